"""One rank fails: all ranks end within the limit, one says why, and no process is left (docs/RELIABILITY.md, Ranks)."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import coder_plugin.training.loop  # noqa: F401 - what is imported here need not be imported by each rank
from coder_plugin import Trainer, distributed
from coder_plugin.data.item import Item
from coder_plugin.training import checkpoint
from tests.reliability import ranks as forked
from tests.reliability.rank_faults import TIMEOUT, options, train

#: Seconds from the fault to the end of the last rank.
LIMIT = 20.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> None:
    """Import what training imports late once, instead of in each rank."""
    from coder_plugin.training.optim import create_optimizer

    folder = tmp_path_factory.mktemp("imported")
    trainer = Trainer(model=tiny_model, loss="dcl", train="scenes", config=options(folder, model=tiny_model))
    create_optimizer(trainer.model, trainer.config)


#: What the rank that failed says, and the other one.
LOST = "(gloo|NCCL|Connection (closed|reset) by peer)"
REASONS = {
    "raises": ("RuntimeError: the picture reader broke", LOST),
    "refuses": ("error: the captions of rank 1 are gone", LOST),
    "killed": ("", LOST),
    "stalls": (LOST, LOST),
    "full disk": ("error: a checkpoint cannot be written to .*No space.*step_00000002 is whole", "error: rank 1: .*No space"),
}


@pytest.mark.parametrize(
    "kind", ["raises", "full disk", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("refuses", "killed", "stalls"))]
)
def test_all_ranks_end_and_the_one_that_failed_says_why(kind, tmp_path, tiny_model) -> None:
    more = {"save_every_steps": 2, "workers": int(kind == "raises")}  # a loading process must not survive its rank either
    if kind == "stalls":
        more |= {"rank_timeout": TIMEOUT, "stall": 1.5 * TIMEOUT}
    endings = forked.run(lambda folder: train(folder, kind, tiny_model, **more), tmp_path)
    own, other = REASONS[kind]
    assert re.search(other, endings[0].output), endings[0].output
    assert re.search(own, endings[1].output), endings[1].output
    status = {"killed": -signal.SIGKILL, "raises": 1, "stalls": 1}.get(kind, 2)
    assert [ending.status for ending in endings] == [2 if kind == "full disk" else 1, status]
    assert max(ending.seconds for ending in endings) < LIMIT + 1.5 * TIMEOUT * (kind == "stalls")
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step_00000002"


EXIT = """
import multiprocessing, time
from coder_plugin.training.signals import StopSignals
with StopSignals():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    print(process.pid, flush=True)
    raise SystemExit(3)
"""


def test_a_process_does_not_wait_for_its_loading_processes() -> None:
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3 and not ended.stderr, ended
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()


def uneven(folder: Path, model: str) -> None:
    """48 pictures, 6 batches a rank; rank 1 cannot read some of its own."""
    from PIL import Image

    def load(number: int) -> Image.Image:
        if distributed.rank() == 1 and number % 12 == 0:
            raise OSError("a picture of rank 1 cannot be read")
        return Image.new("RGB", (64, 64))

    items = [Item(f"{n}.png", (f"picture {n} of something",), functools.partial(load, n)) for n in range(48)]
    config = options(folder, model=model, train_num_samples=None, epochs=2)
    trainer = Trainer(model=model, loss="dcl", train=items, config=config)
    trainer.run()
    print(f"{trainer.step} steps, {len(trainer.loader.bad)} bad")


def test_a_rank_that_runs_out_of_batches_ends_the_epoch_of_all(tmp_path, tiny_model) -> None:
    endings = forked.run(lambda folder: uneven(folder, tiny_model), tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    assert "10 steps, 0 bad" in endings[0].output and re.search("10 steps, [1-9] bad", endings[1].output), endings


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [
        "accelerate.commands.launch", "--num_machines", "1", "--num_processes", "2", "--multi_gpu", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", "0",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", REASONS)
def test_under_launchers(launcher, kind, tmp_path, tiny_model) -> None:
    """torchrun ends the other ranks, the one that stalls too, and its summary names the rank that failed first."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tests.reliability.rank_faults", kind, str(tmp_path)]
    command.append(tiny_model)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    seconds = time.time() - (tmp_path / "fault").stat().st_mtime - 30.0 * (kind == "stalls")
    print(f"{launcher}, {kind}: {seconds:.1f} s")
    assert result.returncode != 0 and seconds < LIMIT + 40  # of which the launcher waits up to 30 s for a rank that stalls
    own, other = REASONS[kind]
    assert re.search(other if kind == "stalls" else own, result.stderr), result.stderr[-3000:]
    root = result.stderr[result.stderr.index("Root Cause") :]
    first = {"stalls": "0", "full disk": "[01]"}.get(kind, "1")  # a full disk ends all ranks at once
    assert re.search(rf"rank\s+: {first}", root), root
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in path.read_bytes()]
    assert not left
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step_00000002"
