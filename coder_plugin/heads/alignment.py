"""Local concept alignment: words and regions share prototypes (SelfAlign eq. 1-4, docs/equations.md#selfalign).

Shapes: B batch, T words, L regions, C their channels before the context stage, K prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.concepts.tags import ADJECTIVE, NOUN, VERB
from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.losses.lca import correspondence, prototype_scores
from coder_plugin.memory.rows import replace_rows
from coder_plugin.tensors import is_on_cpu, unit

Init = Literal["random", "regions"]
#: Values of the option ``words`` -> codes in ``text_tags``.
_CLASSES = {"noun": (NOUN,), "noun+adj+verb": (NOUN, VERB, ADJECTIVE)}


class Alignment(KeepsState):
    """Cosines of words and regions with the prototypes, and the most similar word and region within a pair (eq. 1, 2).

    Requires ``image_locals`` [B, L, C] and ``text_locals`` [B, T, C], the tokens before the context stage, with their
    bool masks ``image_context_mask`` [B, L] and ``text_context_mask`` [B, T], and ``text`` [B, T]; optional:
    ``text_tags`` [B, T], the classes of the words.

    Provides ``coder_word_scores`` [B, T, K] and ``coder_region_scores`` [B, L, K], float32 or float64;
    ``coder_word_regions`` int64 [B, T], each word's most similar region; ``coder_region_words`` int64 [B, L], each
    region's most similar word; and the bool masks ``coder_word_mask`` [B, T] and ``coder_region_mask`` [B, L]. A text's
    start and end count as words, as in the authors' code, except a causal tower's start, the same in all texts.

    The K prototypes are the only parameters. The term ``lca`` stashes its parts for the log.

    Args:
        prototypes: K, >= 2.
        words: ``all``, or the classes of the ablation, ``noun`` or ``noun+adj+verb``, which need tagged captions.
        freeze_steps: number of optimizer steps, >= 0, in which the prototypes are frozen. ``epoch``: the first epoch,
            as in the authors' code for CAMERA; a trainer replaces it by its number of steps.
        init: ``random``: the prototypes start as random directions, as in the authors' code. ``regions`` (our choice):
            after the first optimizer step K regions of its batch, drawn at random over all ranks, replace them; a batch
            with fewer leaves the rest to the next steps. Of accumulated batches they come from the last alone.

    Raises:
        ValueError: options out of range, or words and regions of different numbers of channels.

    Example:
        >>> head = Alignment(BackboneInfo(embed_dim=4, image_locals=4, text_locals=4), prototypes=8)
        >>> words, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
        >>> out = head(words, mask, words, mask, torch.zeros(2, 3, dtype=torch.int64))
        >>> out["coder_word_scores"].shape, out["coder_word_regions"].tolist()
        (torch.Size([2, 3, 8]), [[0, 1, 2], [0, 1, 2]])
    """

    requires = ("image_locals", "image_context_mask", "text_locals", "text_context_mask", "text")
    optional = ("text_tags",)
    provides = (
        "coder_word_scores",
        "coder_word_mask",
        "coder_word_regions",
        "coder_region_scores",
        "coder_region_mask",
        "coder_region_words",
    )
    data_options = ("freeze_steps",)
    free_on_resume = ("freeze_steps",)  # an epoch's steps depend on the number of ranks

    steps: Tensor
    placed: Tensor
    loss: Tensor
    entropy: Tensor

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        prototypes: int = 1024,
        words: Literal["all", "noun", "noun+adj+verb"] = "all",
        freeze_steps: int | Literal["epoch"] = 0,
        init: Init = "random",
    ) -> None:
        super().__init__()
        if prototypes < 2:
            raise ValueError(f"prototypes must be >= 2, got {prototypes}")
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {init!r}")
        if freeze_steps == "epoch":
            raise ValueError("freeze_steps=epoch is for a trainer, which knows that number of steps: pass a number")
        if freeze_steps < 0:
            raise ValueError(f"freeze_steps must be >= 0, got {freeze_steps}")
        if not backbone.image_locals or backbone.image_locals != backbone.text_locals:
            raise ValueError(
                f"words ({backbone.text_locals} channels before the context stage) and regions "
                f"({backbone.image_locals}) must share a space: a region model over a BiGRU does with --model-kwargs "
                "word_projection=true"
            )
        self.words, self.freeze_steps, self.init = words, freeze_steps, init
        self.prototypes = nn.Parameter(F.normalize(torch.randn(prototypes, backbone.image_locals), dim=-1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        #: Whether no region is needed any more. Reading ``placed`` in every step would synchronise with the device.
        self._complete = init != "regions"
        if init == "regions":
            self.register_buffer("placed", torch.zeros((), dtype=torch.int64))
        for name in ("loss", "entropy"):
            self.register_buffer(name, torch.zeros(()))

    def forward(
        self,
        image_locals: Tensor,
        image_context_mask: Tensor,
        text_locals: Tensor,
        text_context_mask: Tensor,
        text: Tensor,
        text_tags: Tensor | None = None,
    ) -> dict[str, Tensor]:
        length = text.shape[1]  # towers cut padding, to another length in each batch
        counted = self._counted(text_context_mask, text_tags)
        with torch.no_grad():
            similarity = correspondence(text_locals, counted, image_locals, image_context_mask)
        if not self._complete and self.training and torch.is_grad_enabled():
            self._stash_regions(image_locals, image_context_mask)
        prototypes = self._trained_prototypes()
        # the assignment gets no gradient: regions' scores need one where regions predict
        with torch.set_grad_enabled(torch.is_grad_enabled() and "coder_region_words" in self.requested_keys):
            regions = prototype_scores(image_locals, prototypes, image_context_mask)
        if is_on_cpu(counted):  # scores of valid words only: most positions of a text are padding
            row, column = counted.nonzero(as_tuple=True)
            valid = prototype_scores(text_locals[row, column], prototypes)
            words = valid.new_zeros(len(text), length, len(prototypes)).index_put_((row, column), valid)
        else:
            words = prototype_scores(text_locals, prototypes, counted)
            words = F.pad(words, (0, 0, 0, length - words.shape[1]))
        return {
            "coder_word_scores": words,
            "coder_word_mask": _padded(counted, length),
            "coder_word_regions": _padded(similarity.argmax(2), length),
            "coder_region_scores": regions,
            "coder_region_mask": image_context_mask,
            "coder_region_words": similarity.argmax(1),
        }

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """The steps of an epoch for ``freeze_steps=epoch``."""
        if options.get("freeze_steps") != "epoch":
            return {}
        assert facts.pairs_per_step is not None
        return {"freeze_steps": facts.samples_per_epoch // facts.pairs_per_step}

    def tag_classes(self) -> tuple[int, ...]:
        return _CLASSES.get(self.words, ())

    def post_step(self) -> None:
        self.steps += 1
        super().post_step()

    def write(  # type: ignore[override]
        self,
        *,
        loss: Tensor | None = None,
        entropy: Tensor | None = None,
        regions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """The parts of LCA, scalars of this rank, and unit regions [m, C], of which those in ``valid`` [m] count."""
        if loss is not None and entropy is not None:
            mean = distributed.all_mean(torch.stack([loss, entropy.to(loss.dtype)]))
            self.loss.copy_(mean[0])
            self.entropy.copy_(mean[1])
        if regions is not None and valid is not None:
            self._place(distributed.gather(regions)[distributed.gather(valid)])

    def health(self) -> dict[str, float]:
        """The parts of LCA in the last step, in nats, once there was one.

        ``entropy``: of the targets, at most log K, where they are uniform and teach nothing. ``divergence``: KL
        divergence of the predictions from them, LCA less the entropy; 0 if they agree. Where ``lca.direction`` is both,
        the figures are means of both directions. ``placed``, with ``init="regions"``: share of the prototypes that
        regions have replaced.
        """
        figures = {}
        if float(self.loss) > 0:
            figures = {"divergence": float(self.loss) - float(self.entropy), "entropy": float(self.entropy)}
        if self.init == "regions":
            figures["placed"] = int(self.placed) / len(self.prototypes)
        return figures

    @torch.no_grad()
    def _stash_regions(self, regions: Tensor, mask: Tensor) -> None:
        """Stash this rank's share of K regions, drawn at random; if there are fewer, the rest is not valid."""
        share = -(-len(self.prototypes) // distributed.world_size())
        rows = unit(regions.detach()[mask]).to(self.prototypes.dtype)
        drawn = rows[torch.randperm(len(rows), device=rows.device)[:share]]
        missing = share - len(drawn)
        valid = torch.arange(share, device=rows.device) < len(drawn)
        self.stash(regions=F.pad(drawn, (0, 0, 0, missing)), valid=valid)

    @torch.no_grad()
    def _place(self, regions: Tensor) -> None:
        """Let regions [m, C], the same on every rank, replace the next prototypes."""
        start, count = int(self.placed), len(self.prototypes)
        regions = regions[: count - start]
        number = torch.arange(count, device=regions.device)
        rows = (number >= start) & (number < start + len(regions))
        values = regions.new_zeros(count, regions.shape[1]).masked_scatter(rows[:, None], regions)
        replace_rows(self.prototypes, rows, values)
        self.replaced_rows = [(self.prototypes, rows)]
        self.placed += len(regions)
        self._complete = start + len(regions) == count

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._complete = self.init != "regions" or int(self.placed) == len(self.prototypes)

    def _counted(self, mask: Tensor, tags: Tensor | None) -> Tensor:
        if not self.tag_classes():
            return mask
        if tags is None:
            raise ValueError(f"alignment.words={self.words} needs text_tags, the classes of the words, in the batch")
        codes = torch.tensor(self.tag_classes(), device=tags.device)
        return mask & torch.isin(tags[:, : mask.shape[1]], codes)

    def _trained_prototypes(self) -> Tensor:
        """The prototypes. While they are frozen their gradient is zero; DDP would fail without a gradient."""
        if not self.freeze_steps:
            return self.prototypes
        scale = (self.steps >= self.freeze_steps).to(self.prototypes.dtype)
        return self.prototypes.detach() + scale * (self.prototypes - self.prototypes.detach())


def _padded(words: Tensor, length: int) -> Tensor:
    """[B, T] -> [B, length]: the outputs of a model have the same shape in every batch."""
    return F.pad(words, (0, length - words.shape[1]))
