"""The loss of the concept embeddings: twice dcl, with its options."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl
from coder_plugin.losses.concept_dcl import ConceptDCL
from coder_plugin.losses.dcl import DCL
from tests.losses.drawn import (
    FORMS,
    close,
    collectives,
    every_way_equals_one_process,
    expression,
    make_loss,
    outputs,
    pair,
    penalty_of_forms,
    same_options,
    second_order,
    transforms,
)
from tests.references import dcl as reference

KEYS = ("coder_image_concepts", "coder_text_concepts")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mu": 0.07, "gamma": 0.1, "epsilon": 0.4, "positive_weight": "mu"},
    {"diversity": "none"},
    {"diversity": "entropy", "epsilon": 2.0},
    {"diversity_gradient": True, "epsilon": 0.5},
    {"effective_negatives": 40},
    {"mask_same_image": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_twice_the_loss_of_the_concept_embeddings(options: dict[str, Any]) -> None:
    """L(V_C, W_C) + L(W_C, V_C), each with both directions (CODER, below eq. 14): by a slow reference, and by dcl."""
    batch = outputs()
    got = make_loss(expression("concept_dcl", options), local_loss="mu" in options)(**batch)
    assert got.keys() == {"concept_dcl_loss"}
    passed = dict(options)
    ids = batch["coder_ids"] if passed.pop("mask_same_image", True) else None
    want = 2 * dcl(*(batch[key] for key in KEYS), image_ids=ids, **passed)
    leaves = [batch[key] for key in KEYS]
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (got["concept_dcl_loss"], want)), strict=True):
        close(one, other)
    if not {"effective_negatives", "diversity_gradient"} & passed.keys():
        images, texts = (batch[key].tolist() for key in KEYS)
        listed = None if ids is None else ids.tolist()
        want = reference.dcl(images, texts, listed, **passed) + reference.dcl(texts, images, listed, **passed)
    close(got["concept_dcl_loss"].detach(), want if isinstance(want, float) else want.detach())


def test_derivatives() -> None:
    v, w = pair(4, 3)

    def loss(v: Tensor, w: Tensor, implementation: Any) -> Tensor:
        term = ConceptDCL()
        term.implementation = implementation
        return term(v, w, torch.tensor([1, 2, 1, 3]))

    penalty_of_forms(loss, v, w)
    for form in FORMS:
        transforms(lambda *x, form=form: loss(*x, implementation=form), v, w)
    through = ConceptDCL(diversity_gradient=True)
    second_order(lambda *x: through(*x), v, w)


def test_half_embeddings_under_autocast() -> None:
    halves = [each.bfloat16() for each in pair(8, 6)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ConceptDCL()(*halves)
    assert got.dtype == torch.float32 and torch.equal(got, 2 * dcl(*(each.float() for each in halves)))


def test_options_and_needs() -> None:
    """The options of dcl; of the term's own, none that needs the banks or hard negatives."""
    options = set(inspect.signature(ConceptDCL).parameters)
    rest = set(inspect.signature(dcl).parameters) - options - {"image_features", "text_features"}
    same_options(ConceptDCL, dcl, only_term={"mask_same_image"}, only_function=rest)
    assert set(inspect.signature(DCL).parameters) - options == {"diversity_over", "hard_negatives"}
    term = ConceptDCL()
    assert (term.requires, term.optional, term.gathers) == (KEYS, ("coder_ids",), (*KEYS, "coder_ids"))
    assert term.supports == {"same_image", "views", "ring"}
    assert ConceptDCL(diversity="entropy").supports == {"same_image", "views"}
    assert ConceptDCL(mask_same_image=False).optional == ()
    with pytest.raises(ValueError, match="mu must be > 0 and finite, got nan"):
        ConceptDCL(mu=float("nan"))
    with pytest.raises(CoderError, match="loss 'concept_dcl' needs coder_text_concepts, which the model did not return"):
        make_loss("concept_dcl")(coder_image_concepts=torch.eye(2))
    with pytest.raises(CoderError, match="does not support gather='ring'"):
        make_loss("concept_dcl(diversity=entropy)", gather="ring")


def test_ranks_equal_one_process_with_the_joint_batch() -> None:
    terms = ("concept_dcl()", expression("concept_dcl", OPTIONS[1]))  # test_dcl.py has its options on ranks
    every_way_equals_one_process(terms, ranks=2)
    assert collectives(terms, "concept_dcl()") == {"all": 2, "local": 2, "large": 3, "ring": 12}
