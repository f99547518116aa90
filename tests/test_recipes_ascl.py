"""What AsCL's recipes resolve to, number by number: the paper's values are written here, not read from the recipes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from coder_plugin import recipes
from coder_plugin.noise.generators import Dropout, FeatureCutoff, Gaussian, Mixture, TokenCutoff
from coder_plugin.noise.positives import Truncate
from tests.recipe_numbers import configuration, first_rate, owners, rates, resolved

#: The fused score alone, on Flickr30K.
FUSED: dict[str, Any] = {
    "ascl": 1.0, "ascl.similarity": "fusion", "ascl.temperature": 0.01, "ascl.mask_same_image": True,
    "asymmetry.negatives": "mixture", "asymmetry.positives": "join+truncate", "asymmetry.noise_at": "input",
    "fusion.local_weight": 0.6, "fusion.init": "identity", "fusion.heads": 4,
}  # fmt: skip
#: The cosine's loss besides, which is ours.
HYBRID = {**FUSED, "ascl_2": 1.0, **{key.replace("ascl.", "ascl_2."): value for key, value in FUSED.items() if "ascl." in key}}
HYBRID["ascl_2.similarity"] = "cosine"
#: Without fusion the score is the cosine; with the triplet loss there are no generated texts.
COSINE = {**{key: value for key, value in FUSED.items() if "fusion." not in key}, "ascl.similarity": "cosine"}
TRIPLET = {
    "triplet": 1.0, "triplet.similarity": "fusion", "triplet.margin": 0.2, "triplet.hardest": True, "triplet.mean_epochs": 0,
    "fusion.local_weight": 0.6, "fusion.init": "identity",
}  # fmt: skip
_COCO = {"ascl.temperature": 0.05, "ascl_2.temperature": 0.05, "fusion.local_weight": 0.8}


def coco(options: dict[str, Any]) -> dict[str, Any]:
    """The same with MS-COCO's temperature and weight of the local score."""
    return {key: _COCO.get(key, value) for key, value in options.items()}


_LETTER = {"ascl.mask_same_image": False, "asymmetry.noise_at": "output"}
_TABLE_2 = {
    "full": FUSED,
    "without-positives": {**FUSED, "asymmetry.positives": None},
    "without-negatives": {**FUSED, "asymmetry.negatives": None},
    "without-both": {**FUSED, "asymmetry.positives": None, "asymmetry.negatives": None},
    "without-fusion": COSINE,
    "triplet": TRIPLET,
}
_FIGURE_3 = {
    "join": {"positives": "join"}, "truncate": {"positives": "truncate"}, "join-and-truncate": {},
    "shuffle": {"negatives": "shuffle"}, "dropout": {"negatives": "dropout"}, "gaussian": {"negatives": "gaussian"},
    "cutoff": {"negatives": "token_cutoff+feature_cutoff"}, "mixture": {"negatives": "mixture"},
}  # fmt: skip
ASCL: dict[str, dict[str, Any]] = {
    "ascl-f30k": FUSED,
    "ascl-coco": coco(FUSED),
    "ascl-f30k-printed": {**FUSED, **_LETTER},
    "ascl-coco-printed": coco({**FUSED, **_LETTER}),
    "ascl-f30k-hybrid": HYBRID,
    "ascl-coco-hybrid": coco(HYBRID),
    **{f"ascl/table2-{row}": options for row, options in _TABLE_2.items()},
    **{f"ascl/table2-coco-{row}": coco(options) for row, options in _TABLE_2.items()},
    **{
        f"ascl/fig3-{kind}": {**FUSED, **{f"asymmetry.{name}": value for name, value in options.items()}}
        for kind, options in _FIGURE_3.items()
    },
}
#: Printed: Adam, batch 64, 20 epochs, 2e-4 and a tenth of it after ten. Clipping, warm-up and BERT's rate are ours.
ASCL_RUN: dict[str, Any] = {
    "model": "region-bert", "model_kwargs": [], "captions": "all", "max_regions": 36, "batch_size": 64, "accum_freq": 1,
    "epochs": 20, "lr": 2e-4, "lr_scheduler": "step", "lr_step_epochs": 10, "lr_step_gamma": 0.1,
    "opt": "adam", "wd": 0.0, "beta1": None, "beta2": None, "grad_clip_norm": 2.0, "warmup_epochs": 1.0,
    "text_lr_scale": 0.1, "heads_lr_scale": 1.0, "region_dropout": 0.0, "word_dropout": 0.0, "ema_decay": None,
}  # fmt: skip


def test_the_objectives_in_numbers():
    for name, wanted in ASCL.items():
        found = resolved(name)
        assert {key: found[key] for key in wanted} == wanted, name
        assert owners(found) - {"ids"} == owners(wanted), f"terms and heads of {name}"


def test_no_recipe_is_left_out():
    ours = {"ascl-clip", "ascl-clip-alone", "ascl-bigru"}
    assert {name for name in recipes.names() if name.startswith("ascl")} == {*ASCL, *ours}


def test_the_runs_in_numbers():
    for name in (*ASCL, "ascl-clip"):
        wanted = {**ASCL_RUN, "lr": 5e-4 if name.startswith(("ascl-coco", "ascl/table2-coco")) else 2e-4}
        if name.endswith("-printed"):
            wanted |= {"grad_clip_norm": None, "warmup_epochs": 0.0, "text_lr_scale": 1.0}
            wanted |= {"lr_step_gamma": 0.9} if name == "ascl-coco-printed" else {}
        if name == "ascl-clip":
            wanted = {"model": "ViT-B-32", "lr": 1e-5, "wd": 0.1, "opt": "adamw", "lr_scheduler": "cosine", "captions": "draw"}
        flat = configuration(name).to_flat()
        assert {key: flat[key] for key in wanted} == wanted, name


def test_the_rate_falls_after_10_of_20_epochs_and_what_is_printed_has_no_warm_up():
    for name, rate, after in (
        ("ascl-f30k", 2e-4, 2e-5), ("ascl-coco", 5e-4, 5e-5), ("ascl-f30k-printed", 2e-4, 2e-5),
        ("ascl-coco-printed", 5e-4, 4.5e-4),
    ):  # fmt: skip
        assert rates(name) == pytest.approx([rate] * 10 + [after] * 10, rel=1e-9), name
        assert first_rate(name) == pytest.approx(rate if "printed" in name else rate / 10), name


def test_the_objective_for_a_clip():
    found = resolved("ascl-clip")
    assert {key: found[key] for key in ("clip", "ascl", "ascl.temperature", "ascl.similarity")} == {
        "clip": 1.0, "ascl": 1.0, "ascl.temperature": "logit_scale", "ascl.similarity": "cosine"
    }  # fmt: skip


def test_noise_and_positives():
    """Rates that the paper does not print: 0.1 of the root mean square, 0.15; a prefix of 40 to 80 % and at least 3 words."""
    assert Gaussian().std == 0.1
    assert [kind().rate for kind in (TokenCutoff, FeatureCutoff, Dropout)] == [0.15] * 3
    kinds = [type(each).__name__ for each in Mixture().generators]
    assert kinds == ["Gaussian", "Shuffle", "TokenCutoff", "FeatureCutoff", "Dropout"]
    parameters = inspect.signature(Truncate).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {"shortest": 0.4, "longest": 0.8, "words": 3}
