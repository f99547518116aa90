#!/usr/bin/env python3
"""Time and peak memory of a whole training step: one objective against `clip`, in the same run.

    python scripts/bench/coder_step.py                                     coder on the CPU, with a small model
    python scripts/bench/coder_step.py --model ViT-B-32 --device cuda --batch-size 256 --precision amp_bf16 --repeats 30
    python scripts/bench/coder_step.py --loss "clip + selfalign"

A step is `Trainer.training_step`, as `coder-plugin train` takes it: forward, loss, backward, norm of the gradients, AdamW and
`post_step`, on batches of the built-in scenes that are already on the device. The two objectives take turns in one process, so
that other load on the machine slows both alike. The ratio of times is the median over repetitions.

Peak memory is measured in a separate process for each objective. On a GPU it is the peak of allocated memory; on a CPU it is
the growth of the resident set after imports. The times of single heads and losses come from further steps, with the device
synchronised before and after each. On a GPU the waits of the host for the device in one step are counted, by the lines of code
that make it wait.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import Results, add_options, measure
from trainer_step import TrainerStep

from coder_plugin.objective import Objective

WARM_UP = 3


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    if options.memory_of:
        torch.set_num_threads(options.threads)
        print(json.dumps(memory(options.memory_of, options)))
        return
    results = Results("coder_step", options, ["open_clip_torch"])
    steps = {name: make_step(name, options) for name in ("clip", options.loss)}
    case = f"{options.model}, batch {options.batch_size}, {options.precision}"
    for name, step in steps.items():
        print(f"{name}: {step.trained:,} trained parameters, {step.frozen:,} frozen")
        waits = step.synchronisations()
        if waits is not None:
            print(f"{name}: the host waits {sum(waits.values())} times in a step: {waits}")
            results.write({"case": case, "form": name, "synchronisations": sum(waits.values()), "at": waits})
    times = measure(steps, options.device, options.repeats, warm_up=WARM_UP, clock=options.clock, limit=options.limit)
    ratios = list(map(float.__truediv__, times[options.loss], times["clip"]))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    print(f"quartiles of the ratio {quartiles[0]:.2f} to {quartiles[2]:.2f}")
    results.compare(case, times, peer="clip", quartiles=quartiles)
    if options.memory:
        peaks = {name: peak_memory_in_subprocess(name) for name in steps}
        ratio = peaks[options.loss] / peaks["clip"]
        print(f"peak memory: clip {peaks['clip'] / 2**20:.0f} MiB, {options.loss} {peaks[options.loss] / 2**20:.0f} MiB, "
              f"ratio {ratio:.2f}")  # fmt: skip
        results.write({"case": case, "peak_bytes": peaks, "memory_ratio": ratio})
    spent = steps[options.loss].parts(max(3, options.repeats // 3))
    parts = {part: statistics.median(values) for part, values in spent.items()}
    total = parts.pop("step")
    print(f"heads and losses within a step of {options.loss} ({1e3 * total:.1f} ms):")
    for part, elapsed in parts.items():
        print(f"  {part:<28} {1e3 * elapsed:8.2f} ms  {100 * elapsed / total:5.1f} %")
    results.write({"case": case, "parts": parts, "step": total})
    if options.profile:
        options.profile.write_text(steps[options.loss].profile())


def make_step(name: str, options: argparse.Namespace) -> TrainerStep:
    settings: dict[str, Any] = {}
    if "pgc" in str(Objective.parse(name)):
        settings["set"] = [f"prototypes.clusters={options.clusters}", f"momentum.bank_size={options.bank}"]
    step = TrainerStep(
        options.model, name, "scenes", batch_size=options.batch_size, precision=options.precision,
        train_num_samples=max(200 * options.batch_size, 2 * options.clusters), opt="adamw", lr=1e-4, **settings,
    )  # fmt: skip
    if not options.device.startswith(step.trainer.device.type):
        raise SystemExit(f"--device {options.device}: the trainer takes {step.device} (CUDA_VISIBLE_DEVICES= hides GPUs)")
    return step


def memory(name: str, options: argparse.Namespace) -> int:
    """Peak memory of a few steps, in bytes."""
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # libraries allocate at first use
    cuda = options.device.startswith("cuda")
    if not cuda:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which importing has raised (Linux)
    before = 0 if cuda else resident("VmRSS")
    step = make_step(name, options)
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=15)
    parser.add_argument("--model", default="coder-tiny", help="open_clip model name [coder-tiny]")
    parser.add_argument("--loss", default="coder", help="objective to compare with clip [coder]")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size [64]")
    parser.add_argument("--bank", type=int, default=4096, help="entries of each momentum bank [4096]")
    parser.add_argument("--clusters", type=int, default=10_000, help="number of prototypes [10000]")
    parser.add_argument("--precision", default="fp32", help="as of coder-plugin train: fp32, amp_bf16, … [fp32]")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a table of the operations that take longest")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
