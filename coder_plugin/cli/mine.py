"""``coder-plugin mine``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from coder_plugin.cli.encoding import OPENING_AND_READING, ModelFlags
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, option
from coder_plugin.errors import CoderError
from coder_plugin.search.mining_options import MiningOptions, check_output
from coder_plugin.terminal import echo, plural

#: Images on the page.
_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class Command(ModelFlags, MiningOptions):
    """The flags of ``coder-plugin mine``."""

    output: str = option(MISSING, "the table to write, such as negatives.tsv", metavar="TABLE")
    data: str | None = option(None, "the training set: shards, a .csv, .json, scenes … [the run's]", metavar="DATA")
    split: str = option("train", "split of Karpathy files, precomp folders and scenes")
    index: str | None = option(
        None, "index of that training set by that model; it is made if there is none, and kept [TABLE.index]", metavar="INDEX"
    )
    html: str | None = option(None, f"also write a page with {_SHOWN} of the images and their negatives", metavar="FILE")
    gpu: bool = option(True, "search on a GPU if FAISS has one")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mine",
        help="find hard negatives for training among the captions of the training set",
        description="Write a table of hard negatives: for each image, captions of other images that a model scores highly, a "
        "margin below the image's own. They are found in an index of the training set, which is made if there is none.",
    )
    add_command(parser, Command, run, options=OPENING_AND_READING)


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_data, check_folder, check_model, check_options, check_parent

    mining = MiningOptions(**{each.name: getattr(arguments, each.name) for each in fields(MiningOptions)})
    check_model(arguments.run_folder)
    check_options(options, reads=["image_root"])
    check_output(arguments.output)
    check_parent(arguments.html, "--html")
    if arguments.data is not None:
        check_data(arguments.data, flag="--data", kind=options.get("dataset_type", "auto"))
    names_model = arguments.run_folder is not None or "model" in options
    folder = Path(arguments.index or f"{arguments.output}.index")
    existing = (folder / "index.json").is_file()
    if not names_model:
        if arguments.index is None:
            raise CoderError("name the model: a run's or export's folder, hf-hub:OWNER/NAME, or --model; or give its --index")
        check_folder(arguments.index, "an index", command="coder-plugin index")
    elif arguments.data is None and not existing and not (Path(arguments.run_folder or "") / "config.json").is_file():
        raise CoderError("name the training set with --data (a run's folder names its own)")
    from coder_plugin import distributed
    from coder_plugin.cli.index import BUILD_TIMEOUT
    from coder_plugin.pretrained.device import default_device
    from coder_plugin.search.index import Index
    from coder_plugin.search.mine import mine_negatives

    default_device(timeout=BUILD_TIMEOUT)
    if not existing and names_model:
        try:
            _make_index(folder, arguments, options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was encoded is kept in {folder}; the same command continues") from None
    if distributed.rank() != 0:
        return 0
    index = Index(folder, gpu=arguments.gpu)
    if existing:
        if names_model:
            index.check_model(_open_model(arguments, options))
        if arguments.data is not None:
            _check_same_data(index, arguments, options)
    try:
        summary = mine_negatives(index, arguments.output, **asdict(mining))
        if arguments.html is not None:
            _write_page(Path(arguments.html), index, mining)
    except OSError as error:
        raise CoderError(f"{error.filename or arguments.output} cannot be written: {error.strerror or error}") from error
    if not existing:
        echo(f"index: {folder}, which another mine with other margins reads again", file=sys.stderr)
    echo(format_summary(arguments.output, summary, mining, index.note))
    return 0


def _open_model(arguments: Command, options: Mapping[str, Any]) -> Any:
    from coder_plugin.pretrained.open import default_export, open_pretrained

    export = arguments.export or default_export(arguments.run_folder)
    return open_pretrained(arguments.run_folder, options, export=export, name=arguments.run_folder)


def _data_config(arguments: Command, options: Mapping[str, Any]) -> Any:
    """How the training set is read."""
    from coder_plugin.pretrained.open import saved_data_config

    named = {} if arguments.data is None else {"train_data": arguments.data, "val_data": arguments.data}
    data = saved_data_config(arguments.run_folder, {**options, **named})
    if data.train is not None and data.train.startswith("<"):
        raise CoderError(f"the run's training set ({data.train}) is not opened from its configuration: name it with --data")
    return data


def _make_index(folder: Path, arguments: Command, options: Mapping[str, Any]) -> None:
    from coder_plugin.config import READING
    from coder_plugin.search.build import build_index
    from coder_plugin.search.embed import EmbedJob
    from coder_plugin.search.index import EMBEDDINGS

    data = _data_config(arguments, options)
    job = EmbedJob(
        model=arguments.run_folder,
        data=data.train or "scenes",
        output=str(folder / EMBEDDINGS),
        options={**options, **{name: getattr(data, name) for name in READING}},  # a run's own, if it names the data
        export=arguments.export,
        split=arguments.split,
    )
    build_index(folder, job)


def _check_same_data(index: Any, arguments: Command, options: Mapping[str, Any]) -> None:
    """Compare an index's images and captions with the data's where that is cheap, else where they are.

    Raises:
        CoderError: the index was made from other data.
    """
    from coder_plugin.data.units import content_digest
    from coder_plugin.search.embed import absolute_data, open_data

    assert arguments.data is not None
    source, _ = open_data(_data_config(arguments, options), arguments.data, arguments.split)
    plan, digest = index.note["plan"], content_digest(source)
    same = plan.get("content") == digest if digest is not None else plan.get("data") == absolute_data(arguments.data)
    if not same:
        made_from = f"{str(plan.get('data'))[:200]}, split {str(plan.get('split'))[:40]}"
        raise CoderError(
            f"{index.folder} was made from other images or captions ({made_from}) than --data {arguments.data}, split "
            f"{arguments.split}: name the same, or another --index"
        )


def _write_page(path: Path, index: Any, mining: MiningOptions) -> None:
    """A page of images at equal distances in the index."""
    from coder_plugin.files import atomic_write
    from coder_plugin.search.mine import Miner
    from coder_plugin.search.page import negatives_page

    images = index.note["images"]
    rows = sorted({images * number // _SHOWN for number in range(_SHOWN)})
    with atomic_write(path, "w") as file:
        file.write(negatives_page(index, Miner(index, mining).mine(rows)))
    echo(f"page: {path}", file=sys.stderr)


def format_summary(path: str, summary: Any, mining: MiningOptions, note: Mapping[str, Any]) -> str:
    """What was found and what was left out, as a text of several lines."""
    from coder_plugin.search.mine import QUANTILES

    counts, asked = summary.by_count, mining.num_negatives
    fewer = sum(images for count, images in counts.items() if 0 < count < asked)
    lines = [
        f"{path}: {plural(summary.negatives, 'negative')} of {plural(summary.images, 'image')}; {counts[asked]:,} have the "
        f"{asked:,} asked for, {fewer:,} fewer, {counts[0]:,} none"
    ]
    if summary.without_captions:
        lines.append(f"{summary.without_captions:,} of the images have no captions")
    if note["bad"]:
        lines.append(f"{plural(sum(note['bad'].values()), 'sample')} of the data could not be read when the index was made")
    lines += ["", f"{'candidates':<18}{summary.candidates:>14,}  ranks {mining.range_min + 1:,} to {mining.range_max:,}"]
    for name, text in _REASONS.items():
        count = summary.dropped[name]
        share = f"{100 * count / summary.candidates:5.1f} %" if summary.candidates else ""
        lines.append(f"  {name:<16}{count:>14,}  {share}  {text}")
    lines += ["", f"{'':<18}" + "".join(f"{_quantile(each):>9}" for each in QUANTILES)]
    for name, values in summary.quantiles.items():
        lines.append(f"{name:<18}" + "".join(f"{value:>9.4f}" if value == value else f"{'–':>9}" for value in values))
    if (fewer or counts[0]) and any(summary.dropped.values()):
        most = max(_REASONS, key=lambda name: summary.dropped[name])
        or_max = " or --margin-from max" if most == "margin" and mining.margin_from == "min" else ""
        deeper = "a larger --range-max, or, " if mining.range_max < note["captions"] else ""
        lines += ["", f"for more negatives: {deeper}for {most!r}, {_ADVICE[most]}{or_max}"]
    return "\n".join(lines)


def _quantile(value: float) -> str:
    return "median" if value == 0.5 else f"{value:.0%}"


#: What each filter leaves out.
_REASONS = {
    "same text": "the text of a caption of the image",
    "margin": "a score that is not the margin below the positive's",
    "similar caption": "a text vector as near to one of a caption of the image as --max-similarity",
    "repeated text": "the text of another negative of the image",
}
_ADVICE = {
    "same text": "data with more captions",
    "margin": "a smaller --relative-margin or --absolute-margin",
    "similar caption": "a greater --max-similarity",
    "repeated text": "data with more captions",
}
