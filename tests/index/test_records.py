"""The records of an index, read by several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coder_plugin.index import records_file
from coder_plugin.index.records import Records

COUNT = 300


def test_threads_share_the_records(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    connection = records_file.create(path)
    images = [(row, f"{row}.png", row, None, None) for row in range(COUNT)]
    records_file.add(connection, images, [], [(row, row, f"caption {row}") for row in range(COUNT)])
    records_file.finish(connection)
    opened = Records([records_file.RecordsFile(path, images=COUNT, captions=COUNT)], [COUNT], [COUNT])

    def read(row: int) -> tuple[str, str, int | None]:
        [image], [caption] = opened.images([row]), opened.captions_of(row)
        return image.key, caption, opened.row_of(f"{row}.png")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(COUNT))) == [(f"{row}.png", f"caption {row}", row) for row in range(COUNT)]
    opened.close()
