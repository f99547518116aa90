"""Banks, ids, pointers, centres and momentum weights are the same bits on all ranks, whatever their loaders do."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import coder_plugin
from coder_plugin import distributed
from coder_plugin.objective import Objective
from tests import gloo


def train(path: str, steps: int) -> dict[str, Tensor]:
    """A coder run on this rank's own random pairs, with pauses of its own; returns the state."""
    torch.manual_seed(0)
    settings = {"momentum.bank_size": 50, "prototypes.clusters": 20, "prototypes.recluster": 50}
    objective = Objective.parse("coder").with_options({**settings, "concepts.vocabulary": "scenes"})
    model = coder_plugin.create_model(path, loss=objective).train()
    loss = coder_plugin.create_loss(objective, model=model)
    ignored = model.coder.state_names()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rank = distributed.rank()
    torch.manual_seed(100 + rank)
    pauses = random.Random(rank)
    for _ in range(steps):
        time.sleep(0.02 * rank * pauses.random())
        text = torch.randint(1, 400, (6, 40))
        text[:, 9] = 49407
        ids = torch.randint(0, 200, (6,))
        losses = loss(**wrapped(torch.randn(6, 3, 64, 64), text, image_id=ids))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        model.coder.post_step(optimizer)
    return {name: value for name, value in model.state_dict().items() if name in ignored}


@pytest.mark.parametrize("steps", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_state_is_equal_on_all_ranks(tiny_model, steps):
    one, two = gloo.run(train, tiny_model, steps, timeout=400)
    kept = {"bank.ids", "bank.pointer", "bank.image", "centres.centres", "towers.model.visual.proj", "recent"}
    assert all(any(name.endswith(ending) for name in one) for ending in kept)
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
    assert one["coder.heads.prototypes.centres.ready"] and one["coder.heads.momentum.bank.count"] == 50
