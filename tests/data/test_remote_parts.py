"""Remote shards are divided between the parts of an evaluation, an index and an extraction: each is fetched once over all."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from coder_plugin.data import open_source
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import SHARD
from coder_plugin.detectors.extract import Job, extract
from tests import fresh
from tests.data.test_remote_shards import write_shards
from tests.detectors.test_extract import Means, contents

MODEL = {"name": "x", "fingerprint": "f" * 64}


def spec(folder: Path, shards: int) -> str:
    return "::".join(f"pipe:echo {n} >> {folder}/fetched; cat {folder}/s{n}.tar" for n in range(shards))


def fetched(folder: Path) -> Counter[int]:
    """How often each shard has been fetched since the last call."""
    notes = folder / "fetched"
    numbers = Counter(map(int, notes.read_text().split())) if notes.exists() else Counter()
    notes.unlink(missing_ok=True)
    return numbers


# the parts of an evaluation


@pytest.mark.parametrize("shards", [16, 20, 35])
def test_sixteen_parts_fetch_every_shard_once(tmp_path, shards):
    write_shards(tmp_path, shards=shards, size=5)
    source = open_source(spec(tmp_path, shards))
    whole = [(position, item.key) for position, item in source.items(block=2)]
    assert [position for position, _ in whole] == [shard * SHARD + n for shard in range(shards) for n in range(5)]
    assert fetched(tmp_path) == Counter(range(shards))
    of_parts = [[(position, item.key) for position, item in source.items(part, 16, block=2)] for part in range(16)]
    assert fetched(tmp_path) == Counter(range(shards))  # 1.0 times, all parts together
    assert sorted(itertools.chain(*of_parts)) == whole
    assert {len(part) for part in of_parts} <= {shards // 16 * 5, (shards // 16 + 1) * 5}  # balanced


@pytest.mark.parametrize(("shards", "ranks"), [(1, 16), (3, 16), (10, 16), (3, 2)])
def test_fewer_shards_than_parts_are_shared_by_blocks(tmp_path, shards, ranks):
    write_shards(tmp_path, shards=shards, size=37)
    source = open_source(spec(tmp_path, shards))
    whole = [(position, item.key) for position, item in source.items()]
    fetched(tmp_path)
    of_parts = [[(position, item.key) for position, item in source.items(part, ranks, block=2)] for part in range(ranks)]
    assert fetched(tmp_path).total() == max(ranks, shards)
    assert sorted(itertools.chain(*of_parts)) == whole and all(of_parts)
    for part in of_parts:  # blocks stay whole
        assert all(position ^ 1 in dict(part) or position % SHARD == 36 for position, _ in part)


def test_batches_are_those_of_one_part_whatever_the_number_of_ranks_and_workers(tmp_path):
    write_shards(tmp_path, shards=9, size=5)

    def batches(rank: int, world_size: int, workers: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
        options: Any = {"batch_size": 3, "transform": lambda _: torch.zeros(1), "workers": workers}
        found = evaluation_batches(open_source(spec(tmp_path, 9)), rank=rank, world_size=world_size, **options)
        return [(tuple(batch["index"].tolist()), tuple(batch["keys"])) for batch in found]

    one = batches(0, 1, 0)
    assert [len(index) for index, _ in one] == [3, 2] * 9  # a batch has samples of one shard
    fetched(tmp_path)
    for world_size, workers in ((3, 0), (2, 2), (4, 2)):
        shares = [batches(rank, world_size, workers) for rank in range(world_size)]
        assert sorted(itertools.chain(*shares)) == one and all(shares)
        assert fetched(tmp_path) == Counter(range(9)), (world_size, workers)


def test_a_local_shard_among_remote_ones_is_dealt_with_them(tmp_path):
    write_shards(tmp_path, shards=3, size=4)
    source = open_source(f"pipe:echo 0 >> {tmp_path}/fetched; cat {tmp_path}/s0.tar::{tmp_path}/s1.tar::{tmp_path}/s2.tar")
    found = [[item.captions[0] for _, item in source.items(part, 2)] for part in range(2)]
    assert found == [[f"caption {n}" for n in (*range(4), *range(8, 12))], [f"caption {n}" for n in range(4, 8)]]
    assert fetched(tmp_path) == Counter([0])


# an extraction


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with the imports done, in place of spawned ones, which tests/detectors/test_extract.py has."""
    fresh.context()
    monkeypatch.setattr("torch.multiprocessing.spawn", partial(start_processes, start_method="forkserver"))


@pytest.mark.usefixtures("forked")
def test_a_process_without_a_shard_of_its_own_fetches_none(tmp_path):
    write_shards(tmp_path, shards=1, size=7, side=40)
    options: Any = {"detector": Means, "batch_size": 3, "workers": 0}
    assert extract(Job(source=open_source(spec(tmp_path, 1)), folder=tmp_path / "out", **options), processes=2).images == 7
    assert fetched(tmp_path) == Counter([0])


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 2)])
def test_an_extraction_fetches_every_shard_once_and_writes_one_for_each(tmp_path, processes, workers):
    write_shards(tmp_path, shards=3, size=7, side=40)
    options: Any = {"detector": Means, "batch_size": 3, "workers": workers}
    local = Job(source=open_source(str(tmp_path / "s{0..2}.tar")), folder=tmp_path / "local", shard_size=7, **options)
    remote = Job(source=open_source(spec(tmp_path, 3)), folder=tmp_path / "remote", shard_size=1, **options)
    assert extract(local).images == 21 == extract(remote, processes=processes).images
    assert fetched(tmp_path) == Counter(range(3))
    shards = [{name: value for name, value in contents(out).items() if re.search("[0-9].tar", name)}
              for out in (local.folder, remote.folder)]  # fmt: skip
    assert len(shards[0]) == 3 and shards[0] == shards[1]
