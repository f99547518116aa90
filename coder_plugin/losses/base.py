"""What a loss term is: a parameter-free module that names the keys it reads and returns a scalar.

Shapes: B pairs of this rank, N pairs of all ranks, m hard negatives of an image, d dimensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.contrast import Block, Implementation, Pairs
from coder_plugin.data.item import NO_TEXT
from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head

#: The keys of hard negatives, which ``hard_negatives=true`` requires.
HARD_NEGATIVES = ("coder_negative_features", "coder_negative_ids")


class Term(nn.Module):
    """Base of the loss terms: ``requires`` and ``optional`` name keys of the model's output, ``forward`` takes them.

    A subclass takes its options as annotated keyword-only arguments of ``__init__``, which may change the attributes below
    where options change what the term needs. ``forward`` is called with exactly the keys that are there and returns a scalar,
    or a dict of ``*_loss`` scalars.

    A term that compares the pairs of all ranks names in ``gathers`` the arguments whose rows it needs from all ranks, and
    overrides :meth:`compute` in place of ``forward``. A step's loss then gathers what all of its terms name in one collective,
    each tensor once. :meth:`pairs` gives the negatives of each anchor.

    A term owns no parameters and no buffers. Whatever is trained belongs to a head, under ``model.coder``, and is used
    inside the model's forward. State (banks, cluster centres) belongs to heads too: a term reads it from
    :meth:`provider` and hands new values to ``head.stash(...)``, which are written after the optimizer step.

    Example:
        >>> class Gap(Term):
        ...     def __init__(self, *, weight: float = 1.0) -> None:
        ...         super().__init__()
        ...         self.weight = weight
        ...     def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        ...         return self.weight * (image_features.mean(0) - text_features.mean(0)).square().sum()
        >>> import torch
        >>> Gap(weight=2.0)(torch.ones(4, 3), torch.zeros(4, 3))
        tensor(6.)
    """

    requires: tuple[str, ...] = ("image_features", "text_features")
    #: Keys that are read where they are there. Of ``coder_ids``: the term masks pairs of one image by them.
    optional: tuple[str, ...] = ()
    #: Arguments that :meth:`compute` takes from all ranks, [N, ...] in rank order; the others are this rank's.
    gathers: tuple[str, ...] = ()
    #: ``same_image``: other captions of an image are not its negatives (trainers warn about a term without it); ``views``:
    #: ``image_features`` may be [B, v, d], of which the greatest similarity counts; ``hard_negatives``: it has the option of
    #: that name; ``ring``: with ``gather="ring"`` :meth:`compute` takes this rank's arguments alone.
    supports: frozenset[str] = frozenset({"same_image"})
    #: Options of heads by head, which follow from the term's own.
    head_options: Mapping[str, Mapping[str, Any]] = {}

    #: Whether each rank computes the rows of its own anchors only, instead of all rows; set by ``create_loss``.
    local_loss: bool = False
    #: Whether one rank's rows after the other visit this one, instead of being gathered; set by ``create_loss``.
    ring: bool = False
    #: How losses of pairs are computed: ``auto``, ``reference`` or ``tiled``; set by ``create_loss``.
    implementation: Implementation = "auto"

    def __init__(self) -> None:
        super().__init__()
        self._heads: tuple[Mapping[str, Head]] = ({},)  # in a tuple: the model owns its heads, the loss must not

    @property
    def heads(self) -> Mapping[str, Head]:
        """The model's heads by name."""
        return self._heads[0]

    def provider(self, key: str, *attributes: str) -> Any:
        """The head that provides a key. A plugin's head may provide it.

        Raises:
            CoderError: no head provides the key, or the head lacks one of the ``attributes``.
        """
        for name, head in self.heads.items():
            if key in head.provides:
                missing = [attribute for attribute in attributes if not hasattr(head, attribute)]
                if missing:
                    raise CoderError(f"{type(self).__name__} needs a head with {', '.join(missing)}; {name!r} has none")
                return head
        raise CoderError(f"{type(self).__name__} reads {key!r}, which no head of this model provides")

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        """Give the term the model's heads. A term that refuses a model raises :class:`CoderError` here."""
        self._heads, self.local_loss = (heads,), local_loss
        return self

    def pairs(
        self,
        images: Tensor,
        texts: Tensor,
        ids: Tensor | None = None,
        *,
        hard: tuple[Tensor | None, Tensor | None] = (None, None),
        hard_ids: Tensor | None = None,
    ) -> Pairs:
        """The pairs of a step, which know each anchor's negatives, local loss and ring included.

        Args:
            images: [N, d], L2-normalised, as ``compute`` takes them. texts: [N, d].
            ids: image ids [N]; pairs of one image are not each other's negatives. None: all distinct.
            hard: texts that are further negatives of every image [N, m, d], and the images that they are captions of [N, m].
            hard_ids: image ids [N] that exclude an image's own captions among them. Default: ``ids``.
        """
        ring = self.ring and distributed.world_size() > 1
        anchors = None if ring else anchors_of_rank(len(images), local_loss=self.local_loss)
        return Pairs(
            images,
            texts,
            ids,
            hard=hard_block(*hard, ids if hard_ids is None else hard_ids),
            anchors=anchors,
            gather=None if anchors is None else distributed.gather,
            ring=ring,
            implementation=self.implementation,
        )

    def forward(self, *args: Any, **outputs: Any) -> Tensor | dict[str, Tensor]:
        """This rank's outputs of the model -> a scalar, or a dict of ``*_loss`` scalars.

        With the further keyword ``gathered``, the arguments in ``gathers`` of all ranks by name, nothing is gathered here.
        """
        gathered = outputs.pop("gathered", None)
        outputs = {**inspect.signature(self.compute).bind_partial(*args).arguments, **outputs} if args else outputs
        if gathered is None:
            ring = self.ring and distributed.world_size() > 1
            gathered = {} if ring else gathered_arguments([(self.gathers, outputs)])[0]
        return self.compute(**{**outputs, **gathered})

    def compute(self, *args: Any, **outputs: Any) -> Any:
        """The loss, from the arguments in ``gathers`` of all ranks and the others of this rank: as ``forward`` returns it."""
        raise NotImplementedError(f"{type(self).__name__} must override forward(), or compute() where it sets gathers")


def hard_block(features: Tensor | None, ids: Tensor | None, image_ids: Tensor | None) -> Block | None:
    """Hard negatives of all pairs as one block of candidates; None without them.

    Args:
        features: [N, m, d], L2-normalised, or keys.
        ids: of the images that they are captions of [N, m]; -2 where there is no text.
        image_ids: of the pairs [N]; None: every hard negative is one of every image.
    """
    if features is None or ids is None:
        return None
    ids = ids.flatten()
    return Block(features.flatten(0, 1), ids, image_ids, ids != NO_TEXT)


def anchors_of_rank(count: int, *, local_loss: bool) -> slice | None:
    """The anchors among the ``count`` rows of the global batch: with a local loss those of this rank; None: all."""
    return rows_of_rank(count) if local_loss and distributed.world_size() > 1 else None


def rows_of_rank(count: int) -> slice:
    """The rows of this rank among the ``count`` rows of all ranks."""
    own = count // distributed.world_size()
    return slice(distributed.rank() * own, (distributed.rank() + 1) * own)


def gathered_arguments(
    terms: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], **options: Any
) -> list[dict[str, Tensor]]:
    """The gathered arguments of several terms, from one collective in which each tensor travels once.

    Args:
        terms: of each, its ``gathers`` and its arguments from this rank.
        options: of :func:`coder_plugin.distributed.gather_together`.
    """
    if distributed.world_size() == 1:
        return [{} for _ in terms]
    distinct: list[Tensor] = []
    places: list[dict[str, int]] = []
    for names, arguments in terms:
        place = {}
        for name in names:
            tensor = arguments.get(name)
            if tensor is not None:
                place[name] = next((k for k, other in enumerate(distinct) if other is tensor), len(distinct))
                if place[name] == len(distinct):
                    distinct.append(tensor)
        places.append(place)
    rows = distributed.gather_together(distinct, **options)
    return [{name: rows[number] for name, number in place.items()} for place in places]


class ModuleTerm(Term):
    """A plain module as a term: it needs only ``requires``; ``optional`` and ``supports`` may be there too.

    Args:
        module: called with its keys as keywords; returns a scalar or a dict of ``*_loss`` scalars.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.requires, self.optional = tuple(module.requires), tuple(getattr(module, "optional", ()))
        self.supports = frozenset(getattr(module, "supports", Term.supports))

    def forward(self, **outputs: Any) -> Tensor | dict[str, Tensor]:
        return self.module(**outputs)
