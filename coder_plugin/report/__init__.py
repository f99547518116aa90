"""Figures of a model's analyses; drawing needs matplotlib, importing this does not."""

from __future__ import annotations

from coder_plugin.report.plots import plot_analyses

__all__ = ["plot_analyses"]
