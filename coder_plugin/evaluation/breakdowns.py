"""Recall by kinds of captions: by what they mention, by their length, by their place among their image's captions.

Shape letters: N images, T captions (texts), R images of one tile.

Text to image, the queries are the captions of a kind. Image to text, the queries are the images that have such captions, of
which the best-ranked counts; an image's other captions are neither right nor wrong candidates. Kinds overlap, because a caption
can mention several things. Intervals are Wilson's, 95 %; they assume independent queries, which captions of one image are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.analyses import length_bins
from coder_plugin.evaluation.metrics import align, captions_of, row_ranks
from coder_plugin.evaluation.multi_positive import Rows

BREAKDOWNS = ("words", "length", "place")
KS = (1, 5, 10)
_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile


def _forms(verbs: str) -> str:
    """Inflected forms of each verb by the rules of English; forms that do not exist do no harm."""
    ends = "{0} {0}s {0}es {1}ing {1}ed {2}ing {2}ed {3}ies {3}ied"
    stems = [(verb, verb.removesuffix("e"), verb + verb[-1], verb.removesuffix("y")) for verb in verbs.split()]
    return " ".join(ends.format(*each) for each in stems)


#: What captions mention, and the words that show it: our choice, for captions of photographs and of the built-in scenes. A
#: whole word counts wherever it stands, whatever it means there.
WORDS: Mapping[str, str] = {
    "colour": "black white red green blue yellow orange purple violet pink brown grey gray gold golden silver beige tan "
    "maroon turquoise teal blond blonde brunette dark colored coloured colorful colourful multicolored multicoloured "
    "reddish",
    "number": "one two three four five six seven eight nine ten eleven twelve several many few couple pair both dozen "
    "multiple numerous single alone group crowd only",
    "relation": "above below under over beneath underneath behind between beside besides near nearby next front back left "
    "right top bottom middle corner center centre inside outside across along against around through toward towards onto "
    "into off atop opposite",
    "size": "small little tiny large big huge giant tall short long wide narrow thick thin deep shallow high low enormous "
    "miniature massive oversized",
    "people": "man men woman women boy boys girl girls child children kid kids baby babies toddler toddlers infant person "
    "people guy guys lady ladies gentleman gentlemen adult adults teenager teenagers teen teens family families player "
    "players crowd couple friend friends someone somebody biker bikers cyclist cyclists skier skiers snowboarder "
    "snowboarders skateboarder skateboarders surfer surfers climber climbers hiker hikers runner runners swimmer swimmers "
    "rider riders dancer dancers worker workers soldier soldiers officer officers",
    "action": _forms(
        "run walk jump leap sit stand play ride hold carry climb swim throw catch chase look watch wear smile laugh cry eat "
        "drink sleep lie fly fall drive push pull kick hit dance sing talk speak read write cook cut wave point lean kneel "
        "crouch slide skate ski surf dive splash dig bark bite fight wrestle race hike march pose wait pass reach shake roll "
        "bounce balance perform practice compete work paint hug kiss feed fetch chew sniff lick swing spin skip stretch grab "
        "hang paddle sail travel perch graze gather"
    )
    + " ran sat stood held swam swum threw thrown caught worn ate eaten drank slept laid lying flew flown fell fallen drove "
    "driven sang sung spoke spoken wrote written cut dug bitten fought shook shaken fed hung swung spun rode ridden knelt "
    "leapt snowboarding skateboarding resting crossing rowing",
}
_SETS = {kind: frozenset(words.split()) for kind, words in WORDS.items()}
#: The kind of captions that mention none of them.
OTHER = "none of these"


def kinds_of(caption: str) -> frozenset[str]:
    """The keys of :data:`WORDS` that a caption mentions.

    Example:
        >>> sorted(kinds_of("Two men in red jackets are running"))
        ['action', 'colour', 'number', 'people']
    """
    words = set(re.findall(r"[a-z]+", caption.lower()))
    return frozenset(kind for kind, listed in _SETS.items() if not listed.isdisjoint(words))


def groups_of(
    by: str, captions: Sequence[str], image_of_text: Tensor, *, caption_names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Kinds of captions: label to bool [T]. Kinds without a caption are included.

    Args:
        by: ``words``, what a caption mentions; ``length``, its number of words; or ``place``, which of its image's captions
            it is.
        captions: T texts.
        image_of_text: [T] int64; an image's captions in their order.
        caption_names: for ``place``, labels of an image's first, second … caption; None: "caption 1" and so on.

    Raises:
        CoderError: an unknown ``by``; fewer labels than an image has captions.
    """
    if by == "words":
        kinds = [kinds_of(caption) for caption in captions]
        groups = {kind: torch.tensor([kind in each for each in kinds]) for kind in WORDS}
        return {**groups, OTHER: torch.tensor([not each for each in kinds])}
    if by == "length":
        labels, bin_of = length_bins(captions)
        return {f"{label} words": bin_of == number for number, label in enumerate(labels)}
    if by == "place":
        count: dict[int, int] = {}
        nth = []
        for image in image_of_text.tolist():
            nth.append(count.get(image, 0))
            count[image] = nth[-1] + 1
        most = max(nth) + 1
        labels = [f"caption {number + 1}" for number in range(most)] if caption_names is None else list(caption_names)
        if len(labels) < most:
            raise CoderError(f"images have up to {most} captions, but only {len(labels)} caption names are given")
        return {label: torch.tensor(nth) == number for number, label in enumerate(labels)}
    raise CoderError(f"by must be one of {', '.join(BREAKDOWNS)}, got {by!r}")


@torch.no_grad()
def breakdown(
    groups: Mapping[str, Tensor], t2i_ranks: Tensor, image_of_text: Tensor, rows: Rows | None = None
) -> dict[str, dict[str, Any]]:
    """Recall of each kind of captions, for ``t2i`` and with ``rows`` for ``i2t``.

    Args:
        groups: of :func:`groups_of`, bool [T] each.
        t2i_ranks: [T] int64, the 0-based rank of each caption's image.
        image_of_text: [T] int64.
        rows: scores of images against all captions in tiles, which are overwritten; None: text to image only.

    Returns:
        Label to direction to ``count``, ``r1``, ``r5``, ``r10`` in percent and ``r1_interval`` and its like, [low, high];
        None where the count is 0.
    """
    out: dict[str, dict[str, Any]] = {label: {"t2i": _recalls(t2i_ranks[mask])} for label, mask in groups.items()}
    if rows is None:
        return out
    ranks: dict[str, list[Tensor]] = {label: [] for label in groups}
    for start, tile in rows:
        row, column = captions_of(start, len(tile), image_of_text)
        right = tile[row, column].clone()
        for label, mask in groups.items():
            in_group = mask[column]
            tile[row, column] = right.masked_fill(~in_group, torch.nan)  # still right, and so no competitor, but never ranked
            ranks[label].append(row_ranks(tile, row, column)[row[in_group].unique()])
    for label, parts in ranks.items():
        out[label]["i2t"] = _recalls(torch.cat(parts))
    return out


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson, 1927), in [0, 1].

    Example:
        >>> low, high = wilson(50, 100)
        >>> round(low, 3), round(high, 3)
        (0.404, 0.596)
    """
    share, z = hits / count, _Z**2 / count
    middle = (share + z / 2) / (1 + z)
    reach = sqrt(z * share * (1 - share) + z**2 / 4) / (1 + z)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _recalls(ranks: Tensor) -> dict[str, Any]:
    count = len(ranks)
    out: dict[str, Any] = {"count": count}
    for k in KS:
        hits = int((ranks < k).sum())
        out[f"r{k}"] = 100 * hits / count if count else None
        out[f"r{k}_interval"] = [100 * bound for bound in wilson(hits, count)] if count else None
    return out


def format_breakdowns(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A plain text table for each breakdown: percent, R@1 with its interval; kinds without a caption are left out.

    Args:
        rows: name of the model to ``by`` to what :func:`breakdown` returned.
    """
    tables = []
    for by in dict.fromkeys(by for row in rows.values() for by in row):
        lines = [["name", f"by {by}"]]
        for title, queries in (("t2i", "captions"), ("i2t", "images")):
            lines[0] += [queries, f"{title} R@1", "95 %", f"{title} R@5", f"{title} R@10"]
        for name, row in rows.items():
            shown = {label: figures for label, figures in row.get(by, {}).items() if figures["t2i"]["count"]}
            for number, (label, figures) in enumerate(shown.items()):
                lines.append(["" if number else name, label, *_cells(figures["t2i"]), *_cells(figures.get("i2t"))])
        tables.append(align(lines))
    return "\n\n".join(tables)


def _cells(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return ["-"] * 5
    interval = "{:.1f}-{:.1f}".format(*figures["r1_interval"])
    return [str(figures["count"]), f"{figures['r1']:.1f}", interval, f"{figures['r5']:.1f}", f"{figures['r10']:.1f}"]
