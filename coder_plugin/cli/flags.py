"""The options of :mod:`coder_plugin.config` as flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from coder_plugin.config import Option, options_by_name, read_file

_METAVARS = {"set": "OWNER.OPTION=VALUE", "model_kwargs": "OPTION=VALUE", "aug_cfg": "OPTION=VALUE"}


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add ``--config`` and a flag for each option, or for those in ``only``, in a group for each subject."""
    parser.add_argument(
        "--config", metavar="FILE", help="JSON or TOML file of these options, such as a run's config.json; flags win over it"
    )
    groups: dict[str, Any] = {}
    for name, option in options_by_name().items():
        if only is None or name in only:
            if option.subject not in groups:
                groups[option.subject] = parser.add_argument_group(f"{option.subject} options")
            groups[option.subject].add_argument(option.flag, dest=name, default=argparse.SUPPRESS, **_argument(option))


def read_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that the flags set, by flat name; nothing that was left at its default."""
    return {name: value for name, value in vars(arguments).items() if name in options_by_name()}


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that ``--config`` and, over it, the flags set, by flat name."""
    file = {} if arguments.config is None else read_file(arguments.config)
    return {**file, **read_flags(arguments)}


def _argument(option: Option) -> dict[str, Any]:
    help_text = option.help
    if option.default not in (None, False, "", 0, []) and "[" not in help_text:
        help_text += f" [{option.default}]"
    argument: dict[str, Any] = {"help": help_text.replace("%", "%%")}
    if option.kind is bool:
        argument["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
    elif option.is_list and not option.is_single:
        argument.update(nargs="+", type=option.kind)
        if option.name in _METAVARS:
            argument.update(action="extend", metavar=_METAVARS[option.name])
    else:
        argument.update(type=option.kind, choices=option.choices)
        if option.choices is None:
            argument["metavar"] = {int: "N", float: "X"}.get(option.kind)
    return argument
