"""Fusion scores on two gloo processes under DDP: rows, and all gradients, equal one process's with the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from coder_plugin import distributed
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.fusion import Fusion
from tests import gloo

PAIRS = 3  # of each rank
WORDS = {"text": (4, 6), "noised": (5, 2)}  # the longest of each rank's texts


class Model(nn.Module):
    """Towers of one matrix each, so that gradients go through what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(4, 8, bias=False), nn.Linear(3, 5, bias=False)
        self.head = Fusion(BackboneInfo(embed_dim=8, image_contexts=8, text_contexts=5), heads=2, pairs_per_tile=4)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        towers = {"image": self.image, "text": self.text, "noised": self.text}
        return self.head(
            **{key: towers[key.split("_")[0]](value) if key.endswith("contexts") else value for key, value in batch.items()}
        )


def batches() -> list[dict[str, Tensor]]:
    """Each rank's batch: texts are as long as the longest of the rank."""
    generator = torch.Generator().manual_seed(1)
    each: list[dict[str, Tensor]] = []
    for rank in range(2):
        batch = {}
        for name, length, channels in (("image", 4, 4), *((name, WORDS[name][rank], 3) for name in WORDS)):
            batch[f"{name}_contexts"] = torch.randn(PAIRS, length, channels, generator=generator, dtype=torch.float64)
            batch[f"{name}_context_mask"] = torch.arange(length) < torch.tensor([length, 1, 2])[:, None]
        each.append(batch)
    return each


def joint() -> dict[str, Tensor]:
    parts = batches()
    length = {key: max(part[key].shape[1] for part in parts) for key in parts[0]}

    def padded(value: Tensor, length: int) -> Tensor:
        more = value.new_zeros(len(value), length - value.shape[1], *value.shape[2:])
        return torch.cat([value, more], 1)

    return {key: torch.cat([padded(part[key], length[key]) for part in parts]) for key in parts[0]}


def objective(scores: dict[str, Tensor], first: int) -> Tensor:
    """The mean over these images of a loss in which every pair has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for number, value in enumerate(scores.values()):
        rows = torch.arange(first, first + len(value))[:, None]
        weights = torch.cos(rows * 7.0 + torch.arange(value.shape[1]) + number)
        total = total + (weights * value).sum(1).mean()
    return total


def on_a_rank() -> dict[str, Any]:
    rank = distributed.rank()
    model = DistributedDataParallel(Model())
    for _ in range(2):  # DDP reports unused parameters at the second step
        model.zero_grad()
        scores = model(batches()[rank])
        objective(scores, rank * PAIRS).backward()
    return {
        "scores": {key: value.detach() for key, value in scores.items()},
        "gradients": {name: parameter.grad for name, parameter in model.module.named_parameters()},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return gloo.run(on_a_rank)


@pytest.fixture(scope="module")
def single() -> tuple[Model, dict[str, Tensor]]:
    model = Model()
    scores = model(joint())
    objective(scores, 0).backward()
    return model, scores


def test_each_rank_has_its_images_against_all_texts(ranks, single):
    for key, value in single[1].items():
        got = torch.cat([each["scores"][key] for each in ranks])
        torch.testing.assert_close(got, value.detach())
    assert set(single[1]) == {"coder_fusion", "coder_fusion_noised"}


def test_gradients_are_those_of_the_joint_batch(ranks, single):
    for name, parameter in single[0].named_parameters():
        for each in ranks:
            torch.testing.assert_close(each["gradients"][name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
