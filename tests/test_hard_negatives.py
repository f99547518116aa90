"""Hard negatives in clip, dcl, m_dcl and triplet: against a slow reference, by tiles, on two ranks; what they do not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl, dcl_loss, m_dcl, tiled, triplet
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.triplet_loss import triplet_of_features
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.losses.clip import Clip
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests import gloo
from tests.peak_memory import peak
from tests.references import hard_negatives as reference

D = 4
EXACT = {"rtol": 1e-9, "atol": 1e-9}
SCALE = 5.0


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


class Case:
    """A batch of n pairs with m hard negatives and q bank entries, in which images may repeat, also as those of negatives."""

    def __init__(self, n: int, m: int, q: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.v, self.w, self.v_keys, self.w_keys = (unit(n, D, generator=g) for _ in range(4))
        self.v_bank, self.w_bank = (unit(q, D, generator=g) for _ in range(2))
        self.negatives = unit(m, D, generator=g)
        self.ids = torch.randint(0, n + 1, (n,), generator=g)
        self.bank_ids = torch.randint(0, n + 3, (q,), generator=g)
        # -2: no text, -1: of an unknown image, else one of the batch or another
        self.negative_ids = torch.randint(-2, n + 3, (m,), generator=g)

    @property
    def hard(self) -> dict[str, Tensor]:
        return {"negatives": self.negatives, "negative_ids": self.negative_ids, "negative_valid": self.negative_ids != -2}

    @property
    def slow(self) -> tuple[Any, Any, Any, reference.Hard]:
        valid = (self.negative_ids != -2).tolist()
        hard = reference.Hard(self.negatives.tolist(), self.negative_ids.tolist(), valid)
        return self.v.tolist(), self.w.tolist(), self.ids.tolist(), hard


def clip_term(case: Case, implementation: str, anchors: slice | None = None) -> Tensor:
    """The term's own form with all similarities, or that by tiles."""
    scale = torch.tensor(SCALE, dtype=torch.float64)
    if implementation == "tiled":
        return tiled_clip(case.v, case.w, scale, anchors=anchors, image_ids=case.ids, **case.hard)
    term = Clip(hard_negatives=True)
    term.implementation = "reference"
    return term(case.v, case.w, scale, None, case.ids, case.negatives[:, None], case.negative_ids[:, None])


def m_dcl_of(case: Case, implementation: Any, **options: Any) -> Tensor:
    features = case.v, case.w, case.v_keys, case.w_keys, case.v_bank, case.w_bank
    ids = {"image_ids": case.ids, "bank_ids": case.bank_ids}
    return m_dcl(*features, **ids, implementation=implementation, **case.hard, **options)


#: name -> the loss of a case, and the slow one
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Case], float]]] = {
    "dcl": (
        lambda c, i, **o: dcl(c.v, c.w, image_ids=c.ids, implementation=i, **c.hard, **o),
        lambda c: reference.dcl(*c.slow),
    ),
    "dcl none": (
        lambda c, i, **o: dcl(c.v, c.w, image_ids=c.ids, diversity="none", implementation=i, **c.hard, **o),
        lambda c: reference.dcl(*c.slow, kind="none"),
    ),
    "dcl effective": (
        lambda c, i, **o: dcl(c.v, c.w, image_ids=c.ids, effective_negatives=9, implementation=i, **c.hard, **o),
        lambda c: reference.dcl(*c.slow, effective=9),
    ),
    "m_dcl": (
        m_dcl_of,
        lambda c: reference.m_dcl(
            *c.slow[:2],
            (c.v_keys.tolist(), c.w_keys.tolist()),
            (c.v_bank.tolist(), c.w_bank.tolist()),
            c.slow[2],
            c.bank_ids.tolist(),
            c.slow[3],
        ),
    ),
    "clip": (lambda c, i, **o: clip_term(c, i, **o), lambda c: reference.clip(*c.slow, SCALE)),
    **{
        f"triplet {hardest} {reduction}": (
            lambda c, i, hardest=hardest, reduction=reduction, **o: triplet_of_features(
                c.v, c.w, image_ids=c.ids, hardest=hardest, reduction=reduction, implementation=i, **c.hard, **o
            ),
            lambda c, hardest=hardest, reduction=reduction: reference.triplet(*c.slow, hardest=hardest, reduction=reduction),
        )
        for hardest in (True, False)
        for reduction in ("mean", "sum")
    },
}
sizes = st.tuples(st.integers(1, 6), st.integers(0, 7), st.integers(0, 4), st.integers(0, 10_000))


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(size=sizes)
def test_equal_to_the_slow_reference(name: str, implementation: str, size: tuple[int, int, int, int]) -> None:
    case = Case(*size)
    loss, slow = LOSSES[name]
    torch.testing.assert_close(loss(case, implementation).item(), slow(case), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("share", [slice(0, 2), slice(3, 5)])
@pytest.mark.parametrize("name", LOSSES)
def test_tiles_and_their_gradients_equal_the_reference(name: str, share: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of a few elements, of all anchors and of a process's share of them."""
    monkeypatch.setattr(tiled, "TILE_ON_CPU", 6)
    loss, _ = LOSSES[name]
    results = []
    for implementation in ("reference", "tiled"):
        for anchors in ((None,) if name == "clip" else (None, share)):
            case = Case(5, 7, seed=3)
            leaves = [each.requires_grad_() for each in (case.v, case.w, case.negatives)]
            value = loss(case, implementation, anchors=anchors) if anchors else loss(case, implementation)
            results.append((value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True, allow_unused=True)))
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", ["dcl none", "m_dcl", "clip", "triplet False mean"])
def test_gradients(name: str, implementation: str) -> None:
    """Of what is not piecewise constant: the weights of dcl's diversity have none."""
    loss, case = LOSSES[name][0], Case(4, 5, seed=1)
    options = {"diversity": "none"} if name == "m_dcl" else {}

    def value(v: Tensor, w: Tensor, negatives: Tensor) -> Tensor:
        case.v, case.w, case.negatives = v, w, negatives
        return loss(case, implementation, **options)

    tensors = case.v, case.w, case.negatives
    inputs = tuple(each.clone().requires_grad_(name != "m_dcl" or k < 2) for k, each in enumerate(tensors))
    assert torch.autograd.gradcheck(value, inputs)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_has_no_effect(name: str, implementation: str) -> None:
    """An image's own caption among the hard negatives of others, and an empty place: as if they were not there."""
    loss, case = LOSSES[name][0], Case(4, 6, seed=2)
    case.ids = torch.tensor([10, 11, 12, 12])
    case.negative_ids = torch.tensor([-2, -2, -1, 11, 12, 99])
    leaf = case.negatives.requires_grad_()
    value = loss(case, implementation)
    if name == "m_dcl":
        assert not value.requires_grad  # keys: no gradient
    else:
        gradient = torch.autograd.grad(value, leaf)[0]
        assert not gradient[:2].any() and gradient.isfinite().all()
    bare = Case(4, 6, seed=2)
    bare.ids, bare.negatives, bare.negative_ids = case.ids, case.negatives[2:].detach(), case.negative_ids[2:]
    torch.testing.assert_close(value.detach(), loss(bare, implementation), **EXACT)
    for own, others in ((11, (0, 2, 3)), (12, (0, 1))):  # only of their own images the texts are no negatives
        near = case.v[case.ids == own][0].detach()
        moved = Case(4, 6, seed=2)
        moved.ids, moved.negative_ids = case.ids, case.negative_ids
        moved.negatives = torch.where((case.negative_ids == own)[:, None], near, case.negatives.detach())
        assert abs(loss(moved, implementation) - value) > 1e-6, others


@pytest.mark.parametrize("name", LOSSES)
def test_without_any_text_it_is_the_loss_without_them(name: str) -> None:
    for m in (0, 3):
        case = Case(4, m)
        case.negative_ids[:] = -2
        if name == "m_dcl":
            features = case.v, case.w, case.v_keys, case.w_keys, case.v_bank, case.w_bank
            plain = m_dcl(*features, image_ids=case.ids, bank_ids=case.bank_ids)
        elif name == "clip":
            plain = Clip()(case.v, case.w, torch.tensor(SCALE, dtype=torch.float64))
        elif name.startswith("dcl"):
            options = {"dcl none": {"diversity": "none"}, "dcl effective": {"effective_negatives": 9}}.get(name, {})
            plain = dcl(case.v, case.w, image_ids=case.ids, **options)
        else:
            _, hardest, reduction = name.split()
            plain = triplet(case.v @ case.w.T, image_ids=case.ids, hardest=hardest == "True", reduction=reduction)  # type: ignore
        for implementation in ("reference", "tiled"):
            torch.testing.assert_close(LOSSES[name][0](case, implementation), plain, **EXACT)


def test_the_diversity_counts_hard_negatives_too() -> None:
    """Negatives of equal similarity have no diversity; a hard negative that differs from them gives some."""
    v = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    further = normalize(torch.tensor([[3.0, 1, 0]], dtype=torch.float64), dim=1)
    for implementation in ("reference", "tiled"):
        weighed, plain = (
            dcl(v, v, diversity=kind, negatives=further, implementation=implementation) for kind in ("std", "none")
        )
        assert abs(weighed - plain) > 1e-3
        assert dcl(v, v, implementation=implementation) == dcl(v, v, diversity="none", implementation=implementation)


def test_a_small_batch_forms_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes half the time of tiles, whose directions then share no product."""
    case, used = Case(4, 5), []
    sums = dcl_loss.negative_sums
    monkeypatch.setattr(dcl_loss, "negative_sums", lambda *args: used.append(len(args[0])) or sums(*args))
    small = dcl(case.v, case.w, image_ids=case.ids, **case.hard)
    assert not used
    monkeypatch.setattr(tiled, "SMALL_MATRIX", 4 * (4 + 5) - 1)
    torch.testing.assert_close(dcl(case.v, case.w, image_ids=case.ids, **case.hard), small, **EXACT)
    assert used == [4, 4]


def test_several_features_of_an_image() -> None:
    """The best of an image's views is compared with hard negatives too."""
    case = Case(4, 5)
    views = torch.stack([case.v, unit(4, D, generator=torch.Generator().manual_seed(8))], 1)
    for function in (dcl, triplet_of_features):
        options = {"image_ids": case.ids, **case.hard}
        single, one, both = (function(x, case.w, **options) for x in (case.v, views[:, :1], views))
        torch.testing.assert_close(one, single, **EXACT)
        assert abs(both - single) > 1e-6


WRONG = [
    ({"negatives": torch.ones(2, D + 1)}, r"negatives must have shape \[m, 4\]"),
    ({"negatives": torch.ones(D)}, r"negatives must have shape \[m, 4\]"),
    ({"negatives": torch.ones(2, D), "negative_ids": torch.ones(3)}, r"negative_ids must have shape \(2,\)"),
    ({"negatives": torch.ones(2, D), "negative_valid": torch.ones(2)}, "negative_valid must be bool"),
    ({"negative_ids": torch.ones(2)}, "need negatives"),
    ({"negatives": torch.full((2, D), 1e30)}, "negatives holds values"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_named(options: dict[str, Tensor], message: str) -> None:
    features = torch.eye(D)
    for call in (
        lambda: dcl(features, features, **options),
        lambda: m_dcl(*[features] * 6, **options),
        lambda: triplet_of_features(features, features, **options),
    ):
        with pytest.raises((ValueError, CoderError), match=message):
            call()


# Terms: the hard negatives of all ranks


class Momentum(KeepsState):
    provides = ("coder_image_keys", "coder_text_keys", "coder_negative_keys")

    def __init__(self) -> None:
        super().__init__()
        self.bank = CoupledBank(5, D).double()
        rows = unit(2, 4, D, generator=torch.Generator().manual_seed(4))
        self.bank.enqueue(rows[0], rows[1], torch.arange(4))


EXPRESSIONS = {
    "dcl": "dcl(hard_negatives=true)",
    "dcl not masked": "dcl(hard_negatives=true,mask_same_image=false)",
    "m_dcl": "m_dcl(hard_negatives=true)",
    "triplet": "triplet(hard_negatives=true)",
    "triplet sum": "triplet(hard_negatives=true,hardest=false,reduction=sum)",
    "clip": "clip(hard_negatives=true)",
    "sum": "2*dcl(hard_negatives=true) + m_dcl(hard_negatives=true) + 0.5*clip(hard_negatives=true) + triplet",
}
PAIRS, EACH = 3, 2


def outputs(rows: slice = slice(None)) -> dict[str, Tensor]:
    """What a model returns for ``rows`` of a joint batch of two ranks."""
    case = Case(2 * PAIRS, 2 * PAIRS * EACH, seed=5)
    g = torch.Generator().manual_seed(6)
    return {
        "image_features": case.v[rows].clone().requires_grad_(),
        "text_features": case.w[rows].clone().requires_grad_(),
        "coder_image_keys": case.v_keys[rows].clone(),
        "coder_text_keys": case.w_keys[rows].clone(),
        "coder_negative_features": case.negatives.view(-1, EACH, D)[rows].clone().requires_grad_(),
        "coder_negative_keys": unit(2 * PAIRS, EACH, D, generator=g)[rows].clone(),
        "coder_ids": case.ids[rows].clone(),
        "coder_negative_ids": case.negative_ids.view(-1, EACH)[rows].clone(),
        "logit_scale": torch.tensor(SCALE, dtype=torch.float64, requires_grad=True),
    }


def make(expression: str, *, local_loss: bool = False, **options: Any) -> CoderLoss:
    objective = replace(Objective.parse(expression), local_loss=local_loss)
    keys = frozenset({"image_features", "text_features", "logit_scale"})
    return CoderLoss(objective, resolve(objective, keys).bindings, {"momentum": Momentum()}, **options)


def step(name: str, local_loss: bool) -> tuple[float, dict[str, Tensor]]:
    own = slice(None) if distributed.world_size() == 1 else slice(distributed.rank() * PAIRS, (distributed.rank() + 1) * PAIRS)
    batch = outputs(own)
    value = make(EXPRESSIONS[name], local_loss=local_loss)(**batch, output_dict=False)
    leaves = {key: each for key, each in batch.items() if each.requires_grad}
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.item(), dict(zip(leaves, gradients, strict=True))


def work() -> dict[tuple[str, bool], Any]:
    return {(name, local): step(name, local) for name in EXPRESSIONS for local in (False, True)}


@cache
def on_two_ranks() -> list[dict[tuple[str, bool], Any]]:
    return gloo.run(work)


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_two_ranks_equal_one_process_with_the_joint_batch(name: str, local_loss: bool) -> None:
    value, gradients = step(name, local_loss)
    ranks = [each[name, local_loss] for each in on_two_ranks()]
    torch.testing.assert_close(sum(each for each, _ in ranks) / 2, value, **EXACT)
    for key, whole in gradients.items():  # a gather returns the sum over ranks, which DDP divides by their number
        parts = [each[key] for _, each in ranks]
        joined = sum(parts) / 2 if key == "logit_scale" else torch.cat(parts) / 2
        torch.testing.assert_close(joined, whole, **EXACT)


@pytest.mark.parametrize("name", ["dcl", "m_dcl", "triplet", "clip"])
def test_a_term_equals_its_function(name: str) -> None:
    batch = {key: each.detach() for key, each in outputs().items()}
    got = make(EXPRESSIONS[name])(**batch, output_dict=False)
    case = Case(2 * PAIRS, 2 * PAIRS * EACH, seed=5)
    if name == "m_dcl":
        bank = Momentum().bank
        case.negatives = batch["coder_negative_keys"].flatten(0, 1)
        case.v_bank, case.w_bank, case.bank_ids = bank.image, bank.text, bank.ids
        want = m_dcl_of(case, "reference", bank_valid=bank.valid)
    else:
        want = LOSSES["triplet True mean" if name == "triplet" else name][0](case, "reference")
    torch.testing.assert_close(got, want, **EXACT)


def test_a_ring_refuses_them_by_name() -> None:
    for name in ("dcl", "clip"):
        with pytest.raises(CoderError, match="not with hard_negatives=true"):
            make(EXPRESSIONS[name], gather="ring")


def test_the_fusion_refuses_them() -> None:
    with pytest.raises(CoderError, match="hard_negatives needs similarity=cosine"):
        Objective.parse("triplet(similarity=fusion,hard_negatives=true)")


def test_other_features_refuse_them() -> None:
    objective = Objective.parse("dcl@concepts(hard_negatives=true)")
    with pytest.raises(CoderError, match="hard negatives, the momentum banks"):
        resolve(objective, frozenset({"image_features", "text_features", "logit_scale"}))


@pytest.mark.parametrize("name", ["dcl", "m_dcl", "triplet", "clip"])
def test_memory_grows_with_the_number_of_rows(name: str) -> None:
    """Of 4,096 images and 65,536 hard negatives, whose matrix of similarities alone has 1.07 GB."""
    live = [torch.empty(4096, 64, device="meta", requires_grad=True) for _ in range(2)]
    negatives = torch.empty(65_536, 64, device="meta", requires_grad=name != "m_dcl")
    ids = torch.empty(4096, dtype=torch.int64, device="meta")
    hard = {
        "negatives": negatives,
        "negative_ids": torch.empty(65_536, dtype=torch.int64, device="meta"),
        "negative_valid": torch.empty(65_536, dtype=torch.bool, device="meta"),
    }

    def loss() -> Tensor:
        if name == "m_dcl":
            return m_dcl(*live, *[each.detach() for each in live * 2], image_ids=ids, **hard)
        if name == "clip":
            # the term takes tiles by itself, since there are more than 4 million similarities
            further = negatives.view(4096, 16, 64), hard["negative_ids"].view(4096, 16)
            return Clip(hard_negatives=True)(*live, torch.ones((), device="meta"), None, ids, *further)
        return {"dcl": dcl, "triplet": triplet_of_features}[name](*live, image_ids=ids, **hard)

    leaves = live if name == "m_dcl" else [*live, negatives]
    assert peak(lambda: torch.autograd.grad(loss(), leaves, allow_unused=True)) <= 0.5e9
