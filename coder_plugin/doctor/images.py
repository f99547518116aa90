"""Pictures and region features of a split: can they be read, and are their sizes, modes, channels and boxes sound?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from coder_plugin.data.bad_samples import allowed, describe
from coder_plugin.data.decode import STORED
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.doctor.findings import Finding, bytes_text, listed, note, ok, problem, share, some, warning
from coder_plugin.doctor.machine import usable_cores

TINY = 32  # pixels: the shorter side
HUGE = 25_000_000  # pixels
OUTSIDE = 0.02  # of the image's size: rounding, and boxes that reach slightly over the edge
SLIM = 3.0  # longer side over the shorter
_ORIENTATION = 0x0112  # of EXIF
_THUMBNAIL = 16


@dataclass(frozen=True, eq=False)
class Look:
    """Properties of one decoded picture.

    Args:
        error: why it cannot be read; the other fields are empty then.
        size: (width, height). mode: of the file. turned: whether its EXIF data ask for a rotation.
        pixels: digest of size and RGB values.
        dhash: uint64 difference hash: whether brightness rises from each of 8 x 8 cells to the next on its right.
        small: uint8 [16, 16, 3].
    """

    key: str
    error: str = ""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    turned: bool = False
    pixels: bytes = b""
    dhash: int = 0
    small: Any = None


def look_at(items: Sequence[Item], what: str, *, threads: bool = True) -> list[Look | Regions]:
    """Load every item: a :class:`Look` of each picture, or the regions of items that load regions.

    Threads speed up the decoding of pictures; region files are read by one thread.
    """
    from tqdm import tqdm

    with ThreadPoolExecutor(min(8, usable_cores()) if threads else 1) as pool:
        looks = pool.map(_look, items)
        return list(tqdm(looks, total=len(items), desc=what, unit="", unit_scale=True, disable=None, leave=False))


def _look(item: Item) -> Look | Regions:
    try:
        loaded = item.load()
    except (OSError, ValueError) as error:
        return Look(item.key, describe(item.key, error)[2])
    if isinstance(loaded, Regions):
        return loaded
    digest = hashlib.blake2b(repr(loaded.size).encode() + loaded.tobytes(), digest_size=16)
    return Look(
        item.key,
        size=loaded.size,
        mode=loaded.info.get(STORED, loaded.mode),
        turned=loaded.getexif().get(_ORIENTATION, 1) not in (0, 1),
        pixels=digest.digest(),
        dhash=difference_hash(loaded),
        small=np.asarray(loaded.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)),
    )


def difference_hash(picture: Image.Image) -> int:
    """64 bits that hardly change with the JPEG quality, size or brightness of a picture."""
    grey = np.asarray(picture.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    return int(np.packbits(grey[:, 1:] > grey[:, :-1]).view(">u8")[0])


def check_pictures(split: str, looks: Sequence[Look], total: int, config: Any, model: Any) -> Iterator[Finding]:
    """Findings on decoded pictures.

    Args:
        split: its name. looks: the decoded pictures, of ``total`` in the split.
        model: a :class:`~.recipe.ModelFacts`, or None.
    """
    name = f"{split}.pictures"
    good = [look for look in looks if not look.error]
    bad = [look for look in looks if look.error]
    if bad:
        expected = len(bad) * total / len(looks)
        rate = config.data.max_bad_samples
        level = problem if expected > allowed(rate, total) or not good else warning
        first = f"{bad[0].key!r}: {bad[0].error}"
        more = f", so about {expected:,.0f} of {total:,}" if len(looks) < total else ""
        do = f"download them again, or leave them out; a run skips up to --max-bad-samples {rate:g} of all"
        if not good:
            do = "check the folder (--image-root FOLDER) and, of a table, the column (--csv-img-key)"
        text = f"{share(len(bad), len(looks))} pictures cannot be read{more}: {first}{_others(bad)}"
        yield level(f"{name}.unreadable", text, do)
    if not good:
        return
    sides = sorted(min(look.size) for look in good), sorted(max(look.size) for look in good)
    middle = f"{sides[0][len(good) // 2]} and {sides[1][len(good) // 2]}"
    yield ok(
        name,
        f"{len(good):,} of {total:,} pictures decoded: sides from {sides[0][0]} to {sides[1][-1]} pixels, "
        f"median of the shorter and the longer side {middle}",
    )
    yield from _sizes(name, good, model)
    yield from _modes(name, good)


def _others(looks: Sequence[Look]) -> str:
    return f"; also {some(look.key for look in looks[1:])}" if len(looks) > 1 else ""


def _sizes(name: str, looks: Sequence[Look], model: Any) -> Iterator[Finding]:
    count = len(looks)
    counted = partial(_counted, looks)
    if tiny := [look for look in looks if min(look.size) < TINY]:
        do = "check whether they are placeholders or thumbnails, and leave them out"
        yield warning(f"{name}.tiny", f"{counted(tiny)} have a side below {TINY} pixels: {_sized(tiny)}", do)
    if huge := [look for look in looks if look.size[0] * look.size[1] > HUGE]:
        biggest = max(look.size[0] * look.size[1] for look in huge)
        text = f"{counted(huge)} have over {HUGE // 10**6} million pixels, {bytes_text(3 * biggest)} decoded: {_sized(huge)}"
        yield warning(f"{name}.huge", text, "scale them down beforehand: each loading process decodes them in full")
    if slim := [look for look in looks if max(look.size) > SLIM * min(look.size)]:
        do = "a centre crop shows little of them: use --open-clip image_resize_mode=longest or squash, or leave out banners"
        yield note(f"{name}.slim", f"{counted(slim)} are over {SLIM:g} times as long as wide: {_sized(slim)}", do)
    side = getattr(model, "image_size", None)
    if side is None:
        return
    small = [look for look in looks if TINY <= min(look.size) < side / 2]
    if len(small) > count / 10:
        text = f"{counted(small)} are less than half the model's {side} pixels: {_sized(small)}"
        yield warning(
            f"{name}.small", text, f"use larger ones, or a smaller model input (--force-image-size {side // 2})"
        )
    shorter = sorted(min(look.size) for look in looks)[count // 2]
    if shorter > 4 * side:
        text = f"the median shorter side is {shorter} pixels, and the model reads {side}: decoding dominates loading"
        yield note(f"{name}.large", text, f"store them with a shorter side of about {int(1.15 * side)}")


def _modes(name: str, looks: Sequence[Look]) -> Iterator[Finding]:
    counted = partial(_counted, looks)
    modes = Counter(look.mode for look in looks)

    def of(*wanted: str) -> list[Look]:
        return [look for look in looks if look.mode in wanted]

    if matches := of("CMYK", "YCCK"):
        do = "convert them to RGB with their colour profile: read without it, their colours are wrong"
        yield warning(
            f"{name}.cmyk", f"{counted(matches)} are CMYK, a print format: {some(look.key for look in matches)}", do
        )
    if matches := of("I", "F", *[mode for mode in modes if mode.startswith("I;16")]):
        do = "scale them to 8 bits: values above 255 are clipped, and the picture is white"
        yield problem(
            f"{name}.deep",
            f"{counted(matches)} have more than 8 bits a channel: {some(look.key for look in matches)}",
            do,
        )
    if matches := of("RGBA", "LA", "PA", "RGBa", "La"):
        do = "fine for a few; else put them on a background: transparent pixels show the colour stored under them"
        yield note(
            f"{name}.alpha",
            f"{counted(matches)} have transparency, which is dropped: {some(look.key for look in matches)}",
            do,
        )
    if matches := [look for look in looks if look.turned]:
        do = "rotate the files (jpegtran, ImageMagick's -auto-orient): training ignores EXIF, as open_clip does"
        yield warning(
            f"{name}.turned",
            f"{counted(matches)} are rotated by their EXIF data: {some(look.key for look in matches)}",
            do,
        )
    if matches := [look for look in looks if not np.ptp(look.small.reshape(-1, 3), axis=0).any()]:
        do = "check whether they are placeholders or failed downloads, and leave them out"
        yield warning(
            f"{name}.blank", f"{counted(matches)} are of one colour: {some(look.key for look in matches)}", do
        )


def _counted(looks: Sequence[Look], matches: Sequence[Look]) -> str:
    return f"{share(len(matches), len(looks))} pictures"


def _sized(looks: Sequence[Look]) -> str:
    return listed(f"{look.key!r} {look.size[0]} x {look.size[1]}" for look in looks)


def check_regions(
    split: str, items: Sequence[Item], looks: Sequence[Look | Regions], total: int, config: Any, model: Any
) -> Iterator[Finding]:
    """Findings on the region features that were read.

    Args:
        split: its name. items, looks: the images read, of ``total`` in the split.
        model: a :class:`~.recipe.ModelFacts`, or None.
    """
    name = f"{split}.regions"
    bad = [look for look in looks if isinstance(look, Look)]
    good = [(item.key, look) for item, look in zip(items, looks, strict=True) if isinstance(look, Regions)]
    if bad:
        expected = len(bad) * total / len(looks)
        rate = config.data.max_bad_samples
        level = problem if expected > allowed(rate, total) or not good else warning
        text = f"{share(len(bad), len(looks))} images have no readable regions: {bad[0].key!r}: {bad[0].error}"
        do = f"extract them again, or leave these images out; a run skips up to --max-bad-samples {rate:g} of all"
        yield level(f"{name}.unreadable", text, do)
    if not good:
        return
    widths = Counter(look.features.shape[1] for _, look in good)
    counts = sorted(len(look) for _, look in good)
    middle = counts[len(counts) // 2]
    spread = f"{middle}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]} (median {middle})"
    channels = " or ".join(map(str, widths))
    boxes = sum(look.boxes is not None for _, look in good)
    yield ok(
        name, f"{len(looks):,} of {total:,} images read: {spread} regions of {channels} channels, {boxes:,} with boxes"
    )
    yield from _region_shapes(name, good, widths, model)
    most = config.data.max_regions
    if counts[-1] > most:
        more = sum(count > most for count in counts)
        text = f"{share(more, len(good))} images have more than {most} regions: the first {most} are read"
        yield note(f"{name}.many", text, f"--max-regions {counts[-1]} reads all")
    yield from _region_values(name, good)


def _region_shapes(
    name: str, good: Sequence[tuple[str, Regions]], widths: Counter[int], model: Any
) -> Iterator[Finding]:
    if len(widths) > 1:
        rare = [key for key, look in good if look.features.shape[1] == widths.most_common()[-1][0]]
        do = "extract all with one detector: training skips images of another width than the model's"
        yield problem(
            f"{name}.channels",
            f"regions have {' or '.join(map(str, widths))} channels; images with the rarest: {some(rare)}",
            do,
        )
    wanted = getattr(model, "region_dim", None)
    if wanted is not None and wanted not in widths:
        text = f"regions have {next(iter(widths))} channels, and the model expects {wanted}"
        yield problem(
            f"{name}.model",
            text,
            f"--model-kwargs region_dim={next(iter(widths))}, or use the features that the model expects",
        )
    without = [key for key, look in good if look.boxes is None]
    if without and len(without) < len(good):
        do = "a model that reads boxes skips these images: extract them again, or use --model-kwargs context=none"
        yield warning(f"{name}.boxless", f"{share(len(without), len(good))} images have no boxes: {some(without)}", do)


def _region_values(name: str, good: Sequence[tuple[str, Regions]]) -> Iterator[Finding]:
    outside, empty, zeros = [], [], []
    for key, look in good:
        if not np.abs(look.features).max(1).all():
            zeros.append(key)
        if (boxes := look.fractions) is None:
            continue
        if boxes.min() < -OUTSIDE or boxes.max() > 1 + OUTSIDE:
            outside.append(key)
        if (boxes[:, 2:] <= boxes[:, :2]).any():
            empty.append(key)
    total = len(good)
    if outside:
        do = "check the images' sizes in the file (width first, as the detector read them), then convert again"
        yield warning(
            f"{name}.outside",
            f"{share(len(outside), total)} images have boxes outside of the image: {some(outside)}",
            do,
        )
    if empty:
        do = "check the order: it must be left, top, right, bottom, not left, top, width, height"
        yield warning(f"{name}.empty", f"{share(len(empty), total)} images have boxes of no area: {some(empty)}", do)
    if zeros:
        do = "this is padding that would be read as regions: write only the real ones"
        yield warning(
            f"{name}.zeros", f"{share(len(zeros), total)} images have regions of only zeros: {some(zeros)}", do
        )
