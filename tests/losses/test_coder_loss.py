"""What an objective's loss does with its terms: weights, labels, bindings, gathers, warnings and refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from coder_plugin import create_loss, create_model, distributed, registry
from coder_plugin.coder import CoderLoss
from coder_plugin.contrast import Pairs
from coder_plugin.contrast.tiles import Tiles
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.basic import Ids
from coder_plugin.losses.base import Term, gathered_arguments
from coder_plugin.losses.caption import Caption
from coder_plugin.losses.clip import Clip
from coder_plugin.losses.dcl import DCL
from coder_plugin.losses.siglip import SigLip
from coder_plugin.losses.triplet import Triplet
from coder_plugin.losses.view_diversity import ViewDiversity
from coder_plugin.objective import Objective
from tests import gloo
from tests.losses.drawn import KEYS, close, drawing, make_loss, rows, step_of_way

TERMS = {"clip": Clip, "siglip": SigLip, "dcl": DCL, "triplet": Triplet}


def outputs(n: int = 8) -> dict[str, Tensor]:
    """A model's keys, leaves; the pairs 0, 3 and 1, 4 show one image each."""
    keys = {f"{side}_features": rows(drawing(k), n, 6, 1e3) for k, side in enumerate(("image", "text"))}
    keys |= {"logit_scale": torch.tensor(5.0).double(), "logit_bias": torch.tensor(-3.0).double()}
    ids = torch.arange(n) + 2**62
    ids[3:5] = ids[:2].clone()
    return {**{key: value.requires_grad_() for key, value in keys.items()}, "coder_ids": ids}


def features(keys: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return keys["image_features"], keys["text_features"]


# -- the sum ---------------------------------------------------------------------------------------------------------


def test_weights_multiply_and_the_sum_is_the_objective() -> None:
    keys = outputs()
    alone = {name: make_loss(name)(**keys, output_dict=False) for name in ("dcl", "triplet", "clip")}
    loss = make_loss("3*dcl + 0.25*triplet + clip")
    got = loss(**keys)
    assert list(got) == ["dcl_loss", "triplet_loss", "clip_loss"]
    for name, weight in (("dcl", 3), ("triplet", 0.25), ("clip", 1)):
        close(got[f"{name}_loss"], weight * alone[name])
    close(loss(**keys, output_dict=False), 3 * alone["dcl"] + 0.25 * alone["triplet"] + alone["clip"])


@pytest.mark.parametrize(
    ("name", "key"),
    [("dcl", "text_features"), ("triplet", "image_features"), ("clip", "logit_scale"), ("siglip", "logit_bias")],
)
def test_a_missing_key_is_named_with_its_term(name: str, key: str) -> None:
    keys = outputs()
    del keys[key]
    other = "dcl" if key.startswith("logit") else "clip"
    with pytest.raises(CoderError, match=f"loss '{name}' needs {key}, which the model did not return"):
        make_loss(f"{name} + {other}")(**keys)
    with pytest.raises(CoderError, match="loss 'dcl' needs image_features, text_features, which"):
        make_loss("dcl")(logit_scale=torch.tensor(1.0))


def test_a_term_reads_the_keys_it_is_bound_to() -> None:
    keys, objective = outputs(), Objective.parse("dcl")
    binding = {"image_features": "coder_a", "text_features": "coder_b", "coder_ids": "coder_ids"}
    loss = CoderLoss(objective, (binding,), {})
    images, texts = features(keys)
    named = {"coder_a": images, "coder_b": texts, "coder_ids": keys["coder_ids"]}
    got = loss(**named, image_features=torch.zeros(8, 6), output_dict=False)
    close(got, make_loss("dcl")(**keys, output_dict=False))
    with pytest.raises(CoderError, match="loss 'dcl' needs coder_b"):
        loss(coder_a=images, **keys)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_reach_what_a_term_reads(name: str) -> None:
    keys = outputs()
    make_loss(name)(**keys, output_dict=False).backward()
    for key in KEYS:
        reads = key in TERMS[name].requires
        # clip also takes the bias, which its softmax ignores
        assert (keys[key].grad is not None and bool(keys[key].grad.abs().max() > 1e-6)) == reads, key


@pytest.mark.parametrize("name", ["dcl", "triplet", "ascl", "clip"])
def test_batches_of_one_pair_of_one_image_and_pairs_that_do_not_match(name: str) -> None:
    for n, ids in ((1, torch.tensor([5])), (6, torch.full((6,), 5))):
        keys = outputs()
        leaf = keys["image_features"]
        pair = {key: keys[key][:n] for key in ("image_features", "text_features")}
        value = make_loss(name)(**pair, logit_scale=keys["logit_scale"], coder_ids=ids, output_dict=False)
        value.backward()
        assert value.isfinite() and leaf.grad.isfinite().all()
    keys = outputs()
    changes = [{"text_features": keys["text_features"][:5]}] + [{"coder_ids": keys["coder_ids"][:5]}] * (name != "clip")
    for change in changes:
        with pytest.raises(ValueError, match=r"(\[n, d\]|\(8,\)), got"):
            make_loss(name)(**{**keys, **change})


# -- what it owns ----------------------------------------------------------------------------------------------------


def test_a_loss_owns_nothing() -> None:
    text = "dcl + triplet + clip + siglip"
    heads = {"ids": Ids(BackboneInfo(embed_dim=6))}
    loss = make_loss(text, heads)
    assert not list(loss.parameters()) and not list(loss.buffers()) and not loss.state_dict()
    assert loss.load_state_dict({}) is not None
    loss(**outputs())
    assert not loss.state_dict()
    for term in loss.terms.values():
        assert term.heads is heads and term.local_loss is False
    assert not any(isinstance(module, Ids) for module in loss.modules())  # heads are the model's
    assert all(term.local_loss for term in make_loss(text, local_loss=True).terms.values())


class Scaled(nn.Module):
    requires = ("image_features",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, image_features: Tensor) -> Tensor:
        return self.scale * image_features.sum()


class Counted(Term):
    requires = ("image_features",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


class Forwarded(Term):
    """Gathers, and yet overrides forward in place of compute."""

    gathers = ("image_features",)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return image_features.sum()


class Unfinished(Term):
    gathers = ("image_features",)


def gathering(keys: Any) -> Term:
    class Gathers(Term):
        requires, gathers = ("image_features",), keys

        def compute(self, image_features: Tensor) -> Tensor:
            return image_features.mean()

    return Gathers()


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Scaled(), "loss 'scaled' owns parameters, which nothing would train: put them into a head"),
        (Counted(), "loss 'counted' holds the buffer 'seen', which no checkpoint would save"),
        (Forwarded(), "names image_features in 'gathers', and gathered rows go to compute"),
        (Unfinished(), "names image_features in 'gathers', and gathered rows go to compute"),
        (gathering("image_features"), "'gathers' must be a tuple of keys, got 'image_features': write .* with a comma"),
        (gathering(("image_feature",)), "gathers 'image_feature', which is not in its .*; did you mean 'image_features'"),
    ],
)
def test_terms_that_own_something_or_gather_without_compute_are_refused(term: nn.Module, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        CoderLoss(Objective.parse([term]), ({"image_features": "image_features"},), {})


def test_an_object_may_be_in_several_losses() -> None:
    """Each has a copy with settings of its own."""
    term = Triplet()
    one, two = (
        CoderLoss(Objective.parse([term]), ({key: key for key in term.requires},), {}, implementation=form)
        for form in ("reference", "tiled")
    )
    assert term.implementation == "auto"
    assert [loss.terms["triplet"].implementation for loss in (one, two)] == ["reference", "tiled"]


# -- several terms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["reference", "tiled"])
@pytest.mark.parametrize("text", ["dcl + triplet", "dcl + 0.5*dcl(mu=0.05)"])
def test_each_term_has_a_graph_of_its_own(text: str, form: str) -> None:
    """One backward pass does not free what another needs."""
    keys = outputs()
    losses = make_loss(text, implementation=form)(**keys)
    for value in losses.values():
        assert torch.autograd.grad(value, keys["image_features"])[0].any()


@pytest.mark.parametrize("form", ["reference", "tiled"])
def test_the_implementation_reaches_every_term(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, choose = [], Pairs.choose
    monkeypatch.setattr(Pairs, "choose", lambda *a, **k: taken.append(choose(*a, **k)) or taken[-1])
    make_loss("dcl + clip + triplet + ascl", implementation=form)(**outputs())
    assert len(taken) >= 3 and {isinstance(each, Tiles) for each in taken} == {form == "tiled"}
    with pytest.raises(ValueError, match="implementation must be 'auto', 'reference' or 'tiled', got 'triton'"):
        make_loss("dcl", implementation="triton")(**outputs())


def on_a_rank() -> dict[str, Any]:
    """The collectives of a loss of several terms and of its gradient; what travels in them, and what a bank then holds."""
    own = slice(distributed.rank() * 4, distributed.rank() * 4 + 4)
    keys = {key: value.detach()[own] if value.ndim else value for key, value in outputs().items()}
    leaf = keys["image_features"].requires_grad_()
    found = {}
    for dtype in ("exact", "bfloat16"):
        before = distributed.collectives()
        value = make_loss("dcl + triplet + clip + ascl", local_loss=True, gather_dtype=dtype)(**keys, output_dict=False)
        found[dtype] = value.item(), torch.autograd.grad(value, leaf)[0], distributed.collectives() - before
        found[f"bank in {dtype}"] = step_of_way("m_dcl", "all", gather_dtype=dtype)[1][0]
    tensors = keys["image_features"], keys["text_features"], keys["coder_ids"]
    named = dict(zip(("a", "b", "c"), tensors, strict=True))
    both = gathered_arguments([(("a", "b"), named), (("a", "c", "d"), named)])
    found["shared"] = both[0]["a"] is both[1]["a"], [list(each) for each in both]
    values = torch.tensor([1.0, 2.0, 6.0, 4.0]).chunk(2)[distributed.rank()].requires_grad_()
    for name, term in REDUCED.items():
        loss = term(values)
        found[name] = loss.item(), torch.autograd.grad(loss, values)[0].tolist()
    return found


#: Terms whose head computes a value of each sample.
REDUCED = {"mean": ViewDiversity(), "sum": ViewDiversity(reduction="sum"), "caption": Caption()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return gloo.run(on_a_rank)


@pytest.mark.parametrize(("name", "whole", "each"), [("mean", 3.25, 0.25), ("sum", 13.0, 1.0), ("caption", 3.25, 0.25)])
def test_values_of_samples_are_reduced_over_all_ranks(ranks: Any, name: str, whole: float, each: float) -> None:
    """Loss and gradients as DDP averages them."""
    assert sum(rank[name][0] for rank in ranks) / 2 == pytest.approx(whole)
    assert [gradient / 2 for rank in ranks for gradient in rank[name][1]] == pytest.approx([each] * 4)


def test_what_terms_read_of_other_ranks_travels_once(ranks: Any) -> None:
    """In one collective, and its gradient in one more; in bfloat16 where that is asked for."""
    for result in ranks:
        (value, gradient, number), (short, rounded, _) = result["exact"], result["bfloat16"]
        assert number == 2 and result["shared"] == (True, [["a", "b"], ["a", "c"]])
        assert 0 < abs(value - short) < 0.05 and 0 < (gradient - rounded).norm() < 0.05 * gradient.norm()
        new = (torch.arange(12) + 16) % 13  # rows of the bank: keys of all ranks are rounded
        exact, short = result["bank in exact"][new], result["bank in bfloat16"][new]
        assert torch.equal(short, exact.bfloat16().double()) and not torch.equal(short, exact)


def test_gather_options_are_checked() -> None:
    for options, message in (
        ({"gather_dtype": "float16"}, "gather_dtype must be one of exact, bfloat16, got 'float16'"),
        ({"gather": "tree"}, "gather must be one of all, ring, got 'tree'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_loss("dcl", **options)
    for options, message in (
        ({"implementation": "reference"}, "take another implementation than 'reference'"),
        ({"gather_dtype": "bfloat16"}, "leave out gather_dtype"),
    ):
        with pytest.raises(CoderError, match=message):
            make_loss("dcl", gather="ring", **options)


# -- warnings --------------------------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if about in record.getMessage()]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dcl", "dcl"),
        ("clip + dcl + triplet + ascl", "dcl and triplet and ascl"),
        ("clip(hard_negatives=true)", "clip"),
        ("clip + siglip + dcl(mask_same_image=false) + triplet(mask_same_image=false) + distill", None),
    ],
)
def test_missing_image_ids_are_warned_of_once_where_a_term_masks_by_them(text: str, named: str | None, caplog) -> None:
    keys = outputs() | {
        "coder_negative_features": torch.zeros(8, 1, 6, dtype=torch.float64),
        "coder_negative_ids": torch.zeros(8, 1, dtype=torch.int64),
        "coder_teacher_image_features": outputs()["image_features"].detach(),
        "coder_teacher_text_features": outputs()["text_features"].detach(),
    }
    loss = make_loss(text)
    with caplog.at_level(logging.WARNING):
        loss(**keys)
        assert not messages(caplog, "image ids")
        del keys["coder_ids"]
        loss(**keys), loss(**keys)
    got = messages(caplog, "image ids")
    assert len(got) == (named is not None)
    assert not got or got[0].startswith(f"{named}: no image ids were passed, so other captions of an image count")


@pytest.mark.parametrize(("text", "warned"), [("dcl + 0.5*clip", "dcl and clip"), ("ascl", None), ("siglip", "siglip")])
def test_a_batch_of_one_pair_is_warned_of_once(text: str, warned: str | None, caplog) -> None:
    keys = {key: value[:1] if value.ndim else value for key, value in outputs().items()}
    loss = make_loss(text)
    with caplog.at_level(logging.WARNING):
        with torch.no_grad():  # as in evaluation
            loss(**keys)
        assert not messages(caplog, "one pair")
        loss(**keys), loss(**keys)
    got = messages(caplog, "a batch of one pair has no negatives")
    assert len(got) == (warned is not None) and all(f"and {warned} ha" in each for each in got)


# -- terms of somebody else ------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution whose loss ``zz-two`` returns two scalars."""
    info = tmp_path / "zz_terms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-terms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[coder_plugin.losses]\nzz-two = zz_terms:Two\n")
    (tmp_path / "zz_terms.py").write_text(
        "from coder_plugin.losses.base import Term\n"
        "class Two(Term):\n"
        "    requires = ('image_features',)\n"
        "    optional = ('logit_scale',)\n"
        "    def __init__(self, *, power: int = 1) -> None:\n"
        "        super().__init__()\n"
        "        self.power = power\n"
        "    def forward(self, image_features, logit_scale=None):\n"
        "        seen = image_features.new_tensor(10.0) if logit_scale is None else logit_scale\n"
        "        return {'sum_loss': image_features.sum() ** self.power, 'scale_loss': seen}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.refresh()
    yield
    registry.refresh()


def test_a_term_may_return_several_losses(theirs: None) -> None:
    keys = outputs()
    loss = make_loss("0.5*zz-two(power=3) + dcl")
    got = loss(**keys)
    assert list(got) == ["zz_two_sum_loss", "zz_two_scale_loss", "dcl_loss"]
    close(got["zz_two_sum_loss"], 0.5 * keys["image_features"].sum() ** 3)
    close(got["zz_two_scale_loss"], 0.5 * keys["logit_scale"])
    close(loss(**keys, output_dict=False), sum(got.values()))
    del keys["logit_scale"]  # a key that is optional is left out
    assert loss(**keys)["zz_two_scale_loss"] == 5


class Returns(Term):
    requires = ("image_features",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, image_features: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, "must return scalar tensors, and its 'loss' is float"),
        (torch.zeros(2), r"must return scalar tensors, and its 'loss' is of shape \[2\]"),
        ({"a_loss": torch.zeros(1)}, r"its 'a_loss' is of shape \[1\]"),
        ({"accuracy": torch.zeros(())}, "returned 'accuracy': every entry is added to the objective"),
    ],
)
def test_what_is_not_a_scalar_loss_is_refused(value: Any, message: str) -> None:
    loss = CoderLoss(Objective.parse([Returns(value)]), ({"image_features": "image_features"},), {})
    with pytest.raises(CoderError, match=message):
        loss(**outputs())


def test_a_plain_module_is_a_term_by_what_it_requires() -> None:
    class Spread(nn.Module):
        requires, optional, supports = ("image_features",), ("coder_ids",), ("views",)

        def forward(self, image_features: Tensor, coder_ids: Tensor | None = None) -> Tensor:
            return image_features.sum() * (1 if coder_ids is None else 2)

    model = create_model("coder-tiny", loss=["clip", (0.5, Spread())])
    loss = create_loss(["clip", (0.5, Spread())], model=model)
    keys, label = outputs(), list(loss.terms)[1]
    assert loss.terms[label].supports == {"views"} and loss.terms[label].optional == ("coder_ids",)
    close(loss(**keys)[f"{label}_loss"], keys["image_features"].sum())


class HasKey:
    """A head of another plugin."""

    provides: Sequence[str] = ("coder_thing",)
    size = 3


def test_a_term_finds_the_head_that_provides_a_key() -> None:
    term = Term().bind({"thing": HasKey()}, local_loss=False)  # type: ignore[dict-item]
    assert term.provider("coder_thing", "size").size == 3
    with pytest.raises(CoderError, match="Term needs a head with bank; 'thing' has none"):
        term.provider("coder_thing", "size", "bank")
    with pytest.raises(CoderError, match="Term reads 'coder_other', which no head of this model provides"):
        term.provider("coder_other")


def test_views_reach_the_terms_that_take_them() -> None:
    keys = outputs()
    keys["image_features"] = normalize(torch.randn(8, 2, 6, generator=drawing(3)).double(), dim=-1)
    for name in ("dcl", "triplet", "ascl"):
        assert "views" in make_loss(name).terms[name].supports and make_loss(name)(**keys, output_dict=False).isfinite()
