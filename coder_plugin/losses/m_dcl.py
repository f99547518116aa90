"""Diversity-sensitive contrastive loss against the coupled momentum banks (CODER eq. 6)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coder_plugin.functional.m_dcl_loss import check_m_dcl_options, m_dcl
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import Banks, global_batch, hard_negatives

_NEGATIVES = ("coder_negative_keys", "coder_negative_ids")


class MDCL(Term):
    """:func:`coder_plugin.functional.m_dcl` with the keys of all ranks and the banks as candidates. It takes that
    function's options.

    Args:
        mask_same_image: keys and entries of an anchor's own image are not its negatives.
        hard_negatives: the momentum keys of the hard negatives of all ranks' images are further candidates of every live image.
            They are not written to the bank.
        warmup: the loss is zero until the bank holds this many entries, or is full.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from coder_plugin.memory.bank import CoupledBank
        >>> head = SimpleNamespace(
        ...     provides=("coder_image_keys",), bank=CoupledBank(4, 2), stash=lambda **keys: print(*keys)
        ... )
        >>> term, eye = MDCL().bind({"momentum": head}, local_loss=False), torch.eye(2)
        >>> term(eye, eye, torch.arange(2), eye, eye)  # an empty bank: twice dcl
        image_keys text_keys ids
        tensor(-2.7532)
    """

    requires: tuple[str, ...] = ("image_features", "text_features", *Banks.requires)
    gathers = (*requires, *_NEGATIVES)
    takes_negatives = True

    @options_of(m_dcl)
    def __init__(
        self, *, mask_same_image: bool = True, hard_negatives: bool = False, warmup: int = 0, **options: Any
    ) -> None:
        super().__init__()
        check_m_dcl_options(**options)
        if warmup < 0:
            raise ValueError(f"warmup must be >= 0, got {warmup}")
        self.options, self.mask_same_image, self.warmup = options, mask_same_image, warmup
        if hard_negatives:
            self.requires = (*self.requires, *_NEGATIVES)

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor,
        coder_image_keys: Tensor,
        coder_text_keys: Tensor,
        coder_negative_keys: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """The live features [N, D] of all ranks, L2-normalised, image ids [N], momentum keys [N, D] and those of hard negatives
        [N, n, D] with their images' ids [N, n] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
        banks = Banks(self, batch, coder_image_keys, coder_text_keys, coder_ids, mask_same_image=self.mask_same_image)
        bank_diversity = None
        kind, gradient = self.options["diversity"], self.options["diversity_gradient"]
        keys = None if coder_negative_keys is None else coder_negative_keys.to(batch.images.dtype)
        further = hard_negatives(keys, coder_negative_ids)
        if kind == "std" and not gradient and not further and "bank" in self.options["diversity_over"]:
            # from the bank's running moments; the function would compute it from the similarities
            bank_diversity = banks.diversity(kind=kind, epsilon=self.options["epsilon"], gradient=False)
        loss = m_dcl(
            batch.images,
            batch.texts,
            banks.image_keys,
            banks.text_keys,
            banks.image_bank,
            banks.text_bank,
            image_ids=batch.ids,
            bank_ids=banks.ids,
            bank_valid=banks.bank.valid,
            bank_diversity=bank_diversity,
            anchors=batch.anchors,
            gather=batch.anchor_gather(),
            implementation=self.implementation,
            **further,
            **self.options,
        )
        return loss * (banks.bank.count >= min(self.warmup, banks.bank.size)) if self.warmup else loss
