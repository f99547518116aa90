"""What the benchmarks share: the machine in words, steps timed in turns, ratios to a peer of the same run, JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Step = Callable[[], object]
Times = dict[str, list[float]]


def add_options(
    parser: argparse.ArgumentParser, *, repeats: int, threads: int | None = None, without: Sequence[str] = ()
) -> None:
    """Add the options that benchmarks share, but those ``without``, which keep their defaults."""
    threads = threads or torch.get_num_threads()
    shared: dict[str, dict[str, Any]] = {
        "device": {"default": "cpu", "help": "cpu, cuda, cuda:1, …"},
        "repeats": {"type": int, "default": repeats, "help": f"timed repetitions [{repeats}]"},
        "limit": {"type": float, "help": "seconds for one case, after which no further repetition begins [none]"},
        "threads": {"type": int, "default": threads, "help": f"CPU threads [{threads}]"},
        "clock": {
            "choices": ("wall", "cpu"), "default": "wall", "help": "cpu: CPU time, workers included, for a busy machine [wall]",
        },
    }  # fmt: skip
    for name, settings in shared.items():
        if name in without:
            parser.set_defaults(**{name: settings.get("default")})
        else:
            parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line of JSON per result to this file")


def machine(device: str = "cpu", packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor or GPU, threads, load, Python, and the versions of torch, this package and ``packages``."""
    facts: dict[str, Any] = {"processor": processor(), "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        facts = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, **facts}
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 1)
    facts["python"] = platform.python_version()
    return facts | {name: installed(name) for name in ("torch", "coder-plugin", *packages)}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Results:
    """Writes results as lines of JSON, each at once, with the benchmark's name, and prints the machine first.

    Args:
        bench: name of the benchmark.
        options: the parsed options; ``json`` names the file, None writes none.
        packages: further packages whose versions count.
    """

    def __init__(self, bench: str, options: argparse.Namespace, packages: Sequence[str] = ()) -> None:
        torch.set_num_threads(options.threads)
        self.bench, self.file = bench, options.json
        facts = machine(options.device, packages)
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        plain = {name: value for name, value in vars(options).items() if isinstance(value, (int, float, str, bool))}
        self.write({"machine": facts, "options": plain})

    def write(self, result: dict[str, Any]) -> None:
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"bench": self.bench, **result}) + "\n")

    def compare(self, case: str, times: Times, *, peer: str, second: str | None = None, **more: Any) -> dict[str, float]:
        """Print and write the medians of ``times`` and each one's ratio to ``peer``, and to a ``second`` one. Returns the first
        ratios."""
        peers = [each for each in (peer, second) if each is not None]
        ratios = {each: {name: ratio(times, name, each) for name in times if name not in peers} for each in peers}
        ratios[peer] |= {each: ratio(times, each, peer) for each in peers[1:]}
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, value in medians.items():
            against = "".join(f"  {ratios[each][name]:7.3f} x {each}" for each in peers if name in ratios[each])
            count = f"({len(times[name])} repetitions)"
            print(f"{case}: {name:<24} {1e3 * value:11.3f} ms {count}{against}", flush=True)
        repeats = {name: len(values) for name, values in times.items()}
        found = {"case": case, "peer": peer, "seconds": medians, "repeats": repeats, "ratio": ratios[peer]}
        self.write(found | ({} if second is None else {"second": second, "ratio_to_second": ratios[second]}) | more)
        return ratios[peer]


def ratio(times: Times, name: str, peer: str) -> float:
    """Median over repetitions of the time of ``name`` over that of ``peer`` in the same repetition."""
    return statistics.median(map(float.__truediv__, times[name], times[peer]))


def measure(
    steps: dict[str, Step],
    device: str = "cpu",
    repeats: int = 9,
    *,
    warm_up: int = 3,
    clock: str = "wall",
    limit: float | None = None,
    block: float = 0.0,
) -> Times:
    """Seconds of each step in each repetition. The steps take turns, in rotating order, so that other load slows all alike.

    Args:
        steps: what to time, by name.
        device: ``cuda…`` times with CUDA events.
        repeats: timed repetitions.
        warm_up: untimed calls of each step, before.
        clock: ``wall``, or ``cpu`` for the CPU time of all threads of this process and of its children that have ended.
        limit: seconds after which no further repetition begins; the first one always runs.
        block: seconds that a timing lasts at least: a short step is called several times in a row and the mean counts, so
            that the caches are filled as in a loop of its own.
    """
    begun = time.perf_counter()
    for step in steps.values():
        for _ in range(warm_up):
            step()
            if limit is not None and time.perf_counter() - begun > limit / 2:
                break
    times: Times = {name: [] for name in steps}
    names = list(steps)
    calls = {name: max(1, math.ceil(block / seconds(step, device, clock))) if block else 1 for name, step in steps.items()}
    for repeat in range(repeats):
        if repeat and limit is not None and time.perf_counter() - begun > limit:
            break
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(seconds(steps[name], device, clock, calls[name]))
    return times


def seconds(step: Step, device: str = "cpu", clock: str = "wall", calls: int = 1) -> float:
    """The mean time of some calls: by CUDA events on a GPU, else of the wall or CPU time (:func:`cpu_seconds`)."""
    if device.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls
    now = cpu_seconds if clock == "cpu" else time.perf_counter
    begun = now()
    for _ in range(calls):
        step()
    return (now() - begun) / calls


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system


def peak_bytes(step: Step, device: str) -> int | None:
    """Peak of allocated GPU memory during one call, beyond what was allocated before it. None without a GPU."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def clip_loss() -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """open_clip's ``ClipLoss``; without open_clip the same computation, under the name "plain InfoNCE"."""
    try:
        from open_clip.loss import ClipLoss
    except ImportError:
        return "plain InfoNCE", plain_infonce
    return "ClipLoss", ClipLoss()


def one_product_infonce(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """InfoNCE from one product and its transpose: the peer of losses that compute each similarity once."""
    labels = torch.arange(len(images), device=images.device)
    logits = scale * images @ texts.T
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def plain_infonce(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """What ``ClipLoss`` computes in one process: a product for each direction, and the mean of both cross-entropies."""
    labels = torch.arange(len(images), device=images.device)
    per_image, per_text = scale * images @ texts.T, scale * texts @ images.T
    return (cross_entropy(per_image, labels) + cross_entropy(per_text, labels)) / 2
