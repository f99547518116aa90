"""AsCL's generated texts: noised captions as negatives, joined or truncated ones as positives (section II-B; METHODS 8).

Shapes: B batch, T text positions, E channels of the word embeddings, R rows of all texts that are encoded together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.sets import valid_first
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import AddsTexts, FollowsModel
from coder_plugin.negatives.base import Noise
from coder_plugin.negatives.expression import make_parts
from coder_plugin.negatives.generators import parse_noise
from coder_plugin.negatives.positives import Truncate

NoiseAt = Literal["input", "output"]


@dataclass
class Texts:
    """A batch's captions and what is encoded with them in one pass of the text tower, B rows each, one below the other.

    ``names``: what the rows after the captions are. ``words`` [last, T] says what noise may change in the last rows;
    ``noised``: whether it does so in their word embeddings, as the tower looks them up, or else in the tokens it gives.
    ``changed`` [last] then says which it has changed: a text of one word has no other order.
    """

    ids: Tensor  # [R, T]
    batch: int
    names: tuple[str, ...]
    words: Tensor
    noise: Noise | None
    noised: bool
    changed: Tensor | None = None

    def with_noise(self, embeddings: Tensor) -> Tensor:
        """The rows' word embeddings [R, T, E], or fewer positions where a tower has cut padding, with the noise in them."""
        plain = len(embeddings) - len(self.words)
        return torch.cat([embeddings[:plain], self._noise(embeddings[plain:])])

    def parted(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every ``text_KEY`` of R rows as that of the captions, and ``NAME_KEY`` of what was made of them."""
        out = dict(known)
        for key, value in known.items():
            if key.startswith("text_"):
                out.update(self._named(key.removeprefix("text_"), value, ("text", *self.names)))
        if self.noise is not None and not self.noised and "text_tokens" in known:
            names = _noised("text", *self.names)
            out.update(self._named("tokens", self._noise(known["text_tokens"]), names))
            out.update(self._named("mask", known["text_mask"], names))
        if self.changed is not None:
            out["noise_changed"] = torch.stack(self.changed.split(self.batch), 1)
        return out

    def _named(self, key: str, value: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        return {f"{name}_{key}": part for name, part in zip(names, value.split(self.batch), strict=True)}

    def _noise(self, rows: Tensor) -> Tensor:
        assert self.noise is not None
        noised = self.noise(rows, self.words[:, : rows.shape[1]])
        self.changed = (noised != rows).flatten(1).any(1)
        return noised


class Asymmetry(AddsTexts, FollowsModel):
    """The features of generated texts, each [B, D], L2-normalised: ``coder_noised_features`` and, of the generated
    positives, ``coder_positive_features`` and ``coder_noised_positive_features``. ``coder_noise_changed`` bool [B, 1 or 2]
    says which of the captions and of the positives the noise has changed at all.

    They are encoded by the same text tower in the same pass as the captions. Positives come with the batch
    (``text_positive``, made of raw text by the loader); where only tokens reach the model they are prefixes of these, or
    with ``join`` alone the captions themselves.

    Args:
        negatives: noise (Asymmetry-I): a name of the group ``coder_plugin.negatives``, with options, or several with +, of
            which each text gets one: ``gaussian(std=0.2)+shuffle``. none: no noised negatives.
        positives: ``join`` (Asymmetry-II), ``truncate`` (III), or both: ``join+truncate``, each as often. none: none.
        noise_at: ``input``, the word embeddings that the text encoder reads, or ``output``, the tokens it gives, which the
            fusion reads: the paper's letter, where a shuffle changes nothing.
    """

    requires = ("text", "text_features")
    uses = ("positive_features", "noised_features", "noised_positive_features", "noise_changed")
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
        made = [] if positives is None else [each for _, each in make_parts("positives", positives)]
        self._truncate = next((each for each in made if isinstance(each, Truncate)), None)
        self._words: tuple[Any, ...] = ()  # in a tuple: the model owns this head, not the other way round

    def attach(self, model: Any) -> None:
        self._words = (model.words,)

    def further_texts(self, text: Tensor, text_positive: Tensor | None = None) -> Texts:
        """Captions [B, T] and their positives [B, T] -> all that is to be encoded."""
        ids, names = text, []
        if self.positives is not None:
            if text_positive is not None and text_positive.shape != text.shape:
                raise ValueError(
                    f"text_positive must have text's shape {tuple(text.shape)}, got {tuple(text_positive.shape)}: one positive "
                    "for each caption, tokenised alike"
                )
            ids = torch.cat([text, self.truncated(text) if text_positive is None else text_positive])
            names.append("positive")
        words = self._words[0].of(ids)
        noised = self.noise is not None and self.noise_at == "input"
        if noised:
            ids = torch.cat([ids, ids])
            names += _noised("text", *names)
        return Texts(ids, len(text), tuple(names), words, self.noise, noised)

    def truncated(self, text: Tensor) -> Tensor:
        """A prefix of each text's tokens but special ones [B, T], of the share that ``truncate`` leaves of words; all of them
        where it is not asked for."""
        if (rule := self._truncate) is None:
            return text
        words = self._words[0]
        ours = words.of(text)
        count = ours.sum(1, keepdim=True)
        share = rule.shortest + (rule.longest - rule.shortest) * torch.rand(count.shape, device=text.device)
        kept = (count * share).round().long().minimum(count - 1).clamp(min=rule.words)
        stays = words.mask(text) & (~ours | (ours.cumsum(1) <= kept))
        moved, valid = valid_first(text[..., None], stays)
        return torch.where(valid, moved.squeeze(-1), words.pad)

    def forward(
        self,
        text: Tensor,
        text_features: Tensor,
        positive_features: Tensor | None = None,
        noised_features: Tensor | None = None,
        noised_positive_features: Tensor | None = None,
        noise_changed: Tensor | None = None,
    ) -> dict[str, Tensor]:
        made = {
            "coder_positive_features": positive_features,
            "coder_noised_features": noised_features,
            "coder_noised_positive_features": noised_positive_features,
            "coder_noise_changed": noise_changed,
        }
        return {key: value for key, value in made.items() if value is not None}


def _noised(*names: str) -> list[str]:
    return ["noised" if name == "text" else f"noised_{name}" for name in names]
