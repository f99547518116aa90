"""An index of several segments, built from embeddings: what it holds, stops, filters; images added and removed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from coder_plugin import files
from coder_plugin.cli import main
from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.index import manifest, records_file, segments, training, vectors_file
from coder_plugin.index.build import build_from_embeddings
from coder_plugin.index.changes import add, remove
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.embeddings_header import Header
from coder_plugin.index.records import Records
from coder_plugin.index.search import Index
from coder_plugin.index.thrift import BINARY, LIST
from coder_plugin.index.unit_file import Rows, write_unit
from tests.index.made_embeddings import COLUMNS, ROWS, embed
from tests.index.test_parquet_footer import change_footer
from tests.reliability import ranks

FACTORY = "IVF4,Flat"
SIZE = 2 * ROWS  # five units: segments of two, two and one


@pytest.fixture(autouse=True, scope="module")
def few_to_train_on() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LEAST", 2)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("made")
    return folder / "embeddings", embed(folder / "embeddings", tokens=True)


@pytest.fixture(scope="module")
def whole(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "index"
    build_from_embeddings(folder, made[0], factory=FACTORY, segment_size=SIZE)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but of the manifest, which has the time, and the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", ".lock")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}


def copy_of(index: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index, tmp_path / "copy"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")
def test_the_first_process_of_a_launcher_builds(made: Any, whole: Path, tmp_path: Path) -> None:
    command = ["index", "--embeddings", str(made[0]), "--output", str(tmp_path / "index")]

    def run(_: Path) -> None:
        sys.exit(main([*command, "--factory", FACTORY, "--segment-size", str(SIZE)]))

    endings = ranks.run(run, tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    assert contents(tmp_path / "index") == contents(whole)


@pytest.mark.parametrize("views", [1, 2])
def test_segments_are_one_index(tmp_path: Path, views: int) -> None:
    vectors = embed(tmp_path / "e", views=views, tokens=True)
    content = build_from_embeddings(tmp_path / "index", tmp_path / "e", segment_size=SIZE)
    assert [(each["images"], each["captions"]) for each in content["segments"]] == [(40, 38), (40, 38), (20, 19)]
    index = Index(tmp_path / "index", verify=True)
    queries = np.random.default_rng(9).standard_normal((4, 8), dtype=np.float32)
    best = np.einsum("qd,nvd->qnv", queries, vectors["images"]).max(2)
    scores, rows = index.search(queries, 100)
    np.testing.assert_array_equal(rows, np.argsort(-best, axis=1, kind="stable"))
    np.testing.assert_allclose(scores, np.take_along_axis(best, rows, 1), rtol=1e-5, atol=1e-6)
    text_rows = index.search(queries, 7, kind="captions")[1]
    np.testing.assert_array_equal(text_rows, np.argsort(-(queries @ vectors["captions"].T), 1, kind="stable")[:, :7])
    np.testing.assert_array_equal(index.vectors["images"].gather([99, 0, 45]), vectors["images"][[99, 0, 45]])
    np.testing.assert_array_equal(index.vector(77, kind="captions"), vectors["captions"][[77]])
    records = index.records
    assert [tuple(each) for each in records.images([61, 0])] == [
        (row, key, stable_hash(key), f"/pictures/{key}.jpg", None) for row, key in ((61, "a-3-1"), (0, "a-0-0"))
    ]
    captions = records.captions([94, 0, 40])
    assert [tuple(each) for each in captions] == [
        (94, "caption 0 of a-4-19", 99), (0, "caption 0 of a-0-1", 1), (40, "caption 1 of a-2-2", 42)
    ]  # fmt: skip
    assert records.captions_of(42) == ("caption 0 of a-2-2", "caption 1 of a-2-2") and records.captions_of(60) == ()
    assert records.thumbnail(62) == b"\xff\xd8\xffa-3-2" and records.thumbnail(60) is None
    assert records.metadata(43) == {"source": "coco", "width": 300, "sharp": False, "score": 3 / 7}
    assert records.metadata(43, characters=2) == {"source": "co", "width": 300, "sharp": False, "score": 3 / 7}
    assert records.metadata(0, characters=2) == records.metadata(0)
    assert records.metadata(0) == {"source": None, "width": 0, "sharp": True, "score": 0.0}
    assert records.row_of("a-4-0") == 80 and records.row_of("nobody") is None
    np.testing.assert_array_equal(records.caption_rows(np.array([1, 42, 43])), [0, 39, 40])
    items = index.items("images", np.array([99, 0, 45]))["tokens"]
    assert items.shape == (3, 6, 3) and not items[1, 2:].any() and not items[2, 4:].any() and items[2, 3].all()
    for row in (-1, 100):
        with pytest.raises(CoderError, match=f"has no row {row}"):
            records.images([row])
    index.close()


def test_a_training_is_shared_by_all_segments(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {".lock", "manifest.json", "segments", "trained-images.faiss", "trained-captions.faiss"}
    trained = faiss.read_index(str(whole / "trained-images.faiss"))
    assert trained.ntotal == 0 and trained.is_trained
    opened = [faiss.read_index(str(path)) for path in whole.rglob("images.faiss")]
    centroids = {each.quantizer.reconstruct_n(0, 4).tobytes() for each in opened}
    assert centroids == {trained.quantizer.reconstruct_n(0, 4).tobytes()}


def test_samples_are_drawn_over_all_units(made: Any) -> None:
    opened = segments.Embeddings(made[0])
    rows = training.sample_rows(100, 30)
    np.testing.assert_array_equal(segments.sample(opened, "images", rows), made[1]["images"][rows, 0])
    np.testing.assert_array_equal(segments.sample(opened, "captions", rows[rows < 95]), made[1]["captions"][rows[rows < 95]])
    assert {row // ROWS for row in rows.tolist()} == set(range(5))


def test_sizes_of_segments(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = segments.Embeddings(made[0])

    def sizes(factory: str, size: int | None = None) -> list[int]:
        return [piece.images for piece in segments.pieces(opened, ["images", "captions"], factory, size)]

    assert sizes("Flat") == [100] and sizes("Flat", 45) == [40, 40, 20] and sizes("HNSW8", 1) == [20] * 5
    monkeypatch.setattr(segments, "_BYTES", 41 * 8 * 4)
    monkeypatch.setattr(segments, "_SEGMENTS", 1000)
    assert sizes("HNSW8") == [40, 40, 20] and sizes("Flat") == [100]
    monkeypatch.setattr(segments, "_SEGMENTS", 1)
    assert sizes("HNSW8") == [100]
    with pytest.raises(CoderError, match="must be at least 1 image, got 0"):
        sizes("Flat", 0)


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Raise before the numbered rename, of a file or a folder; returns what was renamed before."""
    real, done = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if len(done) == number:
            raise Killed
        done.append(Path(target).name)
        real(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    return done


def test_a_build_that_is_killed_continues(made: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each rename; segments that are whole are not written again."""
    writes: list[str] = []
    real = vectors_file.write
    monkeypatch.setattr(vectors_file, "write", lambda path, *args: writes.append(path.name) or real(path, *args))
    order = None
    for number in range(20):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            done = kill_at(patch, number)
            try:
                build_from_embeddings(folder, made[0], factory=FACTORY, segment_size=SIZE)
                order = done
                break
            except Killed:
                pass
        with pytest.raises(CoderError, match="is not finished|is not an index"):
            Index(folder)
        writes.clear()
        build_from_embeddings(folder, made[0], factory=FACTORY, segment_size=SIZE)
        assert len(writes) == 2 * (3 - sum(name.isdecimal() for name in done))
        assert contents(folder) == contents(whole)
    assert order == [
        *("building.json", "trained-images.faiss", "trained-captions.faiss", "building.json"), "00000", "00001", "00002",
        "manifest.json",
    ]  # fmt: skip


def test_what_is_not_whole_is_made_again(made: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "index"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 7)
        build_from_embeddings(folder, made[0], factory=FACTORY, segment_size=SIZE)
    for name in ("segments/00000/images.faiss", "segments/00001/segment.json", "trained-images.faiss"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    (folder / "segments" / ".00002.x.writing").mkdir()
    build_from_embeddings(folder, made[0], factory=FACTORY, segment_size=SIZE)
    assert contents(folder) == contents(whole)


def test_a_segment_whose_note_was_changed_is_not_whole(whole: Path, tmp_path: Path) -> None:
    note = copy_of(whole, tmp_path) / "segments" / "00001" / "segment.json"
    assert segments.read_note(note.parent) is not None
    note.write_text(note.read_text().replace('"images": 40', '"images": 39'))
    assert segments.read_note(note.parent) is None


def test_a_file_that_names_another_number_of_captions_is_refused(tmp_path: Path) -> None:
    embed(tmp_path / "embeddings", units=1)

    def change(footer: Any) -> None:
        content = footer[5, LIST][1][0]
        content[2, BINARY] = content[2, BINARY].replace(b'"captions": 19', b'"captions": 18')

    change_footer(tmp_path / "embeddings" / "00000000.parquet", change)
    with pytest.raises(CoderError, match="has 20 images and 19 captions in these files, not 20 images and 18 captions"):
        build_from_embeddings(tmp_path / "index", tmp_path / "embeddings")


def test_tokens_of_several_types_are_kept_in_full(tmp_path: Path) -> None:
    header = Header(model={"fingerprint": "f" * 64}, plan={}, units=2, dimensions=4, what="images")
    (tmp_path / "embeddings").mkdir()
    header.write(tmp_path / "embeddings")
    for unit, dtype in enumerate((np.float16, np.float32)):
        tokens = {"tokens": np.full((1, 2, 3), 1 / 3, dtype)}
        rows = Rows([f"{unit}.jpg"], [[]], np.ones((1, 4)), None, [None], [None], image_tokens=tokens)
        write_unit(tmp_path / "embeddings" / header.file(unit), header, unit, [rows])
    build_from_embeddings(tmp_path / "index", tmp_path / "embeddings")
    tokens = Index(tmp_path / "index").items("images", np.array([0, 1]))["tokens"]
    assert tokens[:, 0, 0].tolist() == [float(np.float16(1 / 3)), float(np.float32(1 / 3))]


def test_other_vectors_in_the_same_rows_are_other_embeddings(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    first = build_from_embeddings(tmp_path / "index", tmp_path / "e")
    folder = Embeddings(tmp_path / "e")
    values = folder.read(3).to_pydict()
    captions, columns = values["captions"], {name: values[name] for name in COLUMNS}
    images, texts = np.ones((ROWS, 8)), np.ones((sum(map(len, captions)), 8))
    rows = Rows(values["key"], captions, images, texts, values["path"], values["member"], columns=columns)
    write_unit(folder.path(3), folder.header, 3, [rows])
    with pytest.raises(CoderError, match="with other options \\(other embeddings"):
        build_from_embeddings(tmp_path / "index", tmp_path / "e")
    other = build_from_embeddings(tmp_path / "other", tmp_path / "e")
    assert other["images"] == first["images"]
    assert Index(tmp_path / "other").vectors["images"].gather([3 * ROWS]).max() == 1


def test_builds_that_are_refused(made: Any, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="segment size was 40, is None"):
        build_from_embeddings(whole, made[0], factory=FACTORY)
    with pytest.raises(CoderError, match="factory was IVF4,Flat, is Flat"):
        build_from_embeddings(whole, made[0], segment_size=SIZE)
    assert build_from_embeddings(whole, made[0], factory=FACTORY, segment_size=SIZE)["images"] == 100  # finished already
    with pytest.raises(CoderError, match="knows no index factory"):
        build_from_embeddings(tmp_path / "x", made[0], factory="Round")
    embed(tmp_path / "row", units=1)
    with pytest.raises(CoderError, match="has vectors of images only"):
        embed(tmp_path / "images", units=1, what="images")
        build_from_embeddings(tmp_path / "x", tmp_path / "images", what="captions")
    (tmp_path / "row" / "00000000.parquet").unlink()
    with pytest.raises(CoderError, match="is not finished: 1 of 1 files"):
        build_from_embeddings(tmp_path / "x", tmp_path / "row")
    with pytest.raises(CoderError, match="the metadata column 'Row' cannot be kept"):
        records_file.create(tmp_path / "x.sqlite", {"Row": "int64"})


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"a": (1, 2)}, "it has no image_b, as others have"),
        ({"a": (1, 2, 3), "b": (1, 2)}, "image_a has 3 axes, and 2 in other files"),
    ],
)
def test_tokens_of_other_kinds_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], text: str) -> None:
    header = Header(model={"fingerprint": "f" * 64}, plan={}, units=2, dimensions=4, what="images")
    (tmp_path / "embeddings").mkdir()
    header.write(tmp_path / "embeddings")
    for unit, each in enumerate(({"a": (1, 2), "b": (1, 2)}, shapes)):
        tokens = {name: np.ones(shape) for name, shape in each.items()}
        rows = Rows([f"{unit}.jpg"], [[]], np.ones((1, 4)), None, [None], [None], image_tokens=tokens)
        write_unit(tmp_path / "embeddings" / header.file(unit), header, unit, [rows])
    with pytest.raises(CoderError, match=f"00000001.tokens.safetensors is damaged .{text}"):
        build_from_embeddings(tmp_path / "index", tmp_path / "embeddings")


# -- filters ----------------------------------------------------------------------------------------------------------------

FILTERS = {
    "source = 'coco'": lambda number: number % 2 == 1,
    "source = 'coco' AND width > 500": lambda number: number % 2 == 1 and number > 5,
    "source IS NULL": lambda number: number % 2 == 0,
    "sharp": lambda number: number % 4 == 0,
    "score < 1 OR key LIKE '%-19'": lambda number: number < 7 or number == 19,
    "path = '/pictures/a-2-7.jpg'": lambda number: False,
    "lower(upper(source)) = 'coco' -- a comment": lambda number: number % 2 == 1,
    "width IN (SELECT 100)": lambda number: number == 1,
}


@pytest.mark.parametrize("expression", FILTERS)
def test_filters(whole: Path, expression: str) -> None:
    index = Index(whole)
    expected = [row for row in range(100) if FILTERS[expression](row % ROWS)]
    if "path" in expression:
        expected = [47]
    rows = index.records.where(expression)
    assert rows.dtype == np.int64 and rows.tolist() == expected
    texts = index.records.where(expression, kind="captions")
    np.testing.assert_array_equal(texts, index.records.caption_rows(rows))
    found = index.search(np.ones((1, 8)), 100, rows=rows)[1]
    assert sorted(found[0].tolist()) == expected
    index.close()


REFUSED = {
    "": "must be an expression of 1 to 10,000",
    "x" * 10_001: "must be an expression of 1 to 10,000",
    "sourc = 'coco'": "no such column: sourc; the columns are key, path, member, source, width, sharp, score",
    "source = ": "syntax error|incomplete input",
    "image_id > 0": "images.image_id is prohibited",
    "1) UNION SELECT image_id FROM images WHERE (1": "prohibited",
    "1) UNION SELECT row + 1000 FROM images WHERE (1": "results that are no rows",
    "(SELECT max(text) FROM captions) = 'x'": "captions.text is prohibited",
    "(SELECT count(*) FROM sqlite_master) > 0": "not authorized",
    "1); DELETE FROM images; SELECT (1": "one statement|syntax error",
    "randomblob(1000000000) IS NULL": "not authorized to use function: randomblob",
    "replace(key, 'a', 'b') = 'b'": "not authorized to use function: replace",
    "load_extension('x')": "not authorized",
    "key = ?": "binding",
    "key = 'a\0'": "cannot be used as a filter",
    "1) UNION SELECT key FROM images WHERE (1": "it has results that are no rows|invalid literal",
    "1) UNION SELECT NULL FROM images WHERE (1": "cannot be used as a filter",
    "1) UNION SELECT -row FROM images WHERE (1": "it has results that are no rows",
    "1) UNION ALL SELECT i.row FROM images AS i, images AS j WHERE (1": "it has results that are no rows",
    "width > (WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r)": "prohibited|not authorized",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_filters_that_are_refused(whole: Path, expression: str) -> None:
    index = Index(whole)
    before = contents(whole)
    with pytest.raises(CoderError, match=REFUSED[expression]):
        index.records.where(expression)
    assert contents(whole) == before
    index.close()


def test_a_filter_ends_within_its_time(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coder_plugin.index.records.SECONDS", 0.2)
    index = Index(whole)
    many = ", ".join(f"images AS i{number}" for number in range(9))
    with pytest.raises(CoderError, match="it takes over 0.2 s"):
        index.records.where(f"(SELECT max(i0.width) FROM {many}) = 1")
    assert len(index.records.where("sharp")) == 25
    index.close()


# -- add and remove ---------------------------------------------------------------------------------------------------------


def test_images_are_added(made: Any, whole: Path, tmp_path: Path) -> None:
    """No file of before is changed, and the index is that of both together."""
    folder, vectors = copy_of(whole, tmp_path), made[1]
    new = embed(tmp_path / "new", units=2, seed=1, name="b", tokens=True)
    before = contents(folder)
    assert add(folder, tmp_path / "new", segment_size=SIZE) == (40, 38, 0)
    after = contents(folder)
    assert {name: after[name] for name in before} == before and {*after} - {*before} == {
        f"segments/00003/{name}"
        for name in ("images.faiss", "captions.faiss", "records.sqlite", "segment.json",
                     "rerank/image_tokens.npy", "rerank/text_tokens.npy")
    }  # fmt: skip
    index = Index(folder, verify=True, parameters="nprobe=4")
    assert (index.manifest["images"], index.manifest["captions"], index.records.row_of("b-1-3")) == (140, 133, 123)
    queries = np.random.default_rng(9).standard_normal((4, 8), dtype=np.float32)
    both = np.concatenate([vectors["images"], new["images"]])[:, 0]
    np.testing.assert_array_equal(index.search(queries, 20)[1], np.argsort(-(queries @ both.T), 1, kind="stable")[:, :20])
    assert index.records.where("key = 'b-0-2'", kind="captions").tolist() == [96, 97]
    index.close()
    with pytest.raises(CoderError, match=r"has 40 of these images already \(the first: 'b-0-0'\): --replace"):
        add(folder, tmp_path / "new")
    assert add(folder, tmp_path / "new", replace=True) == (40, 38, 40)
    index = Index(folder, verify=True)
    assert index.records.row_of("b-1-3") == 163 and len(index.removed["images"]) == 40
    assert (index.search(queries, 140, rows=np.arange(100, 140))[1]).size == 0
    index.close()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"fingerprint": "0" * 64}, r"was embedded with another model \(model 0\) than .*\(model f\)"),
        ({"what": "images"}, "has vectors of captions, and .* has none"),
        ({"views": 2}, "vectors of other sizes"),
        ({"columns": {"source": "string"}}, r"has other metadata columns \(source:string\) than .* --columns source:string w"),
        ({"tokens": False}, "has no tokens for it: embed the data with --tokens"),
    ],
)
def test_other_embeddings_are_refused(whole: Path, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    embed(tmp_path / "new", units=1, name="b", **{"tokens": True, **options})
    before = contents(whole)
    with pytest.raises(CoderError, match=text):
        add(whole, tmp_path / "new")
    assert contents(whole) == before


def test_images_are_removed(made: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, vectors = copy_of(whole, tmp_path), made[1]
    before = contents(folder)
    keys = [f"a-{unit}-{number}" for unit in range(5) for number in (0, 1, 5)]
    assert remove(folder, [*keys, "nobody", keys[0]]) == (15, ["nobody"])
    assert remove(folder, ["a-0-2", *keys]) == (1, keys)  # they are gone, and nothing else is
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert {*after} - {*before} >= {"removed-00002.npy", "removed-captions-00002.npy"}
    gone = np.sort([*(20 * unit + number for unit in range(5) for number in (0, 1, 5)), 2])
    left = np.setdiff1d(np.arange(100), gone)
    index = Index(folder, verify=True, parameters="nprobe=4")
    queries = np.concatenate([vectors["images"][gone, 0], np.ones((1, 8), np.float32)])
    scores, rows = index.search(queries, 100)
    assert rows.shape == (17, 84) and (np.sort(rows, 1) == left).all()
    texts = index.search(queries, 10, kind="captions")[1]
    captions = index.records.caption_rows(gone)
    assert len(captions) == 5 * 3 + 2 and not np.isin(texts, captions).any() and (texts >= 0).all()
    assert index.records.row_of("a-0-0") is None and index.records.row_of("a-0-3") == 3
    assert index.records.where("width >= 0").tolist() == left.tolist()
    monkeypatch.setattr(Records, "caption_rows", None)  # the index lists these of removed images
    assert not np.isin(index.records.where("1", kind="captions"), captions).any()
    looked_up: list[int] = []
    is_removed = Records.is_removed
    monkeypatch.setattr(Records, "is_removed", lambda self, rows: looked_up.append(len(rows)) or is_removed(self, rows))
    assert index.records.rows_of(["a-0-0", "a-0-3", "a-4-4"]) == {"a-0-3": [3], "a-4-4": [84]}
    assert looked_up == [3]  # all at once
    monkeypatch.undo()
    index.close()
    assert remove(folder, [f"a-{unit}-{number}" for unit in range(5) for number in range(20)]).images == 84
    index = Index(folder)
    assert index.search(queries, 5)[1].shape == (17, 0)
    index.close()


@pytest.mark.parametrize("change", ["add", "replace", "remove"])
def test_a_killed_change_leaves_the_old_index(whole: Path, tmp_path: Path, monkeypatch, change: str) -> None:
    """Before each rename; the same command then ends as one that was not killed."""
    embed(tmp_path / "new", units=2, seed=1, name="a" if change == "replace" else "b", tokens=True)

    def work(folder: Path) -> None:
        if change == "remove":
            remove(folder, ["a-0-0", "a-4-1"])
        else:
            add(folder, tmp_path / "new", replace=change == "replace", segment_size=ROWS)

    work(copy_of(whole, tmp_path))
    expected = contents(tmp_path / "copy")
    old = json.loads((whole / "manifest.json").read_text())
    for number in range(9):
        folder = Path(shutil.copytree(whole, tmp_path / str(number)))
        with monkeypatch.context() as patch:
            done = kill_at(patch, number)
            try:
                work(folder)
                break
            except Killed:
                pass
        index = Index(folder, verify=True)
        assert json.loads((folder / "manifest.json").read_text()) == old and len(index.search(np.ones((1, 8)), 5)[1]) == 1
        index.close()
        work(folder)
        assert contents(folder) == expected
    assert done[-1] == "manifest.json" and len(done) == {"add": 3, "replace": 5, "remove": 3}[change]


def test_segments_of_a_killed_change_are_removed(whole: Path, tmp_path: Path) -> None:
    """Those of an ``add`` that was killed, also if the next change writes fewer."""
    folder = copy_of(whole, tmp_path)
    shutil.copytree(folder / "segments" / "00002", folder / "segments" / "00007")
    remove(folder, ["a-0-0"])
    assert sorted(each.name for each in (folder / "segments").iterdir()) == ["00000", "00001", "00002"]
    assert Index(folder, verify=True).manifest["images"] == 5 * ROWS


def test_unreadable_samples_add_up(tmp_path: Path) -> None:
    for name, bad in (("a", [("image", "x"), ("caption", "y")]), ("b", [("image", "z")])):
        embed(tmp_path / name, units=1, name=name, bad=bad)
    build_from_embeddings(tmp_path / "index", tmp_path / "a")
    add(tmp_path / "index", tmp_path / "b")
    made = Index(tmp_path / "index").manifest
    assert (made["unreadable"], made["unreadable_kinds"]) == (3, {"image": 2, "caption": 1})
    assert made["unreadable_keys"] == ["x", "y", "z"]


def test_a_change_waits_for_no_other(whole: Path) -> None:
    from coder_plugin.index.lock import write_lock

    with write_lock(whole):
        for work in (lambda: remove(whole, ["a-0-0"]), lambda: add(whole, "nowhere")):
            with pytest.raises(CoderError, match="is being written by another process"):
                work()
    with pytest.raises(CoderError, match="is not an index"):
        remove(whole / "segments", ["a"])
    with pytest.raises(CoderError, match="no keys"):
        remove(whole, [])


def reseal(folder: Path, **fields: Any) -> None:
    content = manifest.content_of(json.loads((folder / "manifest.json").read_text()))
    for name in content["files"]:
        content["files"][name] = manifest.sums(folder, [folder / name])[name]
    manifest.write_manifest(folder, {**content, **fields})


@pytest.mark.parametrize(
    "array, text",
    [
        (np.array([1.5, 2]), "is not a list of 2 removed rows"),
        (np.array([1]), "is not a list of 2 removed rows"),
        (np.array([2, 1]), "rows that the index does not have, or not in order"),
        (np.array([1, 100]), "rows that the index does not have, or not in order"),
        (np.array([-1, 1]), "rows that the index does not have, or not in order"),
        (np.array([{}, {}]), "is not a list of removed rows"),
    ],
)
def test_hostile_lists_of_removed_rows(whole: Path, tmp_path: Path, array: np.ndarray, text: str) -> None:
    folder = copy_of(whole, tmp_path)
    remove(folder, ["a-0-0", "a-4-1"])
    np.save(folder / "removed-00001.npy", array, allow_pickle=True)
    reseal(folder)
    with pytest.raises(CoderError, match=f"removed-00001.npy {text}|removed-00001.npy lists {text}"):
        Index(folder)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"segments": []}, "its segments do not hold 100 images"),
        ({"segments": [{"name": "../00000", "images": 100, "captions": 95}]}, "its segments have other names"),
        ({"segments": [{"name": "00000", "images": 50, "captions": count} for count in (95, 0)]}, "or one twice"),
        ({"segments": [{"name": "00000", "images": True, "captions": 95}]}, "a segment is"),
        ({"segments": [{"name": "00000", "images": 100, "captions": 95}]}, "do not match the files of an index"),
        ({"columns": {"key'": "int64"}}, "its columns are"),
        ({"columns": {"a": "int64", "A": "int64"}}, "its columns are"),
        ({"columns": {"a": "blob"}}, "its columns are"),
        ({"columns": {"width": "int64"}}, "records.sqlite is not a file of an index's records"),
        ({"removed": {"number": 1}}, "removed is"),
        ({"removed": {"number": 1, "images": 101, "captions": 0}}, "removed is"),
        ({"removed": {"number": 1, "images": 1, "captions": 1}}, "lists removed-00001.npy, removed-captions-00001"),
    ],
)  # fmt: skip
def test_hostile_manifests_of_segments(whole: Path, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    folder = copy_of(whole, tmp_path)
    reseal(folder, **fields)
    with pytest.raises(CoderError, match=text):
        Index(folder)


def test_hostile_trained_files(whole: Path, tmp_path: Path) -> None:
    folder = copy_of(whole, tmp_path)
    embed(tmp_path / "new", units=1, name="b", tokens=True)
    euclidean = faiss.index_factory(8, "IVF4,Flat", faiss.METRIC_L2)
    euclidean.train(np.random.default_rng(0).standard_normal((200, 8), dtype=np.float32))
    faiss.write_index(euclidean, str(tmp_path / "euclidean"))
    for hostile in (folder / "segments/00000/images.faiss", tmp_path / "euclidean"):
        shutil.copy(hostile, folder / "trained-images.faiss")
        reseal(folder)
        with pytest.raises(CoderError, match="trained-images.faiss is not an empty, trained index of 8 dimensions"):
            add(folder, tmp_path / "new")
    assert Index(folder).manifest["images"] == 100


def test_the_commands(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index, new = str(tmp_path / "index"), str(tmp_path / "new")
    embed(tmp_path / "new", units=1, name="b", tokens=True)
    (tmp_path / "keys.txt").write_text("a-0-0\nnobody\n\na-1-1\n")
    assert main(["index", "--embeddings", str(made[0]), "--output", index, "--factory", "HNSW8", "--segment-size", "40"]) == 0
    assert "100 images, 95 captions; vectors of images: 100 of 8 dimensions" in capsys.readouterr().out
    assert main(["index", "add", index, new]) == 0
    assert "20 images and 19 captions added" in capsys.readouterr().out
    assert main(["index", "add", index, new]) == 2
    assert "--replace removes the old ones" in capsys.readouterr().err
    assert main(["index", "remove", index, "--key", "b-0-0", "--keys-file", str(tmp_path / "keys.txt")]) == 0
    assert "3 images removed; not in the index: 1 key, the first: 'nobody'" in capsys.readouterr().out
    assert Index(index).removed["images"].tolist() == [0, 21, 100]
    assert Index(index).size("images") == 117
