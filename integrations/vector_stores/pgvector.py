"""PostgreSQL with the extension pgvector: a table that is written in one transaction."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coder_plugin.errors import CoderError
from coder_plugin.integrations.vector_stores.base import Table, VectorStore, require

_TYPES = {
    pa.string(): "text", pa.int64(): "bigint", pa.float64(): "double precision", pa.bool_(): "boolean",
    pa.list_(pa.string()): "text[]",
}  # fmt: skip


class PgVector(VectorStore):
    """Tables with a ``vector`` column. Images with several vectors have a row for each."""

    def __init__(self, where: str) -> None:
        if where and "://" not in where and "=" not in where:
            raise CoderError(f"--output {where}: give a connection string, such as postgresql://USER@HOST/DATABASE")
        self.psycopg = require("psycopg", extra="pgvector")
        self.connection = self.psycopg.connect(where)

    def exists(self, name: str) -> bool:
        with self.connection.transaction():
            [found] = self.connection.execute("SELECT to_regclass(quote_ident(%s)) IS NOT NULL", [name]).fetchone()
        return found

    def write(self, table: Table) -> int:
        sql, rows = self.psycopg.sql, table.by_view()
        name, count = sql.Identifier(table.name), 0
        types = [_TYPES.get(each.type, f"vector({table.dimensions}) NOT NULL") for each in rows.schema]
        names = list(map(sql.Identifier, rows.schema.names))
        defined = [sql.SQL("{} {}").format(*each) for each in zip(names, map(sql.SQL, types), strict=True)]
        columns = sql.SQL(", ").join(names)
        with self.connection.transaction():
            self.connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self.connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(name))
            self.connection.execute(sql.SQL("CREATE TABLE {} ({})").format(name, sql.SQL(", ").join(defined)))
            statement = sql.SQL("COPY {} ({}) FROM STDIN").format(name, columns)
            with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
                for batch in rows.batches:
                    count += len(batch)
                    for record in batch.to_pylist():
                        copy.write_row([_text(value) for value in record.values()])
            self.connection.execute(sql.SQL("CREATE INDEX ON {} (id)").format(name))
        return count

    def close(self) -> None:
        self.connection.close()


def _text(value: Any) -> Any:
    """A value as COPY takes it: a vector as its text, and texts without null characters, which PostgreSQL does not store."""
    if isinstance(value, list) and value and isinstance(value[0], float):
        return str(value)
    if isinstance(value, list):
        return [each.replace("\0", "\ufffd") for each in value]
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
