"""Figures of a model: its analyses, the regions that words find, t-SNE; drawing needs matplotlib, importing this does not."""

from __future__ import annotations

from coder_plugin.report.alignment import LOCALS, Aligner, Alignment
from coder_plugin.report.alignment_plot import plot_alignment, write_alignments
from coder_plugin.report.plots import plot_analyses
from coder_plugin.report.tsne import Points, collect_points, frequent_words, measure_points, place_points, plot_tsne

__all__ = [
    "LOCALS",
    "Aligner",
    "Alignment",
    "Points",
    "collect_points",
    "frequent_words",
    "measure_points",
    "place_points",
    "plot_alignment",
    "plot_analyses",
    "plot_tsne",
    "write_alignments",
]
