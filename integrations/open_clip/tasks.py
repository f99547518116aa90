"""open_clip main's trainer (4.x): a task holds model and loss, batches are dicts, checkpoints may be sharded directories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from open_clip_train import file_utils
from torch import Tensor, nn

from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip import rates, saving
from coder_plugin.integrations.open_clip.adapter import Adapter
from coder_plugin.integrations.open_clip.evaluation import Collected
from coder_plugin.integrations.open_clip.overrides import Shadow, overridden
from coder_plugin.integrations.open_clip.sharding import shard_heads

#: What a model with heads reads of a batch.
INPUTS = ("image", "text", "image_id", "text_positive", "text_tags", "text_negatives", "text_negative_ids")


class TaskLayer(Adapter):
    """The overrides for main."""

    packed = False

    def names(self) -> Mapping[str, Any]:
        return {
            **super().names(),
            "create_task": self.create_task,
            "create_optimizer": self.create_optimizer,
            "train_one_epoch": self.train_one_epoch,
            "load_checkpoint": self.load_checkpoint,
            "load_sharded_checkpoint": self.load_sharded_checkpoint,
            "save_sharded_checkpoint": self.save_sharded_checkpoint,
        }

    def elsewhere(self) -> list[tuple[Any, dict[str, Any]]]:
        return [*super().elsewhere(), (self.training, {"get_learning_rate": rates.base_learning_rate})]

    def shadow_of_torch(self) -> Shadow:
        sync = Shadow(torch.nn.SyncBatchNorm, convert_sync_batchnorm=self.convert_sync_batchnorm)
        return Shadow(torch, save=self.save, nn=Shadow(torch.nn, SyncBatchNorm=sync))

    def create_task(self, args: Any, model: Any, **options: Any) -> Any:
        """Upstream's task for these flags, with the objective's loss in it."""
        run = self.run
        if run is not None and args.variable_text and run.extras.names:
            raise CoderError(
                f'--model {args.model} reads texts as long as they are, and --loss "{run.objective}" reads '
                f"{', '.join(run.extras.names)} of the captions' own length: take a model with a fixed context length"
            )
        task = self.own["create_task"](args, model=model, **options)
        if run is None:
            return task
        if not run.is_plain:
            task.loss = run.loss
        return extend(task, self.collect)

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        return self.optimizer(self.own["create_optimizer"], *args, **options)

    def train_one_epoch(self, state: Any, data: Any, args: Any, tb_writer: Any = None) -> Any:
        """Before the first epoch, when everything is made: the sizes are checked and the heads' state follows the optimizer."""
        run = self.run
        if run is not None and not run.started:
            run.start(data, state.epoch, tb_writer)
            run.follow(state.optimizer)
            if state.scheduler is not None:
                state.scheduler = partial(run.at_step, state.scheduler)
        with contextlib.nullcontext() if run is None else run.epoch(state.epoch):
            return self.own["train_one_epoch"](state, data, args, tb_writer=tb_writer)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        if self.run is None:
            return self.own["evaluate"](*args, **options)
        self.collected = Collected()
        try:
            return self.own["evaluate"](*args, **options)
        finally:
            self.collected = None

    def collect(self, outputs: Any) -> None:
        """Keep the vectors of a validation batch."""
        if self.collected is not None:
            self.collected.add(outputs)

    def load_checkpoint(self, task: Any, path: str, *args: Any, **options: Any) -> Any:
        with self._checking(path):
            return self.own["load_checkpoint"](task, path, *args, **options)

    @contextlib.contextmanager
    def _checking(self, path: str) -> Iterator[None]:
        """Upstream reads a checkpoint once, from wherever it lies: its objective is compared there."""
        read = file_utils.pt_load

        def checked(*args: Any, **options: Any) -> Any:
            found = read(*args, **options)
            if self.run is not None:
                saving.check_resumed(
                    found.get(saving.HEAD_OPTIONS), self.run.made_with(), path, trains=self.run.trains
                )
            return found

        with overridden(file_utils, {"pt_load": checked}):
            yield

    def load_sharded_checkpoint(self, task: Any, path: str, *args: Any, **options: Any) -> Any:
        if self.run is not None:
            saving.check_resumed(saving.read_made(path), self.run.made_with(), path, trains=self.run.trains)
        return self.own["load_sharded_checkpoint"](task, path, *args, **options)

    def save_sharded_checkpoint(self, task: Any, optimizer: Any, path: str, **options: Any) -> None:
        """Upstream's; every rank gives its part of the parameters for an export as well, which rank 0 writes."""
        run, master = self.run, options["is_master"]
        if run is not None and master:
            saving.begin_sharded(path, run.made_with())
        self.own["save_sharded_checkpoint"](task, optimizer, path, **options)
        if run is None:
            return
        state = task.state_dict()["state_dict"]
        if master:
            folder, name = Path(path).parent.parent, saving.export_name(path)
            saving.write_export(run.model, state, folder, name, run.exported_config(), run.tokenizer)
            if run.args.delete_previous_checkpoint:
                saving.prune(folder, name)


class CoderTask:
    """Mixed into a task whose model has heads and whose loss is an objective's, or upstream's ClipLoss."""

    coder_collect: Any
    #: Names of the parameters without dimension, which upstream gives one before it shards them.
    coder_scalars: frozenset[str] = frozenset()

    trainable_module: Any
    loss: Any
    teacher: Any

    def training_forward(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        outputs = self.trainable_module(**{key: batch[key] for key in INPUTS if key in batch})
        losses = self.loss(**self.coder_completed(outputs, [batch]), output_dict=True)
        total = sum(value for name, value in losses.items() if name.endswith("_loss"))
        return {**losses, "loss": total}, self._report(outputs)  # type: ignore[attr-defined]

    def compute_accum_loss(self, inputs: Any, inputs_no_accum: Any, accum_batches: Any) -> Any:
        outputs = self.coder_completed({**inputs, **inputs_no_accum}, accum_batches)
        return self.loss(**outputs, output_dict=True), self._report(inputs_no_accum)  # type: ignore[attr-defined]

    def coder_completed(self, outputs: Mapping[str, Tensor], batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The model's outputs with what the loss compares them with: a teacher's, the words that follow (CoCa)."""
        outputs = dict(outputs)
        if hasattr(self, "teacher"):
            (batch,) = batches  # upstream does not accumulate here
            with torch.no_grad():
                taught = self.teacher(image=batch["image"], text=batch["text"])
            outputs.update({f"dist_{key}": value for key, value in taught.items()})
        if "logits" in outputs:
            texts = torch.cat([batch["text"] for batch in batches])
            outputs.update(logits=outputs["logits"][:, :-1], labels=texts[:, 1:])
        return outputs

    def eval_forward(self, batch: Mapping[str, Any]) -> Any:
        """With the images' ids, by which a model with heads gives the vectors that it retrieves by."""
        inputs = {key: batch[key] for key in ("image", "text", "image_id") if key in batch}
        return self.get_trainable_module(use_ema=True)(**inputs)  # type: ignore[attr-defined]

    def forward(self, *args: Any, **keywords: Any) -> Any:
        outputs = super().forward(*args, **keywords)  # type: ignore[misc]
        if not self.training:  # type: ignore[attr-defined]
            self.coder_collect(outputs)  # here, for what is compiled ends before
        return outputs

    def create_dummy_batch(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Upstream's, of ranks that have no validation data: with ids they gather the heads' parameters as rank 0 does."""
        batch = super().create_dummy_batch(*args, **options)  # type: ignore[misc]
        rows, device = batch["text"].shape[0], batch["text"].device
        return {**batch, "image_id": torch.zeros(rows, dtype=torch.long, device=device)}

    def prepare_distributed(self, device_ids: Any = None, **options: Any) -> Any:
        """Upstream's, which takes no device of a CPU; of a compiled module DDP knows the heads' state by other names."""
        module, parallel = self.trainable_module, torch.nn.parallel.DistributedDataParallel
        if hasattr(module, "_orig_mod"):
            ignored = [f"_orig_mod.{name}" for name in module.coder.state_names()]
            parallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        on_cpu = next(module.parameters()).device.type == "cpu"
        return super().prepare_distributed(device_ids=None if on_cpu else device_ids, **options)  # type: ignore[misc]

    def prepare_fsdp(self, **options: Any) -> Any:
        """Upstream's, after the heads and the momentum towers have been sharded in a way of their own."""
        model = self.trainable_module
        self.coder_scalars = frozenset(name for name, parameter in model.named_parameters() if parameter.ndim == 0)
        blocks = [block for name, block in self.coder_blocks() if name.startswith("coder.")]
        sharding = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy")
        shard_heads(model.coder, blocks, **{key: value for key, value in options.items() if key in sharding})
        return super().prepare_fsdp(**options)  # type: ignore[misc]

    def coder_blocks(self) -> list[tuple[str, nn.Module]]:
        """The blocks that upstream would shard, of towers and of momentum towers."""
        return super()._get_fsdp_shard_modules()  # type: ignore[misc]

    def _get_fsdp_shard_modules(self) -> list[tuple[str, nn.Module]]:
        return [(name, block) for name, block in self.coder_blocks() if not name.startswith("coder.")]

    def _normalize_scalar_params(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Upstream makes a scalar of all that has one element; a head's bias stays what it was."""
        for name in self.coder_scalars & state.keys():
            state[name] = state[name].reshape(())
        return state


def extend(task: Any, collect: Any) -> Any:
    """Make a task of upstream's one for a model with heads, in place; ``collect`` is given what evaluation's batches return."""
    cls = type(task)
    task.__class__ = type(cls.__name__, (CoderTask, cls), {"__module__": cls.__module__})
    task.coder_collect = collect
    return task
