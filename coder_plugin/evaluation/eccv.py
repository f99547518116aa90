"""ECCV Caption (Chun et al., ECCV 2022): COCO's test split with human-verified positives, which the authors' package holds.

The same table has recall by CxC's pairs, and by COCO's original pairs over all 5,000 images and as the mean of five folds.
Candidates are the 25,000 captions of the package's lists. Two of its positives are not among these, and count as missed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch

from coder_plugin.errors import CoderError, install_command
from coder_plugin.evaluation.coco import Benchmark, Numbers
from coder_plugin.evaluation.metrics import align, format_cell
from coder_plugin.evaluation.multi_positive import Scores, figures, pairs_of, rankings

#: Name of each ground truth with several positives, and the package's attribute that holds it.
TRUTHS = {"eccv": "eccv_gts", "cxc": "cxc_gts"}
_FOLDS = 5
_RECALLS = ("r1", "r5", "r10")
_PRECISIONS = ("map_at_r", "r_precision")
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
            raise CoderError(f"ECCV Caption needs its package: {install_command('eccv')}") from error
        return Metrics()


def benchmark(metrics: Any) -> Benchmark:
    """The images and captions of the package's lists."""
    return Benchmark(
        "ECCV Caption",
        {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()},
        [int(caption) for caption in metrics.coco_ids],
    )


def eccv_caption(scores: Scores, numbers: Numbers, metrics: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Figures in percent, equal to those that the package computes from ranked lists.

    Among equal scores, candidates that are wrong by the ground truth come first.

    Args:
        scores: of all images and captions of the data; captions that the benchmark does not have are no candidates.
        numbers: COCO's ids of the data.
        metrics: of :func:`load`.

    Returns:
        By ground truth (``eccv``, ``cxc``, ``coco_5k``, ``coco_1k``) and direction (``i2t``, ``t2i``): ``r1``, ``r5``,
        ``r10``, and for ``eccv`` also ``map_at_r`` and ``r_precision``.
    """
    order = benchmark(metrics)
    captions = list(order.order or ())
    images = list(dict.fromkeys(order.image_of[caption] for caption in captions))
    number_of = {image: number for number, image in enumerate(images)}
    places = [{each: place for place, each in enumerate(side)} for side in (numbers.images, numbers.captions)]
    scores = scores.of(
        torch.tensor([places[0][image] for image in images]), numbers.texts[[places[1][caption] for caption in captions]]
    )  # in the package's order, which cuts the folds
    original = scores.recall(torch.tensor([number_of[order.image_of[caption]] for caption in captions]), folds=_FOLDS)
    out: dict[str, dict[str, dict[str, float]]] = {name: {} for name in _TITLES}
    for way, (queries, candidates) in zip(_WAYS, ((images, captions), (captions, images)), strict=True):
        truths = {name: getattr(metrics, attribute)[way] for name, attribute in TRUTHS.items()}
        most = max(len(right) for truth in truths.values() for right in truth.values())
        ranked = rankings(scores.rows(way), {name: pairs_of(truths[name], queries, candidates) for name in truths}, k=most)
        for name, each in ranked.items():
            positives = torch.tensor([len(set(truths[name][queries[query]])) for query in each.queries.tolist()])
            measured = figures(each._replace(positives=positives))
            out[name][way] = {key: measured[key] for key in (_PRECISIONS if name == "eccv" else ()) + _RECALLS}
        for name, recalls in (("coco_5k", original), ("coco_1k", original["folds"])):
            out[name][way] = {key: recalls[f"{way}_{key}"] for key in _RECALLS}
    return out


def format_eccv(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain text table, percent: a line for each model and ground truth.

    Args:
        rows: name to what `eccv_caption` returned.
    """
    columns = _PRECISIONS + _RECALLS
    titles = ("mAP@R", "R-P", "R@1", "R@5", "R@10")
    lines = [["name", "ground truth", *(f"{way} {title}" for way in _WAYS for title in titles)]]
    for name, row in rows.items():
        for number, (truth, title) in enumerate(_TITLES.items()):
            cells = [format_cell(row[truth][way], column) for way in _WAYS for column in columns]
            lines.append(["" if number else name, title, *cells])
    return align(lines)
