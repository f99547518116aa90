"""The named recipes: each resolves, and each says what its row of the paper says."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from coder_plugin import registry
from coder_plugin.functional import dcl
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.options import resolve_config

OURS = [p.name for p in registry.list_plugins("recipes") if p.distribution == "coder-plugin"]
ALL_HEADS = {"ids", "momentum", "concepts", "prototypes"}


@pytest.mark.parametrize("name", OURS)
def test_every_recipe_resolves_and_survives_its_file_form(name):
    objective = Objective.parse(name)
    assert set(required_heads(objective)) <= ALL_HEADS | {"asymmetry", "fusion", "alignment", "contexts", "views", "captioner"}
    assert Objective.from_dict(objective.to_dict()) == objective
    coder, ascl = {"triplet", "dcl", "m_dcl", "concept_dcl", "pgc"}, {"ascl", "clip"}
    selfalign = {"lca", "cra", "view_diversity", "caption"}
    assert {term.name for term in objective.terms} <= coder | ascl | selfalign
    given = {} if "model" in dict(objective.training) else {"model": "ViT-B-32"}
    config = resolve_config({"loss": name, "train_data": "x.tar", **given}).to_flat()
    for option, value in objective.training:
        assert config[option] == value
    flags = {"model": "ViT-B-32", "lr": 0.5, "wd": 0.25, "epochs": 3}
    by_flag = resolve_config({"loss": name, "train_data": "x.tar", **flags}).to_flat()
    assert {option: by_flag[option] for option in flags} == flags


def options(name: str) -> dict[str, dict]:
    objective = Objective.parse(name)
    return {term.name: dict(term.options) for term in objective.terms} | {head: dict(given) for head, given in objective.heads}


def test_coder_is_equation_8():
    objective = Objective.parse("coder")
    assert [(term.weight, term.name) for term in objective.terms] == [
        (3.0, "dcl"), (1.0, "m_dcl"), (1.0, "concept_dcl"), (1.0, "pgc")
    ]  # fmt: skip
    assert set(required_heads(objective)) == ALL_HEADS
    assert options("coder")["dcl"]["diversity_over"] == "batch+bank"
    assert objective.training == ()


def test_the_printed_twins_follow_the_letter():
    for name in ("coder-printed", "coder-f30k-printed", "coder-coco-printed"):
        given = options(name)
        assert all(given[term]["positive_weight"] == "mu" for term in ("dcl", "m_dcl", "concept_dcl"))
        assert given["m_dcl"]["reverse"] == "all" and given["dcl"]["mask_same_image"] is False
    assert dict(Objective.parse("coder-f30k-printed").training)["opt"] == "adam"
    assert dict(Objective.parse("coder-f30k").training)["opt"] == "adamw"
    assert options("coder-f30k")["prototypes"]["clusters"] == 10_000
    assert options("coder-coco")["prototypes"]["clusters"] == 20_000


@pytest.mark.parametrize(
    ("name", "terms", "heads"),
    [
        ("coder/table2-1", ["triplet"], {"ids"}),
        ("coder/table2-2", ["dcl"], {"ids"}),
        ("coder/table2-3", ["dcl", "m_dcl"], {"ids", "momentum"}),
        ("coder/table2-4", ["dcl", "m_dcl", "concept_dcl"], {"ids", "momentum", "concepts"}),
        ("coder/table2-5", ["dcl", "m_dcl", "concept_dcl", "pgc"], ALL_HEADS),
        ("coder/table3-1", ["dcl", "concept_dcl", "pgc"], ALL_HEADS - {"momentum"}),
        ("coder/table3-2", ["dcl", "concept_dcl", "pgc"], ALL_HEADS - {"momentum"}),
        ("coder/table3-3", ["dcl", "concept_dcl", "pgc"], ALL_HEADS),
        ("coder/table3-6", ["dcl", "m_dcl", "concept_dcl", "pgc"], ALL_HEADS),
        ("coder/fig3-32-without-m_dcl", ["dcl", "concept_dcl", "pgc"], ALL_HEADS),
    ],
)
def test_a_row_has_its_terms_and_builds_nothing_else(name, terms, heads):
    objective = Objective.parse(name)
    assert [term.name for term in objective.terms] == terms
    assert set(required_heads(objective)) == heads


def test_rows_differ_where_the_tables_do():
    assert options("coder/table3-1")["dcl"]["diversity"] == options("coder/table3-4")["m_dcl"]["diversity"] == "none"
    assert options("coder/table3-2")["dcl"]["diversity_over"] == "batch"
    assert options("coder/table3-6") == options("coder/table2-5") | {
        "m_dcl": {"diversity": "std", "diversity_over": "batch+bank"},
        "dcl": {"diversity": "std", "diversity_over": "batch+bank"},
        "concept_dcl": {"diversity": "std"},
    }
    assert options("coder/table3-4") == options("coder/table7-none")
    assert options("coder/table4-15k")["prototypes"]["clusters"] == 15_000
    assert {options("coder/table7-entropy")[term]["diversity"] for term in ("dcl", "m_dcl", "concept_dcl")} == {"entropy"}
    assert dict(Objective.parse("coder/fig3-64").training)["batch_size"] == 64
    assert options("coder/fig7-0.5")["concept_dcl"]["epsilon"] == 0.5
    assert options("coder/table4-10k") == options("coder/table2-5")


def test_a_sum_of_recipes_says_nothing_of_training():
    assert Objective.parse("coder-f30k + clip").training == ()
    assert Objective.parse("2*coder-f30k").training == Objective.parse("coder-f30k").training


@pytest.mark.parametrize(("mu", "gamma"), [(0.05, 0.6), (0.1, 0.3)])
def test_coder_clips_loss_keeps_its_scale_from_batch_to_batch(mu, gamma):
    """The same distribution of similarities at a batch of 256 and one of 2,048: METHODS' plain sum grows by mu log 8."""
    generator = torch.Generator().manual_seed(0)

    def loss(n: int, effective: int | None) -> float:
        centre, shared = torch.randn(1, 64, generator=generator), torch.randn(n, 64, generator=generator)
        images, texts = (
            normalize(centre + 1.2 * shared + 0.8 * torch.randn(n, 64, generator=generator), dim=1) for _ in range(2)
        )
        return dcl(images, texts, mu=mu, gamma=gamma, effective_negatives=effective).item()

    kept = abs(loss(2048, 255) - loss(256, 255))
    grown = loss(2048, None) - loss(256, None)
    assert kept < 0.03 and grown > 3 * kept


ASCL = {"asymmetry", "fusion", "ids"}


@pytest.mark.parametrize(
    ("name", "terms", "heads", "asymmetry"),
    [
        ("table2-full", ["ascl", "ascl"], ASCL, {}),
        ("table2-without-positives", ["ascl", "ascl"], ASCL, {"positives": None}),
        ("table2-without-negatives", ["ascl", "ascl"], ASCL, {"negatives": None}),
        ("table2-without-both", ["ascl", "ascl"], ASCL, {"negatives": None, "positives": None}),
        ("table2-without-fusion", ["ascl"], {"asymmetry", "ids"}, {}),
        ("table2-triplet", ["triplet", "triplet"], {"fusion", "ids"}, {}),
        ("fig3-join", ["ascl", "ascl"], ASCL, {"positives": "join"}),
        ("fig3-truncate", ["ascl", "ascl"], ASCL, {"positives": "truncate"}),
        ("fig3-join-and-truncate", ["ascl", "ascl"], ASCL, {}),
        ("fig3-shuffle", ["ascl", "ascl"], ASCL, {"negatives": "shuffle"}),
        ("fig3-dropout", ["ascl", "ascl"], ASCL, {"negatives": "dropout"}),
        ("fig3-gaussian", ["ascl", "ascl"], ASCL, {"negatives": "gaussian"}),
        ("fig3-cutoff", ["ascl", "ascl"], ASCL, {"negatives": "token_cutoff+feature_cutoff"}),
        ("fig3-mixture", ["ascl", "ascl"], ASCL, {"negatives": "mixture"}),
    ],
)
def test_ascls_rows(name, terms, heads, asymmetry):
    objective = Objective.parse(f"ascl/{name}")
    assert [term.name for term in objective.terms] == terms and set(required_heads(objective)) == heads
    assert dict(dict(objective.heads).get("asymmetry", ())) == asymmetry
    # where there is a fusion it is the first term's score, and the towers' own cosine the second's
    similarities = [dict(term.options).get("similarity", "cosine") for term in objective.terms]
    assert similarities == (["cosine"] if "without-fusion" in name else ["fusion", "cosine"])
    if "ascl" in terms:
        assert all(dict(term.options)["temperature"] == 0.01 for term in objective.terms)
    if "fusion" in heads:
        assert dict(dict(objective.heads)["fusion"])["local_weight"] == 0.6
    training = dict(objective.training)
    assert (training["batch_size"], training["epochs"], training["lr"]) == (64, 20, 2e-4)
    assert (training["opt"], training["lr_step_epochs"], training["lr_step_gamma"]) == ("adam", 10, 0.1)


def test_ascl_for_coco_and_for_clip():
    objective = Objective.parse("ascl-coco")
    assert [dict(term.options)["temperature"] for term in objective.terms] == [0.05, 0.05]
    assert dict(dict(objective.heads)["fusion"])["local_weight"] == 0.8
    assert dict(objective.training)["lr"] == 5e-4
    objective = Objective.parse("ascl-clip")
    assert str(objective) == "clip + ascl(temperature=logit_scale)" and "model" not in dict(objective.training)
    assert Objective.parse("ascl-f30k") == Objective.parse("ascl/table2-full")
