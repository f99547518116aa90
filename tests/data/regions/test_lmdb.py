"""LMDB files: UNITER's layouts, pickles that are refused, truncation, mappings and processes."""

import io
import json
import os
import pickle
import sys
import types
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coder_plugin.data.regions import base, lmdb_
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.lmdb_ import LMDB
from coder_plugin.errors import CoderError
from tests.data.regions.keyed_cases import assert_same, check_processes, check_reading, made, record_lists, records
from tests.data.regions.layouts import write_lmdb

lmdb = pytest.importorskip("lmdb")
msgpack = pytest.importorskip("msgpack")

EXTRAS = {"objects_id": lambda n: np.arange(n) * 2**40, "probs": lambda n: np.ones((n, 3), np.float16)}
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def forget_warnings():
    base._warned.clear()


def save(tmp_path, entries: dict, *, subdir: bool = True) -> str:
    path = str(tmp_path / f"db{len(os.listdir(tmp_path))}")
    environment = lmdb.open(path, map_size=1 << 26, subdir=subdir, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key if isinstance(key, bytes) else key.encode(), value)
    environment.close()
    return path


def packed(array: np.ndarray, *, keys=str, **changes) -> dict:
    """msgpack-numpy's dictionary: keys are text in its older versions and bytes in the newer, which have ``kind`` too."""
    content = {"nd": True, "type": array.dtype.str, "shape": array.shape, "data": array.tobytes()}
    if keys is bytes:
        content["kind"] = b""
    content |= changes
    return {key.encode() if keys is bytes else key: value for key, value in content.items()}


def uniter(**changes) -> dict[str, np.ndarray]:
    corners = np.float16([[0, 0.25, 0.5, 1], [0.125, 0, 1, 0.5]])
    arrays = {
        "features": np.arange(16, dtype=np.float16).reshape(2, 8),
        "norm_bb": np.hstack([corners, corners[:, 2:] - corners[:, :2]]),
        "conf": np.float16([0.9, 0.4]),
        "soft_labels": np.ones((2, 11), np.float16),
    }
    return {key: each for key, each in (arrays | changes).items() if each is not None}


def npz(arrays: dict, save=np.savez) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def check_uniter(regions) -> None:
    wanted = uniter()
    assert regions.features.dtype == np.float16 and np.array_equal(regions.features, wanted["features"])
    assert regions.boxes.dtype == np.float32 and np.array_equal(regions.boxes, wanted["norm_bb"][:, :4])
    assert regions.size == (1, 1) and regions.global_feature is None
    assert sorted(regions.extras) == ["conf", "soft_labels"]
    assert regions.extras["soft_labels"].tobytes() == wanted["soft_labels"].tobytes()


def fault(path: str) -> str:
    with pytest.raises(CoderError) as caught:
        LMDB.open(path)
    assert path in str(caught.value)
    return str(caught.value)


def bad(value: bytes, tmp_path) -> str:
    """What is said of a value beside a sound one, which stays readable."""
    path = save(tmp_path, {"a": npz(uniter()), "b": value})
    file = LMDB.open(path)
    check_uniter(file["a"])
    with pytest.raises(ValueError) as caught:
        file["b"]
    assert not isinstance(caught.value, CoderError) and path in str(caught.value) and "'b'" in str(caught.value)
    return str(caught.value)


# reading


@FUZZ
@given(given=record_lists(extras=EXTRAS, whole=True))
def test_files_are_read_bit_for_bit(tmp_path, given):
    check_reading(LMDB, write_lmdb, str(tmp_path / f"{len(os.listdir(tmp_path))}"), given)


def test_images_keep_the_order_of_the_list(tmp_path):
    given = [Record(name, made(seed=k)) for k, name in enumerate("zebra apple mouse 10 9".split())]
    check_reading(LMDB, write_lmdb, str(tmp_path / "x"), given)


# the field's layouts


@pytest.mark.parametrize("subdir", [True, False])
@pytest.mark.parametrize("writer", [np.savez, np.savez_compressed])
def test_uniters_compressed_values(tmp_path, writer, subdir):
    """With ``__keys__``, and the array ``allow_pickle`` that np.savez of its day made of a keyword."""
    value = npz({**uniter(), "allow_pickle": np.asarray(True)}, writer)
    path = save(tmp_path, {"nlvr2_1.npz": value, "__keys__": json.dumps(["nlvr2_1.npz"]).encode()}, subdir=subdir)
    file = LMDB.open(path)
    assert list(file) == ["nlvr2_1.npz"]
    check_uniter(file["nlvr2_1.npz"])


@pytest.mark.parametrize("bin_type", [True, False])
@pytest.mark.parametrize("keys", [str, bytes])
def test_uniters_msgpack_values(tmp_path, keys, bin_type):
    content = {name: packed(array, keys=keys) for name, array in uniter().items()}
    path = save(tmp_path, {"a": msgpack.packb(content, use_bin_type=bin_type)})
    check_uniter(LMDB.open(path)["a"])


def test_a_patched_msgpack_is_not_used(tmp_path, monkeypatch):
    """msgpack_numpy.patch() replaces these for the whole process, by functions that unpickle arrays of objects."""
    path = save(tmp_path, {"a": msgpack.packb({name: packed(array) for name, array in uniter().items()})})
    for name in ("unpackb", "loads", "Unpacker"):
        monkeypatch.setattr(msgpack, name, None)
    check_uniter(LMDB.open(path)["a"])


def test_plain_dictionaries_and_scalars_in_msgpack(tmp_path, caplog):
    wanted = made(3)
    content = {
        "features": {"dtype": "float32", "shape": [3, 5], "data": wanted.features.tobytes()},
        "boxes": {"dtype": "<f4", "shape": [3, 4], "data": wanted.boxes.tobytes()},
        "image_w": 500,
        "image_h": packed(np.float64(375), nd=False, shape=[]),
        "img_id": "COCO_1",
        "objects": ["cat", "dog", "cat"],
    }
    path = save(tmp_path, {"a": msgpack.packb(content)})
    assert_same(LMDB.open(path)["a"], wanted)
    assert "objects is left out" in caplog.text and path in caplog.text


def test_lz4_frames_around_msgpack(tmp_path):
    frame = pytest.importorskip("lz4.frame")
    value = frame.compress(msgpack.packb({name: packed(array) for name, array in uniter().items()}))
    check_uniter(LMDB.open(save(tmp_path, {"a": value}))["a"])
    assert "LZ4" in bad(value[:-9], tmp_path)


def test_lz4_is_asked_for_when_it_is_needed(tmp_path, monkeypatch):
    value = msgpack.packb({name: packed(array) for name, array in uniter().items()})
    file = LMDB.open(save(tmp_path, {"a": lmdb_._LZ4 + zlib.compress(value)}))
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    assert "package lz4: pip install" in str(pytest.raises(CoderError, file.__getitem__, "a").value)

    class Decompressor:
        eof = False

        def decompress(self, data: bytes, max_length: int) -> bytes:
            self.eof = True
            return zlib.decompress(data[4:])

    stand_in = types.SimpleNamespace(LZ4FrameDecompressor=Decompressor)
    monkeypatch.setitem(sys.modules, "lz4", types.ModuleType("lz4"))
    monkeypatch.setitem(sys.modules, "lz4.frame", stand_in)
    check_uniter(file["a"])


def test_without_a_list_the_order_is_that_of_the_keys_over_several_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_, "_BATCH", 3)
    names = [f"{number:02}" for number in range(10)]
    path = save(tmp_path, {name: npz(uniter()) for name in reversed(names)})
    assert list(LMDB.open(path)) == names


# pickles and damage


class Bomb:
    """Unpickling it ends the test run at once."""

    def __reduce__(self):
        return os._exit, (66,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_values_are_refused_by_name(tmp_path, protocol):
    value = pickle.dumps({"features": Bomb()}, protocol)
    message = fault(save(tmp_path, {"42": value, "keys": pickle.dumps([b"42"])}))
    assert "'42'" in message and "pickle" in message and "ViLBERT" in message
    assert "pickle" in bad(value, tmp_path)


def test_pickles_inside_values_are_refused(tmp_path):
    objects = np.empty(2, object)
    objects[:] = [Bomb(), Bomb()]
    assert "'features' is pickled" in bad(npz({"features": objects}), tmp_path)
    content = {"features": packed(np.ones((2, 2)), kind=b"O", type="|O", data=pickle.dumps(objects))}
    assert "not an array of numbers" in bad(msgpack.packb(content), tmp_path)
    content = {"features": packed(np.ones((2, 2)), type="|O", data=pickle.dumps(objects))}
    assert "dtype object" in bad(msgpack.packb(content), tmp_path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"type": "<f3"}, "unknown dtype"),
        ({"type": "f4,f4"}, "only numbers"),
        ({"type": "<U4"}, "only numbers"),
        ({"type": [["a", "<f4"]]}, "not an array of numbers"),
        ({"data": bytes(15)}, "15 bytes, which is not float32 of shape [2, 2]"),
        ({"data": "text" * 4, "shape": [2, -2]}, "shape [2, -2]"),
        ({"shape": [2, "2"]}, "shape [2, b'2']"),
        ({"shape": 4}, "shape 4"),
        ({"data": None}, "not an array of numbers"),
        ({"kind": b"V"}, "not an array of numbers"),
    ],
)
def test_msgpack_arrays_that_do_not_fit(tmp_path, changes, words):
    content = {"features": packed(np.ones((2, 2), np.float32), **changes)}
    assert words in bad(msgpack.packb(content), tmp_path)


@pytest.mark.parametrize(
    "value, words",
    [
        (b"", "neither"),
        (b"{}", "neither .npz nor msgpack: it begins with b'{}'"),
        (b"PK", "not an .npz file"),
        (npz(uniter())[:-30], "damaged .npz"),
        (msgpack.packb({"a": {"b": bytes(99)}})[:-5], "damaged msgpack"),
        (msgpack.packb({"a": 1}) + b"x", "damaged msgpack"),
        (msgpack.packb({"a": 1}), "no features: none of x, features, feat among a"),
        (msgpack.packb({1: 1}), "damaged msgpack"),
        (npz(uniter(norm_bb=np.ones((2, 5)))), "norm_bb has shape [2, 5]"),
        (npz(uniter(features=np.full((2, 3), np.inf))), "6 of 6 numbers in the features"),
        (npz(uniter(conf=np.ones(3))), "conf has 3 rows for 2 regions"),
    ],
)
def test_damaged_values(tmp_path, value, words):
    assert words in bad(value, tmp_path)


@FUZZ
@given(data=st.data())
def test_any_msgpack_is_an_error_or_regions(tmp_path, data):
    content = bytearray(msgpack.packb({name: packed(array) for name, array in uniter().items()}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = save(tmp_path, {"a": npz(uniter()), "b": bytes(content)})
    try:
        LMDB.open(path)["b"]
    except ValueError as exc:
        assert "'b'" in str(exc)


def test_files_that_are_absent_empty_or_foreign(tmp_path):
    assert "no such file" in fault(str(tmp_path / "absent"))
    (tmp_path / "folder").mkdir()
    assert "no such file" in fault(str(tmp_path / "folder"))
    for content in (b"", b"something else" * 1000):
        (tmp_path / "x.mdb").write_bytes(content)
        assert "cannot be read as LMDB" in fault(str(tmp_path / "x.mdb"))
    assert "no images" in fault(save(tmp_path, {}))
    assert "not UTF-8" in fault(save(tmp_path, {b"\xff\xfe": b"x"}))


@pytest.mark.parametrize("eighths", range(8))
def test_a_file_that_is_cut_off_is_refused_before_a_page_is_missed(tmp_path, eighths):
    path = str(tmp_path / "x")
    write_lmdb(path, records(20, channels=512))
    data = os.path.join(path, "data.mdb")
    os.truncate(data, os.path.getsize(data) * eighths // 8)
    message = fault(path)
    assert "truncated" in message or eighths == 0


@pytest.mark.parametrize(
    "order, words",
    [
        (b"{", "not JSON"),
        (b"3", "JSON list"),
        (b"[1]", "JSON list"),
        (b"[]", "lists 0 names, but there are 2"),
        (b'["a", "b", "c"]', "lists 3 names, but there are 2"),
        (b'["a", "a"]', "1 names more than once"),
    ],
)
def test_lists_of_names_that_do_not_fit(tmp_path, order, words):
    assert words in fault(save(tmp_path, {"a": npz(uniter()), "b": npz(uniter()), "__keys__": order}))


def test_a_listed_name_without_a_value(tmp_path):
    path = save(tmp_path, {"a": npz(uniter()), "b": npz(uniter()), "__keys__": b'["a", "c"]'})
    with pytest.raises(ValueError, match="'c'.*no such key"):
        LMDB.open(path)["c"]


def test_asking_reads_nothing_and_strangers_are_key_errors(tmp_path):
    file = LMDB.open(save(tmp_path, {"a": npz(uniter()), "b": b""}))
    assert "b" in file and "c" not in file and file.get("c") is None


def test_a_file_that_changes_under_us_is_noticed(tmp_path):
    path = str(tmp_path / "x")
    write_lmdb(path, records(3))
    file = LMDB.open(path)
    os.utime(os.path.join(path, "data.mdb"), ns=(1, 1))
    with pytest.raises(ValueError, match="has changed since it was opened"):
        file["image 0.jpg"]


# processes


def test_pickled_and_forked(tmp_path):
    check_processes(LMDB, write_lmdb, str(tmp_path / "x"))


def test_two_at_once_and_from_threads(tmp_path):
    """LMDB itself opens a file only once in a process."""
    from concurrent.futures import ThreadPoolExecutor

    path, wanted = str(tmp_path / "x"), records(6)
    write_lmdb(path, wanted)
    files = [LMDB.open(path) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        for got, each in zip(pool.map(lambda k: files[k % 2][wanted[k % 6].name], range(60)), wanted * 10, strict=True):
            assert_same(got, each.regions)


def test_nothing_stays_mapped(tmp_path):
    path = str(tmp_path / "x")
    write_lmdb(path, records(3))
    file = LMDB.open(path)
    assert len(list(file.values())) == 3
    with open("/proc/self/maps") as maps:
        assert path not in maps.read()


def test_without_lmdb_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = save(tmp_path, {"a": b""})
    monkeypatch.setitem(sys.modules, "lmdb", None)
    assert 'package lmdb: pip install "coder-plugin[regions]"' in str(pytest.raises(CoderError, LMDB.open, path).value)


def test_matches(tmp_path):
    assert LMDB.matches(os.path.dirname(save(tmp_path, {})) + "/db0") and not LMDB.matches(str(tmp_path))
    assert LMDB.matches("a.lmdb") and LMDB.matches("a.lmdb/") and LMDB.matches("data.mdb") and not LMDB.matches("a.npz")
