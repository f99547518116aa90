"""``gather="ring"``: no rank holds the global batch, and values and gradients are those of the gathered batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from coder_plugin import create_loss, create_model, distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import tiled
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests import gloo
from tests.test_distributed import KEYS, PAIRS, Towers, distance, joint_batch

#: label: objective, whether ids are given
LOSSES = {
    "dcl": ("dcl", True),
    "dcl without ids": ("dcl", False),
    "dcl not masked": ("dcl(mask_same_image=false)", True),
    "dcl options": ("dcl(mu=0.05,gamma=0.1,epsilon=0.7,positive_weight=2.5)", True),
    "dcl printed": ("dcl(positive_weight=mu,epsilon=0.02)", True),
    "dcl effective": ("dcl(effective_negatives=50)", True),
    "dcl none": ("dcl(diversity='none')", True),
    "dcl none effective": ("dcl(diversity='none',effective_negatives=50)", True),
    "dcl none effective without ids": ("dcl(diversity='none',effective_negatives=50)", False),
    "clip": ("clip", True),
    "both": ("2*dcl + 0.1*clip", True),
}


def make_loss(expression: str, **options: Any) -> CoderLoss:
    objective = replace(Objective.parse(expression), local_loss=True)
    return CoderLoss(objective, resolve(objective, KEYS).bindings, {}, **options)


def step(name: str, gather: str, ranks: int) -> dict[str, Any]:
    """Loss and gradients of this rank's share of the joint batch; of all of it where there is one process."""
    expression, with_ids = LOSSES[name]
    model = Towers(Objective.parse(expression)).double()
    loss = make_loss(expression, gather=gather)
    images, texts, ids = joint_batch(ranks, torch.float64)
    if distributed.world_size() > 1:
        own = slice(distributed.rank() * PAIRS, (distributed.rank() + 1) * PAIRS)
        images, texts, ids = images[own], texts[own], ids[own]
    wrapped = DistributedDataParallel(model) if distributed.world_size() > 1 else model
    outputs = wrapped(images, texts)
    for key in ("image_features", "text_features"):
        outputs[key].retain_grad()
    if with_ids:
        outputs["coder_ids"] = ids
    value = loss(**outputs, output_dict=False)
    value.backward()
    return {
        "value": value.item(),
        "features": torch.stack([outputs[key].grad for key in ("image_features", "text_features")]),
        "parameters": {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad},
    }


class Largest(TorchDispatchMode):
    """The most elements that the storage of a result has had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


B, D = 24, 40


def largest_tensor(expression: str, gather: str) -> int:
    """The elements of the largest tensor of a loss and its gradient, with B pairs on each rank."""
    generator = torch.Generator().manual_seed(distributed.rank())
    features = [normalize(torch.randn(B, D, generator=generator), dim=1).requires_grad_() for _ in range(2)]
    outputs = dict(zip(("image_features", "text_features"), features, strict=True))
    loss = make_loss(expression, gather=gather)
    with Largest() as largest:
        ids = torch.arange(B) // 2 + distributed.rank()
        loss(**outputs, logit_scale=torch.tensor(9.0), coder_ids=ids, output_dict=False).backward()
    return largest.elements


def halves(gather: str) -> tuple[float, Tensor]:
    """Value and gradient of float16 features, multiplied as on a GPU."""
    generator = torch.Generator().manual_seed(distributed.rank())
    features = [normalize(torch.randn(2, B, D, generator=generator), dim=2).half().requires_grad_()][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "multiplies_halves", lambda device: True)
        # on one rank far smaller slopes than on the others
        value = 10.0 ** (-6 * distributed.rank()) * make_loss("dcl", gather=gather)(
            image_features=features[0], text_features=features[1], output_dict=False
        )
        (gradient,) = torch.autograd.grad(value, features)
    return value.item(), gradient


def work(ranks: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE_ON_CPU", 2)  # a row of two columns, or one of more
        small = {name: step(name, "ring", ranks) for name in LOSSES}
    return {
        "ring": {name: step(name, "ring", ranks) for name in LOSSES},
        "small tiles": small,
        "all": {name: step(name, "all", ranks) for name in LOSSES},
        "largest": {(name, form): largest_tensor(name, form) for name in ("dcl", "clip") for form in ("ring", "all")},
        "halves": [halves(form) for form in ("ring", "all")],
        "passes": passes(),
    }


def passes() -> list[Any]:
    """Tensors of several types to the next rank; two passes that overlap; and the number of passes that were counted."""
    rank, before = distributed.rank(), distributed.collectives()
    first = distributed.pass_on([torch.full((2, 3), float(rank)).T, torch.tensor([2**62 + rank]), torch.tensor([rank == 0])])
    second = distributed.pass_on([torch.tensor([-rank], dtype=torch.bfloat16)], channel=1)
    received = [*second(), *first()]
    assert distributed.pass_on([])() == []
    return [each.tolist() for each in received] + [distributed.collectives() - before]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return gloo.run(work, request.param, ranks=request.param, timeout=240)


@cache
def expected(name: str, ranks: int) -> dict[str, Any]:
    return step(name, "all", ranks)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["ring", "small tiles"])
def test_ring_equals_the_gathered_batch(results, name: str, form: str) -> None:
    ranks = len(results)
    joint = expected(name, ranks)
    values = [result[form][name]["value"] for result in results]
    assert sum(values) / ranks == pytest.approx(joint["value"], rel=1e-10)
    for rank, result in enumerate(results):
        ring, gathered = result[form][name], result["all"][name]
        assert ring["value"] == pytest.approx(gathered["value"], rel=1e-10, abs=1e-12)  # of this rank's anchors
        assert distance(ring["features"], gathered["features"]) < 1e-10
        own = joint["features"][:, rank * PAIRS : (rank + 1) * PAIRS]
        assert distance(ring["features"] / ranks, own) < 1e-10
        for key, wanted in joint["parameters"].items():
            assert distance(ring["parameters"][key], wanted) < 1e-10, key
    assert max(values) - min(values) > 1e-3


def test_the_options_matter(results) -> None:
    """What the cases above compare differs from case to case, so that an option that is forgotten is seen."""
    values = {name: expected(name, len(results))["value"] for name in LOSSES}
    del values["dcl none effective without ids"], values["dcl not masked"]  # as dcl without ids, and another of its kind
    numbers = sorted(values.values())
    assert min(b - a for a, b in zip(numbers[:-1], numbers[1:], strict=True)) > 1e-4, values


def test_no_rank_holds_the_global_batch(results) -> None:
    ranks = len(results)
    for result in results:
        for name in ("dcl", "clip"):
            assert result["largest"][name, "ring"] <= 2 * B * D, name  # one rank's features of both sides
            assert result["largest"][name, "all"] >= min(ranks * B * D, 2 * B * D), name
        assert ranks == 2 or result["largest"]["dcl", "all"] > 2 * B * D


def test_slopes_of_ranks_have_one_unit_in_float16(results) -> None:
    for result in results:
        (value, gradient), (other, wanted) = result["halves"]
        assert gradient.dtype == torch.float16 and value == pytest.approx(other, rel=1e-3)
        assert distance(gradient.float(), wanted.float()) < 2**-8


def test_passes_go_to_the_next_rank(results) -> None:
    for rank, result in enumerate(results):
        before = (rank - 1) % len(results)
        assert result["passes"] == [[-before], [[before] * 2] * 3, [2**62 + before], [before == 0], 2]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("triplet", "loss 'triplet' cannot pass blocks around .gather='ring'.: only dcl and clip can; take gather='all'"),
        ("dcl + siglip", "loss 'siglip' cannot .* only dcl and clip can"),
        ("dcl(diversity=entropy)", "loss 'dcl' cannot .* not with diversity=entropy; take"),
        ("dcl(diversity_gradient=true)", "loss 'dcl' cannot .* not with diversity_gradient=true; take"),
        ("clip + dcl(diversity_over='batch+bank')", "loss 'dcl' cannot .* not with diversity_over=batch.bank; take"),
    ],
)
def test_what_the_ring_does_not_have_is_refused(expression: str, message: str) -> None:
    objective = Objective.parse(expression)
    bindings = tuple({} for _ in objective.terms)
    with pytest.raises(CoderError, match=message):
        CoderLoss(objective, bindings, {}, gather="ring")


def test_options_that_contradict_the_ring_are_refused() -> None:
    with pytest.raises(CoderError, match="take another implementation than 'reference'"):
        make_loss("dcl", gather="ring", implementation="reference")
    with pytest.raises(CoderError, match="leave out gather_dtype"):
        make_loss("dcl", gather="ring", gather_dtype="bfloat16")
    with pytest.raises(ValueError, match="gather must be one of all, ring, got 'tree'"):
        make_loss("dcl", gather="tree")


def test_one_process_computes_as_without_the_ring() -> None:
    model = create_model("coder-tiny", loss="dcl + clip")
    images, texts, ids = joint_batch(2, torch.float32)
    features = {"image_features": normalize(images, dim=1), "text_features": normalize(texts[:, :5], dim=1)}
    outputs = {**features, "coder_ids": ids, "logit_scale": torch.tensor(7.0)}
    one, other = (create_loss("dcl + clip", model=model, gather=form)(**outputs) for form in ("all", "ring"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
