"""Retrieval: how well captions find their images and images their captions (METHODS 10)."""

from __future__ import annotations

from coder_plugin.retrieval.metrics import format_table, recall, recall_folds, recall_from_embeddings

__all__ = ["format_table", "recall", "recall_folds", "recall_from_embeddings"]
