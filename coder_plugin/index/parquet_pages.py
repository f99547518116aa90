"""The page headers of a Parquet file, compared with its footer.

Arrow trusts a page's own number of values, and a few bytes can stand for 2**31 of them.
"""

from __future__ import annotations

from typing import IO

from coder_plugin.index.thrift import I32, STRUCT, read_struct

_LONGEST = 1 << 16  # bytes of a header
_DATA_PAGE, _PLAIN = 0, 0
# fields of a page's header, and of the header of a page of data in it
_TYPE, _SIZE, _STORED, _DATA, _COUNT, _ENCODING = (1, I32), (2, I32), (3, I32), (5, STRUCT), (1, I32), (2, I32)


def check_pages(file: IO[bytes], start: int, length: int, values: int) -> None:
    """Check that a column chunk consists of pages of plain, uncompressed data with ``values`` values in all.

    Args:
        file: the Parquet file.
        start: where the chunk's first page begins, in bytes.
        length: of the chunk in bytes.
        values: that the footer says it has.

    Raises:
        ValueError: it does not.
    """
    end, total = start + length, 0
    while start < end:
        file.seek(start)
        header, used = read_struct(file.read(_LONGEST))
        data = header.get(_DATA, {})
        if header.get(_TYPE) != _DATA_PAGE or data.get(_ENCODING) != _PLAIN:
            raise ValueError("a page is in a dictionary, or not of plain data")
        size, count = header.get(_SIZE, -1), data.get(_COUNT, -1)
        if header.get(_STORED) != size or size < 0 or count < 0:
            raise ValueError("a page is compressed, or has no size")
        start, total = start + used + size, total + count
    if start != end or total != values:
        raise ValueError("its pages have other sizes than its footer says")
