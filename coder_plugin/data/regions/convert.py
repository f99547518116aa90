"""From any file of regions to any other, image by image, with captions joined in where they are given."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coder_plugin.data.regions import guess_format
from coder_plugin.data.regions.base import Record, RegionFile, RegionFormat, Regions
from coder_plugin.errors import CoderError
from coder_plugin.registry import load

if TYPE_CHECKING:
    from coder_plugin.data.item import Item
    from coder_plugin.data.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did.

    Args:
        images: written, with ``captions`` captions in all.
        left: captions that the layout has no place for.
        missing: images of the caption source that have no regions.
        unused: images of the file that the caption source does not have, such as those of other splits.
        damaged: images whose entry in the file cannot be read, and why.
    """

    images: int
    captions: int
    from_kind: str
    to_kind: str
    left: int = 0
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        from coder_plugin.data.regions.join import examples

        captions = f" with {self.captions} captions" if self.captions or not self.left else ""
        lines = [f"{self.images} images{captions} written, {self.from_kind} to {self.to_kind}"]
        if self.left:
            lines.append(
                f"{self.left} captions left out: {self.to_kind} has no place for any; train with --train-data CAPTIONS "
                "--regions and these files"
            )
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
    """Write the regions at ``source`` to ``destination``.

    With ``captions`` that source says which images are written, in its order and under its keys; without, they are the
    file's, with the captions that it has itself. An image is held at a time.

    Args:
        split: which split is read, and written if there is no ``to_split``.
        captions_per_image: keep as many captions of each image, the first ones. A layout that has no place for captions
            is written without: the report counts them.
        extras: take along further arrays, such as LXMERT's ``objects_id``; a layout without a place for them refuses.
        missing_ok: leave out captioned images without regions, and damaged images, instead of refusing.

    Raises:
        CoderError: an unknown format, files that are not as they should be, an image that the format cannot hold, or,
            without ``missing_ok``, a missing or damaged image; then nothing is left under the destination's name.
    """
    if captions_per_image is not None and captions_per_image < 1:
        raise CoderError(f"captions_per_image is {captions_per_image}; it must be 1 or more")
    from_kind = guess_format(source) if from_kind == "auto" else from_kind
    to_kind = guess_format(destination) if to_kind == "auto" else to_kind
    layout: RegionFormat = load("regions", to_kind)
    regions: RegionFile = load("regions", from_kind).open(source, split=split)
    rows = _Rows(source, regions, to_kind, layout.keeps, captions_per_image, extras, missing_ok, progress)
    if captions is not None:
        rows.take(captions)
    try:
        images = layout.write(destination, rows.records(), split=to_split or split)
    except CoderError:
        raise
    except ValueError as exc:
        hint = "" if not (extras and rows.with_extras) else f"; without extras, {to_kind} may hold them"
        raise CoderError(f"{exc}{hint}") from exc
    kept = "captions" in layout.keeps
    if rows.captions and not kept:
        log.warning("%s: %s has no place for captions: %d left out", destination, to_kind, rows.captions)
    return Report(
        images=images,
        captions=rows.captions if kept else 0,
        left=0 if kept else rows.captions,
        from_kind=from_kind,
        to_kind=to_kind,
        missing=rows.missing,
        unused=rows.unused,
        damaged=tuple(rows.damaged),
    )


class _Rows:
    """What is to be written: names, where their regions are, and captions."""

    def __init__(
        self,
        source: str,
        regions: RegionFile,
        to_kind: str,
        keeps: tuple[str, ...],
        captions_per_image: int | None,
        extras: bool,
        missing_ok: bool,
        progress: bool,
    ) -> None:
        self.source, self.regions = source, regions
        self.to_kind, self.keeps = to_kind, keeps
        self.limit, self.extras, self.missing_ok, self.progress = captions_per_image, extras, missing_ok, progress
        self.with_extras = False
        # Formats with captions of their own have them as a mapping beside the regions.
        own: Mapping[str, Sequence[str]] = getattr(regions, "captions", {})
        self.rows: list[tuple[str, str, Sequence[str]]] = [(name, name, own.get(name, ())) for name in regions]
        self.missing: tuple[str, ...] = ()
        self.unused: tuple[str, ...] = ()
        self.damaged: list[tuple[str, str]] = []
        self.captions = 0

    def take(self, captions: Source) -> None:
        """The images and captions of a source in place of the file's."""
        from coder_plugin.data.regions.join import examples, find_rule, match

        items = [_without_picture(item) for _, item in captions.items()]
        rule = find_rule(items, self.regions, where=captions.name)
        found = match(items, self.regions, rule, where=captions.name)
        self.missing = tuple(item.key for item in items if item.key not in found)
        if self.missing and not self.missing_ok:
            raise CoderError(
                f"{self.source}: {len(self.missing)} of {len(items)} images of {captions.name} have no regions there, such "
                f"as {examples(self.missing)}; allow missing ones to leave them out"
            )
        self.rows = [(item.key, found[item.key], item.captions) for item in items if item.key in found]
        resolve = getattr(self.regions, "resolve", str)  # where an image has several names, the one it is listed by
        used = set(map(resolve, found.values()))
        self.unused = tuple(name for name in self.regions if name not in used)

    def records(self) -> Iterator[Record]:
        from tqdm import tqdm

        for name, place, captions in tqdm(self.rows, unit="image", disable=not self.progress):
            try:
                regions = self.regions[place]
            except ValueError as exc:
                if not self.missing_ok:
                    raise CoderError(f"{exc}; allow missing ones to leave damaged images out") from exc
                log.warning("left out: %s", exc)
                self.damaged.append((name, str(exc)))
                continue
            self.with_extras |= bool(regions.extras)
            if not self.extras:
                regions = replace(regions, extras={})
            self._check(name, regions)
            kept = tuple(captions[: self.limit])
            self.captions += len(kept)
            yield Record(name, regions, kept)

    def _check(self, name: str, regions: Regions) -> None:
        """Refuse what the layout would lose."""
        if regions.extras and "extras" not in self.keeps:
            names = ", ".join(sorted(regions.extras))
            raise CoderError(
                f"{self.source}: image {name!r} has further arrays ({names}), which {self.to_kind} has no place for: "
                "convert without extras (--without-extras) to leave them out"
            )
        if regions.whole is not None and "whole" not in self.keeps:
            raise CoderError(
                f"{self.source}: image {name!r} has a feature of the whole image, which {self.to_kind} has no place for: "
                "choose another layout"
            )


def _without_picture(item: Item) -> Item:
    """Items of shards hold their compressed pictures."""
    return replace(item, load=_no_picture)


def _no_picture() -> Any:
    raise ValueError("no picture")
