"""A backbone with the heads of an objective, and the loss that reads what they return (DESIGN, "one contract")."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Set
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.heads.aggregator import Aggregator
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.heads.capabilities import (
    AddsTexts,
    Capability,
    FollowsModel,
    KeepsState,
    ReadsTags,
    Scores,
    affects_ranking,
    heads_with,
)
from coder_plugin.objective import Objective
from coder_plugin.resolver import INTERMEDIATE_KEYS, Resolution, resolve

AggregatorName = Literal["tower", "gpo"]
#: The keys that a backbone may return.
_EVERY_OUTPUT = frozenset({"image_features", "text_features", "logit_scale", "logit_bias"})


class Coder(nn.Module):
    """``model.coder``: the objective's heads, run in order inside the model's forward.

    Args:
        aggregator: ``"tower"``, the backbone's own pooling, or ``"gpo"``, an instance branch of ours over its tokens.
        context_blocks: what the model was made with; exports keep it.
    """

    def __init__(
        self,
        objective: Objective,
        resolution: Resolution,
        backbone: BackboneInfo,
        *,
        aggregator: AggregatorName = "tower",
        context_blocks: int = 1,
    ) -> None:
        super().__init__()
        self.objective: Objective = objective
        self.views: int = backbone.views
        self.context_blocks: int = context_blocks
        self.bindings: tuple[Mapping[str, str], ...] = resolution.bindings
        self.aggregators: Any = nn.ModuleDict()
        if aggregator == "gpo":
            channels = {"image": backbone.image_tokens, "text": backbone.text_tokens}
            self.aggregators.update({side: Aggregator(width, backbone.embed_dim) for side, width in channels.items()})
        options = dict(objective.heads)
        self.heads: Any = nn.ModuleDict()
        for name in resolution.heads:
            try:
                head = registry.load("heads", name)(backbone, **dict(options.pop(name, ())))
                head.requested_keys = resolution.reads
                self.heads[name] = head
            except (ValueError, TypeError) as error:
                raise CoderError(f"head {name!r}: {error}") from error
        if options:
            logging.warning("options of heads that this objective does not build: %s", ", ".join(options))

    def aggregate(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The features that stand in for the towers' own, where an aggregator pools the tokens."""
        pooled = {}
        for side, aggregator in self.aggregators.items():
            if f"{side}_tokens" in known:
                feature = aggregator(known[f"{side}_tokens"], known[f"{side}_mask"])
                pooled[f"{side}_features"] = F.normalize(feature.float(), dim=-1)
                if side == "image":
                    pooled["image_pooled"] = feature
        return pooled

    def embed(self, side: Literal["image", "text"], known: Mapping[str, Tensor]) -> Tensor:
        """The retrieval vectors of one side: instance feature and scoring heads' blocks, one after the other."""
        base = 1.0
        blocks: list[tuple[float, Tensor]] = []
        scoring = heads_with(self.heads, Scores).values()
        # what is added comes after what is interpolated, in whichever order the objective names them
        for head in sorted(scoring, key=lambda head: head.adds_score):
            instead, own = head.score_weights()
            if own > 0:
                blocks = [(weight * instead, block) for weight, block in blocks]
                base *= instead
                blocks.append((own, head.image_block(known) if side == "image" else head.text_block(known)))
        feature = known[f"{side}_features"]
        if not blocks:
            return feature
        weighed = [weight**0.5 * block.float() for weight, block in blocks]
        if feature.ndim == 3:  # an image of several features has the same block in each
            weighed = [block[:, None].expand(-1, feature.shape[1], -1) for block in weighed]
        return torch.cat([base**0.5 * feature, *weighed], -1)

    @property
    def adds_texts(self) -> AddsTexts | None:
        """The head that has further texts encoded, if there is one."""
        return next(iter(heads_with(self.heads, AddsTexts).values()), None)

    @property
    def reads_tags(self) -> bool:
        """Whether a head reads the classes of the words."""
        return any(head.tag_classes() for head in heads_with(self.heads, ReadsTags).values())

    def without_heads(self) -> Coder:
        """The same aggregators and no head: what a momentum copy of the model keeps."""
        bare = copy.copy(self)
        bare._modules = {**self._modules, "heads": nn.ModuleDict()}
        return bare

    def attach(self, model: Any) -> None:
        """Let the heads that follow the model copy it: when it is complete, and again when modules were replaced."""
        for head in heads_with(self.heads, FollowsModel).values():
            head.attach(model)

    def discard(self) -> None:
        """Forget what the loss stashed: no step follows."""
        for head in heads_with(self.heads, KeepsState).values():
            head.discard()

    def check(self, *, batch: int, samples: int) -> None:
        """:class:`CoderError` where a head cannot work with a global batch or a run of this size."""
        for name, head in self.heads.items():
            try:
                head.check(batch=batch, samples=samples)
            except ValueError as error:
                raise CoderError(f"head {name!r}: {error}") from error

    def forward(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All keys so far -> the heads' ``coder_*`` keys. A head whose inputs are not all there is left out."""
        pool = dict(known)
        for head in self.heads.values():
            if all(key in pool for key in head.requires):
                pool.update(head(**{key: pool[key] for key in (*head.requires, *head.uses) if key in pool}))
        return {key: value for key, value in pool.items() if key.startswith("coder_")}

    def post_step(self) -> None:
        """Write the heads' state: call once after every optimizer step that was performed."""
        for head in heads_with(self.heads, KeepsState).values():
            head.post_step()

    def health(self) -> dict[str, float]:
        """Figures of the heads' state for the log, as ``head/figure``."""
        stateful = heads_with(self.heads, KeepsState)
        return {f"{name}/{figure}": value for name, head in stateful.items() for figure, value in head.health().items()}

    def state_names(self) -> list[str]:
        """Names, within the whole model, of buffers and frozen copies that accumulate (rule 3)."""
        return [
            f"coder.heads.{name}.{inner}" for name, head in self.heads.items() for inner in head.state_names()
        ]


class CoderLoss(nn.Module):
    """The objective's terms, weighted: the model's keys in, ``{"dcl_loss": …}`` out, in open_clip's manner.

    Entries are already weighted, so their sum is the objective. Holds no parameter and no state.
    """

    def __init__(self, objective: Objective, bindings: tuple[Mapping[str, str], ...], heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.objective: Objective = objective
        self.bindings: tuple[Mapping[str, str], ...] = bindings
        self.terms: Any = nn.ModuleDict()
        for label, spec in zip(objective.labels(), objective.terms, strict=True):
            term = registry.load("losses", spec.name)(**dict(spec.options))
            if next(term.parameters(), None) is not None:
                raise CoderError(f"loss {spec.name!r} owns parameters, which nothing would train: put them into a head")
            self.terms[label] = term.bind(heads, local_loss=objective.local_loss)

    def forward(self, *, output_dict: bool = True, **outputs: Tensor) -> dict[str, Tensor] | Tensor:
        """The model's outputs as keywords -> weighted scalars by name, or their sum with ``output_dict=False``."""
        losses: dict[str, Tensor] = {}
        for (label, term), spec, binding in zip(self.terms.items(), self.objective.terms, self.bindings, strict=True):
            missing = [binding[argument] for argument in term.requires if binding[argument] not in outputs]
            if missing:
                raise CoderError(
                    f"loss {spec.name!r} needs {', '.join(missing)}, which the model did not return: is the model made "
                    "with this objective, in training mode, and given what its heads require (image_id, text_positive)?"
                )
            value = term(**{argument: outputs[key] for argument, key in binding.items() if key in outputs})
            named = value if isinstance(value, dict) else {"loss": value}
            for name, scalar in named.items():
                losses[f"{label}_{name}"] = spec.weight * scalar
        return losses if output_dict else torch.stack(list(losses.values())).sum()


def create_model(
    name: str,
    *,
    loss: str | Objective = "coder",
    pretrained: str | None = None,
    pretrained_image_path: str | None = None,
    aggregator: AggregatorName = "tower",
    context_blocks: int = 1,
    return_intermediates: Collection[str] = (),
    inference: bool = False,
    **options: Any,
) -> Any:
    """An open_clip model, or a region model, with the objective's heads under ``model.coder``.

    An open_clip model keeps its class, attributes and state-dict keys. In training mode ``model(image, text, image_id=…)``
    returns the backbone's keys and the heads' (``coder_*``), batch-first; in eval mode the backbone's alone.
    ``embed_image`` / ``embed_text`` give retrieval vectors whose inner product is the score. Parameters that no term
    reads, such as ``logit_scale`` under ``dcl``, are frozen.

    Args:
        name: any open_clip model name, ``local-dir:…``, ``hf-hub:…``, or the path of a model configuration (``.json``); or a
            backbone of the group ``coder_plugin.backbones``: ``region-bert``, ``region-bigru``, ``region-bert-camera``,
            ``region-bigru-vsrn``, or the ``coder_model.json`` that one's export holds.
        loss: a loss expression, the name of an objective, or an :class:`~coder_plugin.objective.Objective`.
        pretrained: open_clip tag, or a file that open_clip could load (our exports are); for region models an export's
            weights or a released VSE-infinity, VSRN or CAMERA ``.pth``.
        pretrained_image_path: weights for the image tower alone.
        aggregator: ``"tower"``, or ``"gpo"`` for an instance branch over patch and word tokens (projection and GPO), whose
            features stand in for the towers' own in training and in ``embed_*``.
        context_blocks: so many of the last blocks of an open_clip tower stand between what is read as locals and as contexts.
            Convolutional and hierarchical image towers have no such blocks, and region models their own context stage.
        return_intermediates: further keys of ``resolver.INTERMEDIATE_KEYS`` that ``describe_image`` and ``describe_text``
            return besides those that the heads read. A region model always returns all of its own.
        inference: only the heads that take part in the score or re-rank by their own, for evaluation and search: no banks, no
            momentum towers.
        options: for ``open_clip.create_model``: precision, device, force_image_size, …; for a backbone its own, such as
            region_dim, embed_dim, text.

    Raises:
        CoderError: unknown names, files that do not fit, an objective that this model cannot serve, more context blocks than a
            tower has.
    """
    from coder_plugin.backbones import clip, plugin_backbones

    objective = Objective.parse(loss)
    if aggregator not in get_args(AggregatorName):
        raise CoderError(f"aggregator must be one of {', '.join(get_args(AggregatorName))}, got {aggregator!r}")
    if context_blocks < 1:
        raise CoderError(f"context_blocks must be 1 or more, got {context_blocks}")
    if (found := plugin_backbones.find_backbone(name)) is not None:
        if aggregator != "tower" or pretrained_image_path:
            raise CoderError(f"{name} pools its regions itself and has no image tower to load: leave out aggregator and path")
        if context_blocks != 1:
            raise CoderError(f"{name} has a context stage of its own: context_blocks is for open_clip's towers")
        model: Any = plugin_backbones.create_backbone(found, pretrained=pretrained, **options)
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
    loss: str | Objective,
    aggregator: AggregatorName = "tower",
    context_blocks: int = 1,
    return_intermediates: Collection[str] = (),
    inference: bool = False,
    cache_dir: str | None = None,
) -> Any:
    """Put the objective's heads into a model, in place: what :func:`create_model` does with the one that it has made.

    Args:
        model: an open_clip model that returns a dict, or a region model.
        name: what it was made by; its tokenizer is asked where texts are generated.
        loss, aggregator, context_blocks, return_intermediates, inference: as in :func:`create_model`.
        cache_dir: for the tokenizer.
    """
    from coder_plugin.backbones import clip
    from coder_plugin.backbones.base import Backbone, make_word_embeddings
    from coder_plugin.backbones.feature_capture import AGGREGATOR_KEYS, FeatureCapture

    objective = Objective.parse(loss)
    is_region_model = isinstance(model, Backbone)
    inside: Set[str] = model.intermediate_keys if is_region_model else clip.INTERMEDIATE_KEYS
    if absent := sorted(set(return_intermediates) - inside):
        known = "of this model" if set(absent) <= INTERMEDIATE_KEYS else "known"
        raise CoderError(
            f"return_intermediates: {', '.join(absent)} is no key {known}, which gives: {', '.join(sorted(inside))}"
        )
    resolution = resolve(objective, clip.available_keys(model), inside)
    if inference:
        resolution = resolution.of_heads([name for name in resolution.heads if affects_ranking(registry.load("heads", name))])
        objective = replace(objective, heads=tuple(options for options in objective.heads if options[0] in resolution.heads))
    if is_region_model:
        model.coder = Coder(objective, resolution, model.info()).to(next(model.parameters()).device)
    else:
        wanted = (resolution.reads | set(return_intermediates)) & clip.INTERMEDIATE_KEYS
        if aggregator == "gpo":
            wanted |= AGGREGATOR_KEYS
        capture = FeatureCapture(model, wanted, context_blocks=context_blocks) if wanted else None
        coder = Coder(
            objective, resolution, clip.probe_backbone(model, capture), aggregator=aggregator, context_blocks=context_blocks
        )
        model = clip.extend(model, coder.to(next(model.parameters()).device), capture)
    model.coder_name = name
    if model.coder.adds_texts is not None:
        model.word_embeddings = (
            make_word_embeddings(model) if is_region_model else clip.make_word_embeddings(model, name, cache_dir)
        )
    model.coder.attach(model)
    for key in ("logit_scale", "logit_bias"):
        parameter = getattr(model, key, None)
        if parameter is not None and key not in resolution.reads:
            parameter.requires_grad_(False)
    return model


def needs_logit_bias(objective: Objective) -> bool:
    """Whether a term reads SigLIP's bias."""
    return any("logit_bias" in registry.load("losses", term.name).requires for term in objective.terms)


def required_heads(objective: Objective) -> tuple[str, ...]:
    """The heads that an objective builds on a model that has every key."""
    return resolve(objective, _EVERY_OUTPUT).heads


def reads_key(objective: Objective, key: str) -> bool:
    """Whether a term or head of an objective reads a key, on a model that has every key."""
    return key in resolve(objective, _EVERY_OUTPUT).reads


def required_heads_with(objective: Objective, capability: type[Capability]) -> dict[str, type[Capability]]:
    """The classes of those required heads that have a capability, by name."""
    classes = {name: registry.load("heads", name) for name in required_heads(objective)}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, capability)}


def create_loss(loss: str | Objective, *, model: Any) -> CoderLoss:
    """The objective's loss for a model that :func:`create_model` made; ``loss(**model(...))`` is a dict of scalars.

    Raises:
        CoderError: the model has not the heads that the objective requires, or gives an image several features, which one of
            the terms cannot compare.
    """
    from coder_plugin.backbones import clip

    objective = Objective.parse(loss)
    if not hasattr(model, "coder"):
        raise CoderError("create_loss needs a model made by coder_plugin.create_model")
    resolution = resolve(objective, clip.available_keys(model))
    absent = [name for name in resolution.heads if name not in model.coder.heads]
    if absent:
        raise CoderError(f"the model was made without the heads {', '.join(absent)}: give create_model the same objective")
    loss_module = CoderLoss(objective, resolution.bindings, model.coder.heads)
    for spec, binding, term in zip(objective.terms, resolution.bindings, loss_module.terms.values(), strict=True):
        if model.coder.views > 1 and "image_features" in binding.values() and not term.takes_views:
            raise CoderError(
                f"loss {spec.name!r} compares one feature of an image, and this model gives {model.coder.views}: take "
                "--model-kwargs image_pooling=gpo, or a loss that takes the best of several (dcl, triplet)"
            )
    return loss_module
