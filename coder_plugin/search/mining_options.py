"""Which captions count as hard negatives. Nothing heavy is imported, so that a command can check its arguments at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from coder_plugin.errors import CoderError
from coder_plugin.terminal import plural

#: The columns of a table of negatives.
COLUMNS = ("key", "caption", "score", "negative", "negative_key", "negative_score", "rank", "similarity")
MARGIN_FROM = ("max", "min")
SAMPLING = ("top", "random")


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

    num_negatives: int = 5
    range_min: int = 0
    range_max: int = 1000
    absolute_margin: float | None = None
    relative_margin: float | None = None
    margin_from: str = "max"
    max_similarity: float = 0.9
    sampling_strategy: str = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_negatives", 1), ("range_min", 0), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise CoderError(f"{_flag(name)} must be at least {least}, got {value}")
        if self.range_max - self.range_min < self.num_negatives:
            raise CoderError(
                f"--range-max {self.range_max} leaves {plural(max(0, self.range_max - self.range_min), 'candidate')} after "
                f"--range-min {self.range_min}, fewer than --num-negatives {self.num_negatives}"
            )
        if self.absolute_margin is None and self.relative_margin is None:
            object.__setattr__(self, "relative_margin", 0.05)
        for name in ("absolute_margin", "relative_margin"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise CoderError(f"{_flag(name)} must be a finite number, got {value}")
        if not -1 < self.max_similarity <= 1:
            raise CoderError(f"--max-similarity is a cosine, above -1 and at most 1, got {self.max_similarity:g}")
        for name, allowed in (("margin_from", MARGIN_FROM), ("sampling_strategy", SAMPLING)):
            if (value := getattr(self, name)) not in allowed:
                raise CoderError(f"{_flag(name)} must be {' or '.join(allowed)}, got {value!r}")


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
            raise CoderError(f"--output {path} exists and is no table of negatives: choose another name, or remove it")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
