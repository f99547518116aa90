"""Qdrant: a collection on a server, or in a folder that Qdrant's client reads without one.

Qdrant has no transactions. So the points go into a collection ``NAME.a`` or ``NAME.b``, and at the end an alias ``NAME`` is set
to it in one operation.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from coder_plugin.integrations.vector_stores.base import Table, VectorStore, check_no_file, require, vectors_of

_POINTS = 256  # of one request


class Qdrant(VectorStore):
    """Collections with dot products. Point ids are image ids, or ids of captions; images with several vectors are points with
    a multivector, whose score is that of the best."""

    def __init__(self, where: str) -> None:
        client = require("qdrant_client", extra="qdrant")
        self.models = client.models
        if "://" in where:
            self.client = client.QdrantClient(
                url=where, api_key=os.environ.get("QDRANT_API_KEY"), timeout=60, check_compatibility=False
            )
        else:
            check_no_file(where)
            self.client = client.QdrantClient(path=where)

    def exists(self, name: str) -> bool:
        return name in self._aliases() or self.client.collection_exists(name)

    def write(self, table: Table) -> int:
        models, name, old = self.models, table.name, self._aliases().get(table.name)
        new = f"{name}.b" if old == f"{name}.a" else f"{name}.a"
        self.client.delete_collection(new)  # of an export that was stopped
        several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM) if table.views > 1 else None
        vectors = models.VectorParams(size=table.dimensions, distance=models.Distance.DOT, multivector_config=several)
        self.client.create_collection(new, vectors_config=vectors)
        for batch in table.batches:
            points = self._points(batch)
            for start in range(0, len(points), _POINTS):
                self.client.upsert(new, points[start : start + _POINTS], wait=True)
        count = self.client.count(new, exact=True).count
        if old is None:
            self.client.delete_collection(name)  # of another writer, which --overwrite replaces
        alias = models.CreateAlias(collection_name=new, alias_name=name)
        operations = [models.CreateAliasOperation(create_alias=alias)]
        if old is not None:
            operations.insert(0, models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=name)))
        self.client.update_collection_aliases(change_aliases_operations=operations)
        if old in (f"{name}.a", f"{name}.b"):  # else it is somebody's own, to which the alias led
            self.client.delete_collection(old)
        return count

    def close(self) -> None:
        self.client.close()

    def _aliases(self) -> dict[str, str]:
        return {each.alias_name: each.collection_name for each in self.client.get_aliases().aliases}

    def _points(self, batch: pa.RecordBatch) -> list[Any]:
        vectors = vectors_of(batch)
        vectors = (vectors[:, 0] if vectors.shape[1] == 1 else vectors).tolist()
        payloads = batch.drop_columns(["id", "vector"]).to_pylist()
        values = zip(batch["id"].to_pylist(), vectors, payloads, strict=True)
        return [self.models.PointStruct(id=number, vector=vector, payload=payload) for number, vector, payload in values]
