"""The same encodings under other weights of the score's parts (METHODS 6, 9)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
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
    heads = {name: head for name, head in encoder.model.coder.heads.items() if head.scores}
    known = f"this model scores with: {', '.join(heads) or 'no head'}"
    if wrong := [beta for beta in betas if not 0 <= beta <= 1]:
        raise CoderError(f"--beta must be in [0, 1], got {wrong[0]}")
    if wrong := [weight for weight in context_weights if not weight >= 0]:
        raise CoderError(f"--context-weight must be >= 0, got {wrong[0]}")
    if betas and "concepts" not in heads:
        raise CoderError(f"--beta weighs the concept level, and {known}")
    if context_weights and "contexts" not in heads:
        raise CoderError(f"--context-weight weighs the context level, which an objective with cra has, and {known}")
    if others := heads.keys() - {"concepts", "contexts"}:
        raise CoderError(f"the score of {', '.join(sorted(others))} cannot be weighed anew, and {known}")
    with contextlib.ExitStack() as stack:
        if betas:
            stack.enter_context(heads["concepts"].weighing(0.5))
        if context_weights:
            stack.enter_context(heads["contexts"].weighing(1.0))
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
    concepts: Any = heads.get("concepts")
    contexts: Any = heads.get("contexts")
    own = concepts.score_weights()[1] if concepts is not None else 0.0
    weight = contexts.weight if contexts is not None else 0.0
    return Layout(own or None, weight, contexts.width if weight > 0 else 0)


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
