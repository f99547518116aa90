"""The concept head against its equations in loops, with a graph and matrices that are not symmetric (CODER eq. 2, 12-14)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from coder_plugin.concepts import Vocabulary
from coder_plugin.concepts.graph import concept_graph
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.concepts import Concepts

SIZES = BackboneInfo(embed_dim=4, image_tokens=4, text_tokens=5)
#: Captions with each pair of the words x, y, z, and with each word. z implies x and y, which do not imply z.
TOGETHER, COUNTS = [[0, 10, 2], [10, 0, 2], [2, 2, 0]], [20, 20, 4]
#: Edges x -> y, y -> x, z -> x, z -> y; z has two, so its row is divided by the root of 2.
GRAPH = [[1, 1, 0], [1, 1, 0], [math.sqrt(0.5), math.sqrt(0.5), 1]]


@pytest.fixture
def head(tmp_path: Path) -> Concepts:
    vectors = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    types = ("object", "motion", "property")
    words = Vocabulary(("x", "y", "z"), types, torch.tensor(COUNTS), torch.tensor(TOGETHER), vectors, (), {})
    words.save(tmp_path / "words.safetensors")
    torch.manual_seed(1)
    return Concepts(SIZES, vocabulary=str(tmp_path / "words.safetensors")).eval()


def given(seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return {
        "image_pooled": torch.randn(2, 4, generator=generator),
        "text_tokens": torch.randn(2, 3, 5, generator=generator),
        "text_mask": mask,
    }


def set_weights(head: Concepts) -> None:
    """W^v and W^w that are neither symmetric nor equal."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (head.image_weight, head.text_weight):
            weight.copy_(torch.randn(4, 4, generator=generator))


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def mixture(query: np.ndarray, weight: np.ndarray, concepts: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One sample's attention and embedding, eq. 14."""
    units = [concept / np.linalg.norm(concept) for concept in concepts]
    query = query / np.linalg.norm(query)
    logits = [
        scale * sum(query[row] * weight[row, column] * unit[column] for row in range(4) for column in range(4))
        for unit in units
    ]
    exponentials = [math.exp(logit) for logit in logits]
    attention = np.array(exponentials) / sum(exponentials)
    total = sum(share * unit for share, unit in zip(attention, units, strict=True))
    return attention, total / np.linalg.norm(total)


def test_the_graph_goes_from_a_word_to_those_that_it_implies(head: Concepts) -> None:
    graph = concept_graph(torch.tensor(TOGETHER), torch.tensor(COUNTS).double())
    np.testing.assert_allclose(graph, GRAPH, atol=1e-12)
    np.testing.assert_allclose(head.graph, GRAPH, atol=1e-6)


def test_concepts_take_in_their_neighbours(head: Concepts) -> None:
    """Y_i = LeakyReLU(sum_j A_ij W x_j) with slope 0.2."""
    vectors, weight = array(head.vectors), array(head.convolutions[0].weight)
    want = np.zeros((3, 4))
    for i in range(3):
        for j in range(3):
            want[i] += GRAPH[i][j] * (weight @ vectors[j])
    np.testing.assert_allclose(array(head.concepts()), np.where(want > 0, want, 0.2 * want), rtol=1e-4, atol=1e-5)


def test_each_modality_attends_with_its_own_matrix_and_lambda_10(head: Concepts) -> None:
    set_weights(head)
    features = given()
    out = head(**features)
    pooled = head.text_pool(features["text_tokens"], features["text_mask"])
    queries = {"image": head.image_query(features["image_pooled"]), "text": head.text_query(pooled)}
    for side, query in queries.items():
        weight = array(getattr(head, f"{side}_weight"))
        for row in range(2):
            attention, embedding = mixture(array(query)[row], weight, array(head.concepts()), 10.0)
            for found, want in (
                (getattr(head, f"{side}_attention")(features), attention),
                (getattr(head, f"{side}_block")(features), embedding),
                (out[f"coder_{side}_concepts"], embedding),
            ):
                np.testing.assert_allclose(array(found)[row], want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_matrix_is_for_one_modality(head: Concepts, side: str) -> None:
    """Its gradient comes from that modality alone, in forward, block and attention."""
    set_weights(head)
    other = {"image": "text", "text": "image"}[side]
    for read in (
        lambda name: head(**given())[f"coder_{name}_concepts"],
        lambda name: getattr(head, f"{name}_block")(given()),
        lambda name: getattr(head, f"{name}_attention")(given()),
    ):
        for name, moves in ((side, True), (other, False)):
            (gradient,) = torch.autograd.grad(
                read(name).square()[:, 0].sum(), [getattr(head, f"{side}_weight")], allow_unused=True
            )
            assert (gradient is not None and gradient.abs().max() > 1e-6) == moves
