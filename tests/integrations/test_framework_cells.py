"""What docs/frameworks.md says to work: every loop with every loss in every setting is a training that runs here."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import coder_plugin
from coder_plugin import distributed
from tests.documentation import ROOT
from tests.integrations.test_frameworks import OLD_TRANSFORMERS, differences, quiet, runs
from tests.reliability import ranks

__all__ = ["quiet", "runs"]

LOSSES = ("clip", "siglip", "dcl + m_dcl", "coder")
LOOPS = {
    "your own": "raw", "Hugging Face": "hugging_face", "Lightning": "in_lightning",
    "sentence-transformers": "sentence_transformers", "`coder-plugin train`": "ours",
}  # fmt: skip
SETTINGS = ("one process", "DDP", "accumulation", "bf16", "compile", "resume")


def test_the_page_names_every_cell() -> None:
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8").partition("## What works\n")[2]
    assert [name for name in (*LOOPS, *(f"`{loss}`" for loss in LOSSES), *SETTINGS) if name not in text] == []


def trained(runs: Any, path: str, loop: str, loss: str, setting: str, folder: Path) -> Any:
    """A model after two steps."""
    objective = runs.objective(loss)
    torch.manual_seed(0)
    model = coder_plugin.create_model(path, loss=objective).train()
    criterion = coder_plugin.create_loss(objective, model=model)
    accumulate = 2 if setting == "accumulation" else 1
    data, options = runs.batches(2 * accumulate), {"accumulate": accumulate}
    context: Any = contextlib.nullcontext()
    AcceleratorState._reset_state(reset_partial_state=setting != "DDP")  # an earlier loop's precision
    if loop == "ours":
        further = {"accum_freq": accumulate, "precision": "amp_bf16" if setting == "bf16" else "fp32"}
        model.compile = functools.partial(model.compile, backend="eager")  # the default's C++ compiler takes minutes
        steps = 2 * accumulate * distributed.world_size()
        return runs.ours(model, objective, folder, steps=steps, torchcompile=setting == "compile", **further).model
    if setting == "bf16":
        options |= {"hugging_face": {"bf16": True}, "in_lightning": {"precision": "bf16-mixed"}}.get(loop, {})
        if loop == "raw":
            context = torch.autocast("cpu", torch.bfloat16)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"} if setting == "compile" else {}
    if loop == "hugging_face":
        options |= compiled
    elif setting == "compile" and loop != "sentence_transformers":
        model = torch.compile(model, backend="eager")
    with context:
        if loop == "sentence_transformers":
            place, optimizer = folder / "st", runs.adamw(model)
            more = {"gradient_accumulation_steps": accumulate, "max_steps": 2, "bf16": setting == "bf16", **compiled}
            runs.sentence_transformers_runs.train(model, objective, data, place, optimizer, **more)
        else:
            getattr(runs, loop)(model, criterion, data, folder, **options)
    return getattr(model, "_orig_mod", model)


def check(runs: Any, model: Any, loss: str, pairs: int = 4) -> None:
    assert [name for name, value in model.state_dict().items() if value.isnan().any()] == []
    assert not hasattr(model.coder.heads, "momentum") or model.coder.heads["momentum"].bank.count == min(10, 2 * pairs)
    assert loss == "clip" or loss == "siglip" or hasattr(model.coder.heads, "momentum")


def cells(*settings: str) -> list[Any]:
    """Loop, setting and loss. By default bf16 runs once in each loop, with one loss after the other, and one loop compiles.
    The rest is slow: test_frameworks.py and the tests of each trainer compare trainings in these settings to the bit."""
    compiled = {"hugging_face": "clip"}
    rows = []
    for (row, loop), setting in itertools.product(enumerate(LOOPS.values()), settings):
        chosen = {"compile": compiled.get(loop), "bf16": LOSSES[(row + 2) % len(LOSSES)]}.get(setting)
        rows += [pytest.param(loop, setting, loss, marks=[pytest.mark.slow] * (loss != chosen)) for loss in LOSSES]
    return rows


@pytest.mark.parametrize(("loop", "setting", "loss"), cells("one process", "accumulation", "bf16", "compile"))
def test_cells_of_one_process(runs: Any, tiny_model: str, tmp_path: Path, loop: str, setting: str, loss: str) -> None:
    torch._dynamo.reset()  # else it stops compiling after eight models
    torch._dynamo.utils.counters.clear()
    # our own trainer's accumulated batches are one batch
    pairs = 8 if (loop, setting) == ("ours", "accumulation") else 4
    check(runs, trained(runs, tiny_model, loop, loss, setting, tmp_path), loss, pairs)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (setting == "compile")


@pytest.mark.parametrize(("loop", "setting", "loss"), cells("resume"))
def test_cells_of_resuming(runs: Any, tiny_model: str, tmp_path: Path, loop: str, setting: str, loss: str) -> None:
    objective, data, folder = runs.objective(loss), runs.batches(2), tmp_path / "run"
    models = [coder_plugin.create_model(tiny_model, loss=objective).train() for _ in range(2)]
    criteria = [coder_plugin.create_loss(objective, model=model) for model in models]
    if loop == "raw":
        optimizers = [runs.adamw(model) for model in models]
        runs.raw(models[0], criteria[0], data, folder, make_optimizer=lambda _: optimizers[0])
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, criterion, optimizer in zip(models, criteria, optimizers, strict=True):
            if model.coder.followed_by is not None:
                model.coder.followed_by.remove()
            torch.manual_seed(1)
            runs.raw(model, criterion, runs.batches(2, seed=1), folder, make_optimizer=lambda _: optimizer)  # noqa: B023
    elif loop == "ours":
        runs.ours(models[0], objective, folder, steps=2, epochs=2)
        first = folder / "ours" / "checkpoints" / "step_00000002"
        assert runs.ours(models[1], objective, tmp_path / "again", steps=2, epochs=2, resume=str(first)).step == 4
    elif loop == "sentence_transformers":
        run = functools.partial(runs.sentence_transformers_runs.train, loss=objective, batches=data, folder=folder)
        further = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "epoch"}
        run(models[0], optimizer=runs.adamw(models[0]), **further)
        losses = run(models[1], optimizer=runs.adamw(models[1]), resume=str(folder / "checkpoint-2"), **further)
        assert len(losses) == 2
    else:
        checkpoint, options = runs.two_epochs(loop, folder)
        torch.manual_seed(1)
        getattr(runs, loop)(models[0], criteria[0], data, folder, **options)
        getattr(runs, loop)(models[1], criteria[1], data, folder, resume=str(checkpoint), **options)
    assert differences(models[1].state_dict(), models[0].state_dict()) == []


def test_our_trainer_counts_a_step_of_lookahead(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    model = runs.make(tiny_model)
    before = {key: value.clone() for key, value in model.state_dict().items() if "momentum.towers" in key}
    runs.ours(model, "dcl + m_dcl", tmp_path, steps=2, opt="lookahead_adamw")
    assert model.coder.heads["momentum"].bank.count == 8
    assert before and any(not torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def on_two_ranks(runs: Any, path: str, folder: Path, losses: Sequence[str]) -> None:
    for loop, loss in zip(LOOPS.values(), losses, strict=True):
        if not (OLD_TRANSFORMERS and loop in ("hugging_face", "sentence_transformers")):
            check(runs, trained(runs, path, loop, loss, "DDP", folder / loop), loss, 8)


@pytest.mark.slow  # tests/integrations/test_frameworks.py compares two processes of each loop, with one loss
@pytest.mark.parametrize("first", range(len(LOSSES)))
def test_cells_of_two_processes(runs: Any, tiny_model: str, tmp_path: Path, first: int) -> None:
    losses = [LOSSES[(first + number) % len(LOSSES)] for number in range(len(LOOPS))]
    endings = ranks.run(lambda folder: runs.joined(on_two_ranks, tiny_model, folder, losses), tmp_path, timeout=300)
    assert [each.status for each in endings] == [0, 0], endings[0].output + endings[1].output
