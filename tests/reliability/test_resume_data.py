"""An epoch that is interrupted and continued by another number of workers, of ranks, or with another batch size."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin.data import open_source
from coder_plugin.data.loader import TrainLoader
from coder_plugin.errors import CoderError

NUMBER, BATCH, EPOCH = 43, 4, 3
BAD = (1, 8, 9, 20, 21, 30, 41)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def make(kind: str, folder: Path, bad: tuple[int, ...] = ()) -> Any:
    """43 pictures as a table or as four unequal shards; those of ``bad`` do not decode."""
    content = [b"\x89PNG broken" if n in bad else png(n) for n in range(NUMBER)]
    if kind == "table":
        for n in range(NUMBER):
            (folder / f"{n}.png").write_bytes(content[n])
        (folder / "data.tsv").write_text("filepath\ttitle\n" + "".join(f"{n}.png\t{n}\n" for n in range(NUMBER)))
        return open_source(str(folder / "data.tsv"))
    for shard, (start, stop) in enumerate([(0, 13), (13, 20), (20, 32), (32, NUMBER)]):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for n in range(start, stop):
                for extension, data in (("png", content[n]), ("txt", str(n).encode())):
                    info = tarfile.TarInfo(f"{n:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return open_source(str(folder / "*.tar"))


def transform(picture: Image.Image) -> torch.Tensor:
    """The picture's number and a drawn one, as by augmentation."""
    return torch.cat([torch.full((1,), float(picture.getpixel((0, 0))[0])), torch.rand(1)])


def loader(source: Any, **options: Any) -> TrainLoader:
    def tokenizer(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[int(text)] for text in texts])

    given = {"batch_size": BATCH, "seed": 7, **options}
    return TrainLoader(source, transform=transform, tokenizer=tokenizer, **given)


def take(
    source: Any, position: Any, steps: int, **options: Any
) -> tuple[list[list[torch.Tensor]], list[dict[str, Any]]]:
    """At most ``steps`` steps of all ranks together: each rank's batches, and each rank's position as JSON gives it back."""
    ranks = [loader(source, rank=rank, **options) for rank in range(options.get("world_size", 1))]
    streams = [made.epoch(EPOCH, position) for made in ranks]
    taken: list[list[torch.Tensor]] = [[] for _ in ranks]
    positions = [made.position() for made in ranks]
    for _ in range(steps):
        batches = [next(stream, None) for stream in streams]
        if any(batch is None for batch in batches):  # all ranks stop with the first
            break
        for rank, batch in enumerate(batches):
            assert torch.equal(batch["image"][:, 0].long(), batch["text"][:, 0])
            taken[rank].append(batch["image"])
        positions = [made.position() for made in ranks]
    for stream in streams:
        stream.close()
    return taken, json.loads(json.dumps(positions))


def samples(taken: list[list[torch.Tensor]]) -> Counter[int]:
    return Counter(int(number) for batches in taken for batch in batches for number in batch[:, 0])


def check_exact(source: Any, settings: list[dict[str, Any]], steps: list[int], bad: tuple[int, ...]) -> None:
    """No sample twice. None is missing but those that do not fill the last step of the last setting."""
    position: Any = None
    used: Counter[int] = Counter()
    for setting, count in zip(settings, steps, strict=True):
        taken, position = take(source, position, count, **setting)
        used += samples(taken)
        step = setting.get("batch_size", BATCH) * setting.get("world_size", 1)
        assert position[0]["before"] + position[0]["batches"] * step == sum(used.values())
    assert not [number for number, times in used.items() if times > 1], (settings, steps)
    assert not used.keys() & set(bad)
    last = settings[-1]
    step = last.get("batch_size", BATCH) * last.get("world_size", 1)
    # a rank whose samples run out, because its pictures are bad or its shards small, ends the epoch of all ranks
    if not bad:
        assert NUMBER - sum(used.values()) < step + (last.get("world_size", 1) - 1) * last.get("batch_size", BATCH), (
            settings,
            steps,
        )


@pytest.mark.parametrize(
    ("kind", "bad"),
    [("shards", BAD), *(pytest.param("table", bad, marks=pytest.mark.slow) for bad in (BAD, ()))],
)
def test_other_numbers_of_workers_give_the_same_batches(tmp_path, kind, bad):
    """Bit for bit: pictures, augmentation and order; and again after a second change."""
    source = make(kind, tmp_path, bad)
    for world_size in (1, 2):
        whole, _ = take(source, None, 99, workers=2, world_size=world_size)
        for first, second in ((2, 3),) if world_size == 1 else ((2, 1),):
            begun, position = take(source, None, first, workers=2, world_size=world_size)
            more, position = take(source, position, second, workers=3, world_size=world_size)
            rest, _ = take(source, position, 99, workers=0, world_size=world_size)
            for rank in range(world_size):
                found = [*begun[rank], *more[rank], *rest[rank]]
                assert len(found) == len(whole[rank])
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, whole[rank], strict=True))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("shards", BAD),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("table", BAD), ("table", ()), ("shards", ()))),
    ],
)
def test_other_numbers_of_ranks_lose_no_sample_and_repeat_none(tmp_path, kind, bad):
    source = make(kind, tmp_path, bad)
    one, two, three = {"world_size": 1}, {"world_size": 2}, {"world_size": 3}
    for settings, steps in [
        ([one, two], [3, 99]),
        ([two, one], [2, 99]),
        ([three, two], [1, 99]),
        ([one, two, three, one], [2, 1, 1, 99]),
        ([two, {**two, "workers": 2}, three, {**one, "batch_size": 3}], [1, 1, 1, 99]),
        ([two, two, two], [1, 1, 99]),
    ]:
        check_exact(source, settings, steps, bad)


def test_steps_of_other_ranks_hold_the_samples_of_the_uninterrupted_steps(tmp_path):
    """A table's order over all ranks is one permutation: with the same samples a step, each step has the same ones."""
    source = make("table", tmp_path)
    whole, _ = take(source, None, 99, world_size=1, batch_size=4)
    begun, position = take(source, None, 3, world_size=1, batch_size=4)
    rest, _ = take(source, position, 99, world_size=2, batch_size=2)
    steps = [sorted(batch[:, 0].tolist()) for batch in whole[0][3:]]
    assert [sorted([*one[:, 0].tolist(), *two[:, 0].tolist()]) for one, two in zip(*rest, strict=True)] == steps
    again, _ = take(source, take(source, position, 4, world_size=2, batch_size=2)[1], 99, world_size=1, batch_size=4)
    assert [sorted(batch[:, 0].tolist()) for batch in again[0]] == steps[4:]


@pytest.mark.slow
def test_many_changes_lose_no_sample_and_repeat_none(tmp_path):
    """300 chains of up to five settings, drawn at random."""
    chains = changes = 0
    for kind, bad in itertools.product(("table", "shards"), ((), BAD)):
        folder = tmp_path / f"{kind}{len(bad)}"
        folder.mkdir()
        source = make(kind, folder, bad)
        draw = random.Random(f"{kind}{bad}")
        for _ in range(75):
            settings = [
                {
                    "world_size": draw.randint(1, 4),
                    "workers": draw.choice([0, 0, 0, 2]),
                    "batch_size": draw.randint(1, 5),
                }
                for _ in range(draw.randint(2, 5))
            ]
            steps = [draw.randint(0, 3) for _ in settings[1:]] + [99]
            check_exact(source, settings, steps, bad)
            chains, changes = chains + 1, changes + len(settings) - 1
    print(f"{chains} interrupted epochs with {changes} changes of ranks, workers and batch size: 0 missing, 0 twice")


# data that change between the runs


def rewrite(path: Path, content: str) -> None:
    path.write_text(content)


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_suffix(".tmp"))
    b.rename(a)
    a.with_suffix(".tmp").rename(b)


def touch(path: Path) -> None:
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


TABLE = "filepath\ttitle\n" + "".join(f"{n}.png\t{n}\n" for n in range(NUMBER))
CHANGED: dict[str, tuple[str, Any, str]] = {
    "rows reversed": (
        "table",
        lambda folder: rewrite(folder / "data.tsv", "\n".join([TABLE.split("\n")[0], *TABLE.split("\n")[-2:0:-1]])),
        "the images' names or their order; the captions; the files (",
    ),
    "captions replaced": ("table", lambda folder: rewrite(folder / "data.tsv", TABLE.replace("\t7", "\t8")), "the captions"),
    "a row less": (
        "table",
        lambda folder: rewrite(folder / "data.tsv", TABLE.replace("9.png\t9\n", "", 1)),
        f"the number of images ({NUMBER} then, {NUMBER - 1} now); ",
    ),
    "a picture overwritten": ("table", lambda folder: (folder / "3.png").write_bytes(png(3) + b"x"), "the files ("),
    "two pictures exchanged": ("table", lambda folder: swap(folder / "3.png", folder / "4.png"), "the files ("),
    "a shard overwritten": ("shards", lambda folder: touch(folder / "2.tar"), "the files ("),
    "two shards exchanged": ("shards", lambda folder: swap(folder / "0.tar", folder / "2.tar"), "the files ("),
    "a shard less": ("shards", lambda folder: (folder / "3.tar").unlink(), f"the number of images ({NUMBER} then, 32 now); "),
}


@pytest.mark.parametrize(("kind", "change", "says"), CHANGED.values(), ids=CHANGED)
def test_changed_data_are_refused_within_an_epoch_and_said_between_epochs(tmp_path, kind, change, says, caplog):
    source = make(kind, tmp_path)
    begun = loader(source, world_size=2)
    batches = begun.epoch(EPOCH)
    at_start = json.loads(json.dumps(begun.position()))
    next(batches)
    position = json.loads(json.dumps(begun.position()))
    spec = str(tmp_path / ("data.tsv" if kind == "table" else "*.tar"))
    fresh = loader(open_source(spec), world_size=2)
    fresh.epoch(EPOCH, position)
    fresh.log_changes(position["data"])
    assert not caplog.records
    change(tmp_path)
    for options, positions in (({"world_size": 2}, position), ({}, [position, {**position, "rank": 1}])):
        with pytest.raises(CoderError) as caught:
            loader(open_source(spec), **options).epoch(EPOCH, positions)
        message = str(caught.value)
        assert "cannot resume in the middle of epoch 4: the data have changed since the checkpoint was written: " in message
        assert says in message and "\n" not in message, message
    caplog.clear()
    next(loader(open_source(spec), world_size=2).epoch(EPOCH, at_start))
    loader(open_source(spec), world_size=2).log_changes(position["data"])
    assert [says in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.parametrize("sizes", [(60, 4), (4, 60), (1, 1, 62)])
def test_uneven_shards_give_all_ranks_all_steps(tmp_path, sizes):
    """Samples are dealt, not shards."""
    ends = list(itertools.accumulate(sizes))
    for shard, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for n in range(end - size, end):
                for extension, data in (("png", png(n)), ("txt", str(n).encode())):
                    info = tarfile.TarInfo(f"{n:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    taken, _ = take(open_source(str(tmp_path / "*.tar")), None, 99, world_size=2, batch_size=2)
    assert [len(batches) for batches in taken] == [16, 16] and samples(taken) == Counter(range(64))


BROKEN = ({"read": []}, {"read": [-1]}, {"read": ["1"]}, {"last": 1}, {"history": [[]]}, {"bad": {"read": 0}},
          {"setting": None}, {"bad": {"read": 0, "kinds": {"other": 1}}}, {"batches": True}, {"before": 1 << 70})  # fmt: skip


def test_a_position_of_another_form_is_refused(tmp_path):
    source = make("table", tmp_path)
    begun = loader(source)
    next(begun.epoch(EPOCH))
    for position in (None, *({**begun.position(), **wrong} for wrong in BROKEN)):
        with pytest.raises(CoderError, match="position in the data does not have the form"):
            loader(source).epoch(EPOCH, [position])
