"""SelfAlign's named recipes: each resolves on the model it names, and each says what its row of table IV says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coder_plugin import create_loss, create_model, recipes, registry
from coder_plugin.backbones.region_options import Options
from coder_plugin.backbones.tokenizers import SPECIAL
from coder_plugin.expression import parse_value
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from tests.backbones import test_region_text as regions
from tests.backbones import tiny_bert
from tests.recipe_numbers import configuration, first_rate, owners, rates, resolved
from tests.test_recipes import objective_of

NAMES = [name for name in sorted({*recipes.names(), *recipes.objectives()}) if name.startswith("selfalign")]
ROWS = [f"selfalign/table4-{row}" for row in range(12)]


def test_all_are_there():
    others = ["camera", "camera-coco", "clip", "printed", "vsrn", "vsrn-coco"]
    assert sorted(NAMES) == sorted(["selfalign", *(f"selfalign-{other}" for other in others), *ROWS])


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


#: On CAMERA, on a CLIP, on VSRN, and with word classes; the others are slow.
DEFAULT = ("selfalign-camera", "selfalign-clip", "selfalign-vsrn", "selfalign/table4-6")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT)) for name in NAMES])
def test_each_resolves_on_its_model_and_survives_its_file_form(name, bert, tiny_model):
    objective = objective_of(name)
    assert Objective.from_dict(objective.to_dict()) == objective
    training = dict(recipes.load(name).settings) if recipes.has_recipe(name) else {}
    torch.manual_seed(0)
    if name == "selfalign-clip":
        model = create_model(tiny_model, loss=objective)
    else:
        backbone = training.get("model", "region-bert")
        given = dict(each.split("=") for each in training.get("model_kwargs", []))
        more = {key: parse_value(value) for key, value in given.items()}
        model = create_model(backbone, loss=objective, **{**regions.options(backbone, bert), **more})
    assert tuple(model.coder.heads) == required_heads(objective)
    loss = create_loss(objective, model=model)
    if name == "selfalign-clip":
        return
    batch = regions.batch(model)
    batch["text_tags"] = torch.ones_like(batch["text"])
    losses = loss(**model.train()(**batch))
    assert losses and all(torch.isfinite(value) for value in losses.values())


def test_the_formulas_to_the_letter():
    assert str(objective_of("selfalign-printed")) == "lca(assignment=softmax) + cra(mask_same_image=false)"


def test_it_can_be_added_to_other_objectives():
    for text, weight in (("coder + selfalign", 1.0), ("dcl + 0.5*selfalign", 0.5)):
        objective = Objective.parse(text)
        assert {"alignment", "contexts", "ids"} <= set(required_heads(objective))
        given = {term.name: term for term in objective.terms}
        assert given["lca"].weight == given["cra"].weight == weight
        assert dict(given["cra"].options)["ca_on"] == "combined"


# Numbers: the values are written here, not read from the recipes


_BASE = {
    "triplet": 1.0, "triplet.reduction": "sum", "triplet.margin": 0.2, "triplet.hardest": True, "triplet.mean_epochs": 0,
    "triplet.similarity": "cosine",
}  # fmt: skip
_VIEWS = {"view_diversity": 0.01, "view_diversity.reduction": "sum"}
_LCA = {
    "lca": 1.0, "lca.temperature": 0.1, "lca.assignment": "sinkhorn", "lca.epsilon": 0.05, "lca.iterations": 2,
    "lca.direction": "word_to_region",
    "alignment.prototypes": 1024, "alignment.words": "all", "alignment.freeze_steps": 0, "alignment.init": "random",
}  # fmt: skip
_CRA = {
    "cra": 1.0, "cra.temperature": 0.7, "cra.hard_negatives": 512, "cra.margin": 0.2, "cra.hardest": True,
    "cra.reduction": "sum", "cra.ca_on": "context", "cra.mask_same_image": True,
    "contexts.branches": "both", "contexts.gate": "linear", "contexts.score": "cosine_of_mean", "contexts.weight": 1.0,
}  # fmt: skip
ON_CAMERA: dict[str, Any] = {**_BASE, **_VIEWS, **_LCA, **_CRA}
ON_VSRN: dict[str, Any] = {
    **_BASE, "caption": 1.0, "captioner.hidden": 512, "captioner.word_dim": 300, "captioner.dropout": 0.2, **_LCA, **_CRA
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "selfalign-camera": ON_CAMERA,
    "selfalign-camera-coco": ON_CAMERA,
    "selfalign-vsrn": ON_VSRN,
    "selfalign-vsrn-coco": ON_VSRN,
    **dict.fromkeys(("camera", "camera-coco"), {**_BASE, **_VIEWS}),
    **dict.fromkeys(("vsrn", "vsrn-coco"), {key: value for key, value in ON_VSRN.items() if key not in {**_LCA, **_CRA}}),
    **{
        f"selfalign/table4-{row}": options
        for row, options in enumerate(
            [
                ON_CAMERA,
                {**_BASE, **_VIEWS, **_CRA},
                {**_BASE, **_VIEWS, **_LCA},
                {**ON_CAMERA, "lca.direction": "region_to_word"},
                {**ON_CAMERA, "lca.direction": "dual"},
                {**ON_CAMERA, "alignment.words": "noun+adj+verb"},
                {**ON_CAMERA, "alignment.words": "noun"},
                {**ON_CAMERA, "contexts.branches": "none"},
                {**ON_CAMERA, "cra.ca_on": "none"},
                {**ON_CAMERA, "contexts.branches": "image_global"},  # loses T-global/V-local
                {**ON_CAMERA, "contexts.branches": "text_global"},  # mirrors it
                {**_BASE, **_VIEWS},
            ]
        )
    },
}
#: Printed: Adam, batch 128, clip 2; no warm-up is printed or released.
RUN: dict[str, Any] = {
    "model": "region-bert-camera", "captions": "all", "max_regions": 36, "batch_size": 128, "accum_freq": 1,
    "epochs": 30, "lr": 1e-4, "lr_scheduler": "step", "lr_step_epochs": 10, "lr_step_gamma": 0.1,
    "opt": "adam", "wd": 0.0, "grad_clip_norm": 2.0, "warmup_epochs": 0.0, "text_lr_scale": 1.0, "heads_lr_scale": 1.0,
    "region_dropout": 0.0, "word_dropout": 0.0, "ema_decay": None,
}  # fmt: skip


def test_the_objectives_in_numbers():
    for name, wanted in OBJECTIVES.items():
        found = resolved(name)
        assert {key: found[key] for key in wanted} == wanted, name
        assert owners(found) - {"ids", "views"} == owners(wanted), f"terms and heads of {name}"


def test_the_runs_in_numbers():
    for name in (*OBJECTIVES, "selfalign-clip"):
        wanted = dict(RUN)
        if "vsrn" in name:
            kwargs = ["bidirectional=false", *([] if "coco" in name else ["batch_norm=true"])]
            kwargs = [*(["word_projection=true"] if "selfalign" in name else []), *kwargs]
            wanted |= {"model": "region-bigru-vsrn", "lr": 2e-4, "model_kwargs": kwargs}
        wanted |= {
            "selfalign-camera-coco": {"epochs": 40, "lr_step_epochs": 20},
            "selfalign-vsrn-coco": {"lr_step_epochs": 15},
        }.get(f"selfalign-{name.removeprefix('selfalign-')}", {})
        if name == "selfalign-clip":
            wanted = {"model": "ViT-B-32", "lr": 1e-5, "wd": 0.1, "opt": "adamw", "lr_scheduler": "cosine", "captions": "draw"}
            wanted["heads_lr_scale"] = 100.0
        flat = configuration(name).to_flat()
        assert {key: flat[key] for key in wanted} == wanted, name


def test_the_rates():
    """From the first step on: there is no warm-up."""
    for name, expected in {
        "selfalign-camera": [1e-4] * 10 + [1e-5] * 10 + [1e-6] * 10,
        "selfalign-camera-coco": [1e-4] * 20 + [1e-5] * 20,
        "selfalign-vsrn": [2e-4] * 10 + [2e-5] * 10 + [2e-6] * 10,
        "selfalign-vsrn-coco": [2e-4] * 15 + [2e-5] * 15,
    }.items():
        assert rates(name) == pytest.approx(expected, rel=1e-9) and first_rate(name) == pytest.approx(expected[0]), name


def test_the_bases_in_numbers():
    """CAMERA: frozen BERT, 32 tokens, 64 heads, 12 views; VSRN: graph layers, GRUs; D 2048."""
    camera, vsrn = (Options(**registry.load("backbones", name).options) for name in ("region-bert-camera", "region-bigru-vsrn"))
    assert (camera.region_dim, camera.embed_dim, camera.heads, camera.views, camera.context_length) == (2048, 2048, 64, 12, 32)
    assert (camera.encoder, camera.frozen_text, camera.context, camera.text_context) == ("bert", True, "camera", "camera")
    assert (camera.image_pooling, camera.text_pooling, camera.mlp) == ("views", "mean", False)
    assert (vsrn.embed_dim, vsrn.encoder, vsrn.context, vsrn.image_pooling, vsrn.text_pooling) == (
        2048, "bigru", "vsrn", "gru", "last"
    )  # fmt: skip


def test_the_parameters_that_selfalign_adds_to_vsrn():
    """CRA's 25.2 million and the wider GRU's 10.7 are table II's 35.9 (173.6 - 137.7); LCA and the words' layer have 2.7."""
    numbers = []
    for name in ("vsrn", "selfalign-vsrn"):
        recipe = recipes.load(name)
        given = {key: parse_value(value) for key, value in (each.split("=") for each in recipe.settings["model_kwargs"])}
        with torch.device("meta"):
            model = create_model(recipe.settings["model"], loss=recipe.loss, vocabulary=[*SPECIAL, "dog"], **given)
        heads = dict(model.coder.heads.items())
        parts = (model.text.rnn, model.text.project, heads.get("contexts"), heads.get("alignment"))
        numbers.append([sum(each.numel() for each in part.parameters()) / 1e6 if part else 0 for part in (model, *parts)])
    added = [after - before for before, after in zip(*numbers, strict=True)]
    assert added == pytest.approx([38.64, 10.74, 0.62, 25.19, 2.10], abs=0.005)
    assert added[1] + added[3] == pytest.approx(173.6 - 137.7, abs=0.05)


def test_the_objective_for_a_clip():
    found = resolved("selfalign-clip")
    assert {key: found[key] for key in ("clip", "lca", "cra", "cra.ca_on", "cra.reduction")} == {
        "clip": 1.0, "lca": 1.0, "cra": 1.0, "cra.ca_on": "combined", "cra.reduction": "mean"
    }  # fmt: skip
    assert owners(found) - {"ids"} == {"clip", "lca", "cra", "alignment", "contexts"}
