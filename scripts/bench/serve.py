#!/usr/bin/env python3
"""How does `coder-plugin serve` hold up under several clients, beside the same model and FAISS without a server?

    python scripts/bench/serve.py                                                     a made-up index of 100,000 vectors
    python scripts/bench/serve.py --index pictures.index --clients 8 --seconds 600

Each client asks for one text after the other, each text once, over a connection that stays open, and checks every answer. The
peer is what a program would do that has the model and the vectors in its own process: as many threads as clients, each of
which encodes a text with PyTorch and searches with FAISS, one thread each. Server and peer take turns. Without --index the
vectors are random and the model has random weights.

Printed: p50, p95 and queries a second, their ratios to the peer, errors, and the server's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import faiss
import numpy as np
import torch
from common import Results, parser, resident
from search import K, random_index

import coder_plugin
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.search.embed import model_record
from coder_plugin.search.searcher import open_searcher

WORDS = "a red blue small large old dog cat man woman child runs sits plays in on near the snow water with ball hat".split()
COUNT = itertools.count()  # so that no text repeats


def main() -> None:
    made = parser(__doc__, repeats=4, wall=True)
    made.add_argument("--index", type=Path, help="an index to serve [a made-up one]")
    made.add_argument("--items", type=int, default=100_000, help="images of the made-up index [100000]")
    made.add_argument("--clients", type=int, default=8, help="clients at once [8]")
    made.add_argument("--seconds", type=float, default=60.0, help="of serving, over all rounds [60]")
    options = made.parse_args()
    results = Results("serve", options, ["faiss-cpu", "fastapi", "uvicorn"])
    with tempfile.TemporaryDirectory() as folder:
        index = options.index or made_up_index(Path(folder), options.items)
        measure(index, Path(folder) / "log", options, results)


def made_up_index(folder: Path, items: int) -> Path:
    torch.manual_seed(0)
    export = str(folder / "export")
    export_model(coder_plugin.create_model("coder-tiny", loss="dcl"), export)
    pretrained = open_pretrained(export)
    dimensions = pretrained.encoder().text(["a picture"])[0].shape[1]
    random_index(folder / "index", items, dimensions, model_record(pretrained, export, export="best"))
    return folder / "index"


def measure(index: Path, log: Path, options: argparse.Namespace, results: Results) -> None:
    times: dict[str, list[float]] = {"peer": [], "server": []}
    errors, memory, search = 0, [], peer(index)
    with server(index, log) as (address, process):
        for _ in range(options.repeats):
            for name, make in (("peer", lambda: search), ("server", lambda: client(address))):
                found, wrong = run(options.clients, options.seconds / options.repeats, make)
                times[name] += found
                errors += wrong
            memory.append(resident("VmRSS", process) / 1e6)
    figures = {
        name: (*(1e3 * np.percentile(each, [50, 95])).tolist(), len(each) / options.seconds) for name, each in times.items()
    }
    for name, (p50, p95, rate) in figures.items():
        ratios = ", ".join(f"{one / other:.2f}" for one, other in zip(figures[name], figures["peer"], strict=True))
        print(f"{name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, {rate:.0f} queries a second: {ratios} x peer")
    held = ", ".join(f"{megabytes:.0f}" for megabytes in memory)
    print(f"{errors} errors in {len(times['server']):,} queries; memory after each round {held} MB")
    results.write(case=f"{options.clients} clients", p50_p95_rate=figures, errors=errors, memory_mb=memory)


@contextlib.contextmanager
def server(index: Path, log: Path) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address, and the process's number."""
    command = [sys.executable, "-m", "coder_plugin.cli", "serve", str(index), "--port", "0"]
    with open(log, "w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            lines: Any = process.stdout
            url = next((line.split()[2] for line in lines if line.startswith("serving at ")), None)
            if url is None:
                raise SystemExit(f"the server has not started: {log.read_text()}")
            yield urlsplit(url).netloc, process.pid
        finally:
            process.terminate()


def text() -> str:
    return " ".join([*random.choices(WORDS, k=8), str(next(COUNT))])


def client(address: str) -> Callable[[], bool]:
    """A function that asks for one text over its own connection; its value is whether the answer was right."""
    connection, count = http.client.HTTPConnection(address, timeout=60), itertools.count()

    def ask() -> bool:
        try:
            body = json.dumps({"text": text(), "k": K, "filters": {}})
            connection.request("POST", "/api/search", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return False
        # parsing each one would take the server's processor time
        return answer.status == 200 and (next(count) % 50 != 1 or len(json.loads(content)["results"]) == K)

    return ask


def peer(folder: Path) -> Callable[[], bool]:
    """A function that encodes a text and searches for it, in the thread of the caller."""
    searcher = open_searcher(folder, texts_only=True)
    plain = faiss.IndexFlatIP(searcher.index.vectors["images"].dimensions)
    for batch in searcher.index.table.vector_batches("images"):
        plain.add(batch)

    def search() -> bool:
        faiss.omp_set_num_threads(1)  # of this thread; of PyTorch's too
        vectors, _ = searcher.encoder.text([text()])
        return plain.search(vectors.numpy(), K)[0].shape == (1, K)

    return search


def run(clients: int, seconds: float, make: Callable[[], Callable[[], bool]]) -> tuple[list[float], int]:
    """Call functions in as many threads for some seconds: the seconds of each call, and how many were wrong."""

    def work(_: int) -> tuple[list[float], int]:
        step, times, wrong = make(), [], 0
        deadline = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < deadline:
            wrong += not step()
            times.append(time.perf_counter() - begun)
        return times, wrong

    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(work, range(clients)))
    return [each for times, _ in found for each in times], sum(wrong for _, wrong in found)


if __name__ == "__main__":
    main()
