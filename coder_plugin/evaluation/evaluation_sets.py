"""What ``coder-plugin eval`` measures besides recall: kinds of captions, ECCV Caption, CxC, zero-shot classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from coder_plugin.data.scenes import DEFAULT_COUNTS, KINDS
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import coco, cxc, eccv
from coder_plugin.evaluation.breakdowns import breakdown, format_breakdowns, groups_of
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.evaluation.zero_shot import ImageClasses, format_zero_shot, read_classes
from coder_plugin.pretrained.encode import Encoded

#: What the built-in scenes are called.
_SCENES = {f"scenes ({split})" for split in DEFAULT_COUNTS}


class Sets(NamedTuple):
    """What the flags ask for, read before anything is encoded."""

    by: tuple[str, ...] = ()
    eccv: Any = None  # the package's ground truths
    cxc: cxc.CxC | None = None
    classes: ImageClasses | None = None


class Known(NamedTuple):
    """Of one data set: COCO's numbers of its images and captions, and what the captions of an image are called."""

    eccv: Mapping[int, Any] | None
    cxc: Mapping[int, Any] | None
    places: tuple[str, ...] | None


def asked(arguments: Any) -> Sets:
    """What the flags of :mod:`~coder_plugin.cli.eval_flags` ask for.

    Raises:
        CoderError: flags that do not go together, files that cannot be read, a package that is not installed.
    """
    given = {name: getattr(arguments, name, None) for name in ("by", "eccv", "cxc", "zeroshot", "classnames", "templates")}
    if not given["zeroshot"]:
        for name in ("classnames", "templates"):
            if given[name]:
                raise CoderError(f"--{name} {given[name]}: of the classes that --zeroshot FOLDER has")
    classes = None
    if given["zeroshot"]:
        classes = read_classes(given["zeroshot"], given["classnames"], given["templates"] or "openai")
    return Sets(
        tuple(dict.fromkeys(given["by"] or ())),
        eccv.load() if given["eccv"] else None,
        cxc.read_cxc(given["cxc"]) if given["cxc"] else None,
        classes,
    )


def known_of(sets: Sets, source: Any) -> Known:
    """What the sets ask of the data themselves, before they are encoded.

    Raises:
        CoderError: they are not of the split that a set is about.
    """
    of_eccv = of_cxc = places = None
    if sets.eccv is not None:
        of_eccv = coco.coco_numbers((item for _, item in source.items()), eccv.benchmark(sets.eccv))
    if sets.cxc is not None:
        of_cxc = coco.coco_numbers((item for _, item in source.items()), sets.cxc.benchmark)
    if "place" in sets.by:
        places = KINDS if source.name in _SCENES else None
    return Known(of_eccv, of_cxc, places)


def further(sets: Sets, known: Known, encoded: Encoded, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of encoded data, as plain numbers: ``by``, ``eccv``, ``cxc`` as far as asked for.

    They are by the score that recall is by; but ECCV Caption and CxC by the vectors, where a fusion score has put the
    shortlists alone in order, and CxC's i2i and t2t always, for a fusion score is of an image and a text. Their
    ``ranked_by`` says which, by way. Where shortlists are ranked, ``by`` has the text-to-image direction alone.

    Args:
        measured: of `measure`, with ranks.
    """
    matrix: Tensor | None = measured.get("scores")
    scores = Scores(encoded.images, encoded.texts, matrix)
    shortlisted = "rerank" in measured and matrix is None
    out: dict[str, Any] = {}
    if sets.by:
        out["by"] = {}
        for by in sets.by:
            groups = groups_of(by, encoded.captions, encoded.image_of_text, places=known.places)
            rows = None if shortlisted else scores.rows("i2t")
            out["by"][by] = breakdown(groups, measured["t2i_ranks"], encoded.image_of_text, rows)
    ranked_by = dict.fromkeys(("i2t", "t2i"), "vectors" if matrix is None else "fusion score")
    where = encoded.image_ids, encoded.image_of_text
    if known.eccv is not None:
        numbers = coco.of_encoded(known.eccv, *where, "ECCV Caption")
        out["eccv"] = {**eccv.eccv_caption(scores, numbers, sets.eccv), "ranked_by": ranked_by}
    if known.cxc is not None and sets.cxc is not None:
        found = cxc.cxc_recalls(scores, coco.of_encoded(known.cxc, *where, "CxC"), sets.cxc)
        out["cxc"] = {**found, "ranked_by": {**ranked_by, "i2i": "vectors", "t2t": "vectors"}}
    return out


def format_further(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Text tables of what is among the rows of `evaluate_command`; empty where nothing is."""
    tables = []
    if of_classes := {name: row for name, row in results.items() if "zero_shot" in row}:
        tables.append(format_zero_shot(of_classes))
    for key, table in (("by", format_breakdowns), ("eccv", eccv.format_eccv), ("cxc", cxc.format_cxc)):
        if found := {_label(name, row, key): row[key] for name, row in results.items() if key in row}:
            tables.append(table(found))  # type: ignore[operator]
    return "\n\n".join(tables)


def _label(name: str, row: Mapping[str, Any], key: str) -> str:
    by_vectors = row[key].get("ranked_by", {}).get("i2t") == "vectors"
    return f"{name}, shortlist" if "rerank" in row and by_vectors else name
