"""Recall of an encoder on a data set, and ensembles of several models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.two_stage import measure, without_tensors
from coder_plugin.objective import Objective
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.resolver import resolve

#: How many candidates of each query a fusion score re-ranks by default.
SHORTLIST = 32


def evaluate(
    encoder: Encoder, source: Any, *, folds: int = 0, rerank: int | str | None = None, encoded: Encoded | None = None
) -> dict[str, Any]:
    """Recall over a whole data set. Rank 0 computes the figures and every rank gets them.

    Args:
        encoder: of the model.
        source: the data.
        folds: 0, or also the mean over so many folds under ``folds`` (COCO's 1K protocol: 5).
        rerank: how many candidates of each query the fusion score re-ranks, or "all" to score every pair, as the paper does.
            None: 32, or all where no term has trained the towers' own features, which make the shortlist.
        encoded: the encoder's result for the source, if it is already there.

    Returns:
        The figures of :func:`~coder_plugin.evaluation.recall` without ranks, and the numbers of ``images`` and ``texts``. If
        bad samples were left out, ``skipped`` has their numbers by kind of fault: the figures are over fewer images. With a
        fusion score they are those of the re-ranked shortlists; ``rerank`` is their length, and ``shortlist`` holds the
        figures of the embeddings alone.

    Raises:
        CoderError: ``rerank`` is neither a number nor "all", or the model has no fusion score.
    """
    depth = shortlist_length(rerank, encoder)
    encoded = encoder(source) if encoded is None else encoded
    result = without_tensors(measure(encoded, folds, depth)) if distributed.rank() == 0 else {}
    return distributed.gather_objects(result)[0]


def shortlist_length(rerank: int | str | None, encoder: Encoder) -> int | None:
    """How many candidates of each query are re-ranked, from the option ``rerank``; None: all pairs are scored.

    Raises:
        CoderError: ``rerank`` is neither a number nor "all", or the model has no fusion score.
    """
    if rerank is None:
        return SHORTLIST if encoder.reranking is None or _trains_towers(encoder.model.coder.objective) else None
    if rerank == "all" or (str(rerank).isdecimal() and int(rerank) > 0):
        if encoder.reranking is None:
            raise CoderError(
                f"--rerank {rerank} orders candidates by a fusion score, and this model has no fusion head: leave it out, add "
                '--reranker maxsim, or train a fusion head, such as --loss "ascl(similarity=fusion) + ascl"'
            )
        return None if rerank == "all" else int(rerank)
    raise CoderError(f"--rerank must be a number of candidates, 1 or more, or all, got {rerank!r}")


def _trains_towers(objective: Objective) -> bool:
    """Whether a term compares the towers' own features."""
    bindings = resolve(objective, {"image_features", "text_features", "logit_scale", "logit_bias"}).bindings
    return any("image_features" in binding.values() for binding in bindings)


def ensemble(encoded: Sequence[Encoded]) -> Encoded:
    """Several models' vectors of the same images as one; the ensemble's score is the mean of the models' similarities.

    Shortlists are made by the mean inner product. A model that re-ranks contributes its fusion score to their order, the others
    their inner products.

    Args:
        encoded: one per model, of the same data.

    Raises:
        CoderError: the models did not read the same images and captions.
    """
    first = encoded[0]
    for other in encoded[1:]:
        if not torch.equal(first.image_ids, other.image_ids) or not torch.equal(first.image_of_text, other.image_of_text):
            common = len(set(first.image_ids.tolist()) & set(other.image_ids.tolist()))
            raise CoderError(
                f"the models of an ensemble read different images: {len(first.image_ids)} and {len(other.image_ids)}, "
                f"{common} in common, or in another order: evaluate them on the same data (--val-data)"
            )
    return first._replace(
        images=[each.images for each in encoded],
        texts=[each.texts for each in encoded],
        items=[each.items for each in encoded],
    )
