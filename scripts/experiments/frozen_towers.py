#!/usr/bin/env python3
"""Train losses on cached features of frozen towers: a table of ablations in minutes on a CPU.

    python scripts/experiments/flickr8k_towers.py towers --context-length 24
    python scripts/experiments/frozen_towers.py cache cache.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --train-data 'train-{000000..000005}.tar' --val-data val-000000.tar
    python scripts/experiments/frozen_towers.py train cache.pt --model towers/lite0-minilm.json \\
        --losses dcl coder --concepts concepts.safetensors

flickr8k.py runs both for the tables of docs/flickr8k.md. `cache` encodes every image (evaluation transform: no augmentation)
and every caption once, with an open_clip model that has a timm image tower and a transformers text tower. `train` builds the
same model, puts the cached features in the place of the two towers, and trains the projections and heads. Losses, heads,
`post_step` and `embed_*` are those of the package. The momentum copy consists of projections and heads too: frozen towers would
give it the same features.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import resource
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from frozen import (
    REPORTED,
    BestWeights,
    Steps,
    add_training_options,
    append_record,
    parse_settings,
    plain,
    save_cache,
    with_settings,
)
from torch import Tensor, nn

import coder_plugin
from coder_plugin.backbones import clip
from coder_plugin.backbones.feature_capture import FeatureCapture
from coder_plugin.data.from_config import make_source
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.files import atomic_write
from coder_plugin.heads.base import TrainingFacts
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.resolver import INTERMEDIATE_KEYS, resolve
from coder_plugin.training.prepare import with_derived_options
from coder_plugin.training.step import gradient_shares


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.command == "cache":
        cache(options)
        return
    data = torch.load(options.cache, mmap=True, weights_only=True)
    initial = torch.load(options.init, weights_only=True) if options.init else None
    if options.hold_out:
        test = {"test": data["test"]} if "test" in data else {}
        data = {**hold_out(data, options.hold_out, options.hold_out_seed), "report": data["val"], **test}
    CachedTransformer.take(*data.values())
    for text, lr, seed in itertools.product(options.losses, options.lr, options.seeds):
        begun = time.perf_counter()
        results, model, losses = train(text, lr, seed, data, options, initial)
        seconds = time.perf_counter() - begun
        print(f"{text} (lr {lr:g}, seed {seed}); {seconds:.0f} s")
        for name in dict.fromkeys(name for result in results.values() for name in result):
            if name.endswith("rsum") or "/" in name:
                by_epoch = {epoch: round(result[name], 3) for epoch, result in results.items() if name in result}
                print(f"    {name} by epoch: {by_epoch}")
        print("    mean loss in the first and in the last epoch: "
              + ", ".join(f"{k} {a:.3f} -> {b:.3f}" for k, (a, b) in losses.items()), flush=True)  # fmt: skip
        if options.save:
            torch.save({k: v for k, v in model.state_dict().items() if not k.startswith("coder.")}, options.save)
        if options.json:
            record = {"objective": text, "set": options.set, "lr": lr, "seed": seed, "hold_out": options.hold_out,
                      "name": options.name, "results": results, "losses": losses}  # fmt: skip
            if options.hold_out:
                reported = [name for name in REPORTED if name in data]
                record |= {name: evaluate_levels(model, data[name], options.betas, ranks=True) for name in reported}
            append_record(options.json, record)
        if options.compare:
            write_for_compare(options.compare, results, evaluate_levels(model, data["report"], [], ranks=True), data, seconds)


def hold_out(data: dict[str, Any], images: int, seed: int | None = None) -> dict[str, Any]:
    """The training split alone: ``images`` images of it, drawn with a seed, or without one the last ones, take the place of the
    validation split, to choose settings on."""
    train = data["train"]
    count, image_of = len(train["images"]), train["image_of_caption"]
    order = torch.arange(count) if seed is None else torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(count, dtype=torch.bool)
    held[order[count - images :]] = True
    split = {}
    for name, rows in (("train", ~held), ("val", held)):
        texts = rows[image_of]
        numbers = rows.cumsum(0) - 1
        split[name] = {"images": train["images"][rows], "ids": train["ids"][texts], "tokens": train["tokens"][texts],
                       "image_of_caption": numbers[image_of[texts]]}  # fmt: skip
    return split


def write_for_compare(
    path: str, results: dict[int, dict[str, float]], val: dict[str, Any], data: dict[str, Any], seconds: float
) -> None:
    """What ``coder-plugin compare`` reads of a command of one's own."""
    epochs = [results[epoch]["rsum"] for epoch in sorted(results) if epoch]
    record = {
        "held_aside": epochs,
        "before": results[0]["rsum"],
        "seconds": [round(seconds * (epoch + 1) / len(epochs), 1) for epoch in range(len(epochs))],
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "val": {"i2t_ranks": val["i2t_ranks"], "t2i_ranks": val["t2i_ranks"],
                "image_of_text": data["report"]["image_of_caption"].tolist()},
    }  # fmt: skip
    with atomic_write(path, "w") as file:
        file.write(json.dumps(record) + "\n")


@torch.no_grad()
def cache(options: argparse.Namespace) -> None:
    """Write image features [N, C] float32 and token features [T, L, C] float16 of all splits, token ids, the image of each
    caption [T], and the images' keys."""
    config = resolve_config(
        dict(
            model=options.model,
            pretrained_image_path=options.image_weights,
            image_mean=options.image_mean,
            image_std=options.image_std,
            train_data=options.train_data,
            val_data=options.val_data,
        )
    )
    data = {"train": (config.data, "train"), "val": (config.data, "val")}
    if options.test_data is not None:
        data["test"] = replace(config.data, val=options.test_data), "val"
    model = build.make_model(config.model, Objective.parse("dcl"), torch.device("cpu")).eval()
    tokenize, transform = build.make_tokenizer(config.model, model), build.make_transform(model)
    pad, splits = model.text.config.pad_token_id, {}
    for split, (locations, part) in data.items():
        images: list[Tensor] = []
        captions: list[str] = []
        keys: list[str] = []
        image_of: list[int] = []
        batch: list[Tensor] = []
        source = make_source(locations, split=part)
        for number, (_, item) in enumerate(source.items()):
            batch.append(transform(item.load()))
            captions += item.captions
            keys.append(item.key)
            image_of += [number] * len(item.captions)
            if len(batch) == 64:
                images.append(model.visual.trunk(torch.stack(batch)))
                batch = []
        if batch:
            images.append(model.visual.trunk(torch.stack(batch)))
        ids, tokens = tokenize(captions), []
        for rows in ids.split(256):
            output = model.text.transformer(input_ids=rows, attention_mask=(rows != pad).long())
            tokens.append(output.last_hidden_state.half())
        splits[split] = {"images": torch.cat(images), "ids": ids, "tokens": torch.cat(tokens),
                         "image_of_caption": torch.tensor(image_of), "keys": keys}  # fmt: skip
        print(f"{split}: {len(splits[split]['images'])} images, {len(ids)} captions", flush=True)
    save_cache(splits, options.cache)


class CachedTrunk(nn.Module):
    """Replaces the image trunk. Its input is the cached feature, which it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class CachedTransformer(nn.Module):
    """Replaces the text transformer: looks up the token features of captions in the splits of :meth:`take`, by their ids."""

    tables: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of each split: sorted hashes, their rows, ids, features

    @classmethod
    def take(cls, *splits: dict[str, Tensor]) -> None:
        """The captions of these splits, and no others, can be encoded from now on."""
        cls.tables.clear()  # shared with the momentum copy
        for split in splits:
            hashes, rows = _hash(split["ids"]).sort()
            cls.tables.append((hashes, rows, split["ids"], split["tokens"]))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        features = torch.zeros(0)
        missing = torch.ones(len(input_ids), dtype=torch.bool)
        for hashes, rows, ids, tokens in self.tables:
            found = rows[torch.searchsorted(hashes, _hash(input_ids)).clamp(max=len(rows) - 1)]
            hit = missing & (ids[found] == input_ids).all(1)
            if hit.any():
                if not features.numel():
                    features = torch.zeros(len(input_ids), *tokens.shape[1:])
                features[hit] = tokens[found[hit]].float()
                missing &= ~hit
        if missing.any():
            raise ValueError(f"{int(missing.sum())} captions of a batch are in no cache")
        return SimpleNamespace(last_hidden_state=features)


def _hash(ids: Tensor) -> Tensor:
    """Token ids [T, L] -> one integer a caption, [T]."""
    factors = torch.randint(1 << 62, (ids.shape[1],), generator=torch.Generator().manual_seed(0))
    return (ids * factors).sum(1)  # overflow wraps around


def make_model(objective: Objective, seed: int, path: str, initial: dict[str, Tensor] | None) -> Any:
    torch.manual_seed(seed)
    model = coder_plugin.create_model(path, loss=objective)
    model.visual.trunk, model.text.transformer = CachedTrunk(), CachedTransformer()
    if initial is not None:
        model.load_state_dict({**model.state_dict(), **initial})
    reads = resolve(objective, clip.available_keys(model)).reads
    model._coder_capture = FeatureCapture(model, reads & INTERMEDIATE_KEYS)  # on the replaced towers
    model.coder.attach(model)
    return model.train()


def train(
    text: str, lr: float, seed: int, data: dict[str, Any], options: argparse.Namespace, initial: dict[str, Tensor] | None
) -> tuple[dict[int, dict[str, float]], Any, dict[str, tuple[float, float]]]:
    objective = with_settings(Objective.parse(text), parse_settings(options.set))
    facts = TrainingFacts(
        loss=text, samples_per_epoch=len(data["train"]["images" if options.captions == "draw" else "ids"]),
        captions=options.captions, pairs_per_step=options.batch_size, epochs=options.epochs, concepts=options.concepts,
    )  # fmt: skip
    objective = with_derived_options(objective, facts)
    model = make_model(objective, seed, options.model, initial)
    loss = coder_plugin.create_loss(objective, model=model)
    split, size = data["train"], options.batch_size
    images, image_of = len(split["images"]), split["image_of_caption"]
    first = torch.searchsorted(image_of, torch.arange(images))
    number = torch.bincount(image_of)
    steps = (images if options.captions == "draw" else len(image_of)) // size
    total, generator = steps * options.epochs, torch.Generator().manual_seed(seed)
    taken = Steps(model, lr, options.wd, total)
    results = {0: evaluate_levels(model, data["val"], options.betas)}
    prototypes = model.coder.heads["prototypes"] if "prototypes" in model.coder.heads else None
    labels, before = torch.full((len(image_of),), -1), torch.full((len(image_of),), -1)
    means: dict[str, list[list[float]]] = {}
    best = BestWeights(model)
    for epoch in range(options.epochs):
        order = torch.randperm(len(image_of) if options.captions == "all" else images, generator=generator)
        if options.captions == "draw":
            order = first[order] + (torch.rand(images, generator=generator) * number[order]).long()
        for step in range(steps):
            captions = order[step * size : (step + 1) * size]
            rows = image_of[captions]
            outputs = model(split["images"][rows], split["ids"][captions], image_id=rows)
            losses = loss(**outputs)
            if options.shares and not step:
                leaves = {key: value for key, value in outputs.items() if value.requires_grad and value.ndim}
                print(f"    epoch {epoch}: shares of the gradient {gradient_shares(losses, leaves)}")
            if prototypes is not None and prototypes.centres.ready:
                pairs = outputs["image_features"] + outputs["text_features"]
                labels[captions] = prototypes.centres.assign(pairs)
            taken.step(sum(losses.values()))
            for name, value in losses.items():
                means.setdefault(name, [[] for _ in range(options.epochs)])[epoch].append(value.item())
        figures = model.coder.health() | label_figures(labels, before, image_of)
        results[epoch + 1] = evaluate_levels(model, data["val"], options.betas) | figures
        before = labels.clone()
        if options.hold_out:
            best.keep(results[epoch + 1]["rsum"])
    if options.hold_out:
        best.load()
    mean = {name: [sum(epoch) / len(epoch) for epoch in epochs] for name, epochs in means.items()}
    # a term that is zero in the first epoch is reported from its first epoch with a value
    first_and_last = {name: (next((v for v in values if v), 0.0), values[-1]) for name, values in mean.items()}
    return results, model, first_and_last


def label_figures(labels: Tensor, before: Tensor, image_of: Tensor) -> dict[str, float]:
    """How the labels of the training pairs [N] behave: ``labels/churn``, the share that changed since the epoch ``before``;
    ``labels/purity``, the mean over images of the share of its captions that have its most frequent label;
    ``labels/images``, the mean number of images that share a label."""
    figures = {}
    both = (labels >= 0) & (before >= 0)
    if both.any():
        figures["labels/churn"] = float((labels != before)[both].float().mean())
    if (labels >= 0).any():
        owned = labels[labels >= 0], image_of[labels >= 0]
        pairs, counts = torch.stack(owned).unique(dim=1, return_counts=True)
        largest = torch.zeros(int(image_of.max()) + 1, dtype=torch.int64).scatter_reduce_(0, pairs[1], counts, "amax")
        captions = torch.bincount(owned[1], minlength=len(largest))
        figures["labels/purity"] = float((largest / captions.clamp(min=1))[captions > 0].mean())
        figures["labels/images"] = pairs.shape[1] / len(owned[0].unique())
    return figures


@torch.no_grad()
def evaluate_levels(model: Any, split: dict[str, Tensor], betas: list[float], ranks: bool = False) -> dict[str, Any]:
    """Recall of the score, and R@sum of its instance level and its concept level alone, and with other weights beta. With
    ``ranks`` the ranks of every image and caption too, as lists."""
    model.eval()
    images, texts = model.embed_image(split["images"]), []
    for ids in split["ids"].split(500):
        texts.append(model.embed_text(ids))
    model.train()
    vectors = images, torch.cat(texts)
    result = recall_from_embeddings(*vectors, split["image_of_caption"])
    figures = plain(result, ranks)
    scoring = "concepts" in model.coder.heads and model.coder.heads["concepts"].score_weights()[1] > 0
    if scoring:  # the vectors are [sqrt(beta) v, sqrt(1 - beta) v_C]
        dim = model.coder.heads["concepts"].block_dim
        levels = slice(-dim), slice(-dim, None)
        instance, concept = ([F.normalize(v[:, columns], dim=1) for v in vectors] for columns in levels)
        for name, beta in (("instance", 1.0), ("concept", 0.0), *((f"beta {beta:g}", beta) for beta in betas)):
            both = [torch.cat([beta**0.5 * v, (1 - beta) ** 0.5 * c], 1) for v, c in zip(instance, concept, strict=True)]
            figures[f"{name} rsum"] = recall_from_embeddings(*both, split["image_of_caption"])["rsum"]
    return figures


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cache_command = commands.add_parser("cache", help="encode the data once")
    train_command = commands.add_parser("train", help="train losses on the cached features")
    for command in (cache_command, train_command):
        command.add_argument("cache", help="file of cached features")
        command.add_argument("--model", required=True, help="open_clip configuration with timm and transformers towers")
        command.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    cache_command.add_argument("--image-weights", required=True, help="safetensors file of the image tower")
    cache_command.add_argument("--image-mean", type=float, nargs=3, default=[0.5] * 3, help="normalisation: mean")
    cache_command.add_argument("--image-std", type=float, nargs=3, default=[0.5] * 3, help="normalisation: standard deviation")
    cache_command.add_argument("--train-data", help="training data, as for coder-plugin train [the built-in scenes]")
    cache_command.add_argument("--val-data", required=True, help="validation data")
    cache_command.add_argument("--test-data", help="data to report on besides the validation data")
    add_training_options(train_command, epochs=5, batch_size=128)
    train_command.add_argument("--concepts", help="concept vocabulary, by coder-plugin concepts")
    train_command.add_argument("--captions", choices=("draw", "all"), default="all",
                               help="one caption per image and epoch, or all [all]")
    train_command.add_argument("--betas", type=float, nargs="*", default=[], help="also evaluate other weights of the levels")
    train_command.add_argument("--hold-out", type=int, default=0, metavar="N",
                               help="choose settings: train without the last N training images and evaluate on these; with "
                               "--json the best epoch, which --save writes, is evaluated on the validation and test splits")
    train_command.add_argument("--hold-out-seed", type=int, metavar="N",
                               help="draw the images of --hold-out at random with this seed [the last ones]")
    train_command.add_argument("--compare", metavar="FILE", help="also write what coder-plugin compare reads; with --hold-out")
    train_command.add_argument("--name", default="", help="a name for the rows of --json")
    train_command.add_argument("--shares", action="store_true", help="print each term's share of the gradient, once per epoch")
    train_command.add_argument("--init", help="start from the weights of an earlier --save")
    train_command.add_argument("--save", help="write the trained projections to this file")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
