"""Asymmetry-sensitive contrast: noised texts as further negatives of images (AsCL eq. 5, 6).

Shapes: n pairs, a anchors (n, or the rows of one process), q candidates, m noised texts.
Equations and choices: docs/equations.md#ascl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.functional.similarity import (
    anchor_rows,
    batch_cosines,
    batch_similarity,
    check_ids,
    check_pairs,
    check_range,
    check_rows,
    check_temperature,
    cosine,
    raise_precision,
)
from coder_plugin.functional.tiled import Candidates, Implementation, use_tiles
from coder_plugin.functional.tiled_candidates import negative_sums
from coder_plugin.functional.tiled_pairs import batch_sums


def ascl(
    similarity: Tensor,
    noise_similarity: Tensor | None = None,
    *,
    temperature: float | Tensor,
    image_ids: Tensor | None = None,
    noise_valid: Tensor | None = None,
    text_to_image: Tensor | None = None,
    anchors: slice | None = None,
) -> Tensor:
    """One pair of ratios of AsCL, ``L_I`` or ``L_II&III`` (eq. 5, 6), over any similarity.

    The ratio of each text over the images plus that of each image over the texts. Every noised text of the batch is a
    negative of every image, unless it scores above the image's positive. For ``L_II&III`` the texts are the generated
    positives, and the noised texts are made from these positives. The objective is ``(L_I + L_II&III) / 2``.

    Args:
        similarity: images x texts [n, n], row i and column i a pair. With ``anchors`` the rows of these images alone,
            [a, n].
        noise_similarity: the same images x noised texts [n, m] or [a, m]; None: there are none.
        temperature: > 0 (0.01 and 0.05 in the paper).
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        noise_valid: bool [m], False for noised texts that are no negatives. Default: all are.
        text_to_image: with ``anchors``, these texts x images [a, n].
        anchors: the rows of the batch that are anchors; None: all rows.

    Returns:
        Scalar >= 0, float32 or float64: mean over the pairs of both negative logarithms, added.

    Raises:
        ValueError: shapes that differ, an empty batch, a temperature that is not positive.

    Example:
        >>> ascl(torch.tensor([[0.5]]), torch.tensor([[0.5]]), temperature=0.1)  # a noised text as similar as the caption
        tensor(0.6931)
    """
    check_temperature(temperature)
    check_range(similarity=similarity, noise_similarity=noise_similarity, text_to_image=text_to_image)
    rows, columns, positive, negatives = batch_similarity(similarity, text_to_image, image_ids, anchors)
    images = directed_ascl(
        rows, positive, negatives, noise_similarity, noise_valid=noise_valid, temperature=temperature
    )
    texts = directed_ascl(columns, positive, negatives, temperature=temperature)
    return (images + texts).mean()


def ascl_of_features(
    image_features: Tensor,
    text_features: Tensor,
    noised_features: Tensor | None = None,
    *,
    temperature: float | Tensor,
    image_ids: Tensor | None = None,
    noise_valid: Tensor | None = None,
    anchors: slice | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """:func:`ascl` of the cosines of a batch of pairs; by tiles the matrices of similarities are never stored.

    Args:
        image_features: L2-normalised [n, d], or [n, v, d] if an image has several features; row i belongs to row i of
            ``text_features`` [n, d].
        noised_features: of the noised texts [m, d]; None: there are none.
        temperature, image_ids, noise_valid, anchors: as of :func:`ascl`. A temperature that is a tensor gets a gradient.
        implementation: ``"reference"``: all similarities at once; ``"tiled"``: equal up to rounding, in memory that grows with
            n and m alone; ``"auto"``: tiles for more than 4 million similarities (docs/equations.md#tiles).

    Returns:
        Scalar >= 0, float32 or float64.

    Raises:
        ValueError: shapes that differ, an empty batch, a temperature that is not positive.

    Example:
        >>> eye = torch.eye(2)
        >>> ascl_of_features(eye, eye, temperature=0.5)  # InfoNCE of both directions, 2 * log(1 + exp(-2))
        tensor(0.2539)
    """
    check_temperature(temperature)
    check_pairs(image_features, text_features)
    check_range(image_features=image_features, text_features=text_features, noised_features=noised_features)
    n, rows = len(image_features), anchor_rows(image_features, anchors)
    check_ids(image_ids, n)
    noised = () if noised_features is None else (noised_features,)
    pairs = len(rows) * max(n, *map(len, noised), 1)
    if not use_tiles(implementation, (image_features, text_features, *noised), pairs=pairs, small=False):
        similarity, transposed = batch_cosines(image_features, text_features, anchors)
        return ascl(
            similarity,
            None if noised_features is None else cosine(rows, noised_features),
            temperature=temperature,
            image_ids=image_ids,
            noise_valid=noise_valid,
            text_to_image=transposed,
            anchors=anchors,
        )
    number = torch.promote_types(rows.dtype, torch.float32)
    scale = 1 / torch.as_tensor(temperature, dtype=number, device=rows.device).reshape(())
    sums, positive = batch_sums(image_features, text_features, image_ids, anchors, scale, triton=implementation == "triton")
    of_images = [sums[0]]
    if noised_features is not None:
        candidates = [Candidates(noised_features, None, noise_valid)]
        of_images.append(negative_sums(rows, None, candidates, scale, ceiling=positive.detach())[0])
    positive = positive * scale
    images = torch.stack([positive, *of_images]).logsumexp(0)
    texts = torch.logaddexp(positive, sums[1])
    return (images + texts - 2 * positive).mean()


def directed_ascl(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    noise_similarity: Tensor | None = None,
    *,
    temperature: float | Tensor,
    noise_valid: Tensor | None = None,
) -> Tensor:
    """One ratio of AsCL's eq. 5 or 6 as a loss, for each anchor.

    ``-log(e^(S+/t) / (e^(S+/t) + sum_neg e^(S/t) + sum_m a e^(S-/t)))``

    Args:
        similarity: of anchors and candidates [a, q].
        positive: of each anchor and its positive [a].
        negatives: bool [a, q].
        noise_similarity: of the anchors and noised texts [a, m]; those above the anchor's positive do not count.
        temperature: t, > 0.
        noise_valid: bool [m], False where a noised text does not count for any anchor.

    Returns:
        [a], >= 0; an anchor without any negative has 0.
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
        excluded = noise > positive[:, None]
        if noise_valid is not None:
            excluded = excluded | ~noise_valid
        logits.append((noise / temperature).masked_fill(excluded, -torch.inf))
    positive = positive / temperature
    return torch.cat([positive[:, None], *logits], 1).logsumexp(1) - positive
