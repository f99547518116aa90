"""Models of several runs on the same data: the same queries, and maps of all embeddings, side by side.

CODER compares its base and the whole model so, by t-SNE (supplement, figure 3) and by queries (figure 4), and SelfAlign by
queries (figures 6 and 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report import sections
from coder_plugin.report.examples import WAYS, example_blocks, finder, of_different_images
from coder_plugin.report.page import RECALL, Block, figures, note, recall_cells, table
from coder_plugin.report.run import open_run
from coder_plugin.training.run_folder import RunFolder

#: Images of a map, with all their captions: those of CODER's.
_IMAGES = 1000


class Opened(NamedTuple):
    """What is kept of a run's model: its name on the page, its embeddings, the data, and its recall with ranks."""

    name: str
    encoded: Encoded
    source: Any
    pictures: Any
    result: Mapping[str, Any]


def open_runs(runs: Mapping[str, RunFolder], options: Mapping[str, Any], *, export: str | None, split: str) -> list[Opened]:
    """Encode the data with each run's model, one model at a time.

    Args:
        runs: by their names on the page.
        options: of model and data, by flag name; they replace the runs' own.
        export: "best" or "last"; None: best, or last if there is no best. split: of the data.

    Raises:
        CoderError: a model or its data cannot be opened, or the runs read different images or captions.
    """
    opened: list[Opened] = []
    for name, run in runs.items():
        model = open_run(run, options, export=export, split=split)
        opened.append(Opened(name, model.encoded, model.source, model.pictures, sections.measure(model, run)))
        first, last = opened[0].encoded, opened[-1].encoded
        if (first.captions, first.image_of_text.tolist()) != (last.captions, last.image_of_text.tolist()):
            raise CoderError(f"{opened[0].name} and {name} read different data: name one for both with --val-data")
    return opened


def recall(opened: Sequence[Opened]) -> list[Block]:
    """Recall of all runs' models on the data that were read for the page."""
    rows = [(each.name, recall_cells(each.result)) for each in opened]
    return [note(f"Measured for this page, on {opened[0].source.name}."), table(["Run", *RECALL.values()], rows)]


def queries(opened: Sequence[Opened], count: int) -> list[Block]:
    """The queries whose rank differs most between the first run and the last, with what each run finds.

    Ranks are compared by their ratio: from 4 to 1 is as much as from 400 to 100. Of an image's captions only one is shown.

    Args:
        count: most queries of each kind.
    """
    first, last = opened[0], opened[-1]
    titled: dict[str, list[Any]] = {}
    for way, title in WAYS.items():
        before, after = (each.result[f"{way}_ranks"].double() + 1 for each in (first, last))
        gains = (before / after).log2()
        images = range(len(gains)) if way == "i2t" else first.encoded.image_of_text.tolist()
        find = [finder(each.encoded, way, each.result["depth"]) for each in opened]
        for which, sign in (("better", 1), ("worse", -1)):
            order = (-sign * gains).argsort(stable=True)
            chosen = of_different_images(order[sign * gains[order] > 0].tolist(), images.__getitem__, count)
            titled[f"{title}, {which} in {last.name} than in {first.name}"] = [
                (way, of_run(query), f", {each.name}")
                for query in chosen
                for each, of_run in zip(opened, find, strict=True)
            ]
    shown = example_blocks(first.encoded, first.source, first.pictures, titled)
    if not shown:
        raise CoderError(f"every query has the same rank in {first.name} and in {last.name}")
    return [note("The queries whose rank changes most. A frame and ✓ mark a match; the number is the score."), *shown]


def maps(opened: Sequence[Opened]) -> list[Block]:
    """A t-SNE of each run: images spread evenly over the data, and all their captions."""
    made = [sections.map_figure(each.encoded, each.name, images=_IMAGES, all_captions=True) for each in opened]
    return figures(made, wide=True)
