"""What a head is: a module inside ``model.coder`` that turns tensors of the model into further tensors, by name.

What only some heads do (score, re-rank, keep state, add texts, follow the model) is declared in
:mod:`coder_plugin.heads.capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from coder_plugin.backbones.base import BackboneInfo

__all__ = ["BackboneInfo", "Head", "TrainingFacts"]

#: Buffers that normalisation layers write in forward. They are not a head's accumulating state.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What a trainer knows before it builds the heads, for :meth:`Head.options_from_data`.

    Args:
        loss: the loss expression as the user wrote it, for error messages.
        samples_per_epoch: number of samples in one epoch, over all ranks.
        captions: ``draw``, one caption of an image per epoch, or ``all``.
        pairs_per_step: image-text pairs of one optimizer step, over all ranks; None where no step is planned.
        epochs: of the whole run; None where no step is planned.
        concepts: file of the concept vocabulary that the user named, or None.
        on_scenes: whether the run trains on the built-in scenes.
        train_data: the training data that the user named, for error messages.
    """

    loss: str
    samples_per_epoch: int
    captions: Literal["draw", "all"] | None = "draw"
    pairs_per_step: int | None = None
    epochs: int | None = None
    concepts: str | None = None
    on_scenes: bool = False
    train_data: str | None = None


class Head(nn.Module):
    """Base of all heads.

    ``__init__`` takes :class:`BackboneInfo` and keyword-only options. ``forward`` is called inside the model's forward
    with the keys in ``requires`` and those in ``optional`` that are there, and returns keys of ``provides``. Keys that
    start with ``coder_`` leave the model: they must be batch-first and of fixed shape. Other keys stay inside, for later
    heads.

    State is persistent buffers, and forward never writes them: see :class:`~coder_plugin.heads.capabilities.KeepsState`.

    Optional methods are recognised by their presence:

    - ``image_attention(features)``, ``text_attention(features)``: keys of the backbone for B images or texts -> weights of
      the concepts [B, g], each row sums to 1. Such a head has the option and attribute ``vocabulary``, a
      :class:`~coder_plugin.concepts.Vocabulary`, or None for random vectors.
    - ``maps(features)``: keys of the backbone for B pairs -> how relevant each local feature is to the other modality's
      context, cosines ``image`` [B, L] and ``text`` [B, T], -inf at padding.

    Example:
        >>> import torch
        >>> class Norms(Head):
        ...     requires, provides = ("image_pooled",), ("coder_norms",)
        ...     def __init__(self, backbone): super().__init__()
        ...     def forward(self, image_pooled): return {"coder_norms": image_pooled.norm(dim=1)}
        >>> Norms(BackboneInfo(embed_dim=2))(image_pooled=torch.tensor([[3.0, 4.0]]))
        {'coder_norms': tensor([5.])}
    """

    requires: ClassVar[tuple[str, ...]] = ()
    #: Keys that are read where they are there. A head that provides one is built if it is ours, passed as an object,
    #: registered in this process, or of this head's own distribution; otherwise the key stays absent.
    optional: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    #: The provided keys that replace (image_features, text_features) in ``term@head``, or None.
    feature_keys: ClassVar[tuple[str, str] | None] = None
    #: Whether the outputs compare all pairs of a batch, so that a step cannot be split into accumulated batches.
    whole_batch: ClassVar[bool] = False
    #: Options that :meth:`options_from_data` may set.
    data_options: ClassVar[tuple[str, ...]] = ()
    #: Options that a resumed run may have changed.
    free_on_resume: ClassVar[tuple[str, ...]] = ()
    #: Buffers that a resumed run must share with its checkpoint, each with the error message if it does not.
    fixed_on_resume: ClassVar[Mapping[str, str]] = {}

    #: Keys that the terms and heads of the loss read; what is not among them need not be computed.
    requested_keys: Set[str]

    def __init__(self) -> None:
        super().__init__()
        self.requested_keys = frozenset(self.provides)

    def forward(self, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """Required and optional keys -> provided keys.

        Raises:
            NotImplementedError: a subclass must override it.
        """
        raise NotImplementedError

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """Values of :attr:`data_options` for a run, to be merged over ``options``.

        Args:
            options: the options that are set so far. Set values must not be changed.
            facts: facts about the data and the optimizer steps.

        Raises:
            CoderError: the head needs something that the run does not have.
        """
        return {}

    def check(self, *, batch: int, samples: int) -> None:
        """Refuse a run that the head cannot work with. Trainers call it before the first step.

        Args:
            batch: pairs of one step, over all ranks. samples: pairs of the whole run.

        Raises:
            ValueError: why it cannot work.
        """

    def notes(self) -> list[str]:
        """What the log and the plan of a run say about the head, a sentence each: an input that this model does not have, and
        what the head does without it."""
        return []

    @property
    def cacheable(self) -> bool:
        """Whether it gives the same outputs, without a gradient, whenever it is called on a batch between two optimizer
        steps, and draws no random numbers. Where a step passes over a batch twice it is then called once."""
        return False

    @property
    def encodes_negatives(self) -> bool:
        """Whether hard negatives are encoded with the captions, as ``negative_features`` [B, n, D] for the head."""
        return False

    def tag_classes(self) -> tuple[int, ...]:
        """Codes of the classes of words that it reads from ``text_tags`` (:mod:`coder_plugin.concepts.tags`)."""
        return ()

    def state_buffers(self) -> dict[str, Tensor]:
        """Buffers by name, other than the statistics of BatchNorm and InstanceNorm."""
        norms = [name for name, module in self.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        statistics = {f"{norm}.{name}" if norm else name for norm in norms for name in _STATISTICS}
        return {name: buffer for name, buffer in self.named_buffers() if name not in statistics}

    def state_names(self) -> list[str]:
        """Names of accumulating state: :meth:`state_buffers` and frozen parameters.

        They are left out of weight averaging and of what DDP synchronises.
        """
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        return [*self.state_buffers(), *frozen]
