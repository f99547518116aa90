"""The choice of regions, against hand values and a slow reference of bottom-up-attention's rule."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.detectors import select as module
from coder_plugin.detectors.select import Choice, select, to_regions
from coder_plugin.errors import CoderError
from tests.references.select import select as by_class


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - width * height
    return width * height / area if area else 0.0


def slow(scores: np.ndarray, boxes: np.ndarray, choice: Choice) -> list[tuple[int, int, float]]:
    """(proposal, class, score), one proposal, class and pair at a time."""
    best: dict[int, tuple[float, int]] = {}
    for number in range(scores.shape[1]):
        kept: list[int] = []
        for proposal in sorted(range(len(scores)), key=lambda each: -scores[each, number]):
            if all(overlap(boxes[proposal, number], boxes[other, number]) <= choice.nms for other in kept):
                kept.append(proposal)
                if scores[proposal, number] > best.get(proposal, (-1.0, 0))[0]:
                    best[proposal] = scores[proposal, number], number
    rows = sorted(((p, c, s) for p, (s, c) in best.items()), key=lambda row: (-row[2], row[0]))
    return [row for place, row in enumerate(rows) if row[2] >= choice.min_score or place < choice.min_regions][
        : choice.regions
    ]


@given(
    seed=st.integers(0, 10_000),
    proposals=st.integers(1, 14),
    classes=st.integers(1, 4),
    regions=st.integers(1, 8),
    least=st.integers(1, 4),
    floor=st.sampled_from([0.0, 0.5, 1.0]),
    shared=st.booleans(),
)
def test_equals_the_slow_reference(seed, proposals, classes, regions, least, floor, shared):
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 6, (proposals, 1 if shared else classes, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + rng.integers(1, 5, corners.shape)], -1).astype(np.float32)
    scores = rng.permutation(proposals * classes).reshape(proposals, classes).astype(np.float32) / 64
    choice = Choice(regions, 0.32, floor, least)  # no overlap of such boxes is just that
    given_boxes = torch.from_numpy(boxes[:, 0] if shared else boxes)
    chosen, kinds, conf = select(torch.from_numpy(scores), given_boxes, choice)
    expected = slow(scores, np.broadcast_to(boxes, (proposals, classes, 4)), choice)
    assert list(zip(chosen.tolist(), kinds.tolist(), conf.tolist(), strict=True)) == expected


def same(scores: torch.Tensor, boxes: torch.Tensor, choice: Choice) -> bool:
    return all(map(torch.equal, select(scores, boxes, choice), by_class(scores, boxes, choice)))


@given(
    seed=st.integers(0, 10_000),
    proposals=st.integers(1, 50),
    classes=st.integers(1, 30),
    choice=st.builds(
        Choice,
        regions=st.integers(1, 12),
        nms=st.sampled_from([0.0, 0.31, 0.7, 1.0]),
        min_score=st.sampled_from([0.0, 0.4, 0.9]),
        min_regions=st.integers(1, 15),
    ),
    shared=st.booleans(),
    levels=st.sampled_from([2, 20, 10**6]),
    crowded=st.booleans(),
    first=st.sampled_from([1, 4, 32]),
)
def test_equals_suppression_class_by_class(seed, proposals, classes, choice, shared, levels, crowded, first):
    """With ties within and across classes (few levels of scores), boxes without area, and few or many survivors."""
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(proposals, 1 if shared else classes, 2, generator=draw) * (1 if crowded else 90)
    sides = torch.randint(0, 60, corners.shape, generator=draw) + torch.rand(corners.shape, generator=draw).round()
    boxes = torch.cat([corners, corners + sides], -1)
    scores = torch.randint(0, levels, (proposals, classes), generator=draw) / levels
    with patch.object(module, "_FIRST", first):
        assert same(scores, boxes[:, 0] if shared else boxes, choice)


def test_few_pairs_are_looked_at_where_many_proposals_survive():
    """The cost is of the pairs that can be chosen, not of all 300 x 1600."""
    draw = torch.Generator().manual_seed(0)
    corners = torch.rand(300, 2, generator=draw) * 600
    boxes = torch.cat([corners, corners + 100], -1)
    with patch.object(module, "nms", wraps=module.nms) as watched:
        chosen, _, _ = select(torch.rand(300, 1600, generator=draw), boxes, Choice())
    assert len(chosen) == 36
    assert sum(len(call.args[0]) for call in watched.call_args_list) < 300 * 1600 / 25


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_an_error(number):
    scores = torch.rand(3, 4)
    scores[1, 2] = number
    with pytest.raises(ValueError, match="scores contain NaN or infinite"):
        select(scores, torch.rand(3, 4), Choice())


def test_ten_to_a_hundred():
    boxes = torch.arange(20.0)[:, None] * 10 + torch.tensor([0.0, 0, 5, 5])
    few = torch.full((20, 1), 0.1)
    few[:3] = 0.5
    assert len(select(few, boxes, Choice(100, 0.3, 0.2))[0]) == 10
    assert len(select(few + 0.2, boxes, Choice(100, 0.3, 0.2))[0]) == 20
    assert len(select(few + 0.2, boxes, Choice(15, 0.3, 0.2))[0]) == 15


def test_boxes_are_scaled_to_the_pictures_own_pixels():
    regions = to_regions(
        torch.ones(1, 3),
        torch.tensor([[10.0, 20, 40, 50]]),
        classes=torch.tensor([7]),
        conf=torch.tensor([0.5]),
        resized=(50, 40),  # height, width
        size=(400, 100),
    )
    assert regions.boxes.tolist() == [[100, 40, 400, 100]]
    assert regions.extras["objects_id"].dtype == np.int64 and regions.extras["objects_conf"].dtype == np.float32


@pytest.mark.parametrize("option", [{"regions": 0}, {"min_regions": 0}, {"nms": 1.5}, {"min_score": -0.1}])
def test_options_out_of_range(option):
    with pytest.raises(CoderError, match=f"--{next(iter(option)).replace('_', '-')} is"):
        Choice(**option)
