#!/usr/bin/env python3
"""How long does a training step take, and how much memory, beside a step of `clip`?

    python scripts/bench/coder_step.py                                          coder with a small model, on a CPU
    python scripts/bench/coder_step.py --loss "clip + selfalign" --no-memory
    python scripts/bench/coder_step.py --device cuda --model ViT-B-32 --batch-size 256 --precision amp_bf16 --repeats 20

A step is `Trainer.training_step`, as `coder-plugin train` takes it: forward, loss, backward, norm of the gradients, AdamW and
`post_step`, on batches of the built-in scenes that are already on the device. The peak memory is that of a few steps in a
process of its own: allocated on the GPU, or resident beyond the imports on a CPU. --profile writes a table of the operations,
and says how much of a step goes into each head and loss.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import Results, parser, resident
from torch.profiler import profile, record_function

from coder_plugin import Trainer


class TrainerStep:
    """A trainer with an optimizer and a few batches on its device. A call performs one training step, with the next batch.

    Args:
        model, loss, train: as of :class:`coder_plugin.Trainer`.
        device: the device that the trainer must take. batches: that are kept on it.
        options: the trainer's configuration.
    """

    def __init__(self, model: Any, loss: str, train: Any, device: str, *, batches: int = 4, **options: Any) -> None:
        self.logs = tempfile.TemporaryDirectory()
        base = {"epochs": 30, "workers": 0, "logs": self.logs.name, "report": False, "log_every_n_steps": 1 << 30}
        self.trainer = Trainer(model=model, loss=loss, train=train, config={**base, **options})
        if not device.startswith(self.trainer.device.type):
            raise SystemExit(f"--device {device}: the trainer takes {self.trainer.device} (CUDA_VISIBLE_DEVICES= hides GPUs)")
        self.trainer.setup_optimizer()
        self.trainer.model.train()
        self.trainer.step = 1  # the first step logs, which takes more
        feed = self.trainer.loader.epoch(0)
        self.batches = itertools.cycle([self.trainer._to_device(batch) for batch in itertools.islice(feed, batches)])
        feed.close()

    def __call__(self) -> None:
        self.step(next(self.batches))

    def step(self, batch: dict[str, Any]) -> None:
        self.trainer.training_step([batch])
        self.trainer.step += 1

    def profile(self, steps: int = 3) -> str:
        """Time in each head and loss, and a table of the operations that take longest."""
        heads, terms = self.trainer.model.coder.heads, self.trainer.loss.terms
        parts = [(name, head, method) for name, head in heads.items() for method in ("forward", "post_step")]
        parts += [(f"{name}, loss", term, "compute" if term.gathers else "forward") for name, term in terms.items()]
        with contextlib.ExitStack() as stack:
            for name, module, method in parts:
                if hasattr(module, method):
                    wrapped = record_function(f"part {name}: {method}")(getattr(module, method))
                    stack.enter_context(patch.object(module, method, wrapped))
            with profile() as profiler:
                for _ in range(steps):
                    self()
        events = profiler.key_averages()
        device = str(self.trainer.device.type)
        lines = [
            f"{event.key}: {event.cpu_time_total / 1e3 / steps:.2f} ms of the host and "
            f"{event.device_time_total / 1e3 / steps:.2f} ms of the GPU in a step"
            for event in events
            if event.key.startswith("part ")
        ]
        return "\n".join([*lines, events.table(sort_by=f"self_{device}_time_total", row_limit=25, max_name_column_width=60)])


def main() -> None:
    options = arguments()
    results = Results("coder_step", options, ["open_clip_torch"])
    steps = {name: make_step(name, options) for name in ("clip", options.loss)}
    case = f"{options.model}, batch {options.batch_size}, {options.precision}"
    results.compare(case, steps)
    if options.profile:
        options.profile.write_text(steps[options.loss].profile())
    if options.memory:
        peaks = {}
        for name in steps:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                peaks[name] = pool.submit(memory, name, options).result()
            print(f"peak memory of {name}: {peaks[name] / 1e6:.0f} MB, {peaks[name] / peaks['clip']:.2f} x clip", flush=True)
        results.write(case=case, peak_memory=peaks, memory_ratio={options.loss: peaks[options.loss] / peaks["clip"]})


def make_step(name: str, options: argparse.Namespace) -> TrainerStep:
    logging.disable(logging.WARNING)
    coder = name in ("coder", "coder-paper", "coder-printed")
    settings = {"set": [f"prototypes.clusters={options.clusters}", f"momentum.bank_size={options.bank}"]} if coder else {}
    return TrainerStep(
        options.model, name, "scenes", options.device, batch_size=options.batch_size, precision=options.precision,
        train_num_samples=max(200 * options.batch_size, 2 * options.clusters), opt="adamw", lr=1e-4, **settings,
    )  # fmt: skip


def memory(name: str, options: argparse.Namespace) -> int:
    """Peak memory of a few steps, in bytes."""
    torch.set_num_threads(options.threads)
    cuda = options.device.startswith("cuda")
    if not cuda:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak (Linux), which the imports have raised
        before = resident("VmRSS")
    step = make_step(name, options)
    for _ in range(3):
        step()
    return torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - before


def arguments() -> argparse.Namespace:
    made = parser(__doc__, repeats=7)
    made.add_argument("--model", default="coder-tiny", help="open_clip model [coder-tiny]")
    made.add_argument("--loss", default="coder", help="objective to compare with clip [coder]")
    made.add_argument("--batch-size", type=int, default=64, help="pairs of a batch [64]")
    made.add_argument("--bank", type=int, default=4096, help="entries of each momentum bank [4096]")
    made.add_argument("--clusters", type=int, default=10_000, help="prototypes [10000]")
    made.add_argument("--precision", default="fp32", help="as of coder-plugin train: fp32, amp_bf16, … [fp32]")
    made.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure the peak memory")
    made.add_argument("--profile", type=Path, metavar="FILE", help="write where the time of a step goes")
    return made.parse_args()


if __name__ == "__main__":
    main()
