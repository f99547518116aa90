"""Model, tokenizer and transforms, from options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones import own
from coder_plugin.backbones.base import Backbone
from coder_plugin.config import TrainConfig
from coder_plugin.data.from_config import captions_of
from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError
from coder_plugin.model import create_model, reads_key
from coder_plugin.objective import Objective, parse_value


def make_model(
    config: TrainConfig,
    objective: Objective,
    device: torch.device,
    source: Any = None,
    *,
    inference: bool = False,
    return_intermediates: Collection[str] = (),
) -> Any:
    """The model with its heads on ``device``.

    Args:
        config: the model's options.
        objective: the objective, which decides the heads.
        device: where the model is put.
        source: data to check the model against; they give a region model the options left open.
        inference: build only the heads that score.
        return_intermediates: as in :func:`coder_plugin.create_model`.
    """
    options: dict[str, Any] = {"cache_dir": config.model.cache_dir}
    found = own.find(config.model.name)
    example = None if source is None else example_of(source, config.data.max_bad_images, of_regions=found is not None)
    if found is not None:
        options.update(_own_options(config))
        if source is not None:
            captions = partial(captions_of, source)
            options.update(example=example, captions=captions)
            whole = getattr(example, "whole", None)
            # an export keeps what it was made with
            if whole is not None and "global_dim" not in found.options and reads_key(objective, "image_global"):
                options.setdefault("global_dim", len(whole))
    elif config.model.kwargs:
        raise CoderError(f"--model-kwargs are options of region models, and {config.model.name} is open_clip's")
    else:
        options |= {
            "pretrained_image": config.model.pretrained_image,
            "force_image_size": config.model.force_image_size,
            "force_context_length": config.model.force_context_length,
            "force_quick_gelu": config.model.force_quick_gelu,
            "force_patch_dropout": config.model.force_patch_dropout,
            "force_custom_text": config.model.force_custom_text,
            "force_preprocess_cfg": preprocess_overrides(config),
        }
    model = create_model(
        config.model.name,
        loss=objective,
        pretrained=config.model.pretrained,
        pretrained_image_path=config.model.pretrained_image_path,
        aggregator=config.model.aggregator,  # type: ignore[arg-type]
        context_blocks=config.model.context_blocks,
        inference=inference,
        return_intermediates=return_intermediates,
        device=device,
        **options,
    )
    if source is not None:
        check_data(model, example, source.name, config)
    if config.model.channels_last:
        model.visual.to(memory_format=torch.channels_last)
    model.to(device)
    return model


def _own_options(config: TrainConfig) -> dict[str, Any]:
    """``--model-kwargs``, and the flags that region models have as well."""
    options: dict[str, Any] = {}
    for setting in config.model.kwargs:
        name, equals, value = setting.partition("=")
        if not equals:
            raise CoderError(f"--model-kwargs {setting}: write OPTION=VALUE, such as embed_dim=512")
        options[name] = parse_value(value)
    if config.model.force_context_length is not None:
        options["context_length"] = config.model.force_context_length
    return options


def preprocess_overrides(config: Any) -> dict[str, Any]:
    """open_clip's preprocessing options that the flags set."""
    named = {
        "mean": config.model.image_mean,
        "std": config.model.image_std,
        "interpolation": config.model.image_interpolation,
        "resize_mode": config.model.image_resize_mode,
    }
    return {key: value for key, value in named.items() if value is not None}


def make_transforms(model: Any, config: TrainConfig) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The training (augmenting) and evaluation transforms for this model: open_clip's, or a region model's own."""
    if isinstance(model, Backbone):
        options = {"max_regions": config.data.max_regions}
        return model.transform(**options, region_dropout=config.data.region_dropout), model.transform(**options)
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    augmentation = None
    if config.model.aug_cfg:
        pairs = [item.partition("=") for item in config.model.aug_cfg]
        augmentation = {key: _sequence(value) for key, _, value in pairs}
        known = AugmentationCfg.__dataclass_fields__
        for key in augmentation:
            if key not in known:
                raise CoderError(f"--aug-cfg: unknown option {key!r}; known: {', '.join(known)}")
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    return (
        image_transform_v2(preprocess, is_train=True, aug_cfg=augmentation),
        image_transform_v2(preprocess, is_train=False),
    )


def _sequence(text: str) -> Any:
    if "," in text or text[:1] in "([":
        return tuple(parse_value(item) for item in text.strip("()[] ").split(",") if item.strip())
    return parse_value(text)


def make_tokenizer(config: TrainConfig, model: Any, *, training: bool = False) -> Callable[[list[str]], Tensor]:
    """Texts -> ids; in training a region model's drops words."""
    if isinstance(model, Backbone):
        return model.tokenizer(word_dropout=config.data.word_dropout if training else 0.0)
    import open_clip

    from coder_plugin.backbones.clip import register_config

    name = register_config(config.model.name)
    try:
        return open_clip.get_tokenizer(name, context_length=config.model.force_context_length, cache_dir=config.model.cache_dir)
    except OSError as error:
        raise CoderError(f"tokenizer of {name!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def example_of(source: Any, most: int, *, of_regions: bool) -> Any:
    """The first image of the data that can be read, after so many at most that cannot."""
    failed: list[str] = []
    for _, item in source.items():
        try:
            return item.load()
        except (OSError, ValueError) as error:
            failed.append(f"{item.key}: {error}")
        if len(failed) > most:
            break
    why = f"none of the first {len(failed)} images can be read; the first: {failed[0]}" if failed else "no images"
    hint = " (region features of the images: --regions)" if of_regions else ""
    raise CoderError(f"{source.name}: {why}{hint}")


def check_data(model: Any, example: Any, name: str, config: TrainConfig) -> None:
    """CoderError where the data are pictures and the model reads regions, the other way round, or regions that it cannot
    use; a warning where images have more of them than are read."""
    regions = isinstance(example, Regions)
    if regions != isinstance(model, Backbone):
        other = "--model region-bert" if regions else "a --model of open_clip's, or extract regions and name them: --regions"
        raise CoderError(f"{name}: the data are {'regions' if regions else 'pictures'}; they want {other}")
    if regions:
        try:
            model.transform(max_regions=config.data.max_regions)(example)
        except ValueError as error:
            raise CoderError(f"{name}: its first image: {error}") from error
        if len(example) > config.data.max_regions:
            counts = len(example), config.data.max_regions
            logging.warning("%s: images have %d regions, the first %d are read (--max-regions)", name, *counts)
