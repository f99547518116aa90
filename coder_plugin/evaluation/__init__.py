"""Retrieval metrics: how well captions find their images, and images their captions (see docs/equations.md#evaluation)."""

from __future__ import annotations

from coder_plugin.evaluation.analyses import alignment, analyse, format_analyses, recall_by_length, uniformity
from coder_plugin.evaluation.metrics import format_table, mean_over_runs, recall, recall_folds, recall_from_embeddings
from coder_plugin.evaluation.multi_positive import Scores, multi_positive
from coder_plugin.evaluation.rerank import rerank

__all__ = [
    "Scores",
    "alignment",
    "analyse",
    "format_analyses",
    "format_table",
    "mean_over_runs",
    "multi_positive",
    "recall",
    "recall_by_length",
    "recall_folds",
    "recall_from_embeddings",
    "rerank",
    "uniformity",
]
