"""AsCL's generated texts: noised captions as negatives, joined or truncated ones as positives (AsCL, section II-B).

Shapes: B batch, T text positions, D joint dimension.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coder_plugin.backbones.word_embeddings import TextBatch, WordEmbeddings, noised_names
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import AddsTexts
from coder_plugin.masked import valid_first
from coder_plugin.noise.expression import make_parts
from coder_plugin.noise.generators import parse_noise
from coder_plugin.noise.positives import Truncate

NoiseAt = Literal["input", "output"]


class Asymmetry(AddsTexts):
    """Features of generated texts, encoded by the text tower in the same pass as the captions (AsCL, section II-B).

    Requires the captions' ids ``text`` [B, T] and ``text_features`` [B, D]. Provides ``coder_noised_features`` [B, D]
    and, of the generated positives, ``coder_positive_features`` and ``coder_noised_positive_features`` [B, D], all
    L2-normalised; and ``coder_noise_changed``, bool [B, 1 or 2]: the captions and positives that the noise has changed.

    Positives come with the batch (``text_positive`` [B, T], generated from raw text by the loader). Where only ids
    reach the model they are prefixes of the captions, or with ``join`` alone the captions themselves.

    Args:
        negatives: noise (Asymmetry-I): an expression of names from the group ``coder_plugin.negatives``, such as
            ``gaussian(std=0.2)+shuffle``; each text gets one of them. none: no noised negatives.
        positives: ``join`` (Asymmetry-II), ``truncate`` (III), or ``join+truncate``, drawn evenly. none: no positives.
        noise_at: ``input``: noise goes into the word embeddings that the text encoder reads. ``output``: into the
            tokens that it returns and the fusion reads, as the paper prints it; there a shuffle changes nothing.

    Raises:
        CoderError: an expression that cannot be parsed, or an unknown name or option in it.

    Example:
        Three words between a start (1) and an end (2), then padding (0), cut to two words:

        >>> positives = "truncate(shortest=0.7, longest=0.7, words=2)"
        >>> head = Asymmetry(BackboneInfo(embed_dim=4), negatives=None, positives=positives)
        >>> text = torch.tensor([[1, 7, 8, 9, 2, 0]])
        >>> special = torch.tensor([[1, 2, 0, 0, 0, 0]])
        >>> embeddings = WordEmbeddings(torch.nn.Embedding(10, 4), lambda ids: ids != 0, special)
        >>> texts = head.further_texts(embeddings, text)
        >>> texts.names, texts.ids.tolist()
        (('positive',), [[1, 7, 8, 9, 2, 0], [1, 7, 8, 2, 0, 0]])
    """

    requires = ("text", "text_features")
    optional = ("positive_features", "noised_features", "noised_positive_features", "noise_changed")
    provides = (
        "coder_positive_features",
        "coder_noised_features",
        "coder_noised_positive_features",
        "coder_noise_changed",
    )

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        negatives: str | None = "mixture",
        positives: str | None = "join+truncate",
        noise_at: NoiseAt = "input",
    ) -> None:
        super().__init__()
        self.noise = None if negatives is None else parse_noise(negatives)
        self.positives, self.noise_at = positives, noise_at
        generators = [] if positives is None else [generator for _, generator in make_parts("positives", positives)]
        self._truncate = next((generator for generator in generators if isinstance(generator, Truncate)), None)

    def further_texts(
        self, embeddings: WordEmbeddings, text: Tensor, text_positive: Tensor | None = None
    ) -> TextBatch:
        ids, names = text, []
        if self.positives is not None:
            if text_positive is not None and text_positive.shape != text.shape:
                raise ValueError(
                    f"text_positive must have text's shape {tuple(text.shape)}, got {tuple(text_positive.shape)}: one "
                    "positive for each caption, tokenised alike"
                )
            ids = torch.cat([text, self.truncated(embeddings, text) if text_positive is None else text_positive])
            names.append("positive")
        words = embeddings.word_mask(ids)
        noise_input = self.noise is not None and self.noise_at == "input"
        if noise_input:
            ids = torch.cat([ids, ids])
            names += noised_names("text", *names)
        return TextBatch(ids, len(text), tuple(names), words, self.noise, noise_input)

    def truncated(self, embeddings: WordEmbeddings, text: Tensor) -> Tensor:
        """A prefix of each text's words, with its special tokens: ids [B, T] -> ids [B, T].

        The share of words is drawn as ``truncate`` draws it; without ``truncate`` the texts do not change.
        """
        if (rule := self._truncate) is None:
            return text
        words = embeddings.word_mask(text)
        count = words.sum(1, keepdim=True)
        share = rule.shortest + (rule.longest - rule.shortest) * torch.rand(count.shape, device=text.device)
        length = (count * share).round().long().minimum(count - 1).clamp(min=rule.words)
        stays = embeddings.mask(text) & (~words | (words.cumsum(1) <= length))
        moved, valid = valid_first(text[..., None], stays)
        return torch.where(valid, moved.squeeze(-1), embeddings.pad)

    def forward(self, text: Tensor, text_features: Tensor, **generated: Tensor) -> dict[str, Tensor]:
        return {f"coder_{key}": value for key, value in generated.items()}
