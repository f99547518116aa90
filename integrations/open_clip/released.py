"""open_clip 3.3's trainer: it builds the loss after the optimizer and unpacks ``images, texts`` of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import timm.optim
import torch
from open_clip_train import scheduler

from coder_plugin.integrations.open_clip import rates, saving
from coder_plugin.integrations.open_clip.adapter import Adapter
from coder_plugin.integrations.open_clip.evaluation import Collected
from coder_plugin.integrations.open_clip.overrides import Shadow


class Released(Adapter):
    """The overrides for 3.3.x."""

    packed = True

    def names(self) -> Mapping[str, Any]:
        return {
            **super().names(),
            "create_loss": self.create_loss,
            "train_one_epoch": self.train_one_epoch,
            "pt_load": self.pt_load,
            "optim": Shadow(torch.optim, AdamW=partial(self.optimizer, torch.optim.AdamW)),
        }

    def elsewhere(self) -> list[tuple[Any, dict[str, Any]]]:
        create = partial(self.optimizer, timm.optim.create_optimizer_v2)
        return [
            *super().elsewhere(),
            (timm.optim, {"create_optimizer_v2": create}),  # upstream imports it where it calls it
            (scheduler, {"assign_learning_rate": rates.assign_learning_rate}),
        ]

    def shadow_of_torch(self) -> Shadow:
        parallel = Shadow(torch.nn.parallel, DistributedDataParallel=self.distributed_data_parallel)
        sync = Shadow(torch.nn.SyncBatchNorm, convert_sync_batchnorm=self.convert_sync_batchnorm)
        return Shadow(torch, save=self.save, nn=Shadow(torch.nn, parallel=parallel, SyncBatchNorm=sync))

    def create_loss(self, args: Any) -> Any:
        run = self.run
        return self.own["create_loss"](args) if run is None or run.is_plain else run.loss

    def train_one_epoch(self, model: Any, data: Any, loss: Any, epoch: int, optimizer: Any, *rest: Any, **options: Any) -> Any:
        """Before the first epoch, check the sizes and let the heads' state follow the optimizer."""
        run = self.run
        if run is not None and not run.started:
            run.start(data, epoch, options.get("tb_writer"))
            run.follow(optimizer)
        scaler, scheduler, *others = rest
        if run is not None and scheduler is not None:
            scheduler = partial(run.at_step, scheduler)
        with contextlib.nullcontext() if run is None else run.epoch(epoch):
            return self.own["train_one_epoch"](model, data, loss, epoch, optimizer, scaler, scheduler, *others, **options)

    def distributed_data_parallel(self, module: Any, device_ids: Any = None, **options: Any) -> Any:
        """torch's, which accepts no device ids on a CPU."""
        on_cpu = next(module.parameters()).device.type == "cpu"
        return torch.nn.parallel.DistributedDataParallel(module, device_ids=None if on_cpu else device_ids, **options)

    def pt_load(self, path: str, map_location: Any = None) -> Any:
        """Upstream's; compares the checkpoint's loss with the run's, and adds ``module.`` to its names where this run needs it
        (upstream only removes it)."""
        checkpoint = self.own["pt_load"](path, map_location=map_location)
        run = self.run
        if run is None:
            return checkpoint
        saving.check_resumed(checkpoint.get(saving.HEAD_OPTIONS), run.made_with(), path, trains=run.trains)
        if run.args.distributed and not next(iter(checkpoint["state_dict"])).startswith("module."):
            checkpoint["state_dict"] = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
        return checkpoint

    def evaluate(self, model: Any, *args: Any, **options: Any) -> Any:
        with self.collecting(model):
            return self.own["evaluate"](model, *args, **options)

    @contextlib.contextmanager
    def collecting(self, model: Any) -> Iterator[None]:
        """Keep the retrieval vectors of the validation batches."""
        if self.run is None:
            yield
            return
        self.collected = Collected()
        handle = self.run.model.register_forward_hook(self.collected.hook)
        try:
            yield
        finally:
            handle.remove()
            self.collected = None

