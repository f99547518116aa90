#!/usr/bin/env python3
"""Time and memory of a loss's forward and backward pass, by tiles and by its reference, against ClipLoss in the same run.

    python scripts/bench/loss_step.py                           on the CPU, eager and compiled
    python scripts/bench/loss_step.py --device cuda --dtype bfloat16 --sizes 8192x1024 32768x1024 --repeats 20
    python scripts/bench/loss_step.py --loss ascl --forms reference tiled --modes eager
    python scripts/bench/loss_step.py --modes eager --sizes 4096x512 8192x512 --repeats 3 --json loss_step.json

Every repetition times a block of calls of each loss in a row (--block), in rotating order, so that other load on the machine
slows all of them alike. A ratio is the median over repetitions of the loss's time over that of its peer in the same mode; below
1 is faster. There are two peers: ClipLoss, which computes a product for each direction, and InfoNCE from one product and its
transpose, as the losses here. "bare products" are the three that no loss of all pairs can do without. On a GPU the peak of
allocated memory beyond the inputs is given too. Without open_clip the
first peer is the same computation written out, "plain InfoNCE".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import Results, Step, add_options, clip_loss, measure, one_product_infonce, peak_bytes
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.contrast import Pairs
from coder_plugin.functional import dcl
from coder_plugin.losses.ascl import ascl_of_pairs
from coder_plugin.losses.clip import clip_of_pairs
from coder_plugin.losses.triplet import triplet_of_pairs

ONE_PRODUCT = "one-product InfoNCE"


def main() -> None:
    options = arguments()
    results = Results("loss_step", options, ["open_clip_torch"])
    for n, d in options.sizes:
        torch._dynamo.reset()
        for mode in options.modes:
            steps = make_steps(n, d, options, compiled=mode == "compiled")
            times = measure(
                steps,
                options.device,
                options.repeats,
                warm_up=options.warm_up,
                clock=options.clock,
                limit=options.limit,
                block=options.block,
            )
            peaks = {name: peak_bytes(step, options.device) for name, step in steps.items()}
            case = f"{options.loss}, {n} x {d}, {options.dtype_name}, {mode}"
            results.compare(case, times, peer=clip_loss()[0], second=ONE_PRODUCT, n=n, d=d, mode=mode, peak_bytes=peaks)


def make_steps(n: int, d: int, options: argparse.Namespace, *, compiled: bool) -> dict[str, Step]:
    """Forward and backward of each loss for one random batch of n pairs in d dimensions."""
    torch.manual_seed(0)
    images, texts = (
        normalize(torch.randn(n, d, device=options.device), dim=1).to(options.dtype).requires_grad_() for _ in range(2)
    )
    ids = torch.randint(2**62, (n,), device=options.device)
    scale = torch.tensor(14.3, device=options.device, requires_grad=True)
    peer, clip = clip_loss()
    peers = {peer: clip, ONE_PRODUCT: one_product_infonce}
    losses = {name: with_arguments(each, compiled, images, texts, scale) for name, each in peers.items()}
    for form in options.forms:
        passed: dict[str, Any] = {"image_ids": ids, "implementation": form}
        if options.loss == "clip":
            if form == "reference":
                raise SystemExit("the reference of clip is ClipLoss itself, with which every form is compared: --forms tiled")
            losses[form] = with_arguments(clip_form, compiled, images, texts, scale, implementation=form)
        elif options.loss == "ascl":
            losses[form] = with_arguments(ascl_form, compiled, images, texts, texts, **passed)
        else:
            function = dcl if options.loss == "dcl" else triplet_form
            rest = {} if options.loss == "dcl" else {"hardest": options.loss == "triplet"}
            losses[form] = with_arguments(function, compiled, images, texts, **passed, **rest)
    values = [losses[form]().detach() for form in options.forms]
    assert all(torch.allclose(value, values[0], rtol=options.rtol) for value in values), f"the forms differ: {values}"
    @torch.no_grad()
    def products() -> tuple[Tensor, Tensor]:
        similarity = images @ texts.T
        return similarity @ texts, similarity.T @ images

    steps: dict[str, Step] = {
        name: lambda loss=loss, inputs=(images, texts, *([scale] if name in peers else [])): torch.autograd.grad(loss(), inputs)
        for name, loss in losses.items()
    }
    return steps | {"bare products": products}


def clip_form(images: Tensor, texts: Tensor, scale: Tensor, **form: Any) -> Tensor:
    return clip_of_pairs(Pairs(images, texts, **form), scale)


def ascl_form(images: Tensor, texts: Tensor, noised: Tensor, image_ids: Tensor, **form: Any) -> Tensor:
    return ascl_of_pairs(Pairs(images, texts, image_ids, **form), noised, temperature=0.05)


def triplet_form(images: Tensor, texts: Tensor, image_ids: Tensor, *, hardest: bool, **form: Any) -> Tensor:
    return triplet_of_pairs(Pairs(images, texts, image_ids, **form), margin=0.2, hardest=hardest, reduction="mean")


def with_arguments(
    loss: Callable[..., Tensor], compiled: bool, *args: Tensor, **kwargs: Any
) -> Callable[[], Tensor]:
    function = torch.compile(loss, dynamic=False) if compiled else loss
    return lambda: function(*args, **kwargs)


def size(text: str) -> tuple[int, int]:
    n, _, d = text.partition("x")
    return int(n), int(d)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=15)
    dtypes = ["float64", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="type of the features")
    modes = ["eager", "compiled"]
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes, help="without and with torch.compile")
    parser.add_argument("--forms", nargs="+", default=["reference", "tiled"], help="values of --loss-impl [reference tiled]")
    parser.add_argument(
        "--loss", default="dcl", choices=["dcl", "ascl", "triplet", "triplet-all", "clip"], help="what is measured [dcl]"
    )
    parser.add_argument("--warm-up", type=int, default=3, help="untimed calls of each loss, before [3]")
    parser.add_argument("--block", type=float, default=0.02, help="seconds of calls in a row that are timed at least [0.02]")
    sizes = [(n, d) for n in (128, 512, 2048) for d in (512, 1024)]
    parser.add_argument("--sizes", nargs="+", type=size, default=sizes, metavar="NxD", help="batch x dimensions, as 2048x512")
    options = parser.parse_args()
    options.dtype_name, options.dtype = options.dtype, getattr(torch, options.dtype)
    options.rtol = 1e-4 if options.dtype in (torch.float32, torch.float64) else 2e-2
    return options


if __name__ == "__main__":
    main()
