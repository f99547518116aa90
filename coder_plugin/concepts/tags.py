"""``text_tags``: the word class of each token of a caption, which SelfAlign can restrict its alignment to.

Letters: B captions, T positions of a tokenizer's ids.

Taggers and tokenizers clean and split a text in different ways, but both keep its letters, digits and punctuation in order.
These are aligned here regardless of case, accents, spaces, compatible Unicode forms, and punctuation that a tokenizer drops.
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

from coder_plugin.backbones.spans import locator
from coder_plugin.backbones.tokenizers import Located
from coder_plugin.concepts.tagging import Tagger, Token, clean, make_tagger
from coder_plugin.data.item import stable_hash
from coder_plugin.data.source import isolated_rng

#: Classes: no word (start, end, padding, punctuation); NOUN and PROPN; VERB; ADJ; any other word, such as AUX.
NONE, NOUN, VERB, ADJECTIVE, OTHER = range(5)
NAMES = ("none", "noun", "verb", "adjective", "other")
WORDS = NAMES[1:]
_CLASS_OF = {"NOUN": NOUN, "PROPN": NOUN, "VERB": VERB, "ADJ": ADJECTIVE}


@dataclass
class Learned:
    """What one process has tagged since the last :meth:`Tags.take`: classes by caption, and counts of tokens by class,
    of captions, and of ``unmatched`` captions."""

    classes: dict[int, bytes | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class Tags:
    """From captions and a tokenizer to ids and word classes. It loads its tagger at the first call, in each process.

    Tagging is slow and captions repeat, so their classes are cached. The loader returns what its workers :meth:`take` to the
    main process (:meth:`add`), since workers live for one epoch.

    Args:
        tagger: a spaCy pipeline by name or folder, or ``"scenes"``, as for ``coder-plugin concepts``.
        cache_size: maximum number of captions whose classes are cached; the default holds all of COCO's.

    Raises:
        CoderError: at the first call, where spaCy or the pipeline is missing.

    Example:
        >>> import torch
        >>> from coder_plugin.backbones.tokenizers import Located
        >>> class Characters:
        ...     def located(self, captions):
        ...         ids = torch.tensor([[ord(character) for character in caption] for caption in captions])
        ...         spans = [(start, start + 1) for start in range(ids.shape[1])]
        ...         return ids, [Located(caption, caption, spans, True) for caption in captions]
        >>> ids, tags = Tags("scenes")(["a red box"], Characters())
        >>> [NAMES[tag] for tag in tags[0][[0, 2, 6]]]
        ['other', 'adjective', 'noun']
    """

    def __init__(self, tagger: str, *, cache_size: int = 600_000) -> None:
        self.tagger, self.cache_size = tagger, cache_size
        self._loaded: Tagger | None = None
        self._classes: dict[int, bytes | None] = {}
        self._learned = Learned()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_learned": Learned()}

    def load(self) -> Tagger:
        """The tagger; ``CoderError`` where spaCy or the pipeline is missing."""
        if self._loaded is None:
            with isolated_rng("tagger"):  # importing spaCy uses random numbers
                self._loaded = make_tagger(self.tagger)
        return self._loaded

    def __call__(self, captions: list[str], tokenizer: Any) -> tuple[Tensor, Tensor]:
        """The ids [B, T] of ``tokenizer(captions)``, and the class 0 to 4 of each id, int64 [B, T].

        Every token of a word has the word's class, also a masked or replaced one and a space before it; a token of several
        words has the first word's. All words of a caption are of class 4 where its tokens cannot be located in it, or the
        tagger's words are not in it.
        """
        ids, located = locator(tokenizer)(captions)
        tags = torch.zeros_like(ids)
        counts = self._learned.counts
        for row, text, classes in zip(tags, located, self._classes_of(located), strict=True):
            counts["captions"] += 1
            if classes is None or not text.matched:
                counts["unmatched"] += 1
                classes = _untagged(text.view)
            tokens = [_first(classes[start:end]) for start, end in text.spans]
            row[: len(tokens)] = torch.tensor(tokens)
        for name, number in zip(NAMES, torch.bincount(tags.flatten(), minlength=len(NAMES)).tolist(), strict=True):
            counts[name] += number
        return ids, tags

    def check(self, tokenizer: Any) -> None:
        """Raise ``CoderError`` if the tokenizer does not report the positions of its tokens."""
        locator(tokenizer)

    def take(self) -> Learned:
        """What was tagged since the last call."""
        learned, self._learned = self._learned, Learned()
        return learned

    def add(self, classes: Mapping[int, bytes | None]) -> None:
        """Cache the classes that another process has computed."""
        self._classes.update(classes)
        for oldest in list(islice(self._classes, max(0, len(self._classes) - self.cache_size))):
            del self._classes[oldest]

    def _classes_of(self, located: list[Located]) -> list[bytes | None]:
        keys = [stable_hash(each.text, each.view) for each in located]
        new = {key: each for key, each in zip(keys, located, strict=True) if key not in self._classes}
        tagged = dict(zip(new, self._tag(new.values()), strict=True)) if new else {}
        classes = [tagged[key] if key in tagged else self._classes[key] for key in keys]
        self._learned.classes.update(tagged)
        self.add(tagged)
        return classes

    def _tag(self, located: Iterable[Located]) -> Iterator[bytes | None]:
        located = list(located)
        # spaCy refuses lone surrogates, halves of an emoji
        texts = [clean(each.text).encode("utf-8", "ignore").decode() for each in located]
        for each, text, words in zip(located, texts, self.load()(texts), strict=True):
            yield classes_of(each.view, text, words)


def classes_of(view: str, text: str, words: Iterable[Token]) -> bytes | None:
    """The class of each character of ``view``, one byte each, from the words of ``text`` as a tagger returned them.

    Punctuation inside a word has the word's class ("t-shirt", "'s"), outside words it has none. Words that the tagger skipped
    are "other". None where the tagger's words are not in the text, or ``view`` is not the text without some punctuation.
    """
    keys = _keys(text)
    classes = _classes_of_keys(keys, words)
    return None if classes is None else _transfer(keys, classes, view)


def _classes_of_keys(keys: str, words: Iterable[Token]) -> bytes | None:
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


def _transfer(keys: str, classes: bytes, view: str) -> bytes | None:
    """The class of each character of ``view``, whose keys are ``keys`` without some punctuation."""
    out, at = bytearray(len(view)), 0
    for index, character in enumerate(view):
        if index and unicodedata.category(character).startswith("M"):  # an accent has the class of its letter
            out[index] = out[index - 1]
        for key in _key(character):
            while at < len(keys) and keys[at] != key and not keys[at].isalnum():
                at += 1
            if at == len(keys) or keys[at] != key:
                return None
            out[index] = out[index] or classes[at]
            at += 1
    for index in range(len(view) - 2, -1, -1):
        if view[index].isspace():  # some tokenizers join a space with the following word
            out[index] = out[index + 1]
    return None if any(map(str.isalnum, keys[at:])) else bytes(out)


def _untagged(text: str) -> bytes:
    return bytes(OTHER if character.isalnum() else NONE for character in text)


def _first(classes: bytes) -> int:
    return (classes.lstrip(b"\0") or b"\0")[0]


def _keys(text: str) -> str:
    return "".join(map(_key, text))


@lru_cache(maxsize=1 << 16)
def _key(character: str) -> str:
    """The part of a character that survives taggers' and tokenizers' cleaning: nothing of spaces and accents."""
    plain = _strip_marks(unicodedata.normalize("NFKD", clean(character)))
    return _strip_marks(unicodedata.normalize("NFKD", plain.casefold()))


def _strip_marks(text: str) -> str:
    kinds = ("Mn", "Mc", "Me", "Cs")  # accents, and surrogates
    return "".join(each for each in text if not each.isspace() and unicodedata.category(each) not in kinds)
