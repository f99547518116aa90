"""The score of a pair by cross-modal fusion of its regions and words, as pure functions (AsCL eq. 1-4).

Shapes: G groups of a images x b texts, L regions, T words, D joint dimension, H heads of d = D / H channels. Both
directions are alike: q owners with Q queries each attend to s sets of S positions. Masks are bool, True where valid.
Equations and choices: docs/equations.md#ascl.

Let A_h [Q, S] be the attention of a pair, K_h [S, d] the keys of the set, which are its values as well, and Z_h [d, D]
the rows of the output matrix that belong to head h. A query x attends to y = sum_h A_h K_h Z_h [D]. No pair computes y:
all that is needed of it follows from products as cheap as the logits, with matrices computed once per image and text:

    <x, y>    = sum_{h, n} A_hn P_hn            P_h = (x Z_h^T) K_h^T
    |y|^2     = a Gamma a^T                     a = (A_hn) [H S],  Gamma = U U^T,  U = (K_h Z_h) [H S, D]
    mean of y = concat_h(mean of A_h  K_h) Z^O

For long sets Gamma costs more than c Z^O with c = concat_h(A_h K_h); :func:`use_gram` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin.tensors import upcast

#: Added to the logits of padding; finite, so that a set of padding only has a finite gradient.
_PADDING = -1e30
#: Below this product of two squared norms one of the vectors counts as zero, and has the cosine 0 with every other.
_ZERO_NORM = 1e-24


class Attention(NamedTuple):
    """One direction's matrices, float [D, D], applied from the right: ``tokens @ query``. Heads lie side by side."""

    query: Tensor  # Z^X
    key: Tensor  # Z^Y, of keys and values
    output: Tensor  # Z^O
    common: Tensor  # Z^O X_w, or Z^O X_v: from the mean of the heads into the common space


class Side(NamedTuple):
    """What an image (S = L) or a text (S = T) contributes to all its pairs. Leading dimensions are free."""

    query: Tensor  # [..., S, D] tokens Z^X / sqrt(d)
    product: Tensor  # [..., S, D] tokens Z^O^T
    square: Tensor  # [..., S] squared norms of the tokens
    key: Tensor  # [..., S, D] tokens Z^Y of the other direction
    mask: Tensor  # [..., S]
    gram: Tensor | None = None  # [..., H, S, H, S] Gamma
    global_feature: Tensor | None = None  # [..., D] V_g2

    def map(self, function: Callable[[Tensor], Tensor]) -> Side:
        """The function applied to every field: to select rows, to reshape leading dimensions, to move devices."""
        return Side._make(None if field is None else function(field) for field in self)

    def truncate(self, length: int) -> Side:
        """The side with the first ``length`` positions only."""
        query, product, key = (field[..., :length, :] for field in (self.query, self.product, self.key))
        gram = None if self.gram is None else self.gram[..., :length, :, :length]
        return Side(query, product, self.square[..., :length], key, self.mask[..., :length], gram, self.global_feature)


def use_gram(positions: int, dim: int, heads: int) -> bool:
    """Whether Gamma is the cheaper way to the norms, for a set of this many positions."""
    return (heads * positions) ** 2 <= positions * dim + dim**2


def make_side(
    tokens: Tensor,
    mask: Tensor,
    *,
    as_query: Attention,
    as_key: Attention,
    heads: int,
    global_feature: Tensor | None = None,
) -> Side:
    """What the tokens of images or texts contribute to their pairs.

    Autocast may compute the products in its own dtype; results are float32 or float64. Values at padding have no
    effect.

    Args:
        tokens: float [n, S, D]. mask: bool [n, S].
        as_query: the matrices of the direction in which these tokens are the queries; for images: image to text.
        as_key: those of the other direction.
        global_feature: V_g2 = X_g^T G, float [n, D], for images that have a feature of the whole image.

    Raises:
        ValueError: shapes that do not fit, heads that do not divide D.
    """
    dim = tokens.shape[-1]
    if tokens.ndim != 3 or tokens.shape[:2] != mask.shape:
        shapes = f"{tuple(tokens.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"tokens [n, S, D] and mask [n, S] must fit, got {shapes}")
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, got {mask.dtype}")
    if as_query.query.shape != (dim, dim):
        raise ValueError(f"tokens have {dim} channels, and the matrices are {tuple(as_query.query.shape)}")
    if dim % heads:
        raise ValueError(f"heads must divide the dimension {dim}, got {heads}")
    rows = torch.where(mask[..., None], upcast(tokens), 0)
    key = _product(rows, as_key.key)
    gram = None
    if use_gram(mask.shape[1], dim, heads):
        parts = key.split(dim // heads, -1), as_key.output.split(dim // heads)
        outputs = torch.cat([_product(*part) for part in zip(*parts, strict=True)], 1)  # U [n, H S, D]
        gram = _product(outputs, outputs.mT).unflatten(2, (heads, -1)).unflatten(1, (heads, -1))
    return Side(
        query=_product(rows, as_query.query) * (heads / dim) ** 0.5,
        product=_product(rows, as_query.output.T),
        square=rows.square().sum(-1),
        key=key,
        mask=mask,
        gram=gram,
        global_feature=None if global_feature is None else upcast(global_feature),
    )


def pair_scores(
    images: Side,
    texts: Side,
    *,
    image_to_text: Attention,
    text_to_image: Attention,
    heads: int,
    local_weight: float,
) -> Tensor:
    """S = u S_local + (1 - u) S_global of every image with every text of its group (AsCL eq. 2-4).

    ``S_local = mean_i R(v_i, w*_i) / 2 + mean_j R(w_j, v*_j) / 2`` with R the cosine, means over valid positions, w*
    what regions attend to among the words, and v* what words attend to among the regions;
    ``S_global = R(X_v^T mean_j v*_j + V_g2, X_w^T mean_i w*_i)``. A zero vector, and a set of padding only, has the
    cosine 0 with every other.

    Args:
        images: sides with leading dimensions [G, a]. texts: with [G, b].
        image_to_text: matrices of the direction in which regions are the queries. text_to_image: of the other one.
        heads: H. local_weight: u, in [0, 1].

    Returns:
        [G, a, b] in [-1, 1], float32 or float64; differentiable.

    Example:
        >>> eye, mask = torch.eye(2), torch.ones(1, 1, dtype=torch.bool)
        >>> weights = Attention(eye, eye, eye, eye)
        >>> region, word = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 0.0]]])
        >>> image, text = (
        ...     make_side(tokens, mask, as_query=weights, as_key=weights, heads=1).map(lambda field: field[None])
        ...     for tokens in (region, word)
        ... )
        >>> pair_scores(image, text, image_to_text=weights, text_to_image=weights, heads=1, local_weight=0.6)
        tensor([[[0.6000]]])
    """
    to_words, text_mean = _attend(images, texts, image_to_text, heads)  # [G, b, a], [G, b, a, D]
    to_regions, image_mean = _attend(texts, images, text_to_image, heads)  # [G, a, b], [G, a, b, D]
    if images.global_feature is not None:
        image_mean = image_mean + images.global_feature[:, :, None]
    text_mean = text_mean.transpose(1, 2)
    squares = image_mean.square().sum(-1) * text_mean.square().sum(-1)
    global_score = _cosine((image_mean * text_mean).sum(-1), squares)
    local_score = (to_words.transpose(1, 2) + to_regions) / 2
    return local_weight * local_score + (1 - local_weight) * global_score


def _attend(owners: Side, sets: Side, weights: Attention, heads: int) -> tuple[Tensor, Tensor]:
    """Mean cosine of an owner's queries with what they attend to in a set [G, s, q], and X^T of the mean
    [G, s, q, D]."""
    g, q, length, dim = owners.query.shape
    s, size = sets.mask.shape[1:]
    query, product = (x.reshape(g, q * length, heads, -1) for x in (owners.query, owners.product))
    key = sets.key.reshape(g, s * size, heads, -1)
    padding = torch.zeros_like(sets.square).masked_fill(~sets.mask, _PADDING).view(g, s * size, 1)
    dot: Tensor | float = 0.0
    per_head = []  # A of each head, or A K without Gamma
    for head in range(heads):  # one at a time, so that its products stay in the processor's cache
        logits = _product(key[:, :, head], query[:, :, head].mT) + padding
        attention = logits.view(g, s, size, q * length).softmax(2)
        if sets.gram is not None:
            products = _product(key[:, :, head], product[:, :, head].mT).view_as(attention)
            dot = dot + (attention * products).sum(2)
            per_head.append(attention)
        else:
            mixed = _product(key[:, :, head].unflatten(1, (s, size)).mT, attention)  # [G, s, d, q Q]
            dot = dot + (mixed * product[:, None, :, head].mT).sum(2)
            per_head.append(mixed)
    count = owners.mask.sum(-1, keepdim=True).clamp(min=1)
    shares = (owners.mask.to(query.dtype) / count)[:, None, None]  # [G, 1, 1, q, Q]: of the mean over valid queries
    if sets.gram is not None:
        joint = torch.stack(per_head, 2).view(g * s, heads * size, q * length)
        norms = (joint * _product(sets.gram.reshape(g * s, heads * size, -1), joint)).sum(1)
        means = torch.linalg.vecdot(joint.view(g, s, -1, q, length), shares).view(g, s, heads, size, q)
        mean = _product(means.mT, key.view(g, s, size, heads, -1).transpose(2, 3)).transpose(2, 3).flatten(3)
    else:
        joint = torch.cat(per_head, 2)  # [G, s, D, q Q]
        norms = _product(weights.output.T, joint).square().sum(2)
        mean = torch.linalg.vecdot(joint.view(g, s, dim, q, length), shares).mT
    squares = norms.view(g, s, q, length) * owners.square[:, None]
    cosines = _cosine(torch.as_tensor(dot).view(g, s, q, length), squares)
    # a padded query is zero and adds nothing
    return cosines.sum(-1) / count.mT, _product(mean, weights.common)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The matrix product in float32 or float64. Autocast may compute it in bfloat16, but not in float16, which the
    squares of long tokens overflow. Exponentials, norms and means are computed from the result."""
    device = one.device.type
    allowed = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.float16
    with torch.autocast(device, enabled=allowed):
        return upcast(upcast(one) @ upcast(other))


def _cosine(product: Tensor, squares: Tensor) -> Tensor:
    is_zero = squares <= _ZERO_NORM  # False for NaN, which must stay visible
    return torch.where(is_zero, 0, product * torch.where(is_zero, 1, squares).rsqrt())
