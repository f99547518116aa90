"""Memory and open files over a long run."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import pytest
from tiny_run import coder_options, rows, trainer

from coder_plugin import Callback

MB = 2**20
SETTINGS = ["momentum.bank_size=8", "prototypes.clusters=3", "prototypes.recluster=1000", "concepts.warmup=2"]


class Watch(Callback):
    """Resident memory in MB and the number of open files, every n-th step."""

    def __init__(self, every: int) -> None:
        self.every, self.memory, self.files = every, {}, {}

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.step % self.every == 0:
            gc.collect()
            pages = int(open("/proc/self/statm").read().split()[1])
            self.memory[trainer.step] = pages * os.sysconf("SC_PAGE_SIZE") / MB
            self.files[trainer.step] = len(os.listdir("/proc/self/fd"))


def soak(steps: int, folder, epochs: int = 20) -> tuple[float, set[int], Watch]:
    """MB per 1,000 steps after the first fifth, the numbers of open files seen, and the measurements."""
    count = 4 * steps // epochs
    made = trainer(
        coder_options(folder, epochs=epochs, save_every_steps=0, val_frequency=4, log_every_n_steps=50, set=SETTINGS),
        loss="coder",
        count=count,
    )
    watch = Watch(max(1, steps // 100))
    made.callbacks.append(watch)
    made.run()
    assert made.step == steps
    later = {step: value for step, value in watch.memory.items() if step > steps // 5}
    slope = float(np.polyfit([step / 1000 for step in later], list(later.values()), 1)[0])
    return slope, {files for step, files in watch.files.items() if step > steps // 5}, watch


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_and_open_files_over_20000_steps(tmp_path):
    started = time.monotonic()
    slope, files, watch = soak(20_000, tmp_path)
    print(
        f"20,000 steps of a tiny coder: {slope:+.3f} MB per 1,000 steps after the first 4,000, resident memory "
        f"{min(watch.memory.values()):.0f} to {max(watch.memory.values()):.0f} MB, open files {sorted(files)}; "
        f"{time.monotonic() - started:.0f} s"
    )
    assert slope < 1 and len(files) == 1
    assert len(rows(tmp_path / "run")) == 400 + 20 + 5  # every 50 steps, at epochs' ends, evaluations


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_open_files_stay_the_same(tmp_path):
    _, files, watch = soak(10, tmp_path, epochs=2)
    assert len(files) == 1 and watch.memory
