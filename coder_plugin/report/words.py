"""Which positions of a caption are which word: pieces joined, special tokens and punctuation left out.

T text positions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from coder_plugin.backbones.spans import locator
from coder_plugin.backbones.tokenizers import WordTokenizer

#: Letters and digits, with hyphens or apostrophes inside: "t-shirt" is one word, though tokenizers part it.
_WORD = re.compile(r"[^\W_]+(?:[-'\u2019][^\W_]+)*")
#: Words that show nothing by themselves: articles, pronouns, prepositions, auxiliaries, conjunctions.
FUNCTION_WORDS = frozenset(
    "a an the this that these those some any each every all both no not it its he she they them him her his their who whom "
    "whose which what there here i you we us my your our me is are was were be been being am has have had do does did can "
    "could will would may might must shall should to of in on at by for with from into onto over under up down out off as "
    "about across after against along among around before behind below beneath beside besides between beyond during inside "
    "near next outside past through toward towards upon while and or but so if than then too very just also s t 's n't".split()
)
log = logging.getLogger(__name__)


class Word(NamedTuple):
    """A word of a caption, in lower case, and the positions of its pieces."""

    text: str
    positions: tuple[int, ...]


def split(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


class WordReader:
    """Captions -> ids, and which of their positions are words.

    Args:
        tokenizer: ours (``backbones.tokenizers``) or open_clip's.

    Raises:
        CoderError: one that does not tell which characters a token is of.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._locate = locator(tokenizer)
        inner = getattr(tokenizer, "tokenizer", None)
        self._of_words = isinstance(tokenizer, WordTokenizer)  # whose view has no spaces to tell them by
        self._unknown = tokenizer.mask if self._of_words else getattr(inner, "unk_token_id", None)

    def ids(self, caption: str) -> Tensor:
        """[1, T] int64."""
        return self._locate([caption])[0]

    def words(self, caption: str, valid: Sequence[bool]) -> list[Word]:
        """The words of a caption, in order. A word that the tokenizer does not know is left out: its embedding is that of any
        unknown word.

        Args:
            valid: [T], the caption's text mask.
        """
        ids, [located] = self._locate([caption])
        if not located.matched:
            log.warning("%r: no telling which of its tokens are which word: it has none here", caption)
            return []
        view = located.view
        words = located.spans if self._of_words else [match.span() for match in _WORD.finditer(view)]
        pieces: list[list[int]] = [[] for _ in words]
        unknown = set()
        for place, ((start, end), counts) in enumerate(zip(located.spans, valid, strict=False)):
            # a piece that reaches into two words is of the first
            of = next((number for number, word in enumerate(words) if start < word[1] and end > word[0]), None)
            if of is not None and counts:
                pieces[of].append(place)
                if ids[0, place] == self._unknown:
                    unknown.add(of)
        found = [Word(view[start:end].lower(), tuple(places)) for (start, end), places in zip(words, pieces, strict=True)]
        known = [word for number, word in enumerate(found) if word.positions and number not in unknown]
        return [word for word in known if any(map(str.isalnum, word.text))]
