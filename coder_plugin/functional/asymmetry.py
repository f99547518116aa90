"""Asymmetry-sensitive contrast: noised texts as further negatives of images (AsCL eq. 5, 6; METHODS 8)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coder_plugin.functional.similarity import check_rows, different_images, raise_precision


def directed_ascl(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    noise_similarity: Tensor | None = None,
    *,
    temperature: float | Tensor,
    noise_valid: Tensor | None = None,
) -> Tensor:
    """One ratio of AsCL's eq. 5 or 6 as a loss, per anchor.

    ``-log(e^(S+/t) / (e^(S+/t) + sum_neg e^(S/t) + sum_m a e^(S-/t)))``

    Args:
        similarity: of anchors and candidates [n, q].
        positive: of each anchor and its positive [n].
        negatives: bool [n, q].
        noise_similarity: of the anchors and noised texts [n, m]; those above the anchor's positive do not count (a = 0).
        temperature: t, > 0.
        noise_valid: bool [m], False where a noised text does not count at all.

    Returns:
        [n], >= 0; an anchor without any negative has 0.
    """
    check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1]:
        raise ValueError(f"positive must have shape ({len(similarity)},), got {tuple(positive.shape)}")
    positive = raise_precision(positive)
    logits = [(raise_precision(similarity) / temperature).masked_fill(~negatives, -torch.inf)]
    if noise_similarity is not None:
        if noise_similarity.ndim != 2 or len(noise_similarity) != len(similarity):
            raise ValueError(
                f"noise_similarity must have shape ({len(similarity)}, m), got {tuple(noise_similarity.shape)}"
            )
        noise = raise_precision(noise_similarity)
        left_out = noise > positive[:, None]
        if noise_valid is not None:
            left_out = left_out | ~noise_valid
        logits.append((noise / temperature).masked_fill(left_out, -torch.inf))
    positive = positive / temperature
    return torch.cat([positive[:, None], *logits], 1).logsumexp(1) - positive


def ascl(
    similarity: Tensor,
    noise_similarity: Tensor | None = None,
    *,
    temperature: float | Tensor,
    image_ids: Tensor | None = None,
) -> Tensor:
    """One pair of ratios of AsCL, ``L_I`` or ``L_II&III`` (eq. 5, 6; METHODS 8), over any similarity.

    The text's ratio over images plus the image's over texts, where every noised text of the batch is a negative of every
    image unless it scores above the image's positive. For ``L_II&III`` the texts are the generated positives, and the
    noised texts those made of them. The whole objective is ``(L_I + L_II&III) / 2``.

    Args:
        similarity: images x texts [n, n], row i and column i a pair.
        noise_similarity: images x noised texts [n, m]; None: there are none.
        temperature: > 0 (the paper's 0.01 and 0.05).
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.

    Returns:
        Scalar: mean over pairs of both negative logarithms, added.

    Raises:
        ValueError: shapes that differ, an empty batch, a temperature that is not positive.
    """
    check_temperature(temperature)
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not len(similarity):
        raise ValueError(f"similarity must have shape [n, n] of n >= 1 pairs, got {tuple(similarity.shape)}")
    negatives = different_images(image_ids, len(similarity), similarity.device)
    positive = similarity.diagonal()
    of_images = directed_ascl(similarity, positive, negatives, noise_similarity, temperature=temperature)
    of_texts = directed_ascl(similarity.T, positive, negatives.T, temperature=temperature)
    return (of_images + of_texts).mean()


def check_temperature(temperature: float | Tensor) -> None:
    """:class:`ValueError` where a number is no temperature; a tensor's value is not looked at."""
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")
