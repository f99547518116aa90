"""Concepts, prototypes and the score that concepts take part in."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

import coder_plugin
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.concepts import Concepts
from coder_plugin.heads.prototypes import Prototypes
from coder_plugin.objective import Objective

WIDTHS = BackboneInfo(embed_dim=6, image_tokens=5, text_tokens=7)


def test_two_layers_and_no_graph_without_a_vocabulary(caplog):
    head = Concepts(WIDTHS, layers=2)
    assert "concepts: no vocabulary:" in caplog.text
    assert head.concepts().shape == (400, 6) and torch.equal(head.graph, torch.eye(400))


def test_warm_up_lets_the_score_in_step_by_step():
    head = Concepts(WIDTHS, vocabulary="scenes", warmup=4, beta=0.6)
    for step in range(6):
        entered = min(1.0, step / 4)
        assert head.score_weights() == pytest.approx((1 - 0.4 * entered, 0.4 * entered))
        head.post_step()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import json

    from tests.conftest import TINY

    path = tmp_path_factory.mktemp("model") / "tiny-vit-for-heads.json"
    path.write_text(json.dumps(TINY))
    torch.manual_seed(0)
    objective = Objective.parse("dcl + concept_dcl").with_options({"concepts.vocabulary": "scenes"})
    return coder_plugin.create_model(str(path), loss=objective)


def batch() -> dict[str, torch.Tensor]:
    text = torch.randint(1, 400, (5, 40), generator=torch.Generator().manual_seed(0))
    text[:, 7] = 49407
    return {"image": torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(1)), "text": text}


def test_the_inner_product_of_embeddings_is_the_papers_score(model):
    """S = beta S_I + (1 - beta) S_C, from the keys of training, with BatchNorm's running statistics."""
    given = batch()
    with torch.no_grad():
        model.train().coder.heads["concepts"].eval()
        seen = model(**given, image_id=torch.arange(5))
        model.eval()
        images, texts = model.embed_image(given["image"]), model.embed_text(given["text"])
    instance = seen["image_features"] @ seen["text_features"].T
    concept = seen["coder_image_concepts"] @ seen["coder_text_concepts"].T
    torch.testing.assert_close(images @ texts.T, 0.9 * instance + 0.1 * concept, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(5))
    with model.coder.heads["concepts"].weighing(0.0):
        torch.testing.assert_close(model.embed_image(given["image"]) @ model.embed_text(given["text"]).T, concept,
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


def test_before_its_warm_up_the_head_leaves_the_embedding_as_it_is(model):
    head, image = model.coder.heads["concepts"], batch()["image"]
    head.warmup = 10
    try:
        with torch.no_grad():
            plain = normalize(model.encode_image(image), dim=-1)
            assert torch.equal(model.embed_image(image), plain)
            head.steps += 5
            assert cosine_similarity(model.embed_image(image)[:, :32], plain).min() > 0.999
            assert model.embed_image(image).shape[1] == 64
    finally:
        head.warmup = 0
        head.steps.zero_()


def test_an_aggregator_stands_in_for_the_towers_pooling(tiny_model):
    model = coder_plugin.create_model(tiny_model, loss="dcl + m_dcl", aggregator="gpo").train()
    outputs = model(**batch(), image_id=torch.arange(5))
    model.eval()
    torch.testing.assert_close(model.embed_image(batch()["image"]), outputs["image_features"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.embed_text(batch()["text"]), outputs["text_features"], rtol=1e-4, atol=1e-5)
    assert cosine_similarity(model.encode_image(batch()["image"]), outputs["image_features"]).abs().max() < 0.9
    # the momentum copy has the aggregators as well
    torch.testing.assert_close(outputs["coder_image_keys"], outputs["image_features"], rtol=1e-4, atol=1e-5)
    copied = model.coder.heads["momentum"].towers.model
    assert any(name.startswith("coder.aggregators.image") for name, _ in copied.named_parameters())
    sum(outputs[key].sum() for key in ("image_features", "text_features")).backward()
    assert all(p.grad is not None for p in model.coder.aggregators.parameters())
    with pytest.raises(CoderError, match="aggregator must be one of tower, gpo, gpo-mlp"):
        coder_plugin.create_model(tiny_model, aggregator="mean")


def test_inference_builds_what_scores_and_nothing_else(tiny_model):
    objective = Objective.parse("coder").with_options({"concepts.vocabulary": "scenes", "prototypes.clusters": 3})
    model = coder_plugin.create_model(tiny_model, loss=objective, inference=True)
    assert list(model.coder.heads) == ["concepts"]
    assert list(coder_plugin.create_model(tiny_model, loss="dcl", inference=True).coder.heads) == []


def test_sizes_that_cannot_work_are_named(tiny_model):
    objective = Objective.parse("m_dcl").with_options({"momentum.bank_size": 8})
    model = coder_plugin.create_model(tiny_model, loss=objective)
    model.coder.check(batch=8, samples=100)
    with pytest.raises(CoderError, match="head 'momentum': bank_size 8 is smaller than the global batch of 9"):
        model.coder.check(batch=9, samples=100)
    with pytest.raises(ValueError, match="clusters=11 is more than the 10 samples"):
        Prototypes(WIDTHS, clusters=11).check(batch=2, samples=10)
    with pytest.raises(ValueError, match="recluster=3 pairs cannot make clusters=4"):
        Prototypes(WIDTHS, clusters=4, recluster=3)
