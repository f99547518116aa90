"""What is read of a run's folder, the commands that repeat it, and the state in its checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin.cli import build_parser
from coder_plugin.cli.flags import read_options
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.sweep import Layout, reweighed
from coder_plugin.functional import diversity
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.memory.kmeans import OnlineKMeans
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.report import curves, description
from coder_plugin.report.run import report_run
from coder_plugin.report.state import (
    Bank,
    Centres,
    anchor_diversity,
    entry_ages,
    first_captions,
    instance_level,
    read_state,
)
from coder_plugin.training.run_folder import RunFolder, curve, metric_names


def write_metrics(folder: Path, *records: object) -> None:
    folder.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_resumed_runs_later_records_are_true(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"step": 0, "val/rsum": 1.0, "val/epoch": 0},
        *({"step": step, "loss": 1.0 * step} for step in range(0, 50, 10)),
        {"step": 40, "val/rsum": 30.0, "val/epoch": 1},
        *({"step": step, "loss": 100.0 + step} for step in (25, 35)),
        {"step": 36, "val/rsum": 20.0, "val/epoch": 1},
    )
    run = RunFolder.read(tmp_path)
    assert curve(run.steps, "loss") == ([0, 10, 20, 25, 35], [0.0, 10.0, 20.0, 125.0, 135.0])
    assert curve(run.evaluations, "rsum") == ([0, 36], [1.0, 20.0])
    assert run.results("best")["rsum"] == 20.0 == run.results("last")["rsum"]


def test_what_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 0, "loss": 1.0, "nothing": None}, '{"step": 1, "lo', "[1]", {"loss": 2.0})
    (tmp_path / "config.json").write_text("{")
    run = RunFolder.read(tmp_path)
    assert curve(run.steps, "loss") == ([0], [1.0]) and metric_names(run.steps) == ["loss"]
    told = "; ".join(map(str, run.problems))
    assert "3 lines cannot be read" in told and "config.json: cannot be read as" in told and "plan.json: No such file" in told
    assert "no complete checkpoint" in told and run.config is None


def test_a_damaged_plan_is_a_problem(tmp_path: Path) -> None:
    plan = {"model": "RN50", "heads": None, "batch": {"global per step": "many"}, "parameters": 5, "trainable": "all"}
    plan |= {"training data": {"name": "a", "images": "2k"}, "validation data": None, "ranks": [1]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = RunFolder.read(tmp_path)
    assert run.plan == {"model": "RN50", "parameters": 5, "validation data": None}
    assert [each.text for each in run.problems if each.file == "plan.json"] == [
        "its 'heads' is not an object",
        "in its 'batch', 'global per step': not a number",
        "its 'trainable' is not a number",
        "in its 'training data', 'images': not a number",
        "its 'ranks' is not a number",
    ]
    assert run.heads == {} and run.pairs_per_step is None
    assert ("Model", "RN50") in description.describe(run) and description.commands(run)


@pytest.mark.parametrize("content", ["{", "[]", '{"no_such_option": 1}'])
def test_a_damaged_configuration_does_not_stop_a_report(tmp_path: Path, content: str) -> None:
    write_metrics(tmp_path, {"step": 0, "loss": 1.0})
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in report_run(tmp_path, {}).read_text()
    with pytest.raises(CoderError, match="config.json cannot be read"):
        report_run(tmp_path, {"val_data": "scenes"})


def test_a_term_in_its_warm_up_is_said_to_be_off() -> None:
    """A loss of exactly 0 before its first other value is no loss that was reached."""
    values = {"pgc_loss": [0.0, 0.0, 2.5, 0.0], "m_dcl_loss": [0.0] * 4, "dcl_loss": [3.0, 2.0, 1.5, 1.0]}
    values["lr"] = [0.0, 1.0, 1.0, 0.0]
    steps = tuple({"step": 9 * n, **{key: each[n] for key, each in values.items()}} for n in range(4))
    figures = {each.name: each for each in curves.objective(RunFolder(Path("x"), steps=steps))}
    assert figures["pgc_loss"].note == "off before step 18, in its warm-up; last 0 at step 27; lowest 0 at step 27"
    assert "2.5 at step 18" in figures["pgc_loss"].chart and "at step 0" not in figures["pgc_loss"].chart
    assert figures["m_dcl_loss"].chart == "" and figures["m_dcl_loss"].note.startswith("off in all 4 rows of the log")
    assert figures["dcl_loss"].note.startswith("last 1 at step 27") and "0 at step 0" in figures["learning rate"].chart


def test_an_epoch_takes_the_mean_time_of_its_steps() -> None:
    plan, manifest = {"steps per epoch": 10}, {"step": 15, "seconds": 30.0}
    assert RunFolder(Path("x"), plan=plan, manifest=manifest).seconds_per_epoch == 20.0  # one and a half epochs
    for changed in ({"seconds": None}, {"step": 0}, {"seconds": 0.0}):
        assert RunFolder(Path("x"), plan=plan, manifest={**manifest, **changed}).seconds_per_epoch is None
    assert RunFolder(Path("x"), plan={}, manifest=manifest).seconds_per_epoch is None


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="not a training run's folder"):
        RunFolder.read(tmp_path)
    with pytest.raises(CoderError, match="not a training run's folder"):
        RunFolder.read(tmp_path / "absent")


CONFIGS = [
    {},
    dict(loss="coder + 0.5*selfalign", epochs=3, lr=2e-4, set=["dcl.mu=0.07", "pgc.x=1"], seed=3, name="mine"),
    dict(recipe="selfalign-clip", train_data="a b.csv", val_data="c.csv", model="ViT-B-32", image_mean=[0.5, 0.5, 0.5]),
    dict(recipe="coder-f30k", train_data="f30k.json", region_dropout=0.1, model_kwargs=["embed_dim=512"], warmup=5),
    dict(model="RN50", train_data="x.csv", lock_image=True, batch_size=256, lock_image_freeze_bn_stats=False),
    dict(model="RN50", train_data="x.csv", beta2=0.98, force_quick_gelu=True, cache_dir="my models"),
]


def test_the_command_that_goes_on_names_the_run(tmp_path: Path) -> None:
    command = description.resume_command(resolve_config({"epochs": 2}).to_flat(), tmp_path / "a run", ranks=1)
    flags = shlex.split(command.replace("\\\n", " "))
    assert flags[-6:] == ["--logs", str(tmp_path), "--name", "a run", "--resume", "latest"]
    assert flags[:4] == ["coder-plugin", "train", "--epochs", "2"]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_train_command_gives_the_same_options_and_no_more(config: dict[str, Any]) -> None:
    resolved = resolve_config(config)
    text = description.train_command(json.loads(json.dumps(resolved.to_dict())))
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:2] == ["coder-plugin", "train"]
    again = resolve_config(read_options(build_parser().parse_args(words[1:])))
    assert again == resolved.with_options(name=None)
    flags = [word for word in words if word.startswith("--")]
    for flag in flags:  # each is needed
        without = description.needed(resolved.to_flat())
        if flag == "--open-clip":
            continue
        del without[flag.removeprefix("--").removeprefix("no-").replace("-", "_")]
        try:
            other = resolve_config(without)
        except CoderError:
            continue
        assert other != again, flag


def test_a_command_of_several_ranks_and_of_unknown_options() -> None:
    assert description.train_command(resolve_config().to_flat(), ranks=2).startswith(
        "accelerate launch --num_processes 2 -m coder_plugin.cli train"
    )
    with pytest.raises(CoderError, match="unknown option"):
        description.train_command({"of_tomorrow": 1})
    assert dict(description.commands(RunFolder(Path("a b"))))["evaluate the last export"] == "coder-plugin eval 'a b'"
    validated = RunFolder(Path("a"), evaluations=({"step": 5, "rsum": 90.0},))
    assert dict(description.commands(validated))["evaluate the best export"] == "coder-plugin eval a"


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_ages_are_those_of_a_real_bank(steps: int) -> None:
    bank, batch = CoupledBank(20, 4), 6
    for step in range(steps):
        keys = torch.full((batch, 4), float(step))
        bank.enqueue(keys, keys, torch.arange(batch))
    ages = entry_ages(int(bank.pointer), int(bank.count), 20, batch)
    assert torch.equal(ages, (steps - 1 - bank.image[: int(bank.count), 0]).long())


def test_state_is_the_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    bank, centres = CoupledBank(32, 4), OnlineKMeans(8, 4)
    for step in range(3):
        keys = torch.nn.functional.normalize(torch.randn(6, 4), dim=1)
        bank.enqueue(keys, 2 * keys, torch.arange(6) + 2 * step)
    passed = {"passed": torch.tensor(18), "changed": torch.tensor(0.25), "restarted": torch.tensor(3)}
    centres.recluster(torch.nn.functional.normalize(torch.randn(30, 4), dim=1))
    state = {f"coder.heads.momentum.bank.{name}": value for name, value in bank.state_dict().items()}
    state |= {f"coder.heads.prototypes.centres.{name}": value for name, value in centres.state_dict().items()}
    state |= {f"coder.heads.prototypes.{name}": value for name, value in passed.items()}
    state |= {"visual.weight": torch.zeros(3)}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    found = read_state(tmp_path, pairs_per_step=6)
    one, other = sorted(found, key=lambda each: each.head)
    assert isinstance(one, Bank) and isinstance(other, Centres)
    assert (one.head, one.size, one.filled, one.images) == ("momentum", 32, 18, 10)
    assert one.norms["image"] == pytest.approx([1.0] * 18) and one.norms["text"] == pytest.approx([2.0] * 18)
    assert one.ages.tolist() == [2] * 6 + [1] * 6 + [0] * 6
    assert (other.head, other.clusters, other.ready, other.passed) == ("prototypes", 8, True, 18)
    assert other.sizes == centres.counts.double().tolist()
    assert other.norms == pytest.approx([1.0] * 8, abs=1e-6) and (other.changed, other.restarted) == (0.25, 3)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CoderError, match="cannot be read"):
        read_state(tmp_path, pairs_per_step=6)


def made_encoded(images: Tensor, texts: Tensor, owner: list[int]) -> Encoded:
    captions = [f"caption {number}" for number in range(len(texts))]
    return Encoded(images, texts, torch.tensor(owner), torch.arange(len(images)) + 100, captions)


def test_diversity_is_the_losses_of_batches_of_the_trainings_size() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.nn.functional.normalize(torch.randn(n, 8, generator=generator), dim=1) for n in (11, 22))
    encoded = made_encoded(images, texts, [number // 2 for number in range(22)])
    found = anchor_diversity(encoded, batch=4, epsilon=0.2)
    scores = images @ texts[::2].T
    negatives = ~torch.eye(4, dtype=torch.bool)
    for way, matrix in (("image to text", scores), ("text to image", scores.T)):
        expected = [diversity(matrix[a : a + 4, a : a + 4], negatives, epsilon=0.2) for a in (0, 4)]
        assert found[way] == pytest.approx(torch.cat(expected).tolist())
    assert len(anchor_diversity(encoded, batch=500)["image to text"]) == 11
    views = encoded._replace(images=torch.stack([images, -images], 1))
    assert len(anchor_diversity(views, batch=4)["text to image"]) == 8


@pytest.mark.parametrize("context", [0.0, 2.0])
@pytest.mark.parametrize("beta", [None, 0.9, 0.3])
def test_the_instance_level_is_cut_from_the_vectors(beta: float | None, context: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = []
    for shape in ((6, 2), (6,)):  # an image of several features; each level of unit length
        sides.append(
            [torch.nn.functional.normalize(torch.randn(*shape, n, generator=generator), dim=-1) for n in (8, 8, 4)]
        )
    own, concepts = (1.0, 0.0) if beta is None else (beta, 1 - beta)
    weights = [weight**0.5 for weight in (own, concepts, context)]
    vectors = [torch.cat([w * part for w, part in zip(weights, side, strict=True) if w], -1) for side in sides]
    encoded = made_encoded(*vectors, list(range(6)))
    found = instance_level(encoded, Layout(concepts or None, context, 4 if context else 0))
    for got, side in zip((found.images, found.texts), sides, strict=True):
        torch.testing.assert_close(got, side[0])
    with pytest.raises(CoderError, match="concepts alone"):
        instance_level(encoded, Layout(1.0, 0.0, 0))


def test_the_global_batch_is_the_plans_or_all_ranks() -> None:
    config = {"batch_size": 8, "accum_freq": 3}
    assert RunFolder(Path("x"), config, {"batch": {"global per step": 7}}).pairs_per_step == 7
    assert RunFolder(Path("x"), config, {"batch": {}}, manifest={"world_size": 2}).pairs_per_step == 48
    assert RunFolder(Path("x"), config).pairs_per_step is None  # of how many ranks?


def test_first_captions_are_of_images_that_have_some() -> None:
    assert first_captions(torch.tensor([2, 0, 2, 0]), 4).tolist() == [[0, 1], [2, 0]]


def test_reweighed_vectors_score_as_the_parts_say() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(5, 4, generator=generator) for _ in range(3)] for _ in range(2)]
    beta, weight = 0.8, 2.0

    def vectors(side: list[Tensor], beta: float, weight: float) -> Tensor:
        return torch.cat([beta**0.5 * side[0], (1 - beta) ** 0.5 * side[1], weight**0.5 * side[2]], 1)

    encoded = made_encoded(*(vectors(side, beta, weight) for side in parts), list(range(5)))
    layout = Layout(1 - beta, weight, 4)
    for other, context in ((0.3, 0.5), (1.0, 0.0), (0.0, None), (None, 1.0)):
        got = reweighed(encoded, layout, beta=other, context_weight=context)
        wanted = [
            vectors(side, beta if other is None else other, weight if context is None else context) for side in parts
        ]
        torch.testing.assert_close(got.images, wanted[0])
        torch.testing.assert_close(got.texts, wanted[1])
