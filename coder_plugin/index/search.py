"""Search an index by text, by picture or by one of its own images.

A re-ranker, such as a model's fusion head (AsCL eq. 4) or MaxSim, orders the best candidates; see docs/search.md.

Shape letters: N images or captions, D dimensions, V embeddings of an image, q queries, k results, n candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError
from coder_plugin.heads.rerankers import parse_reranker
from coder_plugin.index.arrays import Arrays
from coder_plugin.index.filter_cache import FilterCache
from coder_plugin.index.manifest import KINDS, MANIFEST, RECORDS, RERANK, SEGMENTS, read_manifest
from coder_plugin.index.records import Image, Records
from coder_plugin.index.records_file import RecordsFile
from coder_plugin.index.removed import read_removed
from coder_plugin.index.vectors import Vectors

#: Pairs that a re-ranker scores at once.
_PAIRS = 512
#: The most of a thumbnail.
_PIXELS = 1 << 24


class Index:
    """An index on disk, opened to be searched by vectors.

    Args:
        folder: of the index.
        verify: compare the files' checksums with the manifest's, which reads them once; else only their sizes.
        parameters: of FAISS's parameter space, such as ``nprobe=16``.
        gpu: search on the first GPU, where FAISS sees one and supports this kind of index on it.

    Raises:
        CoderError: no index there, an unfinished or a damaged one; the message names the file.
    """

    def __init__(
        self, folder: str | Path, *, verify: bool = False, parameters: str | None = None, gpu: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.manifest: Mapping[str, Any] = read_manifest(self.folder, verify=verify)
        segments = self.manifest["segments"]
        folders = [self.folder / SEGMENTS / segment["name"] for segment in segments]
        counts = {kind: [segment[kind] for segment in segments] for kind in KINDS}
        #: Rows that were removed, by kind, ascending int64: their data stay in the files, and no search finds them.
        self.removed = read_removed(self.folder, self.manifest)
        each = zip(folders, counts["images"], counts["captions"], strict=True)
        columns = self.manifest["columns"]
        files = [RecordsFile(path / RECORDS, images=n, captions=t, columns=columns) for path, n, t in each]
        self.records = Records(files, counts["images"], counts["captions"], self.removed)
        options: dict[str, Any] = {"flat": self.manifest["factory"] == "Flat", "parameters": parameters, "gpu": gpu}
        self.vectors = {}
        for kind in (kind for kind in KINDS if kind in self.manifest["vectors"]):
            sizes = {name: self.manifest["vectors"][kind][name] for name in ("views", "dimensions")}
            paths = [path / f"{kind}.faiss" for path, count in zip(folders, counts[kind], strict=True) if count]
            filled = [count for count in counts[kind] if count]
            self.vectors[kind] = Vectors(paths, filled, removed=self.removed[kind], verify=verify, **sizes, **options)
        self._arrays = Arrays(self.folder, self.manifest)
        if self.manifest["plan"]["re-ranking"] and not self._arrays.names:
            raise CoderError(f"{self.folder / MANIFEST} lists no files for re-ranking, which its plan names: build it again")

    def size(self, kind: str) -> int:
        """How many "images" or "captions" may be found: all but those that were removed."""
        return self.manifest[kind] - len(self.removed[kind])

    def search(
        self, queries: np.ndarray | Tensor, k: int, *, kind: str = "images", rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best images or captions for each query, by inner product (the greatest over an image's embeddings).

        Args:
            queries: retrieval vectors [q, D], finite, any float dtype.
            k: results, 1 or more.
            kind: "images" or "captions".
            rows: that may be found, int64 [n], as ``index.records.where`` gives them; None: all that were not removed.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64; fewer than k where fewer may be found.

        Raises:
            CoderError: the index has no such vectors; queries of another shape or not finite; rows that it does not have.
        """
        if isinstance(queries, Tensor):
            queries = queries.float().cpu().numpy()
        return self._vectors(kind).search(queries, k, rows=rows)

    def vector(self, row: int, *, kind: str = "images") -> np.ndarray:
        """The retrieval vectors [V, D] of an item; V is 1 unless the model gives an image several embeddings."""
        return self._vectors(kind).gather([row])[0]

    def items(self, kind: str, rows: np.ndarray) -> dict[str, Tensor]:
        """What re-ranking needs of images or captions: tensors [n, …] by name; empty if the index keeps nothing for it."""
        return self._arrays.items(kind, rows)

    def thumbnail(self, key: str) -> Any | None:
        """The thumbnail (PIL) of an image by its key; None where there is none."""
        from coder_plugin.data.decode import decode_image

        row = self.records.row_of(key)
        content = None if row is None else self.records.thumbnail(row)
        if content is None:
            return None
        try:
            return decode_image(content, max_pixels=_PIXELS)
        except ValueError as error:
            raise CoderError(f"{self.folder / RECORDS}: the thumbnail of {key!r} is not a small JPEG file: {error}") from error

    def check_model(self, pretrained: Any) -> None:
        """Check that the index was made with a :class:`~coder_plugin.pretrained.open.PretrainedModel`.

        Raises:
            CoderError: it was made with another model.
        """
        model = self.manifest["model"]
        if pretrained.fingerprint() != model["fingerprint"]:
            objective = f" ({model['objective']})" if model.get("objective") else ""
            raise CoderError(
                f"{self.folder} was made with another model than {pretrained.name}, so their vectors cannot be compared: "
                f"give the model that it was made with, {model.get('name') or 'an unnamed one'}{objective}, or another index"
            )

    def close(self) -> None:
        """Close the file of records."""
        self.records.close()

    def _vectors(self, kind: str) -> Vectors:
        if kind not in self.vectors:
            raise CoderError(f"{self.folder} has no vectors of {kind}, only of {' and '.join(self.vectors)}")
        return self.vectors[kind]


class Hit(NamedTuple):
    """A result. ``index.records`` has the image's captions and its thumbnail.

    ``score`` is the inner product of retrieval vectors; ``fused`` the re-ranker's score, if it ranked this result; ``text`` the
    caption in a search among captions, None among images.
    """

    score: float
    row: int
    image: Image
    text: str | None
    fused: float | None


class Query(NamedTuple):
    """A query's vectors [V, D], and what re-ranking needs of it."""

    vectors: Tensor
    kind: str  # what the query is: "images" or "captions"
    item: dict[str, Tensor] | None


class Searcher:
    """An index with the model that it was made with.

    Args:
        index: an opened index.
        pretrained: a :class:`~coder_plugin.pretrained.open.PretrainedModel` with the manifest's fingerprint; None: only images
            of the index can be queries.

    Raises:
        CoderError: the index was made with another model, or keeps tokens for another re-ranker.
    """

    def __init__(self, index: Index, pretrained: Any) -> None:
        self.index, self.pretrained, self.head = index, pretrained, None
        self.shortlist: int | None = None  # candidates that are re-ranked; None: all
        self._filters = FilterCache(index.records)
        if pretrained is None:
            return
        index.check_model(pretrained)
        self.encoder = pretrained.encoder()
        kept = index.manifest["model"].get("reranker")
        if index.manifest["plan"]["re-ranking"]:
            if _name(kept) != _name(pretrained.reranker):
                advice = "leave out --reranker" if kept is None else f"take --reranker {kept}"
                raise CoderError(
                    f"{index.folder} keeps tokens for {_described(kept)}, not for {_described(pretrained.reranker)}: {advice}"
                )
            from coder_plugin.evaluation.evaluate import shortlist_length

            self.head = self.encoder.reranking
            self.shortlist = shortlist_length(pretrained.rerank, self.encoder)
        elif pretrained.reranker is not None:
            raise CoderError(
                f"--reranker {pretrained.reranker}: {index.folder} keeps no tokens to re-rank by: build it with coder-plugin "
                f"index --reranker {pretrained.reranker}"
            )

    def text(self, texts: Sequence[str]) -> list[Query]:
        """Queries by text."""
        size = self.encoder.batch_size
        batches = [self.encoder.text(list(texts[start : start + size]), self.head) for start in range(0, len(texts), size)]
        return [query for vectors, item in batches for query in self._queries(vectors, item, "captions")]

    def image(self, loaded: Sequence[Any]) -> list[Query]:
        """Queries by pictures (PIL), or for a region model by :class:`~coder_plugin.data.regions.base.Regions`.

        Raises:
            CoderError: pictures for a region model, or regions for another.
        """
        from coder_plugin.backbones.base import Backbone

        reads_regions = isinstance(self.pretrained.model, Backbone)
        for each in loaded:
            if isinstance(each, Regions) != reads_regions:
                expected = "regions (.npz files, or an image of the index by its key)" if reads_regions else "pictures"
                raise CoderError(f"this index's model reads {expected}")
        vectors, item = self.encoder.image(loaded, self.head)
        return self._queries(vectors, item, "images")

    def key(self, key: str) -> Query:
        """A query by an image of the index.

        Raises:
            CoderError: no such image; an index without vectors of images, or of a kind that does not store them.
        """
        row = self.index.records.row_of(key)
        if row is None:
            first = self.index.records.images(range(min(2, self.index.manifest["images"])))
            examples = ", ".join(repr(each.key) for each in first)
            raise CoderError(f"{self.index.folder} has no image {key!r}; its keys look like {examples}, …")
        item = self.index.items("images", np.array([row])) if self.head is not None else None
        return Query(torch.from_numpy(self.index.vector(row)), "images", item)

    def search(
        self,
        query: Query,
        k: int = 10,
        *,
        among: str | None = None,
        rerank: int | str | None = None,
        where: str | None = None,
    ) -> list[Hit]:
        """The k best images or captions for a query.

        Args:
            query: from :meth:`text`, :meth:`image` or :meth:`key`.
            k: results, 1 or more.
            among: "images" or "captions"; None: images for a text, captions for an image, as far as the index has them.
            rerank: how many candidates are re-ranked, or "all"; 0: none. None: as many as in the model's evaluation (32, or
                all where no term has trained the towers' own features), at least k; none without a re-ranker, for an image
                among images, or for a text among captions.
            where: only images for which this is true, and their captions, are searched and re-ranked: an expression of
                ``index.records.where``, such as ``source = 'coco'``; None: all.

        Returns:
            Hits, the best first; fewer than k where fewer may be found.

        Raises:
            CoderError: no such vectors in the index; re-ranking without a score for it; k below 1; a filter that is no
                expression over the index's columns.
        """
        among = among or self._other_kind(query.kind)
        if among not in KINDS:
            raise CoderError(f"among must be {' or '.join(KINDS)}, got {among!r}")
        allowed = None if where is None else self._filters.where(where, among)
        depth = self._rerank_depth(rerank, query, among, k)
        if allowed is not None:
            depth = min(depth, len(allowed))
            if not len(allowed):
                return []
        scores, rows = self._nearest(query.vectors, max(k, depth), among, allowed)
        fused: Sequence[float | None] = [None] * len(rows)
        if depth and len(rows):  # an approximate index may find none of those that are allowed
            first = rows[:depth]
            reranked = self._rerank(query, first, among)
            order = np.lexsort((np.arange(len(first)), -reranked))
            rows, scores = np.concatenate([first[order], rows[depth:]]), np.concatenate([scores[:depth][order], scores[depth:]])
            fused = [*reranked[order].tolist(), *[None] * (len(rows) - len(first))]
        return self._hits(rows[:k], scores[:k], fused[:k], among)

    def _queries(self, vectors: Tensor, item: dict[str, Tensor] | None, kind: str) -> list[Query]:
        views = vectors if vectors.ndim == 3 else vectors[:, None]
        items = [
            None if item is None else {name: value[row : row + 1] for name, value in item.items()} for row in range(len(views))
        ]
        return [Query(vector, kind, each) for vector, each in zip(views, items, strict=True)]

    def _other_kind(self, kind: str) -> str:
        other = "images" if kind == "captions" else "captions"
        return other if other in self.index.vectors else next(iter(self.index.vectors))

    def _rerank_depth(self, rerank: int | str | None, query: Query, among: str, k: int) -> int:
        possible = self.head is not None and query.kind != among
        if rerank is None:
            if not possible:
                return 0
            rerank = "all" if self.shortlist is None else max(self.shortlist, k)
        if rerank != "all" and not str(rerank).isdecimal():
            raise CoderError(f"--rerank must be a number of candidates, or all, got {rerank!r}")
        if str(rerank) != "0" and not possible:
            if self.head is None:
                raise CoderError(
                    f"--rerank {rerank}: the index keeps nothing to re-rank by: build it with coder-plugin index --reranker "
                    "maxsim, or with a model that has a fusion head"
                )
            raise CoderError(f"--rerank {rerank}: re-ranking compares an image with a text, and both are {among} here")
        return self.index.manifest["vectors"][among]["items"] if rerank == "all" else int(rerank)

    def _nearest(self, vectors: Tensor, k: int, among: str, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Scores [k] and rows [k] among those ``allowed``; the best over a query's vectors [V, D]."""
        scores, rows = self.index.search(vectors, k, kind=among, rows=allowed)
        if len(rows) == 1:
            scores, rows = scores[0], rows[0]
        else:
            best: dict[int, float] = {}
            for row, score in zip(rows.ravel().tolist(), scores.ravel().tolist(), strict=True):
                best[row] = max(score, best.get(row, -np.inf))
            ordered = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
            rows = np.array([row for row, _ in ordered], dtype=np.int64)
            scores = np.array([score for _, score in ordered], dtype=np.float32)
        valid = rows >= 0
        return scores[valid], rows[valid]

    def _rerank(self, query: Query, rows: np.ndarray, among: str) -> np.ndarray:
        """The re-ranker's scores [n] of the query with the items of these rows; NaN becomes -inf."""
        try:
            return self._pair_scores(query, rows, among)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            detail, arrays = " ".join(f"{type(error).__name__}: {error}".split())[:200], self.index.folder / RERANK
            raise CoderError(f"{arrays} does not fit the index's model ({detail}): build the index again") from error

    def _pair_scores(self, query: Query, rows: np.ndarray, among: str) -> np.ndarray:
        assert query.item is not None and self.head is not None
        scores = []
        for start in range(0, len(rows), _PAIRS):
            chunk = rows[start : start + _PAIRS]
            candidates = self.index.items(among, chunk)
            every, one = torch.arange(len(chunk))[None], torch.zeros(1, 1, dtype=torch.int64)
            if among == "images":
                scores.append(self.head.scorer(candidates, query.item)(every, one)[0, :, 0])
            else:
                scores.append(self.head.scorer(query.item, candidates)(one, every)[0, 0])
        return torch.nan_to_num(torch.cat(scores).float(), nan=-torch.inf).cpu().numpy()

    def _hits(self, rows: np.ndarray, scores: np.ndarray, fused: Sequence[float | None], among: str) -> list[Hit]:
        records = self.index.records
        texts: list[str | None] = [None] * len(rows)
        owners = rows.tolist()
        if among == "captions":
            captions = records.captions(rows.tolist())
            texts, owners = [each.text for each in captions], [each.image for each in captions]
        images = records.images(owners)
        return [Hit(*values) for values in zip(scores.tolist(), rows.tolist(), images, texts, fused, strict=True)]


def _name(reranker: str | None) -> str | None:
    return None if reranker is None else parse_reranker(reranker).name


def _described(reranker: str | None) -> str:
    return "its model's own head" if reranker is None else f"{_name(reranker)!r}"
