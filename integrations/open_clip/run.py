"""One run of upstream's trainer with our heads: model, loss, and state after each step; for 3.3 and for main."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import open_clip
import open_clip_train.main
import torch
from open_clip_train.data import SharedEpoch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.backbones import clip, plugin_backbones
from coder_plugin.contrast.pairs import Implementation
from coder_plugin.data.from_config import make_negatives
from coder_plugin.data.hard_negatives import NEGATIVES
from coder_plugin.errors import CoderError
from coder_plugin.following import follow
from coder_plugin.heads.base import Head
from coder_plugin.heads.capabilities import affects_ranking
from coder_plugin.integrations.open_clip import flags, saving
from coder_plugin.integrations.open_clip import model as in_upstream
from coder_plugin.integrations.open_clip.data import Extras, samples_of
from coder_plugin.integrations.open_clip.loss import UpstreamLoss
from coder_plugin.model import add_heads, create_loss, needs_logit_bias, required_heads_with
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.export import head_settings, start_heads, weights_named
from coder_plugin.training import prepare

log = logging.getLogger(__name__)


class Run:
    """From one command line to the end of upstream's ``main``."""

    def __init__(self, ours: argparse.Namespace, args: Any) -> None:
        self.model_name = args.model  # unchanged: another process finds a configuration only by its path
        args.model = clip.register_config(args.model)  # upstream finds the tokenizer by this name
        args.pretrained = weights_named(args.pretrained)
        self.args = args
        if {"audio_cfg", "genlip_cfg", "genlap_cfg"} & clip.read_config(args.model).keys():  # open_clip 4's
            raise CoderError(f"{args.model} gives no features of images and texts for --loss to compare: leave out --loss")
        self.config = flags.options(ours, args)
        self.objective: Objective = prepare.make_objective(self.config)
        flat = self.config.to_flat()
        args.loss = self.config.loss.expression  # upstream logs it with the run's options
        for name in flags.OURS:
            setattr(args, f"coder_{name}", flat[name])
        self.model: Any = None
        self.loss: Any = None
        self.extras: Extras | None = None
        self.writer: Any = None
        self.step = self.seen = 0
        self.started = False
        if plugin_backbones.find_backbone(args.model) is not None:
            raise CoderError(f"{args.model} reads regions, which open_clip's trainer cannot load: use coder-plugin train")
        if getattr(args, "distill_model", None) and any(term.name == "distill" for term in self.objective.terms):
            raise CoderError("--distill-model and distill in --loss are two teachers: leave out one")
        if getattr(args, "distill_model", None) and "coca" in args.model.lower():
            raise CoderError("--distill-model cannot be combined with a CoCa model (a limit of open_clip)")

    @property
    def is_plain(self) -> bool:
        """Whether the loss is upstream's own ClipLoss, with its own flags (``--gather-with-grad``)."""
        args = self.args
        other = args.siglip or getattr(args, "distill", False) or hasattr(self.model, "text_decoder")
        is_clip = replace(self.objective, local_loss=False) == Objective.parse("clip")
        return is_clip and self.config.model.aggregator == "tower" and not other

    @property
    def trains(self) -> bool:
        return bool(self.args.train_data) or self.args.dataset_type == "synthetic"

    @property
    def heads_lr_scale(self) -> float:
        """Factor on the learning rate of the heads."""
        return self.config.optim.heads_lr_scale

    def make_model(self, create: Callable[..., Any], name: str, pretrained: str | None, options: dict[str, Any]) -> Any:
        """The model with heads, and upstream's transforms; ``create`` is upstream's ``create_model_and_transforms``."""
        args, config = self.args, self.config
        if not self.trains and args.resume:
            self._take_data_options(saving.read_made(args.resume))
        # rows of a table are pairs, and the number of captions per image in shards is unknown
        pairs = config.with_options(captions="all")
        self.objective = prepare.fit_objective(self.objective, pairs, samples_per_epoch=samples_of(args))
        transforms: list[Any] = []

        def with_transforms(name: str, weights: str | None, *, force_preprocess_cfg: Any = None, **given: Any) -> Any:
            for key, value in (force_preprocess_cfg or {}).items():
                if key in ("mean", "std", "interpolation", "resize_mode") and given.get(f"image_{key}") is None:
                    given[f"image_{key}"] = value
            model, *transforms[:] = create(name, weights, **given)
            return model

        options = {key: value for key, value in options.items() if key != "output_dict"}
        model = clip.create_clip(
            name,
            pretrained=pretrained or None,
            needs_logit_bias=needs_logit_bias(self.objective),
            create=with_transforms,
            **options,
        )
        model = add_heads(
            model,
            name,
            loss=self.objective,
            aggregator=config.model.aggregator,  # type: ignore[arg-type]
            context_blocks=config.model.context_blocks,
            cache_dir=args.cache_dir,
        )
        self.tokenizer = build.make_tokenizer(config.model, model)
        prepare.check_accumulation(model, config)
        self.extras = Extras(
            self.tokenizer,
            prepare.make_positives(model),
            prepare.make_tags(model, config),
            config.data.captions,
            make_negatives(config.data, None) if self.trains else None,
            config.data.csv_negatives_key or NEGATIVES,
            args.seed,
            SharedEpoch() if config.data.hard_negatives else None,
        )
        if config.data.hard_negatives and config.data.hard_negatives >= model.context_length:
            raise CoderError(
                f"--hard-negatives must be less than the length of a text, {model.context_length} tokens"
            )
        self.model = in_upstream.extend(model, self.extras.names)
        folder = name.removeprefix("local-dir:")  # a folder holds its own weights
        started = start_heads(self.model, pretrained or (weights_named(folder) if folder != name else None))
        if not (self.trains or args.resume or started) and any(map(affects_ranking, model.coder.heads.values())):
            raise CoderError(
                f'--loss "{config.loss.expression}" scores with heads, and {pretrained or name} has none: evaluate an export '
                "or a checkpoint of a run with this --loss, or only the towers with --loss clip"
            )
        self.loss = self.make_loss()
        self._freeze()
        ignored = model.coder.state_names()
        if ignored:
            torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        for label, term in self.loss.terms.terms.items():
            if "same_image" not in term.supports:
                log.info("%s uses other captions of an image in a batch as negatives", label)
        return (self.model, *transforms)

    def made_with(self) -> dict[str, Any]:
        """What a checkpoint records: settings that a resumed run must share, and how images are normalised."""
        preprocessing = {key: value for key, value in self.model.visual.preprocess_cfg.items() if value is not None}
        return {**head_settings(self.model), "heads_lr_scale": self.heads_lr_scale, "preprocess_cfg": preprocessing}

    def _take_data_options(self, made: Mapping[str, Any] | None) -> None:
        """Take options that follow from the training data from a checkpoint: evaluation has no training data."""
        if made is None:
            return
        then, now = dict(Objective.from_dict(made["objective"], inference=True).heads), dict(self.objective.heads)
        for name, head in required_heads_with(self.objective, Head).items():
            if self.config.loss.concepts and hasattr(head, "image_attention"):
                continue
            for option in head.data_options:
                value = dict(then.get(name, ())).get(option)
                if value is not None and option not in dict(now.get(name, ())):
                    self.objective = self.objective.with_options({f"{name}.{option}": value})

    def make_loss(self) -> UpstreamLoss:
        config = self.config.loss
        terms = create_loss(
            self.objective,
            model=self.model,
            implementation=cast(Implementation, config.loss_impl),
            gather_dtype=config.gather_dtype,  # type: ignore[arg-type]
        )
        return UpstreamLoss(terms, own=self.own_loss(), accum_freq=self.args.accum_freq)

    def own_loss(self) -> Any:
        """Upstream's loss for these flags; only its captioning or distillation part is used."""
        args = self.args
        gathered = {"rank": distributed.rank(), "world_size": distributed.world_size(), "gather_with_grad": True}
        if getattr(args, "distill", False):
            return open_clip.DistillClipLoss(local_loss=args.local_loss, **gathered)
        if hasattr(self.model, "text_decoder"):
            weights = {"caption_loss_weight": args.coca_caption_loss_weight, "clip_loss_weight": 0.0}
            return open_clip.CoCaLoss(**weights, **gathered)
        return None

    def _freeze(self) -> None:
        """Freeze parameters that no term reads: they get no gradient, on which DDP fails."""
        model, args = self.model, self.args
        if getattr(args, "distill", False):
            model.logit_scale.requires_grad_(True)  # the distillation term reads it

        def probe(**outputs: Tensor) -> Any:
            if getattr(args, "distill", False):
                teacher = {f"dist_{key}": value.detach() for key, value in outputs.items() if not key.startswith("coder_")}
                outputs = {**outputs, **teacher}
            if "logits" in outputs and "labels" not in outputs:  # main's CoCa: its task takes labels from the batch
                logits = outputs["logits"]
                outputs = {**outputs, "labels": logits.new_ones(logits.shape[:2], dtype=torch.long)}
            return self.loss(**outputs)

        named = [(name, each) for name, each in model.named_parameters() if not name.startswith("coder.")]
        model.coder_unread = tuple(name for name, each in named if not each.requires_grad)
        model.coder_unread += tuple(prepare.freeze_unread(model, probe, self.tokenizer))
        if model.coder_unread:
            log.info("frozen, because no term reads them: %s", ", ".join(model.coder_unread))

    def start(self, data: Any, epoch: int, writer: Any) -> None:
        """Before the first step: log the heads' notes, and raise :class:`CoderError` if a head cannot work with this batch size
        or length of run."""
        args = self.args
        pairs = args.batch_size * args.accum_freq * args.world_size
        steps = data["train"].dataloader.num_batches // args.accum_freq
        if steps < 1:
            raise CoderError(
                f"an epoch of {data['train'].dataloader.num_samples} samples has no step of {pairs} pairs (--batch-size "
                f"{args.batch_size}, --accum-freq {args.accum_freq}, {args.world_size} processes)"
            )
        self.model.coder.check(batch=pairs, samples=pairs * steps * args.epochs)
        for name, head in self.model.coder.heads.items():
            for note in head.notes() if distributed.rank() == 0 else ():
                log.info("%s: %s", name, note)
        self.started, self.writer, self.step = True, writer, steps * epoch

    def at_step(self, schedule: Callable[[int], Any], step: int) -> Any:
        """Upstream's schedule, called with the number of the step, which counts steps that the loss scaler skipped too."""
        self.step, self.seen = step, self.seen + 1
        return schedule(step)

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Raise :class:`CoderError` if an epoch ends without a batch: upstream would save an untrained model."""
        before = self.seen
        if self.extras is not None and self.extras.epoch is not None:
            self.extras.epoch.set_value(number)
        yield
        if self.seen == before:
            raise CoderError(f"no batch could be read from {self.args.train_data}: do its files exist? (see the warnings)")

    def follow(self, optimizer: Any) -> None:
        """Let the heads' state advance with the optimizer's steps."""
        follow(self.model, optimizer, after_step=self.after_step)

    def after_step(self) -> None:
        """After every performed optimizer step: log the heads' health at logging steps."""
        if self.step % self.args.log_every_n_steps == 0:
            health = self.model.coder.health()  # on all ranks: some figures read sharded parameters
            if distributed.rank() == 0:
                self._log(health)
        if self.args.skip_scheduler:  # then at_step is never called
            self.step, self.seen = self.step + 1, self.seen + 1

    def _log(self, health: dict[str, float]) -> None:
        named = {f"coder/{name}": value for name, value in health.items()}
        if not named:
            return
        log.info("%s", " ".join(f"{name}: {value:.4g}" for name, value in named.items()))
        if self.writer is not None:
            for name, value in named.items():
                self.writer.add_scalar(name, value, self.step)
        for name in ("wandb", "trackio"):
            if getattr(self.args, name, False):
                # without the step they would be logged with the previous one
                getattr(open_clip_train.main, name).log(named, step=self.step)

    def exported_config(self) -> Any:
        """The configuration that ``coder-plugin eval RUN`` reads: the model and the validation data of this run."""
        args = self.args
        kind = {"synthetic": "auto"}.get(args.dataset_type, args.dataset_type)
        return self.config.with_options(
            model=self.model_name,
            train_data=args.train_data or args.val_data,
            val_data=args.val_data,
            dataset_type=kind,
            csv_separator=args.csv_separator,
            csv_img_key=args.csv_img_key,
            csv_caption_key=args.csv_caption_key,
            force_image_size=args.force_image_size,  # one number, or height and width
            force_quick_gelu=args.force_quick_gelu,
            force_custom_text=args.force_custom_text,
        )

