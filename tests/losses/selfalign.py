"""What the tests of SelfAlign's losses share: padded sets, towers with the objective's heads, and batches of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from coder_plugin import distributed
from coder_plugin.coder import Coder, CoderLoss
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.objective import Objective
from coder_plugin.resolver import INTERMEDIATE_KEYS, resolve
from tests.losses.drawn import KEYS, close, drawing

D, K = 5, 4
PAIRS, L, T = 4, 3, 6  # pairs of each rank, most regions and words
LONGEST = (4, 6, 2)  # text of each rank, whose tower cuts the rest
WIDTHS = BackboneInfo(embed_dim=D, image_locals=D, text_locals=D, image_contexts=D, text_contexts=D)
#: An objective and options of its heads.
Loss = tuple[str, dict[str, Any]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=drawing(seed), dtype=torch.float64)


def sets(lengths: Sequence[int], width: int, seed: int, *, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Padded features [b, width, D], of any length, and their mask; the same for every padding."""
    padded = torch.full((len(lengths), width, D), fill, dtype=torch.float64)
    for row, length in enumerate(lengths):
        padded[row, :length] = numbers(length, D, seed=1000 * seed + row)
    return padded, torch.arange(width) < torch.tensor(lengths)[:, None]


def valid(padded: Tensor, mask: Tensor) -> list[list[list[float]]]:
    return [each[valid_row].tolist() for each, valid_row in zip(padded, mask, strict=True)]


def words_and_regions(fill: float = 0.0, extra: int = 0) -> tuple[Tensor, ...]:
    """Words, their mask, regions, theirs, prototypes; the last text has no words."""
    words, regions = sets([3, 1, 4, 0], 4 + extra, 1, fill=fill), sets([2, 5, 1, 3], 5 + extra, 2, fill=fill)
    return *words, *regions, numbers(7, D)


def contexts_and_locals(fill: float = 0.0, extra: int = 0) -> tuple[Tensor, ...]:
    return numbers(4, D, seed=3), *sets([2, 5, 1, 3], 5 + extra, 2, fill=fill)


class Model(nn.Module):
    """Towers of a matrix for the locals and one for the contexts, with the objective's heads."""

    def __init__(self, loss: Loss, *, local_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        text, options = loss
        with_lca = {"alignment.prototypes": K} if "lca" in text else {}
        self.objective = replace(Objective.parse(text).with_options({**with_lca, **options}), local_loss=local_loss)
        self.image, self.text, self.image_context, self.text_context = (nn.Linear(D, D) for _ in range(4))
        self.coder = Coder(self.objective, resolve(self.objective, KEYS, INTERMEDIATE_KEYS), WIDTHS)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
        self.double()
        # DDP needs every parameter to get a gradient: freeze what no term reads, and the side that is a constant target
        frozen: list[nn.Module] = [] if "cra" in text else [self.image_context, self.text_context]
        frozen += [] if "lca" in text and ("region_to_word" in text or "dual" in text) else [self.image]
        frozen += [] if "lca" in text and "region_to_word" not in text else [self.text]
        if "ca_on='none'" in text and "contexts" in self.coder.heads:
            frozen += [guide.gate for guide in self.coder.heads["contexts"].guides.values()]
        for module in frozen:
            module.requires_grad_(False)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = ("image_context_mask", "text_context_mask", "text", "image_id", "text_tags")
        inputs = {key: batch[key] for key in names}
        for side in ("image", "text"):
            inputs[f"{side}_locals"] = getattr(self, side)(batch[side + "_tokens"])
            inputs[f"{side}_contexts"] = getattr(self, f"{side}_context")(batch[side + "_tokens"])
            sums = (inputs[f"{side}_contexts"] * batch[f"{side}_context_mask"][..., None]).sum(1)
            inputs[f"{side}_features"] = normalize(sums, dim=1)
        features = {key: inputs[key] for key in ("image_features", "text_features")}
        return {**features, **self.coder(inputs)}

    def loss(self) -> CoderLoss:
        return CoderLoss(self.objective, self.coder.bindings, self.coder.heads)

    def towers(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Words, their mask, regions, theirs."""
        words, regions = self.text(batch["text_tokens"]), self.image(batch["image_tokens"])
        return words, batch["text_context_mask"], regions, batch["image_context_mask"]


def joint(ranks: int) -> dict[str, Tensor]:
    """Pairs of all ranks. The first of every rank is one image, rank 0 has another one twice; rank 1 has no noun."""
    generator, rows = drawing(ranks), ranks * PAIRS
    longest = torch.tensor(LONGEST[:ranks]).repeat_interleave(PAIRS)
    lengths = (torch.randint(1, T + 1, (rows,), generator=generator)).minimum(longest)
    lengths[::PAIRS] = longest[::PAIRS]
    ids = torch.arange(rows) + 2**62
    ids[::PAIRS] = 2**62
    ids[2] = ids[1]
    tags = torch.randint(0, 3, (rows, T), generator=generator)
    tags[PAIRS : 2 * PAIRS] = 4
    regions = torch.randint(1, L + 1, (rows,), generator=generator)
    return {
        "image_tokens": torch.randn(rows, L, D, generator=generator, dtype=torch.float64),
        "image_context_mask": torch.arange(L) < regions[:, None],
        "text_tokens": torch.randn(rows, T, D, generator=generator, dtype=torch.float64),
        "text_context_mask": torch.arange(T) < lengths[:, None],
        "text": torch.zeros(rows, T, dtype=torch.int64),
        "text_tags": tags,
        "image_id": ids,
    }


def share(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    part = {key: value[rank * PAIRS : (rank + 1) * PAIRS] for key, value in batch.items()}
    return part | {key: part[key][:, : LONGEST[rank]] for key in ("text_tokens", "text_context_mask")}


def step(loss: Loss, local_loss: bool, ranks: int) -> dict[str, Any]:
    """Losses, gradients and statistics of this process's share of the joint batch; of all of it on one process."""
    model, batch = Model(loss, local_loss=local_loss), joint(ranks)
    several = distributed.world_size() > 1
    batch = share(batch, distributed.rank()) if several else batch
    # its buffers are not broadcast: each rank must compute the same statistics
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if several else model
    for _ in range(2):  # DDP reports unused parameters at the second step
        model.zero_grad()
        losses = model.loss()(**wrapped(batch))
        sum(losses.values()).backward()  # type: ignore[union-attr]
    return {
        "losses": {key: value.item() for key, value in losses.items()},
        "gradients": {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad},
        "buffers": {key: value.clone() for key, value in model.named_buffers()},
    }


def steps(losses: Mapping[str, Loss], cases: Sequence[tuple[str, bool]], ranks: int) -> dict[tuple[str, bool], Any]:
    return {(name, local): step(losses[name], local, ranks) for name, local in cases}


@cache
def _alone(text: str, options: tuple[tuple[str, Any], ...], ranks: int) -> dict[str, Any]:
    return step((text, dict(options)), False, ranks)


def alone(loss: Loss, ranks: int) -> dict[str, Any]:
    """The step of one process with the joint batch."""
    return _alone(loss[0], tuple(loss[1].items()), ranks)


def ranks_equal_one_process(loss: Loss, per_rank: Sequence[dict[str, Any]]) -> None:
    ranks = len(per_rank)
    wanted = alone(loss, ranks)
    for key, value in wanted["losses"].items():
        mean = sum(each["losses"][key] for each in per_rank) / ranks
        assert mean == pytest.approx(value, rel=1e-10, abs=1e-12)
    for each in per_rank:
        for kind in ("gradients", "buffers"):
            assert each[kind].keys() == wanted[kind].keys()
            for key, value in wanted[kind].items():
                close(each[kind][key], value, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(value, per_rank[0]["buffers"][key]) for key, value in each["buffers"].items())
    assert all(value.norm() > 1e-4 for key, value in wanted["gradients"].items() if key.endswith("weight"))
