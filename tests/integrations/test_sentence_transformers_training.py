"""Our losses in sentence-transformers' trainer: evaluators, checkpoints. test_frameworks.py compares it with a raw loop."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import coder_plugin
from coder_plugin import CoderError
from coder_plugin.evaluation import recall
from coder_plugin.integrations.sentence_transformers import CoderLoss, PictureText, loss, module
from coder_plugin.objective import Objective
from tests.documentation import ROOT, blocks
from tests.integrations import sentence_transformers_runs as runs


@pytest.fixture
def make(tiny_model: str) -> Callable[..., Any]:
    def create(expression: Any = "dcl + m_dcl", **options: Any) -> Any:
        torch.manual_seed(0)
        return coder_plugin.create_model(tiny_model, loss=expression, **options).train()

    return create


@pytest.fixture(scope="module")
def pairs() -> Any:
    """Six pictures with two captions each."""
    pictures = runs.pictures() * 2
    captions = [f"{article} {colour}" for article in ("a", "the") for colour in runs.COLOURS]
    return Dataset.from_dict({"image": pictures, "caption": captions})


def sgd(model: Any) -> torch.optim.Optimizer:
    """Unlike AdamW it does not make rounding errors of vanishing gradients large."""
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)


def equal(one: Any, other: Any) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_ids_come_from_the_label_or_from_the_pixels(make: Any, pairs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[list[int]] = []
    forward = loss._pairs
    monkeypatch.setattr(loss, "_pairs", lambda *a: seen.append((found := forward(*a))["image_id"].tolist()) or found)
    labelled = pairs.add_column("label", [*range(6)] * 2)
    for data in (pairs, labelled, labelled.select_columns(["caption", "label", "image"])):
        runs.trainer(runs.wrap(make()), data, tmp_path, loss="dcl + m_dcl", batch_size=12, max_steps=1).train()
    by_pixels, by_label, in_another_order = seen
    assert len(set(by_pixels)) == 6 and max(by_pixels) > 2**32 and all(number >= 0 for number in by_pixels)
    assert sorted(by_label) == sorted([*range(6)] * 2) and in_another_order == by_label
    # the sampler drew the same rows in the same order
    assert len(set(zip(by_pixels, by_label, strict=True))) == 6


def test_captions_of_one_picture_are_masked(make: Any) -> None:
    model = runs.wrap(make("dcl"))
    objective = CoderLoss(model, "dcl")
    pictures = runs.pictures(2)
    texts = model[0].preprocess(["a", "b", "c"])
    with torch.no_grad():
        same = objective([model[0].preprocess([pictures[0], pictures[0], pictures[1]]), texts])
        labelled = [objective([model[0].preprocess([pictures[k] for k in (0, 0, 1)]), texts], torch.tensor(ids))
                    for ids in ([5, 5, 6], [5, 6, 7])]  # fmt: skip
    assert same == labelled[0] != labelled[1]


@pytest.mark.parametrize(
    "columns, message",
    [
        (["caption"], "hold: texts$"),
        (["image"], "hold: pictures$"),
        (["caption", "again"], "hold: texts, texts$"),
        (["image", "caption", "image"], "hold: pictures, texts, pictures$"),
        (["image", "caption", "again"], "the loss dcl reads no hard negatives"),
        (["both", "caption"], "hold: pictures and texts, texts$"),
    ],
)
def test_other_columns_are_refused(make: Any, columns: list[str], message: str) -> None:
    model = runs.wrap(make("dcl"))
    picture = runs.pictures(1)[0]
    values = {"caption": ["a", "b"], "again": ["c", "d"], "image": [picture, picture], "both": [picture, "a"]}
    with pytest.raises(CoderError, match=message):
        CoderLoss(model, "dcl")([model[0].preprocess(values[name]) for name in columns])


def test_further_columns_are_hard_negatives(make: Any, pairs: Any, tmp_path: Path) -> None:
    """Two for each picture, of which an empty text is none; also without a caption's column beside the picture's."""
    expression = "clip(hard_negatives=true) + dcl(hard_negatives=true)"
    model = runs.wrap(make(expression))
    objective, inner = CoderLoss(model, expression), model[0].model
    texts = {"image": runs.pictures(3), "caption": ["a", "b", "c"], "one": ["d", " ", "e"], "two": ["f", "g", "h"]}
    columns = {name: model[0].preprocess(values) for name, values in texts.items()}
    found = [objective([columns[name] for name in order]) for order in (texts, ["caption", "one", "image", "two"])]
    negatives = torch.stack([columns["one"]["input_ids"], columns["two"]["input_ids"]], 1)
    ids = torch.tensor([[-1, -1], [-2, -1], [-1, -1]])
    image = columns["image"]
    given = {"image_id": image["image_id"], "text_negatives": negatives, "text_negative_ids": ids}
    raw = coder_plugin.create_loss(expression, model=inner)
    expected = raw(**inner(image["pixel_values"], columns["caption"]["input_ids"], **given))
    assert found[0] == expected == found[1]
    del given["text_negative_ids"]
    assert raw(**inner(image["pixel_values"], columns["caption"]["input_ids"], **given)) != expected
    data = pairs.add_column("negative", pairs["caption"][1:] + pairs["caption"][:1])
    trainer = runs.trainer(model, data, tmp_path, loss=objective, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(CoderError, match="reads hard negatives, and the data set has no column of them: add one of texts"):
        objective([columns["image"], columns["caption"]])


def test_another_sentence_transformer_is_refused() -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import BoW

    with pytest.raises(CoderError, match=r"the order is CoderLoss\(model, loss\): the model comes first, got a str"):
        CoderLoss("dcl", torch.nn.Linear(1, 1))
    with pytest.raises(CoderError, match="of one PictureText, and this one has BoW"):
        CoderLoss(SentenceTransformer(modules=[BoW(["dog"])], device="cpu"), "dcl")


def test_evaluation_changes_nothing_and_logs_the_terms(make: Any, pairs: Any, tmp_path: Path) -> None:
    model = make()
    trainer = runs.trainer(runs.wrap(model), pairs, tmp_path, loss="dcl + m_dcl", eval_dataset=pairs, max_steps=2)
    trainer.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    figures = trainer.evaluate()
    assert figures["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])
    assert {"eval_dcl_loss", "eval_m_dcl_loss"} <= trainer.state.log_history[-1].keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {"dcl_loss", "m_dcl_loss"} <= trainer.state.log_history[0].keys()
    assert not model.training  # the trainer's choice stays


def test_evaluators(make: Any, pairs: Any, tmp_path: Path) -> None:
    """sentence-transformers' figures of retrieval are ours."""
    from sentence_transformers.evaluation import InformationRetrievalEvaluator, TripletEvaluator

    pictures, captions = runs.pictures(), [f"a {colour}" for colour in runs.COLOURS]
    queries = {str(k): caption for k, caption in enumerate(captions)}
    documents = {f"p{k}": picture for k, picture in enumerate(pictures)}
    relevant = {str(k): {f"p{k}"} for k in range(6)}
    search = InformationRetrievalEvaluator(queries, documents, relevant, accuracy_at_k=[1, 5], name="t2i")
    triplets = TripletEvaluator(pictures, captions, captions[1:] + captions[:1], main_similarity_function="dot", name="own")
    model = runs.wrap(make("dcl"))
    trainer = runs.trainer(model, pairs, tmp_path, loss="dcl", evaluator=[search, triplets], max_steps=2)
    trainer.train()
    figures = trainer.evaluate()
    scores = torch.from_numpy(model.encode(pictures)) @ torch.from_numpy(model.encode(captions)).T
    ours = recall(scores, torch.arange(6))
    assert figures["eval_t2i_dot_accuracy@1"] * 100 == pytest.approx(ours["t2i_r1"])
    assert figures["eval_t2i_dot_accuracy@5"] * 100 == pytest.approx(ours["t2i_r5"])
    negatives = scores[range(6), [*range(1, 6), 0]]
    assert figures["eval_own_dot_accuracy"] == pytest.approx((scores.diagonal() > negatives).float().mean().item())


def test_it_resumes_with_its_banks(make: Any, pairs: Any, tmp_path: Path) -> None:
    expression = Objective.parse("dcl + m_dcl").with_options({"momentum.bank_size": 12})

    def train(resumed: str | None, **options: Any) -> Any:
        model = make(expression)
        given = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", **options}
        runs.trainer(runs.wrap(model), pairs, tmp_path, loss=expression, **given).train(resume_from_checkpoint=resumed)
        return model

    once = train(None)
    assert equal(train(str(tmp_path / "checkpoint-2")), once)
    assert once.coder.heads["momentum"].bank.count == 12
    module = PictureText.load(str(tmp_path / "checkpoint-4"))
    assert equal(module.model, once)
    module.save(str(tmp_path / "shared"))
    assert not list((tmp_path / "shared").glob("coder_training*"))
    plain = PictureText.load(str(tmp_path / "shared")).model
    assert not plain.coder.heads and torch.equal(plain.visual.proj, once.visual.proj)
    chosen = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": pairs}
    best = train(None, max_steps=1, save_steps=1, **chosen)
    assert best.state_dict().keys() == once.state_dict().keys()


def test_a_damaged_checkpoint_is_refused(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    PictureText(make("dcl + m_dcl")).save(str(folder))
    whole = (folder / "coder_training.safetensors").read_bytes()
    (folder / "coder_training.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CoderError, match="coder_training.safetensors"):
        PictureText.load(str(folder))
    folder.rename(tmp_path / "downloaded")  # of no trainer here: the file is not read
    assert not PictureText.load(str(tmp_path / "downloaded")).model.coder.heads


def test_a_shared_model_gets_the_heads_of_the_loss(make: Any, pairs: Any, tmp_path: Path) -> None:
    """Its scoring heads go on from what they have learned, and their options stay."""
    from sentence_transformers import SentenceTransformer

    start = make(Objective.parse("dcl + concept_dcl").with_options({"concepts.warmup": 0, "concepts.beta": 0.7}))
    export = tmp_path / "export"
    coder_plugin.pretrained.export.export_model(start.eval(), export)
    shared = coder_plugin.save_pretrained(export, tmp_path / "shared")
    model = SentenceTransformer(str(shared), trust_remote_code=True, device="cpu")
    inner = model[0].model
    assert not inner.logit_scale.requires_grad or list(inner.coder.heads) == ["concepts"]
    vectors = model.encode(runs.pictures())
    objective = CoderLoss(model, "coder + clip")
    assert list(inner.coder.heads) == ["ids", "momentum", "concepts", "prototypes"] and inner.logit_scale.requires_grad
    assert dict(dict(inner.coder.objective.heads)["concepts"])["beta"] == 0.7
    assert (model.encode(runs.pictures()) == vectors).all()
    towers = inner.coder.heads["momentum"].towers
    assert torch.equal(towers.model.visual.proj, inner.visual.proj)
    trainer = runs.trainer(model, pairs, tmp_path, loss=objective, max_steps=3)
    trainer.train()
    assert inner.coder.followed_by.steps == 3 and inner.coder.heads["momentum"].bank.count == 12


def test_the_loss_of_another_model_is_refused(make: Any) -> None:
    """As with ``model_init``, which makes the trainer's model anew."""
    objective = CoderLoss(runs.wrap(make("dcl")), "dcl")
    with pytest.raises(CoderError, match="loss=lambda model: CoderLoss"):
        objective.model = runs.wrap(make("dcl"))
        objective([])


@pytest.mark.parametrize(
    "first, second, filled",
    [("m_dcl", "m_dcl + concept_dcl", 16), ("clip", "m_dcl", 8)],
)
def test_two_losses_of_one_model_share_its_heads(make: Any, first: str, second: str, filled: int) -> None:
    """As sentence-transformers trains a loss for each data set, in turn."""
    model = runs.wrap(make(first))
    inner = model[0].model
    losses = [CoderLoss(model, first), CoderLoss(model, second)]
    optimizer = sgd(inner)
    texts = model[0].preprocess(["a red circle", "a dog", "a cat", "a square"])
    for step in range(4):
        pictures = {"pixel_values": torch.rand(4, 3, 64, 64), "image_id": torch.arange(4) + 4 * step}
        sum(losses[step % 2]([pictures, texts]).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert inner.coder.followed_by.steps == 4
    assert inner.coder.heads["momentum"].bank.count == filled


def test_two_losses_with_other_options_of_a_head_are_refused(make: Any) -> None:
    model = runs.wrap(make("m_dcl"))
    earlier = CoderLoss(model, "m_dcl")
    CoderLoss(model, Objective.parse("m_dcl + concept_dcl").with_options({"momentum.bank_size": 12}))
    assert len(model[0].model.coder.heads["momentum"].bank.ids) == 12
    with pytest.raises(CoderError, match="has built the head 'momentum' again with other options"):
        earlier([model[0].preprocess(runs.pictures(2)), model[0].preprocess(["a", "b"])])


def test_checkpointing_and_half_precision_reach_the_model(make: Any, pairs: Any, tmp_path: Path) -> None:
    """huggingface/sentence-transformers #3393."""
    model = runs.wrap(make("clip"))
    runs.trainer(model, pairs, tmp_path, loss="clip", max_steps=1, gradient_checkpointing=True).train()
    assert model[0].model.visual.transformer.grad_checkpointing and model[0].model.transformer.grad_checkpointing
    whole = model.encode(runs.pictures())
    assert torch.from_numpy(model.bfloat16().encode(runs.pictures())).allclose(torch.from_numpy(whole), atol=0.05)


def test_two_optimizers_of_parts_are_refused_unless_they_are_followed(make: Any) -> None:
    """Two trainings of different parts, one after the other, are none of this."""
    model = make()
    wrapped = runs.wrap(model)
    objective = CoderLoss(wrapped, "dcl + m_dcl")
    whole = [each for each in model.parameters() if each.requires_grad]
    one, other = (torch.optim.SGD(part, lr=0.1) for part in (whole[:4], whole[4:]))

    def step(*optimizers: torch.optim.Optimizer) -> None:
        losses = objective([wrapped[0].preprocess(runs.pictures(2)), wrapped[0].preprocess(["a", "b"])])
        sum(losses.values()).backward()
        for each in optimizers:
            each.step()

    step(one)
    step(one)
    step(other)
    step(other)
    assert model.coder.followed_by.steps == 2
    with pytest.raises(CoderError, match=r"call coder_plugin.follow\(model, \[one, other\]\)"):
        step(one, other)
    model.coder.followed_by.remove()
    following = coder_plugin.follow(model, [one, other])
    for _ in range(2):
        step(one, other)
    assert model.coder.followed_by is following and following.steps == 2



def test_examples_run() -> None:
    for each in (loss, module):
        found = doctest.testmod(each)
        assert found.attempted and not found.failed


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """The block of docs/frameworks.md, as printed, after the one that makes its pairs."""
    monkeypatch.chdir(tmp_path)
    first, *others = (block.text for block in blocks(ROOT / "docs" / "frameworks.md", "python"))
    [text] = [text for text in others if "sentence_transformers" in text]
    exec(compile(f"{first}\n\n{text}", "frameworks.md", "exec"), {"__name__": "page"})
