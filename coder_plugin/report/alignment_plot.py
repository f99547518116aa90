"""Figures of :class:`~coder_plugin.report.alignment.Alignment`: outlined words and the context map (SelfAlign, figure 4).

Shapes: L regions, W words, H W pixels.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.report.alignment import Alignment
from coder_plugin.report.places import brightness
from coder_plugin.report.plots import literal, new_figure
from coder_plugin.report.words import FUNCTION_WORDS

#: Light left in what is least relevant, so that one still sees what it is.
_DIM = 0.12
_PANEL = 4.2  # inches


def write_alignments(found: Sequence[Alignment], folder: str | Path) -> list[Path]:
    """A figure for each, ``alignment-000.png`` …, and ``alignment.json`` with all numbers, in which each names its ``figure``
    (null where the regions have no boxes, so that there is none).

    Returns:
        The files.

    Raises:
        CoderError: matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths, rows = [], []
    for number, each in enumerate(found):
        path = folder / f"alignment-{number:03d}.png"
        drawn = each.boxes is not None and each.picture is not None
        if drawn:
            plot_alignment(each).savefig(path, dpi=110, bbox_inches="tight")
            paths.append(path)
        rows.append({"figure": path.name if drawn else None, **each.to_dict()})
    paths.append(folder / "alignment.json")
    paths[-1].write_text(json.dumps(rows, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def plot_alignment(found: Alignment) -> Any:
    """A matplotlib figure: on the left the region of each word outlined in the word's colour, on the right the picture, the
    brighter the more relevant a region is to the text's context; that only where the model has such a map.

    Articles, prepositions and the like (:data:`~coder_plugin.report.words.FUNCTION_WORDS`) are not drawn: they show nothing,
    and cover what does. The numbers of ``to_dict`` have them.

    Raises:
        CoderError: matplotlib is not installed, or it is not known where the regions lie.
    """
    from matplotlib.patches import Rectangle

    if found.boxes is None or found.picture is None:
        raise CoderError(f"{found.key}: its regions have no boxes, so that there is no place to draw them")
    height, width = found.picture.shape[:2]
    panels = 1 if found.region_context is None else 2
    tall = min(2.0, max(0.4, height / width))
    title = [literal(line) for line in textwrap.wrap(found.caption, 48 * panels)]
    legend = sum(word not in FUNCTION_WORDS for word in found.words) // (3 * panels) + 1
    figure = new_figure(panels * _PANEL, _PANEL * tall + 0.3 + 0.2 * (len(title) + legend))
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    axes[0].imshow(found.picture, extent=(0, width, height, 0))
    handles = _outline(axes[0], found, width, height)
    if found.region_context is not None:
        light = _DIM + (1 - _DIM) * brightness(found.region_context, found.boxes, height, width)
        axes[1].imshow((found.picture * light[..., None]).round().astype(np.uint8), extent=(0, width, height, 0))
        for left, top, right, bottom in found.boxes:  # the darkest region would look like none
            corner = (left * width, top * height)
            edge = Rectangle(corner, (right - left) * width, (bottom - top) * height, fill=False, lw=0.4, edgecolor="0.6")
            axes[1].add_patch(edge)
        low, high = found.region_context.min(), found.region_context.max()
        axes[1].set_xlabel(f"context: cosine {low:.2f} (dark) to {high:.2f}")
    for each in axes:
        each.set(xlim=(0, width), ylim=(height, 0), xticks=(), yticks=())
    figure.suptitle("\n".join(title), fontsize="medium")
    if handles:
        labels = [handle.get_label() for handle in handles]
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3 * panels), frameon=False)
    return figure


def _outline(axes: Any, found: Alignment, width: int, height: int) -> list[Any]:
    """Outline and name each word's region. Words of one region stand in each other's outlines and on each other's names."""
    import matplotlib
    from matplotlib.patches import Rectangle

    assert found.boxes is not None
    colours = [matplotlib.colormaps["tab20"](place) for place in (*range(0, 20, 2), *range(1, 20, 2))]
    line = max(width, height) / 90  # of an outline, in pixels of the picture
    handles: list[Any] = []
    on: dict[int, int] = {}
    for number, (word, region) in enumerate(zip(found.words, found.regions.tolist(), strict=True)):
        if word in FUNCTION_WORDS:
            continue
        left, top, right, bottom = found.boxes[region] * [width, height, width, height]
        nested = on[region] = on.get(region, -1) + 1
        inset = min((nested + 0.5) * line, 0.45 * (right - left), 0.45 * (bottom - top))
        colour = colours[len(handles) % len(colours)]
        name = literal(word)
        handles.append(
            Rectangle(
                (left + inset, top + inset),
                right - left - 2 * inset,
                bottom - top - 2 * inset,
                fill=False,
                edgecolor=colour,
                linewidth=2,
                label=f"{name} {found.similarity[number, region]:.2f}",
            )
        )
        axes.add_patch(handles[-1])
        axes.annotate(
            name,
            (left, top),
            xytext=(2, -2 - 10 * nested),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="white",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": colour, "edgecolor": "none"},
        )
    return handles
