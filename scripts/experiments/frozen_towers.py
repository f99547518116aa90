#!/usr/bin/env python3
"""Train losses on cached features of frozen towers: minutes a run on a CPU. For frozen.toml and selfalign.toml.

    python scripts/experiments/flickr8k_towers.py towers --context-length 24
    python scripts/experiments/frozen_towers.py cache frozen.pt --model towers/lite0-minilm.json \\
        --image-weights towers/lite0.safetensors --train-data 'train-{000000..000005}.tar' --val-data val-000000.tar
    python scripts/experiments/frozen_towers.py train frozen.pt --model towers/lite0-minilm.json --loss dcl --output dcl.json

`cache` encodes every image (evaluation transform: no augmentation) and every caption once, with an open_clip model that has a
timm image tower and a transformers text tower. With `--cells` it keeps the image tower's last grid in place of the feature, and
also the words before the last layer: word-region losses read both. `train` builds the same model, puts the cached features in
the place of the two towers, and trains the projections and heads. Losses, heads, `post_step` and `embed_*` are those of the
package. The momentum copy consists of projections and heads too: frozen towers would give it the same features. It writes what
`coder-plugin compare` reads: R@sum after each epoch on images of the training split that are held out, drawn at random, and the
ranks of the best epoch on the validation split.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import coder_plugin
from coder_plugin.backbones import clip
from coder_plugin.backbones.feature_capture import FeatureCapture
from coder_plugin.data.from_config import make_source
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.expression import parse_value
from coder_plugin.files import atomic_write
from coder_plugin.following import clamp_logit_scale
from coder_plugin.heads.base import TrainingFacts
from coder_plugin.model import option_owners
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.resolver import INTERMEDIATE_KEYS, resolve
from coder_plugin.training.optim import create_schedule, parameter_groups
from coder_plugin.training.prepare import with_derived_options

#: Weight decay, as in the other experiments on pretrained towers.
WEIGHT_DECAY = 0.05


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.command == "cache":
        cache(options)
    else:
        data = torch.load(options.cache, mmap=True, weights_only=True)
        result = train(hold_out(data["train"], options.hold_out, options.hold_out_seed), data["val"], options)
        with atomic_write(options.output, "w") as file:
            file.write(json.dumps(result) + "\n")


def hold_out(split: dict[str, Any], images: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A split without ``images`` of its images, drawn at random with a seed, and these."""
    image_of = split["image_of_caption"]
    held = torch.zeros(len(split["images"]), dtype=torch.bool)
    held[torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))[len(held) - images :]] = True

    def part(rows: Tensor) -> dict[str, Any]:
        texts = rows[image_of]
        of_texts = {key: split[key][texts] for key in ("ids", "tokens", "before") if key in split}
        return {"images": split["images"][rows], "image_of_caption": (rows.cumsum(0) - 1)[image_of[texts]], **of_texts}

    return part(~held), part(held)


@torch.no_grad()
def cache(options: argparse.Namespace) -> None:
    """Write image features [N, C], token ids [T, L], their features [T, L, C] in float16, and the image of each caption [T].

    With ``cells``, images are the last grid [N, C, H, W] in float16, and ``before`` has the words before the last layer.
    """
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
    model = build.make_model(config.model, Objective.parse("dcl"), torch.device("cpu")).eval()
    tokenize, transform = build.make_tokenizer(config.model, model), build.make_transform(model)
    model.visual.trunk.to(memory_format=torch.channels_last)  # several times as fast on a CPU
    pad, splits = model.text.config.pad_token_id, {}
    for split in ("train", "val"):
        images: list[Tensor] = []
        captions: list[str] = []
        image_of: list[int] = []
        batch: list[Tensor] = []
        for number, (_, item) in enumerate(make_source(config.data, split=split).items()):
            batch.append(transform(item.load()))
            captions += item.captions
            image_of += [number] * len(item.captions)
            if len(batch) == 64:
                images.append(encode_images(model, batch, options.cells))
                batch = []
        if batch:
            images.append(encode_images(model, batch, options.cells))
        ids = tokenize(captions)
        layers = (-1, -2) if options.cells else (-1,)
        tokens, *before = (
            torch.zeros(*ids.shape, model.text.transformer.config.hidden_size, dtype=torch.float16) for _ in layers
        )
        lengths = (ids != pad).sum(1)
        for rows in lengths.argsort(stable=True).split(128):  # captions of similar length: less padding
            words = ids[rows, : int(lengths[rows].max())]
            output = model.text.transformer(words, attention_mask=(words != pad).long(), output_hidden_states=True)
            for layer, states in zip(layers, (tokens, *before), strict=True):
                states[rows, : words.shape[1]] = output.hidden_states[layer].half()
        splits[split] = {"images": torch.cat(images), "ids": ids, "tokens": tokens,
                         "image_of_caption": torch.tensor(image_of)} | dict(zip(["before"], before, strict=False))  # fmt: skip
        print(f"{split}: {len(splits[split]['images'])} images, {len(ids)} captions", flush=True)
    torch.save(splits, f"{options.cache}.tmp")
    Path(f"{options.cache}.tmp").replace(options.cache)


def encode_images(model: Any, batch: list[Tensor], cells: bool) -> Tensor:
    trunk, images = model.visual.trunk, torch.stack(batch).to(memory_format=torch.channels_last)
    return trunk.forward_features(images).half().contiguous() if cells else trunk(images)  # type: ignore[no-any-return]


class CachedTrunk(nn.Module):
    """Replaces the image trunk. Its input is the cached feature, or the last grid [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(x)

    def forward_intermediates(self, x: Tensor, **_: Any) -> tuple[Tensor, list[Tensor]]:
        return x, [x]

    def forward_head(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) if x.ndim == 4 else x


class CachedTransformer(nn.Module):
    """Replaces the text transformer: looks up the token features of captions in the splits of :meth:`take`, by their ids."""

    #: Of each split: sorted hashes, their rows, ids, and features: of the last layer, and before it if the cache has them.
    tables: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])  # the place of the last layer, whose input SelfAlign reads

    @classmethod
    def take(cls, *splits: dict[str, Tensor]) -> None:
        """The captions of these splits, and no others, can be encoded from now on."""
        cls.tables.clear()  # shared with the momentum copy
        for split in splits:
            hashes, rows = _hash(split["ids"]).sort()
            cls.tables.append((hashes, rows, split["ids"], [split[key] for key in ("tokens", "before") if key in split]))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        features = [torch.zeros(*input_ids.shape, states.shape[2]) for states in self.tables[0][3]]
        missing = torch.ones(len(input_ids), dtype=torch.bool)
        for hashes, rows, ids, kept in self.tables:
            found = rows[torch.searchsorted(hashes, _hash(input_ids)).clamp(max=len(rows) - 1)]
            hit = missing & (ids[found] == input_ids).all(1)
            for out, states in zip(features, kept, strict=True):
                out[hit] = states[found[hit]].float()
            missing &= ~hit
        if missing.any():
            raise ValueError(f"{int(missing.sum())} captions of a batch are in no cache")
        self.layers[0](features[-1])
        return SimpleNamespace(last_hidden_state=features[0])


def _hash(ids: Tensor) -> Tensor:
    """Token ids [T, L] -> one integer a caption, [T]."""
    factors = torch.randint(1 << 62, (ids.shape[1],), generator=torch.Generator().manual_seed(0))
    return (ids * factors).sum(1)  # overflow wraps around


def make_objective(expression: str, settings: list[str], facts: TrainingFacts) -> Objective:
    """The objective with those ``OWNER.OPTION=VALUE`` whose owner, a term or a head, it has."""
    objective = Objective.parse(expression)
    owners = option_owners(objective)
    given = {key: parse_value(value) for key, value in (setting.split("=", 1) for setting in settings)}
    objective = objective.with_options({key: value for key, value in given.items() if key.rpartition(".")[0] in owners})
    return with_derived_options(objective, facts)


def make_model(objective: Objective, seed: int, path: str) -> Any:
    torch.manual_seed(seed)
    model = coder_plugin.create_model(path, loss=objective)
    model.text.transformer = CachedTransformer()
    reads = resolve(objective, clip.available_keys(model)).reads
    model._coder_capture = FeatureCapture(model, reads & INTERMEDIATE_KEYS)  # it tries the image trunk, and hooks the new text
    model.visual.trunk = CachedTrunk()
    model.coder.attach(model)  # the momentum copy is one of the model without towers
    return model.train()


def train(splits: tuple[dict[str, Any], dict[str, Any]], val: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train on captions of the first split, choose the epoch by the second, and rank ``val`` by its weights."""
    split, held_out = splits
    CachedTransformer.take(split, held_out, val)
    image_of, size = split["image_of_caption"], options.batch_size
    pairs = len(image_of if options.captions == "all" else split["images"])
    facts = TrainingFacts(
        loss=options.loss, samples_per_epoch=pairs, captions=options.captions, pairs_per_step=size, epochs=options.epochs,
        concepts=options.concepts,
    )  # fmt: skip
    objective = make_objective(options.loss, options.set, facts)
    model = make_model(objective, options.seed, options.model)
    loss = coder_plugin.create_loss(objective, model=model)
    steps, generator = pairs // size, torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=options.lr, weight_decay=WEIGHT_DECAY), fused=True)
    schedule = create_schedule(optimizer, resolve_config({"epochs": options.epochs}), steps)
    before = evaluate(model, held_out)["rsum"]
    scores: list[float] = []
    seconds = [0.0]
    best: dict[str, Tensor] = {}
    for _ in range(options.epochs):
        begun = time.perf_counter()
        for captions in epoch_order(image_of, options.captions, generator)[: steps * size].split(size):
            rows = image_of[captions]
            value = sum(loss(**model(split["images"][rows].float(), split["ids"][captions], image_id=rows)).values())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            model.coder.post_step(optimizer)
            clamp_logit_scale(model)
        seconds.append(seconds[-1] + time.perf_counter() - begun)
        score = evaluate(model, held_out)["rsum"]
        if score > max(scores, default=-1.0):
            best = {name: weight.clone() for name, weight in model.state_dict().items()}
        scores.append(score)
    print(f"{options.loss} at {options.lr:g}, seed {options.seed}:", ", ".join(f"{score:.1f}" for score in scores), flush=True)
    model.load_state_dict(best)
    ranks = evaluate(model, val)
    return {
        "held_aside": scores,
        "before": before,
        "seconds": [round(each, 1) for each in seconds[1:]],
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "val": {"i2t_ranks": ranks["i2t_ranks"].tolist(), "t2i_ranks": ranks["t2i_ranks"].tolist(),
                "image_of_text": val["image_of_caption"].tolist()},
    }  # fmt: skip


def epoch_order(image_of: Tensor, captions: str, generator: torch.Generator) -> Tensor:
    """The captions of an epoch in random order: all of them, or one of each image."""
    order = torch.randperm(len(image_of), generator=generator)
    if captions == "all":
        return order
    by_image, counts = order[image_of[order].argsort(stable=True)], image_of.bincount()
    return by_image[counts.cumsum(0) - counts][torch.randperm(len(counts), generator=generator)]


@torch.no_grad()
def evaluate(model: Any, split: dict[str, Any]) -> dict[str, Any]:
    model.eval()
    texts = torch.cat([model.embed_text(ids) for ids in split["ids"].split(500)])
    images = torch.cat([model.embed_image(each.float()) for each in split["images"].split(500)])
    result: dict[str, Any] = recall_from_embeddings(images, texts, split["image_of_caption"])
    model.train()
    return result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cache_command = commands.add_parser("cache", help="encode the data once")
    train_command = commands.add_parser("train", help="train a loss on the cached features")
    for command in (cache_command, train_command):
        command.add_argument("cache", help="file of cached features")
        command.add_argument("--model", required=True, help="open_clip configuration with timm and transformers towers")
        command.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    cache_command.add_argument("--image-weights", required=True, help="safetensors file of the image tower")
    cache_command.add_argument("--train-data", required=True, help="training data, as for coder-plugin train")
    cache_command.add_argument("--val-data", required=True, help="validation data")
    cache_command.add_argument("--cells", action="store_true", help="keep the last grid, and words before the last layer")
    train_command.add_argument("--loss", required=True, help="loss expression")
    train_command.add_argument("--set", nargs="*", default=[], metavar="OWNER.OPTION=VALUE",
                               help="options of terms and heads; a loss without the owner ignores them")  # fmt: skip
    train_command.add_argument("--concepts", help="concept vocabulary, by coder-plugin concepts")
    train_command.add_argument("--captions", default="all", choices=("all", "draw"),
                               help="of an epoch: all, or one of each image, drawn at random [all]")  # fmt: skip
    train_command.add_argument("--epochs", type=int, default=5, help="epochs [5]")
    train_command.add_argument("--batch-size", type=int, default=128, help="pairs of a step [128]")
    train_command.add_argument("--lr", type=float, default=1e-4, help="learning rate [1e-4]")
    train_command.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the pairs [0]")
    train_command.add_argument("--hold-out", type=int, default=1000, help="training images that choose the epoch [1000]")
    train_command.add_argument("--hold-out-seed", type=int, default=0, help="with which they are drawn [0]")
    train_command.add_argument("--output", required=True, help="JSON file, for coder-plugin compare")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
