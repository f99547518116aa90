#!/usr/bin/env python3
"""Time of a GRU, and of a training step of `region-bigru`, on a CPU: float32, bfloat16 autocast, autocast with PyTorch's GRU.

    python scripts/bench/gru_autocast.py --threads 1
    python scripts/bench/gru_autocast.py --threads 1 --gru-alone --batch-size 32 --dim 512
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python scripts/bench/gru_autocast.py --threads 1    as without AVX-512

`ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` leaves AVX-512 without bfloat16. The GRU of the package goes by what the CPU has, so the
third way, PyTorch's GRU, shows the effect.

A step is forward, `dcl`, backward and AdamW; with `--gru-alone` the forward and backward pass of a bidirectional GRU over
words of 300 channels. The ways take turns in one process, so that other load on the machine slows all alike. Ratios are
medians over repetitions of CPU time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import Results, add_options, measure
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import coder_plugin
from coder_plugin.backbones.recurrent import GRU

WAYS = ("fp32", "amp_bf16", "amp_bf16, torch.nn.GRU")
WORDS = 32
#: The class with PyTorch's own forward.
Plain = type("Plain", (GRU,), {"forward": nn.GRU.forward})


def main() -> None:
    options = arguments()
    results = Results("gru_autocast", options)
    torch.manual_seed(0)
    gru, forward, parameters = gru_alone(options) if options.gru_alone else whole_step(options)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step(way: str) -> None:
        gru.__class__ = Plain if way == WAYS[2] else GRU
        with torch.autocast("cpu", torch.bfloat16, enabled=way != WAYS[0]):
            value = forward()
        optimizer.zero_grad()
        value.backward()
        if not options.gru_alone:
            optimizer.step()

    times = measure(
        {way: partial(step, way) for way in WAYS}, "cpu", options.repeats, warm_up=1, clock=options.clock, limit=options.limit
    )
    case = f"batch {options.batch_size}, D {options.dim}, {torch.backends.cpu.get_cpu_capability()}"
    results.compare(case, times, peer="fp32")


Workload = tuple[nn.Module, Callable[[], Tensor], list[nn.Parameter]]


def whole_step(options: argparse.Namespace) -> Workload:
    words = ["<pad>", "<start>", "<end>", "<unk>", *(f"w{number}" for number in range(1000))]
    sizes = {"region_dim": 2048, "embed_dim": options.dim, "vocabulary": words, "context_length": WORDS}
    model = coder_plugin.create_model("region-bigru", loss="dcl", **sizes).train()
    loss = coder_plugin.create_loss("dcl", model=model)
    n = options.batch_size
    image = {"features": torch.randn(n, 36, 2048), "mask": torch.ones(n, 36, dtype=torch.bool)}
    text = torch.randint(4, 1000, (n, WORDS)) * (torch.arange(WORDS) < torch.randint(8, 24, (n, 1)))

    def forward() -> Tensor:
        return loss(**model(image, text, image_id=torch.arange(n)), output_dict=False)

    return model.text.rnn, forward, list(model.parameters())


def gru_alone(options: argparse.Namespace) -> Workload:
    gru = GRU(300, options.dim, batch_first=True, bidirectional=True)
    rows = torch.randn(options.batch_size, 16, 300, requires_grad=True)
    lengths = torch.randint(8, 17, (options.batch_size,))

    def forward() -> Tensor:
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return gru(packed)[0].data.float().square().mean()

    return gru, forward, list(gru.parameters())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gru-alone", action="store_true", help="forward and backward of the GRU, without the model")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size [64]")
    parser.add_argument("--dim", type=int, default=1024, help="dimensions of the joint space, states of the GRU [1024]")
    add_options(parser, repeats=5, without=("device",))
    parser.set_defaults(clock="cpu", device="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
