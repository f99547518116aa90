"""Extraction: what is written, what becomes of bad pictures, and that a killed run ends as one that was left alone."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.regions import precomp_write
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.precomp import PrecompFile
from coder_plugin.data.regions.shards import ShardFile
from coder_plugin.data.source import ItemSource
from coder_plugin.detectors.base import Detector, Prepared, pixels
from coder_plugin.detectors.extract import Batches, Job, extract, run_ahead, work
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


def test_captions_travel_into_shards_and_precomp(pictures, tmp_path):
    items = [Item(item.key, (f"a {item.key}", "b"), item.load) for _, item in Pictures(str(pictures)).items()]
    for to in ("shards", "precomp"):
        extract(job(pictures, tmp_path / to, source=ItemSource(items), to=to, split="dev"))
    shards = ShardFile(str(tmp_path / "shards"), split="dev")
    precomp = PrecompFile(str(tmp_path / "precomp"), split="dev")
    assert shards.captions == precomp.captions == {item.key: item.captions for item in items}
    for name in shards:
        np.testing.assert_array_equal(shards[name].features, precomp[name].features)
        np.testing.assert_array_equal(shards[name].boxes, precomp[name].boxes)
    assert not list((tmp_path / "precomp").rglob("*.tar"))


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


@pytest.mark.slow
def test_processes_change_nothing(pictures, tmp_path):
    extract(job(pictures, tmp_path / "one"))
    report = extract(job(pictures, tmp_path / "two"), processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert report.images == report.new == 30


def test_units_go_to_processes_in_turn(pictures):
    def units(part: int, skip: set[int]) -> set[int]:
        return {batch.unit for batch in Batches(Pictures(str(pictures)), pixels, 7, 3, skip, part, 2)}

    assert [units(0, set()), units(1, set())] == [{0, 2, 4}, {1, 3}]
    assert units(0, {0, 4}) == {2}


def test_precomp_with_uneven_captions_says_so_and_goes_on_with_as_many_of_each(pictures, tmp_path):
    images = [item for _, item in Pictures(str(pictures)).items()]
    texts = {item.key: tuple("abc")[: 2 + number % 2] for number, item in enumerate(images)}
    source = ItemSource([Item(item.key, texts[item.key], item.load) for item in images])
    assert "captions" in fault(job(pictures, tmp_path / "out", source=source, to="precomp"))
    report = extract(job(pictures, tmp_path / "out", source=source, to="precomp", captions_per_image=2))
    assert (report.images, report.new) == (30, 0)
    assert set(PrecompFile(str(tmp_path / "out")).captions.values()) == {("a", "b")}
    before = contents(tmp_path / "out")
    for other, told in ((1, "1"), (None, "none")):
        again = job(pictures, tmp_path / "out", source=source, to="precomp", captions_per_image=other)
        assert f"was begun with captions_per_image 2, not {told}" in fault(again)
    assert contents(tmp_path / "out") == before


def test_captions_per_image_is_of_precomp(pictures, tmp_path):
    with pytest.raises(CoderError, match="--captions-per-image needs --to precomp"):
        job(pictures, tmp_path, captions_per_image=2)


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


@pytest.mark.parametrize("to", ["shards", "precomp"])
def test_killed_and_restarted_equals_uninterrupted_byte_for_byte(pictures, tmp_path, to):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = multiprocessing.get_context("fork").Process(
        target=extract, args=[job(pictures, killed, detector=Slow, to=to)]
    )
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    (killed / ".train-000004.tar.12345.writing").write_bytes(b"of another killed run")
    assert extract(job(pictures, killed, to=to)).new == 30 - 7 * done
    extract(job(pictures, whole, to=to))
    assert contents(killed) == contents(whole)


def killed_at_name(work: Job, number: int) -> None:
    """Extract, and go without a farewell before a precomp split's file number ``number`` gets its name."""
    names = iter(range(100))

    def replace(aside: str, name: str, rename=os.replace) -> None:
        if os.path.basename(name).startswith(f"{work.split}_") and next(names) == number:
            os._exit(9)
        rename(aside, name)

    precomp_write.os = type("Os", (), {**vars(os), "replace": staticmethod(replace)})
    extract(work)


@pytest.mark.parametrize("number", range(5))
def test_killed_while_precomp_files_get_their_names_and_restarted(pictures, tmp_path, number):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    images = [item for _, item in Pictures(str(pictures)).items()]
    source = ItemSource([Item(item.key, (item.key, "b"), item.load) for item in images])
    process = multiprocessing.get_context("fork").Process(
        target=killed_at_name, args=[job(pictures, killed, source=source, to="precomp"), number]
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(list(killed.glob("train_*"))) == number  # of caps, ids, img_sizes, boxes and, last, ims
    work = job(pictures, killed, source=source, to="precomp", captions_per_image=1)
    assert extract(work).new == 0  # not one picture again
    extract(job(pictures, whole, source=source, to="precomp", captions_per_image=1))
    assert contents(killed) == contents(whole)
    assert set(PrecompFile(str(killed)).captions.values()) == {(item.key,) for item in images}


@pytest.mark.parametrize(
    ("to", "name"), [("precomp", "train_ims.npy"), ("precomp", "train_caps.txt"), ("shards", "train-000009.tar")]
)
def test_files_of_others_are_neither_taken_for_the_result_nor_overwritten(pictures, tmp_path, to, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"of somebody else")
    for other in ("dev_ims.npy", "train-2017-000000.tar"):  # other splits
        (tmp_path / "out" / other).touch()
    before = contents(tmp_path / "out")
    told = fault(job(pictures, tmp_path / "out", to=to))
    assert name in told and "remove split 'train'" in told
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / name).unlink()
    assert extract(job(pictures, tmp_path / "out", to=to)).new == 30


@pytest.mark.slow
@pytest.mark.parametrize("to", ["shards", "precomp"])
def test_the_same_with_a_faster_rcnn(pictures, tmp_path, to):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    work = job(pictures, killed, detector=MOBILENET, workers=1, to=to)
    process = multiprocessing.get_context("spawn").Process(target=on_one_thread, args=[work])
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    assert on_one_thread(work).new == 30 - 7 * done
    on_one_thread(job(pictures, whole, detector=MOBILENET, to=to))
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
        ({"to": "precomp"}, "to"),
    ],
)
def test_a_restart_with_other_options_is_an_error_that_names_them(pictures, tmp_path, changed, name):
    extract(job(pictures, tmp_path / "out"))
    before = contents(tmp_path / "out")
    assert f"was begun with {name} " in fault(job(pictures, tmp_path / "out", **changed))
    assert contents(tmp_path / "out") == before


def test_precomp_is_converted_once(pictures, tmp_path):
    extract(job(pictures, tmp_path / "out", to="precomp"))
    before = contents(tmp_path / "out")
    report = extract(job(pictures, tmp_path / "out", to="precomp"))
    assert (report.images, report.new) == (30, 0)
    assert contents(tmp_path / "out") == before


# faults


@pytest.mark.slow
def test_an_error_of_one_process_is_reported_unchanged(pictures, tmp_path):
    assert fault(job(pictures, tmp_path / "out", detector=Failing), processes=2) == "the detector says no"
    assert not list(tmp_path.rglob("*.writing")) and not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize("option", ["shard_size", "batch_size"])
def test_sizes_must_be_positive(pictures, tmp_path, option):
    with pytest.raises(CoderError, match=option.replace("_", "-")):
        job(pictures, tmp_path, **{option: 0})


def test_other_bad_options(pictures, tmp_path, monkeypatch):
    with pytest.raises(CoderError, match="shards, precomp"):
        job(pictures, tmp_path, to="tsv")
    assert "processes" in fault(job(pictures, tmp_path), processes=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "launcher" in fault(job(pictures, tmp_path), processes=2)


def test_a_fault_of_the_detector_leaves_no_half_file(pictures, tmp_path):
    assert fault(job(pictures, tmp_path / "out", detector=Failing)) == "the detector says no"
    assert not list(tmp_path.rglob("*.writing")) and not list(tmp_path.rglob("*.tar"))


class NotANumber(Means):
    def detect(self, pictures: list[Prepared]) -> list[Regions]:
        return [Regions(np.full((1, 4), np.nan, np.float32))]


def test_the_thread_that_detects_is_on_the_detectors_device(pictures, tmp_path, monkeypatch):
    """CUDA's current device belongs to a thread; a new one's is 0, whatever the detector's."""
    seen = []
    thread = lambda: threading.current_thread().name.split("_")[0]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((device, thread())))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    extract(job(pictures, tmp_path / "one", device="cuda:1"))
    parts = job(pictures, tmp_path / "two", device="cuda")
    parts.notes.mkdir(parents=True)
    work(parts, 2, 8)
    extract(job(pictures, tmp_path / "three"))
    assert seen == [("cuda:1", "ahead"), ("cuda:2", "ahead")]


def test_features_that_are_no_numbers_name_the_images(pictures, tmp_path):
    told = fault(job(pictures, tmp_path / "out", detector=NotANumber))
    assert "000.png, 001.png, 002.png" in told and "NaN" in told


@pytest.mark.slow
def test_the_ranks_of_a_launcher_share_the_units_and_one_of_them_finishes(pictures, tmp_path):
    extract(job(pictures, tmp_path / "one", to="precomp"))
    work = job(pictures, tmp_path / "two", to="precomp")
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


# running ahead


def test_running_ahead_keeps_the_order_and_works_before_results_are_asked_for():
    done = []

    def work_on(number):
        done.append(number)
        return -number

    results = run_ahead(work_on, range(20), size=3)
    assert next(results) == 0
    deadline = time.monotonic() + 10
    while len(done) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert done == [0, 1, 2, 3]
    assert list(results) == [-number for number in range(1, 20)]


def test_an_exception_comes_after_the_results_before_it():
    results = run_ahead({0: 1, 1: 2}.__getitem__, range(5), size=3)
    assert (next(results), next(results)) == (1, 2)
    with pytest.raises(KeyError, match="2"):
        next(results)


def test_the_thread_ends_when_the_iterator_is_closed():
    before, done = threading.active_count(), []
    results = run_ahead(done.append, iter(int, 1), size=2)
    next(results)
    results.close()
    assert threading.active_count() == before and len(done) <= 3
