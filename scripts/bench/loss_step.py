#!/usr/bin/env python3
"""How long do a loss's forward and backward pass take, beside open_clip's ClipLoss?

    python scripts/bench/loss_step.py                                         DCL by tiles, on a CPU
    python scripts/bench/loss_step.py --loss ascl --forms tiled reference --sizes 2048x512
    python scripts/bench/loss_step.py --device cuda --dtypes bfloat16 tf32 --forms tiled reference compiled --sizes 8192x1024

Peers, in the first type of --dtypes: ClipLoss, which computes a product for each direction, and InfoNCE from one product and
its transpose. *Bare products* are the three that every loss of all pairs needs. Forms are by tiles, by the reference, and the
reference by torch.compile. The error is that of the gradients against the reference in float64, up to 8,192 pairs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import torch
from common import Results, Step, parser
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from coder_plugin.contrast import Implementation, Pairs
from coder_plugin.functional import dcl
from coder_plugin.losses.ascl import ascl_of_pairs
from coder_plugin.losses.clip import clip_of_pairs
from coder_plugin.losses.triplet import triplet_of_pairs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
LOSSES = ("dcl", "ascl", "triplet", "triplet-all", "clip")


def loss_of(name: str, images: Tensor, texts: Tensor, ids: Tensor, scale: Tensor, form: Implementation) -> Tensor:
    if name == "dcl":
        return dcl(images, texts, image_ids=ids, implementation=form)
    pairs = Pairs(images, texts, None if name == "clip" else ids, implementation=form)
    if name == "clip":
        return clip_of_pairs(pairs, scale)
    if name == "ascl":
        return ascl_of_pairs(pairs, texts, temperature=0.05)  # a noised text for each pair
    return triplet_of_pairs(pairs, margin=0.2, hardest=name == "triplet", reduction="mean")


def one_product_infonce(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    labels = torch.arange(len(images), device=images.device)
    logits = scale * images @ texts.T
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def main() -> None:
    options = arguments()
    results = Results("loss_step", options, ["open_clip_torch"])
    for size in options.sizes:
        n, d = map(int, size.split("x"))
        torch._dynamo.reset()
        steps, errors = make_steps(n, d, options)
        for name, error in errors.items():
            print(f"{name}: error of the gradients {error:.1e}", flush=True)
        results.compare(f"{options.loss} {n} x {d}", steps, peers=2, error=errors)


def make_steps(n: int, d: int, options: argparse.Namespace) -> tuple[dict[str, Step], dict[str, float]]:
    """Forward and backward of peers and forms for one random batch of n pairs in d dimensions, and the forms' errors."""
    torch.manual_seed(0)
    base = [normalize(torch.randn(n, d, device=options.device), dim=1) for _ in range(2)]
    ids = torch.randint(2**62, (n,), device=options.device)
    scale = torch.tensor(14.3, device=options.device)

    def step(loss: Callable[..., Tensor], dtype: str) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [each.to(DTYPES[dtype]).requires_grad_() for each in base]

        def gradients() -> tuple[Tensor, ...]:
            torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
            return torch.autograd.grad(loss(*leaves), leaves)

        return gradients

    def form(name: str) -> Callable[..., Tensor]:
        whole = torch.compile(loss_of, dynamic=False) if name == "compiled" else loss_of
        return lambda images, texts: whole(options.loss, images, texts, ids, scale, "tiled" if name == "tiled" else "reference")

    peers = {"ClipLoss": ClipLoss(), "one-product InfoNCE": one_product_infonce}
    first = options.dtypes[0]
    steps = {name: step(lambda *pair, loss=loss: loss(*pair, scale), first) for name, loss in peers.items()}
    forms = {f"{name} {dtype}": step(form(name), dtype) for dtype in options.dtypes for name in options.forms}
    errors = {}
    if n <= 8192:
        exact = step(form("reference"), "float64")()
        norm = sum(each.square().sum() for each in exact)
        for name, gradients in forms.items():
            with contextlib.suppress(RuntimeError):  # which is reported where the form is timed
                difference = sum((a.double() - b).square().sum() for a, b in zip(gradients(), exact, strict=True))
                errors[name] = float((difference / norm).sqrt())
    images, texts = (each.to(DTYPES[first]) for each in base)

    def products() -> tuple[Tensor, Tensor]:
        similarity = images @ texts.T
        return similarity @ texts, similarity.T @ images

    return {**steps, **forms, "bare products": products}, errors


def arguments() -> argparse.Namespace:
    made = parser(__doc__, repeats=9)
    made.add_argument("--loss", default="dcl", choices=LOSSES, help="the loss [dcl]; triplet-all: all negatives")
    made.add_argument("--forms", nargs="+", default=["tiled"], choices=["tiled", "reference", "compiled"], help="[tiled]")
    made.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES, help="types of the features [float32]")
    sizes = ["128x512", "512x512", "2048x512"]
    made.add_argument("--sizes", nargs="+", default=sizes, metavar="NxD", help=f"pairs x dimensions [{' '.join(sizes)}]")
    return made.parse_args()


if __name__ == "__main__":
    main()
