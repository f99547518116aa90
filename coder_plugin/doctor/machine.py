"""The machine a run would have: GPUs, cores, and room on disk, in shared memory and among open files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coder_plugin.doctor.findings import Finding, bytes_text, note, ok, one_line, problem, warning

NVIDIA = Path("/proc/driver/nvidia/version")
SHARED = Path("/dev/shm")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
_DISK = 10 * 2**30
_FILES = 1024
_AHEAD = 2  # batches that torch's loader keeps ready for each worker


def check_gpus(config: Any) -> Iterator[Finding]:
    """What GPUs torch can use, and whether it can use those that are there."""
    import torch

    if not torch.cuda.is_available():
        yield from _no_gpu(config)
        return
    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name = f"GPU {number}, {torch.cuda.get_device_name(number)}"
        major, minor = torch.cuda.get_device_capability(number)
        device = torch.device("cuda", number)
        try:
            torch.ones(8, 8, device=device).matmul(torch.ones(8, 8, device=device)).sum().item()
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:
            text = f"{name}: cannot compute: {one_line(error)}"
            do = f"a torch that is built for compute capability {major}.{minor} (this one: {', '.join(built)}), or free the GPU"
            yield problem("machine.gpu", text, do)
            continue
        text = f"{name}: {bytes_text(free)} of {bytes_text(total)} free, compute capability {major}.{minor}"
        if free < total / 2:
            yield warning(
                "machine.gpu.busy", text, "another process holds it: wait, or choose a GPU by CUDA_VISIBLE_DEVICES"
            )
        else:
            yield ok("machine.gpu", text)
    halves = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if halves:
        yield ok("machine.precision", f"bf16 and fp16 in hardware; torch is built for CUDA {torch.version.cuda}")
    elif config.optim.precision in ("auto", "amp_bf16"):
        text = "the GPU has no bf16, which --precision auto and amp_bf16 train in: it is emulated, slowly"
        yield warning("machine.precision", text, "--precision amp (fp16)")


def _no_gpu(config: Any) -> Iterator[Finding]:
    import torch

    there = NVIDIA.exists() or shutil.which("nvidia-smi") is not None
    if there and torch.version.cuda is None:
        do = "install a torch that is built for CUDA (pytorch.org says which)"
        yield warning(
            "machine.gpu.unused", f"an NVIDIA driver is here, and torch {torch.__version__} is built without CUDA", do
        )
    elif there and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        yield note("machine.gpu.hidden", "CUDA_VISIBLE_DEVICES hides all GPUs", "unset it to train on one")
    elif there:
        why = "no GPU is visible"
        try:
            torch.cuda.init()
        except Exception as error:
            why = one_line(error)
        do = f"a driver for CUDA {torch.version.cuda}, or a torch built for an older one; in a container, pass GPUs through"
        yield problem("machine.gpu.driver", f"an NVIDIA driver is here, and torch cannot use it: {why}", do)
    elif torch.backends.mps.is_available():
        yield note(
            "machine.gpu.apple", "an Apple GPU is here; training runs on the CPU", "train elsewhere if that is slow"
        )
    else:
        yield note(
            "machine.gpu.none", "no GPU: training and encoding run on the CPU", "fine for small models and for search"
        )
    if config.optim.precision in ("amp", "amp_fp16"):
        text = f"--precision {config.optim.precision} needs a GPU that torch can use"
        yield problem("machine.precision", text, "--precision fp32 or amp_bf16")


def check_room(config: Any) -> Iterator[Finding]:
    """Cores against loading processes, disk under ``--logs``, shared memory and open files."""
    yield from _cores(config)
    yield from _disk(config)
    if config.data.workers and SHARED.is_dir():
        yield from _shared(config)
    yield from _open_files()


def _cores(config: Any) -> Iterator[Finding]:
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    text = f"{cores} cores for this process, {threads} threads in torch, {config.data.workers} loading processes a rank"
    if config.data.workers > cores:
        yield warning(
            "machine.workers", f"{text}: more processes than cores", f"--workers {max(1, cores - 1)} or fewer"
        )
    elif threads > cores:
        do = f"OMP_NUM_THREADS={cores}: threads beyond the cores wait for each other"
        yield warning("machine.threads", f"{text}: more threads than cores", do)
    else:
        yield ok("machine.cores", text)


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def _disk(config: Any) -> Iterator[Finding]:
    place = Path(config.run.logs).resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield problem(
            "machine.logs", f"--logs {config.run.logs}: {place} cannot be written to", "name another folder: --logs"
        )
        return
    free = shutil.disk_usage(place).free
    text = f"{bytes_text(free)} free under --logs {config.run.logs}"
    if free < _DISK:
        do = "make room or name another disk: a checkpoint has weights, both Adam moments and momentum towers, and two are kept"
        yield warning("machine.disk", text, do)
    else:
        yield ok("machine.disk", text)


def _shared(config: Any) -> Iterator[Finding]:
    """Loading processes hand batches over in shared memory; containers often have 64 MiB of it."""
    free = shutil.disk_usage(SHARED).free
    side = config.model.force_image_size or 224
    needed = config.data.workers * _AHEAD * config.optim.batch_size * 3 * side * side * 4
    workers = config.data.workers
    text = f"{bytes_text(free)} of shared memory free in {SHARED}, {workers} workers want up to {bytes_text(needed)}"
    if needed > free:
        do = "docker run --shm-size=8g (or --ipc=host), fewer --workers, or --workers 0: they die of a bus error otherwise"
        yield warning("machine.shared", text, do)
    else:
        yield ok("machine.shared", text)


def _open_files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _FILES:
        do = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}: each batch on its way, and each open shard, is a file"
        yield warning("machine.files", f"this process may open {soft} files", do)
    else:
        yield ok("machine.files", f"this process may open {soft if soft > 0 else 'any number of'} files")
