"""Loaders' workers end with their main process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from coder_plugin.data.workers import start_worker
from tests import fresh


class Large(Dataset):
    """Samples that do not fit into a pipe."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> tuple[int, bytes]:
        return os.getpid(), bytes(1 << 20)


def load_and_wait(channel: Connection, method: str) -> None:
    options: Any = {"num_workers": 2, "worker_init_fn": start_worker, "multiprocessing_context": method}
    loader = iter(DataLoader(Large(), batch_size=None, **options))
    channel.send({next(loader)[0] for _ in range(2)})
    time.sleep(600)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_with_much_to_send_end_when_the_main_process_is_killed(method: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process: Any = fresh.context().Process(target=load_and_wait, args=(theirs, method))
    process.start()
    assert ours.poll(60)
    workers = ours.recv()
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    end = time.monotonic() + 60
    while (running := [worker for worker in workers if is_running(worker)]) and time.monotonic() < end:
        time.sleep(0.1)
    for worker in running:
        os.kill(worker, signal.SIGKILL)
    assert not running


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
