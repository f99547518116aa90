"""What CODER's recipes resolve to, number by number: the papers' values are written here, not read from the recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coder_plugin import recipes, registry
from coder_plugin.backbones.region_options import Options
from coder_plugin.training.optim import create_optimizer
from tests.recipe_numbers import configuration, first_rate, owners, rates, resolved

#: Options of dcl, m_dcl and concept_dcl that the papers print or imply: mu and gamma of section 4.2, epsilon of eq. 16's text.
_DCL = {
    "mu": 0.1, "gamma": 0.3, "epsilon": 0.1, "diversity": "std", "positive_weight": 1.0, "mask_same_image": True,
    "effective_negatives": None, "diversity_gradient": False,
}  # fmt: skip
#: The objective on Flickr30K (eq. 8, section 4.2): weights of the terms, and options of terms and heads.
FULL: dict[str, Any] = {
    "dcl": 3.0, **{f"dcl.{name}": value for name, value in _DCL.items()}, "dcl.diversity_over": "batch+bank",
    "m_dcl": 1.0, **{f"m_dcl.{name}": value for name, value in _DCL.items()}, "m_dcl.diversity_over": "batch+bank",
    "m_dcl.reverse": "paired", "m_dcl.warmup": 0,
    "concept_dcl": 1.0, **{f"concept_dcl.{name}": value for name, value in _DCL.items()},
    "pgc": 1.0,
    "momentum.momentum": 0.995, "momentum.bank_size": 4096, "momentum.mode": "eval",
    "concepts.threshold": 0.3, "concepts.rescale": True, "concepts.layers": 1, "concepts.scale": 10.0, "concepts.beta": 0.9,
    "concepts.decoder": "linear",
    "concepts.norm": "batch", "concepts.tower_gradient": 1.0,
    "prototypes.clusters": 10_000, "prototypes.scale": 1.0,
}  # fmt: skip
#: Switches of a recipe: options that differ from :data:`FULL`, and terms and heads that it lacks, as None.
_NO_BANKS = {"m_dcl": None, "momentum": None}
_IMPLICIT = {f"{term}.diversity": "none" for term in ("dcl", "m_dcl", "concept_dcl")}
_ENTROPY = {f"{term}.diversity": "entropy" for term in ("dcl", "m_dcl", "concept_dcl")}
_OVER_BATCH = {"dcl.diversity_over": "batch", "m_dcl.diversity_over": "batch"}
_NO_CONCEPTS = {"concept_dcl": None, "concepts": None, "pgc": None, "prototypes": None}
_PRINTED = {
    **{f"{term}.positive_weight": "mu" for term in ("dcl", "m_dcl", "concept_dcl")},
    **{f"{term}.mask_same_image": False for term in ("dcl", "m_dcl", "concept_dcl")},
    "m_dcl.reverse": "all", "concepts.decoder": "mlp",
}  # fmt: skip
_CLIP = {
    **{f"{term}.mu": 0.05 for term in ("dcl", "m_dcl")}, **{f"{term}.gamma": 0.6 for term in ("dcl", "m_dcl")},
    **{f"{term}.effective_negatives": 255 for term in ("dcl", "m_dcl", "concept_dcl")},
    "m_dcl.warmup": 4096, "concepts.warmup": 500,
    "concept_dcl.positive_weight": 2.0, "concepts.tower_gradient": 0.0, "prototypes.scale": 4.0, "m_dcl.reverse": "none",
}  # fmt: skip
_FROZEN = {
    **{f"{term}.mu": 0.05 for term in ("dcl", "m_dcl")}, **{f"{term}.gamma": 0.5 for term in ("dcl", "m_dcl")},
    "prototypes.scale": 8.0,
}  # fmt: skip
_WITHOUT_M_DCL = {"m_dcl": None}

CHANGES: dict[str, dict[str, Any]] = {
    "coder-f30k": {},
    "coder-coco": {"prototypes.clusters": 20_000},
    "coder-f30k-bigru": {},
    "coder-coco-bigru": {"prototypes.clusters": 20_000},
    "coder-f30k-printed": _PRINTED,
    "coder-coco-printed": {**_PRINTED, "prototypes.clusters": 20_000},
    "coder-clip": _CLIP,
    "coder-frozen": _FROZEN,
    "coder/table2-2": {**_NO_BANKS, **_NO_CONCEPTS, "dcl.diversity_over": "batch"},
    "coder/table2-3": _NO_CONCEPTS,
    "coder/table2-4": {"pgc": None, "prototypes": None},
    "coder/table2-5": {},
    "coder/table3-1": {**_NO_BANKS, **_IMPLICIT, **_OVER_BATCH},
    "coder/table3-2": {**_NO_BANKS, **_OVER_BATCH},
    "coder/table3-3": _WITHOUT_M_DCL,
    "coder/table3-4": {**_IMPLICIT, **_OVER_BATCH},
    "coder/table3-5": _OVER_BATCH,
    "coder/table3-6": {},
    **{f"coder/table4-{k}k": {"prototypes.clusters": 1000 * k} for k in (5, 10, 15, 20)},
    "coder/table7-none": {**_IMPLICIT, **_OVER_BATCH},
    "coder/table7-std": {},
    "coder/table7-entropy": _ENTROPY,
    "coder/supplement-fig4-baseline": {
        **_NO_BANKS, "dcl": None, "triplet": 1.0, "triplet.margin": 0.2, "triplet.hardest": True, "triplet.reduction": "sum",
        "triplet.mean_epochs": 1,
    },  # fmt: skip
    **{f"coder/fig3-{n}": {} for n in (32, 64, 128)},
    **{f"coder/fig3-{n}-without-m_dcl": _WITHOUT_M_DCL for n in (32, 64, 128)},
    **{
        f"coder/fig7-{epsilon}": {f"{term}.epsilon": epsilon for term in ("dcl", "m_dcl", "concept_dcl")}
        for epsilon in (0.01, 0.05, 0.1, 0.2, 0.5)
    },
}
#: These have no loss of :data:`FULL`.
OTHERS = ["coder/table2-1"]
PEERS = ["vse-infinity", "vse-infinity-bigru"]

#: Section 4.2 on VSE-infinity's base: options of the run, those that no recipe sets included.
SETTINGS: dict[str, Any] = {
    "model": "region-bert", "model_kwargs": [], "aggregator": "tower", "captions": "all", "max_regions": 36,
    "batch_size": 128, "accum_freq": 1, "epochs": 30,
    "lr": 2e-4, "lr_scheduler": "step", "lr_step_epochs": 15, "lr_step_gamma": 0.1, "warmup_epochs": 1.0, "warmup": None,
    "opt": "adamw", "wd": 1e-4, "beta1": None, "beta2": None, "eps": None, "grad_clip_norm": 2.0, "ema_decay": None,
    "text_lr_scale": 0.1, "heads_lr_scale": 1.0, "layer_decay": 1.0, "lora_rank": 0, "lock_text": False, "lock_image": False,
    "region_dropout": 0.2, "word_dropout": 0.2,
}  # fmt: skip
_LETTER = {
    "opt": "adam", "wd": 0.0, "grad_clip_norm": None, "warmup_epochs": 0.0, "text_lr_scale": 1.0,
    "region_dropout": 0.0, "word_dropout": 0.0, "model_kwargs": ["gpo_decoder=mlp"],
}  # fmt: skip


def test_no_recipe_of_coder_is_left_out():
    ours = {name for name in recipes.names() if name.startswith(("coder", "vse"))}
    assert ours == {*CHANGES, *OTHERS, *PEERS}


def test_the_objectives_in_numbers():
    for name, changes in CHANGES.items():
        absent = {owner for owner, value in changes.items() if value is None}
        wanted = {**FULL, **changes}
        wanted = {key: value for key, value in wanted.items() if key.partition(".")[0] not in absent}
        if name in ("coder-clip", "coder-frozen"):  # their number of prototypes follows from the data
            wanted["prototypes.clusters"] = 10_000
        found = resolved(name)
        assert {key: found[key] for key in wanted} == wanted, name
        assert owners(found) - {"ids", "progress"} == owners(wanted), f"terms and heads of {name}"


def test_the_peers_in_numbers():
    """VSE-infinity's loss: summed hinges, margin 0.2, all negatives in the first epoch."""
    for name in ("coder/table2-1", *PEERS):
        found = {key: value for key, value in resolved(name).items() if not key.startswith("progress.")}
        assert found == {
            "triplet": 1.0, "triplet.margin": 0.2, "triplet.hardest": True, "triplet.reduction": "sum",
            "triplet.mean_epochs": 1, "triplet.similarity": "cosine", "triplet.mask_same_image": True,
            "triplet.hard_negatives": False,
        }, name  # fmt: skip


def test_the_runs_in_numbers():
    for name in (*CHANGES, *OTHERS, *PEERS):
        wanted = {**SETTINGS, **(_LETTER if name.endswith("-printed") else {})}
        if name.endswith("-bigru"):
            wanted |= {"model": "region-bigru", "text_lr_scale": 1.0}
        if name.startswith("coder/fig3-"):
            wanted["batch_size"] = int(name.split("-")[1])
        if name == "coder-clip":
            wanted = {"model": "ViT-B-32", "lr": 1e-5, "wd": 0.1, "opt": "adamw", "lr_scheduler": "cosine"}
            wanted |= {"grad_clip_norm": None, "captions": "draw", "aggregator": "tower", "heads_lr_scale": 1.0}
        if name == "coder-frozen":
            wanted = {"model": "ViT-B-32", "lr": 3e-4, "wd": 0.05, "opt": "adamw", "lr_scheduler": "cosine", "epochs": 5}
            wanted |= {"captions": "all", "batch_size": 128, "lock_image": True, "lock_text": True}
        flat = configuration(name).to_flat()
        assert {key: flat[key] for key in wanted} == wanted, name


def test_the_rate_is_2e_4_for_15_epochs_and_2e_5_for_15():
    for name in ("coder-f30k", "coder-coco", "coder-f30k-printed", "coder-coco-printed", "vse-infinity"):
        assert rates(name) == pytest.approx([2e-4] * 15 + [2e-5] * 15, rel=1e-9), name
        assert first_rate(name) == pytest.approx(2e-4 if name.endswith("-printed") else 2e-5), name  # a tenth of the warm-up


@pytest.mark.parametrize(
    ("name", "kind", "decay", "encoder"),
    [("coder-f30k", torch.optim.AdamW, 1e-4, 2e-5), ("coder-f30k-printed", torch.optim.Adam, 0.0, 2e-4)],
)
def test_the_optimizer(name, kind, decay, encoder):
    """Weight decay of matrices alone, and BERT at a tenth of the rate where VSE-infinity's base has it so."""
    model = nn.Module()
    model.text = nn.Module()
    model.text.transformer, model.text.proj = nn.Linear(2, 2), nn.Linear(2, 2)
    model.visual = nn.Linear(2, 2)
    optimizer = create_optimizer(model, configuration(name))
    assert type(optimizer) is kind and optimizer.defaults["betas"] == (0.9, 0.999)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found[id(model.text.transformer.weight)] == pytest.approx((encoder, decay))
    assert found[id(model.text.transformer.bias)] == pytest.approx((encoder, 0.0))
    for layer in (model.text.proj, model.visual):
        assert found[id(layer.weight)] == pytest.approx((2e-4, decay)) and found[id(layer.bias)] == pytest.approx((2e-4, 0.0))


def test_the_region_model():
    """36 regions of 2048 channels, D 1024, BERT-base, VSE-infinity's perceptron and pooling."""
    preset = registry.load("backbones", "region-bert")
    options = Options(**preset.options)
    assert (options.region_dim, options.embed_dim, options.mlp, options.context) == (2048, 1024, True, "none")
    assert (options.image_pooling, options.text_pooling, options.gpo_decoder) == ("gpo", "gpo", "linear")
    assert (options.encoder, options.text, options.frozen_text) == ("bert", "bert-base-uncased", False)
    bigru = Options(**registry.load("backbones", "region-bigru").options)
    assert (bigru.encoder, bigru.word_dim, bigru.text_layers, bigru.bidirectional) == ("bigru", 300, 1, True)
