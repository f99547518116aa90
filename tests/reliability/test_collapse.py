"""Collapse is measured, and reported once for each time it lasts."""

from __future__ import annotations

import logging

import pytest
import torch

from coder_plugin import Trainer
from coder_plugin.training.collapse import PATIENCE, CollapseWatch, spread

SOUND = {"image_rank": 3.0, "text_rank": 3.0, "similarity_deviation": 0.1}


def by_eigenvalues(rows: torch.Tensor) -> float:
    """The participation ratio of the Gram matrix's eigenvalues, in float64."""
    rows = rows.double() / rows.double().norm(dim=1, keepdim=True)
    values = torch.linalg.eigvalsh(rows @ rows.T)
    return float(values.sum() ** 2 / values.square().sum())


@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (4, 9), (3, 2, 5)])
def test_figures_equal_their_definition(shape) -> None:
    torch.manual_seed(0)
    images, texts = 3 * torch.randn(shape), torch.randn(shape[0], shape[-1]) + 1
    figures = spread({"image_features": images, "text_features": texts, "logit_scale": torch.tensor(2.0)})
    flat = images.reshape(-1, shape[-1])
    assert figures["image_rank"] == pytest.approx(by_eigenvalues(flat), rel=1e-5)
    assert figures["text_rank"] == pytest.approx(by_eigenvalues(texts), rel=1e-5)
    cosines = [torch.cosine_similarity(v, t, dim=0).item() for v in flat.double() for t in texts.double()]
    mean = sum(cosines) / len(cosines)
    deviation = (sum((cosine - mean) ** 2 for cosine in cosines) / len(cosines)) ** 0.5
    assert figures["similarity_deviation"] == pytest.approx(deviation, abs=1e-6)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({**SOUND, "image_rank": 1.01}, "all image embeddings of the batch point in one direction at step"),
        ({**SOUND, "text_rank": 1.0}, "all text embeddings of the batch point in one direction at step"),
        ({**SOUND, "similarity_deviation": 1e-3}, "all similarities of the batch are equal at step"),
    ],
)
def test_a_warning_for_each_change_of_state(metrics, said) -> None:
    watch = CollapseWatch(warmup=10)
    assert [watch.update(step, metrics) for step in range(10)] == [None] * 10
    told = [watch.update(10 + step, metrics) for step in range(10)]
    assert [number for number, text in enumerate(told) if text] == [PATIENCE - 1]
    assert told[PATIENCE - 1].startswith(said) and "lower --lr" in told[PATIENCE - 1]
    assert watch.update(30, SOUND) is None
    told = [watch.update(40 + step, metrics) for step in range(5)]
    assert [number for number, text in enumerate(told) if text] == [PATIENCE - 1]


def train(tmp_path, model: str, **options: object) -> list[float]:
    """Steps at a constant rate, a line for each; the image embeddings' effective rank at the steps."""
    ranks = []

    class Logged(Trainer):
        def training_step(self, batches):
            metrics = super().training_step(batches)
            ranks.append(metrics["image_rank"])
            return metrics

    base = {"batch_size": 16, "train_num_samples": 320, "workers": 0, "logs": str(tmp_path), "epochs": 1, "warmup": 2}
    base |= {"lr_scheduler": "const", "val_frequency": 0, "log_every_n_steps": 1, "model": model}
    loss = options.pop("loss")
    Logged(model=model, loss=loss, train="scenes", config={**base, **options}).run()
    return ranks


@pytest.mark.slow
def test_a_run_that_collapses_says_so(tmp_path, tiny_model, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        ranks = train(tmp_path, tiny_model, loss="triplet(reduction=sum)", lr=3e-2)
    assert min(ranks) < 1.02
    assert sum("the model has collapsed" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("loss", ["clip", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("dcl", "vse-infinity"))])
def test_a_run_that_learns_does_not(tmp_path, tiny_model, caplog, loss) -> None:
    with caplog.at_level(logging.WARNING):
        train(tmp_path, tiny_model, loss=loss, lr=1e-3, train_num_samples=160)
    assert "collapsed" not in caplog.text
