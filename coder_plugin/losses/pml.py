"""Losses of pytorch-metric-learning as terms: ``pml.NTXentLoss(temperature=0.05)`` in a loss expression."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from coder_plugin.errors import CoderError, did_you_mean, install_command
from coder_plugin.losses.base import Term

Pairs = Literal["all", "image-text"]
#: Losses that cannot be terms although they have no parameters, and why.
_REFUSED = {
    "CrossBatchMemory": "keeps a memory that checkpoints would not hold and accumulation would fill twice; m_dcl has a bank",
    "DynamicSoftMarginLoss": "keeps a histogram of earlier batches that checkpoints would not hold",
    "SmoothAPLoss": "needs batches that are sorted by label, with equally many embeddings of each",
    "SelfSupervisedLoss": "makes its own labels, so captions of one image would be negatives; give the loss inside it",
    "VICRegLoss": "compares two views without labels",
}


class PML(Term):
    """A loss of pytorch-metric-learning over the images and texts of all ranks, labelled with the ids of their images.

    In an expression ``pml.NAME(…)`` takes the options of the loss ``NAME`` that are numbers and words, and ``pairs``. Its
    distance, reducer and regulariser, and a miner, are objects: pass ``PML(losses.NAME(distance=…))`` instead.

    Args:
        loss: of ``pytorch_metric_learning.losses``, without parameters.
        miner: of ``pytorch_metric_learning.miners``; None: all pairs, or triplets, of the batch.
        pairs: ``all``: images and texts together are one batch of 2 N embeddings, in which also images are compared with
            images, and texts with texts; ``image-text``: images are compared with texts alone and texts with images, and the
            loss is the mean of both, for losses that take ``ref_emb``.

    Raises:
        CoderError: a loss with parameters, or one that keeps state or takes no labels.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> PML(losses.NTXentLoss(temperature=0.5), pairs="image-text")(torch.eye(2), torch.eye(2))
        tensor(0.1269)
    """

    optional = ("coder_ids",)
    gathers = ("image_features", "text_features", "coder_ids")

    def __init__(self, loss: Any, *, miner: Any = None, pairs: Pairs = "all") -> None:
        super().__init__()
        if pairs not in get_args(Pairs):
            raise CoderError(f"pairs must be one of {', '.join(get_args(Pairs))}, got {pairs!r}")
        if not isinstance(loss, nn.Module):
            raise CoderError(f"PML takes a loss of pytorch-metric-learning, not {loss!r}: losses.NTXentLoss(temperature=0.05)")
        _check(loss)
        self.loss, self.miner, self.compare = loss, miner, pairs

    def compute(self, image_features: Tensor, text_features: Tensor, coder_ids: Tensor | None = None) -> Tensor:
        """The features [N, D] of all ranks, L2-normalised, and image ids [N] -> scalar. Without ids all images differ."""
        if coder_ids is None:
            coder_ids = torch.arange(len(image_features), device=image_features.device)
        if self.compare == "all":
            embeddings, labels = torch.cat([image_features, text_features]), torch.cat([coder_ids, coder_ids])
            return self.loss(embeddings, labels, self.miner(embeddings, labels) if self.miner else None)
        directions = (image_features, text_features), (text_features, image_features)
        return sum(self._compare(*direction, coder_ids) for direction in directions) / 2  # type: ignore[return-value]

    def _compare(self, anchors: Tensor, others: Tensor, ids: Tensor) -> Tensor:
        other_ids = ids.clone()  # the library takes one and the same tensor for embeddings that are compared with themselves
        mined = self.miner(anchors, ids, others, other_ids) if self.miner else None
        return self.loss(anchors, ids, mined, others, other_ids)


def _check(loss: nn.Module) -> None:
    name = type(loss).__name__
    for module in loss.modules():
        if reason := _REFUSED.get(type(module).__name__):
            raise CoderError(f"{name} cannot be a term: it {reason}")
    if next(loss.parameters(), None) is not None:
        raise _with_parameters(name)


def _with_parameters(name: str) -> CoderError:
    return CoderError(
        f"{name} cannot be a term: it owns parameters, such as a row for each class, which no optimizer would train and no "
        "checkpoint hold; take a loss of pairs or triplets, such as NTXentLoss or MultiSimilarityLoss"
    )


@functools.cache
def library(name: str) -> type[PML]:
    """The term of a loss of ``pytorch_metric_learning.losses``, by the loss's name.

    Raises:
        CoderError: no such loss, one with parameters, or pytorch-metric-learning is not installed.

    Example:
        >>> library("TripletMarginLoss")(margin=0.2).loss.margin
        0.2
    """
    try:
        from pytorch_metric_learning import losses
    except ImportError as error:
        raise CoderError(f"pml.{name} needs pytorch-metric-learning: {install_command('pml')} ({error})") from error
    base, generic = losses.BaseMetricLossFunction, (losses.BaseMetricLossFunction, losses.GenericPairLoss)
    found = {key: cls for key, cls in vars(losses).items() if isinstance(cls, type) and issubclass(cls, base)}
    with_parameters = {key for key, cls in found.items() if issubclass(cls, losses.WeightRegularizerMixin)}
    if name in with_parameters:
        raise _with_parameters(name)
    if name in _REFUSED:
        raise CoderError(f"{name} cannot be a term: it {_REFUSED[name]}")
    known = sorted(key for key in found.keys() - with_parameters - _REFUSED.keys() if found[key] not in generic)
    if name not in known:
        hint = did_you_mean(name, known) or ";"
        raise CoderError(f"pytorch-metric-learning has no loss {name!r}{hint} known: {', '.join(known)}")
    cls = found[name]

    class Named(PML):
        __doc__ = cls.__doc__

        def __init__(self, *, pairs: Pairs = "all", **options: Any) -> None:
            try:
                loss = cls(**options)
            except Exception as error:  # it may raise any, of values that it does not check
                raise CoderError(f"pytorch-metric-learning refuses them: {type(error).__name__}: {error}") from error
            super().__init__(loss, pairs=pairs)

    Named.__name__ = Named.__qualname__ = name
    first, pairs, _ = inspect.signature(Named.__init__).parameters.values()
    signature = inspect.Signature([first, *_options(cls, base), pairs])
    Named.__init__.__signature__ = signature  # type: ignore[attr-defined]
    return Named


def _options(cls: Any, base: type) -> list[inspect.Parameter]:
    """The options of a loss, as keywords: those that its class names, or else the next of its bases."""
    for each in cls.__mro__[: cls.__mro__.index(base)]:
        _, *parameters = inspect.signature(each.__init__).parameters.values()
        named = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=inspect.Parameter.empty)
            for parameter in parameters
            if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        ]
        if named:
            return named
    return []
