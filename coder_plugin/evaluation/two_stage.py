"""Recall of encoded data: by their vectors, and where a model has a fusion score, by that in two stages (METHODS 8, 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coder_plugin.evaluation import recall, recall_folds, recall_from_embeddings, rerank
from coder_plugin.evaluation.metrics import over_folds
from coder_plugin.evaluation.rerank import MeanScore, Products, Scorer
from coder_plugin.pretrained.encode import Encoded


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """Without the ranks of single queries."""
    return {
        key: plain(value) if isinstance(value, dict) else value
        for key, value in result.items()
        if not isinstance(value, Tensor)
    }


@torch.no_grad()
def measure(encoded: Encoded, folds: int, depth: int | None) -> dict[str, Any]:
    """What `recall` returns, with the numbers of ``images`` and ``texts``, and under ``folds`` the mean of so many.

    Where a fusion score re-ranks, recall is its, ``rerank`` says of how many candidates, and ``shortlist`` has the same
    figures of the vectors alone; where it scores every pair, ``scores`` [N, T] are these. A pair is scored in float32, also
    where its items were made under autocast.

    Args:
        folds: how many, 0: none. Each has shortlists of its own.
        depth: how many candidates of each query are re-ranked; None: every pair is scored.
    """
    images, texts, owner = encoded.images, encoded.texts, encoded.image_of_text
    sizes = {"images": len(encoded.image_ids), "texts": len(owner)}
    result = {**recall_from_embeddings(images, texts, owner), **sizes}
    if folds:
        result["folds"] = recall_folds(images, texts, owner, folds=folds)
    heads = [items.head for items in _several(encoded.items) if items is not None]
    if not heads:
        return result
    training = [head.training for head in heads]
    try:
        for head in heads:
            head.eval()
        score = _scorer(encoded)
        if depth is not None and depth * (len(owner) + len(encoded.image_ids)) >= len(owner) * len(encoded.image_ids):
            score = _Known(score.all_pairs())  # cheaper than as many pairs one by one
        reranked = _rerank_all(encoded, score, folds) if depth is None else _rerank_first(encoded, score, folds, depth)
    finally:
        for head, was in zip(heads, training, strict=True):
            head.train(was)
    return {**reranked, **sizes, "rerank": "all" if depth is None else depth, "shortlist": result}


class _Known:
    """Scores [N, T] that were all made."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        return self.scores[image_index[:, :, None], text_index[:, None]]

    def all_pairs(self) -> Tensor:
        return self.scores


def _several(value: Any) -> list[Any]:
    """What an ensemble has of each model; of one model, that of the one."""
    return value if isinstance(value, list) else [value]


def _scorer(encoded: Encoded) -> Scorer:
    """The score that re-ranks: the mean over the models, of which those without a fusion score have their product."""
    models = [_several(value) for value in (encoded.images, encoded.texts, encoded.items)]
    scorers: list[Scorer] = [
        Products(images, texts) if items is None else items.head.scorer(items.images, items.texts)
        for images, texts, items in zip(*models, strict=True)
    ]
    return scorers[0] if len(scorers) == 1 else MeanScore(scorers)


def _rerank_first(encoded: Encoded, score: Scorer, folds: int, k: int) -> dict[str, Any]:
    """Each query's first k by embedding in the order of ``score``; folds have shortlists of their own."""
    images, texts = _several(encoded.images), _several(encoded.texts)
    result = rerank(images, texts, encoded.image_of_text, score, k=k)

    def fold(own: slice, captions: Tensor, owner: Tensor) -> dict[str, Any]:
        def of_fold(image_index: Tensor, text_index: Tensor) -> Tensor:
            return score(image_index + own.start, captions[text_index])

        return rerank([each[own] for each in images], [each[captions] for each in texts], owner, of_fold, k=k)

    if folds:
        result["folds"] = over_folds(encoded.image_of_text, len(encoded.image_ids), folds, fold)
    return result


def _rerank_all(encoded: Encoded, score: Scorer, folds: int) -> dict[str, Any]:
    """Every pair by ``score``: the whole matrix, which the paper's protocol asks for."""
    matrix = score.all_pairs().cpu()
    result = {**recall(matrix, encoded.image_of_text), "scores": matrix}

    def fold(own: slice, captions: Tensor, owner: Tensor) -> dict[str, Any]:
        return recall(matrix[own][:, captions], owner)

    if folds:
        result["folds"] = over_folds(encoded.image_of_text, len(encoded.image_ids), folds, fold)
    return result
