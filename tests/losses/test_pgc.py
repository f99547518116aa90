"""Prototype-guided classification: values, derivatives, precision, its term with the prototypes, and two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import pgc
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.heads.prototypes import Prototypes
from coder_plugin.losses.pgc import PGC, pgc_from_logits
from tests import gloo
from tests.losses.checks import compiles
from tests.losses.drawn import (
    D,
    close,
    drawing,
    make_loss,
    outputs,
    pair,
    penalised,
    rows,
    second_order,
    share,
    transforms,
    value_and_gradient,
    vectors,
)

LABELS = torch.tensor([0, 3, 3, 1, 2])
CONCEPTS = (*pair(5, 3), rows(drawing(1), 4, 3))  # and a classifier


# -- the function ----------------------------------------------------------------------------------------------------


def test_expected_value() -> None:
    z = vectors("pgc")
    close(pgc(z["image_concepts"], z["text_concepts"], z["classifier"], z["labels"]), z["loss"])


def test_value_by_hand() -> None:
    """Two prototypes, logits 1 and 0 for the image, 0 and 0 for the text."""
    image, text = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    got = pgc(image, text, torch.eye(2), torch.tensor([0]))
    assert got.item() == pytest.approx(math.log(1 + math.exp(-1)) + math.log(2), rel=1e-6)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 7), st.integers(0, 999))
def test_equal_to_the_slow_reference(n: int, f: int, k: int, seed: int) -> None:
    generator = drawing(seed)
    sides, classifier = (rows(generator, n, f), rows(generator, n, f)), 9 * rows(generator, k, f)
    labels = torch.randint(k, (n,), generator=generator)
    want = 0.0
    for side in sides:
        for row, label in zip(side.tolist(), labels.tolist(), strict=True):
            logits = [math.fsum(a * b for a, b in zip(row, own, strict=True)) for own in classifier.tolist()]
            want += (math.log(math.fsum(map(math.exp, logits))) - logits[label]) / n
    close(pgc(*sides, classifier, labels), want)


def test_derivatives() -> None:
    loss = lambda *x: pgc(*x, LABELS)  # noqa: E731
    second_order(loss, *CONCEPTS)
    transforms(loss, *CONCEPTS)
    assert all(each.isfinite().all() for each in penalised(loss, *CONCEPTS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_raised_also_under_autocast(dtype: torch.dtype) -> None:
    concepts, raised = [each.to(dtype) for each in CONCEPTS], torch.promote_types(dtype, torch.float32)
    want = pgc(*(each.to(raised) for each in concepts), LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = pgc(*concepts, LABELS)
    assert got.dtype == raised and torch.equal(got, want) and torch.equal(pgc(*concepts, LABELS), want)


@pytest.mark.parametrize("scale", [0.0, 1e-10, 1e3])
def test_degenerate_batches_stay_finite(scale: float) -> None:
    for n in (1, 5):
        v, w, classifier = CONCEPTS
        results = value_and_gradient(lambda *x, n=n: pgc(*x, LABELS[:n]), v[:n] * scale, w[:n] * scale, classifier * scale)
        assert all(each.isfinite().all() for each in results)


def test_compiled_without_a_graph_break() -> None:
    compiles(lambda *x: pgc(*x, LABELS), *CONCEPTS)


V, W, C, L = torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((V, W, C, L), r"image_concepts and text_concepts must have one shape \[n, f\], got \(2, 3\) and \(1, 3\)"),
        ((V[0], V[0], C, L), r"image_concepts and text_concepts must have one shape \[n, f\], got \(3,\)"),
        ((V, V, C[:, :2], L), r"classifier must be \[k, 3\], got \(4, 2\)"),
        ((V, V, C[0], L), r"classifier must be \[k, 3\], got \(3,\)"),
        ((V, V, C, L[:1]), r"labels must be integers of shape \(2,\), got torch.int64 \(1,\)"),
        ((V, V, C, L.float()), r"labels must be integers of shape \(2,\), got torch.float32 \(2,\)"),
        ((V[:0], V[:0], C, L[:0]), "labels and logits hold no pair"),
        ((V, V, C + 1e30, L), "classifier holds values of 1.0e[+]30, which overflow"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_bad_input_is_named(arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        pgc(*arguments)


# -- the term --------------------------------------------------------------------------------------------------------


def prototypes(*, clustered: bool = False) -> Prototypes:
    torch.manual_seed(3)
    head = Prototypes(BackboneInfo(embed_dim=D), clusters=5, recluster=18)
    if clustered:
        head.centres.recluster(samples_of(outputs()))
    return head


def samples_of(batch: dict[str, Tensor]) -> Tensor:
    return normalize((batch["image_features"] + batch["text_features"]).float(), dim=-1).detach()


def with_logits(batch: dict[str, Tensor], head: Prototypes) -> dict[str, Tensor]:
    batch = {key: each.float() if each.is_floating_point() else each for key, each in batch.items()}
    return {**batch, **head(*(batch[key] for key in head.requires))}


def test_silent_until_the_pairs_are_clustered_and_then_its_function() -> None:
    batch, head = outputs(), prototypes()
    loss = make_loss("pgc", {"prototypes": head})
    for _ in range(2):
        value = loss(**with_logits(batch, head))["pgc_loss"]
        (gradient,) = torch.autograd.grad(value, head.classifier.weight)
        assert value == 0 and not gradient.any()  # a gradient, as DDP asks, of zero
        head.post_step()
    got = loss(**with_logits(batch, head))["pgc_loss"]
    labels = (samples_of(batch) @ head.centres.centres.T).argmax(1)
    assert len(labels.unique()) > 3
    concepts = [batch[f"coder_{side}_concepts"].float() for side in ("image", "text")]
    weight = head.classifier.weight
    want = pgc(*concepts, weight, labels)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, weight)[0] for value in (got, want)))


def test_samples_and_labels_are_stashed_once_and_written_after_the_step() -> None:
    batch, head = outputs(), prototypes(clustered=True)
    loss, before = make_loss("pgc", {"prototypes": head}), head.centres.counts.sum().item()
    outputs_of_model = with_logits(batch, head)
    loss(**outputs_of_model), loss(**outputs_of_model)
    assert head.passed == 0 and head.centres.counts.sum() == before
    head.post_step(), head.post_step()
    assert head.passed == 12 and head.centres.counts.sum() == before + 12
    torch.testing.assert_close(head.recent[:12], samples_of(batch).half())
    assert torch.equal(head.recent_labels[:12], outputs_of_model["coder_prototype_labels"])


def test_what_the_term_needs_and_supports() -> None:
    keys = ("coder_image_logits", "coder_text_logits", "coder_prototype_labels")
    assert PGC().requires == ("image_features", "text_features", *keys)
    assert PGC().gathers == ("image_features", "text_features", "coder_prototype_labels")
    assert not PGC().optional and PGC().supports == {"same_image"}
    with pytest.raises(TypeError):
        PGC(mu=1)  # it has no options
    with pytest.raises(CoderError, match="loss 'pgc' does not support gather='ring': take gather='all'"):
        make_loss("pgc", {"prototypes": prototypes()}, gather="ring")


def test_a_model_that_lacks_prototypes_is_named() -> None:
    batch, head = outputs(), prototypes()
    loss = make_loss("pgc", {"prototypes": head})
    with pytest.raises(CoderError, match="loss 'pgc' needs coder_image_logits, coder_text_logits, coder_prototype_labels"):
        loss(**batch)

    class Logits(Head):
        provides = Prototypes.provides

    with pytest.raises(CoderError, match="PGC needs a head with centres; 'prototypes' has none"):
        make_loss("pgc", {"prototypes": Logits()})(**with_logits(batch, head))


# -- two ranks -------------------------------------------------------------------------------------------------------


def step(*, turned: bool = False, local_loss: bool = False) -> dict[str, Any]:
    """A step with this rank's share; ``turned``: where rank 1 labels its pairs differently."""
    head, own = prototypes(clustered=True), share(outputs())
    batch = with_logits(own, head)
    if turned and distributed.rank():
        batch["coder_prototype_labels"] = (batch["coder_prototype_labels"] + 1) % 5
    before = distributed.collectives()
    value = make_loss("pgc", {"prototypes": head}, local_loss=local_loss)(**batch)["pgc_loss"]
    gradients = torch.autograd.grad(value, [head.classifier.weight, batch["coder_image_logits"]])
    result = {"value": value.item(), "gradient": gradients[0], "collectives": distributed.collectives() - before}
    result |= {"stash": {**head._stashed}, "logits": [batch[key].detach() for key in PGC.requires[2:4]]}
    head.post_step()
    return {**result, "centres": head.centres.centres}


def work() -> list[dict[str, Any]]:
    return [step(), step(local_loss=True), step(turned=True)]


def test_two_ranks_equal_one_process_with_the_joint_batch() -> None:
    """The mean over the ranks' own pairs; all ranks write the samples and labels of all, each labelled by its owner."""
    alone, ranks = step(), gloo.run(work)
    for one, two in zip(*(each[:2] for each in ranks), strict=True):
        close((one["value"] + two["value"]) / 2, alone["value"], rtol=1e-5, atol=0)
        torch.testing.assert_close((one["gradient"] + two["gradient"]) / 2, alone["gradient"])
        assert one["value"] != two["value"] and one["collectives"] == 1  # nothing flows back to the features
        for each in (one, two):
            assert torch.equal(each["stash"]["labels"], alone["stash"]["labels"])
            torch.testing.assert_close(each["stash"]["samples"], alone["stash"]["samples"])
        assert torch.equal(one["centres"], two["centres"])
        torch.testing.assert_close(one["centres"], alone["centres"])
    one, two = (each[2] for each in ranks)
    labels = alone["stash"]["labels"]
    turned = torch.cat([labels[:6], (labels[6:] + 1) % 5])
    for each, rows_of_rank in ((one, slice(0, 6)), (two, slice(6, 12))):
        assert torch.equal(each["stash"]["labels"], turned)
        close(each["value"], pgc_from_logits(*each["logits"], turned[rows_of_rank]).item(), rtol=1e-6, atol=0)
    want = sum(cross_entropy(torch.cat(sides), turned) for sides in zip(one["logits"], two["logits"], strict=True))
    close((one["value"] + two["value"]) / 2, want, rtol=1e-6, atol=0)
