"""The concepts of a corpus as one value, and the two files it is kept in.

g concepts, d dimensions of a word vector.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coder_plugin.errors import CoderError

TYPES = ("object", "motion", "property")  # nouns, verbs, adjectives
_TENSORS = ("counts", "cooccurrence", "vectors")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """g concept words with what CODER's concept graph and its nodes need (METHODS 4).

    ``words`` are ordered by type (in the order of ``TYPES``), then by falling ``counts``, then by alphabet. ``counts``
    (int64 [g]) is the number of captions that hold a concept, ``cooccurrence`` (int64 [g, g], symmetric, zero diagonal)
    the number that hold both, ``vectors`` (float32 [g, d]) the word vectors; those of the ``missing`` words are random.
    ``settings`` (JSON values only) says what it was made of and how.
    """

    words: tuple[str, ...]
    types: tuple[str, ...]
    counts: Tensor
    cooccurrence: Tensor
    vectors: Tensor
    missing: tuple[str, ...]
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("words", "types", "missing"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(word, str) for word in value):
                raise CoderError(f"vocabulary: {name} must be a list of words, got {type(value).__name__}")
            object.__setattr__(self, name, tuple(value))
        if fault := self._fault():
            raise CoderError(f"vocabulary: {fault}")

    def __len__(self) -> int:
        return len(self.words)

    def of_type(self, kind: str) -> tuple[str, ...]:
        """The concepts of one of ``TYPES``, the most frequent first."""
        if kind not in TYPES:
            raise CoderError(f"concept type is {kind!r}; it must be one of {', '.join(TYPES)}")
        return tuple(word for word, its in zip(self.words, self.types, strict=True) if its == kind)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of words, types and tensors: the same exactly where training would be the same."""
        digest = hashlib.blake2b(json.dumps([self.words, self.types, self.missing]).encode(), digest_size=16)
        for name in _TENSORS:
            digest.update(getattr(self, name).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors to ``path`` (.safetensors) and words, types and settings beside it (.json).

        Each file is replaced whole; a pair of which only one was replaced does not load.
        """
        path = artefact_path(path)
        mark = {"fingerprint": self.fingerprint}
        tensors = save({name: getattr(self, name).contiguous() for name in _TENSORS}, metadata=mark)
        texts = {"words": self.words, "types": self.types, "missing": self.missing, "settings": dict(self.settings)}
        text = json.dumps({**mark, **texts}, indent=1, ensure_ascii=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, tensors)
            _replace(path.with_suffix(".json"), text.encode())
        except OSError as error:
            raise CoderError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error

    def _fault(self) -> str | None:
        g = len(self.words)
        if not g:
            return "no concepts"
        if len(set(self.words)) < g or not all(self.words):
            return "words must be distinct and not empty"
        if len(self.types) != g:
            return f"{g} words but {len(self.types)} types"
        if unknown := set(self.types) - set(TYPES):
            return f"unknown type {sorted(unknown)[0]!r}; a concept is one of {', '.join(TYPES)}"
        if strange := set(self.missing) - set(self.words):
            return f"missing word {sorted(strange)[0]!r} is not among the words"
        wanted = {"counts": ((g,), torch.int64), "cooccurrence": ((g, g), torch.int64)}
        wanted["vectors"] = ((g, self.vectors.shape[-1] if self.vectors.ndim else 0), torch.float32)
        for name, (shape, dtype) in wanted.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"{name} is {tensor.dtype} {list(tensor.shape)}; with {g} words it must be {dtype} {list(shape)}"
        both = self.cooccurrence
        if both.diagonal().any() or not torch.equal(both, both.T) or (both < 0).any():
            return "cooccurrence must be symmetric and not negative, with a zero diagonal"
        if (both > self.counts).any() or (self.counts < 0).any():
            return "cooccurrence exceeds counts: no two words meet in more captions than either is in"
        if not self.vectors.shape[1] or not self.vectors.isfinite().all():
            return "vectors must be finite and of at least one dimension"
        return None


def load_vocabulary(path: str | os.PathLike[str]) -> Vocabulary:
    """The vocabulary saved at ``path`` (.safetensors, its .json beside it); a fault of either file is a CoderError."""
    path = artefact_path(path)
    beside = path.with_suffix(".json")
    for file in (path, beside):
        if not file.is_file():
            raise CoderError(f"{file}: no such file; coder-plugin concepts writes {path.name} and {beside.name}")
    try:
        with safe_open(path, framework="pt") as content:
            mark = (content.metadata() or {}).get("fingerprint")
            tensors = {name: content.get_tensor(name) for name in content.keys()}
    except (OSError, SafetensorError) as error:
        raise CoderError(f"{path}: cannot be read: {error}") from error
    try:
        texts = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CoderError(f"{beside}: cannot be read as JSON: {error}") from error
    fields = ("words", "types", "missing", "settings")
    if not isinstance(texts, dict) or (absent := [name for name in fields if name not in texts]):
        lacking = f": it has no {', '.join(absent)}" if isinstance(texts, dict) else ""
        raise CoderError(f"{beside}: not written by coder-plugin concepts{lacking}")
    if absent := [name for name in _TENSORS if name not in tensors]:
        raise CoderError(f"{path}: not written by coder-plugin concepts: it has no {', '.join(absent)}")
    try:
        parts = {**{name: texts[name] for name in fields}, **{name: tensors[name] for name in _TENSORS}}
        vocabulary = Vocabulary(**parts)
    except CoderError as error:
        raise CoderError(f"{path}: {error}") from error
    if not mark or not texts.get("fingerprint") == mark == vocabulary.fingerprint:
        raise CoderError(f"{path} and {beside.name} do not belong together, or one was changed; make them anew")
    return vocabulary


def artefact_path(path: str | os.PathLike[str]) -> Path:
    """``path``, which must end in .safetensors: the other file's name is made from it."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CoderError(f"concepts file is {str(path)!r}; its name must end in .safetensors (a .json lies beside it)")
    return path


def check_writable(path: Path) -> None:
    """Find out before the work, not after it, whether ``path`` can be written; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(aside := path.with_name(f".{path.name}.test"), b"")
        aside.unlink()
    except OSError as error:
        raise CoderError(f"{path}: cannot be written: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    """Write beside and rename, so that nobody meets half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
