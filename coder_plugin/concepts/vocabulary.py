"""The concepts of a corpus, and the two files that store them.

Shapes: g concepts, d dimensions of a word vector.
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

from coder_plugin.concepts.graph import concept_graph
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.terminal import plural

TYPES = ("object", "motion", "property")  # nouns, verbs, adjectives
_TENSORS = ("counts", "cooccurrence", "vectors")
_TOP = 10  # words of each type in a description


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Concept words, and what CODER's concept graph is built from (``docs/equations.md#concepts``).

    Args:
        words: g distinct words, ordered by type (as in ``TYPES``), then falling count, then alphabet.
        types: the words' types.
        counts: int64 [g], the number of captions with each concept.
        cooccurrence: int64 [g, g], symmetric with zero diagonal, the number of captions with both concepts.
        vectors: float32 [g, d], word vectors; random for the ``missing`` words.
        missing: the words without a vector in the file.
        settings: JSON values: the source and the options of :func:`~coder_plugin.concepts.build.build_vocabulary`.

    Raises:
        CoderError: fields that do not fit each other.
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
        if error := self._error():
            raise CoderError(f"vocabulary: {error}")

    def __len__(self) -> int:
        return len(self.words)

    def of_type(self, kind: str) -> tuple[str, ...]:
        """The concepts of one of ``TYPES``, the most frequent first."""
        if kind not in TYPES:
            raise CoderError(f"concept type is {kind!r}; it must be one of {', '.join(TYPES)}")
        return tuple(word for word, type_ in zip(self.words, self.types, strict=True) if type_ == kind)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of words, types and tensors: equal if and only if training would be the same."""
        digest = hashlib.blake2b(json.dumps([self.words, self.types, self.missing]).encode(), digest_size=16)
        for name in _TENSORS:
            digest.update(getattr(self, name).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors to ``path`` (.safetensors), and words, types and settings to the .json file next to it.

        Each file is replaced atomically; a pair of which only one was replaced does not load.

        Raises:
            CoderError: another ending, or a file that cannot be written.
        """
        path = artefact_path(path)
        mark = {"fingerprint": self.fingerprint}
        tensors = save({name: getattr(self, name).contiguous() for name in _TENSORS}, metadata=mark)
        texts = {"words": self.words, "types": self.types, "missing": self.missing, "settings": dict(self.settings)}
        text = json.dumps({**mark, **texts}, indent=1, ensure_ascii=False) + "\n"
        try:
            for file_path, content in ((path, tensors), (path.with_suffix(".json"), text.encode())):
                with atomic_write(file_path) as file:
                    file.write(content)
        except OSError as error:
            raise CoderError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error

    def _error(self) -> str | None:
        g = len(self.words)
        if not g:
            return "no concepts"
        if len(set(self.words)) < g or not all(self.words):
            return "words must be distinct and not empty"
        if len(self.types) != g:
            return f"{g} words but {len(self.types)} types"
        if unknown := set(self.types) - set(TYPES):
            return f"unknown type {sorted(unknown)[0]!r}; a concept is one of {', '.join(TYPES)}"
        if foreign := set(self.missing) - set(self.words):
            return f"missing word {sorted(foreign)[0]!r} is not among the words"
        expected = {"counts": ((g,), torch.int64), "cooccurrence": ((g, g), torch.int64)}
        expected["vectors"] = ((g, self.vectors.shape[-1] if self.vectors.ndim else 0), torch.float32)
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"{name} is {tensor.dtype} {list(tensor.shape)}; with {g} words it must be {dtype} {list(shape)}"
        both = self.cooccurrence
        if both.diagonal().any() or not torch.equal(both, both.T) or (both < 0).any():
            return "cooccurrence must be symmetric and not negative, with a zero diagonal"
        if (both > self.counts).any() or (self.counts < 0).any():
            return "cooccurrence exceeds counts: no pair of words can be in more captions than each of them"
        if not self.vectors.shape[1] or not self.vectors.isfinite().all():
            return "vectors must be finite and of at least one dimension"
        return None


def load_vocabulary(path: str | os.PathLike[str]) -> Vocabulary:
    """The vocabulary that :meth:`Vocabulary.save` wrote to ``path`` (.safetensors).

    Raises:
        CoderError: a missing, damaged or foreign file, or two files that do not belong together.
    """
    path = artefact_path(path)
    text_path = path.with_suffix(".json")
    for file in (path, text_path):
        if not file.is_file():
            raise CoderError(f"{file}: no such file; coder-plugin concepts writes {path.name} and {text_path.name}")
    try:
        with safe_open(path, framework="pt") as content:
            mark = (content.metadata() or {}).get("fingerprint")
            tensors = {name: content.get_tensor(name) for name in content.keys()}
    except (OSError, SafetensorError) as error:
        raise CoderError(f"{path}: cannot be read: {error}") from error
    try:
        texts = json.loads(text_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CoderError(f"{text_path}: cannot be read as JSON: {error}") from error
    fields = ("words", "types", "missing", "settings")
    if not isinstance(texts, dict) or (absent := [name for name in fields if name not in texts]):
        missing = f": it has no {', '.join(absent)}" if isinstance(texts, dict) else ""
        raise CoderError(f"{text_path}: not written by coder-plugin concepts{missing}")
    if absent := [name for name in _TENSORS if name not in tensors]:
        raise CoderError(f"{path}: not written by coder-plugin concepts: it has no {', '.join(absent)}")
    try:
        parts = {**{name: texts[name] for name in fields}, **{name: tensors[name] for name in _TENSORS}}
        vocabulary = Vocabulary(**parts)
    except CoderError as error:
        raise CoderError(f"{path}: {error}") from error
    if not mark or not texts.get("fingerprint") == mark == vocabulary.fingerprint:
        raise CoderError(f"{path} and {text_path.name} do not belong together, or one was changed; build them again")
    return vocabulary


def artefact_path(path: str | os.PathLike[str]) -> Path:
    """``path``, which must end in .safetensors; the other file has the same name with .json."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CoderError(f"concepts file is {str(path)!r}; its name must end in .safetensors (a .json is written next to it)")
    return path


def check_writable(path: Path) -> None:
    """Check before long work whether ``path`` can be written; its folder is created."""
    try:
        trial = path.with_name(f".{path.name}.test")
        with atomic_write(trial):
            pass
        trial.unlink()
    except OSError as error:
        raise CoderError(f"{path}: cannot be written: {error.strerror or error}") from error


def describe(vocabulary: Vocabulary) -> str:
    """A summary of a vocabulary and its shortfalls, to be read before training on it."""
    settings = vocabulary.settings
    source = settings["source"] or "an unnamed source"
    lines = [f"captions: {settings['captions']} of {source}, tagged by {settings['tagger']}"]
    lines.append(f"{'type':<9} {'requested':>9} {'selected':>9} {'available':>9}  most frequent")
    for kind in TYPES:
        numbers = " ".join(f"{settings[column][kind]:>9}" for column in ("requested", "selected", "available"))
        lines.append(f"{kind:<9} {numbers}  {', '.join(vocabulary.of_type(kind)[:_TOP])}")
    g, dim = vocabulary.vectors.shape
    total = f"{g} concepts" if g == settings["size"] else f"{g} concepts, fewer than the {settings['size']} requested"
    lines.append(f"{total}; the rarest is in {plural(int(vocabulary.counts.min()), 'caption')}")
    linked = concept_graph(vocabulary.cooccurrence, vocabulary.counts).fill_diagonal_(0) > 0
    edges, isolated = int(linked.sum()), int((~linked.any(0) & ~linked.any(1)).sum())
    lines.append(f"graph: {edges} edges, {100 * edges / max(1, g * (g - 1)):.2f} % of all; {isolated} concepts without an edge")
    if settings["vectors"] is None:
        return "\n".join([*lines, f"word vectors: no file: all {g} are random, N(0, 1), {dim} dimensions"])
    from_forms, missing = settings["surface_vectors"], vocabulary.missing
    lines.append(f"word vectors: {g - len(missing)} of {g} from {settings['vectors']}, {dim} dimensions")
    if from_forms:
        forms = ", ".join(f"{word} ({form})" for word, form in from_forms.items())
        lines.append(f"  {len(from_forms)} taken from a surface form, since the word has none: {forms}")
    if missing:
        lines.append(f"  {len(missing)} missing, random from N(0, {settings['sigma']:.3g}): {', '.join(missing)}")
    return "\n".join(lines)
