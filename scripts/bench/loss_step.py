#!/usr/bin/env python3
"""Time of DCL's forward and backward pass, by tiles and by its reference, against open_clip's ClipLoss in the same run.

    python scripts/bench/loss_step.py                           on the CPU, eager and compiled
    python scripts/bench/loss_step.py --device cuda --dtype bfloat16 --repeats 50
    python scripts/bench/loss_step.py --modes eager --sizes 4096x512 8192x512 --repeats 3 --json loss_step.json

Every repetition times each loss once, in rotating order, so that other load on the machine slows all of them alike. A ratio
is the median over repetitions of the loss's time over that of ClipLoss in the same mode. Below 1 is faster than ClipLoss.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.functional import dcl

Step = Callable[[], None]
WARM_UP = 3


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    print(machine(options))
    header = ["N", "D", "mode", "ClipLoss ms", "reference ms", "tiled ms", "reference ratio", "tiled ratio"]
    print(row(header))
    for n, d in options.sizes:
        torch._dynamo.reset()
        for mode in options.modes:
            steps = make_steps(n, d, options, compiled=mode == "compiled")
            times = measure(steps, options.device, options.repeats)
            cells = [n, d, mode, *(f"{1e3 * statistics.median(times[name]):.2f}" for name in steps)]
            for name in ("reference", "tiled"):
                cells.append(f"{statistics.median(map(float.__truediv__, times[name], times['clip'])):.2f}")
            print(row(cells), flush=True)
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"n": n, "d": d, "mode": mode, "seconds": times}) + "\n")


def make_steps(n: int, d: int, options: argparse.Namespace, *, compiled: bool) -> dict[str, Step]:
    """Forward and backward of each loss for one random batch of n pairs in d dimensions."""
    torch.manual_seed(0)
    images, texts = (
        normalize(torch.randn(n, d, device=options.device), dim=1).to(options.dtype).requires_grad_() for _ in range(2)
    )
    ids = torch.randint(2**62, (n,), device=options.device)
    scale = torch.tensor(14.3, device=options.device, requires_grad=True)
    losses: dict[str, Callable[[], Tensor]] = {"clip": with_arguments(ClipLoss(), compiled, images, texts, scale)}
    for form in ("reference", "tiled"):
        losses[form] = with_arguments(dcl, compiled, images, texts, image_ids=ids, implementation=form)
    assert torch.allclose(losses["reference"](), losses["tiled"](), rtol=1e-4), "the tiles differ from the reference"
    leaves = {"clip": (images, texts, scale), "reference": (images, texts), "tiled": (images, texts)}
    return {
        name: lambda loss=loss, inputs=leaves[name]: torch.autograd.grad(loss(), inputs)
        for name, loss in losses.items()
    }


def with_arguments(
    loss: Callable[..., Tensor], compiled: bool, *args: Tensor, **kwargs: Any
) -> Callable[[], Tensor]:
    function = torch.compile(loss, dynamic=False) if compiled else loss
    return lambda: function(*args, **kwargs)


def measure(steps: dict[str, Step], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step in each repetition; the steps take turns."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    clock = seconds_on_gpu if device.startswith("cuda") else seconds_on_cpu
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(clock(steps[name]))
    return times


def seconds_on_cpu(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def seconds_on_gpu(step: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def machine(options: argparse.Namespace) -> str:
    if options.device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name(options.device)}, CUDA {torch.version.cuda}"
    else:
        name = f"{processor()}, {options.threads} threads"
        if hasattr(os, "getloadavg"):
            name += f", load {os.getloadavg()[0]:.1f} at the start"
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "open_clip_torch", "coder-plugin"))
    return (
        f"{name}\nPython {platform.python_version()}, {versions}\n"
        f"{str(options.dtype).removeprefix('torch.')} features, forward and backward, "
        f"medians of {options.repeats} interleaved repetitions after {WARM_UP} warm-ups\n"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def row(cells: list[object]) -> str:
    return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, (5, 5, 8, 11, 12, 8, 15, 11), strict=True))


def size(text: str) -> tuple[int, int]:
    n, _, d = text.partition("x")
    return int(n), int(d)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    dtypes = ["float64", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="type of the features")
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions [15]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    modes = ["eager", "compiled"]
    parser.add_argument("--json", help="append the times to this file")
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes, help="without and with torch.compile")
    sizes = [(n, d) for n in (128, 512, 2048) for d in (512, 1024)]
    parser.add_argument("--sizes", nargs="+", type=size, default=sizes, metavar="NxD", help="batch x dimensions, as 2048x512")
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    return options


if __name__ == "__main__":
    main()
