"""``coder-plugin compare``."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder_plugin.config import option, options_by_name
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

if TYPE_CHECKING:
    from coder_plugin.compare.plan import Plan

#: Options of training that have a flag of their own here, or that a comparison sets.
_OWN = ("loss", "lr", "seed", "name", "logs", "resume", "report", "dry_run", "val_frequency")
#: Of a comparison of nothing: what the built-in scenes are compared with, in minutes on a CPU.
_ON_SCENES: Mapping[str, Any] = {"epochs": 2, "hold_aside": 300, "lr": [1e-3]}
_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s)?")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin compare`` besides the options of training."""

    plan: str | None = option(
        None, "rows with options of their own, a TOML file (docs/compare.md); else give a --loss for each row",
        metavar="PLAN.toml", positional=True
    )
    loss: list[str] = option(
        [], "losses to compare, a row of the result for each [clip and dcl; with --recipe: clip and the recipe's]",
        metavar="EXPRESSION"
    )
    lr: list[float] = option([], "learning rates; each row takes its best [the recipe's or train's]", metavar="X")
    seeds: int | None = option(None, "runs of each row at its chosen settings [3]", at_least=1)
    peer: list[str] = option([], "compare with the best of these rows [the first row]", metavar="ROW")
    trust_plan: bool = option(
        False, "let PLAN.toml run commands and Python files, and fetch models and data: read it first"
    )
    select_data: str | None = option(
        None, "data to choose rates, options and epochs on [images of --train-data, drawn at random: --hold-aside]",
        metavar="DATA"
    )
    output: str = option("comparison", "the folder for runs and results; the same command continues there", metavar="FOLDER")
    jobs: int = option(1, "runs at a time", at_least=1)
    budget: str | None = option(
        None, "keep within so much time, such as 2h or 90min: fewer seeds first, then fewer rates", metavar="TIME"
    )
    print_commands: bool = option(
        False, "print the train commands to run next, for SLURM or another scheduler, and stop. Repeat when they have ended, "
        "until none is left; then run without this flag"
    )


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_command

    parser = commands.add_parser(
        "compare",
        help="train losses on your pictures, each at its best learning rate, and say which to use",
        description="Train each --loss on your pictures at its best learning rate, measure the differences with intervals over "
        "images and seeds, and say what to use. Without data: clip and dcl on the built-in scenes, in minutes on a CPU. Other "
        "options are those of coder-plugin train, for all rows.",
    )
    add_command(parser, Command, run, options=[name for name in options_by_name() if name not in _OWN])


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_data, check_options, check_output

    budget = None if arguments.budget is None else parse_duration(arguments.budget)
    # --loss and --lr are rows and rates; a --config, such as a run's, may say what a comparison sets
    single = (name for name in ("loss", "lr") if name in options and not isinstance(options[name], list))
    of_file: dict[str, Any] = {name: options[name] for name in single}
    options = {**{name: value for name, value in options.items() if name not in _OWN}, **of_file}
    check_output(arguments.output)
    check_options(options)
    if arguments.select_data is not None:
        check_data(arguments.select_data, flag="--select-data", kind=options.get("dataset_type", "auto"))
    plans = make_plans(arguments, options)
    for row in (row for plan in plans for row in plan.rows if row.command is None):
        check_options(row.points()[0].options)

    from coder_plugin.compare.run import Comparison  # torch is imported: it takes seconds

    folder = Path(arguments.output).absolute()
    for plan in plans:
        where = folder / plan.name if plan.name else folder
        comparison = Comparison(plan, where, jobs=arguments.jobs, budget=budget, say=echo)
        if arguments.print_commands:
            for words in comparison.next_commands():
                echo(shlex.join(words))
            continue
        try:
            result = comparison.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"finished runs are kept in {where}; the same command continues") from None
        write(result, comparison.plan, where)
    return 0


def make_plans(arguments: Command, options: Mapping[str, Any]) -> list[Plan]:
    """The plan of the flags, or of the file and the flags that win over it."""
    from coder_plugin.compare import plan

    flags = {**options, **({"lr": arguments.lr} if arguments.lr else {})}
    given: dict[str, Any] = {"seeds": 3}
    if arguments.plan is not None:
        if arguments.loss:
            raise CoderError(f"--loss and {arguments.plan} both name rows: give one")
        given.update(plan.read_plan(arguments.plan, flags, trusted=arguments.trust_plan))
    else:
        own = [] if arguments.loss else [{"loss": flags.pop("loss")}] if "loss" in flags else []
        if not arguments.loss and not own and "recipe" in options:
            own = [{"name": options["recipe"]}]
        losses = arguments.loss or (["clip"] if own else ["clip", "dcl"])
        flags.pop("loss", None)
        rows: Sequence[Mapping[str, Any]] = [*({"loss": loss} for loss in losses), *own]
        if not {"train_data", "dataset_type", "recipe"} & options.keys():
            flags = {**_ON_SCENES, **flags}
        given.update(rows=rows, common=flags)
    if arguments.seeds is not None:
        given["seeds"] = arguments.seeds
    if arguments.peer:
        given["peers"] = arguments.peer
    if arguments.select_data is not None:
        given["select_data"] = arguments.select_data
    return plan.make_plans(**given)


def write(result: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """Write ``comparison.json`` and the page, and print the table."""
    import json

    from coder_plugin.compare.page import write_comparison
    from coder_plugin.compare.result import format_result
    from coder_plugin.files import atomic_write

    with atomic_write(folder / "comparison.json", "w") as file:
        file.write(json.dumps(result) + "\n")
    echo(format_result(result))
    echo(f"page: {write_comparison(result, plan, folder)}")
    if any(row.command is None for row in plan.rows):
        echo(f"models: {folder / 'runs'}/*/export/best")


def parse_duration(text: str) -> float:
    """Seconds of a time such as ``2h``, ``1h30min``, ``90min`` or ``45s``.

    Example:
        >>> parse_duration("1h30min"), parse_duration("45s")
        (5400.0, 45.0)
    """
    match = _BUDGET.fullmatch(text.strip().lower())
    parts = [float(part or 0) for part in match.groups()] if match else []
    if not any(parts):
        raise CoderError(f"--budget {text}: write a time such as 2h, 1h30min or 90min")
    hours, minutes, seconds = parts
    return 3600 * hours + 60 * minutes + seconds
