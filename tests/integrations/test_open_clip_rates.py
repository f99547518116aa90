"""``--coder-heads-lr-scale`` inside upstream's optimizers and schedules."""

import torch
from torch import nn

from coder_plugin.integrations.open_clip import rates


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Linear(3, 2)
        self.coder = nn.Module()
        self.coder.heads = nn.ModuleDict({"concepts": nn.Linear(2, 2)})


def test_heads_get_groups_of_their_own_with_their_decay():
    model = Small()
    matrices = [model.visual.weight, model.coder.heads["concepts"].weight]
    vectors = [model.visual.bias, model.coder.heads["concepts"].bias]
    optimizer = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.2}], lr=0.1
    )
    rates.split_heads(optimizer, model, 100.0)
    found = [(len(g["params"]), g["weight_decay"], g.get("lr_scale", 1.0), g["lr"]) for g in optimizer.param_groups]
    assert found == [(1, 0.0, 1.0, 0.1), (1, 0.2, 1.0, 0.1), (1, 0.0, 100.0, 10.0), (1, 0.2, 100.0, 10.0)]
    assert optimizer.param_groups[2]["params"][0] is model.coder.heads["concepts"].bias
    rates.assign_learning_rate(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5, 50.0, 50.0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 4


def test_a_group_of_heads_alone_leaves_no_empty_group():
    model = Small()
    optimizer = torch.optim.SGD([{"params": list(model.coder.parameters())}], lr=0.4)
    rates.split_heads(optimizer, model, 10.0)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2]
