"""Extraction: what is written, what becomes of bad pictures, and that a killed run ends as one that was left alone."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.shards import ShardFile
from coder_plugin.data.source import ItemSource
from coder_plugin.detectors.base import Detector, Prepared, pixels
from coder_plugin.detectors.extract import Batches, Job, extract, work
from coder_plugin.detectors.torchvision_ import TorchVision
from coder_plugin.errors import CoderError

MOBILENET = partial(TorchVision, model="fasterrcnn_mobilenet_v3_large_320_fpn", allow_random=True)


class Means(Detector):
    """Two regions of a picture: its mean colour, and the batch's size, which shows how batches were cut."""

    width = 4
    preprocess = staticmethod(pixels)

    def __init__(self, *, device: str = "cpu", weight: float = 1.0) -> None:
        self.module = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.module.weight, weight)
        torch.nn.init.zeros_(self.module.bias)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.module]

    def detect(self, pictures: list[Prepared]) -> list[Regions]:
        rows = [[*each.pixels.mean((0, 1)), len(pictures)] for each in pictures]
        boxes = np.array([[0, 0, 2, 2], [1, 1, 3, 3]], np.float32)
        return [
            Regions(np.array([row, row], np.float32), boxes, picture.size)
            for row, picture in zip(rows, pictures, strict=True)
        ]


class Failing(Means):
    def detect(self, pictures: list[Prepared]) -> list[Regions]:
        raise CoderError("the detector says no")


def make_pictures(folder: Path, number: int, *, bad: tuple[int, ...] = ()) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        height, width = rng.integers(20, 60, 2)
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        picture.save(folder / f"{index:03d}.png")
        if index in bad:
            (folder / f"{index:03d}.png").write_bytes(b"no picture")
    return folder


def job(folder: Path, out: Path, **options) -> Job:
    usual = {"source": Pictures(str(folder)), "detector": Means, "shard_size": 7, "batch_size": 3, "workers": 0}
    return Job(folder=out, **{**usual, **options})


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fault(work: Job, **options) -> str:
    with pytest.raises(CoderError) as caught:
        extract(work, **options)
    return str(caught.value)


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path / "pictures", 30)


# what is written


def test_every_picture_is_written_once_in_the_sources_order_with_its_own_regions(pictures, tmp_path):
    report = extract(job(pictures, tmp_path / "out"))
    file = ShardFile(str(tmp_path / "out"))
    assert list(file) == [f"{index:03d}.png" for index in range(30)]
    for name in file:
        picture = np.asarray(Image.open(pictures / name))
        assert file[name].features[0, :3] == pytest.approx(picture.mean((0, 1)), rel=1e-5)
        assert file[name].size == (picture.shape[1], picture.shape[0])
    assert (report.images, report.new, report.bad) == (30, 30, [])
    sizes = json.loads((tmp_path / "out/sizes.json").read_text())
    assert sizes == {f"train-{unit:06d}.tar": size for unit, size in enumerate((7, 7, 7, 7, 2))}


def test_batches_never_cross_a_shard(pictures, tmp_path):
    extract(job(pictures, tmp_path / "out"))
    file = ShardFile(str(tmp_path / "out"))
    sizes = [int(file[name].features[0, 3]) for name in file]
    assert sizes == [3, 3, 3, 3, 3, 3, 1] * 4 + [2, 2]


def test_captions_are_written_too(pictures, tmp_path):
    items = [Item(item.key, (f"a {item.key}", "b"), item.load) for _, item in Pictures(str(pictures)).items()]
    extract(job(pictures, tmp_path / "out", source=ItemSource(items), split="dev"))
    assert ShardFile(str(tmp_path / "out"), split="dev").captions == {item.key: item.captions for item in items}


def test_two_splits_in_one_folder(pictures, tmp_path):
    extract(job(pictures, tmp_path / "out"))
    extract(job(pictures, tmp_path / "out", split="dev"))
    assert len(ShardFile(str(tmp_path / "out"), split="dev")) == 30
    assert len(json.loads((tmp_path / "out/sizes.json").read_text())) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(pictures, tmp_path, workers):
    extract(job(pictures, tmp_path / "none"))
    extract(job(pictures, tmp_path / "some", workers=workers))
    assert contents(tmp_path / "none") == contents(tmp_path / "some")


def test_parts_of_the_work_make_the_whole(pictures, tmp_path):
    extract(job(pictures, tmp_path / "one"))
    parts = job(pictures, tmp_path / "parts")
    parts.notes.mkdir(parents=True)
    for part in (1, 0, 2):
        work(parts, part, 3)
    assert extract(parts).new == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "parts")


def test_parts_go_to_ranks_in_turn(pictures):
    def units(rank: int, skip: set[int]) -> set[int]:
        return {batch.part for batch in Batches(job(pictures, pictures), pixels, skip, rank, 2)}

    assert [units(0, set()), units(1, set())] == [{0, 2, 4}, {1, 3}]
    assert units(0, {0, 4}) == {2}


# bad pictures


def test_bad_pictures_are_named_counted_and_left_out(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 10, bad=(2, 8))
    report = extract(job(folder, tmp_path / "out", max_bad_samples=0.002))
    assert report.images == 8
    assert [key for _, key, _ in report.bad] == ["002.png", "008.png"]
    assert "not an image" in report.bad[0][2]
    assert len(ShardFile(str(tmp_path / "out"))) == 8
    again = extract(job(folder, tmp_path / "out", max_bad_samples=0.002))
    assert (again.images, again.new, again.bad) == (8, 0, report.bad)


def test_too_many_bad_pictures_end_the_run_and_a_higher_limit_goes_on(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 10, bad=(2, 8))
    message = fault(job(folder, tmp_path / "out", max_bad_samples=0))
    assert "1 of 3 samples skipped (picture 1), more than max_bad_samples=0 " in message and "008.png" not in message
    message = fault(job(folder, tmp_path / "out", max_bad_samples=0.001))  # at the end
    assert "2 of 10 samples skipped (picture 2), more than max_bad_samples=0.001" in message
    assert extract(job(folder, tmp_path / "out", max_bad_samples=0.002)).images == 8


def test_a_unit_of_bad_pictures_alone_has_no_shard(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 9, bad=(3, 4, 5))
    extract(job(folder, tmp_path / "out", shard_size=3))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["train-000000.tar", "train-000002.tar"]
    assert extract(job(folder, tmp_path / "out", shard_size=3)).new == 0


def test_no_good_picture_at_all_is_an_error(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 2, bad=(0, 1))
    assert "no image" in fault(job(folder, tmp_path / "out"))


# restarts


class Slow(Means):
    def detect(self, pictures: list[Prepared]) -> list[Regions]:
        time.sleep(0.1)
        return super().detect(pictures)


def kill_when_begun(folder: Path, process) -> int:
    """Kill ``process`` once a unit is done; how many units are."""
    while not list(folder.glob("train.extraction/0*.json")):
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    return len(list(folder.glob("train.extraction/0*.json")))


def test_killed_and_restarted_equals_uninterrupted_byte_for_byte(pictures, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = multiprocessing.get_context("fork").Process(
        target=extract, args=[job(pictures, killed, detector=Slow)]
    )
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    assert extract(job(pictures, killed)).new == 30 - 7 * done
    extract(job(pictures, whole))
    assert contents(killed) == contents(whole)


def test_files_of_others_are_neither_taken_for_the_result_nor_overwritten(pictures, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train-000009.tar").write_bytes(b"of somebody else")
    (tmp_path / "out/train-2017-000000.tar").touch()  # another split
    before = contents(tmp_path / "out")
    told = fault(job(pictures, tmp_path / "out"))
    assert "train-000009.tar" in told and "remove split 'train'" in told
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/train-000009.tar").unlink()
    assert extract(job(pictures, tmp_path / "out")).new == 30


@pytest.mark.slow
def test_the_same_with_a_faster_rcnn(pictures, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    work = job(pictures, killed, detector=MOBILENET, workers=1)
    process = multiprocessing.get_context("spawn").Process(target=on_one_thread, args=[work])
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    assert on_one_thread(work).new == 30 - 7 * done
    on_one_thread(job(pictures, whole, detector=MOBILENET))
    assert contents(killed) == contents(whole)


def on_one_thread(work: Job):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return extract(work)
    finally:
        torch.set_num_threads(threads)


def test_a_missing_shard_is_made_again_and_nothing_else(pictures, tmp_path):
    extract(job(pictures, tmp_path / "out"))
    before = contents(tmp_path / "out")
    (tmp_path / "out/train-000001.tar").unlink()
    (tmp_path / "out/train.extraction/000003.json").unlink()
    assert extract(job(pictures, tmp_path / "out")).new == 14
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"shard_size": 8}, "shard_size"),
        ({"batch_size": 4}, "batch_size"),
        ({"settings": {"regions": 10}}, "regions"),
        ({"detector": partial(Means, weight=2.0)}, "checksum of the weights"),
    ],
)
def test_a_restart_with_other_options_is_an_error_that_names_them(pictures, tmp_path, changed, name):
    extract(job(pictures, tmp_path / "out"))
    before = contents(tmp_path / "out")
    assert f"was begun with {name} " in fault(job(pictures, tmp_path / "out", **changed))
    assert contents(tmp_path / "out") == before


# faults


@pytest.mark.parametrize("option", ["shard_size", "batch_size"])
def test_sizes_must_be_positive(pictures, tmp_path, option):
    with pytest.raises(CoderError, match=option.replace("_", "-")):
        job(pictures, tmp_path, **{option: 0})


def test_a_fault_of_the_detector_leaves_no_half_file(pictures, tmp_path):
    assert fault(job(pictures, tmp_path / "out", detector=Failing)) == "the detector says no"
    assert not list(tmp_path.rglob("*.writing")) and not list(tmp_path.rglob("*.tar"))


class NotANumber(Means):
    def detect(self, pictures: list[Prepared]) -> list[Regions]:
        return [Regions(np.full((1, 4), np.nan, np.float32))]


def test_each_rank_takes_a_device_of_its_machine(pictures, tmp_path, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    extract(job(pictures, tmp_path / "one", device="cuda:1"))
    parts = job(pictures, tmp_path / "two", device="cuda")
    parts.notes.mkdir(parents=True)
    work(parts, 2, 8)
    extract(job(pictures, tmp_path / "three"))
    assert seen == ["cuda:1", "cuda:2"]


def test_features_that_are_no_numbers_name_the_images(pictures, tmp_path):
    told = fault(job(pictures, tmp_path / "out", detector=NotANumber))
    assert "000.png, 001.png, 002.png" in told and "NaN" in told


@pytest.mark.slow
def test_the_ranks_of_a_launcher_share_the_units_and_one_of_them_finishes(pictures, tmp_path):
    extract(job(pictures, tmp_path / "one"))
    work = job(pictures, tmp_path / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=as_rank, args=[work, rank, port]) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def as_rank(work: Job, rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    extract(work)


def test_a_folder_without_pictures_is_an_error(tmp_path):
    with pytest.raises(CoderError, match="no pictures"):
        Pictures(str(tmp_path))


def test_a_damaged_note_is_an_error_that_names_it(pictures, tmp_path):
    extract(job(pictures, tmp_path / "out"))
    (tmp_path / "out/train.extraction/000001.json").write_text("{")
    assert "000001.json" in fault(job(pictures, tmp_path / "out"))
