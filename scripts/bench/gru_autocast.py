#!/usr/bin/env python3
"""Time of a training step of `region-bigru` on a CPU: float32, bfloat16 autocast, and autocast with PyTorch's own GRU.

    python scripts/bench/gru_autocast.py --threads 1

A step is forward, `dcl`, backward and AdamW. The three take turns in one process, so that other load on the machine slows all
alike. Ratios are medians over repetitions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from torch import nn

import coder_plugin
from coder_plugin.backbones.recurrent import GRU

WAYS = ("fp32", "amp_bf16", "amp_bf16, torch.nn.GRU")


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    words = ["<pad>", "<start>", "<end>", "<unk>", *(f"w{number}" for number in range(1000))]
    sizes = {"region_dim": 2048, "embed_dim": options.dim, "vocabulary": words, "context_length": 32}
    model = coder_plugin.create_model("region-bigru", loss="dcl", **sizes).train()
    loss = coder_plugin.create_loss("dcl", model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    n = options.batch_size
    image = {"features": torch.randn(n, 36, 2048), "mask": torch.ones(n, 36, dtype=torch.bool)}
    text = torch.randint(4, 1000, (n, 32)) * (torch.arange(32) < torch.randint(8, 24, (n, 1)))
    plain = type("Plain", (GRU,), {"forward": nn.GRU.forward})

    def step(way: str) -> float:
        model.text.rnn.__class__ = plain if way == WAYS[2] else GRU
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=way != WAYS[0]):
            value = sum(loss(**model(image, text, image_id=torch.arange(n))).values())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return time.perf_counter() - begun

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(options.repeats + 1):
        for way in WAYS:
            seconds = step(way)
            if repeat:  # the first is a warm-up
                times[way].append(seconds)
    print(f"batch {n}, D {options.dim}, {options.threads} thread(s), torch {torch.__version__}, {options.repeats} repeats")
    for way, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times["fp32"], strict=True))
        print(f"{way:24} {1000 * statistics.median(values):7.0f} ms   {ratio:.2f} x fp32")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="batch size [64]")
    parser.add_argument("--dim", type=int, default=1024, help="dimensions of the joint space [1024]")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions [5]")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
