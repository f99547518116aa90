"""An index: built from embeddings or data, changed, built again; stopped, locked, damaged, of somebody else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.search import build as building
from coder_plugin.search.build import add, build_index, remove, write_lock
from coder_plugin.search.embed import EmbedJob, embedded
from coder_plugin.search.index import Index
from tests import gloo
from tests.search.made import embed, write_model, write_pictures


def rows_of(index: Index) -> list[tuple[Any, ...]]:
    """All that an index says of its images, with their vectors and those of their captions."""
    records = index.records
    found = []
    for image in records.images(range(index.size("images"))):
        vectors = [index.vectors["images"].gather([image.row])[0].tolist()]
        if "captions" in index.vectors:
            vectors.append(index.vectors["captions"].gather(records.caption_rows(image.row))[:, 0].tolist())
        read = (records.captions_of, records.metadata, records.thumbnail)
        found.append((image[1:], *(each(image.row) for each in read), vectors))
    return found


def by_key(index: Index) -> dict[str, Any]:
    return {each[0][0]: each for each in rows_of(index)}


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF4,Flat"])
def test_an_index_holds_what_the_embeddings_do(factory: str, tmp_path: Path) -> None:
    vectors = embed(tmp_path / "e", tokens=True)
    build_index(tmp_path / "index", tmp_path / "e", factory=factory)
    index = Index(tmp_path / "index", verify=True, parameters="nprobe=4" if factory[0] == "I" else None)
    assert (index.size("images"), index.size("captions"), index.note["factory"]) == (60, 57, factory)
    for kind, expected in vectors.items():
        np.testing.assert_array_equal(index.vectors[kind].gather(np.arange(len(expected))), expected.reshape(-1, 1, 8))
        scores = expected.reshape(-1, 8)[:3] @ expected.reshape(-1, 8).T
        np.testing.assert_array_equal(index.search(expected.reshape(-1, 8)[:3], 1, kind=kind)[1][:, 0], scores.argmax(1))
    records = index.records
    [image] = records.images([45])
    assert image == (45, "a-2-5", image.image_id, "/pictures/a-2-5.jpg", None)
    assert records.captions_of(45) == ("caption 0 of a-2-5", "caption 1 of a-2-5")
    assert records.metadata(45) == {"source": "coco", "width": 500, "sharp": False, "score": 5 / 7}
    assert [each.text for each in records.captions(records.caption_rows(45))] == list(records.captions_of(45))
    assert records.row_of("a-1-0") == 20 and records.row_of("nobody") is None
    assert records.values("source", 5) == ["coco"] and records.values("width", 5) is None
    assert records.thumbnail(41) == b"\xff\xd8\xffa-2-1" and records.thumbnail(40) is None
    np.testing.assert_array_equal(index.vector(45), vectors["images"][45])
    np.testing.assert_array_equal(index.caption_vectors(45), vectors["captions"][list(records.caption_rows(45))])
    items = index.items("images", np.array([0, 59]))
    assert items["t"].shape == (2, 4, 3) and (items["t"][0, 2:] == 0).all()  # padded to the longest
    assert index.items("captions", np.array([0]))["t"].shape == (1, 2, 3)


def test_embeddings_are_linked_and_another_factory_builds_again(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    first = build_index(tmp_path / "index", tmp_path / "e", rerank=False)
    assert (tmp_path / "index" / "embeddings" / "00000000.parquet").samefile(tmp_path / "e" / "00000000.parquet")
    assert build_index(tmp_path / "index", tmp_path / "e", rerank=False) == first  # nothing to do
    with pytest.raises(CoderError, match="IVF4096,Flat of 60 vectors"):
        build_index(tmp_path / "index", tmp_path / "e", factory="IVF4096,Flat")
    assert Index(tmp_path / "index").note == first
    build_index(tmp_path / "index", tmp_path / "e", factory="HNSW16", what="images")
    assert [*Index(tmp_path / "index").vectors] == ["images"]
    names = sorted(path.name for path in (tmp_path / "index").iterdir())
    assert names == [".lock", "embeddings", "images-00002.faiss", "index.json", "starts-00002.npy"]
    embed(tmp_path / "other", seed=3)
    with pytest.raises(CoderError, match="is an index of other data or options .seed was 0, is 3.: choose another folder"):
        build_index(tmp_path / "index", tmp_path / "other")


def test_add_replace_and_remove(tmp_path: Path) -> None:
    """The rest stays as it was; removed rows are in no file."""
    embed(tmp_path / "e")
    embed(tmp_path / "new", units=2, seed=1, name="b")
    embed(tmp_path / "same", units=1, seed=2, rows=3)  # a-0-0 to a-0-2
    index = tmp_path / "index"
    build_index(index, tmp_path / "e", factory="IVF4,Flat")
    before = by_key(Index(index))
    assert add(index, tmp_path / "new") == (40, 38, 0)
    both = by_key(Index(index))
    assert both == {**before, **{key: both[key] for key in both if key[0] == "b"}} and len(both) == 100
    with pytest.raises(CoderError, match="has 40 of these images already .the first: 'b-0-0'.: --replace"):
        add(index, tmp_path / "new")
    assert add(index, tmp_path / "same", replace=True) == (3, 3, 3)
    changed = by_key(Index(index, verify=True))
    assert len(changed) == 100 and {key for key in changed if changed[key] != both[key]} == {"a-0-0", "a-0-1", "a-0-2"}
    assert remove(index, ["a-1-5", "b-0-3", "nobody", "a-1-5"]) == (2, ["nobody"])
    left = by_key(Index(index, verify=True))
    assert left == {key: each for key, each in changed.items() if key not in ("a-1-5", "b-0-3")}
    assert all(b"a-1-5" not in path.read_bytes() for path in index.rglob("*") if path.is_file())
    assert b"a-1-5" in (tmp_path / "e" / "00000001.parquet").read_bytes()  # the embeddings themselves are as they were
    assert remove(index, ["nobody"]) == (0, ["nobody"])
    assert remove(index, [f"b-1-{number}" for number in range(20)]).images == 20  # a whole file
    assert remove(index, [f"b-0-{number}" for number in range(20)]).images == 19
    with pytest.raises(CoderError, match="has no other images: delete the folder"):
        remove(index, by_key(Index(index)))


def test_only_embeddings_of_the_same_form_are_added(tmp_path: Path) -> None:
    embed(tmp_path / "e", tokens=True)
    build_index(tmp_path / "index", tmp_path / "e")
    for options, text in (
        ({"fingerprint": "e" * 64}, "was embedded with another model .model e. than"),
        ({"what": "images"}, "has other vectors"),
        ({"columns": {"source": "string"}}, "has other metadata columns .source:string. than .* --columns source:string width"),
        ({}, "has other tokens for re-ranking than .*: embed the data with --tokens"),
    ):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        embed(tmp_path / "new", name="b", **{"tokens": bool(options), **options})  # type: ignore[arg-type]
        with pytest.raises(CoderError, match=text):
            add(tmp_path / "index", tmp_path / "new")
    assert len(Index(tmp_path / "index", verify=True).table) == 60


def test_what_is_added_is_encoded_by_a_named_open_clip_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, index = write_model(tmp_path / "export", "clip") / "open_clip_model.safetensors", str(tmp_path / "index")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write_pictures(tmp_path / name, 2, name=name + "-{:03d}.png")
        (tmp_path / name / "all.csv").unlink()
    model = ["--model", "coder-tiny", "--pretrained", str(weights)]
    assert main(["index", *model, "--data", str(tmp_path / "old"), "--output", index, "--workers", "0"]) == 0
    for named in ([], model[:2], model):
        command = ["index", "add", index, "--data", str(tmp_path / "new"), "--workers", "0", "--replace", *named]
        assert main(command) == 0, capsys.readouterr().err
        assert "2 images and 0 captions added" in capsys.readouterr().out


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Embed and build; add what is new, embedded by the index's model; remove; search for what is gone."""
    model, index = write_model(tmp_path / "export", "clip"), str(tmp_path / "index")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    write_pictures(tmp_path / "old", 6)
    (tmp_path / "old" / "all.csv").unlink()
    write_pictures(tmp_path / "new", 8, name="new-{:03d}.png")
    (tmp_path / "new" / "all.csv").unlink()
    (tmp_path / "new" / "new-000.png").rename(tmp_path / "new" / "000.png")
    assert main(["index", str(model), "--data", str(tmp_path / "old"), "--output", index, "--workers", "0"]) == 0
    printed = capsys.readouterr().out
    assert "6 images, 0 captions; vectors of images: 6 of 128 dimensions" in printed
    assert printed.splitlines()[-1] == f"next: coder-plugin search {index} --text 'a dog'"
    same = ["--data", f"{tmp_path / 'new'}/../old/", "--output", index, "--workers", "0"]  # the same folder by another name
    assert main(["index", str(model), *same]) == 0
    moved = ["--model", str(model.rename(tmp_path / "moved"))]
    flags = ["--data", str(tmp_path / "new"), "--workers", "0"]
    assert main(["index", "add", index, *flags]) == 2
    assert "neither an export nor a run" in capsys.readouterr().err
    flags += moved
    assert main(["index", "add", index, *flags]) == 2
    assert "has 1 of these images already (the first: '000.png'): --replace" in capsys.readouterr().err
    assert not (tmp_path / "index" / "adding").exists()  # nothing was encoded for it
    assert main(["index", "add", index, *flags, "--replace"]) == 0
    assert "8 images and 0 captions added; 1 of the same keys were removed" in capsys.readouterr().out
    assert not (tmp_path / "index" / "adding").exists() and len(Index(index).table) == 13
    (tmp_path / "moved").rename(model)
    (tmp_path / "keys.txt").write_text("001.png\nnobody\n")
    assert main(["index", "remove", index, "--key", "002.png", "--keys-file", str(tmp_path / "keys.txt")]) == 0
    assert "2 images removed; not in the index: 1 key, the first: 'nobody'" in capsys.readouterr().out
    assert main(["search", index, "--key", "001.png"]) == 2
    assert "has no image '001.png'; its keys look like '003.png', '004.png'" in capsys.readouterr().err
    for command, text in (
        (["index", "add", index], "say what to add: a folder of coder-plugin embed, or --data"),
        (["index", "remove", index], "no images to remove: give --key or --keys-file"),
        (["index", str(model), "--data", str(tmp_path / "new"), "--output", index], "is an index of other data or options"),
        (["index", "--embeddings", str(tmp_path / "new"), "--output", str(tmp_path / "i")], "holds no embeddings"),
    ):
        assert main(command) == 2
        assert text in capsys.readouterr().err


def test_a_change_that_fails_leaves_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens while a new one is built, too."""
    embed(tmp_path / "e")
    embed(tmp_path / "new", seed=1, name="b")
    index = tmp_path / "index"
    build_index(index, tmp_path / "e")
    before = rows_of(Index(index))
    real, opened = building.build, []

    def failing(*args: Any) -> int:
        opened.append(rows_of(Index(index, verify=True)) == before)
        if len(opened) == 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(building, "build", failing)
        add(index, tmp_path / "new")
    assert opened == [True, True] and rows_of(Index(index, verify=True)) == before
    add(index, tmp_path / "new")
    clean = tmp_path / "clean"
    build_index(clean, tmp_path / "e")
    add(clean, tmp_path / "new")
    assert rows_of(Index(index)) == rows_of(Index(clean)) and len(list(index.glob("*.faiss"))) == 2


def test_a_reader_opens_the_new_index_if_files_are_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed(tmp_path / "e")
    index = tmp_path / "index"
    build_index(index, tmp_path / "e")
    real = Index._open

    def replaced(self: Index, *args: Any) -> None:
        monkeypatch.setattr(Index, "_open", real)
        remove(index, ["a-0-0"])
        real(self, *args)

    monkeypatch.setattr(Index, "_open", replaced)
    assert Index(index).size("images") == 59


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    build_index(tmp_path / "index", tmp_path / "e")
    with write_lock(tmp_path / "index"):
        for change in (lambda: remove(tmp_path / "index", ["a-0-0"]), lambda: build_index(tmp_path / "index", tmp_path / "e")):
            with pytest.raises(CoderError, match="is being written by another process: wait for it"):
                change()
        assert Index(tmp_path / "index").size("images") == 60


@pytest.mark.parametrize("factory", ["Flt", "HNSW32,IDMap"])
def test_a_factory_is_checked_before_the_model_is_opened(tmp_path: Path, factory: str) -> None:
    job = EmbedJob(model=str(tmp_path / "no model"), data=str(tmp_path / "no data"), output=str(tmp_path / "i" / "embeddings"))
    with pytest.raises(CoderError, match=f"{factory}.*take|knows no index factory {factory!r}; use Flat"):
        build_index(tmp_path / "i", job, factory=factory)
    assert not (tmp_path / "i").exists()
    with pytest.raises(CoderError, match="no data: no such file"):  # whether PQ7 fits depends on the model
        build_index(tmp_path / "i", job, factory="PQ7")


def test_foreign_and_unfinished_folders(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(CoderError, match=r"holds no index and is not empty \(a.txt\)"):
        build_index(tmp_path / "notes", tmp_path / "e")
    assert (tmp_path / "notes" / "a.txt").read_text() == "x"
    with pytest.raises(CoderError, match="notes is not an index: it has no index.json"):
        Index(tmp_path / "notes")
    with pytest.raises(CoderError, match="with fewer lists, HNSW32 or Flat"):
        build_index(tmp_path / "begun", tmp_path / "e", factory="IVF4096,Flat")
    with pytest.raises(CoderError, match="holds no index yet: its command was stopped, run it again"):
        Index(tmp_path / "begun")
    embed(tmp_path / "other", seed=4)
    with pytest.raises(CoderError, match="was begun with other options .seed was 0, is 4"):
        build_index(tmp_path / "begun", tmp_path / "other")
    assert build_index(tmp_path / "begun", tmp_path / "e")["images"] == 60
    (tmp_path / "e" / "00000001.parquet").unlink()
    with pytest.raises(CoderError, match="is not finished: 1 of 3 files are missing"):
        build_index(tmp_path / "index", tmp_path / "e")
    with pytest.raises(CoderError, match="what must be both, images or captions"):
        build_index(tmp_path / "index", tmp_path / "e", what="all")


def test_damaged_and_torn_files_are_named(tmp_path: Path) -> None:
    embed(tmp_path / "e", tokens=True)
    build_index(tmp_path / "whole", tmp_path / "e")
    files = [path for path in (tmp_path / "whole").rglob("*") if path.suffix]
    for name in [path.relative_to(tmp_path / "whole") for path in files]:
        for change in ("cut", "gone", "bit"):
            shutil.rmtree(tmp_path / "index", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "index")
            path = tmp_path / "index" / name
            content = bytearray(path.read_bytes())
            if change == "gone":
                path.unlink()
            elif change == "cut":
                path.write_bytes(content[:-5])
            else:
                content[len(content) // 2] ^= 4
                path.write_bytes(content)
            unfinished = name.name == "index.json" and change == "gone"
            with pytest.raises(CoderError, match="holds no index yet" if unfinished else name.name):
                Index(tmp_path / "index", verify=True)


def build_on_a_rank(model: str, folder: str) -> int:
    job = EmbedJob(model=model, data="scenes", output=f"{folder}/embeddings", options={"workers": 0}, rows_per_file=20)
    return build_index(folder, job)["images"]


@pytest.mark.slow
def test_ranks_share_the_work(tmp_path: Path) -> None:
    """Two ranks encode; the index is that of one."""
    model = str(write_model(tmp_path / "export", "clip"))
    assert gloo.run(build_on_a_rank, model, str(tmp_path / "two")) == [100, 100]
    build_on_a_rank(model, str(tmp_path / "one"))
    two, one = (rows_of(Index(tmp_path / name)) for name in ("two", "one"))
    assert [each[:4] for each in two] == [each[:4] for each in one]
    for mine, other in zip(two, one, strict=True):
        np.testing.assert_allclose(mine[4][0], other[4][0], atol=1e-6)
    assert len(embedded(tmp_path / "two" / "embeddings").paths) == 5


def test_the_next_command_looks_for_what_the_pictures_show() -> None:
    from coder_plugin.cli.index import search_words

    assert search_words("i", on_scenes=True) == ["search", "i", "--text", "a large pink striped cross on a beige background"]
    assert search_words("i", on_scenes=False) == ["search", "i", "--text", "a dog"]
