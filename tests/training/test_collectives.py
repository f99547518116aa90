"""How many collectives a training step makes, on two gloo processes."""

from __future__ import annotations

import json

import pytest

from tests.reliability import ranks as forked
from tests.training import collectives


@pytest.mark.parametrize(("loss", "number"), [("coder", 4), ("dcl + clip", 2)])
def test_collectives_of_a_step(tmp_path, tiny_model, loss, number) -> None:
    endings = forked.run(lambda folder: collectives.train(folder, tiny_model, loss), tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    one, two = (json.loads((tmp_path / f"collectives{rank}.json").read_text()) for rank in (0, 1))
    assert one == two
    for step in one:
        print("\n".join(step))
        assert len(step) == number, "\n".join(step)
