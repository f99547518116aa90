"""Similarities of anchors and candidates, and which pairs of a batch are negatives of each other.

Shapes: n anchors, q candidates, d dimensions, v features of one item.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional.host import at_hand

#: A shorter vector has no direction.
NO_LENGTH = 1e-12
#: The largest value of an input: its fourth power, such as the square of an inner product, stays within the type's range.
_LARGEST = {dtype: 1e-2 * torch.finfo(dtype).max ** 0.25 for dtype in (torch.float32, torch.float64)}
#: Collects the rows of all processes, in rank order, from this process's rows.
Gather = Callable[[Tensor], Tensor]


def cosine(anchors: Tensor, candidates: Tensor) -> Tensor:
    """Inner products of two sets of features: cosines, if the features are L2-normalised.

    Args:
        anchors: float [n, d], or [n, v, d] if an item has several features (the views of CAMERA).
        candidates: float [q, d] or [q, v, d].

    Returns:
        [n, q] in float32, or float64 for float64 features, also under autocast. Of items with several features the
        greatest product counts.

    Example:
        >>> cosine(torch.eye(2), torch.tensor([[0.6, 0.8]]))
        tensor([[0.6000],
                [0.8000]])
    """
    with torch.autocast(anchors.device.type, enabled=False):
        anchors, candidates = raise_precision(anchors), raise_precision(candidates)
        products = anchors.flatten(0, -2) @ candidates.flatten(0, -2).T
        if anchors.ndim == candidates.ndim == 2:
            return products
        views = [x.shape[1] if x.ndim == 3 else 1 for x in (anchors, candidates)]
        return products.unflatten(1, (-1, views[1])).unflatten(0, (-1, views[0])).amax((1, 3))


def different_images(image_ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    """Which pairs of a batch show different images and so may be negatives of each other.

    Args:
        image_ids: integers [n]; None: all images are distinct.

    Returns:
        Bool [n, n].

    Raises:
        ValueError: ``image_ids`` of another shape.
    """
    check_ids(image_ids, n)
    if image_ids is None:
        return ~torch.eye(n, dtype=torch.bool, device=device)
    return image_ids[:, None] != image_ids[None, :]


def check_ids(image_ids: Tensor | None, n: int) -> None:
    """:class:`ValueError` unless the ids are None or have shape [n]."""
    if image_ids is not None and image_ids.shape != (n,):
        raise ValueError(f"image_ids must have shape ({n},), got {tuple(image_ids.shape)}")


def candidate_negatives(
    image_ids: Tensor | None, ids: Tensor | None, valid: Tensor | None, n: int, candidates: Tensor
) -> Tensor:
    """Which candidates are negatives of which pairs: valid ones that do not show the pair's image. Bool [n, q].

    Args:
        image_ids: of the pairs, integers [n]. ids: of the candidates, integers [q]. Without either, none shows a pair's image.
        valid: bool [q]. None: all are.
    """
    present = torch.ones(len(candidates), dtype=torch.bool, device=candidates.device) if valid is None else valid
    if image_ids is None or ids is None:
        return present.expand(n, -1)
    return (image_ids[:, None] != ids[None, :]) & present


def anchor_rows(pairs: Tensor, anchors: slice | None) -> Tensor:
    """The rows of a batch [n, ...] that are anchors; all of them if ``anchors`` is None."""
    return pairs if anchors is None else pairs[anchors]


def pair_similarity(similarity: Tensor, anchors: slice | None) -> Tensor:
    """Each anchor's similarity to the candidate of its own pair: rows [a, n or more] -> [a]."""
    return similarity.diagonal(0 if anchors is None else anchors.start)


def cosine_of_rows(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of each row with the row of the same number: [n, d], [n, d] -> [n], in float32 or float64."""
    return (raise_precision(one) * raise_precision(other)).sum(-1)


def batch_similarity(
    similarity: Tensor, text_to_image: Tensor | None, image_ids: Tensor | None, anchors: slice | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The similarities that a loss of pairs compares, checked.

    Args:
        similarity: images x texts [n, n] with the pairs on the diagonal; with ``anchors`` the rows of these images alone.
        text_to_image: with ``anchors``, texts x images, the rows of these texts.

    Returns:
        Image-to-text and text-to-image rows [a, n], each anchor's positive [a], and its negatives, bool [a, n].

    Raises:
        ValueError: shapes that do not fit, an empty batch.
    """
    if similarity.ndim != 2 or (anchors is None and similarity.shape[0] != similarity.shape[1]):
        raise ValueError(f"similarity must be square [n, n], got {tuple(similarity.shape)}")
    if not similarity.numel():
        raise ValueError("similarity holds no pair")
    if anchors is None:
        text_to_image = similarity.T
    elif text_to_image is None or text_to_image.shape != similarity.shape:
        raise ValueError(f"with anchors, text_to_image must have similarity's shape {tuple(similarity.shape)}")
    negatives = different_images(image_ids, similarity.shape[1], similarity.device)
    return similarity, text_to_image, pair_similarity(similarity, anchors), anchor_rows(negatives, anchors)


def batch_cosines(
    image_features: Tensor, text_features: Tensor, anchors: slice | None
) -> tuple[Tensor, Tensor | None]:
    """The cosines of a batch of pairs, as :func:`batch_similarity` takes them."""
    similarity = cosine(anchor_rows(image_features, anchors), text_features)
    return similarity, None if anchors is None else cosine(text_features[anchors], image_features)


def check_pairs(image_features: Tensor, text_features: Tensor) -> None:
    """:class:`ValueError` unless both are [n, d], or [n, v, d] where an item has several features."""
    shapes = [(len(x), x.shape[-1]) if x.ndim in (2, 3) else None for x in (image_features, text_features)]
    if shapes[0] is None or shapes[0] != shapes[1]:
        raise ValueError(
            "image_features and text_features must have one shape [n, d], got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not len(image_features):
        raise ValueError("image_features and text_features hold no pair")


def check_hard_negatives(negatives: Tensor | None, ids: Tensor | None, valid: Tensor | None, *, dim: int) -> None:
    """:class:`ValueError` unless hard negatives are [m, d] with ids [m] and bool valid [m], or all are None."""
    if negatives is None:
        if ids is not None or valid is not None:
            raise ValueError("negative_ids and negative_valid need negatives")
        return
    if negatives.ndim != 2 or negatives.shape[1] != dim:
        raise ValueError(f"negatives must have shape [m, {dim}], got {tuple(negatives.shape)}")
    check_candidates(len(negatives), ids, valid)


def check_candidates(count: int, ids: Tensor | None, valid: Tensor | None) -> None:
    """:class:`ValueError` unless ids are [count] and valid is bool [count], where they are given."""
    for name, value in (("negative_ids", ids), ("negative_valid", valid)):
        if value is not None and value.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},), got {tuple(value.shape)}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"negative_valid must be bool, got {valid.dtype}")


def check_rows(similarity: Tensor, negatives: Tensor) -> None:
    """:class:`ValueError` unless both are [n, q] and the negatives are bool."""
    if similarity.ndim != 2 or similarity.shape != negatives.shape:
        raise ValueError(
            f"similarity and negatives must have one shape [n, q], got {tuple(similarity.shape)} "
            f"and {tuple(negatives.shape)}"
        )
    if negatives.dtype != torch.bool:
        raise ValueError(f"negatives must be bool, got {negatives.dtype}")


def check_temperature(temperature: float | Tensor) -> None:
    """:class:`ValueError` for a number that is no temperature; the value of a tensor is not checked."""
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")


def check_range(**inputs: Tensor | None) -> None:
    """:class:`CoderError` that names a tensor whose finite values are so large that a loss of them could overflow.

    Only tensors on the CPU are checked, and none while compiling: on a GPU the check would wait for it. There, as for NaN and
    infinities, the trainer checks the loss.
    """
    for name, value in inputs.items():
        if value is None or not at_hand(value) or not value.numel() or not value.is_floating_point():
            continue
        if range_checked(value):
            continue
        limit = _LARGEST[torch.float64 if value.dtype == torch.float64 else torch.float32]
        largest = max(abs(float(bound)) for bound in value.detach().aminmax())
        if limit < largest < math.inf:
            raise CoderError(f"{name} holds values of {largest:.1e}, which overflow: normalise it, to at most {limit:.0e}")
        mark_range_checked(value)


def mark_range_checked(value: Tensor) -> None:
    """Note that the values, until the tensor is written again, need no :func:`check_range`."""
    if not value.is_inference():
        value._range_checked = value._version  # type: ignore[attr-defined]


def range_checked(value: Tensor) -> bool:
    """Whether :func:`check_range` has seen the values that the tensor has now."""
    return not value.is_inference() and getattr(value, "_range_checked", None) == value._version


def raise_precision(x: Tensor) -> Tensor:
    """The tensor in float32, or float64 if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def unit(features: Tensor) -> Tensor:
    """L2-normalised over the last dimension, in float32 or float64, also under autocast.

    A vector without a direction, shorter than 1e-12, becomes zero and gets no gradient.

    Example:
        >>> unit(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    features = raise_precision(features)
    length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features / length.masked_fill(length <= NO_LENGTH, torch.inf)
