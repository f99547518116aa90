"""The command ``coder-plugin``. Subcommands import what they need, so that help and mistakes in arguments answer at once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from coder_plugin import __version__
from coder_plugin.cli import (
    compare,
    concepts,
    doctor,
    duplicates,
    embed,
    eval,
    index,
    mine,
    plugins,
    recipes,
    regions,
    report,
    search,
    serve,
    share,
    train,
    vectors,
)
from coder_plugin.cli.parsing import CommandParser
from coder_plugin.errors import CoderError
from coder_plugin.terminal import PrintableFormatter, echo

#: All commands, by what they are for.
_COMMANDS = {
    "train": (train, concepts, regions, mine),
    "measure": (eval, compare, report),
    "search": (embed, index, search, serve, duplicates),
    "share": (share, vectors),
    "inspect": (doctor, recipes, plugins),
}
_EXAMPLE = """first step, without data; a few minutes on a CPU:
  coder-plugin train --name scenes

fine-tune a pretrained CLIP on your table with the columns filepath and title:
  coder-plugin train --recipe finetune-clip --model ViT-B-32 --pretrained laion2b_s34b_b79k \\
      --train-data train.csv --val-data val.csv

options of a command: coder-plugin COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on standard error for a user's mistake."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 0
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.report_unknown(unknown)
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("coder_plugin").setLevel(logging.INFO)  # what was detected, counted or left out, once
    try:
        return arguments.run(arguments)
    except CoderError as error:
        echo(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt as interrupt:  # a command may say what it keeps
        echo(f"coder-plugin: interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="coder-plugin",
        description="Losses beyond InfoNCE for OpenCLIP-style image-text retrieval training.",
        example=_EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"coder-plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for title, modules in _COMMANDS.items():
        with parser.titled(title, commands):
            for module in modules:
                module.add_parser(commands)
    return parser
