"""Backbones of the group ``coder_plugin.backbones``: look-up by name or export, creation, and loading of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.backbones.base import CONFIG, Backbone
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json

#: The weights in an export's folder.
WEIGHTS = "coder_model.safetensors"


@dataclass(frozen=True)
class PluginBackbone:
    """A backbone's entry point, and, for an export, the options saved in it."""

    name: str
    factory: Callable[..., Backbone]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> Mapping[str, Any]:
        """The backbone's defaults of training options."""
        return getattr(self.factory, "training", {})


def find_backbone(name: str) -> PluginBackbone | None:
    """The backbone that a name of the group ``coder_plugin.backbones``, or an export's configuration or folder, stands for.

    None for any other name, which may be an open_clip model.

    Raises:
        CoderError: an export's configuration that holds what it may not.
    """
    if name in registry.names("backbones"):
        return PluginBackbone(name, registry.load("backbones", name))
    path = Path(name.removeprefix("local-dir:"))
    path = path / CONFIG if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = read_json(path)
    except CoderError:
        if path.name == CONFIG:
            raise
        return None  # open_clip's, and reported as such
    if not isinstance(config, dict) or "backbone" not in config:
        return None
    options = config.get("options", {})
    if not isinstance(config["backbone"], str) or not isinstance(options, dict):
        raise CoderError(f"{path} is damaged: it needs the name of a backbone and an object of options")
    factory = registry.load("backbones", config["backbone"])
    if hasattr(factory, "saved_options"):
        options = factory.saved_options(options, path)
    return PluginBackbone(config["backbone"], factory, options)


def create_backbone(
    backbone: PluginBackbone, *, pretrained: str | None = None, device: Any = None, **options: Any
) -> Backbone:
    """Create a model from a backbone's saved options, with ``options`` over them; ``pretrained`` is a file of weights.

    Raises:
        CoderError: options that the backbone does not have, or weights that do not fit.
    """
    model = backbone.factory(**{**backbone.options, **options})
    if pretrained is not None:
        fit_weights(model, read_weights(pretrained), pretrained)
    return model if device is None else model.to(device)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file.

    Raises:
        CoderError: no such file, or it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise CoderError(f"weights {path} do not exist")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        advice = "; a released .pth is converted by scripts/convert_released.py" if str(path).endswith(".pth") else ""
        raise CoderError(f"weights {path} cannot be read: {error}{advice}") from error


def fit_weights(model: nn.Module, weights: Mapping[str, Tensor], path: str) -> None:
    """Load the tensors of a file into a model, in place. SigLIP's bias may be missing: it keeps its value.

    Raises:
        CoderError: tensors that are missing, left over or of another shape.
    """
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("coder.")}
    missing, left = sorted(expected.keys() - weights.keys() - {"logit_bias"}), sorted(weights.keys() - expected.keys())
    wrong = [name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape]
    if missing or left or wrong:
        raise CoderError(
            f"{path} does not fit {type(model).__name__}: {len(missing)} tensors missing {missing[:2]}, {len(left)} left over "
            f"{left[:2]}, {len(wrong)} of another shape {wrong[:2]}: was it saved from another model or other --model-kwargs?"
        )
    model.load_state_dict(weights, strict=False)
