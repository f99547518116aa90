"""Positive captions from an image's captions: joined to say more, truncated to say less (AsCL, Asymmetry-II, -III).

They are generated from raw text in the loader's workers, with Python's ``random``, which the loader seeds for each
sample: the positive of a caption depends on the seed, the epoch, the image and the caption only. See
docs/equations.md#ascl.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

from coder_plugin.data.item import NO_POSITIVE
from coder_plugin.errors import CoderError
from coder_plugin.noise.expression import make_parts

_PIECE = re.compile(r"\S+")


class Positive(Protocol):
    """A generator: what a plugin of the group ``coder_plugin.positives`` returns for its keyword-only options."""

    def __call__(self, caption: str, others: tuple[str, ...]) -> str | None:
        """A positive of a caption, from it and the image's other captions, or None if there is none.

        Random numbers must come from Python's ``random``."""


class Join:
    """Asymmetry-II (AsCL): a caption followed by another caption of its image, each equally often.

    A caption is not joined with a copy of itself; case and spaces do not matter.

    Example:
        >>> Join()("a red box", ("a box on a table", "A  red box"))
        'a red box a box on a table'
    """

    def __call__(self, caption: str, others: tuple[str, ...]) -> str | None:
        normal = _normal(caption)
        different = [other for other in others if _normal(other) not in ("", normal)]
        return f"{caption.strip()} {random.choice(different).strip()}" if different else None


class Truncate:
    """Asymmetry-III (AsCL): a proper prefix of a caption. The paper prints no lengths.

    A word is separated by spaces and contains a letter or a digit; the prefix ends with a word. A text without spaces,
    as in Chinese, is one word.

    Args:
        shortest, longest: bounds of the share of words in the prefix, drawn uniformly and rounded; in (0, 1].
        words: smallest number of words in the prefix, >= 1. A caption without more words has no positive.

    Raises:
        ValueError: not 0 < shortest <= longest <= 1, or ``words`` < 1.

    Example:
        >>> Truncate(shortest=0.5, longest=0.5)("two dogs run on the grass .", ())
        'two dogs run'
    """

    def __init__(self, *, shortest: float = 0.4, longest: float = 0.8, words: int = 3) -> None:
        if not 0 < shortest <= longest <= 1:
            raise ValueError(f"0 < shortest <= longest <= 1 must hold, got shortest={shortest}, longest={longest}")
        if words < 1:
            raise ValueError(f"words must be 1 or more, got {words}")
        self.shortest, self.longest, self.words = shortest, longest, words

    def __call__(self, caption: str, others: tuple[str, ...]) -> str | None:
        ends = [piece.end() for piece in _PIECE.finditer(caption) if any(map(str.isalnum, piece.group()))]
        if len(ends) <= self.words:
            return None
        length = round(random.uniform(self.shortest, self.longest) * len(ends))
        length = min(max(length, self.words), len(ends) - 1)
        return caption[: ends[length - 1]].strip()


class Positives:
    """One positive for a caption, from one of the generators that have one, each equally often.

    Args:
        expression: ``NAME`` or ``NAME(option=value,…)``, several of them joined with ``+``; the names are those of the
            entry-point group ``coder_plugin.positives``.

    Raises:
        CoderError: an expression that cannot be parsed, or an unknown name or option.

    Example:
        >>> Positives("join")("a red box", ())
        ('a red box', 'none')
    """

    def __init__(self, expression: str = "join+truncate") -> None:
        self.expression = expression
        self._generators: Sequence[tuple[str, Positive]] = make_parts("positives", expression)

    def __call__(self, caption: str, others: tuple[str, ...]) -> tuple[str, str]:
        """The positive and the name of its generator; where none is possible, the caption and ``"none"``."""
        # the first generator with a positive, in random order, is each of those with one equally often
        for name, generator in random.sample(self._generators, len(self._generators)):
            if (positive := generator(caption, others)) is None:
                continue
            if not isinstance(positive, str):
                raise CoderError(f"{name!r} in coder_plugin.positives returned {positive!r}, not a text")
            return positive, name
        return caption, NO_POSITIVE


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
