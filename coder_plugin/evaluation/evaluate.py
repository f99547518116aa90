"""Recall on a data set: by vectors, for a model with a fusion score in two stages (AsCL eq. 4), and of ensembles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import over_folds
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.evaluation.rerank import MeanScore, rerank
from coder_plugin.heads.capabilities import PairScorer
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


def without_tensors(result: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers of a result, without the ranks of single queries."""
    return {
        key: without_tensors(value) if isinstance(value, dict) else value
        for key, value in result.items()
        if not isinstance(value, Tensor)
    }


@torch.no_grad()
def measure(encoded: Encoded, folds: int, depth: int | None) -> dict[str, Any]:
    """Recall of one model or of an ensemble.

    Pairs are scored in float32, also where their items were computed under autocast.

    Args:
        encoded: N images and T captions.
        folds: 0, or also the mean over so many folds, each with its own shortlists.
        depth: how many candidates of each query a fusion score re-ranks; None: it scores every pair.

    Returns:
        What :func:`~coder_plugin.evaluation.recall` returns, the numbers of ``images`` and ``texts``, of samples ``skipped`` by
        kind of fault where there are any, and with folds their
        mean under ``folds``. With a fusion score the figures are those after re-ranking; ``rerank`` is ``depth`` or "all",
        ``shortlist`` holds the figures of the vectors alone, and if every pair was scored, ``scores`` [N, T] the scores.
    """
    owner = encoded.image_of_text
    sizes: dict[str, Any] = {"images": len(encoded.image_ids), "texts": len(owner)}
    if encoded.skipped:
        sizes["skipped"] = dict(encoded.skipped)
    result = {**Scores(encoded.images, encoded.texts).recall(owner, folds=folds), **sizes}
    heads = [items.head for items in _as_list(encoded.items) if items is not None]
    if not heads:
        return result
    with evaluating(*heads):
        score = _scorer(encoded)
        if depth is None:
            matrix = score.all_pairs().cpu()
            reranked = {**Scores(encoded.images, encoded.texts, matrix).recall(owner, folds=folds), "scores": matrix}
        else:
            if depth * (len(owner) + len(encoded.image_ids)) >= len(owner) * len(encoded.image_ids):
                score = Scores(encoded.images, encoded.texts, score.all_pairs())  # cheaper than as many pairs one by one
            reranked = _rerank_first(encoded, score, folds, depth)
    return {**reranked, **sizes, "rerank": "all" if depth is None else depth, "shortlist": result}


@contextmanager
def evaluating(*modules: Any) -> Iterator[None]:
    """Modules in eval mode, without gradients; their modes are restored afterwards."""
    modes = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)


def positive_scores(encoded: Encoded) -> Tensor:
    """The fusion score of each caption with its image [T], on the CPU, of one model that has such a score."""
    head = encoded.items.head
    with evaluating(head):
        texts = torch.arange(len(encoded.image_of_text))
        scorer = head.scorer(encoded.items.images, encoded.items.texts)
        return scorer(encoded.image_of_text[:, None], texts[:, None])[:, 0, 0].cpu()


def _as_list(value: Any) -> list[Any]:
    """One entry per model, also for a single model."""
    return value if isinstance(value, list) else [value]


def _scorer(encoded: Encoded) -> PairScorer:
    """The score that re-ranks: the mean over the models; a model without a fusion score contributes its inner products."""
    models = [_as_list(value) for value in (encoded.images, encoded.texts, encoded.items)]
    scorers: list[PairScorer] = [
        Scores(images, texts) if items is None else items.head.scorer(items.images, items.texts)
        for images, texts, items in zip(*models, strict=True)
    ]
    return scorers[0] if len(scorers) == 1 else MeanScore(scorers)


def _rerank_first(encoded: Encoded, score: PairScorer, folds: int, k: int) -> dict[str, Any]:
    """Each query's k best candidates by embedding, re-ranked by ``score``; each fold has its own shortlists."""
    images, texts = _as_list(encoded.images), _as_list(encoded.texts)
    result = rerank(images, texts, encoded.image_of_text, score, k=k)

    def fold(rows: slice, captions: Tensor, owner: Tensor) -> dict[str, Any]:
        def fold_score(image_index: Tensor, text_index: Tensor) -> Tensor:
            return score(image_index + rows.start, captions[text_index])

        return rerank([each[rows] for each in images], [each[captions] for each in texts], owner, fold_score, k=k)

    if folds:
        result["folds"] = over_folds(encoded.image_of_text, len(encoded.image_ids), folds, fold)
    return result
