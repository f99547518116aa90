"""Recall at K and ranks of image-text retrieval (CODER section 4; docs/equations.md#evaluation).

Shape letters: N images, T captions (texts), D joint dimensions, R rows of one tile, F folds.

The rank of a query is 0-based: how many wrong candidates come before the right one; R@K is the percentage of queries
with a rank below K. Image to text, the best-ranked caption of the image counts and its other captions are not in the
way; text to image, there is one right image.

Ties and NaN count against the model. A wrong candidate ranks lower only if its score is strictly lower:
- a tie counts against the query, so a collapsed model (all scores equal) gets the worst rank everywhere;
- a NaN of a wrong candidate is read as +inf: nothing beats it;
- a NaN of a right candidate is read as -inf: it beats nothing (image to text, the image's other captions still count);
- infinities are ordered as numbers, and equal ones tie.

Scores are compared in float64 where the input is float64 or integer, else in float32 (float16 and bfloat16 are exact
there). Whole matrices are never converted: the work goes through tiles of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError

_TILE = 2**22  # scores in memory at once without a chunk: 16 MiB in float32, and as much for counting
_WHOLE = 10**9  # bytes up to which all products are made at once, for both directions
_RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
#: The figures of a result that are single numbers.
METRICS = (*_RECALLS, "rsum", "i2t_medr", "t2i_medr", "i2t_meanr", "t2i_meanr")
#: Columns of a recall table: heading and name of the figure.
RECALL_COLUMNS = {
    "i2t R@1": "i2t_r1",
    "i2t R@5": "i2t_r5",
    "i2t R@10": "i2t_r10",
    "t2i R@1": "t2i_r1",
    "t2i R@5": "t2i_r5",
    "t2i R@10": "t2i_r10",
    "R@sum": "rsum",
    "i2t MedR": "i2t_medr",
    "t2i MedR": "t2i_medr",
}


@torch.no_grad()
def recall(similarity: Tensor, image_of_text: Tensor | Sequence[int], *, chunk: int | None = None) -> dict[str, Any]:
    """Recall in both directions from a score matrix.

    A tie counts against the query. A NaN of a wrong candidate counts as +inf, one of a right candidate as -inf.

    Args:
        similarity: [N, T], higher is more similar; any real dtype.
        image_of_text: [T] integers in [0, N): the image of each caption, in any order; each image needs one caption or more.
        chunk: rows (images) compared at once; None: about four million scores. It changes memory only, never the result.

    Returns:
        ``i2t_r1 i2t_r5 i2t_r10 t2i_r1 t2i_r5 t2i_r10`` in percent and their sum ``rsum``; ``i2t_medr t2i_medr``
        median ranks, **1-based** and rounded down as the field prints them (floor(median) + 1); ``i2t_meanr
        t2i_meanr`` mean ranks, 1-based; ``i2t_ranks`` [N] and ``t2i_ranks`` [T], **0-based**, int64, on the CPU.

    Raises:
        CoderError: shapes that do not fit, an image without a caption, or a caption of an image that does not exist.

    Example:
        >>> similarity = torch.tensor([[0.9, 0.2, 0.1], [0.3, 0.4, 0.8]])  # two images, three captions
        >>> figures = recall(similarity, [0, 0, 1])
        >>> figures["i2t_r1"], round(figures["t2i_r1"], 1), figures["t2i_ranks"].tolist()
        (100.0, 66.7, [0, 1, 0])
    """
    similarity = torch.as_tensor(similarity)
    if similarity.ndim != 2:
        raise CoderError(f"similarity must be [images, texts], got shape {tuple(similarity.shape)}")
    images, texts = similarity.shape
    owner = _owners(image_of_text, images, texts, similarity.device)
    dtype = score_dtype(similarity)
    right = similarity[owner, torch.arange(texts, device=similarity.device)].to(dtype)  # [T]
    beaten = torch.zeros(texts, dtype=torch.int64, device=similarity.device)
    i2t = torch.empty(images, dtype=torch.int64, device=similarity.device)
    for start, stop in tiles(images, texts, chunk):
        tile = similarity[start:stop].to(dtype)
        i2t[start:stop] = row_ranks(tile, *captions_of(start, len(tile), owner))
        beaten += (tile < right).sum(0, dtype=torch.int32)  # never its own image: nothing is below itself
    return summary(i2t, images - 1 - beaten)


@torch.no_grad()
def recall_from_embeddings(
    image_embeddings: Tensor | Sequence[Tensor],
    text_embeddings: Tensor | Sequence[Tensor],
    image_of_text: Tensor | Sequence[int],
    *,
    chunk: int | None = None,
) -> dict[str, Any]:
    """`recall` of ``image_embeddings @ text_embeddings.T``, whose [N, T] matrix is never larger than 1 GB in memory.

    Inner products of the embeddings as they are: normalise them first where cosine is meant. Products are made in
    the dtype of the comparison (float32, or float64 where either side is), also under autocast. Up to 1 GB, with all views and
    models, they are made once. Beyond, or with ``chunk``, each direction makes its own tiles, and a right score is always read
    from the tile that it is compared with: the same pair may come out one bit different in a tile of another shape, which would
    make or break ties. For that reason, the ranks are those of `recall` except where two products differ by rounding alone.

    Args:
        image_embeddings: [N, D], or [N, V, D]: V embeddings of an image, the greatest product counts. Several models'
            as a sequence: an ensemble, whose score is the mean of theirs.
        text_embeddings: [T, D] of each model, on the device of the images.
        image_of_text: [T] integers in [0, N), as in `recall`.
        chunk: queries per tile, that is images for [chunk, T] and captions for [chunk, N]; None: all at once up to 1 GB, else
            as many as make some four million scores.

    Returns:
        What `recall` returns.
    """
    pairs, owner = check_embeddings(image_embeddings, text_embeddings, image_of_text)
    pairs = comparable(pairs)
    images, texts = len(pairs[0][0]), len(pairs[0][1])
    views = sum(_views(image).shape[1] for image, _ in pairs)
    if chunk is None and images * texts * views * pairs[0][0].itemsize <= _WHOLE:
        [(_, whole)] = products(pairs, images)
        return recall(whole, owner)
    i2t, t2i = owner.new_empty(images), owner.new_empty(texts)
    for start, tile in products(pairs, chunk):
        i2t[start : start + len(tile)] = row_ranks(tile, *captions_of(start, len(tile), owner))
    for start, tile in products([pair[::-1] for pair in pairs], chunk):
        right = tile.gather(1, owner[start : start + len(tile), None])
        t2i[start : start + len(tile)] = images - 1 - (tile < right).sum(1, dtype=torch.int32)
    return summary(i2t, t2i)


def recall_folds(
    image_embeddings: Tensor | Sequence[Tensor],
    text_embeddings: Tensor | Sequence[Tensor],
    image_of_text: Tensor | Sequence[int],
    *,
    folds: int = 5,
    chunk: int | None = None,
) -> dict[str, Any]:
    """The mean over F consecutive folds of images, each with its own captions only: COCO's "5-fold 1K".

    Args:
        image_embeddings: as in `recall_from_embeddings`, in the data set's order; N must be divisible by ``folds``.
        text_embeddings: likewise.
        image_of_text: [T] integers in [0, N), as in `recall`.
        folds: how many.
        chunk: as in `recall_from_embeddings`.

    Returns:
        The metrics of `recall` without the ranks, each the mean of the folds, and ``folds``: the same metrics of
        each fold, in order. Plain numbers only.
    """
    pairs, owner = check_embeddings(image_embeddings, text_embeddings, image_of_text)

    def measure(images: slice, texts: Tensor, owner: Tensor) -> dict[str, Any]:
        sides = [side[images] for side, _ in pairs], [side[texts] for _, side in pairs]
        return recall_from_embeddings(*sides, owner, chunk=chunk)

    return over_folds(owner, len(pairs[0][0]), folds, measure)


def over_folds(
    image_of_text: Tensor, images: int, folds: int, measure: Callable[[slice, Tensor, Tensor], Mapping[str, Any]]
) -> dict[str, Any]:
    """What `recall_folds` returns, of any recall: ``measure(images, texts, image_of_text)`` of each fold, that is the run
    of its images, the numbers of its captions, and the image of each of these, counted from the fold's first."""
    if folds < 1 or images % folds:
        raise CoderError(f"{images} images cannot be cut into {folds} equal folds: folds must divide their number")
    size = images // folds
    each = []
    for first in range(0, images, size):
        row, texts = captions_of(first, size, image_of_text)
        result = measure(slice(first, first + size), texts, row)
        each.append({key: result[key] for key in METRICS})
    return {**{key: sum(fold[key] for fold in each) / folds for key in METRICS}, "folds": each}


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain text table, one line per name: R@1 R@5 R@10 both ways, R@sum (percent), median ranks (1-based).

    Args:
        rows: name to what `recall`, `recall_from_embeddings` or `recall_folds` returned, or `mean_over_runs` of such.
    """
    lines = [["name", *RECALL_COLUMNS]]
    for name, row in rows.items():
        missing = [key for key in RECALL_COLUMNS.values() if key not in row]
        if missing:
            raise CoderError(f"row {name!r} lacks {', '.join(missing)}: rows are what recall() returns")
        lines.append([str(name), *(format_cell(row, key) for key in RECALL_COLUMNS.values())])
    return align(lines)


def format_cell(figures: Mapping[str, Any], key: str) -> str:
    """A figure with one decimal, and its standard deviation over runs if there is one; "-" for a missing one."""
    if figures.get(key) is None:
        return "-"
    return f"{float(figures[key]):.1f}" + (f" ± {figures['sd'][key]:.1f}" if "sd" in figures else "")


def mean_over_runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each number of two or more runs, and under ``sd`` their standard deviations (of a sample: n - 1).

    Dicts inside are treated likewise, and have an ``sd`` of their own. What is neither a number nor a dict is left out.

    Example:
        >>> mean_over_runs([{"rsum": 250.0}, {"rsum": 254.0}, {"rsum": 258.0}])
        {'rsum': 254.0, 'sd': {'rsum': 4.0}}
    """
    mean: dict[str, Any] = {}
    sd: dict[str, float] = {}
    for key in rows[0]:
        values = [row.get(key) for row in rows]
        if all(isinstance(value, Mapping) for value in values):
            mean[key] = mean_over_runs(values)  # type: ignore[arg-type]
        elif all(isinstance(value, (int, float)) for value in values):
            numbers = [float(row[key]) for row in rows]
            mean[key], sd[key] = statistics.fmean(numbers), statistics.stdev(numbers)
    return {**mean, "sd": sd} if sd else mean


def format_skipped(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines that say which figures are over fewer images than the data have; empty if none are.

    Args:
        rows: as in :func:`format_table`.

    Example:
        >>> print(format_skipped({"a": {"images": 98, "skipped": {"picture": 2}}}).strip())
        a: over 98 of 100 images; 2 skipped (picture 2)
    """
    lines = []
    for name, row in rows.items():
        if skipped := row.get("skipped"):
            count = sum(skipped.values())
            kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(skipped.items()))
            lines.append(f"\n{name}: over {row['images']:,} of {row['images'] + count:,} images; {count:,} skipped ({kinds})")
    return "".join(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def captions_of(first: int, rows: int, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each right pair in the score rows of images ``first`` … ``first + rows``; ``owner`` is [T]."""
    columns = ((owner >= first) & (owner < first + rows)).nonzero().squeeze(1)
    return owner[columns] - first, columns


def row_ranks(tile: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """0-based ranks [R] of the queries of score rows [R, candidates], of which the pairs (``row``, ``column``) are right:
    the best-ranked right candidate of a row counts."""
    rows, candidates = tile.shape
    right = tile[row, column]
    best = tile.new_full((rows,), -torch.inf)
    best.scatter_reduce_(0, row, right.masked_fill(right.isnan(), -torch.inf), "amax")
    beaten = (tile < best[:, None]).sum(1, dtype=torch.int32).long()
    # Right candidates are no competitors: taken out of the candidates, and those below the best out of the beaten ones.
    beaten.index_add_(0, row, (right < best[row]).long(), alpha=-1)
    return candidates - torch.bincount(row, minlength=rows) - beaten


def best_candidates(
    tile: Tensor, row: Tensor, column: Tensor, k: int, *, exclude: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best candidates (C if fewer) of score rows [R, C], best first, and whether each is right: both [R, k].

    Of equal scores the wrong candidates come first, in their order. ``tile`` is overwritten.

    Args:
        row, column: the right pairs.
        exclude: [R], a candidate of each row that does not count. Then k is less than C.
    """
    rows, candidates = tile.shape
    k = min(k, candidates)
    # -inf marks what is taken out of the wrong candidates, so the lowest score of a right one is the least finite number, and
    # that of a wrong one the next
    least = torch.finfo(tile.dtype).min
    value = tile[row, column].nan_to_num(nan=least, posinf=torch.inf, neginf=least)
    tile.nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=torch.nextafter(tile.new_tensor(least), tile.new_tensor(0.0)))
    tile[row, column] = -torch.inf
    if exclude is not None:
        tile[torch.arange(rows, device=tile.device), exclude] = -torch.inf
    best, index = tile.topk(min(k + 1, candidates), dim=1)
    tied = (best[:, 1:] == best[:, :-1]).any(1)
    if tied.any():  # topk returns ties in any order
        index[tied] = tile[tied].sort(dim=1, descending=True, stable=True).indices[:, : best.shape[1]]
    order = row.argsort(stable=True)
    value, row, column = value[order], row[order], column[order]
    count = torch.bincount(row, minlength=rows)
    behind = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    scores = tile.new_full((rows, int(count.max())), -torch.inf)
    columns = torch.zeros_like(scores, dtype=torch.int64)
    scores[row, behind], columns[row, behind] = value, column
    # a stable sort leaves wrong ones before right ones of the same score
    order = torch.cat([best[:, :k], scores], 1).argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.cat([index[:, :k], columns], 1).gather(1, order), order >= k


def summary(i2t: Tensor, t2i: Tensor) -> dict[str, Any]:
    """The dict of `recall` from the 0-based ranks [N] and [T]."""
    out: dict[str, Any] = {}
    both = {"i2t": i2t.cpu(), "t2i": t2i.cpu()}
    for way, ranks in both.items():
        for k in (1, 5, 10):
            out[f"{way}_r{k}"] = 100.0 * int((ranks < k).sum()) / len(ranks)
    out["rsum"] = sum(out[key] for key in _RECALLS)
    for way, ranks in both.items():
        # Twice the median is the sum of the two middle ranks, so halving rounds down.
        ordered = ranks.sort().values
        out[f"{way}_medr"] = float((ordered[(len(ranks) - 1) // 2] + ordered[len(ranks) // 2]) // 2 + 1)
        out[f"{way}_meanr"] = float(ranks.double().mean()) + 1.0
    return {**out, "i2t_ranks": both["i2t"], "t2i_ranks": both["t2i"]}


def tiles(queries: int, candidates: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of queries."""
    if chunk is None:
        chunk = max(1, _TILE // candidates)
    if chunk < 1:
        raise CoderError(f"chunk must be 1 or more, got {chunk}")
    for start in range(0, queries, chunk):
        yield start, min(start + chunk, queries)


def products(pairs: Sequence[tuple[Tensor, Tensor]], chunk: int | None) -> Iterator[tuple[int, Tensor]]:
    """Start and score rows [R, candidates] of each tile, of (queries, candidates) of each model, in the same buffers.

    A new tensor per tile, with the ranks kept beside it, tears the C allocator's heap into holes that the next tile
    does not fit: the process then grows, now and then, by the whole matrix that tiles are there to avoid.
    """
    buffers: list[Tensor] = []
    queries, candidates = (len(side) for side in pairs[0])
    views = max(a.shape[1] * b.shape[1] for a, b in ((_views(a), _views(b)) for a, b in pairs))
    for start, stop in tiles(queries, candidates * views, chunk):
        total: Any = None
        for number, (a, b) in enumerate(pairs):
            rows, columns = _views(a)[start:stop].flatten(0, 1), _views(b).flatten(0, 1)
            if len(buffers) == number:
                buffers.append(rows.new_empty(len(rows), len(columns)))
            # Writing into a buffer of the comparison's dtype also keeps autocast out: it leaves ``out=`` calls alone.
            scores = torch.mm(rows, columns.T, out=buffers[number][: len(rows)])
            if a.ndim == 3 or b.ndim == 3:
                scores = scores.view(stop - start, -1, candidates, len(columns) // candidates).amax((1, 3))
            total = scores if total is None else total.add_(scores)
        yield start, total if len(pairs) == 1 else total.div_(len(pairs))


def _views(embeddings: Tensor) -> Tensor:
    """[n, V, D], V being 1 where there is one embedding each."""
    return embeddings if embeddings.ndim == 3 else embeddings[:, None]


def score_dtype(*tensors: Tensor) -> torch.dtype:
    """Where scores are compared: float64 for float64 and integers, float32 for everything narrower."""
    for tensor in tensors:
        if tensor.is_complex():
            raise CoderError(f"scores must be real numbers, got {tensor.dtype}")
    wide = any(tensor.dtype == torch.float64 or not tensor.is_floating_point() for tensor in tensors)
    return torch.float64 if wide else torch.float32


def comparable(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Every model's embeddings in the dtype that their products are compared in."""
    dtype = score_dtype(*(side for pair in pairs for side in pair))
    return [(images.to(dtype), texts.to(dtype)) for images, texts in pairs]


def check_embeddings(
    image_embeddings: Tensor | Sequence[Tensor],
    text_embeddings: Tensor | Sequence[Tensor],
    image_of_text: Tensor | Sequence[int],
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Each model's embeddings, [N, D] or [N, V, D] and [T, D], checked, and the owners, int64 [T]."""
    sides = [
        list(side) if isinstance(side, (list, tuple)) and side and isinstance(side[0], Tensor) else [torch.as_tensor(side)]
        for side in (image_embeddings, text_embeddings)
    ]
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise CoderError(f"an ensemble needs images and texts of each model, got {len(sides[0])} and {len(sides[1])}")
    pairs = list(zip(*sides, strict=True))
    for images, texts in pairs:
        shapes = f"got {tuple(images.shape)} and {tuple(texts.shape)}"
        if images.ndim not in (2, 3) or texts.ndim != 2:
            raise CoderError(f"embeddings must be [images, dim] (or [images, views, dim]) and [texts, dim], {shapes}")
        if images.shape[-1] != texts.shape[1]:
            raise CoderError(f"image and text embeddings must have the same dimension, {shapes}")
        if images.device != texts.device:
            raise CoderError(f"image and text embeddings must be on one device, got {images.device} and {texts.device}")
        if (len(images), len(texts)) != (len(pairs[0][0]), len(pairs[0][1])):
            first = f"{tuple(pairs[0][0].shape)} and {tuple(pairs[0][1].shape)}"
            raise CoderError(f"models of an ensemble must have the same images and texts: {first} beside {shapes[4:]}")
    owner = _owners(image_of_text, len(pairs[0][0]), len(pairs[0][1]), pairs[0][0].device)
    return pairs, owner


def _owners(image_of_text: Tensor | Sequence[int], images: int, texts: int, device: torch.device) -> Tensor:
    """``image_of_text`` as int64 [T] on ``device``, checked: one integer per caption, every image named."""
    if not images or not texts:
        raise CoderError(f"retrieval needs an image and a caption at least, got {images} images and {texts} captions")
    owner = torch.as_tensor(image_of_text)
    if owner.is_floating_point() or owner.is_complex() or owner.dtype == torch.bool:
        raise CoderError(f"image_of_text must hold integers, got {owner.dtype}")
    if tuple(owner.shape) != (texts,):
        raise CoderError(
            f"image_of_text must name one image for each of the {texts} captions, got shape {tuple(owner.shape)}"
        )
    owner = owner.to(device=device, dtype=torch.int64)
    outside = ((owner < 0) | (owner >= images)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise CoderError(f"caption {at} names image {int(owner[at])}: images are 0 to {images - 1}")
    bare = (torch.bincount(owner, minlength=images) == 0).nonzero()
    if len(bare):
        raise CoderError(f"image {int(bare[0])} has no caption: every image needs one at least")
    return owner
