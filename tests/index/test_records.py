"""The records of an index, read by several threads."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coder_plugin.errors import CoderError
from coder_plugin.index import records_file
from coder_plugin.index.records import Records
from coder_plugin.index.records_file import RecordsFile

COUNT = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records.sqlite"
    connection = records_file.create(path)
    images = [(row, f"{row}.png", row, None, None) for row in range(COUNT)]
    records_file.add(connection, images, [], [(row, row, f"caption {row}") for row in range(COUNT)])
    records_file.finish(connection)
    return path


def test_threads_share_the_records(path: Path) -> None:
    opened = Records([RecordsFile(path, images=COUNT, captions=COUNT)], [COUNT], [COUNT])

    def read(row: int) -> tuple[str, str, int | None]:
        [image], [caption] = opened.images([row]), opened.captions_of(row)
        return image.key, caption, opened.row_of(f"{row}.png")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(COUNT))) == [(f"{row}.png", f"caption {row}", row) for row in range(COUNT)]
    opened.close()


def test_a_look_up_waits_for_no_filter(path: Path) -> None:
    opened = RecordsFile(path)
    many, end = ", ".join(f"images AS i{number}" for number in range(9)), time.monotonic() + 2
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(opened.where, f"(SELECT max(i0.path) FROM {many}) = 1", size=COUNT, end=end)
        while not slow.running():
            time.sleep(0.01)
        for row in range(20):
            assert opened.images([row])[0][1] == f"{row}.png"
            assert opened.where(f"row = {row}", size=COUNT, end=end).tolist() == [row]
        assert not slow.done()
        with pytest.raises(CoderError, match="it takes over"):
            slow.result()
    opened.close()


def test_a_file_is_opened_once(path: Path) -> None:
    opened = RecordsFile(path)
    files = os.listdir("/proc/self/fd")
    assert len(opened.where("1", size=COUNT, end=time.monotonic() + 9)) == COUNT
    assert os.listdir("/proc/self/fd") == files
    opened.close()


def test_too_many_open_files_are_named(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(CoderError, match="cannot be opened: Too many open files; build the index again with"):
            RecordsFile(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_captions_are_cut_where_they_are_read(tmp_path: Path) -> None:
    connection = records_file.create(tmp_path / "records.sqlite")
    texts = ["ab猫def", "", "short", "last"]
    records_file.add(connection, [(0, "a.png", 0, None, None)], [], [(row, 0, text) for row, text in enumerate(texts)])
    records_file.finish(connection)
    opened = Records([RecordsFile(tmp_path / "records.sqlite", images=1, captions=4)], [1], [4])
    assert opened.captions_of(0) == tuple(texts)
    assert opened.captions_of(0, limit=2) == ("ab猫def", "") and opened.captions_of(0, limit=9) == tuple(texts)
    assert opened.captions_of(0, limit=3, characters=3) == ("ab猫", "", "sho")
    opened.close()
