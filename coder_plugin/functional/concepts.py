"""Commonsense concepts and prototypes (CODER eq. 2, 7, 12-14; METHODS 4, 5).

Shapes: N samples, g concepts, F concept dimensions, K prototypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.functional.similarity import raise_precision


def concept_graph(
    cooccurrence: Tensor, counts: Tensor, *, threshold: float = 0.3, rescale: bool = True
) -> Tensor:
    """The normalised concept graph ``D^-1/2 H D^-1/2 + I`` (CODER eq. 12, 13; METHODS 4).

    ``P_ij = cooccurrence_ij / counts_i``, rescaled to ``5^(P - 0.02) - 5^(-0.02)``; ``H = 1[P >= threshold]`` without its
    diagonal, so H is not symmetric; D holds its row sums. A concept without an edge keeps the identity alone.

    Args:
        cooccurrence: how many captions hold both concepts [g, g].
        counts: how many captions hold a concept [g]; where it is 0, the concept has no edge.
        threshold: smallest P that makes an edge.
        rescale: apply the rescaling before the threshold.

    Returns:
        [g, g], float32, or float64 for float64 counts.

    Raises:
        ValueError: shapes that do not fit.
    """
    if cooccurrence.ndim != 2 or cooccurrence.shape != (len(counts), len(counts)) or counts.ndim != 1:
        raise ValueError(
            f"cooccurrence must be [g, g] and counts [g], got {tuple(cooccurrence.shape)} and {tuple(counts.shape)}"
        )
    number = torch.float64 if torch.float64 in (cooccurrence.dtype, counts.dtype) else torch.float32
    together, alone = cooccurrence.to(number), counts.to(number)[:, None]
    conditional = torch.where(alone > 0, together / alone.clamp(min=1), 0)
    if rescale:
        conditional = 5 ** (conditional - 0.02) - 5**-0.02
    edges = (conditional >= threshold).to(number).fill_diagonal_(0) * (alone > 0)
    degree = edges.sum(1)
    scale = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
    return scale[:, None] * edges * scale[None, :] + torch.eye(len(counts), dtype=number, device=counts.device)


def concept_embedding(
    query: Tensor, weight: Tensor, concepts: Tensor, *, scale: float = 10.0
) -> tuple[Tensor, Tensor]:
    """A sample as a mixture of concepts (CODER eq. 14; METHODS 4): ``a = softmax(scale * q W y)``, ``sum_i a_i y_i``.

    Args:
        query: [n, f]. weight: [f, f]. concepts: [g, f]. Queries and concepts are L2-normalised here.
        scale: lambda, the sharpness of the attention.

    Returns:
        The embeddings [n, f], L2-normalised, and the attention [n, g].

    Raises:
        ValueError: shapes that do not fit.
    """
    f = query.shape[-1]
    if query.ndim != 2 or weight.shape != (f, f) or concepts.ndim != 2 or concepts.shape[1] != f or not len(concepts):
        raise ValueError(
            f"query must be [n, f], weight [f, f] and concepts [g, f], got {tuple(query.shape)}, {tuple(weight.shape)} "
            f"and {tuple(concepts.shape)}"
        )
    with torch.autocast(query.device.type, enabled=False):
        query, weight, concepts = raise_precision(query), raise_precision(weight), raise_precision(concepts)
        directions = F.normalize(concepts, dim=-1)
        attention = (scale * F.normalize(query, dim=-1) @ weight @ directions.T).softmax(-1)
        return F.normalize(attention @ directions, dim=-1), attention
