"""``coder-plugin doctor``: flags, and how findings are printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coder_plugin.cli.flags import add_command
from coder_plugin.config import option, options_by_name
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin doctor`` besides options of training."""

    folder: list[str] = option(
        [], "folder of a run or an export; or hf-hub:OWNER/NAME, if it is cached", metavar="FOLDER", positional=True
    )
    samples: int = option(256, "images to decode, of a split with more than 10,000", at_least=1)
    all: bool = option(False, "decode every image and read all data")
    strict: bool = option(False, "exit with status 1 for a warning, too")
    json: str | None = option(None, "write the findings to FILE ('-': standard output)", metavar="FILE")


def flags() -> list[str]:
    """The options of training that concern model, loss, data or machine."""
    more = ["batch_size", "accum_freq", "epochs", "lr", "opt", "layer_decay", "text_lr_scale", "precision", "logs", "seed"]
    more += ["recipe", "zeroshot", "classnames", "templates"]
    subjects = ("model", "loss", "data")
    return [name for name, option in options_by_name().items() if option.subject in subjects or name in more]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check an installation, data, a set-up or a trained run, and say what to do",
        description="Check the installation. With options of train, such as --train-data, --model or --loss, check these "
        "too; with FOLDER, check the run or export in it. Nothing is downloaded or written. Status 1 if there is a problem.",
    )
    add_command(parser, Command, run, options=flags())


def run(command: Command, options: dict[str, Any]) -> int:
    """Check, print, and return the exit status: 1 with a problem, or with ``--strict`` with a warning, else 0."""
    from coder_plugin.doctor.examine import examine
    from coder_plugin.doctor.findings import format_findings, worst

    findings = examine(options, command.folder, samples=command.samples, check_all=command.all)
    text = json.dumps([asdict(each) for each in findings], indent=2)
    if command.json != "-":
        echo(format_findings(findings))
    if command.json == "-":
        echo(text)
    elif command.json:
        try:
            Path(command.json).write_text(text + "\n")
        except OSError as error:
            raise CoderError(f"--json {command.json}: {error.strerror}") from error
    return int(worst(findings) in (("warning", "problem") if command.strict else ("problem",)))
