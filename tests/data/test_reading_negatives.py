"""Hard negatives from a CSV column, a shard's json and a table: what is read, refused and drawn, and how batches resume."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin.config import DataConfig
from coder_plugin.data import open_source
from coder_plugin.data.from_config import make_negatives, make_source
from coder_plugin.data.hard_negatives import HardNegatives, read_negatives
from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError

NUMBER = 11


def captions(n: int) -> list[str]:
    return [f"1 {n} {k}" for k in range(2)]


def negatives(n: int) -> list[str]:
    """Image n has n modulo 4 of them."""
    return [f"2 {n} {k}" for k in range(n % 4)]


def tokenizer(texts: list[str]) -> torch.Tensor:
    """Three numbers, zeros of an empty text, and one drawn, as tokenizers that drop words do."""
    rows = [[int(word) for word in text.split()] or [0, 0, 0] for text in texts]
    return torch.tensor([row + [int(torch.randint(1000, ()))] for row in rows])


def picture(n: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (n, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_csv(folder: Path, column: str = "negatives", **changed: Any) -> Path:
    """Two rows an image, the first of which lists its hard negatives."""
    path = folder / "data.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["filepath", "title", column])
        for n in range(NUMBER):
            (folder / f"{n}.png").write_bytes(b"broken" if n == 5 else picture(n))
            listed = changed.get(f"image{n}", json.dumps(negatives(n)))
            rows.writerows([[f"{n}.png", captions(n)[0], listed], [f"{n}.png", captions(n)[1], ""]])
    return path


def write_shard(folder: Path, **changed: Any) -> Path:
    path = folder / "data.tar"
    with tarfile.open(path, "w") as tar:
        for n in range(NUMBER):
            note = {"captions": captions(n), "image_id": f"{n}.png", "negatives": changed.get(f"image{n}", negatives(n))}
            for extension, data in (("png", b"broken" if n == 5 else picture(n)), ("json", json.dumps(note).encode())):
                info = tarfile.TarInfo(f"{n:03d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


COLUMNS = ("key", "score", "negative", "negative_key")


def write_table(folder: Path, *, of: str = "3.png", columns: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / "negatives.tsv"
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, columns, dialect="excel-tab", extrasaction="ignore")
        rows.writeheader()
        for n in range(NUMBER):
            for k in range(n % 4):
                rows.writerow({"key": f"{n}.png", "score": 0.5, "negative": f"2 {n} {k}", "negative_key": of if k else ""})
    return path


def source_of(kind: str, folder: Path, **changed: Any) -> Any:
    if kind == "csv":
        return open_source(str(write_csv(folder, **changed)), negatives_key="negatives")
    return open_source(str(write_shard(folder, **changed)), negatives_key="negatives")


kinds = pytest.mark.parametrize("kind", ["csv", "shards"])


@kinds
def test_a_data_set_gives_its_own(tmp_path, kind):
    """Any number of an image, also none, and one list for all of its captions (huggingface/sentence-transformers #2848,
    #3279)."""
    items = [item for _, item in source_of(kind, tmp_path).items()]
    assert [item.negatives for item in items] == [tuple(negatives(n)) for n in range(NUMBER)]
    assert all(item.negative_ids == () and item.fault is None for item in items)


WRONG = {
    "[1]": "a negative that is not text (number 1 of 1)",
    '["2 1 0", " "]': "an empty negative (number 2 of 2)",
    '"2 1 0"': "its negatives are not a list of texts",
    '{"a": "b"}': "its negatives are not a list of texts",
    '["\\ud800"]': "a negative that is not valid Unicode (number 1 of 1)",
    json.dumps(["x" * 20_001]): "a negative of over 20,000 characters",
}


@pytest.mark.parametrize(
    ("kind", "listed"),
    [*(("csv", listed) for listed in WRONG), ("shards", "[1]"), ("shards", '"2 1 0"')],
    ids=lambda each: each[:20],
)
def test_faulty_ones_make_a_bad_sample(tmp_path, kind, listed):
    source = source_of(kind, tmp_path, image3=listed if kind == "csv" else json.loads(listed))
    faults = [(item.key, item.fault) for _, item in source.items() if item.fault is not None]
    (key, fault), where = faults[0], "line 8: " if kind == "csv" else ""
    assert len(faults) == 1 and key.endswith(("3.png", "003")) and fault.kind == "caption"
    assert fault.reason.startswith(where) and WRONG[listed] in fault.reason
    plain = open_source(str(tmp_path / ("data.csv" if kind == "csv" else "data.tar")))  # not asked for: may mean anything else
    assert all(item.fault is None and not item.negatives for _, item in plain.items())


def test_a_column_that_is_no_json_or_not_there(tmp_path):
    source = source_of("csv", tmp_path, image3="a blue car")
    faults = [str(item.fault) for _, item in source.items() if item.fault]
    assert len(faults) == 1 and faults[0].startswith("line 8: its negatives are not a JSON list of texts, such as ")
    path = write_csv(tmp_path, "wrong captions")
    assert not any(item.negatives for _, item in open_source(str(path), negatives_key="negatives").items())
    assert any(item.negatives for _, item in open_source(str(path), negatives_key="wrong captions").items())
    with pytest.raises(CoderError, match=r"no column 'others' for the hard negatives \(--csv-negatives-key\)"):
        open_source(str(path), negatives_key="others")


def test_a_table_is_read(tmp_path):
    table = read_negatives(str(write_table(tmp_path)))
    assert list(table) == [f"{n}.png" for n in range(NUMBER) if n % 4]
    assert table["3.png"] == [("2 3 0", -1), ("2 3 1", stable_hash("3.png")), ("2 3 2", stable_hash("3.png"))]
    assert read_negatives(str(write_table(tmp_path, columns=("negative", "key"))))["2.png"] == [("2 2 0", -1), ("2 2 1", -1)]


TABLES = {
    "key\tnegative\na.jpg\ta cat\nb.jpg\n": "line 3: it does not have 2 columns",
    "key\tnegative\na.jpg\ta cat\tb.jpg\n": "line 2: it does not have 2 columns",
    "key\tnegative\n\ta cat\n": "line 2: it has no image in column 'key'",
    "key\tnegative\na.jpg\t \n": "line 2: it has an empty negative",
    f"key\tnegative\na.jpg\t{'x' * 2001}\n": "line 2: it has a negative of over 20,000 characters, or of a word of over 2,000",
    "key,negative\na.jpg,a cat\n": "no column 'key' and 'negative'; its columns, separated by tabs, are: 'key,negative'",
    "": "no column 'key' and 'negative'; its columns, separated by tabs, are: none: its first line is empty",
    "key\tnegative\n": "it has no row",
    "key\tnegative\na.jpg\t\xff\n": "line 2, byte 7 (0xff) is not UTF-8: convert the file",
}


@pytest.mark.parametrize("text", TABLES, ids=TABLES.get)
def test_faults_of_a_table_are_named(tmp_path, text):
    path = tmp_path / "table.tsv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(CoderError) as caught:
        read_negatives(str(path))
    assert str(caught.value).startswith(f"{path}: {TABLES[text]}")
    with pytest.raises(CoderError, match="no such file"):
        read_negatives(str(tmp_path / "absent.tsv"))
    with pytest.raises(CoderError, match="cannot be read"):
        read_negatives("/dev/null")


def test_what_is_drawn():
    listed = tuple(f"text {k}" for k in range(6))
    item = Item("a.jpg", ("a dog",), lambda: None, others=("text 1",), negatives=listed)
    table = {"a.jpg": [("further", 7), ("its own", item.image_id), ("text 2", -1)]}
    usual = {("text 0", -1), ("text 2", -1), ("text 3", -1), ("text 4", -1), ("text 5", -1), ("further", 7)}
    draw = HardNegatives(3, table).draw
    seen = Counter(pair for epoch in range(300) for pair in set(draw(item, seed=0, epoch=epoch)))
    assert set(seen) == usual  # not its captions, not what the table says is its own
    assert all(100 < count < 200 for count in seen.values())  # each half as often as not, and each once
    assert draw(item, seed=0, epoch=1) == draw(item, seed=0, epoch=1) != draw(item, seed=1, epoch=1)
    every = HardNegatives(8, table).draw(item, seed=0, epoch=0)
    assert set(every[:6]) == usual and every[6:] == [("", -2)] * 2
    twice = Item("a.jpg", ("a dog",), lambda: None, negatives=("text", "right"))  # in the data, and in the table by name
    named = {"a.jpg": [("text", 7), ("text", 8), ("right", twice.image_id)]}
    assert HardNegatives(3, named).draw(twice, seed=0, epoch=0) == [("text", 7), ("", -2), ("", -2)]
    known = Item("b.jpg", ("a dog",), lambda: None, negatives=("one", "two"), negative_ids=(3, -1))
    assert set(HardNegatives(2).draw(known, seed=0, epoch=0)) == {("one", 3), ("two", -1)}


def loader(source: Any, **options: Any) -> TrainLoader:
    given: dict[str, Any] = {"batch_size": 3, "seed": 7, "negatives": HardNegatives(2), **options}

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.tensor([float(image.getpixel((0, 0))[0])])

    return TrainLoader(source, transform=transform, tokenizer=tokenizer, max_bad_samples=0.5, **given)


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return len(left) == len(right) > 0 and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(("kind", "mode"), [("csv", "draw"), ("shards", "all")])
def test_a_batch_has_those_of_its_rows(tmp_path, kind, mode):
    made = loader(source_of(kind, tmp_path), captions=mode)
    batches = list(made.epoch(0))
    for batch in batches:
        assert batch["text_negatives"].shape == (3, 2, 4) and batch["text_negative_ids"].shape == (3, 2)
        assert batch["text_negatives"].dtype == batch["text_negative_ids"].dtype == torch.int64
        columns = (batch[key] for key in ("image", "text", "text_negatives", "text_negative_ids"))
        for image, text, texts, ids in zip(*columns, strict=True):
            n = int(image)
            assert text[1] == n
            filled = min(2, n % 4)
            assert ids.tolist() == [-1] * filled + [-2] * (2 - filled)
            assert all(row.tolist()[:2] == [2, n] for row in texts[:filled]) and not texts[filled:, :3].any()
            assert len({tuple(row.tolist()) for row in texts[:filled]}) == filled
    plain = list(loader(source_of(kind, tmp_path), captions=mode, negatives=None).epoch(0))
    assert all(torch.equal(one["text"], other["text"]) for one, other in zip(batches, plain, strict=True))  # as without them
    rows = 3 * len(batches)
    assert made.negatives_drawn.total() >= 2 * rows and 0 < made.negatives_drawn["filled"] < made.negatives_drawn.total()


def test_they_follow_from_seed_epoch_and_image(tmp_path):
    source = source_of("csv", tmp_path)
    first = list(loader(source).epoch(0))
    assert same(first, list(loader(source).epoch(0)))
    assert not same(first, list(loader(source, seed=8).epoch(0)))

    def by_image(batches: list[dict[str, Any]]) -> dict[int, Any]:
        pairs = (pair for batch in batches for pair in zip(batch["image"], batch["text_negatives"], strict=True))
        return {int(image): texts[:, :3].tolist() for image, texts in pairs}

    several = {4 * k + 3: 3 for k in range(3)}  # of three, two are drawn
    first, other, wide = (by_image(list(made.epoch(e))) for made, e in (
        (loader(source), 0), (loader(source), 1), (loader(source, batch_size=5), 0)
    ))
    assert any(first[n] != other[n] for n in several if n in first and n in other)
    assert all(first[n] == wide[n] for n in first if n in wide)  # whatever the batch


@pytest.mark.parametrize(("kind", "workers"), [("csv", 0), ("shards", 2)])
def test_an_epoch_continues_with_the_same_batches(tmp_path, kind, workers):
    source = source_of(kind, tmp_path)
    whole = list(loader(source, workers=workers).epoch(1))
    broken = loader(source, workers=workers)
    batches = broken.epoch(1)
    start = [next(batches)]
    position = json.loads(json.dumps(broken.position()))
    assert same(start + list(loader(source, workers=workers).epoch(1, position)), whole)
    if workers:
        assert same(start + list(loader(source).epoch(1, position)), whole)  # with another number of workers


def test_the_options_of_a_run(tmp_path):
    path, table = str(write_csv(tmp_path)), str(write_table(tmp_path, of="8.png"))
    config = DataConfig(train=path, val=path, hard_negatives=2)
    source = make_source(config, split="train")
    assert any(item.negatives for _, item in source.items())
    assert not any(item.negatives for _, item in make_source(config, split="val").items())  # only for training
    assert make_negatives(config, source) == HardNegatives(2)
    assert make_negatives(DataConfig(train=path), source) is None
    both = make_negatives(DataConfig(train=path, hard_negatives=2, negatives_file=table), source)
    assert both.table["2.png"][1] == ("2 2 1", stable_hash("8.png"))
    shards = make_source(DataConfig(train=str(write_shard(tmp_path)), hard_negatives=1), split="train")
    assert [item.negatives for _, item in shards.items()][3] == tuple(negatives(3))


def test_mistakes_in_the_options_are_named(tmp_path):
    path, table = str(write_csv(tmp_path, "others")), str(write_table(tmp_path))
    config = DataConfig(train=path, hard_negatives=2)
    source = make_source(config, split="train")
    with pytest.raises(CoderError, match="none of 11 images has a hard negative: give --negatives-file FILE, or"):
        make_negatives(config, source)
    for options in ({"negatives_file": table}, {"csv_negatives_key": "others"}):
        with pytest.raises(CoderError, match="without --hard-negatives N"):
            make_negatives(DataConfig(train=path, **options), source)
    other = ItemSource([Item("x/0.png", ("a dog",), lambda: None)])
    with pytest.raises(CoderError, match=r"the table names images such as '1\.png', the data 'x/0\.png'"):
        make_negatives(DataConfig(hard_negatives=1, negatives_file=table), other)
    with pytest.raises(CoderError, match="--csv-negatives-key is for CSV tables, and these data are read by 'scenes'"):
        make_source(DataConfig(hard_negatives=1, csv_negatives_key="a"), split="train")
