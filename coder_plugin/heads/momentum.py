"""Momentum keys of the batch, and banks of earlier keys (CODER section 3.2.3, docs/equations.md#m-dcl)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones.norm import statistics_of
from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import FollowsModel, KeepsState
from coder_plugin.memory.bank import BankDtype, CoupledBank
from coder_plugin.memory.momentum import Mode, MomentumCopy
from coder_plugin.tensors import is_on_cpu


class Momentum(KeepsState, FollowsModel):
    """The momentum towers' embeddings of the batch, and the banks of earlier ones.

    Requires ``image`` and ``text``, the model's inputs. Provides ``coder_image_keys`` and ``coder_text_keys`` [B, D],
    without gradient; and, if a term reads them, ``coder_negative_keys`` [B, n, D] of the optional hard negatives
    ``text_negatives`` [B, n, T].

    The terms ``m_dcl`` and ``dcl(diversity_over='batch+bank')`` compare with the banks and stash the keys of all ranks.
    After the step these are written, and the momentum towers are updated
    (:class:`~coder_plugin.memory.momentum.MomentumCopy`).

    Args:
        momentum: m of the average over 1 / (1 - m) steps, in [0, 1). Trainers derive it from the length of the run: in
            a short one, keys as old as with the paper's 0.995 would come from another model.
        bank_size: Q, entries per modality, at least the global batch. Trainers derive it from the number of images: a
            bank with a large share of them holds many captions that also fit the anchor's image.
        bank_dtype: storage of the entries: ``float32``, ``float16`` or ``bfloat16``.
        mode: the towers' mode, ``eval`` or ``train`` (dropout and batch statistics as in training).

    Raises:
        ValueError: options out of range, or a model with several features per image.

    Example:
        >>> head, keys = Momentum(BackboneInfo(embed_dim=4), bank_size=8), torch.eye(4)
        >>> head.write(keys, keys, torch.tensor([1, 2, 3, 4]))
        >>> head.bank.ids[head.bank.valid].tolist()
        [1, 2, 3, 4]
    """

    requires = ("image", "text")
    optional = ("text_negatives",)
    provides = ("coder_image_keys", "coder_text_keys", "coder_negative_keys")
    data_options = ("bank_size", "momentum")
    free_on_resume = ("momentum",)  # it depends on the number of epochs

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        momentum: float = 0.995,
        bank_size: int = 4096,
        bank_dtype: BankDtype = "float32",
        mode: Mode = "eval",
    ) -> None:
        super().__init__()
        if backbone.views > 1:
            raise ValueError(
                f"a bank holds one key per image, and this model gives an image {backbone.views} features: take "
                "--model-kwargs image_pooling=gpo"
            )
        self.towers = MomentumCopy(momentum=momentum, mode=mode)
        self.bank = CoupledBank(bank_size, backbone.embed_dim, dtype=bank_dtype)
        self._online: tuple[Any, ...] = ()  # in a tuple: the model owns this head, not the other way round

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """``bank_size``: a seventh of the images, the paper's share of Flickr30K, at most 4,096 and at least one batch.
        Where all captions are pairs, five pairs count as an image. ``momentum``: 1 / (1 - m) is a 170th of the run's
        steps, as with 0.995 in the paper's 34,000 on Flickr30K, at least 10 and at most 200."""
        derived: dict[str, Any] = {}
        if "bank_size" not in options:
            images = facts.samples_per_epoch // (5 if facts.captions == "all" else 1)
            derived["bank_size"] = max(facts.pairs_per_step or 1, min(4096, images // 7))
        if "momentum" not in options and facts.pairs_per_step and facts.epochs:
            steps = facts.epochs * facts.samples_per_epoch // facts.pairs_per_step
            derived["momentum"] = round(1 - 1 / min(200, max(10, steps // 170)), 4)
        return derived

    @property
    def cacheable(self) -> bool:
        return self.towers.mode == "eval"  # in training mode dropout draws random numbers

    def attach(self, model: Any) -> None:
        self.towers.copy_from(model)
        self._online = (model,)

    def forward(self, image: Tensor, text: Tensor, text_negatives: Tensor | None = None) -> dict[str, Tensor]:
        if text_negatives is None or "coder_negative_keys" not in self.requested_keys:
            image_keys, text_keys = self.towers(image, text)
            return {"coder_image_keys": image_keys, "coder_text_keys": text_keys}
        with statistics_of(self.towers.model, len(text)):
            image_keys, keys = self.towers(image, torch.cat([text, text_negatives.flatten(0, 1)]))
        text_keys, negative_keys = keys.split([len(text), len(keys) - len(text)])
        negative_keys = negative_keys.unflatten(0, text_negatives.shape[:2])
        return {"coder_image_keys": image_keys, "coder_text_keys": text_keys, "coder_negative_keys": negative_keys}

    def check(self, *, batch: int, samples: int) -> None:
        if self.bank.size < batch:
            raise ValueError(
                f"bank_size {self.bank.size} is smaller than the global batch of {batch}: give it at least that many "
                f"entries (--set momentum.bank_size={max(4096, batch)})"
            )

    def first_rank_values(self) -> Tensor | None:
        return self.towers.statistics(self._online[0])

    def post_step(self) -> None:
        self.towers.update(self._online[0], self._stashed.pop("first_rank", None))
        super().post_step()

    def stash(self, **values: Any) -> None:
        # other ids have other repeats
        super().stash(**({"repeats": None} if "ids" in values else {}), **values)

    def device_scalars(self) -> dict[str, Tensor]:
        ids = self._stashed.get("ids")
        return {} if ids is None or is_on_cpu(ids) else {"repeats": self.bank.repeats_after(ids)}

    def write(  # type: ignore[override]
        self, image_keys: Tensor, text_keys: Tensor, ids: Tensor, repeats: float | None = None
    ) -> None:
        self.bank.enqueue(image_keys, text_keys, ids, repeats=None if repeats is None else round(repeats))

    def health(self) -> dict[str, float]:
        """Figures of the bank and the momentum towers.

        ``filled``: share of entries that are filled. ``images``: share of the filled entries with different images.
        ``image_spread``, ``text_spread``: variance of the keys about their mean, from 0 (collapsed to a point) to 1.
        ``drift``: distance of the momentum towers' trained parameters from the model's, relative to the norm of the
        latter.
        """
        bank = self.bank
        filled = int(bank.count)
        figures = {"filled": filled / bank.size, "drift": self.towers.drift(self._online[0])}
        if filled:
            figures["images"] = len(bank.ids[:filled].unique()) / filled
            figures["image_spread"] = float(bank.image_moments.spread(bank.count))
            figures["text_spread"] = float(bank.text_moments.spread(bank.count))
        return figures

    def state_names(self) -> list[str]:
        return list(self.state_dict())
