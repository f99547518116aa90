"""Read SCAN's "precomp" folders, the training data of VSE++, VSRN, CAMERA, VSE∞ and many others.

A split is ``{split}_ims.npy`` [N, L, R], ``{split}_caps.txt`` (a caption a line, those of an image one after another) and
``{split}_ids.txt`` (a line for each row of ``ims`` or each caption: COCO's numbers, Flickr30K's positions in Karpathy's list,
or any names). Optional are
- CAMERA's ``{split}_boxes.npy`` [N, L, 4] and ``{split}_img_sizes.npy`` [N, 2]: pixels, and (width, height) in pixels,
- our ``{split}_counts.npy`` [N], how many of the L rows are regions (the others are padding), and
  ``{split}_whole.npy`` [N, G], features of the whole images,
- VSE∞'s ``id_mapping.json``, in this folder or its parent: the file names of the ids.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import RegionFormat, Regions
from coder_plugin.data.regions.npy import NpyRows
from coder_plugin.data.regions.precomp_text import are_row_numbers, lines_of, read_id_mapping
from coder_plugin.data.regions.precomp_write import write
from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.data.source import ItemSource

_FOLD = 1000  # images in each of COCO's five folds
log = logging.getLogger(__name__)


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
        Item(name, file.captions[name], partial(file.read, row), file.other_names(row))
        for row, name in enumerate(file)
    ]
    return ItemSource(items, name=f"{spec} ({file.split})")


class PrecompFile(Mapping[str, Regions]):
    """The images of a split by name (a :data:`~coder_plugin.data.regions.base.RegionFile`).

    ``captions`` maps the names to captions; it is empty without ``caps.txt``. An image's name is that of ``id_mapping.json``,
    else its id; its id and its name without folders also identify it. Ids that are row numbers (0, 1, 2 …) repeat in
    every split, so there, as without ids, the name is the split and the row, ``train_0``, and no other name finds it.
    """

    def __init__(self, path: str, *, split: str = "train") -> None:
        self.folder = _folder(path)
        self.split = _split(self.folder, split)
        self._rows = NpyRows(self.path("ims.npy"), kinds="f", ndim=3)
        if not len(self._rows):
            raise CoderError(f"{self._rows.path}: no images")
        lines = lines_of(self.path("caps.txt"))
        ids = lines_of(self.path("ids.txt"))
        self._repeat = self._rows_per_image(lines, ids)
        number = len(self._rows) // self._repeat
        self._boxes, self._sizes = self._extra("boxes.npy", 3), self._extra("img_sizes.npy", 2)
        self._counts, self._whole = self._extra("counts.npy", 1, "iu"), self._extra("whole.npy", 2)
        self._check_extras()
        self._ids = None if ids is None else self._one_each(ids, number)
        mapping = {} if self._ids is None else read_id_mapping(self.folder)
        self._row_numbers = self._ids is not None and not mapping and are_row_numbers(self._ids)
        self._names = self._name(number, mapping)
        self._row_of = self._find_rows()
        captions = lines or []
        each = len(captions) // number
        self.captions: dict[str, tuple[str, ...]] = {
            name: tuple(captions[row * each : (row + 1) * each]) for row, name in enumerate(self._names) if each
        }
        self._warn_of_testall(number)

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
        features = self._rows[row * self._repeat]
        count = len(features) if self._counts is None else int(_row(self._counts, row, len(self)))
        try:
            boxes = None if self._boxes is None else _row(self._boxes, row, len(self))[:count].astype(np.float32)
            width, height = (1.0, 1.0) if self._sizes is None else map(float, _row(self._sizes, row, len(self)))
            feature = None if self._whole is None else _row(self._whole, row, len(self))
            return Regions(features[:count], boxes, (width, height), feature)
        except ValueError as exc:
            raise BadSample("regions", f"{self._rows.path}: image {self._names[row]!r}, number {row}: {exc}") from exc

    def resolve(self, name: str) -> str:
        """The name that the file lists an image by, from any name that finds it."""
        return self._names[self._row_of[name]]

    def other_names(self, row: int) -> tuple[str, ...]:
        """The image's id, if there are ids."""
        return () if self._ids is None else (self._ids[row],)

    def _rows_per_image(self, captions: list[str] | None, ids: list[str] | None) -> int:
        """How often each image is repeated: once, or for each caption as in VSE++'s files."""
        rows, path = len(self._rows), self._rows.path
        if captions is not None and (not captions or len(captions) % rows):
            raise CoderError(
                f"{self.path('caps.txt')}: {len(captions)} captions for the {rows} images of {os.path.basename(path)}: "
                "every image needs the same number; check that both are complete and of the same split"
            )
        if captions is not None and len(captions) > rows:
            return 1
        run = _run(_RowBytes(self._rows))  # no detector gives two images the same features
        if ids is None or len(ids) != rows:
            return run
        by_ids = _run(ids)
        if by_ids > 1 and by_ids != run:
            raise CoderError(
                f"{self.path('ids.txt')}: {by_ids} lines each name one image, but their rows in {path} differ"
            )
        if by_ids < run:
            log.warning("%s: every %d rows are the same, but ids.txt names them as different images", path, run)
        return by_ids

    def _extra(self, ending: str, ndim: int, kinds: str = "iuf") -> NpyRows | None:
        path = self.path(ending)
        if not os.path.exists(path):
            return None
        array = NpyRows(path, kinds=kinds, ndim=ndim)
        if len(array) not in (len(self._rows), len(self._rows) // self._repeat):
            raise CoderError(
                f"{path}: {len(array)} rows, but {len(self._rows)} in {os.path.basename(self._rows.path)}"
            )
        return array

    def _check_extras(self) -> None:
        regions = self._rows.shape[1]
        if self._boxes is not None and self._boxes.shape[1:] != (regions, 4):
            raise CoderError(f"{self._boxes.path}: has shape {list(self._boxes.shape)}; it must be [.., {regions}, 4]")
        if self._sizes is not None and self._sizes.shape[1] != 2:
            raise CoderError(
                f"{self._sizes.path}: has shape {list(self._sizes.shape)}; it must be [.., 2], width and height"
            )
        if (self._boxes is None) != (self._sizes is None):
            present, missing = ("boxes", "img_sizes") if self._sizes is None else ("img_sizes", "boxes")
            raise CoderError(f"{self.path(present + '.npy')}: needs {self.path(missing + '.npy')}, which is missing")
        if self._counts is not None:
            counts = self._counts.all()
            wrong = np.flatnonzero((counts < 1) | (counts > regions))
            if len(wrong):
                raise CoderError(
                    f"{self._counts.path}: number {wrong[0]} is {counts[wrong[0]]}; counts must be 1 to {regions}"
                )

    def _name(self, number: int, mapping: dict[str, str]) -> list[str]:
        """The images' names, which differ between splits."""
        names = self._ids
        if names is None or self._row_numbers:
            return [f"{self.split}_{row}" for row in range(number)]
        if mapping:
            mapped = set(mapping.values())
            for row, name in enumerate(names):
                if name not in mapping and name not in mapped:
                    raise CoderError(f"{self.path('ids.txt')}: image {row} has id {name!r}, which id_mapping.json lacks")
            names = [mapping.get(name, name) for name in names]
        first: dict[str, int] = {}
        for row, name in enumerate(names):
            if first.setdefault(name, row) != row:
                raise CoderError(f"{self.path('ids.txt')}: images {first[name]} and {row} are both {name!r}")
        return names

    def _find_rows(self) -> dict[str, int]:
        rows = {name: row for row, name in enumerate(self._names)}
        ids = [] if self._ids is None or self._row_numbers else self._ids
        for names in (ids, map(os.path.basename, self._names)):
            others: dict[str, int | None] = {}
            for row, name in enumerate(names):
                others[name] = None if name in others else row  # a name of several images finds none of them
            for name, unique in others.items():
                if unique is not None:
                    rows.setdefault(name, unique)
        return rows

    def _one_each(self, ids: list[str], number: int) -> list[str] | None:
        """The ids of the images; None where each caption has an id of its own, which identifies no image."""
        path = self.path("ids.txt")
        if not ids or len(ids) % number:
            raise CoderError(
                f"{path}: {len(ids)} lines for {number} images; it must have one for each image or each caption"
            )
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
        if self.split != "test":
            return
        if not os.path.exists(path):
            if number == _FOLD and self._is_coco():
                log.warning(
                    "%s: test has %s images, like the first fold of COCO's testall; the papers' 1K result is the mean over "
                    "5 folds of testall, whose files are missing here: add them, and give --split testall --folds 5",
                    self.folder,
                    f"{number:,}",
                )
            return
        testall = len(NpyRows(path, kinds="f", ndim=3)) // self._repeat
        if testall > number:
            folds = testall // number
            log.warning(
                "%s: test holds %s of testall's %s images; the papers' 1K result is the mean over %d folds of testall: "
                "--split testall --folds %d",
                *(self.folder, f"{number:,}", f"{testall:,}", folds, folds),
            )

    def _is_coco(self) -> bool:
        folder, name = os.path.split(os.path.abspath(self.folder))
        names = (name, os.path.basename(folder) if name == "precomp" else "", *self._names)
        return any("coco" in each.lower() for each in names)


def matches(path: str) -> bool:
    """A folder with ``*_ims.npy`` in it or in its ``precomp``, or a new path named ``precomp`` or ``…_precomp``."""
    if not os.path.isdir(path) or not os.listdir(path):
        name = os.path.basename(os.path.normpath(path))
        return not os.path.isfile(path) and (name == "precomp" or name.endswith("_precomp"))
    return bool(_splits(path) or _splits(os.path.join(path, "precomp")))


def _splits(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(name.removesuffix("_ims.npy") for name in os.listdir(folder) if name.endswith("_ims.npy"))


def _folder(path: str) -> str:
    for folder in (path, os.path.join(path, "precomp")):
        if _splits(folder):
            return folder
    if not os.path.isdir(path):
        raise CoderError(f"{path}: not a folder; a precomp folder holds train_ims.npy, train_caps.txt …")
    raise CoderError(f"{path}: no *_ims.npy in it or in {os.path.join(path, 'precomp')}")


def _split(folder: str, split: str) -> str:
    splits = _splits(folder)
    for name in (split, "dev") if split == "val" else (split,):
        if name in splits:
            return name
    raise CoderError(f"{folder}: no {split}_ims.npy; splits present: {', '.join(splits)}")


class _RowBytes(Sequence[bytes]):
    """The bytes of each row, for comparison."""

    def __init__(self, rows: NpyRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        return self._rows[row].tobytes()


def _run(values: Sequence[object]) -> int:
    """The length k of runs of equal values, checked for the first, middle and last run; 1 where runs do not fill the list."""
    k = next((row for row in range(1, len(values)) if values[row] != values[0]), len(values))
    if len(values) % k:
        return 1
    groups = len(values) // k
    starts = [group * k for group in {0, groups // 2, groups - 1}]
    equal = all(values[start + offset] == values[start] for start in starts for offset in range(k))
    return k if equal else 1


def _row(array: NpyRows, row: int, number: int) -> np.ndarray:
    return array[row * (len(array) // number)]


PRECOMP = RegionFormat(open=PrecompFile, write=write, matches=matches, keeps=("captions", "global_feature"))
