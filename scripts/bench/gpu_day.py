#!/usr/bin/env python3
"""Everything that a GPU can tell, in one command of at most ten minutes, in order of worth.

    python scripts/bench/gpu_day.py --out gpu_day --wheels wheels        on a machine with a GPU, without network
    python scripts/bench/gpu_day.py --dry                                tiny sizes, on a CPU

It needs Python 3.10, torch, torchvision, timm, transformers, accelerate and safetensors, and no more for all but the
step of ViT-B-32. `--wheels FOLDER` installs, without the network, what is carried there:

    pip download --no-deps -d wheels open_clip_torch==3.3.0 ftfy wcwidth       for the step of ViT-B-32 and its profile
    pip download --no-deps -d wheels webdataset braceexpand faiss-cpu          for the tests that read shards or search
    pip download -d wheels pytest pytest-timeout hypothesis                    for the tests, where these are not there

This package is installed from the source tree that holds the script, unless it is installed already; that needs setuptools 77
or later, which may be carried too.

Each stage is a process of its own with its own time limit. Its results are appended to `OUT/results.jsonl` as they come, so a
stage that is stopped leaves what it has measured, and the next one goes on. `OUT/log.txt` has everything that was printed. At
the end, measured figures are compared with the goals, and stages that are not complete are named (exit
status 1). OUT is `$OUT` or `./gpu_day`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRECISION = ("--precision", "amp_bf16")


@dataclass(frozen=True)
class Stage:
    """A stage: its command on a GPU and its tiny form.

    Args:
        limit: seconds that it may take.
        command: arguments of Python; ``{json}`` is the file of results, ``{out}`` their folder, ``{gpu tests}`` the test files.
        dry: the same with tiny sizes, for a CPU.
    """

    name: str
    limit: float
    command: tuple[str, ...]
    dry: tuple[str, ...]


def script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(HERE / name), *arguments, "--json", "{json}")


def operations(name: str, limit: float) -> Stage:
    return Stage(
        name, limit, script("gpu_stages.py", name, "--device", "cuda", "--limit", "8"),
        script("gpu_stages.py", name, "--dry", "--repeats", "1", "--threads", "1"),
    )  # fmt: skip


CODER = ("--bank", "64", "--clusters", "16", "--repeats", "1", "--batch-size", "4", "--threads", "1", "--no-memory")
STAGES = (
    Stage("versions", 25, (str(Path(__file__).resolve()), "--versions", "{json}"), (__file__, "--versions", "{json}")),
    operations("rooflines", 40),
    Stage(
        "tests", 80, ("-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "{gpu tests}"),
        ("-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "{gpu tests}", "--collect-only"),
    ),
    operations("dcl", 115),
    operations("m_dcl", 65),
    Stage(
        "step", 105,
        script("coder_step.py", "--model", "ViT-B-32", "--device", "cuda", "--batch-size", "256", *PRECISION, "--repeats", "20",
               "--limit", "40", "--profile", "{out}/profile.txt"),
        script("coder_step.py", *CODER, "--profile", "{out}/profile.txt"),
    ),
    Stage(
        "schedule", 95, script("paper_schedule.py", "--device", "cuda", *PRECISION, "--steps", "200", "--limit", "40"),
        script("paper_schedule.py", "--tiny", "--steps", "1", "--batch-size", "8", "--workers", "0", "--threads", "1"),
    ),
    operations("search", 35),
)  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """A figure and its bound. ``figure`` takes one line of the results and returns the figure, or None."""

    name: str
    bound: float
    unit: str
    figure: Callable[[Mapping[str, Any]], float | None]


def of(case: str, key: str, *, form: str | None = None, scale: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    """The value under ``key`` in the lines of a case that begins so, and of a form."""

    def figure(line: Mapping[str, Any]) -> float | None:
        fits = str(line.get("case", "")).startswith(case) and form in (None, line.get("form"))
        value = line.get(key) if fits else None
        return scale * value if isinstance(value, (int, float)) else None

    return figure


def ratio_of_step(line: Mapping[str, Any]) -> float | None:
    return line.get("ratio", {}).get("coder") if str(line.get("case", "")).startswith("ViT-B-32, batch 256") else None


def _goals() -> list[Goal]:
    dcl, bfloat16 = "DCL 32,768 x 1024, tiled bfloat16", "tiled bfloat16"
    m_dcl, schedule = "M-DCL 4096 x 1M, tiled", "region-bert, batch 128"
    return [
        Goal(dcl, 16, "ms", of("dcl 32768", "seconds", form=bfloat16, scale=1e3)),
        Goal(f"{dcl}, memory", 0.5, "GB", of("dcl 32768", "peak_bytes", form=bfloat16, scale=1e-9)),
        Goal("DCL, tiled bfloat16, error of the gradient", 2e-2, "", of("dcl 8192", "error", form=bfloat16)),
        Goal("DCL, tiled TF32, error of the gradient", 2e-3, "", of("dcl 8192", "error", form="tiled TF32")),
        Goal("M-DCL 128 x 1M, tiled", 2.1, "ms", of("m_dcl 128 x 1048576", "seconds", form="tiled", scale=1e3)),
        Goal(m_dcl, 68, "ms", of("m_dcl 4096", "seconds", form="tiled", scale=1e3)),
        Goal(f"{m_dcl}, memory beyond the banks", 1.0, "GB", of("m_dcl 4096", "peak_bytes", form="tiled", scale=1e-9)),
        Goal("coder step / clip step, ViT-B-32 at 256", 1.45, "x", ratio_of_step),
        Goal("the paper's schedule, steps alone", 6, "min", of(schedule, "hours", scale=60)),
        Goal("the paper's schedule, fed by the loader", 6, "min", of(schedule, "fed_hours", scale=60)),
    ]


GOALS = _goals()


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.versions:
        versions(options.versions)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    before = results.stat().st_size if results.exists() else 0  # lines of earlier runs
    began = time.monotonic()
    with open(options.out / "log.txt", "a", encoding="utf-8") as log:
        prepare(options, log)
        chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
        endings = run(chosen, options, log, until=began + options.limit)
        say(compare(GOALS, read(results, before)), log)
        if options.dry:
            say("(--dry: the goals are for full sizes on a GPU)", log)
        bad = [f"{stage.name}: {ending}" for stage, ending in zip(chosen, endings, strict=True) if ending != "ok"]
        say(f"not complete: {'; '.join(bad)} (see log.txt)" if bad else "all stages are complete", log)
    return 1 if bad else 0


def run(stages: Iterable[Stage], options: argparse.Namespace, log: TextIO, *, until: float) -> list[str]:
    """Run the stages in order; one that fails or is stopped does not keep the next from its turn. Returns their endings."""
    endings = []
    for stage in stages:
        limit = min(stage.limit, until - time.monotonic())
        begun = time.monotonic()
        ending = run_stage(stage, options, log, limit) if limit > 2 else "skipped: the time is used up"
        endings.append(ending)
        line = {"stage": stage.name, "ending": ending, "stage_seconds": round(time.monotonic() - begun, 1)}
        with open(options.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        say(f"== {stage.name}: {ending}, {line['stage_seconds']} s", log)
    return endings


def run_stage(stage: Stage, options: argparse.Namespace, log: TextIO, limit: float) -> str:
    """Returns "ok", "failed with status N" or "stopped after N s". Output goes to the log and the terminal as it comes."""
    places = {"{json}": [str(options.out / "results.jsonl")], "{gpu tests}": gpu_tests()}
    command = [sys.executable]
    for part in stage.dry if options.dry else stage.command:
        command += places.get(part, [part.replace("{out}", str(options.out))])
    say(f"\n== {stage.name}, at most {limit:.0f} s: {' '.join(command)}", log)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # a process group of its own, so that loading processes and peers end with it
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    until = time.monotonic() + limit
    while True:
        ended = process.poll() is not None
        piece = process.stdout.read()
        if piece:
            say(piece.decode(errors="replace"), log, end="")
        elif ended:
            break
        if not ended and time.monotonic() > until:
            kill(process)
            return f"stopped after {limit:.0f} s"
        time.sleep(0.05)
    kill(process)
    return "ok" if process.returncode == 0 else f"failed with status {process.returncode}"


def gpu_tests() -> list[str]:
    """The files with tests for a GPU: collecting all others would take long, and some need packages that are not there."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def kill(process: subprocess.Popen[bytes]) -> None:
    """End all that is left of a stage's process group."""
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def prepare(options: argparse.Namespace, log: TextIO) -> None:
    """Install the wheels and, where it is not installed, this package. What fails is said; the stages show what it costs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    if options.wheels:
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        say(f"wheels: {[Path(wheel).name for wheel in wheels]}", log)
        say(output([*pip, "--find-links", str(options.wheels), *wheels]) if wheels else f"no wheels in {options.wheels}", log)
    try:
        importlib.metadata.version("coder-plugin")
    except importlib.metadata.PackageNotFoundError:
        say(output([*pip, "--no-build-isolation", "-e", str(ROOT)]), log)


def output(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return f"{' '.join(command[2:])}: {'ok' if done.returncode == 0 else done.stdout.strip()}"


def versions(file: Path) -> None:
    """What the machine is: written first, in a process of its own, since importing torch may fail or take long."""
    import platform

    facts: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    packages = "torch torchvision timm transformers accelerate safetensors numpy setuptools pytest hypothesis"
    for package in (*packages.split(), "open_clip_torch", "webdataset", "faiss-cpu", "coder-plugin"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    if shutil.which("git"):
        facts["commit"] = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if shutil.which("nvidia-smi"):
        fields = "--query-gpu=name,memory.total,driver_version,clocks.sm"
        facts["nvidia-smi"] = output_of("nvidia-smi", fields, "--format=csv,noheader")
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        facts["multiprocessors"] = properties.multi_processor_count
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"bench": "versions", **facts}) + "\n")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def read(results: Path, start: int = 0) -> list[dict[str, Any]]:
    """The lines of the results from the byte ``start`` on. A stage that was stopped may leave half a line."""
    lines = []
    for line in results.read_bytes()[start:].decode("utf-8", "replace").splitlines() if results.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def compare(goals: Iterable[Goal], lines: Iterable[Mapping[str, Any]]) -> str:
    """A table of goals and measured figures, the worst of several."""
    lines = list(lines)
    rows = [f"{'goal':<46} {'at most':>10} {'measured':>12}"]
    for goal in goals:
        found = [value for line in lines if (value := goal.figure(line)) is not None]
        measured = f"{max(found):.4g}" if found else "–"
        verdict = "" if not found else "  holds" if max(found) <= goal.bound else "  DOES NOT HOLD"
        rows.append(f"{goal.name:<46} {goal.bound:>7g} {goal.unit:<3} {measured:>11}{verdict}")
    return "\n".join(rows)


def say(text: str, log: TextIO, end: str = "\n") -> None:
    print(text, end=end, flush=True)
    log.write(text + end)
    log.flush()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "gpu_day"))
    parser.add_argument("--out", type=Path, default=default, help="folder of the results [$OUT or gpu_day]")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install without the network")
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], help="only these")
    parser.add_argument("--limit", type=float, default=585, help="seconds for everything [585]")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU: does all of the code run?")
    parser.add_argument("--versions", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
