"""Folders of .npz and .npy files: the field's layouts, pickles that are refused, damage."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coder_plugin.data.regions import base
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.folder import FOLDER
from coder_plugin.errors import CoderError
from tests.data.regions.keyed_cases import assert_same, check_processes, check_reading, made, record_lists
from tests.data.regions.layouts import write_folder

EXTRAS = {"objects_id": lambda n: np.arange(n) * 2**40, "probs": lambda n: np.ones((n, 3), np.float16), "conf": np.ones}
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Bomb:
    """Unpickling it fails the test run for good."""

    def __reduce__(self):
        return os._exit, (66,)


@pytest.fixture(autouse=True)
def forget_warnings():
    base._warned.clear()


def bad(path, name: str) -> str:
    with pytest.raises(ValueError) as caught:
        FOLDER.open(str(path))[name]
    assert not isinstance(caught.value, CoderError) and str(path) in str(caught.value) and repr(name) in str(caught.value)
    return str(caught.value)


def fault(path) -> str:
    with pytest.raises(CoderError) as caught:
        FOLDER.open(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


# reading


@FUZZ
@given(given=record_lists(extras=EXTRAS, whole=True, alphabet="abc/ü図 "))
def test_files_are_read_bit_for_bit(tmp_path, given):
    given = [Record(f"{k}/{'/'.join(filter(None, each.name.split('/')))}.x", each.regions) for k, each in enumerate(given)]
    check_reading(FOLDER, write_folder, str(tmp_path / f"{len(os.listdir(tmp_path))}"), given, order=False)


def test_names_are_paths_without_ending_in_the_alphabets_order(tmp_path):
    path = tmp_path / "f"
    given = [Record(name, made(seed=k)) for k, name in enumerate(["val/42", "b.jpg", "a", "val/deep/x"])]
    write_folder(str(path), given)
    assert (path / "val/42.npz").exists() and (path / "b.jpg.npz").exists()
    assert list(FOLDER.open(str(path))) == ["a", "b.jpg", "val/42", "val/deep/x"]


# the field's layouts


def test_bottom_up_attention_pytorch_with_pickled_info(tmp_path, caplog):
    wanted = made(3)
    more = dict(num_bbox=3, image_h=375, image_w=500)
    np.savez_compressed(tmp_path / "a", x=wanted.features, bbox=wanted.boxes, info={"image_id": Bomb()}, **more)
    assert_same(FOLDER.open(str(tmp_path))["a"], wanted)
    assert "info" in caplog.text and "never unpickled" in caplog.text


def test_openvqas_features_have_the_regions_last(tmp_path):
    wanted = made(3, 5, extras={"cls_prob": np.ones((3, 7), np.float32)})
    np.savez(
        tmp_path / "a",
        x=wanted.features.T,
        bbox=wanted.boxes,
        num_bbox=np.asarray(3),
        image_h=375,
        image_w=500,
        cls_prob=wanted.extras["cls_prob"],
    )
    assert_same(FOLDER.open(str(tmp_path))["a"], wanted)
    np.savez(tmp_path / "b", x=np.ones((5, 2), "f"), num_bbox=2)
    assert FOLDER.open(str(tmp_path))["b"].features.shape == (2, 5)


@pytest.mark.parametrize("columns", [4, 6, 7])
def test_uniters_norm_bb_are_fractions(tmp_path, columns):
    corners = np.float16([[0, 0.25, 0.5, 1], [0.125, 0, 1, 0.5]])
    sides = corners[:, 2:] - corners[:, :2]
    norm_bb = np.hstack([corners, sides, sides[:, :1] * sides[:, 1:]])[:, :columns]
    np.savez(tmp_path / "a", features=np.ones((2, 8), np.float16), norm_bb=norm_bb, conf=np.ones(2), allow_pickle=True)
    regions = FOLDER.open(str(tmp_path))["a"]
    assert regions.features.dtype == np.float16 and regions.boxes.dtype == np.float32 and regions.size == (1, 1)
    assert np.array_equal(regions.boxes, corners) and list(regions.extras) == ["conf"]


def test_boxes_of_unknown_unit_are_left_out_and_told_of_once(tmp_path, caplog):
    for name in "ab":
        np.savez(tmp_path / name, feat=made().features, boxes=made().boxes)
    file = FOLDER.open(str(tmp_path))
    assert file["a"].boxes is None and file["b"].boxes is None
    assert caplog.text.count("image_w") == 1 and str(tmp_path) in caplog.text


def test_npy_with_boxes_as_fractions(tmp_path):
    features, boxes = made().features, made().boxes / 500
    np.save(tmp_path / "a.npy", features)
    np.save(tmp_path / "a_box.npy", boxes)
    np.save(tmp_path / "b_boxes.npy", features)  # without a b.npy: an image
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/a.npy", features.astype(np.float16))
    np.save(tmp_path / "in/a_boxes.npy", made().boxes)
    file = FOLDER.open(str(tmp_path))
    assert list(file) == ["a", "b_boxes", "in/a"]
    assert_same(file["a"], made(boxes=False, size=(1.0, 1.0)).__class__(features, boxes))
    assert file["b_boxes"].boxes is None
    assert "fractions" in bad(tmp_path, "in/a") and "image_w" in bad(tmp_path, "in/a")


def test_mmfs_info_is_passed_over(tmp_path, caplog):
    np.save(tmp_path / "a.npy", made().features)
    np.save(tmp_path / "a_info.npy", {"bbox": Bomb()}, allow_pickle=True)
    file = FOLDER.open(str(tmp_path))
    assert list(file) == ["a"] and file["a"].boxes is None
    assert "_info.npy" in caplog.text and "never unpickled" in caplog.text


# pickles and damage


def test_pickles_are_refused_by_name(tmp_path):
    objects = np.empty(3, object)
    objects[:] = [Bomb(), 1, 2]
    np.save(tmp_path / "whole.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "boxes", x=made().features, bbox=objects)
    np.savez(tmp_path / "features", x=objects)
    for name, what in (("whole", "whole.npy"), ("boxes", "'bbox'"), ("features", "'x'")):
        message = bad(tmp_path, name)
        assert what in message and "never unpickled" in message


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"y": np.ones(3)}, ["no features", "y"]),
        ({"x": np.ones((2, 3)), "feat": np.ones((2, 3))}, ["x and feat"]),
        ({"x": np.ones((2, 3), int)}, ["int64"]),
        ({"x": np.ones((2, 3)), "num_bbox": 4}, ["[2, 3]", "4 boxes"]),
        ({"x": np.ones((2, 3)), "bbox": np.ones((2, 4)), "num_bbox": 3}, ["disagree", "2 and 3"]),
        ({"x": np.ones((2, 3)), "bbox": np.ones((2, 5)), "image_w": 1, "image_h": 1}, ["[2, 5]"]),
        ({"x": np.ones((2, 3)), "bbox": np.ones((2, 4)), "image_w": 0, "image_h": 1}, ["0 x 1"]),
        ({"x": np.ones((2, 3)), "bbox": np.ones((2, 4)), "image_w": [1, 2], "image_h": 1}, ["image_w", "[2]"]),
        ({"x": np.ones((2, 3)), "norm_bb": np.ones((2, 5))}, ["norm_bb", "[2, 5]"]),
        ({"x": np.ones((2, 3)), "bbox": np.full((2, 4), "a"), "image_w": 1, "image_h": 1}, ["bbox", "not numbers"]),
        ({"x": np.full((2, 3), np.nan)}, ["6 of 6", "NaN"]),
        ({"x": np.ones((2, 3)), "conf": np.ones(3)}, ["conf has 3 rows"]),
    ],
)
def test_entries_that_do_not_fit(tmp_path, arrays, words):
    np.savez(tmp_path / "a", **arrays)
    message = bad(tmp_path, "a")
    assert all(word in message for word in words), message


@FUZZ
@given(data=st.data())
def test_any_damage_to_an_npz_is_noticed(tmp_path, data):
    wanted = made(2, extras={"conf": np.ones(2)})
    write_folder(str(tmp_path / f"{len(os.listdir(tmp_path))}"), [Record("a", wanted)])
    path = tmp_path / f"{len(os.listdir(tmp_path)) - 1}"
    content = bytearray((path / "a.npz").read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (path / "a.npz").write_bytes(content)
    try:
        regions = FOLDER.open(str(path))["a"]
    except ValueError as exc:
        assert "'a'" in str(exc)
    else:  # the archive's own dates and flags
        assert_same(regions, wanted)


@FUZZ
@given(data=st.data())
def test_any_damage_to_an_npy_is_an_error_or_another_number(tmp_path, data):
    np.save(tmp_path / "a.npy", made().features)
    content = bytearray((tmp_path / "a.npy").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a.npy").write_bytes(content)
    try:
        FOLDER.open(str(tmp_path))["a"]
    except ValueError as exc:
        assert "'a'" in str(exc)


def test_files_that_are_not_what_they_are_called(tmp_path):
    for name in ("a.npz", "b.npy", "empty.npz"):
        (tmp_path / name).write_bytes(b"" if name == "empty.npz" else b"something else")
    assert "not an .npz file" in bad(tmp_path, "a") and "not an .npz file" in bad(tmp_path, "empty")
    assert "b.npy is not an .npy file" in bad(tmp_path, "b")


def test_folders_that_cannot_be_read(tmp_path):
    assert "no such file or folder" in fault(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    assert "not a folder" in fault(tmp_path / "file")
    (tmp_path / "file.npy").mkdir()
    assert "no .npz or .npy" in fault(tmp_path)
    np.save(tmp_path / "a.npy", made().features)
    np.savez(tmp_path / "a.npz", made().features)
    assert "'a' has both" in fault(tmp_path)


def test_asking_reads_nothing(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"")
    file = FOLDER.open(str(tmp_path))
    assert "a" in file and "b" not in file and file.get("b") is None


def test_pickled_and_forked(tmp_path):
    check_processes(FOLDER, write_folder, str(tmp_path / "f"))


def test_matches(tmp_path):
    assert not FOLDER.matches(str(tmp_path)) and not FOLDER.matches(str(tmp_path / "absent"))
    (tmp_path / "deep/er").mkdir(parents=True)
    np.save(tmp_path / "deep/er/a.npy", made().features)
    assert FOLDER.matches(str(tmp_path)) and not FOLDER.matches(str(tmp_path / "deep/er/a.npy"))
    np.save(tmp_path / "train_ims.npy", made().features)
    assert not FOLDER.matches(str(tmp_path))
