"""What only some heads do. A head declares it by inheriting; callers ask for the capability, never for a head's name.

>>> from coder_plugin.heads.base import BackboneInfo
>>> from coder_plugin.heads.contexts import Contexts
>>> from coder_plugin.heads.basic import Ids
>>> sizes = BackboneInfo(embed_dim=4, image_contexts=4, text_contexts=4)
>>> heads = {"ids": Ids(sizes), "contexts": Contexts(sizes)}
>>> list(heads_with(heads, Scores))
['contexts']

Shapes: B batch, D joint dimension, F channels of a block, T text positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from coder_plugin.backbones.word_embeddings import TextBatch, WordEmbeddings
from coder_plugin.heads.base import Head

Capability = TypeVar("Capability", bound=Head)


class Scores(Head):
    """Adds to the retrieval score an inner product of blocks, each computed from one side's features.

    ``S <- base * S + weight * <image_block, text_block>`` with ``(base, weight) = score_weights()``. The blocks are appended
    to the retrieval vectors, multiplied by ``sqrt(weight)``.
    """

    #: Whether the head's part is added to an unchanged score: ``base`` is 1.
    adds_score: ClassVar[bool] = False
    #: F, channels of the block; None: the weight of the score cannot be changed without training again.
    block_dim: int | None = None

    def score_weights(self) -> tuple[float, float]:
        """``(base, weight)``, both >= 0. A ``weight`` of 0 leaves the block out."""
        raise NotImplementedError

    def image_block(self, features: Mapping[str, Tensor]) -> Tensor:
        """Keys of the backbone for B images -> block of their retrieval vectors [B, F]."""
        raise NotImplementedError

    def text_block(self, features: Mapping[str, Tensor]) -> Tensor:
        """Keys of the backbone for B texts -> block of their retrieval vectors [B, F]."""
        raise NotImplementedError

    def weighing(self, weight: float) -> AbstractContextManager[None]:
        """Inside the context the score uses another weight. Needed where :attr:`block_dim` is set.

        Args:
            weight: ``base``, the weight of the other scores, in [0, 1]; if ``adds_score``, ``weight`` of the head's part, >= 0.
        """
        raise NotImplementedError


class PairScorer(Protocol):
    """Scores of a data set's pairs, N images and M texts."""

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        """int64 [G, a] and [G, b] -> scores [G, a, b]: in each of G groups every image with every text."""
        ...

    def all_pairs(self) -> Tensor:
        """-> scores [N, M] on the CPU."""
        ...


class Reranks(Head):
    """Scores the pairs of a shortlist, from stored items of each image and each text.

    Either a head that a loss trains (:class:`~coder_plugin.heads.fusion.Fusion`), which re-ranks its model's shortlists, or a
    class of the entry-point group ``coder_plugin.rerankers``, such as :class:`~coder_plugin.heads.maxsim.MaxSim`, which
    ``--reranker NAME`` builds beside any model: called with :class:`~coder_plugin.heads.base.BackboneInfo` and keyword-only
    options, it ``requires`` the keys that :meth:`image_item` and :meth:`text_item` read.

    Example:
        >>> import torch
        >>> from coder_plugin.heads.base import BackboneInfo
        >>> class Pooled(Reranks):
        ...     requires = ("image_pooled",)
        ...     def __init__(self, backbone): super().__init__()
        ...     def image_item(self, features): return {"vector": features["image_pooled"]}
        ...     def text_item(self, features): return {"vector": features["text_features"]}
        ...     def scorer(self, images, texts): return Products(images["vector"].float(), texts["vector"].float())
        >>> class Products:
        ...     def __init__(self, images, texts): self.images, self.texts = images, texts
        ...     def __call__(self, image_index, text_index):
        ...         return torch.einsum("gad,gbd->gab", self.images[image_index], self.texts[text_index])
        ...     def all_pairs(self): return self.images @ self.texts.T
        >>> head, one = Pooled(BackboneInfo(embed_dim=2)), torch.tensor([[3.0, 4.0]])
        >>> head.scorer(head.image_item({"image_pooled": one}), head.text_item({"text_features": one})).all_pairs()
        tensor([[25.]])
    """

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keys of the backbone for B images -> what scoring them needs, batch-first. Floating-point tensors are stored in half
        precision where their values fit; batches are padded with zeros to be joined."""
        raise NotImplementedError

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keys of the backbone for B texts -> what scoring them needs, batch-first."""
        raise NotImplementedError

    def scorer(self, images: Mapping[str, Tensor], texts: Mapping[str, Tensor]) -> PairScorer:
        """Items of a data set's N images and M texts -> what scores their pairs."""
        raise NotImplementedError


class KeepsState(Head):
    """Has buffers that change once per performed optimizer step.

    A term, or the head's own forward, hands new values to :meth:`stash`; :meth:`post_step` passes them to :meth:`write`.
    A step that is skipped writes nothing, and of accumulated forwards the last one is written.

    Example:
        >>> import torch
        >>> class Counter(KeepsState):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("pairs", torch.tensor(0))
        ...     def write(self, pairs): self.pairs += pairs
        >>> counter = Counter()
        >>> counter.stash(pairs=8)
        >>> counter.post_step(), counter.post_step(), counter.pairs
        (None, None, tensor(8))
    """

    def __init__(self) -> None:
        super().__init__()
        self._stashed: dict[str, Any] = {}
        needed = [each for each in inspect.signature(self.write).parameters.values() if each.default is each.empty]
        #: Whether :meth:`write` needs values, and none were ever stashed.
        self.unfed: bool = any(each.kind is not each.VAR_KEYWORD for each in needed)
        #: Parameters [K, F] of which :meth:`write` has started rows anew, and which rows, bool [K].
        self.replaced_rows: list[tuple[Tensor, Tensor]] = []

    def stash(self, **values: Any) -> None:
        """Add to what the next :meth:`post_step` writes. A later value of the same name replaces the earlier one."""
        self._stashed, self.unfed = {**self._stashed, **values}, False

    def stashed(self) -> dict[str, Tensor]:
        """The floating-point tensors of the stash, by name. A trainer checks that they are finite before the step."""
        return {
            name: value
            for name, value in self._stashed.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def device_scalars(self) -> dict[str, Tensor]:
        """What :meth:`write` would otherwise wait for: 0-d tensors by name, equal on all ranks.

        A trainer reads them in the transfer that reads the losses, and stashes the numbers under the same names.
        """
        return {}

    def first_rank_values(self) -> Tensor | None:
        """What :meth:`post_step` would otherwise broadcast: numbers of which all ranks take the first rank's, float [k].

        A trainer of several ranks sends them with the gradients, and stashes the first rank's as ``first_rank``.
        """
        return None

    def discard(self) -> None:
        """Forget the stash: the loss was computed, but no step follows."""
        self._stashed = {}

    def post_step(self) -> None:
        """Write the stash. Called once after every optimizer step that was performed."""
        values, self._stashed = self._stashed, {}
        if values:
            self.write(**values)

    def write(self, **values: Any) -> None:
        """Put stashed values into the buffers. Subclasses that stash override it.

        Raises:
            NotImplementedError: values were stashed, and the subclass does not say where they go.
        """
        raise NotImplementedError(f"{type(self).__name__} must override write(): {', '.join(values)} were stashed")

    def take_replaced_rows(self) -> list[tuple[Tensor, Tensor]]:
        """:attr:`replaced_rows`, which are then forgotten: the optimizer's moments of these rows do not hold any more."""
        replaced, self.replaced_rows = self.replaced_rows, []
        return replaced

    def health(self) -> dict[str, float]:
        """Figures for the log that show whether the state is sound, such as how full a bank is."""
        return {}


class FollowsModel(Head):
    """Keeps a copy of the model or a reference to it."""

    def attach(self, model: Any) -> None:
        """Called when the model is complete, and again after its modules were replaced (adapters)."""
        raise NotImplementedError


class AddsTexts(Head):
    """Has further texts encoded together with the captions."""

    #: Expression of the generators of positive captions, for the loader, or None.
    positives: str | None
    #: ``input``: noise goes into word embeddings. ``output``: into the tokens that the text tower returns.
    noise_at: str

    def further_texts(
        self, embeddings: WordEmbeddings, text: Tensor, text_positive: Tensor | None = None
    ) -> TextBatch:
        """Captions [B, T] and, from the loader, their positives [B, T], int64 -> all texts to encode.

        Args:
            embeddings: says which positions are words.

        Raises:
            ValueError: positives of another shape than the captions.
        """
        raise NotImplementedError


def heads_with(heads: Mapping[str, Any], capability: type[Capability]) -> dict[str, Capability]:
    """The heads that have a capability, by name, in their order."""
    return {name: head for name, head in heads.items() if isinstance(head, capability)}


def heads_having(heads: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The heads, or classes of heads, that have an optional method of :class:`Head`, by name, in their order."""
    return {name: head for name, head in heads.items() if hasattr(head, method)}


def affects_ranking(head: Head | type[Head]) -> bool:
    """Whether evaluation and search need the head. Exports keep it."""
    cls = head if isinstance(head, type) else type(head)
    return issubclass(cls, (Scores, Reranks))
