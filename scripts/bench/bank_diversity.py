#!/usr/bin/env python3
"""Time the diversity of a batch over a large momentum bank: running moments against the full similarity matrix.

    python scripts/bench/bank_diversity.py
    python scripts/bench/bank_diversity.py --device cuda --anchors 1024

CODER's diversity (eq. 3) is the standard deviation of each anchor's similarities. Four steps are timed in the same run:

    S              the similarity matrix of the anchors and one bank: a matrix product and nothing else
    S and its SD   the same with the standard deviation of each row
    moments        `CoupledBank.variance` as the losses call it: from running moments, with masks, current keys and
                   entries of the same image
    write          `CoupledBank.enqueue` of one batch of keys, which also updates the moments

Every repetition times each step once. The largest relative error of the standard deviation against float64 is printed too.
"""

from __future__ import annotations

import argparse

import torch
from common import Results, Step, add_options, measure
from torch.nn.functional import normalize

from coder_plugin.memory.bank import CoupledBank


def main() -> None:
    options = arguments()
    results = Results("bank_diversity", options)
    torch.manual_seed(0)
    n, q, d = options.anchors, options.bank, options.dim
    random_features = lambda rows: normalize(torch.randn(rows, d, device=options.device) + 2, dim=1)  # noqa: E731
    bank = CoupledBank(q, d).to(options.device)
    for start in range(0, q, 8192):
        rows = min(8192, q - start)
        ids = torch.arange(start, start + rows, device=options.device)
        bank.enqueue(random_features(rows), random_features(rows), ids)
    anchors, keys = random_features(n), random_features(n)
    ids = torch.randint(0, 2 * q, (n,), device=options.device)
    negatives = ids[:, None] != ids[None, :]

    def direct(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        similarity = anchors.to(dtype) @ torch.cat([keys, bank.text]).to(dtype).T
        allowed = torch.cat([negatives, ids[:, None] != bank.ids], 1)
        count = allowed.sum(1)
        mean = torch.where(allowed, similarity, 0).sum(1) / count
        return (torch.where(allowed, similarity - mean[:, None], 0).square().sum(1) / count).sqrt()

    def write() -> None:
        bank.enqueue(keys, keys, ids + 4 * q)

    from_moments = lambda: bank.variance("text", anchors, keys, ids, ids, mask_entries=True)  # noqa: E731
    error = ((from_moments().sqrt() - direct(torch.float64)) / direct(torch.float64)).abs().max()
    steps: dict[str, Step] = {
        "S": lambda: anchors @ bank.text.T,
        "S and its SD": direct,
        "moments": from_moments,
        "write": write,
    }
    times = measure(steps, options.device, options.repeats, warm_up=2, clock=options.clock, limit=options.limit)
    print(f"largest relative error of SD {error:.1e}; a write updates both banks")
    results.compare(f"N {n}, Q {q}, D {d}", times, peer="S", error=float(error))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, default=128, help="rows of the batch [128]")
    parser.add_argument("--bank", type=int, default=65_536, help="entries of the bank [65536]")
    parser.add_argument("--dim", type=int, default=1024, help="dimensions of the features [1024]")
    add_options(parser, repeats=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
