#!/usr/bin/env python3
"""Everything that a GPU can tell, in one command of at most ten minutes, in order of worth.

    python scripts/bench/gpu_day.py --out gpu_day --wheels wheels        on a machine with a GPU, without network
    python scripts/bench/gpu_day.py --dry                                tiny sizes, on a CPU

It needs Python 3.10, torch, torchvision, timm, transformers, accelerate and safetensors. `--wheels FOLDER` installs, without
the network, what else is carried there:

    pip download --no-deps -d wheels open_clip_torch==3.3.0 ftfy wcwidth       for losses and steps
    pip download --no-deps -d wheels webdataset braceexpand faiss-cpu          for the tests that read shards or search
    pip download -d wheels pytest pytest-timeout hypothesis                    for the tests, where these are not there

This package is installed from the source tree that holds the script, unless it is installed already; that needs setuptools 77
or later, which may be carried too.

Each stage is a process of its own with its own time limit. Its results are appended to `OUT/results.jsonl` as they come, so a
stage that is stopped leaves what it has measured, and the next one goes on. `OUT/log.txt` has everything that was printed. At
the end measured figures are compared with the goals, and stages that are not complete are named (exit status 1).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Stage(NamedTuple):
    """A program with its arguments on a GPU, and those of its tiny form on a CPU; ``limit``: seconds that the former may take.

    ``OUT`` in an argument stands for the folder of results.
    """

    name: str
    limit: float
    program: Sequence[str]
    full: str
    dry: str


def script(name: str, limit: float, full: str, dry: str) -> Stage:
    program = (str(HERE / f"{name}.py"), "--json", "OUT/results.jsonl")
    return Stage(name, limit, program, f"--device cuda {full}", f"--repeats 1 --block 0.01 {dry}")


def gpu_tests() -> list[str]:
    """The files with tests for a GPU: collecting all others would take long, and some need packages that are not there."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


PYTEST = ("-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider")
STAGES = (
    Stage("tests", 80, (*PYTEST, *gpu_tests()), "", "--collect-only"),
    script(
        "loss_step", 120,
        "--dtypes bfloat16 tf32 --forms tiled reference compiled --sizes 2048x1024 8192x1024 32768x1024 --repeats 3",
        "--dtypes bfloat16 tf32 --forms tiled reference compiled --sizes 64x32",
    ),
    script(
        "bank_step", 65, "--dtype float16 --dim 1024 --sizes 128x65536 128x1048576 4096x1048576 --repeats 3",
        "--dtype float16 --dim 32 --sizes 16x256 64x512",
    ),
    script(
        "coder_step", 120, "--model ViT-B-32 --batch-size 256 --precision amp_bf16 --repeats 20 --profile OUT/profile.txt",
        "--bank 64 --clusters 16 --batch-size 4 --no-memory --profile OUT/profile.txt",
    ),
    script("paper_schedule", 180, "--precision amp_bf16 --steps 200", "--tiny --steps 1 --workers 0"),
)  # fmt: skip

STEP, SCHEDULE = "ViT-B-32, batch 256, amp_bf16", "region-bert, batch 128, amp_bf16"
#: What is measured, at most what, and where: the case of a line of results, two keys in it, and a factor.
GOALS: tuple[tuple[str, float, str, str, str, float], ...] = (
    ("DCL 32,768 x 1024, tiled bfloat16, ms", 16, "dcl 32768 x 1024", "seconds", "tiled bfloat16", 1e3),
    ("DCL 32,768 x 1024, tiled bfloat16, GB", 0.5, "dcl 32768 x 1024", "peak_bytes", "tiled bfloat16", 1e-9),
    ("DCL, tiled bfloat16, error of the gradients", 2e-2, "dcl 8192 x 1024", "error", "tiled bfloat16", 1),
    ("DCL, tiled TF32, error of the gradients", 2e-3, "dcl 8192 x 1024", "error", "tiled tf32", 1),
    ("M-DCL 128 x 1M, tiled, ms", 2.1, "m_dcl 128 x 1048576", "seconds", "tiled", 1e3),
    ("M-DCL 4096 x 1M, tiled, ms", 68, "m_dcl 4096 x 1048576", "seconds", "tiled", 1e3),
    ("M-DCL 4096 x 1M, tiled, GB beyond the banks", 1.0, "m_dcl 4096 x 1048576", "peak_bytes", "tiled", 1e-9),
    ("coder step / clip step, ViT-B-32 at 256", 1.45, STEP, "ratio", "coder", 1),
    ("coder / clip, peak memory", 1.2, STEP, "memory_ratio", "coder", 1),
    ("the paper's schedule, steps alone, min", 6, SCHEDULE, "minutes", "on the device", 1),
    ("the paper's schedule, fed by the loader, min", 6, SCHEDULE, "minutes", "fed by the loader", 1),
)


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    before = results.stat().st_size if results.exists() else 0  # lines of earlier runs
    until = time.monotonic() + options.limit
    prepare(options)
    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    endings = run(chosen, options, until=until)
    print(compare(read(results, before)))
    if options.dry:
        print("(--dry: the goals are for full sizes on a GPU)")
    bad = [f"{stage.name}: {ending}" for stage, ending in zip(chosen, endings, strict=True) if ending != "ok"]
    print(f"not complete: {'; '.join(bad)} (see log.txt)" if bad else "all stages are complete")
    return 1 if bad else 0


def run(stages: Iterable[Stage], options: argparse.Namespace, *, until: float) -> list[str]:
    """Run the stages in order; one that fails or is stopped does not keep the next from its turn. Returns their endings."""
    endings = []
    for stage in stages:
        begun = time.monotonic()
        limit = until - begun if options.dry else min(stage.limit, until - begun)
        ending = run_stage(stage, options, limit) if limit > 2 else "skipped: the time is used up"
        endings.append(ending)
        line = {"stage": stage.name, "ending": ending, "stage_seconds": round(time.monotonic() - begun, 1)}
        with open(options.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line)}\n")  # a stage that was stopped may leave half a line
        print(f"== {stage.name}: {ending}, {line['stage_seconds']} s", flush=True)
    return endings


def run_stage(stage: Stage, options: argparse.Namespace, limit: float) -> str:
    """Returns "ok", "failed with status N" or "stopped after N s". What it prints goes to the log, and then to the terminal."""
    command = [*stage.program, *(stage.dry if options.dry else stage.full).split()]
    command = [sys.executable, *(part.replace("OUT", str(options.out)) for part in command)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.dry:
        environment["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes minutes on a CPU
    with open(options.out / "log.txt", "a+", encoding="utf-8", errors="replace") as log:
        begun = log.seek(0, os.SEEK_END)
        log.write(f"\n== {stage.name}, at most {limit:.0f} s: {' '.join(command)}\n")
        log.flush()
        # a process group of its own, so that loading processes end with it
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=limit)
            ending = "ok" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {limit:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        log.seek(begun)
        print(log.read(), flush=True)
    return ending


def prepare(options: argparse.Namespace) -> None:
    """Install the wheels and, where it is not installed, this package. The stages show what a failure costs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    wheels = sorted(map(str, options.wheels.glob("*.whl"))) if options.wheels else []
    if wheels:
        subprocess.run([*pip, *wheels])
    elif options.wheels:
        print(f"no wheels in {options.wheels}")
    try:
        importlib.metadata.version("coder-plugin")
    except importlib.metadata.PackageNotFoundError:
        subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)])


def read(results: Path, start: int = 0) -> list[dict[str, Any]]:
    """The lines of the results from the byte ``start`` on, without those that are not complete."""
    lines = []
    for line in results.read_bytes()[start:].decode("utf-8", "replace").splitlines() if results.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def compare(lines: Sequence[dict[str, Any]]) -> str:
    """A table of goals and measured figures."""
    rows = [f"{'goal':<48} {'at most':>8} {'measured':>9}"]
    for name, bound, case, key, form, factor in GOALS:
        found = [factor * line[key][form] for line in lines if line.get("case") == case and form in line.get(key, ())]
        verdict = f"{found[-1]:>9.4g}  {'holds' if found[-1] <= bound else 'DOES NOT HOLD'}" if found else f"{'–':>9}"
        rows.append(f"{name:<48} {bound:>8g} {verdict}")
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "gpu_day"))
    parser.add_argument("--out", type=Path, default=default, help="folder of the results [$OUT or gpu_day]")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install without the network")
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], help="only these")
    parser.add_argument("--limit", type=float, default=585, help="seconds for everything [585]")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU: does all of the code run?")
    options = parser.parse_args()
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
