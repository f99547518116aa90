"""From captions to concepts: the most frequent words of each type, which of them meet, and their vectors.

C captions, g concepts, d dimensions of a word vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.concepts.tagging import Tagger, scenes_tagger
from coder_plugin.concepts.vectors import WordVectors
from coder_plugin.concepts.vocabulary import TYPES, Vocabulary
from coder_plugin.concepts.words import DEFAULT_STOP_WORDS, Tally, count_words
from coder_plugin.errors import CoderError

RATIO = (7, 2, 1)
_PAIRS_AT_ONCE = 1 << 22
_NAMED = 10  # words in a warning
log = logging.getLogger(__name__)


def build_vocabulary(
    captions: Iterable[str],
    *,
    tagger: Tagger,
    size: int = 400,
    ratio: Sequence[float] = RATIO,
    lemmas: bool = True,
    stop_words: Collection[str] = DEFAULT_STOP_WORDS,
    vectors: WordVectors | None,
    dim: int = 300,
    seed: int = 0,
    source: str = "",
) -> Vocabulary:
    """The ``size`` most frequent words of ``captions`` as concepts, Object : Motion : Property in ``ratio`` (METHODS 4).

    Captions are streamed. A word is its lemma, or its lower-case surface with ``lemmas=False``; its type is what it
    mostly is in the corpus; a token whose lemma or surface is in ``stop_words`` does not count. A type that has fewer
    words than its share leaves the rest to the most frequent words of the others. A word without a vector gets that of
    its most frequent surface form that has one, else a draw from N(0, sigma of the file); without a file all are drawn
    from N(0, 1) in ``dim`` dimensions. Whatever falls short is logged as a warning and stands in ``settings``.
    """
    shares = largest_remainder(size, ratio)
    tally = count_words(captions, tagger, lemmas=lemmas, stop_words=stop_words)
    vocabulary = _assemble(tally, size=size, ratio=ratio, vectors=vectors, dim=dim, seed=seed, source=source, more={
        "lemmas": lemmas, "stop_words": sorted(stop_words), "tagger": getattr(tagger, "name", type(tagger).__name__),
    })  # fmt: skip
    _warn(vocabulary, shares, ratio)
    return vocabulary


@lru_cache(maxsize=4)
def scenes_vocabulary(seed: int = 0) -> Vocabulary:
    """All concepts of the built-in training scenes: there are far fewer than 400, and no motions among them. The vectors
    are drawn from N(0, 1), 300 dimensions."""
    from coder_plugin.data.scenes import open_scenes

    tagger = scenes_tagger()
    captions = (caption for item in open_scenes("train") for caption in item.captions)
    stop_words = {"be"}
    tally = count_words(captions, tagger, lemmas=True, stop_words=stop_words)
    found = [len(tally.candidates(kind)) for kind in TYPES]
    more = {"lemmas": True, "stop_words": sorted(stop_words), "tagger": tagger.name}
    return _assemble(tally, size=sum(found), ratio=found, vectors=None, dim=300, seed=seed, source="scenes", more=more)


def largest_remainder(size: int, ratio: Sequence[float]) -> tuple[int, ...]:
    """``size`` shared out in ``ratio``: whole numbers that add up to it, each within one of its exact share. What
    rounding down leaves goes to the largest remainders, the first of equal ones."""
    if size < 1:
        raise CoderError(f"size is {size}; there must be at least one concept")
    if len(ratio) != len(TYPES) or not all(math.isfinite(part) and part >= 0 for part in ratio) or not sum(ratio):
        raise CoderError(
            f"ratio is {tuple(ratio)}; it must be three numbers of 0 or more ({', '.join(TYPES)}), not all 0"
        )
    exact = [size * part / sum(ratio) for part in ratio]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(ratio)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: size - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def choose(tally: Tally, size: int, ratio: Sequence[float]) -> list[int]:
    """The concepts: of each type its share of ``size``, the most frequent first. What a type cannot fill goes to the
    most frequent words left of the types that have a share; if even these do not suffice there are fewer."""
    ranked = [tally.candidates(kind) if part else [] for kind, part in zip(TYPES, ratio, strict=True)]
    shares = [min(len(words), share) for words, share in zip(ranked, largest_remainder(size, ratio), strict=True)]
    left = [number for words, share in zip(ranked, shares, strict=True) for number in words[share:]]
    left.sort(key=lambda number: (-tally.counts[number], tally.words[number]))
    more = set(left[: size - sum(shares)])
    return [
        n for words, share in zip(ranked, shares, strict=True) for i, n in enumerate(words) if i < share or n in more
    ]


def cooccurrence(tally: Tally, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Captions that hold each concept, int64 [g], and each two of them, int64 [g, g] with a zero diagonal."""
    g = len(chosen)
    concept_of = np.full(len(tally.words), -1)
    concept_of[list(chosen)] = np.arange(g)
    concepts = concept_of[tally.words_of]
    captions, concepts = tally.captions_of[concepts >= 0], concepts[concepts >= 0]
    lengths = np.bincount(captions, minlength=tally.captions)
    starts = np.cumsum(lengths) - lengths
    both = np.zeros(g * g, np.int64)
    for length in np.unique(lengths[lengths > 1]):  # captions of one length make a matrix, and its columns pairs
        first, second = np.triu_indices(length, 1)
        rows = starts[lengths == length]
        step = max(1, _PAIRS_AT_ONCE // len(first))
        for at in range(0, len(rows), step):
            words = concepts[rows[at : at + step, None] + np.arange(length)]
            both += np.bincount((words[:, first] * g + words[:, second]).ravel(), minlength=g * g)
    square = torch.from_numpy(both).view(g, g)
    return torch.from_numpy(np.bincount(concepts, minlength=g)), square + square.T


def _assemble(
    tally: Tally,
    *,
    size: int,
    ratio: Sequence[float],
    vectors: WordVectors | None,
    dim: int,
    seed: int,
    source: str,
    more: dict[str, Any],
) -> Vocabulary:
    chosen = choose(tally, size, ratio)
    if not chosen:
        wanted = " or ".join(kind for kind, part in zip(TYPES, ratio, strict=True) if part)
        raise CoderError(f"{source or 'captions'}: no {wanted} word in {tally.captions} captions (after the stop list)")
    counts, both = cooccurrence(tally, chosen)
    words = [tally.words[number] for number in chosen]
    forms = [tally.forms[number] for number in chosen]
    table, missing, borrowed, sigma = _vectors(words, forms, vectors, dim, seed)
    kinds = [tally.types[number] for number in chosen]
    settings = {
        "source": source,
        "captions": tally.captions,
        "size": size,
        "ratio": list(ratio),
        "asked": dict(zip(TYPES, largest_remainder(size, ratio), strict=True)),
        "there": {kind: len(tally.candidates(kind)) for kind in TYPES},
        "found": {kind: kinds.count(kind) for kind in TYPES},
        **more,
        "vectors": vectors.name if vectors is not None else None,
        "sigma": sigma,
        "surface_vectors": borrowed,
        "seed": seed,
    }
    return Vocabulary(tuple(words), tuple(str(kind) for kind in kinds), counts, both, table, tuple(missing), settings)


def _vectors(
    words: list[str], forms: list[list[str]], file: WordVectors | None, dim: int, seed: int
) -> tuple[Tensor, list[str], dict[str, str], float]:
    """The vectors, [g, d]; the words without one; whose surface form's vector was taken; sigma of the draws."""
    found: dict[str, Tensor] = {}
    sigma = 1.0
    if file is not None:
        read = file.read({*words, *(form for its in forms for form in its)})
        found, dim, sigma = read.vectors, read.dim, read.sigma
        if not found:
            raise CoderError(f"{file.path}: has a vector for none of the {len(words)} concepts, such as {words[0]!r}")
    table = torch.empty(len(words), dim)
    generator = torch.Generator().manual_seed(seed)
    missing, borrowed = [], {}
    for row, word, its in zip(table, words, forms, strict=True):
        form = next((each for each in (word, *its) if each in found), None)
        if form is None:
            missing.append(word)
            row.copy_(sigma * torch.randn(dim, generator=generator))
        else:
            row.copy_(found[form])
            if form != word:
                borrowed[word] = form
    return table, missing, borrowed, sigma


def _warn(vocabulary: Vocabulary, shares: Sequence[int], ratio: Sequence[float]) -> None:
    settings = vocabulary.settings
    for kind, share, part in zip(TYPES, shares, ratio, strict=True):
        there = settings["there"][kind]
        if part and not there:
            log.warning("concepts: the captions have no %s word at all (asked for: %d)", kind, share)
        elif there < share:
            log.warning("concepts: asked for %d %s words, found %d", share, kind, there)
    if len(vocabulary) < settings["size"]:
        log.warning("concepts: asked for %d words, found %d", settings["size"], len(vocabulary))
    if settings["vectors"] is None:
        log.warning("concepts: no word vectors: all %d are random, drawn from N(0, 1)", len(vocabulary))
    elif missing := vocabulary.missing:
        names = ", ".join(missing[:_NAMED]) + (" …" if len(missing) > _NAMED else "")
        log.warning(
            "concepts: no vector in %s for %d of %d words, random instead: %s",
            settings["vectors"], len(missing), len(vocabulary), names,
        )  # fmt: skip
