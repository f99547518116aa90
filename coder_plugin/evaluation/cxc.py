"""Crisscrossed Captions (Parekh et al., EACL 2021): recall within and across modalities by human similarity ratings.

Protocol and thresholds are VSE-infinity's (Chen et al., CVPR 2021). An image and a caption match from a rating of 3 on, two
images from 2.5, two captions from 3 or if they belong to one image. A query's best-ranked match counts, and the query itself is
no candidate. Queries without a match are left out. A rating of two images, or of two captions, counts for both.

Ratings are the files of CxC, ``sits_test.csv``, ``sis_test.csv`` and ``sts_test.csv``.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coder_plugin.data.regions.base import names_of
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.coco import Benchmark, Numbers
from coder_plugin.evaluation.metrics import align, format_cell
from coder_plugin.evaluation.multi_positive import Scores, Way, figures, pairs_of, rankings

IMAGE_TEXT, TEXTS, IMAGES = 3.0, 3.0, 2.5  # ratings, of 0 to 5
_CSV = ("sits_test.csv", "sis_test.csv", "sts_test.csv")
_WAYS: tuple[Way, ...] = ("i2t", "t2i", "i2i", "t2t")
_FIGURES = ("r1", "r5", "r10", "queries")

Truth = dict[int, set[int]]


class CxC(NamedTuple):
    """The matches by COCO's ids for each direction, and the images and captions that have ratings."""

    truths: Mapping[Way, Truth]
    benchmark: Benchmark


def read_cxc(folder: str | Path) -> CxC:
    """Read the ratings of the test split.

    Args:
        folder: has CxC's files.

    Raises:
        CoderError: files are missing, or hold something else.
    """
    folder = Path(folder)
    if missing := [name for name in _CSV if not (folder / name).is_file()]:
        raise CoderError(
            f"{folder} has no {', '.join(missing)}: CxC's files are {', '.join(_CSV)} (github.com/google-research-datasets/"
            "Crisscrossed-Captions, data/)"
        )
    try:
        return _read_csv(*(folder / name for name in _CSV))
    except (OSError, ValueError, csv.Error) as error:
        raise CoderError(f"{folder}: not CxC's ratings: {error}") from error


def _read_csv(sits: Path, sis: Path, sts: Path) -> CxC:
    i2t, t2i, i2i, t2t = (defaultdict(set) for _ in range(4))  # type: ignore[var-annotated]
    image_of: dict[int, int] = {}
    for caption, image, rating, method in _rows(sits):
        if method == "c2i_original":
            image_of[caption] = image
        if rating >= IMAGE_TEXT:
            t2i[caption].add(image)
            i2t[image].add(caption)
    for file, least, truth in ((sis, IMAGES, i2i), (sts, TEXTS, t2t)):
        for one, other, rating, _ in _rows(file):
            if rating >= least:
                truth[one].add(other)
                truth[other].add(one)
    siblings: Truth = defaultdict(set)
    for caption, image in image_of.items():
        siblings[image].add(caption)
    for caption, image in image_of.items():
        t2t[caption].update(siblings[image])
    within = [{key: others - {key} for key, others in truth.items()} for truth in (i2i, t2t)]
    return CxC(dict(zip(_WAYS, (i2t, t2i, *within), strict=True)), Benchmark("CxC", image_of))


def _rows(file: Path) -> Iterator[tuple[int, int, float, str]]:
    """The rows of one of CxC's files: two ids, the rating, and how the pair was sampled.

    Names such as ``COCO_val2014:sentid:732091`` and ``COCO_val2014_000000365325.jpg`` become the numbers that they end in.
    """
    with open(file, newline="", encoding="utf-8") as lines:
        rows = csv.reader(lines)
        next(rows, None)
        for number, row in enumerate(rows, 2):
            try:
                one, other, rating, method = row
                yield _number(one), _number(other), float(rating), method
            except ValueError as error:
                raise CoderError(f"{file}: line {number} is not two names, a rating and a method: {error}") from error


def _number(name: str) -> int:
    digits = names_of(name.rpartition(":")[2])[-1]
    if digits is None:
        raise ValueError(f"{name!r} ends in no number")
    return int(digits)


def cxc_recalls(scores: Scores, numbers: Numbers, cxc: CxC) -> dict[str, dict[str, float | int]]:
    """``r1``, ``r5`` and ``r10`` in percent and the number of ``queries`` for ``i2t``, ``t2i``, ``i2i`` and ``t2t``.

    Args:
        scores: of all images and captions of the data. ``i2i`` and ``t2t`` always use the embeddings, not its matrix.
        numbers: COCO's ids of the data.
        cxc: the ratings.
    """
    scores = scores.of(torch.arange(len(numbers.images)), numbers.texts)
    sides = {"i": numbers.images, "t": numbers.captions}
    out: dict[str, Any] = {}
    for way, truth in cxc.truths.items():
        pairs = pairs_of(truth, sides[way[0]], sides[way[-1]])
        ranked = rankings(scores.rows(way), {f"CxC {way}": pairs}, exclude_self=way[0] == way[-1])[f"CxC {way}"]
        out[way] = {name: value for name, value in figures(ranked).items() if name in _FIGURES}
    return out


def format_cxc(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain text table, percent: a line for each model.

    Args:
        rows: name to what `cxc_recalls` returned. An entry ``ranked_by`` may say for each direction what ranks it; if these
            differ, a line below the table says so.
    """
    lines = [["name", *(f"CxC {way} R@{k}" for way in _WAYS for k in (1, 5, 10))]]
    for name, row in rows.items():
        lines.append([name, *(format_cell(row[way], f"r{k}") for way in _WAYS for k in (1, 5, 10))])
    mixed = any(len(set(row.get("ranked_by", {}).values())) > 1 for row in rows.values())
    return align(lines) + ("\ni2i and t2t: by the vectors" if mixed else "")
