"""Which captions count as hard negatives. Nothing heavy is imported, so that a command can check its arguments at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from coder_plugin.config import option, options_of
from coder_plugin.errors import CoderError
from coder_plugin.terminal import plural

#: The columns of a table of negatives.
COLUMNS = ("key", "caption", "score", "negative", "negative_key", "negative_score", "rank", "similarity")
#: Their title among the flags of a command.
_NEGATIVES = "negatives"


@dataclass(frozen=True, kw_only=True)
class MiningOptions:
    """Options of :func:`~coder_plugin.search.mine.mine_negatives`, named as in sentence-transformers' ``mine_hard_negatives``.

    Args:
        num_negatives: of an image, at most; 1 or more.
        range_min: leave out so many of the captions of other images with the highest scores.
        range_max: look at so many of them, those of ``range_min`` included.
        absolute_margin: a negative's score is at least so far below the positive's.
        relative_margin: a negative's score is below the positive's by at least this fraction of the positive's absolute value.
            None: 0.05, or no such margin if ``absolute_margin`` is set. A margin below 0 allows scores above the positive's.
        margin_from: of several captions of an image, the one that counts as the positive: that of the highest score ("max") or,
            as in sentence-transformers, of the lowest ("min"), which leaves out more.
        max_similarity: a negative's cosine similarity to each caption of the image is below this number, in (-1, 1], by the
            model's text vectors.
        sampling_strategy: of the captions that pass, those of the highest scores ("top"), or drawn ones ("random").
        seed: of the drawing, 0 or more; it draws for each image by its key.

    Raises:
        CoderError: a value that is not allowed.

    Example:
        >>> MiningOptions(absolute_margin=0.1).relative_margin is None, MiningOptions().relative_margin
        (True, 0.05)
    """

    num_negatives: int = option(5, "the most negatives for one image", at_least=1, group=_NEGATIVES)
    range_min: int = option(
        0, "skip the N captions of other images with the highest scores", at_least=0, group=_NEGATIVES
    )
    range_max: int = option(1000, "look no further than the N captions with the highest scores", group=_NEGATIVES)
    relative_margin: float | None = option(
        None, "a negative must score lower than the positive by this fraction of the positive's score [0.05; none with "
        "--absolute-margin]; a number below 0 lets it score higher", group=_NEGATIVES
    )
    absolute_margin: float | None = option(None, "a negative must score lower than the positive by X", group=_NEGATIVES)
    margin_from: str = option(
        "max", "the positive is the image's caption with the highest score (max) or with the lowest (min)",
        choices=("max", "min"), group=_NEGATIVES
    )
    max_similarity: float = option(
        0.9, "leave out captions whose text vector has a cosine of X or more with one of the image's captions", group=_NEGATIVES
    )
    sampling_strategy: str = option(
        "top", "of the captions that pass, take the highest scores (top), or draw (random)", choices=("top", "random"),
        group=_NEGATIVES
    )
    seed: int = option(0, "seed of random sampling [0]", at_least=0, group=_NEGATIVES)

    def __post_init__(self) -> None:
        for name, each in options_of(MiningOptions).items():
            if (value := getattr(self, name)) is not None:
                each.check(value, "argument")
        if self.range_max - self.range_min < self.num_negatives:
            raise CoderError(
                f"--range-max {self.range_max} leaves {plural(max(0, self.range_max - self.range_min), 'candidate')} after "
                f"--range-min {self.range_min}, fewer than --num-negatives {self.num_negatives}"
            )
        if self.absolute_margin is None and self.relative_margin is None:
            object.__setattr__(self, "relative_margin", 0.05)
        for name in ("absolute_margin", "relative_margin"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise CoderError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
        if not -1 < self.max_similarity <= 1:
            raise CoderError(f"--max-similarity is a cosine, above -1 and at most 1, got {self.max_similarity:g}")


def check_output(path: str | Path) -> None:
    """Check that a table may be written there: it replaces nothing but a table of negatives.

    Raises:
        CoderError: a folder, or a file that is no table of negatives.
    """
    path = Path(path)
    if path.is_dir():
        raise CoderError(f"--output {path} is a folder: give the table to write, such as {path / 'negatives.tsv'}")
    if path.exists():
        try:
            with open(path, encoding="utf-8") as file:
                first = file.readline(1000)
        except (OSError, ValueError):
            first = ""
        if first.rstrip("\n") != "\t".join(COLUMNS):
            raise CoderError(f"--output {path} exists and is not a table of negatives: choose another name, or remove it")
