"""What ``coder-plugin eval`` can measure besides recall: kinds of captions, ECCV Caption, CxC, zero-shot classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from coder_plugin.data.scenes import DEFAULT_COUNTS, KINDS
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import coco, cxc, eccv
from coder_plugin.evaluation.breakdowns import breakdown, format_breakdowns, groups_of
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.evaluation.zero_shot import ImageClasses, format_zero_shot, read_classes
from coder_plugin.pretrained.encode import Encoded

#: Names of the built-in scenes as sources.
_SCENES = {f"scenes ({split})" for split in DEFAULT_COUNTS}


class Benchmarks(NamedTuple):
    """What is measured besides recall, with its files read."""

    by: tuple[str, ...] = ()  # breakdowns of recall: words, length, place
    eccv: Any = None  # the ground truths of the package eccv_caption
    cxc: cxc.CxC | None = None
    classes: ImageClasses | None = None  # for zero-shot classification


class DataTruths(NamedTuple):
    """For one data set: COCO's numbers of its images and captions, and names of an image's captions by their place."""

    eccv: Mapping[int, Any] | None
    cxc: Mapping[int, Any] | None
    caption_names: tuple[str, ...] | None


def load_benchmarks(
    *,
    by: Sequence[str] = (),
    eccv_caption: bool = False,
    cxc_folder: str | None = None,
    zeroshot: str | None = None,
    classnames: str | None = None,
    templates: str | None = None,
) -> Benchmarks:
    """Read what the benchmarks need, before anything is encoded.

    Args:
        by: breakdowns of recall, some of words, length and place.
        eccv_caption: measure ECCV Caption.
        cxc_folder: folder of CxC's ratings; None: do not measure it.
        zeroshot: folder of class folders to classify; None: do not.
        classnames: as in :func:`~coder_plugin.evaluation.zero_shot.read_classes`.
        templates: as in :func:`~coder_plugin.evaluation.zero_shot.read_classes`.

    Raises:
        CoderError: options that do not go together, files that cannot be read, a package that is not installed.
    """
    if not zeroshot:
        for name, value in (("classnames", classnames), ("templates", templates)):
            if value:
                raise CoderError(f"--{name} {value} needs --zeroshot FOLDER, the pictures to classify")
    return Benchmarks(
        tuple(dict.fromkeys(by)),
        eccv.load() if eccv_caption else None,
        cxc.read_cxc(cxc_folder) if cxc_folder else None,
        read_classes(zeroshot, classnames, templates or "openai") if zeroshot else None,
    )


def match_data(benchmarks: Benchmarks, source: Any) -> DataTruths:
    """What the benchmarks need to know about a data set, before it is encoded.

    Raises:
        CoderError: the data are not the split that a benchmark is made for.
    """
    of_eccv = of_cxc = caption_names = None
    if benchmarks.eccv is not None:
        of_eccv = coco.coco_numbers((item for _, item in source.items()), eccv.benchmark(benchmarks.eccv))
    if benchmarks.cxc is not None:
        of_cxc = coco.coco_numbers((item for _, item in source.items()), benchmarks.cxc.benchmark)
    if "place" in benchmarks.by and source.name in _SCENES:
        caption_names = KINDS
    return DataTruths(of_eccv, of_cxc, caption_names)


def measure_benchmarks(
    benchmarks: Benchmarks, truths: DataTruths, encoded: Encoded, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """The benchmarks' figures of encoded data as plain numbers, under ``by``, ``eccv`` and ``cxc``.

    They rank by the score that recall ranks by, with two exceptions: ECCV Caption and CxC rank by the vectors where a fusion
    score has re-ranked only shortlists, and CxC's i2i and t2t always, because a fusion score compares an image with a text.
    Their ``ranked_by`` names the score for each direction. With shortlists, ``by`` has only the text-to-image direction.

    Args:
        benchmarks: what to measure.
        truths: of :func:`match_data` for these data.
        encoded: the data's vectors.
        measured: of :func:`~coder_plugin.evaluation.evaluate.measure`, with ranks.
    """
    matrix: Tensor | None = measured.get("scores")
    scores = Scores(encoded.images, encoded.texts, matrix)
    shortlisted = "rerank" in measured and matrix is None
    out: dict[str, Any] = {}
    if benchmarks.by:
        out["by"] = {}
        for by in benchmarks.by:
            groups = groups_of(by, encoded.captions, encoded.image_of_text, caption_names=truths.caption_names)
            rows = None if shortlisted else scores.rows("i2t")
            out["by"][by] = breakdown(groups, measured["t2i_ranks"], encoded.image_of_text, rows)
    ranked_by = dict.fromkeys(("i2t", "t2i"), "vectors" if matrix is None else "fusion score")
    ids = encoded.image_ids, encoded.image_of_text
    if truths.eccv is not None:
        numbers = coco.of_encoded(truths.eccv, *ids, "ECCV Caption")
        out["eccv"] = {**eccv.eccv_caption(scores, numbers, benchmarks.eccv), "ranked_by": ranked_by}
    if truths.cxc is not None and benchmarks.cxc is not None:
        recalls = cxc.cxc_recalls(scores, coco.of_encoded(truths.cxc, *ids, "CxC"), benchmarks.cxc)
        out["cxc"] = {**recalls, "ranked_by": {**ranked_by, "i2i": "vectors", "t2t": "vectors"}}
    return out


def format_benchmarks(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Plain text tables of the benchmarks among the rows of ``evaluate_models``; an empty text if there are none."""
    tables = []
    if classified := {name: row for name, row in results.items() if "zero_shot" in row}:
        tables.append(format_zero_shot(classified))
    for key, format_rows in (("by", format_breakdowns), ("eccv", eccv.format_eccv), ("cxc", cxc.format_cxc)):
        if rows := {_label(name, row, key): row[key] for name, row in results.items() if key in row}:
            tables.append(format_rows(rows))  # type: ignore[operator]
    return "\n\n".join(tables)


def _label(name: str, row: Mapping[str, Any], key: str) -> str:
    by_vectors = row[key].get("ranked_by", {}).get("i2t") == "vectors"
    return f"{name}, shortlist" if "rerank" in row and by_vectors else name
