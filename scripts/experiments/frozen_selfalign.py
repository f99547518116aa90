#!/usr/bin/env python3
"""Train SelfAlign on cached image grids and word features of frozen towers: minutes per run on a CPU.

    python scripts/experiments/flickr8k_towers.py towers --context-length 24
    python scripts/experiments/frozen_selfalign.py cache cache.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --train-data 'train-{000000..000005}.tar' --val-data val-000000.tar
    python scripts/experiments/frozen_selfalign.py train cache.pt --kind camera --model TEXT_FOLDER --losses \\
        "dcl + 0.01*view_diversity" "dcl + 0.01*view_diversity + lca + cra" --seeds 0 1 2

`cache` stores, for every image, the last feature map of a timm convolutional tower (evaluation transform: no augmentation)
and, for every caption, the hidden states before and after the last layer of a transformers encoder.

`train --kind clip` trains the projections and heads of an open_clip model; `--model` is its configuration. The features of
its towers are computed from the cache, and `check` compares them with those of the full model. `train --kind camera` trains
`region-bert-camera` on the hidden states and on the cells of the feature map, averaged to a square of `--cells`, as regions
with boxes; `--model` is then the folder of the text encoder. With `--kind clip`, `--rerankers maxsim` also reports recall with
each query's first 32 candidates ordered by the re-ranker, and by the mean of its score and that of the vectors.

Recall is that of the last epoch. If the cache was made with --report-data, the validation data choose the epoch, and recall is
that of the data to report on.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from frozen import (
    REPORTED,
    BestWeights,
    CachedEncoder,
    Steps,
    add_training_options,
    append_record,
    parse_settings,
    plain,
    save_cache,
    with_settings,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import coder_plugin
from coder_plugin.data.from_config import make_source
from coder_plugin.evaluation import recall_from_embeddings, rerank
from coder_plugin.evaluation.rerank import MeanScore, Products
from coder_plugin.heads.rerankers import make_reranker, required_keys
from coder_plugin.masked import mean
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.options import resolve_config


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.command == "cache":
        cache(options)
        return
    data = torch.load(options.cache, mmap=True, weights_only=True)
    if options.command == "check":
        check(data, options)
        return
    for text, lr, seed in itertools.product(options.losses, options.lr, options.seeds):
        begun = time.perf_counter()
        results, runner, values = train(text, lr, seed, data, options)
        figures = results[options.epochs]
        record = {"kind": options.kind, "objective": text, "set": options.set, "lr": lr, "seed": seed, "results": results,
                  "losses": values}  # fmt: skip
        for name in REPORTED:
            if name in data:
                record[name] = evaluate(runner, data[name], ranks=True)
        figures = record.get("report", figures)
        above = f", without the context score {figures['cosine']:.1f}" if "cosine" in figures else ""
        print(f"{text} (lr {lr:g}, seed {seed}): R@sum {figures['rsum']:.1f}{above}, {time.perf_counter() - begun:.0f} s; "
              + ", ".join(f"{k} {a:.3f} -> {b:.3f}" for k, (a, b) in values.items()), flush=True)  # fmt: skip
        if options.rerankers:
            record["reranked"] = rerank_by(runner, data.get("report", data["val"]), options.rerankers)
            for name, figures in record["reranked"].items():
                print(f"    {name}: R@sum {figures['rsum']:.1f}, R@1 {figures['i2t_r1']:.1f} and {figures['t2i_r1']:.1f}")
        append_record(options.json, record)


@torch.no_grad()
def cache(options: argparse.Namespace) -> None:
    """Write the features of all splits, computed in bfloat16 and stored as float16.

    ``grids`` [N, L, C], hidden states ``before`` and ``after`` the last layer [T, W, E], token ``ids`` [T, W], and
    ``image_of_caption`` [T].
    """
    model, source_of = open_model(options)
    model.visual.trunk.to(memory_format=torch.channels_last)
    tokenize, transform = build.make_tokenizer(source_of.config.model, model), build.make_transform(model)
    encoder, splits = model.text.transformer, {}
    for split in ("train", "val", *(name for name in REPORTED if getattr(options, f"{name}_data") is not None)):
        grids: list[Tensor] = []
        captions: list[str] = []
        image_of: list[int] = []
        batch: list[Tensor] = []
        for number, (_, item) in enumerate(source_of(split).items()):
            batch.append(transform(item.load()))
            captions += item.captions
            image_of += [number] * len(item.captions)
            if len(batch) == 64:
                grids.append(grid(model, torch.stack(batch)))
                batch = []
        if batch:
            grids.append(grid(model, torch.stack(batch)))
        ids = tokenize(captions)
        before, after = [], []
        for rows in ids.split(256):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                states = encoder(input_ids=rows, attention_mask=mask_of(rows).long(), output_hidden_states=True).hidden_states
            before.append(states[-2].half())
            after.append(states[-1].half())
        splits[split] = {"grids": torch.cat(grids), "ids": ids, "before": torch.cat(before), "after": torch.cat(after),
                         "image_of_caption": torch.tensor(image_of)}  # fmt: skip
        print(f"{split}: {len(splits[split]['grids'])} images, {len(ids)} captions", flush=True)
    save_cache(splits, options.cache)


def open_model(options: argparse.Namespace) -> Any:
    """The pretrained model, and a function from a split to its data; the function has the configuration as ``config``."""
    config = resolve_config(
        dict(
            model=options.model,
            pretrained_image_path=options.image_weights,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            train_data=options.train_data,
            val_data=options.val_data,
        )
    )

    def source_of(split: str) -> Any:
        if split in REPORTED:
            return make_source(replace(config.data, val=getattr(options, f"{split}_data")), split="val")
        return make_source(config.data, split=split)

    source_of.config = config  # type: ignore[attr-defined]
    return build.make_model(config.model, Objective.parse("clip"), torch.device("cpu")).eval(), source_of


def grid(model: Any, images: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.visual.trunk.forward_features(images.to(memory_format=torch.channels_last))
    return features.flatten(2).transpose(1, 2).half()


def mask_of(ids: Tensor) -> Tensor:
    return ids != 0  # BERT pads with 0


class Camera:
    """``region-bert-camera`` on the cells of feature maps and on hidden states."""

    def __init__(self, objective: Objective, options: argparse.Namespace, channels: int) -> None:
        sizes = {"embed_dim": options.embed_dim, "heads": 16, "context_length": 24, "region_dim": channels}
        self.model = coder_plugin.create_model("region-bert-camera", loss=objective, text=options.model, **sizes)
        self.model.text.transformer = CachedEncoder(self.model.text.transformer.config.hidden_size)
        self.cells = options.cells
        side = torch.arange(options.cells) / options.cells
        top, left = torch.meshgrid(side, side, indexing="ij")
        corner = torch.stack([left, top], -1).flatten(0, 1)
        self.boxes = torch.cat([corner, corner + 1 / options.cells], -1)

    def image(self, grids: Tensor) -> dict[str, Tensor]:
        side = math.isqrt(grids.shape[1])
        square = grids.float().transpose(1, 2).unflatten(2, (side, side))
        cells = F.adaptive_avg_pool2d(square, self.cells).flatten(2).transpose(1, 2)
        return {"features": cells, "mask": torch.ones(cells.shape[:2], dtype=torch.bool),
                "boxes": self.boxes.expand(len(cells), -1, -1)}  # fmt: skip

    def __call__(self, split: dict[str, Tensor], captions: Tensor) -> dict[str, Tensor]:
        images = split["image_of_caption"][captions]
        self.model.text.transformer.set_states(split["after"][captions])
        return self.model(self.image(split["grids"][images]), split["ids"][captions], image_id=images)

    def embed_images(self, split: dict[str, Tensor], rows: slice) -> Tensor:
        return self.model.embed_image(self.image(split["grids"][rows]))

    def embed_texts(self, split: dict[str, Tensor], rows: slice) -> Tensor:
        self.model.text.transformer.set_states(split["after"][rows])
        return self.model.embed_text(split["ids"][rows])


class Clip:
    """An open_clip model with timm and transformers towers. The cache replaces everything before the projections."""

    def __init__(self, objective: Objective, options: argparse.Namespace, _: int) -> None:
        keys = {key for name in options.rerankers for key in required_keys(name)}
        self.model = coder_plugin.create_model(options.model, loss=objective, return_intermediates=keys)
        self.model.visual.trunk.requires_grad_(False)
        self.model.text.transformer.requires_grad_(False)

    def describe_image(self, grids: Tensor) -> dict[str, Tensor]:
        project, cells = self.model.visual.head, grids.float()
        joint, pooled = project(cells), project(cells.mean(1))
        return {"image_features": F.normalize(pooled.float(), dim=-1), "image_locals": joint, "image_contexts": joint,
                "image_context_mask": torch.ones(cells.shape[:2], dtype=torch.bool)}  # fmt: skip

    def describe_text(self, ids: Tensor, before: Tensor, after: Tensor) -> dict[str, Tensor]:
        project, mask = self.model.text.proj, mask_of(ids)
        pooled = project(mean(after, mask))
        return {"text_features": F.normalize(pooled.float(), dim=-1), "text_context_mask": mask,
                "text_locals": project(before.float()), "text_contexts": project(after.float())}  # fmt: skip

    def __call__(self, split: dict[str, Tensor], captions: Tensor) -> dict[str, Tensor]:
        images, ids = split["image_of_caption"][captions], split["ids"][captions]
        features = {**self.describe_image(split["grids"][images]),
                    **self.describe_text(ids, split["before"][captions], split["after"][captions])}  # fmt: skip
        outputs = {"logit_scale": self.model.logit_scale.exp(), "image_features": features["image_features"],
                   "text_features": features["text_features"]}  # fmt: skip
        return {**outputs, **self.model.coder({**features, "text": ids, "image_id": images})}

    def embed_images(self, split: dict[str, Tensor], rows: slice) -> Tensor:
        return self.model.coder.embed("image", self.describe_image(split["grids"][rows]))

    def embed_texts(self, split: dict[str, Tensor], rows: slice) -> Tensor:
        features = self.describe_text(split["ids"][rows], split["before"][rows], split["after"][rows])
        return self.model.coder.embed("text", features)


KINDS = {"camera": Camera, "clip": Clip}


def train(
    text: str, lr: float, seed: int, data: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[int, dict[str, Any]], Any, dict[str, tuple[float, float]]]:
    """Validation recall after each epoch, the :class:`Camera` or :class:`Clip`, and values of the first and the last epoch.

    The values are the mean of each loss, and the heads' figures at the epoch's end. The model is that of the best epoch if
    there are data to report on, else of the last.
    """
    torch.manual_seed(seed)
    objective = with_settings(Objective.parse(text), parse_settings(options.set))
    split, size = data["train"], options.batch_size
    runner = KINDS[options.kind](objective, options, split["grids"].shape[2])
    model = runner.model.train()
    loss = coder_plugin.create_loss(objective, model=model)
    image_of = split["image_of_caption"]
    images = len(split["grids"])
    first, number = torch.searchsorted(image_of, torch.arange(images)), torch.bincount(image_of)
    steps = images // size
    generator = torch.Generator().manual_seed(seed)
    taken = Steps(model, lr, options.wd, steps * options.epochs, options.clip)
    means: dict[str, list[float]] = {}
    results: dict[int, dict[str, Any]] = {}
    best = BestWeights(model)
    for epoch in range(options.epochs):
        order = torch.randperm(images, generator=generator)
        order = first[order] + (torch.rand(images, generator=generator) * number[order]).long()  # one caption per image
        for step in range(steps):
            # on a CPU the fused attention's backward takes a third of the step
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16), sdpa_kernel(SDPBackend.MATH):
                losses = loss(**runner(split, order[step * size : (step + 1) * size]))
            taken.step(sum(losses.values()))
            for name, value in losses.items():
                means.setdefault(name, [0.0] * options.epochs)[epoch] += value.item() / steps
        for name, figure in model.coder.health().items():
            means.setdefault(name, [0.0] * options.epochs)[epoch] = figure
        results[epoch + 1] = evaluate(runner, data["val"])
        best.keep(results[epoch + 1]["rsum"])
    if any(name in data for name in REPORTED):
        best.load()
    return results, runner, {name: (values[0], values[-1]) for name, values in means.items()}


@torch.no_grad()
def encode(runner: Any, split: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Vectors of a split's images and captions."""
    images, texts = (
        torch.cat([embed(split, slice(start, start + 500)) for start in range(0, count, 500)])
        for embed, count in ((runner.embed_images, len(split["grids"])), (runner.embed_texts, len(split["ids"])))
    )
    return images, texts


@torch.no_grad()
def evaluate(runner: Any, split: dict[str, Tensor], ranks: bool = False) -> dict[str, Any]:
    """Recall, and with a context score also ``cosine``, R@sum of S_b alone. With ``ranks`` the ranks of every image and caption
    too, as lists."""
    model = runner.model.eval()
    figures = plain(recall_from_embeddings(*encode(runner, split), split["image_of_caption"]), ranks)
    if "contexts" in model.coder.heads:
        with model.coder.heads["contexts"].weighing(0.0):
            figures["cosine"] = recall_from_embeddings(*encode(runner, split), split["image_of_caption"])["rsum"]
    model.train()
    return figures


@torch.no_grad()
def rerank_by(runner: Any, split: dict[str, Tensor], names: list[str]) -> dict[str, dict[str, float]]:
    """Recall of shortlists of 32, made by the full score: as they are, by each re-ranker, and by the mean with the score."""
    runner.model.eval()
    images, texts = encode(runner, split)
    products, results = Products(images, texts), {}
    for name in names:
        reranker = make_reranker(name, runner.model.coder.backbone)
        score = reranker.scorer(
            reranker.image_item(runner.describe_image(split["grids"])),
            reranker.text_item(runner.describe_text(split["ids"], split["before"], split["after"])),
        )
        for label, scorer in ((name, score), (f"mean with {name}", MeanScore([products, score]))):
            figures = rerank(images, texts, split["image_of_caption"], scorer, k=32)
            results[label] = plain(figures)
    return results


@torch.no_grad()
def check(data: dict[str, Any], options: argparse.Namespace) -> None:
    """Compare the vectors that `--kind clip` computes from the cache with the float32 forward of the model, on eight images."""
    model, source_of = open_model(options)
    torch.manual_seed(0)
    runner = Clip(Objective.parse("clip + selfalign"), options, 0)
    runner.model.visual.trunk.load_state_dict(model.visual.trunk.state_dict())
    runner.model.text.transformer.load_state_dict(model.text.transformer.state_dict())
    full_model, transform = runner.model.eval(), build.make_transform(model)
    items = [item for _, (_, item) in zip(range(8), source_of("val").items(), strict=False)]
    split = data["val"]
    captions = torch.searchsorted(split["image_of_caption"], torch.arange(8))
    texts = [runner.embed_texts(split, slice(int(n), int(n) + 1)) for n in captions]
    cached = runner.embed_images(split, slice(0, 8)), torch.cat(texts)
    images = torch.stack([transform(item.load()) for item in items])
    computed = full_model.embed_image(images), full_model.embed_text(split["ids"][captions])
    for name, a, b in zip(("images", "texts"), cached, computed, strict=True):
        print(f"{name}: smallest cosine {float(F.cosine_similarity(a, b).min()):.5f}, {a.shape[1]} dimensions")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    summaries = {
        "cache": "encode the data once",
        "check": "compare cached features with the full model",
        "train": "train losses on the cached features",
    }
    parsers = {name: commands.add_parser(name, help=summary) for name, summary in summaries.items()}
    for name, command in parsers.items():
        command.add_argument("cache", help="file of cached features")
        command.add_argument("--model", required=True, help="open_clip configuration; with --kind camera a text encoder")
        command.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
        if name != "train":
            command.add_argument("--image-weights", required=True, help="safetensors file of the image tower")
            command.add_argument("--train-data", required=True, help="training data, as for coder-plugin train")
            command.add_argument("--val-data", required=True, help="validation data")
            command.add_argument("--report-data", help="data to evaluate the epoch on that the validation data choose")
            command.add_argument("--test-data", help="further data to evaluate it on")
    parsers["check"].set_defaults(rerankers=[])
    train_command = parsers["train"]
    add_training_options(train_command, epochs=10, batch_size=128)
    train_command.add_argument("--kind", choices=tuple(KINDS), required=True, help="which model")
    train_command.add_argument("--embed-dim", type=int, default=512, help="dimensions of the joint space of camera [512]")
    train_command.add_argument("--cells", type=int, default=4, help="camera: cells along each side of the square [4]")
    train_command.add_argument("--clip", type=float, default=2.0, help="clip gradients to this norm [2]")
    train_command.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    train_command.add_argument("--rerankers", nargs="*", default=[], metavar="NAME", help="clip: also re-rank by these")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
