"""The options of :mod:`coder_plugin.config` as flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from coder_plugin.cli.parsing import CommandParser, mark_rare
from coder_plugin.config import Option, options_by_name, read_file

#: The subjects in the order of the help, and their titles.
_TITLES = {
    "data": "data",
    "model": "model",
    "loss": "objective",
    "optim": "optimisation",
    "evaluation": "evaluation",
    "run": "run and output",
}
#: The options that ``--help`` shows; ``--help-all`` shows the others too.
_COMMON = frozenset(
    "train_data val_data image_root regions csv_img_key csv_caption_key captions workers "
    "model pretrained lock_image lora_rank loss set concepts "
    "batch_size accum_freq epochs lr wd warmup precision "
    "recipe name logs resume report report_to seed dry_run".split()
)
_METAVARS = {
    "set": "OWNER.OPTION=VALUE",
    "model_kwargs": "OPTION=VALUE",
    "aug_cfg": "OPTION=VALUE",
    "loss": "EXPRESSION",
    "train_data": "DATA",
    "val_data": "DATA",
    "pretrained": "WEIGHTS",
    "regions": "DATA",
    "concepts": "FILE",
    "pretrained_image_path": "FILE",
    "image_root": "FOLDER",
    "cache_dir": "FOLDER",
    "logs": "FOLDER",
    "csv_img_key": "COLUMN",
    "csv_caption_key": "COLUMN",
    "csv_negatives_key": "COLUMN",
    "negatives_file": "FILE",
    "csv_separator": "CHARACTER",
    "image_column": "COLUMN",
    "caption_column": "COLUMN",
    "key_column": "COLUMN",
    "resume": "CHECKPOINT",
    "report_to": "TRACKERS",
    "rerank": "K",
    "zeroshot": "FOLDER",
    "classnames": "FILE",
}


#: What options mean to commands that do not train.
_WITHOUT_TRAINING = {
    "model": "in place of RUN: an open_clip model or configuration (.json), CLIPModel or SiglipModel of transformers (folder, "
    "transformers:OWNER/NAME), or region-bert and the like",
    "pretrained": "weights of --model: an open_clip tag, a file, or an export's folder",
    "batch_size": "images, or captions, per forward pass [the run's, else 64]",
    "workers": "data loading processes [the run's, else 2]",
}


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add ``--config`` and a flag for each option, or for those in ``only``, in a group for each subject."""
    parser.add_argument(
        "--config", metavar="FILE", help="JSON or TOML file of these options, such as a run's config.json; flags win over it"
    )
    options = [(name, option) for name, option in options_by_name().items() if only is None or name in only]
    training = any(name == "train_data" for name, _ in options)
    for subject, title in _TITLES.items():
        group = parser.add_argument_group(title)
        for name, option in options:
            if option.subject == subject:
                help_text = _help(option) if training else _WITHOUT_TRAINING.get(name, _help(option))
                action = group.add_argument(option.flag, dest=name, default=argparse.SUPPRESS, **_argument(option, help_text))
                if name not in _COMMON:
                    mark_rare(action)
    if isinstance(parser, CommandParser) and any(name not in _COMMON for name, _ in options):
        parser.add_help_all()


def add_reranker(parser: argparse.ArgumentParser) -> None:
    """Add ``--reranker``."""
    parser.add_argument(
        "--reranker", metavar="NAME",
        help="re-rank without a trained head: maxsim, by the tokens of images and texts, or a name from another package [the "
        "model's fusion head, if it has one]",
    )


def read_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that the flags set, by flat name; nothing that was left at its default."""
    return {name: value for name, value in vars(arguments).items() if name in options_by_name()}


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that ``--config`` and, over it, the flags set, by flat name."""
    file = {} if arguments.config is None else read_file(arguments.config)
    return {**file, **read_flags(arguments)}


def _help(option: Option) -> str:
    told = "[" in option.help or option.default in (None, False, "", 0, [])
    return option.help if told else f"{option.help} [{option.default}]"


def _argument(option: Option, help_text: str) -> dict[str, Any]:
    argument: dict[str, Any] = {"help": help_text.replace("%", "%%")}
    metavar = _METAVARS.get(option.name) or {int: "N", float: "X", str: "NAME"}.get(option.kind)
    if option.kind is bool:
        argument["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
    elif option.is_list and not option.is_single:
        argument.update(nargs="+", type=option.kind, metavar=metavar)
        if option.kind is str:
            argument["action"] = "extend"
    else:
        argument.update(type=option.kind, choices=option.choices)
        if option.choices is None:
            argument["metavar"] = metavar
    return argument
