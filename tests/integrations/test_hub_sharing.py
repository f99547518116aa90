"""A model that was shared is the same model elsewhere: to the bit, whole or refused, without a trace of where it was made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.evaluate import evaluate
from coder_plugin.pretrained.open import open_pretrained, saved_data_config
from tests import fresh
from tests.integrations import hub_runs


def vectors_elsewhere(
    kind: str, names: list[str], shared: Path, pictures: Path, out: Path, fresh_process: bool
) -> dict[str, dict[str, Any]]:
    """The vectors of shared models, here or in a process of its own, which leaves them in ``out``. A plain one has never seen
    us."""
    if not fresh_process:
        {"ours": hub_runs.main, "plain": hub_runs.plain}[kind](names, shared, pictures, out)
        return torch.load(out)
    arguments = ["-m", "tests.integrations.hub_runs", kind, ",".join(names), str(shared), str(pictures), str(out)]
    if kind == "plain":
        done = subprocess.run([sys.executable, *arguments], cwd=fresh.ROOT, capture_output=True, text=True, timeout=240)
    else:
        done = fresh.run(arguments, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out)


@pytest.mark.parametrize("fresh_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shared_models_have_the_same_vectors_to_the_bit_elsewhere(
    shared: Path, known: dict[str, Any], runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fresh_process: bool,
) -> None:
    """Elsewhere: what the models were made of is out of reach."""
    monkeypatch.chdir(tmp_path)
    home = next(iter(runs.values())).parents[1]
    moved = home.rename(home.with_name("gone"))
    try:
        elsewhere = shutil.copytree(shared, tmp_path / "elsewhere")
        names = sorted(known["vectors"])
        found = vectors_elsewhere("ours", names, elsewhere, known["pictures"], tmp_path / "ours.pt", fresh_process)
        names_of_plain = sorted(known["towers"])
        plain = vectors_elsewhere("plain", names_of_plain, elsewhere, known["pictures"], tmp_path / "plain.pt", fresh_process)
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


def test_the_fingerprint_knows_the_model_wherever_it_is(shared: Path, runs: dict[str, Path]) -> None:
    for name in ("coder", "bert", "bigru"):
        of_run = open_pretrained(runs[name], {}, export="last", device="cpu").fingerprint()
        assert coder_plugin.from_pretrained(shared / name).fingerprint() == of_run, name
    less = open_pretrained(shared / "bert", {"force_context_length": 12}, device="cpu")
    assert less.fingerprint() != coder_plugin.from_pretrained(shared / "bert").fingerprint()


def test_vectors_are_those_of_evaluation(shared: Path, known: dict[str, Any]) -> None:
    """Whatever is given for a picture, in whatever batches."""
    model = coder_plugin.from_pretrained(shared / "coder")
    paths = hub_runs.pictures(known["pictures"])
    whole = known["vectors"]["coder"]["images"]
    assert torch.equal(model.encode_images([Image.open(path) for path in paths]), whole)  # RGB, RGBA, grey
    assert torch.equal(model.encode_images([Path(path) for path in paths]), whole)
    assert torch.equal(model.encode_images(path for path in paths), whole)
    torch.testing.assert_close(model.encode_images(paths, batch_size=1), whole)
    torch.testing.assert_close(model.encode_texts(hub_runs.TEXTS, batch_size=2), known["vectors"]["coder"]["texts"])
    for call, items, match in (
        (model.encode_texts, "a dog", "must be a list"),
        (model.encode_texts, [], "no texts"),
        (model.encode_images, [], "no images"),
        (model.encode_images, Path(paths[0]), "must be a list, also if there is only one, not a .*Path"),
        (model.encode_images, Image.open(paths[0]), "must be a list, also if there is only one"),
        (model.encode_texts, (text for text in ()), "no texts"),
    ):
        with pytest.raises(ValueError, match=match):
            call(items)
    with pytest.raises(CoderError, match="nothing.png: .*No such file"):
        model.encode_images(["nothing.png"])


def test_a_card_that_was_edited_is_kept_and_ours_is_made_anew(shared: Path, tmp_path: Path) -> None:
    first = coder_plugin.save_pretrained(shared / "lora", tmp_path / "first", license="mit", datasets=["flickr8k"])
    second = coder_plugin.save_pretrained(first, tmp_path / "second")
    card = (second / "README.md").read_text()
    assert "# second" in card and "license: mit" in card and "- flickr8k" in card
    (second / "README.md").write_text(card + "\nWritten by hand.\n")
    third = coder_plugin.save_pretrained(second, tmp_path / "third")
    assert (third / "README.md").read_text() == card + "\nWritten by hand.\n"
    for _ in range(2):  # also over a folder with the edited card
        again = coder_plugin.save_pretrained(third, tmp_path / "again")
        assert (again / "README.md").read_text() == card + "\nWritten by hand.\n"
    with pytest.raises(CoderError, match="README.md is kept as it is: write license there"):
        coder_plugin.save_pretrained(second, tmp_path / "fourth", license="mit")
    assert not (tmp_path / "fourth").exists()


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    for spec, match in (
        ("no/such/folder", "neither a folder here nor the name of a repository"),
        (str(tmp_path / "nothing"), "neither a folder here"),
        ("nothing", "neither a folder here"),
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
    assert main(["share", str(runs["bert"]), "--to", str(folder), "--export", "best"]) == 2
    assert "it has --export last" in capsys.readouterr().err
    assert main(["share", str(runs["bert"]), "--to", str(tmp_path / "last")]) == 0  # it was trained without validation
    shared = coder_plugin.from_pretrained(tmp_path / "last")
    assert shared.fingerprint() == open_pretrained(runs["bert"], export="last", device="cpu").fingerprint()
    assert main(["share", str(runs["coder"]), "--to", str(tmp_path / "x"), "--private"]) == 2
    assert "--private applies to a repository" in capsys.readouterr().err
    assert main(["share", str(runs["coder"])]) == 2 and "give one destination" in capsys.readouterr().err


def test_a_shared_folder_is_evaluated_as_its_run(runs: dict[str, Path], shared: Path) -> None:
    from coder_plugin.data.from_config import make_source

    config = saved_data_config(None, {"val_data": str(runs["bigru"].parents[1] / "precomp")})
    source = make_source(config, split="dev")
    trained = open_pretrained(shared / "bigru", {"workers": 0}, source=source, device="cpu")
    of_run = open_pretrained(runs["bigru"], {"workers": 0}, export="last", device="cpu")
    assert evaluate(trained.encoder(), source) == evaluate(of_run.encoder(), source)


def test_a_setting_that_is_in_no_weights_and_no_digest_shows_in_the_vectors(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coder_plugin.integrations.hub import contents

    def lose(folder: Path) -> None:
        found = json.loads((folder / "open_clip_config.json").read_text())
        found["model_cfg"]["quick_gelu"] = not found["model_cfg"].get("quick_gelu", False)
        (folder / "open_clip_config.json").write_text(json.dumps(found))

    monkeypatch.setattr(contents.PretrainedModel, "fingerprint", lambda self: "the same")
    coder_plugin.save_pretrained(shared / "lora", tmp_path / "good")
    monkeypatch.setattr(contents, "_remove_paths", lose)
    with pytest.raises(CoderError, match="opens as another model"):
        coder_plugin.save_pretrained(shared / "lora", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
