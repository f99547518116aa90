"""The loss expression: its grammar, its presets, its options, and one line with the right column for every mistake."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.expression import parse_value
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.losses.base import Term
from coder_plugin.objective import Objective, TermSpec, check_names
from coder_plugin.options import check_options


class Spy(Term):
    """One option of every kind, and two that must agree."""

    def __init__(
        self,
        *,
        word: str = "x",
        count: int = 1,
        size: float = 1.0,
        flag: bool = False,
        maybe: float | None = None,
        kind: Literal["mean", "sum", 3] = "mean",
        either: float | Literal["mu"] = "mu",
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        super().__init__()
        if not low < high:
            raise ValueError(f"low must be < high, got {low} and {high}")


class Needy(Term):
    """An option without a default."""

    def __init__(self, *, margin: float = 0.1, rank: int) -> None:
        super().__init__()
        if margin < 0:
            raise ValueError("margin must be >= 0")


class Unreadable(Term):
    def __init__(self, *, rank: Missing = 1) -> None:  # noqa: F821  (imported for type checkers alone, say)
        super().__init__()


class Gate(Head):
    def __init__(self, backbone: BackboneInfo, *, size: int = 3, wide: bool = False) -> None:
        super().__init__()


class Door(Gate):
    pass


def _named() -> dict[str, Any]:
    return {"loss": "0.5*dcl(mu=0.2) + clip"}


PLUGINS: dict[str, dict[str, Any]] = {
    "losses": {
        "spy": Spy,
        "needy": Needy,
        "unreadable": Unreadable,
        "their/spy-2.b": Spy,
        "dcl_2": Spy,
        "dcl-2": Spy,
    },
    "heads": {"gate": Gate, "door": Door},
    "recipes": {
        "two": {"loss": "0.5*dcl(mu=0.2) + clip"},
        "two/called": _named,
        "two/nested": {"loss": "4*two + triplet"},
        "gated": {"loss": "two", "options": {"gate.size": 5}},
        "gated/other": {"loss": "two", "options": {"gate": {"size": 6}}},
        "broken": {"loss": "clip + gone(mu=1)"},
        "round": {"loss": "clip + trip"},
        "trip": {"loss": "2*round"},
        "text": "0.5*dcl",
        "whole": {"loss": "gated", "lr": 2e-4},
    },
}


@pytest.fixture(autouse=True, scope="module")
def plugins() -> Iterator[None]:
    """Somebody's losses, heads and recipes beside ours."""
    with pytest.MonkeyPatch.context() as patch:
        module = type(sys)("zzmod_recipe")
        patch.setitem(sys.modules, "zzmod_recipe", module)
        for group, members in PLUGINS.items():
            theirs = []
            for index, (name, member) in enumerate(members.items()):
                setattr(module, f"{group}_{index}", member)
                target = f"zzmod_recipe:{group}_{index}"
                theirs.append(
                    registry.Plugin(group=group, name=name, distribution="theirs", version="1", target=target)
                )
            patch.setitem(registry._cache, group, (*registry._discover(group), *theirs))
        yield


def term(name: str, weight: float = 1.0, **fields: Any) -> TermSpec:
    options = tuple(fields.pop("options", {}).items())
    return TermSpec(name, weight, options=options, **fields)


# What is read


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("dcl", [term("dcl")]),
        ("  dcl  ", [term("dcl")]),
        ("3*dcl", [term("dcl", 3.0)]),
        (".5*dcl", [term("dcl", 0.5)]),
        ("2.*dcl", [term("dcl", 2.0)]),
        ("1e-3*dcl", [term("dcl", 0.001)]),
        ("+2*dcl", [term("dcl", 2.0)]),
        ("clip+dcl", [term("clip"), term("dcl")]),
        ("clip +2*dcl", [term("clip"), term("dcl", 2.0)]),
        ("clip\n\t+ dcl", [term("clip"), term("dcl")]),
        ("dcl@ids", [term("dcl", source="ids")]),
        ("2*dcl @ ids (mu=1)", [term("dcl", 2.0, source="ids", options={"mu": 1.0})]),
        ("dcl(head=ids)", [term("dcl", head="ids")]),
        ("dcl@gate(head=ids,mu=.5)", [term("dcl", source="gate", head="ids", options={"mu": 0.5})]),
        ("their/spy-2.b(count=2)", [term("their/spy-2.b", options={"count": 2})]),
        ("spy( word = a , flag=true )", [term("spy", options={"word": "a", "flag": True})]),
        ("spy(maybe=none)", [term("spy", options={"maybe": None})]),
        ("spy(count=-2,size=-1e-2)", [term("spy", options={"count": -2, "size": -0.01})]),
        ("spy(word='1.5')", [term("spy", options={"word": "1.5"})]),
        ("spy(word='true')", [term("spy", options={"word": "true"})]),
        ("spy(word=\"it's, (so) = +\")", [term("spy", options={"word": "it's, (so) = +"})]),
        ("spy(word='')", [term("spy", options={"word": ""})]),
        ("spy(word=a/b-c.d)", [term("spy", options={"word": "a/b-c.d"})]),
        ("spy(kind=sum,either=2)", [term("spy", options={"kind": "sum", "either": 2.0})]),
        ("spy(kind=3,either=mu)", [term("spy", options={"kind": 3, "either": "mu"})]),
        ("spy(high=3,low=2)", [term("spy", options={"low": 2.0, "high": 3.0})]),  # each alone would be turned down
        ("needy(margin=0,rank=2)", [term("needy", options={"margin": 0.0, "rank": 2})]),
    ],
)
def test_reads(text: str, terms: list[TermSpec]) -> None:
    objective = Objective.parse(text)
    assert objective == Objective(tuple(terms))
    for mine, wanted in zip(objective.terms, terms, strict=True):  # 1 == 1.0 == True is not what is asked
        assert [type(value) for _, value in mine.options] == [type(value) for _, value in wanted.options]
        assert type(mine.weight) is float


def test_a_recipe_is_frozen_hashable_and_parsed_once() -> None:
    objective = Objective.parse("clip + dcl(mu=0.2)")
    assert Objective.parse(objective) is objective
    assert hash(objective) == hash(Objective.parse("clip+dcl(mu=.2)"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.local_loss = True  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.terms[0].weight = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-4", 1e-4),
        ("true", True),
        ("false", False),
        ("none", None),
        ("word", "word"),
        ("'12'", "12"),
        ('"a b"', "a b"),
        (" 2 ", 2),
        ("True", True),
        ("nan", "nan"),
        ("-inf", "-inf"),
        ("1_0", "1_0"),
        ("9" * 5000, float("inf")),
    ],
)
def test_parse_value(text: str, value: Any) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


# Presets


def test_presets_are_put_in_their_place_and_scaled() -> None:
    assert [(spec.name, spec.weight) for spec in Objective.parse("2*selfalign-clip+2*clip").terms] == [
        ("clip", 2.0), ("lca", 2.0), ("cra", 2.0), ("clip", 2.0)
    ]  # fmt: skip
    assert [spec.name for spec in Objective.parse("clip+selfalign-clip").terms] == ["clip", "clip", "lca", "cra"]
    two = (term("dcl", 0.5, options={"mu": 0.2}), term("clip"))
    assert Objective.parse("two").terms == Objective.parse("two/called").terms == two
    assert Objective.parse("siglip + 3*two + triplet").terms == (
        term("siglip"),
        term("dcl", 1.5, options={"mu": 0.2}),
        term("clip", 3.0),
        term("triplet"),
    )
    assert [spec.weight for spec in Objective.parse("0.25*two/nested").terms] == [0.5, 1.0, 0.25]


def test_objectives_bring_their_heads_options() -> None:
    objective = Objective.parse("clip + 2*gated")
    assert objective.heads == (("gate", (("size", 5),)),)
    assert [spec.weight for spec in objective.terms] == [1.0, 1.0, 2.0]
    assert Objective.parse("gated + gated").heads == objective.heads
    with pytest.raises(CoderError, match="two objectives set the head 'gate' differently"):
        Objective.parse("gated + gated/other")


def test_a_broken_preset_is_named() -> None:
    with pytest.raises(CoderError) as caught:
        Objective.parse("clip + 2*broken")
    message = str(caught.value)
    assert message.startswith('loss "clip + 2*broken", column 10: the objective \'broken\': ')
    assert 'loss "clip + gone(mu=1)", column 8: unknown loss or objective \'gone\'' in message


# Mistakes. Columns are counted by hand, from 1.

MISTAKES = [
    ("dcll", 1, "unknown loss or objective 'dcll'; did you mean 'dcl'? (known: ascl, "),
    ("mdcl", 1, "did you mean 'm_dcl'?"),
    ("clip + tripet", 8, "did you mean 'triplet'?"),
    ("2*coder/table2-9", 3, "did you mean 'coder/table2-"),
    ("qqqqqq", 1, "unknown loss or objective 'qqqqqq' (known: "),
    ("clip & dcl", 6, "unexpected '&'"),
    ("clip -0.5*dcl", 6, "'-' is not possible: the items are added, and each weight must be > 0"),
    ("clip + inf*dcl", 11, "expected '+', found '*'"),
    ("mine.py", 1, "a class in a file is PATH.py:NAME"),
    ("dcl(mu=mine.py:Hub)", 8, "expected a value, found 'mine.py:Hub'"),
    ("2dcl", 1, "unexpected '2'"),
    ("dcl(word='open", 10, "unexpected \"'\""),
    ("clip dcl", 6, "expected '+', found 'dcl'"),
    ("2 dcl", 3, "expected '*' after the weight, found 'dcl'"),
    ("2**dcl", 3, "expected a loss or an objective, found '*'"),
    ("2*", 3, "a loss or an objective is missing after '*'"),
    ("", 1, "a loss or an objective is missing"),
    ("   ", 4, "a loss or an objective is missing"),
    ("clip +", 7, "a loss or an objective is missing after '+'"),
    ("+ clip", 1, "expected a loss or an objective, found '+'"),
    ("'dcl'", 2, "expected a loss or an objective, found 'dcl'"),
    ("0*dcl", 1, "a weight must be > 0, got 0;"),
    ("clip + -1*dcl", 8, "a weight must be > 0, got -1;"),
    ("1e999*dcl", 1, "a weight must be > 0, got 1e999;"),
    ("dcl@", 5, "a head is missing after '@'"),
    ("dcl@idz", 5, "unknown head 'idz' (known: "),
    ("clip + dcl@ids@ids", 15, "expected '+', found '@'"),
    ("dcl(head=idz)", 5, "unknown head 'idz' (known: "),
    ("dcl(mu=0.1, head=3)", 13, "unknown head 3 (known: "),
    ("coder-printed(margin=1)", 14, "'coder-printed' is an objective: set options with --set"),
    ("coder-printed @ids", 15, "'coder-printed' is an objective"),
    ("clip + round", 8, "objectives contain each other: round -> trip -> round"),
    ("clip + text", 8, "'text' in coder_plugin.recipes is '0.5*dcl'; it must be a mapping such as {'loss': '3*dcl'}"),
    ("ascl-f30k + 0.1*clip", 1, "'ascl-f30k' is a recipe, a whole set-up: use --recipe ascl-f30k. Its loss is \"ascl("),
    ("clip + 2*ascl/table2-full", 10, "'ascl/table2-full' is a recipe, a whole set-up: use --recipe ascl/table2-full. "),
    ("clip + whole", 8, 'Its loss is "0.5*dcl(mu=0.2) + clip" with --set gate.size=5'),
    ("dcl(mo=0.1)", 5, "'dcl' has no option 'mo'; it has: mu, gamma, epsilon,"),
    ("clip(mu=1)", 6, "'clip' has no option 'mu'; it has: hard_negatives"),
    ("dcl(mu=x)", 5, "'dcl': option mu=x must be float"),
    ("dcl(mu=nan)", 5, "'dcl': option mu=nan must be float"),
    ("dcl(mu=1e999)", 5, "'dcl': option mu=inf must be finite"),
    ("dcl(mask_same_image=1)", 5, "option mask_same_image=1 must be bool"),
    ("triplet(margin=0.1, reduction=max)", 21, "option reduction=max must be mean or sum"),
    ("spy(either=nu)", 5, "option either=nu must be float or mu"),
    ("spy(count=1.0)", 5, "option count=1.0 must be int"),
    ("spy(count=true)", 5, "option count=true must be int"),
    ("spy(kind=3.0)", 5, "option kind=3.0 must be mean or sum or 3"),
    ("spy(maybe=x)", 5, "option maybe=x must be float or none"),
    ("spy(word=3)", 5, "option word=3 must be str"),
    ("dcl(gamma=0.2, mu=-1)", 16, "'dcl': mu"),
    ("spy(count=2, low=5, flag=true)", 14, "'spy': low must be < high, got 5.0 and 1.0"),
    ("spy(high=3, count=2, low=5)", 22, "'spy': low must be < high, got 5.0 and 3.0"),
    ("clip + needy(margin=0.2)", 8, "'needy': missing required option rank=…"),
    ("needy(margin=-1, rank=2)", 7, "'needy': margin must be >= 0"),
    ("unreadable(rank=1)", 12, "its options' types cannot be read: name 'Missing' is not defined"),
    ("dcl(mu=0.1, mu=0.2)", 13, "option 'mu' is given twice"),
    ("dcl(head=ids, head=ids)", 15, "option 'head' is given twice"),
    ("dcl(mu=0.1,)", 12, "expected an option, found ')'"),
    ("dcl(mu=0.1", 11, "',' or ')' is missing after '0.1'"),
    ("dcl(", 5, "an option is missing after '('"),
    ("dcl(mu=0.1 gamma=2)", 12, "expected ',' or ')', found 'gamma'"),
    ("dcl(mu 0.1)", 8, "expected '=' after 'mu', found '0.1'"),
    ("dcl(mu=)", 8, "expected a value, found ')'"),
    ("clip\n+ dcll", 8, "unknown loss or objective 'dcll'"),
    ("dcl(mu='a\nb')", 5, "must be float"),
]


@pytest.mark.parametrize(("text", "column", "message"), MISTAKES, ids=[repr(text) for text, *_ in MISTAKES])
def test_mistakes_are_one_line_with_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(CoderError) as caught:
        Objective.parse(text)
    said = str(caught.value)
    assert said.startswith(f'loss "{text.replace(chr(10), " ")}", column {column}: '), said
    assert message in said
    assert len(said.splitlines()) == 1


@given(st.text(alphabet="dclipte+*@(),=.'\"/-_ 019\n\té٣\u2028", max_size=30) | st.text(max_size=12))
def test_any_text_is_a_recipe_or_one_line_with_a_column(text: str) -> None:
    try:
        objective = Objective.parse(text)
    except CoderError as error:
        said = str(error)
        assert len(said.splitlines()) == 1
        flat = re.sub(r"\s", " ", text)
        prefix = f'loss "{flat}", column '
        assert said.startswith(prefix)
        column = int(said[len(prefix) :].split(":")[0])
        assert 1 <= column <= len(text) + 1
    else:
        assert objective.terms and all(spec.weight > 0 for spec in objective.terms)


# Round trips

words = st.text(alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="\"'"), max_size=8)
words |= st.sampled_from(["true", "none", "inf", "nan", "1", "1e5", "a/b-c", "it's", 'say "x"', "-", "_1", "a.", "0x1"])
numbers = st.floats(allow_nan=False, allow_infinity=False)
weights = st.floats(min_value=1e-12, max_value=1e12)
VALUES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "clip": {},
    "siglip": {"dist_impl": st.sampled_from(["bidir", "shift", "reduce", "gather"])},
    "dcl": {
        "mu": st.floats(min_value=0.01, max_value=10),
        "gamma": st.floats(min_value=0, max_value=1),
        "diversity": st.sampled_from(["std", "entropy", "none"]),
        "mask_same_image": st.booleans(),
    },
    "triplet": {
        "margin": st.floats(min_value=0, max_value=1),
        "hardest": st.booleans(),
        "reduction": st.sampled_from(["mean", "sum"]),
    },
    "needy": {"rank": st.integers(), "margin": st.floats(min_value=0, max_value=9)},
    "their/spy-2.b": {
        "word": words,
        "count": st.integers(),
        "maybe": st.none() | numbers,
        "flag": st.booleans(),
        "size": numbers,
        "either": numbers | st.just("mu"),
        "kind": st.sampled_from(["mean", "sum", 3]),
        "low": st.floats(max_value=2, allow_infinity=False, allow_nan=False),
        "high": st.floats(min_value=3, allow_infinity=False, allow_nan=False),
    },
}


@st.composite
def terms(draw: st.DrawFn) -> TermSpec:
    name = draw(st.sampled_from(sorted(VALUES)))
    needed = {"rank"} & VALUES[name].keys() | {"high"} & VALUES[name].keys()
    optional = {option: values for option, values in VALUES[name].items() if option not in needed}
    options = draw(st.fixed_dictionaries({o: VALUES[name][o] for o in needed}, optional=optional))
    heads = st.none() | st.sampled_from(["ids", "tokens", "gate"])
    return TermSpec(name, draw(weights), draw(heads), draw(heads), check_options("losses", name, options))


recipes = st.lists(terms(), min_size=1, max_size=4).map(lambda found: Objective(tuple(found)))
head_options = st.fixed_dictionaries({}, optional={"size": st.integers(), "wide": st.booleans()})


@given(recipes)
def test_text_round_trip(objective: Objective) -> None:
    assert Objective.parse(str(objective)) == objective
    assert str(Objective.parse(str(objective))) == str(objective)


@given(recipes, st.fixed_dictionaries({}, optional={"gate": head_options, "door": head_options}), st.booleans())
def test_json_round_trip(objective: Objective, heads: dict[str, dict[str, Any]], local_loss: bool) -> None:
    checked = tuple((name, check_options("heads", name, options)) for name, options in sorted(heads.items()))
    objective = dataclasses.replace(objective, heads=checked, local_loss=local_loss)
    again = Objective.from_dict(json.loads(json.dumps(objective.to_dict())))
    assert again == objective
    for mine, theirs in zip(again.terms, objective.terms, strict=True):
        assert [type(value) for _, value in mine.options] == [type(value) for _, value in theirs.options]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("3.0*dcl", "3*dcl"),
        ("1*dcl", "dcl"),
        ("0.1*dcl + 1e-7*clip", "0.1*dcl + 1e-07*clip"),
        ("3*two", "1.5*dcl(mu=0.2) + 3*clip"),
        ("0.3*two", "0.15*dcl(mu=0.2) + 0.3*clip"),
        ("dcl@ids(head=gate,mask_same_image=false)", "dcl@ids(mask_same_image=false,head=gate)"),
        ("spy(maybe=none,word='a b')", "spy(word='a b',maybe=none)"),
    ],
)
def test_printing_is_short(text: str, printed: str) -> None:
    assert str(Objective.parse(text)) == printed


def test_a_saved_recipe_is_checked_when_it_is_read_back() -> None:
    data = Objective.parse("dcl(mu=0.2)").to_dict()
    data["terms"][0]["options"]["mo"] = 1
    with pytest.raises(CoderError, match="'dcl' has no option 'mo'"):
        Objective.from_dict(data)
    data["terms"][0].update(name="gone", options={})
    with pytest.raises(CoderError, match="'gone'"):
        Objective.from_dict(data)


# Labels


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("clip + dcl", ["clip", "dcl"]),
        ("dcl + dcl + 2*dcl", ["dcl", "dcl_2", "dcl_3"]),
        ("dcl@ids + dcl", ["dcl_ids", "dcl"]),
        ("dcl@ids + dcl@ids", ["dcl_ids", "dcl_ids_2"]),
        ("their/spy-2.b", ["their_spy_2_b"]),
        ("dcl + dcl + dcl_2", ["dcl", "dcl_2", "dcl_2_2"]),
        ("dcl_2 + dcl + dcl", ["dcl_2", "dcl", "dcl_3"]),
        ("dcl_2 + dcl-2", ["dcl_2", "dcl_2_2"]),
    ],
)
def test_labels(text: str, labels: list[str]) -> None:
    assert Objective.parse(text).labels() == labels


# --set


def test_set_reaches_every_term_of_the_name_and_heads() -> None:
    objective = Objective.parse("dcl(gamma=.2) + 2*dcl@ids + clip").with_options(
        {"dcl.mu": 0.07, "gate.size": 9, "gate.wide": True, "dcl.gamma": 1}
    )
    assert objective.terms == (
        term("dcl", options={"mu": 0.07, "gamma": 1.0}),
        term("dcl", 2.0, source="ids", options={"mu": 0.07, "gamma": 1.0}),
        term("clip"),
    )
    assert objective.heads == (("gate", (("size", 9), ("wide", True))),)
    again = objective.with_options({"gate.size": 4, "door.size": 1})
    assert again.heads == (("door", (("size", 1),)), ("gate", (("size", 4), ("wide", True))))
    assert Objective.parse("their/spy-2.b").with_options({"their/spy-2.b.count": 3}).terms[0].options == (("count", 3),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("mu", 1, "option 'mu': write OWNER.OPTION=VALUE, such as dcl.mu=0.07"),
        ("triplet.margin", 1, "option 'triplet.margin': the loss has no term and no head 'triplet'; known: "),
        ("dcl.mo", 1, "'dcl' has no option 'mo'; it has: mu, "),
        ("dcl.mu", "x", "'dcl': option mu=x must be float"),
        ("dcl.mu", float("nan"), "'dcl': option mu=nan must be finite"),
        ("dcl.mu", 0, "'dcl': mu"),
        ("gate.sise", 1, "'gate' has no option 'sise'; it has: size, wide"),
        ("gate.size", 1.5, "'gate': option size=1.5 must be int"),
        ("gate.backbone", 1, "'gate' has no option 'backbone'"),
    ],
)
def test_set_mistakes(path: str, value: Any, message: str) -> None:
    with pytest.raises(CoderError) as caught:
        Objective.parse("clip + dcl").with_options({path: value})
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_sum_of_very_many_terms() -> None:
    text = " + ".join(["clip"] * 100)
    assert len(check_names(text).items) == len(Objective.parse(text).terms) == 100
