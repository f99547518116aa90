"""Convert a file of regions to region shards or precomp files, image by image, with captions joined in if there are any."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from coder_plugin.data.item import without_image
from coder_plugin.data.regions import guess_format
from coder_plugin.data.regions.base import Entry, Record, RegionFormat, Regions, log
from coder_plugin.data.regions.join import examples, find_rule, match
from coder_plugin.errors import CoderError
from coder_plugin.progress import track
from coder_plugin.registry import load

if TYPE_CHECKING:
    from coder_plugin.data.source import Source


@dataclass(kw_only=True)
class Report:
    """What a conversion wrote and left out.

    Args:
        images: number of images written, with ``captions`` captions in all.
        missing: images of the caption source that have no regions.
        unused: images of the file that the caption source lacks, such as those of other splits.
        damaged: images whose entry in the file cannot be read, and why.
    """

    from_kind: str
    to_kind: str
    images: int = 0
    captions: int = 0
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)

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
    """Write the regions at ``source`` to ``destination`` in the file's order, holding one image at a time.

    ``captions`` decides which images are written, and under which names. Without it, all images of the file are written, with
    the captions that the file holds.

    Args:
        source: a path, or files of one layout joined by ``::``.
        split: the split that is read; also the one that is written, unless ``to_split`` names another.
        captions_per_image: keep the first so many captions of each image.
        extras: also write further arrays, such as LXMERT's ``objects_id``; precomp files cannot store them.
        missing_ok: leave out captioned images without regions and damaged images, instead of refusing.

    Raises:
        CoderError: an unknown layout or one that is only read, faulty files, an image that the layout cannot store, two images
            of one name, or, without ``missing_ok``, a missing or damaged image. Nothing is left at the destination then.
    """
    if captions_per_image is not None and captions_per_image < 1:
        raise CoderError(f"captions_per_image is {captions_per_image}; it must be 1 or more")
    from_kind = guess_format(source) if from_kind == "auto" else from_kind
    to_kind = guess_format(destination) if to_kind == "auto" else to_kind
    layout: RegionFormat = load("regions", to_kind)
    if layout.write is None:
        raise CoderError(f"{destination}: layout {to_kind} is only read; write shards or precomp")
    report = Report(from_kind=from_kind, to_kind=to_kind)
    file, entries = _open(source, load("regions", from_kind), split)
    wanted: dict[str, tuple[str, tuple[str, ...]]] = {}  # names in the file to keys and captions
    if captions is not None:
        listed = dict.fromkeys(entry.name for entry in entries()) if file is None else file
        wanted, report.missing = _join(listed, captions)
        if report.missing and not missing_ok:
            raise CoderError(
                f"{source}: {len(report.missing)} of {len(wanted) + len(report.missing)} images of {captions.name} have no "
                f"regions there, such as {examples(report.missing)}; allow missing images (--missing-ok) to leave them out"
            )
    read, names = 0, set[str]()

    def records() -> Generator[Record, None, None]:
        nonlocal read
        for entry in track(entries(), None if file is None else len(file), what="images", shown=progress):
            read += 1
            name, texts = wanted.get(entry.name, ("", ())) if captions is not None else (entry.name, entry.captions)
            if not name:
                report.unused.append(entry.name)
                continue
            image = f"{source}: image {entry.name!r}"
            try:
                regions = entry.load()
            except CoderError:
                raise
            except (OSError, ValueError) as exc:
                reason = str(exc).removeprefix(f"{image}: ")
                if not missing_ok:
                    raise CoderError(f"{image}: {reason}; --missing-ok leaves damaged images out") from exc
                log.warning("left out: %s: %s", image, reason)
                report.damaged.append((name, reason))
                continue
            if name in names:
                raise CoderError(f"{destination}: image {name!r} occurs twice")
            names.add(name)
            texts = tuple(texts[:captions_per_image])
            report.captions += len(texts)
            yield Record(name, regions if extras else replace(regions, extras={}), texts)

    stream = records()
    try:
        report.images = layout.write(destination, stream, split=to_split or split)
    finally:
        stream.close()
    left = len(report.unused) + len(report.damaged)
    if report.images + left != read:
        raise CoderError(f"{destination}: {report.images} images were written of {read} read and {left} left out: delete it")
    return report


def _open(
    source: str, layout: RegionFormat, split: str
) -> tuple[Mapping[str, Regions] | None, Callable[[], Iterator[Entry]]]:
    """The images by name, for a layout that finds them so, and a function that reads the file from its start."""
    if layout.open is None:
        assert layout.read is not None
        read = layout.read
        return None, lambda: chain.from_iterable(map(read, source.split("::")))
    file = layout.open(source, split=split)

    def entries() -> Iterator[Entry]:
        captions: Mapping[str, tuple[str, ...]] = getattr(file, "captions", {})
        for name in file:
            yield Entry(name, partial(file.__getitem__, name), captions.get(name, ()))
        for name, reason in getattr(file, "damaged", {}).items():
            yield Entry(name, partial(_fail, reason))

    return file, entries


def _fail(reason: str) -> NoReturn:
    raise ValueError(reason)


def _join(
    regions: Mapping[str, Any], captions: Source
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], list[str]]:
    """The file's names of captioned images, to their keys and captions; and the keys of the images without regions."""
    listed = [item for _, item in captions.items()]
    items = [without_image(item) for item in listed if item.fault is None]
    if bad := [item for item in listed if item.fault is not None]:
        log.warning("%s: left out %d bad samples, the first: %r: %s", captions.name, len(bad), bad[0].key, bad[0].fault)
    matches = match(items, regions, find_rule(items, regions, where=captions.name), where=captions.name)
    resolve = getattr(regions, "resolve", str)  # some layouts find an image by several names
    wanted: dict[str, tuple[str, tuple[str, ...]]] = {
        resolve(matches[item.key]): (item.key, item.captions) for item in items if item.key in matches
    }
    return wanted, [item.key for item in items if item.key not in matches]
