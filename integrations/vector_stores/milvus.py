"""Milvus: a collection on a server, or in a ``.db`` file of Milvus Lite.

Rows go into a collection ``NAME__writing``, which is renamed at the end.
"""

from __future__ import annotations

import logging
import os

from coder_plugin.errors import CoderError
from coder_plugin.integrations.vector_stores.base import Table, VectorStore, require

_LONGEST = 65_535  # bytes of a key: the most that Milvus takes
_ROWS = 512  # of one request


class Milvus(VectorStore):
    """Collections with inner products. The primary key is the image id, or the id of a caption; columns are dynamic fields.
    Images with several vectors have a row for each."""

    def __init__(self, where: str) -> None:
        self.pymilvus = require("pymilvus", extra="milvus")
        if "://" not in where and not where.endswith(".db"):
            raise CoderError(f"--output {where}: a file of Milvus Lite ends in .db, and a server's address begins with http://")
        if "://" not in where:  # Milvus Lite logs a traceback for each call that it does not have, or if it cannot start
            for name in ("grpc._server", "milvus_lite.server_manager"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        self.client = self.pymilvus.MilvusClient(uri=where, token=os.environ.get("MILVUS_TOKEN", ""))

    def exists(self, name: str) -> bool:
        return self.client.has_collection(name)

    def write(self, table: Table) -> int:
        new, types = f"{table.name}__writing", self.pymilvus.DataType
        if self.client.has_collection(new):  # of an export that was stopped
            self.client.drop_collection(new)
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=True)
        schema.add_field("id", types.INT64, is_primary=True)
        schema.add_field("key", types.VARCHAR, max_length=_LONGEST)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=table.dimensions)
        index = self.client.prepare_index_params()
        index.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
        self.client.create_collection(new, schema=schema, index_params=index)
        for batch in table.by_view().batches:
            data = batch.to_pylist()
            for start in range(0, len(data), _ROWS):
                self.client.upsert(new, data[start : start + _ROWS])
        self.client.flush(new)
        if self.client.has_collection(table.name):
            self.client.drop_collection(table.name)
        self.client.rename_collection(new, table.name)
        return int(self.client.query(table.name, output_fields=["count(*)"])[0]["count(*)"])

    def close(self) -> None:
        self.client.close()
