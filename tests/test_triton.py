"""Triton's kernels of a tile: equal to the reference in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl, tiled
from coder_plugin.functional.ascl_loss import ascl_of_features
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.model import create_loss, create_model
from coder_plugin.objective import Objective

ROOT = Path(__file__).parent.parent


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Of each loss, by kernels in ``dtype``: the largest error of value and gradients against the reference in float64."""
    generator = torch.Generator().manual_seed(0)
    results = {}
    for n, d, groups in ((1, 4, 1), (150, 8, 75), (150, 8, 2), (300, 16, 300)):
        v, w, noised = (normalize(torch.randn(n, d, generator=generator) + 0.5, dim=1).to(dtype) for _ in range(3))
        ids = torch.arange(n, device=device) % groups
        scale = torch.tensor(14.3)
        losses = {
            "dcl": (lambda *x, i=ids, **form: dcl(*x, image_ids=i, **form), (v, w)),
            "ascl": (lambda *x, i=ids, **form: ascl_of_features(*x, temperature=0.1, image_ids=i, **form), (v, w, noised)),
            "clip": (lambda *x, implementation: tiled_clip(*x, triton=implementation == "triton"), (v, w, scale)),
        }
        for name, (loss, features) in losses.items():
            gradients: list[list[Tensor]] = []
            for form, number in (("reference", torch.float64), ("triton", dtype)):
                leaves = [x.to(device, number if x.ndim else torch.float64).requires_grad_() for x in features]
                value = loss(*leaves, implementation=form)
                gradients.append([value.detach(), *torch.autograd.grad(value, leaves)])
            for want, got in zip(*gradients, strict=True):
                error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))
                case = f"{name} of {n} pairs, {groups} images"
                results[case] = max(error, results.get(case, 0.0))
    return results


def check_in_interpreter() -> None:
    """Run where ``TRITON_INTERPRET`` was set before the kernels were imported."""
    tiled.TILE_ON_CPU, tiled.WHOLE_ROWS = 130 * 130, ()  # ragged squares of several programs
    for name, error in errors("cpu", torch.float64).items():
        assert error <= 1e-10, f"{name}: {error:.1e}"
    tiled.multiplies_halves = lambda device: True
    for name, error in errors("cpu", torch.bfloat16).items():
        assert error <= 2**-7, f"{name}: {error:.1e}"
    print("all equal")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_in_the_interpreter() -> None:
    """Float64 within 1e-10, and bfloat16 features multiplied as they are within 2^-7."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = "from tests.test_triton import check_in_interpreter; check_in_interpreter()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "all equal" in run.stdout, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 2**-7)])
def test_on_a_gpu(dtype, bound) -> None:
    for name, error in errors("cuda", dtype).items():
        assert error <= bound, f"{name}: {error:.1e}"


def set_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    find = importlib.util.find_spec
    found = ModuleSpec("triton", None) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: found if name == "triton" else find(name, *of))


@pytest.fixture
def gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_installed(monkeypatch, True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_refused_where_kernels_cannot_run(gpu, monkeypatch) -> None:
    features = torch.eye(2), torch.eye(2)
    model = create_model("coder-tiny", loss="dcl")
    with pytest.raises(CoderError, match="needs features on a GPU, and these are on cpu: use 'auto'"):
        dcl(*features, implementation="triton")
    create_loss("dcl", model=model, implementation="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for refused in (
        lambda: dcl(*features, implementation="triton"),
        lambda: create_loss("dcl", model=model, implementation="triton"),
    ):
        with pytest.raises(CoderError, match="needs a GPU, and torch finds none: use 'auto'"):
            refused()
    set_installed(monkeypatch, False)
    with pytest.raises(CoderError, match="triton, which is not installed"):
        create_loss("dcl", model=model, implementation="triton")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("dcl + concept_dcl + clip + ascl", None),
        ("dcl + m_dcl + triplet", "do not serve m_dcl and triplet: torch computes them"),
        ("ascl(similarity=fusion)", "do not serve ascl: torch computes them"),
    ],
)
def test_terms_without_kernels_are_named_once(expression, said, gpu, caplog) -> None:
    model = create_model("coder-tiny", loss=expression)
    caplog.clear()
    create_loss(expression, model=model, implementation="triton")
    assert [said in record.getMessage() for record in caplog.records] == [True] * (said is not None)
    caplog.clear()
    create_loss(expression, model=model)
    assert not caplog.records


def test_the_local_loss_has_no_kernels(gpu, caplog, monkeypatch) -> None:
    objective = Objective.parse("dcl + m_dcl")
    model = create_model("coder-tiny", loss=objective)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for local_loss, said in ((True, "do not serve the local loss"), (False, "do not serve m_dcl")):
        caplog.clear()
        create_loss(replace(objective, local_loss=local_loss), model=model, implementation="triton")
        assert [said in record.getMessage() for record in caplog.records] == [True]
    ring = replace(Objective.parse("dcl + clip"), local_loss=True)
    model = create_model("coder-tiny", loss=ring)
    caplog.clear()
    create_loss(ring, model=model, implementation="triton", gather="ring")
    assert not caplog.records


def test_tiles_that_kernels_do_not_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="implementation='triton' needs features"):
        dcl(torch.eye(2)[:, None], torch.eye(2), implementation="triton")
