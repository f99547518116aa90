"""Cross-modal fusion: the score of a pair from its regions and words (AsCL eq. 1-4).

Shapes: G groups of a images x b texts, L regions, T words, D joint dimension, H heads of d = D / H channels. What holds for
both directions is said of s sets of S positions to which q owners of Q queries attend. Masks are bool, True where valid.

With A_h [Q, S] a pair's attention, K_h [S, d] the set's keys, which are its values as well, and Z_h [d, D] the output matrix's
rows of head h, a query x attends to y = sum_h A_h K_h Z_h [D]. No pair forms it, for all that is needed of it follows from
products as cheap as the logits, with matrices that each image and each text makes once:

    <x, y>    = sum_{h, n} A_hn P_hn            P_h = (x Z_h^T) K_h^T
    |y|^2     = a Gamma a^T                     a = (A_hn) [H S],  Gamma = U U^T,  U = (K_h Z_h) [H S, D]
    mean of y = concat_h(mean of A_h  K_h) Z^O

For long sets Gamma is dearer than c Z^O of c = concat_h(A_h K_h): :func:`by_gram` says which is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin.functional.similarity import raise_precision

#: Added to the logits of padding: finite, so that even a set of nothing has a gradient.
_PADDING = -1e30
#: Product of two squared norms up to which one of the vectors is nothing, and has the cosine 0 with everything.
_NOTHING = 1e-24


class Attention(NamedTuple):
    """One direction's matrices, float [D, D], applied from the right: ``tokens @ query``. Heads lie side by side."""

    query: Tensor  # Z^X
    key: Tensor  # Z^Y, of keys and values
    output: Tensor  # Z^O
    common: Tensor  # Z^O X_w, or Z^O X_v: from the mean of the heads into the common space


class Side(NamedTuple):
    """What an image (S = L) or a text (S = T) brings to all its pairs. Leading dimensions are free."""

    query: Tensor  # [..., S, D] tokens Z^X / sqrt(d)
    product: Tensor  # [..., S, D] tokens Z^O^T
    square: Tensor  # [..., S] the tokens' squared norms
    key: Tensor  # [..., S, D] tokens Z^Y of the other direction
    mask: Tensor  # [..., S]
    gram: Tensor | None = None  # [..., H, S, H, S] Gamma
    whole: Tensor | None = None  # [..., D] V_g2

    def each(self, change: Callable[[Tensor], Tensor]) -> Side:
        """The side with another view of every field: its rows, other leading dimensions, another device."""
        return Side._make(None if field is None else change(field) for field in self)

    def cut(self, length: int) -> Side:
        """The side of the first so many positions."""
        query, product, key = (field[..., :length, :] for field in (self.query, self.product, self.key))
        gram = None if self.gram is None else self.gram[..., :length, :, :length]
        return Side(query, product, self.square[..., :length], key, self.mask[..., :length], gram, self.whole)


def by_gram(positions: int, dim: int, heads: int) -> bool:
    """Whether Gamma is the cheaper way to the norms of what attends to a set of so many positions."""
    return (heads * positions) ** 2 <= positions * dim + dim**2


def side(
    tokens: Tensor,
    mask: Tensor,
    *,
    asks: Attention,
    answers: Attention,
    heads: int,
    whole: Tensor | None = None,
) -> Side:
    """What the tokens of images or texts, float [n, S, D] with mask [n, S], bring to their pairs.

    In float32 or better, of products that autocast may make in its own dtype. What padding holds is of no account.

    Args:
        asks: the matrices of the direction in which these tokens are the queries: of images, image to text.
        answers: those of the other direction, where they are attended to.
        whole: V_g2 = X_g^T G, float [n, D], of images that have a feature of the whole image.

    Raises:
        ValueError: shapes that do not fit, heads that do not divide D.
    """
    dim = tokens.shape[-1]
    if tokens.ndim != 3 or tokens.shape[:2] != mask.shape:
        raise ValueError(f"tokens [n, S, D] and mask [n, S] must fit, got {tuple(tokens.shape)} and {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, got {mask.dtype}")
    if asks.query.shape != (dim, dim):
        raise ValueError(f"tokens have {dim} channels, and the matrices are {tuple(asks.query.shape)}")
    if dim % heads:
        raise ValueError(f"heads must divide the dimension {dim}, got {heads}")
    rows = torch.where(mask[..., None], raise_precision(tokens), 0)
    key = _product(rows, answers.key)
    gram = None
    if by_gram(mask.shape[1], dim, heads):
        parts = key.split(dim // heads, -1), answers.output.split(dim // heads)
        outputs = torch.cat([_product(*each) for each in zip(*parts, strict=True)], 1)  # U [n, H S, D]
        gram = _product(outputs, outputs.mT).unflatten(2, (heads, -1)).unflatten(1, (heads, -1))
    return Side(
        query=_product(rows, asks.query) * (heads / dim) ** 0.5,
        product=_product(rows, asks.output.T),
        square=rows.square().sum(-1),
        key=key,
        mask=mask,
        gram=gram,
        whole=None if whole is None else raise_precision(whole),
    )


def pairs(
    images: Side,
    texts: Side,
    *,
    image_to_text: Attention,
    text_to_image: Attention,
    heads: int,
    local_weight: float,
) -> Tensor:
    """S = u S_local + (1 - u) S_global of every image with every text of its group (AsCL eq. 2-4), in [-1, 1].

    ``S_local = mean_i R(v_i, w*_i) / 2 + mean_j R(w_j, v*_j) / 2`` with R the cosine, means over valid positions, w* what
    regions attend to among the words and v* what words attend to among the regions;
    ``S_global = R(X_v^T mean_j v*_j + V_g2, X_w^T mean_i w*_i)``. A vector of nothing, or of padding alone, has the cosine 0.

    Args:
        images: sides with leading dimensions [G, a]. texts: with [G, b].
        local_weight: u.

    Returns:
        Float [G, a, b], float32 or better; differentiable.
    """
    to_words, text_mean = _attend(images, texts, image_to_text, heads)  # [G, b, a], [G, b, a, D]
    to_regions, image_mean = _attend(texts, images, text_to_image, heads)  # [G, a, b], [G, a, b, D]
    if images.whole is not None:
        image_mean = image_mean + images.whole[:, :, None]
    text_mean = text_mean.transpose(1, 2)
    squares = image_mean.square().sum(-1) * text_mean.square().sum(-1)
    overall = _cosine((image_mean * text_mean).sum(-1), squares)
    local = (to_words.transpose(1, 2) + to_regions) / 2
    return local_weight * local + (1 - local_weight) * overall


def _attend(owners: Side, sets: Side, weights: Attention, heads: int) -> tuple[Tensor, Tensor]:
    """Mean cosine of an owner's queries with what they attend to in a set [G, s, q], and X^T of the mean [G, s, q, D]."""
    g, q, length, dim = owners.query.shape
    s, size = sets.mask.shape[1:]
    query, product = (x.reshape(g, q * length, heads, -1) for x in (owners.query, owners.product))
    key = sets.key.reshape(g, s * size, heads, -1)
    padding = torch.zeros_like(sets.square).masked_fill(~sets.mask, _PADDING).view(g, s * size, 1)
    dot: Tensor | float = 0.0
    found = []  # of each head: A, or without Gamma A K
    for head in range(heads):  # one at a time, so that a head's products stay in the processor's cache
        logits = _product(key[:, :, head], query[:, :, head].mT) + padding
        attention = logits.view(g, s, size, q * length).softmax(2)
        if sets.gram is not None:
            products = _product(key[:, :, head], product[:, :, head].mT).view_as(attention)
            dot = dot + (attention * products).sum(2)
            found.append(attention)
        else:
            mixed = _product(key[:, :, head].unflatten(1, (s, size)).mT, attention)  # [G, s, d, q Q]
            dot = dot + (mixed * product[:, None, :, head].mT).sum(2)
            found.append(mixed)
    count = owners.mask.sum(-1, keepdim=True).clamp(min=1)
    shares = (owners.mask.to(query.dtype) / count)[:, None, None]  # [G, 1, 1, q, Q]: of the mean over the valid
    if sets.gram is not None:
        joint = torch.stack(found, 2).view(g * s, heads * size, q * length)
        norms = (joint * _product(sets.gram.reshape(g * s, heads * size, -1), joint)).sum(1)
        means = torch.linalg.vecdot(joint.view(g, s, -1, q, length), shares).view(g, s, heads, size, q)
        mean = _product(means.mT, key.view(g, s, size, heads, -1).transpose(2, 3)).transpose(2, 3).flatten(3)
    else:
        joint = torch.cat(found, 2)  # [G, s, D, q Q]
        norms = _product(weights.output.T, joint).square().sum(2)
        mean = torch.linalg.vecdot(joint.view(g, s, dim, q, length), shares).mT
    squares = norms.view(g, s, q, length) * owners.square[:, None]
    cosines = _cosine(torch.as_tensor(dot).view(g, s, q, length), squares)
    # a padded query is a vector of nothing, so it adds none
    return cosines.sum(-1) / count.mT, _product(mean, weights.common)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The matrix product in float32 or better, which autocast may make in bfloat16; not in float16, which squares of long
    tokens overflow. Exponentials, norms and means are made of what this returns."""
    device = one.device.type
    allowed = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.float16
    with torch.autocast(device, enabled=allowed):
        return raise_precision(raise_precision(one) @ raise_precision(other))


def _cosine(product: Tensor, squares: Tensor) -> Tensor:
    nothing = squares <= _NOTHING  # a NaN is not: it must be seen
    return torch.where(nothing, 0, product * torch.where(nothing, 1, squares).rsqrt())
