"""WebDataset shards: what they give and to whom, and that damage is an error rather than an early end."""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.shard_lists import expand
from coder_plugin.data.shards import LocalShards, open_shards
from coder_plugin.data.tar_index import scan
from coder_plugin.data.units import Slices
from coder_plugin.errors import CoderError


def png(number: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, fields in samples:
            for extension, content in fields.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return str(path)


def sample(number: int, **fields: bytes) -> tuple[str, dict[str, bytes]]:
    return f"{number:04d}", {"png": png(number), "txt": f"caption {number}".encode(), **fields}


def write_set(folder: Path, sizes: tuple[int, ...] = (9, 7, 12, 5, 10), *, captions: int = 0) -> LocalShards:
    first = 0
    for shard, size in enumerate(sizes):
        rows = []
        for number in range(first, first + size):
            listed = {"captions": [f"{number} {k}" for k in range(captions)], "image_id": number}
            rows.append(sample(number, **({"json": json.dumps(listed).encode()} if captions else {})))
        first += size
        write_tar(folder / f"s{shard}.tar", rows)
    return open_shards(str(folder / "s*.tar"))


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# fields and keys


def test_fields_keys_and_captions(tmp_path):
    rows = [
        ("a", {"jpg": png(1), "txt": b" one\n"}),
        ("b", {"webp": png(2), "txt": b"replaced", "json": b'{"captions": ["two", "three"], "image_id": 17}'}),
        ("c", {"jpeg": png(3), "txt": "vier \u00fc".encode(), "json": b'{"image_id": "x/y", "width": 3}'}),
        ("d", {"PNG": png(4), "txt": b"five", "json": b'{"captions": null}', "npy": b"ignored"}),
    ]
    data = open_shards(write_tar(tmp_path / "many.tar", rows))
    found = [(item.key, item.captions, item.load().getpixel((0, 0))[0]) for _, item in data.items()]
    assert found == [
        ("many/a", ("one",), 1),
        ("17", ("two", "three"), 2),
        ("x/y", ("vier \u00fc",), 3),
        ("many/d", ("five",), 4),
    ]
    assert data.num_images == 4
    assert [item.names for _, item in data.items()] == [(key, None, None) for key in "abcd"]


def test_shards_of_one_name_in_two_folders_do_not_share_ids(tmp_path):
    shards = [write_tar(tmp_path / folder / "0.tar", [sample(1)]) for folder in "ab"]
    assert len({item.image_id for _, item in open_shards("::".join(shards)).items()}) == 2


def caption_shard(path: Path, *contents: dict[str, object]) -> str:
    return write_tar(path, [sample(n, json=json.dumps(each).encode()) for n, each in enumerate(contents)])


def fault_of(spec: str, **options: Any) -> str:
    """The fault of the last sample."""
    *_, (_, item) = open_shards(spec, **options).items()
    assert item.fault is not None and item.captions == ()
    with pytest.raises(BadSample) as caught:
        item.load()
    assert str(caught.value) == str(item.fault)
    return f"{item.fault.kind}: {item.fault}"


def captions(spec: str, **options: Any) -> list[tuple[str, ...]]:
    return [item.captions for _, item in open_shards(spec, **options).items()]


def test_captions_as_list_or_text(tmp_path):
    shard = caption_shard(tmp_path / "s.tar", {"captions": ["c"]}, {"texts": "one, two"})
    assert captions(shard) == [("c",), ("caption 1",)]
    assert captions(caption_shard(tmp_path / "t.tar", {"captions": "text"})) == [("text",)]


def test_img2dataset_tars_have_distinct_keys_and_their_uids(tmp_path):
    for shard in range(2):
        rows = []
        for number in range(2):
            key = f"{shard:05d}{number:04d}"
            note = {"caption": "c", "url": "https://x/y.jpg", "key": key, "status": "success", "sha256": "0", "uid": f"u{key}"}
            rows.append((key, {"jpg": png(number), "txt": f"text {key}".encode(), "json": json.dumps(note).encode()}))
        write_tar(tmp_path / f"{shard:05d}.tar", rows)
    items = [item for _, item in open_shards(str(tmp_path / "*.tar")).items()]
    assert [item.key for item in items][1:3] == ["00000/000000001", "00001/000010000"]
    assert len({item.image_id for item in items}) == 4
    assert items[1].captions == ("text 000000001",) and items[1].names == ("000000001", "000000001", "u000000001")
    again = [item.key for _, item in open_shards(str(tmp_path / "0000{0..1}.tar")).items()]
    assert again == [item.key for item in items]


# other arrays and regions in npz


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


FOREIGN, REGIONS = npz(embedding=np.ones(4)), npz(features=np.ones((2, 3)))


streams = pytest.mark.parametrize("stream", [False, True])


@streams
def test_npz_is_an_image_of_regions_where_there_is_no_picture(tmp_path, stream):
    rows = [(f"{n}", {"npz": content, "txt": b"x"}) for n, content in enumerate([b"damaged", REGIONS, FOREIGN])]
    shard = write_tar(tmp_path / "s.tar", [*rows, ("9", {"txt": b"x", "png": png()})])
    items = [item for _, item in open_shards(f"pipe:cat {shard}" if stream else shard).items()]
    assert items[1].load().features.shape == (2, 3) and items[3].load().size == (4, 4)
    for item, words in ((items[0], "not an .npz"), (items[2], "no features: none of x, features, feat among embedding")):
        with pytest.raises(BadSample, match=words):
            item.load()


# CLIP_benchmark's folders


def write_benchmark(folder: Path, splits: tuple[str, ...] = ("test",), shards: int = 2) -> str:
    for split in splits:
        for shard in range(shards):
            row = (f"s{shard:07d}", {"webp": png(shard), "txt": f"{split} {shard} a\n{split} {shard} b".encode()})
            write_tar(folder / split / f"{shard}.tar", [row])
        (folder / split / "nshards.txt").write_text(f"{shards}\n")
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return str(folder)


def test_a_folder_of_clip_benchmark_expands_and_its_lines_are_captions(tmp_path):
    folder = write_benchmark(tmp_path / "set [1]", ("train", "test"), 11)
    found = captions(folder, split="test")
    assert found == [(f"test {n} a", f"test {n} b") for n in range(11)]  # 10.tar after 9.tar
    assert captions(f"{folder}/test") == found
    (tmp_path / "set [1]/nshards.txt").write_text("1")  # the split's own note comes first
    assert captions(folder, split="test") == found
    assert open_source(folder, split="train").samples("all") == 22


# reading


def test_a_resampled_stream_never_ends_and_differs_between_workers(tmp_path):
    write_set(tmp_path)
    data = open_shards(str(tmp_path / "s*.tar"), resampled=True)

    def some(part: int, skip: int = 0) -> list[str]:
        drawn = data.part(part, 2, seed=3, epoch=0, captions="draw", skip=skip)
        return [item.key for item in itertools.islice(drawn, 160)]

    assert some(0) == some(0) != some(1) and len(set(some(0))) > 30 and some(0, skip=20)[:140] == some(0)[20:]


def test_evaluation_gives_every_image_once_with_its_position(tmp_path):
    data = write_set(tmp_path)
    assert [(index, data.item(index).key) for index in range(43)] == [(index, item.key) for index, item in data.items()]


# finding and counting them


def test_expansion(tmp_path):
    for name in ("a0", "a1", "b0"):
        write_tar(tmp_path / f"{name}.tar", [sample(1)])
    here = str(tmp_path)
    names = lambda spec: [Path(each).stem for each in expand(spec)]  # noqa: E731
    assert names(f"{here}/a{{0..1}}.tar") == ["a0", "a1"]
    assert names(f"{here}/b0.tar::{here}/a*.tar") == ["b0", "a0", "a1"]
    assert names(f"file:{here}/b0.tar") == ["b0"]
    assert expand("pipe:cat {x,y}.tar") == ["pipe:cat x.tar", "pipe:cat y.tar"]


@pytest.mark.parametrize("spec", ["", "  ", "a.tar::", "::"])
def test_empty_patterns(spec):
    assert "empty pattern" in fault(open_shards, spec)


def test_missing_shards_are_named_before_training(tmp_path):
    write_tar(tmp_path / "s0.tar", [sample(1)])
    assert "s1.tar" in fault(open_source, str(tmp_path / "s{0..1}.tar"))
    assert "t*.tar" in fault(open_source, str(tmp_path / "t*.tar"))


def test_local_shards_are_counted_by_their_headers_and_streams_by_notes(tmp_path):
    write_set(tmp_path)
    (tmp_path / "sizes.json").write_text(json.dumps({f"s{n}.tar": 10 for n in range(5)}))
    assert open_shards(str(tmp_path / "s*.tar")).num_images == 43
    again = lambda: open_shards(str(tmp_path / "s*.tar"), resampled=True)  # noqa: E731
    assert again().num_images == 50
    (tmp_path / "sizes.json").write_text(json.dumps({f"s{n}.tar": 10 - 20 * (n == 3) for n in range(5)}))
    assert again().num_images == 43  # no number of samples is negative
    (tmp_path / "sizes.json").unlink()
    assert again().num_images == 43
    assert Slices(again(), 1).num_images is None  # shards are not read for it
    (tmp_path / "sizes.json").write_text("[]")
    assert "sizes.json" in fault(lambda: again().num_images)


def test_shards_without_images_are_an_error_that_names_what_they_have(tmp_path):
    shard = write_tar(tmp_path / "t.tar", [(f"{n}", {"txt": b"x", "image": png(), "npy": b""}) for n in range(3)])
    message = fault(open_shards(shard).samples, "draw")
    assert "no images (jpg, png, jpeg, webp, npz) in 1 shards" in message
    assert all(word in message for word in ("3 .image", "3 .txt", "3 .npy"))


# files that are not read


def test_files_that_are_not_read_are_counted_and_named_once(tmp_path, caplog):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.png", "a.txt", "v1.5.png", "v1.6.png", "README", "a.npy", "__note__/x.png"):
            info = tarfile.TarInfo(name)
            info.size = len(png())
            tar.addfile(info, io.BytesIO(png()))
        for kind, name in ((tarfile.LNKTYPE, "b.png"), (tarfile.SYMTYPE, "c.png"), (tarfile.FIFOTYPE, "d.png")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.png"
            tar.addfile(info)
    for spec in (str(path), f"pipe:cat {path}"):
        caplog.clear()
        data = open_shards(spec)
        assert [len(list(data.items())) for _ in range(2)] == [1, 1]
        (record,) = caplog.records
        assert record.levelname == "WARNING" and record.message == (
            f"{spec}: files that are not read: 2 links, such as 'b.png' (write the files themselves: tar --dereference "
            "--hard-dereference); 2 with a further dot in the name, such as 'v1.5.png' (webdataset ends a sample's name at "
            "the first dot); 1 .npy; 1 special files, such as 'd.png'; 1 without an ending, such as 'README'"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_whose_files_are_apart_is_two_bad_ones_that_say_so(tmp_path, stream):
    path = write_tar(tmp_path / "s.tar", [("a", {"txt": b"a dog"}), ("b", {"txt": b"x", "png": png()}), ("a", {"png": png()})])
    first, whole, last = (item for _, item in open_shards(f"pipe:cat {path}" if stream else path).items())
    assert first.captions == ("a dog",) and whole.load().size and last.fault.kind == "caption"
    assert "it has no captions (if the files of a sample are apart in the shard, sort it" in str(last.fault)
    with pytest.raises(BadSample, match="no field jpg, .*--sort=name"):
        first.load()


# damage


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"txt": b" \n"}, ["caption: ", "empty caption"]),
        ({"txt": b"a" * 3000}, ["caption: ", "word of over 2,000"]),
        ({"txt": b"a " * 20_000}, ["caption: ", "over 20,000 characters"]),
        ({"json": b'{"captions": ["fine", ""]}'}, ["caption: ", "empty caption", "number 2 of 2"]),
        ({"json": b'{"captions": []}'}, ["caption: ", "no captions"]),
        ({"json": b'{"captions": {"a": "text"}}'}, ["caption: ", "not a list"]),
        ({"json": b'{"captions": [3]}'}, ["caption: ", "not text"]),
        ({"json": b'{"captions": ["\\ud800"]}'}, ["caption: ", "not valid Unicode"]),
        ({"json": b"{"}, ["caption: ", "not JSON"]),
        ({"json": b"[" * 100_000}, ["caption: ", "nested too deep"]),
        ({"json": b'{"image_id": [1], "captions": ["a"]}'}, ["caption: ", "image_id"]),
        ({"txt": b"\xff\xff"}, ["caption: ", "not UTF-8"]),
    ],
)
def test_a_bad_sample_keeps_its_place_and_has_its_fault(tmp_path, fields, words):
    shard = write_tar(tmp_path / "s.tar", [sample(1), sample(2, **fields)])
    message = fault_of(shard)
    assert all(word in message for word in words), message
    data = open_shards(shard)
    assert [item.key for _, item in data.items()] == ["s/0001", "s/0002"] and data.samples("all") == data.samples("draw") == 2


def boundary(content: bytes) -> int:
    """Where the last sample begins: cut there, a tar file looks complete to tarfile, and every sample is whole."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getmembers()[-2].offset


@pytest.mark.parametrize("where", ["in a member", "in a header", "between samples", "no content", "header garbled"])
def test_a_damaged_shard_is_an_error_that_names_it(tmp_path, where):
    path = Path(write_tar(tmp_path / "cut.tar", [sample(n) for n in range(5)]))
    content = path.read_bytes()
    last = boundary(content)
    path.write_bytes(
        {
            "in a member": content[: last + 515],
            "in a header": content[: last + 100],
            "between samples": content[:last],
            "no content": b"",
            "header garbled": content[:last] + b"\x01garbage" * 64 + content[last + 512 :],
        }[where]
    )
    for message in (
        fault(scan, str(path)),
        fault(list, open_shards(str(path)).items()),  # not a silent end
        fault(list, open_shards(f"pipe:cat {path}").items()),
    ):
        assert re.search("cut.tar' cannot be read: ", message)
