#!/usr/bin/env python3
"""AsCL's fusion: scores of all pairs against two-stage retrieval. Time, memory and the R@1 that re-ranking keeps.

    python scripts/bench/fusion.py                      1,000 images x 5,000 texts, 36 regions, 32 words, D 256
    python scripts/bench/fusion.py --images 100 --texts 500 --shortest 6
    python scripts/bench/fusion.py --device cuda --dim 1024

The data are synthetic. An image is a set of concepts; a region is one of them with noise; a caption names some of them, among
filler words. The head's matrices are set so that attention matches a region with its words, as after training. The shortlist
compares the means of the tokens. Both scores retrieve, neither perfectly.

The time of two-stage retrieval covers everything from tokens to ranks. Memory is the growth of the process's peak resident
size since before the data were created.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from common import Results, add_options
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.evaluation import recall, recall_from_embeddings, rerank
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.fusion import Fusion


def main() -> None:
    options = arguments()
    results = Results("fusion", options)
    case = (
        f"{options.images} images of {options.regions} regions x {options.texts} texts of {options.shortest} to "
        f"{options.words} words, D {options.dim}, {options.heads} heads, float32"
    )
    print(case)
    torch.manual_seed(options.seed)
    start = peak_memory()
    images, texts, image_of_text = synthetic_data(options)
    head = trained_like_head(options).to(options.device)
    vectors = mean_of_tokens(images), mean_of_tokens(texts)

    began = clocks()
    similarity = head.scorer(images, texts).all_pairs()
    full = recall(similarity, image_of_text)
    full_cost = (*since(began), peak_memory() - start)
    del similarity

    began = clocks()
    two_stage = rerank(*vectors, image_of_text, head.scorer(images, texts), k=options.top)
    two_stage_cost = (*since(began), peak_memory() - start)
    shortlist = recall_from_embeddings(*vectors, image_of_text)

    print(f"{'':<12}{'i2t R@1':>9}{'t2i R@1':>9}{'rsum':>8}{'seconds':>9}{'CPU s':>9}{'peak MB':>9}")
    rows = {
        "shortlist": (shortlist, ()),
        "all pairs": (full, full_cost),
        f"re-ranked {options.top}": (two_stage, two_stage_cost),
    }
    for name, (result, cost) in rows.items():
        recalls = "".join(f"{result[key]:{width}.1f}" for key, width in (("i2t_r1", 9), ("t2i_r1", 9), ("rsum", 8)))
        seconds = "".join(f"{value:9.1f}" for value in cost[:2])
        print(f"{name:<12}{recalls}{seconds}" + "".join(f"{value / 1e6:9.0f}" for value in cost[2:]))
    kept = [100 * two_stage[key] / full[key] if full[key] else float("nan") for key in ("i2t_r1", "t2i_r1")]
    ratios = [one / two for one, two in zip(full_cost[:2], two_stage_cost[:2], strict=True)]
    print(
        f"re-ranked keeps {kept[0]:.1f} % and {kept[1]:.1f} % of R@1 at 1/{ratios[0]:.1f} of the time, "
        f"1/{ratios[1]:.1f} of the CPU time"
    )
    costs = {name: cost for name, (_, cost) in rows.items() if cost}
    results.write({"case": case, "peer": "all pairs", "kept": kept, "seconds, CPU seconds, peak bytes": costs, "ratio": ratios})


def clocks() -> tuple[float, float]:
    """Wall-clock seconds and CPU seconds of this process. On a shared machine compare the latter, with --threads 1."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - began[0], now[1] - began[1]


def synthetic_data(options: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Tokens and masks of images and texts, float32 on the CPU, and the image of each text [T]."""
    dim, concepts = options.dim, normalize(torch.randn(options.concepts, options.dim), dim=1)
    scenes = torch.randint(options.concepts, (options.images, options.regions))
    image_of_text = torch.arange(options.texts) * options.images // options.texts
    regions = concepts[scenes] + options.noise * torch.randn(options.images, options.regions, dim) / dim**0.5
    described = torch.randint(options.regions, (options.texts, options.words))
    words = concepts[scenes[image_of_text[:, None], described]]
    filler = torch.rand(options.texts, options.words) < options.filler
    words[filler] = normalize(torch.randn(int(filler.sum()), dim), dim=1)
    words += options.noise * torch.randn(words.shape) / dim**0.5
    length = torch.randint(options.shortest, options.words + 1, (options.texts, 1))
    mask = torch.arange(options.words) < length
    return (
        {"tokens": regions, "mask": torch.ones(options.images, options.regions, dtype=torch.bool)},
        {"tokens": words * mask[..., None], "mask": mask},
        image_of_text,
    )


def trained_like_head(options: argparse.Namespace) -> Fusion:
    """A head whose attention prefers similar tokens and whose outputs lie in the space of the tokens."""
    dim = options.dim
    sizes = BackboneInfo(embed_dim=dim, image_contexts=dim, text_contexts=dim)
    head = Fusion(sizes, heads=options.heads, pairs_per_tile=options.pairs_per_tile)
    with torch.no_grad():
        for direction in (head.image_to_text, head.text_to_image):
            basis = torch.linalg.qr(torch.randn(dim, dim)).Q
            direction.key.copy_(basis)
            direction.query.copy_(options.sharpness * dim**0.5 * basis)
            direction.output.copy_(basis.T)
            direction.common.copy_(torch.eye(dim))
    return head


def mean_of_tokens(item: dict[str, Tensor]) -> Tensor:
    return normalize((item["tokens"] * item["mask"][..., None]).sum(1), dim=1)


def peak_memory() -> float:
    """Peak resident size of this process so far, in bytes."""
    if sys.platform == "win32":
        return float("nan")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="images [1000]")
    parser.add_argument("--texts", type=int, default=5000, help="texts [5000]")
    parser.add_argument("--regions", type=int, default=36, help="regions per image [36]")
    parser.add_argument("--words", type=int, default=32, help="positions of the longest text [32]")
    parser.add_argument("--shortest", type=int, help="words of the shortest text; lengths are drawn uniformly [--words]")
    parser.add_argument("--dim", type=int, default=256, help="dimensions of the tokens [256]")
    parser.add_argument("--heads", type=int, default=4, help="attention heads [4]")
    parser.add_argument("--top", type=int, default=32, help="length of the shortlist [32]")
    parser.add_argument("--pairs-per-tile", type=int, help="pairs that are scored at once [the head's default]")
    add_options(parser, repeats=1, without=("repeats", "limit", "clock"))
    parser.add_argument("--seed", type=int, default=0, help="random seed [0]")
    group = parser.add_argument_group("synthetic data")
    group.add_argument("--concepts", type=int, default=200, help="different concepts [200]")
    group.add_argument("--noise", type=float, default=1.0, help="norm of a token's noise; concepts have norm 1 [1]")
    group.add_argument("--filler", type=float, default=0.6, help="share of filler words [0.6]")
    group.add_argument("--sharpness", type=float, default=2.0, help="sharpness of the attention [2]")
    options = parser.parse_args()
    options.shortest = options.words if options.shortest is None else options.shortest
    return options


if __name__ == "__main__":
    main()
