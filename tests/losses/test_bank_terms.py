"""Terms with state: m_dcl, dcl over the banks, pgc; equal to their functions, on one process and on two."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl, diversity, diversity_weights, m_dcl, pgc, tiled
from coder_plugin.functional.pgc_loss import pgc_from_logits
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.heads.prototypes import Prototypes
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests import gloo

KEYS = frozenset({"image_features", "text_features", "logit_scale"})
D, Q = 6, 13


class Banks(KeepsState):
    """A provider of keys with a filled bank, as the momentum head is."""

    provides = ("coder_image_keys", "coder_text_keys")

    def __init__(self, *, filled: bool = True) -> None:
        super().__init__()
        self.bank = CoupledBank(Q, D).double()
        if filled:
            generator = torch.Generator().manual_seed(99)
            for n in (7, 9):  # turns over once
                rows = normalize(torch.randn(2, n, D, generator=generator, dtype=torch.float64), dim=-1)
                self.bank.enqueue(rows[0], rows[1], torch.randint(0, 12, (n,), generator=generator))

    def write(self, image_keys: Tensor, text_keys: Tensor, ids: Tensor) -> None:  # type: ignore[override]
        self.bank.enqueue(image_keys, text_keys, ids)


def outputs(n: int = 8, rows: slice = slice(None)) -> dict[str, Tensor]:
    """What a model returns for ``rows`` of a joint batch in which images 0 and 3, 1 and 4 are one."""
    generator = torch.Generator().manual_seed(n)
    names = ("image_features", "text_features", "coder_image_keys", "coder_text_keys")
    keys = {
        name: normalize(torch.randn(n, D, generator=generator, dtype=torch.float64), dim=-1)[rows].clone()
        for name in names
    }
    ids = torch.arange(n)
    ids[3:5] = ids[:2].clone()
    return {**keys, "coder_ids": ids[rows].clone()}


def make(expression: str, head: Head, *, local_loss: bool = False, **options: Any) -> CoderLoss:
    objective = replace(Objective.parse(expression), local_loss=local_loss)
    name = "prototypes" if isinstance(head, Prototypes) else "momentum"
    return CoderLoss(objective, resolve(objective, KEYS).bindings, {name: head}, **options)


def from_function(model_output: dict[str, Tensor], head: Banks, masked: bool = True, **options: Any) -> Tensor:
    bank = head.bank
    names = ("image_features", "text_features", "coder_image_keys", "coder_text_keys")
    ids = {"image_ids": model_output["coder_ids"], "bank_ids": bank.ids} if masked else {}
    return m_dcl(*(model_output[name] for name in names), bank.image, bank.text, bank_valid=bank.valid, **ids, **options)


OPTIONS = [
    {},
    {"mu": 0.07, "gamma": 0.1, "epsilon": 0.5},
    {"diversity": "entropy"},
    {"diversity": "none"},
    {"positive_weight": "mu"},
    {"reverse": "all"},
    {"reverse": "none"},
    {"diversity_over": "bank"},
    {"diversity_over": "batch"},
    {"diversity_gradient": True},
    {"effective_negatives": 100},
]


def expression(name: str, options: dict) -> str:
    written = [f"{k}={str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in options.items()]
    return f"{name}({','.join(written)})"


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_m_dcl_equals_its_function(options, masked, filled):
    model_output, head = outputs(), Banks(filled=filled)
    term = expression("m_dcl", {**options, "mask_same_image": masked})
    leaves = {k: v.requires_grad_() for k, v in model_output.items() if "features" in k}
    got = make(term, head)(**model_output)["m_dcl_loss"]
    want = from_function(model_output, head, masked, **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(loss, list(leaves.values())) for loss in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if options and masked and filled and options != {"diversity_gradient": True}:
        assert abs(got - from_function(model_output, head)) > 1e-5  # the options matter


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", ["std", "entropy", "none"])
def test_dcl_over_the_banks_equals_its_function(kind, masked):
    model_output, head = outputs(), Banks()
    term = f"dcl(diversity_over='batch+bank',diversity='{kind}',mask_same_image={str(masked).lower()})"
    got = make(term, head)(**model_output)["dcl_loss"]
    bank, ids = head.bank, model_output["coder_ids"]
    other = ids[:, None] != bank.ids if masked else torch.ones(8, Q, dtype=torch.bool)
    batch = ids[:, None] != ids if masked else ~torch.eye(8, dtype=torch.bool)
    allowed = torch.cat([batch, other & bank.valid], 1)
    over_bank = tuple(
        diversity(
            model_output[f"{a}_features"] @ torch.cat([model_output[f"coder_{b}_keys"], getattr(bank, b)]).T,
            allowed,
            kind=kind,
        )
        for a, b in (("image", "text"), ("text", "image"))
    )
    options = {"image_ids": ids} if masked else {}
    features = model_output["image_features"], model_output["text_features"]
    want = dcl(*features, diversity=kind, bank_diversity=over_bank, **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("term", ["m_dcl", "dcl(diversity_over='batch+bank')"])
def test_the_keys_are_stashed_once_and_written_after_the_step(term):
    model_output, head = outputs(), Banks(filled=False)
    loss = make(term, head)
    loss(**model_output)
    loss(**model_output)
    assert int(head.bank.count) == 0
    head.post_step()
    head.post_step()
    assert int(head.bank.count) == 8
    assert torch.equal(head.bank.text[:8], model_output["coder_text_keys"])
    assert torch.equal(head.bank.ids[:8], model_output["coder_ids"])


def test_m_dcl_stays_silent_until_its_bank_is_warm():
    model_output, head = outputs(), Banks(filled=False)
    model_output["image_features"].requires_grad_()
    loss = make("m_dcl(warmup=10)", head)
    first = loss(**model_output)["m_dcl_loss"]
    first.backward()
    assert first == 0 and model_output["image_features"].grad.abs().sum() == 0
    head.post_step()
    assert loss(**model_output)["m_dcl_loss"] == 0
    head.post_step()  # 13 of 13 entries
    same = make("m_dcl(warmup=4096)", head)(**model_output)["m_dcl_loss"]  # more than the bank can hold: when it is full
    torch.testing.assert_close(same, loss(**model_output)["m_dcl_loss"])
    torch.testing.assert_close(loss(**model_output)["m_dcl_loss"], from_function(model_output, head))


_OTHER_FEATURES = "the momentum banks and the generated texts have only the backbone's own features"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("m_dcl@concepts", _OTHER_FEATURES),
        ("dcl@concepts(diversity_over='batch+bank')", _OTHER_FEATURES),
        ("m_dcl(warmup=-1)", "warmup must be >= 0"),
        ("m_dcl(reverse=both)", "reverse=both must be paired or all or 'none'"),
    ],
)
def test_recipes_that_make_no_sense(objective, message):
    with pytest.raises(CoderError) as error:
        resolve(Objective.parse(objective), KEYS)
    assert message in str(error.value)


def test_a_provider_without_a_bank_is_named():
    class Keys(Head):
        provides = ("coder_image_keys", "coder_text_keys")

    with pytest.raises(CoderError, match="MDCL needs a head with bank; 'momentum' has none"):
        make("m_dcl", Keys())(**outputs())


def prototypes(clusters: int = 5, recluster: int | None = None) -> Prototypes:
    torch.manual_seed(3)
    return Prototypes(BackboneInfo(embed_dim=D), clusters=clusters, recluster=recluster)


def with_logits(model_output: dict[str, Tensor], head: Prototypes) -> dict[str, Tensor]:
    """Concept embeddings stand in as the keys: any unit vectors do."""
    concepts = {side: model_output[f"coder_{side}_keys"].float() for side in ("image", "text")}
    return {**model_output, **head(concepts["image"], concepts["text"])}


def test_pgc_is_silent_until_the_pairs_are_clustered_and_then_its_function():
    model_output, head = outputs(), prototypes(clusters=5, recluster=12)
    for _ in range(2):
        keys = with_logits(model_output, head)
        value = make("pgc", head)(**keys)["pgc_loss"]
        value.backward()
        assert value == 0 and head.classifier.weight.grad.abs().sum() == 0  # a gradient, as DDP asks, of zero
        head.post_step()
    keys = with_logits(model_output, head)
    got = make("pgc", head)(**keys)["pgc_loss"]
    samples = normalize(model_output["image_features"] + model_output["text_features"], dim=-1).float()
    labels = (samples @ head.centres.centres.T).argmax(1)
    assert len(labels.unique()) > 3
    parts = [model_output["coder_image_keys"].float(), model_output["coder_text_keys"].float()]
    torch.testing.assert_close(got, pgc(*parts, head.classifier.weight, labels))


LOSSES = [
    "m_dcl",
    "m_dcl(reverse=all)",
    "m_dcl(diversity=entropy)",
    "m_dcl(mask_same_image=false)",
    "m_dcl(diversity_gradient=true)",
    "dcl(diversity_over='batch+bank')",
    "2*m_dcl + dcl(diversity_over='batch+bank')",
]


def step(term: str, local_loss: bool, ranks: int, **options: Any) -> tuple[float, Tensor, list[Tensor], int]:
    """Mean loss over ranks, the joint batch's gradient as DDP averages it, the bank after the step, and the number of
    collectives."""
    size = 8 // ranks
    rows = slice(distributed.rank() * size, (distributed.rank() + 1) * size)
    model_output, head = outputs(rows=rows), Banks()
    model_output |= {f"coder_{side}_concepts": model_output[f"{side}_features"] for side in ("image", "text")}
    leaves = [model_output[key].requires_grad_() for key in ("image_features", "text_features")]
    before = distributed.collectives()
    value = make(term, head, local_loss=local_loss, **options)(**model_output, output_dict=False)
    value.backward()
    collectives = distributed.collectives() - before
    head.post_step()
    gradient = torch.stack([leaf.grad for leaf in leaves], 1) / ranks
    bank = [head.bank.image, head.bank.ids, head.bank.pointer, head.bank.text_moments.second]
    return float(distributed.all_mean(value)), distributed.gather(gradient), bank, collectives


def both(ranks: int) -> list[Any]:
    results = [step(term, local, ranks) for term in LOSSES for local in (False, True)]
    with pytest.MonkeyPatch.context() as patch:  # as in a large batch, whose ranks weigh their own anchors
        patch.setattr(diversity_weights, "SMALL_BATCH", 0)
        return results + [step(term, True, ranks) for term in LOSSES]


def labelled() -> tuple[Tensor, Tensor, Tensor]:
    """What pgc stashes, where rank 1 would label the pairs of rank 0 differently; and the ranks' losses."""
    rank, ranks = distributed.rank(), distributed.world_size()
    head = prototypes(clusters=5, recluster=12)
    joint = outputs()
    head.centres.recluster(normalize(joint["image_features"] + joint["text_features"], dim=-1))
    rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    model_output = with_logits({key: value[rows] for key, value in joint.items()}, head)
    if rank:
        assign = head.assign
        head.assign = lambda samples: (assign(samples) + 1) % 5  # type: ignore[method-assign]
    value = make("pgc", head)(**model_output)["pgc_loss"]
    stash = head._stashed
    return stash["labels"], stash["samples"], distributed.gather(value.detach()[None])


def test_labels_are_those_of_the_rank_that_owns_the_pair():
    labels, samples, value = labelled()
    (one, one_samples, values), (two, two_samples, _) = gloo.run(labelled)
    assert torch.equal(one, two) and torch.equal(one_samples, two_samples)
    assert torch.equal(one, torch.cat([labels[:4], (labels[4:] + 1) % 5]))
    torch.testing.assert_close(one_samples, samples)
    head = prototypes(clusters=5, recluster=12)
    keys = with_logits(outputs(), head)
    logits = keys["coder_image_logits"], keys["coder_text_logits"]
    want = [pgc_from_logits(*(each[rows] for each in logits), one[rows]) for rows in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(values, torch.stack(want).detach())
    assert value != values.mean()


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    return gloo.run(both, 2)


def test_two_processes_equal_one(on_two):
    alone, (first, second) = both(1), on_two
    for one, two, other in zip(alone, first, second, strict=True):
        assert two[0] == pytest.approx(one[0], rel=1e-10)
        torch.testing.assert_close(two[1], one[1], rtol=1e-10, atol=1e-12)
        for ours, theirs, joint in zip(two[2], other[2], one[2], strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, joint)


def test_two_processes_gather_once(on_two):
    first = on_two[0]
    small, large = first[: 2 * len(LOSSES)], first[2 * len(LOSSES) :]
    tiles = [term for term in LOSSES if "entropy" not in term and "gradient" not in term]
    for (term, local), result in zip([(term, local) for term in LOSSES for local in (False, True)], small, strict=True):
        assert term not in tiles and local or result[3] == 2, (term, local, result[3])
    for term, result in zip(LOSSES, large, strict=True):
        assert result[3] > 2, term  # and the largest weights


DRAWN = 40


def drawn() -> list[tuple[str, bool, bool]]:
    """Terms with options that tiles support, drawn; whether the loss is local; whether the batch counts as large."""
    draw = random.Random(7)
    cases = []
    for _ in range(DRAWN):
        options: dict[str, Any] = {
            "mu": draw.choice((0.02, 0.1, 0.7)),
            "gamma": draw.choice((-0.2, 0.0, 0.3, 0.8)),
            "epsilon": draw.choice((0.01, 0.1, 1.0)),
            "diversity": draw.choice(("std", "std", "none")),
            "positive_weight": draw.choice((1.0, 0.3, "mu")),
            "mask_same_image": draw.random() < 0.7,
        }
        if draw.random() < 0.4:
            options["effective_negatives"] = draw.choice((1, 50))
        name = draw.choice(("dcl", "dcl", "m_dcl", "m_dcl", "concept_dcl"))
        if name == "m_dcl":
            options["reverse"] = draw.choice(("paired", "all", "none"))
        if name != "concept_dcl":
            options["diversity_over"] = draw.choice(("batch", "batch+bank", *(["bank"] if name == "m_dcl" else [])))
        cases.append((expression(name, options), draw.random() < 0.5, draw.random() < 0.5))
    return cases


def drawn_forms(ranks: int, implementation: str) -> list[Any]:
    results = []
    for term, local, large in drawn():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiled, "TILE_ON_CPU", 12)  # several tiles, of unequal sizes
            patch.setattr(tiled, "ONE_TILE", 10)
            patch.setattr(diversity_weights, "SMALL_BATCH", 0 if large else 1 << 22)
            results.append(step(term, local, ranks, implementation=implementation)[:2])
    return results


def test_tiles_on_two_processes_equal_the_reference_on_one():
    alone = drawn_forms(1, "reference")
    for rank in gloo.run(drawn_forms, 2, "tiled"):
        for case, want, got in zip(drawn(), alone, rank, strict=True):
            assert got[0] == pytest.approx(want[0], rel=1e-10), case
            torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-11, msg=lambda text, case=case: f"{case}: {text}")


def test_each_tensor_travels_once(monkeypatch):
    sent: list[list[Tensor]] = []

    def gather_together(tensors: list[Tensor], **_: Any) -> list[Tensor]:
        sent.append(list(tensors))
        return [torch.cat([each, each]) for each in tensors]

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "gather_together", gather_together)
    model_output = outputs()
    make("dcl(diversity_over='batch+bank') + m_dcl + clip", Banks())(**model_output, logit_scale=torch.tensor(3.0))
    (tensors,) = sent
    assert len(tensors) == 5 and all(any(each is value for each in tensors) for value in model_output.values())


def rounded(ranks: int) -> list[Any]:
    return [step("m_dcl", False, ranks, gather_dtype=dtype) for dtype in ("exact", "bfloat16")]


def test_features_and_gradients_rounded_on_the_way():
    (value, gradient, _, collectives), (short, near, bank, same) = gloo.run(rounded, 2)[0]
    assert collectives == same == 2
    assert 0 < abs(short - value) < 0.02 and 0 < (near - gradient).abs().max() < 0.02
    assert torch.equal(bank[0][3:11], bank[0][3:11].bfloat16().double())  # the keys of all ranks are the rounded ones
    assert near.dtype == torch.float64
    with pytest.raises(ValueError, match="gather_dtype must be one of exact, bfloat16, got 'float16'"):
        make("m_dcl", Banks(), gather_dtype="float16")
