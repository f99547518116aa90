"""Whoever runs the loop, the same training gives the same weights, momentum towers, banks and centres.

The raw loop with :func:`coder_plugin.follow` is the reference; test_follow.py compares it with a loop that calls ``post_step``.
"""

from __future__ import annotations

import doctest
import importlib
import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import coder_plugin
from coder_plugin import CoderError
from coder_plugin.evaluation import recall
from tests.documentation import ROOT, blocks
from tests.reliability import ranks

BANKS = "dcl + m_dcl"
State = dict[str, Tensor]

LOOPS = ["raw", "hugging_face", "in_lightning", "sentence_transformers"]
#: transformers 4's trainer, which sentence-transformers' is, does not find the other processes of a CPU group.
OLD_TRANSFORMERS = version("transformers").startswith("4.")
LOOPS_OF_RANKS = ["raw", "in_lightning"] if OLD_TRANSFORMERS else LOOPS
framework = pytest.mark.parametrize("name", ["hugging_face", "in_lightning"])


@pytest.fixture(scope="module")
def runs() -> Any:
    from tests.integrations import framework_runs

    return framework_runs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier training, perhaps in another precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice of Lightning and transformers
        yield


def differences(state: State, other: State) -> list[str]:
    """The names of the values that are not equal to the bit."""
    assert state.keys() == other.keys()
    unequal = []
    for name, value in state.items():
        if OLD_TRANSFORMERS and "prototypes" in name:  # sentence-transformers 5.0 makes all buffers float32
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, check_dtype=False)
        elif not torch.equal(value, other[name]):
            unequal.append(name)
    return unequal


@pytest.mark.parametrize("loss", [pytest.param(BANKS, marks=pytest.mark.slow), "coder"])
def test_every_loop_trains_to_the_same_bits(runs: Any, tiny_model: str, tmp_path: Path, loss: str) -> None:
    """A raw loop, Hugging Face's Trainer, Lightning and sentence-transformers; and our trainer, which takes the gradient of the
    features first. huggingface/sentence-transformers #2723, #3225: its trainer collects the features of both columns."""
    model = runs.make(tiny_model, loss)
    trainer = runs.ours(model, loss, tmp_path)
    assert len(trainer.seen) == trainer.following.steps == runs.STEPS
    assert bool(loss == BANKS or model.coder.heads["prototypes"].centres.ready)
    same = {"loss": loss, "make_optimizer": lambda model: runs.create_optimizer(model, trainer.config)}
    for drive in (runs.raw, runs.hugging_face, runs.in_lightning, runs.sentence_transformers):
        state = runs.train(drive, tiny_model, trainer.seen, tmp_path, **same)
        assert differences(state, model.state_dict()) == [], drive.__name__


def test_accumulated_batches_are_one_step(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """Their losses are averaged, and the bank gets the keys of the last one. Lightning-AI/pytorch-lightning #11688: what moves
    after each performed step, and only then."""
    data = runs.batches(4)
    expected, *states = (runs.train(getattr(runs, name), tiny_model, data, tmp_path, accumulate=2) for name in LOOPS)
    for name, state in zip(LOOPS[1:], states, strict=True):
        assert differences(state, expected) == [], name
    ids = torch.cat([data[1]["image_id"], data[3]["image_id"]])
    assert torch.equal(expected["coder.heads.momentum.bank.ids"][:8], ids)


@framework
def test_a_step_that_the_loss_scaler_skips_writes_nothing(runs: Any, name: str, tiny_model: str, tmp_path: Path) -> None:
    """The training goes on as if there had been no such batch: scales are powers of two, which no gradient's bits notice."""
    data = runs.batches(4)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    model = runs.make(tiny_model)
    backwards: list[Tensor] = []

    def overflow(gradient: Tensor) -> Tensor:
        backwards.append(gradient)
        return gradient * float("inf") if len(backwards) == 2 else gradient

    model.visual.proj.register_hook(overflow)
    options = {"scaler": scaler} if name == "hugging_face" else {"plugins": [runs.InFloat32(scaler)]}
    getattr(runs, name)(model, coder_plugin.create_loss(BANKS, model=model), data, tmp_path, **options)
    assert len(backwards) == 4 and scaler.get_scale() == 2**16 * 2 / 2 * 2 * 2
    expected = runs.train(runs.raw, tiny_model, [data[0], *data[2:]], tmp_path)
    assert differences(model.state_dict(), expected) == []


@pytest.mark.parametrize("name", LOOPS[:3])  # in sentence-transformers the loss follows by itself
def test_a_loop_that_follows_nothing_warns(
    runs: Any, name: str, tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for follows in (True, False) if name == "raw" else (False,):
        with caplog.at_level(logging.WARNING):
            state = runs.train(getattr(runs, name), tiny_model, runs.batches(3), tmp_path, follows=follows)
        warned = [each for each in caplog.records if "call coder_plugin.follow(model, optimizer)" in each.getMessage()]
        assert len(warned) == (not follows) == (state["coder.heads.momentum.bank.count"] == 0)


@framework
def test_a_training_is_resumed_with_its_bank(runs: Any, name: str, tiny_model: str, tmp_path: Path) -> None:
    """Also where the momentum copy shares a frozen tower with the model."""
    data = runs.batches(2)
    model = runs.make(tiny_model)
    model.visual.conv1.requires_grad_(False)
    checkpoint, options = runs.two_epochs(name, tmp_path)
    getattr(runs, name)(model, coder_plugin.create_loss(BANKS, model=model), data, tmp_path, **options)
    resumed = runs.make(tiny_model)
    resumed.visual.conv1.requires_grad_(False)
    loss = coder_plugin.create_loss(BANKS, model=resumed)
    assert checkpoint.exists()
    getattr(runs, name)(resumed, loss, data, tmp_path, resume=str(checkpoint), **options)
    assert differences(resumed.state_dict(), model.state_dict()) == []
    assert runs.bank_ids(resumed) == runs.bank_ids(model)


@pytest.mark.parametrize("name", LOOPS[1:])
def test_a_trained_logit_scale_stays_below_a_hundred(runs: Any, name: str, tiny_model: str, tmp_path: Path) -> None:
    model = runs.make(tiny_model, "clip")
    with torch.no_grad():
        model.logit_scale.fill_(5.0)
    getattr(runs, name)(model, coder_plugin.create_loss("clip", model=model), runs.batches(1), tmp_path)
    assert model.logit_scale.exp().item() == pytest.approx(100)


# -- two processes ---------------------------------------------------------------------------------------------------------


def on_two_ranks(runs: Any, path: str, folder: Path) -> None:
    """Every loop on this rank's batches, which differ; the loss of this rank's anchors only."""
    rank = coder_plugin.distributed.rank()
    data = runs.batches(3, seed=rank + 1)
    results: dict[str, Any] = {"logs": []}
    for name in LOOPS_OF_RANKS:
        torch.manual_seed(rank)  # weights that differ: DDP begins with rank 0's
        model = coder_plugin.create_model(path, loss=runs.objective(BANKS)).train()
        loss = coder_plugin.create_loss(runs.objective(BANKS, local_loss=True), model=model)
        trainer = getattr(runs, name)(model, loss, data, folder, make_optimizer=runs.sgd)
        results[name] = model.state_dict()
        if name == "hugging_face":
            results["logs"] = [each for each in trainer.state.log_history if "loss" in each]
    torch.save(results, folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_processes_train_alike_in_every_loop(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """All loops to the same bits on both ranks; and, up to rounding, as one process with the pairs of both, which are each
    other's negatives (Lightning-Universe/lightning-bolts #179)."""
    endings = ranks.run(lambda folder: runs.joined(on_two_ranks, tiny_model, folder), tmp_path)
    assert [each.status for each in endings] == [0, 0], endings[0].output + endings[1].output
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in LOOPS_OF_RANKS:
        assert differences(first[name], second[name]) == differences(first[name], first["raw"]) == [], name
    assert first["logs"] == second["logs"] and len(first["logs"]) == (0 if OLD_TRANSFORMERS else 3)
    for row in first["logs"]:
        assert row["loss"] == pytest.approx(row["dcl_loss"] + row["m_dcl_loss"], rel=1e-5)
    joint = [
        {key: torch.cat([one[key], two[key]]) for key in one}
        for one, two in zip(runs.batches(3, seed=1), runs.batches(3, seed=2), strict=True)
    ]
    alone = runs.train(runs.raw, tiny_model, joint, tmp_path, make_optimizer=runs.sgd)
    for key, value in alone.items():
        torch.testing.assert_close(first["raw"][key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def a_parameter_among_the_outputs(runs: Any, path: str, folder: Path) -> None:
    """Two steps of a model with SigLIP's bias, as DDP and Trainer run them with ``find_unused_parameters``."""
    data = runs.batches(2, seed=coder_plugin.distributed.rank())
    for loss in ("siglip", "clip"):
        model = coder_plugin.create_model(path, loss=loss, init_logit_bias=-10.0).train()
        before = model.logit_bias.clone()
        criterion = coder_plugin.create_loss(loss, model=model)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = runs.sgd(model)
        for batch in data:
            sum(criterion(**wrapped(**batch)).values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.logit_bias, before) == (loss == "clip")
        if loss == "siglip" and not OLD_TRANSFORMERS:
            runs.hugging_face(coder_plugin.create_model(path, loss=loss, init_logit_bias=-10.0), loss, data, folder)


def test_a_parameter_that_the_model_returns_is_used(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """mlfoundations/open_clip #1076: DDP took ``logit_bias``, which forward returned itself, for unused."""
    endings = ranks.run(lambda folder: runs.joined(a_parameter_among_the_outputs, tiny_model, folder), tmp_path)
    assert [each.status for each in endings] == [0, 0], endings[0].output + endings[1].output


# -- what is of one framework ----------------------------------------------------------------------------------------------


def test_the_callback_is_one_of_either_lightning(runs: Any) -> None:
    """``pytorch_lightning`` has classes of its own."""
    for package in (importlib.import_module("pytorch_lightning"), runs.lightning.pytorch):
        assert isinstance(runs.FollowCallback(), package.Callback)


def test_trainer_logs_each_term(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """huggingface/transformers #12379 and #29972: the terms of a loss, not their sum alone. As means over the steps since the
    last log, however many batches a step accumulates; the last step has one only."""
    model = runs.make(tiny_model)
    loss = coder_plugin.create_loss(BANKS, model=model)
    trainer = runs.hugging_face(model, loss, runs.batches(5), tmp_path, accumulate=2, logging_steps=2)
    rows = [each for each in trainer.state.log_history if "loss" in each]
    assert [row["step"] for row in rows] == [2] and trainer.state.global_step == 3
    rounding = 1e-4 if OLD_TRANSFORMERS else 0.0  # it logs four digits
    assert rows[0]["loss"] == pytest.approx(rows[0]["dcl_loss"] + rows[0]["m_dcl_loss"], rel=1e-5, abs=rounding)
    values = []
    model = runs.make(tiny_model)
    criterion = coder_plugin.create_loss(BANKS, model=model)

    def remember(**outputs: Tensor) -> Any:
        values.append(criterion(**outputs))
        return values[-1]

    runs.raw(model, remember, runs.batches(4), tmp_path, accumulate=2)
    mean = sum(each["m_dcl_loss"].item() for each in values) / 4
    assert rows[0]["m_dcl_loss"] == pytest.approx(mean, rel=1e-5)


def test_trainer_evaluates_by_recall(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """Rows of one id are captions of one image, in any order; vectors are those of ``embed_*``, heads' parts included."""
    loss = "dcl + concept_dcl"
    model = runs.make(tiny_model, loss)
    with torch.no_grad():
        model.coder.heads["concepts"].steps.fill_(10**6)  # it counts in the score
    (batch,) = runs.batches(1)
    order, owner = [2, 0, 1, 1, 0, 2], [0, 1, 2, 2, 1, 0]
    images, ids = batch["image"], batch["image_id"]
    texts = torch.stack([batch["text"][number % 4].roll(number) for number in range(6)])
    rows = [{"image": images[i], "text": texts[n], "image_id": int(ids[i])} for n, i in enumerate(order)]
    arguments = runs.TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to="none")
    trainer = runs.CoderTrainer(model, loss=loss, args=arguments, eval_dataset=rows)
    found = trainer.evaluate()
    vectors = trainer.predict(rows).predictions
    with torch.no_grad():
        pictures, captions = model.eval().embed_image(images[order]), model.embed_text(texts)
        expected = recall(pictures[:3] @ captions.T, owner)
    for each, whole in zip(vectors, (pictures, captions), strict=True):
        torch.testing.assert_close(torch.from_numpy(each), whole)
    assert {name: found[f"eval_{name}"] for name in ("i2t_r1", "t2i_r1", "rsum")} == {
        name: expected[name] for name in ("i2t_r1", "t2i_r1", "rsum")
    }
    assert vectors[0].shape == vectors[1].shape == (6, 64)  # with the concepts' part
    ids, vectors = torch.tensor([7, 9, 9, 8]), torch.eye(3)[[0, 2, 2, 1]]
    prediction = SimpleNamespace(predictions=(vectors, vectors), label_ids=ids)
    assert runs.retrieval_metrics(prediction)["rsum"] == 600


def test_trainer_keeps_the_model_of_the_best_recall(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    """Trainer's own default is the loss in evaluation, which there is not. Its folder is no model to share."""
    model = runs.make(tiny_model, "clip")
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    rows = [{"image": image, "text": torch.full((40,), 5 + n), "image_id": n} for n, image in enumerate(images)]
    arguments = runs.TrainingArguments(
        str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, learning_rate=0.02, eval_strategy="steps",
        save_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = runs.CoderTrainer(model, loss="clip", args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    found = [row["eval_rsum"] for row in trainer.state.log_history if "eval_rsum" in row]
    assert min(found) < max(found) == trainer.state.best_metric == trainer.evaluate()["eval_rsum"], found
    with pytest.raises(CoderError, match="transformers' Trainer wrote it; coder_plugin.save_pretrained.trainer.model, FOLDER"):
        coder_plugin.from_pretrained(trainer.state.best_model_checkpoint)


def test_trainer_refuses_what_would_lose_state(
    runs: Any, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs.make(tiny_model)
    objects = {"model": model, "optimizer": runs.adamw(model)}
    callback = runs.HuggingFaceFollowCallback()
    for _ in range(2):  # a training that was broken off does not end it
        callback.on_train_begin(SimpleNamespace(n_gpu=0), None, None, **objects)
        assert model.coder.followed_by is callback.following
    callback.on_train_end(None, None, None)
    with pytest.raises(CoderError, match="2 GPUs with DataParallel, .* start one process for each"):
        callback.on_train_begin(SimpleNamespace(n_gpu=2), None, None, **objects)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(CoderError, match="FSDP"):
        callback.on_train_begin(SimpleNamespace(n_gpu=0), None, None, **objects)
    monkeypatch.undo()
    with pytest.raises(CoderError, match="FSDPStrategy holds a part of the model .* take strategy='ddp'"):
        strategy = runs.lightning.pytorch.strategies.FSDPStrategy()
        runs.FollowCallback().on_fit_start(SimpleNamespace(strategy=strategy, optimizers=[objects["optimizer"]]), model)
    assert model.coder.followed_by is None
    arguments = runs.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(CoderError, match="unknown loss or objective 'dlc'"):
        runs.CoderTrainer(model, loss="dlc", args=arguments)
    with pytest.raises(CoderError, match="no model of coder_plugin.create_model in the Linear: .* by add_heads"):
        runs.CoderTrainer(torch.nn.Linear(1, 1), loss="clip", args=arguments)


def test_trainers_arguments_run(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    data = runs.batches(2)
    rows = [{name: value[k] for name, value in batch.items()} for batch in data for k in range(4)]
    exact = {"gradient_checkpointing": True, "eval_do_concat_batches": False, "include_for_metrics": ["inputs", "loss"]}
    recalls = []
    for further in ({}, exact, {"bf16_full_eval": True}):
        trainer = runs.hugging_face(
            runs.make(tiny_model, "clip"), "clip", data, tmp_path, per_device_eval_batch_size=4, **further
        )
        if "gradient_checkpointing" in further:
            assert trainer.model.visual.transformer.grad_checkpointing and trainer.model.transformer.grad_checkpointing
        trainer.eval_dataset = rows
        recalls.append(trainer.evaluate()["eval_rsum"])
    assert recalls[0] == recalls[1] == pytest.approx(recalls[2], abs=100)


@pytest.mark.parametrize("name", ["neftune_noise_alpha", "label_smoothing_factor", "batch_eval_metrics"])
def test_trainers_arguments_that_cannot_work_are_refused(runs: Any, tiny_model: str, tmp_path: Path, name: str) -> None:
    arguments = runs.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **{name: 1})
    with pytest.raises(CoderError, match=f"TrainingArguments.{name}=.* does not work with CoderTrainer"):
        runs.CoderTrainer(runs.make(tiny_model, "clip"), loss="clip", args=arguments)


def test_adapters_of_peft_go_into_the_towers_alone(runs: Any, tiny_model: str) -> None:
    """huggingface/peft #761: merging changes no feature, and the momentum copy averages the adapters."""
    peft = pytest.importorskip("peft")
    model = runs.make(tiny_model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_fc", "c_proj"])).train()
    criterion = coder_plugin.create_loss(BANKS, model=model)
    optimizer = torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=0.01)
    coder_plugin.follow(wrapped, optimizer)
    for batch in runs.batches(3):
        sum(criterion(**wrapped(**batch)).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [n for n, p in wrapped.named_parameters() if p.requires_grad and (".coder." in n or "lora_" not in n)] == []
    copied = dict(model.coder.heads["momentum"].towers.model.named_parameters())
    name = next(name for name, parameter in model.named_parameters() if "lora_B" in name)
    torch.testing.assert_close(copied[name], torch.zeros_like(copied[name]), atol=0.02, rtol=0)
    assert copied[name].any() and not torch.equal(copied[name], dict(model.named_parameters())[name])
    text = runs.batches(1)[0]["text"]
    with torch.no_grad():
        before = wrapped.eval() and model.embed_text(text)
        after = wrapped.merge_and_unload().embed_text(text)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("callback", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_lightnings_averages_of_weights(runs: Any, tiny_model: str, tmp_path: Path, callback: str) -> None:
    """They copy the model before the first step, after which its momentum copy shares what was frozen."""
    callbacks = runs.lightning.pytorch.callbacks
    if not hasattr(callbacks, callback):
        pytest.skip(f"this version of Lightning has no {callback}")
    options: dict[str, Any] = {"swa_lrs": 1e-3, "swa_epoch_start": 1}
    if callback.startswith("EMA"):
        options = {"decay": 0.5, "use_buffers": False}
    model = runs.make(tiny_model)
    model.lock_image_tower()
    averaging = getattr(callbacks, callback)(**options)
    loss = coder_plugin.create_loss(BANKS, model=model)
    runs.in_lightning(model, loss, runs.batches(2), tmp_path, max_epochs=3, further=[averaging])
    assert torch.isfinite(model.text_projection).all() and sorted(set(runs.bank_ids(model))) == [*range(8)]
    if callback.startswith("EMA"):
        with pytest.raises(CoderError, match="EMAWeightAveraging would average the ids .*: give it use_buffers=False"):
            runs.in_lightning(model, loss, runs.batches(1), tmp_path, further=[callbacks.EMAWeightAveraging()])


def test_raw_rows_without_a_collator_are_refused(runs: Any, tiny_model: str, tmp_path: Path) -> None:
    arguments = runs.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = runs.CoderTrainer(runs.make(tiny_model, "clip"), loss="clip", args=arguments, data_collator=None)
    row = {"image": torch.zeros(3, 64, 64), "text": torch.ones(40).long(), "image_id": 1}
    assert trainer.data_collator([row])["text"].shape == (1, 40)
    for name, wrong in (("text", [row | {"text": "a dog"}]), ("image", [row | {"image": object()}]), ("image", [(1, 2)])):
        with pytest.raises(CoderError, match=f"tensor '{name}': pass data_collator=ImageTextCollator.make_transform.model"):
            trainer.data_collator(wrong)


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"coder_plugin.integrations.{name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


@pytest.mark.slow
def test_the_page_runs(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/frameworks.md as printed, but for sentence-transformers, which another test runs."""
    monkeypatch.chdir(tmp_path)
    texts = [block.text for block in blocks(ROOT / "docs" / "frameworks.md", "python")]
    text = "\n\n".join(text for text in texts if "sentence_transformers" not in text)
    exec(compile(text, "frameworks.md", "exec"), {"__name__": "page"})
