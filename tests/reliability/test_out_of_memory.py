"""Out of memory is answered in one line, which names what takes less."""

from __future__ import annotations

import pytest
import torch

from coder_plugin import CoderError, Trainer
from coder_plugin.training.memory_advice import OutOfMemory, is_out_of_memory, with_memory_advice

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to"),
    "python": MemoryError(),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


def trainer(tmp_path, tiny_model) -> Trainer:
    options = {"batch_size": 8, "train_num_samples": 16, "workers": 0, "logs": str(tmp_path), "epochs": 1, "val_frequency": 0}
    return Trainer(model=tiny_model, loss="dcl", train="scenes", config={**options, "model": tiny_model})


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
    assert said.startswith("out of memory (") and "--grad-checkpointing" in said and "docs/faq.md#out-of-memory" in said


def test_other_errors_stay_as_they_are(tmp_path, tiny_model) -> None:
    run = trainer(tmp_path, tiny_model)

    def broken(batches):
        raise RuntimeError("shapes do not fit")

    run.training_step = broken
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run.run()
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))


def test_shared_memory() -> None:
    @with_memory_advice
    def load() -> None:
        raise RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
            "shared memory. Please try to raise your shared memory limit."
        )

    with pytest.raises(OutOfMemory, match="^out of shared memory .*docker run --shm-size, or --ipc=host.* fewer --workers"):
        load()
