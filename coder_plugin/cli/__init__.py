"""The command ``coder-plugin``. Subcommands import what they need, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from coder_plugin import __version__
from coder_plugin.cli import data as cli_data
from coder_plugin.cli import evaluate as cli_evaluate
from coder_plugin.cli import recipes as cli_recipes
from coder_plugin.cli import results as cli_results
from coder_plugin.errors import CoderError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on standard error for a person's mistake."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _tell_of_unknown(getattr(arguments, "parser", parser), unknown)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return arguments.run(arguments)
    except CoderError as error:
        print(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("coder-plugin: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coder-plugin", description="Losses beyond InfoNCE for OpenCLIP-style image-text retrieval training."
    )
    parser.add_argument("--version", action="version", version=f"coder-plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    cli_evaluate.add_eval(commands)
    cli_results.add_report(commands)
    cli_results.add_index(commands)
    cli_results.add_search(commands)
    cli_data.add_concepts(commands)
    cli_data.add_regions(commands)
    cli_results.add_share(commands)
    cli_recipes.add_recipes(commands)
    _add_plugins(commands)
    cli_data.add_doctor(commands)
    _know_themselves(commands)
    return parser


def _know_themselves(commands: argparse._SubParsersAction) -> None:
    """A command's own parser tells of its slips: argparse would show the usage of the whole."""
    for parser in commands.choices.values():
        parser.set_defaults(parser=parser)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                _know_themselves(action)


def _tell_of_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    text = f"unrecognized arguments: {' '.join(unknown)}{hint}"
    print(f"{parser.prog}: error: {text}; all flags: {parser.prog} --help", file=sys.stderr)
    raise SystemExit(2)


def _add_train(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "train",
        help="train a model; with no data named, on the built-in scenes",
        description="Train on the data named, or on the built-in scenes. Flags have open_clip's names wherever open_clip "
        "has the flag. Several processes: accelerate launch -m coder_plugin.cli train ...",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.flags import read_flags
    from coder_plugin.config import read_file
    from coder_plugin.evaluation import format_table
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.report.callback import WriteReport
    from coder_plugin.training.loop import Trainer

    file = None if arguments.config is None else read_file(arguments.config)
    config = resolve_config(read_flags(arguments), file=file, file_name=str(arguments.config))
    trainer = Trainer.from_config(config, callbacks=[WriteReport()] if config.run.report else [])
    if trainer.config.run.dry_run:
        trainer.print_plan()
        return 0
    result = trainer.run()
    if trainer.log.main and result["last"]:
        rows = {f"last (epoch {result['last']['epoch']})": result["last"]}
        if result["best"]:
            rows[f"best (epoch {result['best']['epoch']})"] = result["best"]
        print(f"\n{format_table(rows)}")
        print(f"chance R@1: {100 / result['last']['images']:.2f} %   images: {result['last']['images']}")
    if trainer.log.main:
        print(f"report, checkpoints, exports and metrics: {result['folder']}")
    return 0


def _add_plugins(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plugins", help="list losses, heads, readers … and where they come from")
    parser.add_argument("group", nargs="?", help="one group: losses, heads, readers, recipes …")
    parser.add_argument("--check", action="store_true", help="import each of them and report what fails")
    parser.set_defaults(run=_plugins)


def _plugins(arguments: argparse.Namespace) -> int:
    from coder_plugin.registry import format_plugins, list_plugins

    plugins = list_plugins(arguments.group, check=arguments.check)
    print(format_plugins(plugins))
    return 1 if any(plugin.error for plugin in plugins) else 0

