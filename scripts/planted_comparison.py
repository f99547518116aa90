#!/usr/bin/env python3
"""Does ``coder-plugin compare`` find a difference that is there, and none where there is none?

    python scripts/planted_comparison.py scores --repetitions 1000
    python scripts/planted_comparison.py trained --repetitions 200

Both compare rows with a known difference, and equal rows, and count how often the interval contains the difference, and how
often one is claimed. `scores` draws the ranks of images. `trained` trains small towers, each repetition with other seeds and
measured on other images; the difference is then the mean over many of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def scores(repetitions: int) -> None:
    from coder_plugin.compare.statistics import differences
    from tests.compare.planted import margin, rows

    print("images seeds spread | margin covered claimed-of-equal, in percent")
    settings = ((100, 3, 0.0), (100, 3, 0.1), (300, 3, 0.05), (300, 5, 0.05), (1000, 3, 0.05), (100, 2, 0.05))
    for images, seeds, spread in settings:
        setting = {"images": images, "seeds": seeds, "spread": spread}
        truth, covered, claimed = margin(0.2, spread), 0, 0
        for number in range(repetitions):
            better = differences(*rows(number, gain=0.2, **setting), resamples=400)["rsum"]
            covered += better.low <= truth <= better.high
            claimed += differences(*rows(number, gain=0.0, **setting), resamples=400)["rsum"].is_clear
        shares = (100 * count / repetitions for count in (covered, claimed))
        print(f"{images:6} {seeds:5} {spread:6} | {truth:6.1f} " + " ".join(f"{share:6.1f}" for share in shares), flush=True)


def trained(repetitions: int, images: int = 300, seeds: int = 3) -> tuple[float, float]:
    """Small linear towers, trained with ``dcl``: a row with more steps is better, and one with other seeds is equal.

    Returns the shares of comparisons, in percent, whose interval contains the difference, and that claim one of equal rows.
    """
    import numpy as np
    import torch

    from coder_plugin.compare.statistics import Hits, differences
    from coder_plugin.evaluation import recall_from_embeddings
    from coder_plugin.functional import dcl

    width, captions = 24, 2
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=draw)

    def gallery(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures [N, C], and captions [N, 2, C] that are noisy views of them."""
        pictures = torch.randn(count, width, generator=draw)
        return pictures, (pictures @ mixing)[:, None] + 6 * torch.randn(count, captions, width, generator=draw)

    train_images, train_texts = gallery(600)

    def embed(towers: list[torch.Tensor], *sides: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.normalize(side @ weight, dim=1) for side, weight in zip(sides, towers, strict=True)]

    def train(steps: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        towers = [torch.randn(width, 16, generator=generator).div(5).requires_grad_() for _ in "it"]
        optimizer = torch.optim.Adam(towers, lr=1e-2)
        for _ in range(steps):
            rows = torch.randint(len(train_images), (64,), generator=generator)
            texts = train_texts[rows, torch.randint(captions, (64,), generator=generator)]
            image, text = embed(towers, train_images[rows], texts)
            optimizer.zero_grad()
            dcl(image, text).backward()
            optimizer.step()
        return [weight.detach() for weight in towers]

    owner = torch.arange(images).repeat_interleave(captions)

    def hits(towers: list[torch.Tensor], pictures: torch.Tensor, texts: torch.Tensor) -> Hits:
        found = recall_from_embeddings(*embed(towers, pictures, texts.flatten(0, 1)), owner)
        return Hits.from_ranks(found["i2t_ranks"].tolist(), found["t2i_ranks"].tolist(), owner.tolist())

    def rsum(towers: list[torch.Tensor], data: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(hits(towers, *data).recalls(np.ones(images))[0, 0])

    few, more = 50, 60
    many = [(train(few, 10_000 + seed), train(more, 10_000 + seed)) for seed in range(30)]
    others = [gallery(images) for _ in range(10)]
    truth = float(np.mean([rsum(better, data) - rsum(base, data) for base, better in many for data in others]))
    covered = claimed = 0
    for number in range(repetitions):
        data, first = gallery(images), 3 * seeds * number
        rows = {
            name: {seed: hits(train(steps, first + offset * seeds + seed), *data) for seed in range(seeds)}
            for offset, (name, steps) in enumerate({"base": few, "equal": few, "better": more}.items())
        }
        better = differences(rows["better"], rows["base"], resamples=400)["rsum"]
        covered += better.low <= truth <= better.high
        claimed += differences(rows["equal"], rows["base"], resamples=400)["rsum"].is_clear
    shares = 100 * covered / repetitions, 100 * claimed / repetitions
    print(f"{repetitions} comparisons of {images} images, {seeds} seeds: the difference is {truth:.1f}; "
          f"contained in {shares[0]:.1f} %, claimed of equal rows in {shares[1]:.1f} %", flush=True)  # fmt: skip
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["scores", "trained"], help="rows whose scores are drawn, or rows that are trained")
    parser.add_argument("--repetitions", type=int, default=200, help="comparisons of each kind [200]")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    {"scores": scores, "trained": trained}[options.command](options.repetitions)


if __name__ == "__main__":
    main()
