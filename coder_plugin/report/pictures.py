"""``coder-plugin eval --pictures``: what is drawn of each model while it is there, and written when all have been."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError
from coder_plugin.report.alignment import Aligner, Alignment
from coder_plugin.report.alignment_plot import write_alignments
from coder_plugin.report.attention import load_picture
from coder_plugin.report.plots import check_figures
from coder_plugin.report.tsne import Points, TooFew, collect_points, frequent_words, plot_tsne

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What ``--pictures`` and its like ask for."""

    folder: Path
    images: int
    concepts: tuple[str, ...]


class Collected(NamedTuple):
    """What a model gave: alignments, and the points of its concepts unless there are too few."""

    alignments: list[Alignment]
    points: Points | None


def asked(arguments: Any) -> Asked | None:
    """What the flags ask for; None: no pictures.

    Raises:
        CoderError: flags that do not go together, a folder that cannot be made, matplotlib or scikit-learn missing: now, and
            not after everything has been encoded.
    """
    folder = getattr(arguments, "pictures", None)
    if not folder:
        given = {"--pictures-count": "pictures_count", "--pictures-concepts": "pictures_concepts"}
        if flags := [flag for flag, name in given.items() if getattr(arguments, name, None) is not None]:
            raise CoderError(f"{' and '.join(flags)}: of the pictures that --pictures FOLDER asks for")
        return None
    if arguments.beta or arguments.context_weight:
        raise CoderError("--pictures are of a model as it was trained: leave out --beta and --context-weight")
    count = 8 if arguments.pictures_count is None else arguments.pictures_count
    if count < 1:
        raise CoderError(f"--pictures-count is {count}; it must be 1 or more")
    listed = (arguments.pictures_concepts or "").lower().replace(",", " ").split()
    if arguments.pictures_concepts is not None and len(set(listed)) < 2:
        raise CoderError(f"--pictures-concepts {arguments.pictures_concepts!r}: name two words or more, such as dog,water,snow")
    check_figures("--pictures", folder, "needs matplotlib and scikit-learn", "matplotlib", "sklearn")
    return Asked(Path(folder), count, tuple(dict.fromkeys(listed)))


def collect(wanted: Asked, encoder: Any, source: Any, pictures: Any | None = None) -> Collected:
    """Alignments of the first caption of each of the first images that can be read, and the points of the concepts: where
    none are named, of the data's most frequent words.

    Args:
        pictures: :func:`~coder_plugin.data.from_config.make_pictures`.
    """
    from coder_plugin.data.from_config import captions_of

    aligner = Aligner(encoder)
    found: list[Alignment] = []
    with aligner.evaluating():
        beside = iter(()) if pictures is None else pictures.items()
        for _, item in source.items():
            under = next(beside, (0, None))[1]
            seen = aligner.see(item, load_picture(under if under is not None and under.key == item.key else None))
            if seen is None:
                continue
            found.append(aligner.align(item.key, item.captions[0], seen))
            if len(found) == wanted.images:
                break
    if found and found[0].boxes is None:
        log.warning("%s: regions without boxes: alignment.json has the numbers, and no figure can be drawn", source.name)
    try:
        points = collect_points(encoder, source, wanted.concepts or frequent_words(captions_of(source)))
    except TooFew as error:
        log.warning("no t-SNE: %s", error)
        return Collected(found, None)
    return Collected(found, points)


def write(wanted: Asked, models: Mapping[str, Collected]) -> dict[str, dict[str, Any]]:
    """Write the figures and numbers: a folder for each model where there are several, ``tsne.png`` and ``tsne.json``.

    Returns:
        By model what :func:`~coder_plugin.report.tsne.measure_points` gives, of those with points.
    """
    for number, (name, each) in enumerate(models.items(), 1):
        own = re.sub(r"[^\w.-]+", "-", name).strip("-.")[-60:]
        write_alignments(each.alignments, wanted.folder / f"{number}-{own}" if len(models) > 1 else wanted.folder)
    rows = {name: each.points for name, each in models.items() if each.points is not None}
    if not rows:
        return {}
    measured = plot_tsne(rows, wanted.folder / "tsne.png")
    (wanted.folder / "tsne.json").write_text(json.dumps(measured, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return measured


def format_measured(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each model: the two numbers beside t-SNE's points."""
    return [
        f"{name}: mean cosine of a concept's words with its regions less that with other concepts' {each['gap']:.3f}, "
        f"silhouette {each['silhouette']:.3f} (-1 to 1)"
        for name, each in measured.items()
    ]
