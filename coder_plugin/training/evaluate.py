"""Encode a data set and read its recall (METHODS 10)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.retrieval import recall_folds, recall_from_embeddings


class Encoded(NamedTuple):
    """A data set's retrieval vectors on the CPU, in the data's order, of one model or, as lists, of several."""

    images: Any  # [N, D] or [N, V, D]
    texts: Any  # [T, D]
    image_of_text: Tensor  # [T]
    image_ids: Tensor  # [N]


class Encoder:
    """Retrieval vectors of a data set's images and captions, each rank encoding its share."""

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[[list[str]], Tensor],
        transform: Callable[..., Tensor],
        *,
        device: torch.device,
        batch_size: int = 64,
        workers: int = 2,
        max_bad: int = 100,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.model, self.tokenizer, self.transform, self.device = model, tokenizer, transform, device
        self.batch_size, self.workers, self.max_bad, self.autocast = batch_size, workers, max_bad, autocast

    @torch.no_grad()
    def __call__(self, source: Any) -> Encoded:
        """Every image of the data and its captions; images that cannot be read are left out."""
        training = self.model.training
        self.model.eval()
        try:
            share = self._own_share(source)
        finally:
            self.model.train(training)
        parts = [part for part in distributed.gather_objects(share) if part is not None]
        if not parts:
            raise CoderError("the validation data hold no image")
        index = torch.cat([part["index"] for part in parts])
        order = index.argsort()
        captions = torch.cat([part["captions"] for part in parts])
        owner = torch.repeat_interleave(torch.arange(len(index)), captions)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        image_of_text = place[owner]
        text_order = image_of_text.argsort(stable=True)
        images = torch.cat([part["images"] for part in parts])[order]
        texts = torch.cat([part["texts"] for part in parts])[text_order]
        ids = torch.cat([part["image_ids"] for part in parts])[order]
        return Encoded(images, texts, image_of_text[text_order], ids)

    def _own_share(self, source: Any) -> dict[str, Tensor] | None:
        images, texts, index, ids, counts = [], [], [], [], []  # type: list, list, list, list, list
        batches = evaluation_batches(
            source,
            batch_size=self.batch_size,
            transform=self.transform,
            workers=self.workers,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            max_bad=self.max_bad,
        )
        for batch in batches:
            with self.autocast():
                image = map_tensors(lambda each: each.to(self.device), batch["image"])
                images.append(self.model.embed_image(image).float().cpu())
            index.append(torch.as_tensor(batch["index"]))
            ids.append(batch["image_id"])
            counts.extend(len(captions) for captions in batch["captions"])
            texts.append(self._texts([caption for captions in batch["captions"] for caption in captions]))
        if not images:
            return None
        return {
            "images": torch.cat(images),
            "texts": torch.cat(texts),
            "index": torch.cat(index),
            "image_ids": torch.cat(ids),
            "captions": torch.tensor(counts),
        }

    def _texts(self, captions: Sequence[str]) -> Tensor:
        parts = []
        for start in range(0, len(captions), self.batch_size):
            tokens = self.tokenizer(list(captions[start : start + self.batch_size])).to(self.device)
            with self.autocast():
                parts.append(self.model.embed_text(tokens).float().cpu())
        return torch.cat(parts)


def evaluate(encoder: Encoder, source: Any, *, folds: int = 0) -> dict[str, Any]:
    """Recall over the whole set, and with ``folds`` also their mean (COCO's 1K protocol) under ``folds``.

    Every rank gets the numbers; rank 0 computes them.
    """
    return _recalls([encoder(source)], folds)[0]


def ensemble(encoded: Sequence[Encoded]) -> Encoded:
    """Several models' vectors of the same images as one: its score is the mean of their similarities (METHODS 10).

    Raises:
        CoderError: the models did not read the same images and captions.
    """
    first = encoded[0]
    for other in encoded[1:]:
        if not torch.equal(first.image_ids, other.image_ids) or not torch.equal(first.image_of_text, other.image_of_text):
            common = len(set(first.image_ids.tolist()) & set(other.image_ids.tolist()))
            raise CoderError(
                f"the models of an ensemble read different images: {len(first.image_ids)} and {len(other.image_ids)}, "
                f"{common} in common, or in another order: evaluate them on the same data (--val-data)"
            )
    return Encoded([each.images for each in encoded], [each.texts for each in encoded], *first[2:])


def sweep_beta(encoder: Encoder, source: Any, betas: Sequence[float], *, folds: int = 0) -> list[dict[str, Any]]:
    """:func:`evaluate` for each weight of the instance level, ``S = beta S_I + (1 - beta) S_C``; encodes once.

    Raises:
        CoderError: a beta outside [0, 1], a model whose score has no concept level.
    """
    wrong = [beta for beta in betas if not 0 <= beta <= 1]
    if wrong:
        raise CoderError(f"--beta must be in [0, 1], got {wrong[0]}")
    scoring = {name: head for name, head in encoder.model.coder.heads.items() if head.scores}
    if list(scoring) != ["concepts"]:
        raise CoderError(f"--beta weighs the concept level, and this model scores with: {', '.join(scoring) or 'no head'}")
    with scoring["concepts"].weighing(0.5):
        encoded = encoder(source)
    middle = encoded.images.shape[-1] // 2  # [sqrt(1/2) v_I ; sqrt(1/2) v_C], of one dimension

    def weighed(vectors: Tensor, beta: float) -> Tensor:
        return torch.cat([vectors[..., :middle] * (2 * beta) ** 0.5, vectors[..., middle:] * (2 - 2 * beta) ** 0.5], -1)

    swept = (
        encoded._replace(images=weighed(encoded.images, beta), texts=weighed(encoded.texts, beta)) for beta in betas
    )
    return _recalls(swept, folds)


def _recalls(encoded: Iterable[Encoded], folds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for images, texts, image_of_text, ids in encoded:
        result: dict[str, Any] = {}
        if distributed.rank() == 0:
            result = recall_from_embeddings(images, texts, image_of_text)
            result = {key: value for key, value in result.items() if not isinstance(value, Tensor)}
            result.update(images=len(ids), texts=len(image_of_text))
            if folds:
                result["folds"] = recall_folds(images, texts, image_of_text, folds=folds)
        results.append(result)
    return distributed.gather_objects(results)[0]


def evaluate_command(arguments: Any) -> dict[str, dict[str, Any]]:
    """``coder-plugin eval``: recall by the model's name, once for each ``--beta``, and of several models each and together
    (empty on ranks but the first)."""
    runs = list(dict.fromkeys(arguments.run_folder)) or [None]
    if len(runs) > 1 and arguments.beta:
        raise CoderError("--beta is for one model: an ensemble has each model's own")
    if arguments.beta:
        name, source, encoder = _evaluated(arguments, runs[0])
        swept = sweep_beta(encoder, source, arguments.beta, folds=arguments.folds)
        results = {f"{name}, beta {beta:g}": result for beta, result in zip(arguments.beta, swept, strict=True)}
    else:
        encoded: dict[str, Encoded] = {}
        for run in runs:
            name, source, encoder = _evaluated(arguments, run)
            encoded[name] = encoder(source)
            del encoder  # one model at a time on the device
        if len(runs) > 1:
            encoded[f"ensemble of {len(runs)}"] = ensemble(list(encoded.values()))
        results = dict(zip(encoded, _recalls(encoded.values(), arguments.folds), strict=True))
    return results if distributed.rank() == 0 else {}


def _evaluated(arguments: Any, run: str | None) -> tuple[str, Any, Encoder]:
    """The name, the data and the model of one run's export, or of what the flags name."""
    import json
    from dataclasses import replace
    from pathlib import Path

    from coder_plugin.training import setup
    from coder_plugin.training.config import READING, TrainConfig, read_flags
    from coder_plugin.training.export import exported, heads_beside, load_heads, read_heads
    from coder_plugin.training.sources import make_source

    given = read_flags(arguments)
    if run is not None:
        folder = Path(run)
        weights, configuration = exported(folder / "export" / arguments.export)
        if not (folder / "config.json").is_file() or weights is None:
            raise CoderError(f"{folder} is no training run with an export: it needs config.json and export/{arguments.export}")
        trained = json.loads((folder / "config.json").read_text())
        if "val_data" in given:  # other data: how the run's were read says nothing of them
            trained = {key: value for key, value in trained.items() if key not in READING}
        given = {**trained, **given, "pretrained": str(weights)}
        if configuration is not None:  # with every option that the data decided
            given.update(model=str(configuration), model_kwargs=None)
    if given.get("val_data") and not given.get("train_data"):
        given["train_data"] = given["val_data"]  # evaluation alone: not the built-in scenes
    unused = {"resume": None, "lora_rank": 0, "pretrained_image_path": None, "pretrained_image": False, "report_to": ""}
    config = TrainConfig.from_dict({**given, **unused}).resolved()
    heads = heads_beside(config.pretrained)
    if heads is not None:
        recipe, aggregator = read_heads(heads)
        config = replace(config, aggregator=aggregator)
    else:
        recipe = setup.make_recipe(config)
    device = setup.make_accelerator(replace(config, precision="fp32")).device
    source = make_source(config, split=arguments.split)
    if source is None:
        raise CoderError("no data to evaluate on: name them with --val-data")
    model = setup.make_model(config, recipe, device, source, inference=True)
    if heads is not None:
        load_heads(model, heads)
    encoder = Encoder(
        model,
        setup.make_tokenizer(config, model),
        setup.make_transforms(model, config)[1],
        device=device,
        batch_size=config.batch_size or 64,
        workers=config.workers,
        max_bad=config.max_bad_images,
        autocast=setup.make_autocast(config, device),
    )
    return str(run or config.pretrained or config.model), source, encoder
