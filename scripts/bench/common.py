"""What the benchmarks share: options, steps timed in turns by torch.utils.benchmark, ratios to a peer, lines of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Compare, Measurement, Timer

Step = Callable[[], object]


def parser(doc: str | None, *, repeats: int, wall: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark. ``wall``: the script always measures by the clock."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … [cpu]")
    made.add_argument("--repeats", type=int, default=repeats, help=f"rounds, in which every step has a turn [{repeats}]")
    made.add_argument("--block", type=float, default=0.2, help="seconds of calls in a row, at least, of a turn [0.2]")
    made.add_argument("--threads", type=int, default=1, help="threads of PyTorch on the CPU [1]")
    made.add_argument("--json", type=Path, metavar="FILE", help="append results to this file, a line of JSON each")
    if wall:
        made.set_defaults(wall=True)
    else:
        made.add_argument("--wall", action="store_true", help="time by the clock; on a CPU it is the CPU time otherwise")
    return made


class Results:
    """Times steps, prints their ratios to a peer, and writes both as JSON. The machine comes first.

    Args:
        bench: name of the benchmark.
        options: of :func:`parser`.
        packages: further packages whose versions matter.
    """

    def __init__(self, bench: str, options: argparse.Namespace, packages: Sequence[str] = ()) -> None:
        torch.set_num_threads(options.threads)
        self.bench, self.options, self.cuda = bench, options, options.device.startswith("cuda")
        facts = machine(options.device, packages)
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        self.write(machine=facts, options={name: str(value) for name, value in vars(options).items()})

    def write(self, **line: Any) -> None:
        if self.options.json is not None:
            with open(self.options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps({"bench": self.bench, **line}) + "\n")

    def timer(self, case: str, name: str, step: Step) -> Timer:
        """Times ``step``: on a GPU after synchronising it, on a CPU by the CPU time of this process and its ended children."""
        clock = {} if self.cuda or self.options.wall else {"timer": cpu_seconds}
        spec = {"label": self.bench, "sub_label": name, "description": case, "num_threads": self.options.threads}
        return Timer("step()", globals={"step": step}, **spec, **clock)

    def compare(self, case: str, steps: Mapping[str, Step], *, peers: int = 1, **facts: Any) -> dict[str, float]:
        """Time the steps in turns, so that other load on the machine slows all alike, and report them.

        A step that fails on a GPU, for example because it does not fit the memory, is reported, and the others go on.
        """
        timers = {name: self.timer(case, name, step) for name, step in steps.items()}
        found: dict[str, list[Measurement]] = {}
        names = list(steps)
        for turn in range(self.options.repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name not in timers:
                    continue
                try:
                    measured = timers[name].blocked_autorange(min_run_time=self.options.block)  # warms up, too
                    found.setdefault(name, []).append(measured)
                except RuntimeError as error:  # out of memory, or a failed compilation
                    if not self.cuda:
                        raise
                    reason = " ".join(str(error).split())[:200]
                    print(f"{case}: {name} failed: {reason}", flush=True)
                    self.write(case=case, failed=name, error=reason)
                    del timers[name]
                    found.pop(name, None)
                    torch.cuda.empty_cache()
        if self.cuda:
            facts["peak_bytes"] = {name: peak_bytes(steps[name]) for name in timers}
        return self.report(case, {name: found[name] for name in names if name in found}, peers=peers, **facts)

    def report(
        self, case: str, found: Mapping[str, Sequence[Measurement]], *, peers: int = 1, **facts: Any
    ) -> dict[str, float]:
        """Print and write times, and the ratios to the first steps, the peers.

        A ratio is the median over rounds of a step's time over that of the peer in the same round.

        Returns:
            The ratios to the first peer.
        """
        print(Compare([each for rounds in found.values() for each in rounds]))
        ratios: dict[str, dict[str, float]] = {}
        quartiles = {}
        for peer in list(found)[:peers]:
            ratios[peer] = {}
            for name in (each for each in found if each != peer):
                rounds = [one.median / other.median for one, other in zip(found[name], found[peer], strict=True)]
                ratios[peer][name] = statistics.median(rounds)
                low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else 3 * rounds
                quartiles.setdefault(name, [low, high])
                print(f"{name}: {ratios[peer][name]:.3f} x {peer} (quartiles {low:.3f} to {high:.3f})", flush=True)
        for name, size in facts.get("peak_bytes", {}).items():
            print(f"{name}: {size / 1e9:.3f} GB beyond its inputs", flush=True)
        seconds = {name: statistics.median(each.median for each in rounds) for name, rounds in found.items()}
        first = next(iter(ratios.values()))
        self.write(case=case, seconds=seconds, ratio=first, quartiles=quartiles, ratios=ratios, **facts)
        return first


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system


def peak_bytes(step: Step) -> int:
    """Peak of allocated GPU memory during one call, beyond what was allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def resident(field: str) -> int:
    """Resident memory of this process in bytes, now (VmRSS) or at its peak (VmHWM). On Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def machine(device: str = "cpu", packages: Sequence[str] = ()) -> dict[str, Any]:
    """GPU or processor, threads, load, Python, and the versions of torch, this package and ``packages``."""
    facts: dict[str, Any] = {}
    if device.startswith("cuda"):
        facts = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    facts |= {"processor": (names or [platform.machine()])[0], "threads": torch.get_num_threads()}
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 1)
    facts["python"] = platform.python_version()
    for name in ("torch", "coder-plugin", *packages):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def make_bert(folder: Path, words: Sequence[str], *, tiny: bool = False) -> None:
    """A configuration and a tokenizer of BERT base's size, whose vocabulary has ``words``, for models with random weights."""
    from transformers import BertConfig
    from transformers.models.bert import BertTokenizerFast  # type: ignore[attr-defined]

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    size = len(words) if tiny else 30_522
    words += [f"unused{number}" for number in range(size - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizerFast.from_pretrained(str(folder)).save_pretrained(folder)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {}
    BertConfig(vocab_size=size, **small).save_pretrained(folder)
