#!/usr/bin/env python3
"""Time and peak memory of a whole training step: one objective against `clip`, in the same run.

    python scripts/bench/coder_step.py                                     coder on the CPU, with a small model
    python scripts/bench/coder_step.py --model ViT-B-32 --device cuda --precision bf16 --repeats 50
    python scripts/bench/coder_step.py --loss "clip + selfalign"

A step is forward, loss, backward, AdamW and `post_step`. The two objectives take turns in one process, so that other load on
the machine slows both alike. The ratio of times is the median over repetitions.

Peak memory is measured in a separate process for each objective. On a GPU it is the peak of allocated memory; on a CPU it is
the growth of the resident set after imports. The times of single heads and losses come from further steps, with the device
synchronised before and after each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import coder_plugin
from coder_plugin.objective import Objective

WARM_UP = 3


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)  # without a vocabulary, concepts are random: no matter for speed
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, options)))
        return
    print(machine(options))
    steps = {name: Step(name, options) for name in ("clip", options.loss)}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
        print(f"{step.name}: {step.parameters:,} trained parameters, {step.frozen:,} frozen")
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for repeat in range(options.repeats):
        for name in names[repeat % 2 :] + names[: repeat % 2]:
            times[name].append(seconds(steps[name], options.device))
    ratios = list(map(float.__truediv__, times[options.loss], times["clip"]))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    print(f"step: clip {1e3 * statistics.median(times['clip']):.1f} ms, {options.loss} "
          f"{1e3 * statistics.median(times[options.loss]):.1f} ms, ratio {statistics.median(ratios):.2f} "
          f"(quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f})")  # fmt: skip
    peaks = {name: peak_memory_in_subprocess(name) for name in steps}
    print(f"peak memory: clip {peaks['clip'] / 2**20:.0f} MiB, {options.loss} {peaks[options.loss] / 2**20:.0f} MiB, "
          f"ratio {peaks[options.loss] / peaks['clip']:.2f}")  # fmt: skip
    parts = steps[options.loss].parts(options.repeats)
    total = parts.pop("step")
    print(f"heads and losses within a step of {options.loss} ({1e3 * total:.1f} ms):")
    for part, elapsed in parts.items():
        print(f"  {part:<28} {1e3 * elapsed:8.2f} ms  {100 * elapsed / total:5.1f} %")


class Step:
    """Model, loss, optimizer and batch of one objective. A call performs one training step."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, options.device
        objective = Objective.parse(name)
        if "pgc" in str(objective):
            objective = objective.with_options({"prototypes.clusters": options.clusters, "momentum.bank_size": options.bank})
        self.model = coder_plugin.create_model(options.model, loss=objective, device=options.device).train()
        self.loss = coder_plugin.create_loss(objective, model=self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4)
        self.parameters = sum(p.numel() for p in trainable)
        self.frozen = sum(p.numel() for p in self.model.parameters()) - self.parameters
        self.autocast = functools.partial(
            torch.autocast, options.device.split(":")[0], dtype=torch.bfloat16, enabled=options.precision == "bf16"
        )
        size = self.model.visual.image_size
        height, width = size if isinstance(size, tuple) else (size, size)
        generator = torch.Generator().manual_seed(0)
        n, length = options.batch_size, self.model.context_length
        text = torch.randint(1, 400, (n, length), generator=generator)
        words = torch.randint(8, min(30, length), (n,), generator=generator)
        text[torch.arange(length)[None] > words[:, None]] = 0
        text[torch.arange(n), words] = self.model.vocab_size - 1  # CLIP's end-of-text token has the largest id
        self.images = torch.randn(n, 3, height, width, generator=generator).to(options.device)
        self.text = text.to(options.device)
        self.count = 0

    def __call__(self) -> None:
        n = len(self.text)
        ids = torch.arange(n, device=self.device) + n * self.count
        self.count += 1
        with self.autocast():
            outputs = self.model(self.images, self.text, image_id=ids)
        sum(self.loss(**outputs).values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.coder.post_step(self.optimizer)

    def parts(self, repeats: int) -> dict[str, float]:
        """Median seconds of each head and loss and of the whole step (key ``step``)."""
        times: dict[str, list[float]] = {}
        with contextlib.ExitStack() as stack:
            for name, head in self.model.coder.heads.items():
                stack.enter_context(timed(head, "forward", f"{name}: forward", times, self.device))
                stack.enter_context(timed(head, "post_step", f"{name}: post_step", times, self.device))
            for name, term in self.loss.terms.items():
                stack.enter_context(timed(term, "forward", f"{name}: loss", times, self.device))
            for _ in range(repeats):
                times.setdefault("step", []).append(seconds(self, self.device))
        return {part: statistics.median(values) for part, values in times.items()}


@contextlib.contextmanager
def timed(module: nn.Module, method: str, part: str, times: dict[str, list[float]], device: str) -> Iterator[None]:
    """Record the seconds of every call of ``module.method`` under ``times[part]``."""
    original = getattr(module, method)

    def wrapped(*args: object, **kwargs: object) -> object:
        results: list[object] = []
        times.setdefault(part, []).append(seconds(lambda: results.append(original(*args, **kwargs)), device))
        return results[0]

    setattr(module, method, wrapped)
    yield
    delattr(module, method)


def seconds(step: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def memory(name: str, options: argparse.Namespace) -> int:
    """Peak memory of a few steps, in bytes."""
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # libraries allocate at first use
    cuda = options.device.startswith("cuda")
    if not cuda:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which importing has raised (Linux)
    before = 0 if cuda else resident("VmRSS")
    step = Step(name, options)
    for _ in range(WARM_UP):
        step()
    return torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - before


def resident(field: str) -> int:
    """Resident memory of this process in bytes: now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_memory_in_subprocess(name: str) -> int:
    command = [sys.executable, *sys.argv, "--memory-of", name]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout.splitlines()[-1])


def machine(options: argparse.Namespace) -> str:
    if options.device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name(options.device)}, CUDA {torch.version.cuda}"
    else:
        name = f"{platform.machine()}, {options.threads} threads, load {os.getloadavg()[0]:.1f} at the start"
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "open_clip_torch", "coder-plugin"))
    return f"{name}\nPython {platform.python_version()}, {versions}\n{options.model}, batch {options.batch_size}, " \
           f"{options.precision}, bank {options.bank}, {options.clusters} prototypes"  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="coder-tiny", help="open_clip model name [coder-tiny]")
    parser.add_argument("--loss", default="coder", help="objective to compare with clip [coder]")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size [64]")
    parser.add_argument("--bank", type=int, default=4096, help="entries of each momentum bank [4096]")
    parser.add_argument("--clusters", type=int, default=10_000, help="number of prototypes [10000]")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="fp32, or bf16 autocast [fp32]")
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions [15]")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
