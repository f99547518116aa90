"""Gathers, and losses of each way to gather, on three gloo processes: values and gradients equal one process's.

The worker functions run on all ranks and return their results; the tests, here, compare. One start of the processes
serves all tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests import gloo

PAIRS = 3  # of each rank
TEACHER = ("coder_teacher_image_features", "coder_teacher_text_features", "coder_teacher_logit_scale")
KEYS = frozenset({"image_features", "text_features", "logit_scale", "logit_bias", *TEACHER})

#: One of each way to gather; tests/losses/ has every option of every loss. Label: objective.
LOSSES = {
    "dcl": "dcl",
    "dcl not masked": "dcl(mask_same_image=false)",
    "dcl through div": "dcl(diversity_gradient=true,epsilon=0.5)",
    "triplet not masked": "triplet(margin=0.5,hardest=false,mask_same_image=false)",
    "triplet all": "triplet(margin=0.5,hardest=false)",
    "clip": "clip",
    "siglip": "siglip",
    "siglip shift": "siglip(dist_impl=shift)",
    "siglip reduce": "siglip(dist_impl=reduce)",
    "siglip gather": "siglip(dist_impl=gather)",
    "ascl learned": "ascl(temperature=logit_scale)",
    "ascl fusion": "ascl(similarity=fusion,temperature=0.5)",
    "distill similarity": "distill(kind=similarity)",
    "sum of terms": "2*dcl + 0.5*triplet(margin=0.5) + 0.1*clip",
}
CASES = [
    (name, local)
    for name in LOSSES
    for local in (False, True)
    if not (local and name.startswith("siglip"))  # its ranks never hold more than their own rows
]


class Towers(nn.Module):
    """Two linear towers with the parameters that clip and siglip read; all of them in every loss's dict."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.image, self.text = nn.Linear(5, 4), nn.Linear(6, 4)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(-2.0))
        with torch.no_grad():
            for parameter in (*self.image.parameters(), *self.text.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        reads = resolve(objective, KEYS).reads - ({"logit_bias"} if "siglip" not in str(objective) else set())
        reads = reads | {"image_features", "text_features"}
        for key in ("logit_scale", "logit_bias"):  # DDP needs every trained parameter to get a gradient
            getattr(self, key).requires_grad_(key in reads)
        self.reads = reads

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        # the captions, and texts derived from them as AsCL's head gives
        texts = {"text": text, "coder_noised": text + 0.3, "coder_positive": 0.9 * text - 0.1}
        texts["coder_noised_positive"] = text - 0.4
        outputs = {f"{name}_features": normalize(self.text(each), dim=-1) for name, each in texts.items()}
        outputs["image_features"] = normalize(self.image(image), dim=-1)
        for name in texts:  # scores of this rank's images and all texts, as a fusion head computes them in forward
            score = outputs["image_features"] @ distributed.gather(outputs[f"{name}_features"]).T
            outputs["coder_fusion" + name.removeprefix("coder").removeprefix("text")] = score.pow(3)
        teacher = (normalize(image[:, :4], dim=-1), normalize(text[:, 1:5], dim=-1), image.new_full((len(image),), 2.5))
        outputs |= dict(zip(TEACHER, teacher, strict=True))
        outputs = {key: value for key, value in outputs.items() if key in self.reads}
        return outputs | {key: getattr(self, key) for key in ("logit_scale", "logit_bias") if key in self.reads}


def joint_batch(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of all ranks. The first of every rank is one image, and rank 0 has another one twice."""
    generator = torch.Generator().manual_seed(ranks)
    rows = ranks * PAIRS
    images = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    texts = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    ids = torch.arange(rows) + 2**62
    ids[::PAIRS] = 2**62
    ids[2] = ids[1]
    return images, texts, ids


def step(name: str, local_loss: bool, ranks: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of this process's share of the joint batch; of all of it where there is one process."""
    objective = replace(Objective.parse(LOSSES[name]), local_loss=local_loss)
    model = Towers(objective).double()
    loss = CoderLoss(objective, resolve(objective, KEYS).bindings, {})
    images, texts, ids = joint_batch(ranks)
    if distributed.world_size() > 1:
        rows_of_rank = slice(distributed.rank() * PAIRS, (distributed.rank() + 1) * PAIRS)
        images, texts, ids = images[rows_of_rank], texts[rows_of_rank], ids[rows_of_rank]
    # kept in a variable until after backward: gradients are averaged only as long as the wrapper lives
    wrapped = DistributedDataParallel(model) if distributed.world_size() > 1 else model
    value = loss(**wrapped(images, texts), coder_ids=ids, output_dict=False)
    value.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
    return value.item(), gradients


def work(ranks: int) -> dict[str, Any]:
    """Everything that the tests look at, on one rank."""
    return {
        "steps": {case: step(*case, ranks) for case in CASES},
        "gather": check_gather(),
        "reduce": check_reduce(),
        "objects": check_objects(),
    }


def local_rows(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * rank


def coefficients(rank: int, ranks: int) -> Tensor:
    return torch.randn(2 * ranks, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def check_gather() -> dict[str, Any]:
    rank, ranks = distributed.rank(), distributed.world_size()
    collected: dict[str, Any] = {}
    rows = local_rows(rank).requires_grad_()
    gathered = distributed.gather(rows)
    collected["value"] = gathered.detach().clone()
    (gathered * coefficients(rank, ranks)).sum().backward()
    collected["gradient"] = rows.grad

    # a gradient that two branches share must reach the other one as it was
    rows, other = local_rows(rank).requires_grad_(), torch.zeros(2 * ranks, 3, dtype=torch.float64, requires_grad=True)
    doubled = 2 * other  # before the gather, so that its turn in backward comes after
    total = distributed.gather(rows) + doubled
    (total * coefficients(rank, ranks)).sum().backward()
    collected["shared gradient"], collected["other gradient"] = rows.grad, other.grad

    # neither rows nor their gradient lie one after the other in memory
    rows = local_rows(rank).T.contiguous().requires_grad_()
    gathered = distributed.gather(rows.T)
    collected["transposed value"] = gathered.detach().clone()
    (gathered.T * coefficients(rank, ranks).T).sum().backward()
    collected["transposed gradient"] = rows.grad.T
    rows = local_rows(rank).requires_grad_()
    distributed.gather(rows).sum().backward()
    collected["expanded gradient"] = rows.grad

    collected["integers"] = distributed.gather(torch.tensor([2**62 + rank, rank]))
    collected["booleans"] = distributed.gather(torch.tensor([rank == 0]))
    collected["together"] = check_gather_together()
    with torch.no_grad():
        collected["no grad"] = distributed.gather(local_rows(rank).requires_grad_()).requires_grad
    collected["constant"] = distributed.gather(local_rows(rank)).requires_grad
    return collected


def several(rank: int) -> list[Tensor]:
    """Tensors of several types and sizes, as a step's terms gather them."""
    generator = torch.Generator().manual_seed(rank)
    floats = [torch.randn(2, 3, generator=generator, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    constant = torch.randn(2, 5, generator=generator)
    half = torch.randn(2, 1, 3, generator=generator).bfloat16()
    return [*floats, constant, half, torch.tensor([2**62 + rank, -rank]), torch.tensor([rank == 0, True, rank == 1])]


def check_gather_together() -> dict[str, Any]:
    warnings.simplefilter("error", FutureWarning)  # torch >= 2.14 has new names for two collectives
    rank, ranks = distributed.rank(), distributed.world_size()
    collected: dict[str, Any] = {}
    for name, options in {"plain": {}, "short": {"dtype": torch.bfloat16}, "scattered": {}}.items():
        own = several(rank)
        leaves = [own[0].requires_grad_(), own[1].requires_grad_(), own[3].requires_grad_()]
        sums, before = distributed.SumWithGradient(), distributed.collectives()
        gathered = distributed.gather_together(own, sums=sums, **options)
        weights = torch.randn(2 * ranks, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        sums.put(torch.tensor([1.0 + rank, 1 / 3]))
        total = sum((gathered[k].double().view(2 * ranks, 3) * weights).sum() for k in (0, 1))
        with pytest.MonkeyPatch.context() as patch:
            if name == "scattered":  # as on a GPU
                patch.setattr(dist, "get_backend", lambda *_: "nccl")
            total.backward()
        numbers = sums.take()
        collected[name] = {
            "values": [each.detach() for each in gathered],
            "needs": [each.requires_grad for each in gathered],
            "gradients": [leaf.grad for leaf in leaves],
            "sums": numbers,
            "collectives": distributed.collectives() - before,
        }
    sums.put(torch.tensor([2.0]))  # without a backward pass
    collected["alone"] = sums.take()
    return collected


def check_reduce() -> dict[str, Any]:
    rank, ranks = distributed.rank(), distributed.world_size()
    value = torch.tensor([rank, -rank, 0.5], requires_grad=True)
    device = torch.device("cpu")
    return {
        "max": distributed.all_max(value),
        "mean": distributed.all_mean(value),
        "untouched": value.detach().clone(),
        "any": [distributed.any_rank(flag, device) for flag in (rank == ranks - 1, rank == 0, False, True)],
    }


def check_objects() -> list[Any]:
    distributed.barrier()
    return distributed.gather_objects({"rank": distributed.rank(), "name": "x" * (distributed.rank() + 1)})


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What :func:`work` returned on every rank; a failure there fails each test at once, without a new start."""
    return gloo.run(work, 3, ranks=3, timeout=240)


@cache
def expected(name: str, ranks: int) -> tuple[float, Mapping[str, Tensor]]:
    return step(name, False, ranks)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-3))


@pytest.mark.parametrize("name", ["plain", "scattered", "short"])
def test_several_tensors_in_one_collective(results, name) -> None:
    ranks = len(results)
    wanted = [torch.cat(parts) for parts in zip(*map(several, range(ranks)), strict=True)]
    weights = [torch.randn(2 * ranks, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(ranks)]
    for rank, result in enumerate(results):
        collected = result["gather"]["together"][name]
        rows = slice(2 * rank, 2 * rank + 2)
        first, second, unused = collected["gradients"]
        assert collected["needs"] == [True, True, False, True, False, False] and unused is None
        assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(collected["sums"], torch.tensor([sum(range(1, ranks + 1)), ranks / 3]))
        if name == "short":  # the numbers need a collective of their own: bfloat16 would round them
            assert collected["collectives"] == 3
            rounded = [each.bfloat16().to(each.dtype) if each.is_floating_point() else each for each in wanted]
            assert all(torch.equal(got, want) for got, want in zip(collected["values"], rounded, strict=True))
            exact = sum(weights)[rows]
            assert 0 < (second - exact).abs().max() < 0.05 and torch.equal(second, second.bfloat16().double())
            continue
        assert collected["collectives"] == 2
        assert all(torch.equal(got, want) for got, want in zip(collected["values"], wanted, strict=True))
        torch.testing.assert_close(second, sum(weights)[rows], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(first, sum(weights)[rows].float())
    assert all(result["gather"]["together"]["alone"].item() == 2.0 * ranks for result in results)


@pytest.mark.parametrize(("name", "local_loss"), CASES)
def test_ranks_equal_one_process_with_the_joint_batch(results, name: str, local_loss: bool) -> None:
    ranks = len(results)
    tolerance = 1e-10
    value, gradients = expected(name, ranks)
    collected = [result["steps"][name, local_loss] for result in results]
    # what the trainers print is the mean over ranks
    assert sum(each for each, _ in collected) / ranks == pytest.approx(value, rel=tolerance, abs=tolerance)
    all_rows = not local_loss and "siglip" not in name
    for each, gradient in collected:
        if all_rows:  # every rank computes the whole matrix
            assert each == pytest.approx(value, rel=tolerance, abs=tolerance)
        assert gradient.keys() == gradients.keys()
        for key, wanted in gradients.items():
            assert distance(gradient[key], wanted) < tolerance, key


def test_the_comparison_can_fail(results) -> None:
    """The joint batch has ids, gradients and rank shares that matter to the losses above."""
    ranks = len(results)
    for masked, unmasked in (("dcl", "dcl not masked"), ("triplet all", "triplet not masked")):
        (one, gradient), (two, other) = expected(masked, ranks), expected(unmasked, ranks)
        assert abs(one - two) > 1e-3 * abs(one)
        assert distance(gradient["image.weight"], other["image.weight"]) > 1e-3
    _, stopped = expected("dcl", ranks)
    _, through = expected("dcl through div", ranks)
    assert distance(stopped["image.weight"], through["image.weight"]) > 1e-2
    for name in LOSSES:
        gradients = expected(name, ranks)[1]
        assert all(gradients[key].norm() > 1e-3 for key in ("image.weight", "text.weight")), name
        local = [results[rank]["steps"][name, "siglip" not in name][0] for rank in range(ranks)]
        assert max(local) - min(local) > 1e-3, f"{name}: the ranks' own shares are equal"


def test_gather_and_its_gradient(results) -> None:
    ranks = len(results)
    value = torch.cat([local_rows(rank) for rank in range(ranks)])
    total = sum(coefficients(rank, ranks) for rank in range(ranks))
    for rank, result in enumerate(results):
        collected = result["gather"]
        rows_of_rank = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(collected["value"], value) and torch.equal(collected["transposed value"], value)
        for name in ("gradient", "shared gradient", "transposed gradient"):  # the sum over the ranks' losses
            torch.testing.assert_close(collected[name], total[rows_of_rank], rtol=1e-12, atol=1e-12, msg=name)
        assert torch.equal(collected["expanded gradient"], torch.full((2, 3), float(ranks), dtype=torch.float64))
        assert torch.equal(collected["other gradient"], 2 * coefficients(rank, ranks))
        assert collected["integers"].tolist() == [each for r in range(ranks) for each in (2**62 + r, r)]
        assert collected["booleans"].tolist() == [r == 0 for r in range(ranks)]
        assert not collected["no grad"] and not collected["constant"]


def test_reductions_over_ranks(results) -> None:
    ranks = len(results)
    for rank, result in enumerate(results):
        collected = result["reduce"]
        assert collected["max"].tolist() == [ranks - 1, 0, 0.5] and not collected["max"].requires_grad
        assert collected["mean"].tolist() == [(ranks - 1) / 2, -(ranks - 1) / 2, 0.5] and not collected["mean"].requires_grad
        assert collected["untouched"].tolist() == [rank, -rank, 0.5]
        assert collected["any"] == [True, True, False, True]
        assert result["objects"] == [{"rank": r, "name": "x" * (r + 1)} for r in range(ranks)]


def test_one_process_needs_no_group() -> None:
    assert not dist.is_initialized() and distributed.world_size() == 1 and distributed.rank() == 0
    rows = torch.ones(2, 3, requires_grad=True)
    assert distributed.gather(rows) is rows
    assert torch.equal(distributed.all_max(rows), rows) and not distributed.all_max(rows).requires_grad
    assert torch.equal(distributed.all_mean(rows), rows) and not distributed.all_mean(rows).requires_grad
    assert distributed.any_rank(True, rows.device) is True and distributed.any_rank(False, rows.device) is False
    assert distributed.gather_objects("x") == ["x"]
    distributed.barrier()


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    dist.barrier()  # waits for the other one


def test_the_helper_reports_a_failing_rank() -> None:
    with pytest.raises(RuntimeError, match="^rank 1: (.|\n)*RuntimeError: out of luck"):
        gloo.run(fail_on_one_rank, timeout=60)
