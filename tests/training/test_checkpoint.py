"""A checkpoint returns bit for bit, damage is refused by name, nothing in it runs, and a kill leaves a whole one."""

from __future__ import annotations

import json
import logging
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file, sha256_json
from coder_plugin.training import checkpoint
from coder_plugin.training.checkpoint import checkpoints, load, load_rank, newest, prune, save, set_aside
from coder_plugin.training.resume import rng_states, set_rng_states
from tests import fresh, gloo, saved

FILES = ["state.pt", "rank0.pt", "manifest.json"]


def write(directory: Path, name: str, step: int, **fields) -> Path:
    common = {"model": {"weight": torch.full((50,), float(step))}, "trainer": {"loss": math.nan, "seen": [step] * 3}}
    return save(directory, name, manifest={"step": step, **fields}, common=common, own={"position": {"step": step}})


def step_of(path: Path) -> int:
    """The step, if the manifest and both files agree on it."""
    manifest, common = load(path)
    found = {manifest["step"], int(common["model"]["weight"][7]), load_rank(path, 0)["position"]["step"]}
    return found.pop() if len(found) == 1 else -1


def edit(path: Path, **changes) -> None:
    """What an attacker who knows the format can do: the checksums are right again afterwards."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    files = {each.name: {"sha256": sha256_file(each), "bytes": each.stat().st_size} for each in path.glob("*.pt")}
    manifest = {key: value for key, value in manifest.items() if key != "manifest_sha256"} | {"files": files} | changes
    file.write_text(json.dumps(manifest | {"manifest_sha256": sha256_json(manifest)}))


# -- state ---------------------------------------------------------------------------------------------------------------


def regression(seed: int, kind: str):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
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
    common = {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), run, strict=True)}
    path = save(tmp_path, "a", manifest={"step": 4}, common=common, own={"rng": rng_states()})
    expected = steps(*run, 4)

    other = regression(1, kind)
    for name, part in zip(("model", "optimizer", "scheduler"), other, strict=True):
        part.load_state_dict(load(path)[1][name])
    set_rng_states(load_rank(path, 0)["rng"])
    assert steps(*other, 4) == expected
    again = {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), other, strict=True)}
    save(tmp_path, "b", manifest={"step": 8}, common=again, own={})
    common = {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), run, strict=True)}
    save(tmp_path, "c", manifest={"step": 8}, common=common, own={})
    one, two = saved.content(tmp_path / "b"), saved.content(tmp_path / "c")
    assert one.keys() == two.keys() and all(str(one[name]) == str(two[name]) for name in one)
    assert load(path)[1]["model"]._metadata["1"]["version"] == 2  # which load_state_dict reads


def test_random_states_reproduce_the_next_numbers(tmp_path):
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.standard_normal(3), *torch.randn(3).tolist()]

    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)  # each keeps a second number back
    path = save(tmp_path, "a", manifest={"step": 0}, common={}, own={"rng": rng_states()})
    expected = draw()
    assert draw() != expected
    set_rng_states(load_rank(path, 0)["rng"])
    assert draw() == expected


UNREADABLE = {"numpy": np.float64(1), "multiarray": np.zeros(2), "lambda": lambda: 0, "Path": Path("x")}


@pytest.mark.parametrize(("said", "value"), UNREADABLE.items())
def test_what_could_not_be_read_again_is_not_saved(said, value, tmp_path):
    write(tmp_path, "last", 1)
    with pytest.raises(CoderError, match=f"{said}.*a checkpoint holds tensors, numbers"):
        save(tmp_path, "last", manifest={"step": 2}, common={"optimizer": {"state": {0: {"foo": value}}}})
    assert step_of(tmp_path / "last") == 1 and [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("manifest", [{"epoch": 1}, {"step": 1, "best": math.inf}, {"step": 1, "w": torch.ones(1)}])
def test_a_bad_manifest_leaves_the_old_checkpoint(manifest, tmp_path):
    write(tmp_path, "last", 1)
    with pytest.raises(CoderError, match="step|plain JSON"):
        save(tmp_path, "last", manifest=manifest, common={})
    assert step_of(tmp_path / "last") == 1 and [path.name for path in tmp_path.iterdir()] == ["last"]


# -- damage --------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_named_and_skipped(harm, name, tmp_path, caplog):
    write(tmp_path, "good", 1)
    path = write(tmp_path, "bad", 2)
    assert {file.name for file in path.iterdir()} == {*FILES} and newest(tmp_path) == path
    harm(path / name)
    with pytest.raises(CoderError) as caught:
        load(path), load_rank(path, 0)
    assert str(path / name) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == tmp_path / "good"
    assert str(path / name) in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 2, "step": 9}', "is not the manifest"),
        ("[1]", "is not the manifest"),
        ('{"format": 1, "other": 1}', "format 1, from another version"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_foreign_manifests(text, said, tmp_path, caplog):
    write(tmp_path, "good", 1)
    path = write(tmp_path, "bad", 9)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CoderError, match=f"bad/manifest.json.*{said}"):
        load(path)
    assert newest(tmp_path) == tmp_path / "good" and "bad/manifest.json" in caplog.text
    write(tmp_path, "older", 0)
    assert prune(tmp_path, ["good"]) == ["older"] and path.exists()  # it may be somebody's
    assert prune(tmp_path, []) == [] and newest(tmp_path) == tmp_path / "good"  # nothing whole would remain


@pytest.mark.parametrize("listed", ["../secret.pt", "/etc/passwd", "model.bin", "rank1.pt"])
def test_a_manifest_cannot_point_elsewhere(listed, tmp_path):
    path = write(tmp_path, "bad", 2)
    (tmp_path / "secret.pt").write_text("{}")
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(path, files=files | {listed: files["state.pt"]})
    with pytest.raises(CoderError, match="manifest.json is not the manifest.*its 'files' are"):
        load(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["state.pt", "rank0.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_command_with_a_right_checksum_is_refused_and_never_run(name, legacy, tmp_path):
    fired, path = tmp_path / "fired", write(tmp_path / "run", "bad", 2)
    torch.save({"model": Bomb(fired)}, path / name, _use_new_zipfile_serialization=not legacy)
    edit(path)
    checkpoint.verify(path)
    with pytest.raises(CoderError, match=rf"{name} is refused: it names \S+, which reading it could run; .*") as caught:
        load(path), load_rank(path, 0)
    assert "\n" not in str(caught.value) and not fired.exists()
    torch.load(path / name, weights_only=False)
    assert fired.exists()  # it was a live one


@pytest.mark.parametrize("content", [b"", b"PK", b"not torch's"])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = write(tmp_path, "bad", 2)
    (path / "state.pt").write_bytes(content)
    edit(path)
    with pytest.raises(CoderError, match="state.pt is refused: "):
        load(path)
    torch.save([1], path / "state.pt")
    edit(path)
    with pytest.raises(CoderError, match="state.pt is refused: it is a list"):
        load(path)


# -- folders -------------------------------------------------------------------------------------------------------------


def test_newest_goes_by_step_then_epoch_then_time(tmp_path):
    assert newest(tmp_path / "none") is None and newest(tmp_path) is None
    for name, step, epoch in (("z", 9, 1), ("a", 10, 1), ("m", 10, 2), ("y", 10, 1), ("b", 10, 2)):
        write(tmp_path, name, step, epoch=epoch)
    assert [found.path.name for found in checkpoints(tmp_path)] == ["b", "m", "y", "a", "z"]
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path).name == "b"


def test_prune_removes_only_checkpoints(tmp_path):
    for step in range(4):
        write(tmp_path, f"s{step}", step)
    (tmp_path / "photos").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "s3", target_is_directory=True)
    (tmp_path / "log.txt").write_text("x")
    assert sorted(prune(tmp_path, ["s3", "s1"])) == ["s0", "s2"]
    assert {path.name for path in tmp_path.iterdir()} == {"s1", "s3", "photos", "linked", "log.txt"}
    (tmp_path / "s3" / "rank0.pt").unlink()
    assert prune(tmp_path, ["s3"]) == [] and step_of(tmp_path / "s1") == 1


def test_later_ones_are_set_aside_damaged_or_not(tmp_path):
    for step in range(1, 5):
        write(tmp_path / "run", f"step_{step}", step)
    (tmp_path / "run" / "step_3" / "manifest.json").write_text("{")
    assert set_aside(tmp_path / "run", tmp_path / "aside", after=2) == ["step_3", "step_4"]
    write(tmp_path / "run", "step_4", 4)
    set_aside(tmp_path / "run", tmp_path / "aside", after=2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step_1", "step_2"}
    assert len([*(tmp_path / "aside").glob("step_4*")]) == 2


KILLS = """
import os, shutil, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
import test_checkpoint as t
from coder_plugin.files import recover
root, name = Path({root!r}), {name!r}
calls = [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "write_text"), (t.torch, "save")]

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
    t.prune(directory, [name])
    os._exit(0)

fatal, outcomes = 0, []
while True:
    directory = root / str(fatal)
    t.write(directory, "last", 1)
    died = run(directory, fatal) == 9
    step = t.step_of(t.newest(directory))
    assert step in (1, 2) and (step == 2 or died), (fatal, step)
    outcomes.append(step)
    recover(directory)  # as a run does that is started again
    assert t.step_of(t.newest(directory)) == step
    assert {{path.name for path in directory.iterdir()}} <= {{"last", name}}, (fatal, list(directory.iterdir()))
    if not died:
        break
    fatal += 1
assert outcomes == sorted(outcomes) and {{1, 2}} == set(outcomes), outcomes
print("died", fatal)
"""


@pytest.mark.parametrize("name", ["last", pytest.param("new", marks=pytest.mark.slow)])
def test_a_kill_anywhere_leaves_a_whole_checkpoint(name, tmp_path):
    script = KILLS.format(tests=str(Path(__file__).parent), root=str(tmp_path), name=name)
    done = fresh.run(["-c", script], timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("died ")[1]) >= 24  # files, manifest, folders, renames: before and after each


def test_files_and_folders_are_flushed_before_the_rename(tmp_path, monkeypatch):
    log: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("rename"), replace(a, b)))
    write(tmp_path, "last", 1)
    at = log.index("rename")
    flushed = {name if not name.startswith(".last.") else "folder" for name in log[:at]}
    assert flushed == {*FILES, "folder"} and log[at + 1 :] == [tmp_path.name]


# -- ranks ---------------------------------------------------------------------------------------------------------------


def save_on_ranks(root: str) -> list[str]:
    """Save where no rank fails, where the first does, and where the second does: this rank's errors."""
    rank, errors = distributed.rank(), []
    for failing in (None, 0, 1):
        own = {"rank": rank, "value": np.zeros(1) if rank == failing else 0}
        common = {"model": torch.full((4,), rank + 1.0)}
        try:
            save(Path(root, str(failing)), "a", manifest={"step": 5}, common=common, own=own)
            errors.append("")
        except CoderError as error:
            errors.append(str(error))
    return errors


def test_two_ranks(tmp_path):
    for failing in (0, 1):
        write(tmp_path / str(failing), "a", 1)
    errors = gloo.run(save_on_ranks, str(tmp_path))
    assert [each[0] for each in errors] == ["", ""]
    path = newest(tmp_path / "None")
    assert path == tmp_path / "None" / "a" and {file.name for file in path.iterdir()} == {*FILES, "rank1.pt"}
    assert load(path)[0]["world_size"] == 2 and load(path)[1]["model"].tolist() == [1.0] * 4  # rank 0's
    assert [load_rank(path, rank)["rank"] for rank in range(2)] == [0, 1]
    with pytest.raises(CoderError, match="was saved by 2 processes and has no rank2.pt"):
        load_rank(path, 2)
    (path / "rank1.pt").unlink()
    assert newest(path.parent) is None
    for failing in (0, 1):  # all fail with the one, and the old checkpoint stays
        messages, folder = [each[1 + failing] for each in errors], tmp_path / str(failing)
        assert messages[1 - failing] == f"rank {failing}: {messages[failing]}" and "numpy" in messages[failing]
        assert step_of(folder / "a") == 1 and [path.name for path in folder.iterdir()] == ["a"]
