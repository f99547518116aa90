"""A split's regions: how many, of how many channels, and whether their boxes lie in their images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.doctor.findings import Finding, note, ok, problem, share, some, warning
from coder_plugin.doctor.pictures import Look

_OUTSIDE = 0.02  # of the image's width or height: rounding, and boxes that a detector lets stand out


def check_regions(
    split: str, items: Sequence[Item], looks: Sequence[Look | Regions], total: int, config: Any, model: Any
) -> Iterator[Finding]:
    """Findings on the region sets that were read; ``model``: :class:`~.recipe.Made`, or None."""
    name = f"{split}.regions"
    bad = [look for look in looks if isinstance(look, Look)]
    good = [(item.key, look) for item, look in zip(items, looks, strict=True) if isinstance(look, Regions)]
    if bad:
        expected = len(bad) * total / len(looks)
        level = problem if expected > config.data.max_bad_images or not good else warning
        text = f"{share(len(bad), len(looks))} images have no regions that can be read: {bad[0].key!r}: {bad[0].error}"
        do = f"extract them again, or leave these images out; --max-bad-images {config.data.max_bad_images} may lack them"
        yield level(f"{name}.unreadable", text, do)
    if not good:
        return
    widths = Counter(look.features.shape[1] for _, look in good)
    counts = sorted(len(look) for _, look in good)
    middle = counts[len(counts) // 2]
    spread = f"{middle}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}, {middle} in the middle,"
    channels = " or ".join(map(str, widths))
    boxes = sum(look.boxes is not None for _, look in good)
    yield ok(
        name, f"{len(looks):,} of {total:,} images read: {spread} regions of {channels} channels, {boxes:,} with boxes"
    )
    yield from _shapes(name, good, widths, model)
    most = config.data.max_regions
    if counts[-1] > most:
        more = sum(count > most for count in counts)
        text = f"{share(more, len(good))} images have more than {most} regions: the first {most} are read"
        yield note(f"{name}.many", text, f"--max-regions {counts[-1]} reads all")
    yield from _values(name, good)


def _shapes(name: str, good: Sequence[tuple[str, Regions]], widths: Counter[int], model: Any) -> Iterator[Finding]:
    if len(widths) > 1:
        rare = [key for key, look in good if look.features.shape[1] == widths.most_common()[-1][0]]
        do = "extract all with one detector: training stops at the first that differs"
        yield problem(
            f"{name}.channels", f"regions have {' or '.join(map(str, widths))} channels; the rarer: {some(rare)}", do
        )
    wanted = getattr(model, "region_dim", None)
    if wanted is not None and wanted not in widths:
        text = f"regions have {next(iter(widths))} channels, and the model was made for {wanted}"
        yield problem(
            f"{name}.model", text, f"--model-kwargs region_dim={next(iter(widths))}, or the features it was made for"
        )
    without = [key for key, look in good if look.boxes is None]
    if without and len(without) < len(good):
        do = "a model that reads boxes leaves these images out: extract them again, or --model-kwargs context=none"
        yield warning(f"{name}.boxless", f"{share(len(without), len(good))} images have no boxes: {some(without)}", do)


def _values(name: str, good: Sequence[tuple[str, Regions]]) -> Iterator[Finding]:
    outside, empty, zeros = [], [], []
    for key, look in good:
        if not np.abs(look.features).max(1).all():
            zeros.append(key)
        if (boxes := look.fractions) is None:
            continue
        if boxes.min() < -_OUTSIDE or boxes.max() > 1 + _OUTSIDE:
            outside.append(key)
        if (boxes[:, 2:] <= boxes[:, :2]).any():
            empty.append(key)
    total = len(good)
    if outside:
        do = "is the images' size in the file that in which the boxes were found, width first? convert again"
        yield warning(
            f"{name}.outside", f"{share(len(outside), total)} images have boxes outside of them: {some(outside)}", do
        )
    if empty:
        do = "are they left, top, width, height? they must be left, top, right, bottom"
        yield warning(f"{name}.empty", f"{share(len(empty), total)} images have boxes without extent: {some(empty)}", do)
    if zeros:
        do = "padding of the extraction, which would be read as regions: write only as many as there are"
        yield warning(f"{name}.zeros", f"{share(len(zeros), total)} images have regions of zeros alone: {some(zeros)}", do)
