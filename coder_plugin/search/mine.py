"""Hard negatives from an index: for each image, captions of other images that the model scores highly; see
docs/hard_negatives.md.

FAISS finds the candidates, in blocks of images. Their scores are then computed again in double precision from the vectors, so
that they compare with those of the image's own captions whatever kind of index it is.

Shape letters: N images, T captions, D dimensions, V embeddings of an image, k candidates, c captions of an image.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.progress import Progress
from coder_plugin.search.index import Index
from coder_plugin.search.mining_options import COLUMNS, MiningOptions
from coder_plugin.search.parquet import KINDS
from coder_plugin.search.records import Caption, Image

#: Images of a block.
BLOCK = 256
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class Summary:
    """What was found.

    Args:
        images: of the index.
        without_captions: images that have none, and so no negatives.
        by_count: images by their number of negatives; those without captions are not among them.
        candidates: captions that were looked at, of all images together.
        dropped: of them, by the filter that left them out (:data:`FILTERS`).
        quantiles: by name, the values at :data:`QUANTILES` of the scores of images with their positives ("positive"), of the
            negatives' scores, of the differences of both, of the negatives' similarity, and of the similarity of two captions
            of an image ("same image"); nan where there is none.
    """

    images: int = 0
    without_captions: int = 0
    by_count: Counter[int] = field(default_factory=Counter)
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quantiles: dict[str, list[float]] = field(default_factory=dict)

    @property
    def negatives(self) -> int:
        """Rows of the table."""
        return sum(count * images for count, images in self.by_count.items())


def mine_negatives(index: Index, path: str | Path, **options: Any) -> Summary:
    """Write a table of hard negatives: for each image of an index, captions of other images that are easily taken for its own.

    A negative has one of the highest scores among the captions of other images, by retrieval vectors (a fusion score is not
    used). It is left out where its score is not a margin below the positive's; where it may be right, because its text is, or
    its text's vector is similar to, that of a caption of the image; and where it repeats another. Images with the same id are
    one image.

    The table is tab-separated, with a header and quotes where needed (Python's ``csv`` with ``delimiter="\\t"``). Each negative
    is one line, in the order of the index and then of the scores; line breaks within captions become spaces:

    - ``key``: the image's key; ``caption``, ``score``: the positive that the margins count from;
    - ``negative``, ``negative_key``, ``negative_score``: the caption that is wrong for it, and the image that it belongs to;
    - ``rank``: among the captions of other images, from 1; ``similarity``: the cosine with the image's most similar caption.

    Args:
        index: of images and their captions, opened.
        path: the table to write, atomically. An existing file is replaced.
        **options: of :class:`~coder_plugin.search.mining_options.MiningOptions`, such as ``num_negatives=3``.

    Returns:
        What was found and what was left out.

    Raises:
        CoderError: an option that is not allowed; an index without vectors of both kinds, or a damaged one.
        TypeError: an unknown option.

    Example:
        >>> import tempfile, coder_plugin
        >>> from coder_plugin.pretrained.export import export_model
        >>> from coder_plugin.search.build import build_index
        >>> from coder_plugin.search.embed import EmbedJob
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = export_model(coder_plugin.create_model("coder-tiny", loss="clip"), folder / "model")
        >>> names = {"model": str(folder / "model"), "data": "scenes", "output": str(folder / "index" / "embeddings")}
        >>> _ = build_index(folder / "index", EmbedJob(**names, options={"workers": 0}))
        >>> index = Index(folder / "index")
        >>> found = mine_negatives(index, folder / "negatives.tsv", num_negatives=2, relative_margin=-1.0)
        >>> found.negatives == len((folder / "negatives.tsv").read_text().splitlines()) - 1
        True
    """
    miner = Miner(index, MiningOptions(**options))
    summary = Summary(images=index.size("images"))
    values: dict[str, list[float]] = {
        name: [] for name in ("positive", "negative", "difference", "similarity", "same image")
    }
    with atomic_write(path, "w") as file, Progress(summary.images, what="images") as progress:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        for rows in chunks(index.note["images"], BLOCK):
            mined = miner.mine(rows)
            for each in mined:
                table.writerows(table_rows(each))
                _count(summary, values, each)
            summary.without_captions += len(rows) - len(mined)
            progress.update(len(rows))
    summary.quantiles = {
        name: np.quantile(each, QUANTILES).tolist() if each else [float("nan")] * len(QUANTILES)
        for name, each in values.items()
    }
    return summary


def table_rows(mined: Mined) -> Iterator[tuple[Any, ...]]:
    """The rows of a table for an image; its columns are ``COLUMNS``."""
    for each in mined.negatives:
        numbers = f"{each.score:.6f}", each.rank, f"{each.similarity:.6f}"
        yield mined.image.key, _line(mined.positive.text), f"{mined.score:.6f}", _line(each.caption.text), each.key, *numbers


def _line(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())


def _count(summary: Summary, values: Mapping[str, list[float]], mined: Mined) -> None:
    summary.by_count[len(mined.negatives)] += 1
    summary.candidates += mined.candidates
    summary.dropped.update(mined.dropped)
    values["positive"].append(mined.score)
    values["negative"] += [each.score for each in mined.negatives]
    values["difference"] += [mined.score - each.score for each in mined.negatives]
    values["similarity"] += [each.similarity for each in mined.negatives]
    if mined.own_similarity is not None:
        values["same image"].append(mined.own_similarity)


#: Results that one search may return: of more, fewer images are searched for at once.
RESULTS = 1 << 21
#: Rows of the records that are read at once.
_CHUNK = 4096
#: Why candidates were left out, in the order of the checks: each counts those that passed the ones before.
FILTERS = ("same text", "margin", "similar caption", "repeated text")


class Negative(NamedTuple):
    """A caption that is wrong for an image.

    ``key`` names the image that it is a caption of; ``rank`` is 1 for the best of all captions of other images; ``similarity``
    is its cosine with the most similar caption of the image that it is a negative of.
    """

    caption: Caption
    key: str
    score: float
    similarity: float
    rank: int


class Mined(NamedTuple):
    """An image with its negatives, the highest score first."""

    image: Image
    positive: Caption  # that the margins count from
    score: float  # of the image with it
    negatives: tuple[Negative, ...]
    candidates: int  # that were looked at
    dropped: Mapping[str, int]  # candidates by the filter that left them out
    own_similarity: float | None  # of the image's first two captions; None if it has one


class Miner:
    """Finds the negatives of some images of an index. An image's result does not depend on the others in the call.

    Args:
        index: of images and their captions.
        options: which captions count as negatives.

    Raises:
        CoderError: an index without vectors of both kinds; a damaged one.
    """

    def __init__(self, index: Index, options: MiningOptions) -> None:
        if missing := [kind for kind in KINDS if kind not in index.vectors]:
            raise CoderError(f"{index.folder} has no vectors of {missing[0]}: make it from captioned images, with --what both")
        self.index, self.options = index, options
        self.images, self.captions = index.vectors["images"], index.vectors["captions"]
        if self.captions.views != 1 or self.images.dimensions != self.captions.dimensions:
            raise CoderError(f"{index.folder} is damaged: the vectors of its images and captions do not match; build it again")
        images, total = index.note["images"], index.note["captions"]
        ids = [each.image_id for rows in chunks(images) for each in index.records.images(rows)]
        group = np.unique(np.array(ids, dtype=np.int64), return_inverse=True)[1].reshape(-1)  # images with one id are one image
        owners = np.empty(total, dtype=np.int64)
        self._texts = np.empty(total, dtype=np.int64)  # equal where normalized texts are
        with Progress(total, what="captions") as progress:
            for rows in chunks(total):
                found = index.records.captions(rows)
                owners[rows.start : rows.stop] = [each.image for each in found]
                self._texts[rows.start : rows.stop] = [stable_hash(normalized(each.text)) for each in found]
                progress.update(len(rows))
        self._group_of_image, self._group_of_caption = group, group[owners]
        self._by_group = np.argsort(self._group_of_caption, kind="stable")
        self._starts = np.searchsorted(self._group_of_caption[self._by_group], np.arange(images + 1))
        #: Results of an image's search, which finds its own captions too.
        self._depth = min(total, options.range_max + int(np.diff(self._starts).max()))

    def mine(self, rows: Sequence[int]) -> list[Mined]:
        """The images of these rows with their negatives, in this order; those without captions are left out."""
        rows = [row for row in rows if len(self._own(row))]
        size = max(1, RESULTS // (self._depth * self.images.views))
        found = [one for start in range(0, len(rows), size) for one in self._search(rows[start : start + size])]
        records = self.index.records
        captions = iter(records.captions([row for one in found for row in (one.positive, *one.rows.tolist())]))
        texts = [[next(captions) for _ in range(1 + len(one.rows))] for one in found]
        images = iter(records.images([each.image for [_, *negatives] in texts for each in negatives]))
        result = []
        for one, image, [positive, *negatives] in zip(found, records.images([one.row for one in found]), texts, strict=True):
            values = zip(negatives, one.scores.tolist(), one.similarities.tolist(), one.ranks.tolist(), strict=True)
            listed = tuple(Negative(each, next(images).key, *others) for each, *others in values)
            result.append(Mined(image, positive, one.score, listed, one.candidates, one.dropped, one.own_similarity))
        return result

    def _own(self, row: int) -> np.ndarray:
        """Rows of the captions of an image."""
        group = self._group_of_image[row]
        return self._by_group[self._starts[group] : self._starts[group + 1]]

    def _search(self, rows: list[int]) -> list[_Found]:
        vectors = self.images.gather(rows)
        _, found = self.captions.search(vectors.reshape(-1, vectors.shape[-1]), self._depth)
        found = found.reshape(len(rows), -1)
        return [self._filter(row, each, candidates) for row, each, candidates in zip(rows, vectors, found, strict=True)]

    def _filter(self, row: int, image: np.ndarray, found: np.ndarray) -> _Found:
        """The negatives among the captions that a search found for an image [V, D]."""
        options, own = self.options, self._own(row)
        image = image.astype(np.float64)
        candidates = np.unique(found[found >= 0])  # several views find one caption
        candidates = candidates[self._group_of_caption[candidates] != self._group_of_image[row]]
        vectors = self._captions(candidates)
        scores = _scores(vectors, image)
        order = np.lexsort((candidates, -scores))[options.range_min : options.range_max]
        candidates, vectors, scores = candidates[order], vectors[order], scores[order]

        own_vectors = self._captions(own)
        own_scores = _scores(own_vectors, image)
        place = int(own_scores.argmin() if options.margin_from == "min" else own_scores.argmax())
        limit = _limit(float(own_scores[place]), options)

        dropped: dict[str, int] = {}
        left = np.arange(len(candidates))

        def keep(name: str, passing: np.ndarray) -> None:
            nonlocal left
            dropped[name] = int((~passing).sum())
            left = left[passing]

        keep("same text", ~np.isin(self._texts[candidates], self._texts[own]))
        keep("margin", scores[left] <= limit)
        similarities = np.full(len(candidates), -np.inf)
        similarities[left] = _cosines(own_vectors, vectors[left]).max(0)
        keep("similar caption", similarities[left] < options.max_similarity)
        first = np.unique(self._texts[candidates[left]], return_index=True)[1]
        keep("repeated text", np.isin(np.arange(len(left)), first))
        if options.sampling_strategy == "random" and len(left) > options.num_negatives:
            key = self.index.records.images([row])[0].key
            drawn = np.random.default_rng(stable_hash("negatives", options.seed, key))
            left = np.sort(drawn.choice(left, options.num_negatives, replace=False))
        left = left[: options.num_negatives]
        return _Found(
            row, int(own[place]), float(own_scores[place]), candidates[left], scores[left], similarities[left],
            left + options.range_min + 1, len(candidates), dropped,
            float(_cosines(own_vectors[:1], own_vectors[1:2])[0, 0]) if len(own) > 1 else None,
        )  # fmt: skip

    def _captions(self, rows: np.ndarray) -> np.ndarray:
        """Vectors [k, D] of captions, float64."""
        return self.captions.gather(rows)[:, 0].astype(np.float64)


class _Found(NamedTuple):
    row: int
    positive: int  # rows of captions, as ``rows``
    score: float
    rows: np.ndarray
    scores: np.ndarray
    similarities: np.ndarray
    ranks: np.ndarray
    candidates: int
    dropped: dict[str, int]
    own_similarity: float | None


def normalized(text: str) -> str:
    """A text without case, punctuation and repeated spaces; only stripped if it has no word.

    Example:
        >>> normalized(" A dog,  running. ") == normalized("a dog running"), normalized("?!")
        (True, '?!')
    """
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


def _scores(captions: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Inner products [k] with the best of an image's embeddings. Each is summed by itself (``einsum`` without BLAS), so that
    equal vectors have equal scores wherever they stand."""
    return np.einsum("kd,vd->kv", captions, image).max(1)


def _cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[a, D], [b, D] -> [a, b], to six places."""
    norms = np.sqrt(np.einsum("kd,kd->k", one, one)[:, None] * np.einsum("kd,kd->k", other, other))
    return (one @ other.T / np.maximum(norms, 1e-30)).round(6)


def _limit(positive: float, options: MiningOptions) -> float:
    """The highest score of a negative."""
    relative = None if options.relative_margin is None else options.relative_margin * abs(positive)
    return positive - max(margin for margin in (options.absolute_margin, relative) if margin is not None)


def chunks(total: int, size: int = _CHUNK) -> Iterator[range]:
    """The numbers below ``total`` in pieces.

    Example:
        >>> list(chunks(5, 2))
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    for start in range(0, total, size):
        yield range(start, min(start + size, total))
