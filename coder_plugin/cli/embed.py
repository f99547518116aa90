"""``coder-plugin embed``."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from coder_plugin.cli.encoding import OPENING_AND_READING, EncodingFlags, check_encoding, skipped
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

#: As of coder_plugin.search.parquet, which imports more than a parser needs.
_TYPES = ("string", "int64", "float64", "bool")


@dataclass(frozen=True, kw_only=True)
class Command(EncodingFlags):
    """The flags of ``coder-plugin embed``."""

    data: str = option(MISSING, "a folder of pictures, shards, a .csv, .json, scenes …", metavar="DATA")
    dtype: str = option("float32", "type of the vectors", choices=("float32", "float16"))
    tokens: bool = option(
        False, "also write the tokens that the model's fusion head re-ranks by [no]; those of --reranker are always written"
    )
    columns: list[str] = option(
        [], "further columns of a table, or fields of json, to keep; TYPE is string, int64, float64 or bool [string]",
        metavar="NAME[:TYPE]"
    )
    rows_per_file: int = option(4096, "images in each file, for data that are not in shards", at_least=1)
    task_index: int | None = option(None, "number of this task, from 0 [in a SLURM array, its own]")
    task_count: int | None = option(None, "number of tasks [in a SLURM array, its own]")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "embed",
        help="encode images and captions into Parquet files",
        description="Encode a folder of pictures, shards, a CSV or any other data set into Parquet files, one for each shard "
        "or slice: keys, captions, paths, vectors. An interrupted command continues where it stopped. Several processes "
        "each make their part of the files: accelerate launch -m coder_plugin.cli embed ..., or the tasks of a SLURM array.",
    )
    add_command(parser, Command, run, options=OPENING_AND_READING)


def run(arguments: Command, options: dict[str, Any]) -> int:
    check_encoding(arguments, options)
    for name in ("tokens", "reranker"):
        if getattr(arguments, name) and arguments.what == "captions":
            raise CoderError(f"--{name} needs the images: leave out --what captions")
    columns = columns_of(arguments.columns)
    index, count = share_of(arguments.task_index, arguments.task_count)
    from coder_plugin.search.embed import EmbedJob

    own = ("data", "output", "export", "split", "what", "dtype", "thumbnails", "tokens", "reranker", "rows_per_file")
    job = EmbedJob(
        model=arguments.run_folder, options=options, columns=columns, **{name: getattr(arguments, name) for name in own}
    )
    try:
        finished = job.run(index=index, count=count, shown=os.environ.get("RANK", "0") == "0")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"complete files are kept in {arguments.output}; the same command continues") from None
    sizes = f"{plural(finished.files, 'file')}, {plural(finished.images, 'image')}, {plural(finished.captions, 'caption')}"
    if finished.made == 0 and finished.files == finished.units:
        echo(f"{arguments.output} is already finished: {sizes}; nothing to do")
        return 0
    missing = finished.units - finished.files
    rest = f"; {plural(missing, 'file')} of other tasks are missing" if missing else ""
    made = f"{plural(finished.made, 'file')} made here, vectors of {job.dimensions} dimensions, {job.dtype}"
    echo(f"embeddings {arguments.output}: {sizes}; {made}{skipped(finished.bad)}{rest}")
    return 0


def columns_of(named: list[str]) -> dict[str, str]:
    """Names and types of ``--columns``.

    Raises:
        CoderError: an unknown type, or a name twice.

    Example:
        >>> columns_of(["source", "year:int64"])
        {'source': 'string', 'year': 'int64'}
    """
    columns: dict[str, str] = {}
    for each in named:
        name, colon, kind = each.partition(":")
        if colon and kind not in _TYPES:
            raise CoderError(f"--columns {each}: the type {kind!r} is not one of {', '.join(_TYPES)}")
        if name in columns:
            raise CoderError(f"--columns {each}: {name!r} is named twice")
        columns[name] = kind or "string"
    return columns


def share_of(task: int | None, tasks: int | None) -> tuple[int, int]:
    """This process's number among all, and how many there are: of the tasks, and in each of the processes of a launcher.

    Without ``--task-index`` and ``--task-count``, a task of a SLURM array has the array's numbers.

    Raises:
        CoderError: only one of the two, or a number out of range.
    """
    from coder_plugin.launchers import ranks_from_slurm

    if (task is None) != (tasks is None):
        raise CoderError("--task-index and --task-count belong together: give both")
    if task is None or tasks is None:
        values = {"ID": 0, "MIN": 0, "STEP": 1, "COUNT": 1}
        array = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", value)) for name, value in values.items())
        number, least, step, tasks = array
        task = (number - least) // max(1, step)
    if tasks < 1 or not 0 <= task < tasks:
        raise CoderError(f"--task-index {task} of --task-count {tasks}: it must be from 0 to the count less one")
    ranks_from_slurm()
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return task * ranks + rank, tasks * ranks
