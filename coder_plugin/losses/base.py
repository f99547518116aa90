"""What a loss term is: a parameter-free module that names the keys it reads and returns a scalar."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional.tiled import Implementation

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


class Term(nn.Module):
    """Base of the loss terms: ``requires`` and ``uses`` name keys of the model's output, ``forward`` takes them.

    A subclass takes its options as annotated keyword-only arguments of ``__init__``. It names in ``requires`` the keys
    it needs, and in ``uses`` those it takes if they are present; ``__init__`` may set both, if options change them.
    ``forward`` is called with exactly these keys and returns a scalar, or a dict of ``*_loss`` scalars.

    A term that compares the pairs of all ranks names in ``gathers`` the arguments whose rows it needs from all ranks, and
    overrides :meth:`compute` in place of ``forward``. A step's loss then gathers what all of its terms name in one collective,
    each tensor once. A term may also call :func:`coder_plugin.distributed.gather` in its ``forward``, for itself.

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
    uses: tuple[str, ...] = ()
    #: Arguments that :meth:`compute` takes from all ranks, [N, ...] in rank order; the others are this rank's.
    gathers: tuple[str, ...] = ()
    #: Options of heads by head, which follow from the term's own; ``__init__`` may set them.
    head_options: Mapping[str, Mapping[str, Any]] = {}
    #: False if the loss cannot mask several captions of one image; the trainer warns about such captions.
    masks_same_image: ClassVar[bool] = True
    #: Whether ``image_features`` may be [B, V, D], several features of an image of which the greatest similarity counts.
    takes_views: ClassVar[bool] = False

    #: Whether it has the option ``hard_negatives``: hard negatives of the batch as further negatives of the images.
    takes_negatives: ClassVar[bool] = False

    #: Whether each rank computes the rows of its own anchors only, instead of all rows; set by ``create_loss``.
    local_loss: bool = False
    #: Whether the rows of one rank after the other visit this one, instead of being gathered; set by ``create_loss``.
    ring: bool = False
    #: How losses of pairs are computed: ``auto``, ``reference``, ``tiled`` or ``triton``; set by ``create_loss``.
    implementation: Implementation = "auto"
    #: Whether Triton's kernels serve the term, if all rows are anchors (no local loss, or a ring); torch computes the others'.
    has_kernels: bool = False

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

    @property
    def takes_gathered(self) -> bool:
        """Whether a step's shared gather serves the term: it overrides :meth:`compute`, and not ``forward``."""
        return bool(self.gathers) and type(self).forward is Term.forward

    def forward(self, *args: Any, **outputs: Any) -> Tensor | dict[str, Tensor]:
        """This rank's outputs of the model -> a scalar, or a dict of ``*_loss`` scalars.

        With the further keyword ``gathered``, the arguments in ``gathers`` of all ranks by name, nothing is gathered here, and
        the outputs are those of :meth:`prepare`.
        """
        gathered = outputs.pop("gathered", None)
        if gathered is None:
            outputs = self.prepare(**inspect.signature(self.compute).bind_partial(*args, **outputs).arguments)
        if self.ring and distributed.world_size() > 1:
            return self.compute_in_ring(**outputs)
        if gathered is None:
            gathered = gathered_arguments([(self.gathers, outputs)])[0]
        return self.compute(**{**outputs, **gathered})

    def prepare(self, **outputs: Any) -> dict[str, Any]:
        """Change or add arguments of :meth:`compute`, from this rank's, before they are gathered."""
        return outputs

    def ring_obstacle(self) -> str | None:
        """Why the term cannot be computed without a gather, as blocks pass around the ring of ranks; None if it can be."""
        return "only dcl, clip and distill(kind=features) can"

    def compute_in_ring(self, *args: Any, **outputs: Any) -> Any:
        """The loss of this rank's anchors, from this rank's arguments alone, where :meth:`ring_obstacle` is None."""
        raise NotImplementedError(f"{type(self).__name__} must override compute_in_ring()")

    def compute(self, *args: Any, **outputs: Any) -> Any:
        """The loss, from the arguments in ``gathers`` of all ranks and the others of this rank: as ``forward`` returns it."""
        raise NotImplementedError(f"{type(self).__name__} must override forward(), or compute() where it sets gathers")


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
    """A plain module as a term: it needs only ``requires``; ``uses`` and the flags of a term are optional.

    Args:
        module: called with its keys as keywords; returns a scalar or a dict of ``*_loss`` scalars.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.requires, self.uses = tuple(module.requires), tuple(getattr(module, "uses", ()))
        for flag in ("masks_same_image", "takes_views"):
            setattr(self, flag, getattr(module, flag, getattr(self, flag)))

    def forward(self, **outputs: Any) -> Tensor | dict[str, Tensor]:
        return self.module(**outputs)


def options_of(*functions: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Let a term's ``__init__`` take the options of loss functions, so that each option is declared once.

    The decorated ``__init__`` declares its further options and ``**options``, in which it receives every option of the
    functions, defaults included. Options are the keyword-only parameters whose values a loss expression can write:
    numbers, true, false, none and words. Tensors and callables are not among them, nor is ``implementation``, which does not
    change what is minimised.

    Example:
        >>> def spread(features: Tensor, *, margin: float = 0.1, mask: Tensor | None = None) -> Tensor: ...
        >>> class Spread(Term):
        ...     @options_of(spread)
        ...     def __init__(self, *, power: int = 2, **options: Any) -> None:
        ...         super().__init__()
        ...         self.options = options
        >>> inspect.signature(Spread)
        <Signature (*, margin: 'float' = 0.1, power: 'int' = 2) -> 'None'>
        >>> Spread(power=1).options
        {'margin': 0.1}
    """
    shared: dict[str, inspect.Parameter] = {}
    types_of: dict[str, Any] = {}
    for function in functions:
        hints = typing.get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "implementation" and _is_option(hints[name]):
                shared[name], types_of[name] = parameter, hints[name]

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(init)
        first, *term_options = (p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD)
        signature = signature.replace(parameters=[first, *shared.values(), *term_options])

        @functools.wraps(init)
        def with_options(self: Any, /, **options: Any) -> None:
            bound = signature.bind(self, **options)
            bound.apply_defaults()
            init(**bound.arguments)

        with_options.__signature__ = signature  # type: ignore[attr-defined]
        hints = typing.get_type_hints(init)
        hints.pop("options", None)
        with_options.__annotations__ = {**types_of, **hints}
        return with_options

    return decorate


def _is_option(hint: Any) -> bool:
    """Whether a loss expression can write a value of this type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(_is_option(choice) for choice in typing.get_args(hint))
    return typing.get_origin(hint) is typing.Literal or hint in (bool, int, float, str, type(None))
