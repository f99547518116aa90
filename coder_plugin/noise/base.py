"""The base class of noise generators, functions of a text's word embeddings.

Shapes: n texts, T positions, E channels of an embedding. ``words`` is bool [n, T], True at words, not at special tokens
or padding.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Noise:
    """Base of all noise generators, the entry-point group ``coder_plugin.negatives`` (AsCL, Asymmetry-I).

    A subclass takes its options as annotated keyword-only arguments of ``__init__``, raises ``ValueError`` if one is
    out of range, and overrides :meth:`noised`. It has no parameters and no state; it can be pickled and copied. See
    docs/equations.md#ascl.

    Example:
        >>> class Negate(Noise):
        ...     def noised(self, embeddings, words): return -embeddings
        >>> Negate()(torch.ones(1, 3, 1), torch.tensor([[False, True, True]])).flatten().tolist()
        [1.0, -1.0, -1.0]
    """

    def __call__(self, embeddings: Tensor, words: Tensor) -> Tensor:
        """Noised embeddings of the same shape and dtype; differentiable, not in place.

        Positions that are not words come back unchanged. Random numbers come from torch's global generator of the
        device, and their number does not depend on the values: the same generator state gives the same noise.

        Args:
            embeddings: floating-point [n, T, E], the output of the word-embedding layer, before positions are added.
            words: bool [n, T].

        Raises:
            ValueError: wrong shapes or dtypes, of the input or of a subclass's result.
        """
        if embeddings.ndim != 3 or not embeddings.is_floating_point():
            raise ValueError(f"embeddings must be floating-point [n, T, E], got {_kind(embeddings)}")
        if words.shape != embeddings.shape[:2] or words.dtype != torch.bool:
            raise ValueError(f"words must be bool {list(embeddings.shape[:2])}, got {_kind(words)}")
        if not embeddings.numel():
            return embeddings
        noised = self.noised(embeddings, words)
        if noised.shape != embeddings.shape or noised.dtype != embeddings.dtype:
            name = type(self).__name__
            raise ValueError(f"{name} returned {_kind(noised)} for {_kind(embeddings)}: it must keep both")
        return noised.where(words[..., None], embeddings)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        """The noise for [n, T, E] without an empty dimension; texts without words are possible. See :meth:`__call__`.

        Raises:
            NotImplementedError: a subclass must override it.
        """
        raise NotImplementedError


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
