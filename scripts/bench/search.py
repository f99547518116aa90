"""Latency of single queries in an index, against plain FAISS over the same vectors in the same process.

    python scripts/bench/search.py [--items 7000 100000] [--dimensions 512] [--repeats 300] [-k 10] [--threads 1]
    python scripts/bench/search.py --items 100000 --device cuda            also the same vectors in float16 on a GPU

Each query is timed, in rotating order, with

    plain FAISS       `faiss.IndexFlatIP.search`
    Index.search      rows and scores; the rows are checked against those of FAISS
    Searcher.search   results with the keys and ids of the records
    torch             with --device: a product in float16 and `topk`

The vectors are random and normalised. The records hold five captions per image. Printed: milliseconds at p50 and p95, and
their ratios to plain FAISS. The first 20 queries are warm-up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import Results, add_options

from coder_plugin.search.build import build_index
from coder_plugin.search.index import Index
from coder_plugin.search.parquet import Rows, schema_of, write_file
from coder_plugin.search.searcher import Query, Searcher


def random_index(folder: Path, items: int, dimensions: int, model: Mapping[str, Any]) -> None:
    """Write an index of random image vectors of unit length, with five captions of each image as text."""
    generator = torch.Generator().manual_seed(0)

    def rows() -> Iterator[Rows]:
        for start in range(0, items, 512):
            keys = [f"picture_{number:08d}.jpg" for number in range(start, min(start + 512, items))]
            captions = [tuple(f"caption {n} of {key} describes the picture" for n in range(5)) for key in keys]
            vectors = torch.nn.functional.normalize(torch.randn(len(keys), dimensions, generator=generator), dim=-1)
            yield Rows(keys, captions, vectors.numpy(), None, [None] * len(keys), [None] * len(keys))

    header = {"model": dict(model), "plan": {}, "units": 1, "unit": 0, "bad": []}
    with tempfile.TemporaryDirectory(dir=folder.parent) as embeddings:
        write_file(Path(embeddings) / "00000000.parquet", schema_of(dimensions, what="images"), header, rows())
        build_index(folder, embeddings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[7000, 100_000], help="vectors of the index")
    parser.add_argument("--dimensions", type=int, default=512, help="dimensions of the vectors [512]")
    parser.add_argument("-k", type=int, default=10, help="results per query [10]")
    add_options(parser, repeats=300, threads=1, without=("limit", "clock"))
    options = parser.parse_args()
    faiss.omp_set_num_threads(options.threads)
    results = Results("search", options, ["faiss-cpu"])
    for items in options.items:
        with tempfile.TemporaryDirectory() as folder:
            measure(items, Path(folder) / "index", options, results)


def measure(items: int, folder: Path, options: argparse.Namespace, results: Results) -> None:
    random_index(folder, items, options.dimensions, {"fingerprint": ""})
    index = Index(folder)
    searcher = Searcher(index, None)
    plain = faiss.IndexFlatIP(options.dimensions)
    for batch in index.table.vector_batches("images"):
        plain.add(batch)
    queries = torch.randn(options.repeats + 20, options.dimensions, generator=torch.Generator().manual_seed(1))
    searches: dict[str, Callable[[torch.Tensor], Any]] = {
        "plain FAISS": lambda query: plain.search(query.numpy(), options.k),
        "Index.search": lambda query: index.search(query, options.k),
        "Searcher.search": lambda query: searcher.search(Query(query, "captions", None), options.k),
    }
    if options.device.startswith("cuda"):
        vectors = torch.from_numpy(plain.reconstruct_n(0, items)).half().to(options.device)
        searches["torch"] = lambda query: (query.half().to(options.device) @ vectors.T).float().topk(options.k).indices.cpu()
    times: dict[str, list[float]] = {name: [] for name in searches}
    for number, query in enumerate(queries.split(1)):
        turn = number % len(searches)  # the first one has a cold cache
        for name in [*searches][turn:] + [*searches][:turn]:
            search = searches[name]
            started = time.perf_counter()
            search(query)
            if number >= 20:
                times[name].append(1e3 * (time.perf_counter() - started))
        np.testing.assert_array_equal(plain.search(query.numpy(), options.k)[1], index.search(query, options.k)[1])
    base = np.percentile(times["plain FAISS"], [50, 95])
    for name, values in times.items():
        p50, p95 = np.percentile(values, [50, 95])
        print(
            f"{items:>7,} x {options.dimensions}, k = {options.k}: {name:<16} p50 {p50:7.3f} ms, p95 {p95:7.3f} ms; "
            f"{p50 / base[0]:.3f} and {p95 / base[1]:.3f} times plain FAISS"
        )
        results.write({"case": f"{items} x {options.dimensions}", "form": name, "peer": "plain FAISS", "p50": p50, "p95": p95})


if __name__ == "__main__":
    main()
