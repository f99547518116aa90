#!/usr/bin/env python3
"""Diversity of a batch over a large bank from its running moments, against forming the similarities.

    python scripts/bench/bank_diversity.py
    python scripts/bench/bank_diversity.py --device cuda --anchors 1024

Peers, in the same run: S, the product of anchors and bank alone; and S with its standard deviation. Ours is measured as it
is called (`CoupledBank.variance`: masks, current keys, same-image entries), and with the bank's write of one batch of keys,
which keeps the moments. Every repetition times each once. Also printed: the largest relative error of the standard deviation
against float64.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch.nn.functional import normalize

from coder_plugin.memory.bank import CoupledBank


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    n, q, d = options.anchors, options.bank, options.dim
    make = lambda rows: normalize(torch.randn(rows, d, device=options.device) + 2, dim=1)  # noqa: E731
    bank = CoupledBank(q, d).to(options.device)
    for start in range(0, q, 8192):
        rows = min(8192, q - start)
        bank.enqueue(make(rows), make(rows), torch.arange(start, start + rows, device=options.device))
    anchors, keys = make(n), make(n)
    ids = torch.randint(0, 2 * q, (n,), device=options.device)
    negatives = ids[:, None] != ids[None, :]

    def direct(number: torch.dtype = torch.float32) -> torch.Tensor:
        similarity = anchors.to(number) @ torch.cat([keys, bank.text]).to(number).T
        allowed = torch.cat([negatives, ids[:, None] != bank.ids], 1)
        count = allowed.sum(1)
        mean = torch.where(allowed, similarity, 0).sum(1) / count
        return (torch.where(allowed, similarity - mean[:, None], 0).square().sum(1) / count).sqrt()

    def write() -> None:
        bank.enqueue(keys, keys, ids + 4 * q)

    ours = lambda: bank.variance("text", anchors, keys, negatives, ids)  # noqa: E731
    error = ((ours().sqrt() - direct(torch.float64)) / direct(torch.float64)).abs().max()
    steps: dict[str, Callable[[], object]] = {
        "S": lambda: anchors @ bank.text.T,
        "S and its SD": direct,
        "moments": ours,
        "write": write,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 2):
        for name, step in steps.items():
            spent = seconds(step, options.device)
            if repeat >= 2:
                times[name].append(spent)
    versions = ", ".join(f"{each} {version(each)}" for each in ("torch", "coder-plugin"))
    print(f"{platform.machine()}, {options.device}, {options.threads} threads; {versions}")
    print(f"N {n}, Q {q}, D {d}; largest relative error of SD {error:.1e}")
    middle = {name: statistics.median(values) for name, values in times.items()}
    for name, value in middle.items():
        print(f"{name:<14} {1e3 * value:9.2f} ms   S / this = {middle['S'] / value:7.1f}")
    ratio = statistics.median(map(float.__truediv__, times["S"], times["moments"]))
    print(f"moments take 1/{ratio:.0f} of the time of forming S (one bank; a write updates both banks)")


def seconds(step: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--bank", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
