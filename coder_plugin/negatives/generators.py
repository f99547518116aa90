"""Asymmetry-I of AsCL: texts that say what their image does not show, made by noise in their word embeddings.

METHODS 8; the paper prints no rates. Shapes: n texts, T positions, E channels, K of what is drawn from. What each class
says of a text is of its words alone: special tokens and padding stay as they are, and so does a text without words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional.similarity import raise_precision
from coder_plugin.negatives.base import Noise
from coder_plugin.negatives.expression import make_parts

#: Of three different words, which come back in their own order once in 6 draws, one text in 6^4 needs the last resort.
_SHUFFLES = 4


class Gaussian(Noise):
    """Adds N(0, (std * RMS)^2) to every element; RMS is over the text's own words and channels, so that ``std`` means the
    same for towers of any scale. The gradient does not run through RMS.

    Args:
        std: > 0, in units of that RMS.
    """

    def __init__(self, *, std: float = 0.1) -> None:
        if not 0 < std < math.inf:
            raise ValueError(f"std must be > 0 and finite, got {std}")
        self.std = std

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        exact = raise_precision(embeddings)
        own = exact.detach().masked_fill(~words[..., None], 0)
        elements = words.sum(1).clamp(min=1) * embeddings.shape[2]
        rms = (own.square().sum((1, 2)) / elements).sqrt()  # [n]
        return (exact + self.std * rms[:, None, None] * torch.randn_like(exact)).to(embeddings.dtype)


class Shuffle(Noise):
    """Permutes a text's words among their places, so that it reads otherwise: some place has another embedding than
    before, unless the text has fewer than two different words.

    Each order that reads otherwise is equally likely: permutations are drawn evenly, and anew where one changed nothing.
    After the last draw the words of such a text move on by one place, which only equal words withstand. That is the one
    other order of two words, and the lot of at most one text in a thousand where three or more are all different; so the
    number of draws is fixed and the device is never waited for.
    """

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        before = embeddings.detach()
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        places = _words_by(positions, words)
        first, *draws = torch.rand(_SHUFFLES, *words.shape, device=words.device)
        move_on = positions.scatter(1, places[:, :1], words.shape[1])  # the first word is the last one now
        source = positions.scatter(1, places, _words_by(first, words))
        for keys in (*draws, move_on):
            same = ((_rows(before, source) == before).all(2) | ~words).all(1, keepdim=True)
            source = positions.scatter(1, places, _words_by(keys, words)).where(same, source)
        return _rows(embeddings, source)


class TokenCutoff(Noise):
    """Sets the embeddings of whole words to zero.

    Args:
        rate: in [0, 1], each word's probability. Whatever it is, a text loses one word at least, and keeps one if it has
            two or more: a text of one word is only special tokens then.
    """

    def __init__(self, *, rate: float = 0.15) -> None:
        self.rate = _checked(rate)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        return embeddings.masked_fill(_drawn(words, self.rate)[..., None], 0)


class FeatureCutoff(Noise):
    """Sets whole channels of a text to zero, the same ones in all its words.

    Args:
        rate: in [0, 1], each channel's probability. Whatever it is, a text loses one channel at least, and keeps one if
            E > 1.
    """

    def __init__(self, *, rate: float = 0.15) -> None:
        self.rate = _checked(rate)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        channels = words.new_ones(len(words), embeddings.shape[2])
        return embeddings.masked_fill(_drawn(channels, self.rate)[:, None], 0)


class Dropout(Noise):
    """Sets single elements to zero; the others are not scaled up ("randomly discarded", the paper says).

    Args:
        rate: in [0, 1], each element's probability. Whatever it is, a text loses one element at least, and keeps one if it
            has two or more.
    """

    def __init__(self, *, rate: float = 0.15) -> None:
        self.rate = _checked(rate)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        elements = words[..., None].expand_as(embeddings).flatten(1)
        return embeddings.masked_fill(_drawn(elements, self.rate).view_as(embeddings), 0)


class Mixture(Noise):
    """Each text gets the noise of one of several generators, drawn evenly.

    All of them noise the whole batch, and each text takes one result: a few passes over the embeddings, which are nothing
    beside the encoder's, and neither the draws nor the shapes depend on who was chosen, so the device is never waited for.

    Args:
        of: an expression (:mod:`coder_plugin.negatives.expression`) of the generators; one named twice is drawn twice as
            often.

    Raises:
        CoderError: an expression, a name or an option that is not known.
    """

    def __init__(self, *, of: str = "gaussian+shuffle+token_cutoff+feature_cutoff+dropout") -> None:
        self.generators = _generators(of)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        chosen = torch.randint(len(self.generators), (len(words), 1, 1), device=words.device)
        noised = embeddings
        for index, generator in enumerate(self.generators):
            noised = generator(embeddings, words).where(chosen == index, noised)
        return noised


def parse_noise(text: str) -> Noise:
    """The noise generator of an expression: ``NAME`` or ``NAME(option=value,…)``; several joined with ``+`` are their mixture.

    The names are those of the entry-point group ``coder_plugin.negatives``. The cutoff of AsCL's figure 3 is
    ``token_cutoff+feature_cutoff``.

    Raises:
        CoderError: an expression, a name or an option that is not known.
    """
    parts = _generators(text)
    return parts[0] if len(parts) == 1 else Mixture(of=text)


def _generators(text: str) -> list[Noise]:
    parts = make_parts("negatives", text)
    for name, made in parts:
        if not isinstance(made, Noise):
            raise CoderError(f"{name!r} in coder_plugin.negatives is at fault: its {type(made).__name__} is no base.Noise")
    return [made for _, made in parts]


def _drawn(allowed: Tensor, rate: float) -> Tensor:
    """Bool [n, K]: True with the probability ``rate`` where ``allowed``. One of a row's allowed ones at least, which is the
    smallest of its draws, and all but the largest at most, if there are two."""
    draws = torch.rand(allowed.shape, device=allowed.device)
    smallest = draws.masked_fill(~allowed, math.inf).amin(1, keepdim=True)
    largest = draws.masked_fill(~allowed, -math.inf).amax(1, keepdim=True)
    return allowed & ((draws == smallest) | ((draws < rate) & (draws < largest)))


def _words_by(keys: Tensor, words: Tensor) -> Tensor:
    """Positions [n, T]: those of the words, by rising keys [n, T], and then the others, in order."""
    greatest = math.inf if keys.is_floating_point() else torch.iinfo(keys.dtype).max
    return keys.masked_fill(~words, greatest).argsort(dim=1, stable=True)


def _rows(embeddings: Tensor, source: Tensor) -> Tensor:
    """[n, T, E]: at each place of a text the embedding from its position ``source`` [n, T]."""
    return embeddings.gather(1, source[..., None].expand_as(embeddings))


def _checked(rate: float) -> float:
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    return rate
