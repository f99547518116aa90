#!/usr/bin/env python3
"""Train AsCL on region features and cached words of a frozen BERT: minutes per run on a CPU.

    data="--text MINILM --train-data regions --val-data regions --report-data regions-val"
    python scripts/experiments/frozen_ascl.py cache words.pt $data
    python scripts/experiments/frozen_ascl.py train words.pt $data --losses "ascl(similarity=fusion)" ascl

flickr8k.py runs both for the tables of docs/flickr8k.md. `cache` encodes every caption, one generated positive of each (joined
or truncated, as the loader draws them) and noised copies of both, with the noise in the encoder's input embeddings. A file has
one kind of noise and one of positives; ``train --texts`` takes those of another file. `train` builds `region-bert`, puts the
cached hidden states in the place of the encoder, and trains what follows: projections, pooling, fusion. Heads and losses are
those of the package. Recall is that of the fused score, of all pairs, where a term trains it, else that of the cosine. ``fit``
in a record is R@sum of the first training images, by the weights of the best epoch.

An epoch uses one caption of each image. With five captions an image no noised text and no positive is seen twice in five
epochs: a run sees what drawing them anew at each step would show it. Runs with other seeds see the same texts in another order.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
from typing import Any

import torch
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

import coder_plugin
from coder_plugin.backbones.word_embeddings import TextBatch, noised_names
from coder_plugin.data import open_source
from coder_plugin.evaluation import recall
from coder_plugin.heads.asymmetry import Asymmetry
from coder_plugin.heads.base import TrainingFacts
from coder_plugin.locations import absolute
from coder_plugin.noise.positives import Positives
from coder_plugin.objective import Objective
from coder_plugin.training.prepare import with_derived_options


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    sources = {"train": open_source(options.train_data, split="train"), "val": open_source(options.val_data, split="dev")}
    if options.report_data is not None:
        sources["report"] = open_source(options.report_data, split="dev")
    if options.command == "cache":
        if options.test_data is not None:
            sources["test"] = open_source(options.test_data, split="dev")
        cache(sources, options)
        return
    words = load(options.cache)
    if options.texts is not None:
        words["train"] = load(options.texts)["train"]
    if "test" in words:
        sources["test"] = open_source(words["test"]["data"], split="dev")
    regions = {split: read_regions(source, words[split]["captions"]) for split, source in sources.items()}
    for text, lr, seed in itertools.product(options.losses, options.lr, options.seeds):
        results, model, losses = train(text, lr, seed, regions, words, options)
        record = {"objective": text, "set": options.set, "lr": lr, "seed": seed, "results": results, "losses": losses}
        record["fit"] = evaluate(model, regions["train"], words["train"], options.eval_images)["rsum"]
        print(f"{text} (lr {lr:g}, seed {seed}): R@sum {record['fit']:.1f} on as many training images", flush=True)
        for name in REPORTED:
            if name in sources:
                record[name] = evaluate(model, regions[name], words[name], len(regions[name]), ranks=True)
                print(f"{text} (lr {lr:g}, seed {seed}): R@sum {record[name]['rsum']:.1f}, {name}", flush=True)
        append_record(options.json, record)


def make_model(objective: Objective, options: argparse.Namespace, *, region_dim: int, embed_dim: int) -> Any:
    return coder_plugin.create_model(
        "region-bert", loss=objective, text=options.text, frozen_text=True, region_dim=region_dim, embed_dim=embed_dim,
        context_length=40,  # joined captions are long
    )  # fmt: skip


@torch.no_grad()
def cache(sources: dict[str, Any], options: argparse.Namespace) -> None:
    """Write ids and last hidden states (float16) of the captions of all splits; for training also of generated texts.

    ``ids`` and ``positive_ids`` [T, W], ``states`` [words, E] of each group, text after text, ``changed`` [T, 2]: whether the
    noise has changed a caption and a positive, ``image_of_caption`` [T], the ``captions``, and the texts' ``negatives`` and
    ``positives``. The test split has the location of its regions as ``data``, so that published commands of ``train`` need no
    flag for it.
    """
    torch.manual_seed(0)
    random.seed(0)
    model = make_model(Objective.parse("ascl"), options, region_dim=8, embed_dim=8).train()
    tokenize, positives, splits = model.tokenizer(), Positives(options.positives), {}
    for split, source in sources.items():
        captions = [list(item.captions) for _, item in source.items()]
        every = [caption for of_image in captions for caption in of_image]
        saved: dict[str, Any] = {"captions": every, "ids": tokenize(every), "states": {}}
        saved["image_of_caption"] = torch.arange(len(captions)).repeat_interleave(torch.tensor(list(map(len, captions))))
        if split == "train":
            generated = [
                positives(caption, tuple(of_image[:number] + of_image[number + 1 :]))[0]
                for of_image in captions
                for number, caption in enumerate(of_image)
            ]
            saved["positive_ids"] = tokenize(generated)
            for name, ids in (("text", saved["ids"]), ("positive", saved["positive_ids"])):
                clean, noised, changed = encode(model, ids, noise=options.noise)
                saved["states"] |= {name: clean, noised_names(name)[0]: noised}
                saved.setdefault("changed", []).append(changed)
                print(f"{split}: {name} and its noised copies", flush=True)
            saved |= {"changed": torch.stack(saved["changed"], 1), "negatives": options.noise, "positives": options.positives}
        else:
            saved["states"]["text"] = encode(model, saved["ids"], noise=None)[0]
        if split == "test":
            saved["data"] = absolute(options.test_data)
        splits[split] = saved
    save_cache(splits, options.cache)


def encode(model: Any, ids: Tensor, *, noise: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [words, E] of texts and of their noised copies, float16, and bool [T]: which the noise has changed."""
    head = Asymmetry(model.info(), negatives=noise, positives=None)
    width = model.text.transformer.config.hidden_size
    states = torch.zeros(1 if noise is None else 2, *ids.shape, width, dtype=torch.float16)
    changed = torch.zeros(len(ids), dtype=torch.bool)
    for rows in model.text_mask(ids).sum(1).argsort().split(128):  # texts of similar length: less padding
        texts = head.further_texts(model.word_embeddings, ids[rows])
        mask = model.text_mask(texts.ids)
        longest = int(mask.sum(1).max())
        with model.word_embeddings.noise_in(texts), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.text.transformer(
                input_ids=texts.ids[:, :longest], attention_mask=mask[:, :longest].long()
            ).last_hidden_state
        states[:, rows, :longest] = hidden.half().unflatten(0, (len(states), -1))
        if noise is not None:
            changed[rows] = texts.split({})["noise_changed"][:, 0]
    words = ids != 0
    return states[0, words], states[-1, words], changed


def load(path: str) -> dict[str, Any]:
    """The splits of a cache. The states of a group are a tuple, with those of each text's words [n, E]."""
    splits: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    for split in splits.values():
        for name, states in split["states"].items():
            split["states"][name] = states.split((text_ids(split, name) != 0).sum(1).tolist())
    return splits


def text_ids(split: dict[str, Any], name: str) -> Tensor:
    """Token ids [T, W] of a group of texts; noised copies have those of their texts."""
    ids: Tensor = split["positive_ids" if name.endswith("positive") else "ids"]
    return ids


def some_states(split: dict[str, Any], name: str, rows: Tensor) -> Tensor:
    """Hidden states [n, W, E] of some texts of a group, zeros after their words."""
    states = torch.nn.utils.rnn.pad_sequence([split["states"][name][row] for row in rows.tolist()], batch_first=True)
    return pad(states.float(), split["ids"].shape[1])


def read_regions(source: Any, captions: list[str]) -> Tensor:
    """Features [N, L, R] of a data set's images, float16; its captions must be those of the cache."""
    items = [item for _, item in source.items()]
    if [caption for item in items for caption in item.captions] != captions:
        raise SystemExit("the cache and the regions have different captions: write the cache from the same data")
    return torch.stack([torch.as_tensor(item.load().features).half() for item in items])


def train(
    text: str, lr: float, seed: int, regions: dict[str, Tensor], words: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[int, dict[str, Any]], Any, dict[str, tuple[float, float]]]:
    """Recall after each epoch on the first validation images, the model of the best epoch, and the loss of the first and of the
    last epoch."""
    torch.manual_seed(seed)
    objective = with_settings(Objective.parse(text), parse_settings(options.set))
    check_texts(objective, words["train"])
    facts = TrainingFacts(
        loss=text, samples_per_epoch=len(regions["train"]), pairs_per_step=options.batch_size, epochs=options.epochs,
        concepts=options.concepts,
    )  # fmt: skip
    objective = with_derived_options(objective, facts)
    model = make_model(objective, options, region_dim=regions["train"].shape[2], embed_dim=options.embed_dim)
    model.text.transformer = CachedEncoder(words["train"]["states"]["text"][0].shape[1])
    model.coder.attach(model)  # the momentum copy is one of the model without the encoder
    model.train()
    loss = coder_plugin.create_loss(objective, model=model)
    split, images, size = words["train"], len(regions["train"]), options.batch_size
    image_of = split["image_of_caption"]
    first, number = torch.searchsorted(image_of, torch.arange(images)), torch.bincount(image_of)
    generator = torch.Generator().manual_seed(seed)
    turns = torch.rand(images, int(number.max()), generator=generator)
    turns[torch.arange(turns.shape[1]) >= number[:, None]] = torch.inf  # each image's captions in an order of their own
    turns = turns.argsort(1)
    steps = images // size
    taken = Steps(model, lr, options.wd, steps * options.epochs, options.clip, options.heads_lr_scale)
    results: dict[int, dict[str, Any]] = {}
    means: list[float] = []
    best = BestWeights(model)
    for epoch in range(options.epochs):
        order = torch.randperm(images, generator=generator)
        captions = first + turns[torch.arange(images), epoch % number]
        means.append(0.0)
        for batch in order[: steps * size].split(size):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
                outputs = forward(model, regions["train"], split, captions[batch])
                value = sum(loss(**outputs).values())
            taken.step(value)
            means[-1] += value.item() / steps
        results[epoch + 1] = evaluate(model, regions["val"], words["val"], options.eval_images)
        best.keep(results[epoch + 1]["rsum"])
        figures = results[epoch + 1]
        shown = ", ".join(f"{name} {figures[name]:.2f}" for name in ("rsum", "gap", "cosine") if name in figures)
        print(f"{text} {seed} epoch {epoch + 1}: loss {means[-1]:.3f}, {shown}", flush=True)
    best.load()
    return results, model, {"loss": (means[0], means[-1])}


def check_texts(objective: Objective, split: dict[str, Any]) -> None:
    """Refuse generated texts that are not those of the cache."""
    wanted = {**Asymmetry.__init__.__kwdefaults__, **dict(dict(objective.heads).get("asymmetry", {}))}
    for name in ("negatives", "positives"):
        if wanted[name] not in (None, split[name]):
            raise SystemExit(f"asymmetry.{name}={wanted[name]}: the cache was written with {split[name]}, see --texts")
    if wanted["noise_at"] != "input":
        raise SystemExit(f"asymmetry.noise_at={wanted['noise_at']}: the cache has noise in the input embeddings")


def forward(model: Any, regions: Tensor, split: dict[str, Any], captions: Tensor) -> dict[str, Tensor]:
    """What ``region-bert`` in training mode returns for images and captions, with all groups of texts from the cache."""
    images, head = split["image_of_caption"][captions], model.coder.adds_texts
    groups = ["text"]
    if head is not None:
        groups += ["positive"] if head.positives else []
        groups += [noised for name in tuple(groups) for noised in noised_names(name)] if head.noise else []
    ids = torch.cat([text_ids(split, name)[captions] for name in groups])
    model.text.transformer.set_states(torch.cat([some_states(split, name, captions) for name in groups]))
    image = region_batch(regions[images])
    features = {**model.image_side(image), **model.text_side(ids)}
    texts = TextBatch(ids, len(captions), tuple(groups[1:]), ids != 0, None, noise_input=True)
    if head is not None and head.noise:
        changed = split["changed"][captions]
        texts._changed = torch.cat(list(changed.T[: 2 if head.positives else 1]))
    features = texts.split(features)
    outputs = {"logit_scale": model.logit_scale.exp(), **{f"{side}_features": features[f"{side}_features"] for side in
                                                          ("image", "text")}}  # fmt: skip
    return {**outputs, **model.coder({**features, "image": image, "text": ids[: len(captions)], "image_id": images})}


def region_batch(features: Tensor) -> dict[str, Tensor]:
    return {"features": features.float(), "mask": torch.ones(features.shape[:2], dtype=torch.bool)}


@torch.no_grad()
def encode_split(
    model: Any, regions: Tensor, split: dict[str, Any], images: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Keys of the first images and of their captions, and the owners of the captions."""
    owner = split["image_of_caption"][split["image_of_caption"] < images]
    image_side: dict[str, list[Tensor]] = {}
    text_side: dict[str, list[Tensor]] = {}
    for rows in torch.arange(images).split(250):
        add(image_side, model.image_side(region_batch(regions[rows])))
    for rows in torch.arange(len(owner)).split(500):
        model.text.transformer.set_states(some_states(split, "text", rows))
        add(text_side, model.text_side(split["ids"][rows]))
    width = max(mask.shape[1] for mask in text_side["text_mask"])
    pooled = {"text_features", "text_pooled"}
    for key in text_side.keys() - pooled:
        text_side[key] = [pad(part, width) for part in text_side[key]]
    texts = {key: torch.cat(parts) for key, parts in text_side.items()}
    return {key: torch.cat(parts) for key, parts in image_side.items()}, texts, owner


def add(parts: dict[str, list[Tensor]], features: dict[str, Tensor]) -> None:
    for key, value in features.items():
        parts.setdefault(key, []).append(value)


def pad(part: Tensor, width: int) -> Tensor:
    """[n, T, ...] with zeros up to ``width`` positions."""
    return torch.cat([part, part.new_zeros(len(part), width - part.shape[1], *part.shape[2:])], 1)


@torch.no_grad()
def evaluate(model: Any, regions: Tensor, split: dict[str, Any], images: int, ranks: bool = False) -> dict[str, Any]:
    """Recall of the first images and their captions by the fused score of all pairs where it is trained, else by the cosine.

    ``gap`` is the mean score of pairs above that of others, in standard deviations of the others. With a fused score ``cosine``
    is R@sum by the cosine, with a context score R@sum without it. With ``ranks`` the ranks of every image and caption are
    returned too, as lists.
    """
    model.eval()
    described, texts, owner = encode_split(model, regions, split, images)

    def products() -> Tensor:
        scores: Tensor = model.coder.embed("image", described) @ model.coder.embed("text", texts).T
        return scores

    scores, heads, more = products(), model.coder.heads, {}
    if "contexts" in heads:
        with heads["contexts"].weighing(0.0):
            more = {"cosine": recall(products(), owner)["rsum"]}
    if "fusion" in heads:
        more = more or {"cosine": recall(scores, owner)["rsum"]}
        head = heads["fusion"]
        scores = head.scorer(head.image_item(described), head.text_item(texts)).all_pairs()
    model.train()
    pairs = owner == torch.arange(images)[:, None]
    gap = float((scores[pairs].mean() - scores[~pairs].mean()) / scores[~pairs].std())
    return plain(recall(scores, owner), ranks) | {"gap": gap} | more


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {
        "cache": commands.add_parser("cache", help="encode captions, positives and noised copies once"),
        "train": commands.add_parser("train", help="train losses on cached words"),
    }
    for command in parsers.values():
        command.add_argument("cache", help="file of cached words")
        command.add_argument("--text", required=True, help="folder or hub name of the text encoder")
        command.add_argument("--train-data", required=True, help="training data")
        command.add_argument("--val-data", required=True, help="data to choose the epoch on, and rates and options")
        command.add_argument("--report-data", help="data to evaluate the best epoch on")
        command.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    parsers["cache"].add_argument("--test-data", help="a further split to evaluate on; train finds it in the cache")
    parsers["cache"].add_argument("--noise", default="mixture", help="of the noised copies, asymmetry.negatives [mixture]")
    parsers["cache"].add_argument("--positives", default="join+truncate",
                                  help="the generated texts, asymmetry.positives [join+truncate]")
    train_command = parsers["train"]
    add_training_options(train_command, epochs=5, batch_size=32)
    train_command.add_argument("--texts", metavar="FILE", help="a cache to take the training captions and their "
                               "generated texts from, in place of the first one")
    train_command.add_argument("--embed-dim", type=int, default=128, help="dimensions of the joint space [128]")
    train_command.add_argument("--concepts", help="concept vocabulary, by coder-plugin concepts")
    train_command.add_argument("--heads-lr-scale", type=float, default=1.0,
                               help="factor on the learning rate of the fusion's weights [1]")
    train_command.add_argument("--clip", type=float, default=2.0, help="clip gradients to this norm [2]")
    train_command.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    train_command.add_argument("--eval-images", type=int, default=250,
                               help="validation images, the first ones, that the epoch is chosen on [250]")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
