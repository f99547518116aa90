#!/usr/bin/env python3
"""The stages of gpu_day.py that measure single operations: ``python scripts/bench/gpu_stages.py STAGE``.

    rooflines   products in bfloat16, TF32 and float32, and the rate of copies in the device's memory
    dcl         DCL, forward and backward, in each form, against ClipLoss and InfoNCE from one product, in bfloat16: time, peak
                memory, error
    m_dcl       M-DCL with its diversity over the bank, against InfoNCE on the same banks: time and peak memory
    search      exact search of 64 queries in a million vectors

``--dry`` makes every size tiny, so that all of it runs on a CPU in seconds. Errors are relative to the reference in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bank_step import make_steps
from common import Results, add_options, clip_loss, measure, one_product_infonce, peak_bytes
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.functional import dcl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    add_options(parser, repeats=10)
    parser.add_argument("--dry", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    torch.manual_seed(0)
    STAGES[options.stage](options, Results(options.stage, options, ["open_clip_torch"]))


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def timed(step: Callable[[], object], options: argparse.Namespace) -> float:
    """Median seconds of one step."""
    limit = options.limit or 20
    values = measure({"it": step}, options.device, options.repeats, clock=options.clock, limit=limit)["it"]
    return sorted(values)[len(values) // 2]


def features(count: int, dim: int, options: argparse.Namespace, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = [  # a part at a time: a million rows in float32 beside those in float16 are much
        normalize(torch.randn(min(65_536, count - start), dim, device=options.device), dim=1).to(dtype)
        for start in range(0, count, 65_536)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rooflines(options: argparse.Namespace, results: Results) -> None:
    size = 256 if options.dry else 8192
    for name, dtype, allowed in (
        ("bfloat16", torch.bfloat16, False), ("TF32", torch.float32, True), ("float32", torch.float32, False)
    ):  # fmt: skip
        a, b = (torch.randn(size, size, device=options.device, dtype=dtype) for _ in range(2))
        with tf32(allowed):
            seconds = timed(lambda a=a, b=b: a @ b, options)
        rate = 2 * size**3 / seconds / 1e12
        print(f"product {size}^3 in {name}: {1e3 * seconds:.2f} ms, {rate:.1f} TFLOP/s", flush=True)
        results.write({"case": f"product {name}", "seconds": seconds, "tflops": rate})
    source = torch.empty(1 << (20 if options.dry else 31), dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), options)
    rate = 2 * len(source) / seconds / 1e12
    print(f"copy of {len(source) / 1e9:.2f} GB: {rate:.2f} TB/s, read and written", flush=True)
    results.write({"case": "copy", "seconds": seconds, "terabytes_per_second": rate})


def row(
    case: str, name: str, step: Callable[[], Any], options: argparse.Namespace, results: Results, **facts: Any
) -> None:
    """Time and peak memory of one form, or why it has none; the other forms go on."""
    try:
        seconds, peak = timed(step, options), peak_bytes(step, options.device)
    except Exception as error:  # out of memory, an unknown implementation, a failed compilation
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"{case}: {name:<22} -- {reason}", flush=True)
        results.write({"case": case, "form": name, "error": reason})
        return
    memory = "" if peak is None else f"  {peak / 1e9:7.3f} GB"
    notes = "".join(f"  {key} {value:.1e}" for key, value in facts.items() if value is not None)
    print(f"{case}: {name:<22} {1e3 * seconds:10.3f} ms{memory}{notes}", flush=True)
    results.write({"case": case, "form": name, "seconds": seconds, "peak_bytes": peak, **facts})


def gradient_error(step: Callable[[], tuple[Tensor, ...]], exact: tuple[Tensor, ...] | None) -> float | None:
    """Norm of the difference of gradients over the norm of the exact ones."""
    if exact is None:
        return None
    with contextlib.suppress(Exception):  # said where the form is timed
        found = step()
        difference = sum((a.double() - b).square().sum() for a, b in zip(found, exact, strict=True))
        return float((difference / sum(b.square().sum() for b in exact)).sqrt())
    return None


def dcl_forms(options: argparse.Namespace, results: Results) -> None:
    for n, dim in [(64, 32)] if options.dry else [(2048, 1024), (8192, 1024), (32_768, 1024)]:
        torch._dynamo.reset()
        dcl_of(n, dim, options, results)


def dcl_of(n: int, dim: int, options: argparse.Namespace, results: Results) -> None:
    """All forms for one random batch of n pairs."""
    case = f"dcl {n} x {dim}"
    base = [features(n, dim, options, torch.float64) for _ in range(2)]
    ids = torch.randint(2**62, (n,), device=options.device)

    def gradients(
        dtype: torch.dtype, allowed: bool, loss: Callable[..., Tensor], form: str
    ) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [each.to(dtype).requires_grad_() for each in base]

        def step() -> tuple[Tensor, ...]:
            with tf32(allowed):
                return torch.autograd.grad(loss(*leaves, image_ids=ids, implementation=form), leaves)

        return step

    exact = gradients(torch.float64, False, dcl, "reference")() if n <= 8192 else None
    peer, clip = clip_loss()
    leaves = [each.bfloat16().requires_grad_() for each in base]
    scale = torch.tensor(14.3, device=options.device, requires_grad=True)
    backend = "aot_eager" if options.dry else "inductor"  # which takes minutes on a busy CPU
    for name, loss in ((peer, clip), ("one-product InfoNCE", one_product_infonce)):
        step = functools.partial(lambda loss: torch.autograd.grad(loss(*leaves, scale), leaves), loss)
        row(case, f"{name} bfloat16", step, options, results)
    for name, dtype, allowed, loss, form in (
        ("tiled float32", torch.float32, False, dcl, "tiled"),
        ("tiled TF32", torch.float32, True, dcl, "tiled"),
        ("tiled bfloat16", torch.bfloat16, True, dcl, "tiled"),
        ("reference float32", torch.float32, False, dcl, "reference"),
        ("reference TF32", torch.float32, True, dcl, "reference"),
        ("compiled TF32", torch.float32, True, torch.compile(dcl, dynamic=False, backend=backend), "reference"),
    ):
        step = gradients(dtype, allowed, loss, form)
        row(case, name, step, options, results, error=gradient_error(step, exact))


def m_dcl_forms(options: argparse.Namespace, results: Results) -> None:
    tiny = [(16, 256, 32), (64, 512, 32)]
    for n, entries, dim in tiny if options.dry else [(128, 65_536, 1024), (128, 1_048_576, 1024), (4096, 1_048_576, 1024)]:
        m_dcl_of(n, entries, dim, options, results)


def m_dcl_of(n: int, entries: int, dim: int, options: argparse.Namespace, results: Results) -> None:
    """All forms of bank_step.py for one random batch of n pairs and banks in float16."""
    forms = ["tiled"] if n * entries > 1 << 30 else ["reference", "tiled"]  # the reference would need 104 GB
    chosen = argparse.Namespace(device=options.device, dtype="float16", anchors=n, dim=dim, forms=forms, no_peer=False)
    with tf32(True):
        for name, step in make_steps(entries, chosen).items():
            row(f"m_dcl {n} x {entries}", name, step, options, results)


def search(options: argparse.Namespace, results: Results) -> None:
    entries, dim = (2048, 32) if options.dry else (1_048_576, 2048)
    vectors, queries = features(entries, dim, options, torch.float16), features(64, dim, options, torch.float16)
    with torch.no_grad():
        for count in (1, 64):
            few = queries[:count]
            row(f"search {entries} x {dim}, {count} queries", "product", lambda few=few: few @ vectors.T, options, results)
            row(
                f"search {entries} x {dim}, {count} queries", "product and top 10",
                lambda few=few: (few @ vectors.T).float().topk(10), options, results,
            )  # fmt: skip


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "rooflines": rooflines,
    "dcl": dcl_forms,
    "m_dcl": m_dcl_forms,
    "search": search,
}

if __name__ == "__main__":
    main()
