"""Hostile data: tar files, pictures, arrays, tables. Bad samples are skipped and counted, whole files refused by name.

Every case is read as training reads it, to the last sample, and through a command where there is one.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.reliability.hostile import Case

GOOD = 3  # good samples beside a bad one


class Bomb:
    """A pickle that touches the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def picture(format: str = "PNG", size: tuple[int, int] = (4, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (9, 9, 9)).save(buffer, format)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes, **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def shard(folder: Path, *samples: dict[str, bytes], special: Callable[[tarfile.TarFile], object] | None = None) -> None:
    """``s.tar`` with good samples and ``samples``, each a content by field."""
    with tarfile.open(folder / "s.tar", "w") as tar:
        for number in range(GOOD):
            add(tar, f"good{number}.png", picture())
            add(tar, f"good{number}.txt", b"a dog")
        for number, sample in enumerate(samples):
            for field, data in sample.items():
                add(tar, f"bad{number}.{field}", data)
        if special is not None:
            special(tar)


def train(spec: str, **options: Any) -> None:
    """Read data as an epoch of training and as an evaluation do, and print the counts."""
    import torch

    from coder_plugin.data import open_source
    from coder_plugin.data.bad_samples import BadSamples
    from coder_plugin.data.loader import TrainLoader, evaluation_batches

    def transform(image: Any) -> Any:
        return torch.zeros(2)

    source = open_source(spec, **options)
    loader = TrainLoader(source, batch_size=1, transform=transform, tokenizer=lambda texts: torch.zeros(len(texts), 1))
    rows = sum(1 for _ in loader.epoch(0))
    bad = BadSamples(source.name)
    kept = sum(len(batch["keys"]) for batch in evaluation_batches(source, batch_size=2, transform=transform, bad=bad))
    print(f"trained on {rows}: {loader.bad}; evaluated on {kept}: {bad}")


def read_regions(spec: str) -> None:
    """Read every image of a file of regions, and print the counts."""
    from coder_plugin.data.bad_samples import BadSamples, describe
    from coder_plugin.data.regions import guess_format
    from coder_plugin.data.regions.base import entry_errors
    from coder_plugin.registry import load

    layout: Any = load("regions", guess_format(spec))
    bad, read = BadSamples(spec), 0
    for entry in layout.read(spec):
        try:
            with entry_errors(spec, entry.name):
                assert np.isfinite(entry.load().features).all()
            read += 1
            bad.add(1)
        except ValueError as error:
            bad.add(1, [describe(entry.name, error)])
    print(f"read {read}: {bad}")


def skipped(name: str, kind: str, write: Callable[[Path, Path], object], spec: str = "s.tar", good: int = GOOD) -> Case:
    """A case whose one bad sample is skipped and counted in training and evaluation."""
    counted = f"1 of {good + 1} samples skipped ({kind} 1)"
    says = [f"trained on {good}: {counted}; evaluated on {good}: {counted}", "skipped sample", f"({kind}): "]
    return Case(name=name, write=write, commands=[lambda: train(spec)], status=0, says=says)


def refused(name: str, write: Callable[[Path, Path], object], *says: str, spec: str = "s.tar") -> Case:
    return Case(name=name, write=write, commands=[lambda: train(spec)], says=says)


def of_regions(name: str, write: Callable[[Path, Path], object], spec: str, *says: str, status: int = 0) -> Case:
    return Case(name=name, write=write, commands=[lambda: read_regions(spec)], status=status, says=says)


# -- tar files


KINDS = (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE), ("dev", tarfile.CHRTYPE))


def _links(tar: tarfile.TarFile) -> None:
    for name, kind in KINDS:
        add(tar, f"{name}.png", b"", type=kind, linkname="/etc/passwd", devmajor=1, devminor=5)
        add(tar, f"{name}.txt", b"", type=kind, linkname="../../outside/precious.txt")


def _escaping(folder: Path, canary: Path) -> None:
    def special(tar: tarfile.TarFile) -> None:
        for stem in ("../../outside/new", f"{canary}/x", "/tmp/../etc/x"):
            add(tar, f"{stem}.png", picture())
            add(tar, f"{stem}.txt", b"a cat")

    shard(folder, special=special)


def _huge(folder: Path, size: int = 1 << 50) -> None:
    shard(folder)
    content = (folder / "s.tar").read_bytes().rstrip(b"\0")
    info = tarfile.TarInfo("huge.png")
    info.size = size
    header = info.tobuf(tarfile.GNU_FORMAT)
    blocks = len(content) + -len(content) % 512
    (folder / "s.tar").write_bytes(content.ljust(blocks, b"\0") + header + b"x" * 512 + bytes(1024))


def _negative_size(folder: Path, _: Path) -> None:
    """A header with a negative size, which makes some versions of tarfile read it for ever (CVE-2025-8194)."""
    shard(folder)
    content = (folder / "s.tar").read_bytes()
    with tarfile.open(folder / "s.tar") as tar:
        place = tar.getmembers()[4].offset
    header = bytearray(content[place : place + 512])
    header[124:136] = struct.pack(">B11s", 0xFF, (-1024).to_bytes(11, "big", signed=True))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (folder / "s.tar").write_bytes(content[:place] + bytes(header) + content[place + 512 :])


def _large_header(folder: Path, _: Path) -> None:
    """A PAX header of 3 MiB, which tarfile would read as a whole."""
    with tarfile.open(folder / "s.tar", "w") as tar:
        add(tar, "header", b"9 x=" + b"y" * (3 << 20), type=tarfile.XHDTYPE)
        add(tar, "a.png", picture())
        add(tar, "a.txt", b"a dog")


def _sparse(folder: Path, _: Path) -> None:
    """A sparse member of 1 TiB that takes no space: reading it would fill the memory."""

    def special(tar: tarfile.TarFile) -> None:
        headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 40)}
        headers |= {"GNU.sparse.name": "bad.png", "GNU.sparse.map": "0,0"}
        info = tarfile.TarInfo("bad.png")
        info.pax_headers = headers
        tar.addfile(info)
        add(tar, "bad.txt", b"a dog")

    with tarfile.open(folder / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(GOOD):
            add(tar, f"good{number}.png", picture())
            add(tar, f"good{number}.txt", b"a dog")
        special(tar)


def _compressed_bomb(opener: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, _: Path) -> None:
        """A member of 8 GiB zeros in a compressed shard; only its beginning is written."""
        info = tarfile.TarInfo("a.png")
        info.size = 8 << 30
        with opener(folder / "s.tar.gz", "wb") as file:
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            for _ in range(40):
                file.write(bytes(1 << 20))

    return write


TARS = [
    Case(
        name="tar-links-and-devices",
        write=lambda folder, _: shard(folder, special=_links),
        commands=[lambda: train("s.tar")],
        status=0,
        says=[f"trained on {GOOD}: 0 of {GOOD} samples skipped"],
        hides=["root:", "unchanged"],
    ),
    Case(
        name="tar-escaping-names",
        write=_escaping,
        commands=[lambda: train("s.tar")],
        status=0,
        says=["trained on 6: 0 of 6"],
    ),
    refused(
        "tar-truncated",
        lambda folder, _: (shard(folder), (p := folder / "s.tar").write_bytes(p.read_bytes()[:1700])),
        "s.tar",
    ),
    refused("tar-huge-declared-size", lambda folder, _: _huge(folder), "s.tar", "cannot be read"),
    refused("tar-negative-size", _negative_size, "s.tar", "size -1024"),
    refused("tar-large-header", _large_header, "s.tar", "a header of 3,1"),
    refused("tar-gzip-bomb", _compressed_bomb(gzip.open), "s.tar.gz", "decompression bomb", spec="s.tar.gz"),
    skipped("tar-sparse-bomb", "file", _sparse),
]

# -- texts of samples

TEXTS = [
    skipped(f"sample-{name}", kind, lambda folder, _, sample=sample: shard(folder, {"png": picture(), **sample}))
    for name, kind, sample in (
        ("json-deep", "caption", {"json": b'{"captions":' + b"[" * 100_000}),
        ("caption-half-a-character", "caption", {"json": b'{"captions": ["\\ud83d"]}'}),
        ("caption-of-one-long-word", "caption", {"txt": os.urandom(200_000).hex().encode()}),
        ("txt-huge", "file", {"txt": bytes(17 << 20)}),
    )
]

# -- pictures


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes = b"", *extra: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def eps(canary: Path) -> bytes:
    return f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch {canary}) (w) file\n%%EOF\n".encode()


GIF = (
    b"GIF89a"
    + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
    + b","
    + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
    + b"\2\0;"
)
PICTURES = [
    skipped(
        f"picture-{name}", kind, lambda folder, canary, make=make: shard(folder, {"jpg": make(canary), "txt": b"a dog"})
    )
    for name, kind, make in (
        ("eps", "picture", eps),
        ("169-megapixels", "picture", lambda _: png_of(13_000, 13_000, zlib.compress(bytes(13_001 * 1000)))),
        ("lying-size", "picture", lambda _: png_of(2**31 - 1, 2**31 - 1)),
        (
            "text-bomb",
            "picture",
            lambda _: png_of(4, 4, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20 << 20), 9))),
        ),
        ("pickle", "picture", lambda canary: b"\x80\x04cposix\nsystem\n(S'touch %s'\ntR." % str(canary).encode()),
        ("gif-huge-frame", "picture", lambda _: GIF),
    )
]


# -- tables


def table(folder: Path, *rows: str, name: str = "t.csv") -> None:
    (folder / "a.png").write_bytes(picture())
    (folder / "b.png").write_bytes(picture())
    (folder / name).write_text(
        "\n".join(["filepath\ttitle", "a.png\ta dog", "b.png\ta cat", *rows]), errors="surrogateescape"
    )


def _pipe(folder: Path, _: Path) -> None:
    table(folder, "pipe.png\ta dog")
    os.mkfifo(folder / "pipe.png")


TABLES = [
    skipped("csv-row-of-a-named-pipe", "file", _pipe, "t.csv", 2),
    skipped("csv-row-of-a-device", "file", lambda folder, _: table(folder, "/dev/zero\ta dog"), "t.csv", 2),
    Case(
        name="csv-row-of-another-file",
        write=lambda folder, _: table(folder, "/etc/passwd\ta dog"),
        commands=[lambda: train("t.csv")],
        status=0,
        says=["1 of 3 samples skipped (picture 1)"],
        hides=["root:"],
    ),
    skipped("csv-nul-in-a-path", "file", lambda folder, _: table(folder, "c\0.png\ta dog"), "t.csv", 2),
    skipped("csv-escapes-in-names", "missing", lambda folder, _: table(folder, "\x1b]0;x\x07.png\ta dog"), "t.csv", 2),
    skipped("csv-enormous-field", "caption", lambda folder, _: table(folder, f"c.png\t{'a' * 10_000_000}"), "t.csv", 2),
    refused(
        "json-deep",
        lambda folder, _: (folder / "k.json").write_text('{"images":' + "[" * 100_000),
        "k.json",
        "deep",
        spec="k.json",
    ),
]


# -- arrays of regions


def npy(array: np.ndarray, *, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=pickled)
    return buffer.getvalue()


def npy_header(shape: str, descr: str = "<f4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(len(text) + -(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz(level: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", level) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


ONES = npy(np.ones((2, 4), np.float32))


def npz_bomb() -> bytes:
    return npz(zipfile.ZIP_DEFLATED, features=npy_header("(17500, 4000)") + bytes(280 << 20))


def folder_of(data: bytes | Callable[[], bytes], ending: str = "npz") -> Callable[[Path, Path], None]:
    def write(folder: Path, _: Path) -> None:
        (folder / "r").mkdir()
        (folder / "r/good.npz").write_bytes(npz(features=ONES))
        (folder / f"r/bad.{ending}").write_bytes(data() if callable(data) else data)

    return write


def pickled(folder: Path, canary: Path) -> None:
    bomb = npy(np.array([Bomb(canary)], object), pickled=True)
    folder_of(npz(features=bomb))(folder, canary)


def pickled_npy(folder: Path, canary: Path) -> None:
    folder_of(npy(np.array([Bomb(canary)], object), pickled=True), "npy")(folder, canary)


def tsv(folder: Path, count: str = "2", boxes: np.ndarray | None = None) -> None:
    import base64

    boxes = np.ones((2, 4), np.float32) if boxes is None else boxes
    b64 = [base64.b64encode(array.tobytes()).decode() for array in (boxes, np.ones((2, 4), np.float32))]
    good = base64.b64encode(np.ones((2, 4), np.float32).tobytes()).decode()
    (folder / "r.tsv").write_text(f"good\t9\t9\t2\t{good}\t{good}\nbad\t9\t9\t{count}\t{b64[0]}\t{b64[1]}\n")


def hdf5(change: Callable[[Any, Path], object]) -> Callable[[Path, Path], None]:
    def write(folder: Path, _: Path) -> None:
        import h5py

        with h5py.File(folder / "r.hdf5", "w") as file:
            file["image_ids"] = [b"good", b"bad"]
            change(file, folder)

    return write


def _external(file: Any, folder: Path) -> None:
    (folder / "secret.bin").write_bytes(bytes(64))
    file.create_dataset("image_features", (2, 2, 4), "f4", external=[(str(folder / "secret.bin"), 0, 64)])


def _linked(file: Any, folder: Path) -> None:
    import h5py

    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = np.ones((2, 2, 4), np.float32)
    file["image_features"] = h5py.ExternalLink("other.h5", "x")


def _large(file: Any, _: Path) -> None:
    file.create_dataset("image_features", (2, 1 << 20, 1 << 20), "f4", chunks=(1, 64, 64))


def _large_positions(file: Any, _: Path) -> None:
    file["image_features"] = np.ones((2, 4), np.float32)
    file.create_dataset("pos_boxes", (1 << 40, 2), "i8", chunks=(1024, 2))


def lmdb_of(values: Callable[[Path], dict[bytes, bytes]]) -> Callable[[Path, Path], None]:
    def write(folder: Path, canary: Path) -> None:
        import lmdb

        with (
            lmdb.open(str(folder / "r.lmdb"), map_size=1 << 24) as environment,
            environment.begin(write=True) as transaction,
        ):
            for key, value in {b"a-good": npz(features=ONES), **values(canary)}.items():
                transaction.put(key, value)

    return write


def precomp(folder: Path, header: bytes) -> None:
    (folder / "p").mkdir()
    (folder / "p/train_ims.npy").write_bytes(header)
    (folder / "p/train_caps.txt").write_text("a dog\na cat\n")


ONE = ("read 1: 1 of 2 samples skipped (regions 1)",)
ARRAYS = [
    of_regions("npz-pickle", pickled, "r", *ONE),
    of_regions("npy-pickle", pickled_npy, "r", *ONE),
    of_regions("npz-huge-shape", folder_of(npz(features=npy_header("(1000000000, 4000)"))), "r", *ONE),
    of_regions("npz-deep-header", folder_of(npz(features=npy_header("(" * 5000))), "r", *ONE),
    of_regions("npz-bomb", folder_of(npz_bomb), "r", *ONE),
    of_regions("tsv-huge-count", lambda folder, _: tsv(folder, "1e300"), "r.tsv", *ONE),
    of_regions("hdf5-data-in-another-file", hdf5(_external), "r.hdf5", "another file", status=2),
    of_regions("hdf5-link-to-another-file", hdf5(_linked), "r.hdf5", "another file", status=2),
    of_regions("hdf5-huge-rows", hdf5(_large), "r.hdf5", "read 0: 2 of 2 samples skipped (regions 2)"),
    of_regions("hdf5-huge-positions", hdf5(_large_positions), "r.hdf5", "pos_boxes", status=2),
    of_regions(
        "lmdb-pickle",
        lmdb_of(lambda canary: {b"b": b"\x80\x04cposix\nsystem\n(S'touch %s'\ntR." % str(canary).encode()}),
        "r.lmdb",
        *ONE,
    ),
    of_regions("lmdb-msgpack-deep", lmdb_of(lambda _: {b"b": b"\x81\xa1x" + b"\x91" * 100_000}), "r.lmdb", *ONE),
    of_regions("lmdb-names-deep", lmdb_of(lambda _: {b"__keys__": b"[" * 100_000}), "r.lmdb", "__keys__", status=2),
    refused(
        "precomp-huge-shape",
        lambda folder, _: precomp(folder, npy_header("(100000000, 36, 2048)")),
        "truncated",
        spec="p",
    ),
    refused(
        "precomp-deep-header", lambda folder, _: precomp(folder, npy_header("(" * 5000)), "train_ims.npy", spec="p"
    ),
    refused(
        "precomp-pickle",
        lambda folder, canary: precomp(folder, npy(np.array([[[Bomb(canary)]]] * 2, object), pickled=True)),
        "train_ims.npy",
        spec="p",
    ),
]

CASES = [*TARS, *TEXTS, *PICTURES, *TABLES, *ARRAYS]
