"""Out of memory is answered in one line with this run's options, and with what they change."""

from __future__ import annotations

import pytest
import torch

from coder_plugin import CoderError, Trainer
from coder_plugin.training.memory_advice import OutOfMemory, advise, is_out_of_memory

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to"),
    "python": MemoryError(),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


def trainer(tmp_path, tiny_model, loss: str = "dcl", **options: object) -> Trainer:
    base = {"batch_size": 8, "train_num_samples": 16, "workers": 0, "logs": str(tmp_path), "epochs": 1, "val_frequency": 0}
    return Trainer(model=tiny_model, loss=loss, train="scenes", config={**base, "model": tiny_model, **options})


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_a_step_becomes_one_line(kind, tmp_path, tiny_model) -> None:
    run = trainer(tmp_path, tiny_model)

    def exhausted(batches):
        raise ERRORS[kind]

    run.training_step = exhausted
    with pytest.raises(OutOfMemory) as caught:
        run.run()
    said = str(caught.value)
    assert isinstance(caught.value, CoderError) and caught.value.__cause__ is ERRORS[kind] and "\n" not in said
    assert "--batch-size 4 --accum-freq 2 instead of 8 and 1" in said and "--grad-checkpointing" in said
    assert "negatives are the other 7 pairs of the step" in said
    assert "bank_size" not in said and "pairs_per_tile" not in said and "--local-loss" not in said


def test_other_errors_stay_as_they_are(tmp_path, tiny_model) -> None:
    run = trainer(tmp_path, tiny_model)

    def broken(batches):
        raise RuntimeError("shapes do not fit")

    run.training_step = broken
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run.run()
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))


def test_the_options_of_this_run(tmp_path, tiny_model) -> None:
    run = trainer(tmp_path, tiny_model, "m_dcl", accum_freq=2, workers=1, set=["momentum.bank_size=512"])
    said = advise(run, ERRORS["cuda"])
    assert "--batch-size 4 --accum-freq 4 instead of 8 and 2" in said and "fewer --workers (1 now)" in said
    assert "--set momentum.bank_size=256 (now 512: two banks of 512 x 32 take 0.125 MiB, and a step compares 16 x 512" in said
    assert "the other 15 pairs" in said
    run = trainer(tmp_path, tiny_model, grad_checkpointing=True)
    assert "--grad-checkpointing" not in advise(run, ERRORS["cuda"])


def test_fusion_takes_no_accumulation(tmp_path, tiny_model) -> None:
    run = trainer(tmp_path, tiny_model, "ascl(similarity=fusion)", set=["fusion.pairs_per_tile=64", "fusion.recompute=false"])
    said = advise(run, ERRORS["cuda"])
    assert "--set fusion.pairs_per_tile=32 (64 now); --set fusion.recompute=true" in said and "--accum-freq" not in said


def test_shared_memory(tmp_path, tiny_model) -> None:
    error = RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared "
        "memory. Please try to raise your shared memory limit."
    )
    assert is_out_of_memory(error)
    said = advise(trainer(tmp_path, tiny_model, workers=1), error)
    assert said.startswith("out of shared memory") and "--shm-size" in said and "--workers (1 now; 0 needs none)" in said


