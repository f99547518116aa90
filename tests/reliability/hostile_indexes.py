"""Hostile indexes: notes, Parquet files, vectors, arrays and thumbnails; captions in terminal and page."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.files import sha256_file
from tests.reliability.hostile import Case, _honest, honest_run

SEARCH = ["search", "index", "--text", "a red circle", "-k", "3"]
BUILD = ["index", "export", "--data", "pictures", "--output", "index", "--workers", "0"]
BY_KEY = ["search", "index", "--key", "0.png", "--among", "images", "-k", "3"]
FUSION = "dcl + ascl(similarity=fusion)"
COUNT = 6
PARQUET, IMAGES, TOKENS = "embeddings/00000000.parquet", "images-00001.faiss", "image_tokens_tokens-00001.npy"
#: What a terminal would act on, and what a page would run if it were not escaped.
CAPTION = (
    "\x1b[2J\x1b]0;title\x07 \x9b31m \u202ereversed \r\x08 <script>alert(1)</script> <img src=x onerror=alert(1)> \" ' {{7*7}}"
)


@functools.cache
def honest_index(loss: str = "dcl") -> Path:
    """An index of six built-in scenes with two captions each; copy it, do not change it."""
    from coder_plugin.cli import main
    from tests.search.made import write_pictures

    folder = _honest() / f"index-{len(list(_honest().iterdir()))}"
    folder.mkdir()
    write_pictures(folder, COUNT, name="{}.png")
    export = honest_run(loss) / "export" / "last"
    flags = ["--data", str(folder / "all.csv"), "--workers", "0", "--output", str(folder / "index")]
    assert main(["index", str(export), *flags]) == 0
    keys(lambda key: Path(key).name)(folder / "index" / PARQUET)
    reseal(folder / "index")
    return folder / "index"


def reseal(index: Path, change: Callable[[dict[str, Any]], object] = lambda note: None) -> None:
    """Write an index's sizes and checksums anew, after a change of its note."""
    note = json.loads((index / "index.json").read_text())
    for name in note["sizes"]:
        note["sizes"][name], note["checksums"][name] = (index / name).stat().st_size, sha256_file(index / name)
    for name in note["embeddings"]:
        note["embeddings"][name][0] = (index / name).stat().st_size
    change(note)
    (index / "index.json").write_text(json.dumps(note))


def rewrite(change: Callable[[Any], Any], **options: Any) -> Callable[[Path], None]:
    """Change the rows of a Parquet file."""

    def write(path: Path) -> None:
        import pyarrow.parquet as pq

        counts = pq.read_metadata(path).metadata[b"coder_plugin_counts"]
        table = pq.ParquetFile(path).read()
        metadata = {**table.schema.metadata, b"coder_plugin_counts": counts}
        table = change(table).replace_schema_metadata(metadata)
        pq.write_table(table, path, **{"compression": "none", "use_dictionary": False, "write_page_checksum": True, **options})

    return write


def column(name: str, values: Callable[[list[Any]], Any], kind: Any = None) -> Callable[[Path], None]:
    """Replace a column, with values of another type if ``kind`` is one."""

    def change(table: Any) -> Any:
        import pyarrow as pa

        place = table.schema.get_field_index(name)
        made = pa.array(values(table.column(name).to_pylist()), kind or table.schema.field(name).type)
        return table.set_column(place, name, made)

    return rewrite(change)


def keys(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Change the keys, and their ids with them."""

    def write(path: Path) -> None:
        from coder_plugin.data.item import stable_hash

        column("key", lambda values: [change(key) for key in values])(path)
        import pyarrow.parquet as pq

        names = pq.ParquetFile(path).read(["key"]).column(0).to_pylist()
        column("image_id", lambda _: [stable_hash(key) for key in names])(path)

    return write


def _text_folder(folder: Path, canary: Path) -> None:
    """A note that names a configuration whose text encoder is a folder in the working directory."""
    from tests.conftest import TINY

    shutil.copytree(honest_index(), folder / "index")
    reseal(folder / "index", model(spec=None, options={"model": "x.json"}))
    text = {"hf_model_name": "text", "hf_tokenizer_name": "text", "context_length": 24}
    (folder / "x.json").write_text(json.dumps({**TINY, "text_cfg": text}))
    (folder / "text").mkdir()
    backbone = {"model_type": "timm_backbone", "backbone": "hf-hub:somebody/evil", "is_encoder_decoder": True}
    (folder / "text" / "config.json").write_text(json.dumps(backbone))


def note_case(name: str, change: Callable[[dict[str, Any]], object], says: str, **options: Any) -> Case:
    def write(folder: Path, canary: Path) -> None:
        shutil.copytree(honest_index(), folder / "index")
        reseal(folder / "index", change)

    return Case(name=f"index-note-{name}", write=write, **{"commands": [SEARCH], "says": [says], **options})


def file_case(name: str, file: str, change: Callable[[Path], object], says: str, loss: str = "dcl", **options: Any) -> Case:
    def write(folder: Path, canary: Path) -> None:
        shutil.copytree(honest_index(loss), folder / "index")
        change(folder / "index" / file)
        reseal(folder / "index")

    return Case(name=f"index-{name}", write=write, **{"commands": [SEARCH], "says": [says] if says else [], **options})


def overwrite(at: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at : at + len(content)] = content
        path.write_bytes(data)

    return change


def replace_faiss(factory: str, *, id_offset: int) -> Any:
    """Another kind of index in the file, of as many dimensions, whose vectors have other ids."""

    def change(path: Path) -> None:
        import faiss

        dimensions = struct.unpack_from("<i", path.read_bytes(), 4)[0]
        index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
        vectors = np.random.default_rng(0).normal(size=(COUNT, dimensions)).astype("float32")
        index.train(np.repeat(vectors, 50, 0))
        index.add_with_ids(vectors, np.arange(COUNT) + id_offset)
        faiss.write_index(index, str(path))

    return change


def on_disk(path: Path) -> None:
    """An inverted file whose lists lie in another file, named by an absolute path."""
    import faiss

    dimensions = struct.unpack_from("<i", path.read_bytes(), 4)[0]
    vectors = np.random.default_rng(0).normal(size=(COUNT, dimensions)).astype("float32")
    index = faiss.index_factory(dimensions, "IVF1,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.repeat(vectors, 50, 0))
    outside = path.parents[2] / "outside" / "lists"
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(outside))
    index.replace_invlists(lists, False)
    index.add(vectors)
    faiss.write_index(index, str(path))


def npy(header: str | None = None) -> Callable[[Path], None]:
    """An array with this header, or a pickled one."""

    def change(path: Path) -> None:
        if header is not None:
            text = header.encode() + b"\n"
            path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
        else:
            np.save(path, np.array([_Touch(path)] * COUNT, dtype=object), allow_pickle=True)

    return change


class _Touch:
    """Creates the canary when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.canary = path.parents[2] / "canary"

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def picture(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


def thumbnail(content: bytes) -> Callable[[Path], None]:
    return column("thumbnail", lambda values: [content] * len(values))


def linked(path: Path) -> None:
    """The file is moved out of the folder, and a link left in its place."""
    outside = next(each for each in path.parents if each.name == "case").parent / "outside" / path.name
    shutil.move(path, outside)
    path.symlink_to(outside)


def swapped(other: str) -> Callable[[Path], None]:
    """The file and another one of the index in each other's place."""

    def change(path: Path) -> None:
        second = path.parent / other
        first, content = path.read_bytes(), second.read_bytes()
        path.write_bytes(content)
        second.write_bytes(first)

    return change


def captions(path: Path) -> None:
    column("captions", lambda values: [[CAPTION] * len(each) for each in values])(path)
    keys(lambda key: CAPTION + key)(path)


def begun(content: str, folder: Path, canary: Path) -> None:
    """An export, a picture, and a folder with what looks like a build that was begun."""
    from PIL import Image

    shutil.copytree(honest_run("dcl") / "export" / "last", folder / "export")
    (folder / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "pictures" / "0.png")
    (folder / "index").mkdir()
    (folder / "index" / "index.json").write_text(content)


def page_is_escaped(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page and "onerror=alert(1)>" not in page.replace("&gt;", "")
    assert "{{7*7}}" in page  # a template's syntax in a caption is text


def model(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].update(fields)


CONTROLS = ["\x1b", "\x07", "\x9b", "\u202e", "\x08"]
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
DAMAGED = "index.json is damaged"
BAD_ARRAY = "npy is damaged"

CASES = [
    # -- the note: types, names, sizes
    note_case("other-fingerprint", model(fingerprint="0" * 64), "was made with another model"),
    note_case("spec-of-the-hub", model(spec="hf-hub:somebody/evil"), "would fetch 'hf-hub:somebody/evil'"),
    note_case("model-of-the-hub", model(spec=None, options={"model": "hf-hub:somebody/evil"}), "would fetch"),
    note_case(
        "weights-by-url", model(spec=None, options={"model": "RN50", "pretrained": "http://127.0.0.1:9/x"}), "would fetch"
    ),
    note_case("other-option", model(options={"val_data": "pipe:touch canary"}), "'val_data', which does not describe a model"),
    Case(name="index-note-text-folder", write=_text_folder, commands=[SEARCH], says=["backbone names code or another model"]),
    note_case("images-huge", lambda note: note.update(images=2**62), DAMAGED),
    *(
        note_case(f"{name}-outside", change, says)
        for name, change, says in (
            ("sizes", lambda note: note["sizes"].update({"../../outside/precious.txt": 9}), "../../outside/precious.txt"),
            ("embeddings", lambda note: note.update(embeddings={"../../outside/precious.txt": [9, 6]}), "../../outside"),
            ("absolute", lambda note: note.update(embeddings={"/etc/passwd": [1, 1]}), "/etc/passwd"),
            ("checksums", lambda note: note["checksums"].update({"embeddings/../x.faiss": "0" * 64}), "embeddings/../x.faiss"),
            ("tokens", lambda note: note.update(tokens=["../../outside/x"]), DAMAGED),
        )
    ),
    *(
        note_case(f"{name}-other", lambda note, name=name, value=value: note.update({name: value}), says)
        for name, value, says in (
            ("images", 10**9, DAMAGED), ("captions", 9, "starts-00001.npy is damaged"), ("build", "x", DAMAGED),
            ("vectors", {"sounds": {"dimensions": 8, "views": 1}}, DAMAGED), ("columns", {"source": "blob"}, DAMAGED),
            ("sizes", {}, DAMAGED), ("all_vectors", 3, DAMAGED), ("tokens", [1], DAMAGED),
            ("format", "2", "has another format"),
        )
    ),
    file_case("link-rows", PARQUET, linked, "is a link to another folder"),
    file_case("link-vectors", IMAGES, linked, "is a link to another folder"),
    file_case("swapped-vectors", IMAGES, swapped("captions-00001.faiss"), "vectors of"),
    file_case("swapped-rows-and-vectors", IMAGES, swapped(PARQUET), "00001.faiss is not a FAISS index"),
    note_case("deep", lambda note: note.update(x=functools.reduce(lambda inner, _: [inner], range(900), 0)), "", status=0),
    note_case("names-in-errors", model(name=CAPTION, fingerprint="0" * 64), "\\u001b", hides=CONTROLS),
    # -- Parquet
    file_case("rows-other-file", PARQUET, lambda path: path.write_bytes(SVG * 99), "00000000.parquet is damaged"),
    file_case("rows-compressed", PARQUET, rewrite(lambda table: table, compression="zstd"), "it is compressed"),
    file_case(
        "rows-no-captions", PARQUET, column("captions", lambda values: [[]] * len(values)), "has fewer captions than its index",
        commands=[["search", "index", "--text", "x", "--among", "captions"]],
    ),
    file_case("thumbnail-svg", PARQUET, thumbnail(SVG), "not a JPEG file", commands=[BY_KEY, [*SEARCH, "--html", "p"]]),
    file_case("thumbnail-eps", PARQUET, thumbnail(picture("EPS")), "not a JPEG file", commands=[BY_KEY]),
    file_case("thumbnail-large", PARQUET, thumbnail(picture("JPEG", (9000, 9000))), "9000 x 9000 pixels", commands=[BY_KEY]),
    # -- vectors
    file_case("vectors-cut", IMAGES, lambda path: os.truncate(path, 60), "is damaged"),
    file_case("vectors-many", IMAGES, overwrite(8, struct.pack("<q", 2**40)), IMAGES),
    file_case("vectors-untrained", IMAGES, overwrite(32, b"\0"), "is not trained"),
    file_case("vectors-ids", IMAGES, replace_faiss("IVF1,Flat", id_offset=2**40), "vectors that it does not have"),
    file_case("vectors-elsewhere", IMAGES, on_disk, IMAGES),
    file_case("vectors-text", IMAGES, lambda path: path.write_bytes(SVG), "is not a FAISS index"),
    # -- arrays of re-ranking
    file_case("array-pickle", TOKENS, npy(), BAD_ARRAY, FUSION),
    file_case(
        "array-code",
        TOKENS,
        npy("{'descr': __import__('os').system('touch canary'), 'fortran_order': False, 'shape': (6,)}"),
        BAD_ARRAY,
        FUSION,
    ),
    file_case(
        "array-huge", TOKENS, npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6, 1099511627776)}"), BAD_ARRAY, FUSION
    ),
    # -- other commands
    Case(
        name="index-doctor-deep",
        write=lambda folder, canary: (folder / "manifest.json").write_text("[" * 100_000),
        commands=[["doctor", "."]],
        says=["is neither a run's folder"],
    ),
    Case(name="index-begun-deep", write=partial(begun, "[" * 100_000), commands=[BUILD], says=["nested too deeply"]),
    # -- captions and keys where they are shown
    file_case("captions-in-a-terminal", PARQUET, captions, "\\u001b[2J", status=0, hides=CONTROLS),
    file_case("captions-in-json", PARQUET, captions, "\\u009b31m", status=0, hides=CONTROLS, commands=[[*SEARCH, "--json"]]),
    file_case(
        "captions-in-a-page",
        PARQUET,
        captions,
        "page.html",
        status=0,
        hides=CONTROLS,
        commands=[[*SEARCH, "--html", "page.html"]],
        check=page_is_escaped,
    ),
    file_case(
        "keys-in-errors", PARQUET, captions, "its keys look like", hides=CONTROLS, commands=[["search", "index", "--key", "x"]]
    ),
]
