"""``gather="ring"``: no rank holds the global batch, and values and gradients are those of the gathered batch."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coder_plugin import Trainer, create_loss, create_model, distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import tiled
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from coder_plugin.training.step import NonFiniteError
from tests import gloo
from tests.peak_memory import peak
from tests.reliability import ranks as forked
from tests.reliability.number_faults import SAID, fault
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
    """The bytes of the largest storage."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = [each.untyped_storage().nbytes() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.bytes = max([self.bytes, *storages])
        return result


B, D = 24, 40


def largest_tensor(expression: str, gather: str) -> float:
    """Of a loss and its gradient, with B pairs on each rank, where 1 is one rank's features of one side."""
    generator = torch.Generator().manual_seed(distributed.rank())
    features = [normalize(torch.randn(B, D, generator=generator), dim=1).requires_grad_() for _ in range(2)]
    outputs = dict(zip(("image_features", "text_features"), features, strict=True))
    loss = make_loss(expression, gather=gather)
    with Largest() as largest:
        ids = torch.arange(B) // 2 + distributed.rank()
        loss(**outputs, logit_scale=torch.tensor(9.0), coder_ids=ids, output_dict=False).backward()
    return largest.bytes / features[0].nbytes


def halves(gather: str) -> tuple[float, Tensor]:
    """Value and gradient of float16 features, multiplied as on a GPU."""
    generator = torch.Generator().manual_seed(distributed.rank())
    features = normalize(torch.randn(2, B, D, generator=generator), dim=2).half().requires_grad_()
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


def test_no_tensor_holds_the_global_batch(results) -> None:
    for result in results:
        for name in ("dcl", "clip"):
            assert result["largest"][name, "ring"] == 1, name  # as many bytes as one rank's texts
            assert result["largest"][name, "all"] >= 2 * len(results), name


@pytest.mark.parametrize("name", ["dcl", "clip"])
def test_memory_does_not_grow_with_the_number_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 pairs of 1,024 dimensions on each rank, on meta tensors; other ranks are imitated by empty tensors."""
    monkeypatch.setattr(distributed, "pass_on", lambda tensors, **_: lambda: [torch.empty_like(each) for each in tensors])
    for reduction in ("all_max", "all_mean"):
        monkeypatch.setattr(distributed, reduction, lambda value: value.detach().clone())

    def run() -> None:
        features = [torch.empty(4096, 1024, device="meta", requires_grad=True) for _ in range(2)]
        ids, scale = torch.empty(4096, dtype=torch.int64, device="meta"), torch.empty((), device="meta", requires_grad=True)
        outputs = dict(zip(("image_features", "text_features"), features, strict=True), coder_ids=ids, logit_scale=scale)
        make_loss(name, gather="ring")(**outputs, output_dict=False).backward()

    peaks = {}
    for ranks in (3, 8, 64):
        monkeypatch.setattr(distributed, "world_size", lambda ranks=ranks: ranks)
        peaks[ranks] = peak(run)
    print(peaks)
    assert peaks[3] == peaks[8] == peaks[64] <= 0.45e9, peaks


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
        ("triplet", "cannot pass blocks around .*: only dcl, clip and distill.kind=features. can; take"),
        ("dcl + siglip", "loss 'siglip' cannot .* only dcl, clip and"),
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


def train(folder: Path, model: str, gather: str) -> None:
    """Three steps, the last of two micro-batches; then one in which rank 1 has NaN, which changes nothing; then a sound one."""
    config = {
        "batch_size": 4, "train_num_samples": 64, "workers": 0, "logs": str(folder), "name": gather, "epochs": 1,
        "model": model, "val_frequency": 0, "warmup": 0, "report": False, "opt": "sgd", "lr": 0.05, "gather": gather,
    }  # fmt: skip
    trainer = Trainer(model=model, loss="dcl + clip", train="scenes", config=config)
    assert trainer.loss.gather == gather
    trainer.setup_optimizer()
    batches = map(trainer._to_device, trainer.loader.epoch(0))
    metrics = [trainer.training_step([next(batches) for _ in range(count)]) for count in (1, 1, 2)]
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
    for gather in ("all", "ring"):
        endings = forked.run(lambda folder, gather=gather: train(folder, tiny_model, gather), tmp_path)
        assert [ending.status for ending in endings] == [0, 0], endings
        one, two = (json.loads((tmp_path / f"{gather}{rank}.json").read_text()) for rank in (0, 1))
        assert one == two
        trained[gather] = one
    for gathered, ring in zip(*trained.values(), strict=True):
        assert ring.keys() == gathered.keys()
        for key, value in gathered.items():
            assert ring[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key


def test_the_trainer_refuses_the_ring_with_all_anchors_on_each_rank(tmp_path: Path, tiny_model: str) -> None:
    config = {"model": tiny_model, "logs": str(tmp_path), "gather": "ring", "local_loss": False}
    with pytest.raises(CoderError, match="--gather ring compares each rank's own anchors: leave out --no-local-loss"):
        Trainer(model=tiny_model, loss="dcl", train="scenes", config=config)
