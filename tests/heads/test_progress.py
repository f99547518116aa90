"""The head that counts epochs."""

from __future__ import annotations

import pytest
import torch

from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.basic import Progress

SIZES = BackboneInfo(embed_dim=2)


def epochs(head: Progress, steps: int) -> list[int]:
    """The epoch that each of so many further steps is in."""
    found = []
    for _ in range(steps):
        for rows in (3, 2):  # forward may run several times a step, and counts nothing
            out = head(image_features=torch.ones(rows, 2))["coder_epoch"]
            assert out.shape == (rows,) and out.dtype == torch.int64 and len(out.unique()) == 1
        found.append(int(out[0]))
        head.post_step()
    return found


def test_an_epoch_has_its_number_of_performed_steps():
    assert epochs(Progress(SIZES, steps_per_epoch=3), 8) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert epochs(Progress(SIZES, steps_per_epoch=1), 3) == [0, 1, 2]


def test_the_count_is_state():
    whole, half = Progress(SIZES, steps_per_epoch=3), Progress(SIZES, steps_per_epoch=3)
    expected = epochs(whole, 8)
    found = epochs(half, 4)
    other = Progress(SIZES, steps_per_epoch=3)
    other.load_state_dict(half.state_dict())
    assert found + epochs(other, 4) == expected
    assert set(other.state_names()) == {"epoch", "steps"} == set(other.state_dict())


@pytest.mark.parametrize(("steps", "expected"), [(6, [1, 1, 1, 1, 1, 2]), (2, [1, 2, 2, 3])])
def test_epochs_that_are_done_stay_done_when_their_length_changes(steps, expected):
    """A run goes on with another number of ranks in its second epoch."""
    before, after = Progress(SIZES, steps_per_epoch=3), Progress(SIZES, steps_per_epoch=steps)
    epochs(before, 4)
    after.load_state_dict(before.state_dict())
    assert epochs(after, len(expected)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "missing required option steps_per_epoch"), ({"steps_per_epoch": 0}, "steps_per_epoch must be >= 1, got 0")],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Progress(SIZES, **options)
