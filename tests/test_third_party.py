"""Somebody else's package (tests/third_party) installed by pip beside ours, and used in processes of its own."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gloo
import pytest
import torch

from tests import fresh

SAME = """
import json, logging, torch
logging.disable(logging.WARNING)
from coder_plugin import create_loss, create_model
said = {}
for objective in ("clip", "dcl", "triplet + 0.5*clip", "dcl(mask_same_image=false)"):
    torch.manual_seed(0)
    model = create_model("coder-tiny", loss=objective, force_image_size=32).train()
    outputs = model(torch.randn(4, 3, 32, 32), torch.randint(1, 999, (4, 40)), image_id=torch.tensor([1, 2, 1, 3]))
    losses = create_loss(objective, model=model)(**outputs)
    sum(losses.values()).backward()
    said[objective] = {
        "heads": list(model.coder.heads),
        "keys": sorted(outputs),
        "state": list(model.state_dict()),
        "losses": {name: value.item().hex() for name, value in losses.items()},
        "gradient": sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None).item().hex(),
    }
print(json.dumps(said))
"""


try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: what pytest brings along there
    import tomli as tomllib

THEIRS = Path(__file__).parent / "third_party"
Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on nobody's path with their package installed: no network, no build environment, no dependency."""
    folder = tmp_path_factory.mktemp("theirs")
    shutil.copytree(THEIRS, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    install = f"-m pip install --quiet --no-deps --no-build-isolation --no-index --target {folder / 'site'}"
    subprocess.run([sys.executable, *install.split(), folder / "source"], check=True, capture_output=True, timeout=120)
    assert sorted(path.name for path in (folder / "site").iterdir() if path.name != "__pycache__") == [
        "their_losses-1.2.3.dist-info",
        "their_losses.py",
    ]
    return folder / "site"


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """`run("-c", "…")` runs Python with their package on the path, or without."""

    def python(*arguments: str, theirs: bool = True, status: int = 0) -> subprocess.CompletedProcess:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(site)] if theirs else [])
        done = fresh.run(arguments, env=environment, cwd=tmp_path, timeout=300)
        assert done.returncode == status, done.stderr + done.stdout
        return done

    return python


def test_it_is_as_small_as_it_is_said_to_be() -> None:
    """The documentation shows it whole."""
    lines = (THEIRS / "their_losses.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) < 60
    project = tomllib.loads((THEIRS / "pyproject.toml").read_text())
    assert set(project["project"]["entry-points"]) == {"coder_plugin.losses", "coder_plugin.heads"}
    assert project["project"]["dependencies"] == ["coder-plugin"]


def test_it_is_listed_with_its_origin_and_changes_none_of_ours(run: Run) -> None:
    command = ("-m", "coder_plugin.cli", "plugins", "--all")
    with_it, without = (
        {" ".join(line.split()) for line in run(*command, theirs=there).stdout.splitlines()} for there in (True, False)
    )
    assert with_it - without == {
        "losses theirs their-losses 1.2.3 their_losses:Theirs",
        "heads their_bank their-losses 1.2.3 their_losses:Bank",
    }
    assert without < with_it


@pytest.mark.slow
def test_our_recipes_mean_what_they_meant(run: Run) -> None:
    with_it, without = (json.loads(run("-c", SAME, theirs=theirs).stdout) for theirs in (True, False))
    assert with_it == without
    assert with_it["dcl"]["heads"] == ["ids"] and with_it["clip"]["heads"] == []


STEPS = """
import json, logging, torch
logging.disable(logging.WARNING)
from coder_plugin import create_loss, create_model
from coder_plugin.objective import Objective

objective = Objective.parse("theirs(temperature=0.1)").with_options({"their_bank.size": 20})
torch.manual_seed(0)
model = create_model("coder-tiny", loss=objective, force_image_size=32).train()
loss = create_loss(objective, model=model)
bank = model.coder.heads["their_bank"]
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
images, texts = torch.randn(5, 8, 3, 32, 32), torch.randint(1, 999, (5, 8, 40))  # more than the bank: no positive in it
said = {"size": len(bank.texts), "frozen": [n for n, p in model.named_parameters() if not p.requires_grad],
        "losses": [], "filled": [], "right": [], "state": model.coder.state_names()}
for step in range(20):
    outputs = model(images[step % 5], texts[step % 5])
    loss(**outputs)  # a second evaluation before the step writes nothing
    (value,) = loss(**outputs).values()
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    model.coder.post_step()
    said["losses"].append(value.item())
    said["filled"].append([bank.count.item(), bank.pointer.item()])
    newest = bank.texts.roll(-bank.pointer.item(), 0)[-8:]
    said["right"].append(torch.equal(newest, outputs["text_features"]))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_few_steps_fill_the_bank_and_lower_the_loss(run: Run) -> None:
    said = json.loads(run("-c", STEPS).stdout)
    assert said["size"] == 20 and said["frozen"] == ["logit_scale"]
    assert said["state"] == [f"coder.heads.their_bank.{name}" for name in ("texts", "pointer", "count")]
    assert said["filled"][:5] == [[8, 8], [16, 16], [20, 4], [20, 12], [20, 0]]
    assert all(said["right"])
    second, last = said["losses"][5:10], said["losses"][-5:]  # passes over the data with a full bank
    assert sum(last) < 0.7 * sum(second)


@pytest.mark.slow
def test_the_command_line_trains_with_it(run: Run, tmp_path: Path) -> None:
    command = [
        *("-m", "coder_plugin.cli", "train", "--loss", "theirs(temperature=0.05) + 0.5*dcl"),
        *("--set", "their_bank.size=20", "--name", "run", "--logs", str(tmp_path), "--batch-size", "8"),
        *("--train-num-samples", "32", "--workers", "0", "--warmup", "2", "--log-every-n-steps", "1"),
        *("--val-frequency", "0", "--epochs", "1"),
    ]
    run(*command)
    from safetensors.torch import load_file

    from coder_plugin.training.checkpoint import load

    folder = tmp_path / "run"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record for record in records if "theirs_loss" in record]
    assert len(losses) == 4
    for record in losses:
        assert record["loss"] == pytest.approx(record["theirs_loss"] + record["dcl_loss"], rel=1e-4)
    (checkpoint,) = sorted((folder / "checkpoints").iterdir())[-1:]
    state = load(checkpoint)[1]["model"]
    bank = {key.rpartition(".")[2]: value for key, value in state.items() if "their_bank" in key}
    assert bank["texts"].shape == (20, 128) and bank["count"].item() == 20 and bank["pointer"].item() == 32 % 20
    torch.testing.assert_close(bank["texts"].norm(dim=1), torch.ones(20))
    exports = list(folder.rglob("open_clip_model.safetensors"))
    assert exports and not any("coder" in key for path in exports for key in load_file(path))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("theirs(temprature=1)", "column 8: 'theirs' has no option 'temprature'; it has: temperature"),
        ("theirs(temperature=0)", "column 8: 'theirs': temperature must be > 0, got 0.0"),
        ("clip + their", "column 8: unknown loss or objective 'their'; did you mean 'theirs'?"),
    ],
)
def test_mistakes_with_it_are_one_line(run: Run, loss: str, said: str) -> None:
    done = run("-m", "coder_plugin.cli", "train", "--loss", loss, "--dry-run", status=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("coder-plugin: error: ") and said in line


# Two ranks


def _two_steps(site: str, rows: int) -> dict[str, Any]:
    """Two steps of these rows of a global batch of two: both on one process, one on each of two ranks."""
    from coder_plugin import distributed, registry
    from coder_plugin.heads.base import BackboneInfo

    if site not in sys.path:
        sys.path.insert(0, site)
        registry.refresh()
    theirs = importlib.import_module("their_losses")
    bank, term = theirs.Bank(BackboneInfo(embed_dim=4), size=5), theirs.Theirs()
    term.bind({"their_bank": bank}, local_loss=False)
    own = slice(distributed.rank() * rows, (distributed.rank() + 1) * rows)
    losses = []
    for step in range(2):
        texts = torch.tensor([10.0 * step, 10.0 * step + 1])[own, None].expand(rows, 4).clone().requires_grad_()
        losses.append(term(torch.eye(4)[:2][own], texts, **bank(texts)).item())
        bank.post_step()
    return {"texts": bank.texts.tolist(), "count": int(bank.count), "pointer": int(bank.pointer), "losses": losses}


@pytest.fixture
def theirs(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(site))
    yield importlib.import_module("their_losses")
    del sys.modules["their_losses"]


def test_the_bank_holds_every_ranks_texts_in_the_same_order(site: Path, theirs: ModuleType) -> None:
    first, second = gloo.run(_two_steps, str(site), 1)
    assert first == second == _two_steps(str(site), 2)
    assert [row[0] for row in first["texts"]] == [0, 1, 10, 11, 0]
    assert (first["count"], first["pointer"]) == (4, 4)
