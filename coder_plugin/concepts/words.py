"""Count the words of a corpus: which surface forms are one word, its type, and the captions it occurs in."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from coder_plugin.concepts.tagging import Tagger, clean, is_word
from coder_plugin.concepts.vocabulary import TYPES
from coder_plugin.errors import CoderError

#: Lemmas that describe nothing in a picture: auxiliaries, and words that replace or compare others.
DEFAULT_STOP_WORDS = frozenset(
    "be have do can could may might must shall should will would get let "
    "other another such same own able various kind sort type lot bit thing something someone somebody anything".split()
)
_TYPE_OF = {"NOUN": "object", "VERB": "motion", "AUX": "motion", "ADJ": "property", "PROPN": "name"}
_RARE = 0.2  # a noun is named by its plural if less than this share of tokens is the lemma itself, or read as a verb
_MIN_TOKENS = 10  # for that share to be reliable
Kind = str | None
Reading = tuple[str, Kind]  # a token's lemma and type; None: not a concept; "name": a proper noun according to the tagger


def read_stop_words(spec: str) -> Collection[str]:
    """The stop words of a command line: ``default``, ``none``, or a file with one word a line, where # starts a comment."""
    if spec == "default":
        return DEFAULT_STOP_WORDS
    if spec == "none":
        return ()
    try:
        with open(spec, encoding="utf-8-sig") as file:
            words = {line.partition("#")[0].strip() for line in file}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CoderError(f"stop words {spec}: {reason}; give default, none or a file of one word a line") from error
    return words - {""}


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts by word: word w is in ``counts[w]`` captions, has type ``types[w]`` (None: not a concept) and the surface
    forms ``forms[w]``, the most frequent first. ``captions_of`` and ``words_of`` list each (caption, word) pair once,
    sorted."""

    captions: int
    words: list[str]
    types: list[Kind]
    forms: list[list[str]]
    counts: np.ndarray
    captions_of: np.ndarray
    words_of: np.ndarray

    def candidates(self, kind: str) -> list[int]:
        """The words of a type, the most frequent first, equally frequent ones by alphabet."""
        words = [number for number, type_ in enumerate(self.types) if type_ == kind]
        return sorted(words, key=lambda number: (-self.counts[number], self.words[number]))


def count_words(
    captions: Iterable[str], tagger: Tagger, *, lemmas: bool = True, stop_words: Collection[str] = DEFAULT_STOP_WORDS
) -> Tally:
    """Count the words of captions in one pass.

    Taggers err on single tokens, so each surface form has one type everywhere: the one that most of its tokens have.
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
    for index, (_, forms) in enumerate(words.values()):
        word_of[[numbers[form] for form in forms]] = index
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
    """Words with their types and surface forms, the most frequent first, from the readings of the forms.

    Forms of the same lemma and type are one word. Nouns that rarely occur as their lemma are named by their most frequent
    form ("shorts", since "short" is an adjective; "jeans"), unless they are verbs often mistaken for nouns ("leaps"). Words
    with the same name (the verb and the noun "jump") are merged; the type of most tokens counts.
    """
    tokens = {form: of_form.total() for form, of_form in readings.items()}
    groups: dict[Reading, list[str]] = {}
    for form, of_form in readings.items():
        lemma, kind = _reading(of_form)
        if form not in stopped and lemma not in stopped:
            groups.setdefault((lemma if lemmas else form, kind), []).append(form)
    named: dict[str, list[str]] = {}
    for (lemma, kind), forms in groups.items():
        forms.sort(key=lambda form: (-tokens[form], form))
        as_lemma = sum(tokens[form] for form in forms if form == lemma)
        verbs = sum(times for form in forms for (_, type_), times in readings[form].items() if type_ == "motion")
        total = sum(tokens[form] for form in forms)
        lemma_is_other_word = lemma in readings and not as_lemma
        plural = kind == "object" and max(as_lemma, verbs) < _RARE * total and (lemma_is_other_word or total >= _MIN_TOKENS)
        named.setdefault(forms[0] if plural or not is_word(lemma) else lemma, []).extend(forms)
    return {
        name: (_kind(sum((readings[form] for form in forms), Counter())), sorted(forms, key=lambda f: (-tokens[f], f)))
        for name, forms in named.items()
    }


def _reading(readings: Counter[Reading]) -> Reading:
    """The lemma and type of a surface form: its type, and the most frequent lemma with that type."""
    kind = _kind(readings)
    kinds = (kind, "name") if kind == "object" else (kind,)
    return min((-times, lemma) for (lemma, type_), times in readings.items() if type_ in kinds)[1], kind


def _kind(readings: Counter[Reading]) -> Kind:
    """The type of most tokens.

    Proper nouns count as objects only without other readings: in lower case, taggers mistake unknown words ("tan") for names.
    """
    kinds: Counter[Kind] = Counter()
    for (_, kind), times in readings.items():
        kinds[kind] += times
    names = kinds.pop("name", 0)
    if not kinds:
        kinds["object"] = names
    order: tuple[Kind, ...] = (*TYPES, None)
    return max(order, key=lambda kind: kinds[kind])  # the first of equal ones
