"""Build a vocabulary from captions: the most frequent words of each type, their co-occurrences, and their vectors.

Shapes: g concepts, d dimensions of a word vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.concepts.tagging import Tagger, scenes_tagger
from coder_plugin.concepts.vectors import VectorSource
from coder_plugin.concepts.vocabulary import TYPES, Vocabulary, load_vocabulary
from coder_plugin.concepts.words import DEFAULT_STOP_WORDS, Tally, count_words
from coder_plugin.errors import CoderError

RATIO = (7, 2, 1)
_PAIRS_AT_ONCE = 1 << 22
_EXAMPLES = 10  # words in a warning
log = logging.getLogger(__name__)


def build_vocabulary(
    captions: Iterable[str],
    *,
    tagger: Tagger,
    size: int = 400,
    ratio: Sequence[float] = RATIO,
    lemmas: bool = True,
    stop_words: Collection[str] = DEFAULT_STOP_WORDS,
    vectors: VectorSource | None,
    dim: int = 300,
    seed: int = 0,
    source: str = "",
) -> Vocabulary:
    """The most frequent words of the captions as concepts (CODER, section 3.3; ``docs/equations.md#concepts``).

    A word has the type that most of its tokens have. If a type has fewer words than its share, the most frequent words of
    the other types fill the rest. A word without a vector gets that of its most frequent surface form with one, else a draw
    from N(0, sigma of the file). Shortfalls are logged as warnings and recorded in ``settings``.

    Args:
        captions: read once as a stream.
        tagger: see :class:`~coder_plugin.concepts.tagging.Tagger`.
        size: g, number of concepts, from 1.
        ratio: shares of Object (nouns), Motion (verbs) and Property (adjectives); three numbers of 0 or more.
        lemmas: count lemmas; otherwise each lower-case surface form is a word of its own.
        stop_words: lemmas or surface forms that are not counted.
        vectors: a file of word vectors, :class:`WordVectors`, or a text model, :class:`ModelVectors`; None draws all vectors
            from N(0, 1) in ``dim`` dimensions.
        seed: of drawn vectors.
        source: name of the captions, for ``settings`` and messages.

    Raises:
        CoderError: a size or ratio out of range, no word of the wanted types, or vectors for none of the words.

    Example:
        >>> from coder_plugin.concepts.tagging import lexicon_tagger
        >>> captions = ["A red dog runs", "dogs and a red ball"]
        >>> types = {"dog": "NOUN", "ball": "NOUN", "run": "VERB", "red": "ADJ"}
        >>> tagger = lexicon_tagger(types, {"dogs": "dog", "runs": "run"})
        >>> vocabulary = build_vocabulary(captions, tagger=tagger, size=3, ratio=(1, 1, 1), vectors=None, dim=4)
        >>> vocabulary.words, vocabulary.counts.tolist()
        (('dog', 'run', 'red'), [2, 1, 2])
    """
    shares = largest_remainder(size, ratio)
    tally = count_words(captions, tagger, lemmas=lemmas, stop_words=stop_words)
    vocabulary = _assemble(tally, size=size, ratio=ratio, vectors=vectors, dim=dim, seed=seed, source=source, more={
        "lemmas": lemmas, "stop_words": sorted(stop_words), "tagger": getattr(tagger, "name", type(tagger).__name__),
    })  # fmt: skip
    _warn(vocabulary, shares, ratio)
    return vocabulary


@lru_cache(maxsize=1)
def scenes_vocabulary() -> Vocabulary:
    """All concepts of the built-in training scenes, far fewer than 400 and none of them motions; vectors are drawn from
    N(0, 1) in 300 dimensions. It is a file of the package, which :func:`build_scenes_vocabulary` has made."""
    return load_vocabulary(Path(__file__).with_name("scenes.safetensors"))


def build_scenes_vocabulary() -> Vocabulary:
    """:func:`scenes_vocabulary` from the scenes' captions."""
    from coder_plugin.data.scenes import open_scenes

    tagger = scenes_tagger()
    captions = (caption for item in open_scenes("train") for caption in item.captions)
    stop_words = {"be"}
    tally = count_words(captions, tagger, lemmas=True, stop_words=stop_words)
    sizes = [len(tally.candidates(kind)) for kind in TYPES]
    more = {"lemmas": True, "stop_words": sorted(stop_words), "tagger": tagger.name}
    return _assemble(tally, size=sum(sizes), ratio=sizes, vectors=None, dim=300, seed=0, source="scenes", more=more)


def largest_remainder(size: int, ratio: Sequence[float]) -> tuple[int, ...]:
    """Divide ``size`` in ``ratio`` into whole numbers, each within one of its exact share.

    What rounding down leaves goes to the largest remainders, of equal ones to the first.

    Example:
        >>> largest_remainder(8, (7, 2, 1))
        (5, 2, 1)
    """
    if size < 1:
        raise CoderError(f"size is {size}; it must be 1 or more")
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
    """The words that become concepts: of each type its share of ``size``, the most frequent first.

    What a type cannot fill goes to the most frequent remaining words of the types with a share; there may be fewer in all.
    """
    ranked = [tally.candidates(kind) if part else [] for kind, part in zip(TYPES, ratio, strict=True)]
    shares = [min(len(words), share) for words, share in zip(ranked, largest_remainder(size, ratio), strict=True)]
    left = [number for words, share in zip(ranked, shares, strict=True) for number in words[share:]]
    left.sort(key=lambda number: (-tally.counts[number], tally.words[number]))
    more = set(left[: size - sum(shares)])
    return [
        n for words, share in zip(ranked, shares, strict=True) for i, n in enumerate(words) if i < share or n in more
    ]


def cooccurrence(tally: Tally, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The numbers of captions with each concept, int64 [g], and with each pair, int64 [g, g], zero diagonal."""
    g = len(chosen)
    concept_of = np.full(len(tally.words), -1)
    concept_of[list(chosen)] = np.arange(g)
    concepts = concept_of[tally.words_of]
    captions, concepts = tally.captions_of[concepts >= 0], concepts[concepts >= 0]
    lengths = np.bincount(captions, minlength=tally.captions)
    starts = np.cumsum(lengths) - lengths
    both = np.zeros(g * g, np.int64)
    for length in np.unique(lengths[lengths > 1]):  # as a matrix of captions; its columns give the pairs
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
    vectors: VectorSource | None,
    dim: int,
    seed: int,
    source: str,
    more: dict[str, Any],
) -> Vocabulary:
    chosen = choose(tally, size, ratio)
    if not chosen:
        types = " or ".join(kind for kind, part in zip(TYPES, ratio, strict=True) if part)
        raise CoderError(f"{source or 'captions'}: no {types} word in {tally.captions} captions (after the stop list)")
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
        "requested": dict(zip(TYPES, largest_remainder(size, ratio), strict=True)),
        "available": {kind: len(tally.candidates(kind)) for kind in TYPES},
        "selected": {kind: kinds.count(kind) for kind in TYPES},
        **more,
        "vectors": vectors.name if vectors is not None else None,
        **(vectors.settings if vectors is not None else {}),
        "sigma": sigma,
        "surface_vectors": borrowed,
        "seed": seed,
    }
    return Vocabulary(tuple(words), tuple(str(kind) for kind in kinds), counts, both, table, tuple(missing), settings)


def _vectors(
    words: list[str], forms: list[list[str]], source: VectorSource | None, dim: int, seed: int
) -> tuple[Tensor, list[str], dict[str, str], float]:
    """The vectors [g, d]; the words without one; surface forms used instead of words; sigma of the draws."""
    vectors: dict[str, Tensor] = {}
    sigma = 1.0
    if source is not None:
        surface = () if source.complete else (form for each in forms for form in each)
        read = source.read({*words, *surface})
        vectors, dim, sigma = read.vectors, read.dim, read.sigma
        if not vectors:
            raise CoderError(f"{source.name}: has no vector for any of the {len(words)} concepts, such as {words[0]!r}")
    table = torch.empty(len(words), dim)
    generator = torch.Generator().manual_seed(seed)
    missing, borrowed = [], {}
    for row, word, surface_forms in zip(table, words, forms, strict=True):
        form = next((each for each in (word, *surface_forms) if each in vectors), None)
        if form is None:
            missing.append(word)
            row.copy_(sigma * torch.randn(dim, generator=generator))
        else:
            row.copy_(vectors[form])
            if form != word:
                borrowed[word] = form
    return table, missing, borrowed, sigma


def _warn(vocabulary: Vocabulary, shares: Sequence[int], ratio: Sequence[float]) -> None:
    settings = vocabulary.settings
    for kind, share, part in zip(TYPES, shares, ratio, strict=True):
        available = settings["available"][kind]
        if part and not available:
            log.warning("concepts: the captions have no %s word (requested: %d)", kind, share)
        elif available < share:
            log.warning("concepts: requested %d %s words, found %d", share, kind, available)
    if len(vocabulary) < settings["size"]:
        log.warning("concepts: requested %d words, found %d", settings["size"], len(vocabulary))
    if settings["vectors"] is None:
        log.warning("concepts: no word vectors: all %d are random, drawn from N(0, 1)", len(vocabulary))
    elif missing := vocabulary.missing:
        names = ", ".join(missing[:_EXAMPLES]) + (" …" if len(missing) > _EXAMPLES else "")
        log.warning(
            "concepts: no vector in %s for %d of %d words, random instead: %s",
            settings["vectors"], len(missing), len(vocabulary), names,
        )  # fmt: skip
