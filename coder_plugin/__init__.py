"""Losses beyond InfoNCE for OpenCLIP-style image-text retrieval training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "CoderError",
    "Trainer",
    "create_loss",
    "create_model",
    "follow",
    "from_pretrained",
    "list_plugins",
    "load_model",
    "push_to_hub",
    "register",
    "save_pretrained",
]

if TYPE_CHECKING:
    from coder_plugin.errors import CoderError
    from coder_plugin.following import follow
    from coder_plugin.integrations.hub import from_pretrained, push_to_hub, save_pretrained
    from coder_plugin.model import create_loss, create_model
    from coder_plugin.pretrained.open import load_model
    from coder_plugin.registry import list_plugins, register
    from coder_plugin.training.callbacks import Callback
    from coder_plugin.training.loop import Trainer

_HOME = {
    "Callback": "training.callbacks",
    "CoderError": "errors",
    "Trainer": "training.loop",
    "create_loss": "model",
    "create_model": "model",
    "follow": "following",
    "from_pretrained": "integrations.hub",
    "list_plugins": "registry",
    "load_model": "pretrained.open",
    "push_to_hub": "integrations.hub",
    "register": "registry",
    "save_pretrained": "integrations.hub",
}


def __getattr__(name: str) -> Any:
    """Load a public name where it is first used: the command line's help and the registry must not wait for torch."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"coder_plugin.{_HOME[name]}"), name)
    raise AttributeError(f"module 'coder_plugin' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the module with the public ones, loaded or not."""
    return sorted({*globals(), *__all__})
