"""``gather="ring"``: no rank holds the global batch, and values and gradients are those of the gathered batch."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import Trainer, distributed
from coder_plugin.contrast import products
from coder_plugin.errors import CoderError
from coder_plugin.training.step import NonFiniteError
from tests import gloo
from tests.losses.drawn import (
    Step,
    close,
    drawing,
    make_loss,
    outputs,
    ranks_equal_one,
    rows,
    share,
    step_of_rank,
    tile_shape,
)
from tests.peak_memory import LargestTensor, peak
from tests.reliability import ranks as forked
from tests.reliability.number_faults import SAID, fault

#: Objectives; "-" in front: without image ids. tests/losses/ has DCL's family in a ring of two.
LOSSES = (
    "-dcl",
    "clip",
    "-clip(hard_negatives=true)",
    "siglip",
    "distill",
    "ascl(temperature=logit_scale,mask_same_image=false)",
    "triplet(margin=0.5,mask_same_image=false,hardest=false)",
    "triplet(reduction=sum,hardest=false,hard_negatives=true)",
    "2*dcl + 0.1*clip + triplet + ascl",
)


def joint(name: str) -> dict[str, Tensor]:
    """A model's keys, of all ranks."""
    generator, keys = drawing(3), outputs()
    for key in ("coder_noised_features", "coder_positive_features", "coder_noised_positive_features"):
        keys[key] = rows(generator, 12, keys["image_features"].shape[1], 1e3).requires_grad_()
    for side in ("image", "text"):
        keys[f"coder_teacher_{side}_features"] = rows(generator, 12, keys["image_features"].shape[1])
    keys["coder_noise_changed"] = torch.rand(12, 2, generator=generator) < 0.7
    keys |= {f"logit_{key}": torch.tensor(x).double().requires_grad_() for key, x in (("scale", 4.0), ("bias", -2.0))}
    if name.startswith("-"):
        del keys["coder_ids"]
    return keys


def step(name: str, **options: Any) -> Step:
    loss = make_loss(name.removeprefix("-"), local_loss=True, **options)
    return step_of_rank(loss, joint(name))


B, D = 24, 40


def largest_tensor(name: str, gather: str) -> float:
    """Of a loss and its gradient, with B pairs on each rank, where 1 is one rank's features of one side."""
    generator = drawing(distributed.rank())
    drawn = [normalize(torch.randn(B, D, generator=generator), dim=1) for _ in range(4)]
    keys = dict(zip(("image_features", "text_features", "coder_noised_features"), drawn, strict=False))
    leaves = {key: each.clone().requires_grad_() for key, each in keys.items()}
    hard = {"coder_negative_features": drawn[3][:, None], "coder_negative_ids": torch.arange(B)[:, None]}
    loss = make_loss(name, local_loss=True, gather=gather)
    with LargestTensor() as largest:
        ids = torch.arange(B) // 2 + distributed.rank()
        loss(**leaves, **hard, logit_scale=torch.tensor(9.0), coder_ids=ids, output_dict=False).backward()
    return largest.bytes / drawn[0].nbytes


HALVES = ("dcl", "triplet(hardest=false)")
SIZED = ("dcl", "clip(hard_negatives=true)", "ascl", "triplet", "triplet(hardest=false,hard_negatives=true)")


def halves(name: str, gather: str) -> tuple[float, Tensor]:
    """Value and gradient of float16 features, multiplied as on a GPU."""
    features = normalize(torch.randn(2, B, D, generator=drawing(distributed.rank())), dim=2).half().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "multiplies_halves", lambda device: True)
        # on one rank far smaller slopes than on the others
        value = 10.0 ** (-6 * distributed.rank()) * make_loss(name, local_loss=True, gather=gather)(
            image_features=features[0], text_features=features[1], output_dict=False
        )
        (gradient,) = torch.autograd.grad(value, features)
    return value.item(), gradient


def refused_derivatives() -> dict[str, str]:
    """What is said of the derivative of a gradient."""
    found = {}
    for name in ("dcl", "clip", "triplet", "triplet(hardest=false)"):
        keys = share(joint(name))
        value = make_loss(name, local_loss=True, gather="ring")(**keys, output_dict=False)
        try:
            torch.autograd.grad(value, keys["image_features"], create_graph=True)
            found[name] = ""
        except CoderError as error:
            found[name] = str(error)
    return found


def passes() -> list[Any]:
    """Tensors of several types to the next rank; two passes that overlap; the number of passes that were counted."""
    rank, before = distributed.rank(), distributed.collectives()
    several = [torch.full((2, 3), float(rank)).T, torch.tensor([2**62 + rank]), torch.tensor([rank == 0])]
    first = distributed.ring_send_recv(several)
    second = distributed.ring_send_recv([torch.tensor([-rank], dtype=torch.bfloat16)], channel=1)
    received = [*second(), *first()]
    assert distributed.ring_send_recv([])() == []
    return [each.tolist() for each in received] + [distributed.collectives() - before]


def work() -> dict[str, Any]:
    with tile_shape(20, anchors=3):
        small = {name: step(name, gather="ring") for name in LOSSES}
    return {
        "ring": {name: step(name, gather="ring") for name in LOSSES},
        "small tiles": small,
        "all": {name: step(name, implementation="reference") for name in LOSSES},
        "largest": {(name, form): largest_tensor(name, form) for name in SIZED for form in ("ring", "all")},
        "halves": {name: [halves(name, form) for form in ("ring", "all")] for name in HALVES},
        "derivatives": refused_derivatives(),
        "passes": passes(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return gloo.run(work, ranks=3, timeout=240)


@cache
def expected(name: str) -> Step:
    return step(name, implementation="reference")


@pytest.mark.parametrize("name", LOSSES)
def test_ring_equals_the_gathered_batch(results: list[dict[str, Any]], name: str) -> None:
    """Of one process with all pairs, and rank by rank of gathered ones."""
    for form in ("ring", "small tiles"):
        ranks_equal_one(expected(name), [result[form][name] for result in results], rtol=1e-10, atol=1e-10)
        for result in results:
            ring, gathered = result[form][name], result["all"][name]
            close(ring.value, gathered.value, rtol=1e-10, atol=1e-12)  # of this rank's anchors
            for key, each in ring.gradients.items():
                if each.ndim:  # a number's gradient is that of other anchors on each rank
                    close(each, gathered.gradients[key], rtol=1e-10, atol=1e-10)
    values = [result["ring"][name].value for result in results]
    assert max(values) - min(values) > 1e-4


def test_the_options_matter() -> None:
    """What the cases above compare differs from case to case, so that an option that is forgotten is seen."""
    numbers = sorted(expected(name).value for name in LOSSES)
    assert min(b - a for a, b in zip(numbers[:-1], numbers[1:], strict=True)) > 1e-4, numbers


@pytest.mark.parametrize("name", SIZED)
def test_no_tensor_holds_the_global_batch(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result["largest"][name, "ring"] == 1  # as many bytes as one rank's texts
        assert result["largest"][name, "all"] >= 2 * len(results)


@pytest.mark.parametrize("name", ["ascl", pytest.param("triplet(hardest=false)", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 pairs of 1,024 dimensions on each rank, on meta tensors; other ranks are imitated by empty tensors."""
    empty = lambda tensors, **_: lambda: [torch.empty_like(each) for each in tensors]  # noqa: E731
    monkeypatch.setattr(distributed, "ring_send_recv", empty)
    for reduction in ("all_max", "all_mean", "all_sum"):
        monkeypatch.setattr(distributed, reduction, lambda value: value.detach().clone())

    def run() -> None:
        sides = ("image_features", "text_features", "coder_noised_features")
        keys = {side: torch.empty(4096, 1024, device="meta", requires_grad=True) for side in sides}
        keys["coder_ids"] = torch.empty(4096, dtype=torch.int64, device="meta")
        keys["logit_scale"] = torch.empty((), device="meta", requires_grad=True)
        make_loss(name, local_loss=True, gather="ring")(**keys, output_dict=False).backward()

    peaks = {}
    for ranks in (3, 8):
        monkeypatch.setattr(distributed, "world_size", lambda ranks=ranks: ranks)
        peaks[ranks] = peak(run)
    assert peaks[3] == peaks[8] <= 0.45e9, peaks


@pytest.mark.parametrize("name", HALVES)
def test_slopes_of_ranks_have_one_unit_in_float16(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        (value, gradient), (other, wanted) = result["halves"][name]
        assert gradient.dtype == torch.float16 and value == pytest.approx(other, rel=1e-3)
        assert (gradient.float() - wanted.float()).norm() < 2**-8 * wanted.float().norm()


def test_derivatives_of_a_gradient_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, message in result["derivatives"].items():
            assert message.startswith("gather='ring' has first derivatives only: take gather='all'"), (name, message)


def test_passes_go_to_the_next_rank(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        before = (rank - 1) % len(results)
        assert result["passes"] == [[-before], [[before] * 2] * 3, [2**62 + before], [before == 0], 2]


@pytest.mark.parametrize(
    "name",
    [
        "dcl(diversity=entropy)",
        "dcl(diversity_gradient=true)",
        "m_dcl(reverse=all)",
        "triplet(similarity=fusion)",
        "ascl(similarity=fusion)",
        "distill(kind=similarity)",
        "lca",
        "cra",
        "pgc",
    ],
)
def test_what_the_ring_does_not_have_is_refused(name: str) -> None:
    message = rf"loss '{re.escape(name)}' does not support gather='ring': take gather='all'"
    for text in (name, f"clip + {name}"):
        with pytest.raises(CoderError, match=message):
            make_loss(text, gather="ring")


def test_one_process_computes_as_without_the_ring() -> None:
    for name in LOSSES:
        one, other = (step(name, gather=form) for form in ("all", "ring"))
        assert one.value == other.value
        assert all(torch.equal(each, other.gradients[key]) for key, each in one.gradients.items())


# -- the trainer -----------------------------------------------------------------------------------------------------


def train(folder: Path, model: str, gather: str) -> None:
    """Two steps, the last of two micro-batches; then one in which rank 1 has NaN, which changes nothing; then a sound
    one."""
    config = {
        "batch_size": 4, "train_num_samples": 64, "workers": 0, "logs": str(folder), "name": gather, "epochs": 1,
        "model": model, "val_frequency": 0, "warmup": 0, "report": False, "opt": "sgd", "lr": 0.05, "gather": gather,
    }  # fmt: skip
    trainer = Trainer(model=model, loss="dcl + clip + triplet", train="scenes", config=config)
    assert trainer.loss.gather == gather
    trainer.setup_optimizer()
    batches = map(trainer._to_device, trainer.loader.epoch(0))
    metrics = [trainer.training_step([next(batches) for _ in range(count)]) for count in (1, 2)]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    batch = next(batches)
    with fault(trainer, "loss", rank=1):
        try:
            trainer.training_step([batch])
        except NonFiniteError as error:
            assert re.search(SAID["loss"], str(error)), str(error)
        else:
            raise AssertionError("the step was taken")
    assert [name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])] == []
    trainer.optimizer.zero_grad()
    metrics.append(trainer.training_step([batch]))
    (folder / f"{gather}{distributed.rank()}.json").write_text(json.dumps(metrics))


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")
def test_a_trainer_on_two_processes(tmp_path: Path, tiny_model: str) -> None:
    trained = {}
    endings = forked.run(lambda folder: [train(folder, tiny_model, gather) for gather in ("all", "ring")], tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    for gather in ("all", "ring"):
        one, two = (json.loads((tmp_path / f"{gather}{rank}.json").read_text()) for rank in (0, 1))
        assert one == two
        trained[gather] = one
    for gathered, ring in zip(*trained.values(), strict=True):
        assert ring.keys() == gathered.keys()
        for key, value in gathered.items():
            assert ring[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key
