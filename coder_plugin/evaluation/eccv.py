"""ECCV Caption (Chun et al., ECCV 2022): COCO's test split with human-verified positives, evaluated by the authors' package.

The package also has recall by COCO's original pairs, over all 5,000 images and as the mean of five folds, and by CxC's pairs.
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

#: Name of each ground truth, and the package's attribute that holds it.
TRUTHS = {"eccv": "eccv_gts", "cxc": "cxc_gts", "coco_5k": "coco_gts"}
KS = (1, 5, 10)
_FOLDS = 5
_TITLES = {"eccv": "ECCV Caption", "cxc": "CxC", "coco_5k": "COCO 5K", "coco_1k": "COCO 1K"}
_WAYS: tuple[Literal["i2t", "t2i"], ...] = ("i2t", "t2i")


def load() -> Any:
    """The package's `Metrics`, with its ground truths.

    Raises:
        CoderError: the package is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends ujson
        try:
            from eccv_caption import Metrics
        except ImportError as error:
            raise CoderError('ECCV Caption needs its package: pip install "coder-plugin[eccv]"') from error
        return Metrics()


def benchmark(metrics: Any) -> Benchmark:
    """The images and captions of the package's lists."""
    return Benchmark(
        "ECCV Caption",
        {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()},
        [int(caption) for caption in metrics.coco_ids],
    )


def eccv_caption(scores: Scores, numbers: Numbers, metrics: Any) -> dict[str, dict[str, dict[str, float]]]:
    """The package's figures in percent.

    The package gets ranked lists. Among equal scores, candidates that are wrong by the ground truth come first.

    Args:
        scores: of all images and captions of the data; captions that the benchmark does not have are no candidates.
        numbers: COCO's ids of the data.
        metrics: of :func:`load`.

    Returns:
        By ground truth (``eccv``, ``cxc``, ``coco_5k``, ``coco_1k``) and direction (``i2t``, ``t2i``): ``r1``, ``r5``,
        ``r10``, and for ``eccv`` also ``map_at_r`` and ``r_precision``.
    """
    scores = scores.of(torch.arange(len(numbers.images)), numbers.texts)
    ids = {"i2t": (numbers.images, numbers.captions), "t2i": (numbers.captions, numbers.images)}
    ranked: dict[str, dict[str, Ranking]] = {}
    for way, (queries, candidates) in ids.items():
        truths = {name: pairs_of(getattr(metrics, attribute)[way], queries, candidates) for name, attribute in TRUTHS.items()}
        ranked[way] = rankings(scores.rows(way), truths)  # type: ignore[arg-type]
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name in TRUTHS:
        lists = [_lists(ranked[way][name], *ids[way]) for way in _WAYS]
        _add_figures(out, name, metrics, lists, [f"{name}_recalls"])
        if name == "eccv":
            _add_figures(out, name, metrics, lists, ["eccv_map_at_r", "eccv_rprecision"])
    _add_figures(out, "coco_1k", metrics, _folds(scores, numbers, metrics), ["coco_1k_recalls"])
    return out


def _folds(scores: Scores, numbers: Numbers, metrics: Any) -> list[dict[int, list[int]]]:
    """Each query's ranked list within its fold, by id: images' lists and captions' lists."""
    order = [int(caption) for caption in metrics.coco_ids]
    image_of = {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()}
    image_index, caption_index = (
        {number: index for index, number in enumerate(side)} for side in (numbers.images, numbers.captions)
    )
    all_lists: list[dict[int, list[int]]] = [{}, {}]
    size = len(order) // _FOLDS
    for first in range(0, len(order), size):
        captions = order[first : first + size]
        images = list(dict.fromkeys(image_of[caption] for caption in captions))
        fold = scores.of(
            torch.tensor([image_index[image] for image in images]), torch.tensor([caption_index[each] for each in captions])
        )
        for lists, way, (queries, candidates) in zip(all_lists, _WAYS, ((images, captions), (captions, images)), strict=True):
            pairs = pairs_of(metrics.coco_gts[way], queries, candidates)
            lists.update(_lists(rankings(fold.rows(way), {"fold": pairs})["fold"], queries, candidates))
    return all_lists


def _lists(ranked: Ranking, queries: list[int], candidates: list[int]) -> dict[int, list[int]]:
    """The ranked candidates of each query, by id."""
    return {
        queries[query]: [candidates[index] for index in indices]
        for query, indices in zip(ranked.queries.tolist(), ranked.candidates.tolist(), strict=True)
    }


def _add_figures(
    out: dict[str, Any], name: str, metrics: Any, lists: list[dict[int, list[int]]], targets: list[str]
) -> None:
    """Compute the package's metrics of these names, and add them to ``out[name]``."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that verbose=False leaves on
        results = metrics.compute_all_metrics(*lists, target_metrics=targets, Ks=KS, verbose=False)
    for key, ways in results.items():
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
