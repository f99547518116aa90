#!/usr/bin/env python3
"""How long does recall take, beside one product of all embeddings and its ranks?

    python scripts/bench/evaluate.py                                     1,000 and 5,000 images x 5 captions, D 1024
    python scripts/bench/evaluate.py --device cuda --images 25000

*Evaluation* is `recall_from_embeddings`, as `coder-plugin eval` calls it; the peer is `recall` of the whole similarity matrix.
*Plain* is the usual code: the matrix, an argsort of each row and each column, and the rank of the best right one. All three
must give the same numbers.
"""

from __future__ import annotations

import torch
from common import Results, parser
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.evaluation import recall, recall_from_embeddings

CAPTIONS = 5
NAMES = [f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)]


def main() -> None:
    made = parser(__doc__, repeats=3)
    made.add_argument("--images", type=int, nargs="+", default=[1000, 5000], help="images, of five captions each [1000 5000]")
    made.add_argument("--dim", type=int, default=1024, help="dimensions [1024]")
    options = made.parse_args()
    results = Results("evaluate", options)
    for count in options.images:
        torch.manual_seed(0)
        images = normalize(torch.randn(count, options.dim, device=options.device), dim=1)
        owner = torch.arange(count, device=options.device).repeat_interleave(CAPTIONS)
        noise = torch.randn(count * CAPTIONS, options.dim, device=options.device)
        texts = normalize(images[owner] + 10 * noise / options.dim**0.5, dim=1)
        steps = {
            "one product": lambda images=images, texts=texts, owner=owner: recall(images @ texts.T, owner),
            "evaluation": lambda images=images, texts=texts, owner=owner: recall_from_embeddings(images, texts, owner),
            "plain": lambda images=images, texts=texts, owner=owner: plain(images @ texts.T, owner),
        }
        found = {name: [round(float(result[key]), 6) for key in NAMES] for name, step in steps.items() for result in [step()]}
        if len(set(map(tuple, found.values()))) != 1:
            raise SystemExit(f"the recalls differ: {found}")
        results.compare(f"{count} images x {count * CAPTIONS} captions, D {options.dim}", steps)


def plain(similarity: Tensor, owner: Tensor) -> dict[str, float]:
    """R@1, 5 and 10 of both directions by sorting every row and every column, in percent."""
    rows = owner[similarity.argsort(dim=1, descending=True)] == torch.arange(len(similarity), device=owner.device)[:, None]
    columns = similarity.argsort(dim=0, descending=True) == owner
    ranks = {"i2t": rows.int().argmax(1), "t2i": columns.int().argmax(0)}
    return {f"{name}_r{k}": 100 * float((of < k).double().mean()) for name, of in ranks.items() for k in (1, 5, 10)}


if __name__ == "__main__":
    main()
