"""A folder of a shared model: replaced whole or not at all, and refused by name where it is not what was shared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch

import coder_plugin
from coder_plugin.errors import CoderError


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
    with pytest.raises(CoderError, match=r"the order is save_pretrained\(model, folder\)"):
        coder_plugin.save_pretrained("folder", torch.nn.Linear(1, 1))
    with pytest.raises(CoderError, match="is a file"):
        coder_plugin.save_pretrained(runs["gpo"], folder / "README.md", export="last")
    assert (folder / "README.md").read_text() == "my own card" and not (folder / "coder.safetensors").exists()


def test_nothing_is_left_of_a_share_that_fails(
    runs: dict[str, Path], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was shared before is still there."""
    folder = shutil.copytree(shared / "lora", tmp_path / "folder")
    monkeypatch.setattr("coder_plugin.integrations.hub.contents.seal_again", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and coder_plugin.from_pretrained(folder)
    monkeypatch.undo()
    monkeypatch.setattr("coder_plugin.integrations.hub.contents._features", lambda trained: [torch.rand(3)])
    with pytest.raises(CoderError, match="opens as another model"):
        coder_plugin.save_pretrained(runs["gpo"], folder, export="last")


@pytest.mark.parametrize("name", ["concepts.safetensors", "text/config.json", "open_clip_model.safetensors"])
def test_a_folder_that_is_not_whole_is_refused_by_name(shared: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(shared / ("bert" if name.startswith("text") else "coder"), tmp_path / "folder")
    (folder / name).unlink()
    with pytest.raises(CoderError, match=f"incomplete: {name} is missing"):
        coder_plugin.from_pretrained(folder)


def test_a_damaged_vocabulary_is_refused_by_name(shared: Path, tmp_path: Path) -> None:
    """As the weights that every export has: tests/reliability/test_exports.py."""
    path = shutil.copytree(shared / "coder", tmp_path / "folder") / "concepts.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    with pytest.raises(CoderError, match=f"{path} is damaged"):
        coder_plugin.from_pretrained(path.parent)


@pytest.mark.parametrize("name", ["coder/open_clip_config.json", "bert/text/config.json", "bigru/coder_model.json"])
def test_a_changed_description_is_refused_by_name(shared: Path, tmp_path: Path, name: str) -> None:
    """Also one that can be read: with another activation it is another model."""
    kind, _, file = name.partition("/")
    folder = shutil.copytree(shared / kind, tmp_path / "folder")
    found = json.loads((folder / file).read_text())
    found.get("model_cfg", found)["quick_gelu"] = True
    (folder / file).write_text(json.dumps(found))
    with pytest.raises(CoderError, match=f"{file} is damaged, or of another export"):
        coder_plugin.from_pretrained(folder)
    (folder / file).write_bytes((shared / kind / file).read_bytes())
    (folder / "README.md").write_text("a card of one's own")
    assert coder_plugin.from_pretrained(folder)


@pytest.mark.parametrize("loss", [pytest.param("clip + dcl", marks=pytest.mark.slow), "clip + selfalign"])
def test_a_model_that_another_loop_trained_is_shared(loss: str, tiny_model: str, tmp_path: Path) -> None:
    model = coder_plugin.create_model(tiny_model, loss=loss).train()
    with torch.no_grad():
        model.text_projection.mul_(2).add_(0.1)
    texts = ["a red star", "a blue circle"]
    folder = coder_plugin.save_pretrained(model, tmp_path / "model", license="mit")
    assert model.training and (folder / "README.md").is_file()
    shared = coder_plugin.from_pretrained(folder)
    model.eval()
    pictures = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(shared.model.embed_image(pictures), model.embed_image(pictures))
        expected = model.embed_text(open_clip.SimpleTokenizer(context_length=model.context_length)(texts))
    torch.testing.assert_close(torch.as_tensor(shared.encode_texts(texts)), expected, rtol=1e-5, atol=1e-6)


def test_a_wrapper_of_a_model_is_not_shared(tmp_path: Path) -> None:
    model = coder_plugin.create_model("coder-tiny", loss="dcl")
    with pytest.raises(CoderError, match="the DataParallel is no model of coder_plugin.create_model"):
        coder_plugin.save_pretrained(torch.nn.DataParallel(model), tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_the_links_of_the_hubs_cache_open(shared: Path, tmp_path: Path) -> None:
    blobs = shutil.copytree(shared / "lora", tmp_path / "models--a--b" / "blobs")
    snapshot = blobs.parent / "snapshots" / "0123"
    for path in blobs.rglob("*"):
        if path.is_file():
            link = snapshot / path.relative_to(blobs)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    assert coder_plugin.from_pretrained(snapshot)
