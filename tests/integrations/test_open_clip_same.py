"""``--loss clip`` in open_clip 3.3's own trainer is upstream's loss: the same numbers at every step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from coder_plugin import create_model
from tests import fresh
from tests.integrations import upstream_runs as runs

GATHERED = ["--local-loss", "--gather-with-grad"]
ACCUMULATED = {"batch_size": 4, "accum_freq": 2}


@pytest.mark.parametrize(
    ("model", "data", "further", "flags", "processes"),
    [
        pytest.param("vit", "csv", [], {"precision": "amp_bf16"}, 1, marks=pytest.mark.slow),
        pytest.param("timm-hf", "webdataset-one", ["--use-bn-sync"], ACCUMULATED, 1, marks=pytest.mark.slow),
        ("vit", "webdataset-one", [], {}, 1),
        pytest.param("custom", "csv", ["--lock-image", "--grad-clip-norm", "1"], ACCUMULATED, 1, marks=pytest.mark.slow),
        pytest.param("vit", "csv", [], {"batch_size": 8}, 2, marks=pytest.mark.slow),
        pytest.param("resnet", "webdataset-one", GATHERED, {"batch_size": 8}, 2, marks=pytest.mark.slow),
        pytest.param("custom", "csv", GATHERED, ACCUMULATED, 2, marks=pytest.mark.slow),
    ],
)
def test_clip_is_upstreams_step_for_step(
    model: str, data: str, further: list[str], flags: dict[str, Any], processes: int, released: Any, tmp_path: Any
) -> None:
    run = runs.train if processes == 1 else released.pair.train
    flags = {"epochs": 3, **flags}
    lines = [runs.command(tmp_path, name, released.models[model], released.data[data], *further, **flags) for name in "ab"]
    plain, ours = run(lines[0], plain=True), run([*lines[1], "--loss", "clip"])
    assert len(plain.logged()) > 4 and len(set(plain.logged())) > 4
    assert ours.logged() == plain.logged()
    assert ours.logged("train/scale") == plain.logged("train/scale")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "further", "loss"),
    [("coca", [], "clip"), ("sigmoid", ["--siglip"], "siglip")],
)
def test_our_term_in_place_of_upstreams_gives_its_numbers(
    model: str, further: list[str], loss: str, released: Any, tmp_path: Any
) -> None:
    lines = [runs.command(tmp_path, name, released.models[model], released.data["csv"], *further, epochs=2) for name in "ab"]
    plain, ours = runs.train(lines[0], plain=True), runs.train([*lines[1], "--loss", loss])
    assert ours.logged() == pytest.approx(plain.logged(), rel=1e-4)
    assert ours.logged(f"train/{loss}_loss") == pytest.approx(plain.logged("train/contrastive_loss"), rel=1e-4)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What was never written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_no_weight_of_a_new_coca_is_left_to_chance(released: Any, tmp_path: Any, nan_in_new_memory: None) -> None:
    made = create_model(released.models["coca"], loss="dcl")
    assert all(value.isfinite().all() for value in made.parameters())
    line = runs.command(tmp_path, "run", released.models["coca"], released.data["csv"], "--loss", "dcl", epochs=1)
    assert runs.train(line).logged()[0] < 20


@pytest.mark.slow
def test_the_command_under_torchrun(released: Any, tmp_path: Any) -> None:
    """Whose two processes are forked, with the imports done."""
    module = tmp_path / "module.py"
    module.write_text("import runpy\nrunpy.run_module('coder_plugin.integrations.open_clip', None, '__main__', True)\n")
    forked = ["--run-path", "--start-method", "fork"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *forked]
    line = runs.command(tmp_path, "run", released.models["vit"], released.data["csv"], "--loss", "dcl", epochs=1, batch_size=8)
    result = fresh.run(
        [*launch, "--", str(module), *line],
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    ran = runs.Ran(tmp_path / "run")
    assert len(ran.logged("train/dcl_loss")) == 2 and ran.saved(1)["epoch"] == 1
    assert (ran.folder / "export" / "last" / "open_clip_model.safetensors").is_file()
