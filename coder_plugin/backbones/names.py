"""The names of models, read without importing open_clip or torch, so that a misspelt one is reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from coder_plugin import registry
from coder_plugin.errors import CoderError

#: Our own configurations of open_clip models.
CONFIGS = Path(__file__).parent / "model_configs"
#: What the name of a model of transformers begins with, if it is not a folder's: ``transformers:OWNER/NAME``.
TRANSFORMERS = "transformers:"
#: What a name that is looked up elsewhere begins with.
SCHEMES = ("hf-hub:", "local-dir:", TRANSFORMERS)


def model_names() -> list[str]:
    """Names of open_clip's models, of our configurations for it, and of registered region models.

    Example:
        >>> {"ViT-B-32", "coder-tiny", "region-bert"} <= set(model_names())
        True
    """
    spec = find_spec("open_clip")
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = [CONFIGS, *(Path(place) / "model_configs" for place in places)]
    return sorted({path.stem for folder in folders for path in folder.glob("*.json")} | set(registry.names("backbones")))


def check_model_name(name: str) -> None:
    """Check a model's name as far as that is possible without open_clip. Paths and names with a scheme are not looked up.

    Raises:
        CoderError: an unknown name, or a configuration file that does not exist.

    Example:
        >>> check_model_name("ViT-B-32")
    """
    if name.startswith(SCHEMES) or Path(name).is_dir():
        return
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise CoderError(f"model configuration {name} does not exist")
        return
    names = model_names()
    if name not in names and name.replace("/", "-") not in names:
        raise unknown_model(name, names)


def unknown_model(name: str, names: Collection[str]) -> CoderError:
    """The error for a name that no model has."""
    lower = {each.lower(): each for each in names}
    near = [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return CoderError(
        f"unknown model {name!r}{hint} (there is no such folder either; all: open_clip.list_models(), a config file's path, a "
        "model's folder, or transformers:OWNER/NAME)"
    )
