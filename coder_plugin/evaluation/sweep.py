"""Evaluate a model with other weights of CODER's concept score and SelfAlign's context score, without encoding again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    with contextlib.ExitStack() as stack:  # equal weights, so that every part has a block
        if betas and beta_head is not None:
            stack.enter_context(beta_head.weighing(0.5))
        if context_weights and weight_head is not None:
            stack.enter_context(weight_head.weighing(1.0))
        encoded = encoder(source)
        width = 0  # of S_c's block, the last
        if weight_head is not None and weight_head.score_weights()[1] > 0:
            width = weight_head.block_dim or 0

    def weigh(vectors: Tensor, beta: float | None, weight: float | None) -> Tensor:
        blocks, context = vectors.split([vectors.shape[-1] - width, width], -1)
        if beta is not None:
            instance, concept = blocks.chunk(2, -1)
            blocks = torch.cat([instance * (2 * beta) ** 0.5, concept * (2 * (1 - beta)) ** 0.5], -1)
        return torch.cat([blocks, context if weight is None else context * weight**0.5], -1)

    for beta in betas or (None,):
        for weight in context_weights or (None,):
            weights = {"beta": beta, "context weight": weight}
            name = ", ".join(f"{part} {value:g}" for part, value in weights.items() if value is not None)
            yield name, encoded._replace(images=weigh(encoded.images, beta, weight), texts=weigh(encoded.texts, beta, weight))


def _reweighed(heads: Mapping[str, Any]) -> tuple[Scores | None, Scores | None]:
    """The head whose weight is interpolated (beta), and the one that is added (context weight)."""
    weighable = [head for head in heads_with(heads, Scores).values() if head.block_dim is not None]
    interpolated = next((head for head in weighable if not head.adds_score), None)
    return interpolated, next((head for head in weighable if head.adds_score), None)
