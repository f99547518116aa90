"""Hostile indexes: manifests, records, vectors, arrays and thumbnails whose checksums match; captions in terminal and page."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.files import sha256_file, sha256_json
from tests.reliability.hostile import Case, _honest, honest_run

SEARCH = ["search", "index", "--text", "a red circle", "-k", "3"]
VERIFIED = [*SEARCH, "--verify"]
BUILD = ["index", "export", "--data", "pictures", "--output", "index", "--workers", "0"]
BY_KEY = ["search", "index", "--key", "0.png", "--among", "images", "-k", "3"]
FIRST = "segments/00000"
FUSION = "dcl + ascl(similarity=fusion)"
COUNT = 6
#: What a terminal would act on, and what a page would run if it were not escaped.
CAPTION = (
    "\x1b[2J\x1b]0;title\x07 \x9b31m \u202ereversed \r\x08 <script>alert(1)</script> <img src=x onerror=alert(1)> \" ' {{7*7}}"
)


@functools.cache
def honest_index(loss: str = "dcl") -> Path:
    """An index of six built-in scenes with two captions each; copy it, do not change it."""
    from coder_plugin.cli import main
    from tests.index.made_pictures import write_pictures

    folder = _honest() / f"index-{len(list(_honest().iterdir()))}"
    folder.mkdir()
    write_pictures(folder, COUNT, name="{}.png")
    export = honest_run(loss) / "export" / "last"
    flags = ["--data", str(folder / "all.csv"), "--workers", "0", "--output", str(folder / "index")]
    assert main(["index", str(export), *flags]) == 0
    sql(f"UPDATE images SET key = substr(key, {len(str(folder)) + 2})")(folder / "index" / FIRST / "records.sqlite")
    reseal(folder / "index")
    return folder / "index"


def reseal(index: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Write an index's checksums anew, after a change of its manifest."""
    manifest = json.loads((index / "manifest.json").read_text())
    content = {key: value for key, value in manifest.items() if key not in ("format", "version", "manifest_sha256")}
    for name, sums in content["files"].items():
        if (index / name).is_file():
            sums.update(bytes=(index / name).stat().st_size, sha256=sha256_file(index / name))
    change(content)
    head = {"format": manifest["format"], "version": manifest["version"]}
    (index / "manifest.json").write_text(json.dumps({**head, **content, "manifest_sha256": sha256_json(content)}))


def _text_folder(folder: Path, canary: Path) -> None:
    """A manifest that names a configuration whose text encoder is a folder in the working directory."""
    from tests.conftest import TINY

    shutil.copytree(honest_index(), folder / "index")
    reseal(folder / "index", model(spec=None, options={"model": "x.json"}))
    text = {"hf_model_name": "text", "hf_tokenizer_name": "text", "context_length": 24}
    (folder / "x.json").write_text(json.dumps({**TINY, "text_cfg": text}))
    (folder / "text").mkdir()
    backbone = {"model_type": "timm_backbone", "backbone": "hf-hub:somebody/evil", "is_encoder_decoder": True}
    (folder / "text" / "config.json").write_text(json.dumps(backbone))


def manifest_case(name: str, change: Callable[[dict[str, Any]], object], says: str, **options: Any) -> Case:
    def write(folder: Path, canary: Path) -> None:
        shutil.copytree(honest_index(), folder / "index")
        reseal(folder / "index", change)

    return Case(name=f"index-manifest-{name}", write=write, **{"commands": [SEARCH], "says": [says], **options})


def file_case(name: str, file: str, change: Callable[[Path], object], says: str, loss: str = "dcl", **options: Any) -> Case:
    def write(folder: Path, canary: Path) -> None:
        shutil.copytree(honest_index(loss), folder / "index")
        change(folder / "index" / FIRST / file)
        reseal(folder / "index")

    return Case(name=f"index-{name}", write=write, **{"commands": [SEARCH], "says": [says] if says else [], **options})


def sql(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return change


def schema(old: str, new: str) -> Callable[[Path], None]:
    """Change the definition of a table as it is stored."""
    return sql(
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET sql = replace(sql, '{old}', '{new}')",
        "PRAGMA user_version = 1",
    )


def overwrite(at: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at : at + len(content)] = content
        path.write_bytes(data)

    return change


def replace_faiss(factory: str, *, metric: str = "METRIC_INNER_PRODUCT", count: int = COUNT, id_offset: int = 0) -> Any:
    """Another kind of index in the file, of as many dimensions."""

    def change(path: Path) -> None:
        import faiss

        dimensions = struct.unpack_from("<i", path.read_bytes(), 4)[0]
        index = faiss.index_factory(dimensions, factory, getattr(faiss, metric))
        vectors = np.random.default_rng(0).normal(size=(count, dimensions)).astype("float32")
        if not index.is_trained:
            index.train(np.repeat(vectors, 50, 0))
        if id_offset:
            index.add_with_ids(vectors, np.arange(count) + id_offset)
        else:
            index.add(vectors)
        faiss.write_index(index, str(path))

    return change


def as_factory(case: Case, factory: str) -> Case:
    """The same with a manifest that names another factory."""

    def write(folder: Path, canary: Path) -> None:
        case.write(folder, canary)
        reseal(folder / "index", lambda content: content.update(factory=factory))

    return Case(**{**vars(case), "name": f"{case.name}-{factory.partition(',')[0].lower()}", "write": write})


def on_disk(path: Path) -> None:
    """An inverted file whose lists lie in another file, named by an absolute path."""
    import faiss

    dimensions = struct.unpack_from("<i", path.read_bytes(), 4)[0]
    vectors = np.random.default_rng(0).normal(size=(COUNT, dimensions)).astype("float32")
    index = faiss.index_factory(dimensions, "IVF1,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.repeat(vectors, 50, 0))
    outside = path.parents[4] / "outside" / "lists"
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(outside))
    index.replace_invlists(lists, False)
    index.add(vectors)
    faiss.write_index(index, str(path))


def npy(header: str | None = None, array: np.ndarray | None = None, pickled: bool = False) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        if header is not None:
            text = header.encode() + b"\n"
            path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
        elif pickled:
            np.save(path, np.array([_Touch(path)] * COUNT, dtype=object), allow_pickle=True)
        else:
            np.save(path, np.asarray(array))

    return change


class _Touch:
    """Creates the canary when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.canary = path.parents[5] / "canary"

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def picture(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


def thumbnail(content: bytes) -> Callable[[Path], None]:
    return sql(f"UPDATE thumbnails SET file = x'{content.hex()}'")


def captions(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE captions SET text = ?", (CAPTION,))
    connection.execute("UPDATE images SET key = ? || key", (CAPTION,))
    connection.commit()
    connection.close()


def begun(content: str, folder: Path, canary: Path) -> None:
    """An export, a picture, and a folder with the note of a build that was begun."""
    from PIL import Image

    shutil.copytree(honest_run("dcl") / "export" / "last", folder / "export")
    (folder / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "pictures" / "0.png")
    (folder / "index").mkdir()
    (folder / "index" / "building.json").write_text(content)


def page_is_escaped(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page and "onerror=alert(1)>" not in page.replace("&gt;", "")
    assert "{{7*7}}" in page  # a template's syntax in a caption is text


def sized(kind: str, **sizes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["vectors"][kind].update(sizes)


def model(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].update(fields)


def without(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path
        for name in parents:
            content = content[name]
        content.pop(last, None)

    return change


LOOP = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS row, n AS key, n AS image_id FROM r"
CONTROLS = ["\x1b", "\x07", "\x9b", "\u202e", "\x08"]
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
UNSEALED = "was not written by coder-plugin index"

CASES = [
    # -- the manifest: types, names, sizes
    manifest_case("model-list", lambda content: content.update(model=[1]), UNSEALED),
    manifest_case("plan-text", lambda content: content.update(plan="x"), UNSEALED),
    manifest_case("no-rerank-in-plan", without("plan", "re-ranking"), UNSEALED),
    manifest_case("options-list", model(options=["model", "x"]), UNSEALED),
    manifest_case("spec-number", model(spec=3), UNSEALED),
    manifest_case("no-spec", without("model", "spec"), "its manifest names no model"),
    manifest_case("no-options", without("model", "options"), "", status=0),
    manifest_case("no-fingerprint", without("model", "fingerprint"), UNSEALED),
    manifest_case("fingerprint-list", model(fingerprint=["x"]), UNSEALED),
    manifest_case("other-fingerprint", model(fingerprint="0" * 64), "was made with another model"),
    manifest_case("spec-of-the-hub", model(spec="hf-hub:somebody/evil"), "would fetch 'hf-hub:somebody/evil'"),
    manifest_case("model-of-the-hub", model(spec=None, options={"model": "hf-hub:somebody/evil"}), "would fetch"),
    manifest_case(
        "weights-by-url", model(spec=None, options={"model": "RN50", "pretrained": "http://127.0.0.1:9/x"}), "would fetch"
    ),
    manifest_case(
        "other-option", model(options={"val_data": "pipe:touch canary"}), "'val_data', which does not describe a model"
    ),
    Case(
        name="index-manifest-text-folder",
        write=_text_folder,
        commands=[SEARCH],
        says=["timm_backbone"],
    ),
    manifest_case("unreadable-kinds", lambda content: content.update(unreadable_kinds={"image": "x"}), "of kind 'image' are"),
    manifest_case("images-negative", lambda content: content.update(images=-1), UNSEALED),
    manifest_case("images-true", lambda content: content.update(images=True), UNSEALED),
    manifest_case("images-huge", lambda content: content.update(images=2**62), UNSEALED),
    manifest_case("items-other", sized("images", items=5), UNSEALED),
    manifest_case("dimensions-zero", sized("images", dimensions=0), UNSEALED),
    manifest_case("dimensions-huge", sized("images", dimensions=2**31), UNSEALED),
    manifest_case("views-text", sized("images", views="1"), UNSEALED),
    manifest_case("views-many", sized("images", views=3), "vectors of"),
    manifest_case("path-outside", lambda content: content["files"].update({"../outside/precious.txt": {}}), "do not match"),
    manifest_case("no-checksum", lambda content: content["files"].update({f"{FIRST}/records.sqlite": None}), UNSEALED),
    manifest_case("bytes-text", lambda content: content["files"][f"{FIRST}/records.sqlite"].update(bytes="1"), UNSEALED),
    manifest_case(
        "deep", lambda content: content.update(x=functools.reduce(lambda inner, _: [inner], range(900), 0)), "", status=0
    ),
    manifest_case("rerank-without-arrays", lambda content: content["plan"].update({"re-ranking": True}), "lists no files for"),
    # -- the records: what SQLite would run, and what it stores in any column
    file_case(
        "records-recursive-view",
        "records.sqlite",
        sql("DROP TABLE images", f"CREATE VIEW images AS {LOOP}"),
        "views or indexes",
    ),
    file_case("records-view-more", "records.sqlite", sql(f"CREATE VIEW other AS {LOOP}"), "views or indexes"),
    file_case(
        "records-trigger",
        "records.sqlite",
        sql("CREATE TRIGGER t AFTER INSERT ON images BEGIN DELETE FROM captions; END"),
        "views or indexes",
    ),
    file_case("records-virtual", "records.sqlite", sql("CREATE VIRTUAL TABLE v USING fts5(x)"), "views or indexes"),
    file_case("records-generated", "records.sqlite", schema("text TEXT NOT NULL", "text AS (hex(zeroblob(9)))"), "records"),
    file_case("records-no-sql", "records.sqlite", schema("CREATE TABLE images (", "CREATE TABLE images ((("), "records"),
    file_case("records-empty", "records.sqlite", lambda path: path.write_bytes(b""), "views or indexes"),
    file_case("records-other-file", "records.sqlite", lambda path: path.write_bytes(SVG * 99), "records.sqlite is damaged"),
    file_case("records-cut", "records.sqlite", lambda path: os.truncate(path, 9000), f"{FIRST}/records.sqlite"),
    file_case("records-key-blob", "records.sqlite", sql("UPDATE images SET key = x'ff00'"), "holds a bytes, not a str"),
    file_case("records-id-text", "records.sqlite", sql("UPDATE images SET image_id = 'x'"), "holds a str, not a int"),
    file_case("records-caption-blob", "records.sqlite", sql("UPDATE captions SET text = x'ff'"), "holds a bytes, not a str"),
    file_case(
        "records-caption-not-utf8", "records.sqlite", sql("UPDATE captions SET text = CAST(x'ff' AS TEXT)"), "is damaged"
    ),
    file_case(
        "records-no-image",
        "records.sqlite",
        sql("DELETE FROM images WHERE row = 3"),
        "no row 3",
        commands=[[*SEARCH[:-1], "6"]],
    ),
    file_case(
        "records-no-last", "records.sqlite", sql("DELETE FROM images WHERE row = 5"), "does not hold the rows of 6 images"
    ),
    file_case("records-no-rows", "records.sqlite", sql("DELETE FROM images"), "does not hold the rows of 6 images"),
    file_case(
        "records-owner-far",
        "records.sqlite",
        sql("UPDATE captions SET image = 9223372036854775807"),
        "belongs to no image",
        commands=[["search", "index", "--text", "x", "--among", "captions"]],
    ),
    file_case(
        "records-thumbnail-text",
        "records.sqlite",
        sql("UPDATE thumbnails SET file = 'x'"),
        "holds a str, not a bytes",
        commands=[[*SEARCH, "--html", "page.html"]],
    ),
    file_case(
        "thumbnail-svg", "records.sqlite", thumbnail(SVG), "not a JPEG file", commands=[BY_KEY, [*SEARCH, "--html", "p"]]
    ),
    file_case("thumbnail-png", "records.sqlite", thumbnail(picture("PNG")), "not a JPEG file", commands=[BY_KEY]),
    file_case("thumbnail-eps", "records.sqlite", thumbnail(picture("EPS")), "not a JPEG file", commands=[BY_KEY]),
    file_case("thumbnail-cut", "records.sqlite", thumbnail(picture("JPEG")[:200]), "not a small JPEG file", commands=[BY_KEY]),
    file_case(
        "thumbnail-large", "records.sqlite", thumbnail(picture("JPEG", (9000, 9000))), "9000 x 9000 pixels", commands=[BY_KEY]
    ),
    # -- vectors
    file_case("vectors-cut", "images.faiss", lambda path: os.truncate(path, 60), "images.faiss has 60 bytes"),
    file_case("vectors-header-cut", "images.faiss", lambda path: os.truncate(path, 20), "ends in its header"),
    file_case("vectors-empty", "images.faiss", lambda path: path.write_bytes(b""), "is not a flat index"),
    file_case("vectors-many", "images.faiss", overwrite(8, struct.pack("<q", 2**40)), "expected 6 of"),
    file_case("vectors-negative", "images.faiss", overwrite(8, struct.pack("<q", -1)), "expected 6 of"),
    file_case("vectors-length", "images.faiss", overwrite(37, struct.pack("<Q", 2**61)), "expected 6 of"),
    file_case("vectors-metric", "images.faiss", overwrite(33, struct.pack("<i", 1)), "does not compare by inner products"),
    file_case("vectors-untrained", "images.faiss", overwrite(32, b"\0"), "was not written"),
    file_case("vectors-nan", "images.faiss", overwrite(45, struct.pack("<f", float("nan"))), "not finite", commands=[VERIFIED]),
    file_case("vectors-huge", "images.faiss", overwrite(45, struct.pack("<f", np.inf)), "not finite", commands=[VERIFIED]),
    file_case("vectors-other-kind", "images.faiss", replace_faiss("HNSW8"), "is not a flat index"),
    as_factory(
        file_case("vectors-distance", "images.faiss", replace_faiss("HNSW8", metric="METRIC_L2"), "inner products"), "HNSW8"
    ),
    as_factory(file_case("vectors-fewer", "images.faiss", replace_faiss("HNSW8", count=5), "holds 5 vectors"), "HNSW8"),
    as_factory(
        file_case("vectors-ids", "images.faiss", replace_faiss("IVF1,Flat", id_offset=2**40), "results that are no rows"),
        "IVF1,Flat",
    ),
    as_factory(file_case("vectors-elsewhere", "images.faiss", on_disk, "is not a FAISS index"), "IVF1,Flat"),
    as_factory(file_case("vectors-text", "images.faiss", lambda path: path.write_bytes(SVG), "is not a FAISS index"), "HNSW8"),
    # -- arrays of re-ranking
    file_case("array-pickle", "rerank/image_tokens.npy", npy(pickled=True), "is not an array for re-ranking", FUSION),
    file_case("array-header", "rerank/image_tokens.npy", npy("(" * 900), "is not an array for re-ranking", FUSION),
    file_case(
        "array-code",
        "rerank/image_tokens.npy",
        npy("{'descr': __import__('os').system('touch canary'), 'fortran_order': False, 'shape': (6,)}"),
        "is not an array for re-ranking",
        FUSION,
    ),
    file_case(
        "array-huge",
        "rerank/image_tokens.npy",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6, 1099511627776)}"),
        "is not an array for re-ranking",
        FUSION,
    ),
    file_case(
        "array-texts", "rerank/image_tokens.npy", npy(array=np.array(["x"] * COUNT)), "is not an array of numbers", FUSION
    ),
    file_case(
        "array-short", "rerank/image_tokens.npy", npy(array=np.zeros((5, 4), "f2")), "is not an array of numbers", FUSION
    ),
    file_case(
        "array-shape", "rerank/image_tokens.npy", npy(array=np.zeros((6, 1, 1), "f2")), "does not fit the index's model", FUSION
    ),
    file_case(
        "array-records", "rerank/image_tokens.npy", npy(array=np.zeros(6, "f4,i4")), "is not an array of numbers", FUSION
    ),
    # -- other commands
    Case(
        name="index-doctor-deep",
        write=lambda folder, canary: (folder / "manifest.json").write_text("[" * 100_000),
        commands=[["doctor", "."]],
        says=["is neither a run's folder"],
    ),
    Case(name="index-begun-list", write=partial(begun, "[1]"), commands=[BUILD], says=["was not written by"]),
    Case(name="index-begun-deep", write=partial(begun, "[" * 100_000), commands=[BUILD], says=["nested too deeply"]),
    Case(
        name="index-begun-no-plan",
        write=partial(begun, '{"format": "coder-plugin index", "version": 2}'),
        commands=[BUILD],
        says=["has no plan"],
    ),
    Case(
        name="index-begun-other-plan",
        write=partial(begun, '{"format": "coder-plugin index", "version": 2, "plan": {"model": ["\\u001b[2J"]}}'),
        commands=[BUILD],
        says=["was begun with other options"],
        hides=["\x1b"],
    ),
    # -- captions and keys where they are shown
    file_case("captions-in-a-terminal", "records.sqlite", captions, "\\u001b[2J", status=0, hides=CONTROLS),
    file_case(
        "captions-in-json", "records.sqlite", captions, "\\u009b31m", status=0, hides=CONTROLS, commands=[[*SEARCH, "--json"]]
    ),
    file_case(
        "captions-in-a-page",
        "records.sqlite",
        captions,
        "page.html",
        status=0,
        hides=CONTROLS,
        commands=[[*SEARCH, "--html", "page.html"]],
        check=page_is_escaped,
    ),
    file_case(
        "keys-in-errors",
        "records.sqlite",
        captions,
        "its keys look like",
        hides=CONTROLS,
        commands=[["search", "index", "--key", "x"]],
    ),
    manifest_case("names-in-errors", model(name=CAPTION, fingerprint="0" * 64), "\\u001b", hides=CONTROLS),
]
