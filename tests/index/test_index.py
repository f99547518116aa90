"""Making an index: what comes out, a stop anywhere, two writers, several ranks, damage."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin import distributed, files, progress
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.index import build, embed, manifest, records_file, vectors_file
from coder_plugin.index.build import build_index
from coder_plugin.index.search import Index
from tests import gloo
from tests.evaluation.test_evaluate import make_encoder
from tests.training import region_data

MODEL = {"name": "x", "fingerprint": "f" * 64}
FIRST = "segments/00000"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return region_data.write_precomp(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True, scope="module")
def small_files() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ROWS_PER_FILE", 5)  # of 24 images, a batch to a file
        yield


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "index"
    build_index(folder, *make_encoder(data), model=MODEL)
    return folder


def sums(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())["files"]


def test_an_index_holds_what_the_encoder_gives(data: str, whole: Path) -> None:
    encoder, source = make_encoder(data)
    encoded = encoder(source)
    index = Index(whole)
    assert index.manifest["vectors"] == {
        "images": {"items": 24, "views": 1, "dimensions": 16},
        "captions": {"items": 120, "views": 1, "dimensions": 16},
    }
    for kind, expected in (("images", encoded.images), ("captions", encoded.texts)):
        found = np.concatenate([index.vector(row, kind=kind) for row in range(len(expected))])
        np.testing.assert_array_equal(found, expected.numpy())
        scores, rows = index.search(encoded.texts[:7], 5, kind=kind)
        best = (encoded.texts[:7] @ expected.T).topk(5)
        np.testing.assert_array_equal(rows, best.indices)
        np.testing.assert_allclose(scores, best.values, rtol=1e-5)
    items = [item for _, item in source.items()]
    rows = [5, 23, 0, 5]
    assert [each[1:3] for each in index.records.images(rows)] == [
        (items[row].key, items[row].image_id) for row in rows
    ]
    assert [index.records.captions_of(row) for row in rows] == [items[row].captions for row in rows]
    assert [each.text for each in index.records.captions([119, 3])] == [items[23].captions[4], items[0].captions[3]]
    assert [each.image for each in index.records.captions([119, 3, 5])] == [23, 0, 1]
    assert index.records.row_of(items[9].key) == 9 and index.records.row_of("nobody") is None
    kept = index.items("images", np.array([3, 1]))
    torch.testing.assert_close(kept["tokens"], encoded.items.images["tokens"][[3, 1]], rtol=0, atol=0)
    texts = index.items("captions", np.array([77]))
    torch.testing.assert_close(texts["tokens"], encoded.items.texts["tokens"][[77]], rtol=0, atol=0)
    assert {path.name for path in whole.iterdir()} == {".lock", "manifest.json", "segments"}


class Killed(BaseException):
    pass


#: What is called while an index is made, and after how many calls, or before which file's: a kill there must lose nothing.
STAGES: dict[str, tuple[Any, str, int | str]] = {
    "the first file": (embed, "write_unit", 0),
    "the third file": (embed, "write_unit", 2),
    "a file's rename": (os, "replace", "00000003.parquet"),
    "the records": (records_file, "finish", 0),
    "the first vectors": (vectors_file, "write", 0),
    "the second vectors": (vectors_file, "write", 1),
    "the segment's rename": (os, "replace", "00000"),
    "the manifest": (manifest, "write_manifest", 0),
    "the manifest's rename": (os, "replace", "manifest.json"),
}


def count_batches(encoder: Any) -> list[int]:
    """Lets an encoder write the sizes of the batches of images that it encodes into the list."""
    sizes, real = [], encoder.transformed
    encoder.transformed = lambda batch, head: (sizes.append(1), real(batch, head))[1]
    return sizes


@pytest.mark.parametrize("stage", STAGES)
def test_a_stop_anywhere_changes_nothing(data: str, whole: Path, tmp_path: Path, monkeypatch, stage: str) -> None:
    module, name, after = STAGES[stage]
    real, calls = getattr(module, name), []

    def stopping(*args: Any, **options: Any) -> Any:
        if after in (len(calls), Path(args[-1]).name if module is os else None):
            raise Killed
        calls.append(name)
        return real(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, stopping)
        build_index(tmp_path / "index", *make_encoder(data), model=MODEL)
    with pytest.raises(CoderError, match="index that is not finished"):
        Index(tmp_path / "index")
    encoder, source = make_encoder(data)
    encoded = count_batches(encoder)
    build_index(tmp_path / "index", encoder, source, model=MODEL)
    assert sums(tmp_path / "index") == sums(whole)
    done = {"the first file": 0, "the third file": 2, "a file's rename": 3}.get(stage, 5)
    assert len(encoded) == 5 - done  # and nothing that was done is encoded again


CHILD = """
import sys
from coder_plugin.index import build, embed
from tests.evaluation.test_evaluate import make_encoder
build.ROWS_PER_FILE = 5
real, calls = embed.write_unit, []
def write(*args, **options):
    summary = real(*args, **options)
    calls.append(1)
    if len(calls) == 2:
        print("two", flush=True)
        sys.stdin.read()
    return summary
embed.write_unit = write
build.build_index(sys.argv[2], *make_encoder(sys.argv[1]), model={"name": "x", "fingerprint": "f" * 64})
"""


def test_two_writers_and_a_killed_one(data: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHILD, data, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline() == "two\n"
        started = time.monotonic()
        with pytest.raises(CoderError, match="index is being written by another process"):
            build_index(folder, *make_encoder(data), model=MODEL)
        assert time.monotonic() - started < 30
        assert len(list((folder / "embeddings").glob("*.parquet"))) == 2
        child.send_signal(signal.SIGKILL)
        child.wait()
        build_index(folder, *make_encoder(data), model=MODEL)
    finally:
        child.kill()
    assert sums(folder) == sums(whole)
    before = (folder / "manifest.json").read_bytes()
    assert build_index(folder, *make_encoder(data), model=MODEL)["images"] == 24  # finished: nothing to do
    assert (folder / "manifest.json").read_bytes() == before


def on_a_rank(data: str, folder: str) -> int:
    build.ROWS_PER_FILE = 5
    encoder, source = make_encoder(data)
    encoded = count_batches(encoder)
    build_index(folder, encoder, source, model=MODEL)
    return len(encoded)


def test_ranks_share_the_work(data: str, whole: Path, tmp_path: Path) -> None:
    assert sum(gloo.run(on_a_rank, data, str(tmp_path / "index"))) == 6  # five files and, for the header, one image
    assert sums(tmp_path / "index") == sums(whole)


def test_images_that_cannot_be_read_are_left_out(data: str, tmp_path: Path, monkeypatch) -> None:
    """Of the 24, all of a file and some others; and a stop between them."""
    encoder, source = make_encoder(data)
    lost = {0, 5, 6, 7, 8, 9, 23}

    def broken() -> Any:
        raise ValueError("broken")

    items = [Item(i.key, i.captions, broken if n in lost else i.load) for n, i in source.items()]
    real, left = embed.write_unit, [0]

    def stopping(*args: Any, **options: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(*args, **options)

    monkeypatch.setattr(embed, "write_unit", stopping)
    for folder in ("once", "twice"):
        if folder == "twice":
            left[0] = 3
            with pytest.raises(Killed):
                build_index(tmp_path / folder, make_encoder(data)[0], ItemSource(items), model=MODEL)
        left[0] = 99
        made = build_index(tmp_path / folder, make_encoder(data)[0], ItemSource(items), model=MODEL)
        assert (made["images"], made["captions"], made["unreadable"]) == (17, 85, 7)
        assert made["unreadable_keys"] == [items[n].key for n in sorted(lost)]
    assert sums(tmp_path / "once") == sums(tmp_path / "twice")
    assert [each.key for each in Index(tmp_path / "once").records.images([0, 4])] == [items[1].key, items[10].key]


def test_captions_alone_load_no_image(data: str, whole: Path, tmp_path: Path) -> None:
    encoder, source = make_encoder(data)
    items = [Item(i.key, i.captions, lambda: pytest.fail("an image was loaded")) for _, i in source.items()]
    build_index(tmp_path / "texts", encoder, ItemSource(items), model=MODEL, what="captions")
    assert sums(tmp_path / "texts")[f"{FIRST}/captions.faiss"] == sums(whole)[f"{FIRST}/captions.faiss"]
    with pytest.raises(CoderError, match="no vectors of images, only of captions"):
        Index(tmp_path / "texts").search(np.zeros((1, 16)), 1)
    build_index(tmp_path / "images", *make_encoder(data), model=MODEL, what="images", rerank=False)
    assert set(sums(tmp_path / "images")) == {f"{FIRST}/images.faiss", f"{FIRST}/records.sqlite"}
    assert sums(tmp_path / "images")[f"{FIRST}/images.faiss"] == sums(whole)[f"{FIRST}/images.faiss"]
    assert len(Index(tmp_path / "images").records.captions_of(3)) == 5  # the texts are there as texts


@pytest.mark.parametrize("name", ["images.faiss", "captions.faiss", "records.sqlite", "rerank/image_tokens.npy"])
def test_a_damaged_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    import shutil

    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    file = folder / FIRST / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CoderError, match=f"{file.name} is damaged: its checksum"):
        Index(folder, verify=True)
    file.write_bytes(content[:-1])
    with pytest.raises(CoderError, match=f"{file.name} is damaged: {len(content) - 1} bytes, not the {len(content)}"):
        Index(folder)
    file.unlink()
    with pytest.raises(CoderError, match=f"{file.name} is missing"):
        Index(folder)


def test_foreign_folders_are_refused(whole: Path, tmp_path: Path, data: str) -> None:
    for text, content in (
        ("was not written by coder-plugin index", {"format": "somebody's"}),
        ("was not written by coder-plugin index", [1]),
        ("has version 1 of the format.*build it again", {"format": manifest.FORMAT, "version": 1}),
        ("manifest.json is damaged: it has been changed", {**json.loads((whole / "manifest.json").read_text()), "images": 25}),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(CoderError, match=text):
            Index(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CoderError, match="manifest.json cannot be read"):
        Index(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CoderError, match="is not an index: it has no manifest.json"):
        Index(tmp_path)
    (tmp_path / "holiday.txt").touch()
    with pytest.raises(CoderError, match=r"is not an index and not empty \(holiday.txt\)"):
        build_index(tmp_path, *make_encoder(data), model=MODEL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "holiday.txt"]


def test_other_options_are_refused(whole: Path, tmp_path: Path, data: str, monkeypatch) -> None:
    def begun(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(embed, "write_unit", begun)
        build_index(tmp_path / "index", *make_encoder(data), model=MODEL)
    other = {**MODEL, "fingerprint": "a" * 64}
    for folder, word in ((tmp_path / "index", "was begun with"), (whole, "is a finished index with")):
        for change, text in (
            ({"model": other}, "another model"),
            ({"thumbnails": 64}, "thumbnails was 128, is 64"),
            ({"what": "images"}, "what was both, is images"),
        ):
            with pytest.raises(CoderError, match=rf"{word} other options \({text}"):
                build_index(folder, *make_encoder(data), **{"model": MODEL, **change})
    with pytest.raises(CoderError, match="factory was Flat, is HNSW8"):
        build_index(whole, *make_encoder(data), model=MODEL, factory="HNSW8")
    with pytest.raises(CoderError, match="knows no index factory 'Round'"):
        build_index(tmp_path / "index", *make_encoder(data), model=MODEL, factory="Round")
    assert build_index(tmp_path / "index", *make_encoder(data), model=MODEL)["images"] == 24  # nothing was lost by it
    with pytest.raises(CoderError, match="what must be one of both, images, captions, got 'sounds'"):
        build_index(tmp_path / "new", *make_encoder(data), model=MODEL, what="sounds")
    with pytest.raises(CoderError, match=r"thumbnails must be 0 \(none\) or more pixels, got -1"):
        build_index(tmp_path / "new", *make_encoder(data), model=MODEL, thumbnails=-1)
    with pytest.raises(CoderError, match="knows no index factory 'Round'"):
        build_index(tmp_path / "new", *make_encoder(data), model=MODEL, factory="Round")
    assert not (tmp_path / "new").exists()


def test_progress_without_a_terminal_is_printed(capsys, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress(1000, 512, what="images") as shown:
        for done in (600, 700, 1024):
            now[0] += 6
            shown.advance(done)
    lines = ["continuing after 512 of 1,000 images", "700 of 1,000 images, 16 per second, 0:19 left"]
    assert capsys.readouterr().err.splitlines() == lines
    with progress.Progress(None, what="captions") as shown:
        now[0] += 11
        shown.update(33)
    assert capsys.readouterr().err == "33 captions, 3.0 per second\n"
    with progress.Progress(None, what="images", shown=False) as shown:
        now[0] += 11
        shown.update(5)
    assert capsys.readouterr().err == ""


def test_a_torn_file_of_a_stopped_build_is_made_again(data: str, whole: Path, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "index"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(records_file, "finish", lambda *_: (_ for _ in ()).throw(Killed))
        build_index(folder, *make_encoder(data), model=MODEL)
    torn = folder / "embeddings" / "00000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-20])
    encoder, source = make_encoder(data)
    encoded = count_batches(encoder)
    build_index(folder, encoder, source, model=MODEL)
    assert sums(folder) == sums(whole) and len(encoded) == 1


def test_data_that_have_changed_are_refused(data: str, whole: Path, tmp_path: Path) -> None:
    encoder, source = make_encoder(data)
    items = [item for _, item in source.items()]
    build_index(tmp_path / "index", encoder, ItemSource(items), model=MODEL, data={"precision": "fp32"})
    for changed, text in (
        (items[:-1], "images was 24, is 23"),
        ([*items[:-1], Item("new", items[-1].captions, items[-1].load)], "the data's content has changed"),
        ([*items[:-1], Item(items[-1].key, ("another",), items[-1].load)], "the data's content has changed"),
    ):
        with pytest.raises(CoderError, match=text):
            build_index(tmp_path / "index", encoder, ItemSource(changed), model=MODEL, data={"precision": "fp32"})
    with pytest.raises(CoderError, match="precision was fp32, is amp_bf16"):
        build_index(tmp_path / "index", encoder, ItemSource(items), model=MODEL, data={"precision": "amp_bf16"})


def test_nothing_is_left_behind(data: str, whole: Path, tmp_path: Path, monkeypatch) -> None:
    """Of a stop before the first note, in the middle, and after the manifest."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / ".building.json.1.writing").write_text("{")  # a kill in the middle of the first file
    for module, name in ((files, "atomic_replace"), (vectors_file, "write"), (build, "_remove_leftovers")):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, name, lambda *_, **__: (_ for _ in ()).throw(Killed))
            build_index(folder, *make_encoder(data), model=MODEL)
    assert (folder / "embeddings").is_dir() and (folder / "manifest.json").is_file()
    build_index(folder, *make_encoder(data), model=MODEL)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert sums(folder) == sums(whole)


def test_captions_or_images_that_are_not_there(data: str, tmp_path: Path) -> None:
    encoder, source = make_encoder(data)
    items = [Item(i.key, (), i.load) for _, i in source.items()]
    bare = SimpleNamespace(name="bare", num_images=24, items=lambda *_, **__: enumerate(items))
    with pytest.raises(CoderError, match="the data have no captions, and only captions were to be indexed"):
        build_index(tmp_path / "index", encoder, bare, model=MODEL, what="captions")
    bare.num_images = 0
    with pytest.raises(CoderError, match="bare: no images"):
        build_index(tmp_path / "none", encoder, bare, model=MODEL, what="captions")


def failing_on_a_rank(data: str, folder: str) -> str:
    def failing(*_: Any, **__: Any) -> None:
        raise CoderError("the disk is full")

    if distributed.rank() == 1:
        build.embed_all = failing
    try:
        build_index(folder, *make_encoder(data), model=MODEL)
    except CoderError as error:
        return str(error)
    return "made"


def test_an_error_on_one_rank_is_raised_on_all(data: str, tmp_path: Path) -> None:
    errors = gloo.run(failing_on_a_rank, data, str(tmp_path / "index"))
    assert errors == ["another process failed: the disk is full", "the disk is full"]


SUM = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "change, text",
    [
        ({"files": {}}, "lists segments/00000/images.faiss, segments/00000/records.sqlite, which do not match"),
        ({"files": {"../records.sqlite": SUM, f"{FIRST}/images.faiss": SUM}}, r"lists ../records.sqlite, segments/00000/rec"),
        ({"vectors": {}}, "which do not match the files of an index"),
        ({"plan": None}, "manifest.json lacks plan"),
    ],
)
def test_a_manifest_of_other_files_is_refused(data: str, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    build_index(tmp_path, *make_encoder(data), model=MODEL, what="images", rerank=False)
    said = json.loads((tmp_path / "manifest.json").read_text())
    content = {key: value for key, value in {**said, **change}.items() if key not in ("manifest_sha256", "format", "version")}
    content = {key: value for key, value in content.items() if value is not None}
    manifest.write_json(tmp_path / "manifest.json", {**content, "manifest_sha256": manifest.sha256_json(content)})
    with pytest.raises(CoderError, match=text):
        Index(tmp_path)


def test_thumbnails_of_regions_come_from_their_pictures(data: str, tmp_path: Path) -> None:
    """Of the same key at the same place; what is missing, another's or broken has none; also after a stop."""
    encoder, source = make_encoder(data)

    def picture(number: int) -> Image.Image:
        if number == 4:
            raise OSError("broken")
        return Image.new("RGB", (300, 200), (10 * number, 0, 0))

    items = [
        Item("another" if n == 2 else item.key, item.captions, partial(picture, n)) for n, item in source.items() if n < 20
    ]
    build_index(tmp_path / "index", encoder, source, model=MODEL, thumbnails=64, pictures=ItemSource(items))
    found = Index(tmp_path / "index").records
    for row in range(24):
        small = found.thumbnail(row)
        assert (small is None) == (row in (2, 4) or row >= 20)
        if small is not None:
            made = Image.open(io.BytesIO(small))
            assert made.size == (64, 43) and abs(made.getpixel((30, 20))[0] - 10 * row) < 6


def test_names_that_are_not_unicode(tmp_path: Path, data: str) -> None:
    encoder, source = make_encoder(data)
    [(_, first), *_] = source.items()
    made = [Item("half\udce9.jpg", ("naïve 猫",), first.load), Item("b", ("half a \ud83d face",), first.load)]
    manifest = build_index(tmp_path / "index", encoder, ItemSource(made), model=MODEL)
    found = Index(tmp_path / "index").records
    assert found.captions_of(0) == ("naïve 猫",)
    assert manifest["unreadable_kinds"] == {"caption": 1} and manifest["unreadable_keys"] == ["b"]
    assert found.row_of("half\udce9.jpg") == 0
