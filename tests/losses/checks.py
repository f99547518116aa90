"""What the tests of several losses check in the same way: degenerate batches, precision, compilation, memory, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from coder_plugin.contrast import Pairs
from coder_plugin.contrast.pairs import hard_negatives
from coder_plugin.losses.ascl import ascl_of_pairs
from coder_plugin.losses.clip import clip_of_pairs
from coder_plugin.losses.triplet import triplet_of_pairs
from tests import gloo
from tests.losses.drawn import (
    Step,
    leaves_of,
    make_loss,
    pair,
    ranks_equal_one,
    step_of_rank,
    tile_shape,
    value_and_gradient,
)
from tests.peak_memory import peak


def of_features(loss_of_pairs: Callable[..., Tensor], **defaults: Any) -> Callable[..., Tensor]:
    """A loss of ``Pairs`` as a function of features and of the options of ``Pairs``, as ``dcl`` is one."""

    def loss(
        images: Tensor,
        texts: Tensor,
        *further: Any,
        image_ids: Tensor | None = None,
        anchors: slice | None = None,
        negatives: Tensor | None = None,
        negative_ids: Tensor | None = None,
        negative_valid: Tensor | None = None,
        implementation: Any = "auto",
        **options: Any,
    ) -> Tensor:
        hard = hard_negatives(negatives, negative_ids, negative_valid, image_ids, dim=texts.shape[-1])
        pairs = Pairs(images, texts, image_ids, hard=hard, anchors=anchors, implementation=implementation)
        return loss_of_pairs(pairs, *further, **{**defaults, **options})

    return loss


ascl_of_features = of_features(ascl_of_pairs)
triplet_of_features = of_features(triplet_of_pairs, margin=0.2, hardest=True, reduction="mean")


def clip_of_features(images: Tensor, texts: Tensor, scale: Tensor, **options: Any) -> Tensor:
    """``clip`` masks no pairs: image ids are for hard negatives alone."""
    ids = options.pop("image_ids", None)
    hard = [options.pop(name, None) for name in ("negatives", "negative_ids", "negative_valid")]
    block = hard_negatives(*hard, ids, dim=texts.shape[-1])
    return clip_of_pairs(Pairs(images, texts, hard=block, **options), scale)


HALVES = (torch.bfloat16, torch.float16)


def degenerate() -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Name, images, texts and image ids of batches that have too little in them."""
    images, texts = pair(6, 8)
    yield "collapsed", images[:1].expand(6, 8), images[:1].expand(6, 8), None
    order = torch.tensor([0, 0, 1, 1, 2, 2])
    yield "duplicates", images[order], images[order], torch.tensor([0, 0, 1, 2, 3, 3])
    yield "opposite", images, -images, None
    yield "zeros", images * 0, texts * 0, None
    yield "almost zeros", images * 1e-10, texts * 1e-9, None
    yield "one pair", images[:1], texts[:1], None
    yield "two pairs", images[:2], texts[:2], None
    yield "one image", images, texts, torch.full((6,), 7)


def stays_finite(loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
    """Value and gradient of each degenerate batch, in float32 and in a half type."""
    for name, images, texts, ids in degenerate():
        for dtype in (torch.float32, torch.float16):
            results = value_and_gradient(lambda v, w, ids=ids: loss(v, w, ids), images.to(dtype), texts.to(dtype))
            assert all(each.isfinite().all() for each in results), (name, dtype)


def raises_halves(function: Callable[..., Tensor], *features: Tensor, bound: float = 1e-5) -> None:
    """Float32 of half types, which are raised first, and float64 of float64; autocast changes nothing."""
    assert function(*features).dtype == torch.float64
    for dtype in HALVES:
        rounded = [each.to(dtype) for each in features]
        got = value_and_gradient(function, *rounded)
        assert got[0].dtype == torch.float32 and all(each.dtype == dtype for each in got[1:])
        exact = function(*(each.double() for each in rounded))
        torch.testing.assert_close(got[0].double(), exact, rtol=bound, atol=bound)
    leaves = leaves_of([each.float() for each in features])
    want = function(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = function(*leaves)
    assert torch.equal(got, want) and got.dtype == torch.float32
    gradients = (torch.autograd.grad(each, leaves, allow_unused=True, materialize_grads=True) for each in (got, want))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def compiles(function: Callable[..., Tensor], *features: Tensor, one_tile: int = 1 << 24) -> None:
    """One graph, forward and backward, with the value and gradient of eager mode. ``one_tile=0``: of several tiles."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with tile_shape(1 << 21 if one_tile else 20, one_tile=one_tile):
        results = [value_and_gradient(each, *features) for each in (compiled, function)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


PAIRS = 16_384


def memory_of_pairs(
    loss: Callable[..., Tensor],
    *,
    sides: int = 2,
    bound: float,
    numbers: int = 0,
    dtype: torch.dtype = torch.float32,
    pairs: int = PAIRS,
) -> None:
    """A loss and its gradient with 1,024 dimensions need at most ``bound`` bytes, where one matrix of similarities has
    1.07 GB. ``numbers``: further leaves of no dimension."""
    leaves = [torch.empty(pairs, 1024, device="meta", dtype=dtype, requires_grad=True) for _ in range(sides)]
    leaves += [torch.empty((), device="meta", requires_grad=True) for _ in range(numbers)]
    used = peak(lambda: torch.autograd.grad(loss(*leaves), leaves))
    assert 8192 * pairs <= used <= bound, f"{used / 1e9:.2f} GB"


def hard_memory(loss: Callable[..., Tensor]) -> None:
    """4,096 images with 65,536 hard negatives, whose matrix of similarities alone has 1.07 GB."""
    live = [torch.empty(4096, 64, device="meta", requires_grad=True) for _ in range(2)]
    negatives = torch.empty(65_536, 64, device="meta", requires_grad=True)
    ids, of, valid = (
        torch.empty(n, dtype=dtype, device="meta")
        for n, dtype in ((4096, torch.int64), (65_536, torch.int64), (65_536, torch.bool))
    )
    hard = {"image_ids": ids, "negatives": negatives, "negative_ids": of, "negative_valid": valid}
    assert peak(lambda: torch.autograd.grad(loss(*live, **hard), [*live, negatives], allow_unused=True)) <= 0.5e9


# -- ranks -----------------------------------------------------------------------------------------------------------

Joint = Callable[[], dict[str, Tensor]]


def steps_of_rank(joint: Joint, expressions: Sequence[str], options: Sequence[dict[str, Any]]) -> list[Step]:
    """A step of each objective with each of the loss's options, in small tiles."""
    with tile_shape(40, anchors=5):
        return [step_of_rank(make_loss(each, **chosen), joint()) for each in expressions for chosen in options]


#: Every rank computes all rows, or those of its own anchors; all similarities at once, or tiles.
GATHERED = [{"local_loss": local, "implementation": form} for local in (False, True) for form in ("reference", "tiled")]


@cache
def _steps(joint: Joint, expressions: tuple[str, ...], forms: str, ranks: int) -> list[list[Step]]:
    options = GATHERED if forms == "gathered" else [{"local_loss": True, "gather": "ring"}]
    return gloo.run(steps_of_rank, joint, expressions, options, ranks=ranks)


def on_ranks(
    joint: Joint, expressions: Sequence[str], expression: str, *, forms: str = "gathered", ranks: int = 2
) -> list[list[Step]]:
    """The steps of all ranks with one of the objectives; all of them are run when the first is asked for."""
    every = _steps(joint, tuple(expressions), forms, ranks)
    each = len(every[0]) // len(expressions)
    place = [*expressions].index(expression) * each
    return [[steps[place + k] for steps in every] for k in range(each)]


def ranks_equal_one_process(joint: Joint, expressions: Sequence[str], expression: str, **options: Any) -> None:
    """Value and gradients are those of one process with the joint batch, and the ranks' own shares differ."""
    alone = step_of_rank(make_loss(expression), joint())
    assert any(each.norm() > 1e-3 for each in alone.gradients.values())
    for steps in on_ranks(joint, expressions, expression, **options):
        ranks_equal_one(alone, steps, rtol=1e-9, atol=1e-10)
    values = [each.value for each in steps]
    assert max(values) - min(values) > 1e-4 * abs(alone.value), "the ranks' own shares are equal"
