"""Data sets opened from :class:`~coder_plugin.config.DataConfig`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from coder_plugin.config import DataConfig
from coder_plugin.data import guess_kind, open_source, reader_options
from coder_plugin.data.bad_samples import BadSamples, describe
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.hard_negatives import NEGATIVES, HardNegatives, read_negatives
from coder_plugin.data.held_aside import split_aside
from coder_plugin.data.regions import open_regions
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.errors import CoderError
from coder_plugin.locations import check_local

log = logging.getLogger(__name__)

#: Options of readers that have the names of fields of :class:`~coder_plugin.config.DataConfig`.
_READING = (
    "csv_separator", "csv_img_key", "csv_caption_key", "image_root", "image_column", "caption_column", "key_column"
)


def make_source(config: DataConfig, *, split: str, join: bool = True, metadata: Sequence[str] = ()) -> Any | None:
    """Open a split of the data.

    Args:
        config: which data, and how they are read.
        split: "train" opens ``config.train``, any other ``config.val``, or the images that ``config.hold_aside`` keeps out of
            ``config.train``.
        join: join ``--regions``, if it is set; of shards only the first is read.
        metadata: names of further columns or fields that items keep.

    Returns:
        The source. Without training data the built-in scenes; None if training data but no validation data are named.

    Raises:
        CoderError: data that cannot be opened, or options that do not fit them.
    """
    if config.hold_aside and (split == "train" or config.val is None):
        whole = make_source(replace(config, hold_aside=0), split="train", join=join, metadata=metadata)
        rest, aside = split_aside(whole, config.hold_aside, config.hold_aside_seed)
        return rest if split == "train" else aside
    spec = config.train if split == "train" else config.val
    if spec is not None and spec.startswith("<"):
        check_local(spec)
        flag = "--train-data" if split == "train" else "--val-data"
        raise CoderError(f"the run's data were a Python object ({spec}), which no configuration holds: name data with {flag}")
    kind = config.dataset_type
    if spec is None:
        if not config.on_scenes:
            return None
        spec = kind = "scenes"
    elif config.on_scenes:  # train on scenes, evaluate on other data
        kind = "auto"
    return _open(replace(config, dataset_type=kind), spec, split=split, join=join, metadata=metadata)


def object_source(config: DataConfig, dataset: Any, *, split: str) -> Any:
    """A ``Dataset`` or ``IterableDataset`` of Hugging Face's ``datasets`` as a source, with the regions if they are set."""
    return _open(replace(config, dataset_type="hf", dataset_resampled=False), dataset, split=split)


def _open(config: DataConfig, spec: Any, *, split: str, join: bool = True, metadata: Sequence[str] = ()) -> Any:
    options = reading_options(config, spec if isinstance(spec, str) else "", pictures=config.regions is None)
    kind = options["kind"]
    if split == "train" and config.hard_negatives:
        if config.csv_negatives_key is not None and kind != "csv":
            raise CoderError(
                f"--csv-negatives-key is for CSV tables, and these data are read by {kind!r}: take --negatives-file"
            )
        if "negatives_key" in (reader_options(kind) or ()):
            options["negatives_key"] = config.csv_negatives_key or NEGATIVES
    if split == "train" and config.dataset_resampled:
        if not _takes(kind, "resampled"):
            raise CoderError(f"--open-clip dataset_resampled draws shards, and {spec} is read by {kind!r}")
        options["resampled"] = True
    if metadata:
        if not _takes(kind, "metadata"):
            raise CoderError(f"--columns: {spec} is read by {kind!r}, which keeps no further columns")
        options["metadata"] = list(metadata)
    source = open_source(spec, split=split, **options)
    if not join or config.regions is None:
        return source
    check_local(config.regions)
    regions = open_regions(config.regions, config.regions_type, split=split)
    return RegionSource(source, regions, max_missing=config.max_bad_samples)


def pictures_under_regions(config: DataConfig, split: str) -> Any | None:
    """The pictures of validation images that are read as regions; None without regions, or if there are no pictures."""
    if config.regions is None or config.val is None:
        return None
    try:
        return open_source(config.val, split=split, **reading_options(config, config.val))
    except CoderError as error:
        log.warning("regions are drawn on blank canvases: %s", error)
        return None


def make_captions(config: DataConfig, spec: str, *, split: str) -> Any:
    """A data set of which only captions are read: missing pictures do not matter."""
    return open_source(spec, split=split, **reading_options(config, spec, pictures=False))


def reading_options(config: DataConfig, spec: str, *, pictures: bool = True) -> dict[str, Any]:
    """Arguments of :func:`coder_plugin.data.open_source` for a data set.

    Args:
        config: how it is read.
        spec: its name or path, from which the reader is guessed where the configuration says "auto".
        pictures: whether picture files are needed.

    Raises:
        CoderError: a location from a file that runs a command or fetches.
    """
    check_local(spec)
    set_max_pixels(config.max_image_pixels)
    kind = guess_kind(spec) if config.dataset_type == "auto" else config.dataset_type
    options = {name: getattr(config, name) or None for name in _READING if _takes(kind, name)}
    if not pictures and "pictures" in (reader_options(kind) or ()):
        options["pictures"] = False
    return {"kind": kind, **options}


def _takes(kind: str, option: str) -> bool:
    """Whether a reader has an option; one of another package may take any."""
    options = reader_options(kind)
    return options is None or option in options


def make_negatives(config: DataConfig, source: Any) -> HardNegatives | None:
    """What draws the hard negatives of the training data; None without ``--hard-negatives``.

    Raises:
        CoderError: a faulty ``--negatives-file``, flags that need ``--hard-negatives``, or no image has a hard negative.
    """
    if not config.hard_negatives:
        flags = {"--negatives-file": config.negatives_file, "--csv-negatives-key": config.csv_negatives_key}
        if given := [flag for flag, value in flags.items() if value is not None]:
            raise CoderError(f"{given[0]} without --hard-negatives N, how many are drawn for each image: give both")
        return None
    table = {} if config.negatives_file is None else read_negatives(config.negatives_file)
    negatives = HardNegatives(config.hard_negatives, table)
    negatives.check(source)
    return negatives


def captions_of(source: Any) -> Iterator[str]:
    """All captions of a data set, in its order. Those of bad samples are left out with a warning."""
    bad = BadSamples(source.name, 1.0)
    for _, item in source.items():
        bad.add(1, () if item.fault is None else [describe(item.key, item.fault)])
        yield from item.captions
    if len(bad):
        log.warning("%s: captions: %s", source.name, bad)
