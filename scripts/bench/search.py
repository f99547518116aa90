#!/usr/bin/env python3
"""How fast are single queries of an index, beside plain FAISS over the same vectors? What does a build need?

    python scripts/bench/search.py                                       7,000 and 100,000 vectors of 512 dimensions, exact
    python scripts/bench/search.py --items 5000000 --dimensions 256 --factory IVF4096,SQfp16 --nprobe 4 16 64 --folder DIR

The peer is `faiss.IndexFlatIP.search`, which holds all vectors in memory. *Index* gives rows and scores, *Searcher* also keys
and captions. Recall@10 is that of the peer's results. The unit vectors lie around made-up centres, one to 250 vectors.

Time and memory of the build, and the first query after the files were dropped from the memory, are those of new processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import Results, parser, resident
from torch.utils.benchmark import Measurement

from coder_plugin.search.build import build_index
from coder_plugin.search.index import Index
from coder_plugin.search.parquet import Rows, schema_of, write_file
from coder_plugin.search.searcher import Query, Searcher

K = 10
ROWS = 8192  # vectors of a batch


def vectors(count: int, dimensions: int, items: int, seed: int) -> np.ndarray:
    """Unit vectors [count, dimensions] near the centres of an index of so many ``items``."""
    centres = np.random.default_rng(0).standard_normal((max(items // 250, 1), dimensions), dtype=np.float32)
    draw = np.random.default_rng([1, seed])
    near = centres[draw.integers(0, len(centres), count)] + 0.6 * draw.standard_normal((count, dimensions), dtype=np.float32)
    return near / np.linalg.norm(near, axis=1, keepdims=True)


def random_index(
    folder: Path, items: int, dimensions: int, model: Mapping[str, Any], factory: str = "Flat"
) -> dict[str, float]:
    """Write an index of made-up vectors, each with a caption, and return the seconds and the memory of its build."""

    def rows() -> Iterator[Rows]:
        for start in range(0, items, ROWS):
            keys = [f"picture_{number:08d}.jpg" for number in range(start, min(start + ROWS, items))]
            captions, none = [[f"a caption of {key}"] for key in keys], [None] * len(keys)
            yield Rows(keys, captions, vectors(len(keys), dimensions, items, start), None, none, none)

    header = {"model": dict(model), "plan": {}, "units": 1, "unit": 0, "bad": []}
    with tempfile.TemporaryDirectory(dir=folder.parent) as embeddings:
        write_file(Path(embeddings) / "00000000.parquet", schema_of(dimensions, what="images"), header, rows())
        begun = time.perf_counter()
        build_index(folder, embeddings, factory=factory)
        return {"build_seconds": time.perf_counter() - begun, "build_peak_mb": resident("VmHWM") / 1e6}


def first_query(folder: Path, dimensions: int, parameters: str | None) -> dict[str, float]:
    """Seconds of opening an index and of the first answer, after the operating system was asked to drop its files."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    query = vectors(1, dimensions, ROWS, 1)
    begun = time.perf_counter()
    index = Index(folder, parameters=parameters, gpu=False)
    opened = time.perf_counter()
    index.records.images(index.search(query, K)[1][0].tolist())
    return {"open_seconds": opened - begun, "first_answer_seconds": time.perf_counter() - opened}


def main() -> None:
    made = parser(__doc__, repeats=300)
    made.add_argument("--items", type=int, nargs="+", default=[7000, 100_000], help="vectors of the index [7000 100000]")
    made.add_argument("--dimensions", type=int, default=512, help="dimensions of the vectors [512]")
    made.add_argument("--factory", default="Flat", help="kind of index, as of coder-plugin index [Flat]")
    made.add_argument("--nprobe", type=int, nargs="+", default=[4, 16, 64], help="lists that are searched, of an IVF [4 16 64]")
    made.add_argument("--folder", type=Path, help="for the files, which are removed again [the system's]")
    options = made.parse_args()
    faiss.omp_set_num_threads(options.threads)
    results = Results("search", options, ["faiss-cpu"])
    parameters = [f"nprobe={number}" for number in options.nprobe] if options.factory.startswith("IVF") else [None]
    for items in options.items:
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            folder, facts = Path(temporary) / "index", {}
            for work, *further in (
                (random_index, items, options.dimensions, {"fingerprint": ""}, options.factory),
                (first_query, options.dimensions, parameters[0]),
            ):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    facts |= pool.submit(work, folder, *further).result()
            print(f"{items:,} x {options.dimensions}: " + ", ".join(f"{name} {value:.3g}" for name, value in facts.items()))
            measure(items, folder, facts, parameters, results)


def measure(
    items: int, folder: Path, facts: dict[str, float], parameters: list[str | None], results: Results
) -> None:
    options = results.options
    plain = faiss.IndexFlatIP(options.dimensions)
    for batch in Index(folder).table.vector_batches("images"):
        plain.add(batch)
    queries = vectors(options.repeats + 20, options.dimensions, items, items + 1)
    exact = plain.search(queries, K)[1]
    searches: dict[str, Callable[[np.ndarray], Any]] = {"plain FAISS": lambda query: plain.search(query, K)}
    recalls = {}
    for each in parameters:
        index = Index(folder, parameters=each, gpu=options.device != "cpu")
        searcher, ending = Searcher(index, None), "" if each is None else f", {each}"
        searches[f"Index{ending}"] = lambda query, index=index: index.search(query, K)
        searches[f"Searcher{ending}"] = lambda query, searcher=searcher: searcher.search(Query(query, "captions", None), K)
        found = index.search(queries, K)[1]
        recalls[f"Index{ending}"] = np.mean([len({*a} & {*b}) / K for a, b in zip(found.tolist(), exact.tolist(), strict=True)])
    case = f"{items} x {options.dimensions}, {options.factory}"
    turns = {name: itertools.cycle(np.split(queries, len(queries))) for name in searches}
    timers = {
        name: results.timer(case, name, lambda search=search, turn=turns[name]: search(next(turn)))
        for name, search in searches.items()
    }
    times: dict[str, list[Measurement]] = {name: [] for name in searches}
    for number in range(options.repeats):
        names = list(searches)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # the first one has a cold cache
            times[name].append(timers[name].timeit(1))
    percentiles = {name: [1e3 * q for q in np.percentile([m.median for m in times[name]], [50, 95])] for name in searches}
    results.report(case, times, recall=recalls, p50_and_p95_ms=percentiles, **facts)
    base = percentiles["plain FAISS"]
    for name, (p50, p95) in percentiles.items():
        recall = f", recall@{K} {recalls[name]:.3f}" if name in recalls else ""
        print(f"{name}: p50 {p50:.3f} ms, p95 {p95:.3f} ms, {p50 / base[0]:.2f} and {p95 / base[1]:.2f} x plain FAISS{recall}")


if __name__ == "__main__":
    main()
