"""``coder-plugin vectors``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

_FORMS = ("parquet", "numpy")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin vectors``."""

    index: str = option(MISSING, "a folder written by coder-plugin index or embed", metavar="INDEX", positional=True)
    to: str = option(MISSING, "parquet or numpy; vector stores read Parquet", metavar="FORM")
    output: str = option(MISSING, "a folder to make", metavar="DIR")
    what: str = option("images", "with --to numpy: which vectors", choices=("images", "captions", "both"))


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "vectors",
        help="write the vectors of an index as Parquet or NumPy files",
        description="Write the vectors of an index or of a folder of embeddings to a new folder: the Parquet files with keys, "
        "captions and all other columns, or one NumPy array of each kind beside keys.txt and captions.txt.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.checks import check_folder

    if arguments.to not in _FORMS:
        raise CoderError(
            f"--to {arguments.to}: it is parquet or numpy; LanceDB, Qdrant, Milvus and pgvector take the Parquet files of an "
            "index in a few lines: docs/embed.md#vector-stores"
        )
    check_folder(arguments.index, "an index", command="coder-plugin index")
    import shutil

    from coder_plugin.files import atomic_folder
    from coder_plugin.search.embed import embedded
    from coder_plugin.search.index import Index, is_index
    from coder_plugin.search.parquet import KINDS

    output = Path(arguments.output)
    if output.exists():
        raise CoderError(f"--output {output} exists: give a folder to make")
    folder = Path(arguments.index)
    table = Index(folder, gpu=False).table if is_index(folder) else embedded(folder)
    kinds = [kind for kind in KINDS if arguments.what in ("both", kind)]
    if arguments.to == "numpy" and (missing := [kind for kind in kinds if kind not in table.vector_sizes]):
        raise CoderError(f"{folder} has no vectors of {missing[0]}: embed them with --what both")
    with atomic_folder(output) as temporary:
        if arguments.to == "parquet":
            for path in table.paths:
                shutil.copyfile(path, temporary / path.name)
        else:
            _write_arrays(table, temporary, kinds)
    echo(f"{output}: {plural(len(table), 'image')} as {arguments.to}")
    return 0


def _write_arrays(table: object, folder: Path, kinds: list[str]) -> None:
    import numpy as np

    from coder_plugin.search.parquet import Table

    assert isinstance(table, Table)
    files = (open(folder / f"{name}.txt", "w", encoding="utf-8") for name in ("keys", "captions"))
    with next(files) as keys, next(files) as texts:
        for _, batch in table.batches(["key", "captions"]):
            for key, captions in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                keys.write(" ".join(key.splitlines()) + "\n")
                texts.writelines(f"{' '.join(key.splitlines())}\t{' '.join(text.split())}\n" for text in captions)
    for kind in kinds:
        size, batches = table.vector_sizes[kind], table.vector_batches(kind)
        vectors = np.concatenate([batch.reshape(-1, size["views"], size["dimensions"]) for batch in batches])
        np.save(folder / f"{kind}.npy", vectors[:, 0] if size["views"] == 1 else vectors)
