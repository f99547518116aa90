"""The loader: full batches, the same ones however many workers, and the same ones again after an interruption."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.loader import TrainLoader, evaluation_batches
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.noise.positives import Positives

NUMBER, BATCH = 43, 5
BAD = (1, 8, 9, 20, 21, 30, 41)


def transform(picture: Image.Image) -> torch.Tensor:
    """The picture's number, and draws from each generator that augmentations use."""
    noise = torch.stack([torch.rand(2, 2), torch.full((2, 2), random.random()), torch.full((2, 2), np.random.rand())])
    return torch.cat([torch.full((1, 2, 2), float(picture.getpixel((0, 0))[0])), noise.float()])


def tokenizer(texts: list[str]) -> torch.Tensor:
    """Two numbers of a caption "image caption", and one drawn, as tokenizers that drop words do."""
    return torch.tensor([[int(n) for n in text.split()] + [int(torch.randint(1000, ()))] for text in texts])


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def make(kind: str, folder: Path, *, bad: tuple[int, ...] = (), absent: tuple[int, ...] = (), captions: int = 3):
    """43 pictures as a table or as four unequal shards, written once; those of ``bad`` do not decode."""
    if any(folder.iterdir()):
        return open_source(str(folder / ("data.tsv" if kind == "table" else "*.tar")))
    content = [b"\x89PNG broken" if n in bad else png(n) for n in range(NUMBER)]
    texts = [[f"{n} {k}" for k in range(captions)] for n in range(NUMBER)]
    if kind == "table":
        for n in range(NUMBER):
            if n not in absent:
                (folder / f"{n}.png").write_bytes(content[n])
        rows = [f"{n}.png\t{text}" for n in range(NUMBER) for text in texts[n]]
        (folder / "data.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
        return open_source(str(folder / "data.tsv"))
    for shard, (start, stop) in enumerate([(0, 13), (13, 20), (20, 32), (32, NUMBER)]):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for n in range(start, stop):
                note = json.dumps({"captions": texts[n], "image_id": n}).encode()
                for extension, data in (("png", content[n]), ("json", note)):
                    info = tarfile.TarInfo(f"{n:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return open_source(str(folder / "*.tar"))


def loader(source, **options) -> TrainLoader:
    given = {"batch_size": BATCH, "seed": 7, **options}
    return TrainLoader(source, transform=transform, tokenizer=tokenizer, **given)


def numbers(batches) -> list[list[int]]:
    return [batch["text"][:, 0].tolist() for batch in batches]


def equal(left: list[dict], right: list[dict]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


readers = pytest.mark.parametrize(("kind", "workers"), [("table", 0), ("shards", 2)])


# batches


@readers
def test_batches_are_full_and_rows_belong_together(tmp_path, kind, workers):
    source = make(kind, tmp_path)
    made = loader(source, workers=workers)
    batches = list(made.epoch(0))
    assert made.steps_per_epoch == len(batches) == 8
    ids = {item.captions[0].split()[0]: item.image_id for _, item in source.items()}
    for batch in batches:
        assert batch["image"].shape == (BATCH, 4, 2, 2) and batch["text"].shape == (BATCH, 3)
        assert batch["image_id"].dtype == torch.int64 and batch["image_id"].shape == (BATCH,)
        assert batch["image"][:, 0, 0, 0].tolist() == batch["text"][:, 0].tolist()
        assert batch["image_id"].tolist() == [ids[str(n)] for n in batch["text"][:, 0].tolist()]
    assert max(Counter(n for batch in numbers(batches) for n in batch).values()) == 1  # drawn: no image twice


@pytest.mark.parametrize(
    ("kind", "world", "workers", "captions"),
    [("table", 3, 0, "all"), ("shards", 2, 2, "all"), ("shards", 3, 0, "draw")],
)
def test_no_sample_twice_and_none_lost_but_the_rest(tmp_path, kind, world, workers, captions):
    source = make(kind, tmp_path)
    seen: Counter[tuple[int, ...]] = Counter()
    rows = steps = 0
    for rank in range(world):
        made = loader(source, rank=rank, world_size=world, workers=workers, captions=captions)
        steps = made.steps_per_epoch
        batches = list(made.epoch(1))
        assert len(batches) <= steps
        # ranks of unequal shards may miss a batch; those of a table may not
        assert len(batches) == steps if kind == "table" or world == 1 else len(batches) >= 0.7 * steps
        for batch in batches:
            seen.update(map(tuple, batch["text"][:, : 1 if captions == "draw" else 2].tolist()))
            rows += BATCH
    total = NUMBER * (1 if captions == "draw" else 3)
    assert steps == total // (BATCH * world) and set(seen.values()) == {1} and len(seen) == rows <= total


@readers
def test_the_same_again_and_other_epochs_and_seeds_differ(tmp_path, kind, workers):
    source = make(kind, tmp_path)
    first = list(loader(source, workers=workers).epoch(2))
    made = loader(source, workers=workers)
    list(made.epoch(0))  # an epoch does not depend on those before it
    assert equal(first, list(made.epoch(2)))
    assert numbers(first) != numbers(made.epoch(3))
    assert numbers(first) != numbers(loader(source, workers=workers, seed=8).epoch(2))


def test_augmentation_depends_on_seed_epoch_image_and_caption_alone(tmp_path):
    source = make("shards", tmp_path)

    def noise(**options) -> dict[tuple, torch.Tensor]:
        epoch = options.pop("epoch", 0)
        batches = loader(source, captions="all", **options).epoch(epoch)
        return {
            tuple(row.tolist()): image[1:]
            for b in batches
            for row, image in zip(b["text"][:, :2], b["image"], strict=True)
        }

    first, other = noise(), noise(workers=2, batch_size=4)
    shared = first.keys() & other.keys()
    assert len(shared) > 100 and all(torch.equal(first[row], other[row]) for row in shared)
    assert len({tuple(each.flatten().tolist()) for each in first.values()}) == len(first)
    for changed in (noise(epoch=1), noise(seed=8)):
        assert not any(torch.equal(first[row], changed[row]) for row in first.keys() & changed.keys())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_surrounding_generators_are_not_disturbed(tmp_path, workers):
    source = make("table", tmp_path)

    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    seed()
    expected = [draws() for _ in range(8)]
    seed()
    assert [draws() for _ in loader(source, workers=workers).epoch(0)] == expected
    seed()
    batches = evaluation_batches(source, batch_size=6, transform=transform, bad=BadSamples(source.name), workers=workers)
    assert [draws() for _ in batches] == expected


# resuming


@pytest.mark.parametrize(
    ("kind", "bad", "workers"),
    [
        ("table", BAD, 0), ("shards", BAD, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("table", BAD, 3), ("shards", BAD, 1), ("table", (), 2), ("shards", (), 0))
        ),
    ],
)  # fmt: skip
def test_resuming_is_exact_from_every_position(tmp_path, kind, workers, bad):
    source = make(kind, tmp_path, bad=bad)
    whole, positions = loader(source, workers=workers), []
    positions.append(json.dumps(whole.position()))
    batches = []
    for batch in whole.epoch(0):
        batches.append(batch)
        positions.append(json.dumps(whole.position()))
    assert len(batches) == (NUMBER - len(bad)) // BATCH
    assert not bad or any(json.loads(each)["read"][0] % BATCH for each in positions)
    end = whole.position()
    for done in range(0, len(positions), 1 if workers < 2 else 3):
        fresh = loader(source, workers=workers)
        assert equal(list(fresh.epoch(0, json.loads(positions[done]))), batches[done:])
        if done < len(batches):
            again = fresh.position()
            assert {**again, "bad": set(again["bad"])} == {**end, "bad": set(end["bad"])}


@pytest.mark.parametrize("kind", [pytest.param("table", marks=pytest.mark.slow), "shards"])
def test_resuming_on_ranks_with_all_captions_and_then_again(tmp_path, kind):
    source = make(kind, tmp_path, bad=(5, 6, 30))
    options = {"rank": 1, "world_size": 2, "workers": 2, "captions": "all"}
    expected = list(loader(source, **options).epoch(4))
    found, position = [], None
    for stop in (3, 2, 100):  # interrupted twice
        made = loader(source, **options)
        stream = made.epoch(4, position)
        for batch, _ in zip(stream, range(stop), strict=False):
            found.append(batch)
            position = made.position()
        stream.close()
    assert equal(found, expected)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seed": 1}, "seed was 7 and is 1"),
        ({"captions": "all"}, "captions was draw and is all"),
        ({"num_samples": 30}, "samples per epoch was 43 and is 30"),
    ],
)
def test_resuming_in_mid_epoch_with_other_settings_is_refused(tmp_path, changes, words):
    source = make("table", tmp_path)
    made = loader(source)
    fresh = made.position()
    stream = made.epoch(0)
    next(stream)
    stream.close()
    other = loader(source, **changes)
    assert words in fault(other.epoch, 0, made.position())
    next(other.epoch(0, fresh))  # an epoch that has not begun asks for nothing
    assert "in epoch 1, not in epoch 2" in fault(made.epoch, 1, made.position())


# bad input


@readers
def test_bad_images_are_left_out_counted_by_epoch_and_named_once(tmp_path, kind, workers, caplog):
    source = make(kind, tmp_path, bad=(4, 11))
    made = loader(source, workers=workers)
    for epoch in range(3):
        seen = [n for batch in numbers(made.epoch(epoch)) for n in batch]
        assert len(seen) == len(set(seen)) == 40 and not {4, 11} & set(seen)
        assert made.bad.kinds == {"picture": 2} and 42 <= made.bad.read <= 43  # the last chunk may not be needed
    keys = {"4.png", "11.png"} if kind == "table" else {"4", "11"}
    for key in keys:
        assert sum(f"skipped sample '{key}' (picture)" in record.getMessage() for record in caplog.records) == 1


@readers
def test_too_many_bad_images_end_the_run(tmp_path, kind, workers):
    source = make(kind, tmp_path, bad=(4, 11, 12))
    list(loader(source, workers=workers, max_bad_samples=0.003).epoch(0))  # three of 1,000
    message = fault(list, loader(source, workers=workers, max_bad_samples=0.002).epoch(0))
    assert f"{source.name}: 3 of 43 samples skipped (picture 3)" in message and "max_bad_samples=0.002" in message
    message = fault(list, loader(source, workers=workers, max_bad_samples=0).epoch(0))  # at once
    assert "1 of" in message and "the last one: " in message and "(picture)" in message


def test_bad_images_before_an_interruption_still_count(tmp_path):
    source = make("table", tmp_path, bad=tuple(range(10)))
    made = loader(source)
    batches = made.epoch(0)
    for _ in range(3):
        next(batches)
    position, before = made.position(), len(made.bad)
    assert before > 1
    list(batches)
    assert "10 of 43" in fault(lambda: list(loader(source, max_bad_samples=0.009).epoch(0)))
    resumed = loader(source, max_bad_samples=0.01)
    list(resumed.epoch(0, position))
    assert resumed.bad.state() == made.bad.state() == {"read": 43, "kinds": {"picture": 10}}
    assert "10 of 43" in fault(lambda: list(loader(source, max_bad_samples=0.009).epoch(0, position)))
    list(resumed.epoch(1))  # another pass
    assert resumed.bad.state() == {"read": 43, "kinds": {"picture": 10}}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_problem_in_a_worker_is_one_line_and_no_traceback(tmp_path, workers):
    make("shards", tmp_path)
    shard = tmp_path / "2.tar"
    made = loader(open_source(str(tmp_path / "*.tar")), workers=workers, num_samples=NUMBER)
    shard.write_bytes(shard.read_bytes()[:5000])
    message = fault(list, made.epoch(0))
    assert "2.tar" in message and "Traceback" not in message


def test_a_bug_in_a_transform_is_not_taken_for_a_bad_image(tmp_path):
    def broken(picture: Image.Image) -> torch.Tensor:
        raise ValueError("a bug")

    made = TrainLoader(make("table", tmp_path), batch_size=5, transform=broken, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="a bug") as caught:
        next(made.epoch(0))
    assert not isinstance(caught.value, CoderError)


def test_steps_per_epoch_and_data_that_is_too_small(tmp_path):
    source = make("table", tmp_path)
    assert loader(source, batch_size=43).steps_per_epoch == 1
    assert loader(source, batch_size=43, captions="all").steps_per_epoch == 3
    assert loader(source, batch_size=7, world_size=3).steps_per_epoch == 2
    assert loader(source, num_samples=20).steps_per_epoch == len(list(loader(source, num_samples=20).epoch(0))) == 4
    message = fault(loader, source, batch_size=44)
    assert "--batch-size 44 is larger than the data (43 samples)" in message
    assert "2 ranks" in fault(loader, source, batch_size=22, world_size=2)
    for name, number in (("batch_size", 0), ("workers", -1), ("max_bad_samples", -1), ("max_bad_samples", 100)):
        assert str(number) in fault(loader, source, **{name: number})


def piped(folder: Path):
    """The shards as a stream."""
    make("shards", folder)
    return open_source("::".join(f"pipe:cat {shard}" for shard in sorted(folder.glob("*.tar"))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_ends_early_says_so_and_one_that_is_far_too_short_is_an_error(tmp_path, workers, caplog):
    made = loader(piped(tmp_path), workers=workers, num_samples=60)
    assert made.steps_per_epoch == 12 and len(list(made.epoch(0))) == 8
    assert "8 of 12 batches" in caplog.text
    short = loader(piped(tmp_path), workers=workers, num_samples=100)
    message = fault(list, short.epoch(0))
    assert "8 of 20 batches" in message and "--train-num-samples" in message


def test_resampled_shards_give_as_many_batches_as_asked_for(tmp_path):
    make("shards", tmp_path)
    source = open_source(str(tmp_path / "*.tar"), resampled=True)
    made = loader(source, workers=2, num_samples=100)
    batches, positions = [], []
    for batch in made.epoch(0):
        batches.append(batch)
        positions.append(made.position())
    assert len(batches) == 20
    assert equal(list(loader(source, workers=2, num_samples=100).epoch(0, positions[14])), batches[15:])


# evaluation


@pytest.mark.parametrize(("kind", "world", "workers"), [("table", 3, 0), ("shards", 2, 2)])
def test_evaluation_shows_every_image_once_and_in_order(tmp_path, kind, world, workers):
    source = make(kind, tmp_path, bad=(6, 40))
    found = {}
    for rank in range(world):
        options = {"batch_size": 4, "transform": transform, "workers": workers, "bad": BadSamples(source.name)}
        batches = list(evaluation_batches(source, rank=rank, world_size=world, **options))
        order = [index for batch in batches for index in batch["index"].tolist()]
        assert order == sorted(order)
        for batch in batches:
            assert len(batch["index"]) == len(batch["captions"]) == len(batch["image"]) == len(batch["image_id"]) <= 4
            rows = zip(batch["index"].tolist(), batch["image"][:, 0, 0, 0].tolist(), batch["captions"], strict=True)
            for index, number, captions in rows:
                assert index not in found
                found[index] = int(number), captions
    assert sorted(number for number, _ in found.values()) == [n for n in range(NUMBER) if n not in (6, 40)]
    for index, (number, captions) in found.items():
        assert captions == tuple(f"{number} {k}" for k in range(3)) and index == number


def test_evaluation_counts_bad_images(tmp_path):
    source = make("table", tmp_path, bad=(6, 40))
    bad = BadSamples("val", 0.001)
    list(evaluation_batches(source, batch_size=4, transform=transform, bad=bad))
    assert str(bad) == "2 of 43 samples skipped (picture 2)" and "2 of 43" in fault(bad.finish)
    fault(list, evaluation_batches(source, batch_size=4, transform=transform, bad=BadSamples("val", 0)))


# images that are several tensors


def regions_transform(number: int) -> dict[str, torch.Tensor]:
    """A set of regions, each tensor of which tells the image's number."""
    kept = 1 + int(torch.randint(4, ()))
    return {
        "features": torch.full((4, 3), float(number)),
        "mask": torch.arange(4) < kept,
        "boxes": torch.full((4, 4), number / 100),
        "aspect": torch.tensor(float(number)),
    }


def load_number(number: int, bad: bool) -> int:
    if bad:
        raise ValueError(f"3 of 9 numbers in the features of {number} are NaN")
    return number


def regions_source(bad: tuple[int, ...] = ()) -> ItemSource:
    items = [
        Item(f"image {n}", tuple(f"{n} {k}" for k in range(3)), partial(load_number, n, n in bad)) for n in range(NUMBER)
    ]
    return ItemSource(items, name="made")


def regions_loader(source: ItemSource, **options) -> TrainLoader:
    return TrainLoader(source, transform=regions_transform, tokenizer=tokenizer, **{"batch_size": BATCH, "seed": 7, **options})


def flat(batches) -> list[dict[str, torch.Tensor]]:
    return [{**batch["image"], **{key: batch[key] for key in ("image_id", "text")}} for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_tensors_of_an_image_stay_with_its_text(workers):
    """Also where the gaps of bad images are closed with rows of the next chunk."""
    bad = (3, 4, 11, 30)
    source = regions_source(bad)
    made = regions_loader(source, workers=workers)
    batches = flat(made.epoch(0))
    ids = {n: stable_hash(f"image {n}") for n in range(NUMBER)}
    assert len(batches) == (NUMBER - len(bad)) // BATCH and len(made.bad) == len(bad)
    seen = []
    for batch in batches:
        shown = batch["text"][:, 0].tolist()
        assert {key: tuple(value.shape) for key, value in batch.items()} == {
            "features": (BATCH, 4, 3),
            "mask": (BATCH, 4),
            "boxes": (BATCH, 4, 4),
            "aspect": (BATCH,),
            "image_id": (BATCH,),
            "text": (BATCH, 3),
        }
        assert batch["features"][:, 0, 0].tolist() == batch["aspect"].tolist() == [float(n) for n in shown]
        torch.testing.assert_close(batch["boxes"][:, -1, -1], torch.tensor(shown) / 100)
        assert batch["image_id"].tolist() == [ids[n] for n in shown]
        seen += shown
    assert len(set(seen)) == len(seen) and not set(bad) & set(seen)


def test_masks_are_an_images_own_whatever_is_left_out():
    """What dropout keeps of an image is drawn from the image alone: neighbours, leftovers and workers change nothing."""
    masks = []
    for bad, options in (((), {}), ((3, 4, 11, 30), {"workers": 2}), ((), {"batch_size": 7})):
        for batch in flat(regions_loader(regions_source(bad), **options).epoch(0)):
            masks += zip(batch["text"][:, 0].tolist(), batch["mask"].sum(1).tolist(), strict=True)
    assert len(set(masks)) == len({number for number, _ in masks}) and len({count for _, count in masks}) > 2


@pytest.mark.parametrize("workers", [0, 2])
def test_sets_of_tensors_go_on_in_mid_epoch(workers):
    source = regions_source((3, 4, 11, 30))
    whole = flat(regions_loader(source, workers=workers).epoch(1))
    for stop in (1, 4, 6):
        first = regions_loader(source, workers=workers)
        taken = first.epoch(1)
        for _ in range(stop):
            next(taken)
        position = json.loads(json.dumps(first.position()))
        assert equal(flat(regions_loader(source, workers=workers).epoch(1, position)), whole[stop:])


# positive captions

#: A caption of two words can be cut to its first, the image's number.
POSITIVES = "join+truncate(words=1)"


def padded_tokenizer(texts: list[str]) -> torch.Tensor:
    """Four numbers of a text, -1 where it is shorter, and one drawn, as tokenizers that drop words do."""
    rows = [[int(n) for n in text.split()] for text in texts]
    return torch.tensor([[*row, -1, -1, -1][:4] + [int(torch.randint(1000, ()))] for row in rows])


def region_number(regions: Regions) -> torch.Tensor:
    return torch.full((1, 2, 2), float(regions.features[0, 0]))


def positive_loader(kind: str, folder: Path, **options) -> TrainLoader:
    bad = options.pop("bad", ())
    captions = options.pop("captions_each", 3)
    view = transform
    if kind == "regions":
        source = make("table", folder, captions=captions)
        known = {f"{n}.png": Regions(np.full((1, 2), n, np.float32)) for n in range(NUMBER) if n not in bad}
        source, view = RegionSource(source, known), region_number
    elif kind == "resampled":
        make("shards", folder, bad=bad, captions=captions)
        source = open_source(str(folder / "*.tar"), resampled=True)
        options = {"num_samples": 60, **options}
    else:
        source = make(kind, folder, bad=bad, captions=captions)
    given = {"batch_size": BATCH, "seed": 7, "tokenizer": padded_tokenizer, **options}
    return TrainLoader(source, transform=view, **given)


def pairs(batches) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The numbers of each text and of its positive, without padding."""
    return [
        tuple(tuple(n for n in row if n >= 0) for row in both)
        for batch in batches
        for both in zip(batch["text"][:, :4].tolist(), batch["text_positive"][:, :4].tolist(), strict=True)
    ]


choices = pytest.mark.parametrize(
    ("kind", "captions", "workers"),
    [
        ("table", "draw", 0), ("shards", "all", 2), pytest.param("resampled", "draw", 2, marks=pytest.mark.slow),
        ("regions", "all", 0),
    ],  # fmt: skip
)


@choices
def test_positives_are_of_their_own_image_and_disturb_nothing(tmp_path, kind, captions, workers):
    options = {"captions": captions, "workers": workers, "bad": (3, 17)}
    plain = list(positive_loader(kind, tmp_path, **options).epoch(1))
    made = positive_loader(kind, tmp_path, positives=Positives(POSITIVES), **options)
    batches = list(made.epoch(1))
    assert equal([{key: value for key, value in b.items() if key != "text_positive"} for b in batches], plain)
    seen = Counter()
    for text, positive in pairs(batches):
        number, own = text
        if len(positive) == 1:
            assert positive == (number,)
            seen["truncate"] += 1
        else:
            assert positive[:3] == (number, own, number) and positive[3] in {0, 1, 2} - {own}
            seen["join"] += 1
    assert set(made.positives_made) == {"join", "truncate"} == set(seen)
    assert all(made.positives_made[name] >= seen[name] for name in seen)  # rows that fill no batch were decoded too
    assert made.positives_made.total() - seen.total() < 2 * BATCH * max(workers, 1)


@choices
def test_positives_are_the_same_after_an_interruption(tmp_path, kind, captions, workers):
    options = {"captions": captions, "workers": workers, "bad": (3, 17), "positives": Positives(POSITIVES)}
    whole, batches, positions = positive_loader(kind, tmp_path, **options), [], []
    for batch in whole.epoch(0):
        batches.append(batch)
        positions.append(json.dumps(whole.position()))
    fresh = positive_loader(kind, tmp_path, **options)
    assert equal(list(fresh.epoch(0, json.loads(positions[4]))), batches[5:])


@pytest.mark.parametrize(
    "kind", ["shards", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("table", "regions", "resampled"))]
)
def test_a_positive_depends_on_seed_epoch_image_and_caption_alone(tmp_path, kind):
    drawn = {"num_samples": 400} if kind == "resampled" else {}  # so that two streams have captions in common

    def some(epoch: int = 0, **options) -> dict[tuple[int, ...], tuple[int, ...]]:
        options = {**drawn, **options}
        made = positive_loader(kind, tmp_path, captions="all", positives=Positives(POSITIVES), **options)
        return dict(pairs(made.epoch(epoch)))

    first, other = some(), some(workers=2, batch_size=4, rank=1, world_size=2)
    shared = first.keys() & other.keys()
    assert len(shared) > 8 and all(first[text] == other[text] for text in shared)
    for changed in (some(epoch=1), some(seed=8)):
        shared = first.keys() & changed.keys()
        assert sum(first[text] != changed[text] for text in shared) > len(shared) / 4


@pytest.mark.parametrize(
    "captions, kinds",
    [
        (("one",), {"none"}),
        (("one", "one", " One "), {"none"}),
        (("one", "two"), {"join"}),
        (("1 2 3 4 5",), {"truncate"}),
        (("word " * 500, "word " * 400), {"join", "truncate", "same tokens"}),
    ],
    ids=["one word", "copies", "two of one word", "one caption", "long"],
)
def test_poor_captions_give_batches(captions, kinds):
    """A caption of its own as positive where nothing else is possible; nothing is refused."""
    items = [Item(f"image {n}", captions, partial(load_number, n, False)) for n in range(30)]

    def tokenize(texts: list[str]) -> torch.Tensor:
        return torch.tensor([([len(word) for word in text.split()] + [0] * 300)[:300] for text in texts])

    made = TrainLoader(
        ItemSource(items, name="poor"),
        batch_size=10,
        transform=regions_transform,
        tokenizer=tokenize,
        captions="all",
        positives=Positives(),
    )
    batches = list(made.epoch(0))
    assert len(batches) == made.steps_per_epoch and set(made.positives_made) <= kinds and made.positives_made
    if kinds == {"none"}:
        assert all(torch.equal(batch["text"], batch["text_positive"]) for batch in batches)
    elif len(kinds) == 1:
        assert not any((batch["text"] == batch["text_positive"]).all(1).any() for batch in batches)
