"""A training run in which rank 1 fails. As a program: ``python -m tests.reliability.rank_faults KIND FOLDER MODEL``."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from coder_plugin import Callback, CoderError, Trainer, distributed
from coder_plugin.training import checkpoint

#: Seconds that the process group waits for a rank that does nothing.
TIMEOUT = 3.0


class Fault(Callback):
    """Something goes wrong on rank 1 after the third step."""

    def __init__(self, kind: str, folder: Path, stall: float) -> None:
        self.kind, self.folder, self.stall = kind, folder, stall

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.step != 3 or distributed.rank() != 1:
            return
        (self.folder / "fault").touch()
        if self.kind == "raises":
            raise RuntimeError("the picture reader broke")
        if self.kind == "refuses":
            raise CoderError("the captions of rank 1 are gone")
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stalls":
            time.sleep(self.stall)
        if self.kind == "full disk":
            fill_disk()


def fill_disk() -> None:
    """From now on this process's checkpoints find no room."""

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint._write = write


def options(folder: Path, **more: object) -> dict[str, object]:
    base = {"epochs": 1, "batch_size": 4, "train_num_samples": 64, "workers": 0, "logs": str(folder), "name": "run"}
    return {**base, "val_frequency": 0, "report": False, **more}


def train(folder: Path, kind: str, model: str, *, stall: float = 600, **more: object) -> None:
    config, fault = options(folder, model=model, **more), Fault(kind, folder, stall)
    Trainer(model=model, loss="dcl", train="scenes", config=config, callbacks=[fault]).run()


if __name__ == "__main__":
    kind, folder, model = sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["coder-tiny"])[0]
    try:
        record(train)(folder, kind, model, save_every_steps=2, workers=1, rank_timeout=30.0 if kind == "stalls" else 3600.0)
    except CoderError as error:
        print(f"coder-plugin: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
