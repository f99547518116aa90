"""The command's flags: what reaches the detector, the report, and what is refused."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from PIL import Image

from coder_plugin.cli.flags import add_command, read_command
from coder_plugin.cli.regions import Extract, extract_command
from coder_plugin.data.regions.shards import ShardFile
from coder_plugin.errors import CoderError

TIMM = ["--detector", "timm", "--detector-model", "test_resnet.r160_in1k", "--allow-random", "--device", "cpu"]


def run(*words: str) -> str:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_command(parser, Extract)
    return extract_command(read_command(Extract, parser.parse_args([*words, "--workers", "0"])), {})


def fault(*words: str) -> str:
    with pytest.raises(CoderError) as caught:
        run(*words)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "in/deep").mkdir(parents=True)
    for name in ("b.jpg", "a.PNG", "deep/c.webp"):
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / "in" / name)
    (tmp_path / "in/bad.jpg").write_bytes(b"no")
    (tmp_path / "in/notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_of_pictures_to_shards(folder):
    words = [str(folder / "in"), str(folder / "out"), *TIMM, "--grid", "2", "--image-size", "96"]
    report = run(*words)
    file = ShardFile(str(folder / "out"))
    assert list(file) == ["a.PNG", "b.jpg", "deep/c.webp"]
    assert len(file["b.jpg"]) == 4 and file["b.jpg"].size == (40, 30)
    assert f"regions {folder}/out: 1 shard, 3 images; 1 shard made here" in report
    assert "; 1 sample skipped (picture 1), which " in report and report.endswith(f": train with --regions {folder}/out")
    note = json.loads((folder / "out/train.extraction/000000.json").read_text())
    noted = note["plan"]
    assert [each[:2] for each in note["bad"]] == [["picture", "bad.jpg"]]
    assert (
        noted["model"] == "test_resnet.r160_in1k" and noted["grid"] == 2 and len(noted["checksum of the weights"]) == 64
    )
    assert noted["detector"] == "timm" and noted["source"] == str(folder / "in")
    assert "0 shards made here" in run(*words)
    assert "was begun with other options (grid was 2, is 3)" in fault(*[word if word != "2" else "3" for word in words])


def test_the_tasks_of_an_array(folder, monkeypatch):
    words = [str(folder / "in"), str(folder / "out"), *TIMM, "--shard-size", "2"]
    assert "1 shard made here" in (told := run(*words, "--task-index", "1", "--task-count", "2"))
    assert "1 shard of other tasks are missing" in told
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert "2 shards, 3 images; 1 shard made here" in run(*words)


def test_a_data_set_with_captions(folder):
    rows = ["filepath\ttitle", *(f"{name}\ta {name}" for name in ("b.jpg", "a.PNG"))]
    (folder / "in/table.csv").write_text("\n".join(rows) + "\n")
    run(str(folder / "in/table.csv"), str(folder / "out"), *TIMM, "--to-split", "dev")
    assert ShardFile(str(folder / "out"), split="dev").captions == {"b.jpg": ("a b.jpg",), "a.PNG": ("a a.PNG",)}


def test_a_whole_image_feature(folder):
    run(str(folder / "in"), str(folder / "out"), *TIMM, "--global-features", "timm:test_efficientnet.r160_in1k")
    assert ShardFile(str(folder / "out"))["b.jpg"].global_feature.ndim == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--detector", "yolo"], "'yolo'"),
        ([*TIMM, "--nms", "0.5"], "detector 'timm' has no option 'nms'"),
        (["--detector", "c4", "--grid", "3"], "detector 'c4' has no option 'grid'"),
        (["--detector", "c4"], "--allow-random"),
        ([*TIMM, "--global-features", "resnet50"], "timm:MODEL"),
        ([*TIMM, "--global-weights", "f"], "without --global-features"),
        ([*TIMM, "--shard-size", "0"], "--shard-size must be at least 1, got 0"),
    ],
)
def test_what_is_refused(folder, words, told):
    assert told in fault(str(folder / "in"), str(folder / "out"), *words)
