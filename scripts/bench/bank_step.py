#!/usr/bin/env python3
"""How long does M-DCL take over a large bank, beside InfoNCE on the same keys and banks? And its diversity, beside a product?

    python scripts/bench/bank_step.py                                                   128 anchors, 32,768 entries, on a CPU
    python scripts/bench/bank_step.py --device cuda --dtype float16 --dim 1024 --sizes 128x65536 128x1048576 4096x1048576

*InfoNCE* is the cross-entropy of both directions over keys and entries, as in MoCo, with forward and backward pass. M-DCL takes
its diversity over the bank from the bank's running moments, as in training, and that is part of its time.

For the first size the diversity of anchors over one bank is timed too. The peer is S, the product of anchors and bank;
*S and its SD* has the standard deviation of each row too, which is CODER's equation 3; *moments* is what the losses do
instead, with masks and current keys; *write* puts a batch of keys into both banks and updates the moments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import Results, Step, parser
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from coder_plugin.contrast import Implementation
from coder_plugin.functional import m_dcl
from coder_plugin.losses.diversity import raw_diversity_of_variance
from coder_plugin.memory.bank import CoupledBank


def main() -> None:
    made = parser(__doc__, repeats=7)
    made.add_argument("--sizes", nargs="+", default=["128x32768"], metavar="NxQ", help="anchors x entries [128x32768]")
    made.add_argument("--dim", type=int, default=512, help="dimensions [512]")
    dtypes = ["float32", "bfloat16", "float16"]
    made.add_argument("--dtype", default="float32", choices=dtypes, help="type of the banks [float32]")
    options = made.parse_args()
    results = Results("bank_step", options)
    for size in options.sizes:
        anchors, entries = map(int, size.split("x"))
        loss, diversity, error = make_steps(anchors, entries, options)
        results.compare(f"m_dcl {anchors} x {entries}", loss)
        if size == options.sizes[0]:
            print(f"moments: largest error of a standard deviation {error():.1e}")
            results.compare(f"diversity {anchors} x {entries}", diversity, error=error())


def make_steps(
    n: int, entries: int, options: argparse.Namespace
) -> tuple[dict[str, Step], dict[str, Step], Callable[[], float]]:
    """Steps of the losses, and of the diversity with its largest error, for one random batch of n pairs and its keys."""
    torch.manual_seed(0)

    def features(count: int) -> Tensor:
        return normalize(torch.randn(count, options.dim, device=options.device) + 0.1, dim=1)

    live, keys = [features(n).requires_grad_() for _ in range(2)], [features(n) for _ in range(2)]
    bank = CoupledBank(entries, options.dim, dtype=options.dtype).to(options.device)
    for start in range(0, entries, 65_536):
        rows = min(65_536, entries - start)
        bank.enqueue(features(rows), features(rows), torch.arange(start, start + rows, device=options.device))
    banks, labels = [bank.image, bank.text], torch.arange(n, device=options.device)
    ids = torch.randint(2 * entries, (n,), device=options.device)  # about half of them are in the bank

    def infonce() -> tuple[Tensor, ...]:
        def logits(k: int) -> Tensor:  # the bank is multiplied in its own type: no copy
            return torch.cat([live[k] @ keys[1 - k].T, (live[k].to(banks[1 - k].dtype) @ banks[1 - k].T).float()], 1)

        return torch.autograd.grad(sum(cross_entropy(20 * logits(k), labels) for k in range(2)), live)

    def variance(side: str) -> Tensor:
        own, other = (live[0], keys[1]) if side == "text" else (live[1], keys[0])
        return bank.variance(side, own.detach(), other, ids, ids, mask_entries=True)

    def coupled(form: Implementation) -> tuple[Tensor, ...]:
        raw = [raw_diversity_of_variance(variance(side).float()) for side in ("text", "image")]
        diversity = (raw[0] / raw[0].amax(), raw[1] / raw[1].amax())
        passed = {"image_ids": ids, "bank_ids": bank.ids, "bank_diversity": diversity, "implementation": form}
        return torch.autograd.grad(m_dcl(*live, *keys, *banks, **passed), live)

    @torch.no_grad()
    def deviation(dtype: torch.dtype = torch.float32) -> Tensor:
        similarity = live[0].to(dtype) @ torch.cat([keys[1], bank.text]).to(dtype).T
        allowed = torch.cat([ids[:, None] != ids, ids[:, None] != bank.ids], 1)
        count = allowed.sum(1)
        mean = torch.where(allowed, similarity, 0).sum(1) / count
        return (torch.where(allowed, similarity - mean[:, None], 0).square().sum(1) / count).sqrt()

    def error() -> float:
        exact = deviation(torch.float64)
        return float(((variance("text").sqrt() - exact) / exact).abs().max())

    diversity: dict[str, Step] = {
        "S": lambda: live[0].detach().to(bank.text.dtype) @ bank.text.T,
        "S and its SD": deviation,
        "moments": lambda: variance("text"),
        "write": lambda: bank.enqueue(keys[0], keys[1], ids + 4 * entries),
    }
    forms: tuple[Implementation, ...] = ("reference", "tiled")
    return {"InfoNCE": infonce, **{form: lambda form=form: coupled(form) for form in forms}}, diversity, error


if __name__ == "__main__":
    main()
