"""What the tests of the losses share: drawn features, the forms of a loss side by side, derivatives, and several ranks."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.contrast import Negatives, Pairs, products, sums, tiles, variance
from coder_plugin.heads.base import Head
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests import gloo

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "data" / "vectors"
#: What an open_clip model returns.
KEYS = frozenset({"image_features", "text_features", "logit_scale", "logit_bias"})
EXACT = {"rtol": 1e-9, "atol": 1e-9}
KINDS = ("std", "entropy", "none")
#: Options of dcl that are out of range, and messages.
BAD_DCL_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"mu": value}, f"mu must be > 0 and finite, got {value}") for value in (0, math.nan, math.inf)),
    ({"gamma": -math.inf}, "gamma must be finite, got -inf"),
    ({"epsilon": math.nan}, "epsilon must be > 0 and finite, got nan"),
    ({"epsilon": 0, "diversity": "none"}, "epsilon must be > 0 and finite, got 0"),
    ({"diversity": "sd"}, "diversity must be 'std', 'entropy' or 'none', got 'sd'"),
    *(
        ({"positive_weight": value}, f"positive_weight must be a finite number >= 0 or 'mu', got {value!r}")
        for value in (-1, math.inf, "half")
    ),
    *(({"effective_negatives": value}, f"effective_negatives must be >= 1 or none, got {value}") for value in (0, math.inf)),
]
FORMS = ("reference", "tiled")


# -- inputs ----------------------------------------------------------------------------------------------------------


def vectors(name: str) -> dict[str, Any]:
    """Inputs and expected values that this code did not make; the test is skipped where they are not there."""
    file = VECTORS / f"{name}.npz"
    if not file.exists():
        pytest.skip(f"no expected values here: {file}")
    return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in np.load(file).items()}


def drawing(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(generator: torch.Generator, n: int, d: int, spread: float = 1.0) -> Tensor:
    """Unit vectors [n, d], float64; with a small spread all are nearly equal."""
    common = torch.ones(d, dtype=torch.float64)
    return normalize(common / spread + torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)


def dcl_options(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Options of dcl that tiles support, and ``more``."""
    values = {
        "mu": [0.003, 0.05, 0.1, 1.0], "gamma": [0.0, 0.3], "epsilon": [0.01, 0.1], "diversity": ["std", "std", "none"],
        "positive_weight": [0.0, 1.0, "mu"], "effective_negatives": [None, 50],
    }  # fmt: skip
    return st.fixed_dictionaries({**{name: st.sampled_from(each) for name, each in values.items()}, **more})


def drawn_terms(name: str, number: int, **more: Sequence[Any]) -> list[str]:
    """Terms with options of dcl that a ring supports, and ``more``, drawn."""
    values = {
        "mu": (0.02, 0.1, 0.7), "gamma": (-0.2, 0.0, 0.3, 0.8), "epsilon": (0.01, 0.1, 1.0),
        "diversity": ("std", "std", "none"), "positive_weight": (1.0, 0.3, "mu"),
        "mask_same_image": (True, True, False), "hard_negatives": (True, False, False),
        "effective_negatives": (None, None, 1, 50), **more,
    }  # fmt: skip
    draw = random.Random(7)
    options = [{key: draw.choice(each) for key, each in values.items()} for _ in range(number)]
    return [expression(name, {key: value for key, value in each.items() if value is not None}) for each in options]


def pair(n: int, d: int, *, seed: int = 0, spread: float = 1e3) -> tuple[Tensor, Tensor]:
    """Images and texts."""
    generator = drawing(seed)
    return rows(generator, n, d, spread), rows(generator, n, d, spread)


def hard_negatives(generator: torch.Generator, m: int, d: int, images: int) -> dict[str, Tensor]:
    """Hard negatives as the losses take them: some of them captions of the ``images`` 0, 1, ..., some of an unknown image (-1),
    some places without a text (-2)."""
    ids = torch.randint(-2, images + 3, (m,), generator=generator)
    return {"negatives": rows(generator, m, d, 1e3), "negative_ids": ids, "negative_valid": ids != -2}


def close(got: Any, want: Any, **tolerance: float) -> None:
    """Equal to 1e-9, whatever is a number or a tensor of either float type."""
    got, want = (torch.as_tensor(each, dtype=torch.float64) for each in (got, want))
    torch.testing.assert_close(got, want, **tolerance or EXACT)


# -- forms: the reference and tiles ----------------------------------------------------------------------------------


@contextlib.contextmanager
def tile_shape(
    elements: int, *, anchors: int = 4096, one_tile: int = 0, kept: int = 0, whole_rows: bool = True
) -> Iterator[None]:
    """Tiles of at most so many elements and anchors. ``one_tile``: batches of so many similarities are one tile. ``kept``: of
    so many they are kept. ``whole_rows=False``: both directions share squares, as on a GPU."""
    cut = products.tiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "TILE_ON_CPU", elements)
        patch.setattr(products, "MAX_ANCHORS", anchors)
        patch.setattr(tiles, "ONE_TILE", one_tile)
        patch.setattr(sums, "MAX_KEPT", kept)
        if not whole_rows:
            for module in (sums, tiles, variance):
                patch.setattr(module, "tiles", lambda anchors, candidates, **_: cut(anchors, candidates))
        yield


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Ragged tiles of a few rows, where 4 pairs and fewer are one tile."""
    with tile_shape(150, anchors=5, one_tile=20):
        yield


#: Ragged rows, without and with similarities that are kept; ragged squares of 5 anchors; single elements nearly; one tile.
TILE_SHAPES: tuple[dict[str, Any], ...] = (
    {"elements": 150},
    {"elements": 150, "kept": 1 << 24},
    {"elements": 40, "anchors": 5, "whole_rows": False},
    {"elements": 2, "anchors": 3},
    {"elements": 1 << 21, "one_tile": 1 << 24},
)


def value_and_gradient(function: Callable[..., Tensor], *features: Tensor) -> list[Tensor]:
    """The value of a scalar function, and its gradient with respect to each of the features; zero where it has none."""
    leaves = [each.detach().clone().requires_grad_() for each in features]
    value = function(*leaves)
    gradients = [torch.zeros_like(each) for each in leaves]
    if value.requires_grad:
        gradients = list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    return [value.detach(), *gradients]


def compare_forms(function: Callable[..., Tensor], *features: Tensor, bound: float = 1e-10, **options: Any) -> None:
    """The reference, tiles of three shapes (tests/contrast/ has all) and ``auto``: value and gradients differ by at most
    ``bound``, relative to the largest. ``function`` takes ``implementation`` and the ``options``."""

    def results(form: str) -> list[Tensor]:
        return value_and_gradient(lambda *leaves: function(*leaves, implementation=form, **options), *features)

    reference = results("reference")
    for form, shape in (*(("tiled", TILE_SHAPES[number]) for number in (0, 2, 4)), ("auto", TILE_SHAPES[1])):
        with tile_shape(**shape):
            got = results(form)
        for name, one, other in zip(("value", *"abcdefg"), got, reference, strict=False):
            assert one.dtype == other.dtype, (form, shape, name)
            if other.numel():
                distance = (one - other).abs().max()
                assert distance <= bound * other.abs().max().clamp(min=1e-3), (form, shape, name, distance, options)


@pytest.fixture
def forms_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was asked for and what was taken, of every choice of a form."""
    choose, taken = Pairs.choose, []

    def chosen(pairs: Pairs, *args: Any, **options: Any) -> Negatives:
        negatives = choose(pairs, *args, **options)
        taken.append((pairs.implementation, type(negatives).__name__))
        return negatives

    monkeypatch.setattr(Pairs, "choose", chosen)
    return taken


# -- derivatives -----------------------------------------------------------------------------------------------------


def leaves_of(features: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.detach().clone().requires_grad_() for each in features)


def second_order(function: Callable[..., Tensor], *features: Tensor) -> None:
    """First and second derivatives are those of finite differences, in random directions."""
    torch.autograd.gradcheck(function, leaves_of(features), fast_mode=True)
    torch.autograd.gradgradcheck(function, leaves_of(features), fast_mode=True)


def transforms(function: Callable[..., Tensor], *features: Tensor) -> None:
    """``torch.func.grad`` and ``jacrev``, all rows at once and one by one, give the gradients of autograd."""
    which = tuple(range(len(features)))
    features = tuple(each.detach() for each in features)
    expected = value_and_gradient(function, *features)[1:]
    for transform in (torch.func.grad, torch.func.jacrev, lambda f, n: torch.func.jacrev(f, n, chunk_size=1)):
        for one, other in zip(transform(function, which)(*features), expected, strict=True):
            close(one, other, rtol=1e-10, atol=1e-10)


@contextlib.contextmanager
def held_weights(module: Any) -> Iterator[None]:
    """The diversity weights of the first call in every later one, as the stopped gradient sees them: finite differences of a
    loss would see them move."""
    first: list[Tensor] = []
    compute = module.diversity_weights

    def held(*args: Any, **options: Any) -> Tensor:
        if not first:
            first.append(compute(*args, **options).detach())
        return first[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "diversity_weights", held)
        yield


def penalised(function: Callable[..., Tensor], *features: Tensor) -> list[Tensor]:
    """Value and gradient of a loss with a gradient penalty: ``loss + 10 |gradient|^2``."""

    def loss(*leaves: Tensor) -> Tensor:
        value = function(*leaves)
        gradients = torch.autograd.grad(value, leaves, create_graph=True)
        return value + 10 * sum(each.square().sum() for each in gradients)

    return value_and_gradient(loss, *features)


def penalty_of_forms(function: Callable[..., Tensor], *features: Tensor, **options: Any) -> None:
    """Value and gradient of a gradient penalty: of ``auto`` and ``tiled`` (one tile, and several) those of the reference."""

    def results(form: str) -> list[Tensor]:
        return penalised(lambda *leaves: function(*leaves, implementation=form, **options), *features)

    want = results("reference")
    for form, shape in (("tiled", TILE_SHAPES[1]), ("tiled", TILE_SHAPES[2]), ("auto", TILE_SHAPES[-1])):
        with tile_shape(**shape):
            for one, other in zip(results(form), want, strict=True):
                close(one, other)


# -- terms -----------------------------------------------------------------------------------------------------------


def expression(name: str, options: Mapping[str, Any]) -> str:
    """A term as an objective writes it."""
    written = [f"{k}={str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in options.items()]
    return f"{name}({','.join(written)})"


def make_loss(
    objective: str, heads: Mapping[str, Head] | None = None, *, local_loss: bool = False, **options: Any
) -> CoderLoss:
    parsed = replace(Objective.parse(objective), local_loss=local_loss)
    return CoderLoss(parsed, resolve(parsed, KEYS).bindings, heads or {}, **options)


def same_options(term: type, function: Callable[..., Any], *, only_term: set[str], only_function: set[str]) -> None:
    """The options of a term have the names, defaults and types of its function's."""
    of_term, of_function = (
        {
            name: (each.default, each.annotation)
            for name, each in inspect.signature(call).parameters.items()
            if each.kind is each.KEYWORD_ONLY
        }
        for call in (term, function)
    )
    assert only_term <= of_term.keys() and only_function <= of_function.keys()
    assert {name: each for name, each in of_term.items() if name not in only_term} == {
        name: each for name, each in of_function.items() if name not in only_function
    }


D, BANK = 6, 13


class Momentum(KeepsState):
    """A provider of keys with banks, as the momentum head is."""

    provides = ("coder_image_keys", "coder_text_keys", "coder_negative_keys")

    def __init__(self, *, filled: bool = True) -> None:
        super().__init__()
        self.bank = CoupledBank(BANK, D).double()
        generator = drawing(99)
        for n in (7, 9) if filled else ():  # turns over once
            ids = torch.randint(0, 16, (n,), generator=generator)
            self.bank.enqueue(rows(generator, n, D, 1e3), rows(generator, n, D, 1e3), ids)

    def write(self, image_keys: Tensor, text_keys: Tensor, ids: Tensor) -> None:  # type: ignore[override]
        self.bank.enqueue(image_keys, text_keys, ids)


def outputs(n: int = 12, *, seed: int = 0) -> dict[str, Tensor]:
    """What a model returns for a joint batch, in which images 0 and 3, 1 and 4, 2 and 11 are one; live features are leaves."""
    generator = drawing(seed)
    keys = {
        **{f"{side}_features": rows(generator, n, D, 1e3).requires_grad_() for side in ("image", "text")},
        **{f"coder_{side}_concepts": rows(generator, n, D, 1e3).requires_grad_() for side in ("image", "text")},
        **{f"coder_{side}_keys": rows(generator, n, D, 1e3) for side in ("image", "text")},
        "coder_negative_features": rows(generator, 2 * n, D, 1e3).view(n, 2, D).requires_grad_(),
        "coder_negative_keys": rows(generator, 2 * n, D, 1e3).view(n, 2, D),
        "coder_negative_ids": torch.randint(-2, n + 3, (n, 2), generator=generator),
        "coder_ids": torch.arange(n),
    }
    keys["coder_ids"][3:5] = keys["coder_ids"][:2].clone()
    keys["coder_ids"][-1] = 2
    return keys


# -- ranks -----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Of this rank: the loss, the gradient of each leaf's own rows, and the number of collectives."""

    value: float
    gradients: dict[str, Tensor]
    collectives: int


def share(joint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows of a joint batch, with new leaves where the joint ones need a gradient; numbers as they are."""
    rank, ranks = distributed.rank(), distributed.world_size()
    own = {
        key: (each if not each.ndim else each[rank * len(each) // ranks : (rank + 1) * len(each) // ranks]).detach().clone()
        for key, each in joint.items()
    }
    return {key: each.requires_grad_(joint[key].requires_grad) for key, each in own.items()}


def step_of_rank(loss: CoderLoss, joint: Mapping[str, Tensor]) -> Step:
    """A step of a loss with this rank's share of a joint batch; with one process, of all of it."""
    outputs, before = share(joint), distributed.collectives()
    value = loss(**outputs, output_dict=False)
    leaves = {key: each for key, each in outputs.items() if each.requires_grad}
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Step(value.item(), dict(zip(leaves, gradients, strict=True)), distributed.collectives() - before)


def ranks_equal_one(alone: Step, ranks: Sequence[Step], **tolerance: float) -> None:
    """The mean over the ranks is the loss of the joint batch, and so are the gradients, which DDP divides by the number of
    ranks."""
    close(sum(each.value for each in ranks) / len(ranks), alone.value, **tolerance)
    for key, whole in alone.gradients.items():
        parts = [each.gradients[key] for each in ranks]
        joined = torch.cat(parts) if whole.ndim else sum(parts)
        close(joined / len(ranks), whole, **tolerance)


#: How rows travel: every rank has the loss of all anchors; of its own; of its own in a batch so large that each rank weighs its
#: own; and the rows of one rank after the other.
WAYS: dict[str, dict[str, Any]] = {
    "all": {}, "local": {"local_loss": True}, "large": {"local_loss": True}, "ring": {"local_loss": True, "gather": "ring"}
}  # fmt: skip


def step_of_way(objective: str, way: str, **options: Any) -> tuple[Step, list[Tensor]]:
    """A step with this rank's share of :func:`outputs`, and the bank after it."""
    head = Momentum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 0 if way == "large" else 1 << 22)
        step = step_of_rank(make_loss(objective, {"momentum": head}, **WAYS[way], **options), outputs())
    if head._stashed:
        head.post_step()
    return step, [head.bank.image, head.bank.ids, head.bank.pointer, head.bank.text_moments.second]


def steps_of_ways(objectives: Sequence[str]) -> dict[tuple[str, str], tuple[Step, list[Tensor]]]:
    """A step of each objective in each way that it supports, in small tiles."""
    steps = {}
    with tile_shape(60, anchors=4, one_tile=10):
        for objective in objectives:
            ring = all("ring" in spec.build().supports for spec in Objective.parse(objective).terms)
            steps |= {(objective, way): step_of_way(objective, way) for way in WAYS if ring or way != "ring"}
    return steps


@cache
def on_ranks(objectives: tuple[str, ...], ranks: int) -> list[dict[tuple[str, str], tuple[Step, list[Tensor]]]]:
    return gloo.run(steps_of_ways, objectives, ranks=ranks)


def every_way_equals_one_process(objectives: tuple[str, ...], ranks: int) -> None:
    """Value, gradient and the bank: by tiles on the ranks, by the reference on one process."""
    alone = {objective: step_of_way(objective, "all", implementation="reference") for objective in objectives}
    results = on_ranks(objectives, ranks)
    for case in results[0]:
        step, bank = alone[case[0]]
        steps, banks = zip(*(each[case] for each in results), strict=True)
        ranks_equal_one(step, steps)
        assert case[1] == "all" or steps[0].value != steps[1].value
        for one, other, joint in zip(*banks[:2], bank, strict=True):
            assert torch.equal(one, other), case
            torch.testing.assert_close(one, joint)


def collectives(objectives: tuple[str, ...], objective: str) -> dict[str, int]:
    """Of a step on two ranks, by way."""
    return {way: step.collectives for (each, way), (step, _) in on_ranks(objectives, 2)[0].items() if each == objective}
