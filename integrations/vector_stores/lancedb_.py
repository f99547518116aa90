"""LanceDB: a table in a folder or an object store. It is one commit, so an export that was stopped leaves none."""

from __future__ import annotations

import os

import pyarrow as pa

from coder_plugin.integrations.vector_stores.base import Table, VectorStore, check_no_file, require


class LanceDB(VectorStore):
    """A LanceDB database. Images with several vectors have a row for each: LanceDB's multivectors have no inner product."""

    def __init__(self, where: str) -> None:
        check_no_file(where)
        # a new table is no reason for a warning
        os.environ.setdefault("LANCEDB_LOG", "warn,lance::dataset::write::insert=error")
        self.database = require("lancedb", extra="lancedb").connect(where)

    def exists(self, name: str) -> bool:
        try:
            self.database.open_table(name)
        except ValueError as error:  # also of a folder without a commit
            if f"Table '{name}' was not found" not in str(error):
                raise
            return False
        return True

    def write(self, table: Table) -> int:
        rows = table.by_view()
        reader = pa.RecordBatchReader.from_batches(rows.schema, rows.batches)
        return self.database.create_table(table.name, data=reader, mode="overwrite").count_rows()
