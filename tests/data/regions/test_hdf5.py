"""HDF5 files: our layout, the field's two, where names come from, what units boxes have, damage."""

import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from coder_plugin.data.regions import base
from coder_plugin.data.regions.hdf5 import HDF5
from coder_plugin.errors import CoderError
from tests.data.regions.keyed_cases import assert_same, check_processes, check_reading, made, record_lists
from tests.data.regions.layouts import write_hdf5

h5py = pytest.importorskip("h5py")

EXTRAS = {
    "objects_id": lambda n: np.arange(n) * 2**40,
    "probs": lambda n: np.ones((n, 3), np.float16),
    "kept": lambda n: np.arange(n) % 2 == 0,
}
SIZES = np.array([[500, 375], [640, 480]])


@pytest.fixture(autouse=True)
def forget_warnings():
    base._warned.clear()


def fixed(tmp_path, **changes) -> tuple[str, list]:
    """bottom-up-attention-vqa's layout: two images of three regions; a change of None leaves a dataset out."""
    regions = [made(3, size=tuple(map(float, SIZES[0]))), made(3, seed=1, size=tuple(map(float, SIZES[1])))]
    boxes = np.stack([each.boxes for each in regions])
    relative = boxes / np.tile(SIZES, 2)[:, None]
    content = {
        "image_features": np.stack([each.features for each in regions]),
        "image_bb": boxes,
        "spatial_features": np.concatenate([relative, relative[..., 2:] - relative[..., :2]], -1).astype(np.float32),
        "image_ids": np.array([42, 7]),
        **changes,
    }
    return save(tmp_path, content), regions


def flat(tmp_path, counts=(2, 1, 4), **changes) -> tuple[str, list]:
    """BAN's layout, with sizes."""
    regions = [made(count, seed=count) for count in counts]
    ends = np.cumsum((0, *counts))
    content = {
        "image_features": np.concatenate([each.features for each in regions]),
        "image_bb": np.concatenate([each.boxes for each in regions]),
        "pos_boxes": np.stack([ends[:-1], ends[1:]], 1).astype(np.int32),
        "image_size": np.array([[500, 375]] * len(counts)),
        "ids": np.array(["a", "ü", "c"][: len(counts)], object),
        **changes,
    }
    return save(tmp_path, content), regions


def save(tmp_path, content) -> str:
    path = str(tmp_path / "train36.hdf5")
    with h5py.File(path, "w") as file:
        for name, array in content.items():
            if array is not None:
                strings = isinstance(array, np.ndarray) and array.dtype == object
                file.create_dataset(name, data=array, dtype=h5py.string_dtype() if strings else None)
    return path


def fault(path: str) -> str:
    with pytest.raises(CoderError) as caught:
        HDF5.open(path)
    assert os.path.dirname(path) in str(caught.value)
    return str(caught.value)


# reading


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=record_lists(one_width=True, extras=EXTRAS, whole=True))
def test_files_are_read_bit_for_bit(tmp_path, given):
    check_reading(HDF5, write_hdf5, str(tmp_path / "x.h5"), given)


# the field's layouts


def test_fixed_layout_takes_boxes_from_the_fractions(tmp_path):
    path, wanted = fixed(tmp_path)
    file = HDF5.open(path)
    assert list(file) == ["42", "7"]
    for number, regions in zip((42, 7), wanted, strict=True):
        got = file[str(number)]
        assert got.size == (1, 1) and np.array_equal(got.features, regions.features)
        np.testing.assert_allclose(got.boxes, regions.fractions, rtol=1e-6)


def test_fixed_layout_with_sizes_has_pixels(tmp_path):
    path, wanted = fixed(tmp_path, image_size=SIZES, spatial_features=None)
    assert_same(HDF5.open(path)["7"], wanted[1])


def test_flat_layout(tmp_path):
    path, wanted = flat(tmp_path)
    file = HDF5.open(path)
    assert list(file) == ["a", "ü", "c"]
    for got, regions in zip(file.values(), wanted, strict=True):
        assert_same(got, regions)


def test_an_attribute_says_that_boxes_are_fractions(tmp_path):
    path, wanted = fixed(tmp_path, image_bb=np.full((2, 3, 4), 0.5, "f"), spatial_features=None, image_size=SIZES)
    with h5py.File(path, "a") as file:
        file["image_bb"].attrs["units"] = "fractions"
    got = HDF5.open(path)["42"]
    assert got.size == (1, 1) and np.array_equal(got.boxes, np.full((3, 4), 0.5))
    with h5py.File(path, "a") as file:
        file["image_bb"].attrs["units"] = "inches"
    assert "'inches'" in fault(path)


def test_boxes_of_unknown_unit_are_left_out_and_told_of(tmp_path, caplog):
    path, _ = fixed(tmp_path, spatial_features=None)
    assert HDF5.open(path)["7"].boxes is None
    assert path in caplog.text and "image_size" in caplog.text and "units" in caplog.text


def test_a_file_with_features_alone(tmp_path):
    path, wanted = fixed(tmp_path, spatial_features=None, image_bb=None)
    got = HDF5.open(path)["7"]
    assert got.boxes is None and np.array_equal(got.features, wanted[1].features)


def test_big_endian_features_come_in_this_machines_order(tmp_path):
    path, wanted = fixed(tmp_path)
    with h5py.File(path, "a") as file:
        features = file["image_features"][()].astype(">f4")
        del file["image_features"]
        file["image_features"] = features
    got = HDF5.open(path)["42"].features
    assert got.dtype == np.float32 and np.array_equal(got, wanted[0].features)


# names


@pytest.mark.parametrize(
    "ending, content, names",
    [
        ("json", json.dumps([42, "ü"]), ["42", "ü"]),
        ("json", json.dumps({"b": 1, "a": 0}), ["a", "b"]),
        ("json", json.dumps({"b": 1}), ["b"]),
        ("txt", "one image\nü\n", ["one image", "ü"]),
    ],
)
def test_names_from_beside_the_file(tmp_path, ending, content, names):
    path, wanted = fixed(tmp_path, image_ids=None)
    (tmp_path / f"train36_ids.{ending}").write_text(content, encoding="utf-8")
    file = HDF5.open(path)
    assert list(file) == names
    assert np.array_equal(file[names[-1]].features, wanted[1].features)


def test_pickled_names_are_refused_by_name(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os._exit, (66,)

    path, _ = fixed(tmp_path, image_ids=None)
    assert "train36_ids.json" in fault(path) and "is a pickle" not in fault(path)
    (tmp_path / "train36_imgid2idx.pkl").write_bytes(pickle.dumps(Bomb()))
    message = fault(path)
    assert "train36_imgid2idx.pkl is a pickle" in message and "train36_ids.json" in message


@pytest.mark.parametrize(
    "content, words",
    [
        ("[1]", "1 names for 2 images"),
        ("[1, 1]", "'1' more than once (1 names too many)"),
        ('{"a": 0, "b": 2}', "'b' has 2"),
        ('{"a": 0, "b": "1"}', "'b' has '1'"),
        ('{"a": 0, "b": 0}', "two names have the same row"),
        ("3", "a list of names"),
        ("{", "cannot be read"),
        ("[]", "0 names"),
    ],
)
def test_wrong_names_beside_the_file(tmp_path, content, words):
    path, _ = fixed(tmp_path, image_ids=None)
    (tmp_path / "train36_ids.json").write_text(content)
    message = fault(path)
    assert words in message and "train36_ids.json" in message


# damage


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"image_features": None}, ["no dataset 'image_features'", "image_bb"]),
        ({"image_features": np.ones(3)}, ["[3]"]),
        ({"image_bb": np.ones((2, 2, 4))}, ["image_bb", "[2, 2, 4]", "[2, 3, 4]"]),
        ({"spatial_features": np.ones((2, 3, 4))}, ["spatial_features"]),
        ({"image_size": np.ones((1, 2))}, ["image_size"]),
        ({"whole": np.ones(2)}, ["whole", "[2]"]),
        ({"whole": np.ones((3, 8))}, ["whole", "[3, 8]"]),
        ({"extras/conf": np.ones((2, 4))}, ["extras/conf", "[2, 4]"]),
        ({"image_features": None, "image_features/a": np.ones((2, 3, 5))}, ["no dataset 'image_features'"]),
        ({"image_ids": np.ones(2)}, ["image_ids", "float64"]),
        ({"image_ids": np.arange(3)}, ["3 names for 2"]),
        ({"image_ids": np.array([7, 7])}, ["'7' more than once"]),
        ({"image_ids": np.array([b"\xff", b"a"])}, ["utf-8"]),
    ],
)
def test_fixed_layouts_that_do_not_fit(tmp_path, changes, words):
    message = fault(fixed(tmp_path, **changes)[0])
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "ends, words",
    [
        (None, ["pos_boxes", "is missing"]),
        (np.ones((3, 3), int), ["[3, 3]"]),
        (np.ones((3, 2)), ["float64"]),
        ([[0, 2], [2, 3], [3, 8]], ["row 2", "[3, 8]", "7 regions", "1 such rows of 3"]),
        ([[0, 2], [3, 2], [-1, 2]], ["row 1", "2 such rows"]),
    ],
)
def test_flat_layouts_that_do_not_fit(tmp_path, ends, words):
    message = fault(flat(tmp_path, pos_boxes=ends)[0])
    assert all(word in message for word in words), message


def test_an_image_without_regions_or_with_nan_is_an_error_of_its_own(tmp_path):
    path, wanted = flat(tmp_path, pos_boxes=[[0, 2], [0, 0], [3, 7]])
    with h5py.File(path, "a") as file:
        file["image_features"][0, 0] = np.nan
    file = HDF5.open(path)
    for name, words in (("a", "1 of 10 numbers in the features are NaN"), ("ü", "at least one region")):
        with pytest.raises(ValueError) as caught:
            file[name]
        assert not isinstance(caught.value, CoderError)
        assert all(word in str(caught.value) for word in (path, repr(name), words))
    assert_same(file["c"], wanted[2])


def test_files_that_are_absent_truncated_or_foreign(tmp_path):
    assert "no such file" in fault(str(tmp_path / "absent.h5"))
    path = flat(tmp_path)[0]
    whole = open(path, "rb").read()
    for content in (b"", b"something else" * 100, *(whole[: len(whole) * part // 8] for part in range(1, 8))):
        with open(path, "wb") as file:
            file.write(content)
        assert "cannot be read as HDF5" in fault(path)
    assert fault(str(tmp_path))


def test_asking_reads_nothing_and_strangers_are_key_errors(tmp_path):
    path, _ = flat(tmp_path, pos_boxes=[[0, 0]] * 3)
    file = HDF5.open(path)
    assert "a" in file and "b" not in file and file.get("b") is None


def test_pickled_and_forked(tmp_path):
    check_processes(HDF5, write_hdf5, str(tmp_path / "x.h5"))


def test_without_h5py_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = flat(tmp_path)[0]
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert 'pip install "coder-plugin[regions]"' in str(pytest.raises(CoderError, HDF5.open, path).value)


def test_matches():
    assert HDF5.matches("a/train36.hdf5") and HDF5.matches("x.H5") and not HDF5.matches("x.h5.tmp")
