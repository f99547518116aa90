#!/usr/bin/env python3
"""The papers' figures of speed, as ratios between their rows: encoding a query, scoring candidates, scoring pairs.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Results, Step, add_options, measure
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
    options = arguments()
    results = Results("papers", options, ["transformers"])
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        small = options.small
        for base in BASES:
            steps = {name: step(make()) for name, (make, step) in encoders(base, Path(folder), options).items()}
            results.compare(f"encoding a caption, {base}", timed(steps, options), peer=base)
        dim = 64 if small else 2048
        vectors = {f"D {width}": draw(options.candidates, width, options) for width in (dim, 2 * dim, 3 * dim)}
        steps = {name: scoring(rows) for name, rows in vectors.items()}
        results.compare(f"scoring {options.candidates:,} candidates", timed(steps, options), peer=f"D {dim}")
        vectors.clear()
        images, texts = (20, 100) if small else (1000, 5000)
        dim //= 2
        widths = {"one vector": dim, "CODER": 2 * dim}
        pairs: dict[str, Step] = {name: product(images, texts, width, options) for name, width in widths.items()}
        times = timed(pairs, options)
        part = max(1, images // options.fused)  # the fusion scores a part of the images and of the texts
        steps = {"": fused(images // part, texts // part, dim, options)}
        times["AsCL's fusion"] = [seconds * part * part for seconds in timed(steps, options)[""]]
        rates = {name: images * texts / sorted(each)[len(each) // 2] / 1e3 for name, each in times.items()}
        results.compare(f"all pairs of {images:,} x {texts:,}, D {dim}", times, peer="one vector", kilo_pairs_per_second=rates)
        print(", ".join(f"{name} {rate:,.0f} thousand pairs/s" for name, rate in rates.items()))


def encoders(
    base: str, folder: Path, options: argparse.Namespace
) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Step]]]:
    """Models of the base alone and with SelfAlign, and what encodes a caption with one."""
    sizes: dict[str, Any] = {"vocabulary": [*SPECIAL, *dict.fromkeys(CAPTION.lower().replace(".", "").split())]}
    if base == "CAMERA":
        sizes = {"text": bert(folder, options.small), "pretrained_text": False}
    sizes |= {"embed_dim": 64, "region_dim": 32, **({"heads": 4} if base == "CAMERA" else {})} if options.small else {}

    def make(recipe: str, loss: str) -> Callable[[], Any]:
        settings = load(recipe).settings
        kwargs: dict[str, Any] = dict(pair.split("=") for pair in settings.get("model_kwargs", ()))
        kwargs = {name: value == "true" for name, value in kwargs.items()} | sizes
        return lambda: coder_plugin.create_model(settings["model"], loss=loss, **kwargs).eval().to(options.device)

    def step(model: Any) -> Step:
        tokens = model.tokenizer()([CAPTION]).to(options.device)
        parameters = sum(each.numel() for each in model.parameters()) / 1e6
        print(f"{model.name}, {', '.join(model.coder.heads) or 'no heads'}: {parameters:.2f} M parameters")
        return lambda: model.embed_text(tokens)

    recipe = BASES[base]
    return {base: (make(recipe, "triplet"), step), f"{base} + SelfAlign": (make(f"selfalign-{recipe}", "lca + cra"), step)}


def bert(folder: Path, small: bool) -> str:
    """The folder of a configuration and a tokenizer of BERT base's size, whose words are the caption's."""
    from transformers import BertConfig
    from transformers.models.bert import BertTokenizerFast  # type: ignore[attr-defined]

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *dict.fromkeys(CAPTION.lower().rstrip(".").split())]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizerFast.from_pretrained(str(folder)).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64} if small else {}
    BertConfig(**sizes).save_pretrained(folder)
    return str(folder)


def draw(rows: int, width: int, options: argparse.Namespace) -> Tensor:
    generator = torch.Generator(options.device).manual_seed(0)
    return normalize(torch.randn(rows, width, generator=generator, device=options.device), dim=1)


def scoring(rows: Tensor) -> Step:
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


def timed(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, list[float]]:
    return measure(steps, options.device, options.repeats, clock=options.clock, limit=options.limit)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=100_000, help="vectors that a query is scored against [100000]")
    parser.add_argument("--fused", type=int, default=50, help="images that the fusion scores with five captions each [50]")
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    add_options(parser, repeats=9, threads=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
