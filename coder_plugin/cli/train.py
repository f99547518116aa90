"""``coder-plugin train``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder_plugin.config import TrainConfig, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin train`` besides the options of training."""

    json: bool = option(False, "with --dry-run: print all of the plan, as JSON")


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_command, add_flags

    parser = commands.add_parser(
        "train",
        help="train a model, by default on the built-in scenes",
        description="Train on --train-data, or on the built-in scenes. Flags have open_clip's names wherever open_clip "
        "has the flag. Several processes: accelerate launch -m coder_plugin.cli train ...",
    )
    add_flags(parser)
    add_command(parser, Command)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_options
    from coder_plugin.cli.flags import read_command, read_flags
    from coder_plugin.config import read_file
    from coder_plugin.pretrained.options import resolve_config

    file = None if arguments.config is None else read_file(arguments.config)
    flags, as_json = read_flags(arguments), read_command(Command, arguments).json
    if as_json and not flags.get("dry_run"):
        raise CoderError("--json prints the plan: add --dry-run")
    check_options(flags, file=file, file_name=str(arguments.config))
    config = resolve_config(flags, file=file, file_name=str(arguments.config))

    from torch.distributed.elastic.multiprocessing.errors import (
        get_error_handler,  # torch is imported: it takes seconds
    )

    try:
        return train(config, as_json=as_json)
    except Exception as error:
        get_error_handler().record_exception(error)  # torchrun's summary then names the rank that failed first
        raise


def train(config: TrainConfig, *, as_json: bool) -> int:
    """Train, or with ``--dry-run`` print the plan; returns the exit status."""
    from coder_plugin.report.callback import WriteReport
    from coder_plugin.training.loop import Trainer

    trainer = Trainer.from_config(config, callbacks=[WriteReport()] if config.run.report else [])
    if trainer.config.run.dry_run:
        trainer.print_plan(as_json=as_json)
        return 0
    try:
        result = trainer.run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept(trainer.folder)) from None
    if trainer.log.main:
        echo(summary(trainer, result))
    return 0


def kept(folder: Path) -> str:
    """What an interrupted run leaves, and how to continue it."""
    from coder_plugin.training.checkpoint import checkpoints

    saved = checkpoints(folder / "checkpoints")
    command = f"the same command with --name {shlex.quote(folder.name)} --resume latest"
    if not saved:
        return f"no checkpoint was written yet; {command} begins again" if folder.exists() else "nothing was written"
    return f"the checkpoint {saved[0].path} and the exports in {folder / 'export'} are kept; {command} continues from there"


def summary(trainer: Trainer, result: Mapping[str, Any]) -> str:
    """The last lines of a run: its recall, what it wrote, and the commands that come next."""
    from coder_plugin.evaluation import format_table

    lines = []
    if last := result["last"]:
        rows = {"before training": result["before"]} if result["before"] else {}
        rows[f"last (epoch {last['epoch']})"] = last
        if best := result["best"]:
            rows[f"best (epoch {best['epoch']})"] = best
        lines += ["", format_table(rows), f"chance R@1: {100 / last['images']:.2f} %   images: {last['images']}"]
    if trainer.zero_shot:
        from coder_plugin.training.fine_tuning import format_accuracy

        lines.append(format_accuracy(trainer.zero_shot))
    lines.append(f"checkpoints, exports and metrics: {result['folder']}")
    return "\n".join([*lines, "next:", *(f"  {command}" for command in next_commands(trainer))])


def next_commands(trainer: Trainer) -> list[str]:
    """Commands that evaluate (if there are validation data), index and search what a run has trained."""
    from coder_plugin.cli.index import search_words
    from coder_plugin.config import READING, get_option
    from coder_plugin.locations import is_local

    config, folder = trainer.config, str(trainer.folder)
    data = config.data.val or config.data.train or "scenes"
    options = config.to_flat()
    reading: list[str] = []
    for name in READING:
        if options[name] not in (None, get_option(name).default):
            reading += get_option(name).words(options[name])
    index = str(trainer.folder / "index")
    export = [] if trainer.best else ["--export", "last"]
    aside = config.data.hold_aside > 0
    known = (aside or config.data.val is not None) and all(map(is_local, filter(None, (data, config.data.regions))))
    evaluate = [] if known or config.data.on_scenes else ["--val-data", data, *reading]  # eval takes no others from the run
    if config.evaluation.zeroshot is not None and config.model.pretrained:  # also weights between those before and after
        evaluate += ["--zeroshot", config.evaluation.zeroshot, "--wise-ft", "0", "0.25", "0.5", "0.75", "1"]
    unseen = config.data.val is not None or config.data.on_scenes or aside  # recall on the training data would say little
    commands = (
        *([["eval", folder, *export, *evaluate]] if unseen else []),
        ["index", folder, *export, "--data", data, *reading, "--output", index],
        search_words(index, on_scenes=config.data.on_scenes),
    )
    return [shlex.join(["coder-plugin", *command]) for command in commands]
