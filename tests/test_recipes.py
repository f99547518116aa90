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
from tests.recipe_numbers import configuration

ALL_HEADS = {"ids", "momentum", "concepts", "prototypes"}
OBJECTIVES = [
    "ascl-clip", "ascl-fusion", "ascl-hybrid", "ascl-printed", "coder", "coder-clip", "coder-paper", "coder-printed",
    "finetune-clip", "selfalign", "selfalign-clip", "selfalign-printed", "vse-infinity",
]  # fmt: skip
#: As docs/evidence/dcl.md trains it.
_BIGRU = {
    "model": "region-bigru", "model_kwargs": ["embed_dim=256"], "captions": "all", "batch_size": 128, "epochs": 8,
    "lr": 6e-3, "lr_scheduler": "step", "lr_step_epochs": 4, "lr_step_gamma": 0.1, "opt": "adamw", "wd": 1e-4,
    "grad_clip_norm": 2.0, "warmup_epochs": 1.0, "region_dropout": 0.2, "word_dropout": 0.2,
}  # fmt: skip
#: Settings of recipes that are not of the papers' own set-ups; tests/test_recipes_*.py have those, number by number.
SETTINGS = {
    "dcl-bigru": _BIGRU,
    "ascl-bigru": _BIGRU,
    "finetune-clip": {"lr": 1e-5, "wd": 0.1, "batch_size": 128, "epochs": 5, "warmup_epochs": 0.5, "grad_clip_norm": 1.0},
    "coder-clip": {"lr": 1e-5, "wd": 0.1},
    "ascl-clip": {"lr": 1e-5, "wd": 0.1},
    "ascl-clip-alone": {"lr": 1e-5, "wd": 0.1},
    "selfalign-clip": {"lr": 1e-5, "wd": 0.1, "warmup_epochs": 0.0, "heads_lr_scale": 100.0},
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
    assert len(names) == 92 and len({*names, *OBJECTIVES}) == 100
    rows = {prefix: sum(name.startswith(f"{prefix}/") for name in names) for prefix in ("coder", "ascl", "selfalign")}
    assert rows == {"coder": 30, "ascl": 20, "selfalign": 12}, rows


def test_every_recipe_resolves_and_survives_its_file_form():
    heads = ALL_HEADS | {"asymmetry", "fusion", "alignment", "contexts", "views", "captioner", "progress", "teacher"}
    terms = set("triplet dcl m_dcl concept_dcl pgc ascl clip distill lca cra view_diversity caption".split())
    for name in sorted({*recipes.names(), *OBJECTIVES}):
        objective = objective_of(name)
        assert set(required_heads(objective)) <= heads and {term.name for term in objective.terms} <= terms, name
        assert Objective.from_dict(objective.to_dict()) == objective, name
        if name in OBJECTIVES and recipes.has_recipe(name):
            assert recipes.load(name).loss == name and not recipes.load(name).options
        assert (recipes.load(name) if recipes.has_recipe(name) else recipes.find_objective(name)).description, name


def test_every_recipe_makes_its_configuration():
    for name in recipes.names():
        recipe, config = recipes.load(name), configuration(name)
        flat = config.to_flat()
        assert {option: flat[option] for option in recipe.settings} == recipe.settings, name
        assert make_objective(config) == objective_of(name), name


def test_settings():
    for name, settings in SETTINGS.items():
        got = recipes.load(name).settings
        assert got == settings, name
        assert {key: type(value) for key, value in got.items()} == {key: type(value) for key, value in settings.items()}, name


def test_clip_objectives():
    assert objective_of("finetune-clip").terms == Objective.parse(
        "3*dcl(effective_negatives=127) + distill(kind=features,teacher=base)"
    ).terms  # fmt: skip
    assert str(objective_of("ascl-clip-alone")) == "ascl(temperature=logit_scale)"
    assert str(objective_of("ascl-bigru")) == "ascl(temperature=0.1)"
    assert options("ascl-bigru")["asymmetry"] == {"positives": None}


def test_coder_is_equation_8():
    objective = Objective.parse("coder")
    assert [(term.weight, term.name) for term in objective.terms] == [
        (3.0, "dcl"), (1.0, "m_dcl"), (1.0, "concept_dcl"), (1.0, "pgc")
    ]  # fmt: skip
    assert set(required_heads(objective)) == ALL_HEADS
    assert options("coder")["dcl"]["diversity_over"] == "batch+bank"


@pytest.mark.parametrize(("recipe", "decoder"), [("coder-f30k", "linear"), ("coder-f30k-printed", "mlp")])
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


def test_coder_clips_loss_keeps_its_scale_from_batch_to_batch():
    """The same distribution of similarities at a batch of 256 and one of 2,048: the plain sum grows by mu log 8."""
    generator = torch.Generator().manual_seed(0)

    def loss(n: int, effective: int | None) -> float:
        centre, shared = torch.randn(1, 64, generator=generator), torch.randn(n, 64, generator=generator)
        images, texts = (
            normalize(centre + 1.2 * shared + 0.8 * torch.randn(n, 64, generator=generator), dim=1) for _ in range(2)
        )
        return dcl(images, texts, mu=0.05, gamma=0.6, effective_negatives=effective).item()

    kept = abs(loss(2048, 255) - loss(256, 255))
    grown = loss(2048, None) - loss(256, None)
    assert kept < 0.03 and grown > 3 * kept


# A user's file, and other packages


def write(folder, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_one_recipe(tmp_path):
    recipe = recipes.load(write(tmp_path, 'base = "coder-f30k"\nbatch_size = 64\noptions = { dcl.mu = 0.2 }'))
    assert (recipe.name, recipe.loss) == ("mine", "coder-paper")
    assert recipe.settings == recipes.load("coder-f30k").settings | {"batch_size": 64}
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
    assert recipes.load("zz-recipe").settings == recipes.load("coder-f30k").settings | {"lr": 0.5}
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
