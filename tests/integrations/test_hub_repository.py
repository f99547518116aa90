"""Repositories of the Hugging Face Hub, its client replaced: pushed, opened wherever a model is named, and its errors told."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export_manifest import seal_again
from coder_plugin.pretrained.open import open_pretrained
from tests.integrations import hub_runs


class Hub:
    """Repositories as folders, by the few calls that sharing makes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.public, self.fails = folder, [], set(), None  # type: Path, list, set, Any

    def __call__(self, token: Any = None) -> Hub:
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        if self.fails is not None:
            raise self.fails
        assert exist_ok
        if not (self.folder / repo_id).exists():
            (self.folder / repo_id).mkdir(parents=True)
            if not private:
                self.public.add(repo_id)
        return SimpleNamespace(repo_id=repo_id)

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=repo_id not in self.public)

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        self.calls.append(("branch", branch, exist_ok))

    def file_exists(self, repo_id: str, filename: str, *, revision: str | None) -> bool:
        return (self.folder / repo_id / filename).is_file()

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None, local_dir: Path) -> None:
        local_dir.mkdir(parents=True)
        shutil.copyfile(self.folder / repo_id / filename, local_dir / filename)

    def upload_folder(self, *, repo_id: str, folder_path: Path, delete_patterns: list[str], **options: Any) -> Any:
        self.calls.append(("upload", options))
        place = self.folder / repo_id
        there = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
        for name in filter_repo_objects(there, allow_patterns=delete_patterns):
            (place / name).unlink()
        shutil.copytree(folder_path, place, dirs_exist_ok=True)
        address = f"https://hub.example/{repo_id}"
        request = f"{address}/discussions/1" if options["create_pr"] else None
        return SimpleNamespace(pr_url=request, commit_url=f"{address}/commit/1")

    def download(self, repo_id: str, *, allow_patterns: list[str], revision: Any, cache_dir: Any, token: Any) -> str:
        self.calls.append(("download", repo_id, revision, token))
        if self.fails is not None:
            raise self.fails
        place = self.folder / repo_id
        snapshot = self.folder / "cache" / repo_id
        there = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
        for name in filter_repo_objects(there, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / name, snapshot / name)
        return str(snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", made)
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.download)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_repository_is_pushed_and_opened(
    hub: Hub, shared: Path, runs: dict[str, Path], known: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    address = coder_plugin.push_to_hub(runs["coder"], "group/coder", token="secret", license="mit", commit_message="First")
    assert address == "https://hub.example/group/coder/commit/1" and ("token", "secret") in hub.calls
    pushed = {path.name for path in (hub.folder / "group/coder").iterdir()}
    assert pushed == {path.name for path in (shared / "coder").iterdir()}
    (hub.folder / "group/coder/pytorch_model.bin").write_bytes(b"x")
    found = hub_runs.vectors("group/coder", known["pictures"])
    assert all(torch.equal(found[side], known["vectors"]["coder"][side]) for side in found)
    snapshot = hub.folder / "cache/group/coder"
    assert not (snapshot / "pytorch_model.bin").exists() and not (snapshot / "README.md").exists()
    card = (hub.folder / "group/coder/README.md").read_text()
    assert 'from_pretrained("group/coder")' in card and '"hf-hub:group/coder"' in card and "secret" not in card
    # wherever a trained model is named
    again = open_pretrained("hf-hub:group/coder@v1", {"batch_size": 4}, device="cpu")
    assert again.config.batch_size == 4 and hub.calls[-1] == ("download", "group/coder", "v1", None)
    assert again.fingerprint() == coder_plugin.from_pretrained("group/coder").fingerprint()
    assert main(["share", "hf-hub:group/coder", "--to", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / "coder.safetensors").is_file() and "# copy" in (tmp_path / "copy" / "README.md").read_text()
    # a model without heads over one with heads leaves none behind
    assert main(["share", str(runs["lora"]), "--export", "last", "--repo", "group/coder"]) == 0
    assert not (hub.folder / "group/coder/coder.safetensors").exists() and "/commit/1" in capsys.readouterr().out


def test_a_push_removes_the_earlier_models_files_and_no_others(
    hub: Hub, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coder_plugin.push_to_hub(shared / "bert", "group/model")
    place = hub.folder / "group/model"
    assert {"tokenizer.json", "text/config.json"} <= _names(place)
    (place / "text" / "notes.md").write_text("mine")
    (place / "concepts.md").write_text("mine")
    coder_plugin.push_to_hub(shared / "bigru", "group/model")
    assert _names(place) == _names(shared / "bigru") | {"text/notes.md", "concepts.md"}
    # without a manifest that can be read, weights at least that would be opened instead
    (place / "coder_export.json").write_text("{")
    coder_plugin.push_to_hub(shared / "lora", "group/model")
    assert _names(place) == _names(shared / "lora") | {"text/notes.md", "concepts.md"}
    assert "group/model: other files of the earlier model may stay" in caplog.text
    (place / "coder_export.json").unlink()
    shutil.copyfile(shared / "coder" / "coder.safetensors", place / "coder.safetensors")
    coder_plugin.push_to_hub(shared / "lora", "group/model")
    assert _names(place) == _names(shared / "lora") | {"text/notes.md", "concepts.md"}


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_a_manifest_lists_is_downloaded(hub: Hub, shared: Path) -> None:
    """Whatever a tokenizer's files are called, and nothing beside."""
    place = hub.folder / "group/lora"
    shutil.copytree(shared / "lora", place)
    for name in ("vocab.bpe", "chat[1].jinja"):
        (place / name).write_text(name)
    seal_again(place)
    for name in ("other.bin", "chat1.jinja"):
        (place / name).write_text(name)
    coder_plugin.from_pretrained("group/lora")
    assert _names(hub.folder / "cache/group/lora") == _names(place) - {"README.md", "other.bin", "chat1.jinja"}


@pytest.mark.parametrize("weights", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_a_repository_of_open_clips_opens_as_a_plain_clip(hub: Hub, shared: Path, weights: str) -> None:
    from safetensors.torch import load_file, save_file

    place = hub.folder / "group" / "clip"
    place.mkdir(parents=True)
    shutil.copyfile(shared / "coder" / "open_clip_config.json", place / "open_clip_config.json")
    state = load_file(shared / "coder" / "open_clip_model.safetensors")
    if weights.endswith(".bin"):
        torch.save(state, place / weights)
    else:
        save_file(state, place / weights)
    trained = coder_plugin.from_pretrained("group/clip")
    assert len(trained.model.coder.heads) == 0 and trained.encode_texts(["a dog"]).shape == (1, 32)
    assert torch.equal(trained.model.state_dict()["visual.proj"], state["visual.proj"])
    assert [call[0] for call in hub.calls] == ["download"] * (1 if weights.endswith("safetensors") else 2)


def test_a_repository_without_a_model_is_refused(hub: Hub) -> None:
    (hub.folder / "group" / "text").mkdir(parents=True)
    (hub.folder / "group" / "text" / "config.json").write_text("{}")
    with pytest.raises(CoderError, match="group/text: the repository holds no model"):
        coder_plugin.from_pretrained("group/text")


def _response(status: int) -> Any:
    import httpx

    return httpx.Response(status, request=httpx.Request("GET", "https://hub.example"))


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder"), "name a folder instead"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (errors.HFValidationError("bad"), "write OWNER/NAME"),
        (ConnectionError("no route"), "cannot be reached"),
        (RuntimeError("something\nelse"), "RuntimeError: something else"),
    ],
)
def test_the_hubs_errors_say_what_to_do(hub: Hub, error: Exception, match: str) -> None:
    hub.fails = error
    with pytest.raises(CoderError, match=f"group/x: .*{match}"):
        coder_plugin.from_pretrained("group/x")


def test_sharing_tells_an_error_in_one_line(hub: Hub, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fails = RuntimeError("something\nelse")
    assert main(["share", str(shared / "lora"), "--repo", "group/x"]) == 2
    assert "coder-plugin: error: group/x: " in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "status", "match"),
    [
        ("RepositoryNotFoundError", 404, "no such repository, or a private one"),
        ("GatedRepoError", 403, "ask for access"),
        ("RevisionNotFoundError", 404, "no such revision"),
        ("HfHubHTTPError", 403, "this token may not"),
    ],
)
def test_the_hubs_answers_say_what_to_do(hub: Hub, kind: str, status: int, match: str) -> None:
    pytest.importorskip("httpx")
    try:
        hub.fails = getattr(errors, kind)("no", response=_response(status))
    except TypeError:
        pytest.skip("another huggingface_hub")
    with pytest.raises(CoderError, match=match):
        coder_plugin.from_pretrained("group/x")
