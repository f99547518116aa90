"""An image as a set of regions, and what file layouts of them provide.

Shapes: L regions of an image (at least one), R channels of a region, G channels of the whole image.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.errors import CoderError, install_command

log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one image, in the file's order (a detector's: by falling score).

    Args:
        features: [L, R] of a float dtype, as stored. It may be a read-only part of a file that is mapped to memory.
        boxes: [L, 4] float32: left, top, right, bottom, in the units of ``size``; or None.
        size: (width, height) of the image in the boxes' units: pixels, or (1, 1) where boxes are fractions.
        global_feature: [G], a feature of the whole image, or None.
        extras: further arrays [L, …] that a layout carries, such as LXMERT's ``objects_id``.

    Raises:
        ValueError: wrong shapes or dtypes, no region, or NaN or infinity in a feature, a box or the size.

    Example:
        >>> import numpy as np
        >>> regions = Regions(np.ones((2, 3), np.float32), np.float32([[0, 0, 50, 80], [10, 20, 100, 80]]), (100, 80))
        >>> len(regions), regions.fractions[1].tolist()
        (2, [0.10000000149011612, 0.25, 1.0, 1.0])
    """

    features: np.ndarray
    boxes: np.ndarray | None = None
    size: tuple[float, float] = (1.0, 1.0)
    global_feature: np.ndarray | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or not self.features.size or self.features.dtype.kind != "f":
            raise ValueError(
                f"features are {self.features.dtype} of shape {list(self.features.shape)}; "
                "they must be floats [regions, channels] of at least one region"
            )
        if self.boxes is not None and self.boxes.shape != (len(self), 4):
            raise ValueError(f"boxes have shape {list(self.boxes.shape)}, not [{len(self)}, 4] for {len(self)} regions")
        if self.boxes is not None and not all(0 < side < np.inf for side in self.size):
            raise ValueError(f"the image's size is {self.size[0]:g} x {self.size[1]:g}; both must be > 0 and finite")
        whole = self.global_feature
        if whole is not None and (whole.ndim != 1 or whole.dtype.kind not in "fiu"):
            raise ValueError(f"the global feature is {whole.dtype} of shape {list(whole.shape)}; it must be numbers [channels]")
        for name, array in (("features", self.features), ("boxes", self.boxes), ("global feature", self.global_feature)):
            if array is not None and not _is_finite(array):
                count = int((~np.isfinite(array)).sum())
                raise ValueError(f"{count} of {array.size} numbers in the {name} are NaN or infinite")
        for name, array in self.extras.items():
            if not array.ndim or len(array) != len(self):
                raise ValueError(f"{name} has {len(array) if array.ndim else 'no'} rows for {len(self)} regions")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def fractions(self) -> np.ndarray | None:
        """The boxes [L, 4] as fractions of the image's width and height, float32."""
        if self.boxes is None:
            return None
        width, height = self.size
        return (self.boxes / np.asarray([width, height, width, height])).astype(np.float32)


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype == np.float32 and array.flags.c_contiguous:
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):  # half the time of isfinite, but squares of numbers above 1e19 overflow
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())


class Record(NamedTuple):
    """An image to be written to a file: its name, its regions, and its captions if any."""

    name: str
    regions: Regions
    captions: tuple[str, ...] = ()


class Entry(NamedTuple):
    """An image in a file that is read in its order.

    ``load`` is called before the next entry is taken, if at all; it raises ``ValueError`` where the entry is damaged.
    """

    name: str
    load: Callable[[], Regions]
    captions: tuple[str, ...] = ()


#: Image names to their regions, in the file's order. ``file[name]`` reads one image; it raises ``KeyError`` for an unknown
#: name and ``BadSample`` for a damaged entry. A file can be pickled for loader workers and needs no ``close()``. Captions that
#: it holds are its attribute ``captions``, names to tuples of texts.
RegionFile = Mapping[str, Regions]

@dataclass(frozen=True, kw_only=True)
class RegionFormat:
    """One file layout: an entry point of the group ``coder_plugin.regions``.

    A truncated file or one of another layout is a ``CoderError`` that names the file and the fault.

    Args:
        matches: ``matches(path)`` says whether a path looks like this layout: by its name or, for a folder, its files' names.
        open: ``open(path, *, split)`` -> :data:`RegionFile`, for layouts that can be trained on. ``split`` matters only where
            one path holds several.
        read: ``read(path)`` -> iterator of :class:`Entry`, every image once, for layouts that are only converted. An image
            that the file lists and lacks is a ``CoderError``.
        write: ``write(path, records, *, split)`` -> number of records written; None for layouts that are not written. It
            takes any iterable of :class:`Record`, holds one record at a time, and refuses what it cannot store; when it fails
            it leaves no partial file.
        splits: ``splits(path)`` -> the splits that a path holds, for layouts with splits.
    """

    matches: Callable[[str], bool]
    open: Callable[..., RegionFile] | None = None
    read: Callable[[str], Iterator[Entry]] | None = None
    write: Callable[..., int] | None = None
    splits: Callable[[str], Sequence[str]] | None = None


@contextmanager
def entry_errors(path: str, name: str) -> Iterator[None]:
    """Turn a ``ValueError`` into a ``BadSample`` with file and image before its message."""
    try:
        yield
    except CoderError:
        raise
    except ValueError as exc:
        kind = exc.kind if isinstance(exc, BadSample) else "regions"
        raise BadSample(kind, f"{path}: image {name!r}: {exc}") from exc


@contextmanager
def staged_split(folder: str, split: str, *, last: str = "") -> Iterator[str]:
    """A temporary folder whose files are moved to ``folder`` when the block ends, the one named ``last`` after all others.

    If the block or a move fails, nothing is left.
    """
    temporary = os.path.join(folder, f".{split}.{os.getpid()}.part")
    os.makedirs(temporary)
    moved: list[str] = []
    try:
        yield temporary
        for name in sorted(os.listdir(temporary), key=lambda name: (name == last, name)):
            os.replace(os.path.join(temporary, name), target := os.path.join(folder, name))
            moved.append(target)
    except BaseException:
        for target in moved:
            os.remove(target)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def warn_once(path: str, text: str) -> None:
    """Log a warning about a file once in a process, however many of its images show it."""
    if (path, text) not in _warned:
        _warned.add((path, text))
        log.warning("%s: %s", path, text)


def optional_package(module: str) -> Any:
    """A module of a package that reading some layouts needs."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise CoderError(f"this file needs the package {package}: {install_command('regions')}") from exc


def grid_boxes(rows: int, columns: int) -> np.ndarray:
    """The cells of a grid, row by row, as boxes [L, 4] float32: left, top, right, bottom as fractions of the picture.

    Example:
        >>> grid_boxes(1, 2).tolist()
        [[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0]]
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    return np.stack([column / columns, row / rows, (column + 1) / columns, (row + 1) / rows], 1).astype(np.float32)


#: How :func:`names_of` changes a name, in its order.
DERIVATIONS = ("unchanged", "without folders", "without folders and ending", "the digits at its end", "the number at its end")


def names_of(name: str) -> tuple[str | None, ...]:
    """The names under which a file of regions may list an image that captions call ``name``, the most exact first.

    Always one for each of :data:`DERIVATIONS`, None where it does not exist, so that a position means the same for all names.

    Example:
        >>> names_of("val2014/COCO_val2014_000000000042.jpg")[2:]
        ('COCO_val2014_000000000042', '000000000042', '42')
    """
    base = os.path.basename(name)
    stem = os.path.splitext(base)[0]
    digits = stem.rpartition("_")[2]  # COCO's file names end in the image's number
    if not (digits.isascii() and digits.isdigit()):
        return name, base or None, stem or None, None, None
    return name, base, stem, digits, digits.lstrip("0") or "0"
