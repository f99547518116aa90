"""The concept head: its encoders, its gradient into the towers, its layers, and what it says when it collapses."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, linear

from coder_plugin import distributed
from coder_plugin.functional import dcl
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.concepts import Concepts
from tests import gloo

SIZES = BackboneInfo(embed_dim=8, text_tokens=6)


def inputs(n: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(n, 5, dtype=torch.bool)
    mask[::2, 3:] = False
    return {
        "image_pooled": 3 + torch.randn(n, 8, generator=generator),
        "text_tokens": 1 + torch.randn(n, 5, 6, generator=generator),
        "text_mask": mask,
    }


def head(**options: object) -> Concepts:
    torch.manual_seed(0)
    return Concepts(SIZES, vocabulary="scenes", **options)  # type: ignore[arg-type]


def by_hand(query: Tensor, weight: Tensor, concepts: Tensor, scale: float) -> Tensor:
    """Eq. 14, one sample and one concept at a time."""
    rows = []
    for each in query.double():
        each = each / each.norm()
        directions = [concept / concept.norm() for concept in concepts.double()]
        scores = torch.stack([scale * each @ weight.double() @ direction for direction in directions])
        mixture = sum(a * direction for a, direction in zip(scores.softmax(0), directions, strict=True))
        rows.append(mixture / mixture.norm())
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_embeddings_by_hand(norm):
    module = head(norm=norm).train()
    with torch.no_grad():  # the two modalities' weights differ, and neither is symmetric
        module.image_weight.copy_(torch.randn(8, 8))
        module.text_weight.copy_(torch.randn(8, 8))
    batch = inputs(7)
    out = module(**batch)
    concepts = leaky_relu(module.graph.double() @ module.vectors.double() @ module.convolutions[0].weight.double().T, 0.2)
    queries = {
        "image": linear(batch["image_pooled"], module.image_query[0].weight, module.image_query[0].bias),
        "text": linear(
            module.text_pool(batch["text_tokens"], batch["text_mask"]),
            module.text_query[0].weight,
            module.text_query[0].bias,
        ),
    }
    for side, query in queries.items():
        if norm == "batch":
            query = (query - query.mean(0)) / (query.var(0, unbiased=False) + 1e-5).sqrt()
        want = by_hand(query, getattr(module, f"{side}_weight"), concepts, 10.0)
        torch.testing.assert_close(out[f"coder_{side}_concepts"].double(), want, rtol=1e-4, atol=1e-5)


def test_both_weights_start_as_the_identity_and_lambda_is_10():
    module = head()
    assert module.scale == 10.0
    for weight in (module.image_weight, module.text_weight):
        assert torch.equal(weight, torch.eye(8))
    assert set(module.state_names()) == {"vectors", "graph", "steps"}


def test_the_second_layer_has_no_activation():
    one, two, three = head(), head(layers=2), head(layers=3)
    def convolve(module, hidden, number):
        return module.graph @ hidden @ module.convolutions[number].weight.T
    torch.testing.assert_close(one.concepts(), leaky_relu(convolve(one, one.vectors, 0), 0.2))
    torch.testing.assert_close(two.concepts(), convolve(two, leaky_relu(convolve(two, two.vectors, 0), 0.2), 1))
    hidden = leaky_relu(convolve(three, leaky_relu(convolve(three, three.vectors, 0), 0.2), 1), 0.2)
    torch.testing.assert_close(three.concepts(), convolve(three, hidden, 2))


@pytest.mark.parametrize(("tower_gradient", "warmup", "steps", "factor"), [
    (0.25, 0, 0, 0.25), (0.0, 0, 5, 0.0), (0.5, 10, 4, 0.2), (1.0, 10, 20, 1.0),
])  # fmt: skip
def test_the_gradient_into_the_towers_is_scaled_and_values_are_not(tower_gradient, warmup, steps, factor):
    results = []
    for module in (head(tower_gradient=1.0), head(tower_gradient=tower_gradient, warmup=warmup)):
        module.train().steps.fill_(steps)
        batch = inputs(6)
        leaves = [batch[key].requires_grad_() for key in ("image_pooled", "text_tokens")]
        out = module(**batch)
        (dcl(*out.values()) + out["coder_text_concepts"][:, 0].sum()).backward()
        results.append((out, [leaf.grad for leaf in leaves], {n: p.grad for n, p in module.named_parameters()}))
    (plain, full, weights), (other, scaled, same) = results
    for key, value in plain.items():
        assert torch.equal(other[key], value)
    for one, two in zip(full, scaled, strict=True):
        torch.testing.assert_close(two, factor * one, rtol=1e-5, atol=1e-8)
        assert one.abs().max() > 1e-3
    for name, gradient in weights.items():
        torch.testing.assert_close(same[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, r"beta must be in \[0, 1\], got 1.5"),
        ({"tower_gradient": 1.5}, r"tower_gradient must be in \[0, 1\], got 1.5"),
        ({"norm": "layer"}, "norm must be 'batch' or 'none'"),
        ({"layers": 0}, "layers must be >= 1"),
        ({"warmup": -1}, "warmup >= 0"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        head(**options)
    with pytest.raises(ValueError, match="this tower gives none"):
        Concepts(BackboneInfo(embed_dim=6))


def train(module: Concepts, steps: int) -> tuple[float, float]:
    """Mean cosines within images and within texts after some steps of DCL on pairs from ten groups."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(10, 8, generator=generator)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(steps):
        which = torch.randint(0, 10, (64,), generator=generator)
        images = 3 + groups[which] + 0.1 * torch.randn(64, 8, generator=generator)
        tokens = 1 + groups[which][:, None, :6] + 0.1 * torch.randn(64, 5, 6, generator=generator)
        out = module(images, tokens, torch.ones(64, 5, dtype=torch.bool))
        optimizer.zero_grad()
        (2 * dcl(*out.values())).backward()
        optimizer.step()
        module.post_step()
    return 1 - module.health()["image_spread"], 1 - module.health()["text_spread"]


def test_the_concept_level_leaves_the_plateau_within_30_steps():
    images, texts = train(head().train(), 30)
    assert images < 0.9 and texts < 0.9
    images, texts = train(head(norm="none").train(), 30)
    assert images > 0.9, "without BatchNorm it stays: the test sees the fault"


def test_health_by_hand():
    module = head().train()
    assert module.health() == {}
    batch = inputs(6)
    out = {key: value.detach().double() for key, value in module(**batch).items()}
    figures = module.health()
    cosines = {}
    for side in ("image", "text"):
        rows = out[f"coder_{side}_concepts"]
        pairs = [float(rows[i] @ rows[j]) for i in range(6) for j in range(6) if i != j]
        cosines[side] = sum(pairs) / 30
        assert figures[f"{side}_spread"] == pytest.approx(1 - cosines[side], abs=1e-5)
        features = {key: value for key, value in batch.items() if key.startswith(side)}
        attention = getattr(module, f"{side}_attention")(features).double()
        effective = sum(float((-row * row.log()).sum().exp()) for row in attention) / 6
        assert figures[f"{side}_concepts"] == pytest.approx(effective, rel=1e-4)
    score = sum(float(v @ w) for v, w in zip(*out.values(), strict=True)) / 6
    assert figures["score"] == pytest.approx(score, abs=1e-5)
    assert set(figures) == {"image_spread", "text_spread", "image_concepts", "text_concepts", "score"}
    module.eval()
    module(**inputs(6, seed=1))
    assert module.health() == figures, "evaluation leaves the figures of training"


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_collapse_of_one_side_is_said_once(caplog, side):
    module = head(norm="none", scale=50.0).train()
    batch = inputs(6)
    spread = {"image_pooled": 9 * torch.randn(6, 8), "text_tokens": 9 * torch.randn(6, 1, 6).expand(6, 5, 6)}
    batch |= {key: torch.ones_like(value) if key.startswith(side) else value for key, value in spread.items()}
    batch["text_mask"] = torch.ones_like(batch["text_mask"])
    module(**batch)
    with caplog.at_level(logging.WARNING):
        module.steps.fill_(99)
        module.health()
        assert not caplog.records
        module.steps.fill_(100)
        module.health()
        module.health()
    assert len(caplog.records) == 1 and f"({side}): the concept level has collapsed" in caplog.text
    module = head().train()
    module(**inputs(6))
    module.steps.fill_(100)
    module.health()
    assert len(caplog.records) == 1


def test_an_attention_to_few_of_many_concepts_is_said_once(caplog):
    module = Concepts(SIZES).train()
    with torch.no_grad():
        module.image_weight.mul_(100)  # as a high rate makes it
    module.steps.fill_(99)
    module(**inputs(6))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert module.health()["image_concepts"] < 6
        assert not caplog.records
        module.steps.fill_(100)
        module.health()
        module.health()
        assert len(caplog.records) == 1 and "of 400 concepts share a sample's attention" in caplog.text
        with torch.no_grad():
            module.image_weight.div_(100)
        module(**inputs(6))
        assert min(module.health()[f"{side}_concepts"] for side in ("image", "text")) > 6
        module._warned.clear()
        module.health()
    assert len(caplog.records) == 1


def over_ranks() -> tuple[list[Tensor], dict[str, float]]:
    """Both embeddings of all ranks, BatchNorm's running mean, and the gradients as DDP averages them; the log's figures."""
    module = head(tower_gradient=1.0).train()
    size = 8 // distributed.world_size()
    rows = slice(size * distributed.rank(), size * (distributed.rank() + 1))
    out = module(**{key: value[rows] for key, value in inputs(8).items()})
    images, texts = (distributed.gather(out[key]) for key in module.provides)
    dcl(images, texts).backward()
    gradients = [distributed.all_mean(p.grad) for p in module.parameters() if p.grad is not None]
    assert len(gradients) > 8
    return [images.detach(), texts.detach(), module.image_query[1].running_mean, *gradients], module.health()


def test_batch_statistics_are_those_of_all_ranks():
    want, want_figures = over_ranks()
    for tensors, figures in gloo.run(over_ranks):
        for got, expected in zip(tensors, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert figures == pytest.approx(want_figures, abs=1e-4), "figures of the batch of all ranks"
    assert want[0].std(0).max() > 1e-3
