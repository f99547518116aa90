"""A run's options: what flags, a file and a recipe say, over the defaults of the scenes and of the backbone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coder_plugin import recipes, registry
from coder_plugin.config import LOSS_OPTIONS, SCENES_DEFAULTS, TrainConfig, flatten, get_option, merge, resolve
from coder_plugin.errors import CoderError
from coder_plugin.expression import format_value
from coder_plugin.locations import check_model_addresses

#: Options that only region models have.
_OF_REGION_MODELS = ("region_dropout", "word_dropout")


def resolve_config(
    flags: Mapping[str, Any] | None = None,
    *,
    file: Mapping[str, Any] | None = None,
    file_name: str = "file",
    flags_name: str = "flag",
) -> TrainConfig:
    """Merge the layers of options: field defaults, scenes, backbone, recipe, file, flags; later ones win.

    Args:
        flags: options, flat (``{"lr": 1e-3}``) or nested by subject (``{"optim": {"lr": 1e-3}}``). None: none.
        file: options of a configuration file, in the same forms.
        file_name: what ``origins`` calls the file.
        flags_name: what ``origins`` calls ``flags``.

    Returns:
        The configuration, with the recipe's settings if an option ``recipe`` names one.

    Raises:
        CoderError: unknown options, values of the wrong type or range, or options that do not go together.

    Example:
        >>> config = resolve_config({"epochs": 2})
        >>> config.model.name, config.optim.epochs, config.optim.batch_size
        ('coder-tiny', 2, 64)
        >>> config.origins["epochs"], config.origins["batch_size"]
        ('flag', 'scenes')
    """
    file, flags = flatten(file or {}), flatten(flags or {})
    if "recipe" in file and "loss" in flags and "loss" not in file:  # the file's options are for its recipe's loss
        file = {name: value for name, value in file.items() if name not in LOSS_OPTIONS}
    layers = [(file_name, file), (flags_name, flags)]
    options, _ = merge(layers)
    recipe_name, settings = _recipe_layer(options)
    check_model_addresses(file, file_name, flags)
    if str(options.get("recipe")).endswith(".toml"):
        check_model_addresses(settings, recipe_name, {**file, **flags})
    data = resolve(layers).data
    if data.train is None and not data.on_scenes:
        raise CoderError(f"--dataset-type {data.dataset_type} needs --train-data")
    if data.on_scenes:
        unused = settings.pop("model", None)  # the scenes are pictures, whatever model the recipe is for
        if unused is not None and "model" not in options:
            if unused in registry.names("backbones"):
                raise CoderError(
                    f"{recipe_name}: its {unused} reads region features, and no data are named: add --train-data, such as "
                    f"f30k_precomp; to try its loss on the built-in scenes add --model {SCENES_DEFAULTS['model']}"
                )
            text = "the built-in scenes train %s, not the recipe's %s: for that give --train-data, and --model for pictures"
            logging.warning(text, SCENES_DEFAULTS["model"], unused)
    elif "model" not in options and "model" not in settings:
        raise CoderError("--model is needed with --train-data, such as --model ViT-B-32")
    from coder_plugin.backbones import plugin_backbones  # it needs torch; what is checked above does not

    model = options.get("model") or settings.get("model") or SCENES_DEFAULTS["model"]
    backbone = plugin_backbones.find_backbone(model)
    if backbone is None:
        settings.pop("model_kwargs", None)
        for name in _OF_REGION_MODELS:
            settings.pop(name, None)
            if options.get(name):
                raise CoderError(f"{get_option(name).flag} is only for region models; {model} is an open_clip model")
    config = resolve(
        [
            *([("scenes", SCENES_DEFAULTS)] if data.on_scenes else []),
            *([(f"model {backbone.name}", backbone.training)] if backbone is not None else []),
            (recipe_name, settings),
            *layers,
        ]
    )
    if config.model.pretrained is None:
        return config
    from coder_plugin.pretrained.export import weights_named

    weights = weights_named(config.model.pretrained)
    return replace(config, model=replace(config.model, pretrained=weights))


def _recipe_layer(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The layer of ``--recipe``: its settings, its loss, and the options of the loss's terms and heads as ``--set``.

    A loss that is given besides the recipe replaces the recipe's, with its options.
    """
    if (name := options.get("recipe")) is None:
        return "recipe", {}
    recipe = recipes.load(name)
    settings = dict(recipe.settings)
    if "loss" not in options:
        settings["loss"] = recipe.loss
        if recipe.options:
            settings["set"] = [f"{option}={format_value(value)}" for option, value in recipe.options.items()]
    return f"recipe {name}", settings
