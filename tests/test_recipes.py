"""The named recipes: each resolves, and each says what its row of the paper says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from coder_plugin import recipes, registry
from coder_plugin.backbones.gpo import GPO
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.build import make_model
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.prepare import make_objective
from tests.backbones import tiny_bert

ALL_HEADS = {"ids", "momentum", "concepts", "prototypes"}
OBJECTIVES = [
    "ascl-clip", "ascl-fusion", "ascl-hybrid", "ascl-printed", "coder", "coder-clip", "coder-paper", "coder-printed",
    "finetune-clip", "selfalign", "selfalign-clip", "selfalign-printed", "vse-infinity",
]  # fmt: skip
#: CODER, section 4.2, on VSE-infinity's base.
CODER = {
    "model": "region-bert", "captions": "all", "batch_size": 128, "epochs": 30, "lr": 2e-4, "lr_scheduler": "step",
    "lr_step_epochs": 15, "lr_step_gamma": 0.1, "opt": "adamw", "wd": 1e-4, "grad_clip_norm": 2.0, "warmup_epochs": 1.0,
    "text_lr_scale": 0.1, "region_dropout": 0.2, "word_dropout": 0.2,
}  # fmt: skip
#: DCL as docs/evidence/dcl.md trains it.
DCL_BIGRU = {
    **CODER, "model": "region-bigru", "model_kwargs": ["embed_dim=256"], "epochs": 8, "lr": 6e-3, "lr_step_epochs": 4,
}  # fmt: skip
del DCL_BIGRU["text_lr_scale"]
#: Only what the paper prints.
PRINTED = {
    "model": "region-bert", "captions": "all", "batch_size": 128, "epochs": 30, "lr": 2e-4, "lr_scheduler": "step",
    "lr_step_epochs": 15, "lr_step_gamma": 0.1, "opt": "adam", "wd": 0.0, "warmup_epochs": 0.0, "text_lr_scale": 1.0,
    "region_dropout": 0.0, "word_dropout": 0.0, "model_kwargs": ["gpo_decoder=mlp"],
}  # fmt: skip
BIGRU = {**CODER, "model": "region-bigru", "text_lr_scale": 1.0}
ASCL_PRINTED = {
    "model": "region-bert", "captions": "all", "batch_size": 64, "epochs": 20, "lr": 2e-4, "lr_scheduler": "step",
    "lr_step_epochs": 10, "lr_step_gamma": 0.1, "opt": "adam", "wd": 0.0, "warmup_epochs": 0.0, "text_lr_scale": 1.0,
    "region_dropout": 0.0, "word_dropout": 0.0,
}  # fmt: skip
ASCL_TRAINING = {
    "model": "region-bert", "captions": "all", "batch_size": 64, "epochs": 20, "lr": 2e-4, "lr_scheduler": "step",
    "lr_step_epochs": 10, "lr_step_gamma": 0.1, "opt": "adam", "wd": 0.0, "grad_clip_norm": 2.0, "warmup_epochs": 1.0,
    "text_lr_scale": 0.1, "region_dropout": 0.0, "word_dropout": 0.0,
}  # fmt: skip
CAMERA = {
    "model": "region-bert-camera", "captions": "all", "batch_size": 128, "epochs": 30, "lr": 1e-4, "lr_scheduler": "step",
    "lr_step_epochs": 10, "lr_step_gamma": 0.1, "opt": "adam", "wd": 0.0, "grad_clip_norm": 2.0, "text_lr_scale": 1.0,
    "warmup_epochs": 0.0,
}  # fmt: skip
VSRN = {
    **CAMERA, "model": "region-bigru-vsrn", "lr": 2e-4,
    "model_kwargs": ["word_projection=true", "bidirectional=false", "batch_norm=true"],
}  # fmt: skip


def objective_of(name: str) -> Objective:
    """Of a recipe or a named objective."""
    if not recipes.has_recipe(name):
        return Objective.parse(name)
    recipe = recipes.load(name)
    return Objective.parse(recipe.loss).with_options(recipe.options)


def options(name: str) -> dict[str, dict]:
    objective = objective_of(name)
    return {term.name: dict(term.options) for term in objective.terms} | {head: dict(given) for head, given in objective.heads}


def test_names():
    assert recipes.objectives() == OBJECTIVES
    names = recipes.names()
    assert len(names) == 91 and len({*names, *OBJECTIVES}) == 99
    rows = {prefix: sum(name.startswith(f"{prefix}/") for name in names) for prefix in ("coder", "ascl", "selfalign")}
    assert rows == {"coder": 30, "ascl": 20, "selfalign": 12}, rows


@pytest.mark.parametrize("name", sorted({*recipes.names(), *OBJECTIVES}))
def test_every_recipe_resolves_and_survives_its_file_form(name):
    objective = objective_of(name)
    assert set(required_heads(objective)) <= ALL_HEADS | {
        "asymmetry", "fusion", "alignment", "contexts", "views", "captioner", "progress", "teacher",
    }  # fmt: skip
    assert Objective.from_dict(objective.to_dict()) == objective
    coder, ascl = {"triplet", "dcl", "m_dcl", "concept_dcl", "pgc"}, {"ascl", "clip", "distill"}
    selfalign = {"lca", "cra", "view_diversity", "caption"}
    assert {term.name for term in objective.terms} <= coder | ascl | selfalign
    if name in OBJECTIVES and recipes.has_recipe(name):
        assert recipes.load(name).loss == name and not recipes.load(name).options
    description = recipes.load(name).description if recipes.has_recipe(name) else recipes.find_objective(name).description
    assert description


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("coder-f30k", CODER),
        ("coder-coco", CODER),
        ("coder-f30k-printed", PRINTED),
        ("coder-coco-printed", PRINTED),
        ("coder-clip", {"lr": 1e-5, "wd": 0.1}),
        ("dcl-bigru", DCL_BIGRU),
        ("vse-infinity", CODER),
        *((f"{name}-bigru", BIGRU) for name in ("coder-f30k", "coder-coco", "vse-infinity")),
        ("coder/supplement-fig4-baseline", CODER),
        *((f"coder/{row}", CODER) for row in ("table2-1", "table2-5", "table3-1", "table3-6", "table4-5k", "table7-entropy")),
        *((f"coder/fig3-{n}", CODER | {"batch_size": n}) for n in (32, 64, 128)),
        *((f"coder/fig3-{n}-without-m_dcl", CODER | {"batch_size": n}) for n in (32, 64, 128)),
        ("coder/fig7-0.5", CODER),
        ("ascl-f30k", ASCL_TRAINING),
        ("ascl-coco", ASCL_TRAINING | {"lr": 5e-4}),
        ("ascl-f30k-hybrid", ASCL_TRAINING),
        ("ascl-coco-hybrid", ASCL_TRAINING | {"lr": 5e-4}),
        ("ascl-clip", {"lr": 1e-5, "wd": 0.1}),
        ("ascl-clip-alone", {"lr": 1e-5, "wd": 0.1}),
        ("ascl-f30k-printed", ASCL_PRINTED),
        ("ascl-coco-printed", ASCL_PRINTED | {"lr": 5e-4, "lr_step_gamma": 0.9}),
        ("finetune-clip", {"lr": 1e-5, "wd": 0.1, "batch_size": 128, "epochs": 5, "warmup_epochs": 0.5, "grad_clip_norm": 1.0}),
        ("ascl/table2-without-fusion", ASCL_TRAINING),
        ("ascl/table2-triplet", ASCL_TRAINING),
        ("ascl/fig3-mixture", ASCL_TRAINING),
        ("selfalign-camera", CAMERA),
        ("selfalign-camera-coco", CAMERA | {"epochs": 40, "lr_step_epochs": 20}),
        ("selfalign-vsrn", VSRN),
        ("selfalign-vsrn-coco", VSRN | {"lr_step_epochs": 15, "model_kwargs": VSRN["model_kwargs"][:2]}),
        ("camera", CAMERA),
        ("camera-coco", CAMERA | {"epochs": 40, "lr_step_epochs": 20}),
        ("vsrn", VSRN | {"model_kwargs": ["bidirectional=false", "batch_norm=true"]}),
        ("vsrn-coco", VSRN | {"lr_step_epochs": 15, "model_kwargs": ["bidirectional=false"]}),
        ("selfalign-clip", {"lr": 1e-5, "wd": 0.1, "warmup_epochs": 0.0, "heads_lr_scale": 100.0}),
        *((f"selfalign/table4-{row}", CAMERA) for row in range(12)),
    ],
)
def test_settings(name, settings):
    got = recipes.load(name).settings
    assert got == settings
    assert {key: type(value) for key, value in got.items()} == {key: type(value) for key, value in settings.items()}


def test_clip_objectives():
    assert objective_of("coder-clip").terms == Objective.parse(
        "3*dcl(mu=0.05,gamma=0.6,effective_negatives=255,diversity_over='batch+bank') "
        "+ m_dcl(mu=0.05,gamma=0.6,effective_negatives=255,reverse=none,warmup=4096) "
        "+ concept_dcl(positive_weight=2.0,effective_negatives=255) + pgc"
    ).terms  # fmt: skip
    assert objective_of("finetune-clip").terms == Objective.parse(
        "3*dcl(effective_negatives=127) + distill(kind=features,teacher=base)"
    ).terms  # fmt: skip
    heads = {name: dict(values) for name, values in objective_of("coder-clip").heads}
    assert heads == {"concepts": {"tower_gradient": 0.0, "warmup": 500}, "prototypes": {"scale": 4.0}}
    assert str(objective_of("selfalign-clip")) == "clip + lca + cra(ca_on=combined)"


@pytest.mark.parametrize("name", ["vse-infinity", "vse-infinity-bigru", "coder/table2-1"])
def test_vse_infinity_is_the_released_triplet(name):
    """The peer of table 2: margin 0.2, sums, all negatives for one epoch and then the hardest."""
    (term,) = objective_of(name).terms
    built = term.build()
    assert (term.weight, term.name, built.mean_epochs) == (1.0, "triplet", 1)
    assert built.options == {"margin": 0.2, "hardest": True, "reduction": "sum"}


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("coder-f30k-bigru", "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl + pgc"),
        ("coder/supplement-fig4-baseline", "triplet(margin=0.2,reduction=sum,mean_epochs=1) + concept_dcl + pgc"),
        ("ascl-clip-alone", "ascl(temperature=logit_scale)"),
        ("camera-coco", "triplet(reduction=sum) + 0.01*view_diversity(reduction=sum)"),
        ("vsrn", "triplet(reduction=sum) + caption"),
        ("vsrn-coco", "triplet(reduction=sum) + caption"),
    ],
)
def test_the_terms_of_peers_and_of_other_encoders(name, loss):
    assert objective_of(name).terms == Objective.parse(loss).terms
    given, prototypes = options(name), {"clusters": 10_000}
    assert "concepts" not in given or (given["concepts"], given["prototypes"]) == ({"tower_gradient": 1.0}, prototypes)


def test_coder_is_equation_8():
    objective = Objective.parse("coder")
    assert [(term.weight, term.name) for term in objective.terms] == [
        (3.0, "dcl"), (1.0, "m_dcl"), (1.0, "concept_dcl"), (1.0, "pgc")
    ]  # fmt: skip
    assert set(required_heads(objective)) == ALL_HEADS
    assert options("coder")["dcl"]["diversity_over"] == "batch+bank"


@pytest.mark.parametrize(
    ("recipe", "decoder"), [("coder-f30k", "linear"), ("coder-f30k-printed", "mlp"), ("coder-coco-printed", "mlp")]
)
def test_every_gpo_of_the_printed_recipes_has_the_perceptron(recipe, decoder, tmp_path):
    """The region model's two, the concept head's, and those of the momentum copy."""
    small = {"model_kwargs": [f"text={tiny_bert.make(tmp_path / 'bert')}", "embed_dim=8", "region_dim=4"]}
    config = resolve_config({"recipe": recipe, "train_data": "x.tar", "set": ["momentum.bank_size=8"], **small})
    objective = make_objective(config).with_options({"concepts.vocabulary": "scenes", "prototypes.clusters": 3})
    model = make_model(config.model, objective, torch.device("cpu"))
    gpos = {name: module for name, module in model.named_modules() if isinstance(module, GPO)}
    assert list(gpos) == ["visual.pool", "text.pool", "coder.heads.concepts.text_pool"]
    copies = model.coder.heads["momentum"].towers.model.named_modules()
    gpos |= {f"copy.{name}": module for name, module in copies if isinstance(module, GPO)}
    assert len(gpos) == 5
    layers = {"linear": [nn.Linear], "mlp": [nn.Linear, nn.ReLU, nn.Linear]}[decoder]
    for name, gpo in gpos.items():
        score = gpo.score if isinstance(gpo.score, nn.Sequential) else [gpo.score]
        assert [type(layer) for layer in score] == layers, name


def test_the_printed_twins_follow_the_letter():
    for name in ("coder-printed", "coder-f30k-printed", "coder-coco-printed"):
        given = options(name)
        assert all(given[term]["positive_weight"] == "mu" for term in ("dcl", "m_dcl", "concept_dcl"))
        assert given["m_dcl"]["reverse"] == "all" and given["dcl"]["mask_same_image"] is False
    assert options("coder-f30k")["prototypes"]["clusters"] == 10_000
    assert options("coder-coco")["prototypes"]["clusters"] == options("coder-coco-bigru")["prototypes"]["clusters"] == 20_000
    for name, temperature, weight in (("ascl-f30k-printed", 0.01, 0.6), ("ascl-coco-printed", 0.05, 0.8)):
        assert options(name) == {
            "ascl": {"similarity": "fusion", "mask_same_image": False, "temperature": temperature},
            "asymmetry": {"noise_at": "output"},
            "fusion": {"local_weight": weight},
        }


@pytest.mark.parametrize(
    ("name", "terms", "heads"),
    [
        ("coder/table2-1", ["triplet"], {"ids", "progress"}),
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
    objective = objective_of(name)
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
    assert options("coder/fig7-0.5")["concept_dcl"]["epsilon"] == 0.5
    assert options("coder/table4-10k") == options("coder/table2-5")


@pytest.mark.parametrize(("mu", "gamma"), [(0.05, 0.6), (0.1, 0.3)])
def test_coder_clips_loss_keeps_its_scale_from_batch_to_batch(mu, gamma):
    """The same distribution of similarities at a batch of 256 and one of 2,048: the plain sum grows by mu log 8."""
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

#: What the paper prints for each data set: temperature, u and learning rate.
ASCL_DATA = {"f30k": (0.01, 0.6, 2e-4), "coco": (0.05, 0.8, 5e-4)}
ASCL_ROWS = {  # objective, heads, options of the generators
    "full": ("ascl(similarity=fusion)", ASCL, {}),
    "without-positives": ("ascl(similarity=fusion)", ASCL, {"positives": None}),
    "without-negatives": ("ascl(similarity=fusion)", ASCL, {"negatives": None}),
    "without-both": ("ascl(similarity=fusion)", ASCL, {"negatives": None, "positives": None}),
    "without-fusion": ("ascl", {"asymmetry", "ids"}, {}),
    "triplet": ("triplet(similarity=fusion)", {"fusion", "ids"}, {}),
}
ASCL_FIGURE = {
    "join": {"positives": "join"},
    "truncate": {"positives": "truncate"},
    "join-and-truncate": {},
    "shuffle": {"negatives": "shuffle"},
    "dropout": {"negatives": "dropout"},
    "gaussian": {"negatives": "gaussian"},
    "cutoff": {"negatives": "token_cutoff+feature_cutoff"},
    "mixture": {"negatives": "mixture"},
}


@pytest.mark.parametrize(
    ("name", "data", "row", "asymmetry"),
    [
        *((f"ascl/table2-{row}", "f30k", row, made) for row, (_, _, made) in ASCL_ROWS.items()),
        *((f"ascl/table2-coco-{row}", "coco", row, made) for row, (_, _, made) in ASCL_ROWS.items()),
        *((f"ascl/fig3-{row}", "f30k", "full", made) for row, made in ASCL_FIGURE.items()),
        *((f"ascl-{data}", data, "full", {}) for data in ASCL_DATA),
    ],
)
def test_ascls_rows_are_the_fused_score_alone(name, data, row, asymmetry):
    objective, (loss, heads, _), (temperature, u, lr) = objective_of(name), ASCL_ROWS[row], ASCL_DATA[data]
    assert set(required_heads(objective)) == heads
    [term], [plain] = objective.terms, Objective.parse(loss).terms
    assert term.name == plain.name
    # the triplet has no temperature, and without fusion there is no u
    expected = dict(plain.options) | ({"temperature": temperature} if term.name == "ascl" else {})
    assert dict(term.options) == expected
    given = {head: dict(options) for head, options in objective.heads}
    fusion = {"fusion": {"local_weight": u}} if "fusion" in heads else {}
    assert given == fusion | ({"asymmetry": asymmetry} if asymmetry else {})
    assert recipes.load(name).settings == ASCL_TRAINING | {"lr": lr}


def test_ascls_hybrids_and_its_objective_for_clip():
    for data, (temperature, u, _) in ASCL_DATA.items():
        hybrid = objective_of(f"ascl-{data}-hybrid")
        expected = [{"similarity": "fusion", "temperature": temperature}, {"temperature": temperature}]
        assert [dict(term.options) for term in hybrid.terms] == expected
        assert dict(hybrid.heads) == {"fusion": (("local_weight", u),)}
    assert str(objective_of("ascl-fusion")) == "ascl(similarity=fusion)"
    assert str(objective_of("ascl-hybrid")) == "ascl(similarity=fusion) + ascl"
    assert str(objective_of("ascl-clip")) == "clip + ascl(temperature=logit_scale)"
    assert objective_of("ascl-f30k") == objective_of("ascl/table2-full")


# A user's file, and other packages


def write(folder, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_one_recipe(tmp_path):
    recipe = recipes.load(write(tmp_path, 'base = "coder-f30k"\nbatch_size = 64\noptions = { dcl.mu = 0.2 }'))
    assert (recipe.name, recipe.loss) == ("mine", "coder-paper")
    assert recipe.settings == CODER | {"batch_size": 64}
    assert recipe.options == {"prototypes.clusters": 10_000, "dcl.mu": 0.2}
    recipe = recipes.load(write(tmp_path, '[recipes.other]\nbase = "ascl-f30k"\nloss = "clip"\n"options" = {}'))
    assert (recipe.name, recipe.loss, recipe.options) == ("other", "clip", {}), "a new loss starts without the base's options"
    two = recipes.load(write(tmp_path, "\n".join(["[recipes.one]", 'loss = "clip"', "lr = 0.5"])))
    assert two.settings == {"lr": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss = ", "mine.toml: "),
        ("lr = 0.1", "mine.toml: [recipes.mine] has neither a loss nor a base"),
        ('loss = "clip"\nepoch = 3', "mine.toml: [recipes.mine]: unknown field 'epoch'; did you mean 'epochs'? (known: "),
        ('bas = "coder"\nlr = 1.0', "unknown field 'bas'; did you mean 'base'? (known: description, base, loss, options, "),
        ('loss = 3', "[recipes.mine]: loss must be text, got 3"),
        ('base = "coder-f3k"', "[recipes.mine]: base is an unknown recipe, 'coder-f3k'; did you mean 'coder-f30k'?"),
        ('base = "coder"', "'coder' is an objective, not a recipe: it sets no model and no training; use --loss coder"),
        ('base = "mine"\n', "base is an unknown recipe, 'mine'"),
        ('loss = "clip"\noptions = 3', "[recipes.mine]: options must be a table"),
        ('loss = "clip"\noptions = { mu = 3 }', "option 'mu': write OWNER.OPTION = VALUE"),
        ('loss = "clip"\nset = ["dcl.mu=1"]', "options of terms and heads belong into the table options"),
        ("[recipes.a]\nbase = 'b'\n[recipes.b]\nbase = 'a'", "it holds: a, b"),
        ("[recipe.a]\nloss = 'clip'", "unknown field 'recipe'"),
        ("[recipes.a]\nloss = 'clip'\n[recipe.b]", "unknown table 'recipe'; did you mean 'recipes'?"),
        ("[recipes]\na = 3", "[recipes.a] must be a table"),
        ("[objectives.a]\nloss = 'clip'", "[objectives] are for packages; write the expression into the recipe's loss"),
    ],
)
def test_bad_files(text, message, tmp_path):
    with pytest.raises(CoderError) as caught:
        recipes.load(write(tmp_path, text))
    said = str(caught.value)
    assert message.replace(" (known:", "; known:") in said and len(said.splitlines()) == 1, said


def test_unknown_names(tmp_path):
    with pytest.raises(CoderError, match="unknown recipe 'coder-f3k'; did you mean 'coder-f30k'"):
        recipes.load("coder-f3k")
    with pytest.raises(CoderError, match="'selfalign' is an objective, not a recipe.*use --loss selfalign"):
        recipes.load("selfalign")
    with pytest.raises(CoderError, match="gone.toml.*No such file"):
        recipes.load(tmp_path / "gone.toml")


@pytest.fixture
def register():
    names = []

    def add(name, target):
        names.append(name)
        return registry.register("recipes", name, target)

    yield add
    for name in names:
        registry.unregister("recipes", name)


def test_other_packages(register, tmp_path):
    register("zz-objective", {"loss": "3*dcl", "options": {"dcl.mu": 0.2}})
    register("zz-recipe", lambda: {"base": "coder-f30k", "lr": 0.5})
    path = write(tmp_path, "[objectives.zz-file]\nloss = 'clip'\n[recipes.zz-file]\nloss = 'zz-file'\nlr = 0.25")
    register("zz-file", path)
    register("zz-lost", path)
    assert str(Objective.parse("clip + 2*zz-objective")) == "clip + 6*dcl(mu=0.2)"
    assert recipes.load("zz-recipe").settings == CODER | {"lr": 0.5}
    assert recipes.load("zz-file").settings == {"lr": 0.25} and str(Objective.parse("zz-file")) == "clip"
    assert {"zz-objective", "zz-recipe", "zz-file"} <= set(recipes.names())
    with pytest.raises(CoderError, match=r"holds neither \[objectives.zz-lost\] nor \[recipes.zz-lost\]"):
        recipes.load("zz-lost")
    register("coder-f30k", {"loss": "clip", "lr": 1.0})
    with pytest.raises(CoderError, match=r"'coder-f30k' is claimed by coder_plugin/recipes/coder.toml and by register"):
        recipes.load("coder-f30k")


def test_the_command_lists_and_prints(capsys, tmp_path):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    tables = [name for name in recipes.names() if "/" in name]
    assert f"{len(tables)} more recipes" in printed and not any(f" {name} " in printed for name in tables)
    assert main(["recipes", "--all"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("AsCL: ") and "\nCODER: " in printed and "\nSelfAlign: " in printed
    lines = printed.splitlines()
    for name in recipes.names():
        assert any(line.split()[:2] == ["recipe", name] for line in lines), name
    for name in OBJECTIVES:
        assert any(line.split()[:2] == ["objective", name] for line in lines), name
    assert main(["recipes", "coder-clip"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[objectives.coder-clip]\n") and "[recipes.coder-clip]\n" in printed
    assert "dcl.effective_negatives = 255\n" in printed and "lr = 1e-05" in printed
    assert main(["recipes", "ascl-f30k-printed"]) == 0
    own, printed_, fusion = capsys.readouterr().out.split("\n\n# [objectives.")
    assert own.startswith("[recipes.ascl-f30k-printed]\n") and fusion.startswith("ascl-fusion]\n")
    assert '# loss = "ascl-fusion"\n' in printed_ and '# asymmetry.noise_at = "output"' in printed_
    assert main(["recipes", "coder-f3k"]) == 2
    assert "did you mean 'coder-f30k'" in capsys.readouterr().err


# --recipe


def test_flags_win_over_a_recipe():
    """``--dry-run`` shows these origins."""
    config = resolve_config({"recipe": "coder-f30k", "train_data": "x.tar", "lr": 0.5, "set": ["dcl.mu=0.2"]})
    assert (config.model.name, config.loss.expression) == ("region-bert", "coder-paper")
    assert (config.optim.lr, config.optim.epochs) == (0.5, 30)
    assert config.loss.set == ["prototypes.clusters=10000", "dcl.mu=0.2"]
    assert config.origins["lr"] == "flag" and config.origins["epochs"] == "recipe coder-f30k"
    objective = make_objective(config)
    assert objective == objective_of("coder-f30k").with_options({"dcl.mu": 0.2})
    assert resolve_config(config.to_dict()) == config


def test_a_loss_replaces_the_recipes_with_its_options():
    config = resolve_config({"recipe": "ascl-f30k", "train_data": "x.tar", "loss": "clip"})
    assert (config.loss.expression, config.loss.set, config.optim.lr) == ("clip", [], 2e-4)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_makes_its_configuration(name):
    recipe = recipes.load(name)
    model = {} if "model" in recipe.settings else {"model": "ViT-B-32"}
    config = resolve_config({"recipe": name, "train_data": "x.tar", **model})
    flat = config.to_flat()
    assert {option: flat[option] for option in recipe.settings} == recipe.settings
    assert make_objective(config) == objective_of(name)
