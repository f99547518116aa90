"""The accelerator of a run: device, autocast, loss scaling and DDP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from coder_plugin import distributed
from coder_plugin.config import TrainConfig
from coder_plugin.errors import CoderError
from coder_plugin.launchers import ranks_from_slurm
from coder_plugin.pretrained.device import mixed_precision
from coder_plugin.training.trackers import tracker_names

#: The variables with which accelerate asks for other forms of parallel training than DDP.
_FORMS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_TP")
#: The fields of accelerate's ``ParallelismConfig`` that divide a model or its input.
_DIVISIONS = ("dp_shard_size", "tp_size", "cp_size", "sp_size")


def make_accelerator(config: TrainConfig) -> Any:
    """The accelerator for ``--precision`` and ``--report-to``. Under SLURM the ranks are ``srun``'s.

    Raises:
        CoderError: a form of parallel training other than DDP is asked for, an unknown tracker, one that is not installed, a
            precision that the device does not have, or a process group that accelerate does not see.
    """
    from accelerate import Accelerator, utils

    check_parallelism(os.environ)
    ranks_from_slurm()
    cuda = torch.cuda.is_available()
    mixed = mixed_precision(config.optim.precision)
    tracker_names(config.run.report_to)  # raises before a model is built; RunLog starts them
    # training_step accumulates (cached features); accelerate's own setting, from its environment, must not divide gradients
    accumulation = utils.GradientAccumulationPlugin(num_steps=1)
    patience = utils.InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.rank_timeout))
    options = {
        "gradient_accumulation_plugin": accumulation,
        "project_dir": config.run.logs,
        "kwargs_handlers": [patience],
    }
    try:
        accelerator = Accelerator(mixed_precision=mixed, cpu=not cuda, **options)
    except (ValueError, ImportError) as error:
        raise CoderError(f"accelerate: {error}") from error
    if (ranks := distributed.world_size()) != accelerator.num_processes:
        raise CoderError(
            f"there is a process group of {ranks} processes, and accelerate sees {accelerator.num_processes}, so each would "
            "train a model of its own: start the script with torchrun or accelerate launch, or set RANK, LOCAL_RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT before the Trainer is made"
        )
    check_parallelism({}, getattr(accelerator.state, "parallelism_config", None))
    return accelerator


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """A context in which CUDA devices multiply float32 matrices in TF32, or in full. What was set before is put back.

    cuDNN's own setting, of convolutions and recurrent layers, is left alone.
    """
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # set in the new form alone
        before = precision == "tf32"
    if before == allowed:
        yield
        return
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before
        matmul.fp32_precision = precision


def check_parallelism(environment: Mapping[str, str], parallelism: Any = None) -> None:
    """Refuse every form of parallel training that this trainer has not: it would train a whole copy in each process instead.

    Args:
        environment: the variables that ``accelerate launch`` sets, and that accelerate sets where a script passes a plugin.
        parallelism: accelerate's ``ParallelismConfig`` in force, or None.

    Raises:
        CoderError: such a form is asked for. The message has the command of open_clip's trainer with FSDP2.
    """
    asked = [name for name in _FORMS if environment.get(name, "").lower() in ("true", "1", "yes", "on")]
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        names = [f"PARALLELISM_CONFIG_{field.upper()}" for field in _DIVISIONS]
        asked += [name for name in names if environment.get(name, "1") != "1"]
    asked += [f"ParallelismConfig.{field}" for field in _DIVISIONS if (getattr(parallelism, field, None) or 1) > 1]
    if asked:
        raise CoderError(
            f"accelerate's configuration asks for {asked[0]}. This trainer has DDP only, which holds the whole model in each "
            "process: take it out (accelerate launch --multi_gpu ...), or shard large towers with FSDP2 in the trainer of "
            "open_clip's main branch: torchrun --nproc_per_node 8 -m -- coder_plugin.integrations.open_clip --fsdp --precision "
            "amp_bf16 --model NAME --train-data DATA --loss LOSS"
        )
