"""Models with the heads that a loss needs, and losses for them: :func:`create_model` and :func:`create_loss`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from coder_plugin import registry
from coder_plugin.coder import AggregatorName, Coder, CoderLoss, GatherDtype, GatherForm
from coder_plugin.contrast.pairs import Implementation
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import Head
from coder_plugin.heads.capabilities import Capability, affects_ranking
from coder_plugin.objective import Objective, object_name
from coder_plugin.resolver import INTERMEDIATE_KEYS, Resolution, resolve

#: The keys that a backbone may return.
_OUTPUTS = frozenset({"image_features", "text_features", "logit_scale", "logit_bias"})


def create_model(
    name: str,
    *,
    loss: Any = "dcl",
    custom_heads: Sequence[Any] = (),
    pretrained: str | None = None,
    pretrained_image_path: str | None = None,
    aggregator: AggregatorName = "tower",
    context_blocks: int = 1,
    return_intermediates: Collection[str] = (),
    inference: bool | Sequence[str] = False,
    **options: Any,
) -> Any:
    """An open_clip model, a CLIPModel or SiglipModel of transformers, or a region model, with the heads that a loss needs under
    ``model.coder``.

    A model of open_clip or transformers keeps its class, attributes and state-dict keys. In training mode
    ``model(image, text, image_id=…)`` returns the backbone's keys and the heads' (``coder_*``), batch-first; in eval mode only
    the backbone's.
    ``embed_image`` and ``embed_text`` give retrieval vectors whose inner product is the score. Parameters that no term
    reads, such as ``logit_scale`` under ``dcl``, are frozen.

    Args:
        name: any open_clip model name, ``local-dir:…``, ``hf-hub:…``, or the path of a model configuration (``.json``); of
            transformers, ``transformers:OWNER/NAME``, a folder that ``save_pretrained`` wrote, or the ``config.json`` in it for
            random weights; or a backbone of the group ``coder_plugin.backbones``: ``region-bert``, ``region-bigru``,
            ``region-bert-camera``, ``region-bigru-vsrn``, or the ``coder_model.json`` of its export.
        loss: a loss expression, an :class:`~coder_plugin.objective.Objective`, a term object, or a list of these;
            ``(weight, loss)`` weighs any of them.
        custom_heads: head classes or objects that are not registered. The loss must need each of them.
        pretrained: an open_clip tag, or a file that open_clip can load, such as an export. For models of transformers a
            ``.safetensors`` file instead of the folder's own. For region models an export's weights.
        pretrained_image_path: weights of the image tower.
        aggregator: ``"tower"``, or ``"gpo"``: a projection and GPO over patch and word tokens, whose features replace the
            towers' own in training and in ``embed_*``. ``"gpo-mlp"``: GPO with the two-layer perceptron that CODER prints.
        context_blocks: number of the last blocks of a tower between the layer that gives locals and the layer
            that gives contexts, at least 1. Convolutional and hierarchical image towers have no such blocks, and region
            models have their own context stage.
        return_intermediates: further keys of ``resolver.INTERMEDIATE_KEYS`` that ``describe_image`` and ``describe_text``
            return besides those that the heads read. A region model always returns all of its own.
        inference: for evaluation and search, build only the heads that score or re-rank: no banks, no momentum towers. A
            sequence names these heads in their order, as an export does; no other head is then imported.
        options: passed to ``open_clip.create_model``: precision, device, force_image_size, …; or to a region model:
            region_dim, embed_dim, text, ….

    Returns:
        The model, an ``nn.Module``, with its heads under ``coder`` and the methods ``embed_image`` and ``embed_text``.

    Raises:
        CoderError: unknown names, files that do not fit, a loss that this model cannot serve, more context blocks than a
            tower has.

    Example:
        >>> import torch
        >>> model = create_model("coder-tiny", loss="dcl + 0.5*clip").train()
        >>> loss = create_loss("dcl + 0.5*clip", model=model)
        >>> image, text = torch.rand(2, 3, 64, 64), torch.ones(2, model.context_length, dtype=torch.long)
        >>> sorted(loss(**model(image, text, image_id=torch.tensor([1, 2]))))
        ['clip_loss', 'dcl_loss']
        >>> model.embed_image(image).shape == model.embed_text(text).shape
        True
    """
    from coder_plugin.backbones import clip, plugin_backbones, transformers_clip

    passed = _heads_by_name(custom_heads)
    objective = Objective.parse(loss, heads=passed)
    if aggregator not in get_args(AggregatorName):
        raise CoderError(f"aggregator must be one of {', '.join(get_args(AggregatorName))}, got {aggregator!r}")
    if pretrained is not None and not isinstance(pretrained, (str, Path)):
        raise CoderError(f"pretrained is {pretrained!r}: name a tag of open_clip, such as 'openai', or a file")
    if context_blocks < 1:
        raise CoderError(f"context_blocks must be 1 or more, got {context_blocks}")
    backbone = plugin_backbones.find_backbone(name)
    if backbone is not None:
        if aggregator != "tower" or pretrained_image_path:
            raise CoderError(f"{name} pools its regions itself and has no image tower to load: leave out aggregator and path")
        if context_blocks != 1:
            raise CoderError(f"{name} has a context stage of its own: context_blocks is for open_clip's towers")
        if needs_logit_bias(objective) and getattr(backbone.factory, "logit_bias", False):
            options.setdefault("logit_bias", True)
        model: Any = plugin_backbones.create_backbone(backbone, pretrained=pretrained, **options)
    elif (location := transformers_clip.find_location(name)) is not None:
        model = transformers_clip.create(
            location, pretrained=pretrained, pretrained_image_path=pretrained_image_path, **options
        )
    else:
        model = clip.create_clip(
            name,
            pretrained=pretrained,
            pretrained_image_path=pretrained_image_path,
            needs_logit_bias=needs_logit_bias(objective),
            **options,
        )
    return add_heads(
        model,
        name,
        loss=objective,
        custom_heads=custom_heads,
        aggregator=aggregator,
        context_blocks=context_blocks,
        return_intermediates=return_intermediates,
        inference=inference,
        cache_dir=options.get("cache_dir"),
    )


def add_heads(
    model: Any,
    name: str,
    *,
    loss: Any,
    custom_heads: Sequence[Any] = (),
    aggregator: AggregatorName = "tower",
    context_blocks: int = 1,
    return_intermediates: Collection[str] = (),
    inference: bool | Sequence[str] = False,
    cache_dir: str | None = None,
) -> Any:
    """Add the heads that a loss needs to an existing model, in place.

    Args:
        model: an open_clip model that returns a dict, a CLIPModel or SiglipModel of transformers, or a region model.
        name: the name that it was created by; the tokenizer is found by it, and a model of transformers is exported with the
            tokenizer and the image processor that are there.
        loss, custom_heads, aggregator, context_blocks, return_intermediates, inference: as in :func:`create_model`.
        cache_dir: folder of the tokenizer's download.

    Raises:
        CoderError: as in :func:`create_model`, and for a model of another kind.
    """
    from coder_plugin.backbones import clip, transformers_clip
    from coder_plugin.backbones.base import Backbone, make_word_embeddings
    from coder_plugin.backbones.feature_capture import AGGREGATOR_KEYS, FeatureCapture

    passed = _heads_by_name(custom_heads)
    objective = Objective.parse(loss, heads=passed)
    is_region_model = isinstance(model, Backbone)
    if hasattr(model, "coder"):
        raise CoderError(
            f"the {type(model).__name__} has heads already: give create_model the whole loss, or add the heads to a new model "
            "with its weights"
        )
    if transformers_clip.class_name(model) is not None:
        model = transformers_clip.adapt(model, name, cache_dir=cache_dir)
    elif not is_region_model and not all(hasattr(model, part) for part in ("visual", "encode_image", "encode_text")):
        raise CoderError(
            f"heads cannot be added to a {type(model).__name__}: only to an open_clip model, to a CLIPModel or SiglipModel of "
            "transformers, and to a region model"
        )
    intermediates: Set[str] = model.intermediate_keys if is_region_model else clip.INTERMEDIATE_KEYS
    _check_intermediates(return_intermediates, intermediates)
    if isinstance(inference, bool):
        resolution = resolve(objective, clip.available_keys(model), intermediates, heads=passed)
    else:
        resolution = Resolution(tuple(inference), (), frozenset(), passed)
    if unused := [name for name in passed if name not in resolution.heads]:
        names = ", ".join(unused)
        raise CoderError(f"custom_heads: the loss needs no head {names}; a term or head must require what it provides")
    if inference is not False:
        resolution = resolution.of_heads([name for name in resolution.heads if affects_ranking(resolution.head(name))])
        objective = replace(objective, heads=tuple(options for options in objective.heads if options[0] in resolution.heads))
    device = next(model.parameters()).device
    if is_region_model:
        model.coder = Coder(objective, resolution, model.info()).to(device)
    else:
        keys = (resolution.reads | set(return_intermediates)) & clip.INTERMEDIATE_KEYS
        if aggregator != "tower":
            keys |= AGGREGATOR_KEYS
        capture_class = getattr(model, "capture_class", FeatureCapture)
        capture = capture_class(model, keys, context_blocks=context_blocks) if keys else None
        info = clip.probe_backbone(model, capture)
        coder = Coder(objective, resolution, info, aggregator=aggregator, context_blocks=context_blocks)
        model = clip.extend(model, coder.to(device), capture)
    model.coder_name = name
    if model.coder.adds_texts is not None:
        model.word_embeddings = (
            make_word_embeddings(model) if is_region_model else clip.make_word_embeddings(model, name, cache_dir)
        )
    if model.coder.encodes_negatives and hasattr(model, "text_decoder"):
        raise CoderError(f"{name} generates captions from images, so hard negatives cannot be encoded with its captions")
    model.coder.attach(model)
    for key in ("logit_scale", "logit_bias"):
        parameter = getattr(model, key, None)
        if parameter is not None and key not in resolution.reads:
            parameter.requires_grad_(False)
    return model


def create_loss(
    loss: Any,
    *,
    model: Any,
    implementation: Implementation = "auto",
    gather_dtype: GatherDtype = "exact",
    gather: GatherForm = "all",
) -> CoderLoss:
    """A loss for a model of :func:`create_model`; ``loss(**model(...))`` is a dict of weighted scalars.

    Args:
        loss: as in :func:`create_model`. It may leave out terms that the model was created with, but not need more heads.
        model: the model whose heads' output the loss reads.
        implementation: ``"reference"``: each loss forms all similarities of the batch at once; ``"tiled"``: equal up to
            rounding, in memory that grows with the batch size alone (docs/equations.md#tiles); ``"auto"``: tiles for the
            terms and options that have them.
        gather_dtype: how features, keys and the gradients that return travel between ranks: ``"exact"``, in their own types,
            or ``"bfloat16"``, rounded to 8 bits of mantissa on the way, and summed so, in half the bytes.
        gather: with several processes, ``"all"``: every rank gets the features of all ranks; ``"ring"``: the texts of one rank
            after the other visit it, so that no rank holds the global batch. For terms whose ``supports`` has ``ring``, by
            tiles; each rank then compares its own anchors. In one process both are the same.

    Returns:
        The loss, an ``nn.Module`` without parameters and state. Called with the model's output as keywords it returns
        ``{"dcl_loss": …}``, a scalar for each term with its weight applied; with ``output_dict=False`` their sum.

    Raises:
        CoderError: the model lacks heads that the loss needs, a term has parameters or buffers, the model gives an image
            several features and a term can compare only one, or ``gather="ring"`` with a term or an option that does not
            support it.

    Example:
        >>> import torch
        >>> class Spread(torch.nn.Module):
        ...     requires = ("image_features",)
        ...
        ...     def forward(self, image_features):
        ...         return -image_features.var(0).sum()
        >>> spread = Spread()
        >>> model = create_model("coder-tiny", loss=["clip", (0.5, spread)])
        >>> print(create_loss(["clip", (0.5, spread)], model=model).objective)
        clip + 0.5*spread
    """
    from coder_plugin.backbones import clip

    if not hasattr(model, "coder"):
        raise CoderError("create_loss needs a model made by coder_plugin.create_model")
    passed = {name: model.coder.heads[name] for name in model.coder.passed_heads}
    objective = Objective.parse(loss, heads=passed)
    resolution = resolve(objective, clip.available_keys(model), heads=passed)
    absent = [name for name in resolution.heads if name not in model.coder.heads]
    if absent:
        raise CoderError(f"the model was made without the heads {', '.join(absent)}: give create_model the same loss")
    coder_loss = CoderLoss(
        objective,
        resolution.bindings,
        model.coder.heads,
        implementation=implementation,
        gather_dtype=gather_dtype,
        gather=gather,
    )
    if gather == "ring" and model.coder.views > 1:
        raise CoderError(f"gather='ring' compares one feature of an image, and this model gives {model.coder.views}")
    for spec, binding, term in zip(objective.terms, resolution.bindings, coder_loss.terms.values(), strict=True):
        if model.coder.views > 1 and "image_features" in binding.values() and "views" not in term.supports:
            raise CoderError(
                f"loss {spec.name!r} compares one feature of an image, and this model gives {model.coder.views}: take "
                "--model-kwargs image_pooling=gpo, or a loss that takes the best of several (dcl, triplet)"
            )
    return coder_loss


def needs_logit_bias(objective: Objective) -> bool:
    """Whether a term reads SigLIP's bias."""
    return any("logit_bias" in term.build().requires for term in objective.terms)


def required_heads(objective: Objective) -> tuple[str, ...]:
    """The registered heads that an objective needs on a model that has every key."""
    return resolve(objective, _OUTPUTS).heads


def option_owners(objective: Objective) -> set[str]:
    """The terms and the required heads of an objective, by whose names ``--set OWNER.OPTION=VALUE`` sets options."""
    return {*required_heads(objective), *(term.name for term in objective.terms)}


def reads_key(objective: Objective, key: str) -> bool:
    """Whether a term or head of an objective reads a key, on a model that has every key."""
    return key in resolve(objective, _OUTPUTS).reads


def required_heads_with(objective: Objective, capability: type[Capability]) -> dict[str, type[Capability]]:
    """The classes of those required heads that have a capability, by name."""
    classes = {name: registry.load("heads", name) for name in required_heads(objective)}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, capability)}


def _heads_by_name(heads: Sequence[Any]) -> Mapping[str, Any]:
    named: dict[str, Any] = {}
    for head in heads:
        if not (isinstance(head, Head) or (isinstance(head, type) and issubclass(head, Head))):
            raise CoderError(f"custom_heads: {head!r} is neither a subclass nor an object of coder_plugin.heads.base.Head")
        name = object_name(head)
        if name in named or name in registry.names("heads"):
            raise CoderError(f"custom_heads: there is another head {name!r}; rename the class")
        named[name] = head
    return named


def _check_intermediates(requested: Collection[str], available: Set[str]) -> None:
    absent = sorted(set(requested) - available)
    if absent:
        unknown = "this model does not give" if set(absent) <= INTERMEDIATE_KEYS else "unknown key"
        keys, known = ", ".join(absent), ", ".join(sorted(available))
        raise CoderError(f"return_intermediates: {unknown} {keys}; it gives: {known}")
