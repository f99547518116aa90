"""Check the machine: GPUs, CPU cores, disk space, shared memory and the limit of open files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coder_plugin.doctor.findings import Finding, bytes_text, note, ok, one_line, problem, warning

NVIDIA = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MIN_DISK = 10 * 2**30  # bytes
_MIN_OPEN_FILES = 1024
_PREFETCH = 2  # batches that torch's loader keeps ready for each worker


def check_gpus(config: Any) -> Iterator[Finding]:
    """GPUs that torch can use, and why it cannot use the others."""
    import torch

    if not torch.cuda.is_available():
        yield from _no_gpu(config)
        return
    architectures = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name = f"GPU {number}, {torch.cuda.get_device_name(number)}"
        major, minor = torch.cuda.get_device_capability(number)
        device = torch.device("cuda", number)
        try:
            torch.ones(8, 8, device=device).matmul(torch.ones(8, 8, device=device)).sum().item()
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:
            text = f"{name}: cannot compute: {one_line(error)}"
            do = f"install a torch built for compute capability {major}.{minor} "
            do += f"(this one: {', '.join(architectures)}), or free the GPU"
            yield problem("machine.gpu", text, do)
            continue
        text = f"{name}: {bytes_text(free)} of {bytes_text(total)} free, compute capability {major}.{minor}"
        if free < total / 2:
            yield warning(
                "machine.gpu.busy", text, "another process uses it: wait, or choose another GPU with CUDA_VISIBLE_DEVICES"
            )
        else:
            yield ok("machine.gpu", text)
    has_bf16 = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if has_bf16:
        yield ok("machine.precision", f"bf16 and fp16 in hardware; torch is built for CUDA {torch.version.cuda}")
    elif config.optim.precision in ("auto", "amp_bf16"):
        text = "the GPU has no bf16, which --precision auto and amp_bf16 use: it would be emulated, which is slow"
        yield warning("machine.precision", text, "use --precision amp (fp16)")


def _no_gpu(config: Any) -> Iterator[Finding]:
    import torch

    has_driver = NVIDIA.exists() or shutil.which("nvidia-smi") is not None
    if has_driver and torch.version.cuda is None:
        do = "install a torch that is built for CUDA (see pytorch.org)"
        yield warning(
            "machine.gpu.unused", f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA", do
        )
    elif has_driver and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        yield note("machine.gpu.hidden", "CUDA_VISIBLE_DEVICES hides all GPUs", "unset it to train on one")
    elif has_driver:
        reason = "no GPU is visible"
        try:
            torch.cuda.init()
        except Exception as error:
            reason = one_line(error)
        do = f"install a driver for CUDA {torch.version.cuda} or a torch for an older CUDA; in a container, pass GPUs through"
        yield problem("machine.gpu.driver", f"there is an NVIDIA driver, but torch cannot use it: {reason}", do)
    elif torch.backends.mps.is_available():
        text = "there is an Apple GPU, but training runs on the CPU"
        yield note("machine.gpu.apple", text, "if that is too slow, train on another machine")
    else:
        yield note(
            "machine.gpu.none", "no GPU: training and encoding run on the CPU", "fine for small models and for search"
        )
    if config.optim.precision in ("amp", "amp_fp16"):
        text = f"--precision {config.optim.precision} needs a GPU that torch can use"
        yield problem("machine.precision", text, "use --precision fp32 or amp_bf16")


def check_room(config: Any) -> Iterator[Finding]:
    """CPU cores for the loading processes, disk space under ``--logs``, shared memory and the limit of open files."""
    yield from _cores(config)
    yield from _disk(config)
    if config.data.workers and SHARED_MEMORY.is_dir():
        yield from _shared(config)
    yield from _open_files()


def _cores(config: Any) -> Iterator[Finding]:
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    text = f"{cores} cores for this process, {threads} threads in torch, {config.data.workers} loading processes per rank"
    if config.data.workers > cores:
        yield warning(
            "machine.workers", f"{text}: more processes than cores", f"use --workers {max(1, cores - 1)} or fewer"
        )
    elif threads > cores:
        do = f"set OMP_NUM_THREADS={cores}: with more threads than cores, threads wait for each other"
        yield warning("machine.threads", f"{text}: more threads than cores", do)
    else:
        yield ok("machine.cores", text)


def usable_cores() -> int:
    """Number of cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def _disk(config: Any) -> Iterator[Finding]:
    folder = Path(config.run.logs).resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield problem(
            "machine.logs", f"--logs {config.run.logs}: {folder} cannot be written to", "name another folder with --logs"
        )
        return
    free = shutil.disk_usage(folder).free
    text = f"{bytes_text(free)} free under --logs {config.run.logs}"
    if free < _MIN_DISK:
        do = "free space, or name another disk: two checkpoints are kept, each with weights, Adam's moments and momentum towers"
        yield warning("machine.disk", text, do)
    else:
        yield ok("machine.disk", text)


def _shared(config: Any) -> Iterator[Finding]:
    """Loading processes pass batches through shared memory; containers often have only 64 MiB."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    side = config.model.force_image_size or 224
    needed = config.data.workers * _PREFETCH * config.optim.batch_size * 3 * side * side * 4
    workers = config.data.workers
    text = f"{bytes_text(free)} of shared memory free in {SHARED_MEMORY}, {workers} workers need up to {bytes_text(needed)}"
    if needed > free:
        do = "docker run --shm-size=8g (or --ipc=host), fewer --workers, or --workers 0: otherwise they stop with a bus error"
        yield warning("machine.shared", text, do)
    else:
        yield ok("machine.shared", text)


def _open_files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _MIN_OPEN_FILES:
        do = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}: each batch in transit and each open shard counts as a file"
        yield warning("machine.files", f"this process may open {soft} files", do)
    else:
        yield ok("machine.files", f"this process may open {soft if soft > 0 else 'any number of'} files")
