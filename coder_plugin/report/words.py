"""Which token positions of a caption belong to which word: pieces joined, special tokens and punctuation left out.

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

#: Letters and digits, with hyphens or apostrophes inside: "t-shirt" is one word, though tokenizers split it.
_WORD = re.compile(r"[^\W_]+(?:[-'\u2019][^\W_]+)*")
#: Words that name nothing visible: articles, pronouns, prepositions, auxiliaries, conjunctions.
FUNCTION_WORDS = frozenset(
    "a an the this that these those some any each every all both no not it its he she they them him her his their who whom "
    "whose which what there here i you we us my your our me is are was were be been being am has have had do does did can "
    "could will would may might must shall should to of in on at by for with from into onto over under up down out off as "
    "about across after against along among around before behind below beneath beside besides between beyond during inside "
    "near next outside past through toward towards upon while and or but so if than then too very just also s t 's n't".split()
)
log = logging.getLogger(__name__)


class Word(NamedTuple):
    """A word of a caption in lower case, and the token positions of its pieces."""

    text: str
    positions: tuple[int, ...]


def split_words(text: str) -> list[str]:
    """The words of a text in lower case.

    Example:
        >>> split_words("A man's T-shirt, 3 dogs")
        ['a', "man's", 't-shirt', '3', 'dogs']
    """
    return _WORD.findall(text.lower())


class WordReader:
    """Tokenizes captions and finds the words among the tokens.

    Args:
        tokenizer: one of ``backbones.tokenizers``, or one of open_clip's.

    Raises:
        CoderError: the tokenizer does not report which characters a token stands for.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._locate = locator(tokenizer)
        inner = getattr(tokenizer, "tokenizer", None)
        self._word_level = isinstance(tokenizer, WordTokenizer)  # its normalised text has no spaces between words
        self._unknown = tokenizer.mask if self._word_level else getattr(inner, "unk_token_id", None)

    def ids(self, caption: str) -> Tensor:
        """Token ids [1, T] int64."""
        return self._locate([caption])[0]

    def words(self, caption: str, valid: Sequence[bool]) -> list[Word]:
        """The words of a caption in order. Words with an unknown token are left out: all unknown words share one embedding.

        Args:
            valid: [T], the caption's text mask.
        """
        ids, [located] = self._locate([caption])
        if not located.matched:
            log.warning("%r: its tokens cannot be matched to its words; no words are shown", caption)
            return []
        text = located.view
        spans = located.spans if self._word_level else [match.span() for match in _WORD.finditer(text)]
        pieces: list[list[int]] = [[] for _ in spans]
        unknown = set()
        for position, ((start, end), is_valid) in enumerate(zip(located.spans, valid, strict=False)):
            # a token that reaches into two words counts for the first
            owner = next((number for number, span in enumerate(spans) if start < span[1] and end > span[0]), None)
            if owner is not None and is_valid:
                pieces[owner].append(position)
                if ids[0, position] == self._unknown:
                    unknown.add(owner)
        words = [Word(text[start:end].lower(), tuple(each)) for (start, end), each in zip(spans, pieces, strict=True)]
        return [
            word
            for number, word in enumerate(words)
            if word.positions and number not in unknown and any(map(str.isalnum, word.text))
        ]
