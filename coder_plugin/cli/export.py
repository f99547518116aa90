"""``coder-plugin export``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.terminal import echo, plural


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write the vectors of an index to a vector store",
        description="Write the vectors of an index or of a folder of embeddings, with keys, ids, captions, paths and metadata, "
        "to a vector store: LanceDB, Qdrant, Milvus, PostgreSQL with pgvector, Parquet or NumPy files. A command that was "
        "stopped can be repeated.",
    )
    parser.add_argument("index", metavar="INDEX", help="a folder written by coder-plugin index or embed")
    parser.add_argument(
        "--to", required=True, metavar="STORE",
        help="lancedb, qdrant, milvus, pgvector, parquet, numpy, or another of coder-plugin plugins vector_stores",
    )
    parser.add_argument(
        "--output", required=True, metavar="WHERE",
        help="a folder, a file (Milvus Lite), an address (Qdrant, Milvus) or a connection string (PostgreSQL)",
    )
    parser.add_argument(
        "--what", choices=("images", "captions", "both"), default="images",
        help="which vectors; each kind is a table, or one of the columns of Parquet files [images]",
    )
    parser.add_argument("--table", metavar="NAME", help="name of the table or collection [images, captions]")
    parser.add_argument("--overwrite", action="store_true", help="replace a table that exists")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=False, help="verify the index's checksums first [False]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_folder
    from coder_plugin.registry import names

    stores = sorted([*names("vector_stores"), "parquet"])
    if arguments.to not in stores:
        hint = did_you_mean(arguments.to, stores) or ";"
        raise CoderError(f"--to {arguments.to}: unknown store{hint} known: {', '.join(stores)}")
    check_folder(arguments.index, "an index", command="coder-plugin index")
    echo(export_command(arguments))
    return 0


def export_command(arguments: argparse.Namespace) -> str:
    """Write the tables that the flags name; returns a summary."""
    from coder_plugin.integrations.vector_stores.export import export

    exported = export(
        arguments.index,
        arguments.to,
        arguments.output,
        what=arguments.what,
        name=arguments.table,
        overwrite=arguments.overwrite,
        verify=arguments.verify,
    )
    if exported.note:
        echo(f"note: {exported.note}", file=sys.stderr)
    return "\n".join(_line(arguments.to, written) for written in exported.tables)


def _line(to: str, written: Any) -> str:
    """A line about a table. Connection strings, which may have passwords, are not shown."""
    text = f"{to}: {written.name}: {plural(written.rows, 'row')} of {written.items:,} {written.kind}"
    if written.rows < written.items:
        text += "; some have the same key, of which the store keeps one"
    return text
