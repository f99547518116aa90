"""Re-ranking against a loop over pairs, against the whole matrix, and what it asks for."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation import metrics, recall, rerank
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.evaluation.rerank import MeanScore

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")


def same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key], key


def from_matrix(matrix: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda images, texts: matrix[images[:, :, None], texts[:, None]]


def slow_rank(shortlist_by: list[float], order_by: list[float], right: list[int], k: int) -> int:
    """0-based rank of the best right candidate, one candidate at a time."""

    def key(score: float, wrong: bool) -> float:
        return score if not math.isnan(score) else INF if wrong else -INF

    everybody = range(len(shortlist_by))
    wrong = [c for c in everybody if c not in right]
    # higher first; of equal ones the wrong first; then as they come
    ranked = sorted(everybody, key=lambda c: (-key(shortlist_by[c], c in wrong), c in right, c))
    shortlist = ranked[:k]
    inside = [c for c in shortlist if c in right]
    if not inside:
        return next(place for place, c in enumerate(ranked) if c in right)
    return min(
        sum(math.isnan(order_by[r]) or key(order_by[w], True) >= order_by[r] for w in shortlist if w in wrong)
        for r in inside
    )


def slow_ranks(shortlist_by: Tensor, order_by: Tensor, owner: list[int], k: int) -> tuple[list[int], list[int]]:
    images, texts = range(len(shortlist_by)), range(len(owner))
    i2t = [
        slow_rank(shortlist_by[i].tolist(), order_by[i].tolist(), [t for t in texts if owner[t] == i], k) for i in images
    ]
    t2i = [slow_rank(shortlist_by[:, t].tolist(), order_by[:, t].tolist(), [owner[t]], k) for t in texts]
    return i2t, t2i


SCORES = st.sampled_from([NAN, -INF, INF, -1.0, 0.0, 0.25, 0.5, 1.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Shortlist scores [N, T], pair scores [N, T] and owners: few values, so that ties abound, NaN and infinities."""
    images = draw(st.integers(1, 7))
    owner = draw(st.permutations([*range(images), *draw(st.lists(st.integers(0, images - 1), max_size=9))]))
    size = images * len(owner)
    first, second = (torch.tensor(draw(st.lists(SCORES, min_size=size, max_size=size))) for _ in range(2))
    return first.view(images, -1), second.view(images, -1), owner


@given(cases(), st.integers(1, 18), st.sampled_from([None, 1, 2, 3]))
def test_equals_the_loop(case: tuple[Tensor, Tensor, list[int]], k: int, chunk: int | None) -> None:
    shortlist_by, order_by, owner = case
    # any finite matrix is a product of embeddings; NaN and infinities come in through the tile itself
    got = by_tiles(shortlist_by, order_by, owner, k, chunk)
    want = slow_ranks(shortlist_by, order_by, owner, k)
    assert (got["i2t_ranks"].tolist(), got["t2i_ranks"].tolist()) == want


def by_tiles(shortlist_by: Tensor, order_by: Tensor, owner: list[int], k: int, chunk: int | None) -> dict[str, Any]:
    """:func:`rerank` with the matrix of the first stage given, where no embeddings have it as their product."""
    module = sys.modules["coder_plugin.evaluation.rerank"]
    real = module.products  # type: ignore[attr-defined]

    def products(pairs: Any, chunk: int | None) -> Any:
        queries = shortlist_by if len(pairs[0][0]) == len(shortlist_by) and pairs[0][0][0, 0] == 1 else shortlist_by.T
        for start, stop in metrics.tiles(*queries.shape, chunk):
            yield start, queries[start:stop].clone()

    module.products = products  # type: ignore[attr-defined]
    try:
        images, texts = torch.ones(len(shortlist_by), 1), torch.zeros(len(owner), 1)
        return rerank(images, texts, owner, from_matrix(order_by), k=k, chunk=chunk)
    finally:
        module.products = real  # type: ignore[attr-defined]


def embedded(images: int, captions: int, seed: int = 0, views: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integer embeddings, whose products are exact in any tile and tie, a matrix of pair scores, and owners."""
    generator = torch.Generator().manual_seed(seed)
    shape = (images, views, 5) if views else (images, 5)
    image = torch.randint(-2, 3, shape, generator=generator).float()
    text = torch.randint(-2, 3, (captions, 5), generator=generator).float()
    matrix = torch.randint(-3, 4, (images, captions), generator=generator).float()
    owner = torch.cat([torch.arange(images), torch.randint(images, (captions - images,), generator=generator)])
    return image, text, matrix, owner[torch.randperm(captions, generator=generator)]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("k", [1, 5, 13, 30])
@pytest.mark.parametrize("views", [0, 3])
def test_embeddings_and_their_views_equal_the_loop(k: int, chunk: int | None, views: int) -> None:
    image, text, matrix, owner = embedded(12, 30, views=views)
    product = (image @ text.T).amax(1) if views else image @ text.T
    got = rerank(image, text, owner, from_matrix(matrix), k=k, chunk=chunk)
    assert (got["i2t_ranks"].tolist(), got["t2i_ranks"].tolist()) == slow_ranks(product, matrix, owner.tolist(), k)
    if k >= 30:
        same(got, recall(matrix, owner))


def test_hand_value() -> None:
    """Two of three candidates are kept: what is third stays there, however good its score."""
    image = torch.eye(3)
    text = torch.tensor([[0.5, 0.9, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.1]])  # of images 0, 1, 2
    score = from_matrix(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    got = rerank(image, text, [0, 1, 2], score, k=2)
    assert got["t2i_ranks"].tolist() == [0, 0, 2]
    # image 0: captions 1 and 2 (.9) before its own (.5); image 1: its own ties with caption 2 and loses the place
    assert got["i2t_ranks"].tolist() == [2, 2, 2]
    assert got["t2i_r1"] == pytest.approx(200 / 3) and got["i2t_r1"] == 0
    assert rerank(image, text, [0, 1, 2], score, k=3)["rsum"] == 600


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded batches of the documented shapes; nothing of queries whose right candidates are not in the shortlist."""
    monkeypatch.setattr(sys.modules["coder_plugin.evaluation.rerank"], "_PAIRS", 10)
    image, text, matrix, owner = embedded(12, 30)
    asked: list[tuple[Tensor, Tensor]] = []

    def score(images: Tensor, texts: Tensor) -> Tensor:
        asked.append((images, texts))
        assert images.dtype == texts.dtype == torch.int64 and len(images) == len(texts)
        return from_matrix(matrix)(images, texts)

    for k in (1, 4, 25):
        asked.clear()
        got = rerank(image, text, owner, score, k=k)
        assert (got["i2t_ranks"].tolist(), got["t2i_ranks"].tolist()) == slow_ranks(image @ text.T, matrix, owner.tolist(), k)
        assert all(images.shape[1] == 1 or texts.shape[1] == 1 for images, texts in asked)
        assert max(len(images) * images.shape[1] * texts.shape[1] for images, texts in asked) <= 10
    one = rerank(image, text, owner, score, k=1)
    asked.clear()
    rerank(image, text, owner, score, k=1)
    found = {(i, int((image[i] @ text.T).argmax())) for i in (one["i2t_ranks"] == 0).nonzero().squeeze(1).tolist()}
    found |= {(int(owner[t]), t) for t in (one["t2i_ranks"] == 0).nonzero().squeeze(1).tolist()}
    pairs = [pair for images, texts in asked for pair in zip(images.flatten().tolist(), texts.flatten().tolist(), strict=True)]
    assert sorted(pairs) == sorted(found) and len(pairs) < 42


def test_a_pair_in_shortlists_of_both_directions_is_scored_once() -> None:
    image, text, matrix, owner = embedded(12, 30)
    asked: list[tuple[int, int]] = []

    def score(images: Tensor, texts: Tensor) -> Tensor:
        asked.extend((int(i), int(t)) for row, [t] in zip(images, texts, strict=True) for i in row.unique())
        return from_matrix(matrix)(images, texts)

    rerank(image, text, owner, score, k=30)
    assert len(asked) == len(set(asked)) == 12 * 30


def test_what_is_refused() -> None:
    image, text, matrix, owner = embedded(8, 20)
    for k, chunk, message in ((0, None, "1 candidate or more, got k = 0"), (3, 0, "chunk must be 1 or more")):
        with pytest.raises(CoderError, match=message):
            rerank(image, text, owner, from_matrix(matrix), k=k, chunk=chunk)
    with pytest.raises(CoderError, match="same dimension"):
        rerank(image, text[:, :4], owner, from_matrix(matrix), k=3)
    with pytest.raises(CoderError, match="image 7 has no caption"):
        rerank(image, text, owner % 7, from_matrix(matrix), k=3)
    with pytest.raises(CoderError, match=r"must be \(8, 8, 1\), got \(8, 8\)"):
        rerank(torch.eye(8), torch.eye(8), range(8), lambda i, t: matrix[i, t], k=3)


def test_scorers() -> None:
    (a, b, *_), (c, d, *_) = embedded(6, 11, views=3), embedded(6, 11, seed=1)
    first, second = Scores(a, b), Scores(c, d)
    both, together = MeanScore([first, second]), Scores([a, c], [b, d])
    matrices = (a @ b.T).amax(1), c @ d.T
    mean = sum(matrices) / 2
    images, texts = torch.tensor([[0, 5], [2, 2]]), torch.tensor([[1, 10, 3], [0, 4, 4]])
    for scorer, matrix in zip((first, second, both, together), (*matrices, mean, mean), strict=True):
        assert torch.equal(scorer.all_pairs(), matrix)
        assert torch.equal(scorer(images, texts), from_matrix(matrix)(images, texts))


@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 40), st.integers(1, 35), st.integers(0, 2**31))
def test_tiles_of_any_size_equal_the_whole(images: int, more: int, k: int, chunk: int, seed: int) -> None:
    image, text, matrix, owner = embedded(images, images + more, seed)
    whole = rerank(image, text, owner, from_matrix(matrix), k=k)
    same(rerank(image, text, owner, from_matrix(matrix), k=k, chunk=chunk), whole)


CHILD = """
import sys, time, torch
from coder_plugin.evaluation import rerank
torch.manual_seed(0)
image, text = torch.randn(5000, 256), torch.randn(25000, 256)
owner = torch.arange(5000).repeat_interleave(5)
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
text += 0.5 * image[owner]
score = lambda i, t: torch.einsum("gad,gbd->gab", image[i], text[t])
before, start = peak(), time.perf_counter()
rerank(image, text, owner, score, k=32)
print(peak() - before, time.perf_counter() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read in Linux's units")
def test_coco_5k_memory() -> None:
    output = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, check=True, capture_output=True, text=True, timeout=500)
    grown, took = map(float, output.stdout.split())
    print(f"{grown:.0f} MiB, {took:.1f} s")
    assert grown < 300, "well under the [N, T] matrix alone (477 MiB)"
