"""Terms and heads as objects, and names by ``register``."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import coder_plugin
from coder_plugin import create_loss, create_model, registry
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.losses.base import Term
from coder_plugin.objective import Objective, TermSpec


class Spread(nn.Module):
    """A plain module: ``requires`` and nothing else."""

    requires = ("image_features", "text_features")

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return self.weight * (image_features - text_features).square().sum()


class Norms(Head):
    requires, provides = ("image_features",), ("coder_norms",)

    def __init__(self, backbone: BackboneInfo, *, power: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((backbone.embed_dim,), power))

    def forward(self, image_features: Tensor) -> dict[str, Tensor]:
        return {"coder_norms": (image_features * self.scale).norm(dim=1)}


class ReadsNorms(Term):
    requires = ("coder_norms",)

    def forward(self, coder_norms: Tensor) -> Tensor:
        return coder_norms.mean()


@pytest.fixture(scope="module")
def outputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    images, texts = (nn.functional.normalize(torch.randn(4, 8), dim=1) for _ in range(2))
    return {"image_features": images, "text_features": texts, "logit_scale": torch.tensor(10.0)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("coder-tiny", loss=["clip", Spread()]).train()


@pytest.fixture
def group() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    for group, name in registry._registered.keys() - before.keys():
        registry.unregister(group, name)


@pytest.mark.parametrize(
    ("loss", "labels", "weights"),
    [
        (Spread(), ["spread"], [1.0]),
        ([Spread()], ["spread"], [1.0]),
        (["clip", Spread(weight=2.0)], ["clip", "spread"], [1.0, 1.0]),
        (["2*clip", (0.5, Spread())], ["clip", "spread"], [2.0, 0.5]),
        ([(2, "3*clip"), Spread(), Spread()], ["clip", "spread", "spread_2"], [6.0, 1.0, 1.0]),
        ((2, ["clip", (3, Spread())]), ["clip", "spread"], [2.0, 6.0]),
        ((Spread(), "clip"), ["spread", "clip"], [1.0, 1.0]),
        ([Objective.parse("clip"), Spread()], ["clip", "spread"], [1.0, 1.0]),
    ],
)
def test_terms_as_objects(model, outputs, loss, labels, weights):
    created = create_loss(loss, model=model)
    assert created.objective.labels() == labels and [term.weight for term in created.objective.terms] == weights
    losses = created(**outputs)
    assert list(losses) == [f"{label}_loss" for label in labels]
    factor = {id(term): term.term.weight for term in created.objective.terms if term.term is not None}
    gap = (outputs["image_features"] - outputs["text_features"]).square().sum()
    for label, term in zip(labels, created.objective.terms, strict=True):
        if term.term is not None:
            torch.testing.assert_close(losses[f"{label}_loss"], term.weight * factor[id(term)] * gap)


def test_a_term_binds_to_the_model(model):
    term = ReadsNorms()
    created = create_model("coder-tiny", loss=term, custom_heads=[Norms])
    assert list(created.coder.heads) == ["norms"]
    bound = create_loss(term, model=created).terms["reads_norms"]
    assert isinstance(bound, ReadsNorms) and bound.heads is created.coder.heads
    other = create_model("coder-tiny", loss=term, custom_heads=[Norms])
    assert create_loss(term, model=other).terms["reads_norms"].heads is other.coder.heads
    assert bound.heads is created.coder.heads, "a loss of another model leaves this one as it is"
    plain = create_loss(Spread(), model=model).terms["spread"]
    assert plain.optional == () and plain.supports == {"same_image"}


def test_printing_and_files():
    spread = Spread()
    objective = Objective.parse(["clip", (0.5, spread)])
    assert str(objective) == "clip + 0.5*spread" and objective.terms[1] == TermSpec("spread", 0.5, term=spread)
    assert hash(objective) == hash(Objective.parse(["clip", (0.5, spread)]))
    data = json.loads(json.dumps(objective.to_dict()))
    assert data["terms"][1]["class"] == f"{__name__}:Spread"
    with pytest.raises(CoderError, match="the term 'spread' was an object of test_objects:Spread.*pass the object again"):
        Objective.from_dict(data)
    inert = Objective.from_dict(data, inference=True)
    assert str(inert) == str(objective) and inert.to_dict() == objective.to_dict()
    assert inert.terms[1].build().requires == ("image_features", "text_features")
    with pytest.raises(CoderError, match="opened without its term test_objects:Spread"):
        inert.terms[1].build()(image_features=1, text_features=1)
    with pytest.raises(CoderError, match="'spread' was passed as an object: set its options when you build it"):
        objective.with_options({"spread.weight": 2.0})


class Learns(Spread):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Renamed(Spread):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return images.sum()


class Computes(Term):
    gathers = ("image_features",)

    def compute(self, image_features: Tensor) -> Tensor:
        return image_features.sum()


class OneKey(Spread):
    requires = "image_features"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Learns(), "loss 'learns' owns parameters, which nothing would train: put them into a head"),
        (Spread, "Spread is a class: pass an instance"),
        (OneKey(), "loss 'one_key': 'requires' must be a tuple of keys, got 'image_features'"),
        (Renamed(), r"loss 'renamed': forward takes \(images\), but the class says: requires image_features, text_"),
        (Computes(), r"loss 'computes': compute takes \(image_features\), but the class says: requires image_features, "),
        (nn.Linear(2, 2), "is not a loss: pass an expression, or an nn.Module that names the keys it reads in 'requires'"),
        (None, "None is not a loss"),
        ([], "the loss is an empty list"),
        ((0, Spread()), "a weight must be > 0, got 0"),
        ((float("nan"), "clip"), "a weight must be > 0, got nan"),
        ((True, "clip"), "a weight must be a plain number, .* got True"),
        ((torch.tensor(2.0), "clip"), "a weight must be a plain number, .* got tensor"),
        (["clip", "dlc"], "did you mean 'dcl'"),
        (ReadsNorms(), "requires 'coder_norms', which neither this model nor any head provides"),
    ],
)
def test_mistakes(model, loss, message):
    with pytest.raises(CoderError, match=message):
        create_loss(loss, model=model)


# Heads


def test_a_head_class_and_a_head_object():
    model = create_model("coder-tiny", loss=["clip", ReadsNorms()], custom_heads=[Norms]).train()
    width = model.coder.heads["norms"].scale.numel()
    images, texts = torch.rand(2, 3, 64, 64), torch.ones(2, model.context_length, dtype=torch.long)
    features = model(images, texts)
    assert features["coder_norms"].shape == (2,) and "coder_norms" not in model.eval()(images, texts)
    created = create_loss(["clip", ReadsNorms()], model=model)
    torch.testing.assert_close(created(**features)["reads_norms_loss"], features["coder_norms"].mean())
    head = Norms(BackboneInfo(embed_dim=width), power=2.0)
    model = create_model("coder-tiny", loss=ReadsNorms(), custom_heads=[head]).train()
    assert model.coder.heads["norms"] is head
    assert any(name == "coder.heads.norms.scale" for name, _ in model.named_parameters())
    torch.testing.assert_close(model(images, texts)["coder_norms"], torch.full((2,), 2.0))


def test_an_expression_may_name_a_passed_head():
    class Pair(Head):
        requires, provides = ("image_features", "text_features"), ("coder_a", "coder_b")
        feature_keys = ("coder_a", "coder_b")

        def __init__(self, backbone: BackboneInfo) -> None:
            super().__init__()

        def forward(self, image_features: Tensor, text_features: Tensor) -> dict[str, Tensor]:
            return {"coder_a": -image_features, "coder_b": text_features}

    model = create_model("coder-tiny", loss="clip + clip@pair", custom_heads=[Pair])
    loss = create_loss("clip + clip@pair", model=model)
    assert loss.bindings[1]["image_features"] == "coder_a" and list(loss.terms) == ["clip", "clip_pair"]
    with pytest.raises(CoderError, match="column 13: unknown head 'pear'"):
        create_model("coder-tiny", loss="clip + clip@pear", custom_heads=[Pair])


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([Spread], "is neither a subclass nor an object of coder_plugin.heads.base.Head"),
        ([Norms, Norms], "there is another head 'norms'; rename the class"),
        ([type("Ids", (Norms,), {})], "there is another head 'ids'; rename the class"),
        ([Norms], "the loss needs no head norms"),
    ],
)
def test_mistakes_with_heads(heads, message):
    with pytest.raises(CoderError, match=message):
        create_model("coder-tiny", loss="clip", custom_heads=heads)


TINY = BackboneInfo(embed_dim=128)


class Returns(Norms):
    """Returns whatever it is made with."""

    provides = ("coder_norms", "coder_more")

    def __init__(self, backbone: BackboneInfo, *keys: str) -> None:
        super().__init__(backbone)
        self.keys = keys

    def forward(self, image_features: Tensor) -> dict[str, Tensor]:
        return {key: image_features.sum(1) for key in self.keys}


class Counts(Norms):
    """Changes its buffer in forward, in place or by a new tensor."""

    def __init__(self, backbone: BackboneInfo, *, in_place: bool = True) -> None:
        super().__init__(backbone)
        self.in_place = in_place
        self.norm = nn.BatchNorm1d(backbone.embed_dim)  # its statistics are written in forward, as they are meant to be
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, image_features: Tensor) -> dict[str, Tensor]:
        if self.in_place is not None:
            self.steps = self.steps.add_(1) if self.in_place else self.steps + 1
        return super().forward(self.norm(image_features))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (Returns(TINY, "coder_norms", "coder_nroms"), "head 'returns' returned coder_nroms, not in its provides"),
        (Returns(TINY, "coder_more"), "head 'returns' did not return coder_norms, which the loss requires"),
        (Counts(TINY), r"head 'counts' changes its buffer 'steps' in forward.*write it in write\(\)"),
        (Counts(TINY, in_place=False), "head 'counts' changes its buffer 'steps' in forward"),
    ],
)
def test_what_a_head_does_in_forward(head, message):
    model = create_model("coder-tiny", loss=ReadsNorms(), custom_heads=[head]).train()
    images, texts = torch.rand(2, 3, 64, 64), torch.ones(2, model.context_length, dtype=torch.long)
    with pytest.raises(CoderError, match=message):
        model(images, texts)


def test_a_head_that_cannot_be_built_or_called():
    class Alone(Norms):
        def __init__(self) -> None:
            Head.__init__(self)

    class Takes(Norms):
        optional = ("text_features",)

    for head, message in (
        (Alone, r"head 'alone': __init__ must take the backbone's sizes, then options as keywords: def __init__\(self, b"),
        (Takes, r"head 'takes': forward takes \(image_features\), .* requires image_features, optional text_features"),
    ):
        with pytest.raises(CoderError, match=message):
            create_model("coder-tiny", loss=ReadsNorms(), custom_heads=[head])


# PATH.py:NAME

FILE = """
import torch


class HubPenalty(torch.nn.Module):
    requires = ("image_features",)

    def __init__(self, *, margin: float = 0.5) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, image_features):
        return self.margin * image_features.square().sum()
"""


def test_a_loss_in_a_file(tmp_path, monkeypatch, model, outputs):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    text = f"clip + 0.5*mine.py:HubPenalty(margin=0.1) + ./mine.py:HubPenalty + {tmp_path}/mine.py:HubPenalty"
    loss = create_loss(text, model=model)
    assert list(loss.terms) == ["clip", "hub_penalty", "hub_penalty_2", "hub_penalty_3"] and str(loss.objective) == text
    torch.testing.assert_close(loss(**outputs)["hub_penalty_loss"], torch.tensor(0.5 * 0.1 * 4))
    first, second, third = (type(spec.build().module) for spec in loss.objective.terms[1:])
    assert first is second is third and pickle.loads(pickle.dumps(first)) is first, "the file is imported once"
    changed = Objective.parse("mine.py:HubPenalty").with_options({"mine.py:HubPenalty.margin": 2})
    assert str(changed) == "mine.py:HubPenalty(margin=2.0)"


def test_opening_a_file_runs_no_other_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    objective = Objective.parse("clip + 0.5*mine.py:HubPenalty(margin=0.1)")
    data = json.loads(json.dumps(objective.to_dict()))
    assert Objective.from_dict(data, objects=objective.terms[1:]) == objective
    other = Objective.parse("clip + 0.5*mine.py:HubPenalty(margin=0.2)")
    assert Objective.from_dict(data, objects=other.terms[1:]) == objective, "the saved options, for a comparison"
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    data["terms"][1]["name"] = "evil.py:HubPenalty"
    for _ in range(2):
        inert = Objective.from_dict(data, inference=True)
        assert str(inert) == "clip + 0.5*evil.py:HubPenalty(margin=0.1)" and inert.terms[1].build()
        with pytest.raises(CoderError, match="the term 'evil.py:HubPenalty' was an object of .*pass the object again"):
            Objective.from_dict(data)
        data["terms"][1].pop("class", None)  # a hostile file may leave it out
    with pytest.raises(CoderError, match="unknown name in coder_plugin.heads: 'evil.py:HubPenalty'"):
        registry.load("heads", "evil.py:HubPenalty")


@pytest.mark.parametrize(
    ("text", "loss", "message"),
    [
        (FILE, "clip + gone.py:Hub", "column 8: gone.py: there is no file .*/gone.py"),
        (FILE, "mine.py:HubPenalt", "mine.py has no class 'HubPenalt'; did you mean 'HubPenalty'. its losses: HubPenalty"),
        ("import nothing", "mine.py:Hub", "column 1: mine.py cannot be imported: ModuleNotFoundError: No module named 'noth"),
        ("Hub = 3", "mine.py:Hub", "mine.py has no class 'Hub'; its losses: none"),
        (FILE, "mine.py:HubPenalty(margn=1)", "column 20: 'mine.py:HubPenalty' has no option 'margn'; it has: margin"),
        (FILE, "mine.py:HubPenalty(margin=x)", "column 20: 'mine.py:HubPenalty': option margin=x must be float"),
        (FILE.replace("requires", "reads"), "mine.py:HubPenalty", "loss 'mine.py:HubPenalty': 'requires' must be a tuple"),
    ],
)
def test_mistakes_with_files(tmp_path, monkeypatch, model, text, loss, message):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CoderError, match=message):
        create_loss(loss, model=model)


# register


def test_register(group):
    assert coder_plugin.register("losses", "spread", Spread) is Spread
    assert "spread" in registry.names("losses") and registry.load("losses", "spread") is Spread
    assert coder_plugin.register("losses", "spread", Spread) is Spread, "the same object again"
    (plugin,) = (plugin for plugin in registry.list_plugins("losses", check=True) if plugin.name == "spread")
    assert plugin.error is None and plugin.target == f"{__name__}:Spread"
    assert "register()" in registry.format_plugins([plugin])
    coder_plugin.register("coder_plugin.heads", "norms", f"{__name__}:Norms")
    assert registry.load("heads", "norms") is Norms
    registry.refresh()
    assert registry.load("losses", "spread") is Spread, "a registration stays"


def test_register_as_decorator(group, outputs, model):
    @coder_plugin.register("losses", "zero")
    class Zero(nn.Module):
        requires = ("image_features",)

        def forward(self, image_features: Tensor) -> Tensor:
            return 0 * image_features.sum()

    assert registry.load("losses", "zero") is Zero
    assert create_loss("clip + zero", model=model)(**outputs)["zero_loss"] == 0


def test_a_conflict_names_both(group):
    with pytest.raises(
        CoderError,
        match=r"register: 'dcl' in coder_plugin.losses is already coder_plugin.losses.dcl:DCL \(from coder-plugin .*\), so it "
        r"cannot be test_objects:Spread",
    ):
        coder_plugin.register("losses", "dcl", Spread)
    coder_plugin.register("losses", "spread", Spread)
    with pytest.raises(CoderError, match=r"already test_objects:Spread \(from register\(\)\), so it cannot be .*Norms"):
        coder_plugin.register("losses", "spread", Norms)
    with pytest.raises(CoderError, match="unknown plugin group: 'loses'; did you mean 'losses'"):
        coder_plugin.register("loses", "spread", Spread)


def test_a_class_that_is_defined_again_replaces_the_old_one(group):
    def define() -> type:
        class Again(Spread):
            pass

        return coder_plugin.register("losses", "again", Again)

    first, second = define(), define()
    assert first is not second and registry.load("losses", "again") is second
