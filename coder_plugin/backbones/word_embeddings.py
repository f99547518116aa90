"""The input of a text tower: which positions are words, generated captions, and noise in word embeddings (AsCL, section II-B).

Shapes: B captions, R rows encoded together (captions and the texts generated from them), T text positions, E channels of the
word embeddings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.errors import CoderError

#: Noises embeddings or tokens [n, T, E] at the words, bool [n, T] (:class:`coder_plugin.noise.base.Noise`).
NoiseFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass
class TextBatch:
    """Captions and the texts generated from them, encoded in one pass of the text tower: groups of B rows, captions first.

    Args:
        ids: int64 [R, T].
        batch: B.
        names: names of the groups after the captions.
        words: bool [last, T], where noise may change the last rows.
        noise: the noise generator, or None.
        noise_input: whether noise goes into the word embeddings of the last rows; else into the tokens of the tower's output.
    """

    ids: Tensor
    batch: int
    names: tuple[str, ...]
    words: Tensor
    noise: NoiseFunction | None
    noise_input: bool
    _changed: Tensor | None = None  # [last]; noise may change nothing: a text of one word has one order

    def add_noise(self, embeddings: Tensor) -> Tensor:
        """Word embeddings [R, T', E], T' <= T where a tower has cut padding -> the same with noise in the last rows."""
        plain = len(embeddings) - len(self.words)
        return torch.cat([embeddings[:plain], self._noised(embeddings[plain:])])

    def split(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every ``text_KEY`` of R rows becomes that of the B captions, and ``NAME_KEY`` of each group of generated texts.

        With noise, ``noise_changed`` bool [B, 1 or 2] says which captions and which positives the noise has changed.
        """
        out = dict(features)
        for key, value in features.items():
            if key.startswith("text_"):
                out.update(self._by_group(key.removeprefix("text_"), value, ("text", *self.names)))
        if self.noise is not None and not self.noise_input and "text_contexts" in features:
            names = noised_names("text", *self.names)
            out.update(self._by_group("contexts", self._noised(features["text_contexts"]), names))
            out.update(self._by_group("context_mask", features["text_context_mask"], names))
        if self._changed is not None:
            out["noise_changed"] = torch.stack(self._changed.split(self.batch), 1)
        return out

    def _by_group(self, key: str, value: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        return {f"{name}_{key}": rows for name, rows in zip(names, value.split(self.batch), strict=True)}

    def _noised(self, rows: Tensor) -> Tensor:
        assert self.noise is not None
        noised = self.noise(rows, self.words[:, : rows.shape[1]])
        self._changed = (noised != rows).flatten(1).any(1)
        return noised


def noised_names(*names: str) -> list[str]:
    """Names of the groups that noise makes from these: ``noised`` from ``text``, else ``noised_NAME``."""
    return ["noised" if name == "text" else f"noised_{name}" for name in names]


class WordEmbeddings:
    """The word positions of a text tower's input, and a hook that adds noise to their embeddings. Copying a model copies them.

    Args:
        embedding: the layer that looks up word embeddings. A hook changes its output, so that all that follows (positions,
            causal attention, recurrence, pooling) works as it does on captions.
        mask: ids [R, T] -> bool [R, T], True up to a text's end.
        blank: ids of an empty text [1, T]: special tokens, then padding.
    """

    def __init__(self, embedding: nn.Module, mask: Callable[[Tensor], Tensor], blank: Tensor) -> None:
        self.mask, self.pad = mask, int(blank[0, -1])
        self._special = blank[mask(blank)].unique()
        self._texts: TextBatch | None = None
        self._looked_up = False
        # A partial of a bound method, unlike a closure, is copied with the model.
        embedding.register_forward_hook(functools.partial(self._hook))

    def word_mask(self, text: Tensor) -> Tensor:
        """Ids [R, T] -> bool [R, T], True at words: neither start nor end nor padding."""
        self._special = self._special.to(text.device)
        return self.mask(text) & ~torch.isin(text, self._special)

    @contextlib.contextmanager
    def noise_in(self, texts: TextBatch) -> Iterator[None]:
        """Inside the context the text tower reads the noised word embeddings of ``texts``.

        Raises:
            CoderError: the tower did not call the embedding layer.
        """
        if not texts.noise_input:
            yield
            return
        self._texts, self._looked_up = texts, False
        try:
            yield
        finally:
            self._texts = None
        if not self._looked_up:
            raise CoderError("the text tower did not call its embedding layer, so no noise could be added to its words")

    def _hook(self, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor | None:
        if self._texts is None:
            return None
        self._looked_up = True
        return self._texts.add_noise(embeddings)
