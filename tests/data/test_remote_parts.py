"""Remote shards are divided between the parts of an evaluation, an index and an extraction: each is fetched once over all."""

from __future__ import annotations

import functools
import http.server
import itertools
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.streams import STRIDE
from coder_plugin.detectors.extract import RegionsJob
from tests.data.test_remote_shards import write_shards
from tests.detectors.test_extract import Means, contents


def spec(folder: Path, shards: int) -> str:
    return "::".join(f"pipe:echo {n} >> {folder}/fetched; cat {folder}/s{n}.tar" for n in range(shards))


def fetched(folder: Path) -> Counter[int]:
    """How often each shard has been fetched since the last call."""
    notes = folder / "fetched"
    numbers = Counter(map(int, notes.read_text().split())) if notes.exists() else Counter()
    notes.unlink(missing_ok=True)
    return numbers


# the parts of an evaluation


@pytest.mark.parametrize(("shards", "ranks"), [(20, 16), (3, 2), (3, 5)])
def test_parts_fetch_every_shard_once(tmp_path, shards, ranks):
    write_shards(tmp_path, shards=shards, size=5)
    source = open_source(spec(tmp_path, shards))
    whole = [(position, item.key) for position, item in source.items()]
    assert [position for position, _ in whole] == [shard * STRIDE + n for shard in range(shards) for n in range(5)]
    assert fetched(tmp_path) == Counter(range(shards))
    of_parts = [[(position, item.key) for position, item in source.items(part, ranks)] for part in range(ranks)]
    assert fetched(tmp_path) == Counter(range(shards))  # 1.0 times, all parts together
    assert sorted(itertools.chain(*of_parts)) == whole


def test_images_are_those_of_one_part_whatever_the_number_of_ranks_and_workers(tmp_path):
    write_shards(tmp_path, shards=9, size=5)

    def images(rank: int, world_size: int, workers: int) -> list[tuple[int, str]]:
        options: Any = {"batch_size": 3, "transform": lambda _: torch.zeros(1), "bad": BadSamples("shards"), "workers": workers}
        found = evaluation_batches(open_source(spec(tmp_path, 9)), rank=rank, world_size=world_size, **options)
        return [pair for batch in found for pair in zip(batch["index"].tolist(), batch["keys"], strict=True)]

    one = images(0, 1, 0)
    assert len(one) == 45 and one == sorted(one)
    fetched(tmp_path)
    for world_size, workers in ((3, 0), (2, 2)):
        shares = [images(rank, world_size, workers) for rank in range(world_size)]
        assert sorted(itertools.chain(*shares)) == one and all(shares)
        assert fetched(tmp_path) == Counter(range(9)), (world_size, workers)


# the parts of training


@pytest.mark.parametrize(("shards", "parts"), [(10, 8), (3, 2), (1, 4)])
def test_a_shard_is_shared_only_at_the_ends_of_runs_and_no_part_is_idle(tmp_path, shards, parts):
    write_shards(tmp_path, shards=shards, size=37)
    source = open_source(spec(tmp_path, shards))
    order: Any = {"seed": 3, "epoch": 1, "captions": "draw"}
    of_parts = [[item.key for item in source.part(part, parts, **order)] for part in range(parts)]
    seen = Counter(itertools.chain(*of_parts))
    assert len(seen) == 37 * shards and set(seen.values()) == {1}
    assert max(map(len, of_parts)) - min(map(len, of_parts)) <= 2 * -(-shards // parts)
    assert fetched(tmp_path).total() <= shards + parts - 1
    assert [item.key for item in source.part(0, parts, skip=5, **order)] == of_parts[0][5:]
    assert of_parts[0] != [item.key for item in source.part(0, parts, **{**order, "epoch": 2})]


# an extraction


def extract_by_ranks(job: RegionsJob, ranks: int) -> int:
    """The number of images that this many ranks of a launcher extract, here one after another."""
    return [job.run(index=rank, count=ranks).images for rank in range(ranks)][-1]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_an_extraction_fetches_every_shard_once_and_writes_one_for_each(tmp_path, ranks, workers):
    write_shards(tmp_path, shards=3, size=7, side=40)
    options: Any = {"detector": Means, "batch_size": 3, "workers": workers}
    local = RegionsJob(source=open_source(str(tmp_path / "s{0..2}.tar")), folder=tmp_path / "local", shard_size=7, **options)
    remote = RegionsJob(source=open_source(spec(tmp_path, 3)), folder=tmp_path / "remote", shard_size=1, **options)
    assert local.run().images == 21 == extract_by_ranks(remote, ranks)
    assert fetched(tmp_path) == Counter(range(3))
    shards = [{name: value for name, value in contents(out).items() if re.search("[0-9].tar", name)}
              for out in (local.folder, remote.folder)]  # fmt: skip
    assert len(shards[0]) == 3 and shards[0] == shards[1]


@pytest.mark.parametrize(("shards", "parts"), [(10, 8), (3, 5)])
def test_the_parts_of_an_extraction_request_each_byte_once(tmp_path, shards, parts):
    write_shards(tmp_path, shards=shards, size=2, side=40)
    sent: Counter[str] = Counter()

    class Counting(http.server.SimpleHTTPRequestHandler):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            content = source.read()
            sent[self.path] += len(content)
            outputfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counting, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        names = f"http://127.0.0.1:{server.server_address[1]}/s{{0..{shards - 1}}}.tar"
        jobs = [
            RegionsJob(source=open_source(names), folder=tmp_path / "out", detector=Means, batch_size=3, workers=0)
            for _ in range(parts)
        ]
        finished = [job.run(index=index, count=parts) for index, job in enumerate(jobs)]
    finally:
        server.shutdown()
        server.server_close()
    assert finished[-1].images == 2 * shards
    sizes = {f"/s{n}.tar": (tmp_path / f"s{n}.tar").stat().st_size for n in range(shards)}
    assert {name: sent[name] for name in sizes} == sizes  # 1.0 times
