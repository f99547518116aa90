#!/usr/bin/env python3
"""Fine-tune a CLIP that was trained here first: what does recall gain, and what does zero-shot accuracy lose?

    python scripts/experiments/flickr8k_towers.py towers --context-length 24
    python scripts/experiments/fine_tuning.py classes classes
    python scripts/experiments/frozen_towers.py cache flickr.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --train-data 'train-{000000..000005}.tar' --val-data val-000000.tar
    python scripts/experiments/frozen_towers.py cache scenes.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --val-data classes/classes.csv
    python scripts/experiments/fine_tuning.py base flickr.pt scenes.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --save base
    coder-plugin mine base/export --data 'train-{000003..000005}.tar' --output negatives.tsv
    python scripts/experiments/fine_tuning.py tune flickr.pt scenes.pt --model towers/lite0-minilm.json \\
        --init base/weights.pt --negatives negatives.tsv --lr 1e-4 3e-4 1e-3 --seeds 0 1 2 \\
        --losses clip "clip + distill" "clip(hard_negatives=true)"

`base` trains with InfoNCE on the built-in scenes and on the first half of Flickr8k's training images, and writes an export.
`tune` goes on with the second half alone. It reports R@sum on the validation images, and the zero-shot accuracy of pictures of
one object among 48 classes, such as "a red circle", which only the scenes have taught. With ``--hold-out N`` it leaves the last
N training images out and reports recall on these: rates are chosen so. As in frozen_towers.py the towers are frozen and their
features cached; the projections, two layers each, are trained.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import open_clip
import torch
from frozen import make_optimizer, rate
from frozen_towers import CachedTransformer, evaluate_levels, make_model
from torch import Tensor

import coder_plugin
from coder_plugin.backbones import clip
from coder_plugin.data.scenes import COLOURS, SHAPES, draw, make_scene
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.options import resolve_config


def main() -> None:
    options = arguments()
    if options.command == "classes":
        write_classes(options.folder, options.per_class)
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    flickr, scenes = (torch.load(path, mmap=True, weights_only=True) for path in (options.flickr, options.scenes))
    CachedTransformer.take(flickr["train"], flickr["val"], scenes["train"], scenes["val"])
    half = len(flickr["train"]["images"]) // 2
    if options.command == "base":
        train_base(options, flickr, scenes, part(flickr["train"], 0, half))
        return
    second = part(flickr["train"], half, len(flickr["train"]["images"]))
    val = flickr["val"]
    if options.hold_out:
        kept = len(second["images"]) - options.hold_out
        second, val = part(second, 0, kept), part(second, kept, len(second["images"]))
    initial = torch.load(options.init, weights_only=True)
    negatives = read_negatives(options, flickr["train"]["keys"], half, len(second["images"])) if options.negatives else {}
    for text, lr, seed in itertools.product(options.losses, options.lr, options.seeds):
        begun = time.perf_counter()
        model = make_model(Objective.parse(text), seed, options.model, initial)
        figures = [figures_of(model, val, scenes["val"])]
        for _ in tune(model, text, [second], lr, seed, options, negatives):
            figures.append(figures_of(model, val, scenes["val"]))
        record = {"name": options.name, "objective": text, "lr": lr, "seed": seed, "hold_out": options.hold_out}
        took = time.perf_counter() - begun
        print(f"{text} (lr {lr:g}, seed {seed}): {figures[0]} -> {figures[-1]}; {took:.0f} s", flush=True)
        if options.json:
            with Path(options.json).open("a") as file:
                file.write(json.dumps(record | {"epochs": figures}) + "\n")


def write_classes(folder: Path, per_class: int) -> None:
    """Pictures of one object each, none of them a training scene, and ``classes.csv`` with the name of each one's class."""
    wanted = {(colour, shape): per_class for colour, shape in itertools.product(COLOURS, SHAPES)}
    rows = []
    for number in itertools.count():
        scene = make_scene("val", number)
        kind = scene.things[0].colour, scene.things[0].shape
        if len(scene.things) == 1 and wanted[kind]:
            wanted[kind] -= 1
            folder.mkdir(parents=True, exist_ok=True)
            draw(scene, 64).save(folder / f"{number:06d}.png")
            rows.append((f"{number:06d}.png", f"a {kind[0]} {kind[1]}"))
        if not any(wanted.values()):
            break
    with (folder / "classes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filepath", "title"), *rows])


def part(split: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """The images [first, last) of a split, with their captions."""
    image_of = split["image_of_caption"]
    texts = slice(int((image_of < first).sum()), int((image_of < last).sum()))
    return {"images": split["images"][first:last], "ids": split["ids"][texts], "image_of_caption": image_of[texts] - first}


def train_base(options: argparse.Namespace, flickr: dict[str, Any], scenes: dict[str, Any], first: dict[str, Tensor]) -> None:
    model = make_model(Objective.parse("clip"), 0, options.model, None)
    for epoch in tune(model, "clip", [first, scenes["train"]], options.lr[0], 0, options, {}):
        print(epoch, figures_of(model, flickr["val"], scenes["val"]), flush=True)
    options.save.mkdir(parents=True, exist_ok=True)
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith("coder.")}
    torch.save(weights, options.save / "weights.pt")
    half = (0.5, 0.5, 0.5)
    settings = {"pretrained_image_path": options.image_weights, "image_mean": half, "image_std": half}
    config = resolve_config({"model": options.model, **settings})
    whole = build.make_model(config.model, Objective.parse("clip"), torch.device("cpu"))
    whole.load_state_dict({**whole.state_dict(), **weights})
    export_model(whole, options.save / "export", tokenizer=build.make_tokenizer(config.model, whole))


Negatives = dict[int, tuple[Tensor, Tensor]]


def read_negatives(options: argparse.Namespace, keys: list[str], first: int, count: int) -> Negatives:
    """Of each of the ``count`` images from ``first`` on: token ids of its hard negatives [k, T], and the images whose captions
    they are [k]. Both are numbered from 0; captions of other images are left out."""
    tokenize = open_clip.get_tokenizer(clip.register_config(options.model))
    number = {key: index for index, key in enumerate(keys[first : first + count])}
    found: dict[int, list[tuple[str, int]]] = {}
    with open(options.negatives, newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if row["key"] in number and row["negative_key"] in number:
                found.setdefault(number[row["key"]], []).append((row["negative"], number[row["negative_key"]]))
    result = {}
    for image, rows in found.items():
        texts, owners = zip(*rows, strict=True)
        result[image] = tokenize(list(texts)), torch.tensor(owners)
    return result


def draw_negatives(
    negatives: Negatives, rows: Tensor, count: int, like: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """``count`` of the hard negatives of each image of a batch, as the model takes them."""
    texts = like[:, None].repeat(1, count, 1)  # where there are none, a text that the cache has
    owners = torch.full((len(rows), count), -2)
    for place, row in enumerate(rows.tolist()):
        if row in negatives:
            ids, owner = negatives[row]
            drawn = torch.randperm(len(ids), generator=generator)[:count]
            texts[place, : len(drawn)], owners[place, : len(drawn)] = ids[drawn], owner[drawn]
    return {"text_negatives": texts, "text_negative_ids": owners}


def tune(
    model: Any,
    text: str,
    splits: list[dict[str, Tensor]],
    lr: float,
    seed: int,
    options: argparse.Namespace,
    negatives: Negatives,
) -> Any:
    """Train with one caption of each image an epoch; yields the number of each epoch when it is complete."""
    loss = coder_plugin.create_loss(text, model=model)
    optimizer = make_optimizer(model, lr, options.wd)
    coder_plugin.follow(model, optimizer)
    pools = [(split, torch.bincount(split["image_of_caption"]).cumsum(0)) for split in splits]
    ends = torch.tensor([len(split["images"]) for split in splits]).cumsum(0)
    steps = int(ends[-1]) // options.batch_size
    total, generator = steps * options.epochs, torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, total))
    for epoch in range(options.epochs):
        order = torch.randperm(int(ends[-1]), generator=generator)
        for rows in order[: steps * options.batch_size].split(options.batch_size):
            images, ids = [], []
            for row in rows.tolist():
                pool = int(torch.searchsorted(ends, row, right=True))
                split, last = pools[pool]
                image = row - (int(ends[pool - 1]) if pool else 0)
                begin, end = int(last[image - 1]) if image else 0, int(last[image])
                images.append(split["images"][image])
                ids.append(split["ids"][int(torch.randint(begin, end, (), generator=generator))])
            batch: dict[str, Tensor] = {"image": torch.stack(images), "text": torch.stack(ids), "image_id": rows}
            if model.coder.reads_negatives:
                batch |= draw_negatives(negatives, rows, options.hard_negatives, batch["text"], generator)
            losses = loss(**model(**batch))
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
        yield epoch + 1


@torch.no_grad()
def figures_of(model: Any, val: dict[str, Tensor], classes: dict[str, Tensor]) -> dict[str, float]:
    """R@sum on the validation images, and the zero-shot accuracy of the scenes' classes in percent."""
    recall = evaluate_levels(model, val, [])
    model.eval()
    names, label = torch.unique(classes["ids"], dim=0, return_inverse=True)
    found = (model.embed_image(classes["images"]) @ model.embed_text(names).T).argmax(1)
    model.train()
    accuracy = (found == label).float().mean().item()
    figures = {key: round(recall[key], 2) for key in ("rsum", "i2t_r1", "t2i_r1")}
    return {**figures, "zero-shot": round(100 * accuracy, 2)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    classes = commands.add_parser("classes", help="write the pictures of the zero-shot test")
    classes.add_argument("folder", type=Path, help="output folder")
    classes.add_argument("--per-class", type=int, default=10, help="pictures of each class [10]")
    base, tune_command = commands.add_parser("base", help="train the CLIP"), commands.add_parser("tune", help="fine-tune it")
    for command in (base, tune_command):
        command.add_argument("flickr", help="features of Flickr8k, by frozen_towers.py cache")
        command.add_argument("scenes", help="features of the scenes, and of the classes as their validation split")
        command.add_argument("--model", required=True, help="open_clip configuration with timm and transformers towers")
        command.add_argument("--batch-size", type=int, default=128, help="batch size [128]")
        command.add_argument("--wd", type=float, default=0.05, help="weight decay [0.05]")
        command.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    base.add_argument("--epochs", type=int, default=20, help="epochs [20]")
    base.add_argument("--lr", type=float, nargs=1, default=[1e-3], help="learning rate [1e-3]")
    base.add_argument("--image-weights", required=True, help="safetensors file of the image tower")
    base.add_argument("--save", type=Path, required=True, help="write weights.pt (the projections) and export/ in this folder")
    tune_command.add_argument("--init", required=True, help="weights by base")
    tune_command.add_argument("--losses", nargs="+", required=True, help="loss expressions, one run each")
    tune_command.add_argument("--epochs", type=int, default=10, help="epochs [10]")
    tune_command.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="learning rates, one run each [1e-3]")
    tune_command.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each seed")
    tune_command.add_argument("--hold-out", type=int, default=0, metavar="N", help="report the last N training images instead")
    tune_command.add_argument("--negatives", help="table of hard negatives, for losses with hard_negatives=true")
    tune_command.add_argument("--hard-negatives", type=int, default=2, help="of these, for each image and step [2]")
    tune_command.add_argument("--name", default="", help="a name for the rows of --json")
    tune_command.add_argument("--json", help="append results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
