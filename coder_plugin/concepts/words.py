"""The words of a corpus: which surface forms are one word, of which type it is, and which captions hold it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from coder_plugin.concepts.tagging import Tagger, clean, is_word
from coder_plugin.concepts.vocabulary import TYPES

#: Lemmas that say nothing of a picture: auxiliaries, and words that only stand for others or compare them.
DEFAULT_STOP_WORDS = frozenset(
    "be have do can could may might must shall should will would get let "
    "other another such same own able various kind sort type lot bit thing something someone somebody anything".split()
)
_TYPE_OF = {"NOUN": "object", "VERB": "motion", "AUX": "motion", "ADJ": "property", "PROPN": "name"}
_FEW = 0.2  # of a noun's tokens: fewer in its lemma's own form, and fewer read as a verb, make the plural its name
_ENOUGH = 10  # tokens, before their share says anything
Kind = str | None
Reading = tuple[
    str, Kind
]  # lemma and type of a token; None: no concept's; "name": a proper noun, or so the tagger says


@dataclass(frozen=True, eq=False)
class Tally:
    """What was counted, word by word: ``counts[w]`` captions hold word w, ``types[w]`` is what it is (None: no concept),
    ``forms[w]`` are its surface forms, the most frequent first. ``captions_of`` and ``words_of`` are the pairs of a caption
    and a word that it holds, each pair once, sorted."""

    captions: int
    words: list[str]
    types: list[Kind]
    forms: list[list[str]]
    counts: np.ndarray
    captions_of: np.ndarray
    words_of: np.ndarray

    def candidates(self, kind: str) -> list[int]:
        """The words of a type, the most frequent first, equals by alphabet."""
        there = [number for number, its in enumerate(self.types) if its == kind]
        return sorted(there, key=lambda number: (-self.counts[number], self.words[number]))


def count_words(
    captions: Iterable[str], tagger: Tagger, *, lemmas: bool = True, stop_words: Collection[str] = DEFAULT_STOP_WORDS
) -> Tally:
    """One pass over the captions, of which a number for each token is kept.

    A tagger errs on single tokens, so each surface form is read in one way everywhere: as the type that it mostly has.
    """
    numbers: dict[str, int] = {}
    readings: list[Counter[Reading]] = []
    tokens, lengths = array("i"), array("i")
    for tagged in tagger(map(clean, captions)):
        before = len(tokens)
        for surface, lemma, part in tagged:
            surface = surface.lower()
            if not is_word(surface):
                continue
            number = numbers.setdefault(surface, len(numbers))
            if number == len(readings):
                readings.append(Counter())
            readings[number][lemma.lower(), _TYPE_OF.get(part)] += 1
            tokens.append(number)
        lengths.append(len(tokens) - before)
    words = _words(dict(zip(numbers, readings, strict=True)), lemmas, {clean(word) for word in stop_words})

    word_of = np.full(len(numbers), -1)
    for place, (_, forms) in enumerate(words.values()):
        word_of[[numbers[form] for form in forms]] = place
    caption = np.repeat(np.arange(len(lengths)), np.array(lengths, np.int64))
    word = word_of[np.array(tokens, np.int64)]
    pairs = np.unique(caption[word >= 0] * max(1, len(words)) + word[word >= 0])
    captions_of, words_of = np.divmod(pairs, max(1, len(words)))
    return Tally(
        captions=len(lengths),
        words=list(words),
        types=[kind for kind, _ in words.values()],
        forms=[forms for _, forms in words.values()],
        counts=np.bincount(words_of, minlength=len(words)),
        captions_of=captions_of,
        words_of=words_of,
    )


def _words(
    readings: dict[str, Counter[Reading]], lemmas: bool, stopped: Collection[str]
) -> dict[str, tuple[Kind, list[str]]]:
    """Each word with its type and its surface forms, the most frequent first, made of the readings of the forms.

    Forms of one lemma and type are one word. Nouns that hardly ever stand in their lemma's own form go by the form that
    they have: "shorts", for short is an adjective, or "jeans"; but not verbs often taken for nouns ("leaps"). Words that
    share a name in the end (the verb and the noun "jump") are one word, of the type that most of its tokens have.
    """
    tokens = {form: their.total() for form, their in readings.items()}
    groups: dict[Reading, list[str]] = {}
    for form, their in readings.items():
        lemma, kind = _reading(their)
        if form not in stopped and lemma not in stopped:
            groups.setdefault((lemma if lemmas else form, kind), []).append(form)
    named: dict[str, list[str]] = {}
    for (lemma, kind), forms in groups.items():
        forms.sort(key=lambda form: (-tokens[form], form))
        own = sum(tokens[form] for form in forms if form == lemma)
        verbs = sum(times for form in forms for (_, its), times in readings[form].items() if its == "motion")
        total = sum(tokens[form] for form in forms)
        another = lemma in readings and not own
        plural = kind == "object" and max(own, verbs) < _FEW * total and (another or total >= _ENOUGH)
        named.setdefault(forms[0] if plural or not is_word(lemma) else lemma, []).extend(forms)
    return {
        name: (_kind(sum((readings[form] for form in forms), Counter())), sorted(forms, key=lambda f: (-tokens[f], f)))
        for name, forms in named.items()
    }


def _reading(their: Counter[Reading]) -> Reading:
    """How a surface form is read: its type, and the most frequent of the lemmas that it has as that."""
    kind = _kind(their)
    sought = (kind, "name") if kind == "object" else (kind,)
    return min((-times, lemma) for (lemma, its), times in their.items() if its in sought)[1], kind


def _kind(their: Counter[Reading]) -> Kind:
    """The type of most tokens. Proper nouns are objects where the tagger sees nothing else; in lower case it takes what
    it does not know for a name ("tan"), so beside other readings they have no say."""
    kinds: Counter[Kind] = Counter()
    for (_, kind), times in their.items():
        kinds[kind] += times
    names = kinds.pop("name", 0)
    if not kinds:
        kinds["object"] = names
    order: tuple[Kind, ...] = (*TYPES, None)
    return max(order, key=lambda kind: kinds[kind])  # of equal ones the first
