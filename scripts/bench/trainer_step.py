"""One step of ``coder-plugin train``, on batches that are already on the device: for timing, counting and profiling."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import seconds
from torch import nn

from coder_plugin import Trainer


class TrainerStep:
    """A trainer with an optimizer and a few batches. A call performs one training step, with the next batch.

    Args:
        model, loss, train: as of :class:`coder_plugin.Trainer`.
        batches: batches that are kept on the device.
        options: the trainer's configuration.
    """

    def __init__(self, model: Any, loss: str, train: Any, *, batches: int = 4, **options: Any) -> None:
        self.logs = tempfile.TemporaryDirectory()
        base = {"epochs": 30, "workers": 0, "logs": self.logs.name, "report": False, "log_every_n_steps": 1 << 30}
        self.trainer = trainer = Trainer(model=model, loss=loss, train=train, config={**base, **options})
        trainer.setup_optimizer()
        trainer.model.train()
        trainer.step = 1  # the first step logs, which takes more
        self.device = str(trainer.device)
        self.trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        self.frozen = sum(p.numel() for p in trainer.model.parameters()) - self.trained
        epoch = trainer.loader.epoch(0)
        self.batches = [trainer._to_device(batch) for batch in itertools.islice(epoch, batches)]
        epoch.close()
        self.number = 0

    def __call__(self) -> None:
        self.step(self.batches[self.number % len(self.batches)])

    def step(self, batch: dict[str, Any]) -> None:
        self.trainer.training_step([batch])
        self.trainer.step += 1
        self.number += 1

    def fed(self, count: int) -> float:
        """Seconds of ``count`` steps whose batches the loader reads meanwhile, after the first one has come."""
        feed = iter(self.trainer.loader.epoch(1))
        self.step(self.trainer._to_device(next(feed)))
        self.synchronize()
        begun = time.perf_counter()
        for batch in itertools.islice(feed, count):
            self.step(self.trainer._to_device(batch))
        self.synchronize()
        elapsed = time.perf_counter() - begun
        feed.close()
        return elapsed

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def parts(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each head and loss, with the device synchronised around each, and of the whole step (key ``step``)."""
        times: dict[str, list[float]] = {}
        with contextlib.ExitStack() as stack:
            for name, head in self.trainer.model.coder.heads.items():
                for method in ("forward", "post_step"):
                    if hasattr(head, method):
                        stack.enter_context(timed(head, method, f"{name}: {method}", times, self.device))
            for name, term in self.trainer.loss.terms.items():
                method = "compute" if term.gathers else "forward"
                stack.enter_context(timed(term, method, f"{name}: loss", times, self.device))
            for _ in range(repeats):
                times.setdefault("step", []).append(seconds(self, self.device))
        return times

    def synchronisations(self) -> dict[str, int] | None:
        """How often the host waits for the GPU in one step, by the line that makes it wait. None without a GPU."""
        if not self.device.startswith("cuda"):
            return None
        self()  # the first step reads what has just been loaded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in caught if "synchronizing" in str(w.message)]
        return dict(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits))

    def profile(self, steps: int = 3, rows: int = 25) -> str:
        """A table of the operations that take longest."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device.startswith("cuda")
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
            for _ in range(steps):
                self()
            self.synchronize()
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        return profiler.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=60)


@contextlib.contextmanager
def timed(module: nn.Module, method: str, part: str, times: dict[str, list[float]], device: str) -> Iterator[None]:
    """Record the seconds of every call of ``module.method`` under ``times[part]``."""
    original: Callable[..., Any] = getattr(module, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        times.setdefault(part, []).append(seconds(lambda: results.append(original(*args, **kwargs)), device))
        return results[0]

    setattr(module, method, wrapped)
    yield
    delattr(module, method)
