#!/usr/bin/env python3
"""Time and memory of an evaluation: recall by tiles against the full matrix, and encoding against the model alone.

    python scripts/bench/evaluate.py                                     1,000 and 5,000 images x 5 captions, D 1024
    python scripts/bench/evaluate.py --device cuda --images 25000

*Tiles* is `recall_from_embeddings`, which evaluation calls. *Full matrix* is `recall` of the whole similarity matrix; both give
the same numbers, which is checked. *Plain* is the usual code: the matrix, an argsort of each row and of each column, and the
rank of the best right one; it is left out with `--no-plain`. Ratios are to the full matrix.

Encoding reads the built-in scenes with `Encoder`, as `coder-plugin eval` does. Its peer is the model alone on batches in
memory.
"""

from __future__ import annotations

import argparse
import logging
import resource

import torch
from common import Results, add_options, measure, peak_bytes
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.evaluation import recall, recall_from_embeddings

CAPTIONS = 5


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    results = Results("evaluate", options)
    for count in options.images:
        matching(count, options, results)
    if options.encode:
        encoding(options, results)


def matching(count: int, options: argparse.Namespace, results: Results) -> None:
    torch.manual_seed(0)
    images = normalize(torch.randn(count, options.dim, device=options.device), dim=1)
    owner = torch.arange(count, device=options.device).repeat_interleave(CAPTIONS)
    noise = torch.randn(count * CAPTIONS, options.dim, device=options.device)
    texts = normalize(images[owner] + 10 * noise / options.dim**0.5, dim=1)
    steps = {
        "full matrix": lambda: recall(images @ texts.T, owner),
        "tiles": lambda: recall_from_embeddings(images, texts, owner),
    }
    if options.plain:
        steps["plain"] = lambda: plain(images @ texts.T, owner)
    names = [f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)]
    found = [{name: round(float(result[name]), 6) for name in names} for result in (step() for step in steps.values())]
    assert all(each == found[0] for each in found), found
    print(f"{count} images: {found[0]}")
    times = measure(steps, options.device, options.repeats, warm_up=0, clock=options.clock, limit=options.limit)
    peaks = {name: peak_bytes(step, options.device) for name, step in steps.items()}
    results.compare(
        f"{count} images x {CAPTIONS * count} captions, {options.dim} dimensions", times, peer="full matrix",
        peak_bytes=peaks, resident_peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )  # fmt: skip


def plain(similarity: Tensor, owner: Tensor) -> dict[str, float]:
    """R@1, 5 and 10 of both directions by sorting every row and every column, in percent."""
    rows = owner[similarity.argsort(dim=1, descending=True)] == torch.arange(len(similarity), device=owner.device)[:, None]
    columns = similarity.argsort(dim=0, descending=True) == owner
    ranks = {"i2t": rows.int().argmax(1), "t2i": columns.int().argmax(0)}
    return {f"{name}_r{k}": 100 * float((of < k).double().mean()) for name, of in ranks.items() for k in (1, 5, 10)}


def encoding(options: argparse.Namespace, results: Results) -> None:
    from coder_plugin import create_model
    from coder_plugin.config import ModelConfig
    from coder_plugin.data.scenes import open_scenes
    from coder_plugin.data.source import ItemSource
    from coder_plugin.evaluation.evaluate import Encoder
    from coder_plugin.pretrained import build

    model = create_model(options.model, loss="clip").to(options.device).eval()
    source = ItemSource(open_scenes("val", count=options.scenes), name="scenes")
    tokenizer = build.make_tokenizer(ModelConfig(name=options.model), model)
    encoder = Encoder(
        model, tokenizer, build.make_transform(model), device=torch.device(options.device), batch_size=64, workers=0
    )
    image = torch.randn(options.scenes, 3, *[model.visual.image_size] * 2, device=options.device)
    text = tokenizer(["a red circle above a blue square"] * (CAPTIONS * options.scenes)).to(options.device)

    @torch.no_grad()
    def alone() -> None:
        for batch in image.split(64):
            model.embed_image(batch)
        for batch in text.split(64):
            model.embed_text(batch)

    times = measure(
        {"model alone": alone, "Encoder": lambda: encoder(source)}, options.device, options.repeats, warm_up=1,
        clock=options.clock, limit=options.limit,
    )  # fmt: skip
    results.compare(f"{options.model}, {options.scenes} scenes and their captions", times, peer="model alone")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=3)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 5000], help="images, of five captions each")
    parser.add_argument("--dim", type=int, default=1024, help="dimensions [1024]")
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="without the sorts of the whole matrix")
    parser.add_argument("--no-encode", dest="encode", action="store_false", help="without encoding")
    parser.add_argument("--model", default="coder-tiny", help="open_clip model that encodes [coder-tiny]")
    parser.add_argument("--scenes", type=int, default=128, help="scenes that are encoded [128]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
