"""What upstream's data sets give with us: ids as our own readers have them, drawn captions, positives, word classes."""

from __future__ import annotations

import argparse
import csv
import io
import json
import pickle
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs the extra open-clip", exc_type=ImportError)

import open_clip
from open_clip_train import data as upstream
from open_clip_train import params

from coder_plugin.backbones.clip import register_config
from coder_plugin.concepts.tags import Tags
from coder_plugin.data import open_source
from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip import adapted, data
from coder_plugin.integrations.open_clip.data import (
    CAPTIONS,
    Extras,
    HasCaptions,
    Rename,
    pack,
    reading,
    samples_of,
    unpack,
)
from coder_plugin.integrations.open_clip.overrides import overridden
from coder_plugin.noise.positives import Positives

pytestmark = pytest.mark.skipif(
    not open_clip.__version__.startswith("3.3."), reason="batches are packed for open_clip 3.3 alone"
)
LENGTH = 40


class Letters:
    """A tokenizer whose ids can be read: one letter a token, [B, LENGTH]."""

    def __call__(self, texts: str | list[str]) -> Tensor:
        rows = [[ord(letter) for letter in text[:LENGTH]] for text in ([texts] if isinstance(texts, str) else texts)]
        return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


class Others:
    """In place of positives: what they are made of."""

    def __call__(self, caption: str, others: tuple[str, ...]) -> tuple[str, str]:
        return "|".join(others), "others"


def read(row: Tensor) -> str:
    return "".join(chr(code) for code in row.tolist() if code)


def png(number: int) -> bytes:
    Image.new("RGB", (4, 4), (number, 0, 0)).save(blob := io.BytesIO(), "png")
    return blob.getvalue()


def write_tar(path: Path, samples: list[dict[str, Any]]) -> Path:
    """Samples of a ``key``, and fields by name; a ``png`` that tells its number is put in unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            fields = {"png": png(number), **sample}
            key = fields.pop("key", f"{number:04d}")
            for name, value in fields.items():
                blob = value if isinstance(value, bytes) else json.dumps(value).encode()
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(blob)
                tar.addfile(info, io.BytesIO(blob))
    return path


def write_csv(
    path: Path, rows: list[tuple[str, str]], *, columns: tuple[str, str] = ("filepath", "title"), sep: str = "\t"
) -> Path:
    with open(path, "w", newline="") as file:
        table = csv.writer(file, delimiter=sep)
        table.writerow(columns)
        for number, (name, caption) in enumerate(rows):
            (path.parent / name).write_bytes(png(number % 256))
            table.writerow([path.parent / name, caption])
    return path


def options(*flags: str, **given: Any) -> argparse.Namespace:
    args = params.parse_args(["--batch-size", "4", "--workers", "0", *flags])
    return argparse.Namespace(**{**vars(args), "world_size": 1, "rank": 0, "distributed": False, **given})


def build(args: argparse.Namespace, extras: Extras) -> dict[str, Any]:
    """Upstream's loaders of what ``args`` name."""
    with overridden(upstream, {"tarfile_to_samples_nothrow": data.read_tars}), reading(extras, packed=True):
        return upstream.get_data(args, (to_tensor, to_tensor), tokenizer=extras.tokenizer)


def rows(loader: Any, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Every pair of an epoch: what its image, its caption and the rest say."""
    found = []
    for images, texts in loader.dataloader:
        text, further = unpack(texts, names)
        for number in range(len(text)):
            rest = {name: value[number] for name, value in further.items()}
            found.append({"image": round(float(images[number, 0, 0, 0]) * 255), "text": read(text[number]), **rest})
    return found


def captions_of(number: int, count: int = 3) -> list[str]:
    return [f"{number} {'abcde'[which]}" for which in range(count)]


@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    names=st.sampled_from([(), ("text_positive",), ("text_tags",), ("text_positive", "text_tags")]),
    ids=st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4),
)
def test_packed_texts_unpack(batch: int, length: int, names: tuple[str, ...], ids: list[int]) -> None:
    texts = torch.randint(0, 50000, (batch, length))
    extras = [{name: torch.randint(0, 9, (length,)) for name in names} for _ in range(batch)]
    extras = [{**extra, "image_id": torch.tensor(own)} for extra, own in zip(extras, ids, strict=False)]
    packed = torch.stack([pack(text, extra, names) for text, extra in zip(texts, extras, strict=True)])
    assert packed.shape == (batch, 2 + len(names), length) and packed.dtype == torch.int64
    text, further = unpack(packed, names)
    assert torch.equal(text, texts) and set(further) == {"image_id", *names}
    assert further["image_id"].tolist() == ids[:batch]
    for name in names:
        assert torch.equal(further[name], torch.stack([extra[name] for extra in extras]))


def test_evaluation_packs_the_id_alone() -> None:
    packed = pack(torch.arange(3), {"image_id": torch.tensor(7), "text_positive": torch.ones(3)}, ())[None]
    text, further = unpack(packed, ("text_positive",))
    assert text.tolist() == [[0, 1, 2]] and {name: value.tolist() for name, value in further.items()} == {"image_id": [7]}


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_of_a_table_are_our_readers(tmp_path: Path, split: str) -> None:
    pairs = [(f"{number // 2}.png", f"caption {number}") for number in range(8)]
    path = write_csv(tmp_path / "t.tsv", [*pairs, ("weird name, ß.png", "last")])
    args = options(f"--{split}-data", str(path), batch_size=3)
    found = rows(build(args, Extras(Letters()))[split])
    ours = {caption: item.image_id for _, item in open_source(str(path)).items() for caption in item.captions}
    assert {row["text"]: int(row["image_id"]) for row in found} == ours
    assert len(set(ours.values())) == 5, "pairs of a file have one id"


SHARDS = {
    "stems": [("a/000.tar", {}), ("b/001.v2.tar", {})],
    "equal keys": [("a/x.tar", {}), ("a/y.tar", {})],
    "equal stems": [("a/000.tar", {}), ("b/000.tar", {})],
    "image ids": [("a/000.tar", {"image_id": 7}), ("a/001.tar", {"image_id": "seven"})],
}


@pytest.mark.parametrize(("kind", "split"), [*((kind, "train") for kind in SHARDS), ("equal stems", "val")])
def test_ids_of_shards_are_our_readers(tmp_path: Path, kind: str, split: str) -> None:
    names = []
    for shard, (name, extra) in enumerate(SHARDS[kind]):
        samples = [{"txt": f"{shard} {n}".encode(), **({"json": extra} if extra else {})} for n in range(4)]
        names.append(str(write_tar(tmp_path / name, [*samples, {"key": "in/folder", "txt": f"{shard} last".encode()}])))
    args = options(f"--{split}-data", "::".join(names), "--train-num-samples", "10", batch_size=5)
    found = rows(build(args, Extras(Letters()))[split])
    ours = {item.captions[0]: item.image_id for _, item in open_source("::".join(names), kind="webdataset").items()}
    assert len(ours) == 10 and {row["text"]: int(row["image_id"]) for row in found} == ours
    assert len(set(ours.values())) == (4 if kind == "image ids" else 10)


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """Two shards of eight pictures with three captions each."""
    for shard in range(2):
        samples = [
            {"txt": b"nothing of this", "json": {CAPTIONS: captions_of(number)}, "png": png(number)}
            for number in range(shard * 8, shard * 8 + 8)
        ]
        write_tar(tmp_path / f"{shard}.tar", samples)
    return str(tmp_path / "{0..1}.tar")


def test_training_draws_one_of_an_images_captions(listed: str) -> None:
    train = build(options("--train-data", listed, "--train-num-samples", "16"), Extras(Letters()))["train"]
    seen: Counter[str] = Counter()
    for epoch in range(30):
        train.set_epoch(epoch)
        found = rows(train)
        assert sorted(row["image"] for row in found) == list(range(16)), "each picture once"
        assert all(row["text"] in captions_of(row["image"]) for row in found)
        seen.update(row["text"] for row in found)
    assert len(seen) == 48 and max(seen.values()) < 25, "each caption, no one always"


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_has_every_caption_of_an_image_as_a_pair(listed: str, workers: int) -> None:
    found = rows(build(options("--val-data", listed, workers=workers), Extras(Letters()))["val"])
    assert Counter(row["text"] for row in found) == {text: 1 for number in range(16) for text in captions_of(number)}
    ids = {row["image"]: {int(other["image_id"]) for other in found if other["image"] == row["image"]} for row in found}
    assert all(len(each) == 1 for each in ids.values()) and len(set.union(*ids.values())) == 16


@pytest.mark.parametrize(("kind", "workers"), [("csv", 2), ("shards", 0), pytest.param("shards", 2, marks=pytest.mark.slow)])
def test_positives_are_of_the_images_other_captions(tmp_path: Path, listed: str, kind: str, workers: int) -> None:
    pairs = [(f"{number}.png", text) for number in range(8) for text in captions_of(number)]
    path = listed if kind == "shards" else str(write_csv(tmp_path / "t.csv", pairs))
    extras = Extras(Letters(), Others())  # type: ignore[arg-type]
    args = options("--train-data", path, "--train-num-samples", "16", workers=workers)
    found = rows(build(args, extras)["train"], extras.names)
    assert extras.names == ("text_positive",) and len(found) == (16 if kind == "shards" else 24)
    for row in found:
        own = row["text"]
        assert read(row["text_positive"]) == "|".join(text for text in captions_of(int(own.split()[0])) if text != own)


def test_words_classes_are_those_of_the_models_tokens(tmp_path: Path) -> None:
    model = register_config("coder-tiny")
    tokenizer = open_clip.get_tokenizer(model)
    texts = ["a small red disc", "two blue squares above a big heart", "a small red disc", "it is striped"]
    path = write_csv(tmp_path / "t.csv", [(f"{number}.png", text) for number, text in enumerate(texts)])
    extras = Extras(tokenizer, Positives("truncate"), Tags("scenes"))
    assert extras.names == ("text_positive", "text_tags")
    [(_, packed)] = build(options("--train-data", str(path)), extras)["train"].dataloader
    text, further = unpack(packed, extras.names)
    known = {tuple(ids.tolist()): tags for ids, tags in zip(*Tags("scenes")(texts, tokenizer), strict=True)}
    for ids, tags in zip(text, further["text_tags"], strict=True):
        assert torch.equal(tags, known[tuple(ids.tolist())])
    assert further["text_tags"].any()


@pytest.mark.parametrize("split", ["train", "val"])
def test_samples_without_a_caption_are_left_out_and_captions_in_json_alone_are_not(tmp_path: Path, split: str) -> None:
    samples: list[dict[str, Any]] = [
        {"txt": b"kept 0"},
        {"json": {"width": 3}},
        {"json": {CAPTIONS: ["kept 1", "", 3]}},
        {"txt": b"kept 2", "json": {CAPTIONS: []}},
        {"txt": b"of no picture", "png": b""},
        {"txt": b"passed over", "json": {CAPTIONS: "kept 3"}},
        {},
    ]
    path = str(write_tar(tmp_path / "0.tar", samples))
    args = options(f"--{split}-data", path, "--train-num-samples", "4")
    found = rows(build(args, Extras(Letters()))[split])
    assert {row["text"] for row in found} == {f"kept {number}" for number in range(4)}


def test_stages_and_data_sets_can_be_pickled(tmp_path: Path) -> None:
    extras = Extras(open_clip.get_tokenizer(register_config("coder-tiny")), Positives("join+truncate"), Tags("scenes"))
    path = write_csv(tmp_path / "t.csv", [("0.png", "a b c d e"), ("0.png", "f g")])
    dataset = build(options("--train-data", str(path)), extras)["train"].dataloader.dataset
    copies = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copies[1][1][[0, 2, 3]], dataset[1][1][[0, 2, 3]])
    sample = {"__key__": "7", "__url__": "x.tar", "txt": "a b", "jpg": 0}
    rename = Rename("jpg", "txt", extras=extras, is_train=True, labels={"x.tar": "x"})
    for stage in (rename, pickle.loads(pickle.dumps(rename))):
        [made] = stage(iter([sample]))
        packed = data.Pack("image", "text", names=extras.names)
        tokens = {**made, "text": extras.tokenizer(made["text"])[0]}
        [(_, text)] = pickle.loads(pickle.dumps(packed))(iter([tokens]))
        assert text.shape[0] == 4 and int(text[-1, 0]) == stable_hash("x/7")
    assert pickle.loads(pickle.dumps(HasCaptions(upstream.filter_no_caption_or_no_image)))({"txt": "", "png": 0})
    assert pickle.loads(pickle.dumps(data.read_tars)) is data.read_tars


def test_resampled_shards_with_factors(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # of what the workers draw
    monkeypatch.setattr(upstream, "_SAMPLE_SHUFFLE_INITIAL", 100)
    monkeypatch.setattr(upstream, "_SAMPLE_SHUFFLE_SIZE", 100)
    first, second = listed.replace("{0..1}", "0"), listed.replace("{0..1}", "1")
    flags = ["--train-data", f"{first}::{second}", "--train-num-samples", "480", "--dataset-resampled"]
    args = options(*flags, "--train-data-upsampling-factors", "1::3", workers=2, batch_size=16)
    found = rows(build(args, Extras(Letters()))["train"])
    counts = Counter(row["image"] // 8 for row in found)
    assert len(found) == 480 and 2 < counts[1] / counts[0] < 4.5
    assert {(row["image"], int(row["image_id"])) for row in found} == {
        (number, stable_hash(f"{number // 8}/{number % 8:04d}")) for number in range(16)
    }


def test_upstream_reads_shards_with_this_webdataset_while_adapted(listed: str) -> None:
    """webdataset 1.0 marks a shard's end, on which 3.3's grouping fails with KeyError."""
    with adapted():
        args = options("--train-data", listed, "--train-num-samples", "16")
        loader = upstream.get_data(args, (to_tensor, to_tensor), tokenizer=Letters())["train"].dataloader
        assert sum(len(texts) for _, texts in loader) == 16


def test_nothing_stays_replaced() -> None:
    import open_clip_train.main as trainer
    from open_clip_train import train, zero_shot

    modules = (trainer, upstream, train, zero_shot)
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(ZeroDivisionError), adapted():
        assert trainer.parse_args is not before[0]["parse_args"]
        with reading(Extras(Letters()), packed=True):
            assert upstream.get_wds_dataset is not before[1]["get_wds_dataset"]
            with pytest.raises(FileNotFoundError):
                upstream.get_csv_dataset(options("--train-data", "absent.csv"), to_tensor, True)
            with pytest.raises(AttributeError):
                upstream.get_wds_dataset(argparse.Namespace(train_data="x.tar"), to_tensor, True)
            assert upstream.CsvDataset is before[1]["CsvDataset"] and upstream.wds is before[1]["wds"]
            raise ZeroDivisionError
    assert [dict(vars(module)) for module in modules] == before


def test_tables_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", [("0.png", "a")], columns=("path", "title"), sep=",")
    with pytest.raises(CoderError, match=r"no column 'filepath' \(--csv-img-key\); split at ',': 'path', 'title'"):
        samples_of(options("--train-data", str(table), "--csv-separator", ","))
    with pytest.raises(CoderError, match=r"no column 'text' \(--csv-caption-key\)"):
        samples_of(options("--train-data", str(table), "--csv-separator", ",", csv_img_key="path", csv_caption_key="text"))
    with pytest.raises(CoderError, match=r"split at '\\t': 'path,title'; give --csv-separator ,$"):
        samples_of(options("--train-data", str(table)))
    with pytest.raises(CoderError, match=r"split at ',': 'path', 'title'$"):
        samples_of(options("--train-data", str(table), "--csv-separator", ","))
    with pytest.raises(CoderError, match="absent.csv cannot be read as a table"):
        samples_of(options("--train-data", str(tmp_path / "absent.csv")))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(CoderError, match="empty.csv cannot be read as a table"):
        samples_of(options("--train-data", str(tmp_path / "empty.csv")))
    (tmp_path / "latin.csv").write_bytes("filepath\ttitle\n0.png\ta café\n".encode("latin1"))
    with pytest.raises(CoderError, match=r"latin.csv: line 2, byte 12 \(0xe9\) is not UTF-8: .* iconv -f latin1 -t utf-8"):
        samples_of(options("--train-data", str(tmp_path / "latin.csv")))
    with pytest.raises(CoderError, match="coder-plugin train reads the built-in scenes, .* --dataset-type synthetic"):
        samples_of(options("--train-data", "scenes"))


def relative_csv(folder: Path) -> Path:
    """Three pictures with two captions each, by their names alone."""
    path = write_csv(folder / "pairs.csv", [(f"{number}.png", text) for number in range(3) for text in captions_of(number, 2)])
    path.write_text(path.read_text().replace(f"{folder}/", ""))
    return path


def drawn(path: Path) -> list[tuple[int, int, str]]:
    """Image, id and the other captions of every row of a CSV, sorted."""
    extras = Extras(Letters(), positives=Others())
    args = options("--train-data", str(path), "--dataset-type", "csv", "--batch-size", "3")
    names = ("text_positive",)
    loaders = build(args, extras)
    return sorted(
        (row["image"], int(row["image_id"]), read(row["text_positive"])) for row in rows(loaders["train"], names)
    )


def test_relative_paths_of_a_csv_are_of_the_working_directory_or_of_its_folder(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = relative_csv(folder)
    monkeypatch.chdir(folder)
    within = drawn(path)
    assert [image for image, _, _ in within] == [1, 1, 3, 3, 5, 5] and {key for _, key, _ in within} == {
        stable_hash(f"{number}.png") for number in range(3)
    }
    monkeypatch.chdir(tmp_path)
    assert drawn(path) == within  # ids too: a run goes on from another directory


def test_a_csv_without_its_pictures_is_refused_in_one_line(tmp_path) -> None:
    path = relative_csv(tmp_path)
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    with pytest.raises(CoderError, match=r"pairs.csv: its first picture, 0.png, is not there in the working") as refused:
        drawn(path)
    assert "\n" not in str(refused.value)
    absolute = write_csv(tmp_path / "absolute.csv", [("a.png", "a")])
    (tmp_path / "a.png").unlink()
    with pytest.raises(CoderError, match=r"a.png, is not there: --csv-img-key"):
        drawn(absolute)
