"""Extraction: what is written, what becomes of bad pictures, and that a killed run ends as one that was left alone."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import shutil
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
from coder_plugin.detectors.extract import RegionsJob
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


def job(folder: Path, out: Path, **options) -> RegionsJob:
    usual = {"source": Pictures(str(folder)), "detector": Means, "shard_size": 7, "batch_size": 3, "workers": 0}
    return RegionsJob(folder=out, **{**usual, **options})


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fault(work: RegionsJob) -> str:
    with pytest.raises(CoderError) as caught:
        work.run()
    return str(caught.value)


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path / "pictures", 30)


# what is written


def test_every_picture_is_written_once_in_the_sources_order_with_its_own_regions(pictures, tmp_path):
    report = job(pictures, tmp_path / "out").run()
    file = ShardFile(str(tmp_path / "out"))
    assert list(file) == [f"{index:03d}.png" for index in range(30)]
    for name in file:
        picture = np.asarray(Image.open(pictures / name))
        assert file[name].features[0, :3] == pytest.approx(picture.mean((0, 1)), rel=1e-5)
        assert file[name].size == (picture.shape[1], picture.shape[0])
    assert report == (5, 5, 5, 30, 0, {})
    sizes = json.loads((tmp_path / "out/sizes.json").read_text())
    assert sizes == {f"train-{unit:06d}.tar": size for unit, size in enumerate((7, 7, 7, 7, 2))}


def test_batches_never_cross_a_shard(pictures, tmp_path):
    job(pictures, tmp_path / "out").run()
    file = ShardFile(str(tmp_path / "out"))
    sizes = [int(file[name].features[0, 3]) for name in file]
    assert sizes == [3, 3, 3, 3, 3, 3, 1] * 4 + [2, 2]


def test_captions_are_written_too(pictures, tmp_path):
    items = [Item(item.key, (f"a {item.key}", "b"), item.load) for _, item in Pictures(str(pictures)).items()]
    job(pictures, tmp_path / "out", source=ItemSource(items), split="dev").run()
    assert ShardFile(str(tmp_path / "out"), split="dev").captions == {item.key: item.captions for item in items}


def test_two_splits_in_one_folder(pictures, tmp_path):
    job(pictures, tmp_path / "out").run()
    job(pictures, tmp_path / "out", split="dev").run()
    assert len(ShardFile(str(tmp_path / "out"), split="dev")) == 30
    assert len(json.loads((tmp_path / "out/sizes.json").read_text())) == 10


def test_workers_change_nothing(pictures, tmp_path):
    job(pictures, tmp_path / "none").run()
    job(pictures, tmp_path / "some", workers=2).run()
    assert contents(tmp_path / "none") == contents(tmp_path / "some")


def test_tasks_make_the_whole_in_any_order(pictures, tmp_path):
    job(pictures, tmp_path / "one").run()
    parts = job(pictures, tmp_path / "parts")
    finished = [parts.run(index=index, count=3) for index in (1, 0, 2)]
    assert [(each.made, each.files) for each in finished] == [(2, 2), (2, 4), (1, 5)] and finished[2].images == 30
    assert parts.run().made == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "parts")


def test_a_call_makes_one_shard_and_a_job_can_be_pickled(pictures, tmp_path):
    made = job(pictures, tmp_path / "out")
    assert made(2) == {"unit": 2, "path": str(made.path(2)), "rows": 7, "captions": 0, "bad": 0}
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["train-000002.tar"]
    again = pickle.loads(pickle.dumps(made))
    assert "opened" not in vars(again) and again(2)["rows"] == 7


# bad pictures


def test_bad_pictures_are_named_counted_and_left_out(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 10, bad=(2, 8))
    report = job(folder, tmp_path / "out", max_bad_samples=0.002).run()
    assert report.images == 8 and report.bad == {"picture": 2}
    bad = [each for note in (tmp_path / "out/train.extraction").glob("0*.json") for each in json.loads(note.read_text())["bad"]]
    assert sorted(key for _, key, _ in bad) == ["002.png", "008.png"] and "not an image" in bad[0][2]
    assert len(ShardFile(str(tmp_path / "out"))) == 8
    again = job(folder, tmp_path / "out", max_bad_samples=0.002).run()
    assert (again.images, again.made, again.bad) == (8, 0, report.bad)


def test_too_many_bad_pictures_end_the_run_and_a_higher_limit_goes_on(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 10, bad=(2, 8))
    message = fault(job(folder, tmp_path / "out", max_bad_samples=0))
    assert "1 of 3 samples skipped (picture 1), more than max_bad_samples=0 " in message and "008.png" not in message
    message = fault(job(folder, tmp_path / "out", max_bad_samples=0.001))  # at the end
    assert "2 of 10 samples skipped (picture 2), more than max_bad_samples=0.001" in message
    assert job(folder, tmp_path / "out", max_bad_samples=0.002).run().images == 8


def test_a_unit_of_bad_pictures_alone_has_no_shard(tmp_path):
    folder = make_pictures(tmp_path / "pictures", 9, bad=(3, 4, 5))
    job(folder, tmp_path / "out", shard_size=3).run()
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["train-000000.tar", "train-000002.tar"]
    assert job(folder, tmp_path / "out", shard_size=3).run().made == 0


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
        target=RegionsJob.run, args=[job(pictures, killed, detector=Slow)]
    )
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    assert job(pictures, killed).run().made == 5 - done
    job(pictures, whole).run()
    assert contents(killed) == contents(whole)


def test_killed_between_the_first_shard_and_its_note(pictures, tmp_path):
    job(pictures, tmp_path / "out").run()
    before = contents(tmp_path / "out")
    for note in (tmp_path / "out").glob("train.extraction/0*.json"):
        note.unlink()
    assert job(pictures, tmp_path / "out").run().made == 5 and contents(tmp_path / "out") == before


def test_data_that_have_changed_are_noticed(pictures, tmp_path):
    plans = [job(pictures, tmp_path / "out").header()["plan"]]
    job(pictures, tmp_path / "out").run()
    shutil.copytree(pictures, tmp_path / "copy", copy_function=shutil.copyfile)  # of other times
    assert plans[0]["content"] == job(tmp_path / "copy", tmp_path / "out").header()["plan"]["content"] is not None
    replaced, content = pictures / "004.png", (pictures / "004.png").read_bytes()
    for change in (lambda: replaced.write_bytes((pictures / "005.png").read_bytes()), lambda: replaced.unlink()):
        change()
        assert "the data's content has changed" in fault(job(pictures, tmp_path / "out"))
    replaced.write_bytes(content)
    assert job(pictures, tmp_path / "out").run().made == 0
    replaced.rename(pictures / "0005.png")
    assert "the data's content has changed" in fault(job(pictures, tmp_path / "out"))


def test_files_of_others_are_neither_taken_for_the_result_nor_overwritten(pictures, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train-000009.tar").write_bytes(b"of somebody else")
    (tmp_path / "out/train-2017-000000.tar").touch()  # another split
    before = contents(tmp_path / "out")
    told = fault(job(pictures, tmp_path / "out"))
    assert "train-000009.tar" in told and "remove split 'train'" in told
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/train-000009.tar").unlink()
    assert job(pictures, tmp_path / "out").run().made == 5


@pytest.mark.slow
def test_the_same_with_a_faster_rcnn(pictures, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    work = job(pictures, killed, detector=MOBILENET, workers=1)
    process = multiprocessing.get_context("spawn").Process(target=on_one_thread, args=[work])
    process.start()
    done = kill_when_begun(killed, process)
    assert 1 <= done < 5
    assert on_one_thread(work).made == 5 - done
    on_one_thread(job(pictures, whole, detector=MOBILENET))
    assert contents(killed) == contents(whole)


def on_one_thread(work: RegionsJob):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work.run()
    finally:
        torch.set_num_threads(threads)


def test_a_missing_shard_is_made_again_and_nothing_else(pictures, tmp_path):
    job(pictures, tmp_path / "out").run()
    before = contents(tmp_path / "out")
    (tmp_path / "out/train-000001.tar").unlink()
    (tmp_path / "out/train.extraction/000003.json").unlink()
    assert job(pictures, tmp_path / "out").run().made == 2
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"shard_size": 8}, "shard_size"),
        ({"settings": {"regions": 10}}, "regions"),
        ({"detector": partial(Means, weight=2.0)}, "checksum of the weights"),
    ],
)
def test_a_restart_with_other_options_is_an_error_that_names_them(pictures, tmp_path, changed, name):
    job(pictures, tmp_path / "out").run()
    before = contents(tmp_path / "out")
    assert f"was begun with other options ({name} was " in fault(job(pictures, tmp_path / "out", **changed))
    assert contents(tmp_path / "out") == before


# faults


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
    job(pictures, tmp_path / "one", device="cuda:1").run()
    monkeypatch.setenv("LOCAL_RANK", "2")
    job(pictures, tmp_path / "two", device="cuda").run(index=2, count=8)
    job(pictures, tmp_path / "three").run()
    assert seen == ["cuda:1", "cuda:2"]


def test_features_that_are_no_numbers_name_the_images(pictures, tmp_path):
    told = fault(job(pictures, tmp_path / "out", detector=NotANumber))
    assert "000.png, 001.png, 002.png" in told and "NaN" in told


@pytest.mark.parametrize("damage", ["{", '{"rows": 7}'])
def test_a_damaged_note_or_shard_is_made_again(pictures, tmp_path, caplog, damage):
    job(pictures, tmp_path / "out").run()
    before = contents(tmp_path / "out")
    (tmp_path / "out/train.extraction/000001.json").write_text(damage)
    (tmp_path / "out/train-000002.tar").write_bytes(b"torn")
    assert job(pictures, tmp_path / "out").run().made == 2
    assert contents(tmp_path / "out") == before
    assert "000001.json" in caplog.text and "train-000002.tar is missing or damaged" in caplog.text
