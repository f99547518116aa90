"""An export is one thing: kills, bits, files of two exports, missing files, NaN, another shape."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import coder_plugin
from coder_plugin.backbones import plugin_backbones
from coder_plugin.errors import CoderError
from coder_plugin.files import recover
from coder_plugin.pretrained.export import (
    HEADS,
    OPTIONS,
    WEIGHTS,
    export_model,
    exported_step,
)
from coder_plugin.pretrained.export_manifest import MANIFEST, seal_again
from coder_plugin.pretrained.open import export_folder, open_pretrained
from tests import fresh
from tests.conftest import TINY

LOSS = "dcl + concept_dcl"


def model(folder: Path, seed: int, loss: str = LOSS):
    torch.manual_seed(seed)
    config = folder / "tiny-vit-exports.json"
    config.write_text(json.dumps(TINY))
    return coder_plugin.create_model(str(config), loss=loss).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Exports of two models of the same shape, with heads and a vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    for number, name in enumerate(("one", "other")):
        made = model(folder, number)
        export_model(made, folder / name, step=number)
    return folder / "one", folder / "other"


def copied(export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export, tmp_path / "copy"))


def vector(folder: Path) -> torch.Tensor:
    return open_pretrained(folder, export="last", device="cpu").encode_texts(["a red circle"])


def test_an_export_opens_and_names_its_step(pair: tuple[Path, Path]) -> None:
    one, other = pair
    assert {WEIGHTS, HEADS, OPTIONS, MANIFEST, "open_clip_config.json"} <= {path.name for path in one.iterdir()}
    assert not torch.equal(vector(one), vector(other))
    assert (exported_step(one), exported_step(other), exported_step(one.parent)) == (0, 1, None)


AGAIN = """
import sys
from pathlib import Path
from coder_plugin.pretrained.export import export_model
from tests.reliability.test_exports import model
for folder in map(Path, sys.argv[1:]):
    export_model(model(folder.parent, 0), folder, step=0)
"""


def test_two_processes_write_the_same_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]  # safetensors orders its metadata by a seed drawn for each file
    done = fresh.run(["-c", AGAIN, *map(str, folders)], timeout=120)
    assert done.returncode == 0, done.stderr
    for folder in folders:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files == {path.name: path.read_bytes() for path in pair[0].iterdir()}


@pytest.mark.parametrize("name", [WEIGHTS, HEADS])
def test_parts_of_two_exports_are_refused(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    mixed = copied(pair[0], tmp_path)
    shutil.copy(pair[1] / name, mixed / name)
    with pytest.raises(CoderError, match=f"{name} is damaged, or of another export"):
        vector(mixed)


def test_towers_that_are_listed_without_their_heads_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    part = copied(pair[0], tmp_path)
    (part / HEADS).unlink()
    seal_again(part)
    with pytest.raises(CoderError, match=f"{MANIFEST} does not belong to .*{WEIGHTS}"):
        vector(part)


@pytest.mark.parametrize("missing", [HEADS, MANIFEST, OPTIONS, "open_clip_config.json"])
def test_an_incomplete_export_is_refused(pair: tuple[Path, Path], tmp_path: Path, missing: str) -> None:
    part = copied(pair[0], tmp_path)
    (part / missing).unlink()
    with pytest.raises(CoderError, match=f"is incomplete: {missing}"):
        vector(part)


def test_heads_that_do_not_belong_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    export_model(model(tmp_path, 3, "clip"), tmp_path / "plain")
    assert not (tmp_path / "plain" / HEADS).exists()
    vector(tmp_path / "plain")
    shutil.copy(pair[0] / HEADS, tmp_path / "plain" / HEADS)
    with pytest.raises(CoderError, match=f"{HEADS} does not belong to this export"):
        vector(tmp_path / "plain")


def change(folder: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit the tensors of a file, and write the manifest anew as if the export had been made so."""
    with safe_open(folder / name, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name, metadata=metadata)
    seal_again(folder)


@pytest.mark.parametrize("name, tensor, number", [(WEIGHTS, "visual.proj", float("nan")), (HEADS, None, float("inf"))])
def test_nan_and_infinity_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, name: str, tensor: str | None, number: float
) -> None:
    bad = copied(pair[0], tmp_path)
    change(bad, name, lambda tensors: tensors[tensor or next(iter(sorted(tensors)))].view(-1)[:1].fill_(number))
    with pytest.raises(CoderError, match="holds NaN or infinity"):
        vector(bad)


@pytest.mark.parametrize(
    "name, message",
    [("positional_embedding", "set the option force_context_length"), ("visual.positional_embedding", "cannot be created")],
)
def test_a_positional_embedding_one_row_short_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, name: str, message: str
) -> None:
    """open_clip would interpolate the text's; it fails for an image that is no longer a square."""
    short = copied(pair[0], tmp_path)
    change(short, WEIGHTS, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CoderError, match=message):
        vector(short)


def test_a_region_models_export_is_checked_too(tmp_path: Path) -> None:
    options = {"vocabulary": ["<pad>", "<start>", "<end>", "<unk>", "a"], "embed_dim": 16, "region_dim": 8, "word_dim": 8}
    export_model(coder_plugin.create_model("region-bigru", loss=LOSS, **options), tmp_path / "export")
    vector(tmp_path / "export")
    (tmp_path / "export" / HEADS).unlink()
    with pytest.raises(CoderError, match=f"{HEADS} is missing"):
        vector(tmp_path / "export")
    assert (tmp_path / "export" / plugin_backbones.WEIGHTS).is_file()


@pytest.mark.parametrize("name", ["text/thesis.md", "coder_options.json"])
def test_a_folder_of_other_files_is_not_written_over(name: str, tmp_path: Path) -> None:
    file = tmp_path / "work" / name
    file.parent.mkdir(parents=True)
    for each in (file, tmp_path / "work" / "vocab.txt", tmp_path / "work" / "notes.md"):
        each.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    made = model(tmp_path, 4)
    before = sorted({*before, *tmp_path.rglob("*")})
    if name == "text/thesis.md":  # this model writes neither: all is kept
        export_model(made, file.parents[1])
        assert (tmp_path / "work" / WEIGHTS).is_file()
    else:
        with pytest.raises(CoderError, match=f"work holds no export, and its {name} would be replaced; nothing was changed"):
            export_model(made, file.parent)
        assert sorted(tmp_path.rglob("*")) == before
    assert [each.read_text() for each in (file, tmp_path / "work/vocab.txt", tmp_path / "work/notes.md")] == ["mine"] * 3


# -- kills ---------------------------------------------------------------------------------------------------------------


def _killed_at(count: int, write: Callable[[], object]) -> bool:
    """Run ``write`` in a forked process that dies before its ``count``-th write, rename, fsync or removal; whether it died."""
    pid = os.fork()
    if pid == 0:
        try:
            seen = [0]

            def counting(function):
                def counted(*args, **options):
                    seen[0] += 1
                    if seen[0] == count:
                        os._exit(9)
                    return function(*args, **options)

                return counted

            for name in ("replace", "fsync", "mkdir", "unlink", "rmdir", "open"):
                setattr(os, name, counting(getattr(os, name)))
            import builtins

            builtins.open = counting(builtins.open)
            write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def _kills(tmp_path: Path, step: int) -> tuple[int, int]:
    """Kill the replacement of an export at every ``step``-th point. Returns the points, and how many gave the new one."""
    one, other = model(tmp_path, 0), model(tmp_path, 1)
    exported = tmp_path / "run" / "export"
    points = new = 0
    texts = {}
    for number, each in enumerate((one, other)):
        export_model(each, tmp_path / f"whole{number}", step=number)
        texts[number] = vector(tmp_path / f"whole{number}")
    while True:
        shutil.rmtree(exported, ignore_errors=True)
        shutil.copytree(tmp_path / "whole0", exported / "last")
        if not _killed_at(1 + points * step, lambda: export_model(other, exported / "last", step=1)):
            break
        points += 1
        found = vector(tmp_path / "run")
        assert sum(torch.equal(found, text) for text in texts.values()) == 1, "half of each"
        recover(exported)
        assert not [path for path in exported.iterdir() if path.name.startswith(".")], "leftovers"
        number = exported_step(exported / "last")
        assert number in (0, 1) and torch.equal(vector(exported / "last"), texts[number])
        new += number
    return points, new


def test_a_kill_leaves_the_old_export_or_the_new_one(tmp_path: Path) -> None:
    points, new = _kills(tmp_path, 14)
    assert points >= 2


@pytest.mark.slow
def test_a_kill_leaves_the_old_export_or_the_new_one_long(tmp_path: Path) -> None:
    points, new = _kills(tmp_path, 1)
    print(f"\nexports: killed at {points} points: {points - new} whole old exports, {new} whole new ones, 0 others")
    assert points >= 30 and 0 < new < points


def test_a_resumed_run_writes_an_export_that_is_behind_again(tmp_path: Path) -> None:
    config = tmp_path / "tiny-vit-resumed.json"
    config.write_text(json.dumps(TINY))
    options = {
        "epochs": 1, "batch_size": 4, "train_num_samples": 8, "workers": 0, "val_frequency": 0, "precision": "fp32",
        "logs": str(tmp_path), "name": "run", "model": str(config), "report": False,
    }  # fmt: skip
    first = coder_plugin.Trainer(model=str(config), loss=LOSS, train="scenes", config=options)
    first.run()
    last = tmp_path / "run" / "export" / "last"
    expected, step = vector(last), exported_step(last)
    assert step == first.step == 2
    export_model(model(tmp_path, 7), last, step=1)
    (last.parent / ".last.elsewhere.1.00000000.writing").mkdir()
    assert not torch.equal(vector(last), expected)
    again = coder_plugin.Trainer(model=str(config), loss=LOSS, train="scenes", config={**options, "resume": "latest"})
    again.run()
    assert torch.equal(vector(last), expected) and exported_step(last) == 2
    assert [path.name for path in last.parent.iterdir()] == ["last"]


# -- bits ----------------------------------------------------------------------------------------------------------------


def _flip(pair: tuple[Path, Path], tmp_path: Path, times: int) -> dict[str, int]:
    """Flip a bit of each file, so many times."""
    rng = random.Random(0)
    whole, text = copied(pair[0], tmp_path), vector(pair[0])
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    counts = {"refused": 0, "harmless": 0}
    for file in files * times:
        content = file.read_bytes()
        position = rng.randrange(len(content) * 8)
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(bytes(damaged))
        try:
            found = vector(whole)
        except CoderError as error:
            assert file.name in str(error), f"{file.name} is not named: {error}"
            counts["refused"] += 1
        else:
            assert torch.equal(found, text), f"a bit of {file.name} gives another model"
            counts["harmless"] += 1
        assert file.is_file(), "deleted"
        file.write_bytes(content)
    return counts


def test_a_flipped_bit_is_refused_by_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert _flip(pair, tmp_path, 1)["harmless"] == 0


@pytest.mark.slow
def test_a_flipped_bit_is_refused_by_name_long(pair: tuple[Path, Path], tmp_path: Path) -> None:
    counts = _flip(pair, tmp_path, 42)
    print(f"\nbits flipped in exports: {counts}")


def test_the_old_name_of_a_replaced_export_opens(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed between the two renames of the replacement, the run still has its old export."""
    (tmp_path / "export").mkdir()
    shutil.copytree(pair[0], tmp_path / "export" / ".last.old")
    assert export_folder(tmp_path, export="last").name == ".last.old"
    assert torch.equal(vector(tmp_path), vector(pair[0]))
