"""Word vector files: every format that is read, and that every fault is told in one line that names it."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from coder_plugin.concepts import WordVectors, vectors
from coder_plugin.errors import CoderError

ROWS = "the 1 2\ncat -0.5 4e-1\ndog 3 5\n"


@pytest.fixture
def write(tmp_path: Path):
    def call(content: str | bytes, name: str = "vectors.txt") -> WordVectors:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return WordVectors(path)

    return call


def fault(file: WordVectors, words=("cat",)) -> str:
    with pytest.raises(CoderError) as caught:
        file.read(words)
    assert "\n" not in str(caught.value) and str(file.path) in str(caught.value)
    return str(caught.value)


def zipped(**members: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in members.items():
            archive.writestr(f"{name}.txt", text)
    return content.getvalue()


# what is read


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        ROWS.rstrip("\n"),
        f"3 2\n{ROWS}",  # word2vec
        f"3 2\r\n{ROWS}".replace("\n", "\r\n"),
        ROWS.replace("\n", " \n"),  # fastText ends its lines with a space
        ROWS.replace(" ", "\t"),
        f"\ufeff{ROWS}",
        f"{ROWS}\n\n",
        gzip.compress(ROWS.encode(), mtime=0),
        zipped(one=ROWS),
    ],
    ids="glove unfinished word2vec crlf fasttext tabs mark blank gzip zip".split(),
)
def test_formats(write, content):
    found = write(content).read({"cat", "dog", "bird"})
    assert found.dim == 2 and set(found.vectors) == {"cat", "dog"}
    torch.testing.assert_close(found.vectors["cat"], torch.tensor([-0.5, 0.4]))
    assert found.vectors["dog"].dtype == torch.float32 and found.vectors["dog"].tolist() == [3, 5]
    assert found.sigma == pytest.approx(np.std([1, 2, -0.5, 0.4, 3, 5]))


def test_words_of_any_script_and_rows_that_are_no_utf8(write):
    file = write("été 1 2\n".encode() + b"\xff\xfe 3 4\n" + "a\u00a0b 5 6\nc\u2028d 7 8\n猫 9 9\n".encode())
    found = file.read({"été", "猫", "a\u00a0b"}).vectors
    assert found["猫"].tolist() == [9, 9] and found["été"].tolist() == [1, 2] and found["a\u00a0b"].tolist() == [5, 6]


def test_sigma_is_of_the_first_rows_and_later_ones_are_parsed_only_where_wanted(write, monkeypatch):
    monkeypatch.setattr(vectors, "SIGMA_ROWS", 2)
    found = write("a 1 2\nb 3 4\nthe x y\n. . 5 6\ncat 70 80\n").read({"cat"})
    assert found.sigma == pytest.approx(np.std([1, 2, 3, 4])) and found.vectors["cat"].tolist() == [70, 80]
    assert "line 3 is not 'word v1 … v2' with finite numbers: it has 3 columns" in fault(write("a 1 2\nb 3 4\nthe 1 2 3\n"))
    assert "line 3 is not 'word v1 … v2' with finite numbers: it has 1 columns" in fault(write("a 1 2\nb 3 4\nthe 1\n"))
    assert "line 3" in fault(write("a 1 2\nb 3 4\ncat x y\n"))


# what is refused


@pytest.mark.parametrize(
    "content, words",
    [
        ("", ["no word vectors"]),
        ("\n\n", ["no word vectors"]),
        ("3 2\n", ["no word vectors"]),
        ("cat\ndog\n", ["line 1", "word v1"]),
        ("some text that is no table\n", ["line 1", "GloVe"]),
        ("the 1 2\ncat 3\n", ["line 2", "v2", "1 columns"]),
        ("the 1 2\n\ncat 3 4 5\n", ["line 3", "v2", "3 columns"]),
        ("9 3\nthe 1 2\n", ["line 2", "v3", "2 columns"]),
        ("the 1 2\ncat 3 x\n", ["line 2"]),
        ("the 1 2\ncat nan 4\n", ["line 2", "finite"]),
        ("the 1 2\ncat\n", ["line 2"]),
        (b"3 2\nthe \x00\x00\x80\x3f\xcd\xcc\xcc\xbd", ["line 2", "binary"]),
        (b"\x80\x02}q\x00(U\x03cat", ["line 1", "not text"]),
        (b"x" * (1 << 21), ["line 1", "not text"]),
        (gzip.compress(ROWS.encode() * 99, mtime=0)[:-20], ["cannot be read after line"]),
        (gzip.compress(ROWS.encode(), mtime=0)[:12] + b"\xff" * 20, ["cannot be read after line 0"]),
        (zipped(a=ROWS, b=ROWS), ["2 files", "a.txt, b.txt", "unpack one"]),
        (b"PK\x03\x04 broken", ["cannot be read"]),
    ],
)
def test_faults(write, content, words):
    message = fault(write(content))
    assert all(word in message for word in words), message
