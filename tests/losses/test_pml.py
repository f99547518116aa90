"""pytorch-metric-learning's losses as terms: equal to the library called directly, on one process and on two."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses, miners
from torch import Tensor

import coder_plugin
from coder_plugin import CoderError, create_loss, create_model, registry
from coder_plugin.losses.pml import PML, library
from coder_plugin.objective import Objective
from tests import gloo
from tests.test_follow import batch

IDS = torch.tensor([2**62 + 5, 9, 2**62 + 5, 3, 11, 4])


def features(seed: int = 0, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [F.normalize(torch.randn(rows, 8, generator=generator), dim=1) for _ in range(2)]
    return draw[0].requires_grad_(), draw[1].requires_grad_()


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


#: Options of losses that need some.
REQUIRED = {"RankedListLoss": {"margin": 0.4, "Tn": 10}, "HistogramLoss": {"n_bins": 20}}


def usable() -> list[str]:
    """The losses of the library that can be terms."""
    found = []
    for name, value in sorted(vars(losses).items()):
        if isinstance(value, type):
            try:
                library(name)(**REQUIRED.get(name, {}))
            except CoderError:
                continue
            found.append(name)
    return found


USABLE = usable()


def test_what_can_be_a_term() -> None:
    assert len(USABLE) > 15 and {"NTXentLoss", "MultiSimilarityLoss", "TripletMarginLoss", "SupConLoss"} <= {*USABLE}
    assert not {"ArcFaceLoss", "ProxyNCALoss", "VICRegLoss", "DynamicSoftMarginLoss", "SmoothAPLoss"} & {*USABLE}


@pytest.mark.parametrize("name", USABLE)
def test_equal_to_the_library(name: str) -> None:
    """Value and gradients of images and texts as one batch, labelled by the ids."""
    options = REQUIRED.get(name, {})
    images, texts = features()

    def direct(images: Tensor, texts: Tensor) -> Tensor:
        torch.manual_seed(0)  # some sample
        return getattr(losses, name)(**options)(torch.cat([images, texts]), torch.cat([IDS, IDS]))

    def term(images: Tensor, texts: Tensor) -> Tensor:
        torch.manual_seed(0)
        return library(name)(**options)(images, texts, IDS)

    found = value_and_gradients(term, images, texts)
    assert all(map(torch.equal, found, value_and_gradients(direct, images, texts)))
    assert found[1].abs().sum() > 0, "no gradient compares nothing"


def test_objects_with_a_miner() -> None:
    images, texts = features()
    embeddings, labels = torch.cat([images, texts]), torch.cat([IDS, IDS])
    loss, miner = losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner(epsilon=0.01)
    expected = loss(embeddings, labels, miner(embeddings, labels))
    assert torch.equal(PML(loss, miner=miner)(images, texts, IDS), expected) and expected != PML(loss)(images, texts, IDS)
    again = IDS.clone()
    across = miner(images, IDS, texts, again), miner(texts, IDS, images, again)
    expected = (loss(images, IDS, across[0], texts, again) + loss(texts, IDS, across[1], images, again)) / 2
    assert torch.equal(PML(loss, miner=miner, pairs="image-text")(images, texts, IDS), expected)


def test_in_a_loss_expression(tiny_model: str) -> None:
    expression = "dcl + 0.5*pml.NTXentLoss(temperature=0.05) + pml.TripletMarginLoss(margin=0.1,pairs=image-text)"
    torch.manual_seed(0)
    model = create_model(tiny_model, loss=expression).train()
    assert list(model.coder.heads) == ["ids"]
    outputs = model(**batch())
    found = create_loss(expression, model=model)(**outputs)
    assert list(found) == ["dcl_loss", "pml_NTXentLoss_loss", "pml_TripletMarginLoss_loss"]
    images, texts, ids = (outputs[key] for key in ("image_features", "text_features", "coder_ids"))
    direct = losses.NTXentLoss(temperature=0.05)(torch.cat([images, texts]), torch.cat([ids, ids]))
    assert torch.equal(found["pml_NTXentLoss_loss"], 0.5 * direct)
    sum(found.values()).backward()
    assert model.visual.proj.grad.abs().sum() > 0
    objective = Objective.parse(expression)
    assert Objective.from_dict(objective.to_dict()) == objective and Objective.parse(str(objective)) == objective
    changed = objective.with_options({"pml.NTXentLoss.temperature": 0.2})
    assert "pml.NTXentLoss(temperature=0.2)" in str(changed)
    objects = ["dcl", (0.5, PML(losses.NTXentLoss(temperature=0.05)))]
    model = create_model(tiny_model, loss=objects).train()
    assert list(create_loss(objects, model=model)(**model(**batch()))) == ["dcl_loss", "pml_loss"]


@pytest.mark.parametrize(
    "expression, message",
    [
        ("pml.NTXentLos", "no loss 'NTXentLos'; did you mean 'NTXentLoss'"),
        ("pml.NTXentLoss(mu=1)", "column 16: .*no option 'mu'; it has: temperature, pairs"),
        ("pml.NTXentLoss(pairs=text)", "pairs=text must be all or image-text"),
        ("pml.RankedListLoss", "missing required option margin=…, Tn=…"),
        ("pml.ArcFaceLoss", "ArcFaceLoss cannot be a term: it owns parameters.* take a loss of pairs"),
        ("pml.ManifoldLoss(l=8)", "ManifoldLoss cannot be a term: it owns parameters"),
        ("pml.TupletMarginLoss(margin=wide)", "refuses them: .*Error: "),
        ("pml.DynamicSoftMarginLoss", "keeps a histogram of earlier batches"),
        ("pml.VICRegLoss", "compares two views without labels"),
        ("pmls.NTXentLoss", "unknown loss or objective 'pmls.NTXentLoss'"),
        ("pml", "unknown loss or objective 'pml'"),
    ],
)
def test_what_is_refused(expression: str, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        Objective.parse(expression)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(CoderError, match="pml.NTXentLoss needs pytorch-metric-learning: pip install "):
        Objective.parse("pml.NTXentLoss")
    monkeypatch.undo()
    library.cache_clear()


def test_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any package can bring a library; its prefix is not a loss, and a loss of that name wins."""

    class Zero(torch.nn.Module):
        requires = ("image_features",)

        def forward(self, image_features: Tensor) -> Tensor:
            return 0 * image_features.sum()

    coder_plugin.register("loss_libraries", "theirs", {"Zero": Zero}.__getitem__)
    try:
        assert Objective.parse("theirs.Zero").terms[0].name == "theirs.Zero" and registry.is_loss("theirs.Zero")
        assert not registry.is_loss("theirs") and "theirs.Zero" not in registry.names("losses")
    finally:
        registry.unregister("loss_libraries", "theirs")
    assert not registry.is_loss("theirs.Zero")


EXPRESSION = "pml.NTXentLoss(temperature=0.1) + pml.MultiSimilarityLoss(pairs=image-text)"


def on_ranks(tiny_model: str) -> list[Tensor]:
    """The loss of half of a batch on each rank, and the gradients that DDP would average."""
    return compute(tiny_model, torch.distributed.get_rank(), torch.distributed.get_world_size())


def compute(tiny_model: str, rank: int, ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = create_model(tiny_model, loss=EXPRESSION).train()
    rows = slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
    share = {key: value[rows] for key, value in batch().items()}
    share["image_id"] = torch.tensor([7, 8, 7, 9])[rows]
    loss = create_loss(EXPRESSION, model=model)(output_dict=False, **model(**share))
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def test_two_ranks_equal_one_process(tiny_model: str) -> None:
    first, second = gloo.run(on_ranks, tiny_model)
    alone = compute(tiny_model, 0, 1)
    mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    torch.testing.assert_close(mean, alone)
    assert not torch.allclose(first[1], second[1])
