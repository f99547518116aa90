"""TSV files of regions: what the field's own readers and writers make of them, damage, the index beside the file."""

import base64
import csv
import io
import os
import shutil
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from coder_plugin.data.regions import tsv
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.tsv import BUA, BUA_LAYOUT, LXMERT
from coder_plugin.errors import CoderError
from tests.data.regions.keyed_cases import assert_same, check_processes, check_reading, made, record_lists, records
from tests.data.regions.layouts import BUA_FIELDS, LXMERT_FIELDS, write_lxmert, write_tsv

WRITERS = {BUA: write_tsv, LXMERT: write_lxmert}
EXTRAS = {
    "objects_id": lambda n: np.arange(n) * 2**40 - 1,
    "objects_conf": lambda n: np.linspace(0, 1, n, dtype=np.float32),
    "attrs_id": lambda n: np.arange(n),
    "attrs_conf": lambda n: np.full(n, 1 / 3, np.float32),
}
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def lxmert(count: int = 3, **options):
    return made(count, extras={key: make(count) for key, make in EXTRAS.items()}, **options)


def written(tmp_path, number: int = 4) -> str:
    path = str(tmp_path / "x.tsv")
    write_tsv(path, records(number))
    return path


def change(path: str, line: int, field: int, value: bytes) -> None:
    """Put ``value`` into a field of a line, both from 0."""
    with open(path, "rb") as file:
        lines = [each.split(b"\t") for each in file.read().split(b"\n")]
    lines[line][field] = value
    with open(path, "wb") as file:
        file.write(b"\n".join(b"\t".join(each) for each in lines))


def fault(path: str, form=BUA) -> str:
    with pytest.raises(CoderError) as caught:
        form.open(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def bad_entry(path: str, name: str, form=BUA) -> str:
    with pytest.raises(ValueError) as caught:
        form.open(path)[name]
    assert not isinstance(caught.value, CoderError) and path in str(caught.value) and repr(name) in str(caught.value)
    return str(caught.value)


# reading


@FUZZ
@given(given=record_lists(dtypes=[np.float16, np.float32]))
def test_bua_files_are_read_bit_for_bit(tmp_path, given):
    check_reading(BUA, write_tsv, str(tmp_path / "x.tsv"), given, features=np.float32)


@FUZZ
@given(given=record_lists(dtypes=[np.float16, np.float32], extras=EXTRAS))
def test_lxmert_files_are_read_bit_for_bit(tmp_path, given):
    check_reading(LXMERT, write_lxmert, str(tmp_path / "x.tsv"), given, features=np.float32)


@pytest.mark.parametrize("name", ['"', '""', 'a"b', '"a', '"a b"', "a,b", "ü/ж 図.jpg", "000042"])
def test_names_that_the_csv_module_quotes(tmp_path, name):
    path = str(tmp_path / "x.tsv")
    check_reading(BUA, write_tsv, path, [Record(name, made())])


# the field's own readers and writers


def test_we_read_what_the_fields_writers_write(tmp_path):
    """csv.DictWriter, whose lines end in CR LF; the height first in LXMERT's layout, the width in the other."""
    bua, other = made(2), lxmert(4, size=(640.0, 480.0))
    sizes = [{"image_w": 500, "image_h": 375}, {"img_h": 480, "img_w": 640}]
    for regions, fields, form, size in zip((bua, other), (BUA_FIELDS, LXMERT_FIELDS), (BUA, LXMERT), sizes, strict=True):
        text = io.StringIO()
        row = {fields[0]: 42, "num_boxes": len(regions), **size}
        for key, array in dict(boxes=regions.boxes, features=regions.features, **regions.extras).items():
            row[key] = base64.b64encode(array.tobytes()).decode()
        csv.DictWriter(text, fields, delimiter="\t").writerow(row)
        path = tmp_path / "x.tsv"
        path.write_bytes(text.getvalue().encode())
        assert path.read_bytes().endswith(b"\r\n")
        assert_same(form.open(str(path))["42"], regions)


def test_a_line_of_more_than_a_block_and_than_the_csv_modules_limit(tmp_path):
    path, regions = str(tmp_path / "x.tsv"), made(100, 2048)
    write_tsv(path, [Record("a", regions), Record("b", made()), Record("c", regions)])
    assert os.path.getsize(path) > 2 * tsv._BLOCK > 2 * csv.field_size_limit()
    file = BUA.open(path)
    assert_same(file["c"], regions)
    assert_same(file["b"], made())


def test_blank_lines_and_a_last_line_without_its_end_are_read(tmp_path):
    path = written(tmp_path, 3)
    with open(path, "rb") as file:
        lines = file.read().splitlines()
    with open(path, "wb") as file:
        file.write(b"\n\r\n".join(lines))
    assert len(BUA.open(path)) == 3
    assert "line 5:" in bad_entry_after(path, 4, 5, b"####", "image 2.jpg")


def bad_entry_after(path: str, line: int, field: int, value: bytes, name: str) -> str:
    change(path, line, field, value)
    with open(path, "ab") as file:
        file.write(b"\n")
    return bad_entry(path, name)


# damage that makes the whole file doubtful


def test_wrong_number_of_fields_is_named_and_counted(tmp_path):
    path = written(tmp_path, 5)
    with open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"\t", b" ", 1)
    lines[3] = lines[3].replace(b"\t", b"\t\t", 1)
    with open(path, "wb") as file:
        file.writelines(lines)
    message = fault(path)
    assert "line 2 has 5 fields, not the 6" in message and "2 such lines of 5" in message


@pytest.mark.parametrize("form, other, words", [(BUA, LXMERT, "LXMERT's"), (LXMERT, BUA, "bottom-up-attention's")])
def test_the_other_layout_is_told_by_its_fields(tmp_path, form, other, words):
    path = str(tmp_path / "x.tsv")
    WRITERS[other](path, [Record("a", lxmert() if other is LXMERT else made())])
    message = fault(path, form)
    assert "line 1 has" in message and words in message
    assert len(other.open(path)) == 1


@pytest.mark.parametrize("cut", [1, 2, 60, 80])
def test_a_truncated_last_line(tmp_path, cut):
    path = written(tmp_path, 3)
    os.truncate(path, os.path.getsize(path) - 1 - cut)
    message = fault(path)
    assert "line 3, the last, is truncated" in message


def test_a_last_line_that_lost_whole_columns_is_cut_off_too(tmp_path):
    """64 float32 of 16 regions: without 2 x 16 of them the field is sound in itself, but narrower than the first line's."""
    path = str(tmp_path / "x.tsv")
    write_tsv(path, [Record("a", made(3, 64)), Record("b", made(12, 64))])
    os.truncate(path, os.path.getsize(path) - 1 - 12 * 4 * 4 // 3 * 2)
    assert "line 2, the last, is truncated" in fault(path)


def test_duplicate_names_are_named_and_counted(tmp_path):
    path = written(tmp_path, 4)
    change(path, 2, 0, b"image 0.jpg")
    change(path, 3, 0, b"image 0.jpg")
    message = fault(path)
    assert "line 3 repeats image 'image 0.jpg' of line 1 (2 such lines of 4)" in message


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_lines(tmp_path, content):
    (tmp_path / "x.tsv").write_bytes(content)
    assert "no images" in fault(str(tmp_path / "x.tsv"))
    assert os.listdir(tmp_path) == ["x.tsv"]


def test_files_that_are_absent_foreign_or_folders(tmp_path):
    assert "no such file" in fault(str(tmp_path / "absent.tsv"))
    assert "directory" in fault(str(tmp_path))
    (tmp_path / "x.tsv").write_bytes(bytes(range(256)).replace(b"\n", b"") * 4 + b"\n")
    assert "line 1 has 5 fields" in fault(str(tmp_path / "x.tsv"))
    (tmp_path / "y.tsv").write_bytes(b"\xff\xfe" + b"\tx" * 5 + b"\n")
    assert "line 1: the image's name is not UTF-8" in fault(str(tmp_path / "y.tsv"))


# damage inside one entry


@pytest.mark.parametrize(
    "field, value, words",
    [
        (1, b"wide", ["width is b'wide'"]),
        (2, b"inf", ["height is b'inf'"]),
        (2, b"0", ["500 x 0"]),
        (3, b"0", ["num_boxes is 0"]),
        (3, b"1.5", ["num_boxes is 1.5"]),
        (3, b"nan", ["num_boxes is b'nan'"]),
        (3, b"3", ["boxes holds 32 bytes", "3 x 4 of float32", "num_boxes 3"]),
        (3, b"1", ["boxes holds 32 bytes", "1 x 4"]),
        (4, b"AAAA", ["boxes holds 3 bytes"]),
        (4, b"A", ["boxes is not base64"]),
        (5, b"", ["features holds 0 bytes"]),
        (5, b"b'AAAA'", ["features is not base64"]),
        (5, base64.b64encode(bytes(41)), ["features holds 41 bytes", "2 rows of float32"]),
        (5, base64.b64encode(np.float32([1, np.nan, np.inf, 4]).tobytes()), ["2 of 4", "features", "NaN"]),
    ],
)
def test_damage_in_one_entry_is_named_and_leaves_the_others(tmp_path, field, value, words):
    path = written(tmp_path, 4)
    change(path, 1, field, value)
    message = bad_entry(path, "image 1.jpg")
    assert "line 2:" in message and all(word in message for word in words), message
    for number in (0, 2, 3):
        assert_same(BUA.open(path)[f"image {number}.jpg"], records(4)[number].regions)


def test_lxmerts_arrays_have_their_lengths_checked(tmp_path):
    path = str(tmp_path / "x_obj.tsv")
    write_lxmert(path, [Record("a", lxmert(3))])
    change(path, 0, 3, base64.b64encode(np.arange(3, dtype=np.int32).tobytes()))
    assert "objects_id holds 12 bytes, which is not 3 x 1 of int64" in bad_entry(path, "a", LXMERT)


@FUZZ
@given(data=st.data())
def test_any_damage_is_a_clear_error_or_another_number(tmp_path, data):
    path = written(tmp_path, 3)
    content = bytearray(open(path, "rb").read())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with open(path, "wb") as file:
        file.write(content)
    try:
        file = BUA.open(path)
    except CoderError:
        return
    for name in file:
        try:
            file[name]
        except ValueError as exc:
            assert path in str(exc)


def test_a_name_that_is_not_there_is_a_key_error_and_asking_reads_nothing(tmp_path):
    path = written(tmp_path)
    change(path, 1, 5, b"####")
    file = BUA.open(path)
    assert "image 1.jpg" in file and "nobody" not in file and file.get("nobody") is None
    with pytest.raises(KeyError):
        file["nobody"]


# the index beside the file


def test_indexing_shows_how_far_it_is(tmp_path, monkeypatch):
    path = written(tmp_path)
    bars = []

    class Bar(tqdm):
        def __init__(self, **options) -> None:
            super().__init__(**{**options, "disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr("tqdm.tqdm", Bar)
    BUA.open(path)
    ((bar),) = bars
    assert bar.n == bar.total == os.path.getsize(path) and "x.tsv" in bar.desc and bar.unit == "B"
    BUA.open(path)
    assert len(bars) == 1


def test_the_index_is_kept_used_and_dropped_when_the_file_changes(tmp_path, monkeypatch):
    path, scans = written(tmp_path), []
    monkeypatch.setattr(tsv, "_scan", lambda *args, scan=tsv._scan: scans.append(args) or scan(*args))
    first = dict(BUA.open(path))
    assert sorted(os.listdir(tmp_path)) == ["x.tsv", "x.tsv.index"] and len(scans) == 1
    for name, regions in BUA.open(path).items():
        assert_same(regions, first[name])
    assert len(scans) == 1
    os.utime(path, ns=(1, 1))
    BUA.open(path)
    assert len(scans) == 2
    write_tsv(path, records(2))
    assert len(BUA.open(path)) == 2 and len(scans) == 3


def test_an_index_of_the_other_layout_is_not_used(tmp_path):
    path = written(tmp_path)
    BUA.open(path)
    assert "10 of LXMERT" in fault(path, LXMERT)


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "foreign"])
def test_a_damaged_index_is_made_anew(tmp_path, damage):
    path = written(tmp_path)
    BUA.open(path)
    index = tmp_path / "x.tsv.index"
    whole = index.read_bytes()
    broken = {
        "empty": b"",
        "cut": whole[:-5],
        "flip": whole.replace(b"[0, ", b"[3, "),
        "foreign": b"something\nelse",
    }[damage]
    assert broken != whole
    index.write_bytes(broken)
    for (name, wanted, _), (found, regions) in zip(records(4), BUA.open(path).items(), strict=True):
        assert name == found
        assert_same(regions, wanted)
    assert index.read_bytes() == whole


def test_a_folder_that_cannot_be_written_only_costs_the_pass(tmp_path, monkeypatch):
    path = written(tmp_path)

    def refuse(*args):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    assert len(BUA.open(path)) == 4
    assert os.listdir(tmp_path) == ["x.tsv"]


def test_a_file_that_changes_under_us_is_noticed(tmp_path):
    path = written(tmp_path)
    file = BUA.open(path)
    write_tsv(path, records(3))
    with pytest.raises(ValueError, match="has changed since it was opened"):
        file["image 0.jpg"]


def test_the_index_pass_holds_no_line(tmp_path, monkeypatch):
    """A file without line ends, of another kind then, is read in blocks: no call asks for more than one."""
    monkeypatch.setattr(tsv, "_BLOCK", 1000)
    asked = []

    class File(io.FileIO):
        def readline(self, size=-1):
            asked.append(size)
            return super().readline(size)

    path = written(tmp_path, 3)
    monkeypatch.setattr(tsv, "open", lambda path, mode, buffering: File(path), raising=False)
    places = tsv._scan(path, BUA_LAYOUT)
    assert len(places) == 3 and set(asked) == {1000}


# processes and names


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_pickled_and_forked(tmp_path):
    check_processes(BUA, write_tsv, str(tmp_path / "x.tsv"))


def test_moved_with_its_index(tmp_path):
    path = written(tmp_path)
    BUA.open(path)
    (tmp_path / "there").mkdir()
    for ending in ("", ".index"):
        shutil.move(path + ending, tmp_path / "there")
    assert len(BUA.open(str(tmp_path / "there/x.tsv"))) == 4


def test_matches():
    for name in ("trainval_36.tsv", "a/karpathy_train.tsv.1"):
        assert BUA.matches(name) and not LXMERT.matches(name)
    assert LXMERT.matches("mscoco/train2014_obj36.tsv") and not BUA.matches("train2014_obj36.tsv")
    for name in ("x.tsv.index", "x.csv", "folder.tsv/x.h5", "tsv", "x.tsvx", "x.tsv.gz"):
        assert not BUA.matches(name) and not LXMERT.matches(name)
