#!/usr/bin/env python3
"""Train recipes on the cached features of frozen towers: an ablation table in minutes on a processor.

    python scripts/experiments/flickr8k_towers.py towers --context-length 24
    python scripts/experiments/frozen_towers.py cache cache.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --train-data 'train-{000000..000005}.tar' --val-data val-000000.tar
    python scripts/experiments/frozen_towers.py train cache.pt --recipes dcl coder --concepts concepts.safetensors

`cache` encodes every image (evaluation transform: no augmentation) and every caption once, by a timm image tower and a
transformers text tower of open_clip. `train` makes the same model, puts the cached features where trunk and transformer
were, and trains what is left (projections and heads) with the objective's own terms, heads, `post_step` and `embed_*`. Of the
momentum copy only projections and heads are copied either: frozen towers give it the same features.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import coder_plugin
from coder_plugin.backbones import clip
from coder_plugin.backbones.tokens import TokenTaps
from coder_plugin.config import TrainConfig
from coder_plugin.data.from_config import make_source
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.objective import Objective, parse_value
from coder_plugin.pretrained import build
from coder_plugin.resolver import INTERMEDIATE_KEYS, resolve
from coder_plugin.training.step import gradient_shares


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    if options.command == "cache":
        cache(options)
        return
    data = torch.load(options.cache, mmap=True, weights_only=True)
    start = torch.load(options.init, weights_only=True) if options.init else None
    for text in options.recipes:
        for seed in options.seeds:
            begun = time.perf_counter()
            results, model, losses = train(text, seed, data, options, start)
            shown = {epoch: round(result["rsum"], 1) for epoch, result in results.items()}
            print(f"{text} (seed {seed}): R@sum by epoch {shown}; {time.perf_counter() - begun:.0f} s", flush=True)
            if "concepts" in model.coder.heads:
                with model.coder.heads["concepts"].weighing(1.0):
                    alone = evaluate(model, data["val"])["rsum"]
                with model.coder.heads["concepts"].weighing(0.0):
                    print(f"    instance level alone {alone:.1f}, concept level alone "
                          f"{evaluate(model, data['val'])['rsum']:.1f}")  # fmt: skip
            print("    losses, mean of the first and the last epoch: "
                  + ", ".join(f"{k} {a:.3f} -> {b:.3f}" for k, (a, b) in losses.items()), flush=True)  # fmt: skip
            if options.save:
                torch.save({k: v for k, v in model.state_dict().items() if not k.startswith("coder.")}, options.save)
            if options.json:
                with Path(options.json).open("a") as file:
                    file.write(json.dumps({"objective": text, "seed": seed, "results": results, "losses": losses}) + "\n")


@torch.no_grad()
def cache(options: argparse.Namespace) -> None:
    """Images [N, C] float32 and tokens [T, L, C] float16 of both splits, with token ids and each caption's image."""
    config = TrainConfig(
        model=options.model,
        pretrained_image_path=options.image_weights,
        image_mean=options.image_mean,
        image_std=options.image_std,
        train_data=options.train_data,
        val_data=options.val_data,
    ).resolved()
    model = build.make_model(config, Objective.parse("dcl"), torch.device("cpu")).eval()
    tokenize, transform = build.make_tokenizer(config, model), build.make_transforms(model, config)[1]
    pad, splits = model.text.config.pad_token_id, {}
    for split in ("train", "val"):
        images: list[Tensor] = []
        captions: list[str] = []
        owners: list[int] = []
        waiting: list[Tensor] = []
        source = make_source(config, split=split)
        for number, (_, item) in enumerate(source.items()):
            waiting.append(transform(item.load()))
            captions += item.captions
            owners += [number] * len(item.captions)
            if len(waiting) == 64:
                images.append(model.visual.trunk(torch.stack(waiting)))
                waiting = []
        if waiting:
            images.append(model.visual.trunk(torch.stack(waiting)))
        ids, tokens = tokenize(captions), []
        for rows in ids.split(256):
            output = model.text.transformer(input_ids=rows, attention_mask=(rows != pad).long())
            tokens.append(output.last_hidden_state.half())
        splits[split] = {"images": torch.cat(images), "ids": ids, "tokens": torch.cat(tokens), "own": torch.tensor(owners)}
        print(f"{split}: {len(splits[split]['images'])} images, {len(ids)} captions", flush=True)
    torch.save(splits, options.cache)


class Given(nn.Module):
    """In the place of an image trunk: its input is the cached feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Tokens(nn.Module):
    """In the place of a text transformer: gives back what :meth:`hold` was handed."""

    held: list[Tensor] = [torch.empty(0)]  # shared with the momentum copy

    @classmethod
    def hold(cls, tokens: Tensor) -> None:
        cls.held[0] = tokens.float()

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.held[0])


def make_model(objective: Objective, seed: int, path: str, start: dict[str, Tensor] | None) -> Any:
    torch.manual_seed(seed)
    model = coder_plugin.create_model(path, loss=objective)
    model.visual.trunk, model.text.transformer = Given(), Tokens()
    if start is not None:
        model.load_state_dict({**model.state_dict(), **start})
    reads = resolve(objective, clip.available_keys(model)).reads
    model._coder_taps = (TokenTaps(model, reads & INTERMEDIATE_KEYS),)  # on what now stands there
    model.coder.attach(model)
    return model.train()


def train(
    text: str, seed: int, data: dict[str, Any], options: argparse.Namespace, start: dict[str, Tensor] | None
) -> tuple[dict[int, dict[str, float]], Any, dict[str, tuple[float, float]]]:
    settings: dict[str, Any] = dict(setting.split("=", 1) for setting in options.set)
    objective = Objective.parse(text)
    heads = coder_plugin.model.required_heads(objective)
    if "concepts" in heads:
        settings.setdefault("concepts.vocabulary", options.concepts)
    if "prototypes" in heads:
        settings.setdefault("prototypes.clusters", len(data["train"]["own"]) // 15)
    settings = {key: parse_value(str(value)) for key, value in settings.items() if key.split(".")[0] in
                {*heads, *(term.name for term in objective.terms)}}  # fmt: skip
    objective = objective.with_options(settings)
    model = make_model(objective, seed, options.model, start)
    loss = coder_plugin.create_loss(objective, model=model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.wd},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.lr,
    )
    split, size = data["train"], options.batch_size
    images, own = len(split["images"]), split["own"]
    first = torch.searchsorted(own, torch.arange(images))
    number = torch.bincount(own)
    steps = (images if options.captions == "draw" else len(own)) // size
    total, generator = steps * options.epochs, torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, total))
    results = {0: evaluate(model, data["val"])}
    means: dict[str, list[list[float]]] = {}
    for epoch in range(options.epochs):
        order = torch.randperm(len(own) if options.captions == "all" else images, generator=generator)
        if options.captions == "draw":
            order = first[order] + (torch.rand(images, generator=generator) * number[order]).long()
        for step in range(steps):
            captions = order[step * size : (step + 1) * size]
            Tokens.hold(split["tokens"][captions])
            outputs = model(split["images"][own[captions]], split["ids"][captions], image_id=own[captions])
            losses = loss(**outputs)
            if options.shares and not step:
                leaves = {key: value for key, value in outputs.items() if value.requires_grad and value.ndim}
                print(f"    epoch {epoch}: shares {gradient_shares(losses, leaves)}")
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            schedule.step()
            model.coder.post_step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            for name, value in losses.items():
                means.setdefault(name, [[] for _ in range(options.epochs)])[epoch].append(value.item())
        results[epoch + 1] = evaluate(model, data["val"])
    mean = {name: [sum(epoch) / len(epoch) for epoch in epochs] for name, epochs in means.items()}
    # a term that is silent at first counts from its second epoch
    kept = {name: (next((v for v in values if v), 0.0), values[-1]) for name, values in mean.items()}
    return results, model, kept


def rate(step: int, total: int) -> float:
    """Five per cent of linear warm-up, then cosine to zero."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


@torch.no_grad()
def evaluate(model: Any, split: dict[str, Tensor]) -> dict[str, float]:
    model.eval()
    images, texts = model.embed_image(split["images"]), []
    for ids, tokens in zip(split["ids"].split(500), split["tokens"].split(500), strict=True):
        Tokens.hold(tokens)
        texts.append(model.embed_text(ids))
    model.train()
    result = recall_from_embeddings(images, torch.cat(texts), split["own"])
    return {key: value for key, value in result.items() if not isinstance(value, Tensor)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("cache", help="encode the data once")
    second = commands.add_parser("train", help="train recipes on what was encoded")
    for command in (first, second):
        command.add_argument("cache", help="the file of cached features")
        command.add_argument("--model", required=True, help="open_clip model configuration with timm and hf towers")
        command.add_argument("--threads", type=int, default=1)
    first.add_argument("--image-weights", required=True)
    first.add_argument("--image-mean", type=float, nargs=3, default=[0.5] * 3)
    first.add_argument("--image-std", type=float, nargs=3, default=[0.5] * 3)
    first.add_argument("--train-data", required=True)
    first.add_argument("--val-data", required=True)
    second.add_argument("--recipes", nargs="+", required=True)
    second.add_argument("--set", nargs="*", default=[], metavar="OWNER.OPTION=VALUE", help="for recipes that have the owner")
    second.add_argument("--concepts", help="vocabulary file")
    second.add_argument("--captions", choices=("draw", "all"), default="all")
    second.add_argument("--epochs", type=int, default=5)
    second.add_argument("--batch-size", type=int, default=128)
    second.add_argument("--lr", type=float, default=1e-3)
    second.add_argument("--wd", type=float, default=0.05)
    second.add_argument("--seeds", type=int, nargs="+", default=[0])
    second.add_argument("--shares", action="store_true", help="print each term's share of the gradient once an epoch")
    second.add_argument("--init", help="weights to start from, of an earlier --save")
    second.add_argument("--save", help="keep the trained towers' projections here")
    second.add_argument("--json", help="append results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
