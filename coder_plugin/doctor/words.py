"""Concept vocabularies and word vectors, against the words that the captions use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, share, some, warning
from coder_plugin.errors import CoderError

_FEW = 0.9  # of the words in running text that vectors should have
_MISSING = 0.1  # of the concepts, whose vectors are random


def count_words(captions: Iterable[str]) -> Counter[str]:
    """Words in lower case, letters with hyphens and apostrophes inside, and how often each stands in the captions."""
    from coder_plugin.concepts.tagging import clean, is_word

    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(word for word in (part.strip(".,;:!?\"'()[]") for part in clean(caption).split()) if is_word(word))
    return counts


def check_concepts(path: str, words: Counter[str]) -> Iterator[Finding]:
    """A file of ``coder-plugin concepts``: whole, with vectors, and of these captions. ``words``: empty without captions."""
    from coder_plugin.concepts.vocabulary import load_vocabulary

    try:
        vocabulary = load_vocabulary(path)
    except CoderError as error:
        yield problem("words.concepts", one_line(error), "make it anew: coder-plugin concepts --train-data … --output FILE")
        return
    size, dim = vocabulary.vectors.shape
    yield ok(
        "words.concepts", f"{path}: {size} concepts, vectors of {dim} dimensions, of {vocabulary.settings.get('source')}"
    )
    if missing := vocabulary.missing:
        text = f"{share(len(missing), size)} concepts have no vector, but a random one: {some(missing)}"
        level = warning if len(missing) > _MISSING * size else note
        yield level("words.concepts.random", text, "make it with vectors that have them: --vectors (GloVe has most words)")
    if not words:
        return
    forms = vocabulary.settings.get("surface_vectors") or {}
    absent = [word for word in vocabulary.words if not _occurs(word, words) and forms.get(word) not in words]
    if len(absent) > size / 4:
        text = f"{share(len(absent), size)} concepts stand in no training caption: {some(absent)}"
        do = "was the file made of other captions? make it of these: coder-plugin concepts --train-data …"
        yield warning("words.concepts.absent", text, do)
    else:
        yield ok("words.concepts.used", f"{size - len(absent)} of {size} concepts stand in the training captions")


def _occurs(word: str, words: Counter[str]) -> bool:
    """In one of the forms that English makes of a lemma; irregular ones are missed."""
    stems = (word, word.removesuffix("e"), word.removesuffix("y") + "i", word + word[-1])
    return any(stem + ending in words for stem in stems for ending in ("", "s", "es", "ed", "ing", "d"))


def check_vectors(path: str, words: Counter[str]) -> Iterator[Finding]:
    """A file of word vectors: whole, and how many of the captions' words it has."""
    from coder_plugin.concepts.vectors import WordVectors

    try:
        found = WordVectors(path).read(words.keys())
    except CoderError as error:
        do = "a GloVe or word2vec text file (.gz, .zip too); download it again, or remove the broken line"
        yield problem("words.vectors", one_line(error), do)
        return
    yield ok("words.vectors", f"{path}: {found.dim} dimensions, standard deviation {found.sigma:.3g}")
    if not words:
        yield note("words.vectors.words", "without captions their words are not looked up", "name --train-data too")
        return
    running, known = words.total(), sum(words[word] for word in found.vectors)
    have = share(len(found.vectors), len(words))
    text = f"{have} words of the captions have a vector, {100 * known / running:.1f} % of running text"
    if known < _FEW * running:
        lacking = [word for word, _ in words.most_common() if word not in found.vectors]
        do = "take vectors of more words (GloVe's have 400,000), in lower case and of the captions' language"
        yield warning("words.vectors.few", f"{text}; not, most frequent first: {some(lacking)}", do)
    else:
        yield ok("words.vectors.words", text)


def words_of(splits: Iterable[Any]) -> Counter[str]:
    return count_words(caption for split in splits for item in split.items for caption in item.captions)
