"""Reading released checkpoints without running them: both of torch's formats, Python 2's strings, hostile and foreign files."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coder_plugin.errors import CoderError
from scripts.convert_released import check_tensors, read_checkpoint

STATE = OrderedDict(
    weight=torch.arange(12, dtype=torch.float32).view(3, 4),
    turned=torch.arange(12, dtype=torch.float64).view(3, 4).t()[1:, :2],
    half=torch.ones(2, dtype=torch.float16),
    count=torch.tensor(7),
    nothing=torch.zeros(0, 5),
    parameter=torch.nn.Parameter(torch.full((2, 2), 3.0)),
)


@pytest.fixture(params=["zip", "old"])
def kind(request: Any) -> str:
    return request.param


def save(content: Any, path: Path, kind: str) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def python2(path: Path) -> Path:
    """The same old-format file, with its strings as Python 2 writes them."""
    content = path.read_bytes()
    file, out = io.BytesIO(content), b""
    for _ in range(5):
        operations = list(pickletools.genops(file))
        ends = [place for _, _, place in operations][1:] + [file.tell()]
        for (operation, argument, place), end in zip(operations, ends, strict=True):
            if operation.name == "BINUNICODE" and argument is not None:
                text = argument.encode("latin1")
                out += b"U" + bytes([len(text)]) + text
            else:
                out += content[place:end]
    path.write_bytes(out + content[file.tell() :])
    return path


def same(read: dict[str, torch.Tensor]) -> bool:
    return list(read) == list(STATE) and all(
        read[name].dtype == value.dtype and torch.equal(read[name], value) for name, value in STATE.items()
    )


def test_tensors_are_those_that_were_saved(tmp_path: Path, kind: str) -> None:
    content = read_checkpoint(save({"model": [STATE, STATE], "epoch": 3}, tmp_path / "a.pth", kind))
    assert content["epoch"] == 3
    assert same(check_tensors(content["model"][0])) and same(check_tensors(content["model"][1]))


def test_options_are_read_and_other_objects_are_refused(tmp_path: Path, kind: str) -> None:
    options = argparse.Namespace(data_name="coco", sizes=[1, 2.0], flag=None)
    content = read_checkpoint(save({"opt": options, "list": [1]}, tmp_path / "a.pth", kind))
    assert content == {"opt": options, "list": [1]}
    with pytest.raises(ValueError, match="'opt' is not a tensor"):
        check_tensors(content)
    with pytest.raises(ValueError, match="not a dict"):
        check_tensors(content["list"])
    for name, value in {"pathlib": tmp_path, "numpy": np.float64(3.0)}.items():
        path = save({"opt": argparse.Namespace(value=value)}, tmp_path / "a.pth", kind)
        with pytest.raises(CoderError, match=rf"it contains {name}\S*, and loading that could run code.*torch\.save\("):
            read_checkpoint(path)


def test_python_2(tmp_path: Path) -> None:
    content = {"model": [STATE], "opt": argparse.Namespace(caption="caf\xe9")}
    path = python2(save({"a": "caf\xe9"}, tmp_path / "a.pth", "old"))
    assert torch.load(path, encoding="latin1", weights_only=False) == {"a": "caf\xe9"}
    assert same(check_tensors(read_checkpoint(python2(save(content, tmp_path / "a.pth", "old")))["model"][0]))


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("name", ["system", "exec", "nested", "in a key"])
def test_nothing_runs(name: str, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "ran"
    command = Call(os.system, f"touch {mark}")
    hostile = {
        "system": command,
        "exec": Call(exec, f"open({str(mark)!r}, 'w').close()"),
        "nested": Call(pickle.loads, pickle.dumps(command)),
        "in a key": {(1, (2,)): command},
    }[name]
    path = save({"model": [STATE, hostile]}, tmp_path / "a.pth", kind)
    with pytest.raises(CoderError, match=r"a\.pth cannot be read as a PyTorch checkpoint: it contains"):
        read_checkpoint(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # it would have run
    assert mark.exists()


def test_a_tensor_larger_than_its_values_is_refused(tmp_path: Path, kind: str) -> None:
    state = {"huge": torch.ones(1).expand(1 << 40)}
    with pytest.raises(ValueError, match="'huge' is not a complete tensor"):
        check_tensors(read_checkpoint(save(state, tmp_path / "a.pth", kind)))


def test_every_truncation_is_an_error(tmp_path: Path, kind: str) -> None:
    content = save({"model": [STATE]}, tmp_path / "a.pth", kind).read_bytes()
    path = tmp_path / "b.pth"
    for length in [*range(0, len(content), 397), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CoderError, match=r"b\.pth cannot be read"):
            read_checkpoint(path)


def test_foreign_files(tmp_path: Path) -> None:
    contents = (b"", b"hello\n", pickle.dumps({"model": 1}), b"\x89PNG\r\n\x1a\n" + bytes(40), b"storages" + bytes(600))
    for number, content in enumerate(contents):
        (tmp_path / f"file{number}").write_bytes(content)
    np.savez(tmp_path / "arrays.npz", a=np.arange(3))
    for path in [*tmp_path.iterdir(), tmp_path, tmp_path / "absent"]:
        with pytest.raises(CoderError, match=f"{path.name} cannot be read"):
            read_checkpoint(path)
