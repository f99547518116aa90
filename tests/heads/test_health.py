"""What heads say of their state: hand-made states whose figures are known."""

import pytest
import torch

import coder_plugin
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.prototypes import Prototypes


def test_momentum_figures():
    model = coder_plugin.create_model("coder-tiny", loss="m_dcl")
    head = model.coder.heads["momentum"]
    axes = torch.eye(head.bank.image.shape[1])
    ids = torch.tensor([7, 7, 8, 9])
    head.bank.enqueue(axes[:4], axes[:1].expand(4, -1), ids)
    figures = head.health()
    assert figures["filled"] == pytest.approx(4 / head.bank.size)
    assert figures["images"] == pytest.approx(3 / 4)
    assert figures["image_spread"] == pytest.approx(3 / 4)  # four orthogonal keys: 1 - |mean|^2
    assert figures["text_spread"] == pytest.approx(0.0)  # collapsed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("coder.") and parameter.requires_grad:
                parameter.mul_(2)
    assert head.health()["drift"] == pytest.approx(0.5)  # |theta - 2 theta| / |2 theta|


def test_prototype_figures():
    head = Prototypes(BackboneInfo(embed_dim=4), clusters=4)
    assert head.health() == {}, "no centres yet"
    head.centres.ready.fill_(True)
    head.centres.counts.copy_(torch.tensor([5, 5, 5, 5]))
    head.changed.fill_(0.25)
    head.restarted.fill_(2)
    assert head.health() == {"used": pytest.approx(1.0), "changed": 0.25, "restarted": 0.5}
    head.centres.counts.copy_(torch.tensor([20, 0, 0, 0]))
    assert head.health() == {"used": pytest.approx(1 / 4), "changed": 0.25, "restarted": 0.5}
