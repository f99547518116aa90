"""The trained CLIP without ``coder.*``, as a folder that plain open_clip opens (DESIGN, rule 5).

``open_clip.create_model(NAME, pretrained=FOLDER/open_clip_model.safetensors)`` or ``"local-dir:FOLDER"``.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

WEIGHTS = "open_clip_model.safetensors"


def export_clip(model: Any, folder: Path) -> Path:
    """Write the weights and the configuration the model was made with, overrides included; returns the weights' path.

    Where that configuration could not be read (a hub that cannot be reached), only the weights are written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.writing"
    save_file(plain_state(model), aside, metadata={"format": "pt"})
    os.replace(aside, folder / WEIGHTS)
    if model.coder_config is not None:
        written = {"model_cfg": model.coder_config, "preprocess_cfg": dict(model.visual.preprocess_cfg)}
        (folder / "open_clip_config.json").write_text(json.dumps(written, indent=2))
    return folder / WEIGHTS


def plain_state(model: Any) -> dict[str, Tensor]:
    """The state dict that the model's open_clip class has: no heads, low-rank adapters merged into their weights."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        model = _merged(model)
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in model.state_dict().items()
        if not name.startswith("coder.")
    }


def _merged(model: Any) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer

    coder = model.coder
    model.coder = nn.Module()  # banks and momentum towers need not be copied
    try:
        merged = copy.deepcopy(model)
    finally:
        model.coder = coder
    layers = [(name, module) for name, module in merged.named_modules() if isinstance(module, BaseTunerLayer)]
    outer: list[str] = []
    for name, module in layers:
        if outer and name.startswith(f"{outer[-1]}."):
            continue  # part of an attention that has been merged as a whole
        outer.append(name)
        parent, _, child = name.rpartition(".")
        setattr(merged.get_submodule(parent), child, _plain_layer(module))
    return merged


def _plain_layer(module: Any) -> nn.Module:
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    module.merge()
    return module.get_base_layer()
