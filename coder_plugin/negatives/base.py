"""What a noise generator is: a function of a text's word embeddings, and its rules.

Shapes: n texts, T positions, E channels of an embedding. ``words`` is bool [n, T], True at a text's own words: neither
special tokens nor padding.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Noise:
    """Base of all noise generators (AsCL, Asymmetry-I; METHODS 8), the entry-point group ``coder_plugin.negatives``.

    A subclass takes its options as keyword-only arguments of ``__init__`` (annotated: they are checked), raises
    ``ValueError`` where one is out of range, and overrides :meth:`noised`. It has no parameter and no state; it can be
    pickled and copied.
    """

    def __call__(self, embeddings: Tensor, words: Tensor) -> Tensor:
        """Noised embeddings, of the same shape and dtype; differentiable, nothing in place.

        What is no word comes back bit for bit, whatever :meth:`noised` did there. The draws are from torch's global
        generator of the device alone, as many whatever the values are: the same state gives the same noise.

        Args:
            embeddings: [n, T, E], floating-point: what the text encoder's word-embedding layer returned, before positions
                are added.
            words: bool [n, T].

        Raises:
            ValueError: other shapes or dtypes, of the input or of what a subclass made of it.
        """
        if embeddings.ndim != 3 or not embeddings.is_floating_point():
            raise ValueError(f"embeddings must be floating-point [n, T, E], got {_kind(embeddings)}")
        if words.shape != embeddings.shape[:2] or words.dtype != torch.bool:
            raise ValueError(f"words must be bool {list(embeddings.shape[:2])}, got {_kind(words)}")
        if not embeddings.numel():
            return embeddings
        noised = self.noised(embeddings, words)
        if noised.shape != embeddings.shape or noised.dtype != embeddings.dtype:
            raise ValueError(f"{type(self).__name__} made {_kind(noised)} of {_kind(embeddings)}: it must keep both")
        return noised.where(words[..., None], embeddings)

    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        """What :meth:`__call__` promises, for [n, T, E] without an empty dimension; a text may have no word at all."""
        raise NotImplementedError


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
