"""The same vectors with other weights of the score's parts: CODER's concept level, SelfAlign's context level."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import Reweighs, Scores, heads_with
from coder_plugin.pretrained.encode import Encoded, Encoder


def sweep(
    encoder: Encoder, source: Any, *, betas: Sequence[float] = (), context_weights: Sequence[float] = ()
) -> Iterator[tuple[str, Encoded]]:
    """Encode once, and give the vectors for each combination of weights, with its name (``"beta 0.9, context weight 0"``).

    Args:
        betas: of the instance level in ``S_b = beta S_I + (1 - beta) S_C``; none: the model's own.
        context_weights: of S_c in ``S = S_b + weight S_c``; 0 is S_b alone.

    Raises:
        CoderError: a weight out of range, a model whose score has no such part.
    """
    heads = heads_with(encoder.model.coder.heads, Scores)
    known = f"this model scores with: {', '.join(heads) or 'no head'}"
    if wrong := [beta for beta in betas if not 0 <= beta <= 1]:
        raise CoderError(f"--beta must be in [0, 1], got {wrong[0]}")
    if wrong := [weight for weight in context_weights if not weight >= 0]:
        raise CoderError(f"--context-weight must be >= 0, got {wrong[0]}")
    beta_head, weight_head = _reweighed(heads)
    if betas and beta_head is None:
        raise CoderError(f"--beta weighs the concept level, and {known}")
    if context_weights and weight_head is None:
        raise CoderError(f"--context-weight weighs the context level, which an objective with cra has, and {known}")
    if others := {name for name, head in heads.items() if head not in (beta_head, weight_head)}:
        raise CoderError(f"the score of {', '.join(sorted(others))} cannot be weighed anew, and {known}")
    with contextlib.ExitStack() as stack:
        if betas and beta_head is not None:
            stack.enter_context(beta_head.weighing(0.5))
        if context_weights and weight_head is not None:
            stack.enter_context(weight_head.weighing(1.0))
        encoded = encoder(source)
        layout = layout_of(heads)
    for beta in betas or (None,):
        for weight in context_weights or (None,):
            named = {"beta": beta, "context weight": weight}
            name = ", ".join(f"{part} {value:g}" for part, value in named.items() if value is not None)
            yield name, reweighed(encoded, layout, beta=beta, context_weight=weight)


class Layout(NamedTuple):
    """How a retrieval vector is put together, [S_I's block ; S_C's, of the same width ; S_c's]."""

    concepts: float | None  # weight of S_C in S_b, 0 to 1; None: it has no block
    contexts: float  # weight of S_c
    width: int  # of S_c's block


def layout_of(heads: Mapping[str, Any]) -> Layout:
    """The layout of the vectors that a model with these heads gives as they now weigh."""
    interpolated, added = _reweighed(heads)
    own = 0.0 if interpolated is None else interpolated.score_weights()[1]
    weight = 0.0 if added is None else added.score_weights()[1]
    return Layout(own or None, weight, added.block_dim if added is not None and weight > 0 else 0)


def _reweighed(heads: Mapping[str, Any]) -> tuple[Reweighs | None, Reweighs | None]:
    """The head whose weight is interpolated (beta), and the one that is added (context weight)."""
    reweighs = heads_with(heads, Reweighs).values()
    interpolated = next((head for head in reweighs if not head.adds_score), None)
    return interpolated, next((head for head in reweighs if head.adds_score), None)


def reweighed(
    encoded: Encoded, layout: Layout, *, beta: float | None = None, context_weight: float | None = None
) -> Encoded:
    """The vectors under other weights than they were made with; a part whose weight was 0 has no block to weigh.

    Args:
        beta: of S_I in S_b. context_weight: of S_c. None: as it was.
    """

    def weigh(vectors: Tensor) -> Tensor:
        parts = [*vectors.split([vectors.shape[-1] - layout.width, layout.width], -1)]
        if beta is not None and layout.concepts is not None:
            instance, concept = parts[0].chunk(2, -1)
            own = layout.concepts
            parts[:1] = [instance * (beta / (1 - own)) ** 0.5, concept * ((1 - beta) / own) ** 0.5]
        if context_weight is not None and layout.width:
            parts[-1] = parts[-1] * (context_weight / layout.contexts) ** 0.5
        return torch.cat(parts, -1)

    return encoded._replace(images=weigh(encoded.images), texts=weigh(encoded.texts))
