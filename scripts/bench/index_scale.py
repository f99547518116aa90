"""An index of millions of made-up vectors: memory and time of its build, recall and latency by nprobe, and the first query.

    python scripts/bench/index_scale.py --items 5000000 --dimensions 256 --factory IVF4096,Flat --folder /big/disk/scale
    python scripts/bench/index_scale.py --items 3000 --dimensions 32 --factory IVF16,Flat --folder /tmp/scale       a short form

The unit vectors lie around made-up centres. They are written as an embeddings folder of 8,192 vectors a file.
Then, each in a process of its own, so that memory and time are that step's alone:

    embed    writes DIR/embeddings; kept, if it is there
    build    coder_plugin.search.build.build_index, and the most memory that it had resident (ru_maxrss)
    truth    the ten best of each query by brute force, from the embeddings
    search   recall@10 against it, and p50 and p95 of single queries, for each nprobe
    first    opens the index in a new process and answers one query with the keys of its results, after the operating system
             was asked to drop the files from memory
    stores   with --stores: the same queries in LanceDB and Qdrant's local mode, filled from the embeddings as in
             docs/embed.md; each without an index, which compares all vectors, and LanceDB also with lists (IVF_FLAT)

Printed, and written to --json: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

K = 10
ROWS = 8192  # images of a unit
STEPS = ("embed", "build", "truth", "search", "first", "stores")


def vectors(options: argparse.Namespace, unit: int) -> np.ndarray:
    """The vectors [n, D] of a unit: near one of the centres each, of unit length. Unit -1: the queries."""
    centres = np.random.default_rng(0).standard_normal((options.centres, options.dimensions), dtype=np.float32)
    rng = np.random.default_rng([1, unit + 1])
    count = options.queries if unit < 0 else min(ROWS, options.items - unit * ROWS)
    noise = rng.standard_normal((count, options.dimensions), dtype=np.float32)
    found = centres[rng.integers(0, options.centres, count)] + options.spread * noise
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def embed(options: argparse.Namespace) -> dict[str, Any]:
    from coder_plugin.search.parquet import Rows, schema_of, write_file

    folder = options.folder / "embeddings"
    plan = {name: getattr(options, name) for name in ("items", "dimensions", "centres", "spread")}
    units = -(-options.items // ROWS)
    model = {"fingerprint": "0" * 64, "name": "made up"}
    folder.mkdir(parents=True, exist_ok=True)
    for unit in range(units):
        path = folder / f"{unit:08d}.parquet"
        if not path.exists():
            found = vectors(options, unit)
            keys = [f"{unit * ROWS + number:010d}.jpg" for number in range(len(found))]
            none = [None] * len(found)
            header = {"model": model, "plan": plan, "units": units, "unit": unit, "bad": []}
            schema = schema_of(options.dimensions, what="images")
            write_file(path, schema, header, [Rows(keys, [[]] * len(found), found, None, none, none)])
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def build(options: argparse.Namespace) -> dict[str, Any]:
    from coder_plugin.search.build import build_index

    note = build_index(options.folder / "index", options.folder / "embeddings", factory=options.factory)
    return {"bytes": sum(note["sizes"].values())}


def batches(options: argparse.Namespace) -> Iterator[np.ndarray]:
    for unit in range(-(-options.items // ROWS)):
        yield vectors(options, unit)


def truth(options: argparse.Namespace) -> dict[str, Any]:
    queries = vectors(options, -1)
    scores, rows = np.full((len(queries), K), -np.inf, np.float32), np.full((len(queries), K), -1)
    start = 0
    for batch in batches(options):
        both = np.concatenate([scores, queries @ batch.T], 1)
        numbers = np.concatenate([rows, np.broadcast_to(np.arange(start, start + len(batch)), (len(queries), len(batch)))], 1)
        order = np.argsort(-both, 1, kind="stable")[:, :K]
        scores, rows = np.take_along_axis(both, order, 1), np.take_along_axis(numbers, order, 1)
        start += len(batch)
    np.save(options.folder / "truth.npy", rows)
    return {"queries": len(queries)}


def measure(options: argparse.Namespace, find: Callable[[np.ndarray], Sequence[int]]) -> dict[str, float]:
    """Recall@10 against the truth, and p50 and p95 of single queries; ``find`` gives the rows of the ten best."""
    queries, expected = vectors(options, -1), np.load(options.folder / "truth.npy")
    for query in queries[:20]:  # warm-up
        find(query)
    times, found = [], []
    for query in queries:
        started = time.perf_counter()
        found.append(find(query))
        times.append(1000 * (time.perf_counter() - started))
    recall = np.mean([len({*one} & {*other}) / K for one, other in zip(found, expected.tolist(), strict=True)])
    p50, p95 = np.percentile(times, (50, 95)).tolist()
    return {"recall@10": float(recall), "p50 ms": p50, "p95 ms": p95}


def search(options: argparse.Namespace) -> dict[str, Any]:
    from coder_plugin.search.index import Index

    table = []
    for nprobe in options.nprobe if options.factory.startswith("IVF") else [None]:
        index = Index(options.folder / "index", parameters=None if nprobe is None else f"nprobe={nprobe}", gpu=False)
        figures = measure(options, lambda query, index=index: index.search(query[None], K)[1][0].tolist())  # type: ignore[misc]
        table.append({"nprobe": nprobe, **figures})
    return {"by nprobe": table}


def stores(options: argparse.Namespace) -> dict[str, Any]:
    import lancedb
    import pyarrow.dataset
    from qdrant_client import QdrantClient, models

    rows = pyarrow.dataset.dataset(options.folder / "embeddings").scanner(columns=["key", "image_vector"])
    results: dict[str, Any] = {}
    started = time.perf_counter()
    table = lancedb.connect(options.folder / "lancedb").create_table("images", rows.to_reader(), mode="overwrite")
    results["LanceDB"] = {"filled in s": time.perf_counter() - started}

    def lance(query: np.ndarray, nprobe: int | None = None) -> list[int]:
        found = table.search(query, vector_column_name="image_vector").distance_type("dot").limit(K)
        found = found.select(["key", "_distance"])
        return [int(row["key"][:10]) for row in (found if nprobe is None else found.nprobes(nprobe)).to_list()]

    results["LanceDB"] |= measure(options, lance)
    started = time.perf_counter()
    lists = int(np.sqrt(options.items))
    table.create_index(metric="dot", num_partitions=lists, vector_column_name="image_vector", index_type="IVF_FLAT")
    results["LanceDB IVF_FLAT"] = {"lists": lists, "indexed in s": time.perf_counter() - started}
    results["LanceDB IVF_FLAT"]["by nprobe"] = [
        {"nprobe": nprobe, **measure(options, lambda query, nprobe=nprobe: lance(query, nprobe))}  # type: ignore[misc]
        for nprobe in options.nprobe
    ]
    started = time.perf_counter()
    client = QdrantClient(":memory:")  # on disk it searches alike, but commits each point
    sizes = models.VectorParams(size=options.dimensions, distance=models.Distance.DOT)
    client.create_collection("images", vectors_config=sizes)
    for batch in rows.to_batches():
        points = [models.PointStruct(id=int(row["key"][:10]), vector=row["image_vector"]) for row in batch.to_pylist()]
        client.upsert("images", points)
    results["Qdrant, local"] = {"filled in s": time.perf_counter() - started}
    results["Qdrant, local"] |= measure(
        options, lambda query: [int(hit.id) for hit in client.query_points("images", query=query.tolist(), limit=K).points]
    )
    return results


def first(options: argparse.Namespace) -> dict[str, Any]:
    from coder_plugin.search.index import Index

    dropped = 0
    for path in sorted(each for each in options.folder.rglob("*") if each.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            dropped += path.stat().st_size
    query = vectors(options, -1)[:1]
    parameters = f"nprobe={options.nprobe[0]}" if options.factory.startswith("IVF") else None
    seconds = []
    for _ in range(2):  # cold, and once more
        started = time.perf_counter()
        index = Index(options.folder / "index", parameters=parameters, gpu=False)
        opened = time.perf_counter()
        index.records.images(index.search(query, K)[1][0].tolist())
        seconds.append([opened - started, time.perf_counter() - opened])
    return {"dropped bytes": dropped, "open s, first answer s": seconds[0], "again": seconds[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5_000_000)
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--factory", default="IVF4096,Flat")
    parser.add_argument("--nprobe", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--centres", type=int, default=20_000)
    parser.add_argument("--spread", type=float, default=0.6, help="of a vector around its centre, by dimension")
    parser.add_argument("--folder", type=Path, required=True, help="for the embeddings and the index, which stay there")
    parser.add_argument("--stores", action="store_true", help="also measure LanceDB and Qdrant's local mode")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--step", choices=STEPS, help="one step alone, in this process")
    options = parser.parse_args()
    if options.step:
        started = time.perf_counter()
        result = globals()[options.step](options)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(json.dumps({**result, "seconds": round(time.perf_counter() - started, 3), "most resident MB": round(peak / 1e6)}))
        return
    names = ("items", "dimensions", "factory", "nprobe", "queries", "centres", "spread")
    results: dict[str, Any] = {"options": {name: getattr(options, name) for name in names}}
    results["machine"] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for step in STEPS if options.stores else STEPS[:-1]:
        command = [sys.executable, __file__, *sys.argv[1:], "--step", step]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[step] = json.loads(done.stdout.splitlines()[-1])
        print(f"{step}: {json.dumps(results[step])}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
