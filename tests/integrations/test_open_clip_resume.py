"""Resuming, evaluation alone and zero-shot classification in open_clip 3.3's own trainer with heads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin.backbones.clip import register_config
from coder_plugin.errors import CoderError
from tests.integrations import upstream_runs as runs

HEADS = ["--coder-concepts", "scenes", "--coder-set", "prototypes.clusters=8", "momentum.bank_size=256"]
CODER = ["--loss", "coder", *HEADS]
COUNT = "coder.heads.momentum.bank.count"
#: The same picture in every epoch: a resumed run begins with random numbers of its own.
STILL = ["--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)"]


def continue_as(ran: runs.Ran, name: str, epoch: int) -> None:
    """A run of that name that was interrupted after an epoch of this one."""
    checkpoints = ran.folder.with_name(name) / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copy(ran.folder / "checkpoints" / f"epoch_{epoch}.pt", checkpoints)


def test_a_resumed_run_is_the_uninterrupted_one(released: Any, tmp_path: Path) -> None:
    """With two processes, whose order of samples is the epoch's; towers, heads, banks, centres and Adam's moments."""
    flags = {"batch_size": 8, "wd": 0.1, "epochs": 2, "save_frequency": 1}
    lines = [
        runs.command(tmp_path, name, released.models["vit"], released.data["csv"], *CODER, *STILL, **flags) for name in "ab"
    ]
    whole = released.pair.train(lines[0])
    continue_as(whole, "b", 1)
    resumed = released.pair.train([*lines[1], "--resume", "latest"])
    assert resumed.logged() == whole.logged()[2:]
    expected, found = whole.saved(2), resumed.saved(2)
    assert int(found["state_dict"][COUNT]) == 4 * 16
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value), name
    for number, moments in expected["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][key], value) for key, value in moments.items())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(1, 2), (2, 1)])
def test_resuming_on_other_numbers_of_processes(processes: tuple[int, int], released: Any, tmp_path: Path) -> None:
    def run(number: int, name: str, *further: str, **flags: object) -> runs.Ran:
        data = [*released.data["webdataset"], *CODER, *further]
        line = runs.command(tmp_path, name, released.models["resnet"], data, batch_size=16 // number, **flags)
        return runs.train(line) if number == 1 else released.pair.train(line)

    before = run(processes[0], "run", epochs=2)
    loaded = run(processes[1], "run", "--resume", "latest", epochs=2)
    state = before.saved(2)["state_dict"]
    assert loaded.state.keys() == state.keys()
    assert all(torch.equal(loaded.state[name], value) for name, value in state.items())
    further = run(processes[1], "run", "--resume", "latest", epochs=4)
    after = further.saved(4)["state_dict"]
    assert (int(state[COUNT]), int(after[COUNT])) == (64, 128)
    assert torch.equal(after["coder.heads.momentum.bank.image"][:64], state["coder.heads.momentum.bank.image"][:64])
    assert all(not torch.equal(after[name], state[name]) for name in further.trained)


@pytest.mark.slow
def test_other_heads_and_plain_checkpoints_are_not_resumed(released: Any, tmp_path: Path) -> None:
    def line(name: str, *further: str) -> list[str]:
        return runs.command(tmp_path, name, released.models["vit"], released.data["csv"], *further, epochs=1)

    ours, plain = runs.train(line("ours", "--loss", "dcl")), runs.train(line("plain"), plain=True)
    for ran, loss, told in (
        (ours, CODER, 'was trained with --loss "dcl"'),
        (ours, ["--loss", "dcl", "--coder-set", "dcl.mu=0.2"], "resume with its own loss"),
        (plain, ["--loss", "dcl"], "is no checkpoint of a run with --loss"),
    ):
        checkpoint = str(ran.folder / "checkpoints" / "epoch_1.pt")
        with pytest.raises(CoderError, match=told):
            runs.train(line("other", *loss, "--resume", checkpoint))


@pytest.fixture(scope="module")
def trained(released: Any, tmp_path_factory: pytest.TempPathFactory) -> runs.Ran:
    """A run with a head that scores, validated on its training data."""
    val = ["--val-data", released.data["csv"][1]]
    folder = tmp_path_factory.mktemp("trained")
    return runs.train(runs.command(folder, "run", released.models["vit"], released.data["csv"], *CODER, *val, epochs=2))


def results(ran: runs.Ran) -> dict[str, float]:
    return json.loads((ran.folder / "checkpoints" / "results.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    "start",
    [pytest.param("checkpoints/epoch_2.pt", marks=pytest.mark.slow), "export/last/open_clip_model.safetensors", "resume"],
)
def test_evaluation_alone_finds_what_training_found(start: str, trained: runs.Ran, released: Any, tmp_path: Path) -> None:
    place = ["--resume", str(trained.folder / "checkpoints/epoch_2.pt")]
    place = place if start == "resume" else ["--pretrained", str(trained.folder / start)]
    val = ["--val-data", released.data["csv"][1], "--dataset-type", "csv", *place]
    ran = runs.train(runs.command(tmp_path, "eval", released.models["vit"], val, *CODER))
    assert results(trained)["rsum"] > 0
    for name, value in results(trained).items():
        if name != "epoch":
            assert results(ran)[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("loss", [["--loss", "dcl"], pytest.param([], marks=pytest.mark.slow)])
def test_zero_shot(loss: list[str], released: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On pictures of three classes, with every name of ImageNet's and one template; also without ``--loss``."""
    from open_clip_train import zero_shot

    monkeypatch.setattr(zero_shot, "OPENAI_IMAGENET_TEMPLATES", zero_shot.OPENAI_IMAGENET_TEMPLATES[:1])
    for number in range(6):
        (folder := tmp_path / "pictures" / f"n0{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (40 * number, 100, 200)).save(folder / f"{number}.png")
    further = ["--imagenet-val", str(tmp_path / "pictures"), "--zeroshot-frequency", "1", *loss]
    model = register_config(released.models["custom"])  # upstream knows no paths
    ran = runs.train(runs.command(tmp_path, "run", model, released.data["csv"], *further, epochs=1))
    found = [results(ran)[f"imagenet-zeroshot-val-top{k}"] for k in (1, 5)]
    assert all(0 <= share <= 1 and (6 * share).is_integer() for share in found) and found[0] <= found[1]
