"""The best and the worst queries of a model in both directions, with what they find.

Shapes: N images, T captions (texts), D dimensions, V features of an image, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from coder_plugin.data.item import Item
from coder_plugin.evaluation.metrics import best_candidates
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.html import data_uri
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.page import Block, heading

Way = Literal["i2t", "t2i"]
#: With their titles.
WAYS: dict[Way, str] = {"t2i": "Text to image", "i2t": "Image to text"}
#: Pairs that are scored at once.
_PAIRS = 1024
_SHOWN = 5


@dataclass(frozen=True)
class Hit:
    """One candidate of a query: its index in the data, its score, and whether it is right.

    ``behind``: a fusion score re-ranked a shortlist, and this candidate comes after it; its score is the vectors' product.
    """

    index: int
    score: float
    right: bool
    behind: bool = False


class Example(NamedTuple):
    """A query (its index among the images or the captions), its 0-based rank as recall counts, its first candidates, and the
    best right candidate."""

    query: int
    rank: int
    hits: list[Hit]
    truth: Hit


def query_blocks(
    encoded: Encoded, source: Any, pictures: Any, result: Mapping[str, Any], *, count: int, depth: int | None
) -> list[Block]:
    """Blocks of the best and the worst queries of both directions.

    Args:
        source: the data. pictures: those of images that are read as regions, or None.
        result: of recall, with ``t2i_ranks`` and ``i2t_ranks``.
        count: queries of each kind. depth: as in :func:`best_and_worst`.
    """
    chosen = {way: best_and_worst(encoded, way, result[f"{way}_ranks"], count=count, depth=depth) for way in WAYS}
    titled = {
        f"{WAYS[way]}, {which}": [(way, each, "") for each in side]
        for way, sides in chosen.items()
        for side, which in zip(sides, ("best", "worst"), strict=True)
    }
    return example_blocks(encoded, source, pictures, titled)


def example_blocks(
    encoded: Encoded, source: Any, pictures: Any, titled: Mapping[str, Sequence[tuple[Way, Example, str]]]
) -> list[Block]:
    """Queries with what they find, under titles; a title without queries is left out.

    Args:
        encoded: whose captions and images the examples name; their scores may be another model's of the same data.
        source, pictures: as in :func:`query_blocks`.
        titled: by title the examples with their direction, and a text after their rank.
    """
    rows: set[int] = set()
    for way, each, _ in (one for side in titled.values() for one in side):
        rows.update([each.query] if way == "i2t" else [hit.index for hit in (*each.hits, each.truth)])
    items = items_of(source, encoded, rows)
    shown = shown_images(items, pictures)

    def image(index: int) -> dict[str, Any]:
        return shown.get(index) or {"uri": None, "key": f"image {index}", "alt": ""}

    def candidate(way: Way, hit: Hit, lead: str = "") -> dict[str, Any]:
        content = {"caption": encoded.captions[hit.index]} if way == "i2t" else {"image": image(hit.index)}
        lead += "product " if hit.behind else ""
        return {"image": None, "score": hit.score, "right": hit.right, "lead": lead, **content}

    def block(way: Way, each: Example, after: str) -> Block:
        subject = {"caption": encoded.captions[each.query]} if way == "t2i" else {"image": image(each.query)}
        hits = [candidate(way, hit) for hit in each.hits]
        if not any(hit.right for hit in each.hits):
            hits.append(candidate(way, each.truth, f"rank {each.rank + 1:,}: "))
        return {"query": {"image": None, "caption": "", "rank": f"{each.rank + 1:,}{after}", "hits": hits, **subject}}

    return [made for title, side in titled.items() if side for made in (heading(title), *(block(*each) for each in side))]


def of_different_images(
    queries: Iterable[int], image_of: Callable[[int], int], count: int, *, without: Collection[int] = ()
) -> list[int]:
    """The first ``count`` queries, of each image the first one alone; none of the images ``without``."""
    chosen: dict[int, int] = {}
    for query in queries:
        if len(chosen) == count:
            break
        if image_of(query) not in without:
            chosen.setdefault(image_of(query), query)
    return list(chosen.values())


def best_and_worst(
    encoded: Encoded, way: Way, ranks: Tensor, *, count: int, depth: int | None = None
) -> tuple[list[Example], list[Example]]:
    """The queries with the lowest and those with the highest ranks, ties in the data's order.

    Of several captions of one image only the first counts, and no image is in both lists.

    Args:
        ranks: of all queries, 0-based, as recall returns them.
        count: most queries in each list.
        depth: candidates that the fusion score re-ranks, for a model that has one; None: all.
    """
    find = finder(encoded, way, depth)
    image_of = (range(len(ranks)) if way == "i2t" else encoded.image_of_text.tolist()).__getitem__
    best = of_different_images(ranks.argsort(stable=True).tolist(), image_of, count)
    worst = of_different_images((-ranks).argsort(stable=True).tolist(), image_of, count, without={*map(image_of, best)})
    return list(map(find, best)), list(map(find, worst))


def finder(encoded: Encoded, way: Way, depth: int | None) -> Callable[[int], Example]:
    """A function from a query to its candidates as recall orders them: at equal scores, wrong before right."""
    items, owner = encoded.items, encoded.image_of_text
    vectors = Scores(encoded.images, encoded.texts)
    fusion = None if items is None else items.head.scorer(items.images, items.texts)
    everything = torch.arange(len(owner) if way == "i2t" else len(encoded.image_ids))

    @torch.no_grad()
    def score(scorer: Any, query: int, candidates: Tensor) -> Tensor:
        sides = (torch.full_like(candidates, query), candidates)[:: 1 if way == "i2t" else -1]
        parts = zip(*(side[:, None].split(_PAIRS) for side in sides), strict=True)
        return torch.cat([scorer(*part)[:, 0, 0].float().cpu() for part in parts])

    def ordered(scores: Tensor, right: Tensor) -> Tensor:
        column = right.nonzero().squeeze(1)
        return best_candidates(scores[None].clone(), torch.zeros_like(column), column, len(scores))[0][0]

    def find(query: int) -> Example:
        right = owner == query if way == "i2t" else everything == owner[query]
        scores, reranked = score(vectors, query, everything), len(everything)
        order = ordered(scores, right)
        if fusion is not None:
            shortlist = order[:depth].sort().values
            reranked = len(shortlist)
            fused = score(fusion, query, shortlist)
            order = torch.cat([shortlist[ordered(fused, right[shortlist])], order[reranked:]])
            scores = scores.index_put((shortlist,), fused)
        values = zip(order.tolist(), scores[order].tolist(), right[order].tolist(), strict=True)
        hits = [Hit(*each, behind=number >= reranked) for number, each in enumerate(values)]
        rank = next(number for number, hit in enumerate(hits) if hit.right)
        return Example(query, rank, hits[:_SHOWN], hits[rank])

    return find


# -- the data's items ----------------------------------------------------------------------------------------------------


def items_of(source: Any, encoded: Encoded, rows: Collection[int]) -> dict[int, Item]:
    """The items of some rows of ``encoded.images``, in order. The data are read no further than the last of them."""
    row_at = {int(encoded.index[row]): row for row in rows}
    numbered = ((row_at[position], item) for position, item in source.items() if position in row_at)
    return dict(islice(numbered, len(row_at)))


def shown_images(items: Mapping[int, Item], pictures: Any) -> dict[int, dict[str, Any]]:
    """For each item the ``uri`` of its picture (None: there is none), its ``key``, and its first caption as ``alt``."""
    under = items_by_key(pictures, {item.key for item in items.values()})
    shown = {}
    for index, item in items.items():
        picture = load_picture(under.get(item.key, item))
        uri = None if picture is None else data_uri(picture)
        shown[index] = {"uri": uri, "key": item.key, "alt": item.captions[0]}
    return shown


def items_by_key(source: Any, keys: Collection[str]) -> dict[str, Item]:
    """The items of a second source of the same images, by key; empty if there is no source."""
    items: dict[str, Item] = {}
    for _, item in source.items() if source is not None else ():
        if item.key in keys:
            items.setdefault(item.key, item)
            if len(items) == len(keys):
                break
    return items


def load_picture(item: Item | None) -> Image.Image | None:
    """An item's picture; None if it cannot be read or is read as regions."""
    try:
        loaded = None if item is None else item.load()
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, Image.Image) else None
