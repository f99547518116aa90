"""The HTML report of a training run, and figures of a model. matplotlib and scikit-learn are loaded only to draw."""

from __future__ import annotations

from coder_plugin.report.alignment import LOCALS, Aligner, Alignment
from coder_plugin.report.figures import plot_alignment, plot_analyses, write_alignments
from coder_plugin.report.tsne import Points, collect_points, frequent_words, measure_points, plot_tsne

__all__ = [
    "LOCALS",
    "Aligner",
    "Alignment",
    "Points",
    "collect_points",
    "frequent_words",
    "measure_points",
    "plot_alignment",
    "plot_analyses",
    "plot_tsne",
    "write_alignments",
]
