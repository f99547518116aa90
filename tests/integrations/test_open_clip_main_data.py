"""Shards through the reader of open_clip's main branch, in workers that are not forked: ``--json-text-key``, captions in json.

The checkout is the one that CODER_OPEN_CLIP_MAIN names; a process of its own imports it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coder_plugin.data.item import stable_hash

CHECKOUT = os.environ.get("CODER_OPEN_CLIP_MAIN")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="CODER_OPEN_CLIP_MAIN names no checkout of open_clip's main branch")

READ = """
import argparse, json, multiprocessing, sys
from torchvision.transforms.functional import to_tensor

def main(shards, *flags):
    import open_clip
    from open_clip_train import data, params
    from coder_plugin.integrations.open_clip import adapted
    from coder_plugin.integrations.open_clip.data import Extras, reading
    from coder_plugin.noise.positives import Positives

    tokenizer = open_clip.SimpleTokenizer()
    given = ["--train-data", shards, "--val-data", shards, "--train-num-samples", "8", "--batch-size", "4", "--workers", "1"]
    args = params.parse_args([*given, *flags])
    args = argparse.Namespace(**{**vars(args), "world_size": 1, "rank": 0, "distributed": False})
    read = lambda row: tokenizer.decode([code for code in row.tolist() if 0 < code < 49406]).strip()
    found = {}
    with adapted(), reading(Extras(tokenizer, Positives("truncate")), packed=False):
        for split, info in data.get_data(args, (to_tensor, to_tensor), tokenizer=tokenizer).items():
            found[split] = [
                {key: read(value) if key.startswith("text") else int(value) for key, value in zip(batch, row) if key != "image"}
                for batch in info.dataloader for row in zip(*batch.values())
            ]
    print(json.dumps(found))

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two of four pictures each, every other one with a ``txt``."""
    folder = tmp_path_factory.mktemp("main")
    Image.new("RGB", (4, 4)).save(png := io.BytesIO(), "png")
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(4):
                name = f"{shard} {number}"
                meta = {"title": f"title {name} of five words", "captions": [f"{name} {which} and on" for which in "ab"]}
                fields = {"png": png.getvalue(), "json": json.dumps(meta).encode()}
                for suffix, blob in {**fields, **({"txt": b"text"} if number % 2 else {})}.items():
                    info = tarfile.TarInfo(f"{number}.{suffix}")
                    info.size = len(blob)
                    tar.addfile(info, io.BytesIO(blob))
    return str(folder / "{0..1}.tar")


def read(folder: Path, shards: str, *flags: str) -> dict[str, list[dict[str, Any]]]:
    script = folder / "read.py"  # a file: workers import it anew
    script.write_text(READ)
    done = subprocess.run(
        [sys.executable, str(script), shards, *flags],
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}/src"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NAMES = [f"{shard} {number}" for shard in range(2) for number in range(4)]


def check(rows: list[dict[str, Any]], *, positives: bool) -> None:
    for row in rows:
        shard, number = row["text"].removeprefix("title ").split()[:2]
        assert row["image_id"] == stable_hash(f"{shard}/{number}")
        assert ("text_positive" in row) == positives
        assert not positives or (row["text"].startswith(row["text_positive"]) and row["text"] != row["text_positive"])


def test_captions_in_json_alone(tmp_path: Path, shards: str) -> None:
    found = read(tmp_path, shards)
    assert sorted(row["text"][:3] for row in found["train"]) == NAMES
    assert sorted(row["text"] for row in found["val"]) == sorted(f"{name} {which} and on" for name in NAMES for which in "ab")
    check(found["train"], positives=True)
    check(found["val"], positives=False)


def test_a_caption_that_json_text_key_names(tmp_path: Path, shards: str) -> None:
    found = read(tmp_path, shards, "--json-text-key", "absent;title")
    for split in ("train", "val"):
        assert sorted(row["text"] for row in found[split]) == [f"title {name} of five words" for name in NAMES]
        check(found[split], positives=split == "train")
