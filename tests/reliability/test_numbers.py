"""NaN and infinity are caught before the step and before the bank, and are neither saved nor resumed from."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin import CoderError, Trainer
from coder_plugin.training import checkpoint, resume
from coder_plugin.training.step import NonFiniteError
from tests.reliability import ranks as forked
from tests.reliability.number_faults import KINDS, LOSS, SAID, fault

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")


def make(folder: Path, model: str, **more: object) -> Trainer:
    options = {"batch_size": 4, "train_num_samples": 32, "workers": 0, "logs": str(folder), "name": "run", "epochs": 1}
    options |= {"model": model, "val_frequency": 0, "warmup": 0, "set": ["momentum.bank_size=16"], "report": False, **more}
    return Trainer(model=model, loss=LOSS, train="scenes", config=options)


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value.nan_to_num(), other[name].nan_to_num()) for name, value in one.items())


def every_kind(folder: Path, model: str, rank: int | None, said: dict[str, str]) -> None:
    """Steps that are sound, each followed by one that meets a fault and changes nothing."""
    trainer = make(folder, model, train_num_samples=64)
    trainer.setup_optimizer()
    batches = map(trainer._to_device, trainer.loader.epoch(0))
    trainer.training_step([next(batches)])
    for kind in KINDS:
        batch = next(batches)
        for value in (torch.nan, torch.inf) if kind in ("loss", "key") else (torch.nan,):
            with fault(trainer, kind, rank=rank, value=value):
                before = snapshot(trainer)
                try:
                    trainer.training_step([batch])
                except NonFiniteError as error:
                    assert re.search(said[kind], str(error)), (kind, str(error))
                else:
                    raise AssertionError(f"{kind}: the step was taken")
                assert same(before, snapshot(trainer)), kind
            trainer.optimizer.zero_grad()
    assert all(math.isfinite(value) for value in trainer.training_step([next(batches)]).values())
    assert not same(before, snapshot(trainer))
    print("every kind was caught")


def test_on_one_process(tmp_path, tiny_model) -> None:
    every_kind(tmp_path, tiny_model, None, {kind: said.replace(" on rank 1", "") for kind, said in SAID.items()})


@linux
@pytest.mark.slow
def test_on_one_rank_of_two(tmp_path, tiny_model) -> None:
    endings = forked.run(lambda folder: every_kind(folder, tiny_model, 1, SAID), tmp_path)
    assert all(ending.status == 0 and "every kind was caught" in ending.output for ending in endings), endings


def test_weights_that_are_not_finite_are_not_saved(tmp_path, tiny_model) -> None:
    trainer = make(tmp_path, tiny_model, save_every_steps=2)
    step = trainer.optimizer_step

    def breaking(result: Any) -> None:
        step(result)
        if trainer.step == 3:  # the fourth step, after which the run saves
            with torch.no_grad():
                trainer.model.text_projection[0, 0] = torch.inf

    trainer.optimizer_step = breaking
    with pytest.raises(NonFiniteError, match="text_projection is not finite after step 4: no checkpoint was written"):
        trainer.run()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("[!.]*")] == ["step_00000002"]


def test_a_bank_with_nan_is_not_resumed_from(tmp_path, tiny_model) -> None:
    make(tmp_path, tiny_model, train_num_samples=8).run()
    trainer = make(tmp_path, tiny_model, train_num_samples=8, epochs=2, resume="latest")
    state = resume.find_state(trainer.config, trainer.folder)
    before = snapshot(trainer)
    state.common["model"]["coder.heads.momentum.bank.text"][1, 2] = torch.nan
    with pytest.raises(CoderError, match="the checkpoint's coder.heads.momentum.bank.text is not finite: give --resume"):
        resume.restore_model(trainer, state)
    assert same(before, snapshot(trainer))


def explode(folder: Path, model: str, kind: str, rank: int | None) -> None:
    """A run of 8 steps that saves every second and meets a fault at step 5."""
    trainer = make(folder, model, train_num_samples=64, save_every_steps=2, lr=1e-2)
    take = trainer.training_step

    def step(batches: Any) -> dict[str, float]:
        with fault(trainer, kind, rank=rank) if trainer.step == 5 else fault(trainer, kind, rank=-1):
            return take(batches)

    trainer.training_step = step
    trainer.run()


def go_on(folder: Path, model: str) -> None:
    trainer = make(folder, model, train_num_samples=64, save_every_steps=2, lr=1e-3, resume="latest")
    trainer.run()
    print(f"{trainer.step} steps")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_and_goes_on_with_a_lower_rate(kind, rank, tmp_path, tiny_model) -> None:
    endings = forked.run(lambda folder: explode(folder, tiny_model, kind, rank), tmp_path)
    said = SAID[kind].replace(" on rank 1", "" if rank is None else f" on rank {rank}").removesuffix("$")
    for ending in endings:
        assert ending.status == 2, ending
        assert re.search(f"error: .*({said}).* at step 5 .epoch 1.: the step was not taken", ending.output), ending.output
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.newest(folder) == folder / "step_00000004"
    endings = forked.run(lambda folder: go_on(folder, tiny_model), tmp_path)
    assert all(ending.status == 0 and "8 steps" in ending.output for ending in endings), endings
    print(f"{kind} on rank {rank}: ended at step 5 on both ranks, went on from step 4 with a tenth of the rate")
