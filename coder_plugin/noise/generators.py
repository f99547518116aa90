"""Asymmetry-I of AsCL: texts that do not describe their image, by noise in word embeddings (docs/equations.md#ascl).

The paper prints no rates; the defaults are ours. All classes change words only: special tokens, padding and texts
without words stay unchanged.

Shapes: n texts, T positions, E channels, K candidates of a draw.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.noise.base import Noise
from coder_plugin.noise.expression import make_parts
from coder_plugin.tensors import upcast

#: Draws per text. Three different words keep their order in 1 of 6 draws, so 1 text in 6^4 needs the final rotation.
_SHUFFLES = 4


class Gaussian(Noise):
    """Adds N(0, (std * RMS)^2) to every element. RMS is over the text's words and channels, so ``std`` does not depend
    on a tower's scale. No gradient flows through the RMS.

    Args:
        std: > 0, in units of the RMS.

    Raises:
        ValueError: std out of range.

    Example:
        >>> embeddings, words = torch.ones(1, 2, 4), torch.tensor([[True, False]])
        >>> (Gaussian(std=0.5)(embeddings, words) != embeddings).any(2).tolist()
        [[True, False]]
    """

    def __init__(self, *, std: float = 0.1) -> None:
        if not 0 < std < math.inf:
            raise ValueError(f"std must be > 0 and finite, got {std}")
        self.std = std

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        exact = upcast(embeddings)
        valid = exact.detach().masked_fill(~words[..., None], 0)
        elements = words.sum(1).clamp(min=1) * embeddings.shape[2]
        rms = (valid.square().sum((1, 2)) / elements).sqrt()  # [n]
        return (exact + self.std * rms[:, None, None] * torch.randn_like(exact)).to(embeddings.dtype)


class Shuffle(Noise):
    """Permutes a text's words so that at least one position changes, unless it has fewer than two different words.

    All orders that change the text are equally likely: permutations are drawn uniformly, and again if one changed
    nothing. If the last draw changed nothing either, the words are rotated by one position. This is exact for two words
    and affects at most 0.1 % of texts with three or more different words. The number of draws is fixed, so nothing
    synchronises with the device.

    Example:
        >>> embeddings, words = torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[True, True, False]])
        >>> Shuffle()(embeddings, words).flatten().tolist()
        [2.0, 1.0, 9.0]
    """

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        before = embeddings.detach()
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        word_positions = _words_by(positions, words)
        first, *draws = torch.rand(_SHUFFLES, *words.shape, device=words.device)
        rotation = positions.scatter(1, word_positions[:, :1], words.shape[1])  # the first word goes last
        source = positions.scatter(1, word_positions, _words_by(first, words))
        for keys in (*draws, rotation):
            same = ((_rows(before, source) == before).all(2) | ~words).all(1, keepdim=True)
            source = positions.scatter(1, word_positions, _words_by(keys, words)).where(same, source)
        return _rows(embeddings, source)


class Cutoff(Noise):
    """Base of noise that sets something of a text to zero.

    Args:
        rate: probability of each word, channel or element, in [0, 1]. At least one is set to zero, and one keeps its
            value if there are two or more.

    Raises:
        ValueError: rate out of range.
    """

    def __init__(self, *, rate: float = 0.15) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        self.rate = rate

    def drawn(self, allowed: Tensor) -> Tensor:
        """Bool [n, K], True with probability ``rate`` where ``allowed`` [n, K] is: in each row at least for the
        smallest draw, and never for the largest if two or more are allowed."""
        draws = torch.rand(allowed.shape, device=allowed.device)
        smallest = draws.masked_fill(~allowed, math.inf).amin(1, keepdim=True)
        largest = draws.masked_fill(~allowed, -math.inf).amax(1, keepdim=True)
        return allowed & ((draws == smallest) | ((draws < self.rate) & (draws < largest)))


class TokenCutoff(Cutoff):
    """Sets the embeddings of whole words to zero, each with probability ``rate`` (:class:`Cutoff`).

    Example:
        >>> TokenCutoff(rate=0.0)(torch.ones(1, 3, 2), torch.ones(1, 3, dtype=torch.bool)).sum().item()
        4.0
    """

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        return embeddings.masked_fill(self.drawn(words)[..., None], 0)


class FeatureCutoff(Cutoff):
    """Sets whole channels to zero, each with probability ``rate`` (:class:`Cutoff`), the same in all words of a text.

    Example:
        >>> FeatureCutoff(rate=1.0)(torch.ones(1, 3, 2), torch.ones(1, 3, dtype=torch.bool)).sum().item()
        3.0
    """

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        channels = words.new_ones(len(words), embeddings.shape[2])
        return embeddings.masked_fill(self.drawn(channels)[:, None], 0)


class Dropout(Cutoff):
    """Sets single elements to zero, each with probability ``rate`` (:class:`Cutoff`), and does not scale up the others
    ("randomly discarded", the paper says).

    Example:
        >>> Dropout(rate=0.0)(torch.ones(1, 3, 2), torch.ones(1, 3, dtype=torch.bool)).sum().item()
        5.0
    """

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        elements = words[..., None].expand_as(embeddings).flatten(1)
        return embeddings.masked_fill(self.drawn(elements).view_as(embeddings), 0)


class Mixture(Noise):
    """Each text gets the noise of one of several generators, each equally often.

    All generators noise the whole batch, and each text takes one of the results. This costs little compared with the
    encoder, and neither draws nor shapes depend on the choice, so nothing synchronises with the device.

    Args:
        of: an expression of the generators (:mod:`coder_plugin.noise.expression`); one that is named twice is chosen
            twice as often.

    Raises:
        CoderError: an expression that cannot be parsed, or an unknown name or option.
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
    """The noise generator of an expression: ``NAME`` or ``NAME(option=value,…)``; several joined with ``+`` are a
    mixture.

    The names are those of the entry-point group ``coder_plugin.negatives``. The cutoff of AsCL's figure 3 is
    ``token_cutoff+feature_cutoff``.

    Raises:
        CoderError: an expression that cannot be parsed, or an unknown name or option.

    Example:
        >>> parse_noise("gaussian(std=0.2)").std, len(parse_noise("shuffle+dropout").generators)
        (0.2, 2)
    """
    parts = _generators(text)
    return parts[0] if len(parts) == 1 else Mixture(of=text)


def _generators(text: str) -> list[Noise]:
    parts = make_parts("negatives", text)
    for name, generator in parts:
        if not isinstance(generator, Noise):
            raise CoderError(
                f"{name!r} in coder_plugin.negatives is not a noise generator: its {type(generator).__name__} is not a "
                "coder_plugin.noise.base.Noise"
            )
    return [generator for _, generator in parts]


def _words_by(keys: Tensor, words: Tensor) -> Tensor:
    """Positions [n, T]: first those of the words, by ascending keys [n, T], then the others in order."""
    greatest = math.inf if keys.is_floating_point() else torch.iinfo(keys.dtype).max
    return keys.masked_fill(~words, greatest).argsort(dim=1, stable=True)


def _rows(embeddings: Tensor, source: Tensor) -> Tensor:
    """[n, T, E]: at each position the embedding of the position ``source`` [n, T] of the same text."""
    return embeddings.gather(1, source[..., None].expand_as(embeddings))
