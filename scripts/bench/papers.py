#!/usr/bin/env python3
"""The papers' figures of speed: how much longer do encoding and scoring take with SelfAlign, CODER's concepts, AsCL's fusion?

    python scripts/bench/papers.py                              the papers' widths with random weights, 100,000 candidates
    python scripts/bench/papers.py --device cuda --json papers.jsonl

*Encoding* (SelfAlign, table II): one caption through a text tower and its heads, without and with SelfAlign. The number of
candidates does not enter, because images and texts are encoded apart. *Scoring* (table III, and table IV's GPU time): one
query against N vectors, of D for a base, of 2 D with one context block (#7, #9, #10), and of 3 D with SelfAlign's two.
*Pairs a second* (CODER, figure 4): all pairs of 1,000 images and 5,000 captions by one product of vectors, of CODER with its
concept block, and by AsCL's fusion.

BERT has random weights of base's size, so nothing is downloaded; time does not depend on the weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Results, Step, make_bert, parser
from torch import Tensor
from torch.nn.functional import normalize

import coder_plugin
from coder_plugin.backbones.tokenizers import SPECIAL
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.fusion import Fusion
from coder_plugin.recipes import load

CAPTION = "A man in a red shirt rides a bicycle down the street while two dogs run beside him."
BASES = {"CAMERA": "camera", "VSRN": "vsrn"}


def main() -> None:
    made = parser(__doc__, repeats=9)
    made.add_argument("--candidates", type=int, default=100_000, help="vectors that a query is scored against [100000]")
    made.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    options = made.parse_args()
    results, small = Results("papers", options, ["transformers"]), options.small
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for base in BASES:
            results.compare(f"encoding a caption, {base}", encoders(base, Path(folder), options))
        dim = 64 if small else 2048
        steps = {f"D {width}": scoring(options.candidates, width, options) for width in (dim, 2 * dim, 3 * dim)}
        results.compare(f"scoring {options.candidates:,} candidates", steps)
        # the fusion scores a part of the pairs, and the others do so as often as there are parts
        images, texts, dim, parts = (20, 100, 32, 4) if small else (1000, 5000, 1024, 400)
        pairs: dict[str, Step] = {
            "one vector": product(images, texts, dim, options),
            "CODER": product(images, texts, 2 * dim, options),
            f"AsCL's fusion, 1/{parts} of the pairs": fused(int(images / parts**0.5), int(texts / parts**0.5), dim, options),
        }
        ratio = results.compare(f"all pairs of {images:,} x {texts:,}, D {dim}", pairs, pairs=images * texts, parts=parts)
        print(f"AsCL's fusion of all pairs: {parts * list(ratio.values())[-1]:,.0f} x one vector")


def encoders(base: str, folder: Path, options: argparse.Namespace) -> dict[str, Step]:
    """Steps that encode a caption, with a model of the base alone and with SelfAlign."""
    sizes: dict[str, Any] = {"vocabulary": [*SPECIAL, *dict.fromkeys(CAPTION.lower().replace(".", "").split())]}
    if base == "CAMERA":
        make_bert(folder / "bert", CAPTION.lower().rstrip(".").split(), tiny=options.small)
        sizes = {"text": str(folder / "bert"), "pretrained_text": False}
    sizes |= {"embed_dim": 64, "region_dim": 32, **({"heads": 4} if base == "CAMERA" else {})} if options.small else {}

    def step(recipe: str, loss: str) -> Step:
        settings = load(recipe).settings
        kwargs: dict[str, Any] = dict(pair.split("=") for pair in settings.get("model_kwargs", ()))
        kwargs = {name: value == "true" for name, value in kwargs.items()} | sizes
        model = coder_plugin.create_model(settings["model"], loss=loss, **kwargs).eval().to(options.device)
        tokens = model.tokenizer()([CAPTION]).to(options.device)
        parameters = sum(each.numel() for each in model.parameters()) / 1e6
        print(f"{model.name}, {', '.join(model.coder.heads) or 'no heads'}: {parameters:.2f} M parameters")
        return lambda: model.embed_text(tokens)

    recipe = BASES[base]
    return {base: step(recipe, "triplet"), f"{base} + SelfAlign": step(f"selfalign-{recipe}", "lca + cra")}


def draw(rows: int, width: int, options: argparse.Namespace) -> Tensor:
    generator = torch.Generator(options.device).manual_seed(0)
    return normalize(torch.randn(rows, width, generator=generator, device=options.device), dim=1)


def scoring(count: int, width: int, options: argparse.Namespace) -> Step:
    rows = draw(count, width, options)
    return lambda: rows @ rows[0]


def product(images: int, texts: int, width: int, options: argparse.Namespace) -> Step:
    one, other = draw(images, width, options), draw(texts, width, options)
    return lambda: one @ other.T


def fused(images: int, texts: int, dim: int, options: argparse.Namespace) -> Step:
    """All pairs by AsCL's fusion, of 36 regions and 16 words."""
    head = Fusion(BackboneInfo(embed_dim=dim, image_contexts=dim, text_contexts=dim)).eval().to(options.device)
    sides = {}
    for side, rows, length in (("image", images, 36), ("text", texts, 16)):
        tokens = draw(rows * length, dim, options).unflatten(0, (rows, length))
        mask = torch.ones(rows, length, dtype=torch.bool, device=options.device)
        sides[side] = {f"{side}_contexts": tokens, f"{side}_context_mask": mask}
    scorer = head.scorer(head.image_item(sides["image"]), head.text_item(sides["text"]))
    return lambda: scorer.all_pairs()


if __name__ == "__main__":
    main()
