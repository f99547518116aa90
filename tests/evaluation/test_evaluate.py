"""Encoding for re-ranking and the command's rows, with a head whose score of a pair is the mean product of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coder_plugin.cli.eval import Command, analyses_of, evaluate_command
from coder_plugin.config import DataConfig
from coder_plugin.data import open_source
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import compare, metrics, recall, recall_from_embeddings, rerank
from coder_plugin.evaluation.evaluate import ensemble, evaluate, measure
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.fusion import Fusion
from coder_plugin.pretrained.encode import Encoded, Encoder, Items
from tests import gloo, region_model
from tests.training import region_data

FIGURES = set(metrics.METRICS) | {"images", "texts"}


class Means(Reranks):
    """Scores a pair by the product of its mean region and its mean word."""

    def image_item(self, known: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": known["image_tokens"], "mask": known["image_mask"], "whole": known["image_pooled"]}

    def text_item(self, known: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": known["text_tokens"], "mask": known["text_mask"]}

    def scorer(self, images: dict[str, Tensor], texts: dict[str, Tensor]) -> MeansScorer:
        assert not self.training and not torch.is_grad_enabled()
        return MeansScorer(images, texts)


class MeansScorer:
    def __init__(self, images: dict[str, Tensor], texts: dict[str, Tensor]) -> None:
        self.images, self.texts = (mean(side["tokens"], side["mask"]) for side in (images, texts))

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        return torch.einsum("gad,gbd->gab", self.images[image_index], self.texts[text_index])

    def all_pairs(self) -> Tensor:
        return self.images @ self.texts.T


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    return (tokens.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def make_encoder(
    data: str, *, fusion: bool = True, seed: int = 0, batch_size: int = 5, loss: str = "dcl"
) -> tuple[Encoder, Any]:
    """Of a fresh model and 24 images of five captions, of lengths that differ from batch to batch."""
    source = open_source(data, split="dev")
    model = region_model.make(loss, seed=seed)
    if fusion:
        model.coder.heads["means"] = Means()
    made = {"device": torch.device("cpu"), "batch_size": batch_size, "workers": 0}
    return Encoder(model, model.tokenizer(), model.transform(), **made), source


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return region_data.write_precomp(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def encoded(data: str) -> Encoded:
    encoder, source = make_encoder(data)
    return encoder(source)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in metrics.METRICS}


def test_items_are_each_images_and_captions_own(data: str, encoded: Encoded) -> None:
    encoder, source = make_encoder(data)
    items = encoded.items
    assert isinstance(items, Items) and items.head.training  # as it was
    captions: list[str] = []
    model = encoder.model.eval()
    for number, (_, item) in enumerate(source.items()):
        with torch.no_grad():
            known = model.describe_image({key: value[None] for key, value in encoder.transform(item.load()).items()})
            close(items.images["tokens"][number], known["image_tokens"][0])
            close(items.images["whole"][number], known["image_pooled"][0])
            close(encoded.images[number], known["image_features"][0])
            for caption in item.captions:
                words = model.describe_text(encoder.tokenizer([caption]))
                place, length = len(captions), words["text_tokens"].shape[1]
                close(items.texts["tokens"][place, :length], words["text_tokens"][0])
                assert not items.texts["mask"][place, length:].any()
                assert items.texts["mask"][place].sum() == words["text_mask"].sum()
                captions.append(caption)
    assert list(encoded.captions) == captions
    assert items.texts["tokens"].dtype == torch.float16 and items.texts["mask"].dtype == torch.bool
    assert len(items.texts["tokens"]) == 120 and len(items.images["tokens"]) == 24


def close(kept: Tensor, computed: Tensor) -> None:
    torch.testing.assert_close(kept.float(), computed.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("depth", [1, 5, 120])
def test_figures_are_of_the_reranked_and_of_the_shortlist(data: str, encoded: Encoded, depth: int) -> None:
    encoder, source = make_encoder(data)
    got = evaluate(encoder, source, folds=3, rerank=depth)
    vectors = encoded.images, encoded.texts, encoded.image_of_text
    score = MeansScorer(encoded.items.images, encoded.items.texts)
    assert figures(got) == figures(rerank(*vectors, score, k=depth))
    assert figures(got["shortlist"]) == figures(recall_from_embeddings(*vectors))
    assert figures(got) != figures(got["shortlist"]) or depth == 1
    assert got.keys() == FIGURES | {"rerank", "shortlist", "folds"} and got["rerank"] == depth
    assert got["shortlist"].keys() == FIGURES | {"folds"} and got["images"] == 24
    assert json.loads(json.dumps(got)) == got
    own = (encoded.image_of_text >= 8) & (encoded.image_of_text < 16)
    fold = MeansScorer(*({name: value[rows] for name, value in side.items()} for side, rows in (
        (encoded.items.images, slice(8, 16)), (encoded.items.texts, own))))  # fmt: skip
    expected = rerank(encoded.images[8:16], encoded.texts[own], encoded.image_of_text[own] - 8, fold, k=depth)
    assert got["folds"]["folds"][1] == figures(expected)


def test_ascls_own_head(data: str) -> None:
    """Its scorer reads the half-precision items; a shortlist of everything is the whole matrix, a short one is not."""
    encoder, source = make_encoder(data, fusion=False)
    encoder.model.coder.heads["fusion"] = Fusion(encoder.model.info())
    everything, deep, short = (evaluate(encoder, source, folds=2, rerank=each) for each in ("all", 120, 3))
    assert figures(deep) == pytest.approx(figures(everything), rel=1e-2)  # rounding differs between the two ways
    assert deep["folds"]["rsum"] == pytest.approx(everything["folds"]["rsum"], rel=1e-2)
    assert short["shortlist"] == deep["shortlist"] and figures(short) != figures(deep)


def test_without_a_fusion_score_nothing_is_added(data: str) -> None:
    encoder, source = make_encoder(data, fusion=False)
    got = evaluate(encoder, source, folds=2)
    assert got.keys() == FIGURES | {"folds"} and encoder(source).items is None
    for wrong in ("32", "all", 8):
        with pytest.raises(CoderError, match=f"--rerank {wrong} orders .* no fusion head"):
            evaluate(encoder, source, rerank=wrong)
    for wrong in ("0", "-1", "most", "1.5", 0):
        with pytest.raises(CoderError, match="must be a number of candidates, 1 or more, or all, got"):
            evaluate(encoder, source, rerank=wrong)
    encoder.model.coder.heads.update({"a": Means(), "b": Means()})
    with pytest.raises(CoderError, match="this model has a, b"):
        encoder(source)


@pytest.mark.parametrize("second", [True, False], ids=["two fusions", "a fusion and a dual encoder"])
@pytest.mark.parametrize("depth", [7, None])
def test_an_ensemble_means_scores(data: str, encoded: Encoded, second: bool, depth: int | None) -> None:
    encoder, source = make_encoder(data, fusion=second, seed=1)
    other = encoder(source)
    got = measure(ensemble([encoded, other]), 2, depth)
    product = encoded.images @ encoded.texts.T + other.images @ other.texts.T
    own = MeansScorer(other.items.images, other.items.texts).all_pairs() if second else other.images @ other.texts.T
    matrix = (MeansScorer(encoded.items.images, encoded.items.texts).all_pairs() + own) / 2
    assert figures(got["shortlist"]) == pytest.approx(figures(recall(product, encoded.image_of_text)))
    if depth is None:
        assert figures(got) == pytest.approx(figures(recall(matrix, encoded.image_of_text)))
        return
    vectors = [encoded.images, other.images], [encoded.texts, other.texts], encoded.image_of_text
    expected = rerank(*vectors, lambda i, t: matrix[i[:, :, None], t[:, None]], k=depth)
    assert figures(got) == pytest.approx(figures(expected))


def command(*, rerank: str | None = None, **flags: Any) -> dict[str, Any]:
    arguments = {"run_folder": ["a"], "folds": 2, "export": "best", **flags}
    return evaluate_command(Command(**arguments), {} if rerank is None else {"rerank": rerank})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    """Runs by name: a, of a model that re-ranks, and b, of one that does not."""

    def opened_model(setting: compare._Setting, run: str, source: Any) -> Any:
        encoder, _ = make_encoder(data, fusion=run == "a", seed=len(run))
        return SimpleNamespace(name=run, encoder=lambda: encoder, rerank=setting.options.get("rerank"))

    monkeypatch.setattr(compare._Setting, "data", lambda *_: (make_encoder(data)[1], DataConfig()))
    monkeypatch.setattr(compare._Setting, "open", opened_model)


def test_the_commands_rows(opened: None) -> None:
    rows = command(run_folder=["a", "b"])
    assert list(rows) == ["a", "b", "ensemble of 2", "mean of 2 runs"]
    mean, two = rows.popitem()[1], [rows["a"]["rsum"], rows["b"]["rsum"]]
    assert mean["rsum"] == pytest.approx(sum(two) / 2) and mean["sd"]["rsum"] == pytest.approx(abs(two[0] - two[1]) / 2**0.5)
    assert "sd" in mean["folds"] and "shortlist" not in mean  # which b has not
    assert rows["a"]["rerank"] == rows["ensemble of 2"]["rerank"] == 32 and "rerank" not in rows["b"]
    assert ["shortlist" in row for row in rows.values()] == [True, False, True] and all("folds" in row for row in rows.values())
    assert command(rerank="all")["a"]["rerank"] == "all"
    together = command(run_folder=["b", "a"], rerank="8")  # the flag is for the one that can
    assert together["ensemble of 2"]["rerank"] == together["a"]["rerank"] == 8 and "rerank" not in together["b"]
    with pytest.raises(CoderError, match="no fusion head"):
        command(run_folder=["b"], rerank="8")


def test_a_long_shortlist_is_read_off_all_pairs(data: str, encoded: Encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shortlists hold more pairs than there are, no pair is scored by itself, and the figures are the same."""
    from coder_plugin.evaluation import evaluate as module

    encoder, source = make_encoder(data)
    by_pairs = {depth: evaluate(encoder, source, rerank=depth) for depth in (19, 21)}
    asked: list[int] = []
    scorer = module._scorer

    def watched(given: Encoded) -> Any:
        made = scorer(given)
        asked.append(0)
        return SimpleNamespace(all_pairs=lambda: asked.append(1) or made.all_pairs())  # no call of single pairs

    monkeypatch.setattr(module, "_scorer", watched)
    assert figures(evaluate(encoder, source, rerank=21)) == figures(by_pairs[21]) and 1 in asked
    with pytest.raises(TypeError, match="not callable"):
        evaluate(encoder, source, rerank=19)


def test_the_commands_analyses(opened: None, data: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "figures"
    rows = command(run_folder=["a", "b"], analyses=str(folder), rerank=None)
    found = analyses_of(rows)
    assert list(found) == ["a", "b"]  # an ensemble has no embedding of its own
    assert json.loads((folder / "analyses.json").read_text()) == found
    assert len(list(folder.glob("*.png"))) == 3
    # recall by length is of the re-ranked: all lengths together are the row's own
    bins = found["a"]["recall_by_length"]["bins"]
    keys = ("t2i_r1", "t2i_r5", "t2i_r10")
    together = [sum(each["count"] * each[key] for each in bins if each["count"]) / 120 for key in keys]
    assert together == pytest.approx([rows["a"][key] for key in keys])
    assert together != pytest.approx([rows["a"]["shortlist"][key] for key in keys])
    # figure 4's distance of an image and its caption, by the fused score of the re-ranking head
    assert found["a"]["scores"]["recall_by_length"] == "fused score of the first 32 by embedding"
    assert found["b"]["scores"]["recall_by_length"] == "embeddings"
    assert found["a"]["alignment"]["image_text_fused"]["count"] == 120
    (tmp_path / "file").write_text("")
    with pytest.raises(CoderError, match="cannot be made"):
        command(analyses=str(tmp_path / "file"))


def test_the_analyses_of_a_model_that_scores_pairs_alone(
    data: str, opened: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its towers' embeddings are in no loss: distances are those of the means of the tokens, here in NumPy's float64."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("coder_plugin.report.figures.plot_analyses", lambda *_: [])
    encoder, source = make_encoder(data, fusion=False, loss="ascl(similarity=fusion)")
    made = SimpleNamespace(name="a", encoder=lambda: encoder, rerank="all")
    monkeypatch.setattr(compare._Setting, "open", lambda *_: made)
    row = analyses_of(command(analyses=str(tmp_path), rerank="all"))["a"]
    encoded = encoder(source)
    images, texts = (mean(side["tokens"], side["mask"]).double().numpy() for side in encoded.items[1:])
    images, texts = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (images, texts))
    owner = encoded.image_of_text.numpy()
    assert row["scores"]["alignment"] == row["scores"]["uniformity"] == "means of the fusion's tokens"
    pairs = np.linalg.norm(images[owner] - texts, axis=1)
    assert row["alignment"]["image_text"]["mean"] == pytest.approx(pairs.mean(), abs=1e-6)
    apart = np.linalg.norm(texts[:, None] - texts[None], axis=2)
    same, upper = owner[:, None] == owner[None], np.triu(np.ones_like(apart, bool), 1)
    assert row["alignment"]["text_text"]["mean"] == pytest.approx(apart[same & upper].mean(), abs=1e-6)
    assert row["uniformity"]["texts"]["mean"] == pytest.approx(apart[~same & upper].mean(), abs=1e-6)
    assert row["uniformity"]["texts"]["variance"] == pytest.approx(apart[~same & upper].var(), abs=1e-6)
    made.rerank = "5"
    shortlisted = analyses_of(command(analyses=str(tmp_path), rerank="5"))["a"]
    assert shortlisted["scores"]["alignment"] == "embeddings" and shortlisted["alignment"] != row["alignment"]


def on_ranks(data: str) -> tuple[dict[str, Any], Encoded]:
    encoder, source = make_encoder(data)
    return evaluate(encoder, source, folds=2, rerank=5), encoder(source)


def test_ranks_encode_their_shares_and_the_first_scores(data: str) -> None:
    alone, whole = on_ranks(data)
    (first, kept), (second, left) = gloo.run(on_ranks, data)
    assert first == second
    for key in metrics.METRICS:
        assert first[key] == pytest.approx(alone[key], abs=1e-6), key
        assert first["shortlist"][key] == pytest.approx(alone["shortlist"][key], abs=1e-6), key
    assert left.items is None and list(left.captions) == list(kept.captions) == list(whole.captions)
    for mine, theirs in ((kept.items.images, whole.items.images), (kept.items.texts, whole.items.texts)):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=2e-3, atol=2e-3)
