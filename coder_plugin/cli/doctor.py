"""``coder-plugin doctor``: flags, and how findings are printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from coder_plugin.cli.flags import read_options
from coder_plugin.config import options_by_name
from coder_plugin.errors import CoderError


def flags() -> list[str]:
    """The options of training that concern model, loss, data or machine."""
    more = ("batch_size", "accum_freq", "epochs", "precision", "logs", "seed")
    subjects = ("model", "loss", "data")
    return [name for name, option in options_by_name().items() if option.subject in subjects or name in more]


def doctor_command(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit status: 1 with a problem, or with ``--strict`` with a warning, else 0."""
    from coder_plugin.doctor.examine import examine
    from coder_plugin.doctor.findings import format_findings, worst

    findings = examine(
        read_options(arguments),
        arguments.folder,
        samples=arguments.samples,
        check_all=arguments.all,
        vectors=arguments.vectors,
        check_objective=arguments.config is not None,
    )
    text = json.dumps([asdict(each) for each in findings], indent=2)
    if arguments.json != "-":
        print(format_findings(findings))
    if arguments.json == "-":
        print(text)
    elif arguments.json:
        try:
            Path(arguments.json).write_text(text + "\n")
        except OSError as error:
            raise CoderError(f"--json {arguments.json}: {error.strerror}") from error
    return int(worst(findings) in (("warning", "problem") if arguments.strict else ("problem",)))
