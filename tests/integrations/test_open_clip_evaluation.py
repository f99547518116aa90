"""Validation in upstream's loop: recall with several captions an image, in little memory, by the vectors of the score."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs the extra open-clip", exc_type=ImportError)

from open_clip_train import train

import coder_plugin
from coder_plugin.integrations.open_clip import adapted
from coder_plugin.integrations.open_clip import model as in_upstream
from coder_plugin.integrations.open_clip.data import pack
from coder_plugin.integrations.open_clip.evaluation import Collected
from coder_plugin.integrations.open_clip.model import VECTORS
from coder_plugin.objective import Objective
from tests.references import recall as reference


def collect(images: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor, batch: int = 7) -> Collected:
    """Pairs as validation meets them, batch by batch."""
    collected = Collected()
    for start in range(0, len(ids), batch):
        rows = slice(start, start + batch)
        values = (images[rows], texts[rows], ids[rows])
        collected.hook(None, None, {"image_features": None, **dict(zip(VECTORS, values, strict=True))})
    return collected


@pytest.mark.parametrize("seed", range(4))
def test_metrics_are_the_reference(seed: int) -> None:
    """Images of one to five captions in any order, with ties; ids of 63 bits."""
    torch.manual_seed(seed)
    captions = torch.randint(1, 6, (12,))
    image = torch.arange(12).repeat_interleave(captions)[torch.randperm(int(captions.sum()))]
    ids = torch.randint(0, 2**63 - 1, (12,))
    vectors, texts = torch.randint(-2, 3, (12, 4)).float(), torch.randint(-2, 3, (len(image), 4)).float()
    found = collect(vectors[image], texts, ids[image]).metrics()
    expected = reference.recall((vectors @ texts.T).tolist(), image.tolist())
    for ours, name in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
        for k in (1, 5, 10):
            assert found[f"{name}_R@{k}"] == pytest.approx(expected[f"{ours}_r{k}"] / 100)
        assert found[f"{name}_mean_rank"] == pytest.approx(expected[f"{ours}_meanr"])
        assert found[f"{name}_median_rank"] == expected[f"{ours}_medr"]
    assert found["rsum"] == pytest.approx(expected["rsum"]) and found["num_images"] == 12


def test_without_a_run_upstreams_metrics_stay() -> None:
    images = F.normalize(torch.randn(9, 4), dim=-1)
    asked = {"image_features": images, "text_features": images, "logit_scale": torch.tensor(1.0)}
    before = train.get_clip_metrics(**asked)
    with adapted() as adapter:
        assert train.get_clip_metrics(**asked) == before
        adapter.run, adapter.collected = SimpleNamespace(), collect(images, images, torch.arange(9))  # type: ignore[assignment]
        assert train.get_clip_metrics(**asked)["rsum"] == 600
    assert train.get_clip_metrics(**asked) == before


class Largest(TorchDispatchMode):
    """How many values the largest tensor has that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        self.values = max([self.values, *(each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor))])
        return made


def test_memory_is_that_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 pairs upstream ranks a matrix of 10^8 scores, with 23 bytes for each; ours has 4 million at a time, where one
    product for both directions would be larger than a limit."""
    monkeypatch.setattr("coder_plugin.evaluation.metrics._WHOLE", 10**7)
    images, texts = torch.randn(10_000, 8), torch.randn(10_000, 8)
    collected = collect(images, texts, torch.arange(10_000) // 5, batch=1000)
    with Largest() as largest:
        assert collected.metrics()["num_images"] == 2000
    assert len(texts) * 10 < largest.values <= 2**22


@pytest.mark.parametrize("aggregator", ["tower", "gpo"])
@pytest.mark.parametrize("objective", ["clip", "coder"])
def test_vectors_are_those_that_the_model_retrieves_by(tiny_model: str, objective: str, aggregator: str) -> None:
    made = Objective.parse(objective)
    if objective == "coder":
        made = made.with_options({"concepts.vocabulary": "scenes", "prototypes.clusters": 3})
    model = coder_plugin.create_model(tiny_model, loss=made, aggregator=aggregator)
    model = in_upstream.extend(model, ()).eval()
    images, texts = torch.randn(3, 3, 64, 64), torch.randint(1, 40000, (3, 40))
    ids = torch.tensor([7, 7, 2**62])
    packed = torch.stack([pack(text, {"image_id": own}, ()) for text, own in zip(texts, ids, strict=True)])
    with torch.no_grad():
        outputs = model(images, packed)
        plain = model(images, texts)
        image, text = model.embed_image(images), model.embed_text(texts)
    torch.testing.assert_close(outputs[VECTORS[0]], image)
    torch.testing.assert_close(outputs[VECTORS[1]], text)
    assert torch.equal(outputs[VECTORS[2]], ids)
    assert (image.shape[1] > 32) == (objective == "coder"), "concepts' block"
    assert set(plain) == set(outputs) - set(VECTORS), "upstream's keys"
    torch.testing.assert_close(outputs["image_features"], plain["image_features"])
