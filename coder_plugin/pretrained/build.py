"""Model, tokenizer and transforms, from options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones import plugin_backbones
from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.transformers_clip import TransformersTowers
from coder_plugin.config import ModelConfig
from coder_plugin.data.bad_samples import ENOUGH, Bad, describe, nothing_to_read
from coder_plugin.data.from_config import captions_of
from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError
from coder_plugin.expression import parse_value
from coder_plugin.model import create_model, reads_key
from coder_plugin.objective import Objective


def make_model(
    config: ModelConfig,
    objective: Objective,
    device: torch.device,
    source: Any = None,
    *,
    max_regions: int = 36,
    inference: bool | Sequence[str] = False,
    return_intermediates: Collection[str] = (),
) -> Any:
    """A model with its heads on ``device``.

    Args:
        config: architecture, weights and overrides. Locking, adapters and checkpointing are the trainer's.
        objective: the loss, which decides the heads.
        device: where the model is put.
        source: data to check the model against; a region model takes from them what its options leave open. None: no check.
        max_regions: regions of an image that a region model reads.
        inference: build only the heads that score, or those of these names; as in :func:`coder_plugin.create_model`.
        return_intermediates: as in :func:`coder_plugin.create_model`.

    Raises:
        CoderError: an unknown model or option; weights or data that do not fit.
    """
    options: dict[str, Any] = {"cache_dir": config.cache_dir}
    backbone = plugin_backbones.find_backbone(config.name)
    example = None if source is None else first_image(source)
    if backbone is not None:
        options.update(_region_model_options(config))
        if source is not None:
            options.update(example=example, captions=partial(captions_of, source))
            global_feature = getattr(example, "global_feature", None)
            # an export has global_dim among its options
            if global_feature is not None and "global_dim" not in backbone.options and reads_key(objective, "image_global"):
                options.setdefault("global_dim", len(global_feature))
    elif config.kwargs:
        raise CoderError(f"--model-kwargs are options of region models, and {config.name} is not one")
    else:
        preprocess = {
            "mean": config.image_mean,
            "std": config.image_std,
            "interpolation": config.image_interpolation,
            "resize_mode": config.image_resize_mode,
        }
        options |= {
            "pretrained_image": config.pretrained_image,
            "force_image_size": config.force_image_size,
            "force_context_length": config.force_context_length,
            "force_quick_gelu": config.force_quick_gelu,
            "force_patch_dropout": config.force_patch_dropout,
            "force_custom_text": config.force_custom_text,
            "force_preprocess_cfg": {name: value for name, value in preprocess.items() if value is not None},
        }
    model = create_model(
        config.name,
        loss=objective,
        pretrained=config.pretrained,
        pretrained_image_path=config.pretrained_image_path,
        aggregator=config.aggregator,  # type: ignore[arg-type]
        context_blocks=config.context_blocks,
        inference=inference,
        return_intermediates=return_intermediates,
        device=device,
        **options,
    )
    if source is not None:
        check_data(model, example, source.name, max_regions=max_regions)
    if config.channels_last:
        model.visual.to(memory_format=torch.channels_last)
    return model.to(device)


def _region_model_options(config: ModelConfig) -> dict[str, Any]:
    """``--model-kwargs``, and the flags that region models also have."""
    options: dict[str, Any] = {}
    for setting in config.kwargs:
        name, _, value = setting.partition("=")
        options[name] = parse_value(value)
    if config.force_context_length is not None:
        options["context_length"] = config.force_context_length
    return options


def make_transform(model: Any, *, max_regions: int = 36) -> Callable[..., Any]:
    """The evaluation transform of a model: a picture (PIL) -> [3, H, W]; for a region model, regions -> a dict of tensors."""
    if isinstance(model, Backbone):
        return model.transform(max_regions=max_regions)
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)


def make_tokenizer(config: ModelConfig, model: Any, *, word_dropout: float = 0.0) -> Callable[[list[str]], Tensor]:
    """The tokenizer of a model: n texts -> int64 [n, length].

    Args:
        config: of the model.
        model: made with it.
        word_dropout: share of words that a region model's tokenizer masks, replaces or drops at random, for training.

    Raises:
        CoderError: a Hugging Face tokenizer that cannot be loaded.
    """
    if isinstance(model, Backbone):
        return model.tokenizer(word_dropout=word_dropout)
    if isinstance(model, TransformersTowers):
        return model.tokenizer()
    import open_clip

    from coder_plugin.backbones.clip import register_config

    name = register_config(config.name)
    try:
        return open_clip.get_tokenizer(name, context_length=config.force_context_length, cache_dir=config.cache_dir)
    except (OSError, ValueError) as error:
        raise CoderError(f"tokenizer of {name!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def first_image(source: Any) -> Any:
    """The first image, or regions, of a data set that can be read.

    Raises:
        CoderError: the data are empty, or none of the first 1,000 images can be read.
    """
    failed: list[Bad] = []
    for _, item in source.items():
        try:
            return item.load()
        except (OSError, ValueError) as error:
            failed.append(describe(item.key, error))
        if len(failed) == ENOUGH:
            break
    raise nothing_to_read(source.name, failed)


def check_data(model: Any, example: Any, name: str, *, max_regions: int) -> None:
    """Check that a model can read a data set; warn if images have more regions than it reads.

    Args:
        model: any.
        example: an image, or regions, of the data.
        name: of the data, for messages.
        max_regions: regions of an image that are read.

    Raises:
        CoderError: pictures for a region model, regions for another, or regions that the model cannot use.
    """
    regions = isinstance(example, Regions)
    if regions != isinstance(model, Backbone):
        other = "--model region-bert" if regions else "an open_clip --model, or region features of the pictures: --regions"
        raise CoderError(f"{name}: the data are {'regions' if regions else 'pictures'}; they need {other}")
    if regions:
        try:
            model.transform(max_regions=max_regions)(example)
        except ValueError as error:
            raise CoderError(f"{name}: its first image: {error}") from error
        if len(example) > max_regions:
            logging.warning(
                "%s: images have %d regions, the first %d are read (--max-regions)", name, len(example), max_regions
            )
