"""Train with Hugging Face's ``Trainer``: :class:`CoderTrainer`, or :class:`FollowCallback` in a trainer of one's own.

Shapes: n pairs, F channels of a retrieval vector.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, default_data_collator

from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.following import Following, clamp_logit_scale, find_model, follow
from coder_plugin.model import create_loss
from coder_plugin.training.accelerator import check_parallelism


class FollowCallback(TrainerCallback):
    """Advances banks, momentum towers and centres once after every step that a Hugging Face ``Trainer`` performs, and keeps a
    trained ``logit_scale`` at most log(100).

    :class:`CoderTrainer` has one. A trainer of your own needs it: ``Trainer(..., callbacks=[FollowCallback()])``.

    Attributes:
        following: while it trains, what :func:`coder_plugin.follow` returned.

    Raises:
        CoderError: when training begins: the model is sharded (FSDP, DeepSpeed), or one process trains on several GPUs
            (``DataParallel``).
    """

    def __init__(self) -> None:
        self.following: Following | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        check_parallelism(os.environ)
        if args.n_gpu > 1:
            raise CoderError(
                f"one process would train on {args.n_gpu} GPUs with DataParallel, whose copies of the model lose their state: "
                f"start one process for each (torchrun --nproc_per_node {args.n_gpu} script.py), or set CUDA_VISIBLE_DEVICES=0"
            )
        self.stop()
        model = find_model(objects["model"])
        self.following = follow(model, objects["optimizer"], after_step=lambda: clamp_logit_scale(model))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Follow no longer, as after a training that was broken off."""
        if self.following is not None:
            self.following.remove()
            self.following = None


#: Arguments of Trainer that it would fail with, or ignore.
_REFUSED = {
    "neftune_noise_alpha": "it adds noise to the embeddings of a language model; ascl adds noise to captions",
    "label_smoothing_factor": "pairs have no labels",
    "use_liger_kernel": "its kernels are those of language models",
    "batch_eval_metrics": "recall compares all pairs of the evaluation set",
}


class CoderTrainer(Trainer):
    """Hugging Face's ``Trainer`` for models of :func:`coder_plugin.create_model`.

    The loss compares the pairs of all processes. State advances once for each performed step, and is in checkpoints. Each
    term is logged beside ``loss`` with its weight applied; they add up to it. Evaluation measures recall between the pairs of
    the evaluation set (``eval_rsum`` and others). Batches of gradient accumulation are averaged, as ``Trainer`` does: each
    pair has the negatives of its own micro-batch, and a bank gets the keys of the last one.

    Args:
        model: with heads. None with ``model_init``.
        loss: as in :func:`coder_plugin.create_loss`, or what that returned.
        options: of ``Trainer``: args, data_collator (:class:`coder_plugin.data.ImageTextCollator`), train_dataset, ….
            ``compute_metrics`` replaces :func:`retrieval_metrics`. ``load_best_model_at_end`` takes ``rsum`` unless
            ``metric_for_best_model`` is another.

    Raises:
        CoderError: a model without heads, rows of pictures and texts without a collator, or arguments that need labels or a
            language model, by name; as :func:`coder_plugin.create_loss`; and as :class:`FollowCallback`, when training begins.

    Example:
        >>> import tempfile
        >>> from transformers import TrainingArguments
        >>> import coder_plugin
        >>> model = coder_plugin.create_model("coder-tiny", loss="clip + dcl")
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, report_to="none", disable_tqdm=True
        ... )
        >>> rows = [{"image": torch.rand(3, 64, 64), "text": torch.ones(40).long(), "image_id": i} for i in range(2)]
        >>> trainer = CoderTrainer(model=model, loss="clip + dcl", args=args, train_dataset=rows)
        >>> trainer.train().global_step  # prints the losses, too
        {...}
        1
    """

    #: The loss of a micro-batch is a mean over its pairs: Trainer divides it by the number of micro-batches.
    loss_is_scaled_for_ga = False
    model: Any

    def __init__(self, model: Any = None, *, loss: Any, callbacks: Any = None, **options: Any) -> None:
        self._loss: Any = loss
        self._criterion: Any = None
        self._loss_of: Any = None
        self._logged: dict[str, Tensor] = {}
        self._logged_steps = 0.0
        self._follow = FollowCallback()
        options.setdefault("compute_metrics", retrieval_metrics)
        if options.get("data_collator") is None and options.get("processing_class") is None:
            options["data_collator"] = _collate
        for name, why in _REFUSED.items():
            if getattr(options.get("args"), name, None):
                raise CoderError(f"TrainingArguments({name}=…) does not work with CoderTrainer: {why}")
        super().__init__(model, callbacks=[*(callbacks or []), self._follow], **options)
        by_loss = self.args.metric_for_best_model in ("loss", "eval_loss")  # the default, which evaluation does not have
        if by_loss and self.compute_metrics is retrieval_metrics:
            self.args.metric_for_best_model, self.args.greater_is_better = "rsum", True
        self.args.remove_unused_columns = False  # the collator reads columns that the model does not
        find_model(self.model)  # refuses one without heads
        _ = self.criterion

    @property
    def criterion(self) -> CoderLoss:
        """The loss of the current model; ``model_init`` makes a new one for each training."""
        if isinstance(self._loss, CoderLoss):
            return self._loss
        if self._criterion is None or self._loss_of is not self.model:
            self._criterion, self._loss_of = create_loss(self._loss, model=self.model), self.model
        return self._criterion

    def train(self, *args: Any, **options: Any) -> Any:
        try:
            return super().train(*args, **options)
        finally:
            self._follow.stop()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The sum of the terms; ``num_items_in_batch``, which counts labels, plays no part."""
        outputs = model(**inputs)
        losses = self.criterion(**outputs)
        share = 1 / self.current_gradient_accumulation_steps
        self._logged_steps += share
        for name, value in losses.items():
            self._logged[name] = self._logged.get(name, 0.0) + value.detach() * share
        total = sum(losses.values())
        return (total, outputs) if return_outputs else total

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Add each term's mean over the steps since the last log, and over the processes."""
        if "loss" in logs and self._logged:
            means = self.accelerator.reduce(torch.stack(list(self._logged.values())), "mean") / self._logged_steps
            logs.update(zip(self._logged, means.tolist(), strict=True))
            self._logged, self._logged_steps = {}, 0.0
        super().log(logs, *args, **options)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Any, Any]:
        """Retrieval vectors of images and texts, and the images' ids; no loss, since banks belong to training."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.accelerator.autocast():
            vectors = self.model.embed_image(inputs["image"]).float(), self.model.embed_text(inputs["text"]).float()
        return None, vectors, inputs["image_id"]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """safetensors refuses tensors in one memory, such as a frozen tower that the momentum copy shares."""
        if state_dict is None and self.args.should_save:
            state_dict = _without_sharing(self.model)
        super()._save(output_dir, state_dict)


def _collate(rows: list[Any]) -> dict[str, Any]:
    """transformers' own collator, which takes rows of tensors."""
    for name in ("image", "text"):
        value = rows[0].get(name) if isinstance(rows[0], Mapping) else None
        if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
            raise CoderError(
                f"the rows are no dicts with a tensor {name!r}: "
                "pass data_collator=ImageTextCollator(make_transform(model), tokenizer)"
            )
    return default_data_collator(rows)


def retrieval_metrics(prediction: Any) -> dict[str, float]:
    """Recall in both directions, for ``Trainer(compute_metrics=...)``.

    Args:
        prediction: ``predictions``: retrieval vectors of images and of texts, [n, F] each, one row a pair. ``label_ids``: the
            images' ids, int64 [n]; rows of one id are captions of one image. Both may be lists of batches
            (``eval_do_concat_batches=False``).

    Returns:
        The numbers of :func:`coder_plugin.evaluation.recall`, recalls in percent.

    Raises:
        CoderError: vectors of other shapes.

    Example:
        >>> from transformers import EvalPrediction
        >>> vectors = torch.eye(3).numpy()
        >>> figures = retrieval_metrics(EvalPrediction((vectors, vectors), torch.tensor([7, 8, 9]).numpy()))
        >>> figures["i2t_r1"], figures["rsum"]
        (100.0, 600.0)
    """
    vectors, ids = prediction.predictions, prediction.label_ids
    if isinstance(ids, list):
        vectors, ids = [np.concatenate(batches) for batches in zip(*vectors, strict=True)], np.concatenate(ids)
    images, texts = map(torch.as_tensor, vectors)
    unique, image_of_text = torch.as_tensor(ids).unique(return_inverse=True)
    rows = torch.arange(len(image_of_text))
    first = torch.full_like(unique, len(rows)).scatter_reduce(0, image_of_text, rows, "amin")
    figures = recall_from_embeddings(images[first], texts, image_of_text)
    return {name: value for name, value in figures.items() if not isinstance(value, Tensor)}


def _without_sharing(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with each tensor in memory of its own."""
    seen: set[int] = set()
    state = {}
    for name, value in model.state_dict().items():
        place = value.untyped_storage().data_ptr()
        state[name] = value.clone() if place in seen else value.contiguous()
        seen.add(place)
    return state
