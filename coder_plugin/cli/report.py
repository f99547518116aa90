"""``coder-plugin report``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from coder_plugin.cli.encoding import ExportFlag
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, READING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

_OPTIONS = (
    *("val_data", "max_regions", "max_bad_samples", "max_image_pixels", "workers", "batch_size", "precision"), *READING
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Command(ExportFlag):
    """The flags of ``coder-plugin report``."""

    run_folder: list[str] = option(
        MISSING, "a training run's folder; several are compared", metavar="RUN", positional=True
    )
    output: str | None = option(
        None, "the file to write [RUN/report.html; of several, comparison.html beside the first]", metavar="FILE"
    )
    images: int | None = option(
        None, "number of queries of each kind, and of sample images [6]. With several: show queries and maps side by side, "
        "for which their models are opened [not shown]", at_least=1
    )  # fmt: skip
    split: str | None = option(None, "split of Karpathy files, precomp folders and scenes [val]")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="write an HTML page about a training run, or a comparison of several",
        description="Write one self-contained HTML file about a run: recall, best and worst queries, curves, options, a map of "
        "the embeddings, concepts, banks. A section without data says why. Several runs are compared: recall, curves, the "
        "options that differ, time per epoch; with --images also queries and maps side by side.",
    )
    add_command(parser, Command, run, options=_OPTIONS)


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_folder, check_options

    for folder in arguments.run_folder:
        check_folder(folder, "a run", command="coder-plugin train")
    shown = {name: getattr(arguments, name) for name in ("split", "images") if getattr(arguments, name) is not None}
    where: dict[str, Any] = {"export": arguments.export, "output": arguments.output}
    if len(arguments.run_folder) > 1 and arguments.images is None and (shown or options):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in (*shown, *options))
        raise CoderError(
            f"several runs are compared by what they have logged: leave out {given}, or add --images N to open their models"
        )
    check_options(options, reads=["val_data", "image_root"])
    if len(arguments.run_folder) > 1:
        from coder_plugin.report.compare import compare_runs

        echo(compare_runs(arguments.run_folder, options=options, **shown, **where))
        return 0
    from coder_plugin.report.run import report_run

    echo(report_run(arguments.run_folder[0], options, **shown, **where))
    return 0
