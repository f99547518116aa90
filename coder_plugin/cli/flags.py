"""Flags from dataclasses whose fields :func:`coder_plugin.config.option` declares: of training, and of single commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from coder_plugin.cli.parsing import CommandParser, mark_rare
from coder_plugin.config import MISSING, Option, get_option, options_by_name, options_of, read_file
from coder_plugin.errors import CoderError
from coder_plugin.expression import parse_value

_T = TypeVar("_T")
#: The subjects of :data:`coder_plugin.config.SUBJECTS` in the order of the help, and their titles.
_TITLES = {
    "loss": "objective",
    "model": "model",
    "data": "data",
    "optim": "optimisation",
    "evaluation": "evaluation",
    "run": "run and output",
}
#: What options mean to commands that do not train.
_WITHOUT_TRAINING = {
    "model": "in place of RUN: an open_clip model or configuration (.json), CLIPModel or SiglipModel of transformers (folder, "
    "transformers:OWNER/NAME), or a region model such as region-bert",
    "pretrained": "weights of --model: an open_clip tag, a file, or an export's folder",
    "batch_size": "images, or captions, per forward pass [the run's, else 64]",
    "workers": "data loading processes [the run's, else 2]",
    "max_regions": "read at most the first n regions of an image [the model's, else 36]",
    "max_bad_samples": "stop above this fraction of samples that cannot be used, judged after 1,000 [the run's, else 0.01]",
    "precision": "autocast [the model's, else bf16 on GPU, fp32 on CPU]",
}


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add ``--config`` and a flag for each option of training, or for those in ``only``, in a group for each subject.

    Args:
        parser: of the command.
        only: names of the options; None: all.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="JSON or TOML file of these options, such as a run's config.json; flags win over it"
    )
    options = [option for name, option in options_by_name().items() if only is None or name in only]
    training = any(option.name == "train_data" for option in options)
    texts = {} if training else _WITHOUT_TRAINING
    options.sort(key=lambda option: option.group is None)  # --recipe beside --loss
    for title in _TITLES.values():
        group = parser.add_argument_group("computation" if title == "optimisation" and not training else title)
        for option in options:
            if title == (option.group or _TITLES[option.subject]) and not option.listed:
                _add(group, option, texts.get(option.name))
    if listed := [option for option in options if option.listed]:
        _add_list(parser.add_argument_group("open_clip's rarer options"), listed)
    if isinstance(parser, CommandParser):
        parser.add_help_all()


def add_command(
    parser: argparse.ArgumentParser,
    cls: type,
    run: Callable[..., int] | None = None,
    *,
    options: Collection[str] | None = None,
) -> None:
    """Add a flag, or an argument without one, for each field of a command's own dataclass, and set what the command runs.

    Args:
        parser: of the command.
        cls: the dataclass.
        run: called with an instance of it; with ``options`` also with those of training that were given, by flat name.
            Returns the exit status. None: the caller sets it.
        options: names of options of training that the command takes, too.

    Example:
        >>> from dataclasses import dataclass
        >>> from coder_plugin.config import option
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Command:
        ...     run: str = option(MISSING, "a run's folder", positional=True)
        ...     top: int = option(5, "results for each query", at_least=1)
        >>> parser = argparse.ArgumentParser()
        >>> add_command(parser, Command)
        >>> read_command(Command, parser.parse_args(["logs/run", "--top", "3"]))
        Command(run='logs/run', top=3)
    """
    groups: dict[str | None, Any] = {None: parser}
    for option in sorted(options_of(cls).values(), key=lambda each: each.field not in cls.__annotations__):  # its own first
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    if options is not None:
        add_flags(parser, only=options)
    if run is not None:
        reads_options = options is not None
        parser.set_defaults(
            run=lambda arguments: run(read_command(cls, arguments), *([read_options(arguments)] if reads_options else []))
        )
    if isinstance(parser, CommandParser):
        parser.add_help_all()


def read_command(cls: type[_T], arguments: argparse.Namespace) -> _T:
    """What :func:`add_command` has added, as an instance of the dataclass.

    Raises:
        CoderError: a value that is out of range, or that the dataclass refuses.
    """
    given = {name: value for name, value in vars(arguments).items() if name in options_of(cls) and value is not None}
    values = {option.field: option.check(given[name], "flag") for name, option in options_of(cls).items() if name in given}
    return cls(**values)


def read_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of training that the flags set, by flat name; nothing that was left at its default.

    Raises:
        CoderError: an unknown name in ``--open-clip``.
    """
    flags = {name: value for name, value in vars(arguments).items() if name in options_by_name()}
    return {**flags, **_read_list(getattr(arguments, "open_clip", ()))}


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that ``--config`` and, over it, the flags set, by flat name."""
    file = {} if arguments.config is None else read_file(arguments.config)
    return {**file, **read_flags(arguments)}


def _add(group: Any, option: Option, help_text: str | None = None) -> None:
    text = help_text or option.help
    if help_text is None and "[" not in text and option.default not in (None, MISSING, False, "", 0, []):
        text = f"{text} [{option.default}]"
    argument: dict[str, Any] = {"help": text.replace("%", "%%")}
    metavar = option.metavar or {int: "N", float: "X", str: "NAME"}.get(option.kind)
    if option.kind is bool:
        argument["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
    elif option.is_list and not option.is_single:
        argument.update(nargs=len(metavar) if isinstance(metavar, tuple) else "+", type=option.kind, metavar=metavar)
        if option.choices is not None:
            argument["choices"] = option.choices
        if option.kind is str and not option.positional and argument["nargs"] == "+":
            argument["action"] = "extend"
    else:
        argument.update(type=option.kind, choices=option.choices)
        if option.choices is None:
            argument["metavar"] = metavar
    required = option.default is MISSING
    if option.positional:
        argument["nargs"] = {(True, True): "+", (True, False): "*", (False, False): "?"}.get((option.is_list, required))
        group.add_argument(option.name, **argument, **({} if required else {"default": None}))
        return
    action = group.add_argument(option.flag, dest=option.name, default=argparse.SUPPRESS, required=required, **argument)
    if option.common is False or (option.subject and not option.common):
        mark_rare(action)


def _add_list(group: Any, options: Iterable[Option]) -> None:
    names = "; ".join(f"{option.name}: {option.help}" for option in options)
    action = group.add_argument(
        "--open-clip", nargs="+", action="extend", default=argparse.SUPPRESS, metavar="OPTION=VALUE",
        help=names.replace("%", "%%"),
    )
    action.names = [option.name for option in options]
    mark_rare(action)


def _read_list(settings: Iterable[str]) -> dict[str, Any]:
    """The options of ``--open-clip``, each in the form ``name=value``; several values are separated by commas."""
    options = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in options_by_name() or not get_option(name).listed:
            known = ", ".join(name for name, option in options_by_name().items() if option.listed)
            raise CoderError(f"--open-clip {setting}: write OPTION=VALUE, with one of {known}")
        option = get_option(name)
        options[name] = text if option.kind is str else parse_value(text)
    return options
