"""Hard negatives in open_clip 3.3's own trainer: those that our own reader draws, through packed batches to the loss."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs the extra open-clip", exc_type=ImportError)

import open_clip
from open_clip_train.data import SharedEpoch

from coder_plugin.data.hard_negatives import HardNegatives
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip.data import Extras, unpack
from tests.integrations import upstream_runs as runs
from tests.integrations.test_open_clip_data import Letters, build, options, png, read, write_tar

pytestmark = pytest.mark.skipif(
    not open_clip.__version__.startswith("3.3."), reason="batches are packed for open_clip 3.3 alone"
)


def negatives(number: int) -> list[str]:
    return [f"not {number} {which}" for which in "abcd"[: number % 5]]


def write_table(path: Path, column: str = "negatives", first: str | None = None) -> Path:
    with open(path, "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title", column])
        for number in range(8):
            (path.parent / f"{number}.png").write_bytes(png(number))
            listed = json.dumps(negatives(number)) if number or first is None else first
            table.writerow([str(path.parent / f"{number}.png"), f"{number} a", listed])
    return path


def extras(count: int = 3, *, epoch: int = 0, table: Any = None, **given: Any) -> Extras:
    shared = SharedEpoch()
    shared.set_value(epoch)
    return Extras(Letters(), negatives=HardNegatives(count, table or {}), seed=5, epoch=shared, **given)


def batches(args: Any, made: Extras) -> dict[int, tuple[list[str], list[int]]]:
    """The hard negatives of each image, and the ids of their images."""
    found = {}
    for images, texts in build(args, made)["train"].dataloader:
        text, further = unpack(texts, made.names)
        for number, row in enumerate(text):
            of = round(float(images[number, 0, 0, 0]) * 255)
            assert read(row) == f"{of} a"
            texts = [read(each) for each in further["text_negatives"][number]]
            found[of] = texts, further["text_negative_ids"][number].tolist()
    return found


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
def test_batches_have_what_our_own_reader_draws(tmp_path: Path, kind: str) -> None:
    """The same texts by seed, epoch, key and caption, from the column or the json, and from a table."""
    if kind == "csv":
        args = options("--train-data", str(write_table(tmp_path / "data.tsv")), "--dataset-type", "csv")
        keys = [str(tmp_path / f"{number}.png") for number in range(8)]
    else:
        samples = [{"txt": f"{n} a".encode(), "json": {"image_id": n, "negatives": negatives(n)}} for n in range(8)]
        path = write_tar(tmp_path / "data.tar", samples)
        args = options("--train-data", str(path), "--dataset-type", "webdataset", "--train-num-samples", "8")
        keys = [str(number) for number in range(8)]
    table = {keys[3]: [("from the table", 77)]}
    for epoch in (0, 1):
        found = batches(args, extras(epoch=epoch, table=table))
        assert sorted(found) == list(range(8))
        for number, (texts, ids) in found.items():
            item = Item(keys[number], (f"{number} a",), lambda: None, negatives=tuple(negatives(number)))
            own = HardNegatives(3, table)
            if kind == "csv":  # the column's follow the table's
                listed = [(text, -1) for text in item.negatives]
                own = HardNegatives(3, {keys[number]: [*table.get(keys[number], []), *listed]})
                item = Item(keys[number], item.captions, item.load)
            drawn = own.draw(item, seed=5, epoch=epoch)
            assert list(zip(texts, ids, strict=True)) == drawn
    assert found[0] == ([""] * 3, [-2] * 3)


def test_faults_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = write_table(tmp_path / "data.tsv", first='["a", 1]')
    args = options("--train-data", str(table), "--dataset-type", "csv")
    with pytest.raises(CoderError, match=r"row 1 after the header: its 'negatives': it has a negative that is not text"):
        build(args, extras())
    write_table(table, column="others")
    with pytest.raises(CoderError, match="no image has a hard negative: give --negatives-file FILE"):
        build(args, extras())
    with pytest.raises(CoderError, match=r"no column 'wrong' for the hard negatives \(--csv-negatives-key\)"):
        build(args, extras(negatives_key="wrong"))
    samples = [{"txt": f"{n} a".encode(), "json": {"negatives": ["ok"] if n else "text"}} for n in range(8)]
    shard = write_tar(tmp_path / "data.tar", samples)
    args = options("--train-data", str(shard), "--dataset-type", "webdataset", "--train-num-samples", "8", batch_size=7)
    assert sorted(batches(args, extras())) == list(range(1, 8))
    assert "its negatives are not a list of texts" in caplog.text


def test_a_run_trains_with_them(released: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asked for in mlfoundations/open_clip #869: upstream's trainer, a column of hard negatives, InfoNCE."""
    epochs, draw = set(), HardNegatives.draw
    monkeypatch.setattr(HardNegatives, "draw", lambda self, item, **by: epochs.add(by["epoch"]) or draw(self, item, **by))
    path = tmp_path / "pairs.csv"
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["filepath", "title", "negatives"])
        for number in range(16):
            (tmp_path / f"{number}.png").write_bytes(png(number))
            rows.writerow([str(tmp_path / f"{number}.png"), f"number {number}", json.dumps([f"number {number} not"])])
    data = ["--train-data", str(path), "--dataset-type", "csv"]
    first = {}
    flags = {"epochs": 2, "batch_size": 8, "accum_freq": 2}
    for name, further in (("with", ["--coder-hard-negatives", "2"]), ("without", [])):
        line = runs.command(tmp_path, name, released.models["vit"], data, *further, **flags)
        first[name] = runs.train([*line, "--loss", "clip + dcl"]).logged("train/clip_loss")[0]
    assert epochs == {0, 1}
    # 15 candidates and 16 hard negatives of almost equal similarity: log 32 in place of log 16, for images alone
    assert first["with"] - first["without"] == pytest.approx(0.5 * torch.tensor(2.0).log().item(), abs=0.15)


def test_flags_that_do_not_go_together(released: Any, tmp_path: Path) -> None:
    line = runs.command(tmp_path, "run", released.models["vit"], released.data["webdataset"])
    for further, message in (
        (["--loss", "dcl(hard_negatives=true)"], "give --coder-hard-negatives N"),
        (["--loss", "dcl", "--coder-csv-negatives-key", "x"], "--coder-csv-negatives-key is for tables"),
        (["--loss", "dcl", "--coder-hard-negatives", "24"], "must be less than the length of a text, 24 tokens"),
        (["--loss", "siglip", "--coder-hard-negatives", "2"], "takes hard negatives"),
    ):
        with pytest.raises(CoderError, match=message):
            runs.train([*line, *further])
