"""Replaces names in upstream's trainer: the part that open_clip 3.3 and its main branch share."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from coder_plugin.backbones.clip import without_weights_warning
from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.integrations.open_clip import data, evaluation, flags, rates, saving
from coder_plugin.integrations.open_clip.evaluation import Collected
from coder_plugin.integrations.open_clip.overrides import Shadow, overridden
from coder_plugin.integrations.open_clip.run import Run
from coder_plugin.terminal import echo


class Adapter:
    """Replacements for names in ``open_clip_train.main``, for any number of calls of its ``main(argv)``.

    Without ``--loss`` each of them does what upstream's does.
    """

    #: Whether the inputs of a batch besides image and text are packed into the texts.
    packed: bool

    def __init__(self, trainer: ModuleType) -> None:
        from open_clip_train import data as reading
        from open_clip_train import train, zero_shot

        self.trainer, self.reading, self.training, self.zero_shot = trainer, reading, train, zero_shot
        self.own: dict[str, Any] = {name: getattr(trainer, name, None) for name in self.names()}
        self.own_metrics = train.get_clip_metrics
        self.run: Run | None = None
        self.collected: Collected | None = None

    def names(self) -> Mapping[str, Any]:
        """Names in ``open_clip_train.main`` and their replacements."""
        return {
            "parse_args": self.parse_args,
            "create_model_and_transforms": self.create_model_and_transforms,
            "get_data": self.get_data,
            "evaluate": self.evaluate,
            "torch": self.shadow_of_torch(),
        }

    def elsewhere(self) -> list[tuple[Any, dict[str, Any]]]:
        """Further modules, each with names and their replacements."""
        return [
            (self.reading, {"tarfile_to_samples_nothrow": data.read_tars}),
            (self.training, {"get_clip_metrics": self.get_clip_metrics}),
            (self.zero_shot, {"accuracy": evaluation.accuracy}),
        ]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(overridden(self.trainer, self.names()))
            for module, names in self.elsewhere():
                stack.enter_context(overridden(module, names))
            yield

    def shadow_of_torch(self) -> Shadow:
        """torch as ``open_clip_train.main`` sees it."""
        raise NotImplementedError

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:
        """Our flags first: upstream's parser allows abbreviations and would read ``--loss`` as ``--loss-dist-impl``."""
        self.run = None
        ours, rest = flags.split(argv)
        args = self.own["parse_args"](rest)
        if ours.loss is not None:
            if not any(each.startswith("--prec") for each in rest) and not torch.cuda.is_available():
                args.precision = "fp32"
                if os.environ.get("RANK", "0") == "0":
                    echo("--precision fp32, because there is no GPU (open_clip's default, amp, is slower on a CPU)")
            self.run = Run(ours, args)
        for handler in [each for each in logging.getLogger().handlers if type(each) is logging.StreamHandler]:
            logging.getLogger().removeHandler(handler)  # of a message until now: upstream adds its own, and lines came twice
        return args

    def create_model_and_transforms(self, name: str, pretrained: str | None = None, **options: Any) -> Any:
        """The first model is trained; a second one is the teacher of a distillation."""
        create = self.own["create_model_and_transforms"]
        if self.run is None or self.run.model is not None:
            return self.teacher(*create(name, pretrained, **options))
        with without_weights_warning() if self.run.args.resume else contextlib.nullcontext():
            return self.run.make_model(create, name, pretrained, options)

    def teacher(self, model: Any, *transforms: Any) -> Any:
        """The teacher of a distillation, which reads the same batches."""
        run = self.run
        if run is not None and self.packed:
            model.register_forward_pre_hook(partial(data.unpacked, run.model.coder_rows), with_kwargs=True)
        return (model, *transforms)

    def optimizer(self, create: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Upstream's optimizer, with the heads in separate groups if they have a learning rate of their own."""
        optimizer, run = create(*args, **options), self.run
        if run is None or run.heads_lr_scale == 1:
            return optimizer
        return rates.split_heads(optimizer, run.model, run.heads_lr_scale)

    def get_data(self, args: Any, *rest: Any, **options: Any) -> Any:
        if self.run is None:
            return self.own["get_data"](args, *rest, **options)
        assert self.run.extras is not None
        with data.reading(self.run.extras, packed=self.packed):
            return self.own["get_data"](args, *rest, **options)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def get_clip_metrics(self, image_features: Any, text_features: Any, logit_scale: Any, **options: Any) -> dict[str, float]:
        if self.run is None:
            return self.own_metrics(
                image_features=image_features, text_features=text_features, logit_scale=logit_scale, **options
            )
        assert self.collected is not None
        return self.collected.metrics()

    def save(self, value: Any, path: Any, *args: Any, **options: Any) -> None:
        """``torch.save``; a checkpoint also records how its heads were built, and an export is written."""
        run = self.run
        if run is None or not saving.is_checkpoint(value):
            torch.save(value, path, *args, **options)
            return
        value = saving.saved(value, str(path), run.model, run.exported_config(), run.made_with(), run.tokenizer)
        torch.save(value, path, *args, **options)
        if run.args.delete_previous_checkpoint:
            saving.prune(Path(path).parent.parent, saving.export_name(str(path)))

    @staticmethod
    def convert_sync_batchnorm(module: Any, process_group: Any = None) -> Any:
        """torch's, except for BatchNorms over masked positions, which synchronise in their own way, and frozen ones."""
        unchanged = [
            (name, each)
            for name, each in module.named_modules()
            if isinstance(each, MaskedBatchNorm) or getattr(each, "statistics_are_frozen", False)
        ]
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for name, each in unchanged:
            module.set_submodule(name, each)
        return module
