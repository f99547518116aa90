"""Recall and ranks: outside numbers, hand values, the loop reference, and the tiled path against the whole matrix."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.errors import CoderError
from coder_plugin.evaluation import format_table, mean_over_runs, metrics, recall, recall_folds, recall_from_embeddings
from tests.references import recall as reference

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT.parent / "shared" / "data" / "vectors" / "retrieval.npz"
RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
NAN, INF = float("nan"), float("inf")


def same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key], key


def integer_embeddings(images: int, captions: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Small integers as floats: every product is exact in any order of summation, and ties abound."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(-2, 3, (images, dim), generator=generator).float()
    text = torch.randint(-2, 3, (captions, dim), generator=generator).float()
    owner = torch.cat([torch.arange(images), torch.randint(images, (captions - images,), generator=generator)])
    return image, text, owner[torch.randperm(captions, generator=generator)]


# -- outside numbers and hand values ----------------------------------------------------------------------------------


@pytest.mark.skipif(not VECTORS.exists(), reason=f"no check vectors at {VECTORS}")
@pytest.mark.parametrize(("chunk", "dtype"), [(None, torch.float64), (7, torch.float32)])
def test_check_vectors(chunk: int | None, dtype: torch.dtype) -> None:
    z = np.load(VECTORS)
    got = recall(torch.from_numpy(z["similarity"]).to(dtype), torch.from_numpy(z["image_of_text"]), chunk=chunk)
    assert got["i2t_ranks"].tolist() == z["i2t_rank"].tolist()
    assert got["t2i_ranks"].tolist() == z["t2i_rank"].tolist()
    assert [got[key] for key in RECALLS] == pytest.approx(z["recall"].tolist(), abs=1e-9)
    assert got["rsum"] == pytest.approx(float(z["rsum"]), abs=1e-9)


def test_hand_value() -> None:
    similarity = torch.tensor([[0.1, 0.9, 0.8, 0.0], [0.3, 0.2, 0.7, 0.6], [0.4, 0.1, 0.9, 0.7]])
    got = recall(similarity, torch.tensor([0, 0, 1, 2]))
    # Image 0 finds caption 1 first; image 1's caption (.7) is its best; image 2's (.7) stands behind caption 2 (.9).
    assert got["i2t_ranks"].tolist() == [0, 0, 1]
    # Caption 0 (.1) is last; caption 1 first; caption 2 (.7) behind .8 and .9; caption 3 first.
    assert got["t2i_ranks"].tolist() == [2, 0, 2, 0]
    assert got["i2t_r1"] == pytest.approx(200 / 3)
    assert got["t2i_r1"] == 50
    assert got["rsum"] == pytest.approx(200 / 3 + 50 + 400)
    assert (got["i2t_medr"], got["t2i_medr"]) == (1, 2)  # medians 0 and 1, printed from 1
    assert (got["i2t_meanr"], got["t2i_meanr"]) == (pytest.approx(4 / 3), 2)
    assert got["i2t_ranks"].dtype == got["t2i_ranks"].dtype == torch.int64


def test_a_perfect_model() -> None:
    owner = torch.arange(30).repeat_interleave(5)
    got = recall(torch.nn.functional.one_hot(owner).T.float(), owner)
    assert got["rsum"] == 600 and got["i2t_medr"] == got["t2i_medr"] == 1


@pytest.mark.parametrize("level", [0.0, 1.0, INF, -INF, NAN])
def test_a_collapsed_model_scores_zero(level: float) -> None:
    owner = torch.arange(50).repeat_interleave(5)
    got = recall(torch.full((50, 250), level), owner)
    assert got["rsum"] == 0
    assert set(got["i2t_ranks"].tolist()) == {245} and set(got["t2i_ranks"].tolist()) == {49}


@pytest.mark.parametrize(
    ("row", "rank"),
    [
        ([0.5, 0.5, 0.1], 1),  # a tie
        ([NAN, -INF, 0.1], 2),  # a right NaN is behind everything, even -inf
        ([0.5, NAN, 0.1], 1),  # a wrong NaN is before everything
        ([INF, NAN, INF], 2),  # even before +inf
        ([-INF, -INF, 0.0], 2),
        ([INF, 1.0, 2.0], 0),
    ],
)
def test_ties_and_special_values(row: list[float], rank: int) -> None:
    rest = [[0.0] * 3] * 2
    assert recall(torch.tensor([row, *rest]), [0, 1, 2])["i2t_ranks"][0] == rank
    assert recall(torch.tensor([row, *rest]).T, [0, 1, 2])["t2i_ranks"][0] == rank


def test_a_nan_caption_leaves_the_others_of_its_image() -> None:
    got = recall(torch.tensor([[NAN, 0.5, 0.2], [0.0, 0.0, 1.0]]), [0, 0, 1])
    assert got["i2t_ranks"].tolist() == [0, 0]
    assert got["t2i_ranks"].tolist() == [1, 0, 0]


# -- the loop reference -----------------------------------------------------------------------------------------------

SCORES = st.one_of(st.sampled_from([-INF, -1.0, 0.0, -0.0, 1.0, INF, NAN]), st.floats(-2, 2, width=16))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    owner = draw(st.permutations([i for i, count in enumerate(counts) for _ in range(count)]))
    row = st.lists(SCORES, min_size=len(owner), max_size=len(owner))
    return draw(st.lists(row, min_size=len(counts), max_size=len(counts))), owner


@given(
    matrices(),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
    st.sampled_from([None, 1, 2, 3, 100]),
)
def test_recall_equals_the_loop(case: tuple, dtype: torch.dtype, chunk: int | None) -> None:
    scores, owner = case
    got = recall(torch.tensor(scores, dtype=dtype), torch.tensor(owner), chunk=chunk)
    assert (got["i2t_ranks"].tolist(), got["t2i_ranks"].tolist()) == reference.ranks(scores, owner)
    for key, value in reference.recall(scores, owner).items():
        assert got[key] == pytest.approx(value, abs=1e-9), key


@given(matrices(), st.sampled_from([None, 1, 2, 3, 100]))
def test_embeddings_equal_the_loop(case: tuple, chunk: int | None) -> None:
    """One-hot captions on one side make the products the scores themselves, where they are finite."""
    scores, owner = case
    image = torch.tensor(scores, dtype=torch.float64).nan_to_num(5.0, 4.0, -4.0)
    got = recall_from_embeddings(image, torch.eye(len(owner), dtype=torch.float64), torch.tensor(owner), chunk=chunk)
    assert (got["i2t_ranks"].tolist(), got["t2i_ranks"].tolist()) == reference.ranks(image.tolist(), owner)


@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 8), st.integers(1, 35), st.integers(0, 2**31))
def test_tiles_of_any_size_equal_the_whole(images: int, more: int, dim: int, chunk: int, seed: int) -> None:
    image, text, owner = integer_embeddings(images, images + more, dim, seed)
    want = recall(image @ text.T, owner)
    same(recall(image @ text.T, owner, chunk=chunk), want)
    same(recall_from_embeddings(image, text, owner, chunk=chunk), want)


# -- tiles, dtypes, surroundings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_narrow_and_wide_inputs(dtype: torch.dtype) -> None:
    image, text, owner = integer_embeddings(20, 60, 12)  # exact in every one of these
    want = recall(image @ text.T, owner)
    same(recall((image @ text.T).to(dtype), owner), want)
    same(recall_from_embeddings(image.to(dtype), text.to(dtype), owner, chunk=7), want)
    same(recall_from_embeddings(image, text.to(dtype), owner), want)


def test_half_embeddings_are_multiplied_in_float32() -> None:
    """257 needs nine bits: a product kept in bfloat16 would round it to 256 and tie."""
    image = torch.tensor([[16.0, 1.0], [16.0, 0.0]], dtype=torch.bfloat16)
    text = torch.tensor([[16.0, 1.0], [16.0, -1.0]], dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = recall_from_embeddings(image, text, [0, 1])
        also = recall_from_embeddings(image.float(), text.float(), [0, 1])
    assert got["t2i_r1"] == also["t2i_r1"] == 100


def test_float64_scores_keep_their_last_bits() -> None:
    assert recall(torch.tensor([[1.0 + 1e-12, 1.0], [0.0, 1.0]], dtype=torch.float64), [0, 1])["i2t_r1"] == 100


def test_duplicate_embeddings_tie_in_every_tile() -> None:
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    for chunk in (1, 2, 3):
        got = recall_from_embeddings(image, image, [0, 1, 2], chunk=chunk)
        assert got["i2t_ranks"].tolist() == got["t2i_ranks"].tolist() == [1, 1, 0]


def test_a_nan_embedding_hurts_everybody() -> None:
    image = torch.eye(12)
    image[3] = NAN
    got = recall_from_embeddings(image, torch.eye(12), torch.arange(12))
    assert got["i2t_ranks"].tolist() == [0] * 3 + [11] + [0] * 8
    assert got["t2i_ranks"].tolist() == [1] * 3 + [11] + [1] * 8


# -- folds and the table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folds", [1, 2, 5])
def test_folds_equal_slicing_by_hand(folds: int) -> None:
    image, text, owner = integer_embeddings(20, 70, 8)
    got = recall_folds(image, text, owner, folds=folds, chunk=3)
    size = 20 // folds
    want = []
    for k in range(folds):
        kept = [t for t in range(70) if owner[t] // size == k]
        block = image[k * size : (k + 1) * size] @ text[kept].T
        want.append(recall(block, [int(owner[t]) - k * size for t in kept]))
    assert len(got["folds"]) == folds
    for fold, whole in zip(got["folds"], want, strict=True):
        assert fold == {key: value for key, value in whole.items() if not key.endswith("ranks")}
    for key in (*RECALLS, "rsum", "i2t_medr", "t2i_medr", "i2t_meanr", "t2i_meanr"):
        assert got[key] == pytest.approx(sum(fold[key] for fold in want) / folds)
    json.dumps(got)


def test_mean_and_deviation_over_runs() -> None:
    runs = [
        {**dict.fromkeys(metrics.METRICS, value), "folds": {"rsum": value + 100, "folds": [{}]}, "rerank": "all"}
        for value in (50.0, 51.0, 52.0, 55.0, 62.0)
    ]
    mean = mean_over_runs(runs)
    # deviations from 54: -4, -3, -2, 1, 8, whose squares are 94 in all, over 4
    assert mean.keys() == {*metrics.METRICS, "sd", "folds"} and mean["sd"].keys() == set(metrics.METRICS)
    assert (mean["t2i_r5"], mean["sd"]["t2i_r5"]) == (54.0, pytest.approx(23.5**0.5))
    assert mean["folds"] == {"rsum": 154.0, "sd": {"rsum": pytest.approx(23.5**0.5)}}
    lines = format_table({"a": runs[0], "mean of 5 runs": mean}).splitlines()
    assert lines[2].split("  ")[0] == "mean of 5 runs" and lines[2].count("54.0 ± 4.8") == 9 and "±" not in lines[1]
    assert len({len(line) for line in lines}) == 1
    assert mean_over_runs([{"a": 1}, {"b": 2}]) == {}


def test_table() -> None:
    good = {**dict.fromkeys(RECALLS, 50.0), "rsum": 300.04, "i2t_medr": 1.0, "t2i_medr": 2.4}
    table = format_table({"coder": good, "a longer name": recall(torch.eye(3), [0, 1, 2])}).splitlines()
    assert table[0].split("  ")[0] == "name" and table[0].endswith("R@sum  i2t MedR  t2i MedR")
    assert table[1].split() == ["coder", *["50.0"] * 6, "300.0", "1.0", "2.4"]
    assert table[2].startswith("a longer name  ") and table[2].split()[-3:] == ["600.0", "1.0", "1.0"]
    assert len({len(line) for line in table}) == 1
    assert format_table({}).startswith("name")
    with pytest.raises(CoderError, match=r"row 'x' lacks i2t_r1, .*rows are what recall\(\) returns"):
        format_table({"x": {"rsum": 1.0}})


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("similarity", "owner", "message"),
    [
        (torch.zeros(3), [0], r"similarity must be \[images, texts\], got shape \(3,\)"),
        (torch.zeros(0, 3), [0, 0, 0], "got 0 images and 3 captions"),
        (torch.zeros(3, 0), [], "got 3 images and 0 captions"),
        (torch.zeros(2, 3), [0, 1], r"each of the 3 captions, got shape \(2,\)"),
        (torch.zeros(2, 2), [[0], [1]], r"each of the 2 captions, got shape \(2, 1\)"),
        (torch.zeros(2, 2), [0.0, 1.0], "must hold integers, got torch.float32"),
        (torch.zeros(2, 2), [False, True], "must hold integers, got torch.bool"),
        (torch.zeros(2, 3), [0, 1, 2], "caption 2 names image 2: images are 0 to 1"),
        (torch.zeros(2, 3), [0, -1, 1], "caption 1 names image -1: images are 0 to 1"),
        (torch.zeros(4, 3), [0, 2, 2], "image 1 has no caption"),
        (torch.zeros(1, 1, dtype=torch.complex64), [0], "must be real numbers, got torch.complex64"),
    ],
)
def test_bad_matrices(similarity: torch.Tensor, owner: list, message: str) -> None:
    with pytest.raises(CoderError, match=message) as caught:
        recall(similarity, torch.tensor(owner))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [recall_from_embeddings, recall_folds])
def test_bad_embeddings(call) -> None:
    image, text = torch.zeros(5, 4), torch.zeros(5, 4)
    with pytest.raises(CoderError, match=r"same dimension, got \(5, 4\) and \(5, 3\)"):
        call(image, text[:, :3], range(5))
    with pytest.raises(CoderError, match=r"must be \[images, dim\] .* and \[texts, dim\], got \(5, 4\) and \(4,\)"):
        call(image, text[0], range(5))
    with pytest.raises(CoderError, match="must be on one device, got cpu and meta"):
        call(image, text.to("meta"), range(5))
    with pytest.raises(CoderError, match="image 3 has no caption"):
        call(image, text, [0, 1, 2, 4, 4])
    with pytest.raises(CoderError, match="chunk must be 1 or more, got 0"):
        call(image, text, range(5), chunk=0)


@pytest.mark.parametrize("folds", [0, -5, 2, 10])
def test_folds_must_divide(folds: int) -> None:
    with pytest.raises(CoderError, match=f"5 images cannot be cut into {folds} equal folds"):
        recall_folds(torch.zeros(5, 4), torch.zeros(5, 4), range(5), folds=folds)


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_flickr_size_takes_well_under_a_second() -> None:
    similarity, owner = torch.randn(1000, 5000), torch.arange(1000).repeat_interleave(5)
    recall(similarity, owner)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        recall(similarity, owner)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.8


# VmHWM is the peak of this very program; ru_maxrss also remembers the process that started it, so it is the fallback.
CHILD = """
import resource, sys, time, torch
from coder_plugin.evaluation import recall_from_embeddings
kind, dim, dtype, images = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
image = torch.empty(images, dim, dtype=dtype).normal_()
text = torch.empty(25000, dim, dtype=dtype).normal_()
owner = torch.arange(25000) % images
start = time.perf_counter()
if kind == "run":
    recall_from_embeddings(image, text, owner)
took = time.perf_counter() - start
try:
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
except (OSError, StopIteration):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
inputs = (image.nbytes + text.nbytes + owner.nbytes) / 2**20
print(peak / 1024, inputs, took)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read in Linux's units")
@pytest.mark.parametrize(
    ("dim", "dtype", "images", "limit"),
    # 5,000 images: the [N, T] matrix of 477 MiB and a tile; more than 1 GB is never held
    [(1024, "float32", 5000, 700), (1024, "bfloat16", 5000, 900), (256, "float32", 11_000, 300)],
)
def test_coco_memory(dim: int, dtype: str, images: int, limit: int) -> None:
    def child(kind: str) -> tuple[float, float, float]:
        command = [sys.executable, "-c", CHILD, kind, str(dim), dtype, str(images)]
        output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=500).stdout
        peak, inputs, took = map(float, output.split())
        return peak, inputs, took

    base, _, _ = child("baseline")
    peak, _, took = child("run")
    print(f"{images} images, D {dim} {dtype}: {peak:.0f} MiB, {peak - base:.0f} over the inputs alone, {took:.1f} s")
    assert peak - base < limit


def test_views_and_ensembles_are_means_of_greatest_products() -> None:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(6, 3, 8, generator=generator), torch.randn(6, 5, generator=generator)]
    texts = [torch.randn(14, 8, generator=generator), torch.randn(14, 5, generator=generator)]
    owner = [0, 1, 2, 3, 4, 5, *[n % 6 for n in range(8)]]
    several = torch.stack([(images[0] @ text).amax(1) for text in texts[0]], 1)  # the greatest of the three views
    for (ours, theirs), expected in (
        ((images[0], texts[0]), several),
        ((images, texts), (several + images[1] @ texts[1].T) / 2),
        (([images[1]] * 2, [texts[1]] * 2), images[1] @ texts[1].T),
    ):
        for chunk in (None, 1, 4):
            got = recall_from_embeddings(ours, theirs, owner, chunk=chunk)
            want = recall(expected, owner)
            assert got["i2t_ranks"].tolist() == want["i2t_ranks"].tolist()
            assert got["t2i_ranks"].tolist() == want["t2i_ranks"].tolist()
    folds = recall_folds(images, texts, owner, folds=2)
    kept = torch.tensor(owner) < 3
    first = recall_from_embeddings([x[:3] for x in images], [x[kept] for x in texts], [n for n in owner if n < 3])
    assert folds["folds"][0]["rsum"] == first["rsum"]
