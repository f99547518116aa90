#!/usr/bin/env python3
"""What does re-ranking by AsCL's fusion keep of the R@1 of scoring all pairs, and at which share of the time?

    python scripts/bench/fusion.py                      1,000 images x 5,000 texts, 36 regions, 32 words, D 256
    python scripts/bench/fusion.py --images 100 --texts 500

The data are synthetic. An image is a set of concepts; a region is one of them with noise; a caption names some of them, among
filler words. The head's matrices are set so that attention matches a region with its words, as after training. The shortlist
compares the means of the tokens. The time of two stages covers everything from tokens to ranks.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import Results, cpu_seconds, parser
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.evaluation import recall, recall_from_embeddings, rerank
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.fusion import Fusion

REGIONS, WORDS, CONCEPTS, FILLER = 36, 32, 200, 0.6


def main() -> None:
    made = parser(__doc__, repeats=1)
    made.add_argument("--images", type=int, default=1000, help="images [1000]")
    made.add_argument("--texts", type=int, default=5000, help="texts [5000]")
    made.add_argument("--dim", type=int, default=256, help="dimensions of the tokens [256]")
    made.add_argument("--top", type=int, default=32, help="length of the shortlist [32]")
    options = made.parse_args()
    results = Results("fusion", options)
    clock = time.perf_counter if options.wall or options.device != "cpu" else cpu_seconds
    torch.manual_seed(0)
    images, texts, owner = synthetic_data(options)
    head = trained_like_head(options.dim).to(options.device)
    vectors = mean_of_tokens(images), mean_of_tokens(texts)
    begun = clock()
    two_stages = rerank(*vectors, owner, head.scorer(images, texts), k=options.top)
    middle = clock()
    full = recall(head.scorer(images, texts).all_pairs(), owner)
    seconds = [clock() - middle, middle - begun]
    shortlist = recall_from_embeddings(*vectors, owner)
    for name, found in (("shortlist alone", shortlist), ("all pairs", full), (f"{options.top} re-ranked", two_stages)):
        print(f"{name}: i2t R@1 {found['i2t_r1']:.1f}, t2i R@1 {found['t2i_r1']:.1f}")
    kept = [100 * two_stages[key] / full[key] if full[key] else float("nan") for key in ("i2t_r1", "t2i_r1")]
    ratio = {"re-ranked": seconds[1] / seconds[0]}
    print(f"all pairs {seconds[0]:.1f} s, re-ranked {seconds[1]:.1f} s: {ratio['re-ranked']:.4f} x all pairs")
    print(f"R@1 kept: {kept[0]:.1f} and {kept[1]:.1f} %")
    case = f"{options.images} x {options.texts}, D {options.dim}"
    results.write(case=case, seconds=dict(zip(("all pairs", "re-ranked"), seconds, strict=True)), ratio=ratio, kept=kept)


def synthetic_data(options: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Tokens and masks of images and texts, float32 on the CPU, and the image of each text [T]."""
    n, t, dim = options.images, options.texts, options.dim
    concepts = normalize(torch.randn(CONCEPTS, dim), dim=1)
    scenes, owner = torch.randint(CONCEPTS, (n, REGIONS)), torch.arange(t) * n // t
    regions = concepts[scenes] + torch.randn(n, REGIONS, dim) / dim**0.5
    words = concepts[scenes[owner[:, None], torch.randint(REGIONS, (t, WORDS))]]
    filler = torch.rand(t, WORDS) < FILLER
    words[filler] = normalize(torch.randn(int(filler.sum()), dim), dim=1)
    words += torch.randn(words.shape) / dim**0.5
    masks = (torch.ones(size, dtype=torch.bool) for size in ((n, REGIONS), (t, WORDS)))
    return {"tokens": regions, "mask": next(masks)}, {"tokens": words, "mask": next(masks)}, owner


def trained_like_head(dim: int) -> Fusion:
    """A head whose attention prefers similar tokens and whose outputs lie in the space of the tokens."""
    head = Fusion(BackboneInfo(embed_dim=dim, image_contexts=dim, text_contexts=dim), heads=4)
    with torch.no_grad():
        for direction in (head.image_to_text, head.text_to_image):
            basis = torch.linalg.qr(torch.randn(dim, dim)).Q
            direction.key.copy_(basis)
            direction.query.copy_(2 * dim**0.5 * basis)
            direction.output.copy_(basis.T)
            direction.common.copy_(torch.eye(dim))
    return head


def mean_of_tokens(item: dict[str, Tensor]) -> Tensor:
    return normalize((item["tokens"] * item["mask"][..., None]).sum(1), dim=1)


if __name__ == "__main__":
    main()
