"""The argument parser of all commands: errors of one line, and help in two lengths."""

from __future__ import annotations

import argparse
import difflib
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from coder_plugin.errors import did_you_mean
from coder_plugin.registry import GROUPS
from coder_plugin.terminal import echo

_KINDS = {int: "a whole number", float: "a number"}
#: What other tools call our options.
_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--weight-decay": "--wd",
    "--optimizer": "--opt",
    "--num-epochs": "--epochs",
    "--max-epochs": "--epochs",
    "--num-workers": "--workers",
    "--bs": "--batch-size",
    "--data": "--train-data",
    "--output": "--logs",
    "--output-dir": "--logs",
    "--checkpoint": "--resume",
    "--wandb": "--report-to",
    "--tokenizer": "--model",
    "--margin": "--relative-margin",
    "--top-k": "--num-negatives",
    "--max-iters": "--max-steps",
    "--num-steps": "--max-steps",
    "--amp": "--precision",
    "--fp16": "--precision",
    "--bf16": "--precision",
    "--gpus": "--device",
}
#: What other tools have an option for, and how it is done here.
_ADVICE = {
    "--device": "a GPU is used where there is one; CUDA_VISIBLE_DEVICES=N chooses it, an empty CUDA_VISIBLE_DEVICES= the CPU",
}


class Help(argparse.HelpFormatter):
    """Help without the rare options, and with a usage line that names only what a command must be given."""

    show_rare = False

    def __init__(self, prog: str, **options: Any) -> None:
        columns = shutil.get_terminal_size().columns - 2
        super().__init__(prog, **{"max_help_position": 26, "width": min(max(columns, 40), 110), **options})

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if prefix is None:  # else it becomes the name of a subcommand, as in "coder-plugin train"
            needed.append(argparse.Action([], "options", metavar="[options]"))
        super().add_usage(usage, needed, (), prefix)

    def add_argument(self, action: argparse.Action) -> None:
        if self.show_rare or not is_rare(action):
            super().add_argument(action)


class FullHelp(Help):
    """Help with all options."""

    show_rare = True


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        brief, parser.formatter_class = parser.formatter_class, FullHelp
        parser.print_help()
        parser.formatter_class = brief
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names what is wrong and what is allowed. Options cannot be abbreviated.

    Args:
        example: lines at the end of the help, printed as they are.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        self.example = example
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help, **options})
        self.set_defaults(parser=self)  # the parser of the command that was given, for its own errors

    @contextmanager
    def titled(self, title: str, commands: argparse._SubParsersAction) -> Iterator[None]:
        """List the commands that are added meanwhile under a title of their own in the help."""
        if commands in self._positionals._group_actions:
            self._positionals._group_actions.remove(commands)
        listed = len(commands._choices_actions)
        yield
        self.add_argument_group(title)._group_actions.extend(commands._choices_actions[listed:])

    def add_help_all(self) -> None:
        """Add ``--help-all``, which also shows the options that :func:`mark_rare` has marked, if there are any."""
        if "--help-all" in self._option_string_actions or not any(map(is_rare, self._actions)):
            return
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all options and exit")

    def format_help(self) -> str:
        text = super().format_help()
        rare = sum(map(is_rare, self._actions))
        if rare and self.formatter_class is not FullHelp:
            text += f"\n{rare} more options: {self.prog} --help-all\n"
        return f"{text}\n{self.example}" if self.example else text

    def error(self, message: str) -> NoReturn:
        has_rare = any(map(is_rare, self._actions))
        advice = f"all options: {self.prog} {'--help-all' if has_rare else '--help'}"
        echo(f"{self.prog}: error: {' '.join(message.removeprefix('argument ').split())}; {advice}", file=sys.stderr)
        raise SystemExit(2)

    def report_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error for arguments that the command does not have."""
        first = unknown[0].partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not first.startswith("-"):
            hint = f"; did you mean --text {shlex.join(unknown)}?" if "--text" in flags else ""
            self.error(f"unexpected {' '.join(map(repr, unknown))}: every value follows its option{hint}")
        if first in flags:
            self.error(f"unknown option {first} before the command: write {self.prog} {first} VALUE")
        name = first.lower().replace("_", "-")
        for action in self._actions:
            if name[2:].replace("-", "_") in getattr(action, "names", ()):
                self.error(f"unknown option {first}: write {action.option_strings[0]} {name[2:].replace('-', '_')}=VALUE")
        near: str | None = _ELSEWHERE.get(name, name)
        if near in _ADVICE and near not in flags:
            self.error(f"unknown option {first}: {_ADVICE[near]}")
        if near not in flags:
            near = next(iter(difflib.get_close_matches(name, flags, n=1)), None)
        self.error(f"unknown option {first}" + (f"; did you mean {near}?" if near else ""))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kind = _KINDS.get(action.type)  # type: ignore[call-overload]
            raise error if kind is None else argparse.ArgumentError(action, f"{arg_string!r} is not {kind}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        hint = did_you_mean(str(value), names) or ";"
        if isinstance(action, argparse._SubParsersAction):
            if value in GROUPS:
                hint = f": coder-plugin plugins {value} lists them;"
            raise argparse.ArgumentError(None, f"unknown command {value!r}{hint} commands: {', '.join(names)}")
        raise argparse.ArgumentError(action, f"{str(value)!r} is not allowed{hint} allowed: {', '.join(names)}")


def mark_rare(action: argparse.Action) -> None:
    """Show an option with ``--help-all`` only."""
    action.rare = True  # type: ignore[attr-defined]


def is_rare(action: argparse.Action) -> bool:
    """Whether :func:`mark_rare` has marked an option."""
    return getattr(action, "rare", False)
