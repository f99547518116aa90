#!/usr/bin/env python3
"""How long does CODER's Flickr30K schedule take, and does the loader keep up with the steps?

    python scripts/bench/paper_schedule.py --device cuda --precision amp_bf16 --steps 200
    python scripts/bench/paper_schedule.py --tiny --steps 2                          to try the script on a CPU

The schedule: 29,000 images of 36 regions x 2,048 channels with five captions each, every caption a pair, batches of 128, 30
epochs: 33,960 steps. The model is `region-bert` with a BERT of the size of bert-base, the loss `coder-paper` with 10,000
prototypes. Features, captions and weights are random: nothing is downloaded. Steps that the loader feeds are compared with
steps on batches that are already on the device. Evaluation, saving and the clustering after each epoch are not included.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from coder_step import TrainerStep
from common import Results, make_bert, parser

from coder_plugin.concepts.vocabulary import Vocabulary
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions

IMAGES, CAPTIONS, EPOCHS, BATCH = 29_000, 5, 30, 128
WORDS = [f"word{number:04d}" for number in range(8000)]


def main() -> None:
    made = parser(__doc__, repeats=1, wall=True)
    made.add_argument("--steps", type=int, default=200, help="timed steps of each kind [200]")
    made.add_argument("--precision", default="fp32", help="as of coder-plugin train: fp32, amp_bf16, … [fp32]")
    made.add_argument("--workers", type=int, default=4, help="processes that read data [4]")
    made.add_argument("--tiny", action="store_true", help="few images, batches of 8, a small BERT and few prototypes")
    options = made.parse_args()
    logging.disable(logging.WARNING)
    results = Results("paper_schedule", options, ["transformers"])
    with tempfile.TemporaryDirectory() as folder:
        step = make_step(Path(folder), options)
        case = f"region-bert, batch {8 if options.tiny else BATCH}, {options.precision}"
        found = {"on the device": [results.timer(case, "on the device", step).timeit(options.steps)]}
        print(f"on the device: {1e3 * found['on the device'][0].median:.2f} ms a step", flush=True)
        feed = iter(step.trainer.loader.epoch(1))
        fed = results.timer(case, "fed by the loader", lambda: step.step(step.trainer._to_device(next(feed))))
        found["fed by the loader"] = [fed.timeit(options.steps)]
        feed.close()
    total = EPOCHS * (IMAGES * CAPTIONS // BATCH)
    minutes = {name: times[0].median * total / 60 for name, times in found.items()}
    results.report(case, found, steps=total, minutes=minutes)
    print(", ".join(f"{name} {each:.1f} min" for name, each in minutes.items()) + f" for {total:,} steps")


def make_step(folder: Path, options: argparse.Namespace) -> TrainerStep:
    tiny = options.tiny
    make_bert(folder / "bert", WORDS, tiny=tiny)
    make_concepts(folder / "concepts.safetensors", 8 if tiny else 400)
    kwargs = [f"text={folder / 'bert'}", "pretrained_text=False", *(["embed_dim=64"] if tiny else [])]
    items = make_items(64 if tiny else IMAGES, 16 if tiny else 256)
    return TrainerStep(
        "region-bert", "coder-paper", items, options.device, batches=8, captions="all", batch_size=8 if tiny else BATCH,
        precision=options.precision, epochs=EPOCHS, workers=options.workers, opt="adamw", lr=2e-4, grad_clip_norm=2.0,
        concepts=str(folder / "concepts.safetensors"), model_kwargs=kwargs, seed=0,
        set=[f"prototypes.clusters={16 if tiny else 10_000}"],
    )  # fmt: skip


def make_items(images: int, different: int) -> list[Item]:
    """Images with captions of 6 to 18 words. They share some sets of random features, held in memory."""
    draw, rng = random.Random(0), np.random.default_rng(0)
    pool = [Regions(rng.standard_normal((36, 2048), dtype=np.float32)) for _ in range(different)]
    captions = [tuple(" ".join(draw.choices(WORDS, k=draw.randint(6, 18))) for _ in range(CAPTIONS)) for _ in range(images)]
    return [Item(f"{number}.jpg", each, partial(pool.__getitem__, number % different)) for number, each in enumerate(captions)]


def make_concepts(file: Path, count: int) -> None:
    """A vocabulary of some of the captions' words, with random vectors and co-occurrences."""
    draw = torch.Generator().manual_seed(0)
    together = torch.randint(50, (count, count), generator=draw).tril(-1)
    counts, vectors = torch.full((count,), 1000), torch.randn(count, 300, generator=draw)
    words, types = tuple(WORDS[:count]), ("object",) * count
    Vocabulary(words, types, counts, together + together.T, vectors, missing=(), settings={}).save(file)


if __name__ == "__main__":
    main()
