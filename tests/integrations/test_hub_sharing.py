"""A model that was shared is the same model elsewhere: to the bit, whole or refused, without a trace of where it was made."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.training.evaluate import evaluate
from coder_plugin.training.trained import open_trained, trained_config
from tests.integrations import hub_runs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(hub_models: SimpleNamespace) -> dict[str, Path]:
    return hub_models.runs


@pytest.fixture(scope="module")
def shared(hub_models: SimpleNamespace) -> Path:
    return hub_models.shared


@pytest.fixture(scope="module")
def known(hub_models: SimpleNamespace) -> dict[str, Any]:
    return hub_models.known


def fresh(kind: str, names: list[str], shared: Path, pictures: Path, out: Path) -> subprocess.Popen[str]:
    """A process of its own that writes the vectors of shared models to ``out``."""
    call = [sys.executable, "-m", "tests.integrations.hub_runs", kind, ",".join(names), str(shared), str(pictures), str(out)]
    return subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str], out: Path) -> dict[str, dict[str, torch.Tensor]]:
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-2000:]
    return torch.load(out)


def test_a_fresh_process_has_the_same_vectors_to_the_bit(
    shared: Path, known: dict[str, Any], runs: dict[str, Path], tmp_path: Path
) -> None:
    """Elsewhere: what the models were made of is out of reach."""
    home = next(iter(runs.values())).parents[1]
    moved = home.rename(home.with_name("gone"))
    try:
        elsewhere = shutil.copytree(shared, tmp_path / "elsewhere")
        names = sorted(known["vectors"])
        ours = fresh("ours", names, elsewhere, known["pictures"], tmp_path / "ours.pt")
        theirs = fresh("plain", sorted(known["towers"]), elsewhere, known["pictures"], tmp_path / "plain.pt")
        found, plain = finished(ours, tmp_path / "ours.pt"), finished(theirs, tmp_path / "plain.pt")
    finally:
        moved.rename(home)
    for name in names:
        for side in ("images", "texts"):
            assert torch.equal(found[name][side], known["vectors"][name][side]), (name, side)
            assert found[name][side].isfinite().all() and found[name][side].dtype == torch.float32
    assert found["coder"]["texts"].shape[1] > known["towers"]["coder"]["texts"].shape[1]  # the concept block is in it
    for name, towers in known["towers"].items():
        for side in ("images", "texts"):
            assert torch.equal(plain[name][side], towers[side]), (name, side)


def test_nothing_shared_tells_where_it_was_made(shared: Path) -> None:
    files = [path for path in shared.rglob("*") if path.is_file()]
    assert len(files) > 30
    for path in files:
        assert hub_runs.SOMEBODY.encode() not in path.read_bytes(), path
        assert path.stat().st_mode & 0o444 == (shared / "coder" / "coder_run.json").stat().st_mode & 0o444, path
    text = json.loads((shared / "bert" / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    assert text["hf_model_name"] == "text"


def test_what_came_with_a_run_comes_with_the_folder(shared: Path, runs: dict[str, Path]) -> None:
    assert trained_config(shared / "bigru", {}).max_regions == 5
    assert trained_config(shared / "bigru", {"max_regions": 3}).max_regions == 3
    assert trained_config(shared / "gpo", {}).channels_last and not trained_config(shared / "lora", {}).channels_last
    record = json.loads((shared / "coder" / "coder_run.json").read_text())
    assert record["options"]["concepts"] == "words.safetensors" and record["terms"]["heads"]["momentum"]["bank_size"] == 24
    assert record["recipe"] == json.loads((runs["coder"] / "plan.json").read_text())["recipe"]
    assert record["results"] == hub_runs.FIGURES and not {"logs", "name"} & record["options"].keys()
    assert {"coder.safetensors", "concepts.safetensors", "concepts.json", "README.md"} <= record["files"].keys()
    fusion = coder_plugin.from_pretrained(shared / "fusion")
    assert fusion.encoder().reranking is not None
    lora = coder_plugin.load_model(shared / "lora")
    assert not any("lora" in name for name, _ in lora.named_parameters())


def test_the_fingerprint_knows_the_model_wherever_it_is(shared: Path, runs: dict[str, Path]) -> None:
    for name in ("coder", "bert", "bigru"):
        of_run = open_trained(trained_config(runs[name], {}, export="last"), device=torch.device("cpu")).fingerprint()
        assert coder_plugin.from_pretrained(shared / name).fingerprint() == of_run, name
    less = open_trained(trained_config(shared / "bert", {"force_context_length": 12}), device=torch.device("cpu"))
    assert less.fingerprint() != coder_plugin.from_pretrained(shared / "bert").fingerprint()


def test_a_run_opens_where_its_configuration_is_gone(runs: dict[str, Path], known: dict[str, Any], tmp_path: Path) -> None:
    """A path from another working directory, or a file that was removed: its exports have it as well."""
    run = shutil.copytree(runs["bert"], tmp_path / "run")
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**options, "model": "models/with-bert-for-tests.json"}))
    model = open_trained(trained_config(run, {}, export="last"), device=torch.device("cpu"))
    assert torch.equal(model.encode_texts(hub_runs.TEXTS), known["vectors"]["bert"]["texts"])


def test_vectors_are_those_of_evaluation(shared: Path, known: dict[str, Any]) -> None:
    """Whatever is given for a picture, in whatever batches."""
    model = coder_plugin.from_pretrained(shared / "coder")
    paths = hub_runs.pictures(known["pictures"])
    whole = known["vectors"]["coder"]["images"]
    assert torch.equal(model.encode_images([Image.open(path) for path in paths]), whole)  # RGB, RGBA, grey
    assert torch.equal(model.encode_images([Path(path) for path in paths]), whole)
    torch.testing.assert_close(model.encode_images(paths, batch_size=1), whole)
    torch.testing.assert_close(model.encode_texts(hub_runs.TEXTS, batch_size=2), known["vectors"]["coder"]["texts"])
    for call, items, match in (
        (model.encode_texts, "a dog", "must be a list"),
        (model.encode_texts, [], "no texts"),
        (model.encode_images, [], "no images"),
    ):
        with pytest.raises(ValueError, match=match):
            call(items)
    with pytest.raises(CoderError, match="nothing.png: .*No such file"):
        model.encode_images(["nothing.png"])


def test_a_shared_folder_is_replaced_by_another_and_nothing_else_is(
    shared: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(shared / "gpo", tmp_path / "folder")
    coder_plugin.save_pretrained(runs["lora"], folder, export="last")
    assert not (folder / "coder.safetensors").exists() and [path.name for path in tmp_path.iterdir()] == ["folder"]
    (folder / "mine.txt").write_text("notes")
    with pytest.raises(CoderError, match="mine.txt, which sharing did not write"):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")
    (folder / "mine.txt").unlink()
    (folder / "README.md").write_text("my own card")
    with pytest.raises(CoderError, match="README.md was changed"):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(CoderError, match="holds something else"):
        coder_plugin.save_pretrained(runs["gpo"], tmp_path / "other", export="last")
    with pytest.raises(CoderError, match="is a file"):
        coder_plugin.save_pretrained(runs["gpo"], folder / "README.md", export="last")
    assert (folder / "README.md").read_text() == "my own card" and not (folder / "coder.safetensors").exists()


def test_a_card_that_was_edited_is_kept_and_ours_is_made_anew(shared: Path, tmp_path: Path) -> None:
    first = coder_plugin.save_pretrained(shared / "lora", tmp_path / "first", license="mit", datasets=["flickr8k"])
    second = coder_plugin.save_pretrained(first, tmp_path / "second")
    card = (second / "README.md").read_text()
    assert "# second" in card and "license: mit" in card and "- flickr8k" in card
    (second / "README.md").write_text(card + "\nWritten by hand.\n")
    third = coder_plugin.save_pretrained(second, tmp_path / "third")
    assert (third / "README.md").read_text() == card + "\nWritten by hand.\n"
    with pytest.raises(CoderError, match="README.md is kept as it is: write license there"):
        coder_plugin.save_pretrained(second, tmp_path / "fourth", license="mit")
    assert not (tmp_path / "fourth").exists()


@pytest.mark.parametrize(
    "name", ["coder.safetensors", "concepts.safetensors", "text/config.json", "open_clip_model.safetensors"]
)
def test_a_folder_that_is_not_whole_is_refused_by_name(shared: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(shared / ("bert" if name.startswith("text") else "coder"), tmp_path / "folder")
    (folder / name).unlink()
    with pytest.raises(CoderError, match=f"not whole: {name} is missing"):
        coder_plugin.from_pretrained(folder)


@pytest.mark.parametrize("name", ["coder.safetensors", "concepts.safetensors", "open_clip_model.safetensors"])
@pytest.mark.parametrize("record", [True, False])
def test_damaged_weights_are_refused_by_name(shared: Path, tmp_path: Path, name: str, record: bool) -> None:
    """A flipped bit where checksums came along, a cut file also where they did not: an export's."""
    folder = shutil.copytree(shared / "coder", tmp_path / "folder")
    data = bytearray((folder / name).read_bytes())
    data[-5] ^= 64
    (folder / name).write_bytes(data if record else data[: len(data) // 2])
    if not record:
        (folder / "coder_run.json").unlink()
    with pytest.raises(CoderError) as caught:
        coder_plugin.from_pretrained(folder)
    assert str(folder) in str(caught.value) and ("is damaged, or not the file" in str(caught.value)) == record


@pytest.mark.parametrize("name", ["coder_run.json", "open_clip_config.json", "concepts.json"])
def test_damaged_descriptions_are_refused_by_name(shared: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(shared / "coder", tmp_path / "folder")
    (folder / name).write_text((folder / name).read_text()[:40])
    with pytest.raises(CoderError, match=name):
        coder_plugin.from_pretrained(folder)


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    for spec, match in (
        ("no/such/folder", "no folder here, and no repository's name"),
        (str(tmp_path / "nothing"), "no folder here"),
        ("nothing", "no folder here"),
        (tmp_path, "neither an export nor a run"),
    ):
        with pytest.raises(CoderError, match=match):
            coder_plugin.from_pretrained(spec)
    with pytest.raises(CoderError, match="has no revisions"):
        coder_plugin.from_pretrained(tmp_path, revision="main")
    with pytest.raises(CoderError, match="neither an export nor a run"):
        coder_plugin.save_pretrained(tmp_path, tmp_path / "new")


def test_the_command(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "new" / "coder"
    flags = ["--card-license", "cc-by-4.0", "--card-base-model", "group/base", "--card-datasets", "scenes"]
    assert main(["share", str(runs["coder"]), "--to", str(folder), *flags]) == 0
    assert f'coder_plugin.from_pretrained("{folder}")' in capsys.readouterr().out
    assert "base_model: group/base" in (folder / "README.md").read_text()
    assert main(["share", str(runs["bert"]), "--to", str(folder)]) == 2  # it has no best
    assert "it has --export last" in capsys.readouterr().err
    assert main(["share", str(runs["coder"]), "--to", str(tmp_path / "x"), "--private"]) == 2
    assert "--private is of a repository" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["share", str(runs["coder"])])


def test_a_shared_folder_is_evaluated_as_its_run(runs: dict[str, Path], shared: Path) -> None:
    from coder_plugin.training.sources import make_source

    config = trained_config(shared / "bigru", {"val_data": str(runs["bigru"].parents[1] / "precomp"), "workers": 0})
    source = make_source(config, split="dev")
    trained = open_trained(config, source=source, device=torch.device("cpu"))
    of_run = open_trained(trained_config(runs["bigru"], {"workers": 0}, export="last"), device=torch.device("cpu"))
    assert evaluate(trained.encoder(), source) == evaluate(of_run.encoder(), source)


def test_nothing_is_left_of_a_share_that_fails(
    runs: dict[str, Path], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was shared before is still there."""
    folder = shutil.copytree(shared / "lora", tmp_path / "folder")
    monkeypatch.setattr("coder_plugin.integrations.hub.sharing.export_heads", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and coder_plugin.from_pretrained(folder)
    monkeypatch.setattr("coder_plugin.integrations.hub.sharing.export_heads", lambda *_: logging.info("forgotten"))
    with pytest.raises(CoderError, match="opens as another model"):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")
