"""ECCV Caption (Chun et al., ECCV 2022): COCO's test split with the positives that people verified, by its own package.

Beside them, recall by COCO's own pairs, over all 5,000 images and in five folds, and by CxC's: all as `eccv_caption` has them.
Candidates are the 25,000 captions of its lists. Two of its positives are not among these, and count as missed.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.coco import Benchmark, Numbers
from coder_plugin.evaluation.metrics import align
from coder_plugin.evaluation.multi_positive import Ranking, Scores, pairs_of, rankings

#: What the package calls a ground truth, and where it keeps it.
TRUTHS = {"eccv": "eccv_gts", "cxc": "cxc_gts", "coco_5k": "coco_gts"}
KS = (1, 5, 10)
_FOLDS = 5
_TITLES = {"eccv": "ECCV Caption", "cxc": "CxC", "coco_5k": "COCO 5K", "coco_1k": "COCO 1K"}
_WAYS: tuple[Literal["i2t", "t2i"], ...] = ("i2t", "t2i")


def load() -> Any:
    """The package's `Metrics`, with its ground truths.

    Raises:
        CoderError: it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends ujson
        try:
            from eccv_caption import Metrics
        except ImportError as error:
            raise CoderError('ECCV Caption needs its package: pip install "coder-plugin[eccv]"') from error
        return Metrics()


def benchmark(metrics: Any) -> Benchmark:
    """What it is of."""
    return Benchmark(
        "ECCV Caption",
        {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()},
        [int(caption) for caption in metrics.coco_ids],
    )


def eccv_caption(scores: Scores, numbers: Numbers, metrics: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of the package in percent: ground truth, then direction, then ``r1``, ``r5``, ``r10``, and of ECCV Caption
    ``map_at_r`` and ``r_precision``.

    The package gets ranked lists. Of equal scores they have the wrong candidate first, whichever ground truth it is wrong by.

    Args:
        scores: of all images and captions of the data; captions beyond COCO's test set are no candidates.
        numbers: theirs. metrics: of :func:`load`.
    """
    scores = scores.of(torch.arange(len(numbers.images)), numbers.texts)
    ids = {"i2t": (numbers.images, numbers.captions), "t2i": (numbers.captions, numbers.images)}
    found: dict[str, dict[str, Ranking]] = {}
    for way, (queries, candidates) in ids.items():
        truths = {name: pairs_of(getattr(metrics, kept)[way], queries, candidates) for name, kept in TRUTHS.items()}
        found[way] = rankings(scores.rows(way), truths)  # type: ignore[arg-type]
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name in TRUTHS:
        lists = [_lists(found[way][name], *ids[way]) for way in _WAYS]
        wanted = [f"{name}_recalls"]
        _take(out, name, metrics, lists, wanted)
        if name == "eccv":
            _take(out, name, metrics, lists, ["eccv_map_at_r", "eccv_rprecision"])
    _take(out, "coco_1k", metrics, _folds(scores, numbers, metrics), ["coco_1k_recalls"])
    return out


def _folds(scores: Scores, numbers: Numbers, metrics: Any) -> list[dict[int, list[int]]]:
    """Of each query the first places within its own fold, which are all that the package looks at."""
    order = [int(caption) for caption in metrics.coco_ids]
    image_of = {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()}
    places = ({number: place for place, number in enumerate(side)} for side in (numbers.images, numbers.captions))
    image_place, caption_place = places
    whole: list[dict[int, list[int]]] = [{}, {}]
    size = len(order) // _FOLDS
    for first in range(0, len(order), size):
        captions = order[first : first + size]
        images = list(dict.fromkeys(image_of[caption] for caption in captions))
        fold = scores.of(
            torch.tensor([image_place[image] for image in images]), torch.tensor([caption_place[each] for each in captions])
        )
        for lists, way, (queries, candidates) in zip(whole, _WAYS, ((images, captions), (captions, images)), strict=True):
            pairs = pairs_of(metrics.coco_gts[way], queries, candidates)
            lists.update(_lists(rankings(fold.rows(way), {"fold": pairs})["fold"], queries, candidates))
    return whole


def _lists(ranked: Ranking, queries: list[int], candidates: list[int]) -> dict[int, list[int]]:
    return {
        queries[query]: [candidates[place] for place in places]
        for query, places in zip(ranked.queries.tolist(), ranked.candidates.tolist(), strict=True)
    }


def _take(out: dict[str, Any], name: str, metrics: Any, lists: list[dict[int, list[int]]], wanted: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that verbose=False leaves on
        got = metrics.compute_all_metrics(*lists, target_metrics=wanted, Ks=KS, verbose=False)
    for key, ways in got.items():
        figure = key.removeprefix(f"{name}_").replace("rprecision", "r_precision")
        for way, value in ways.items():
            out.setdefault(name, {}).setdefault(way, {})[figure] = 100 * float(value)


def format_eccv(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain text table, percent: a line for each model and ground truth.

    Args:
        rows: name to what `eccv_caption` returned.
    """
    columns = ("map_at_r", "r_precision", "r1", "r5", "r10")
    titles = ("mAP@R", "R-P", "R@1", "R@5", "R@10")
    lines = [["name", "ground truth", *(f"{way} {title}" for way in _WAYS for title in titles)]]
    for name, row in rows.items():
        for number, (truth, title) in enumerate(_TITLES.items()):
            cells = [row[truth][way].get(column) for way in _WAYS for column in columns]
            lines.append(["" if number else name, title, *("-" if cell is None else f"{cell:.1f}" for cell in cells)])
    return align(lines)
