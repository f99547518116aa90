"""What the plans train on: each step is a command that its program takes, and is made once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coder_plugin.cli import build_parser


def test_each_step_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k_prepare
    import frozen_towers

    work, shards = tmp_path / "work", tmp_path / "shards"
    shards.mkdir()
    with pytest.raises(SystemExit, match="has no train-"):
        flickr8k_prepare.prepare(shards, work, "none", "scenes")
    for name in ("train-000000", "train-000001", "val-000000"):
        (shards / f"{name}.tar").touch()
    made: list[list[str]] = []
    status = 0

    def run(command: list[str], cwd: Path) -> Any:
        """Make a step's files, where its flags say."""
        made.append(command[1:])
        words = command[1:]
        if words[:2] == ["-m", "coder_plugin.cli"]:
            found = build_parser().parse_args(words[2:])
            assert all(Path(cwd / each).parent.is_dir() for each in words if each.endswith("*.tar"))
            output = words[words.index("--output") + 1] if "--output" in words else words[5]
            (cwd / output).mkdir(exist_ok=True)
            if words[3] == "convert":
                (cwd / "regions" / f"{words[-1]}_ims.npy").touch()
            assert found is not None
        elif words[1] == "cache":
            assert frozen_towers.build_parser().parse_args(words[1:]).val_data == "val/*.tar"
            (cwd / words[2]).touch()
        else:
            (cwd / words[1]).mkdir(exist_ok=True)
            (cwd / words[1] / "lite0-minilm.json").write_text(json.dumps({"text_cfg": {"hf_model_name": str(tmp_path)}}))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(flickr8k_prepare, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--vectors vectors.txt: no such file"):
        flickr8k_prepare.prepare(shards, work, "vectors.txt", "scenes")
    (tmp_path / "vectors.txt").write_text("dog 1.0")
    flickr8k_prepare.prepare(shards, work, "vectors.txt", "scenes")
    assert str(tmp_path / "vectors.txt") in made[-1], "the steps run in another folder"
    assert len(made) == 9 and {path.name for path in (work / "regions").iterdir()} == {"train_ims.npy", "dev_ims.npy"}
    assert (work / "train" / "train-000001.tar").resolve() == shards / "train-000001.tar"
    assert (work / "towers" / "minilm").resolve() == tmp_path
    flickr8k_prepare.prepare(shards, work, "none", "scenes")
    assert len(made) == 9, "what is there stays"
    (work / "frozen.pt").unlink()
    status = 1
    with pytest.raises(SystemExit, match="failed: .*cache frozen.pt"):
        flickr8k_prepare.prepare(shards, work, "none", "scenes")
    assert len(made) == 10
