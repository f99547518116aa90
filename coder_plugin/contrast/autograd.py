"""What the own autograd functions share: blocks as arguments, tiles that visit other ranks, derivatives of higher order.

Shapes: a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coder_plugin.contrast.negatives import Block, Direction, excluded
from coder_plugin.contrast.ring import ring_pass
from coder_plugin.errors import CoderError

#: Tensors by name that belong to a block, and visit other ranks together with it.
Visitor = Mapping[str, Tensor]

FIELDS = len(Block._fields)


def flatten(blocks: Sequence[Block]) -> list[Any]:
    """The fields of all blocks in a row, as an autograd function takes them; :func:`unflatten` is the inverse.

    A compiled one takes no tensor twice, such as ids that are those of the anchors too: each is a view of its own then.
    """
    fields = [field for block in blocks for field in block]
    if torch.compiler.is_compiling():
        return [field.view_as(field) if isinstance(field, Tensor) else field for field in fields]
    return fields


def apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function; only its forward pass where no gradient is needed, which ``torch.compile`` cannot tell."""
    needed = any(each.requires_grad for each in arguments if isinstance(each, Tensor))
    return function.apply(*arguments) if needed and torch.is_grad_enabled() else function.forward(*arguments)


def unflatten(fields: Sequence[Any]) -> list[Block]:
    return [Block(*fields[k : k + FIELDS]) for k in range(0, len(fields), FIELDS)]


def save(ctx: Any, blocks: Sequence[Block], *tensors: Tensor | None) -> None:
    """Save tensors and blocks for the backward pass, which gets them from :func:`saved`."""
    ctx.visits = [block.visits for block in blocks]
    ctx.save_for_backward(*tensors, *(field for block in blocks for field in block[:-1]))


def saved(ctx: Any, number: int) -> tuple[list[Any], list[Block]]:
    """The ``number`` tensors and the blocks of :func:`save`."""
    tensors, width = list(ctx.saved_tensors), FIELDS - 1
    starts = range(number, len(tensors), width)
    blocks = [Block(*tensors[k : k + width], visits) for k, visits in zip(starts, ctx.visits, strict=True)]  # type: ignore[call-arg]
    return tensors[:number], blocks


def visit(
    block: Block,
    run: Callable[[Visitor], list[Tensor]],
    *,
    ring: bool,
    merge: Callable[[Tensor, Tensor], Tensor] = Tensor.add_,
    more: Visitor | None = None,
) -> list[Tensor]:
    """Call ``run`` with the tensors of a block: of this rank, or in a ring of every rank, and return what concerns this rank's.

    Args:
        merge: in a ring, joins two ranks' results about one block.
        more: further tensors that belong to the block's rows.
    """
    tensors = {"rows": block.rows, "ids": block.ids, "valid": block.valid, **(more or {})}
    present = {name: each for name, each in tensors.items() if each is not None}
    if not (ring and block.visits):
        return run(present)
    return ring_pass(list(present.values()), lambda values: run(dict(zip(present, values, strict=True))), merge)


def exclude(
    similarity: Tensor, visitor: Visitor, anchor_ids: Tensor | None, part: slice, tile: slice, ceiling: Tensor | None = None
) -> Tensor:
    """A tile of similarities with -inf where a candidate is not a negative, in place."""
    ids, valid = visitor.get("ids"), visitor.get("valid")
    mask = excluded(
        None if ids is None else ids[tile],
        None if anchor_ids is None else anchor_ids[part],
        None if valid is None else valid[tile],
    )
    if ceiling is not None:
        above = similarity > ceiling[part, None]
        mask = above if mask is None else mask | above
    return similarity if mask is None else similarity.masked_fill_(mask, -torch.inf)


def result_dtype(anchors: Tensor, blocks: Sequence[Block]) -> torch.dtype:
    """The type of similarities and sums: float32, or float64 if any row is."""
    dtype = torch.promote_types(anchors.dtype, torch.float32)
    for block in blocks:
        dtype = torch.promote_types(dtype, block.rows.dtype)
    return dtype


def wants_graph() -> bool:
    """Whether a backward pass that runs now must be differentiable itself (``create_graph=True``, ``torch.func``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def dense_gradients(
    statistic: Callable[..., Any], inputs: Sequence[Tensor], needed: Sequence[bool], gradient: Any, *, ring: bool = False
) -> list[Tensor | None]:
    """The gradients of a statistic with a graph of their own, from the dense form, for derivatives of higher order.

    Args:
        statistic: a function of ``inputs``, of differentiable operations.
        needed: which inputs need a gradient.
    """
    if ring:
        raise CoderError("gather='ring' has first derivatives only: take gather='all' for derivatives of a gradient")

    def of_needed(*leaves: Tensor) -> Any:
        rest = iter(leaves)
        return statistic(*(next(rest) if wanted else each for each, wanted in zip(inputs, needed, strict=True)))

    _, pull_back = torch.func.vjp(of_needed, *(each for each, wanted in zip(inputs, needed, strict=True) if wanted))  # type: ignore[misc]
    gradients = iter(pull_back(gradient))
    return [next(gradients) if wanted else None for wanted in needed]


def directions_of(anchors: Tensor, blocks: Sequence[Block], *, mirrored: bool) -> list[Direction]:
    """One direction; or, mirrored, also that of the only block's rows as anchors."""
    directions = [Direction(anchors, tuple(blocks))]
    if mirrored:
        (block,) = blocks
        directions.append(Direction(block.rows, (Block(anchors, block.anchor_ids, block.ids),)))
    return directions


def any_arguments(function: Any) -> Any:
    """Let torch call an autograd function with its arguments as they are: by default it binds them to ``forward``'s signature
    in every call, which takes as long as a small operation."""
    arguments = inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)
    function.forward.__signature__ = inspect.Signature([arguments])
    return function
