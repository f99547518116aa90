"""Latency, errors and memory of `coder-plugin serve` under several clients, against FAISS and the same model without a server.

    python scripts/bench/serve.py [--items 100000] [--model coder-tiny] [--clients 8] [--seconds 60] [-k 10] [--rounds 4]
    python scripts/bench/serve.py --index INDEX [--clients 8] [--seconds 600] [--url URL] [--filters JSON [JSON …]]

With --url a server that runs already is asked, and its memory is not measured. With --filters the server's queries have these
filters in turn, such as '{"source": "coco"}'; the peer searches all images.

Without --index the vectors are random, the model has random weights, and five captions belong to an image. Each client asks
for one text after the other, each text once, over a connection that stays open, and checks the status of every answer.

The peer is what a program would do that has the model and the vectors in its own process: as many threads as there are clients,
each of which encodes one text after the other, with one thread of PyTorch, and searches by one thread of FAISS
(`faiss.IndexFlatIP.search`; an index of another kind: `Index.search`). Server and peer take turns, --rounds times.

Printed: milliseconds at p50, p95 and on average, queries per second, ratios to the peer (medians over rounds), errors, and the
server's resident memory: after a tenth of the time, at the end, and at most.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import faiss
import numpy as np
import torch
from common import Results, add_options
from search import random_index

import coder_plugin
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.search.embed import model_record
from coder_plugin.search.searcher import Searcher, open_searcher

WORDS = "a red blue small large old dog cat man woman child runs sits plays in on near the snow water with ball hat".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, help="an index to serve [a made one]")
    parser.add_argument("--url", help="of a server of this index that runs already [one is started]")
    parser.add_argument("--items", type=int, default=100_000, help="images of the made index [100000]")
    parser.add_argument("--model", default="coder-tiny", help="model of the made index [coder-tiny]")
    parser.add_argument("--clients", type=int, default=8, help="clients at once [8]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of serving, over all rounds [60]")
    parser.add_argument("--rounds", type=int, default=4, help="in which server and peer take turns [4]")
    parser.add_argument("-k", type=int, default=10, help="results per query [10]")
    parser.add_argument("--filters", type=json.loads, nargs="+", default=[None], help="of the server's queries, in turn [none]")
    add_options(parser, repeats=1, threads=1, without=("repeats", "limit", "clock", "device"))
    options = parser.parse_args()
    results = Results("serve", options, ["faiss-cpu", "fastapi", "uvicorn"])
    with tempfile.TemporaryDirectory() as folder:
        index = options.index or made(Path(folder), options)
        measure(index, Path(folder), options, results)


def made(folder: Path, options: argparse.Namespace) -> Path:
    """An index of random vectors whose queries a model with random weights encodes."""
    torch.manual_seed(0)
    export_model(coder_plugin.create_model(options.model, loss="dcl"), folder / "export")
    pretrained = open_pretrained(str(folder / "export"))
    dimensions = pretrained.encoder().text(["a picture"])[0].shape[1]
    record = model_record(pretrained, str(folder / "export"), export="best")
    random_index(folder / "index", options.items, dimensions, record)
    return folder / "index"


def measure(index: Path, folder: Path, options: argparse.Namespace, results: Results) -> None:
    texts = unique_texts()
    with server(index, folder / "log") if options.url is None else contextlib.nullcontext((options.url, 0)) as (url, process):
        search = peer(open_searcher(index, verify=False), options.k)
        memory: list[float] = []
        stop = watch(process, memory)
        rounds: dict[str, list[tuple[list[float], float]]] = {"serve": [], "peer": []}
        errors = 0
        share = options.seconds / options.rounds
        for _ in range(options.rounds):
            times, seconds, wrong = run(options.clients, share, lambda: client(urlsplit(url).netloc, options, texts))
            rounds["serve"].append((times, seconds))
            errors += wrong
            times, seconds, _ = run(options.clients, min(share, 20.0), lambda: lambda: search(next(texts)))
            rounds["peer"].append((times, seconds))
        stop()
    log = (folder / "log").read_text() if options.url is None else ""
    report(rounds, errors, memory, log, options, results)


@contextlib.contextmanager
def server(index: Path, log: Path) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address, and the process's number."""
    command = [sys.executable, "-m", "coder_plugin.cli", "serve", str(index), "--port", "0"]
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        lines: Any = process.stdout
        url = next((line.split()[2] for line in lines if line.startswith("serving at ")), None)
        if url is None:
            raise SystemExit(f"the server has not started: {log.read_text()}")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def unique_texts() -> Any:
    """Texts that never repeat, for any number of threads."""
    draw, lock, number = random.Random(0), threading.Lock(), itertools.count()

    class Texts:
        def __next__(self) -> str:
            with lock:
                return " ".join([*draw.choices(WORDS, k=8), str(next(number))])

    return Texts()


def client(netloc: str, options: argparse.Namespace, texts: Any) -> Callable[[], bool]:
    """A function that asks for one text; its value is whether the answer was right."""
    connection = http.client.HTTPConnection(netloc, timeout=60)
    count, filters = itertools.count(), itertools.cycle(options.filters)

    def ask() -> bool:
        try:
            body = json.dumps({"text": next(texts), "k": options.k, "filters": next(filters) or {}})
            connection.request("POST", "/api/search", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return False
        # parsing each one would take the server's processor time
        return answer.status == 200 and (next(count) % 50 != 1 or len(json.loads(content)["results"]) == options.k)

    return ask


def peer(searcher: Searcher, k: int) -> Callable[[str], bool]:
    """Encode a text and search for it, in the thread of the caller."""
    index, local = searcher.index, threading.local()
    plain = None
    if index.note["factory"] == "Flat" and index.vectors["images"].views == 1:
        images = index.vectors["images"]
        plain = faiss.IndexFlatIP(images.dimensions)
        for start in range(0, images.items, 4096):
            plain.add(np.ascontiguousarray(images.gather(np.arange(start, min(start + 4096, images.items)))[:, 0]))

    def search(text: str) -> bool:
        if not hasattr(local, "ready"):
            faiss.omp_set_num_threads(1)  # of this thread; of PyTorch's too
            local.ready = True
        vectors, _ = searcher.encoder.text([text])
        scores, _ = index.search(vectors, k) if plain is None else plain.search(vectors.numpy(), k)
        return scores.shape == (1, k)

    return search


def run(clients: int, seconds: float, make: Callable[[], Callable[[], bool]]) -> tuple[list[float], float, int]:
    """Call functions in as many threads for some seconds: seconds of each call, seconds in all, and how many were wrong."""
    times: list[float] = []
    wrong = 0
    lock, begin = threading.Lock(), threading.Barrier(clients + 1)

    def work() -> None:
        nonlocal wrong
        try:
            step = make()
            step()  # the connection, the threads
        except BaseException:
            begin.abort()  # the others would wait for this one
            raise
        begin.wait()
        deadline, own, bad = time.perf_counter() + seconds, [], 0
        while (started := time.perf_counter()) < deadline:
            bad += not step()
            own.append(time.perf_counter() - started)
        with lock:
            times.extend(own)
            wrong += bad

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return times, time.perf_counter() - started, wrong


def watch(process: int, memory: list[float]) -> Callable[[], None]:
    """Append a process's memory in MB each second, until the result is called."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(1.0 if memory else 0.0):
            status = Path(f"/proc/{process}/status")
            if status.is_file() and (found := re.search(r"VmRSS:\s+(\d+) kB", status.read_text())):
                memory.append(int(found[1]) / 1024)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


def report(
    rounds: dict[str, list[tuple[list[float], float]]],
    errors: int,
    memory: list[float],
    log: str,
    options: argparse.Namespace,
    results: Results,
) -> None:
    figures: dict[str, dict[str, float]] = {}
    by_round: dict[str, list[list[float]]] = {}
    for name, parts in rounds.items():
        every = [each for times, _ in parts for each in times]
        p50, p95 = (1e3 * each for each in np.percentile(every, [50, 95]))
        rate = len(every) / sum(seconds for _, seconds in parts)
        mean = 1e3 * statistics.fmean(every)
        figures[name] = {"p50_ms": p50, "p95_ms": p95, "mean_ms": mean, "per_second": rate, "queries": len(every)}
        by_round[name] = [[*np.percentile(times, [50, 95]), statistics.fmean(times)] for times, _ in parts]
        print(f"{name:<6} p50 {p50:8.2f} ms, p95 {p95:8.2f} ms, mean {mean:8.2f} ms, {rate:8.1f}/s, {len(every):,} queries")
    pairs = zip(by_round["serve"], by_round["peer"], strict=True)
    ratios = [[ours / theirs for ours, theirs in zip(*pair, strict=True)] for pair in pairs]
    p50, p95, mean = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"serve / peer: p50 {p50:.3f}, p95 {p95:.3f}, mean {mean:.3f}; {errors} errors")
    held = {"after a tenth": memory[len(memory) // 10], "at the end": memory[-1], "at most": max(memory)} if memory else {}
    if held:
        print("memory of the server: " + ", ".join(f"{value:,.0f} MB {name}" for name, value in held.items()))
    for line in log.splitlines()[:5]:
        print(f"log: {line}")
    results.write(
        {
            "case": f"{options.clients} clients",
            **figures,
            "ratio": {"p50": p50, "p95": p95, "mean": mean},
            "errors": errors,
            "memory_mb": held,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        }
    )


if __name__ == "__main__":
    main()
