"""Searching an index by text, by picture, or by one of its own images; re-ranking by the model's fusion score (AsCL eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError
from coder_plugin.index.index import Index
from coder_plugin.index.manifest import KINDS
from coder_plugin.index.records import Image

#: Pairs that a fusion score is asked for at once.
_PAIRS = 512


class Hit(NamedTuple):
    """A result. Of a search among captions, ``text`` is the caption; among images, it is None.

    ``score``: the inner product of retrieval vectors; ``fused``: the fusion score that has put it in its place, if one has.
    ``index.records`` has an image's captions and its thumbnail.
    """

    score: float
    row: int
    image: Image
    text: str | None
    fused: float | None


class Query(NamedTuple):
    """A query's vectors [V, D], and what re-ranking needs of it."""

    vectors: Tensor
    kind: str  # what it is itself: images or captions
    item: dict[str, Tensor] | None


class Searcher:
    """An index with the model that it was made with.

    Args:
        index: an opened index.
        trained: a :class:`~coder_plugin.pretrained.open.Trained`, its fingerprint the manifest's; None: no query is encoded.

    Raises:
        CoderError: the index was made with another model.
    """

    def __init__(self, index: Index, trained: Any) -> None:
        of = index.manifest["model"]
        from coder_plugin.evaluation.evaluate import shortlist_length

        self.index, self.trained, self.head = index, trained, None
        self.shortlist: int | None = None  # candidates that the fusion score puts in order; None: all
        if trained is None:
            return
        if trained.fingerprint() != of["fingerprint"]:
            raise CoderError(
                f"{index.folder} was made with another model than {trained.name}: its vectors would be compared with ones "
                f"that mean something else. It was made with {of.get('name', 'one')} ({of.get('objective', '')})"
            )
        self.encoder = trained.encoder()
        if index.manifest["plan"]["re-ranking"]:
            self.head = self.encoder.reranking
            self.shortlist = shortlist_length(trained.config.evaluation.rerank, self.encoder)

    def text(self, texts: Sequence[str]) -> list[Query]:
        """Queries by text."""
        size = self.encoder.batch_size
        found = [self.encoder.text(list(texts[at : at + size]), self.head) for at in range(0, len(texts), size)]
        return [query for vectors, item in found for query in self._queries(vectors, item, "captions")]

    def image(self, loaded: Sequence[Any]) -> list[Query]:
        """Queries by pictures (PIL), or by what the model reads in their place: :class:`Regions`.

        Raises:
            CoderError: pictures for a model of regions, or the other way round.
        """
        from coder_plugin.backbones.base import Backbone

        of_regions = isinstance(self.trained.model, Backbone)
        for each in loaded:
            if isinstance(each, Regions) != of_regions:
                wants = "regions (.npz files, or an image of the index by its key)" if of_regions else "pictures"
                raise CoderError(f"this index's model reads {wants}")
        vectors, item = self.encoder.image(loaded, self.head)
        return self._queries(vectors, item, "images")

    def key(self, key: str) -> Query:
        """A query by an image of the index.

        Raises:
            CoderError: no such image; an index without vectors of images, or of a kind that gives none back.
        """
        row = self.index.records.row_of(key)
        if row is None:
            first = self.index.records.images(range(min(2, self.index.manifest["images"])))
            known = ", ".join(repr(each.key) for each in first)
            raise CoderError(f"{self.index.folder} has no image {key!r}; here they are called {known}, …")
        vectors = torch.from_numpy(self.index.vector(row))
        item = self.index.items("images", np.array([row])) if self.head is not None else None
        return Query(vectors, "images", item)

    def search(
        self, query: Query, k: int = 10, *, among: str | None = None, rerank: int | str | None = None
    ) -> list[Hit]:
        """The k best images or captions.

        Args:
            among: images or captions; None: images for a text, captions for an image, as far as the index has them.
            rerank: so many candidates are put in order by the fusion score, or "all"; 0: none. None: where the model has such
                a score and the query is of the other kind, as many as in its evaluation (32, and all where no term has trained
                the towers' own features), or k if that is more.

        Raises:
            CoderError: no such vectors in the index; re-ranking where there is no score for it; k below 1.
        """
        among = among or self._other(query.kind)
        if among not in KINDS:
            raise CoderError(f"one searches among {' or '.join(KINDS)}, not {among!r}")
        depth = self._depth(rerank, query, among, k)
        scores, rows = self._nearest(query.vectors, max(k, depth), among)
        fused: Sequence[float | None] = [None] * len(rows)
        if depth:
            first = rows[:depth]
            found = self._fused(query, first, among)
            order = np.lexsort((np.arange(len(first)), -found))
            rows, scores = np.concatenate([first[order], rows[depth:]]), np.concatenate([scores[:depth][order], scores[depth:]])
            fused = [*found[order].tolist(), *[None] * (len(rows) - len(first))]
        return self._hits(rows[:k], scores[:k], fused[:k], among)

    def _queries(self, vectors: Tensor, item: dict[str, Tensor] | None, kind: str) -> list[Query]:
        views = vectors if vectors.ndim == 3 else vectors[:, None]
        def of(row: int) -> dict[str, Tensor] | None:
            return None if item is None else {name: value[row : row + 1] for name, value in item.items()}

        return [Query(own, kind, of(row)) for row, own in enumerate(views)]

    def _other(self, kind: str) -> str:
        other = "images" if kind == "captions" else "captions"
        return other if other in self.index.vectors else next(iter(self.index.vectors))

    def _depth(self, rerank: int | str | None, query: Query, among: str, k: int) -> int:
        able = self.head is not None and query.kind != among
        if rerank is None:
            if not able:
                return 0
            rerank = "all" if self.shortlist is None else max(self.shortlist, k)
        if rerank != "all" and not str(rerank).isdecimal():
            raise CoderError(f"--rerank must be a number of candidates, or all, got {rerank!r}")
        if str(rerank) != "0" and not able:
            if self.head is None:
                raise CoderError(f"--rerank {rerank}: this index keeps nothing to re-rank by: its model has no fusion score")
            raise CoderError(f"--rerank {rerank}: the fusion score is of an image and a text, and both are {among} here")
        return self.index.manifest["vectors"][among]["items"] if rerank == "all" else int(rerank)

    def _nearest(self, vectors: Tensor, k: int, among: str) -> tuple[np.ndarray, np.ndarray]:
        """Scores [k] and rows [k]; of a query with several vectors, by the best of them."""
        scores, rows = self.index.search(vectors, k, kind=among)
        if len(rows) == 1:
            scores, rows = scores[0], rows[0]
        else:
            best: dict[int, float] = {}
            for row, score in zip(rows.ravel().tolist(), scores.ravel().tolist(), strict=True):
                best[row] = max(score, best.get(row, -np.inf))
            ordered = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
            rows = np.array([row for row, _ in ordered], dtype=np.int64)
            scores = np.array([score for _, score in ordered], dtype=np.float32)
        there = rows >= 0
        return scores[there], rows[there]

    def _fused(self, query: Query, rows: np.ndarray, among: str) -> np.ndarray:
        """Fusion scores [n] of the query with items of these rows; NaN is the worst."""
        assert query.item is not None and self.head is not None
        found = []
        for start in range(0, len(rows), _PAIRS):
            theirs = self.index.items(among, rows[start : start + _PAIRS])
            every, one = torch.arange(len(rows[start : start + _PAIRS]))[None], torch.zeros(1, 1, dtype=torch.int64)
            if among == "images":
                found.append(self.head.scorer(theirs, query.item)(every, one)[0, :, 0])
            else:
                found.append(self.head.scorer(query.item, theirs)(one, every)[0, 0])
        return torch.nan_to_num(torch.cat(found).float(), nan=-torch.inf).cpu().numpy()

    def _hits(self, rows: np.ndarray, scores: np.ndarray, fused: Sequence[float | None], among: str) -> list[Hit]:
        records = self.index.records
        texts: list[str | None] = [None] * len(rows)
        owners = rows.tolist()
        if among == "captions":
            captions = records.captions(rows.tolist())
            texts, owners = [each.text for each in captions], [each.image for each in captions]
        images = records.images(owners)
        return [Hit(*row) for row in zip(scores.tolist(), rows.tolist(), images, texts, fused, strict=True)]
