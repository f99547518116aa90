"""The accelerate training loop: epochs of steps, evaluation, checkpoints, exports.

The same model and loss objects as in open_clip's own trainer run here. Loaders and schedules are not handed to
``accelerator.prepare``: rank 0 would dispatch the data and schedules would step world-size times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coder_plugin import distributed, registry
from coder_plugin.backbones.base import Backbone
from coder_plugin.config import TrainConfig, flatten
from coder_plugin.data.from_config import make_source
from coder_plugin.data.item import stable_hash
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.source import map_tensors
from coder_plugin.data.tags import NAMES, WORDS
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import format_table
from coder_plugin.evaluation.evaluate import Encoder, evaluate, shortlist_length
from coder_plugin.heads.capabilities import ReadsTags, heads_with
from coder_plugin.model import create_loss
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.pretrained.export import export_heads, export_model, inference_options
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training import checkpoint, prepare
from coder_plugin.training.average import WeightAverage
from coder_plugin.training.log import RunLog, machine, versions
from coder_plugin.training.optim import create_optimizer, create_schedule
from coder_plugin.training.step import NonFiniteError, explain_gradient, forward_backward, restored_buffers

#: So many steps on end may the fp16 loss scaler skip while it looks for its scale.
SKIPS = 25
#: What a resumed run must share with its checkpoint: the optimizer's state belongs to these.
FIXED = (
    "model opt lr wd beta1 beta2 eps momentum layer_decay lora_rank accum_freq lock_image lock_image_unlocked_groups "
    "lock_text lock_text_unlocked_layers aggregator context_blocks model_kwargs text_lr_scale heads_lr_scale"
).split()


class Trainer:
    """One run. ``Trainer(config).run()`` trains, evaluates, saves, and returns the last and best recall."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        objective = prepare.make_objective(config)
        self.accelerator = prepare.make_accelerator(config)
        self.device = self.accelerator.device
        self.folder = Path(config.run.logs) / (config.run.name or self._default_name())
        self.log = RunLog(self.folder, self.accelerator, config)

        batch_size = config.optim.batch_size
        train, self.val = make_source(config.data, split="train"), make_source(config.data, split="val")
        assert train is not None
        samples = train.samples(config.data.captions, config.data.train_num_samples)
        self.objective = prepare.fit_objective(objective, config, samples_per_epoch=samples)
        _seed(config.run.seed)
        self.model = prepare.make_training_model(config, self.objective, self.device, train)
        self.loss = create_loss(self.objective, model=self.model)
        blind = [label for label, term in self.loss.terms.items() if not term.masks_same_image]
        if config.data.captions == "all" and blind:
            logging.warning(
                "--captions all: %s takes the captions of one image for negatives of each other: keep draw", " and ".join(blind)
            )
        prepare.check_accumulation(self.model, config)
        self.tokenizer = build.make_tokenizer(config.model, self.model)
        train_transform = prepare.make_train_transform(self.model, config)
        val_transform = build.make_transform(self.model, max_regions=config.data.max_regions)
        self.loader = TrainLoader(
            train,
            batch_size=batch_size,
            transform=train_transform,
            tokenizer=build.make_tokenizer(config.model, self.model, word_dropout=config.data.word_dropout),
            positives=prepare.make_positives(self.model),
            tags=prepare.make_tags(self.model, config),
            seed=config.run.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            workers=config.data.workers,
            captions=config.data.captions,
            max_bad=config.data.max_bad_images,
            num_samples=config.data.train_num_samples,
            pin_memory=self.device.type == "cuda",
        )
        self.steps_per_epoch = self.loader.steps_per_epoch // config.optim.accum_freq
        if self.steps_per_epoch < 1:
            raise CoderError(
                f"--accum-freq {config.optim.accum_freq} is more than the {self.loader.steps_per_epoch} batches of an epoch"
            )
        pairs_per_step = batch_size * config.optim.accum_freq * distributed.world_size()
        self.model.coder.check(
            batch=pairs_per_step, samples=pairs_per_step * self.steps_per_epoch * config.optim.epochs
        )
        self.encoder = Encoder(
            self.model,
            self.tokenizer,
            val_transform,
            device=self.device,
            batch_size=batch_size,
            workers=config.data.workers,
            max_bad=config.data.max_bad_images,
            autocast=self.accelerator.autocast,
        )
        shortlist_length(config.evaluation.rerank, self.encoder)  # a slip is told of now, and not after an epoch
        self.frozen = prepare.freeze_unread(self.model, self.loss, self.tokenizer)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise CoderError("nothing is left to train: both towers are locked and the objective's heads have no parameters")
        self.step = self.epoch = self.skipped = 0
        self.told_of_texts = False
        self.position: dict[str, Any] | None = None
        self.best: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.encoded: Encoded | None = None

    def _default_name(self) -> str:
        stamp = distributed.gather_objects(time.strftime("%Y_%m_%d-%H_%M_%S"))[0]
        return f"{stamp}-{Path(self.config.model.name).stem}"

    @classmethod
    def from_config(cls, config: TrainConfig | Mapping[str, Any]) -> Trainer:
        """The trainer of a configuration, or of options (flat or nested) over the defaults."""
        return cls(config if isinstance(config, TrainConfig) else resolve_config(config))

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last epoch. Returns ``{"last": recall, "best": recall, "folder": …}``."""
        config = self.config
        state = self._found_checkpoint()
        if state is not None:
            self._load_model(state)
        self._prepare()
        if state is not None:
            self._load_rest(state)
        else:
            _seed(config.run.seed + 1 + distributed.rank())  # dropout differs between ranks
        self.log.start(self.plan())
        with self.log.closing():
            every = config.evaluation.val_frequency
            if self.step == 0 and self.val is not None and every:
                self._evaluate("before the first step")
            while self.epoch < config.optim.epochs:
                self._train_epoch()
                self.epoch, self.position = self.epoch + 1, None
                last = self.epoch == config.optim.epochs
                if self.val is not None and every and (last or self.epoch % every == 0):
                    self._evaluate(f"after epoch {self.epoch}")
                self._save()
            if config.run.report:
                self._report()
        return {"last": self.last, "best": self.best, "folder": str(self.folder)}

    def _prepare(self) -> None:
        model = self.model
        if self.config.model.torchcompile:
            model.compile()
        ignored = model.coder.state_names()
        if ignored:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        optimizer = create_optimizer(model, self.config)
        self.schedule = create_schedule(optimizer, self.config, self.steps_per_epoch)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = (
            WeightAverage(model, self.config.optim.ema_decay, leave_out=ignored) if self.config.optim.ema_decay else None
        )

    def _train_epoch(self) -> None:
        config, model = self.config, self.model
        model.train()
        batches = iter(self.loader.epoch(self.epoch, self.position))
        done = self.position["batches"] // config.optim.accum_freq if self.position else 0
        with self.log.progress(self.epoch, done, self.steps_per_epoch) as progress:
            while True:
                waiting = time.perf_counter()
                group = list(itertools.islice(batches, config.optim.accum_freq))
                # a rank whose images did not all decode may run out first: then all stop
                if distributed.any_rank(len(group) < config.optim.accum_freq, self.device):
                    break
                waiting = time.perf_counter() - waiting
                logged = self.step % config.run.log_every_n_steps == 0
                metrics = self._step([self._to_device(batch) for batch in group], shares=logged)
                self.step += 1
                self.position = self.loader.position()
                progress.update(metrics, waiting)
                if logged:
                    state = {f"coder/{name}": value for name, value in model.coder.health().items()}
                    self.log.write(
                        {**metrics, **state, "epoch": self.epoch, "lr": max(self.schedule.get_last_lr())}, step=self.step - 1
                    )
                if config.run.save_every_steps and self.step % config.run.save_every_steps == 0:
                    self._save()
        self.log.bad_images(self.loader.bad)
        self._tell_of_texts()
        if self.position is None:
            raise CoderError(
                f"epoch {self.epoch} gave no step on some rank: {len(self.loader.bad)} images of rank {distributed.rank()} "
                "could not be used (see the warnings), and what is left is less than a batch"
            )

    def _tell_of_texts(self) -> None:
        """After the first epoch: how many positive captions of which kind all ranks have had, and how many were none; which
        classes the words were of, and how many captions could not be tagged."""
        if self.told_of_texts:
            return
        self.told_of_texts = True
        if prepare.make_positives(self.model) is not None:
            made: Counter[str] = sum(distributed.gather_objects(self.loader.positives_made), Counter())
            self.log.say("positive captions: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(made.items())))
        if self.model.coder.reads_tags:
            tagged: Counter[str] = sum(distributed.gather_objects(self.loader.tagged), Counter())
            self.log.say("tokens by class of word: " + ", ".join(f"{name} {tagged[name]:,}" for name in WORDS))
            for name, head in heads_with(self.model.coder.heads, ReadsTags).items():
                wanted = [NAMES[code] for code in head.tag_classes()]
                if wanted and not any(tagged[each] for each in wanted):
                    logging.warning(
                        "no token is of a %s: the head %r has no word to read (is --tagger one for these captions?)",
                        " or ".join(wanted),
                        name,
                    )
            if tagged["unmatched"]:
                self.log.say(
                    f"{tagged['unmatched']:,} of {tagged['captions']:,} captions: the tagger's words do not match the "
                    'tokens, all of which count as "other"'
                )

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(lambda each: each.to(self.device, non_blocking=True), batch)

    def _step(self, batches: list[dict[str, Any]], *, shares: bool) -> dict[str, float]:
        """One optimizer step; nothing is written, neither weights nor state, where a loss or gradient is not finite."""
        try:
            result = forward_backward(self.wrapped, self.loss, batches, self.accelerator, shares=shares)
            norm = self._clip(result.leaves)
        except NonFiniteError as error:
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"{error} at step {self.step} (epoch {self.epoch}): the step was not taken and nothing was written; "
                "lower --lr, lengthen --warmup or clip with --grad-clip-norm, then --resume the last checkpoint"
            ) from error
        self.optimizer.step()
        self.schedule.step()
        self.skipped = self.skipped + 1 if self.accelerator.optimizer_step_was_skipped else 0
        if self.skipped > SKIPS:
            why = explain_gradient(self.model, self.loss, result.leaves)
            raise NonFiniteError(f"{why} is not finite: the loss scaler has skipped {self.skipped} steps on end")
        self.optimizer.zero_grad()
        if not self.skipped:
            self.model.coder.post_step()
            scale = getattr(self.model, "logit_scale", None)
            if scale is not None and scale.requires_grad:
                with torch.no_grad():
                    scale.clamp_(0, math.log(100))
            if self.average is not None:
                self.average.update(self.model)
        shown = {f"share/{name}": value for name, value in result.shares.items()}
        return {"loss": sum(result.losses.values()), **result.losses, **shown, "gradient_norm": norm}

    def _clip(self, leaves: Mapping[str, Tensor]) -> float:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.accelerator.unscale_gradients(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        value = float(norm)
        # the fp16 loss scaler finds overflows itself, skips the step and lowers its scale
        if not math.isfinite(value) and self.accelerator.scaler is None:
            raise NonFiniteError(explain_gradient(self.model, self.loss, leaves))
        if self.config.optim.grad_clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.optim.grad_clip_norm, norm)
        return value

    # -- evaluation and files ------------------------------------------------------------------------------------

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.average.applied(self.model) if self.average is not None else contextlib.nullcontext()

    def _evaluate(self, when: str) -> None:
        state = set(self.model.coder.state_names())  # is the same on all ranks already
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and name not in state:
                distributed.broadcast(buffer)  # BatchNorm's statistics: ranks evaluate one model, the exported one
        with self._averaged():
            encoded = self.encoder(self.val)
            result = evaluate(self.encoder, self.val, rerank=self.config.evaluation.rerank, encoded=encoded)
        self.last = {**result, "epoch": self.epoch, "step": self.step}
        last = self.epoch == self.config.optim.epochs
        self.encoded = encoded if last else None  # for the report
        shortlist = {f"shortlist/{k}": v for k, v in self.last.get("shortlist", {}).items()}
        self.log.write({f"val/{k}": v for k, v in {**self.last, **shortlist}.items() if k != "step"}, step=self.step)
        rows = {"val": self.last, "val, shortlist": self.last.get("shortlist")}
        self.log.say(f"{when}:\n{format_table({name: row for name, row in rows.items() if row})}")
        if self.last["rsum"] > self.best.get("rsum", -1.0) and self.step:
            self.best = {**self.last, "checkpoint": self._checkpoint_name()}
            self._export("best")

    def _checkpoint_name(self) -> str:
        return f"step_{self.step:08d}"

    def _save(self) -> None:
        common: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        if self.average is not None:
            common["average"] = self.average.state_dict()
        if self.accelerator.scaler is not None:
            common["scaler"] = self.accelerator.scaler.state_dict()
        own = {"rng": _rng_states(), "position": self.position}
        manifest = {
            "step": self.step,
            "epoch": self.epoch,
            "objective": self.objective.to_dict(),
            "config": self.config.to_dict(),
            "backbone": self._backbone(),
            "last": self.last,
            "best": self.best,
            "kept": bool(
                self.config.run.save_frequency and not self.position and self.epoch % self.config.run.save_frequency == 0
            ),
            "versions": versions(),
        }
        directory = self.folder / "checkpoints"
        checkpoint.save(
            directory,
            self._checkpoint_name(),
            manifest=manifest,
            common=common,
            own=own,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            barrier=distributed.barrier,
        )
        if distributed.rank() == 0:
            kept = [c.path.name for c in checkpoint.checkpoints(directory) if c.manifest.get("kept")]
            checkpoint.prune(directory, [*kept, self._checkpoint_name(), self.best.get("checkpoint", "")])
        distributed.barrier()
        self._export("last")

    def _export(self, tag: str) -> None:
        if distributed.rank() == 0:
            with self._averaged():
                options = inference_options(self.config)
                export_model(self.model, self.folder / "export" / tag, tokenizer=self.tokenizer, options=options)
                export_heads(self.model, self.folder / "export" / tag)
        distributed.barrier()

    def _report(self) -> None:
        """The run as a page to open, written by the first rank. The run is over and saved: a fault here is told of, and ends
        nothing."""
        from coder_plugin.data.from_config import make_pictures
        from coder_plugin.report.run import write_report

        seen: dict[str, Any] = {"reason": "the run had no validation data, or --val-frequency 0"}
        with self._averaged():
            if self.val is not None and self.config.evaluation.val_frequency:
                encoded = self.encoder(self.val) if self.encoded is None else self.encoded  # of all ranks, so outside the try
                seen = {"encoder": self.encoder, "source": self.val, "encoded": encoded}
                seen["weights"] = f"the model after epoch {self.epoch}"
            if not self.log.main:
                return
            self.model.eval()
            try:
                if len(seen) > 1:
                    seen["beside"] = make_pictures(self.config.data, split="val")
                self.log.say(f"report: {write_report(self.folder, **seen)}")
            except Exception:
                logging.warning("no report could be written (coder-plugin report %s tries again)", self.folder, exc_info=True)

    # -- resuming ------------------------------------------------------------------------------------------------

    def _found_checkpoint(self) -> tuple[dict, dict, dict | None] | None:
        directory = self.folder / "checkpoints"
        if self.config.run.resume is None:
            if checkpoint.newest(directory, verify=False) is not None:
                raise CoderError(f"{self.folder} holds a run already: --resume latest goes on with it, or choose --name")
            return None
        path = checkpoint.newest(directory) if self.config.run.resume == "latest" else Path(self.config.run.resume)
        if path is None:
            self.log.say(f"no complete checkpoint in {directory}: starting at the beginning")
            return None
        return checkpoint.load(path, rank=distributed.rank())

    def _load_model(self, state: tuple[dict, dict, dict | None]) -> None:
        manifest, common, _ = state
        now, then = self.config.to_flat(), flatten(manifest["config"])
        changed = [
            f"--{name.replace('_', '-')} was {then.get(name)}, is {now[name]}"
            for name in FIXED
            if then.get(name) != now[name]
        ]
        if changed:
            raise CoderError(f"cannot resume with other options ({'; '.join(changed)}); --pretrained starts from the export")
        saved = self.objective.from_dict(manifest["objective"])
        if comparable(saved) != comparable(self.objective):
            was, now_is = dict(saved.heads), dict(self.objective.heads)
            other = [
                f"{name}: {dict(was.get(name, ()))} and {dict(now_is.get(name, ()))}"
                for name in sorted(was.keys() | now_is.keys())
                if was.get(name) != now_is.get(name)
            ]
            heads = f" with other options of heads ({'; '.join(other)})" if other else " with another --local-loss"
            raise CoderError(
                f'the checkpoint was trained with --loss "{saved}", this run asks for "{self.objective}"'
                f"{heads if str(saved) == str(self.objective) else ''}: resume with its own loss, or start from its export: "
                "--pretrained"
            )
        made = manifest.get("backbone") or {}
        other = [name for name, value in made.get("options", {}).items() if self._backbone()["options"].get(name) != value]
        if other:
            raise CoderError(
                f"the checkpoint's model was made with other options: {', '.join(other)} (a BiGRU's vocabulary is of the "
                "training captions: name the one it had with --model-kwargs vocabulary=FILE)"
            )
        self._check_fixed_buffers(common["model"])
        try:
            self.model.load_state_dict(common["model"])
        except RuntimeError as error:
            raise CoderError(f"the checkpoint is of another model: {str(error)[:300]}") from error

    def _backbone(self) -> dict[str, Any]:
        """How a backbone of ours is made, its vocabulary in short."""
        if not isinstance(self.model, Backbone):
            return {}
        made = self.model.config()
        options = {
            name: stable_hash(*value) if isinstance(value, (list, tuple)) else value for name, value in made["options"].items()
        }
        return {**made, "options": options}

    def _check_fixed_buffers(self, weights: Mapping[str, Tensor]) -> None:
        """CoderError where a head's buffers differ that must be the checkpoint's."""
        current = self.model.state_dict()
        for name, head in self.model.coder.heads.items():
            for buffer, message in head.fixed_on_resume.items():
                key = f"coder.heads.{name}.{buffer}"
                if key in current and key in weights and not torch.equal(current[key].cpu(), weights[key]):
                    raise CoderError(message)

    def _load_rest(self, state: tuple[dict, dict, dict | None]) -> None:
        manifest, common, own = state
        try:
            self.optimizer.load_state_dict(common["optimizer"])
        except ValueError as error:
            raise CoderError(f"the checkpoint's optimizer does not fit this run: {error}") from error
        self.schedule.load_state_dict(common["schedule"])
        if self.average is not None and "average" in common:
            self.average.load_state_dict(common["average"])
        if self.accelerator.scaler is not None and "scaler" in common:
            self.accelerator.scaler.load_state_dict(common["scaler"])
        self.step, self.epoch = manifest["step"], manifest["epoch"]
        self.best, self.last = manifest["best"], manifest["last"]
        if manifest["world_size"] == distributed.world_size() and own is not None:
            self.position = own["position"]
            _set_rng_states(own["rng"])
        else:
            self.log.say(
                f"the checkpoint is of {manifest['world_size']} ranks, this run has {distributed.world_size()}: "
                f"epoch {self.epoch} starts anew, with fresh random states"
            )
            _seed(self.config.run.seed + 1 + distributed.rank())
        self.log.say(f"resumed at step {self.step}, epoch {self.epoch}")

    # -- what will happen ----------------------------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """The resolved plan that ``--dry-run`` prints: terms, heads, shapes, parameters, data, steps."""
        config, model = self.config, self.model
        training = model.training
        model.train()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), restored_buffers(model), torch.random.fork_rng(devices=devices):
            outputs = model(**prepare.example_batch(model, self.tokenizer, rows=2))
        model.train(training)
        parameters = dict(model.named_parameters())
        heads = {
            name: sum(p.numel() for p in head.parameters()) for name, head in model.coder.heads.items()
        }
        return {
            "run": str(self.folder),
            "objective": str(self.objective),
            "options": self.objective.to_dict(),
            "terms": self.objective.labels(),
            "heads": heads,
            "model": f"{config.model.name} ({type(model).__name__})",
            "outputs": {key: ["B", *value.shape[1:]] if value.ndim else [] for key, value in outputs.items()},
            "parameters": sum(p.numel() for p in parameters.values()),
            "trainable": sum(p.numel() for p in parameters.values() if p.requires_grad),
            "frozen because no term reads them": self.frozen,
            "training data": {
                "name": self.loader.source.name,
                "images": self.loader.source.num_images,
                "samples per epoch": self.loader.samples_per_epoch,
                "captions": config.data.captions,
            },
            "validation data": None if self.val is None else {"name": self.val.name, "images": self.val.num_images},
            "batch": {
                "per rank and forward": config.optim.batch_size,
                "global per step": config.optim.batch_size * config.optim.accum_freq * distributed.world_size(),
            },
            "steps per epoch": self.steps_per_epoch,
            "epochs": config.optim.epochs,
            "precision": str(self.accelerator.mixed_precision),
            "device": str(self.device),
            "machine": machine(self.device),
            "ranks": distributed.world_size(),
            "versions": versions(),
        }

    def print_plan(self) -> None:
        plan = self.plan()  # on every rank: a forward may gather
        if distributed.rank() == 0:
            print(json.dumps(plan, indent=2))


def comparable(objective: Objective) -> Objective:
    """Without the options that a resumed run may have changed, as the heads declare them."""
    heads = {
        name: tuple(option for option in options if option[0] not in registry.load("heads", name).free_on_resume)
        for name, options in objective.heads
    }
    return replace(objective, heads=tuple(heads.items()))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
