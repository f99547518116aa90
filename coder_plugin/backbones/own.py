"""Backbones that are not open_clip's: found by name or in an export, made, and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from coder_plugin import registry
from coder_plugin.backbones.base import CONFIG, Backbone
from coder_plugin.errors import CoderError

#: The weights beside an export's configuration.
WEIGHTS = "coder_model.safetensors"


@dataclass(frozen=True)
class Found:
    """A backbone's entry point and the options that an export has kept."""

    name: str
    factory: Callable[..., Backbone]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> Mapping[str, Any]:
        """Defaults of training options that go with the backbone."""
        return getattr(self.factory, "training", {})


def find(name: str) -> Found | None:
    """The backbone that a name of the group ``coder_plugin.backbones``, or an export's configuration or folder, means;
    None where it is open_clip's to say."""
    if name in registry.names("backbones"):
        return Found(name, registry.load("backbones", name))
    path = Path(name.removeprefix("local-dir:"))
    path = path / CONFIG if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        made = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(made, dict) or "backbone" not in made:
        return None
    options = dict(made.get("options", {}))
    if isinstance(text := options.get("text"), str) and (path.parent / text).is_dir():
        options["text"] = str(path.parent / text)  # an export carries its text encoder's shape and tokenizer
    return Found(made["backbone"], registry.load("backbones", made["backbone"]), options)


def create(found: Found, *, pretrained: str | None = None, device: Any = None, **options: Any) -> Backbone:
    """The backbone with an export's options, and these over them; ``pretrained`` is a file of weights."""
    model = found.factory(**{**found.options, **options})
    if pretrained is not None:
        load(model, pretrained)
    return model if device is None else model.to(device)


def load(model: Backbone, path: str) -> None:
    """Load an export's weights, or a released ``.pth``, whole: a tensor missing, left over or misshapen is an error."""
    weights: Mapping[str, Tensor]
    if not Path(path).is_file():
        raise CoderError(f"weights {path} do not exist")
    if path.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CoderError(f"weights {path} cannot be read: {error}") from error
    else:
        from coder_plugin.backbones.released import read_released

        weights = read_released(path, model)
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("coder.")}
    missing, left = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape]
    if missing or left or wrong:
        raise CoderError(
            f"{path} does not fit {type(model).__name__}: {len(missing)} tensors missing {missing[:2]}, {len(left)} left over "
            f"{left[:2]}, {len(wrong)} of another shape {wrong[:2]}: is it of another model, or made with other --model-kwargs?"
        )
    model.load_state_dict(weights, strict=False)
