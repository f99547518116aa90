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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import torch
from common import Results, add_options

from coder_plugin.data.item import stable_hash
from coder_plugin.index.build import build_index
from coder_plugin.index.search import Index, Query, Searcher
from coder_plugin.pretrained.encode import Batch


class RandomEncoder:
    """An encoder that returns random image vectors."""

    batch_size, max_bad_samples, reranking, model = 512, 0, None, torch.nn.Identity()

    def __init__(self, items: int, dimensions: int) -> None:
        self.items, self.dimensions = items, dimensions

    def text(self, texts: list[str], head: Any = None) -> tuple[torch.Tensor, None]:
        return torch.zeros(len(texts), self.dimensions), None

    def batches(self, *_: Any, **__: Any) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, self.items, self.batch_size):
            positions = torch.arange(start, min(start + self.batch_size, self.items))
            keys = [f"picture_{number:08d}.jpg" for number in positions.tolist()]
            vectors = torch.randn(len(positions), self.dimensions, generator=generator)
            ids = torch.tensor([stable_hash(key) for key in keys])
            captions = [tuple(f"caption {n} of {key} describes the picture" for n in range(5)) for key in keys]
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
            yield Batch(positions, ids, keys, captions, vectors, [], None, [], [], [start // self.batch_size])


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
    source: Any = SimpleNamespace(name="random", num_images=items)
    encoder = RandomEncoder(items, options.dimensions)
    build_index(folder, encoder, source, model={"fingerprint": ""}, what="images", thumbnails=0)
    index = Index(folder)
    searcher = Searcher(index, None)
    plain = faiss.IndexFlatIP(options.dimensions)
    for row in range(0, items, 4096):
        plain.add(np.concatenate([index.vector(number) for number in range(row, min(row + 4096, items))]))
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
