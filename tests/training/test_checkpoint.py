"""State survives bit for bit, damage is refused by name, and a kill at any point leaves a checkpoint to go on from."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import random
import struct
import threading
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from coder_plugin.errors import CoderError
from coder_plugin.training import checkpoint
from coder_plugin.training.checkpoint import checkpoints, load, newest, prune, save
from coder_plugin.training.serialization import pack, unpack
from tests import fresh, gloo


def bits(tensor: torch.Tensor) -> list:
    """Compared as bytes: NaN differs from itself and -0.0 equals 0.0, neither of which will do here."""
    flat = tensor.detach().resolve_conj().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).tolist()


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        metadata = same(getattr(left, "_metadata", None), getattr(right, "_metadata", None))
        return metadata and same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return struct.pack("d", left) == struct.pack("d", right) if isinstance(left, float) else left == right


def through_json(tree):
    tensors, skeleton = pack(tree)
    return unpack(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))


def through_disk(tree, directory: Path):
    return load(save(directory, "round", manifest={"step": 0}, common={"part": tree}))[1]["part"]


# ---------------------------------------------------------------------------------------------------------------- trees

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DENSE = [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits", "torch.int1"))]
DENSE = [d for d in DENSE if d.itemsize > 1 or "int" not in str(d) or d in (torch.int8, torch.uint8)]
text = st.text(st.characters(codec=None, categories=None), max_size=6) | st.sampled_from(
    ["$", "name", "__metadata__", "a.b"]
)
whole = st.integers() | st.integers(-(2**200), 2**200)
keys = st.recursive(
    st.none() | st.booleans() | whole | text, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4
)


@st.composite
def tensors(draw):
    """Any bits in any layout: NaN payloads, 0-d, empty, transposed, strided, expanded, views of one storage."""
    dtype = draw(st.sampled_from([d for d in DENSE if d != torch.bool]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    made = (
        torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )
    if draw(st.booleans()) and made.dim() > 1:
        made = made.transpose(0, -1)
    return made[0] if draw(st.booleans()) and made.dim() and made.shape[0] else made


kinds = hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes()
arrays = hnp.arrays(
    kinds | hnp.boolean_dtypes() | hnp.datetime64_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)
)
leaves = (
    keys | st.floats(allow_nan=True) | tensors() | arrays | arrays.filter(lambda a: a.size).map(lambda a: a.ravel()[0])
)
leaves |= st.lists(st.integers(-(2**63), 2**63 - 1), min_size=14, max_size=20) | hnp.arrays("U3", 2)


def branch(children):
    lists = st.lists(children, max_size=4)
    maps = st.dictionaries(keys, children, max_size=4)
    marked = st.fixed_dictionaries({"$": st.sampled_from(["tuple", "tensor", "float"]) | children, "items": children})
    return lists | lists.map(tuple) | maps | maps.map(OrderedDict) | maps.map(Counter) | marked


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(leaves, branch, max_leaves=12))
def test_any_tree_survives_strict_json_and_safetensors(tmp_path_factory, tree):
    assert same(through_json(tree), tree)
    assert same(through_disk(tree, tmp_path_factory.getbasetemp() / "trees"), tree)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_every_dtype(dtype, tmp_path):
    flat = torch.arange(dtype.itemsize * 12, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    made = flat.view(dtype).reshape(3, 4)
    tree = {"whole": made, "columns": made.t()[1:], "scalar": made[1, 2], "empty": made[:0], "again": made}
    assert same(through_disk(tree, tmp_path), tree)


def test_dtypes_include_the_ones_that_matter():
    wanted = {
        torch.bfloat16,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.float8_e4m3fn,
        torch.int8,
    }
    assert wanted <= set(DENSE)


def test_conjugate_and_negative_views_are_resolved():
    made = torch.tensor([1 + 2j, 3 - 4j])
    got = unpack(*pack([made.conj(), made.conj().imag]))
    assert got[0].tolist() == [1 - 2j, 3 + 4j] and got[1].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    "value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, struct.unpack(">d", b"\x7f\xf0" + b"\1" * 6)[0]]
)
def test_floats_keep_their_bits(value):
    assert same(through_json({"x": value}), {"x": value})


AWKWARD_KEYS = [1, "1", True, "True", None, "None", (1, "a", (None,)), -(10**6000), "\ud800\udc00"]


@pytest.mark.parametrize("key", AWKWARD_KEYS, ids=range(len(AWKWARD_KEYS)))
def test_keys_keep_their_types(key):
    tree = {key: torch.ones(1), "other": 2**6000}
    assert same(through_json(tree), tree)


def test_keys_that_share_a_path_do_not_share_a_tensor(tmp_path):
    tree = {3: torch.tensor(1), "3": torch.tensor(2), "a.b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    tree |= {"": torch.tensor(5), "__metadata__": torch.tensor(6)}  # the second is safetensors' own word
    assert same(through_disk(tree, tmp_path), tree)


def test_long_runs_of_integers_are_compact():
    parts, skeleton = pack(random.Random(0).getstate())
    assert len(json.dumps(skeleton)) < 200 and sum(t.numel() for t in parts.values()) == 625
    assert same(unpack(*pack([True] * 40)), [True] * 40) and same(unpack(*pack([2**63] * 40)), [2**63] * 40)


def test_a_state_dict_keeps_its_own_tensor_names(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    path = save(tmp_path, "a", manifest={"step": 0}, common={"model": module.state_dict()})
    assert load_file(path / "model.safetensors").keys() == module.state_dict().keys()
    loaded = load(path)[1]["model"]
    assert same(loaded, module.state_dict()) and loaded._metadata["1"]["version"] == 2


class Colour(IntEnum):
    RED = 1


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("leaf", "said"),
    [({1, 2}, "a set"), (b"x", "a bytes"), (1j, "a complex"), (Colour.RED, "Colour"), (torch.Size([1]), "torch.Size")]
    + [
        (torch.ones(2).as_subclass(Odd), "Odd"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ]
    + [(np.array([object()]), "object"), (np.zeros(1, "i4,f8"), "numpy.ndarray"), (lambda: 0, "function")]
    + [(torch.device("cpu"), "torch.device"), (np.str_("a"), "numpy.str_"), (range(3), "a range")],
)
def test_anything_else_is_refused_by_path(leaf, said):
    with pytest.raises(CoderError, match=r"^optimizer\.state\.3\.foo is a ") as caught:
        pack({"optimizer": {"state": [0, 1, 2, {"foo": leaf}]}})
    assert said in str(caught.value)


def test_refusals_of_keys_and_of_endless_trees():
    with pytest.raises(CoderError, match="optimizer.state has a key that is a float"):
        pack({"state": {1.5: 0}}, root="optimizer")
    endless: list = []
    endless.append(endless)
    with pytest.raises(CoderError, match="contains itself"):
        pack(endless)
    deep: list = []
    for _ in range(90):
        deep = [{"x": (deep,)}] if _ < 30 else deep
    assert same(unpack({}, json.loads(json.dumps(pack(deep)[1]))), deep)


@pytest.mark.parametrize(
    "skeleton",
    [{"$": "tensor", "name": "gone"}, {"$": "eval", "code": "1"}, {"$": "tuple"}, {"$": "dict", "items": [[[1], 2]]}]
    + [
        {"$": ["tuple"]},
        {"$": "int", "hex": "zz"},
        {"$": "tensor", "name": "t", "dtype": "load"},
        {"no": "mention of t"},
    ]
    + [
        {"$": "array", "name": "t", "dtype": "O", "shape": [1]},
        {"$": "array", "name": "t", "dtype": "f4", "shape": [9]},
    ]
    + [
        {"$": "array", "name": "t", "dtype": "f4", "shape": [-1, -2]},
        {"$": "array", "name": "t", "dtype": "O,i4", "shape": [1]},
    ],
    ids=str,
)
def test_malformed_skeletons_are_coder_errors(skeleton):
    with pytest.raises(CoderError):
        unpack({"t": torch.zeros(8, dtype=torch.uint8)}, skeleton)


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [("O", [1], "cannot hold the numpy dtype"), ("O,i4", [1], "cannot hold"), ("u1", [9], "does not have 8 bytes")],
)
def test_malformed_arrays(dtype, shape, said):
    """Refused by our own check: numpy would broadcast one byte over any shape, and read bytes as pointers."""
    node = {"$": "array", "name": "t", "dtype": dtype, "shape": shape}
    with pytest.raises(CoderError, match=said):
        unpack({"t": torch.zeros(8, dtype=torch.uint8)}, node)
    with pytest.raises(CoderError, match="cannot hold|does not have 1 bytes"):
        unpack({"t": torch.zeros(1, dtype=torch.uint8)}, node)


# ------------------------------------------------------------------------------------------------------- training state


def regression(seed: int, kind: str):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])


def steps(model, optimizer, scheduler, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = (model(torch.randn(6, 4)) - torch.randn(6, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_goes_on_bit_for_bit(kind, tmp_path):
    run = regression(0, kind)
    steps(*run, 4)
    state = {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), run, strict=True)}
    path = save(tmp_path, "a", manifest={"step": 4}, common=state, own={"rng": torch.get_rng_state()})
    expected = steps(*run, 4)

    other = regression(1, kind)
    _, common, own = load(path)
    for name, part in zip(("model", "optimizer", "scheduler"), other, strict=True):
        part.load_state_dict(common[name])
    torch.set_rng_state(own["rng"])
    assert steps(*other, 4) == expected
    assert all(same(ours.state_dict(), theirs.state_dict()) for ours, theirs in zip(run, other, strict=True))


def test_random_states_reproduce_the_next_numbers(tmp_path):
    generator, torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(4)
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3), generator.integers(9, dtype=np.uint32)
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    state |= {"dict": np.random.get_state(legacy=False), "generator": generator.bit_generator.state}
    state["torch_generator"] = torch_generator.get_state()

    def draw():
        numbers = [random.random(), random.gauss(0, 1), *np.random.standard_normal(3), *torch.randn(3).tolist()]
        drawn = generator.integers(2**31, size=3, dtype=np.uint32).tolist()
        return numbers + drawn + torch.randn(3, generator=torch_generator).tolist()

    path = save(tmp_path, "a", manifest={"step": 0}, own={"rng": state})
    expected = draw()
    assert draw() != expected
    back = load(path)[2]["rng"]
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    generator.bit_generator.state = back["generator"]
    torch_generator.set_state(back["torch_generator"])
    assert draw() == expected and same(back, state)


# -------------------------------------------------------------------------------------------------------- files on disk


def write(directory: Path, name: str, step: int, **fields) -> Path:
    parts = {"model": {"weight": torch.full((50,), float(step))}, "trainer": {"loss": math.nan, "seen": [step] * 3}}
    return save(directory, name, manifest={"step": step, **fields}, common=parts, own={"rng": (step, "x")})


def step_of(path: Path) -> int:
    """The step, if manifest and parts agree on it."""
    manifest, common, own = load(path)
    assert own is not None
    held = {manifest["step"], int(common["model"]["weight"][7]), common["trainer"]["seen"][0], own["rng"][0]}
    return held.pop() if len(held) == 1 else -1


def edit(path: Path, **changes) -> None:
    """What an attacker who knows the format can do: the manifest is consistent again afterwards."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    manifest.pop("manifest_sha256")
    file.write_text(json.dumps(manifest | {"manifest_sha256": checkpoint.sha256_json(manifest)}))


def test_layout_and_manifest(tmp_path):
    path = write(tmp_path, "epoch_1", 7, epoch=1, objective={"terms": ("clip", "dcl")})
    assert path == tmp_path / "epoch_1" and [p.name for p in tmp_path.iterdir()] == ["epoch_1"]
    manifest, common, own = load(path)
    stems = ("model", "trainer", "rng-rank0")
    assert set(manifest["files"]) == {f"{stem}.{end}" for stem in stems for end in ("json", "safetensors")}
    assert {p.name for p in path.iterdir()} == {*manifest["files"], "manifest.json"}
    assert len({p.stat().st_mode for p in path.iterdir()}) == 1  # safetensors' own files are private otherwise
    found = {field: manifest[field] for field in ("format", "step", "epoch", "objective", "world_size")}
    assert found == {"format": 1, "step": 7, "epoch": 1, "objective": {"terms": ["clip", "dcl"]}, "world_size": 1}
    assert common.keys() == {"model", "trainer"} and own == {"rng": (7, "x")} and step_of(path) == 7
    assert load(path, rank=1)[2] is None and load(path, rank=1)[1].keys() == common.keys()


FILES = ["model.safetensors", "model.json", "rng-rank0.safetensors", "rng-rank0.json", "manifest.json"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    at = raw.index(b"step") + 7 if file.name == "manifest.json" else len(raw) - 1  # the step is 2, then 3: JSON still
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_named_and_skipped(harm, name, tmp_path, caplog):
    write(tmp_path, "good", 1)
    path = write(tmp_path, "bad", 2)
    assert newest(tmp_path) == path
    harm(path / name)
    with pytest.raises(CoderError) as caught:
        load(path)
    assert str(path / name) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == tmp_path / "good"
    assert str(path / name) in caplog.text


def test_nothing_is_used_before_everything_is_checked(tmp_path, monkeypatch):
    path = write(tmp_path, "bad", 2)
    flip(path / "rng-rank0.json")  # the last of the files
    monkeypatch.setattr(checkpoint, "load_file", lambda *_, **__: pytest.fail("a file was opened"))
    with pytest.raises(CoderError, match="rng-rank0.json"):
        load(path)


def test_without_verify_presence_and_size_still_count(tmp_path):
    path = write(tmp_path, "bad", 2)
    flip(path / "model.safetensors")
    assert (
        load(path, verify=False)[0]["step"] == 2 and newest(tmp_path, verify=False) == path and newest(tmp_path) is None
    )
    truncate(path / "model.safetensors")
    with pytest.raises(CoderError, match="model.safetensors has"):
        load(path, verify=False)
    assert newest(tmp_path, verify=False) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "step": 9}', "is not the manifest"),
        ("[1]", "is not the manifest"),
        ('{"format": "x"}', "is not the"),
    ]
    + [
        ('{"format": 2, "other": 1}', "format 2, from a newer"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_foreign_and_future_manifests(text, said, tmp_path, caplog):
    write(tmp_path, "good", 1)
    path = write(tmp_path, "bad", 9)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CoderError, match=f"bad/manifest.json.*{said}"):
        load(path)
    assert newest(tmp_path) == tmp_path / "good" and "bad/manifest.json" in caplog.text
    write(tmp_path, "older", 0)
    assert prune(tmp_path, ["good"]) == ["older"] and path.exists()  # not ours to remove
    assert prune(tmp_path, []) == [] and newest(tmp_path) == tmp_path / "good"  # nothing whole would remain


@pytest.mark.parametrize("listed", ["../secret.json", "/etc/passwd", "model.pt", "sub/x.json", "lone.json"])
def test_a_manifest_cannot_point_elsewhere(listed, tmp_path):
    path = write(tmp_path, "bad", 2)
    (tmp_path / "secret.json").write_text("{}")
    files = json.loads((path / "manifest.json").read_text())["files"]
    entry = files["model.json"]
    other = {} if listed == "lone.json" else {listed.replace(".json", ".safetensors"): entry}
    edit(path, files=files | {listed: entry} | other)
    with pytest.raises(CoderError, match="manifest.json lists"):
        load(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(writer, tmp_path):
    fired, path = tmp_path / "fired", write(tmp_path / "run", "bad", 2)
    file = path / "model.safetensors"
    if writer == "pickle":
        file.write_bytes(pickle.dumps(Bomb(fired)))
    else:
        torch.save(Bomb(fired), file)
    with pytest.raises(CoderError, match="model.safetensors"):
        load(path)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files[file.name] = {"sha256": checkpoint.sha256_file(file), "bytes": file.stat().st_size}
    edit(path, files=files)
    with pytest.raises(CoderError, match="model.safetensors is not a safetensors file"):
        load(path)
    assert not fired.exists()
    file = file.rename(path / "model.pt")
    torch.load(file, weights_only=False) if writer == "torch" else pickle.loads(file.read_bytes())
    assert fired.exists()  # it was a live one


def test_a_checkpoint_is_replaced_and_the_loaded_state_stays(tmp_path):
    path = write(tmp_path, "last", 1)
    first = load(path)[1]
    with (path / "model.safetensors").open("r+b") as file:  # what a memory map would show
        file.write(bytes((path / "model.safetensors").stat().st_size))
    assert step_of(write(tmp_path, "last", 2)) == 2
    assert first["model"]["weight"].tolist() == [1.0] * 50 and [p.name for p in tmp_path.iterdir()] == ["last"]


def test_newest_goes_by_step_then_epoch_then_time(tmp_path):
    assert newest(tmp_path / "none") is None and newest(tmp_path) is None
    write(tmp_path, "z", 9, epoch=1)
    write(tmp_path, "a", 10, epoch=1)
    assert newest(tmp_path).name == "a"
    write(tmp_path, "m", 10, epoch=2)
    write(tmp_path, "y", 10, epoch=1)
    assert newest(tmp_path).name == "m"
    write(tmp_path, "b", 10, epoch=2)
    assert [found.path.name for found in checkpoints(tmp_path)] == ["b", "m", "y", "a", "z"]
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path).name == "b"


def test_prune_removes_only_our_own(tmp_path):
    for step in range(4):
        write(tmp_path, f"s{step}", step)
    (tmp_path / "photos").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "s3", target_is_directory=True)
    (tmp_path / "log.txt").write_text("x")
    with pytest.raises(CoderError, match="several names"):
        prune(tmp_path, "s3")
    assert sorted(prune(tmp_path, ["s3", "s1"])) == ["s0", "s2"]
    assert {p.name for p in tmp_path.iterdir()} == {"s1", "s3", "photos", "linked", "log.txt"} and step_of(
        tmp_path / "s3"
    ) == 3


def test_a_kill_inside_prune_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    def killed(path, **_):
        (path / "model.json").unlink()
        raise KeyboardInterrupt

    write(tmp_path, "s1", 1)
    write(tmp_path, "s2", 2)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, ["s2"])
    monkeypatch.undo()
    assert [found.path.name for found in checkpoints(tmp_path)] == ["s2"]
    assert prune(tmp_path, ["s2"]) == [] and [p.name for p in tmp_path.iterdir()] == ["s2"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "-x"])
def test_bad_names_are_refused(name, tmp_path):
    with pytest.raises(CoderError, match="name"):
        write(tmp_path, name, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("request_", "said"),
    [({"common": {"a/b": 1}}, "part"), ({"common": {"x-rank0": 1}}, "part"), ({"own": {"manifest": 1}}, "part")]
    + [
        ({"manifest": {"epoch": 1}}, "step"),
        ({"manifest": {"step": 1, "files": {}}}, "'files'"),
        ({"rank": 2}, "rank 2"),
    ]
    + [
        ({"manifest": {"step": 1, "best": math.inf}}, "plain JSON"),
        ({"manifest": {"step": 1, "w": torch.ones(1)}}, "JSON"),
    ]
    + [
        ({"common": {"model": {"w": {1, 2}}}}, "^model.w is a set"),
        ({"own": {"rng": {"w": b""}}}, "^rng-rank0.w is a bytes"),
    ],
)
def test_bad_requests_leave_the_old_checkpoint(request_, said, tmp_path):
    write(tmp_path, "last", 1)
    with pytest.raises(CoderError, match=said):
        save(tmp_path, "last", **({"manifest": {"step": 2}} | request_))
    assert step_of(tmp_path / "last") == 1
    write(tmp_path, "last", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_what_is_not_a_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "thesis.tex").write_text("years")
    with pytest.raises(CoderError, match="is not a checkpoint"):
        write(tmp_path, "last", 1)
    assert (tmp_path / "last" / "thesis.tex").read_text() == "years"


# ---------------------------------------------------------------------------------------------------------------- kills

KILLS = """
import os, shutil, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
import test_checkpoint as t
root, name = Path({root!r}), {name!r}
calls = [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "unlink")]
calls += [(t.checkpoint, "save_file")]

def run(directory, fatal):
    "Save step 2 and die just before (even) or after (odd) the given call; the child's exit status is 9 if it died."
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = -1
    def lethal(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == fatal:
                os._exit(9)
            result = function(*args, **kwargs)
            count += 1
            if count == fatal:
                os._exit(9)
            return result
        return call
    for owner, attribute in calls:
        setattr(owner, attribute, lethal(getattr(owner, attribute)))
    t.write(directory, name, 2)
    os._exit(0)

fatal, outcomes = 0, []
while True:
    directory = root / str(fatal)
    t.write(directory, "last", 1)
    died = run(directory, fatal) == 9
    found = t.newest(directory)
    step = t.step_of(found)
    assert step in (1, 2), (fatal, found)
    assert step == 2 or died, fatal
    if name == "last":
        assert t.step_of(directory / "last") == step, fatal
    outcomes.append(step)
    if fatal % 3:  # as after a restart: the next save puts everything right
        t.write(directory, "next", 3)
        assert t.step_of(t.newest(directory)) == 3
        assert t.step_of(directory / name if step == 2 else directory / "last") == step
        wanted = {{"last", "next"}} | ({{name}} if step == 2 else set())
    else:
        t.prune(directory, ["last"])
        wanted = {{"last"}}
    assert {{p.name for p in directory.iterdir()}} == wanted, (fatal, list(directory.iterdir()))
    if not died:
        break
    fatal += 1
assert outcomes == sorted(outcomes) and {{1, 2}} == set(outcomes), outcomes
print("died", fatal)
"""


@pytest.mark.parametrize("name", ["last", "new"])
def test_a_kill_anywhere_leaves_a_whole_checkpoint(name, tmp_path):
    script = KILLS.format(tests=str(Path(__file__).parent), root=str(tmp_path), name=name)
    done = fresh.run(["-c", script], timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("died ")[1]) >= 30  # files, manifest, directories, renames: before and after each


def test_files_and_directories_are_flushed_before_the_rename(tmp_path, monkeypatch):
    log: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("rename"), replace(a, b)))
    path = write(tmp_path, "last", 1)
    at = log.index("rename")
    assert set(log[:at]) == {p.name for p in path.iterdir()} | {".last.writing"} and log[at + 1 :] == [tmp_path.name]


# ---------------------------------------------------------------------------------------------------------------- ranks


def both(work) -> list:
    """Run `work(rank, barrier)` on two ranks; their results or errors. A rank left waiting breaks the barrier."""
    barrier = threading.Barrier(2, timeout=30)
    results: list = [None, None]

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank, barrier.wait)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_ranks(tmp_path):
    def work(rank, barrier):
        for step in (1, 2):  # the second replaces the first; the same name is what tempts a race
            common, own = {"model": torch.full((3,), step + 10.0 * rank)}, {"rng": {"rank": rank}}
            if rank == 1:
                common["ignored"] = 0
                own["extra"] = (step,)
            path = save(
                tmp_path,
                "last",
                manifest={"step": step},
                common=common,
                own=own,
                rank=rank,
                world_size=2,
                barrier=barrier,
            )
            barrier()
        return path

    assert both(work) == [tmp_path / "last"] * 2 and [p.name for p in tmp_path.iterdir()] == ["last"]
    names = {p.name.split(".")[0] for p in (tmp_path / "last").iterdir()}
    assert names == {"manifest", "model", "rng-rank0", "rng-rank1", "extra-rank1"}
    loaded = [load(tmp_path / "last", rank=rank) for rank in range(3)]
    assert [own for *_, own in loaded] == [{"rng": {"rank": 0}}, {"rng": {"rank": 1}, "extra": (2,)}, None]
    assert all(common["model"].tolist() == [2.0] * 3 and manifest["world_size"] == 2 for manifest, common, _ in loaded)
    assert newest(tmp_path) == tmp_path / "last"
    (tmp_path / "last" / "extra-rank1.json").unlink()
    with pytest.raises(CoderError, match="extra-rank1.json is missing"):
        load(tmp_path / "last", rank=0)


@pytest.mark.parametrize(("failing", "place"), [(0, "own"), (1, "own"), (1, "request"), (0, "commit"), (0, "prepare")])
def test_when_one_rank_fails_all_do_and_none_waits(failing, place, tmp_path, monkeypatch):
    write(tmp_path, "last", 1)
    if place in ("commit", "prepare"):
        monkeypatch.setattr(checkpoint, f"_{place}", lambda *_: (_ for _ in ()).throw(OSError("disk full")))

    def work(rank, barrier):
        own = {"rng": {"x": {1}} if place == "own" and rank == failing else 0}
        if place == "request" and rank == failing:
            own = {"a/b": 0}
        return save(tmp_path, "last", manifest={"step": 2}, own=own, rank=rank, world_size=2, barrier=barrier)

    results = both(work)
    assert all(isinstance(result, CoderError | OSError) for result in results), results
    assert {"own": "x is a set", "request": "a part's name"}.get(place, "disk full") in str(results[failing])
    assert not any("Barrier" in type(result).__name__ for result in results)
    monkeypatch.undo()
    assert step_of(tmp_path / "last") == 1
    write(tmp_path, "last", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def gloo_rank(directory: str) -> None:
    from torch import distributed

    rank = distributed.get_rank()
    where = Path(directory) / "run"
    ours = {"rank": rank, "rng": torch.Generator().manual_seed(rank).get_state()}
    save(
        where,
        "a",
        manifest={"step": 5},
        common={"model": torch.ones(4)},
        own={"state": ours},
        rank=rank,
        world_size=2,
        barrier=distributed.barrier,
    )
    assert same(load(where / "a", rank=rank)[2], {"state": ours})


def test_two_processes_with_gloo(tmp_path):
    gloo.run(gloo_rank, str(tmp_path))
    assert (
        newest(tmp_path / "run") == tmp_path / "run" / "a"
        and load(tmp_path / "run" / "a", rank=1)[2]["state"]["rank"] == 1
    )
