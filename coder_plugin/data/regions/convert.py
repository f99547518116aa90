"""Convert a file of regions to region shards or precomp files, image by image, with captions joined in if there are any."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coder_plugin.data.regions import guess_format
from coder_plugin.data.regions.base import Record, RegionFile, RegionFormat, Regions
from coder_plugin.data.regions.join import examples, find_rule, match, without_image
from coder_plugin.errors import CoderError
from coder_plugin.progress import track
from coder_plugin.registry import load, names

if TYPE_CHECKING:
    from coder_plugin.data.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion wrote and left out.

    Args:
        images: number of images written, with ``captions`` captions in all.
        missing: images of the caption source that have no regions.
        unused: images of the file that the caption source lacks, such as those of other splits.
        damaged: images whose entry in the file cannot be read, and why.
    """

    images: int
    captions: int
    from_kind: str
    to_kind: str
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.images} images with {self.captions} captions written, {self.from_kind} to {self.to_kind}"]
        if self.missing:
            lines.append(f"{len(self.missing)} captioned images without regions: {examples(self.missing)}")
        if self.unused:
            lines.append(f"{len(self.unused)} images with regions but no captions, left out: {examples(self.unused)}")
        if self.damaged:
            name, reason = self.damaged[0]
            lines.append(f"{len(self.damaged)} damaged images left out, the first: {name!r}: {reason}")
        return "\n".join(lines)


def convert(
    source: str,
    destination: str,
    *,
    from_kind: str = "auto",
    to_kind: str = "auto",
    split: str = "train",
    to_split: str | None = None,
    captions: Source | None = None,
    captions_per_image: int | None = None,
    extras: bool = True,
    missing_ok: bool = False,
    progress: bool = True,
) -> Report:
    """Write the regions at ``source`` to ``destination``, holding one image at a time.

    ``captions`` decides which images are written, in its order and under its keys. Without it, all images of the file are
    written, with the captions that the file holds.

    Args:
        split: the split that is read; also the one that is written, unless ``to_split`` names another.
        captions_per_image: keep the first so many captions of each image.
        extras: also write further arrays, such as LXMERT's ``objects_id``; precomp files cannot store them.
        missing_ok: leave out captioned images without regions and damaged images, instead of refusing.

    Raises:
        CoderError: an unknown layout or one that is only read, faulty files, an image that the layout cannot store, or,
            without ``missing_ok``, a missing or damaged image. Nothing is left at the destination then.
    """
    if captions_per_image is not None and captions_per_image < 1:
        raise CoderError(f"captions_per_image is {captions_per_image}; it must be 1 or more")
    from_kind = guess_format(source) if from_kind == "auto" else from_kind
    to_kind = guess_format(destination) if to_kind == "auto" else to_kind
    layout: RegionFormat = load("regions", to_kind)
    if layout.write is None:
        raise CoderError(f"{destination}: layout {to_kind} is only read; write one of: {', '.join(_writable())}")
    regions: RegionFile = load("regions", from_kind).open(source, split=split)
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    if captions is None:
        # Layouts with captions of their own have them as an attribute.
        own: Mapping[str, Sequence[str]] = getattr(regions, "captions", {})
        rows = [(name, name, own.get(name, ())) for name in regions]
    else:
        rows, missing, unused = _join(source, regions, captions, missing_ok=missing_ok)
    damaged: list[tuple[str, str]] = []
    count = 0

    def records() -> Iterator[Record]:
        nonlocal count
        for name, place, texts in track(rows, len(rows), what="images", shown=progress):
            try:
                entry = regions[place]
            except ValueError as exc:
                if not missing_ok:
                    raise CoderError(f"{exc}; allow missing images (--missing-ok) to leave damaged ones out") from exc
                log.warning("left out: %s", exc)
                damaged.append((name, str(exc)))
                continue
            entry = entry if extras else replace(entry, extras={})
            _check(f"{source}: image {name!r}", entry, to_kind, layout.keeps)
            texts = tuple(texts[:captions_per_image])
            count += len(texts)
            yield Record(name, entry, texts)

    try:
        images = layout.write(destination, records(), split=to_split or split)
    except CoderError:
        raise
    except ValueError as exc:
        raise CoderError(f"{destination}: {exc}") from exc
    return Report(
        images=images,
        captions=count,
        from_kind=from_kind,
        to_kind=to_kind,
        missing=missing,
        unused=unused,
        damaged=tuple(damaged),
    )


def _join(
    source: str, regions: RegionFile, captions: Source, *, missing_ok: bool
) -> tuple[list[tuple[str, str, Sequence[str]]], tuple[str, ...], tuple[str, ...]]:
    """(key, name in the file, captions) of each captioned image; the keys without regions; the file's unused names."""
    listed = [item for _, item in captions.items()]
    items = [without_image(item) for item in listed if item.fault is None]
    if bad := [item for item in listed if item.fault is not None]:
        log.warning("%s: left out %d bad samples, the first: %r: %s", captions.name, len(bad), bad[0].key, bad[0].fault)
    matches = match(items, regions, find_rule(items, regions, where=captions.name), where=captions.name)
    missing = tuple(item.key for item in items if item.key not in matches)
    if missing and not missing_ok:
        raise CoderError(
            f"{source}: {len(missing)} of {len(items)} images of {captions.name} have no regions there, such as "
            f"{examples(missing)}; allow missing images (--missing-ok) to leave them out"
        )
    rows: list[tuple[str, str, Sequence[str]]] = [
        (item.key, matches[item.key], item.captions) for item in items if item.key in matches
    ]
    resolve = getattr(regions, "resolve", str)  # some layouts find an image by several names
    used = set(map(resolve, matches.values()))
    return rows, missing, tuple(name for name in regions if name not in used)


def _check(image: str, regions: Regions, kind: str, keeps: tuple[str, ...]) -> None:
    """Refuse to lose what the layout cannot store."""
    if regions.extras and "extras" not in keeps:
        arrays = ", ".join(sorted(regions.extras))
        raise CoderError(f"{image} has further arrays ({arrays}), which {kind} cannot store: drop them with --without-extras")
    if regions.global_feature is not None and "global_feature" not in keeps:
        raise CoderError(f"{image} has a feature of the whole image, which {kind} cannot store: choose another layout")


def _writable() -> list[str]:
    """The layouts that can be written; plugins that cannot be imported are skipped."""
    kinds = []
    for name in names("regions"):
        try:
            layout: RegionFormat = load("regions", name)
        except CoderError:
            continue
        if layout.write is not None:
            kinds.append(name)
    return kinds
