"""``coder-plugin report``."""

from __future__ import annotations

import argparse

from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import READING

    parser = commands.add_parser(
        "report",
        help="one HTML file of a training run: curves, recall, results, state",
        description="Write one self-contained HTML file about a run: options, curves, recall, best and worst queries, a map of "
        "the embeddings, concepts, banks. A section without data says why.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="a training run's folder")
    parser.add_argument("--output", metavar="FILE", help="the file to write [RUN/report.html]")
    parser.add_argument("--export", choices=("best", "last"), help="the export whose results are shown [best]")
    parser.add_argument(
        "--images", type=int, default=6, metavar="N", help="number of queries of each kind, and of sample images [6]"
    )
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    reading = "val_data max_regions max_bad_samples max_image_pixels workers batch_size precision".split()
    add_flags(parser, only=[*reading, *READING])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_folder, check_options
    from coder_plugin.cli.flags import read_options

    check_folder(arguments.run_folder, "a run", command="coder-plugin train")
    check_options(read_options(arguments))
    from coder_plugin.report.run import report_run

    options = {name: getattr(arguments, name) for name in ("export", "split", "output", "images")}
    echo(report_run(arguments.run_folder, read_options(arguments), **options))
    return 0
