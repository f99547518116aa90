"""From an image's regions to tensors of one shape: what is kept, padded, dropped and refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.transform import RegionTransform
from coder_plugin.data.source import isolated_rng
from coder_plugin.errors import CoderError

CHANNELS = 3


def transform_of(**options: object) -> RegionTransform:
    return RegionTransform(CHANNELS, **{"boxes": True, **options})  # type: ignore[arg-type]


def regions(count: int, *, boxes: bool = True, dtype: type = np.float32, global_feature: bool = False) -> Regions:
    """Region n holds n + 1 in all channels, and its box tells n."""
    features: np.ndarray = np.repeat(np.arange(1, count + 1, dtype=dtype)[:, None], CHANNELS, 1)
    corners = np.stack([[n, 2 * n, n + 10, 2 * n + 20] for n in range(count)]).astype(np.float32) if boxes else None
    size = (400.0, 200.0) if boxes else (1.0, 1.0)
    return Regions(features, corners, size, np.arange(4, dtype=np.float32) if global_feature else None)


def numbers(out: dict[str, torch.Tensor]) -> list[int]:
    return (out["features"][out["mask"]][:, 0] - 1).long().tolist()


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (4, 4), (5, 5), (9, 5)])
def test_first_regions_padded_and_masked(count, kept):
    out = transform_of(max_regions=5)(regions(count))
    assert out["features"].shape == (5, CHANNELS) and out["features"].dtype == torch.float32
    assert out["mask"].tolist() == [True] * kept + [False] * (5 - kept) and numbers(out) == list(range(kept))
    assert (out["features"][kept:] == 0).all() and (out["boxes"][kept:] == 0).all()


def test_boxes_become_fractions_with_the_images_aspect():
    out = transform_of(max_regions=3)(regions(2))
    expected = torch.tensor([[0, 0, 10 / 400, 20 / 200], [1 / 400, 2 / 200, 11 / 400, 22 / 200]])
    torch.testing.assert_close(out["boxes"][:2], expected)
    assert out["boxes"].dtype == out["aspect"].dtype == torch.float32
    assert out["aspect"].item() == 2 and out["aspect"].shape == ()


@pytest.mark.parametrize("boxes", [True, False])
def test_keys_are_what_the_model_reads(boxes):
    out = transform_of(boxes=boxes)(regions(2, global_feature=True))
    assert out.keys() == {"features", "mask", *(("boxes", "aspect") if boxes else ())}
    assert out["features"].shape == (36, CHANNELS)


def test_an_image_without_boxes_is_unusable_only_where_they_are_read():
    assert transform_of(boxes=False)(regions(2, boxes=False)).keys() == {"features", "mask"}
    with pytest.raises(BadSample, match="no boxes"):
        transform_of()(regions(2, boxes=False))


# dropout


@given(st.integers(1, 12), st.integers(1, 8), st.floats(0, 0.999), st.integers(0, 10**6))
def test_dropout_keeps_one_at_least_in_order_with_its_box(count, most, dropout, seed):
    with isolated_rng(seed):
        out = transform_of(max_regions=most, dropout=dropout)(regions(count))
    kept = numbers(out)
    assert 1 <= len(kept) <= min(count, most) and kept == sorted(set(kept)) and max(kept) < min(count, most)
    assert out["mask"].tolist() == [True] * len(kept) + [False] * (most - len(kept))
    assert (out["boxes"][: len(kept), 0] * 400).round().long().tolist() == kept


def test_dropout_depends_on_the_generator_alone():
    transform, made = transform_of(max_regions=30, dropout=0.5), regions(30)
    found = []
    for seed in (1, 1, 2):
        with isolated_rng(seed):
            found.append(numbers(transform(made)))
    assert found[0] == found[1] != found[2]
    state = torch.get_rng_state()
    transform_of()(made)  # evaluation draws nothing
    assert torch.equal(torch.get_rng_state(), state)


# what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_regions": 0}, "max regions must be 1 or more, got 0"),
        ({"dropout": 1.0}, r"region dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, "region dropout"),
        ({"dropout": float("nan")}, "region dropout"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(CoderError, match=message):
        RegionTransform(CHANNELS, **options)


def test_other_channels():
    with pytest.raises(BadSample, match="regions have 3 channels, but the model reads 7") as caught:
        RegionTransform(7)(regions(2))
    assert caught.value.kind == "regions"
