"""What goes over from one run of open_clip's trainer to the next, and what of its flags an objective changes."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import coder_plugin
import coder_plugin.integrations.open_clip
from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip.run import Run
from tests.integrations import upstream_runs as runs

HEADS = ["--coder-concepts", "scenes", "--coder-set", "prototypes.clusters=8", "momentum.bank_size=256"]
CODER = ["--loss", "coder", *HEADS]


@pytest.fixture(scope="module")
def trained(released: Any, tmp_path_factory: pytest.TempPathFactory) -> runs.Ran:
    """A run with heads that score, a rate of theirs, and another normalisation."""
    folder = tmp_path_factory.mktemp("trained")
    further = [*CODER, "--image-mean", "0.5", "0.4", "0.3", "--coder-heads-lr-scale", "10"]
    return runs.train(runs.command(folder, "run", released.models["vit"], released.data["csv"], *further, epochs=1))


def evaluation(released: Any, folder: Path, name: str, *further: str) -> list[str]:
    data = ["--val-data", released.data["csv"][1], "--dataset-type", "csv"]
    return runs.command(folder, name, released.models["vit"], data, *further)


def test_weights_bring_their_normalisation(trained: runs.Ran, released: Any, tmp_path: Path) -> None:
    """A checkpoint and an export; a flag wins. The model is made, and not evaluated."""

    class Made(Exception):
        pass

    made: list[Any] = []
    create = Run.make_model

    def watched(self: Run, *args: Any, **options: Any) -> Any:
        made.append(create(self, *args, **options))
        raise Made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "make_model", watched)
        checkpoint = trained.folder / "checkpoints/epoch_1.pt"
        export = trained.folder / "export/last/open_clip_model.safetensors"
        for name, weights, flags in (("a", checkpoint, []), ("b", export, []), ("c", export, ["--image-mean", *3 * ["0.1"]])):
            with pytest.raises(Made):
                runs.train(evaluation(released, tmp_path, name, *CODER, "--pretrained", str(weights), *flags))
    for model, _, transform in made[:2]:
        assert tuple(model.visual.preprocess_cfg["mean"]) == tuple(transform.transforms[-1].mean) == (0.5, 0.4, 0.3)
    assert tuple(made[2][2].transforms[-1].mean) == (0.1, 0.1, 0.1)


def test_evaluation_wants_the_heads_that_score(trained: runs.Ran, released: Any, tmp_path: Path) -> None:
    plain = runs.train(
        runs.command(tmp_path, "plain", released.models["vit"], released.data["csv"], "--loss", "dcl", epochs=1)
    )
    weights = ["--pretrained", str(plain.folder / "checkpoints" / "epoch_1.pt")]
    with pytest.raises(CoderError, match="has none"):
        runs.train(evaluation(released, tmp_path, "a", *CODER, *weights))
    assert runs.train(evaluation(released, tmp_path, "b", "--loss", "dcl", *weights)).logged("val/rsum")


def test_resuming_with_other_settings_is_refused(trained: runs.Ran, released: Any, tmp_path: Path) -> None:
    """test_open_clip_saving.py has the other settings."""
    resume = ["--resume", str(trained.folder / "checkpoints" / "epoch_1.pt")]
    with pytest.raises(CoderError, match="--coder-heads-lr-scale 10"):
        runs.train(runs.command(tmp_path, "a", released.models["vit"], released.data["csv"], *CODER, *resume, epochs=2))


@pytest.mark.parametrize("loss", [pytest.param("dcl", marks=pytest.mark.slow), "clip + ascl"])
def test_a_teacher_reads_packed_texts(loss: str, trained: runs.Ran, released: Any, tmp_path: Path) -> None:
    teacher = str(trained.folder / "export" / "last" / "open_clip_model.safetensors")
    further = ["--loss", loss, "--distill-model", Path(released.models["vit"]).stem, "--distill-pretrained", teacher]
    ran = runs.train(runs.command(tmp_path, "a", released.models["vit"], released.data["csv"], *further, epochs=1))
    distilled = ran.logged("train/distill_loss")
    assert len(distilled) == 2 and all(0 < each < 10 for each in distilled)
    assert ran.saved(1)["state_dict"]["logit_scale"].ndim == 0


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "pure_bf16"])
def test_momentum_towers_of_bfloat16_weights_are_float32(precision: str, released: Any, tmp_path: Path) -> None:
    options = {"precision": precision, "epochs": 1}
    line = runs.command(tmp_path, "a", released.models["vit"], released.data["csv"], "--loss", "m_dcl", **options)
    state = runs.train(line).saved(1)["state_dict"]
    average = state["coder.heads.momentum.towers.model.visual.conv1.weight"]
    assert average.dtype == torch.float32 != state["visual.conv1.weight"].dtype
    assert not torch.equal(average, average.bfloat16().float())  # it has moved by less than bfloat16 can tell


@pytest.mark.parametrize(
    "further, message",
    [
        (["--loss", "dcl", "--siglip"], "name the term siglip"),
        (["--loss", "siglip", "--siglip", "--loss-dist-impl", "gather"], "siglip\\(dist_impl"),
        (["--loss", "clip", "--coca-contrastive-loss-weight", "0.5"], "0.5\\*clip"),
        (["--loss", "dcl", "--coder-captions", "draw"], "rows of a table are pairs"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(
    further: list[str], message: str, released: Any, tmp_path: Path
) -> None:
    with pytest.raises(CoderError, match=message):
        runs.train(runs.command(tmp_path, "a", released.models["vit"], released.data["csv"], *further))


@pytest.mark.parametrize("given", [[], ["--precision", "amp_bf16"], ["--loss"]])
def test_without_a_gpu_the_precision_is_fp32(given: list[str], released: Any, tmp_path: Path, capsys: Any) -> None:
    """Unless another is given, and with ``--loss`` only. A handler of a line logged before would double all lines."""
    argv = runs.command(tmp_path, "a", released.models["vit"], released.data["csv"])
    argv[argv.index("--precision") : argv.index("--precision") + 2] = given if given != ["--loss"] else []
    handler = logging.StreamHandler()
    with pytest.MonkeyPatch.context() as patch, coder_plugin.integrations.open_clip.adapted() as adapter:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(logging.getLogger(), "handlers", [handler])
        args = adapter.parse_args([*argv, *([] if given == ["--loss"] else ["--loss", "dcl"])])
        assert logging.getLogger().handlers == []
    assert args.precision == {0: "fp32", 1: "amp", 2: "amp_bf16"}[len(given)]
    assert ("--precision fp32, because there is no GPU" in capsys.readouterr().out) is not bool(given)


def test_health_is_logged_at_upstreams_steps() -> None:
    logged: list[int] = []
    coder = SimpleNamespace(health=lambda: {"x": 1.0})
    run: Any = Run.__new__(Run)
    run.args, run.model, run.step = SimpleNamespace(log_every_n_steps=2, skip_scheduler=False), SimpleNamespace(coder=coder), 0
    run.seen = 0
    run._log = lambda health: logged.append(run.step)
    for step in (4, 5, 6, 8):  # the scaler skipped one
        run.at_step(lambda step: step, step)
        run.after_step()
    run.args.skip_scheduler = True
    run.after_step()
    run.after_step()
    assert logged == [4, 6, 8, 8] and run.step == 10


def test_a_teacher_of_the_loss_is_the_weights_that_the_run_starts_from(released: Any, tmp_path: Path) -> None:
    loss, data = ["--loss", "clip + distill"], released.data["csv"]
    ran = runs.train(runs.command(tmp_path, "a", released.models["vit"], data, *loss, epochs=1))
    distances = ran.logged("train/distill_loss")
    assert distances[0] < 1e-6 < distances[-1]
    prefix = "coder.heads.teacher.copy.model."
    state = ran.saved(1)["state_dict"]
    taught = {name: value for name, value in state.items() if name.startswith(prefix)}
    assert any(not torch.equal(value, state[name.removeprefix(prefix)]) for name, value in taught.items())
    resume = ["--resume", str(ran.folder / "checkpoints" / "epoch_1.pt")]
    longer = runs.train(runs.command(tmp_path, "b", released.models["vit"], data, *loss, *resume, epochs=2))
    after = longer.saved(2)["state_dict"]
    assert taught and all(torch.equal(after[name], value) for name, value in taught.items())
    two = ["--distill-model", Path(released.models["vit"]).stem, "--distill-pretrained", "weights.pt"]
    with pytest.raises(CoderError, match="--distill-model and distill in --loss are two teachers"):
        runs.train(runs.command(tmp_path, "c", released.models["vit"], data, *loss, *two))
