"""From captions to token ids for the region models: any transformers tokenizer, or words of a vocabulary.

Word dropout in training follows VSE-infinity: of the dropped words 50 % become the mask token, 10 % a random token, and 40 %
are deleted. All pieces of a word are treated alike. All words of a text may be deleted.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError

_CLITIC = re.compile(r"(?<=\w)(n't|'(?:s|m|d|ll|re|ve))\b")
_WORD = re.compile(r"n't\b|'(?:s|m|d|ll|re|ve)\b|[^\W_]+(?:[.,]\d+)*(?:-[^\W_]+)*|[^\w\s]")
#: The first ids of every vocabulary, in SCAN's order.
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")
Span = tuple[int, int]
#: A word of a text: the ids of its pieces, and the characters of each piece.
Word = tuple[list[int], list[Span]]


class Located(NamedTuple):
    """The characters that each of a text's token ids stands for.

    Args:
        text: the original text, which taggers read.
        view: the text after the tokenizer's normalisation, possibly without spaces.
        spans: position t stands for ``view[slice(*spans[t])]``; the start token has the empty span (0, 0). The end token and
            padding follow the last span.
        matched: False if the tokenizer does not tell the characters of a position; its span is then all of ``view``.
    """

    text: str
    view: str
    spans: list[Span]
    matched: bool = True


class Tokenizer:
    """Texts -> ids int64 [B, T] with start and end tokens, truncated or padded to T.

    Args:
        context_length: T, >= 3.
        word_dropout: probability that a word is dropped, in [0, 1); 0 outside training.
    """

    start: int
    end: int
    pad: int
    mask: int
    size: int

    def __init__(self, *, context_length: int, word_dropout: float = 0.0) -> None:
        if context_length < 3:
            raise CoderError(f"context length must be >= 3 (start, a token, end), got {context_length}")
        if not 0 <= word_dropout < 1:
            raise CoderError(f"word dropout must be in [0, 1), got {word_dropout}")
        self.context_length, self.word_dropout = context_length, word_dropout

    def read(self, texts: list[str]) -> list[tuple[str, list[Word]]]:
        """Each text after normalisation, and its words."""
        raise NotImplementedError

    def __call__(self, texts: str | list[str]) -> Tensor:
        return self.located(texts)[0]

    def located(self, texts: str | list[str]) -> tuple[Tensor, list[Located]]:
        """The ids [B, T], and the characters of each position.

        With word dropout the two belong together: a masked or replaced word keeps its span, and a deleted word has none."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        out = torch.full((len(texts), self.context_length), self.pad, dtype=torch.long)
        located = []
        for row, text, (view, words) in zip(out, texts, self.read(texts), strict=True):
            pieces = [piece for ids, spans in words for piece in zip(self._drop_word(ids), spans, strict=False)]
            pieces = pieces[: self.context_length - 2]
            row[: len(pieces) + 2] = torch.tensor([self.start, *(number for number, _ in pieces), self.end])
            located.append(Located(text, view, [(0, 0), *(span for _, span in pieces)]))
        return out, located

    def _drop_word(self, word: list[int]) -> list[int]:
        if not self.word_dropout or random.random() >= self.word_dropout:
            return word
        chance = random.random()
        if chance < 0.5:
            return [self.mask] * len(word)
        if chance < 0.6:
            return [random.randrange(self.size) for _ in word]
        return []


class SubwordTokenizer(Tokenizer):
    """A fast tokenizer of transformers; slow ones do not tell which pieces form a word."""

    def __init__(self, tokenizer: Any, *, context_length: int, word_dropout: float = 0.0) -> None:
        super().__init__(context_length=context_length, word_dropout=word_dropout)
        if not tokenizer.is_fast:
            raise CoderError(f"{type(tokenizer).__name__} is not a fast tokenizer: it does not tell which pieces form a word")
        self.tokenizer = tokenizer
        start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.start = tokenizer.bos_token_id if start is None else start
        self.end = tokenizer.eos_token_id if end is None else end
        self.pad, self.size = tokenizer.pad_token_id, len(tokenizer)
        self.mask = tokenizer.unk_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        if None in (self.start, self.end, self.pad):
            raise CoderError(f"{type(tokenizer).__name__} has no start, end or padding token; a BERT-like tokenizer has all")

    def read(self, texts: list[str]) -> list[tuple[str, list[Word]]]:
        encoded = self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)
        out = []
        for text, row in zip(texts, encoded.encodings, strict=True):
            words: dict[int | None, Word] = {}
            for piece, word, span in zip(row.ids, row.word_ids, row.offsets, strict=True):
                ids, spans = words.setdefault(word, ([], []))
                ids.append(piece)
                spans.append(span)
            out.append((text, list(words.values())))
        return out


class WordTokenizer(Tokenizer):
    """Lower-case words of a vocabulary that begins with :data:`SPECIAL`; any other word becomes ``<unk>``.

    Example:
        >>> WordTokenizer([*SPECIAL, "a", "dog"], context_length=6)("A dog runs").tolist()
        [[1, 4, 5, 3, 2, 0]]
    """

    def __init__(self, vocabulary: Sequence[str], *, context_length: int, word_dropout: float = 0.0) -> None:
        super().__init__(context_length=context_length, word_dropout=word_dropout)
        self.ids = {word: number for number, word in enumerate(check_vocabulary(vocabulary))}
        self.pad, self.start, self.end, self.mask = range(4)
        self.size = len(self.ids)

    def read(self, texts: list[str]) -> list[tuple[str, list[Word]]]:
        out = []
        for words in map(split_words, texts):
            spans = pairwise(accumulate(map(len, words), initial=0))
            ids = [self.ids.get(word, self.mask) for word in words]
            out.append(("".join(words), [([number], [span]) for number, span in zip(ids, spans, strict=True)]))
        return out


def split_words(text: str) -> list[str]:
    """Lower-case words and punctuation of a text by the Penn Treebank's rules, as in the released vocabularies.

    ``man's`` becomes ``man 's`` and ``don't`` ``do n't``; ``t-shirt`` and ``3.5`` are one word each.

    Example:
        >>> split_words("A man's t-shirt.")
        ['a', 'man', "'s", 't-shirt', '.']
    """
    return _WORD.findall(_CLITIC.sub(r" \1", text.lower()))


def build_vocabulary(captions: Iterable[str], *, least: int = 4) -> list[str]:
    """:data:`SPECIAL`, then the words that occur at least ``least`` times (4 in SCAN and VSRN), most frequent first."""
    counts = Counter(word for caption in captions for word in split_words(caption))
    words = sorted((word for word, count in counts.items() if count >= least), key=lambda word: (-counts[word], word))
    if not words:
        raise CoderError(f"no word occurs {least} times in the captions; a vocabulary needs more captions")
    return [*SPECIAL, *words]


def read_vocabulary(path: str) -> list[str]:
    """Read a vocabulary file: a JSON list of words, or ``{"word2idx": …}`` as in SCAN and VSRN.

    Raises:
        CoderError: a file that cannot be read, or that is neither.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise CoderError(f"vocabulary {path} cannot be read: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("word2idx"), dict):
        ids: dict[str, Any] = content["word2idx"]
        if not all(type(number) is int for number in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
            raise CoderError(f"vocabulary {path}: the ids of word2idx are not 0 to {len(ids) - 1}, each once")
        content = sorted(ids, key=ids.__getitem__)
    if not (isinstance(content, list) and all(isinstance(word, str) for word in content)):
        raise CoderError(f"vocabulary {path} is neither a list of words nor SCAN's word2idx")
    try:
        return check_vocabulary(content)
    except CoderError as error:
        raise CoderError(f"vocabulary {path}: {error}") from error


def check_vocabulary(words: Sequence[str]) -> list[str]:
    """The words as a list.

    Raises:
        CoderError: words that are not strings, that do not begin with :data:`SPECIAL`, or that occur twice.
    """
    if others := [word for word in words if not isinstance(word, str)]:
        raise CoderError(f"a vocabulary is a list of words, this one holds {others[0]!r}")
    if tuple(words[:4]) != SPECIAL:
        raise CoderError(f"a vocabulary must begin with {', '.join(SPECIAL)}; this one begins with {', '.join(words[:4])}")
    if len(set(words)) != len(words):
        raise CoderError(f"{len(words) - len(set(words))} words of the vocabulary occur twice")
    return list(words)
