"""A backbone with the heads of a recipe, and the loss that reads what they return (DESIGN, "one contract")."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import Head, Widths
from coder_plugin.recipe import Recipe
from coder_plugin.resolver import TOKENS, Resolution, resolve


class Coder(nn.Module):
    """``model.coder``: the recipe's heads, run in order inside the model's forward."""

    def __init__(self, recipe: Recipe, resolution: Resolution, widths: Widths) -> None:
        super().__init__()
        self.recipe: Recipe = recipe
        self.bindings: tuple[Mapping[str, str], ...] = resolution.bindings
        options = dict(recipe.heads)
        self.heads: Any = nn.ModuleDict()
        for name in resolution.heads:
            try:
                self.heads[name] = registry.load("heads", name)(widths, **dict(options.pop(name, ())))
            except (ValueError, TypeError) as error:
                raise CoderError(f"head {name!r}: {error}") from error
        if options:
            logging.warning("options of heads that this recipe does not build: %s", ", ".join(options))

    def forward(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All keys so far -> the heads' ``coder_*`` keys. A head whose inputs are not all there is left out."""
        pool = dict(known)
        for head in self.heads.values():
            if all(key in pool for key in head.requires):
                pool.update(head(**{key: pool[key] for key in head.requires}))
        return {key: value for key, value in pool.items() if key.startswith("coder_")}

    def post_step(self) -> None:
        """Write the heads' state: call once after every optimizer step that was performed (rule 3)."""
        for head in self.heads.values():
            head.post_step()

    def state_names(self) -> list[str]:
        """Names, within the whole model, of buffers and frozen copies that accumulate (rule 3)."""
        return [
            f"coder.heads.{name}.{inner}" for name, head in self.heads.items() for inner in head.state_names()
        ]


class CoderLoss(nn.Module):
    """The recipe's terms, weighted: the model's keys in, ``{"dcl_loss": …}`` out, in open_clip's manner.

    Entries are already weighted, so their sum is the objective. Holds no parameter and no state.
    """

    def __init__(self, recipe: Recipe, bindings: tuple[Mapping[str, str], ...], heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.recipe: Recipe = recipe
        self.bindings: tuple[Mapping[str, str], ...] = bindings
        self.terms: Any = nn.ModuleDict()
        for label, spec in zip(recipe.labels(), recipe.terms, strict=True):
            term = registry.load("losses", spec.name)(**dict(spec.options))
            if next(term.parameters(), None) is not None:
                raise CoderError(f"loss {spec.name!r} owns parameters, which nothing would train: put them into a head")
            self.terms[label] = term.bind(heads, local_loss=recipe.local_loss)

    def forward(self, *, output_dict: bool = True, **outputs: Tensor) -> dict[str, Tensor] | Tensor:
        """The model's outputs as keywords -> weighted scalars by name, or their sum with ``output_dict=False``."""
        losses: dict[str, Tensor] = {}
        for (label, term), spec, binding in zip(self.terms.items(), self.recipe.terms, self.bindings, strict=True):
            missing = [binding[argument] for argument in term.requires if binding[argument] not in outputs]
            if missing:
                raise CoderError(
                    f"loss {spec.name!r} needs {', '.join(missing)}, which the model did not return: is the model made "
                    "with this recipe, in training mode, and given what its heads require (image_id, text_positive)?"
                )
            value = term(**{argument: outputs[key] for argument, key in binding.items() if key in outputs})
            named = value if isinstance(value, dict) else {"loss": value}
            for name, scalar in named.items():
                losses[f"{label}_{name}"] = spec.weight * scalar
        return losses if output_dict else torch.stack(list(losses.values())).sum()


def create_model(
    name: str,
    *,
    recipe: str | Recipe = "dcl",
    pretrained: str | None = None,
    pretrained_image_path: str | None = None,
    **options: Any,
) -> Any:
    """An open_clip model with the recipe's heads under ``model.coder``.

    It keeps its class, attributes and state-dict keys. In training mode ``model(image, text, image_id=…)`` returns
    upstream's keys and the heads' (``coder_*``), batch-first; in eval mode upstream's alone.
    ``embed_image`` / ``embed_text`` give retrieval vectors whose inner product is the score. Parameters that no term
    reads, such as ``logit_scale`` under ``dcl``, are frozen.

    Args:
        name: any open_clip model name, ``local-dir:…``, ``hf-hub:…``, or the path of a model configuration (``.json``).
        recipe: a loss expression, a preset's name or a :class:`~coder_plugin.recipe.Recipe`.
        pretrained: open_clip tag, or a file that open_clip could load (our exports are).
        pretrained_image_path: weights for the image tower alone.
        options: for ``open_clip.create_model``: precision, device, force_image_size, …

    Raises:
        CoderError: unknown names, files that do not fit, a recipe that this model cannot serve.
    """
    from coder_plugin.backbones import clip
    from coder_plugin.backbones.tokens import TokenTaps

    recipe = Recipe.parse(recipe)
    model = clip.create_clip(
        name,
        pretrained=pretrained,
        pretrained_image_path=pretrained_image_path,
        needs_logit_bias=any(
            "logit_bias" in registry.load("losses", term.name).requires for term in recipe.terms
        ),
        **options,
    )
    resolution = resolve(recipe, clip.available_keys(model))
    taps = TokenTaps(model) if resolution.reads & TOKENS else None
    coder = Coder(recipe, resolution, clip.probe_widths(model, taps))
    coder.to(next(model.parameters()).device)
    model = clip.extend(model, coder, taps)
    for key in ("logit_scale", "logit_bias"):
        parameter = getattr(model, key, None)
        if parameter is not None and key not in resolution.reads:
            parameter.requires_grad_(False)
    return model


def create_loss(recipe: str | Recipe, *, model: Any) -> CoderLoss:
    """The recipe's loss for a model that :func:`create_model` made; ``loss(**model(...))`` is a dict of scalars.

    Raises:
        CoderError: the model has not the heads that the recipe requires.
    """
    from coder_plugin.backbones import clip

    recipe = Recipe.parse(recipe)
    if not hasattr(model, "coder"):
        raise CoderError("create_loss needs a model made by coder_plugin.create_model")
    resolution = resolve(recipe, clip.available_keys(model))
    absent = [name for name in resolution.heads if name not in model.coder.heads]
    if absent:
        raise CoderError(f"the model was made without the heads {', '.join(absent)}: give create_model the same recipe")
    return CoderLoss(recipe, resolution.bindings, model.coder.heads)
