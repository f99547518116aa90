"""Evaluate a model with other weights of CODER's concept score and SelfAlign's context score, without encoding again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import Scores, heads_with
from coder_plugin.pretrained.encode import Encoded, Encoder


def sweep(
    encoder: Encoder, source: Any, *, betas: Sequence[float] = (), context_weights: Sequence[float] = ()
) -> Iterator[tuple[str, Encoded]]:
    """Encode the data once, and reweigh the vectors for each combination of weights.

    Args:
        encoder: of the model.
        source: the data.
        betas: weights of the instance score in ``S_b = beta S_I + (1 - beta) S_C``, 0 to 1; none: the model's.
        context_weights: weights of S_c in ``S = S_b + weight S_c``, 0 or more; 0 is S_b alone. None: the model's.

    Yields:
        The combination's name, such as ``"beta 0.9, context weight 0"``, and its vectors.

    Raises:
        CoderError: a weight out of range, or a model whose score has no such part.
    """
    heads = heads_with(encoder.model.coder.heads, Scores)
    scoring = f"this model scores with: {', '.join(heads) or 'no head'}"
    if wrong := [beta for beta in betas if not 0 <= beta <= 1]:
        raise CoderError(f"--beta must be in [0, 1], got {wrong[0]}")
    if wrong := [weight for weight in context_weights if not weight >= 0]:
        raise CoderError(f"--context-weight must be >= 0, got {wrong[0]}")
    beta_head, weight_head = _reweighed(heads)
    if betas and beta_head is None:
        raise CoderError(f"--beta weighs the concept level, and {scoring}")
    if context_weights and weight_head is None:
        raise CoderError(f"--context-weight weighs the context level, which an objective with cra has, and {scoring}")
    if others := {name for name, head in heads.items() if head not in (beta_head, weight_head)}:
        raise CoderError(f"the score of {', '.join(sorted(others))} cannot be reweighed, and {scoring}")
    with contextlib.ExitStack() as stack:
        if betas and beta_head is not None:
            stack.enter_context(beta_head.weighing(0.5))
        if context_weights and weight_head is not None:
            stack.enter_context(weight_head.weighing(1.0))
        encoded = encoder(source)
        layout = layout_of(heads)
    for beta in betas or (None,):
        for weight in context_weights or (None,):
            weights = {"beta": beta, "context weight": weight}
            name = ", ".join(f"{part} {value:g}" for part, value in weights.items() if value is not None)
            yield name, reweighed(encoded, layout, beta=beta, context_weight=weight)


class Layout(NamedTuple):
    """Blocks of a retrieval vector: those of S_I and S_C, equally wide, then that of S_c."""

    concepts: float | None  # weight of S_C in S_b, 0 to 1; None: S_C has no block
    contexts: float  # weight of S_c
    width: int  # of S_c's block


def layout_of(heads: Mapping[str, Any]) -> Layout:
    """The layout of the vectors of a model with these heads and their current weights."""
    interpolated, added = _reweighed(heads)
    concepts = 0.0 if interpolated is None else interpolated.score_weights()[1]
    weight = 0.0 if added is None else added.score_weights()[1]
    return Layout(concepts or None, weight, added.block_dim or 0 if added is not None and weight > 0 else 0)


def _reweighed(heads: Mapping[str, Any]) -> tuple[Scores | None, Scores | None]:
    """The head whose weight is interpolated (beta), and the one that is added (context weight)."""
    weighable = [head for head in heads_with(heads, Scores).values() if head.block_dim is not None]
    interpolated = next((head for head in weighable if not head.adds_score), None)
    return interpolated, next((head for head in weighable if head.adds_score), None)


def reweighed(
    encoded: Encoded, layout: Layout, *, beta: float | None = None, context_weight: float | None = None
) -> Encoded:
    """The vectors with other weights. A part whose weight was 0 has no block, so it cannot be reweighed.

    Args:
        encoded: the vectors of one model.
        layout: their blocks and current weights.
        beta: weight of S_I in S_b; None: unchanged.
        context_weight: weight of S_c; None: unchanged.
    """

    def weigh(vectors: Tensor) -> Tensor:
        parts = [*vectors.split([vectors.shape[-1] - layout.width, layout.width], -1)]
        if beta is not None and layout.concepts is not None:
            instance, concept = parts[0].chunk(2, -1)
            current = layout.concepts
            parts[:1] = [instance * (beta / (1 - current)) ** 0.5, concept * ((1 - beta) / current) ** 0.5]
        if context_weight is not None and layout.width:
            parts[-1] = parts[-1] * (context_weight / layout.contexts) ** 0.5
        return torch.cat(parts, -1)

    return encoded._replace(images=weigh(encoded.images), texts=weigh(encoded.texts))
