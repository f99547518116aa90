"""Encode a data set and read its recall (METHODS 10)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.retrieval import recall_folds, recall_from_embeddings


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
    def __call__(self, source: Any) -> tuple[Tensor, Tensor, Tensor]:
        """-> image vectors [N, D] or [N, V, D], text vectors [T, D], the image of each text [T]; on the CPU, in the data's
        order."""
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
        return images, texts, image_of_text[text_order]

    def _own_share(self, source: Any) -> dict[str, Tensor] | None:
        images, texts, index, counts = [], [], [], []  # type: list, list, list, list
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
            counts.extend(len(captions) for captions in batch["captions"])
            texts.append(self._texts([caption for captions in batch["captions"] for caption in captions]))
        if not images:
            return None
        return {
            "images": torch.cat(images),
            "texts": torch.cat(texts),
            "index": torch.cat(index),
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


def evaluate_ensemble(encoders: Sequence[Encoder], source: Any, *, folds: int = 0) -> list[dict[str, Any]]:
    """:func:`evaluate` for each model and, last, for all of them together: the mean of their similarities (METHODS 10)."""
    encoded = [encoder(source) for encoder in encoders]
    owners = encoded[0][2]
    if any(not torch.equal(owners, each[2]) for each in encoded):
        raise CoderError("the models of an ensemble did not read the same images: some were skipped for one of them")
    images, texts = [each[0] for each in encoded], [each[1] for each in encoded]
    return _recalls([*encoded, (images, texts, owners)], folds)


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
        images, texts, image_of_text = encoder(source)
    middle = images.shape[-1] // 2  # [sqrt(1/2) v_I ; sqrt(1/2) v_C], of one dimension

    def weighed(vectors: Tensor, beta: float) -> Tensor:
        return torch.cat([vectors[..., :middle] * (2 * beta) ** 0.5, vectors[..., middle:] * (2 - 2 * beta) ** 0.5], -1)

    return _recalls(((weighed(images, beta), weighed(texts, beta), image_of_text) for beta in betas), folds)


def _recalls(encoded: Iterable[tuple[Any, Any, Tensor]], folds: int) -> list[dict[str, Any]]:
    """Recall of each (images, texts, image of each text), where images and texts are one model's or a list of several's."""
    results: list[dict[str, Any]] = []
    for images, texts, image_of_text in encoded:
        result: dict[str, Any] = {}
        if distributed.rank() == 0:
            result = recall_from_embeddings(images, texts, image_of_text)
            result = {key: value for key, value in result.items() if not isinstance(value, Tensor)}
            several = isinstance(images, list)
            result.update(images=len(images[0] if several else images), texts=len(texts[0] if several else texts))
            if folds:
                result["folds"] = recall_folds(images, texts, image_of_text, folds=folds)
        results.append(result)
    return distributed.gather_objects(results)[0]


def evaluate_command(arguments: Any) -> dict[str, dict[str, Any]]:
    """``coder-plugin eval``: recall by the model's name, once for each ``--beta``, and of several models each and together
    (empty on ranks but the first)."""
    runs = arguments.run_folder or [None]
    if len(runs) > 1 and arguments.beta:
        raise CoderError("--beta is for one model: an ensemble has each model's own")
    names: list[str] = []
    encoders: list[Encoder] = []
    for run in runs:
        config, source, encoder = _evaluated(arguments, run)
        names.append(str(run or config.pretrained or config.model))
        encoders.append(encoder)
    if arguments.beta:
        swept = sweep_beta(encoders[0], source, arguments.beta, folds=arguments.folds)
        results = {f"{names[0]}, beta {beta:g}": result for beta, result in zip(arguments.beta, swept, strict=True)}
    elif len(encoders) > 1:
        found = evaluate_ensemble(encoders, source, folds=arguments.folds)
        results = dict(zip([*names, f"ensemble of {len(names)}"], found, strict=True))
    else:
        results = {names[0]: evaluate(encoders[0], source, folds=arguments.folds)}
    return results if distributed.rank() == 0 else {}


def _evaluated(arguments: Any, run: str | None) -> tuple[Any, Any, Encoder]:
    """The configuration, the data and the model of one run's export, or of what the flags name."""
    import json
    from dataclasses import replace
    from pathlib import Path

    from coder_plugin.training import setup
    from coder_plugin.training.config import READING, TrainConfig, read_flags
    from coder_plugin.training.export import exported, heads_beside, load_heads, read_heads

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
    accelerator = setup.make_accelerator(config)
    source = setup.make_source(config, split=arguments.split)
    if source is None:
        raise CoderError("no data to evaluate on: name them with --val-data")
    model = setup.make_model(config, recipe, accelerator.device, source, inference=True)
    if heads is not None:
        load_heads(model, heads)
    encoder = Encoder(
        model,
        setup.make_tokenizer(config, model),
        setup.make_transforms(model, config)[1],
        device=accelerator.device,
        batch_size=config.batch_size or 64,
        workers=config.workers,
        max_bad=config.max_bad_images,
        autocast=accelerator.autocast,
    )
    return config, source, encoder
