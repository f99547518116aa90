"""Device and precision of an opened model."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from coder_plugin.errors import CoderError
from coder_plugin.launchers import ranks_from_slurm


def default_device(timeout: timedelta | None = None) -> torch.device:
    """This process's GPU (number ``LOCAL_RANK`` under a launcher), or the CPU where there is none.

    Under torchrun, ``accelerate launch`` or SLURM's ``srun`` it also joins the process group, unless that has been done.

    Args:
        timeout: how long one rank of that group waits for another; None: torch's own.
    """
    device = local_device()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        atexit.register(_leave_group)
    return device


def local_device() -> torch.device:
    """As :func:`default_device`, for processes that exchange nothing and join no group."""
    ranks_from_slurm()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # where SLURM gives each task a GPU of its own, that is number 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _leave_group() -> None:
    """Its threads end before the interpreter does: a process that leaves them running may abort at its very end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def mixed_precision(precision: str) -> str:
    """accelerate's name for ``--precision``: no, bf16 or fp16.

    Args:
        precision: auto (bf16 on a GPU, fp32 on a CPU), fp32, amp, amp_bf16 or amp_fp16.

    Raises:
        CoderError: fp16 on a CPU.
    """
    cuda = torch.cuda.is_available()
    mixed = {"auto": "bf16" if cuda else "no", "fp32": "no", "amp": "fp16", "amp_fp16": "fp16", "amp_bf16": "bf16"}[precision]
    if mixed == "fp16" and not cuda:
        raise CoderError(f"--precision {precision} needs a GPU; on a CPU use fp32 or amp_bf16")
    return mixed


def make_autocast(precision: str, device: torch.device) -> Callable[[], Any]:
    """A function that gives an autocast context for ``--precision``, or a null context for fp32."""
    mixed = mixed_precision(precision)
    if mixed == "no":
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16 if mixed == "bf16" else torch.float16)
