"""Gradients and state of a step of open_clip 3.3's own trainer: micro-batches of one batch, and steps that are skipped."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.integrations import upstream_runs as runs

CODER = ["--coder-concepts", "scenes", "--coder-set", "prototypes.clusters=8", "momentum.bank_size=64"]
BANK = "coder.heads.momentum.bank"


@contextlib.contextmanager
def gradients() -> Iterator[list[list[torch.Tensor]]]:
    """Of every step its parameters' gradients, in the optimizer's order."""
    steps: list[list[torch.Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        steps.append([grad.clone() for grad in held if grad is not None])

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield steps
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("loss", "model", "further"),
    [
        pytest.param("dcl", "custom", [], marks=pytest.mark.slow),
        pytest.param("siglip", "sigmoid", ["--siglip"], marks=pytest.mark.slow),
        pytest.param("clip", "coca", [], marks=pytest.mark.slow),
        ("coder", "vit", [*CODER, "concepts.norm=none"]),  # no BatchNorm
        pytest.param(
            "clip + lca + cra(ca_on='combined')", "vit", ["--coder-set", "contexts.branches=none"], marks=pytest.mark.slow
        ),  # no BatchNorm
        pytest.param("clip + ascl", "vit", ["--coder-negatives", "none"], marks=pytest.mark.slow),  # no noise
    ],
)
def test_accumulated_gradients_are_the_big_batchs(
    loss: str, model: str, further: list[str], released: Any, tmp_path: Any
) -> None:
    # SGD: Adam's steps make much of rounding where a gradient is nearly zero
    flags = {"epochs": 1, "opt": "timm/sgd", "momentum": 0.9, "lr": 0.01}
    found, states = [], []
    for name, size in (("big", {"batch_size": 16}), ("small", {"batch_size": 4, "accum_freq": 4})):
        line = runs.command(tmp_path, name, released.models[model], released.data["csv"], *further, **{**flags, **size})
        with gradients() as steps:
            ran = runs.train([*line, "--loss", loss])
        found.append(steps)
        states.append(ran.saved(1)["state_dict"])
    assert len(found[0]) == len(found[1]) == 2
    for big, small in zip(*found, strict=True):
        flat, other = (torch.cat([grad.flatten() for grad in step]) for step in (big, small))
        assert (flat - other).norm() <= 1e-5 * flat.norm()
        scale, other = (next((grad for grad in step if grad.ndim == 0), torch.zeros(())) for step in (big, small))
        assert (scale - other).abs() <= 1e-4 * scale.abs()
    for name, value in states[0].items():  # momentum towers, banks and centres are written once a step
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


class Overflowing(torch.amp.GradScaler):
    """Losses of the second step of each epoch, of two micro-batches each, are too large for the scale."""

    calls = 0

    def scale(self, outputs: Any) -> Any:
        number, type(self).calls = self.calls, self.calls + 1
        return super().scale(outputs) * (torch.inf if number % 4 in (2, 3) else 1)


def test_a_step_that_the_loss_scaler_skips_writes_nothing(
    released: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", Overflowing)
    flags = {"batch_size": 8, "accum_freq": 2, "precision": "amp", "save_frequency": 1, "epochs": 2}
    loss = ["--loss", "m_dcl", "--coder-set", "momentum.bank_size=64"]
    line = runs.command(tmp_path, "run", released.models["vit"], released.data["csv"], *loss, **flags)
    with gradients() as steps:
        ran = runs.train(line)
    saved = [ran.saved(epoch) for epoch in (1, 2)]
    assert len(steps) == 2
    assert [int(each["state_dict"][f"{BANK}.count"]) for each in saved] == [16, 32]
    assert saved[-1]["scaler"]["scale"] == 65536 / 2**2
