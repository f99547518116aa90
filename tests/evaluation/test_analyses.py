"""Alignment, uniformity and recall by length: hand values, a slow reference, tiles against the whole, degenerate data."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.errors import CoderError
from coder_plugin.evaluation import analyses, recall_from_embeddings
from coder_plugin.evaluation.analyses import (
    alignment,
    analyse,
    format_analyses,
    recall_by_length,
    token_means,
    uniformity,
)

ROOT2, ROOT3 = math.sqrt(2), math.sqrt(3)


def embeddings(
    images: int, texts: int, dim: int, *, views: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random embeddings of any norm, and owners in any order that name every image."""
    generator = torch.Generator().manual_seed(seed)
    shape = (images, views, dim) if views else (images, dim)
    owner = torch.cat([torch.arange(images), torch.randint(images, (texts - images,), generator=generator)])
    owner = owner[torch.randperm(texts, generator=generator)]
    image, text = torch.randn(shape, generator=generator), torch.randn(texts, dim, generator=generator)
    return image.to(dtype), text.to(dtype), owner


def words(*counts: int) -> list[str]:
    return [" ".join(["word"] * count) for count in counts]


# -- a slow reference: loops over pairs in numpy -----------------------------------------------------------------------


def unit(rows: torch.Tensor) -> np.ndarray:
    array = rows.double().numpy()
    array = array if array.ndim == 3 else array[:, None]
    return array / np.sqrt((array**2).sum(-1, keepdims=True))


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return min(math.sqrt(((x - y) ** 2).sum()) for x in a for y in b)


def figures(distances: list[float]) -> dict[str, float]:
    mean = math.fsum(distances) / len(distances)
    variance = math.fsum((d - mean) ** 2 for d in distances) / len(distances)
    return {"count": len(distances), "mean": mean, "variance": variance, "std": math.sqrt(variance)}


def reference(images: torch.Tensor, texts: torch.Tensor, owner: torch.Tensor) -> dict[str, dict[str, dict[str, float]]]:
    v, w, of = unit(images), unit(texts), owner.tolist()
    aligned = {
        "image_text": [apart(v[i], w[t]) for t, i in enumerate(of)],
        "text_text": [apart(w[s], w[t]) for s, t in itertools.combinations(range(len(w)), 2) if of[s] == of[t]],
    }
    uniform = {
        "images": [apart(v[i], v[j]) for i, j in itertools.combinations(range(len(v)), 2)],
        "texts": [apart(w[s], w[t]) for s, t in itertools.combinations(range(len(w)), 2) if of[s] != of[t]],
    }
    return {
        "alignment": {name: figures(distances) for name, distances in aligned.items()},
        "uniformity": {name: figures(distances) for name, distances in uniform.items()},
    }


def close(got: dict, expected: dict, tolerance: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            close(got[key], value, tolerance)
        elif key == "count" or value is None:
            assert got[key] == value, key
        else:
            assert got[key] == pytest.approx(value, abs=tolerance), key


@pytest.mark.parametrize(("views", "chunk"), [(0, None), (0, 4), (3, None), (3, 1)])
def test_reference(views: int, chunk: int | None) -> None:
    images, texts, owner = embeddings(7, 23, 5, views=views)
    expected = reference(images, texts, owner)
    close(alignment(images, texts, owner, chunk=chunk), expected["alignment"])
    close(uniformity(images, texts, owner, chunk=chunk), expected["uniformity"])


# -- hand values -------------------------------------------------------------------------------------------------------


def test_hand_values() -> None:
    images = torch.tensor([[3.0, 0.0], [0.0, 0.5]])  # along x and along y
    texts = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 7.0]])
    owner = [0, 0, 1]
    got = alignment(images, texts, owner)
    # Distances 0 (same direction), 2 (opposite) and 0; mean 2/3, E d² = 4/3, variance 4/3 - 4/9 = 8/9.
    assert got["image_text"] == pytest.approx({"count": 3, "mean": 2 / 3, "variance": 8 / 9, "std": math.sqrt(8) / 3})
    assert got["text_text"] == pytest.approx({"count": 1, "mean": 2, "variance": 0, "std": 0})
    got = uniformity(images, texts, owner)
    assert got["images"] == pytest.approx({"count": 1, "mean": ROOT2, "variance": 0, "std": 0})
    # text 2 against each of image 0's: those two are no pair here
    assert got["texts"] == pytest.approx({"count": 2, "mean": ROOT2, "variance": 0, "std": 0}, abs=1e-9)


def test_opposite_points_are_two_apart() -> None:
    """Of forty pairs, some are farther apart than 2 by rounding."""
    for points in torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(0)):
        pair = torch.cat([points, -points])
        got = uniformity(pair, pair, [0, 1])["images"]
        assert got["mean"] == pytest.approx(2, abs=1e-12)


def test_nearest_view_counts() -> None:
    images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [-1.0, 0.0]]])
    texts = torch.tensor([[0.0, 1.0], [0.5, -ROOT3 / 2]])
    # Cosines 0 and 1 of the first image, -sqrt(3)/2 and -1/2 of the second: distances 0 and sqrt(2 + 1).
    assert alignment(images, texts, [0, 1])["image_text"]["mean"] == pytest.approx(ROOT3 / 2)
    assert uniformity(images, texts, [0, 1])["images"]["mean"] == pytest.approx(0, abs=1e-7)
    assert alignment(images[:, :1], texts, [0, 1]) == alignment(images[:, 0], texts, [0, 1])  # one view is none


def test_mean_square_of_all_pairs_is_known_from_the_mean_embedding() -> None:
    """Over all ordered pairs, own ones included, E d² = 2 - 2 |mean|²."""
    images, texts, _ = embeddings(300, 300, 16)
    got = uniformity(images + 0.5, texts, torch.arange(300), chunk=64)["images"]
    mean = torch.nn.functional.normalize(images + 0.5, dim=1).mean(0)
    expected = (2 - 2 * float(mean @ mean)) * 300 / 299
    assert got["mean"] ** 2 + got["variance"] == pytest.approx(expected, rel=1e-12)


# -- invariances and precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_embeddings_are_computed_wide(dtype: torch.dtype) -> None:
    images, texts, owner = embeddings(6, 15, 8, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = {"alignment": alignment(images, texts, owner), "uniformity": uniformity(images, texts, owner)}
    close(got, reference(images, texts, owner), 1e-9)


@pytest.mark.parametrize("spread", [1e-3, 1e-6, 1e-8])
def test_collapsed_embeddings_keep_their_digits(spread: float) -> None:
    """With sqrt(2 - 2cos) in float64, distances of 1e-8 are all rounding, and in float32 those of 1e-4 already."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.nn.functional.normalize(torch.ones(16, dtype=torch.float64), dim=0)
    texts = corner + spread * torch.randn(40, 16, generator=generator, dtype=torch.float64)
    owner = torch.arange(20).repeat(2)
    got = {"alignment": alignment(texts[:20], texts, owner), "uniformity": uniformity(texts[:20], texts, owner)}
    expected = reference(texts[:20], texts, owner)
    for part, pairs in (("alignment", "text_text"), ("uniformity", "images"), ("uniformity", "texts")):
        for figure in ("mean", "variance"):
            assert got[part][pairs][figure] == pytest.approx(expected[part][pairs][figure], rel=1e-5, abs=0)


def test_memory_is_a_tile_not_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is seen: none is larger than a tile, and together they are the upper half of the matrix."""
    largest, sizes, matmul = 64, [], torch.Tensor.__matmul__
    monkeypatch.setattr(analyses, "_TILE", largest**2)

    def seen(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = matmul(left, right)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", seen)
    images, texts, owner = embeddings(100, 500, 8, views=3)
    got = uniformity(images, texts, owner)
    assert max(sizes) <= largest**2
    assert sum(sizes) < 0.7 * (300**2 + 500**2)
    assert got["images"]["count"] == 100 * 99 // 2
    counts = torch.bincount(owner)
    assert got["texts"]["count"] == (500**2 - int(counts.square().sum())) // 2


# -- nothing to measure, nothing to lose -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "bad", "side"),
    [
        (alignment, math.nan, "image"),
        (alignment, -math.inf, "text"),
        (uniformity, math.inf, "image"),
        (uniformity, math.nan, "text"),
    ],
)
def test_embeddings_without_a_direction(function, bad: float, side: str) -> None:
    images, texts, owner = embeddings(3, 6, 4, views=2)
    if side == "image":
        images[2, 1, 0] = bad
    else:
        texts[2, 0] = bad
    with pytest.raises(CoderError, match=f"1 {side} embedding.*the first at 2"):
        function(images, texts, owner)


def test_bad_input() -> None:
    images, texts, owner = embeddings(3, 6, 4)
    captions = words(*[5] * 6)
    with pytest.raises(CoderError, match="zeros, the first at 1"):
        alignment(images.index_fill(0, torch.tensor([1]), 0), texts, owner)
    with pytest.raises(CoderError, match="ensemble"):
        analyse([images, images], [texts, texts], owner, captions)
    with pytest.raises(CoderError, match="real"):
        alignment(images.to(torch.complex128), texts.to(torch.complex128), owner)
    with pytest.raises(CoderError, match="same dimension"):
        uniformity(images, texts[:, :2], owner)
    with pytest.raises(CoderError, match="image 0 has no caption"):
        uniformity(images, texts, [1, 1, 2, 2, 1, 2])
    for wrong in (captions[:5], "abcdef"):
        with pytest.raises(CoderError, match="captions must be"):
            analyse(images, texts, owner, wrong)


# -- recall by query length --------------------------------------------------------------------------------------------


def test_recall_by_length_hand_values() -> None:
    captions = [*words(1, 5, 6, 7, 8, 12, 14), "", "  a\tb \n c ", *words(20, 300)]
    ranks = torch.tensor([0, 10, 4, 5, 0, 9, 1, 0, 3, 0, 7])
    got = recall_by_length(ranks, captions)
    table = {each.pop("words"): each for each in got["bins"]}
    assert list(table) == ["<6", "6-7", "8-9", "10-11", "12-14", "15-19", "20+"]
    assert table["<6"] == {"count": 4, "t2i_r1": 50.0, "t2i_r5": 75.0, "t2i_r10": 75.0}
    assert table["6-7"] == {"count": 2, "t2i_r1": 0.0, "t2i_r5": 50.0, "t2i_r10": 100.0}
    assert table["8-9"] == {"count": 1, "t2i_r1": 100.0, "t2i_r5": 100.0, "t2i_r10": 100.0}
    assert table["10-11"] == table["15-19"] == {"count": 0, "t2i_r1": None, "t2i_r5": None, "t2i_r10": None}
    assert table["12-14"] == {"count": 2, "t2i_r1": 0.0, "t2i_r5": 50.0, "t2i_r10": 100.0}
    assert table["20+"] == {"count": 2, "t2i_r1": 50.0, "t2i_r5": 50.0, "t2i_r10": 100.0}
    assert got["all"] == pytest.approx({"count": 11, "t2i_r1": 400 / 11, "t2i_r5": 700 / 11, "t2i_r10": 1000 / 11})


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    edges=st.sets(st.integers(1, 12), min_size=1).map(sorted),
    data=st.data(),
)
def test_every_caption_is_in_one_bin(lengths: list[int], edges: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths)))
    got = recall_by_length(ranks, words(*lengths), edges=edges)
    bounds = list(zip([0, *edges], [*edges, math.inf], strict=True))
    for each, (low, high) in zip(got["bins"], bounds, strict=True):
        inside = [rank for rank, length in zip(ranks, lengths, strict=True) if low <= length < high]
        assert each["count"] == len(inside)
        for k in (1, 5, 10):
            hits = sum(rank < k for rank in inside)
            assert each[f"t2i_r{k}"] == (pytest.approx(100 * hits / len(inside)) if inside else None)


@pytest.mark.parametrize(
    ("ranks", "captions", "options", "message"),
    [
        ([0, 1], ["a"], {}, "one each"),
        ([], [], {}, "one each"),
        ([0], "a", {}, "one each"),
        ([0.5], ["a"], {}, "integers from 0"),
        ([-1], ["a"], {}, "integers from 0"),
        ([0], ["a"], {"edges": []}, "edges"),
        ([0], ["a"], {"edges": [0, 3]}, "edges"),
        ([0], ["a"], {"edges": [3, 3]}, "edges"),
        ([0], ["a"], {"edges": [2.5]}, "edges"),
        ([0], ["a"], {"sample": 2}, "sample"),
        ([0], ["a"], {"sample": 0}, "sample"),
    ],
)
def test_recall_by_length_bad_input(ranks, captions, options, message) -> None:
    with pytest.raises(CoderError, match=message):
        recall_by_length(ranks, captions, **options)


# -- all together ------------------------------------------------------------------------------------------------------


def test_analyse_is_its_parts_and_json() -> None:
    images, texts, owner = embeddings(8, 24, 6)
    captions = words(*range(1, 25))
    got = analyse(images, texts, owner, captions, edges=[5, 9], sample=20, seed=3, chunk=7)
    close(got["alignment"], alignment(images, texts, owner), 1e-12)
    close(got["uniformity"], uniformity(images, texts, owner), 1e-12)
    ranks = recall_from_embeddings(images, texts, owner)["t2i_ranks"]  # products as they are, not cosines
    assert got["recall_by_length"] == recall_by_length(ranks, captions, edges=[5, 9], sample=20, seed=3)
    assert (got["images"], got["texts"]) == (8, 24)
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_means_of_tokens_leave_padding_out_and_add_the_whole_image() -> None:
    tokens = torch.tensor([[[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]], [[1.0, 0.0], [7.0, 7.0], [7.0, 7.0]]])
    item = {"tokens": tokens, "mask": torch.tensor([[True, True, False], [True, False, False]])}
    assert token_means(item).tolist() == [[2.0, 4.0], [1.0, 0.0]]
    assert token_means({**item, "whole": torch.tensor([[1.0, -4.0], [0.0, 2.0]])}).tolist() == [[3.0, 0.0], [1.0, 2.0]]


def test_fused_scores_of_pairs_are_distances_of_their_own() -> None:
    images, texts, owner = embeddings(8, 24, 6)
    cosines = (torch.nn.functional.normalize(images, dim=1)[owner] * torch.nn.functional.normalize(texts, dim=1)).sum(1)
    plain = analyse(images, texts, owner, words(*[3] * 24))
    assert "image_text_fused" not in plain["alignment"]
    assert plain["scores"] == dict.fromkeys(("alignment", "uniformity", "recall_by_length"), "embeddings")
    # by the cosine as if it were a fused score the distances are those of the embeddings
    ranks = torch.zeros(24, dtype=torch.int64)
    got = analyse(images, texts, owner, words(*[3] * 24), t2i_ranks=ranks, ranked_by="fused score", fused_scores=cosines)
    close(got["alignment"].pop("image_text_fused"), got["alignment"]["image_text"], 1e-9)
    assert {key: got[key] for key in ("alignment", "uniformity")} == {key: plain[key] for key in ("alignment", "uniformity")}
    assert got["scores"] == plain["scores"] | {"image_text_fused": "fused score", "recall_by_length": "fused score"}
    by_hand = analyse(images, texts, owner, words(*[3] * 24), fused_scores=torch.tensor([1.0, 0.5, -1.0]).repeat(8))
    assert by_hand["alignment"]["image_text_fused"]["mean"] == pytest.approx((0 + 1 + 2) / 3)
    lines = format_analyses({"plain": plain, "both": got | {"alignment": by_hand["alignment"]}}).splitlines()
    assert lines[0].split("  ")[1].strip() == "I-T mean" and "I-T fused" in lines[0]
    at = lines[0].index("I-T fused")
    assert [line[at : at + 9].strip() for line in lines[1:3]] == ["-", "1.0000"]
    assert any(line.startswith("plain, by embeddings") for line in lines)
    assert any(line.startswith("both, by fused score") for line in lines)


def test_table() -> None:
    data = embeddings(3, 3, 4)
    rows = {name: analyse(*data, words(3, 7, 25), t2i_ranks=ranks) for name, ranks in (("m", [0, 5, 20]), ("longer", [0] * 3))}
    lines = format_analyses(json.loads(json.dumps(rows))).splitlines()
    distances, recalls = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert distances[0].split("  ")[0] == "name" and len(distances) == 3
    assert distances[1].split()[:3] == ["m", f"{rows['m']['alignment']['image_text']['mean']:.4f}", "-"]
    assert recalls[0].split() == ["name", "words", "<6", "6-7", "8-9", "10-11", "12-14", "15-19", "20+", "all"]
    assert recalls[1].split() == [*"m, by ranks that were given captions".split(), "1", "1", "0", "0", "0", "0", "1", "3"]
    assert recalls[2].split() == ["t2i", "R@1", "100.0", "0.0", "-", "-", "-", "-", "0.0", "33.3"]
    assert recalls[4].split() == ["t2i", "R@10", "100.0", "100.0", "-", "-", "-", "-", "0.0", "66.7"]
    assert {len(line) for line in distances} == {len(distances[0])} and {len(line) for line in recalls} == {len(recalls[0])}
