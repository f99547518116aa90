"""Data sets of Hugging Face's ``datasets``: whole and as streams, by name and as objects, resumed with the same batches."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from PIL import Image

from coder_plugin import Callback, Trainer, distributed
from coder_plugin.cli import main
from coder_plugin.config import DataConfig
from coder_plugin.data import guess_kind, open_source
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.from_config import object_source
from coder_plugin.data.huggingface import open_picture
from coder_plugin.data.item import stable_hash
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.streams import STRIDE
from coder_plugin.errors import install_command
from tests import gloo
from tests.data.test_loader import BAD, BATCH, NUMBER, equal, fault, loader, numbers, png, transform
from tests.few import few

datasets = pytest.importorskip("datasets")
SHARDS = (0, 13, 20, 32, NUMBER)
#: Older versions are refused (test_versions_that_are_too_old_are_refused).
streams = pytest.mark.skipif(Version(datasets.__version__) < Version("5.1"), reason="streams need datasets 5.1")
kinds = pytest.mark.parametrize("kind", ["whole", pytest.param("stream", marks=streams)])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def rows(numbers: Any, bad: Any = ()) -> dict[str, list[Any]]:
    return {
        "picture": [{"bytes": b"\x89PNG broken" if n in bad else png(n), "path": None} for n in numbers],
        "caption": [[f"{n} {k}" for k in range(3)] for n in numbers],
        "image_id": list(numbers),
    }


def whole(numbers: Any = range(NUMBER), bad: Any = ()) -> Any:
    text, integer = datasets.Value("string"), datasets.Value("int64")
    types = {"picture": datasets.Image(), "caption": datasets.List(text), "image_id": integer}
    return datasets.Dataset.from_dict(rows(numbers, bad), features=datasets.Features(types))


def write_parquet(folder: Path, bad: Any = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for shard, (start, stop) in enumerate(zip(SHARDS, SHARDS[1:], strict=False)):
        whole(range(start, stop), bad).to_parquet(folder / f"{shard}.parquet", batch_size=4)
    return folder


def make(kind: str, folder: Path, bad: Any = ()) -> Any:
    """43 pictures with three captions each: in memory, or as a stream of four unequal Parquet files."""
    if kind == "whole":
        return open_source(whole(bad=bad))
    files = sorted(map(str, write_parquet(folder / "parquet", bad).glob("*.parquet")))
    return open_source(datasets.load_dataset("parquet", data_files=files, split="train", streaming=True))


def options(kind: str) -> dict[str, Any]:
    return {"num_samples": NUMBER} if kind == "stream" else {}


def read_and_note(files: list[str], note: str) -> Any:
    """Examples of "shards" whose names begin with a number; every shard that is opened is a line in ``note``."""
    for file in files:
        with open(note, "a") as opened:
            opened.write(file + "\n")
        first = int(file.partition("-")[0])
        for n in range(first, first + 10):
            yield {"image": {"bytes": png(n), "path": None}, "caption": f"{n} 0", "key": str(n)}


def noted_stream(note: Path, shards: int) -> Any:
    files = [f"{10 * n}-{n}" for n in range(shards)]
    return datasets.IterableDataset.from_generator(read_and_note, gen_kwargs={"files": files, "note": str(note)})


# rows


@kinds
def test_rows_are_items(tmp_path, kind):
    source = make(kind, tmp_path)
    found = list(source.items())
    places = range(NUMBER)
    if kind == "stream":
        places = [STRIDE * s + n for s, (a, b) in enumerate(zip(SHARDS, SHARDS[1:], strict=False)) for n in range(b - a)]
    assert [index for index, _ in found] == list(places)
    for n, (_, item) in enumerate(found):
        assert item.captions == (f"{n} 0", f"{n} 1", f"{n} 2") and item.key == str(n)
        assert item.image_id == stable_hash(str(n)) and item.names == (str(n),)
        assert item.load().mode == "RGB" and item.load().getpixel((0, 0)) == (n, 0, 0)
    assert source.num_images == (None if kind == "stream" else NUMBER)


def test_rows_of_one_key_are_one_image(tmp_path):
    pictures = [{"bytes": png(n), "path": None} for n in (1, 2, 1)]
    data = {"image": pictures, "text": ["a", "b", "c"], "file_name": ["x", "y", "x"]}
    source = open_source(datasets.Dataset.from_dict(data))
    assert [(item.key, item.captions) for _, item in source.items()] == [("x", ("a", "c")), ("y", ("b",))]
    assert [item.load().getpixel((0, 0))[0] for _, item in source.items()] == [1, 2]
    assert (source.samples("draw"), source.samples("all")) == (2, 3)
    assert len(list(open_source(datasets.Dataset.from_dict(data), key_column="text").items())) == 3


@kinds
def test_faulty_rows_are_counted_and_named(tmp_path, kind):
    data = rows(range(6), bad=[1])
    data["caption"][2], data["caption"][3], data["picture"][4] = [], [" "], None
    data["caption"] = [None if n == 0 else each for n, each in enumerate(data["caption"])]
    table = datasets.Dataset.from_dict(data)
    source = open_source(table if kind == "whole" else table.to_iterable_dataset())
    made = loader(source, batch_size=1, num_samples=6)
    assert numbers(made.epoch(0)) == [[5]]
    assert made.bad.kinds == {"caption": 3, "picture": 1, "file": 1} and made.bad.read == 6


def test_columns_are_told_by_type_and_name_or_named():
    table = datasets.Dataset.from_dict({"photo": [png(1)], "thumb": [png(2)], "words": ["1 0"], "more": [["1 1", "1 2"]]})
    assert "no column of pictures: name one (--image-column); its columns are: 'photo', 'thumb'" in fault(open_source, table)
    assert "no column of captions" in fault(open_source, table, image_column="photo")
    misspelled = fault(open_source, table, image_column="photo", caption_column=["word"])
    assert "no column 'word' (--caption-column); did you mean 'words'?; its columns are: 'photo'" in misspelled
    assert "no column 'id' (--key-column)" in fault(open_source, table, key_column="id")
    (_, item), = open_source(table, image_column="photo", caption_column=["words", "more"]).items()
    assert item.captions == ("1 0", "1 1", "1 2") and item.load().getpixel((0, 0)) == (1, 0, 0)
    both = table.cast_column("photo", datasets.Image()).cast_column("thumb", datasets.Image())
    assert "several columns of pictures: photo, thumb" in fault(open_source, both, caption_column=["words"])
    one = table.cast_column("thumb", datasets.Image())
    (_, item), = open_source(one, caption_column=["words"]).items()
    assert item.load().getpixel((0, 0)) == (2, 0, 0)
    flickr8k = {"image": [png(1)], **{f"caption_{n}": [f"1 {n}"] for n in (10, 2, 0)}}
    (_, item), = open_source(datasets.Dataset.from_dict(flickr8k)).items()
    assert item.captions == ("1 0", "1 2", "1 10")


@kinds
def test_hard_negatives_are_a_column_of_lists(kind):
    data = {**rows(range(4)), "negatives": [["4 0"], None, [], ["5 0", " "]]}
    table = datasets.Dataset.from_dict(data)
    given = table if kind == "whole" else table.to_iterable_dataset()
    items = [item for _, item in open_source(given, negatives_key="negatives").items()]
    assert [item.negatives for item in items] == [("4 0",), (), (), ()]
    assert [item.fault and item.fault.kind for item in items] == [None, None, None, "caption"]
    assert not any(item.negatives for _, item in open_source(given).items())
    assert open_source(given.remove_columns("negatives"), negatives_key="negatives").num_images in (4, None)
    config = DataConfig(hard_negatives=1)
    assert [item.negatives for _, item in object_source(config, given, split="train").items()][0] == ("4 0",)
    assert not any(item.negatives for _, item in object_source(config, given, split="val").items())
    grouped = open_source(datasets.Dataset.from_dict({**data, "image_id": [1, 2, 1, 2]}), negatives_key="negatives")
    assert [(len(item.captions), item.negatives) for _, item in grouped.items()] == [(6, ("4 0",)), (0, ())]


def test_pictures_in_every_form_and_their_limits(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(png(7))
    forms = [{"bytes": png(7), "path": "else.png"}, {"bytes": None, "path": str(path)}, png(7), str(path), Image.open(path)]
    for form in forms:
        assert open_picture(form).getpixel((0, 0)) == (7, 0, 0) and open_picture(form).mode == "RGB"
    set_max_pixels(15)
    for form in forms:
        with pytest.raises(ValueError, match="4 x 4 pixels are more than the 15"):
            open_picture(form)
    set_max_pixels(None)
    for form, words in [(None, "no picture"), ("", "no picture"), (5, "no picture but a int")]:
        with pytest.raises(ValueError, match=words):
            open_picture(form)
    for address in ("https://example.org/a.png", "file:///etc/passwd", "zip://a.png::https://x.org/a.zip", "s3://b/a.png"):
        with pytest.raises(ValueError, match="an address instead of a picture"):
            open_picture({"bytes": None, "path": address})
    import fsspec

    opened = []
    monkeypatch.setattr(fsspec, "open", lambda address, mode: (opened.append(address), path.open(mode))[1])
    for address in ("hf://datasets/o/n@main/a.png", "zip://a.png::hf://datasets/o/n@main/a.zip"):
        assert open_picture({"bytes": None, "path": address}).getpixel((0, 0)) == (7, 0, 0)
    assert len(opened) == 2


# order and resuming


@kinds
@pytest.mark.parametrize(
    ("bad", "workers"), [(BAD, 0), pytest.param(BAD, 2, marks=pytest.mark.slow), pytest.param((), 0, marks=pytest.mark.slow)]
)
def test_resuming_is_exact_from_every_position(tmp_path, kind, bad, workers):
    source = make(kind, tmp_path, bad)
    made, positions, batches = loader(source, workers=workers, **options(kind)), [], []
    positions.append(json.dumps(made.position()))
    for batch in made.epoch(0):
        batches.append(batch)
        positions.append(json.dumps(made.position()))
    assert len(batches) == (NUMBER - len(bad)) // BATCH
    for done in range(0, len(positions), 1 if workers < 2 else 3):
        fresh = loader(source, workers=workers, **options(kind))
        assert equal(list(fresh.epoch(0, json.loads(positions[done]))), batches[done:])


@streams
@pytest.mark.parametrize("change", few(["both", "map", "filter"]))
def test_resuming_a_stream_that_is_mapped_or_filtered(tmp_path, change):
    stream = whole().to_iterable_dataset(num_shards=3)
    if change != "filter":
        stream = stream.map(lambda row: {"caption": [text + "0" for text in row["caption"]]})
    if change != "map":
        stream = stream.filter(lambda row: row["image_id"] % 3 > 0)
    _resume_everywhere(open_source(stream), range(NUMBER) if change == "map" else [n for n in range(NUMBER) if n % 3])


ORDER: dict[str, Any] = {"seed": 0, "epoch": 0, "captions": "draw"}


def _resume_everywhere(source: Any, keys: Any) -> None:
    source.buffer = 6
    expected = [(item.key, item.captions) for item in source.part(0, 1, **ORDER)]
    assert sorted(int(key) for key, _ in expected) == list(keys)
    for skip in range(0, len(expected), 5):
        assert [(item.key, item.captions) for item in source.part(0, 1, skip=skip, **ORDER)] == expected[skip:]


@streams
@pytest.mark.parametrize(("ranks", "workers"), few([(2, 2), (1, 4), (4, 0)]))
def test_every_shard_is_read_once(tmp_path, ranks, workers):
    note = tmp_path / "opened"
    source = open_source(noted_stream(note, 4))
    note.write_text("")
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        made = loader(source, rank=rank, world_size=ranks, workers=workers, batch_size=2, num_samples=40)
        for batch in numbers(made.epoch(0)):
            seen.update(batch)
    assert Counter(note.read_text().split()) == Counter(f"{10 * n}-{n}" for n in range(4))
    assert seen == Counter(range(40))
    note.write_text("")
    seen.clear()
    for rank in range(ranks):
        share = {"rank": rank, "world_size": ranks, "workers": workers, "bad": BadSamples(source.name)}
        for batch in evaluation_batches(source, batch_size=3, transform=transform, **share):
            seen.update(batch["image"][:, 0, 0, 0].int().tolist())
    assert set(Counter(note.read_text().split()).values()) == {1} and seen == Counter(range(40))


def test_the_rest_of_an_epoch_is_dealt_to_other_ranks_and_workers(tmp_path):
    source = make("whole", tmp_path)
    seen: Counter[int] = Counter()
    positions = []
    for rank in range(2):
        made = loader(source, rank=rank, world_size=2, workers=2, batch_size=3)
        stream = made.epoch(0)
        for _ in range(3):
            seen.update(next(stream)["text"][:, 0].tolist())
        stream.close()
        positions.append(json.loads(json.dumps(made.position())))
    for rank in range(3):
        made = loader(source, rank=rank, world_size=3, batch_size=2)
        for batch in numbers(made.epoch(0, positions)):
            seen.update(batch)
    assert set(seen.values()) == {1} and 18 + 18 <= len(seen) <= NUMBER


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.step == self.step:
            trainer.stop = True


def train(data: Any, model: str, logs: Path, name: str, **config: Any) -> dict[str, torch.Tensor]:
    stop = config.pop("stop", 0)
    given = {
        "logs": str(logs), "name": name, "batch_size": 4, "epochs": 2, "workers": 0, "warmup": 1, "lr": 0.01, "report": False,
        **config,
    }  # fmt: skip
    trainer = Trainer(model=model, loss="dcl", train=data, config=given, callbacks=[Stop(stop)] if stop else [])
    trainer.run()
    return {key: value.clone() for key, value in trainer.model.state_dict().items()}


def interrupted(kind: str, folder: str, model: str) -> bool:
    """Whether a run that was stopped inside its second epoch ends with the weights of one that was not. On each rank."""
    if torch.distributed.is_initialized():  # what a launcher sets, and accelerate reads
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # which nobody calls, since the ranks have met
    data: Any = whole(range(32))
    samples = {}
    if kind == "stream":
        data, samples = data.to_iterable_dataset(num_shards=4), {"train_num_samples": 32}
    expected = train(data, model, Path(folder), "one", **samples)
    steps = 32 // 4 // (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    half = train(data, model, Path(folder), "two", stop=steps + 1, **samples)  # with two ranks a step later
    found = train(data, model, Path(folder), "two", resume="latest", **samples)
    assert not all(torch.equal(half[key], expected[key]) for key in expected)
    total = sum(value.double().sum().item() for value in expected.values())
    assert len(set(distributed.gather_objects(total))) == 1  # the ranks trained one model
    return all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.slow), pytest.param("stream", marks=streams)])
def test_a_run_resumes_bit_for_bit(tmp_path, tiny_model, kind):
    assert interrupted(kind, str(tmp_path), tiny_model)


@pytest.mark.slow
@streams
def test_a_run_of_two_ranks_resumes_bit_for_bit(tmp_path, tiny_model):
    assert gloo.run(interrupted, "stream", str(tmp_path), tiny_model) == [True, True]


# by name


@streams
def test_files_and_folders_are_recognised(tmp_path):
    parquet = write_parquet(tmp_path / "parquet")
    whole().save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": whole(range(9)), "validation": whole(range(4)), "test": whole(range(2))}).save_to_disk(
        tmp_path / "splits"
    )
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(png(3))
    (pictures / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "3 0"}))
    sizes = {parquet: 43, f"{parquet}/*.parquet": 43, f"{parquet}/1.parquet": 7, tmp_path / "saved": 43, pictures: 1}
    for spec, size in sizes.items():
        assert guess_kind(str(spec)) == "hf"
        for kind in ("auto", "hf-streaming"):
            items = [item for _, item in open_source(str(spec), kind).items()]
            assert len(items) == size and items[0].load().size == (4, 4), (spec, kind)
    for split, size in {"train": 9, "val": 4, "test": 2}.items():
        assert len(list(open_source(str(tmp_path / "splits"), split=split).items())) == size
    words = "it has no split 'dev'; its splits are train, validation, test: give one of them, as a folder"
    assert words in fault(open_source, str(tmp_path / "splits"), split="dev")
    assert open_source(str(tmp_path / "splits" / "test"), split="dev").num_images == 2
    assert "no such file" in fault(open_source, str(tmp_path / "none.parquet"))


@pytest.mark.parametrize(
    ("spec", "asked", "chosen"),
    [
        ("hf:o/n", {"path": "o/n", "name": None, "revision": None}, "validation"),
        ("hf:o/n:train[:9]", None, ""),
        ("hf:o/n:test", {"path": "o/n", "name": None, "revision": None}, "test"),
        ("hf:o/n/c@refs/convert/parquet:test", {"path": "o/n", "name": "c", "revision": "refs/convert/parquet"}, "test"),
        ("hf-streaming:o/n@v1", {"path": "o/n", "name": None, "revision": "v1"}, "validation"),
    ],
)
def test_names_of_the_hub(monkeypatch, spec, asked, chosen):
    calls = []
    monkeypatch.setattr("coder_plugin.hub_access.is_reachable", lambda address: True)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name, revision: ["train", "validation"])
    monkeypatch.setattr(datasets, "load_dataset", lambda **given: (calls.append(given), whole(range(3)))[1])
    if asked is None:
        assert "write hf:OWNER/NAME" in fault(open_source, spec, split="val")
        return
    assert open_source(spec, split="val").num_images == 3 and open_source(spec, split="val").name == spec
    assert calls[0] == {**asked, "split": chosen, "streaming": spec.startswith("hf-s")}
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["all"])
    if ":" not in spec.partition(":")[2]:
        assert "no split 'val'; its splits are all: name it: hf:OWNER/NAME:SPLIT" in fault(open_source, spec, split="val")


@streams
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("raise SystemExit('code of a data set was run')")
    (folder / "state.txt").write_text("")
    assert "code of a data set is not run" in fault(open_source, str(folder), "hf")
    assert "leave out 'hf:'" in fault(open_source, f"hf:{tmp_path}")
    stream = whole().to_iterable_dataset()
    assert "pass it without .shuffle()" in fault(open_source, stream.shuffle(seed=0).map(lambda row: row))
    for probabilities in (None, [0.5, 0.5]):
        mixed = datasets.interleave_datasets([stream, stream], probabilities=probabilities, seed=0)
        assert "pass datasets.concatenate_datasets" in fault(open_source, mixed.map(lambda row: row))
    assert sum(1 for _ in open_source(datasets.concatenate_datasets([stream, stream])).items()) == 2 * NUMBER
    assert "give one of its splits, such as dataset['test']" in fault(open_source, datasets.DatasetDict({"test": whole()}))
    transformed = whole().with_transform(lambda batch: batch)
    assert "its own transform would not be used" in fault(open_source, transformed)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    assert fault(open_source, str(write_parquet(tmp_path / "p"))) == f"{tmp_path / 'p'}: division by zero"
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert install_command("datasets") in fault(open_source, "hf:o/n")


def test_a_file_of_options_may_not_name_the_hub(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"train_data": "hf:o/n", "model": "RN50"}))
    assert main(["train", "--config", str(path), "--logs", str(tmp_path)]) == 2
    assert "if you trust it, give it again on the command line" in capsys.readouterr().err


@streams
def test_commands_take_them(tmp_path, tiny_model, capsys, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    write_parquet(tmp_path / "data")
    columns = ["--image-column", "picture", "--caption-column", "caption"]
    train = ["train", "--model", tiny_model, "--train-data", "data", "--val-data", "data", *columns, "--dataset-type"]
    run = ["hf-streaming", "--train-num-samples", "16", "--batch-size", "8", "--epochs", "1", "--workers", "0", "--name", "r"]
    assert main([*train, *run]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["eval", "logs/r", "--workers", "0"]) == 0  # as the run read it
    assert main(["eval", "logs/r", "--val-data", "data/1.parquet", "--workers", "0", "--key-column", "image_id"]) == 0
    assert capsys.readouterr().out.count("R@sum") == 2
    assert main(["index", "logs/r", "--data", "data", "--output", "i", "--dataset-type", "hf", "--workers", "0"]) == 0
    assert "43 images, 129 captions" in capsys.readouterr().out
    assert main(["doctor", "--train-data", "data", "--dataset-type", "hf-streaming", "--model", tiny_model]) in (0, 1)
    assert "43 images" in capsys.readouterr().out
    assert os.path.exists("logs/r/export/best")
