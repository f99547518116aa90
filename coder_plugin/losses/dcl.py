"""Diversity-sensitive contrastive loss over the global batch (CODER eq. 3-5)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from coder_plugin.functional.dcl_loss import check_dcl_options, dcl
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import NEGATIVES, Banks, global_batch, hard_negatives
from coder_plugin.losses.ring import dcl_of_ranks


class DCL(Term):
    """:func:`coder_plugin.functional.dcl` with the pairs of all ranks as candidates. It takes that function's options.

    Args:
        diversity_over: ``batch``, or ``batch+bank``: the mean of the diversity over the batch and that over the keys and
            entries of the momentum banks, which then exist with or without ``m_dcl``.
        mask_same_image: pairs of one image are not each other's negatives, nor are its captions that are hard negatives of
            others.
        hard_negatives: the hard negatives of all ranks' images are further negatives of every image.

    Example:
        >>> import torch
        >>> DCL(mu=0.1, diversity="none")(torch.eye(2), torch.eye(2))
        tensor(-1.3766)
    """

    uses: tuple[str, ...] = ("coder_ids",)
    gathers = ("image_features", "text_features", *Banks.requires, *NEGATIVES)
    takes_views = True
    takes_negatives = True
    has_kernels = True

    @options_of(dcl)
    def __init__(
        self,
        *,
        diversity_over: Literal["batch", "batch+bank"] = "batch",
        mask_same_image: bool = True,
        hard_negatives: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_dcl_options(**options)
        if diversity_over not in ("batch", "batch+bank"):
            raise ValueError(f"diversity_over must be 'batch' or 'batch+bank', got {diversity_over!r}")
        self.options, self.mask_same_image = options, mask_same_image
        if diversity_over == "batch+bank":
            self.requires = (*self.requires, *Banks.requires)
            self.uses = ()
        if hard_negatives:
            self.requires, self.has_kernels = (*self.requires, *NEGATIVES), False

    def ring_obstacle(self) -> str | None:
        if type(self) is not DCL:
            return super().ring_obstacle()
        refused = {
            "diversity=entropy": self.options["diversity"] == "entropy",
            "diversity_gradient=true": self.options["diversity_gradient"],
            "diversity_over=batch+bank": "coder_image_keys" in self.requires,
            "hard_negatives=true": NEGATIVES[0] in self.requires,
        }
        return next((f"not with {option}" for option, is_set in refused.items() if is_set), None)

    def compute_in_ring(
        self, image_features: Tensor, text_features: Tensor, coder_ids: Tensor | None = None
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, and image ids [B] -> scalar."""
        options = {name: self.options[name] for name in ("mu", "gamma", "positive_weight", "effective_negatives")}
        return dcl_of_ranks(
            image_features,
            text_features,
            coder_ids if self.mask_same_image else None,
            epsilon=None if self.options["diversity"] == "none" else self.options["epsilon"],
            triton=self.implementation == "triton",
            **options,
        )

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor | None = None,
        coder_image_keys: Tensor | None = None,
        coder_text_keys: Tensor | None = None,
        coder_negative_features: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """The features [N, D] of all ranks, L2-normalised, image ids [N], momentum keys [N, D] and hard negatives [N, n, D]
        with their images' ids [N, n] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
        bank_diversity = None
        if coder_image_keys is not None and coder_text_keys is not None and coder_ids is not None:
            banks = Banks(
                self, batch, coder_image_keys, coder_text_keys, coder_ids, mask_same_image=self.mask_same_image
            )
            bank_diversity = banks.diversity(
                kind=self.options["diversity"],
                epsilon=self.options["epsilon"],
                gradient=self.options["diversity_gradient"],
            )
        return dcl(
            batch.images,
            batch.texts,
            image_ids=batch.ids,
            bank_diversity=bank_diversity,
            anchors=batch.anchors,
            gather=batch.anchor_gather(),
            implementation=self.implementation,
            **hard_negatives(coder_negative_features, coder_negative_ids),
            **self.options,
        )
