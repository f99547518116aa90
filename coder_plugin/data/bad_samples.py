"""Samples that cannot be used are left out, counted by kind and named; a rate of them ends the reading."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from coder_plugin.errors import CoderError

#: Kinds of bad samples, and what each means.
KINDS = {
    "missing": "the picture's file does not exist",
    "picture": "the picture is damaged, of a format that is not read, or has more pixels than --max-image-pixels",
    "caption": "captions, hard negatives or JSON that cannot be used",
    "regions": "region features that are missing, damaged, or not as the model reads them",
    "file": "a file that cannot be opened, is too large, or occurs twice in the sample; or the sample has no image",
}
#: Samples that must be read before their rate is judged, except where the data end earlier.
ENOUGH = 1000
DEFAULT_RATE = 0.01
#: What to do where every picture is missing.
WRONG_PATHS = (
    "fix the paths, or name the folder that they are relative to (--image-root); "
    "a model that reads region features needs their files instead (--regions)"
)
_SHOWN = 10  # of each kind, by name
_LONGEST = 200  # characters of a key or a reason in a message
log = logging.getLogger(__name__)


class BadSample(ValueError):
    """A sample that cannot be used, found while it is read. It is left out and counted.

    Args:
        kind: one of :data:`KINDS`.
        reason: what is wrong with it.

    Example:
        >>> BadSample("caption", "it is empty").kind
        'caption'
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)  # both, so that it can be pickled
        assert kind in KINDS
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return self.reason


#: A sample that was left out: its kind, its key, and the reason.
Bad = tuple[str, str, str]


def describe(key: str, error: BaseException) -> Bad:
    """The entry of a sample whose reading raised ``error``.

    Example:
        >>> describe("a.jpg", FileNotFoundError(2, "No such file or directory", "pictures/a.jpg"))
        ('missing', 'a.jpg', "not found: 'pictures/a.jpg'")
    """
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) and error.filename is not None:
        return "missing", key, shorten(f"not found: {str(error.filename)!r}")
    kind = error.kind if isinstance(error, BadSample) else "file" if isinstance(error, OSError) else "picture"
    return kind, key, shorten(" ".join(str(error).split()) or type(error).__name__)


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def allowed(rate: float, read: int) -> float:
    """How many of ``read`` samples may be bad: ``rate`` of them, and of data with fewer than :data:`ENOUGH` as of so many."""
    return rate * max(read, ENOUGH)


def nothing_to_read(name: str, failed: Sequence[Bad]) -> CoderError:
    """The error for data of which no image can be read; ``failed`` are those that were tried."""
    if not failed:
        return CoderError(f"{name}: no images")
    _, key, reason = failed[0]
    hint = f": {WRONG_PATHS}" if all(kind == "missing" for kind, _, _ in failed) else ""
    return CoderError(f"{name}: none of the first {len(failed)} images can be read; the first: {key}: {reason}{hint}")


def check_rate(rate: float) -> float:
    if not 0 <= rate <= 1:
        raise CoderError(f"max_bad_samples is {rate}; it is a fraction of the samples, from 0 to 1, such as {DEFAULT_RATE}")
    return rate


class BadSamples:
    """Counts the bad samples of one pass over data, by kind, and ends it where they are too many.

    The first ten of each kind are logged by name. The rate is judged while reading, with four standard deviations to spare
    (the bad samples read first may by chance be more than their share), and exactly when the pass ends. Data with fewer than
    :data:`ENOUGH` samples are judged as if they had so many.

    Args:
        name: of the data.
        rate: allowed fraction of the samples read, from 0 to 1.

    Raises:
        CoderError: a rate out of range; too many bad samples.

    Example:
        >>> bad = BadSamples("data", 0.01)
        >>> bad.add(64, [("caption", "a.jpg", "it is empty")])
        >>> len(bad), str(bad)
        (1, '1 of 64 samples skipped (caption 1)')
    """

    def __init__(self, name: str, rate: float = DEFAULT_RATE) -> None:
        self.name, self.rate = name, check_rate(rate)
        self.read = 0
        self.kinds: Counter[str] = Counter()
        self._named: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return self.kinds.total()

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.kinds.items()))
        return f"{len(self):,} of {self.read:,} samples skipped" + (f" ({kinds})" if kinds else "")

    @property
    def missing_advice(self) -> str:
        """What to do if no picture's file exists; empty if one does."""
        return WRONG_PATHS if 0 < self.read == self.kinds["missing"] else ""

    def add(self, read: int, bad: Iterable[Bad] = ()) -> None:
        """Count ``read`` samples, of which ``bad`` were left out."""
        self.read += read
        last = ""
        for kind, key, reason in bad:
            self.kinds[kind] += 1
            self._log(kind, key, reason)
            last = f"; the last one: {shorten(key)!r} ({kind}): {reason}"
        limit = allowed(self.rate, self.read)
        if last and len(self) > limit + 4 * math.sqrt(limit):
            self._stop(last)

    def finish(self) -> None:
        """Judge the rate at the end of the pass."""
        if len(self) > allowed(self.rate, self.read) + 1e-9:
            self._stop()

    def restart(self) -> None:
        """Begin another pass over the same data. Samples that were logged by name are not logged again."""
        self.read = 0
        self.kinds.clear()

    def state(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {"read": self.read, "kinds": dict(self.kinds)}

    def restore(self, state: dict[str, Any]) -> None:
        """Add what another pass, which was interrupted, had counted."""
        self.read += state["read"]
        self.kinds.update(state["kinds"])

    def _log(self, kind: str, key: str, reason: str) -> None:
        named = self._named.setdefault(kind, set())
        if key in named or len(named) == _SHOWN:
            return
        named.add(key)
        more = "; further ones of this kind are only counted" if len(named) == _SHOWN else ""
        log.warning("%s: skipped sample %r (%s): %s%s", self.name, shorten(key), kind, reason, more)

    def _stop(self, last: str = "") -> None:
        few = f" (of fewer than {ENOUGH:,} samples: more than {self.rate * ENOUGH:g})" if self.read < ENOUGH else ""
        advice = self.missing_advice or "fix or leave them out, or allow a greater fraction (--max-bad-samples)"
        raise CoderError(f"{self.name}: {self}, more than max_bad_samples={self.rate:g} of them{few}{last}: {advice}")


def total(parts: Iterable[BadSamples]) -> BadSamples:
    """The counts of several ranks' shares of the same data as one."""
    first, *others = parts
    whole = BadSamples(first.name, first.rate)
    for part in (first, *others):
        whole.restore(part.state())
    return whole
