"""Files of the field's tools, read once and in their order for conversion: right numbers, named faults, nothing unpickled."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import h5py
import lmdb
import msgpack
import numpy as np
import pytest

from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.folder import FOLDER
from coder_plugin.data.regions.hdf5 import HDF5
from coder_plugin.data.regions.lmdb_ import LMDB
from coder_plugin.data.regions.tsv import BUA, LXMERT
from coder_plugin.errors import CoderError, install_command
from tests.data.regions import layouts

FORMS: dict[str, tuple[RegionFormat, Any, str]] = {
    "tsv": (BUA, layouts.write_tsv, "x.tsv"),
    "lxmert": (LXMERT, layouts.write_lxmert, "x_obj36.tsv"),
    "hdf5": (HDF5, layouts.write_hdf5, "x.hdf5"),
    "lmdb": (LMDB, layouts.write_lmdb, "x.lmdb"),
    "folder": (FOLDER, layouts.write_folder, "x"),
}


class Bomb:
    """Unpickling it ends the test run at once."""

    def __reduce__(self):
        return os._exit, (66,)


def made(count: int = 3, seed: int = 0, **more: Any) -> Regions:
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 400, (count, 2, 2)), axis=1).reshape(count, 4).astype(np.float32)
    return Regions(rng.standard_normal((count, 5)).astype(np.float32), corners, (500.0, 375.0), **more)


def labels(count: int) -> dict[str, np.ndarray]:
    ids, scores = np.arange(count), np.linspace(1, 0, count, dtype=np.float32)
    return {"objects_id": ids, "objects_conf": scores, "attrs_id": ids + 7, "attrs_conf": scores / 2}


def read(form: RegionFormat, path: str | Path) -> dict[str, Regions]:
    assert form.read is not None
    return {entry.name: entry.load() for entry in form.read(str(path))}


def names(form: RegionFormat, path: str | Path) -> list[str]:
    assert form.read is not None
    return [entry.name for entry in form.read(str(path))]


def fault(form: RegionFormat, path: str | Path) -> str:
    with pytest.raises(CoderError) as caught:
        names(form, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def damage(form: RegionFormat, path: str | Path, name: str) -> str:
    """What is said of one image; the others can be read."""
    assert form.read is not None
    said = ""
    for entry in form.read(str(path)):
        if entry.name == name:
            with pytest.raises(ValueError) as caught:
                entry.load()
            assert not isinstance(caught.value, CoderError)
            said = str(caught.value)
        else:
            entry.load()
    return said


def assert_same(got: Regions, wanted: Regions) -> None:
    pairs = [(got.features, wanted.features), (got.boxes, wanted.boxes), (got.global_feature, wanted.global_feature)]
    for each, other in [*pairs, *((got.extras[key], wanted.extras[key]) for key in wanted.extras)]:
        assert (each is None) == (other is None)
        if each is not None and other is not None:
            assert (each.dtype, each.shape) == (other.dtype, other.shape) and each.tobytes() == other.tobytes()
    assert got.extras.keys() == wanted.extras.keys() and tuple(got.size) == tuple(wanted.size)


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_tool_writes_is_read_to_the_bit(tmp_path, kind):
    form, write, place = FORMS[kind]
    path = str(tmp_path / place)
    counts = (3, 1, 4, 1, 5)
    whole = {"global_feature": np.arange(3, dtype=np.float32)} if kind in ("lmdb", "folder") else {}
    extras = {"lxmert": labels, "lmdb": labels, "folder": labels}.get(kind, lambda count: {})
    given = [Record(f"{n}{letter}", made(n, seed, extras=extras(n), **whole))
             for seed, (n, letter) in enumerate(zip(counts, "adbec", strict=True))]  # fmt: skip
    write(path, given)
    found = read(form, path)
    assert list(found) == ([each.name for each in given] if kind not in ("lmdb", "folder") else sorted(found))
    assert len(found) == 5 and form.matches(path)
    for name, wanted, _ in given:
        assert_same(found[name], Regions(wanted.features, wanted.fractions) if kind == "hdf5" else wanted)


@pytest.mark.parametrize("kind", FORMS)
def test_a_file_that_is_absent_foreign_or_truncated(tmp_path, kind):
    form, write, place = FORMS[kind]
    path = tmp_path / place
    assert "no such" in fault(form, path).lower() and str(path) in fault(form, path)
    if kind != "folder":
        path.write_bytes(b"something else\t" * 1000)
        assert str(path) in fault(form, path)
        path.unlink()
    write(str(path), [Record(str(n), made(seed=n, extras=labels(3) if kind == "lxmert" else {})) for n in range(4)])
    file = {"lmdb": path / "data.mdb", "folder": path / "3.npz"}.get(kind, path)
    os.truncate(file, file.stat().st_size * 3 // 4 - 5)
    if kind in ("hdf5", "lmdb"):
        assert "truncated" in fault(form, path)
    elif kind == "folder":
        assert "damaged .npz" in damage(form, path, "3")
    else:
        with pytest.raises(ValueError, match="line 4|line 3"):
            read(form, path)


# TSV


def row(path: Path, **changes: str) -> Path:
    layouts.write_tsv(path, [Record("good", made(2)), Record("bad", made(2))])
    lines = path.read_text().splitlines()
    fields = dict(zip(layouts.BUA_FIELDS, lines[1].split("\t"), strict=True)) | changes
    path.write_text("\n".join([lines[0], "", "\t".join(fields.values())]))  # a blank line, and no line end
    return path


def b64(array: np.ndarray) -> str:
    import base64

    return base64.b64encode(array.tobytes()).decode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_boxes": "3"}, "boxes holds 32 bytes, which is not 3 x 4 of float32"),
        ({"num_boxes": "-2"}, "num_boxes is -2"),
        ({"num_boxes": "1e300"}, "boxes holds 32 bytes"),
        ({"num_boxes": "x"}, "num_boxes is b'x', not a number"),
        ({"image_w": "nan"}, "width is b'nan'"),
        ({"image_h": "0"}, "both must be > 0"),
        ({"features": "AAA"}, "features is not base64"),
        ({"features": ""}, "features holds 0 bytes"),
        ({"features": b64(np.ones((2, 4), np.float32))}, "features have 4 channels, those of the first image 5"),
        ({"features": b64(np.full((2, 5), np.nan, np.float32))}, "10 of 10 numbers"),
    ],
)
def test_a_line_of_wrong_numbers(tmp_path, changes, words):
    message = damage(BUA, row(tmp_path / "x.tsv", **changes), "bad")
    assert words in message and message.startswith("line 3: ")


# HDF5


def fixed(folder: Path, **changes: Any) -> tuple[Path, list[Regions]]:
    """The layout of a fixed number of regions, of two images."""
    wanted = [made(3, seed) for seed in range(2)]
    size = np.array([500, 375, 500, 375], np.float32)
    boxes = np.stack([each.boxes for each in wanted])  # type: ignore[misc]
    spatial = np.concatenate([boxes / size, (boxes[..., 2:] - boxes[..., :2]) / size[:2]], axis=2)
    content = {
        "image_features": np.stack([each.features for each in wanted]),
        "image_bb": boxes,
        "spatial_features": spatial.astype(np.float32),
        "image_ids": np.array([42, 7]),
    }
    path = folder / "train36.hdf5"
    with h5py.File(path, "w") as file:
        for name, array in (content | changes).items():
            if array is not None:
                file[name] = array
    return path, wanted


def flat(folder: Path, ends: Any) -> Path:
    with h5py.File(folder / "x.hdf5", "w") as file:
        file["image_features"] = np.arange(35, dtype=np.float32).reshape(7, 5)
        file["image_ids"] = [b"a", b"b", b"c"]
        if ends is not None:
            file["pos_boxes"] = ends
    return folder / "x.hdf5"


def test_boxes_of_hdf5_are_fractions_or_left_out(tmp_path, caplog):
    path, wanted = fixed(tmp_path)
    got = read(HDF5, path)["7"]
    assert got.size == (1, 1) and np.array_equal(got.features, wanted[1].features)
    np.testing.assert_allclose(got.boxes, wanted[1].fractions, rtol=1e-6)
    path, _ = fixed(tmp_path, spatial_features=None)
    assert read(HDF5, path)["7"].boxes is None and "boxes are left out: without spatial_features" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_features": None}, "no dataset 'image_features'; of those read it has: image_bb"),
        ({"image_features": np.ones(3)}, "[3]"),
        ({"image_bb": np.ones((2, 2, 4))}, "image_bb has shape [2, 2, 4], not [2, 3, 4]"),
        ({"spatial_features": np.ones((2, 3, 4))}, "spatial_features has shape"),
        ({"image_ids": np.ones(2)}, "image_ids is float64"),
        ({"image_ids": np.arange(3)}, "3 names for 2 images"),
    ],
)
def test_datasets_that_do_not_fit(tmp_path, changes, words):
    assert words in fault(HDF5, fixed(tmp_path, **changes)[0])


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (None, "pos_boxes, the rows of each image, is missing"),
        (np.ones((3, 3), int), "[3, 3]"),
        (np.ones((3, 2)), "float64"),
        ([[0, 2], [2, 3], [3, 8]], "row 2 of pos_boxes is [3, 8], but there are 7 regions"),
        ([[0, 2], [2, 3], [4, 7]], "pos_boxes lists 6 regions, but image_features has 7"),
    ],
)
def test_rows_of_images_that_do_not_fit(tmp_path, ends, words):
    assert words in fault(HDF5, flat(tmp_path, ends))


# LMDB


def uniter(**changes: Any) -> dict[str, np.ndarray]:
    boxes = np.linspace(0, 1, 14).reshape(2, 7)
    arrays = {"features": np.ones((2, 3), np.float16), "norm_bb": boxes, "conf": np.ones(2, np.float32)}
    return arrays | changes


def npz(arrays: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def packed(array: np.ndarray, **changes: Any) -> dict[bytes, Any]:
    """As msgpack-numpy packs an array."""
    content = {"nd": True, "type": array.dtype.str, "kind": b"", "shape": array.shape, "data": array.tobytes()}
    return {key.encode(): value for key, value in (content | changes).items()}


def saved(folder: Path, content: dict[str, bytes]) -> str:
    path = str(folder / f"db{len(list(folder.iterdir()))}")
    with lmdb.open(path, map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for key, value in content.items():
            transaction.put(key.encode(), value)
    return path


@pytest.mark.parametrize("how", ["npz", "msgpack"])
def test_uniters_values(tmp_path, monkeypatch, how):
    arrays = uniter(soft_labels=np.ones((2, 11), np.float16))
    value = npz(arrays) if how == "npz" else msgpack.packb({name: packed(each) for name, each in arrays.items()})
    for name in ("unpackb", "loads", "Unpacker"):  # msgpack_numpy.patch() replaces these by functions that unpickle
        monkeypatch.setattr(msgpack, name, None)
    got = read(LMDB, saved(tmp_path, {"nlvr2_1.npz": value, "__keys__": b'["nlvr2_1.npz"]'}))["nlvr2_1.npz"]
    assert got.features.dtype == np.float16 and np.array_equal(got.features, arrays["features"])
    assert np.array_equal(got.boxes, arrays["norm_bb"][:, :4].astype(np.float32)) and got.size == (1, 1)  # type: ignore[arg-type]
    assert sorted(got.extras) == ["conf", "soft_labels"]


OBJECTS = np.array([Bomb(), Bomb()], object)
TWO = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (pickle.dumps({"features": Bomb()}), "pickle, as in ViLBERT's files"),
        (pickle.dumps({"features": Bomb()}, 0), "pickle, as in ViLBERT's files"),
        (npz({"features": OBJECTS}), "'features' is pickled"),
        (msgpack.packb({"features": packed(TWO, kind=b"O", type="|O")}), "not an array of numbers"),
        (msgpack.packb({"features": packed(TWO, type="|O")}), "dtype object; only numbers are read"),
        (msgpack.packb({"features": packed(TWO, type="<f3")}), "unknown dtype"),
        (msgpack.packb({"features": packed(TWO, type="<U4")}), "only numbers"),
        (msgpack.packb({"features": packed(TWO, data=bytes(15))}), "15 bytes, which is not float32 of shape [2, 2]"),
        (msgpack.packb({"features": packed(TWO, shape=[2, -2])}), "shape [2, -2]"),
        (msgpack.packb({"features": packed(TWO, shape=4)}), "shape 4"),
        (msgpack.packb({"a": 1}), "no features: none of x, features, feat among a"),
        (msgpack.packb({"a": {"b": bytes(99)}})[:-5], "damaged msgpack"),
        (b"\x81\xa1x" + b"\x91" * 100_000, "damaged msgpack"),
        (b"", "neither .npz nor msgpack"),
        (b"PK", "not an .npz file"),
        (npz(uniter())[:-30], "damaged .npz"),
        (npz(uniter(norm_bb=np.ones((2, 5)))), "norm_bb has shape [2, 5]"),
        (npz(uniter(conf=np.ones(3))), "conf has 3 rows for 2 regions"),
    ],
)
def test_values_that_are_pickled_or_damaged(tmp_path, value, words):
    assert words in damage(LMDB, saved(tmp_path, {"a": npz(uniter()), "b": value}), "b")


@pytest.mark.parametrize(("form", "package"), [(LMDB, "lmdb"), (HDF5, "h5py")])
def test_a_package_that_is_not_installed(tmp_path, monkeypatch, form, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert f"package {package}: {install_command('regions')}" in fault(form, tmp_path / "x")


# folders


def test_a_folder_of_several_tools_files(tmp_path, caplog):
    """bottom-up-attention.pytorch's with an object of information, OpenVQA's transposed, features alone."""
    wanted = made(2)
    (tmp_path / "val").mkdir()
    np.savez(tmp_path / "val/42.npz", info=np.array({"a": 1}, object), **layouts.bua_arrays(wanted))
    np.savez(tmp_path / "7.npz", x=wanted.features.T, bbox=wanted.boxes, num_bbox=2)
    np.save(tmp_path / "8.npy", wanted.features)
    got = read(FOLDER, tmp_path)
    assert list(got) == ["7", "8", "val/42"]
    assert_same(got["val/42"], wanted)
    assert all(np.array_equal(got[name].features, wanted.features) for name in got)
    assert got["7"].boxes is None and "without image_w and image_h" in caplog.text


def test_folders_are_told_from_precomp(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(1))
    assert FOLDER.matches(str(tmp_path)) and not FOLDER.matches(str(tmp_path / "b"))
    np.save(tmp_path / "train_ims.npy", np.ones(1))
    assert not FOLDER.matches(str(tmp_path))
