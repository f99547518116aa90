"""The graph of concepts, and samples as mixtures of concepts (CODER eq. 2, 12-14).

Shapes: n samples, g concepts, f concept dimensions. Equations and choices: docs/equations.md#concepts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.tensors import check_range, unit, upcast


def concept_graph(cooccurrence: Tensor, counts: Tensor, *, threshold: float = 0.3, rescale: bool = True) -> Tensor:
    """The normalised concept graph ``D^-1/2 H D^-1/2 + I`` (CODER eq. 12, 13).

    ``P_ij = cooccurrence_ij / counts_i``, rescaled to ``5^(P - 0.02) - 5^(-0.02)``; ``H = 1[P >= threshold]`` with a
    zero diagonal; D holds the row sums of H. H is not symmetric. A concept without an edge keeps the identity only.

    Args:
        cooccurrence: number of captions that hold both concepts [g, g].
        counts: number of captions that hold a concept [g]; a concept with count 0 has no edge.
        threshold: the smallest P that makes an edge, in [0, 1]. rescale: whether P is rescaled before the threshold.

    Returns:
        [g, g] in float32, or float64 for float64 counts.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> concept_graph(torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 3]))
        tensor([[1., 1.],
                [1., 1.]])
    """
    if cooccurrence.ndim != 2 or cooccurrence.shape != (len(counts), len(counts)) or counts.ndim != 1:
        raise ValueError(
            f"cooccurrence must be [g, g] and counts [g], got {tuple(cooccurrence.shape)} and {tuple(counts.shape)}"
        )
    number = torch.float64 if torch.float64 in (cooccurrence.dtype, counts.dtype) else torch.float32
    pair_counts, word_counts = cooccurrence.to(number), counts.to(number)[:, None]
    conditional = torch.where(word_counts > 0, pair_counts / word_counts.clamp(min=1), 0)
    if rescale:
        conditional = 5 ** (conditional - 0.02) - 5**-0.02
    edges = (conditional >= threshold).to(number).fill_diagonal_(0) * (word_counts > 0)
    degree = edges.sum(1)
    scale = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
    return scale[:, None] * edges * scale[None, :] + torch.eye(len(counts), dtype=number, device=counts.device)


def concept_embedding(query: Tensor, weight: Tensor, concepts: Tensor, *, scale: float = 10.0) -> tuple[Tensor, Tensor]:
    """Samples as mixtures of concepts: ``a = softmax(scale * q W y)``, embedding ``sum_i a_i y_i`` (CODER eq. 14).

    Args:
        query: [n, f]. weight: W [f, f]. concepts: [g, f]. Queries and concepts of any length; normalised here.
        scale: lambda, the sharpness of the attention.

    Returns:
        The embeddings [n, f], L2-normalised, and the attention [n, g], whose rows sum to one; float32 or float64.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> embedding, attention = concept_embedding(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.eye(2), scale=1.0)
        >>> attention
        tensor([[0.7311, 0.2689]])
        >>> embedding
        tensor([[0.9385, 0.3453]])
    """
    f = query.shape[-1]
    if query.ndim != 2 or weight.shape != (f, f) or concepts.ndim != 2 or concepts.shape[1] != f or not len(concepts):
        raise ValueError(
            f"query must be [n, f], weight [f, f] and concepts [g, f], got {tuple(query.shape)}, {tuple(weight.shape)} "
            f"and {tuple(concepts.shape)}"
        )
    check_range(query=query, weight=weight, concepts=concepts)
    with torch.autocast(query.device.type, enabled=False):
        directions = unit(concepts)
        attention = (scale * unit(query) @ upcast(weight) @ directions.T).softmax(-1)
        return unit(attention @ directions), attention
