"""Word vectors: from text files of GloVe, word2vec or fastText, or a text model's embeddings of the words.

Of a file only vectors of the requested words are stored, so one of millions of rows needs little memory.
"""

from __future__ import annotations

import gzip
import logging
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.errors import CoderError

SIGMA_ROWS = 100_000
_MAX_LINE = 1 << 20  # bytes; a binary file may have no line end for gigabytes
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FoundVectors:
    """The vectors (float32 [d]) of the words that a source has, and ``sigma``, the standard deviation of its values."""

    vectors: dict[str, Tensor]
    dim: int
    sigma: float


class VectorSource(Protocol):
    """Where :func:`~coder_plugin.concepts.build_vocabulary` gets word vectors from."""

    #: Whether every word has a vector.
    complete: bool
    #: Options that a vocabulary's settings record.
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What settings and messages call it."""
        ...

    def read(self, words: Collection[str]) -> FoundVectors:
        """The vectors of those of the words that it has."""
        ...


class ModelVectors:
    """A text model's embeddings of the words, each embedded as a text of its own: no word is missing.

    The embeddings are normalised to unit length; their mean over the words is subtracted, and they are normalised again. Single
    words lie close together in the space of a text model, and the part that they share would make all concepts alike
    (docs/equations.md#concepts).

    Args:
        encode: n texts -> their embeddings, n rows of d numbers, a tensor or an array; one call for all words, sorted.
        name: what settings and messages call the model.
        template: the text for a word, with ``{}`` in the word's place.
        center: subtract the mean.

    Raises:
        CoderError: a template without ``{}``; from :meth:`read`, embeddings of another shape, or not finite.

    Example:
        >>> vectors = ModelVectors(lambda texts: torch.tensor([[float(len(text)), 3.0] for text in texts]), name="lengths")
        >>> vectors.read({"bird", "dog"}).vectors["bird"]
        tensor([ 0.7071, -0.7071])
    """

    complete = True

    def __init__(
        self, encode: Callable[[list[str]], Any], *, name: str, template: str = "{}", center: bool = True
    ) -> None:
        if "{}" not in template:
            raise CoderError(f"the template {template!r} has no {{}}, the place of the word")
        self.encode, self.name, self.template, self.center = encode, name, template, center
        self.settings: Mapping[str, Any] = {"template": template, "center": center}

    def read(self, words: Collection[str]) -> FoundVectors:
        """The vectors of all words. ``sigma`` is the standard deviation of their values."""
        ordered = sorted(set(words))
        with torch.no_grad():
            embeddings = torch.as_tensor(self.encode([self.template.replace("{}", word) for word in ordered])).float().cpu()
        if embeddings.ndim != 2 or len(embeddings) != len(ordered) or not embeddings.isfinite().all():
            raise CoderError(
                f"{self.name} gave embeddings of shape {tuple(embeddings.shape)} for {len(ordered)} words: a finite row for "
                "each word is needed"
            )
        table = F.normalize(embeddings, dim=1)
        if self.center and len(ordered) > 1:
            table = F.normalize(table - table.mean(0), dim=1)
        return FoundVectors(dict(zip(ordered, table, strict=True)), table.shape[1], float(table.std(correction=0)))


class WordVectors:
    """A file of rows ``word v1 … vd``: plain, in gzip, or the only file in a zip archive.

    Args:
        path: the file; it is read by :meth:`read`. A first line "rows dimensions" (word2vec, fastText) is allowed.

    Raises:
        CoderError: the file does not exist; from :meth:`read`, it is not such a file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "glove.txt"
        >>> _ = path.write_text("dog 1 0\\ncat 0 1\\n")
        >>> WordVectors(path).read({"cat", "unicorn"}).vectors
        {'cat': tensor([0., 1.])}
    """

    complete = False
    settings: Mapping[str, Any] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CoderError(f"word vectors: {str(path)!r} is not a file")

    @property
    def name(self) -> str:
        return self.path.name

    def read(self, words: Collection[str]) -> FoundVectors:
        """The vectors of those of ``words`` that the file has; of repeated rows the first counts.

        ``sigma`` is computed from the first 100,000 rows, the most frequent words in GloVe and word2vec files. Later rows
        are checked for their number of columns, and parsed only if requested.
        """
        requested = {word.encode(): word for word in words}
        heads = {word.split(b" ")[0] for word in requested}
        vectors: dict[str, Tensor] = {}
        moments = np.zeros(3)  # values, their sum, the sum of their squares
        dim, rows, announced = 0, 0, None
        for number, line in self._lines():
            if not dim:
                head = line.split()
                dim = max(1, len(head) - 1)
                if len(head) == 2 and all(field.isdigit() for field in head) and int(head[1]):
                    announced, dim = map(int, head)  # word2vec's first line
                    continue
            if rows >= SIGMA_ROWS and line.split(b" ", 1)[0] not in heads and line.count(b" ") == dim:
                rows += 1
                continue
            word, values = self._row(number, line, dim)
            if rows < SIGMA_ROWS:
                moments += (dim, values.sum(), np.square(values).sum())
            if word in requested and requested[word] not in vectors:
                vectors[requested[word]] = torch.from_numpy(values.astype(np.float32))
            rows += 1
        if not rows:
            raise CoderError(f"{self.path}: no word vectors in it")
        if announced is not None and announced != rows:
            log.warning("%s: its first line says %d words, but it has %d", self.path, announced, rows)
        number_of, total, squares = moments
        return FoundVectors(vectors, dim, math.sqrt(max(squares / number_of - (total / number_of) ** 2, 0.0)))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered lines that are not blank, as bytes: some files have words that are not valid UTF-8, or contain characters
        that Unicode counts as spaces or line ends."""
        number = 0
        try:
            with self._open() as file:
                while line := file.readline(_MAX_LINE):
                    number += 1
                    if len(line) == _MAX_LINE or (number == 1 and b"\0" in line):
                        raise CoderError(f"{self.path}: line {number} is not text{_HINT}")
                    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if line := line.rstrip():
                        yield number, line
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CoderError(f"{self.path}: cannot be read after line {number}: {reason}") from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        with open(self.path, "rb") as file:
            start = file.read(4)
            file.seek(0)
            if start[:2] == b"\x1f\x8b":
                with gzip.open(file) as unpacked:
                    yield unpacked  # type: ignore[misc]
            elif start == b"PK\x03\x04":
                with zipfile.ZipFile(file) as archive:
                    members = [each.filename for each in archive.infolist() if not each.is_dir()]
                    if len(members) != 1:
                        raise CoderError(f"{self.path}: has {len(members)} files ({', '.join(members)}); unpack one")
                    with archive.open(members[0]) as unpacked:
                        yield unpacked
            else:
                yield file

    def _row(self, number: int, line: bytes, dim: int) -> tuple[bytes, np.ndarray]:
        """The word and its d values, float64. A word may hold spaces (GloVe 840B), so columns count from the right."""
        fields = line.split()
        word, values = fields[:-dim], _numbers(fields[-dim:])
        if not word or values is None or (len(word) > 1 and _numbers(word[-1:]) is not None):
            raise CoderError(
                f"{self.path}: line {number} is not 'word v1 … v{dim}' with finite numbers: it has {len(fields) - 1} columns "
                f"after the word{_HINT}"
            )
        return b" ".join(word), values


_HINT = " (a text file of GloVe or word2vec is needed; gensim converts binary files)"


def _numbers(fields: list[bytes]) -> np.ndarray | None:
    """The numbers in fields; None if one is not a finite number."""
    with suppress(ValueError):
        values = np.array(fields, dtype=np.float64)
        return values if np.isfinite(values).all() else None
    return None
