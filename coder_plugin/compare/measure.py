"""Measure models on the validation data: ranks of every image and caption, from which all figures follow."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coder_plugin.compare.statistics import Hits
from coder_plugin.config import DataConfig
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json


def once(path: Path, val_data: str | None, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement saved in a file, if it was made on these data. Otherwise ``make`` measures, and the file is written."""
    if path.is_file() and (saved := read_json(path, most=1 << 30))["data"] == val_data:
        return saved  # type: ignore[no-any-return]
    made = {"data": val_data, **make()}
    with atomic_write(path, "w") as file:
        file.write(json.dumps(made, separators=(",", ":")) + "\n")
    return made


def of_run(folder: Path, val_data: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks of a run's best weights."""
    return ranks_of(*open_run(folder, val_data, options))


def open_run(folder: Path, val_data: str | None, options: Mapping[str, Any]) -> tuple[Any, Any, str | None]:
    """The encoder of a run's best weights, the validation data, and how many candidates are re-ranked.

    Args:
        folder: of the run.
        val_data: their name; None: the validation split of the built-in scenes.
        options: the run's.
    """
    from coder_plugin.pretrained.open import open_pretrained

    source = open_data(val_data, options)
    model = open_pretrained(folder, {}, export="best", name=folder.name, source=source)
    return model.encoder(), source, model.rerank


def open_data(val_data: str | None, options: Mapping[str, Any]) -> Any:
    """The validation data, read as the training data are."""
    from coder_plugin.data.from_config import make_source

    return make_source(data_config(val_data, options), split="val")


def data_config(val_data: str | None, options: Mapping[str, Any]) -> DataConfig:
    """The options of data of a run that reads all of the validation data."""
    from coder_plugin.pretrained.options import resolve_config

    return resolve_config({**options, "hold_aside": 0, "val_data": val_data}).data


def before(options: Mapping[str, Any], val_data: str | None, folder: Path) -> dict[str, Any]:
    """The ranks of the model that a run starts from."""
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training.loop import Trainer

    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))  # warnings about training, which has ended
    try:
        trainer = Trainer.from_config(resolve_config({**options, "logs": str(folder), "name": "before"}))
    finally:
        logging.disable(level)
    return ranks_of(trainer.encoder, open_data(val_data, options), trainer.config.evaluation.rerank)


def ranks_of(encoder: Any, source: Any, rerank: str | None) -> dict[str, Any]:
    """Ranks, 0-based, the image of each caption, and a digest of the images that were measured."""
    from coder_plugin.evaluation.evaluate import measure, shortlist_length
    from coder_plugin.files import sha256_json

    encoded = encoder(source)
    measured = measure(encoded, 0, shortlist_length(rerank, encoder))
    return {
        "images": sha256_json(encoded.image_ids.tolist())[:16],
        "i2t_ranks": measured["i2t_ranks"].tolist(),
        "t2i_ranks": measured["t2i_ranks"].tolist(),
        "image_of_text": encoded.image_of_text.tolist(),
    }


def hits(measured: Mapping[str, Any], first: Mapping[str, Any]) -> Hits:
    """What each image adds, of a measurement of the same images as ``first``.

    Raises:
        CoderError: they are others.
    """
    digests = {measured["images"], first["images"]} - {None}  # a command of one's own gives none
    sizes = {len(each["i2t_ranks"]) for each in (measured, first)}
    if len(digests) > 1 or len(sizes) > 1 or measured["image_of_text"] != first["image_of_text"]:
        raise CoderError("the rows were measured on different images or captions, so they cannot be compared: did data change?")
    return Hits.from_ranks(measured["i2t_ranks"], measured["t2i_ranks"], measured["image_of_text"])
