"""Search an index by text, by picture or by one of its own images.

A re-ranker, such as a model's fusion head (AsCL eq. 4) or MaxSim, orders the best candidates; see docs/search.md.

Shape letters: D dimensions, V vectors of an image, k results, n candidates.
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
from coder_plugin.search.index import NOTE, Index
from coder_plugin.search.parquet import KINDS
from coder_plugin.search.records import Image

#: Pairs that a re-ranker scores at once.
_PAIRS = 512


class Hit(NamedTuple):
    """A result. ``index.records`` has the image's captions and its thumbnail.

    ``score`` is the inner product of retrieval vectors; ``fused`` the re-ranker's score, if it ranked this result; ``text`` the
    caption in a search among captions, None among images. ``caption`` is that caption, or of an image that one of its captions
    which matches the query best, as far as the index has vectors of them; empty without captions.
    """

    score: float
    row: int
    image: Image
    text: str | None
    fused: float | None
    caption: str = ""


class Query(NamedTuple):
    """A query's vectors [V, D], and what re-ranking needs of it."""

    vectors: Tensor
    kind: str  # what the query is: "images" or "captions"
    item: dict[str, Tensor] | None


class Searcher:
    """An index with the model that it was made with.

    Args:
        index: an opened index.
        pretrained: a :class:`~coder_plugin.pretrained.open.PretrainedModel` that made it; None: only images
            of the index can be queries.

    Raises:
        CoderError: the index was made with another model, or keeps tokens for another re-ranker.
    """

    def __init__(self, index: Index, pretrained: Any) -> None:
        self.index, self.pretrained, self.head = index, pretrained, None
        self.shortlist: int | None = None  # candidates that are re-ranked; None: all
        if pretrained is None:
            return
        index.check_model(pretrained)
        self.encoder = pretrained.encoder()
        kept = index.note["model"].get("reranker")
        if index.reranks:
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
            first = self.index.records.images(list(range(min(2, self.index.note["images"]))))
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
        allowed = None if where is None else self.index.records.where(where, kind=among)
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
        return self._hits(query, rows[:k], scores[:k], fused[:k], among)

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
        return self.index.note[among] if rerank == "all" else int(rerank)

    def _nearest(self, vectors: Tensor, k: int, among: str, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Scores [k] and rows [k] among those ``allowed``; the best over a query's vectors [V, D]."""
        scores, rows = (each.ravel() for each in self.index.search(vectors, k, kind=among, rows=allowed))
        order = np.lexsort((rows, -scores))
        order = order[rows[order] >= 0]
        order = order[np.sort(np.unique(rows[order], return_index=True)[1])][:k]  # of each row the best score
        return scores[order], rows[order]

    def _rerank(self, query: Query, rows: np.ndarray, among: str) -> np.ndarray:
        """The re-ranker's scores [n] of the query with the items of these rows; NaN becomes -inf."""
        try:
            return self._pair_scores(query, rows, among)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            detail, arrays = " ".join(f"{type(error).__name__}: {error}".split())[:200], self.index.folder
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

    def _hits(
        self, query: Query, rows: np.ndarray, scores: np.ndarray, fused: Sequence[float | None], among: str
    ) -> list[Hit]:
        records = self.index.records
        if among == "captions":
            captions = records.captions(rows.tolist())
            texts: list[str | None] = [each.text for each in captions]
            images = records.images([each.image for each in captions])
            shown = [each.text for each in captions]
        else:
            texts, images = [None] * len(rows), records.images(rows.tolist())
            shown = [self._caption(query, row) for row in rows.tolist()]
        values = zip(scores.tolist(), rows.tolist(), images, texts, fused, shown, strict=True)
        return [Hit(*each) for each in values]

    def _caption(self, query: Query, row: int) -> str:
        """The caption of an image that matches a query best, or its first one where there are no vectors of captions."""
        captions = self.index.records.captions_of(row)
        if len(captions) < 2 or "captions" not in self.index.vectors:
            return next(iter(captions), "")
        vectors = self.index.caption_vectors(row)
        return captions[int((vectors @ query.vectors.float().cpu().numpy().T).max(1).argmax())]


def _name(reranker: str | None) -> str | None:
    return None if reranker is None else parse_reranker(reranker).name


def _described(reranker: str | None) -> str:
    return "its model's own head" if reranker is None else f"{_name(reranker)!r}"


def open_searcher(
    folder: str | Path,
    *,
    model: str | None = None,
    verify: bool = False,
    parameters: str | None = None,
    gpu: bool = True,
    need_model: bool = True,
    device: torch.device | None = None,
    reranker: str | None = None,
    texts_only: bool = False,
) -> Searcher:
    """Open an index together with the model that made it.

    Args:
        folder: of the index.
        model: the model's folder, if it has moved since; None: where the index says.
        verify: as in :class:`~coder_plugin.search.index.Index`.
        parameters: as in :class:`~coder_plugin.search.index.Index`.
        gpu: as in :class:`~coder_plugin.search.index.Index`.
        need_model: False: open the model only if re-ranking needs it; texts and pictures then cannot be encoded.
        device: of the model; None: this process's GPU, or the CPU.
        reranker: that whose tokens the index keeps, with other options or from another package
            (:func:`~coder_plugin.pretrained.open.open_pretrained`); None: as the index was made, if the re-ranker is ours.
        texts_only: queries are texts, or images of the index, so that the image tower need not be built.

    Raises:
        CoderError: no index, or a damaged one; its model has been moved, or is another one now; another re-ranker.
    """
    from coder_plugin.pretrained.open import open_pretrained
    from coder_plugin.pretrained.saved_model import check_saved_reranker

    index = Index(folder, verify=verify, parameters=parameters, gpu=gpu)
    record = index.note["model"]
    reranks = index.reranks
    if not need_model and not reranks and reranker is None:
        return Searcher(index, None)
    spec = model or record.get("spec")
    try:
        options = checked_options(record, model)
        name = str(spec or record.get("name", "the index's model"))
        export = "last" if record.get("export") == "last" else None  # the fingerprint says whether it is the same model
        if reranks and reranker is None and record.get("reranker") is not None:
            reranker = str(record["reranker"])
            check_saved_reranker(reranker, f"its {NOTE}")
        pretrained = open_pretrained(
            spec, options, export=export, name=name, device=device, reranker=reranker, texts_only=texts_only
        )
    except CoderError as error:
        moved = "; if it has moved, name its folder with --model" if model is None and "--model" not in str(error) else ""
        raise CoderError(f"{folder}: its model cannot be opened: {error}{moved}") from error
    return Searcher(index, pretrained)


def checked_options(record: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """The options that an index opens its model with. Somebody else may have written them, so they may only describe
    a model, and what would be fetched from where they say is asked for on the command line.

    Raises:
        CoderError: other options, a model elsewhere, or no model at all.
    """
    from coder_plugin.pretrained.saved_model import check_model_record

    options = dict(record.get("options", {}))
    if model is not None:
        options = {name: value for name, value in options.items() if name not in ("model", "pretrained")}
    elif record.get("spec") is None and not isinstance(options.get("model"), str):
        raise CoderError(f"its {NOTE} names no model")
    return check_model_record({**record, "options": options}, f"its {NOTE}", spec=model)["options"]


def load_image(path: str) -> Any:
    """A picture (PIL), or the regions in an ``.npz`` file.

    Raises:
        CoderError: the file cannot be read.
    """
    from coder_plugin.data.decode import decode_image
    from coder_plugin.data.regions.arrays import decode_npz

    try:
        return decode_npz(Path(path).read_bytes(), path) if path.lower().endswith(".npz") else decode_image(path)
    except (OSError, ValueError) as error:
        raise CoderError(f"--image {path} cannot be read: {error}") from error
