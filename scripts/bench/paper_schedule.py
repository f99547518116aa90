#!/usr/bin/env python3
"""Time of the paper's Flickr30K schedule, from a few hundred of its steps.

    python scripts/bench/paper_schedule.py --device cuda --precision amp_bf16 --steps 200
    python scripts/bench/paper_schedule.py --steps 2 --text bigru

CODER's schedule: 29,000 images of 36 regions x 2,048 channels with five captions each, every caption a pair, batches of 128,
30 epochs: 1,132 steps an epoch, 33,960 steps. The model is `region-bert` with a BERT of the size of bert-base, or
`region-bigru`; the loss is `coder-paper` with 10,000 prototypes. Features, captions and weights are random: nothing is
downloaded.

Timed are steps on batches that are already on the device, and steps that the loader feeds. Hours are the time of a fed step
times all steps. Not included: evaluation, saving and the clustering after each epoch.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Results, add_options, measure
from trainer_step import TrainerStep

from coder_plugin.concepts.vocabulary import Vocabulary
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions

IMAGES, CAPTIONS, REGIONS, CHANNELS, EPOCHS = 29_000, 5, 36, 2048, 30
WORDS, CONCEPTS = 8000, 400


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    results = Results("paper_schedule", options, ["transformers"])
    with tempfile.TemporaryDirectory() as folder:
        step = make_step(Path(folder), options)
        print(f"{step.trained:,} trained parameters; {step.trainer.steps_per_epoch} steps an epoch")
        waits = step.synchronisations()
        times = measure({"step": step}, options.device, options.steps, warm_up=3, limit=options.limit)["step"]
        seconds = sorted(times)[len(times) // 2]
        print(f"a step: {1e3 * seconds:.2f} ms ({len(times)} repetitions)", flush=True)
        fed = step.fed(options.steps) / options.steps
    total = EPOCHS * (IMAGES * CAPTIONS // options.batch_size)
    print(f"fed by the loader ({options.workers} workers): {1e3 * fed:.2f} ms")
    print(f"{total:,} steps: {seconds * total / 3600:.2f} h, fed {fed * total / 3600:.2f} h")
    if waits is not None:
        print(f"the host waits {sum(waits.values())} times in a step: {waits}")
    case = f"region-{options.text}, batch {options.batch_size}, {options.precision}"
    results.write({
        "case": case, "seconds": seconds, "fed_seconds": fed, "steps": total, "hours": seconds * total / 3600,
        "fed_hours": fed * total / 3600, "synchronisations": waits,
    })  # fmt: skip


def make_step(folder: Path, options: argparse.Namespace) -> TrainerStep:
    if options.text == "bert":
        make_bert(folder / "bert", tiny=options.tiny)
        kwargs = [f"text={folder / 'bert'}", "pretrained_text=False"]
    else:
        kwargs = []
    if options.tiny:
        kwargs.append("embed_dim=64")
    step = TrainerStep(
        f"region-{options.text}", "coder-paper", make_items(options), batches=8, batch_size=options.batch_size, captions="all",
        precision=options.precision, epochs=EPOCHS, workers=options.workers, opt="adamw", lr=2e-4, grad_clip_norm=2.0,
        concepts=str(make_concepts(folder, options)), model_kwargs=kwargs, seed=0,
        set=[f"prototypes.clusters={16 if options.tiny else 10_000}"],
    )  # fmt: skip
    if not options.device.startswith(step.trainer.device.type):
        raise SystemExit(f"--device {options.device}: the trainer takes {step.device} (CUDA_VISIBLE_DEVICES= hides GPUs)")
    return step


def make_items(options: argparse.Namespace) -> list[Item]:
    """Images with captions of 6 to 18 words. They share 256 sets of random features, held in memory."""
    draw = random.Random(0)
    rng = np.random.default_rng(0)
    pool = [Regions(rng.standard_normal((REGIONS, CHANNELS), dtype=np.float32)) for _ in range(16 if options.tiny else 256)]
    vocabulary = [f"word{number}" for number in range(WORDS)]
    images = 64 if options.tiny else IMAGES
    return [
        Item(
            f"{number}.jpg",
            tuple(" ".join(draw.choices(vocabulary, k=draw.randint(6, 18))) for _ in range(CAPTIONS)),
            partial(pool.__getitem__, number % len(pool)),
        )
        for number in range(images)
    ]


def make_concepts(folder: Path, options: argparse.Namespace) -> Path:
    """A vocabulary of some of the captions' words, with random vectors and counts."""
    words = [f"word{number}" for number in range(8 if options.tiny else CONCEPTS)]
    generator = torch.Generator().manual_seed(0)
    together = torch.randint(50, (len(words), len(words)), generator=generator).tril(-1)
    together += together.T.clone()
    counts = together.sum(1) + 50
    # as a vocabulary is: the most frequent first
    ranked = sorted(range(len(words)), key=lambda index: (-int(counts[index]), words[index]))
    order = torch.tensor(ranked)
    vocabulary = Vocabulary(
        words=tuple(words[index] for index in ranked),
        types=("object",) * len(words),
        counts=counts[order],
        cooccurrence=together[order][:, order].contiguous(),
        vectors=torch.randn(len(words), 300, generator=generator),
        missing=(),
        settings={},
    )
    vocabulary.save(folder / "concepts.safetensors")
    return folder / "concepts.safetensors"


def make_bert(folder: Path, *, tiny: bool) -> None:
    """Configuration and tokenizer of a BERT of the size of bert-base, whose vocabulary has the captions' words."""
    from transformers import BertConfig
    from transformers.models.bert import BertTokenizerFast

    folder.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = special + [f"word{number}" for number in range(WORDS)]
    size = len(words) if tiny else 30_522
    words += [f"unused{number}" for number in range(size - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizerFast.from_pretrained(str(folder)).save_pretrained(folder)
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertConfig(vocab_size=size, **(small if tiny else {})).save_pretrained(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=1, without=("repeats", "clock"))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each kind [200]")
    parser.add_argument("--batch-size", type=int, default=128, help="pairs of a batch [128]")
    parser.add_argument("--text", choices=("bert", "bigru"), default="bert", help="text encoder [bert]")
    parser.add_argument("--precision", default="fp32", help="as of coder-plugin train: fp32, amp_bf16, … [fp32]")
    parser.add_argument("--workers", type=int, default=4, help="processes that read data [4]")
    parser.add_argument("--tiny", action="store_true", help="few images, a small BERT and few prototypes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
