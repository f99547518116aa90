"""Read SCAN's "precomp" folders, the training data of VSE++, VSRN, CAMERA, VSE∞ and many others.

A split is ``{split}_ims.npy`` [N, L, R], ``{split}_caps.txt`` (a caption a line, those of an image one after another) and
``{split}_ids.txt`` (a line for each row of ``ims`` or each caption: COCO's numbers, Flickr30K's positions in Karpathy's list,
or any names). Optional are
- CAMERA's ``{split}_boxes.npy`` [N, L, 4] and ``{split}_img_sizes.npy`` [N, 2]: pixels, and (width, height) in pixels,
- VSE∞'s ``id_mapping.json``, in this folder or its parent: the file names of the ids.

The arrays are mapped to memory: a row is read from the disk when it is used, and processes share the operating system's cache.
"""

from __future__ import annotations

import os
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import RegionFormat, Regions, entry_errors, log
from coder_plugin.data.regions.precomp_text import are_row_numbers, lines_of, read_id_mapping
from coder_plugin.data.regions.precomp_write import write
from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.data.source import ItemSource


def open_precomp(spec: str, *, split: str = "train") -> ItemSource:
    """The reader ``precomp``: one split of a precomp folder (or of a folder with a subfolder ``precomp``), with captions.

    ``val`` is ``dev`` where there is no ``val``. An image's key is its name in :class:`PrecompFile`, its other name its id.

    Raises:
        CoderError: a missing folder, split or ``caps.txt``, or faulty files.
    """
    from coder_plugin.data.source import ItemSource  # imports torch, which reading regions does not need

    file = PrecompFile(spec, split=split)
    if not file.captions:
        raise CoderError(f"{file.path('caps.txt')}: missing: its images have no captions to train or evaluate on")
    items = [
        Item(name, file.captions[name], partial(file.read, row), () if file.ids is None else (file.ids[row],))
        for row, name in enumerate(file)
    ]
    return ItemSource(items, name=f"{spec} ({file.split})", files=file.files)


class PrecompFile(Mapping[str, Regions]):
    """The images of a split by name (a :data:`~coder_plugin.data.regions.base.RegionFile`).

    ``captions`` maps the names to captions; it is empty without ``caps.txt``. An image's name is that of ``id_mapping.json``,
    else its id; its id and its name without folders also identify it. Ids that are row numbers (0, 1, 2 …) repeat in
    every split, so there, as without ids, the name is the split and the row, ``train_0``, and no other name finds it.

    Args:
        path: the folder, or one with a subfolder ``precomp``.
        split: ``val`` is ``dev`` where there is no ``val``.

    Raises:
        CoderError: no such folder or split, arrays of other shapes or dtypes, numbers of lines that do not fit, or two images
            of one name.
    """

    def __init__(self, path: str, *, split: str = "train") -> None:
        self.folder = _folder(path)
        self.split = _split(self.folder, split)
        self._ims = _map(self.path("ims.npy"), "f", 3)
        self.files = (self.path("ims.npy"),)
        texts = map(self.path, ("caps.txt", "ids.txt"))
        lines, ids = (lines_of(text) if os.path.exists(text) else None for text in texts)
        self._repeat = self._rows_per_image(lines, ids)
        number = len(self._ims) // self._repeat
        self._boxes, self._sizes = self._optional("boxes.npy", (self._ims.shape[1], 4)), self._optional("img_sizes.npy", (2,))
        if (self._boxes is None) != (self._sizes is None):
            present, missing = ("boxes", "img_sizes") if self._sizes is None else ("img_sizes", "boxes")
            raise CoderError(f"{self.path(present + '.npy')}: needs {self.path(missing + '.npy')}, which is missing")
        self.ids = None if ids is None else self._one_each(ids, number)
        self._row_of = self._find_rows(number)
        each = len(lines or ()) // number
        self.captions: dict[str, tuple[str, ...]] = {
            name: tuple(lines[row * each : (row + 1) * each]) for row, name in enumerate(self._names) if lines
        }
        self._warn_of_testall(number)

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the files itself
        return partial(PrecompFile, self.folder, split=self.split), ()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._row_of

    def __getitem__(self, name: str) -> Regions:
        return self.read(self._row_of[name])

    def path(self, ending: str) -> str:
        return os.path.join(self.folder, f"{self.split}_{ending}")

    def read(self, row: int) -> Regions:
        """The regions of an image by its number in the split; ``BadSample`` where they are damaged."""
        boxes, size = None, (1.0, 1.0)
        if self._boxes is not None and self._sizes is not None:
            boxes, (width, height) = self._row(self._boxes, row).astype(np.float32), self._row(self._sizes, row)
            size = float(width), float(height)
        with entry_errors(self.path("ims.npy"), self._names[row]):
            return Regions(self._ims[row * self._repeat], boxes, size)

    def resolve(self, name: str) -> str:
        """The name that the file lists an image by, from any name that finds it."""
        return self._names[self._row_of[name]]

    def _row(self, array: np.ndarray, row: int) -> Any:
        return array[row * (len(array) // len(self))]

    def _rows_per_image(self, captions: list[str] | None, ids: list[str] | None) -> int:
        """How often each image is repeated: once, or for each caption as in VSE++'s files."""
        rows = len(self._ims)
        if captions is not None and (not captions or len(captions) % rows):
            raise CoderError(
                f"{self.path('caps.txt')}: {len(captions)} captions for the {rows} images of {self.split}_ims.npy: "
                "every image needs the same number; check that both are complete and of the same split"
            )
        if captions is not None and len(captions) > rows:
            return 1
        run = _run(rows, lambda row, other: np.array_equal(self._ims[row], self._ims[other]))  # no two images have equal ones
        if ids is None or len(ids) != rows:
            return run
        by_ids = _run(rows, lambda row, other: ids[row] == ids[other])
        if by_ids > 1 and by_ids != run:
            raise CoderError(f"{self.path('ids.txt')}: {by_ids} lines each name one image, but their rows in ims.npy differ")
        return by_ids

    def _optional(self, ending: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """An array of one row of this shape for each image, or for each row of ``ims.npy``."""
        path, rows = self.path(ending), len(self._ims)
        if not os.path.exists(path):
            return None
        array = _map(path, "iuf", len(shape) + 1)
        if len(array) not in (rows, rows // self._repeat):
            raise CoderError(f"{path}: {len(array)} rows, but {rows} in {self.split}_ims.npy")
        if array.shape[1:] != shape:
            raise CoderError(f"{path}: has shape {list(array.shape)}; it must be {[len(array), *shape]}")
        return array

    def _find_rows(self, number: int) -> dict[str, int]:
        """Name the images; returns the row of each of their names."""
        mapping = read_id_mapping(self.folder) if self.ids is not None else {}
        path = self.path("ids.txt")
        if self.ids is None or not mapping and are_row_numbers(self.ids):
            self._names = [f"{self.split}_{row}" for row in range(number)]
            return {name: row for row, name in enumerate(self._names)}
        if mapping and (lost := set(self.ids) - set(mapping) - set(mapping.values())):
            row = min(map(self.ids.index, lost))
            raise CoderError(f"{path}: image {row} has id {self.ids[row]!r}, which id_mapping.json lacks")
        self._names = [mapping.get(name, name) for name in self.ids]
        rows: dict[str, int] = {}
        for row, name in enumerate(self._names):
            if rows.setdefault(name, row) != row:
                raise CoderError(f"{path}: images {rows[name]} and {row} are both {name!r}")
        for names in (self.ids, [os.path.basename(name) for name in self._names]):
            counts = Counter(names)  # a name of several images finds none of them
            rows = {name: row for row, name in enumerate(names) if counts[name] == 1} | rows
        return rows

    def _one_each(self, ids: list[str], number: int) -> list[str] | None:
        """The ids of the images; None where each caption has an id of its own, which identifies no image."""
        path = self.path("ids.txt")
        if not ids or len(ids) % number:
            raise CoderError(f"{path}: {len(ids)} lines for {number} images; it must have one for each image or each caption")
        each = len(ids) // number
        if each > 1 and len(set(ids)) == len(ids):
            return None
        for line, name in enumerate(ids):
            first = line - line % each
            if name != ids[first]:
                raise CoderError(
                    f"{path}: line {line + 1} is {name!r} but line {first + 1} is {ids[first]!r}: with {len(ids)} lines for "
                    f"{number} images, every {each} lines must name the same image"
                )
        return ids[::each]

    def _warn_of_testall(self, number: int) -> None:
        path = os.path.join(self.folder, "testall_ims.npy")
        if self.split != "test" or not os.path.exists(path):
            return
        testall = len(_map(path, "f", 3)) // self._repeat
        if testall > number:
            log.warning(
                "%s: test holds %s of testall's %s images; the papers' 1K result is the mean over %d folds of testall: "
                "--split testall --folds %d",
                *(self.folder, f"{number:,}", f"{testall:,}", testall // number, testall // number),
            )


def matches(path: str) -> bool:
    """A folder with ``*_ims.npy`` in it or in its ``precomp``, or a new path named ``precomp`` or ``…_precomp``."""
    if not os.path.isdir(path) or not os.listdir(path):
        name = os.path.basename(os.path.normpath(path))
        return not os.path.isfile(path) and (name == "precomp" or name.endswith("_precomp"))
    return bool(splits(path))


def splits(path: str) -> list[str]:
    """The splits of a folder, or of its subfolder ``precomp``."""
    for folder in (path, os.path.join(path, "precomp")):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        if found := sorted(name.removesuffix("_ims.npy") for name in names if name.endswith("_ims.npy")):
            return found
    return []


def _folder(path: str) -> str:
    if not os.path.isdir(path):
        raise CoderError(f"{path}: not a folder; a precomp folder holds train_ims.npy, train_caps.txt …")
    if not splits(path):
        raise CoderError(f"{path}: no *_ims.npy in it or in {os.path.join(path, 'precomp')}")
    return path if any(name.endswith("_ims.npy") for name in os.listdir(path)) else os.path.join(path, "precomp")


def _split(folder: str, split: str) -> str:
    present = splits(folder)
    for name in (split, "dev") if split == "val" else (split,):
        if name in present:
            return name
    raise CoderError(f"{folder}: no {split}_ims.npy; splits present: {', '.join(present)}")


def _run(rows: int, equal: Callable[[int, int], bool]) -> int:
    """The length of runs of equal rows, compared in the first, middle and last run; 1 where runs do not fill the rows."""
    run = next((row for row in range(1, rows) if not equal(row, 0)), rows)
    starts = [group * run for group in (0, rows // run // 2, rows // run - 1)]
    return run if not rows % run and all(equal(start, start + each) for start in starts for each in range(run)) else 1


def _map(path: str, kinds: str, ndim: int) -> np.ndarray:
    """A ``.npy`` file mapped to memory, read-only, checked to be complete and of numbers of these kinds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files written by Python 2, as many released ones are, have shapes like (36L,)
            if not os.path.isfile(path):
                raise ValueError("it is not a regular file")
            array = np.lib.format.open_memmap(path, mode="r")  # np.load(mmap_mode="r") of .npy files alone
    except (OSError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as exc:
        reason = " ".join(str(exc).split())
        if "mmap length" in reason:
            reason = f"truncated: its {os.path.getsize(path):,} bytes are fewer than its header requires; copy it again"
        raise CoderError(f"{path}: cannot be read as a .npy file: {reason}") from exc
    if array.dtype.kind not in kinds:
        raise CoderError(f"{path}: holds {array.dtype}; it must be {'floating point' if kinds == 'f' else 'numbers'}")
    if array.ndim != ndim or not array.size:
        raise CoderError(f"{path}: has shape {list(array.shape)}; it must have {ndim} dimensions, none of them empty")
    return array.view(np.ndarray)


PRECOMP = RegionFormat(open=PrecompFile, write=write, matches=matches, splits=splits)
