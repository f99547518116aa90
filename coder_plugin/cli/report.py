"""``coder-plugin report``."""

from __future__ import annotations

import argparse

from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import READING

    parser = commands.add_parser(
        "report",
        help="one HTML file of a training run: recall, results, curves, state; or of several, compared",
        description="Write one self-contained HTML file about a run: recall, best and worst queries, curves, options, a map of "
        "the embeddings, concepts, banks. A section without data says why. Several runs are compared: recall, curves, the "
        "options that differ, time per epoch.",
    )
    parser.add_argument("run_folder", nargs="+", metavar="RUN", help="a training run's folder; several are compared")
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write [RUN/report.html; of several, comparison.html beside the first]"
    )
    parser.add_argument(
        "--export", choices=("best", "last"), help="the export whose results are shown [best; last if no validation was run]"
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help="number of queries of each kind, and of sample images [6]"
    )
    parser.add_argument("--split", help="split of Karpathy files, precomp folders and scenes [val]")
    reading = "val_data max_regions max_bad_samples max_image_pixels workers batch_size precision".split()
    add_flags(parser, only=[*reading, *READING])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_folder, check_options
    from coder_plugin.cli.flags import read_options

    options = read_options(arguments)
    for folder in arguments.run_folder:
        check_folder(folder, "a run", command="coder-plugin train")
    shown = {name: getattr(arguments, name) for name in ("split", "images") if getattr(arguments, name) is not None}
    where = {"export": arguments.export, "output": arguments.output}
    if len(arguments.run_folder) > 1:
        from coder_plugin.report.compare import compare_runs

        if others := [f"--{name.replace('_', '-')}" for name in (*shown, *options)]:
            raise CoderError(
                f"several runs are compared by what they have logged: leave out {', '.join(others)} "
                "(coder-plugin eval RUN RUN measures them on other data)"
            )
        echo(compare_runs(arguments.run_folder, **where))
        return 0
    check_options(options, reads=["val_data", "image_root"])
    from coder_plugin.report.run import report_run

    echo(report_run(arguments.run_folder[0], options, **shown, **where))
    return 0
