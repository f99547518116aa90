"""Recall of encoded data: by their vectors, and for a model with a fusion score in two stages (AsCL eq. 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coder_plugin.evaluation.metrics import over_folds
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.evaluation.rerank import MatrixScores, MeanScore, Products, Scorer, rerank
from coder_plugin.pretrained.encode import Encoded


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
                score = MatrixScores(score.all_pairs())  # cheaper than as many pairs one by one
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


def _scorer(encoded: Encoded) -> Scorer:
    """The score that re-ranks: the mean over the models; a model without a fusion score contributes its inner products."""
    models = [_as_list(value) for value in (encoded.images, encoded.texts, encoded.items)]
    scorers: list[Scorer] = [
        Products(images, texts) if items is None else items.head.scorer(items.images, items.texts)
        for images, texts, items in zip(*models, strict=True)
    ]
    return scorers[0] if len(scorers) == 1 else MeanScore(scorers)


def _rerank_first(encoded: Encoded, score: Scorer, folds: int, k: int) -> dict[str, Any]:
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
