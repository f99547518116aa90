"""What a run costs, estimated by a few steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coder_plugin.compare.probe import measure


@pytest.mark.parametrize(("images", "epochs"), [(8, 1), (24, 1), (96, 1), (16, 4)])
def test_the_time_of_a_step_is_positive_however_few_there_are(tmp_path: Path, images: int, epochs: int) -> None:
    """With 8 pairs a batch: 1, 3, 12 and 2 steps an epoch; random weights are not evaluated before the first step."""
    options = {"logs": str(tmp_path), "name": "run", "report": False, "train_num_samples": images, "batch_size": 8}
    begun = time.time()
    cost = measure({**options, "epochs": epochs, "workers": 0}, begun)
    taken = time.time() - begun
    assert cost["steps"] == epochs * images // 8
    assert (0 < cost["step"] or epochs > 1) and cost["step"] <= cost["seconds"]
    if images < 64:  # all steps were made, so the estimate is the time that they took
        assert cost["seconds"] <= 1.3 * taken
        assert cost["seconds"] >= cost["steps"] * cost["step"] + epochs * cost["evaluation"]
    if epochs > 1:
        assert cost["step"] < cost["evaluation"]  # of 500 images; it is in no step
