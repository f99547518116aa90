"""A text tower's input: which of its tokens are words, and other embeddings in the place of some of theirs.

Shapes: R texts, T text positions, E channels of the word embeddings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.heads.asymmetry import Texts


class Words:
    """One model's word embeddings; a copied model has its own.

    Args:
        embedding: the layer that looks them up. Its output is changed by a hook, so that whatever follows (positions,
            causal attention, recurrence, pooling) works as it does on captions.
        mask: ids [R, T] -> bool [R, T], True up to a text's end.
        blank: an empty text's ids [1, T]: special tokens, then padding.
    """

    def __init__(self, embedding: nn.Module, mask: Callable[[Tensor], Tensor], blank: Tensor) -> None:
        self.mask, self.pad = mask, int(blank[0, -1])
        self._special = blank[mask(blank)].unique()
        self._texts: Texts | None = None
        self._read = False
        # A partial of a bound method, unlike a closure, is copied with the model.
        embedding.register_forward_hook(functools.partial(self._hook))

    def of(self, text: Tensor) -> Tensor:
        """Ids [R, T] -> bool [R, T], True at words: neither start nor end nor padding."""
        self._special = self._special.to(text.device)
        return self.mask(text) & ~torch.isin(text, self._special)

    @contextlib.contextmanager
    def noised(self, texts: Texts) -> Iterator[None]:
        """Put noise into the word embeddings of the texts that ask for it, in the forward that runs inside."""
        if not texts.noised:
            yield
            return
        self._texts, self._read = texts, False
        try:
            yield
        finally:
            self._texts = None
        if not self._read:
            raise CoderError("the text tower did not look its words up, so that no noise could be put into them")

    def _hook(self, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor | None:
        if self._texts is None:
            return None
        self._read = True
        return self._texts.with_noise(embeddings)
