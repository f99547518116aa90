"""An index on disk: FAISS files that were built from Parquet files, and a small JSON that names both.

Shape letters: N images or captions, D dimensions, V vectors of an image, q queries, k results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.files import read_json, sha256_file
from coder_plugin.search.parquet import COLUMN_TYPES, KINDS, Table
from coder_plugin.search.records import Records
from coder_plugin.search.vectors import Vectors

FORMAT = "coder-plugin index 3"
NOTE = "index.json"
#: Folder of the Parquet files.
EMBEDDINGS = "embeddings"
#: Names of an index's files, from its folder.
PATH = re.compile(
    rf"{EMBEDDINGS}/\d{{8}}\.parquet|(?:images|captions)-\d{{5}}\.faiss|(?:starts|(?:image|text)_tokens_\w{{1,99}})-\d{{5}}\.npy"
)
_TOKENS = re.compile(r"(?:image|text)_tokens_\w{1,99}")
#: The most of a thumbnail in pixels.
_PIXELS = 1 << 24


def is_index(folder: str | Path) -> bool:
    """Whether a folder has an index's note."""
    return (Path(folder) / NOTE).is_file()


def read_note(folder: Path, *, verify: bool = False, derived: bool = True) -> dict[str, Any]:
    """The JSON of an index, after the files that it names were found whole.

    Args:
        folder: of the index.
        verify: also compare checksums, which reads the files once.
        derived: also look at the files that can be built again from the Parquet files.

    Raises:
        CoderError: no index there, a damaged one, or one of another version; the message names the file.
    """
    path = folder / NOTE
    if not path.exists():
        if (folder / EMBEDDINGS).is_dir():
            raise CoderError(f"{folder} holds no index yet: its command was stopped, run it again")
        raise CoderError(f"{folder} is not an index: it has no {NOTE}; give the folder of one, which coder-plugin index makes")
    note = read_json(path)
    if not isinstance(note, dict) or note.get("format") != FORMAT:
        raise CoderError(f"{path} has another format than {FORMAT!r}: build the index again with this coder-plugin")
    try:
        _check_note(note)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CoderError(f"{path} is damaged ({str(error)[:100]}): build the index again") from error
    real = folder.resolve()
    for name, size in {
        **{name: each[0] for name, each in note["embeddings"].items()}, **(note["sizes"] if derived else {})
    }.items():
        file = folder / name
        if not file.is_file():
            raise CoderError(f"{file} is missing: build the index again")
        if not file.resolve().is_relative_to(real):
            raise CoderError(f"{file} is a link to another folder: copy the file")
        if file.stat().st_size != size:
            raise CoderError(f"{file} has {file.stat().st_size:,} bytes, not {size:,} as {NOTE} says: build the index again")
    if verify:
        for name, checksum in note["checksums"].items():
            if sha256_file(folder / name) != checksum:
                raise CoderError(f"{folder / name} has another checksum than {NOTE} says: build the index again")
    return note


def _content(folder: Path) -> bytes | None:
    return (folder / NOTE).read_bytes() if (folder / NOTE).is_file() else None


def _check_note(note: Mapping[str, Any]) -> None:
    """Types of what is read, and paths that stay in the folder."""
    model = note["model"]
    texts = [model["fingerprint"], note["factory"], *(model[name] for name in ("name", "spec") if model.get(name) is not None)]
    texts += [name if _TOKENS.fullmatch(name) else None for name in note["tokens"]]
    if not all(isinstance(text, str) for text in texts) or not isinstance(model.get("options", {}), dict):
        raise ValueError("model or factory")
    files = [*note["embeddings"], *note["sizes"], *note["checksums"]]
    if bad := [name for name in files if not PATH.fullmatch(name)]:
        raise ValueError(f"file {bad[0][:60]!r}")
    numbers = [number for each in note["embeddings"].values() for number in each]
    numbers += [note["build"], note["images"], note["captions"], *note["sizes"].values()]
    sizes = [*note["vectors"].values(), *note["all_vectors"].values()]
    numbers += [number for each in sizes for number in (each["dimensions"], each["views"])]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers):
        raise ValueError("a size")
    if not note["embeddings"] or any(len(each) != 2 for each in note["embeddings"].values()):
        raise ValueError("embeddings")
    names = ["starts-{}.npy", *(f"{kind}-{{}}.faiss" for kind in note["vectors"])]
    names += [f"{name}-{{}}.npy" for name in note["tokens"] if note["reranks"]]
    if {*note["sizes"]} != {name.format(f"{note['build']:05d}") for name in names}:
        raise ValueError("files")
    if not {*note["vectors"]} <= {*note["all_vectors"]} <= {*KINDS} or not {*note["columns"].values()} <= {*COLUMN_TYPES}:
        raise ValueError("vectors or columns")
    if sum(rows for _, rows in note["embeddings"].values()) != note["images"]:
        raise ValueError("images")
    if not isinstance(note["tokens"], list) or not all(isinstance(note[name], dict) for name in ("plan", "options", "bad")):
        raise ValueError("plan, tokens or bad")


class Index:
    """An index on disk, opened to be searched by vectors.

    Args:
        folder: of the index.
        verify: compare the files' checksums, which reads them once; else only their sizes.
        parameters: of FAISS's parameter space, such as ``nprobe=16``.
        gpu: search on the first GPU, where FAISS sees one and supports this kind of index on it.

    Raises:
        CoderError: no index there, an unfinished or a damaged one; the message names the file.
    """

    def __init__(
        self, folder: str | Path, *, verify: bool = False, parameters: str | None = None, gpu: bool = True
    ) -> None:
        self.folder = Path(folder)
        for attempt in (1, 2):  # the second time if a change has replaced files meanwhile
            seen = _content(self.folder)
            try:
                #: Model, factory, sizes and files, as JSON values.
                self.note = read_note(self.folder, verify=verify)
                self._open(parameters, gpu)
                break
            except CoderError:
                if attempt == 2 or _content(self.folder) == seen:
                    raise
        if verify:
            self._verify()

    def _open(self, parameters: str | None, gpu: bool) -> None:
        note, number = self.note, f"{self.note['build']:05d}"
        sizes = note["vectors"]
        known = {
            "model": note["model"],
            "vectors": note["all_vectors"],
            "columns": note["columns"],
            "tokens": note["tokens"],
            "rows": [rows for _, rows in note["embeddings"].values()],
        }
        self.table = Table([self.folder / name for name in note["embeddings"]], known)
        starts = _array(self.folder / f"starts-{number}.npy", note["images"] + 1)
        if starts.dtype != np.int64 or starts.ndim != 1 or (np.diff(starts) < 0).any() or starts[-1] != note["captions"]:
            raise CoderError(f"{self.folder / f'starts-{number}.npy'} is damaged: build the index again")
        self.records = Records(self.table, starts)
        self.vectors = {
            kind: Vectors(
                self.folder / f"{kind}-{number}.faiss", items=note[kind], parameters=parameters, gpu=gpu, **sizes[kind]
            )
            for kind in KINDS
            if kind in sizes
        }
        self._tokens = {
            name: _array(self.folder / f"{name}-{number}.npy", note["images" if name.startswith("image") else "captions"])
            for name in (note["tokens"] if note["reranks"] else ())
        }

    @property
    def reranks(self) -> bool:
        """Whether the index keeps what re-ranking needs."""
        return bool(self._tokens)

    def size(self, kind: str) -> int:
        """How many "images" or "captions" there are."""
        return self.note[kind]

    def search(
        self, queries: np.ndarray | Tensor, k: int, *, kind: str = "images", rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best images or captions for each query, by inner product (the greatest over an image's vectors).

        Args:
            queries: retrieval vectors [q, D], finite, any float dtype.
            k: results, 1 or more.
            kind: "images" or "captions".
            rows: that may be found, int64 [n], as ``index.records.where`` gives them; None: all.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64; fewer than k where fewer may be found.

        Raises:
            CoderError: the index has no such vectors; queries of another shape or not finite; rows that it does not have.
        """
        if isinstance(queries, Tensor):
            queries = queries.float().cpu().numpy()
        if kind not in self.vectors:
            raise CoderError(f"{self.folder} has no vectors of {kind}, only of {' and '.join(self.vectors)}")
        return self.vectors[kind].search(queries, k, rows=rows)

    def vector(self, row: int) -> np.ndarray:
        """The retrieval vectors [V, D] of an image as they were embedded, whatever the factory."""
        if "images" not in self.vectors:
            raise CoderError(f"{self.folder} has no vectors of images: make it with --what images or both")
        return self.table.vectors("images", [row])[0]

    def caption_vectors(self, row: int) -> np.ndarray:
        """The vectors [t, D] of the captions of an image."""
        if self.note["factory"] == "Flat":
            return self.vectors["captions"].gather(self.records.caption_rows(row))[:, 0]
        return self.table.vectors("captions", [row])[:, 0]

    def items(self, kind: str, rows: np.ndarray) -> dict[str, Tensor]:
        """What re-ranking needs of images or captions: tensors [n, …] by name; empty if the index keeps nothing for it."""
        prefix = {"images": "image_tokens_", "captions": "text_tokens_"}[kind]
        found = {name: array[rows] for name, array in self._tokens.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): torch.from_numpy(array) for name, array in found.items()}

    def thumbnail(self, key: str) -> Any | None:
        """The thumbnail (PIL) of an image by its key; None where there is none."""
        from coder_plugin.data.decode import decode_image

        row = self.records.row_of(key)
        content = None if row is None else self.records.thumbnail(row)
        if content is None:
            return None
        try:
            return decode_image(content, max_pixels=_PIXELS)
        except ValueError as error:
            raise CoderError(f"{self.folder}: the thumbnail of {key!r} is not a small JPEG file: {error}") from error

    def check_model(self, pretrained: Any) -> None:
        """Check that the index was made with a :class:`~coder_plugin.pretrained.open.PretrainedModel`.

        Raises:
            CoderError: it was made with another model.
        """
        model = self.note["model"]
        if pretrained.fingerprint() != model["fingerprint"]:
            objective = f" ({model['objective']})" if model.get("objective") else ""
            raise CoderError(
                f"{self.folder} was made with another model than {pretrained.name}, so their vectors cannot be compared: "
                f"give the model that it was made with, {model.get('name') or 'an unnamed one'}{objective}, or another index"
            )

    def _verify(self) -> None:
        """Read all Parquet files, whose pages have checksums."""
        for _ in self.table.batches(self.table.names):
            pass


def _array(path: Path, count: int) -> np.ndarray:
    """A memory map of an array of numbers [count, …].

    Raises:
        CoderError: the file is something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.shape[:1] == (count,):
            return array
        reason = f"it holds no numbers for {count:,} items"
    except Exception as error:  # the header is parsed as Python, so an error of any kind may come
        reason = str(error)[:200]
    raise CoderError(f"{path} is damaged ({reason}): build the index again")

