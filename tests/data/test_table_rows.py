"""Quotes in tables: legal ones are read as by Python's csv, and one that is never closed loses no row."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.data import open_source
from coder_plugin.data.table_rows import read_rows


def rows(text: str, separator: str = "\t", image: str = "filepath") -> list[tuple[int, list[str]]]:
    return list(read_rows(list(io.StringIO(text, newline="")), separator, image))


def table(count: int, quoted: dict[int, str], separator: str = "\t", *, name: str = "{}.jpg") -> str:
    lines = [separator.join((name.format(n), quoted.get(n, f"a thing {n}"))) for n in range(count)]
    return "\n".join([f"filepath{separator}title", *lines]) + "\n"


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(CELLS, st.text('a",\n\r\t', max_size=8)), min_size=1), st.sampled_from("\t,;|"))
def test_what_csv_writes_is_read_as_it_was_written(pairs, separator):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=separator).writerows([("filepath", "title"), *((f"{a.strip()}.jpg ", b) for a, b in pairs)])
    read = [row for _, row in rows(buffer.getvalue(), separator)]
    assert read == list(csv.reader(io.StringIO(buffer.getvalue(), newline=""), delimiter=separator))
    assert len(read) == 1 + len(pairs)


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize(
    "quoted",
    [
        {2: '"a thing', 32: 'a thing" it says'},  # closed in the middle of a later field
        {2: '"a thing', 32: 'it is 12"'},  # closed at the end of one: legal, by the letter
        {2: '"a thing', 32: '"a thing'},
        {2: '"a thing'},  # never closed
        {39: '"a thing'},
        {2: 'it is 12" wide', 5: 'two""', 7: "a 'b'"},
    ],
    ids=str,
)
def test_a_quote_that_is_never_closed_loses_no_row(tmp_path, caplog, separator, quoted):
    path = tmp_path / "a.tsv"
    path.write_text(table(40, quoted, separator))
    items = [item for _, item in open_source(str(path)).items()]
    assert [item.key for item in items] == [f"{n}.jpg" for n in range(40)] and not any(item.fault for item in items)
    assert [item.captions[0] for item in items] == [quoted.get(n, f"a thing {n}") for n in range(40)]
    stray = [n for n, text in quoted.items() if text.startswith('"')]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == bool(stray)
    if stray:
        assert f"line {stray[0] + 2}: a quote that is never closed is read as a character ({len(stray)} such" in said[0]


def test_a_text_of_several_lines_is_legal_and_its_lines_are_counted(caplog):
    text = 'filepath,title\na.jpg,"one, two\nthree, four\n\nfive"\n\nb.jpg,six\n'
    assert rows(text, ",")[1:] == [(2, ["a.jpg", "one, two\nthree, four\n\nfive"]), (7, ["b.jpg", "six"])]
    assert not caplog.records
    for end in ("\r\n", "\r"):
        assert [row for _, row in rows(text.replace("\n", end), ",")][2] == ["b.jpg", "six"]


def test_where_the_images_have_no_ending_lines_that_may_be_rows_are_named(caplog):
    text = table(6, {1: '"one', 3: 'three"'}, name="image{}")
    assert len(rows(text)) == 1 + 4
    assert "line 3: a quoted text runs over lines that may be rows (1 such texts)" in caplog.text
    caplog.clear()
    other = "a.jpg\tone\nb.jpg\t\"two\nc.png\tthree\"\n"  # the row within has another ending than its own
    assert len(rows("filepath\ttitle\n" + other)) == 1 + 2 and "line 3: a quoted text runs over" in caplog.text
    caplog.clear()
    assert len(rows(table(6, {1: '"one'}, name="image{}"))) == 1 + 6
    assert "line 3: a quote that is never closed" in caplog.text and "may be rows" not in caplog.text
    caplog.clear()
    assert len(rows(table(6, {1: '"one\ntwo\nthree"'}, name="image{}"))) == 1 + 6 and not caplog.records
