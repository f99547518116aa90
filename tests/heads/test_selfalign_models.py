"""SelfAlign inside models: region models and a CLIP under its recipes, their score, gradients and exports."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin import create_loss, create_model
from coder_plugin.masked import without_start
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import load_model
from coder_plugin.tensors import cosine
from coder_plugin.training.prepare import freeze_unread
from tests.backbones import test_region_text as regions
from tests.backbones import tiny_bert
from tests.references import selfalign as reference

MODELS = ("region-bert", "region-bigru", "region-bert-camera", "region-bigru-vsrn", "clip")
RECIPE = "triplet + lca + cra(hard_negatives=6)"
#: Gradients that stay away with reason: in front of a BatchNorm, or of a softmax.
SILENT = (".project.bias", "mlp.hidden.bias", "attention.value.bias", ".out.bias", "self.key.bias", "pool.score.bias")


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


def small(text: str, **more: Any) -> Objective:
    given = {"alignment.prototypes": 6} if "lca" in text else {}
    return Objective.parse(text).with_options({**given, **more})


@pytest.fixture(scope="module")
def models(bert, tiny_model):
    @cache
    def make(name: str, text: str = RECIPE, **more: Any) -> Any:
        torch.manual_seed(0)
        objective = small(text, **{key.replace("__", "."): value for key, value in more.items()})
        if name == "clip":
            return create_model(tiny_model, loss=objective)
        options = {**regions.options(name, bert), **({"word_projection": True} if "bigru" in name else {})}
        model = create_model(name, loss=objective, **options)
        with torch.no_grad():  # a fresh VSRN's graph is the identity
            for key, parameter in model.named_parameters():
                if key.endswith("norm.weight"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make


def batch(model: Any, name: str) -> dict[str, Any]:
    if name != "clip":
        return regions.batch(model)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, 400, (4, 40), generator=generator)
    for row, length in enumerate((5, 9, 3, 7)):
        text[row, length - 1], text[row, length:] = 49407, 0
    return {"image": torch.randn(4, 3, 64, 64, generator=generator), "text": text, "image_id": torch.arange(4)}


def valid(known: dict[str, Tensor], side: str) -> list[Tensor]:
    pairs = zip(known[f"{side}_contexts"], known[f"{side}_context_mask"], strict=True)
    return [features[mask].double() for features, mask in pairs]


@pytest.mark.parametrize("name", [*MODELS[2:], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[:2])])
def test_keys_losses_and_gradients(models, name):
    model = models(name).train()
    loss = create_loss(model.coder.objective, model=model)
    given = batch(model, name)
    outputs = model(**given)
    length = given["text"].shape[1]
    assert outputs["coder_word_scores"].shape == (4, length, 6) and outputs["coder_word_regions"].shape == (4, length)
    assert outputs["coder_text_locals"].shape[:2] == outputs["coder_text_locals_mask"].shape == (4, length)
    assert all(key.startswith("coder_") for key in outputs.keys() - {"image_features", "text_features", "logit_scale"})
    assert all(len(value) == 4 for key, value in outputs.items() if key.startswith("coder_"))
    losses = loss(**outputs)
    assert losses.keys() == {"triplet_loss", "lca_loss", "cra_contrast_loss", "cra_triplet_loss"}
    assert all(torch.isfinite(value) and value >= 0 for value in losses.values())
    model.zero_grad()
    sum(losses.values()).backward()
    dead = {key for key, p in model.named_parameters() if p.requires_grad and (p.grad is None or p.grad.abs().max() < 1e-9)}
    assert {key for key in dead if not key.endswith(SILENT)} == set()
    model.eval()
    assert {key for key in model(given["image"], given["text"]) if key.startswith("coder_")} == set()


@pytest.mark.parametrize(("name", "weight"), [*((name, 0.3) for name in MODELS[2:]), ("clip", 0.0)])
def test_the_score_is_the_base_plus_the_contexts(models, name, weight):
    model = models(name, RECIPE, contexts__weight=weight).train()
    given = batch(model, name)
    for _ in range(3):
        model(**given)  # statistics of the BatchNorms that are no longer those of the start
    model.eval()
    with torch.no_grad():
        image, text = model.describe_image(given["image"]), model.describe_text(given["text"])
        embedded = model.embed_image(given["image"]), model.embed_text(given["text"])
        base = cosine(image["image_features"], text["text_features"])
        state = {key: value.double() for key, value in model.coder.heads["contexts"].state_dict().items()}
        more, _ = reference.context_score(valid(image, "image"), valid(text, "text"), state, training=False)
    torch.testing.assert_close(cosine(*embedded), (base + weight * more.float()), rtol=1e-4, atol=1e-4)
    width = image["image_features"].shape[-1]
    assert embedded[1].shape[1] == width + (2 * image["image_contexts"].shape[-1] if weight else 0)
    assert embedded[0].shape[:-1] == image["image_features"].shape[:-1] and more.abs().max() > 0.01
    if name == "region-bert-camera":  # the maximum over its views, and every view has the contexts
        assert embedded[0].shape == (4, 3, embedded[1].shape[1])


@pytest.mark.parametrize("name", ["region-bert-camera", "clip"])
def test_exports_keep_what_the_score_needs(models, name, tmp_path):
    model = models(name).train()
    given = batch(model, name)
    model(**given)
    model.eval()
    export_model(model, tmp_path)
    again = load_model(tmp_path)
    assert list(again.coder.heads) == ["contexts"]
    with torch.no_grad():
        for side in ("image", "text"):
            wanted = getattr(model, f"embed_{side}")(given[side])
            torch.testing.assert_close(getattr(again, f"embed_{side}")(given[side]), wanted)


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("triplet + lca(direction=dual) + cra(ca_on=combined)", set()),
        ("triplet + cra(ca_on='none')", {"contexts.guides.text.gate", "contexts.guides.image.gate"}),
    ],
)
def test_what_nothing_reads_is_frozen_before_ddp(models, text, unread):
    model = models("region-bert-camera", text)
    found = freeze_unread(model, create_loss(model.coder.objective, model=model), model.tokenizer())
    heads = {key.removeprefix("coder.heads.").rpartition(".")[0] for key in found if key.startswith("coder.heads.")}
    assert heads == unread and not any(key.startswith(("visual.", "text.proj")) for key in found)


@pytest.mark.parametrize("name", ["region-bert-camera", "clip"])
def test_word_classes_travel_through_the_model(models, name):
    model = models(name, RECIPE, alignment__words="noun").train()
    given = batch(model, name)
    tags = torch.zeros_like(given["text"])
    tags[:, 1] = 1
    out = model(**given, text_tags=tags)
    assert model.coder.reads_tags and out["coder_word_mask"].nonzero()[:, 1].eq(1).all() and out["coder_word_mask"].any()
    with pytest.raises(ValueError, match="text_tags"):
        model(**given)


def test_without_the_contrast_nothing_learns_in_contexts_and_the_score_stays(models):
    """Table IV's #7: S_c is the cosine of the mean contexts."""
    model = models("region-bert-camera", "triplet + cra", contexts__branches="none").eval()
    assert list(model.coder.heads["contexts"].parameters()) == []
    given = batch(model, "region-bert-camera")
    with torch.no_grad():
        image, text = model.describe_image(given["image"]), model.describe_text(given["text"])
        means = [torch.stack([x.mean(0) for x in valid(known, side)]) for known, side in ((image, "image"), (text, "text"))]
        unit = [torch.nn.functional.normalize(each, dim=1).float() for each in means]
        wanted = cosine(image["image_features"], text["text_features"]) + unit[0] @ unit[1].T
        got = cosine(model.embed_image(given["image"]), model.embed_text(given["text"]))
    torch.testing.assert_close(got, wanted)
    losses = create_loss("triplet + cra", model=model)(**model.train()(**given))
    assert losses.keys() == {"triplet_loss", "cra_triplet_loss"}


def test_the_start_of_a_text_that_is_read_forward_does_not_count(models):
    """In a causal tower it is one vector for all texts; where a text is read both ways it is not."""
    model = models("clip").eval()
    text = batch(model, "clip")["text"]
    text[:, 0] = 49406
    known = model.describe_text(text)
    first = known["text_contexts"][:, 0]
    torch.testing.assert_close(first, first[:1].expand_as(first))
    assert not known["text_context_mask"][:, 0].any() and known["text_mask"][:, 0].all()
    assert torch.equal(known["text_context_mask"][:, 1:], known["text_mask"][:, 1:])
    camera = models("region-bert-camera").eval()
    known = camera.describe_text(batch(camera, "region-bert-camera")["text"])
    assert torch.equal(known["text_context_mask"], known["text_mask"])
    lone = torch.tensor([[True, False, False], [True, True, False]])
    assert without_start(lone).tolist() == [[True, False, False], [False, True, False]]
