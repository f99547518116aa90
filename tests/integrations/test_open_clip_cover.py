"""Recipes in open_clip 3.3's own trainer, over pairs of everything that may meet there."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
import torch

from tests.integrations import upstream_runs as runs
from tests.integrations.covering import Pairs, Row, covering, every, pairs

AXES = {
    "model": tuple(runs.MODELS),
    "extra": ("none", "grad-checkpointing", "torchcompile", "lock-image", "lock-image-partly", "lock-text"),
    "loss": ("clip", "dcl", "coder", "clip + ascl", "clip + selfalign"),
    "data": ("csv", "webdataset", "synthetic"),
    "processes": ("1", "2"),
    "accumulation": ("1", "2"),
    "precision": ("fp32", "amp_bf16"),
}
EXTRAS = {
    "none": [],
    "grad-checkpointing": ["--grad-checkpointing"],
    "torchcompile": ["--torchcompile"],
    "lock-image": ["--lock-image"],
    "lock-image-partly": ["--lock-image", "--lock-image-freeze-bn-stats", "--lock-image-unlocked-groups", "1"],
    "lock-text": ["--lock-text", "--lock-text-freeze-layer-norm"],
}
EPOCHS, STEPS, PAIRS = 6, 12, 16


def allowed(row: Row) -> bool:
    """Less what upstream has not, locks of a CoCa's towers, and what we refuse, AsCL's texts in a CoCa."""
    return row["model"] != "coca" or not (row["extra"].startswith("lock") or "ascl" in row["loss"])


def shown(row: Row) -> Pairs:
    """Upstream's synthetic data are one picture and one caption: what learns of them shows little of anything else."""
    return Pairs(pair for pair in pairs(row) if row["data"] != "synthetic" or ("data", "synthetic") in pair)


ALLOWED = every(AXES, allowed)
ROWS = covering(ALLOWED, shown)
SYNTHETIC = [row for row in ROWS if row["data"] == "synthetic"]
LEARNING = [row for row in ROWS if row["data"] != "synthetic"]


#: The rest is marked slow; resuming, accumulated gradients and upstream's own numbers have tests of their own.
ORDINARY = [
    dict(zip(AXES, row, strict=True))
    for row in (
        ("resnet", "lock-text", "coder", "webdataset", "1", "1", "amp_bf16"),
        ("timm-hf", "lock-image-partly", "clip", "webdataset", "1", "1", "fp32"),
    )
]


def test_every_pair_is_covered() -> None:
    wanted, covered = (Pairs().union(*map(shown, rows)) for rows in (ALLOWED, ROWS))
    assert covered == wanted
    assert all(map(allowed, ORDINARY))


def arguments(row: Row) -> tuple[list[str], dict[str, object]]:
    loss, further = row["loss"], list(EXTRAS[row["extra"]])
    if row["model"] == "sigmoid" and "clip" in loss:
        loss = loss.replace("clip", "siglip", 1)
        further.append("--siglip")
    if row["model"] == "resnet" and "partly" in row["extra"]:
        further = further[:2]  # upstream locks a ModifiedResNet whole
    if loss == "coder":
        settings = ["prototypes.clusters=8", "momentum.bank_size=256"]
        further += ["--coder-concepts", "scenes", "--coder-set", *settings]
    micro = PAIRS // int(row["processes"]) // int(row["accumulation"])
    flags: dict[str, object] = {"epochs": EPOCHS, "save_frequency": EPOCHS // 2}
    flags |= {"batch_size": micro, "accum_freq": row["accumulation"], "precision": row["precision"]}
    return ["--loss", loss, *further], flags


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row in ORDINARY else [pytest.mark.slow], id="-".join(row.values()))
        for row in [*ORDINARY, *(row for row in [*LEARNING, *SYNTHETIC] if row not in ORDINARY)]
    ],
)
def test_a_run_learns_and_writes_its_state(row: Row, tmp_path: Any, released: Any) -> None:
    further, flags = arguments(row)
    argv = runs.command(tmp_path, "run", released.models[row["model"]], released.data[row["data"]], *further, **flags)
    ran = runs.train(argv) if row["processes"] == "1" else released.pair.train(argv)

    losses = ran.logged()
    assert len(losses) == STEPS and all(math.isfinite(value) for value in losses)
    middle, end = ran.saved(EPOCHS // 2)["state_dict"], ran.saved(EPOCHS)["state_dict"]
    if row["data"] != "synthetic":
        if row["loss"] == "coder":  # pgc is zero before the first clustering: the sum of the others falls
            losses = [total - pgc for total, pgc in zip(losses, ran.logged("train/pgc_loss"), strict=True)]
        assert mean(losses[-4:]) < mean(losses[:4])
        moved = {name for name in end if not torch.equal(middle[name], end[name])}
        heads = {name for name in ran.trained if name.startswith("coder.")}
        assert heads <= moved
        assert bool(heads) == (row["loss"] in ("coder", "clip + selfalign"))
        towers = {name for name in ran.frozen if not name.startswith("coder.")}
        assert not towers & moved
        for side, prefixes in (("image", "visual."), ("text", ("text.", "transformer."))):
            if row["extra"].startswith(f"lock-{side}"):
                assert any(name.startswith(prefixes) for name in towers)
        if row["extra"] == "lock-image-partly" and row["model"] == "resnet":
            assert not any(name.startswith("visual.") for name in moved)
    if row["loss"] == "coder":
        bank = "coder.heads.momentum.bank.count"
        assert (int(middle[bank]), int(end[bank])) == (PAIRS * STEPS // 2, PAIRS * STEPS)


@pytest.mark.slow
def test_what_no_term_reads_stays_frozen_when_groups_are_unlocked(released: Any, tmp_path: Any) -> None:
    """LCA reads words and regions inside the towers: DDP would wait for gradients of what comes after."""
    further = ["--loss", "lca", "--lock-image", "--lock-image-unlocked-groups", "2"]
    line = runs.command(tmp_path, "run", released.models["vit"], released.data["csv"], *further, batch_size=8)
    ran = released.pair.train(line)
    assert "visual.proj" in ran.frozen
    assert all(math.isfinite(value) for value in ran.logged())
