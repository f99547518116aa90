"""``text_tags``: the class of the word that each token of a caption is of (SelfAlign's word classes, METHODS 9).

Letters: B captions, T positions of a tokenizer's ids.

Taggers and tokenizers part a text each in its own way, and clean it first. They meet in its letters, digits and signs,
which both keep in order: case, accents, spaces and the forms that Unicode calls compatible do not count, nor does a sign that
a tokenizer drops.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones.tokenizers import Located
from coder_plugin.concepts.tagging import Tagger, Token, clean, scenes_tagger, spacy_tagger
from coder_plugin.data.item import stable_hash
from coder_plugin.data.source import isolated_rng
from coder_plugin.data.spans import locator

#: The classes: no word (start, end, padding, punctuation), NOUN and PROPN, VERB, ADJ, and every other word, AUX among them.
NONE, NOUN, VERB, ADJECTIVE, OTHER = range(5)
NAMES = ("none", "noun", "verb", "adjective", "other")
WORDS = NAMES[1:]
_CLASS_OF = {"NOUN": NOUN, "PROPN": NOUN, "VERB": VERB, "ADJ": ADJECTIVE}


@dataclass
class Learned:
    """What tagging in one process has found since it was last asked: classes by caption, and how many tokens there were of
    each class, how many captions, and how many of them ``unmatched``."""

    classes: dict[int, bytes | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class Tags:
    """Captions and a tokenizer -> ids and word classes. It travels to workers as a name, and loads the tagger where it is
    called first.

    Tagging is slow and captions come again, so the classes of a caption are kept; the loader brings what its workers
    :meth:`take` back to the main process (:meth:`add`), for workers live no longer than an epoch.

    Args:
        tagger: a spaCy pipeline by name or folder, or ``"scenes"``, as ``coder-plugin concepts`` names it.
        kept: so many captions at most have their classes kept, the last ones: the default is all of COCO's.
    """

    def __init__(self, tagger: str, *, kept: int = 600_000) -> None:
        self.tagger, self.kept = tagger, kept
        self._loaded: Tagger | None = None
        self._classes: dict[int, bytes | None] = {}
        self._learned = Learned()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_learned": Learned()}

    def load(self) -> Tagger:
        """The tagger. :class:`CoderError` where spaCy or the pipeline is not there."""
        if self._loaded is None:
            with isolated_rng("tagger"):  # spaCy draws while it is imported
                self._loaded = scenes_tagger() if self.tagger == "scenes" else spacy_tagger(self.tagger)
        return self._loaded

    def __call__(self, captions: list[str], tokenizer: Any) -> tuple[Tensor, Tensor]:
        """The ids [B, T] that ``tokenizer(captions)`` gives, of the same draws, and the class in 0..4 of each, int64 [B, T].

        Every piece of a word has its word's class, a masked or replaced one too, and one that is the space before it alone;
        a piece of several words the first's. A caption whose
        tokens cannot be told apart, or in which the tagger's words are not found, has 4 for all its words.
        """
        ids, located = locator(tokenizer)(captions)
        tags = torch.zeros_like(ids)
        counts = self._learned.counts
        for row, text, classes in zip(tags, located, self._classes_of(located), strict=True):
            counts["captions"] += 1
            if classes is None or not text.matched:
                counts["unmatched"] += 1
                classes = _untagged(text.view)
            found = [_first(classes[start:end]) for start, end in text.spans]
            row[: len(found)] = torch.tensor(found)
        for number, tokens in enumerate(torch.bincount(tags.flatten(), minlength=len(NAMES)).tolist()):
            counts[NAMES[number]] += tokens
        return ids, tags

    def take(self) -> Learned:
        """What was found since the last call."""
        learned, self._learned = self._learned, Learned()
        return learned

    def add(self, classes: Mapping[int, bytes | None]) -> None:
        """Keep the classes that another process has found."""
        self._classes.update(classes)
        for oldest in list(islice(self._classes, max(0, len(self._classes) - self.kept))):
            del self._classes[oldest]

    def _classes_of(self, located: list[Located]) -> list[bytes | None]:
        keys = [stable_hash(each.text, each.view) for each in located]
        new = {key: each for key, each in zip(keys, located, strict=True) if key not in self._classes}
        found = dict(zip(new, self._tag(new.values()), strict=True)) if new else {}
        classes = [found[key] if key in found else self._classes[key] for key in keys]
        self._learned.classes.update(found)
        self.add(found)
        return classes

    def _tag(self, located: Iterable[Located]) -> Iterator[bytes | None]:
        located = list(located)
        # a lone surrogate, half of an emoji, is no text that spaCy takes
        texts = [clean(each.text).encode("utf-8", "ignore").decode() for each in located]
        for each, text, words in zip(located, texts, self.load()(texts), strict=True):
            yield classes_of(each.view, text, words)


def classes_of(view: str, text: str, words: Iterable[Token]) -> bytes | None:
    """The class of each character of ``view``, one byte each, given the words that a tagger found in ``text``.

    A word's class is that of its signs as well ("t-shirt", "'s"). A word that the tagger passed over is another word; a sign
    outside words is none. None where the tagger's words are not in the text, or the view is not the text less some signs.
    """
    keys = _keys(text)
    classes = _marked(keys, words)
    return None if classes is None else _carried(keys, classes, view)


def _marked(keys: str, words: Iterable[Token]) -> bytes | None:
    """The class of each of a text's keys."""
    classes, at = bytearray(_untagged(keys)), 0
    for surface, _, part in words:
        word = _keys(surface)
        if not any(map(str.isalnum, word)):
            continue
        at = keys.find(word, at)
        if at < 0:
            return None
        classes[at : at + len(word)] = bytes([_CLASS_OF.get(part, OTHER)]) * len(word)
        at += len(word)
    return bytes(classes)


def _carried(keys: str, classes: bytes, view: str) -> bytes | None:
    """The class of each character of ``view``, whose keys are these but for some signs."""
    out, at = bytearray(len(view)), 0
    for place, character in enumerate(view):
        if place and unicodedata.category(character).startswith("M"):  # a mark is of the letter that it stands on
            out[place] = out[place - 1]
        for key in _key(character):
            while at < len(keys) and keys[at] != key and not keys[at].isalnum():
                at += 1
            if at == len(keys) or keys[at] != key:
                return None
            out[place] = out[place] or classes[at]
            at += 1
    for place in range(len(view) - 2, -1, -1):
        if view[place].isspace():  # some tokenizers put it with the word behind it
            out[place] = out[place + 1]
    return None if any(map(str.isalnum, keys[at:])) else bytes(out)


def _untagged(text: str) -> bytes:
    return bytes(OTHER if character.isalnum() else NONE for character in text)


def _first(classes: bytes) -> int:
    return (classes.lstrip(b"\0") or b"\0")[0]


def _keys(text: str) -> str:
    return "".join(map(_key, text))


@lru_cache(maxsize=1 << 16)
def _key(character: str) -> str:
    """What of a character is the same before and after taggers' and tokenizers' cleaning; nothing of spaces and marks."""
    plain = _bare(unicodedata.normalize("NFKD", clean(character)))
    return _bare(unicodedata.normalize("NFKD", plain.casefold()))


def _bare(text: str) -> str:
    kinds = ("Mn", "Mc", "Me", "Cs")  # marks, and halves of characters
    return "".join(each for each in text if not each.isspace() and unicodedata.category(each) not in kinds)
