"""Recipes in the trainer of open_clip's main branch: its tasks, DDP and FSDP2, against a checkout that the environment variable
CODER_OPEN_CLIP_MAIN names. Its processes import that checkout; this one keeps what is installed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest import mock

import open_clip
import pytest
import torch
from safetensors.torch import load_file

import coder_plugin
from coder_plugin.errors import CoderError
from tests.integrations import upstream_runs as runs
from tests.integrations.covering import Row, covering, every, pairs

CHECKOUT = os.environ.get("CODER_OPEN_CLIP_MAIN")
SET = ["--coder-set", "prototypes.clusters=8", "momentum.bank_size=256"]
CODER = ["--loss", "coder", "--coder-concepts", "scenes", *SET]
BANK = "coder.heads.momentum.bank"
#: The same picture in every epoch: a resumed run begins with random numbers of its own.
STILL = ["--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)"]

AXES = {
    "task": ("clip", "siglip", "coca", "distill"),
    "loss": ("clip", "dcl", "coder", "clip + ascl", "clip + selfalign"),
    "processes": ("single", "ddp", "fsdp"),
    "accumulation": ("1", "2"),
    "precision": ("fp32", "amp_bf16"),
    "data": ("csv", "webdataset", "synthetic"),
}
EPOCHS, STEPS, PAIRS = 6, 12, 16


def allowed(row: Row) -> bool:
    """Less what upstream has not, accumulation in a distillation, and what we refuse, AsCL's texts in a CoCa and ``--siglip``
    without its term."""
    refused = {"distill": row["accumulation"] == "2", "coca": "ascl" in row["loss"], "siglip": row["loss"] == "coder"}
    return not refused.get(row["task"], False)


ALLOWED = every(AXES, allowed)
ROWS = covering(ALLOWED, pairs)
ORDINARY = ROWS[:14]


def train(argv: list[str], *, plain: bool = False, compiled: str = "", zero_shot: bool = False) -> runs.Ran:
    """:func:`upstream_runs.train`, less the tensors, of which a sharded model's cannot leave their process."""
    with contextlib.ExitStack() as stack:
        if compiled:  # traced, but no code made of it, which takes a minute more
            argv = [*argv, "--torchcompile", "--torchcompile-strategy", compiled, "--torchcompile-backend", "aot_eager"]
        if zero_shot:
            from open_clip_train import zero_shot as theirs

            one = theirs.OPENAI_IMAGENET_TEMPLATES[:1]
            stack.enter_context(mock.patch.object(theirs, "OPENAI_IMAGENET_TEMPLATES", one))
        return replace(runs.train(argv, plain=plain), state={})


def refusal(argv: list[str]) -> str:
    """What a person is told."""
    try:
        runs.train(argv)
    except CoderError as error:
        return str(error)
    return ""


def told_version(argv: list[str]) -> tuple[str, str]:
    import open_clip

    return open_clip.__version__, str(open_clip.__file__)


def encoded(argv: list[str]) -> torch.Tensor:
    """The towers of a folder, opened by open_clip alone: features of a picture and a text."""
    import open_clip

    return features_of(open_clip.create_model(f"local-dir:{argv[0]}"))


def features_of(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(1, 3, 32, 32, generator=generator), torch.randint(1, 90, (1, 24), generator=generator)
    with torch.no_grad():
        return torch.cat([model.eval().encode_image(image), model.encode_text(text)])


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """``one`` process and ``two`` that have main's open_clip; ``models``, ``data`` and a ``teacher`` for their runs."""
    if CHECKOUT is None:
        pytest.skip("CODER_OPEN_CLIP_MAIN names no checkout of open_clip's main branch")
    pytest.importorskip("tensorboard", reason="upstream's log is read: pip install .[open-clip]")
    folder = tmp_path_factory.mktemp("main")
    path = (str(Path(CHECKOUT, "src")),)
    one, two = runs.Pair(ranks=1, path=path), runs.Pair(path=path)
    models, data = runs.write_models(folder), runs.write_scenes(folder)
    further = {
        "reads-long": {**runs.MODELS["timm-hf"], "text_cfg": json.loads(Path(models["timm-hf"]).read_text())["text_cfg"]},
    }
    further["reads-long"]["text_cfg"]["variable_text"] = True
    for name, config in further.items():
        models[name] = str(folder / f"tiny-upstream-{name}.json")
        Path(models[name]).write_text(json.dumps({"embed_dim": 32, **config}))
    teacher = one(train, runs.command(folder, "teacher", models["vit"], data["csv"], "--loss", "clip", epochs=2))[0]
    weights = teacher.folder / "export/last/open_clip_model.safetensors"
    distilled = ["--distill-model", Path(models["vit"]).stem, "--distill-pretrained", str(weights)]

    def run(processes: str, argv: list[str], **options: Any) -> runs.Ran:
        return (one if processes == "single" else two)(train, argv, **options)[0]

    yield SimpleNamespace(one=one, two=two, run=run, models=models, data=data, distilled=distilled, teacher=teacher)
    one.close()
    two.close()


def test_the_processes_have_the_checkout(main: SimpleNamespace) -> None:
    assert CHECKOUT is not None
    for version, place in [*main.one(told_version, []), *main.two(told_version, [])]:
        assert version.startswith("4.") and Path(place).is_relative_to(CHECKOUT)


def test_every_pair_is_covered() -> None:
    assert frozenset().union(*map(pairs, ROWS)) == frozenset().union(*map(pairs, ALLOWED))
    assert {side for row in ORDINARY for side in row.items()} == {(axis, value) for axis in AXES for value in AXES[axis]}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row in ORDINARY else [pytest.mark.slow], id="-".join(row.values()))
        for row in ROWS
    ],
)
def test_a_run_learns_and_writes_its_state(row: Row, tmp_path: Path, main: SimpleNamespace) -> None:
    task, loss, further = row["task"], row["loss"], []
    if task == "siglip":
        loss, further = loss.replace("clip", "siglip", 1).replace("dcl", "siglip + dcl"), ["--siglip"]
    if task == "distill":
        further = main.distilled
    if loss == "coder":
        further = [*further, *CODER[2:]]
    if row["processes"] == "fsdp":
        further = [*further, "--fsdp"]
    model = {"siglip": "sigmoid", "coca": "coca"}.get(task, "vit")
    micro = PAIRS // int(row["accumulation"]) // (1 if row["processes"] == "single" else 2)
    flags = {"batch_size": micro, "accum_freq": row["accumulation"], "precision": row["precision"], "epochs": EPOCHS}
    data = main.data[row["data"]]
    argv = runs.command(tmp_path, "run", main.models[model], data, "--loss", loss, *further, save_frequency=3, **flags)
    ran = main.run(row["processes"], argv)

    losses = ran.logged()
    assert len(losses) == STEPS and all(math.isfinite(value) for value in losses)
    middle, end = ran.saved(EPOCHS // 2)["state_dict"], ran.saved(EPOCHS)["state_dict"]
    if row["data"] != "synthetic":  # one picture and one caption, over and over: little can be learnt of them
        assert mean(losses[-4:]) < mean(losses[2:5])  # in the first two, CODER's clusters have no centres yet
        heads = {name for name in ran.trained if name.startswith("coder.")}
        assert bool(heads) == (row["loss"] in ("coder", "clip + selfalign"))
        assert all(not torch.equal(middle[name], end[name]) for name in heads)
    if row["loss"] == "coder":
        assert (int(middle[f"{BANK}.count"]), int(end[f"{BANK}.count"])) == (PAIRS * STEPS // 2, PAIRS * STEPS)
    named = {"coca": "caption_loss", "distill": "distill_loss"}.get(task)
    if named:
        assert all(value > 0 for value in ran.logged(f"train/{named}"))


@pytest.mark.parametrize(
    ("model", "further", "flags", "processes"),
    [
        ("vit", [], {}, "single"),
        ("custom", ["--local-loss", "--gather-with-grad"], {"batch_size": 4, "accum_freq": 2}, "ddp"),
        pytest.param("resnet", [], {"precision": "amp_bf16", "batch_size": 8}, "ddp", marks=pytest.mark.slow),
    ],
)
def test_clip_is_upstreams_step_for_step(
    model: str, further: list[str], flags: dict[str, Any], processes: str, main: SimpleNamespace, tmp_path: Path
) -> None:
    lines = [runs.command(tmp_path, name, main.models[model], main.data["csv"], *further, **flags) for name in "abc"]
    plain = main.run(processes, lines[0], plain=True)
    ours = main.run(processes, [*lines[1], "--loss", "clip"])
    assert len(set(plain.logged())) > 4
    assert ours.logged() == plain.logged()
    assert ours.logged("train/logit_scale") == plain.logged("train/logit_scale")
    if processes == "single":  # without --loss nothing is ours, not paths of models either, and a checkpoint knows no heads
        theirs = main.run(processes, [part.replace(main.models[model], Path(main.models[model]).stem) for part in lines[2]])
        assert theirs.logged() == plain.logged() and "coder" not in theirs.saved(4)


@pytest.mark.parametrize(
    ("task", "model", "further", "loss"),
    [
        ("coca", "coca", [], "clip"),
        pytest.param("siglip", "sigmoid", ["--siglip"], "siglip", marks=pytest.mark.slow),
        ("distill", "vit", [], "clip"),
    ],
)
def test_our_term_in_place_of_upstreams_gives_its_numbers(
    task: str, model: str, further: list[str], loss: str, main: SimpleNamespace, tmp_path: Path
) -> None:
    """Labels that are shifted by one word, a teacher that sees image and text alone: upstream's numbers, all of its terms."""
    further = main.distilled if task == "distill" else further
    lines = [runs.command(tmp_path, name, main.models[model], main.data["csv"], *further) for name in "ab"]
    plain = main.run("single", lines[0], plain=True)
    ours = main.run("single", [*lines[1], "--loss", loss])
    assert len(set(plain.logged())) > 4
    assert ours.logged() == pytest.approx(plain.logged(), rel=1e-4)
    assert ours.logged(f"train/{loss}_loss") == pytest.approx(plain.logged("train/contrastive_loss"), rel=1e-4)


SHARDED = [
    pytest.param(CODER, "vit", {}, id="coder"),
    pytest.param(CODER, "vit", {"batch_size": 4, "accum_freq": 2}, marks=pytest.mark.slow, id="coder-accumulated"),
    pytest.param(
        ["--loss", "dcl + concept_dcl", "--coder-concepts", "scenes", "--coder-aggregator", "gpo"],
        "custom",
        {},
        marks=pytest.mark.slow,
        id="gpo",
    ),
    pytest.param(["--loss", "clip + ascl"], "vit", {}, marks=pytest.mark.slow, id="ascl"),
    pytest.param(["--loss", "clip + selfalign", "--coder-set", "contexts.gate=mlp"], "vit", {}, id="selfalign"),
    pytest.param(CODER, "resnet", {}, marks=pytest.mark.slow, id="resnet"),
]


@pytest.mark.parametrize(("loss", "model", "flags"), SHARDED)
def test_sharded_training_is_that_of_replicas(
    loss: list[str], model: str, flags: dict[str, Any], main: SimpleNamespace, tmp_path: Path
) -> None:
    """FSDP2 against DDP: losses, momentum towers, banks, centres, the figures of both, and what validation finds."""
    further = [*loss, "--val-data", main.data["csv"][1]]
    flags = {"batch_size": 8, **flags}
    lines = [runs.command(tmp_path, name, main.models[model], main.data["csv"], *further, **flags) for name in "ab"]
    whole, sharded = main.run("ddp", lines[0]), main.run("fsdp", [*lines[1], "--fsdp"])
    tags = [tag for tag in whole.tags() if "_loss" in tag or tag.startswith(("coder/", "val/"))]
    assert "val/rsum" in tags and set(tags) <= set(sharded.tags())
    for tag in ("train/loss", *tags):
        assert sharded.logged(tag) == pytest.approx(whole.logged(tag), rel=1e-4, abs=1e-6), tag
    assert (CODER is loss) == ("coder/momentum/drift" in tags)
    expected, found = whole.saved(4)["state_dict"], sharded.saved(4)["state_dict"]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if not name.endswith("_query.0.bias"):  # BatchNorm follows: its gradient is rounding, which Adam scales up
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)
    begun = whole.saved(2)["state_dict"]
    copies = [name for name in expected if ".towers.model.visual" in name and name.endswith("weight")]
    assert all(not torch.equal(begun[name], found[name]) for name in copies)


@pytest.mark.parametrize(
    ("processes", "strategy", "further"),
    [
        pytest.param("single", "task", [], marks=pytest.mark.slow),
        ("single", "step", []),
        ("single", "model", []),
        pytest.param("ddp", "task", [], marks=pytest.mark.slow),
        pytest.param("ddp", "model", [], marks=pytest.mark.slow),
        pytest.param("fsdp", "model", [], marks=pytest.mark.slow),
        pytest.param("fsdp", "model", ["--grad-checkpointing"], marks=pytest.mark.slow),
        pytest.param("fsdp", "", ["--grad-checkpointing", "--fsdp-no-reshard-after-forward"], marks=pytest.mark.slow),
    ],
)
def test_compiled_training_writes_the_same_state(
    processes: str, strategy: str, further: list[str], main: SimpleNamespace, tmp_path: Path
) -> None:
    flags = {"epochs": 2, "batch_size": 16 if processes == "single" else 8}
    further = [*CODER, "--val-data", main.data["csv"][1], *further, *(["--fsdp"] if processes == "fsdp" else [])]
    lines = [runs.command(tmp_path, name, main.models["vit"], main.data["csv"], *further, **flags) for name in "ab"]
    plain = [flag for flag in lines[0] if flag not in ("--grad-checkpointing", "--fsdp-no-reshard-after-forward")]
    eager, compiled = main.run(processes, plain), main.run(processes, lines[1], compiled=strategy)
    for tag in ("train/loss", "val/rsum", "coder/momentum/drift"):
        assert compiled.logged(tag) == pytest.approx(eager.logged(tag), rel=1e-4, abs=1e-5), tag
    expected, found = eager.saved(2)["state_dict"], compiled.saved(2)["state_dict"]
    assert int(found[f"{BANK}.count"]) == 4 * PAIRS
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if not name.endswith("_query.0.bias"):  # BatchNorm follows: its gradient is rounding, which Adam scales up
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


class Overflowing(torch.amp.GradScaler):
    """Losses of every other step are too large for the scale."""

    calls = 0

    def scale(self, outputs: Any) -> Any:
        number, type(self).calls = self.calls, self.calls + 1
        return super().scale(outputs) * (torch.inf if number % 2 else 1)


def overflowing(argv: list[str]) -> runs.Ran:
    with mock.patch.object(torch.amp, "GradScaler", Overflowing):
        return train(argv)


def test_a_step_that_the_loss_scaler_skips_writes_nothing(main: SimpleNamespace, tmp_path: Path) -> None:
    argv = runs.command(tmp_path, "run", main.models["vit"], main.data["csv"], *CODER, precision="amp", save_frequency=1)
    ran = main.one(overflowing, argv)[0]
    for epoch in (1, 2, 3, 4):
        saved = ran.saved(epoch)
        skipped = math.log2(65536 / saved["scaler"]["scale"])  # a step that is skipped halves it
        assert epoch <= skipped < 2 * epoch + 1
        assert int(saved["state_dict"][f"{BANK}.count"]) == PAIRS * (2 * epoch - skipped)
    assert skipped < 8


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param([], marks=pytest.mark.slow, id="ddp"),
        pytest.param(["--fsdp"], id="fsdp"),
        pytest.param(["--fsdp", "--fsdp-checkpoint", "sharded"], id="fsdp-sharded"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(sharding: list[str], main: SimpleNamespace, tmp_path: Path) -> None:
    """Towers, heads, banks, centres and Adam's moments: the losses that follow, and the last export."""
    further = [*CODER, *STILL, *sharding]
    flags = {"batch_size": 8, "wd": 0.1, "save_frequency": 2}
    lines = [runs.command(tmp_path, name, main.models["vit"], main.data["csv"], *further, **flags) for name in "ab"]
    whole = main.run("two", lines[0])
    name = "epoch_2" if "sharded" in sharding else "epoch_2.pt"
    (checkpoints := tmp_path / "b" / "checkpoints").mkdir(parents=True)
    saved = whole.folder / "checkpoints" / name
    (shutil.copytree if saved.is_dir() else shutil.copy)(saved, checkpoints / name)
    resumed = main.run("two", [*lines[1], "--resume", "latest"])
    assert resumed.logged() == pytest.approx(whole.logged()[4:], rel=1e-5)
    exports = [ran.folder / "export" / "last" for ran in (whole, resumed)]
    for file in ("open_clip_model.safetensors", "coder.safetensors"):
        expected, found = (load_file(export / file) for export in exports)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)
    figures = [ran.logged("coder/momentum/filled") for ran in (whole, resumed)]
    assert figures[1] == figures[0][4:] and figures[0][-1] == 8 * PAIRS / 256


def test_one_process_evaluates_a_full_checkpoint_of_sharded_training(main: SimpleNamespace, tmp_path: Path) -> None:
    """Its tensors have the shapes that they have in a model that is not sharded: upstream makes scalars of biases of one."""
    heads = ["--loss", "clip + selfalign", "--coder-set", "contexts.gate=mlp", "--val-data", main.data["csv"][1]]
    data = [*main.data["csv"], *heads, "--fsdp"]
    before = main.run("fsdp", runs.command(tmp_path, "a", main.models["vit"], data, epochs=2, batch_size=8))
    state = before.saved(2)["state_dict"]
    assert state["logit_scale"].ndim == 0
    assert any(value.shape == (1,) for name, value in state.items() if name.startswith("coder."))
    alone = [*main.data["csv"][2:], *heads, "--pretrained", str(before.folder / "checkpoints" / "epoch_2.pt")]
    after = main.run("single", runs.command(tmp_path, "b", main.models["vit"], alone))
    assert after.logged("val/rsum")[0] == pytest.approx(before.logged("val/rsum")[-1], rel=1e-4)


def test_exports_open_in_plain_open_clip(main: SimpleNamespace, tmp_path: Path) -> None:
    """Of every kind of save: in the checkout's, in the one that is installed here, and with the heads that score."""
    heads = ["--loss", "dcl + concept_dcl", "--coder-concepts", "scenes", "--save-most-recent", "--delete-previous-checkpoint"]
    for name, sharding in {"full": [], "fsdp": ["--fsdp"], "sharded": ["--fsdp", "--fsdp-checkpoint", "sharded"]}.items():
        flags = {"epochs": 3, "save_frequency": 1, "batch_size": 8}
        line = runs.command(tmp_path, name, main.models["vit"], main.data["csv"], *heads, *sharding, **flags)
        ran = main.run("two", line)
        exports = {path.name for path in (ran.folder / "export").iterdir()}
        assert {"epoch_3", "epoch_latest", "last"} <= exports and "epoch_1" not in exports
        last = ran.folder / "export" / "last"
        found = features_of(open_clip.create_model(f"local-dir:{last}"))
        torch.testing.assert_close(main.one(encoded, [str(last)])[0], found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(features_of(coder_plugin.load_model(last)), found, rtol=1e-4, atol=1e-5)
        if name == "sharded":
            made = json.loads((ran.folder / "checkpoints" / "epoch_3" / "coder.json").read_text())
            assert "concept_dcl" in json.dumps(made["objective"])


def test_other_heads_and_plain_checkpoints_are_not_resumed(main: SimpleNamespace, tmp_path: Path) -> None:
    def line(name: str, *further: str, **flags: object) -> list[str]:
        return runs.command(tmp_path, name, main.models["vit"], main.data["csv"], *further, **{"epochs": 2, **flags})

    ours = main.run("single", line("ours", "--loss", "dcl"))
    plain = main.run("single", line("plain"), plain=True)
    sharded = [*line("sharded", "--loss", "dcl", batch_size=8), "--fsdp", "--fsdp-checkpoint", "sharded"]
    directory = main.run("fsdp", sharded).folder / "checkpoints" / "epoch_2"
    for number, (place, told) in enumerate(
        [
            (ours.folder / "checkpoints" / "epoch_2.pt", 'was trained with --loss "dcl"'),
            (plain.folder / "checkpoints" / "epoch_2.pt", "is no checkpoint of a run with --loss"),
        ]
    ):
        assert told in main.one(refusal, [*line(f"other{number}", *CODER), "--resume", str(place)])[0]
    again = [*line("again", *CODER, batch_size=8), "--fsdp", "--resume", str(directory)]
    assert all('was trained with --loss "dcl"' in told for told in main.two(refusal, again))
    (directory / "coder.json").unlink()
    again = [*line("anew", "--loss", "dcl", batch_size=8), "--fsdp", "--resume", str(directory)]
    assert all("is no checkpoint of a run with --loss" in told for told in main.two(refusal, again))


@pytest.mark.parametrize(
    ("model", "further", "told"),
    [
        ("naflexgenlip_test", ["--loss", "dcl"], "naflexgenlip_test gives no features of images and texts"),
        ("naflexgenlap_test_1d", ["--loss", "dcl"], "naflexgenlap_test_1d gives no features of images and texts"),
        ("naflexclap_test", ["--loss", "dcl"], "naflexclap_test gives no features of images and texts"),
        ("CLAP-HTSAT-tiny", ["--loss", "dcl"], "CLAP-HTSAT-tiny gives no features of images and texts"),
        ("vit", ["--loss", "dcl", "--use-naflex"], "--use-naflex does not go with --loss"),
        ("reads-long", ["--loss", "clip + ascl"], "reads text_positive of the captions' own length"),
        ("coca", ["--loss", "clip + ascl"], "generates captions from images"),
        ("vit", ["--loss", "clip + ascl(similarity=fusion)", "--accum-freq", "2"], "scores every pair of a batch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    model: str, further: list[str], told: str, main: SimpleNamespace, tmp_path: Path
) -> None:
    name = main.models.get(model, model)
    assert told in main.one(refusal, runs.command(tmp_path, "run", name, main.data["csv"], *further, epochs=1))[0]


def test_texts_of_their_own_length_train_without_positives(main: SimpleNamespace, tmp_path: Path) -> None:
    flags = {"lr": 5e-4, "epochs": 2}
    argv = runs.command(tmp_path, "run", main.models["reads-long"], main.data["csv"], "--loss", "3*dcl + m_dcl", **flags)
    ran = main.run("single", [*argv, "--coder-set", "momentum.bank_size=256"])
    assert all(math.isfinite(value) for value in ran.logged())
    assert int(ran.saved(2)["state_dict"][f"{BANK}.count"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_zero_shot(sharding: list[str], main: SimpleNamespace, tmp_path: Path) -> None:
    from PIL import Image

    for number in range(6):
        (folder := tmp_path / "pictures" / f"n0{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (40 * number, 100, 200)).save(folder / f"{number}.png")
    further = ["--imagenet-val", str(tmp_path / "pictures"), "--zeroshot-frequency", "1", *CODER, *sharding]
    argv = runs.command(tmp_path, "run", main.models["vit"], main.data["csv"], *further, epochs=1, batch_size=8)
    ran = main.run("two", argv, zero_shot=True)
    assert all(0 <= ran.logged(f"val/imagenet-zeroshot-val-top{k}")[0] <= 1 for k in (1, 5))


@pytest.mark.slow
def test_heads_have_a_rate_of_their_own(main: SimpleNamespace, tmp_path: Path) -> None:
    moved = []
    for name, scale in (("slow", "1e-3"), ("fast", "1")):
        further = ["--loss", "dcl + concept_dcl", "--coder-concepts", "scenes", "--coder-heads-lr-scale", scale]
        ran = main.run("single", runs.command(tmp_path, name, main.models["vit"], main.data["csv"], *further))
        before, after = (ran.saved(epoch)["state_dict"] for epoch in (2, 4))
        heads = [name for name in ran.trained if name.startswith("coder.")]
        moved.append(sum(float((after[name] - before[name]).norm()) for name in heads))
    assert 0 < moved[0] < 0.01 * moved[1]
