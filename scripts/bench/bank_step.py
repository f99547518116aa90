#!/usr/bin/env python3
"""Time of M-DCL's forward and backward pass against InfoNCE on the same keys and banks, measured in the same run.

    python scripts/bench/bank_step.py                                     on the CPU: 128 anchors, 32,768 and 65,536 entries
    python scripts/bench/bank_step.py --device cuda --dtype float16 --anchors 128 --entries 1048576 --dim 1024

InfoNCE is the cross-entropy of both directions over keys and entries, as in MoCo: it multiplies with keys and with entries, and
joins the logits, so that it copies no bank. M-DCL computes its diversity over the bank from the bank's running moments, as in
training; that is part of its time. Every repetition times each loss once, in rotating order; a ratio is the median over
repetitions. Below 1 is faster than InfoNCE. On a GPU the peak of allocated memory beyond banks and inputs is given too.
"""

from __future__ import annotations

import argparse

import torch
from common import Results, Step, add_options, measure, peak_bytes
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from coder_plugin.functional import m_dcl
from coder_plugin.losses.diversity import raw_diversity_of_variance
from coder_plugin.memory.bank import CoupledBank

PEER = "InfoNCE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="type of the banks")
    parser.add_argument("--anchors", type=int, default=128, help="pairs of a batch [128]")
    parser.add_argument("--entries", type=int, nargs="+", default=[32_768, 65_536], help="entries of each bank")
    parser.add_argument("--dim", type=int, default=512, help="dimensions [512]")
    parser.add_argument("--forms", nargs="+", default=["reference", "tiled"], help="values of --loss-impl [reference tiled]")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed calls of each loss, before [3]")
    parser.add_argument("--no-peer", action="store_true", help="without InfoNCE, where it does not fit")
    options = parser.parse_args()
    results = Results("bank_step", options)
    for entries in options.entries:
        steps = make_steps(entries, options)
        times = measure(
            steps, options.device, options.repeats, warm_up=options.warm_up, clock=options.clock, limit=options.limit
        )
        peaks = {name: peak_bytes(step, options.device) for name, step in steps.items()}
        case = f"{options.anchors} x {entries} x {options.dim}, banks in {options.dtype}"
        results.compare(case, times, peer=next(iter(steps)), n=options.anchors, entries=entries, peak_bytes=peaks)


def make_steps(entries: int, options: argparse.Namespace) -> dict[str, Step]:
    """Forward and backward of each loss for one random batch with its keys and banks."""
    torch.manual_seed(0)
    n, device = options.anchors, options.device

    def features(count: int) -> Tensor:
        return normalize(torch.randn(count, options.dim, device=device), dim=1)

    live = [features(n).requires_grad_() for _ in range(2)]
    keys, banks = [features(n) for _ in range(2)], [features(entries).to(getattr(torch, options.dtype)) for _ in range(2)]
    ids, bank_ids = (torch.randint(2**62, (size,), device=device) for size in (n, entries))
    bank = CoupledBank(entries, options.dim, dtype=options.dtype).to(device)
    bank.enqueue(*banks, bank_ids)
    banks = [bank.image, bank.text]
    labels = torch.arange(n, device=device)

    def infonce() -> tuple[Tensor, ...]:
        loss = sum(
            cross_entropy(torch.cat([20 * anchors @ keys[1 - k].T, product(20 * anchors, banks[1 - k])], 1), labels)
            for k, anchors in enumerate(live)
        )
        return torch.autograd.grad(loss, live)

    @torch.no_grad()
    def diversity() -> tuple[Tensor, Tensor]:
        sides = zip(("text", "image"), live, (keys[1], keys[0]), strict=True)
        raw = [
            raw_diversity_of_variance(bank.variance(side, anchors, others, ids, ids, mask_entries=True).float())
            for side, anchors, others in sides
        ]
        return raw[0] / raw[0].amax(), raw[1] / raw[1].amax()

    def coupled(form: str) -> tuple[Tensor, ...]:
        passed = {"image_ids": ids, "bank_ids": bank_ids, "bank_diversity": diversity()}
        return torch.autograd.grad(m_dcl(*live, *keys, *banks, **passed, implementation=form), live)

    steps: dict[str, Step] = {} if options.no_peer else {PEER: infonce}
    return steps | {form: lambda form=form: coupled(form) for form in options.forms}


def product(anchors: Tensor, bank: Tensor) -> Tensor:
    """``anchors @ bank.T`` without a copy of the bank, where the device multiplies its type."""
    return (anchors.to(bank.dtype) @ bank.T).float()


if __name__ == "__main__":
    main()
