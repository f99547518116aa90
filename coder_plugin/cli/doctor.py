"""``coder-plugin doctor``: flags, and how findings are printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from coder_plugin.cli.flags import read_options
from coder_plugin.config import options_by_name
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo


def flags() -> list[str]:
    """The options of training that concern model, loss, data or machine."""
    more = ["batch_size", "accum_freq", "epochs", "lr", "opt", "layer_decay", "text_lr_scale", "precision", "logs", "seed"]
    more += ["recipe", "zeroshot", "classnames", "templates"]
    subjects = ("model", "loss", "data")
    return [name for name, option in options_by_name().items() if option.subject in subjects or name in more]


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "doctor",
        help="check installation, data, objective or a trained run, and say what to do",
        description="Check the installation; with data, a model or an objective named as for train, these too; with a folder, "
        "the run or export in it. Nothing is downloaded or written. Status 1 where there is a problem.",
    )
    parser.add_argument(
        "folder", nargs="*", help="folder of a run or an export; or hf-hub:OWNER/NAME, if it is cached"
    )
    parser.add_argument(
        "--samples", type=int, default=256, metavar="N", help="images to decode of a split with more than 10,000 [256]"
    )
    parser.add_argument("--all", action="store_true", help="decode every image and read all data")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 for a warning, too")
    parser.add_argument("--json", metavar="FILE", help="write the findings to FILE ('-': standard output)")
    add_flags(parser, only=flags())
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit status: 1 with a problem, or with ``--strict`` with a warning, else 0."""
    from coder_plugin.doctor.examine import examine
    from coder_plugin.doctor.findings import format_findings, worst

    findings = examine(
        read_options(arguments),
        arguments.folder,
        samples=arguments.samples,
        check_all=arguments.all,
        check_objective=arguments.config is not None,
    )
    text = json.dumps([asdict(each) for each in findings], indent=2)
    if arguments.json != "-":
        echo(format_findings(findings))
    if arguments.json == "-":
        echo(text)
    elif arguments.json:
        try:
            Path(arguments.json).write_text(text + "\n")
        except OSError as error:
            raise CoderError(f"--json {arguments.json}: {error.strerror}") from error
    return int(worst(findings) in (("warning", "problem") if arguments.strict else ("problem",)))
