"""Positive captions made from an image's own (AsCL, Asymmetry-II and -III): joined to hold more, cut short to hold less.

They are made on raw text, in the loader's workers, and draw from Python's ``random``, which the loader seeds for each
sample: the positive of a caption depends on nothing but the seed, the epoch, the image and the caption.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

from coder_plugin.data.item import NO_POSITIVE
from coder_plugin.errors import CoderError
from coder_plugin.negatives.expression import make_parts

_PIECE = re.compile(r"\S+")


class Positive(Protocol):
    """What a plugin of the group ``coder_plugin.positives`` makes of its keyword-only options."""

    def __call__(self, caption: str, others: tuple[str, ...]) -> str | None:
        """A positive of a caption, given the image's other captions; None where it is not possible. It draws from Python's
        ``random`` alone."""


class Join:
    """Asymmetry-II (AsCL): a caption and one of the image's others after it, drawn evenly; together they tell more.

    A caption is not joined with its own copy, whatever its case and spaces.
    """

    def __call__(self, caption: str, others: tuple[str, ...]) -> str | None:
        own = _normal(caption)
        different = [other for other in others if _normal(other) not in ("", own)]
        return f"{caption.strip()} {random.choice(different).strip()}" if different else None


class Truncate:
    """Asymmetry-III (AsCL): a proper prefix of a caption, which tells less. The paper prints no lengths.

    A word stands between spaces and has a letter or a digit, so a lone full stop is none; a prefix ends with a word. A text
    written without spaces, such as a Chinese one, is one word.

    Args:
        shortest, longest: bounds of the share of the words that are kept, drawn uniformly and rounded; in (0, 1].
        words: so many are kept at least: a caption must have more of them.

    Raises:
        ValueError: not 0 < shortest <= longest <= 1, or ``words`` < 1.
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
        kept = round(random.uniform(self.shortest, self.longest) * len(ends))
        kept = min(max(kept, self.words), len(ends) - 1)
        return caption[: ends[kept - 1]].strip()


class Positives:
    """One positive for a caption: of those generators of an expression that can make one, each equally often.

    Args:
        expression: ``NAME`` or ``NAME(option=value,…)``, several of them joined with ``+``; the names are those of the
            entry-point group ``coder_plugin.positives``.

    Raises:
        CoderError: an expression, a name or an option that is not known.
    """

    def __init__(self, expression: str = "join+truncate") -> None:
        self.expression = expression
        self._makers: Sequence[tuple[str, Positive]] = make_parts("positives", expression)

    def __call__(self, caption: str, others: tuple[str, ...]) -> tuple[str, str]:
        """The positive and the name of its generator; where none is possible, the caption and ``"none"``."""
        # the first possible one in a random order is each of the possible ones equally often
        for name, make in random.sample(self._makers, len(self._makers)):
            if (made := make(caption, others)) is None:
                continue
            if not isinstance(made, str):
                raise CoderError(f"{name!r} in coder_plugin.positives is at fault: of a caption it made {made!r}, no text")
            return made, name
        return caption, NO_POSITIVE


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
