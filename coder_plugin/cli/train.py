"""``coder-plugin train``."""

from __future__ import annotations

import argparse

from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "train",
        help="train a model, by default on the built-in scenes",
        description="Train on --train-data, or on the built-in scenes. Flags have open_clip's names wherever open_clip "
        "has the flag. Several processes: accelerate launch -m coder_plugin.cli train ...",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
        echo(f"\n{format_table(rows)}")
        echo(f"chance R@1: {100 / result['last']['images']:.2f} %   images: {result['last']['images']}")
    if trainer.log.main:
        echo(f"checkpoints, exports and metrics: {result['folder']}")
    return 0
