"""The short way to read tar headers gives what ``tarfile`` gives."""

from __future__ import annotations

import tarfile

from hypothesis import example, given
from hypothesis import strategies as st

from coder_plugin.data.tars import CheckedTarInfo

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def read(kind: type[tarfile.TarInfo], block: bytes) -> object:
    try:
        header = kind.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        return type(error)
    return header.name, header.size, header.type


@given(
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=140),
    size=st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 40)),
    kind=st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]),
    form=st.sampled_from(FORMATS),
    change=st.one_of(st.none(), st.tuples(st.integers(0, 511), st.integers(0, 255))),
    repaired=st.booleans(),
)
@example(name="a.jpg", size=8, kind=tarfile.REGTYPE, form=tarfile.USTAR_FORMAT, change=(130, ord("9")), repaired=True)
@example(name="a.jpg", size=8, kind=tarfile.REGTYPE, form=tarfile.USTAR_FORMAT, change=(0, ord("b")), repaired=False)
@example(name="a.jpg", size=8, kind=tarfile.REGTYPE, form=tarfile.USTAR_FORMAT, change=(345, ord("b")), repaired=True)
def test_headers_are_those_of_tarfile(name, size, kind, form, change, repaired):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    try:
        block = bytearray(info.tobuf(form)[-tarfile.BLOCKSIZE :])
    except ValueError:  # too long a name for the format
        return
    if change is not None:
        used = change[0] < 100 or 124 <= change[0] < 136 or 148 <= change[0] < 157 or change[0] >= 345
        if repaired and not used:  # owner, rights, time: not used, so not checked beyond the checksum
            return
        block[change[0]] = change[1]
        if repaired:
            block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    assert read(CheckedTarInfo, bytes(block)) == read(tarfile.TarInfo, bytes(block))
