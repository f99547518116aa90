"""Figures of ``coder-plugin eval --pictures``: collected while each model is in memory, written at the end."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.data.from_config import captions_of
from coder_plugin.errors import CoderError
from coder_plugin.report.alignment import Aligner, Alignment
from coder_plugin.report.examples import load_picture
from coder_plugin.report.figures import check_figures, write_alignments
from coder_plugin.report.tsne import Points, TooFew, collect_points, frequent_words, plot_tsne

log = logging.getLogger(__name__)


class FigureOptions(NamedTuple):
    """What to draw: figures of the first ``images`` images, and t-SNE of ``concepts`` (empty: the most frequent words)."""

    folder: Path
    images: int
    concepts: tuple[str, ...]


class FigureData(NamedTuple):
    """What one model's figures show. ``points`` is None if too few concepts occur."""

    alignments: list[Alignment]
    points: Points | None


def figure_options(
    folder: str | None, *, images: int | None = None, concepts: str | None = None, reweighted: bool = False
) -> FigureOptions | None:
    """Check the flags before anything is encoded; None if no figures are asked for.

    Args:
        folder: ``--pictures``. images: ``--pictures-count``. concepts: ``--pictures-concepts``.
        reweighted: whether ``--beta`` or ``--context-weight`` change the score.

    Raises:
        CoderError: flags that contradict each other, a folder that cannot be made, or no matplotlib or scikit-learn.
    """
    if not folder:
        flags = {"--pictures-count": images, "--pictures-concepts": concepts}
        if names := [flag for flag, value in flags.items() if value is not None]:
            raise CoderError(f"{' and '.join(names)} need --pictures FOLDER")
        return None
    if reweighted:
        raise CoderError("--pictures shows a model as it was trained: leave out --beta and --context-weight")
    words = (concepts or "").lower().replace(",", " ").split()
    if concepts is not None and len(set(words)) < 2:
        raise CoderError(f"--pictures-concepts {concepts!r}: name two words or more, such as dog,water,snow")
    check_figures("--pictures", folder, "needs matplotlib and scikit-learn", "matplotlib", "sklearn")
    return FigureOptions(Path(folder), images or 8, tuple(dict.fromkeys(words)))


def collect(options: FigureOptions, encoder: Any, source: Any, pictures: Any | None = None) -> FigureData:
    """Alignments of the first images that can be read, each with its first caption, and the points of the concepts.

    Args:
        pictures: :func:`coder_plugin.data.from_config.pictures_under_regions`.
    """
    aligner = Aligner(encoder)
    alignments: list[Alignment] = []
    with aligner.evaluating():
        under = chain([] if pictures is None else (item for _, item in pictures.items()), repeat(None))
        for (_, item), other in zip(source.items(), under, strict=False):
            picture = load_picture(other) if other is not None and other.key == item.key else None
            image = aligner.describe_image(item, picture)
            if image is None:
                continue
            alignments.append(aligner.align(item.key, item.captions[0], image))
            if len(alignments) == options.images:
                break
    if not alignments:
        raise CoderError(f"{source.name}: not one image can be used for figures (encoding the data says why)")
    if alignments[0].boxes is None:
        log.warning("%s: regions without boxes cannot be drawn; alignment.json has the numbers", source.name)
    try:
        points = collect_points(encoder, source, options.concepts or frequent_words(captions_of(source)))
    except TooFew as error:
        log.warning("no t-SNE: %s", error)
        return FigureData(alignments, None)
    return FigureData(alignments, points)


def write(options: FigureOptions, models: Mapping[str, FigureData]) -> dict[str, dict[str, Any]]:
    """Write figures and numbers: a folder per model if there are several, ``tsne.png`` and ``tsne.json``.

    Returns:
        Model name -> result of :func:`~coder_plugin.report.tsne.measure_points`, for models with points.
    """
    for number, (name, data) in enumerate(models.items(), 1):
        subfolder = f"{number}-" + re.sub(r"[^\w.-]+", "-", name).strip("-.")[-60:]
        write_alignments(data.alignments, options.folder / subfolder if len(models) > 1 else options.folder)
    points = {name: data.points for name, data in models.items() if data.points is not None}
    if not points:
        return {}
    measured = plot_tsne(points, options.folder / "tsne.png")
    (options.folder / "tsne.json").write_text(
        json.dumps(measured, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return measured


def format_measured(measured: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """One line per model: the two numbers that go with t-SNE."""
    return [
        f"{name}: mean cosine of a concept's words with its regions less that with other concepts' {each['gap']:.3f}, "
        f"silhouette {each['silhouette']:.3f} (-1 to 1)"
        for name, each in measured.items()
    ]
