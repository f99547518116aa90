"""Ten faults of samples, spread over a data set: counted right, no slower than good ones, and an end only above the rate."""

from __future__ import annotations

import io
import json
import random
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import KINDS, BadSample, BadSamples, total
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.loader import TrainLoader, evaluation_batches
from coder_plugin.errors import CoderError


def png(size: tuple[int, int] = (4, 4), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, kind)
    return buffer.getvalue()


PNG = png()
#: Ten faults: the kind that is counted, and the fields.
BAD: tuple[tuple[str, dict[str, bytes]], ...] = (
    ("caption", {"png": PNG, "json": b'{"captions": ["a'}),
    ("caption", {"png": PNG, "json": b"[" * 100_000}),
    ("caption", {"png": PNG, "json": b'{"captions": {"a": 1}}'}),
    ("caption", {"png": PNG, "json": b'{"captions": []}'}),
    ("caption", {"png": PNG, "txt": b" "}),
    ("caption", {"png": PNG}),
    ("picture", {"png": PNG[:44], "txt": b"a dog"}),
    ("picture", {"png": b"%!PS-Adobe-3.0 EPSF-3.0\n", "txt": b"a dog"}),
    ("picture", {"png": png((9, 9)), "txt": b"a dog"}),
    ("file", {"txt": b"a dog"}),
)
GOOD = {"png": PNG, "txt": b"a dog"}


def write(folder: Path, count: int, every: int, *, shards: int = 10) -> None:
    """``count`` samples in shards; one in ``every`` is bad, the kinds in turn."""
    order = [False] * count
    for number in random.Random(1).sample(range(count), count // every if every else 0):
        order[number] = True
    bad = 0
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * count // shards, (shard + 1) * count // shards):
                fields = GOOD
                if order[number]:
                    fields, bad = BAD[bad % len(BAD)][1], bad + 1
                for field, data in fields.items():
                    member = tarfile.TarInfo(f"{number:07d}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "sizes.json").write_text(
        json.dumps({f"{n:03d}.tar": (n + 1) * count // shards - n * count // shards for n in range(shards)})
    )


@pytest.fixture
def limit():
    set_max_pixels(64)
    yield
    set_max_pixels(None)


def loader(folder: Path, rate: float, **options) -> TrainLoader:
    return TrainLoader(
        open_source(str(folder / "*.tar")),
        batch_size=50,
        transform=lambda picture: torch.from_numpy(np.asarray(picture).copy()),
        tokenizer=lambda texts: torch.zeros(len(texts), 4, dtype=torch.int64),
        max_bad_samples=rate,
        **options,
    )


def expected(count: int, every: int) -> Counter[str]:
    return Counter(BAD[number % len(BAD)][0] for number in range(count // every))


def check(folder: Path, count: int, every: int, **options) -> None:
    write(folder, count, every)
    made = loader(folder, 1.2 / every, **options)
    rows = sum(len(batch["image_id"]) for batch in made.epoch(0))
    assert made.bad.kinds == expected(count, every) and made.bad.read == count
    assert rows == (count - count // every) // 50 * 50
    bad = BadSamples("val", 1.2 / every)
    batches = evaluation_batches(made.source, batch_size=50, transform=lambda picture: torch.zeros(1), bad=bad)
    assert sum(len(batch["keys"]) for batch in batches) == count - count // every and bad.kinds == made.bad.kinds
    bad.finish()
    exact = loader(folder, 1 / every, **options)  # the rate itself is no reason to stop, in whatever order they come
    assert sum(1 for _ in exact.epoch(0)) == rows // 50
    for rate in (0.5 / every, 0.9 / every):
        with pytest.raises(CoderError, match="samples skipped .*, more than max_bad_samples"):
            list(loader(folder, rate, **options).epoch(0))


def test_bad_samples_of_ten_faults_are_counted_and_end_a_run_only_above_the_rate(tmp_path, limit):
    check(tmp_path, 1000, 10)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_bad_samples_in_a_hundred_thousand(tmp_path, limit):
    """Also timed: the rows of a data set with bad samples, a second, against those of one with good ones only."""
    check(tmp_path, 100_000, 10)
    good = tmp_path / "good"
    good.mkdir()
    write(good, 100_000, 0)
    seconds: dict[str, list[float]] = {"bad": [], "good": []}
    for _ in range(3):
        for name, folder in (("good", good), ("bad", tmp_path)):
            made = loader(folder, 0.2)
            started = time.process_time()
            for _ in made.epoch(0):
                pass
            seconds[name].append(time.process_time() - started)
    clean, mixed = min(seconds["good"]), min(seconds["bad"])
    print(f"\n100,000 samples: {clean:.2f} s of CPU without bad ones, {mixed:.2f} s with 10,000: {mixed / clean:.3f}")
    assert mixed <= 1.05 * clean


def test_a_run_reports_its_bad_samples(tmp_path, tiny_model, caplog, capsys, limit):
    """At the end of each epoch, in the log and in metrics.jsonl; and recall says over how many images it is."""
    from coder_plugin import Trainer

    write(tmp_path, 40, 4, shards=2)
    options = {
        "train_data": f"{tmp_path}/*.tar",
        "val_data": f"{tmp_path}/001.tar",
        "model": tiny_model,
        "batch_size": 8,
    }
    options |= {
        "epochs": 2,
        "workers": 0,
        "report": False,
        "max_image_pixels": 64,
        "logs": str(tmp_path),
        "name": "run",
    }
    results = Trainer.from_config(options).run()
    kinds = expected(40, 4)
    counts = {f"epoch/skipped_samples/{kind}": count for kind, count in kinds.items()}
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "epoch/read_samples" in row]
    assert [row["epoch"] for row in found] == [0, 1]
    assert all({**row, **counts, "epoch/read_samples": 40, "epoch/skipped_samples": 10} == row for row in found)
    assert caplog.text.count("10 of 40 samples skipped (caption 6, file 1, picture 3)") == 2
    skipped = sum(results["last"]["skipped"].values())
    assert skipped and results["last"]["images"] == 20 - skipped
    assert f"over {20 - skipped} of 20 images; {skipped} skipped (" in capsys.readouterr().out
    assert rows[-1]["val/skipped_samples"] == skipped


@pytest.mark.parametrize("count", [5, 999])
def test_a_small_data_set_with_nothing_but_bad_samples_says_so(tmp_path, count):
    from coder_plugin import Trainer

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(count):
            for field, data in (("png", PNG), ("txt", b"")):
                member = tarfile.TarInfo(f"{number}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    options = {
        "train_data": str(tmp_path / "0.tar"),
        "model": "coder-tiny",
        "batch_size": 4,
        "workers": 0,
        "val_frequency": 0,
    }
    with pytest.raises(
        CoderError, match=f"none of the first {count} images can be read; the first: 0/0: it has an empty caption"
    ):
        Trainer.from_config({**options, "epochs": 1, "logs": str(tmp_path / "logs"), "report": False}).run()


def test_the_rate_is_judged_with_an_allowance_while_reading_and_exactly_at_the_end():
    bad = BadSamples("data", 0.01)
    fault = ("file", "key", "broken")
    for _ in range(22):
        bad.add(1, [fault])  # 10 of 1,000, and four times the root of 10
    with pytest.raises(
        CoderError,
        match=r"23 of 23 samples skipped \(file 23\), more than max_bad_samples=0.01 of them "
        r"\(of fewer than 1,000 samples: more than 10\); .*'key' \(file\): broken",
    ):
        bad.add(1, [fault])
    bad.restart()
    bad.add(10, [fault] * 10)
    bad.finish()
    bad.add(1, [fault])
    with pytest.raises(CoderError, match="11 of 11"):
        bad.finish()
    bad.add(1_089)
    bad.finish()  # one in a hundred
    bad.add(0, [fault])
    with pytest.raises(CoderError, match="more than max_bad_samples=0.01 of them: fix"):
        bad.finish()


@pytest.mark.parametrize(
    "kinds, advice",
    [
        ({"missing": 11}, r"fix the paths, or name the folder that they are relative to \(--image-root\)"),
        ({"missing": 11, "caption": 1}, "fix or leave them out, or allow a greater fraction"),
    ],
)
def test_where_every_picture_is_missing_the_folder_may_be_another(kinds, advice):
    bad = BadSamples("data", 0.01)
    bad.add(sum(kinds.values()), [(kind, "a.png", "not found") for kind, count in kinds.items() for _ in range(count)])
    with pytest.raises(CoderError, match=f"of them .*: {advice}"):
        bad.finish()


def test_each_kind_is_named_ten_times_at_most_and_once_a_key(caplog):
    bad = BadSamples("data", 1.0)
    for number in range(40):
        bad.add(1, [("file", f"j{number % 20}", "broken"), ("caption", "c", "it is empty")])
    messages = [record.getMessage() for record in caplog.records]
    assert [text.split("'")[1] for text in messages if "(file)" in text] == [f"j{number}" for number in range(10)]
    assert (
        messages[-1].endswith("further ones of this kind are only counted")
        and sum("(caption)" in text for text in messages) == 1
    )


def test_counts_of_ranks_are_added_and_travel_to_other_processes():
    import pickle

    parts = [BadSamples("data", 0.5) for _ in range(3)]
    for number, part in enumerate(parts):
        part.add(10, [("file", f"k{number}", "broken")] * number)
    whole = total(pickle.loads(pickle.dumps(parts)))
    assert str(whole) == "3 of 30 samples skipped (file 3)"
    fault = pickle.loads(pickle.dumps(BadSample("caption", "it is empty")))
    assert (fault.kind, str(fault)) == ("caption", "it is empty") and set(KINDS) >= {kind for kind, _ in BAD}
