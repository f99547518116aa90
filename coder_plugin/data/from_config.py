"""Open data sets from a run's options."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from coder_plugin.config import TrainConfig
from coder_plugin.data import guess_kind, open_source
from coder_plugin.data.regions import open_regions
from coder_plugin.data.regions.base import RegionFile
from coder_plugin.data.regions.join import Joined, RegionSource
from coder_plugin.errors import CoderError

#: The options that each reader takes, under which name; a plugin's reader gets all of them.
_READER_FLAGS = {
    "caps": {},
    "coco": {"image_root": "images"},
    "csv": {"csv_separator": "csv_separator", "csv_img_key": "csv_img_key", "csv_caption_key": "csv_caption_key"},
    "img2dataset": {},
    "karpathy": {"image_root": "images"},
    "precomp": {},
    "webdataset": {},
    "scenes": {},
}
#: Readers that need no pictures where regions replace them.
_OPTIONAL_PICTURES = ("coco", "csv", "karpathy")


def make_source(config: TrainConfig, *, split: str, join: bool = True) -> Any | None:
    """The data of a split, by default the built-in scenes; None without validation data.

    With ``join`` and ``--regions``, images are replaced by their regions; this reads the first samples of shards.
    """
    spec = config.data.train if split == "train" else config.data.val
    kind = config.data.dataset_type
    if spec is None:
        if not config.data.on_scenes:
            return None
        spec = kind = "scenes"
    elif config.data.on_scenes:  # scenes to train on, other data to evaluate on
        kind = "auto"
    reading = reading_options(config.with_options(dataset_type=kind), spec, pictures=config.data.regions is None)
    if split == "train" and config.data.dataset_resampled:
        if reading["kind"] in _READER_FLAGS and reading["kind"] != "webdataset":
            raise CoderError(f"--dataset-resampled draws shards, and {spec} is read by {reading['kind']!r}")
        reading["resampled"] = True
    source = open_source(spec, split=split, **reading)
    return join_regions(source, config, split=split) if join and config.data.regions is not None else source


def join_regions(source: Any, config: TrainConfig, *, split: str) -> RegionSource:
    """A data set with the region features of ``--regions`` instead of pictures."""
    return RegionSource(source, make_regions(config, split=split), max_missing=config.data.max_bad_images)


def pictures_under_regions(config: TrainConfig, split: str) -> Any | None:
    """A source of the pictures of validation images that are read as regions; None if the captions' data have none."""
    if config.data.regions is None or config.data.val is None:
        return None
    try:
        return open_source(config.data.val, split=split, **reading_options(config, config.data.val))
    except CoderError as error:
        logging.getLogger(__name__).warning("regions are drawn on blank canvases: %s", error)
        return None


def make_captions(config: TrainConfig, spec: str, *, split: str) -> Any:
    """A data set for its captions only, without pictures."""
    return open_source(spec, split=split, **reading_options(config, spec, pictures=False))


def reading_options(config: TrainConfig, spec: str, *, pictures: bool = True) -> dict[str, Any]:
    """The options of :func:`coder_plugin.data.open_source` for a data set."""
    kind = guess_kind(spec) if config.data.dataset_type == "auto" else config.data.dataset_type
    flags = _READER_FLAGS.get(kind, {name: given for names in _READER_FLAGS.values() for name, given in names.items()})
    options = {given: getattr(config.data, name) or None for name, given in flags.items()}
    if kind in _OPTIONAL_PICTURES and not pictures:
        options["pictures"] = False
    return {"kind": kind, **options}


def make_regions(config: TrainConfig, *, split: str) -> RegionFile:
    """The files of ``--regions`` as one."""
    assert config.data.regions is not None
    files = [(part, open_regions(part, config.data.regions_type, split=split)) for part in config.data.regions.split("::")]
    return files[0][1] if len(files) == 1 else Joined(files)


def captions_of(source: Any) -> Iterator[str]:
    return (caption for _, item in source.items() for caption in item.captions)
