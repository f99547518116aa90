"""Reading checkpoints without running them: torch's two formats, hostile pickles, broken and foreign files."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import struct
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coder_plugin.errors import CoderError
from scripts.convert_released import check_tensors, read_checkpoint

FORMATS = ["zip", "old"]


def save(content: Any, path: Path, kind: str) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def wrap(pickled: bytes, path: Path, kind: str, *, values: dict[str, bytes] | None = None) -> Path:
    """A file of torch's whose main pickle is these bytes."""
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
            for key, content in (values or {}).items():
                archive.writestr(f"archive/data/{key}", content)
    else:
        system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
        head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, system)]
        path.write_bytes(b"".join([*head, pickled, pickle.dumps([], 2)]))
    return path


def python2(path: Path) -> Path:
    """The same old-format file, with its strings as Python 2 writes them."""
    content = path.read_bytes()
    file, out = io.BytesIO(content), b""
    for _ in range(5):
        begin = file.tell()
        operations = list(pickletools.genops(file))
        ends = [place for _, _, place in operations][1:] + [file.tell()]
        for (operation, argument, place), end in zip(operations, ends, strict=True):
            if operation.name == "BINUNICODE" and argument is not None:
                text = argument.encode("latin1")
                out += b"U" + bytes([len(text)]) + text
            else:
                out += content[place:end]
        assert file.tell() > begin
    path.write_bytes(out + content[file.tell() :])
    return path


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.made = (function, arguments) if state is None else (function, arguments, state)

    def __call__(self) -> None:  # so that a call's result can be pickled as what is called
        raise AssertionError

    def __reduce__(self) -> Any:
        return self.made


@pytest.fixture(params=FORMATS)
def kind(request: Any) -> str:
    return request.param


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that hostile pickles try to make."""
    return tmp_path / "ran"


STATE = OrderedDict(
    weight=torch.arange(12, dtype=torch.float32).view(3, 4),
    turned=torch.arange(12, dtype=torch.float64).view(3, 4).t()[1:, :2],
    half=torch.ones(2, dtype=torch.float16),
    brain=torch.ones(2, dtype=torch.bfloat16),
    count=torch.tensor(7),
    small=torch.tensor([1, 2], dtype=torch.int8),
    flags=torch.tensor([True, False]),
    nothing=torch.zeros(0, 5),
    parameter=torch.nn.Parameter(torch.full((2, 2), 3.0)),
)


def same(read: dict[str, torch.Tensor], state: Any = STATE) -> bool:
    return list(read) == list(state) and all(
        read[name].dtype == value.dtype and torch.equal(read[name], value) for name, value in state.items()
    )


def test_tensors_are_those_that_were_saved(tmp_path: Path, kind: str) -> None:
    content = read_checkpoint(save({"model": [STATE, STATE], "epoch": 3}, tmp_path / "a.pth", kind))
    assert content["epoch"] == 3
    assert same(check_tensors(content["model"][0])) and same(check_tensors(content["model"][1]))


def test_a_modules_state_dict(tmp_path: Path, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()  # an OrderedDict with an attribute, as checkpoints hold it
    assert same(check_tensors(read_checkpoint(save(state, tmp_path / "a.pth", kind))), state)


def test_views_share_their_values(tmp_path: Path, kind: str) -> None:
    whole = torch.arange(10.0)
    read = check_tensors(read_checkpoint(save({"a": whole[:4], "b": whole[4:]}, tmp_path / "a.pth", kind)))
    assert read["a"].tolist() == [0, 1, 2, 3] and read["b"].tolist() == [4, 5, 6, 7, 8, 9]


def test_options_are_read_and_other_objects_are_refused(tmp_path: Path, kind: str) -> None:
    options = argparse.Namespace(data_name="coco", sizes=[1, 2.0], flag=None)
    content = read_checkpoint(save({"opt": options, "list": [1]}, tmp_path / "a.pth", kind))
    assert content == {"opt": options, "list": [1]}
    with pytest.raises(ValueError, match="'opt' is not a tensor"):
        check_tensors(content)
    with pytest.raises(ValueError, match="not a dict"):
        check_tensors(content["list"])
    for name, value in {"pathlib": tmp_path, "numpy": np.float64(3.0), "slice": slice(3)}.items():
        path = save({"opt": argparse.Namespace(value=value)}, tmp_path / "a.pth", kind)
        with pytest.raises(CoderError, match=rf"it contains {name}\S*, and loading that could run code.*torch\.save\("):
            read_checkpoint(path)


def test_python_2(tmp_path: Path) -> None:
    content = {"model": [STATE], "opt": argparse.Namespace(caption="caf\xe9")}
    path = python2(save({"a": "caf\xe9"}, tmp_path / "a.pth", "old"))
    assert torch.load(path, encoding="latin1", weights_only=False) == {"a": "caf\xe9"}
    assert same(check_tensors(read_checkpoint(python2(save(content, tmp_path / "a.pth", "old")))["model"][0]))


def hostile(mark: Path) -> dict[str, bytes]:
    command = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w').close()"
    inner = pickle.dumps(Call(os.system, command))
    other = mark.with_suffix(".pkl")
    other.write_bytes(inner)
    short = command.encode()
    objects = {
        "system": Call(os.system, command),
        "eval": Call(eval, code),
        "exec": Call(exec, code),
        "chain": Call(Call(getattr, Call(__import__, "os"), "system"), command),
        "called twice": Call(Call(Call(getattr, Call(__import__, "os"), "system"), command)),
        "nested pickle": Call(pickle.loads, inner),
        "storage bytes": Call(torch.storage._load_from_bytes, inner),
        "torch.load": Call(torch.load, str(other)),
        "serialization": Call(torch.serialization.load, str(other), None),
        "hub": Call(torch.hub.load, str(mark.parent), "x"),
        "jit": Call(torch.jit.load, str(other)),
        "setstate": Call(torch.nn.Linear, 2, 2, state={"__class__": 1, "forward": Call(os.system, command)}),
        "in a state": Call(argparse.Namespace, state={"__setstate__": Call(os.system, command)}),
        "in a key": {(1, (2, (3,))): Call(os.system, command)},
        "tensor type": Call(torch._tensor._rebuild_from_type_v2, os.system, os.system, (command,), {}),
        "as an argument": Call(OrderedDict, [("a", Call(os.system, command))]),
    }
    dotted = b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c" + bytes([len(short)]) + short + b"\x85R."
    inside = (
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x15torch.os.system.xxxxx\x93\x8c" + bytes([len(short)]) + short + b"\x85R."
    )
    return {
        **{name: pickle.dumps(value, 2) for name, value in objects.items()},
        **{f"{name}, protocol 4": pickle.dumps(value, 4) for name, value in objects.items()},
        "dotted": dotted,
        "dotted inside": inside,
        "INST": b"(S'" + short + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + short + b"'\no.",
        "persistent": b"cos\nsystem\n(S'" + short + b"'\ntRQ.",
        "import": b"cantigravity\nfly_anti_gravity\n.",
    }


def test_nothing_runs(tmp_path: Path, kind: str, mark: Path) -> None:
    for label, pickled in hostile(mark).items():
        with pytest.raises(CoderError, match=r"a\.pth cannot be read as a PyTorch checkpoint"):
            read_checkpoint(wrap(pickled, tmp_path / "a.pth", kind))
        assert not mark.exists(), label
    assert "antigravity" not in sys.modules


def test_the_hostile_pickles_would_run(mark: Path) -> None:
    """Else the test above says nothing."""
    for label in ("system", "eval", "chain", "nested pickle", "dotted", "INST", "OBJ", "as an argument"):
        pickle.loads(hostile(mark)[label])
        assert mark.exists(), label
        mark.unlink()


def test_what_rebuilds_tensors_cannot_be_changed(tmp_path: Path, kind: str) -> None:
    targets = [
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nFloatStorage\n",
        b"cargparse\nNamespace\n",
        b"cx\ny\n",
    ]
    for target in targets:
        for state in (b"}(X\x06\x00\x00\x00forgedK\x01u", b"N}(X\x06\x00\x00\x00forgedK\x01u\x86"):
            with pytest.raises(CoderError):
                read_checkpoint(wrap(b"\x80\x02" + target + state + b"b.", tmp_path / "a.pth", kind))
    assert same(check_tensors(read_checkpoint(save(STATE, tmp_path / "b.pth", kind))))
    assert not hasattr(OrderedDict, "forged") and not hasattr(argparse.Namespace, "forged")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "forged") and not hasattr(torch.FloatStorage, "forged")


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"  # four values


def tensor(storage: bytes, offset: bytes, size: bytes, stride: bytes) -> bytes:
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89}tR."


BAD = {
    "reaches beyond": tensor(STORAGE, b"K\x01", b"K\x04\x85", b"K\x01\x85"),
    "is repeated": tensor(STORAGE, b"K\x00", b"M\xff\xffM\xff\xff\x86", b"K\x00K\x00\x86"),
    "negative offset": tensor(STORAGE, b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85"),
    "negative stride": tensor(STORAGE, b"K\x03", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "two strides": tensor(STORAGE, b"K\x00", b"K\x02\x85", b"K\x01K\x01\x86"),
    "size is a word": tensor(STORAGE, b"K\x00", b"X\x01\x00\x00\x00a\x85", b"K\x01\x85"),
    "no storage": tensor(b"N", b"K\x00", b"K\x02\x85", b"K\x01\x85"),
    "missing values": tensor(STORAGE.replace(b"\x000X", b"\x001X"), b"K\x00", b"K\x02\x85", b"K\x01\x85"),
    "too few arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "unknown storage": tensor(STORAGE.replace(b"FloatStorage", b"Float"), b"K\x00", b"K\x02\x85", b"K\x01\x85"),
    "count is a word": tensor(
        STORAGE.replace(b"K\x04tQ", b"X\x01\x00\x00\x00atQ"), b"K\x00", b"K\x02\x85", b"K\x01\x85"
    ),
    "described in two ways": b"\x80\x02" + STORAGE + STORAGE.replace(b"K\x04tQ", b"K\x05tQ") + b"\x86.",
    "other bytes": b"\x80\x02" + STORAGE.replace(b"K\x04tQ", b"K\x05tQ") + b".",
    "extension": b"\x80\x02\x82\x07.",
    "a forged memo": b"\x80\x02Nr\xff\xff\xff\xff" + b"0",
    "hash of a list": b"\x80\x02}]K\x01s.",
    "nothing on the stack": b"\x80\x020.",
    "unknown operation": b"\x80\x02\xff.",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pickles_are_errors(name: str, tmp_path: Path, kind: str) -> None:
    path = wrap(BAD[name], tmp_path / "a.pth", kind, values={"0": bytes(16)})
    refused = r"a\.pth cannot be read as a PyTorch checkpoint|is not a (complete )?tensor"
    with pytest.raises((CoderError, ValueError), match=refused):
        check_tensors({"a": read_checkpoint(path)})


@pytest.mark.parametrize("saved", [b"K\x07", b"X\x01\x00\x00\x00a", b")", b"(K\x01K\x02K\x03K\x04K\x05t", b"N", b"}"])
def test_odd_persistent_ids(saved: bytes, tmp_path: Path, kind: str) -> None:
    path = wrap(b"\x80\x02}X\x01\x00\x00\x00a" + saved + b"Qs.", tmp_path / "a.pth", kind)
    with pytest.raises(CoderError, match="cannot be read"):
        read_checkpoint(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": "b" * 10_000_000}))
    with pytest.raises(CoderError, match="compressed"):
        read_checkpoint(path)


@pytest.mark.parametrize("change", [("byteorder", b"none"), ("data/0", b"123")])
def test_a_changed_archive(change: tuple[str, bytes], tmp_path: Path) -> None:
    source, path = save(STATE, tmp_path / "a.pth", "zip"), tmp_path / "b.pth"
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as out:
        for name in archive.namelist():
            out.writestr(name, change[1] if name.endswith(change[0]) else archive.read(name))
    with pytest.raises(CoderError, match="endian|byte"):
        read_checkpoint(path)


def test_the_old_formats_counts(tmp_path: Path) -> None:
    path = save({"a": torch.ones(3)}, tmp_path / "a.pth", "old")
    content = path.read_bytes()
    for count in (4, 2, -1, 2**62):
        path.write_bytes(content[:-20] + struct.pack("<q", count) + content[-12:])
        with pytest.raises(CoderError, match="storage has wrong byte size: expected"):
            read_checkpoint(path)


def test_a_forged_memo_takes_no_memory(tmp_path: Path) -> None:
    path = wrap(b"\x80\x02Nr\x00\x00\x00\x01.", tmp_path / "a.pth", "zip")  # the 16,777,216th
    tracemalloc.start()
    try:
        assert read_checkpoint(path) is None
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_every_truncation_is_an_error(tmp_path: Path, kind: str) -> None:
    content = save({"model": [STATE]}, tmp_path / "a.pth", kind).read_bytes()
    path = tmp_path / "b.pth"
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CoderError, match=r"b\.pth cannot be read"):
            read_checkpoint(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_other_bytes_are_data_or_an_error(tmp_path: Path, kind: str, changes: list[tuple[float, int]]) -> None:
    content = bytearray(save({"model": [STATE]}, tmp_path / "a.pth", kind).read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path = tmp_path / "b.pth"
    path.write_bytes(content)
    try:
        read = read_checkpoint(path)
    except CoderError:
        return
    states = read.get("model") if isinstance(read, dict) else None
    if isinstance(states, list) and len(states) == 1:
        try:
            check_tensors(states[0])
        except ValueError as error:
            assert "is no" in str(error)


def test_foreign_files(tmp_path: Path) -> None:
    files = {
        "empty": b"",
        "text": b"hello\n",
        "pickle": pickle.dumps({"model": 1}),
        "png": b"\x89PNG\r\n\x1a\n" + bytes(40),
        "tar": b"storages" + bytes(600),
        "zeros": bytes(1000),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "array.npy", np.arange(3))
    np.savez(tmp_path / "arrays.npz", a=np.arange(3))
    for path in tmp_path.iterdir():
        with pytest.raises(CoderError, match=f"{path.name} cannot be read"):
            read_checkpoint(path)
    with pytest.raises(CoderError, match="cannot be read"):
        read_checkpoint(tmp_path)
    with pytest.raises(CoderError, match="cannot be read"):
        read_checkpoint(tmp_path / "absent")


def test_a_torchscript_archive_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    with pytest.raises(CoderError, match="TorchScript"):
        read_checkpoint(path)
