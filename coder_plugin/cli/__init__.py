"""The command ``coder-plugin``. Subcommands import what they need, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from coder_plugin import __version__
from coder_plugin.cli import concepts, doctor, eval, index, plugins, recipes, regions, report, search, share, train
from coder_plugin.errors import CoderError
from coder_plugin.terminal import PrintableFormatter, echo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on standard error for a user's mistake."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _report_unknown(getattr(arguments, "parser", parser), unknown)
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        return arguments.run(arguments)
    except CoderError as error:
        echo(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        echo("coder-plugin: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coder-plugin", description="Losses beyond InfoNCE for OpenCLIP-style image-text retrieval training."
    )
    parser.add_argument("--version", action="version", version=f"coder-plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (train, eval, report, index, search, concepts, regions, recipes, share, plugins, doctor):
        command.add_parser(commands)
    _attach_subparser_errors(commands)
    return parser


def _attach_subparser_errors(commands: argparse._SubParsersAction) -> None:
    """Let each command's parser report its own errors; argparse would show the usage of the whole program."""
    for parser in commands.choices.values():
        parser.set_defaults(parser=parser)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                _attach_subparser_errors(action)


def _report_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    text = f"unrecognized arguments: {' '.join(unknown)}{hint}"
    echo(f"{parser.prog}: error: {text}; all flags: {parser.prog} --help", file=sys.stderr)
    raise SystemExit(2)
