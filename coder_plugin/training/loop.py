"""The trainer: epochs of steps, evaluation, checkpoints and exports.

The model and loss objects are the same as in open_clip's own trainer. Loaders and schedules are not given to
``accelerator.prepare``, which would send rank 0's data to all ranks and step the schedule once per rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.concepts.tags import NAMES, WORDS
from coder_plugin.config import TrainConfig
from coder_plugin.data.bad_samples import total
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.from_config import make_negatives
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.pixels import tensors_of, to_device
from coder_plugin.distributed import on_first_rank
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import format_table
from coder_plugin.evaluation.evaluate import Encoder, evaluate, shortlist_length
from coder_plugin.evaluation.metrics import format_skipped
from coder_plugin.evaluation.zero_shot import accuracies, read_classes, zero_shot
from coder_plugin.following import Following, clamp_logit_scale, follow
from coder_plugin.pretrained import build
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.pretrained.export import export_model, exported_step, inference_options
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.terminal import echo
from coder_plugin.training import checkpoint, fine_tuning, prepare, resume
from coder_plugin.training.accelerator import make_accelerator, tf32_products
from coder_plugin.training.average import WeightAverage
from coder_plugin.training.callbacks import Callback
from coder_plugin.training.collapse import CollapseWatch
from coder_plugin.training.disk import check_shared, run_folder, run_lock, writing
from coder_plugin.training.log import RunLog, StepLines, peak_memory, versions
from coder_plugin.training.optim import create_optimizer, create_schedule, total_steps, warmup_steps, with_epochs
from coder_plugin.training.plan import format_plan, make_plan, options_with_origins
from coder_plugin.training.signals import EXIT_STATUS, StoppedBySignal, StopSignals
from coder_plugin.training.step import NonFiniteError, StepResult, forward_backward

#: The fp16 loss scaler may skip this many consecutive steps while it searches for its scale.
MAX_SKIPPED_STEPS = 25


class _Group(NamedTuple):
    """The micro-batches of a step, the loader's position after them, and the seconds that they took to arrive.

    ``copied``: an event after their copy to the device. None: they are still on the host.
    """

    batches: list[dict[str, Any]]
    position: dict[str, Any]
    waited: float
    copied: torch.cuda.Event | None = None


class Trainer:
    """Train a model with a loss on a data set.

    Args:
        model: an open_clip model name, a region model's name, the path of a configuration; or a model made by
            :func:`coder_plugin.create_model`; or a plain open_clip model, to which the loss's heads are added (give its name
            as ``config={"model": NAME}``: its tokenizer goes by that name).
        loss: a loss expression, a list of terms (names and objects), an
            :class:`~coder_plugin.objective.Objective`, or a :class:`~coder_plugin.coder.CoderLoss` of the given model.
        train: training data: a path, ``"scenes"``, a data source, a ``Dataset`` or ``IterableDataset`` of Hugging Face's
            ``datasets``, or a list of :class:`~coder_plugin.data.item.Item`.
        val: validation data, in the same forms. None: no evaluation.
        config: all other options: a :class:`~coder_plugin.config.TrainConfig`, or a mapping of options, flat
            (``{"lr": 1e-3}``) or nested (``{"optim": {"lr": 1e-3}}``). None: the defaults.
        callbacks: called after steps, evaluations, saves and at the end.

    Attributes:
        step: optimizer steps taken so far. epoch: epochs completed so far.
        seconds: of training so far, with the waits for data, without evaluation and saving.
        stop: set it to True, on one rank or several, to end the run with an evaluation and a checkpoint: in one process after
            the current step. Several processes end together; what a callback sets after a step travels with the next step,
            which is then the last. ``config={"resume": "latest"}`` continues with the step after it, also inside an epoch.
        train_transform: of a training picture; an :class:`~coder_plugin.data.pixels.EightBit`, whose batches are normalised on
            the device, where open_clip's transform can be one.
        model, loss, loader, optimizer, schedule, accelerator: what a step works with; optimizer and schedule exist once
            :meth:`run` has begun.

    Raises:
        CoderError: options, data and model that do not go together.

    Example:
        >>> import tempfile
        >>> options = {"epochs": 1, "batch_size": 4, "train_num_samples": 8, "workers": 0, "logs": tempfile.mkdtemp()}
        >>> trainer = Trainer(model="coder-tiny", loss="dcl", train="scenes", config=options)
        >>> trainer.steps_per_epoch
        2
    """

    def __init__(
        self,
        *,
        model: Any,
        loss: Any,
        train: Any,
        val: Any = None,
        config: TrainConfig | Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config = prepare.config_of_objects(config, model=model, loss=loss, train=train, val=val)
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise CoderError(f"{callback!r} is not a callback: pass an instance of a subclass of coder_plugin.Callback")
        optim, data = config.optim, config.data
        set_max_pixels(data.max_image_pixels)  # also of pictures in data that are passed
        self.accelerator = make_accelerator(config)
        objective = prepare.make_objective(config, loss, model)  # it asks for the number of processes
        prepare.check_objects(config, objective, model=model, loss=loss)
        self.device = self.accelerator.device
        self.folder = run_folder(config.run.logs, config.run.name or self._default_name())
        resume.check_run_exists(config, self.folder)

        source, self.val = (prepare.open_data(config, each, split) for each, split in ((train, "train"), (val, "val")))
        assert source is not None
        samples = source.samples(data.captions, data.train_num_samples)
        negatives = make_negatives(data, source)
        self.steps_per_epoch = prepare.steps_per_epoch(config, source.name, samples)
        self.config = config = with_epochs(config, self.steps_per_epoch)
        self.total_steps = total_steps(config, self.steps_per_epoch)
        self.log = RunLog(self.folder, self.accelerator, config)
        zeroshot, classnames, templates = (getattr(config.evaluation, x) for x in ("zeroshot", "classnames", "templates"))
        self.classes = None if zeroshot is None else read_classes(zeroshot, classnames, templates or "openai")
        resume.seed_everything(config.run.seed)
        self.derived: dict[str, Any] = {}
        if hasattr(model, "coder"):  # its heads are made: their options stand
            self.objective = replace(objective, heads=model.coder.objective.heads)
        else:
            self.objective = prepare.fit_objective(objective, config, samples_per_epoch=samples)
            given = {(head, name) for head, options in objective.heads for name, _ in options}
            fitted = ((head, name, value) for head, options in self.objective.heads for name, value in options)
            self.derived = {f"{head}.{name}": value for head, name, value in fitted if (head, name) not in given}
        if isinstance(model, str):
            prepare.say_random_weights(config)
        self.model: Any = prepare.make_training_model(config, self.objective, self.device, source, model=model)
        self.loss = loss if isinstance(loss, CoderLoss) else prepare.make_loss(config, self.objective, self.model)
        self._warn_of_unmasked_terms()
        for advice in fine_tuning.advice(config, self.model, self.loss, pretrained=isinstance(model, str)):
            self.log.warn(f"{advice.text}: {advice.do}")
        self.tokenizer = build.make_tokenizer(config.model, self.model)
        self.train_transform = prepare.make_train_transform(self.model, config)
        val_transform = build.make_transform(self.model, max_regions=data.max_regions)
        self.loader = TrainLoader(
            source,
            batch_size=optim.batch_size,
            transform=self.train_transform,
            tokenizer=build.make_tokenizer(config.model, self.model, word_dropout=data.word_dropout),
            positives=prepare.make_positives(self.model),
            negatives=negatives,
            tags=prepare.make_tags(self.model, config),
            seed=config.run.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            workers=data.workers,
            captions=data.captions,
            max_bad_samples=data.max_bad_samples,
            num_samples=data.train_num_samples,
            pin_memory=self.device.type == "cuda",
        )
        self.frozen = prepare.check_run(config, self.model, self.loss, self.tokenizer, self.total_steps)
        self.encoder = Encoder(
            self.model,
            self.tokenizer,
            val_transform,
            device=self.device,
            batch_size=optim.batch_size,
            workers=data.workers,
            max_bad_samples=data.max_bad_samples,
            autocast=self.accelerator.autocast,
        )
        shortlist_length(config.evaluation.rerank, self.encoder)  # raises here rather than after the first epoch
        self.step = self.epoch = self.skipped = 0
        self.stop = self.caption_stats_logged = False
        self.position: Any = None
        self.seconds = 0.0
        self._is_last = self._ends_epoch = False
        self._result: StepResult | None = None
        self.following: Following | None = None
        self._hooks: list[Any] = []
        self._copies: Any = None
        self.saved: tuple[int, int] | None = None
        self.changes: list[dict[str, Any]] = []
        self.signals = StopSignals()
        self.best: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        # of random weights it is chance
        trained = not isinstance(model, str) or fine_tuning.starts_from_weights(config)
        self._measures_before = config.evaluation.val_before or trained
        self.zero_shot: dict[str, Any] = {}
        self.encoded: Encoded | None = None

    @classmethod
    def from_config(cls, config: TrainConfig | Mapping[str, Any], *, callbacks: Sequence[Callback] = ()) -> Trainer:
        """The trainer that a configuration names completely: what ``coder-plugin train`` uses.

        Args:
            config: a configuration, or options (flat or nested) over the defaults.
            callbacks: as in :class:`Trainer`.
        """
        if not isinstance(config, TrainConfig):
            config = resolve_config(config, flags_name="argument")
        scenes = "scenes" if config.data.on_scenes and not config.data.hold_aside else None
        return cls(
            model=config.model.name,
            loss=config.loss.expression,
            train=config.data.train or "scenes",
            val=config.data.val or scenes,
            config=config,
            callbacks=callbacks,
        )

    def _default_name(self) -> str:
        stamp = distributed.gather_objects(time.strftime("%Y_%m_%d-%H_%M_%S"))[0]
        return f"{stamp}-{Path(self.config.model.name).stem}"

    def _warn_of_unmasked_terms(self) -> None:
        unmasked = [label for label, term in self.loss.terms.items() if "same_image" not in term.supports]
        if self.config.data.captions == "all" and unmasked:
            logging.warning(
                "--captions all: %s takes the captions of one image as negatives of each other: use --captions draw",
                " and ".join(unmasked),
            )

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last epoch or step. Returns ``{"before": recall, "last": recall, "best": recall, "folder": path}``.

        Raises:
            StoppedBySignal: after SIGTERM, SIGHUP, SIGUSR1 or SIGINT, with a checkpoint of the last step. As a ``SystemExit``
                it ends the process with status 75; ``config={"resume": "latest"}`` continues the run.
            CoderError: another run writes into the folder; nothing whole can be resumed; the disk is full.
        """
        with run_lock(self.folder), self.signals:
            check_shared(self.folder)
            try:
                return self._run()
            finally:
                if self.following is not None:  # another loop may train the model afterwards
                    self.following.remove()
                for hook in self._hooks:
                    hook.remove()

    def _run(self) -> dict[str, Any]:
        config = self.config
        state = resume.find_state(config, self.folder)
        if state is not None:
            resume.restore_model(self, state)
        elif config.run.resume is not None:
            self.log.say(f"no complete checkpoint in {self.folder / 'checkpoints'}: starting from the beginning")
        self.setup_optimizer()
        if state is not None:
            resume.restore_training(self, state)
            self.saved = (self.step, self.epoch)
            if on_first_rank(lambda: exported_step(self.folder / "export" / "last") != self.step):
                self._export("last")
        else:
            resume.seed_everything(config.run.seed + 1 + distributed.rank())  # dropout differs between ranks
        plan = make_plan(self)
        with writing("the run's files", self.folder, self.folder):
            on_first_rank(lambda: resume.begin_after(self, state))
            self.best = distributed.gather_objects(self.best)[0]  # dropped where its export cannot be written again
            on_first_rank(lambda: self.log.write_plan(plan))
        self.log.start(plan)
        with self.log.closing():
            if self.step == 0:
                self._evaluate_or_leave("before the first step", position=None)
            while self.epoch < config.optim.epochs and not self._is_finished() and not self._all_stop():
                if self._train_epoch():
                    position, self.epoch, self.position = self.position, self.epoch + 1, None
                    self._evaluate_or_leave(f"after epoch {self.epoch}", position)
                else:
                    with self._same_random_states():
                        self._evaluate(f"after step {self.step}")
                self._save()
                if self.step >= self.total_steps:
                    break
            results = {"before": self.before, "last": self.last, "best": self.best, "folder": str(self.folder)}
            if self.best and self.best["rsum"] < self.before.get("rsum", 0.0):
                self.log.warn(
                    f"the best evaluation has R@sum {self.best['rsum']:.1f}, the model before training "
                    f"{self.before['rsum']:.1f}: training made it worse. Give a lower --lr, or a longer --warmup"
                )
            for callback in self.callbacks:
                callback.on_train_end(self, results)
        return results

    def setup_optimizer(self) -> None:
        """Make optimizer, schedule and weight average, and wrap the model for several processes. :meth:`run` calls it."""
        model, ema_decay = self.model, self.config.optim.ema_decay
        if self.config.model.torchcompile:
            model.compile()
            self.loss.compile()
        state_names = model.coder.state_names()
        if state_names:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, state_names)
        optimizer = create_optimizer(model, self.config)
        self.schedule = create_schedule(optimizer, self.config, self.steps_per_epoch)
        self.collapse = CollapseWatch(warmup_steps(self.config, self.steps_per_epoch))
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
        ]
        self.following = follow(model, optimizer)
        # batches are copied beside the step before; with several micro-batches memory is short
        ahead = self.device.type == "cuda" and self.config.optim.accum_freq == 1
        self._copies = torch.cuda.Stream(self.device) if ahead else None
        self.average = WeightAverage(model, ema_decay, leave_out=state_names) if ema_decay else None

    def _same_random_states(self) -> contextlib.AbstractContextManager[None]:
        """A context that changes no random state, so that an epoch can be resumed as if it had not been entered."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, or to a stop. Returns whether the epoch is complete."""
        accum_freq, model = self.config.optim.accum_freq, self.model
        model.train()
        with resume.reading("the checkpoint's position in the data") if self.position else contextlib.nullcontext():
            batches = self.loader.epoch(self.epoch, self.position)
            at = self.loader.position()
        self.position = None if self.position is None else at
        clock = time.perf_counter()
        groups = self._groups(batches)
        following = next(groups)
        self._is_last = len(following.batches) < accum_freq
        left = self.total_steps - self.step
        lines = StepLines(self.log, self.epoch, at["batches"] // accum_freq, at["of"] // accum_freq, left)
        leaving = distributed.any_rank(self._must_leave() or left <= 0, self.device)
        while not leaving:
            group, following = following, next(groups)
            position, waited = group.position, group.waited
            # a rank with bad samples may run out of batches first: then all ranks stop
            ends_run = self.step + 1 >= self.total_steps
            self._is_last, self._result = ends_run or len(following.batches) < accum_freq, None
            # all ranks measure together: with several, the end is the planned one
            alone = distributed.world_size() == 1
            self._ends_epoch = self._is_last if alone else ends_run or self._is_epoch_over(position)
            logged = self.is_logging_step
            rate = max(self.schedule.get_last_lr())  # that of this step: the schedule goes on with the optimizer
            metrics = self._checked_step(self._on_device(group))
            self.step += 1
            self.position = position
            lines.update(metrics, waited, ends=self._ends_epoch)
            if logged:
                self.log.warn(self.collapse.update(self.step - 1, metrics))
                health = {f"coder/{name}": value for name, value in model.coder.health().items()}
                skipped = {"skipped_samples": len(self.loader.bad)} if len(self.loader.bad) else {}  # of the first rank
                self.log.write({**metrics, **health, **skipped, "epoch": self.epoch, "lr": rate}, step=self.step - 1)
            for callback in self.callbacks:
                callback.on_step_end(self, metrics)
            self.seconds += time.perf_counter() - clock
            if self.config.run.save_every_steps and self.step % self.config.run.save_every_steps == 0:
                self._save()
            leaving = self._all_leave()
            clock = time.perf_counter()
        if distributed.any_rank(bool(self.signals.received), self.device):
            self._leave()
        bad = total(distributed.gather_objects(self.loader.bad))
        self.log.bad_samples(bad, epoch=self.epoch, step=self.step)
        self._log_caption_stats()
        stopped = self._all_stop() or self.step >= self.total_steps
        if self.position is None and not stopped:
            raise CoderError(
                f"epoch {self.epoch + 1} gave no step on some rank: {bad} (see the warnings), and the rest is less than a "
                "batch on some rank"
            )
        return not stopped or (self.position is not None and self._is_epoch_over(self.position))

    def _groups(self, batches: Iterator[dict[str, Any]]) -> Iterator[_Group]:
        """The micro-batches of each step; at the end of the epoch fewer than ``--accum-freq``."""
        while True:
            started = time.perf_counter()
            group = list(itertools.islice(batches, self.config.optim.accum_freq))
            waited, copied = time.perf_counter() - started, None
            if self._copies is not None:
                with torch.cuda.stream(self._copies):
                    group = [self._to_device(batch) for batch in group]
                copied = self._copies.record_event()
            yield _Group(group, self.loader.position(), waited, copied)

    def _on_device(self, group: _Group) -> list[dict[str, Any]]:
        """Its micro-batches, for the current stream."""
        if group.copied is None:
            return [self._to_device(batch) for batch in group.batches]
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(group.copied)
        for batch in group.batches:
            for each in tensors_of(batch):
                each.record_stream(stream)
        return group.batches

    def _must_leave(self) -> bool:
        """Whether this rank cannot take another step, or has been asked to stop."""
        return self._is_last or self.stop or bool(self.signals.received)

    def _all_leave(self) -> bool:
        """Whether a rank must leave: from what travelled with the step's losses, or where a ``training_step`` of another class
        has not sent it, in a collective."""
        result, self._result = self._result, None
        if result is None or distributed.world_size() == 1:
            return distributed.any_rank(self._must_leave(), self.device)
        result.check()
        return result.leaving

    def _all_stop(self) -> bool:
        """Whether ``stop`` is set on a rank, and from now on on all. Call it on all ranks."""
        self.stop = distributed.any_rank(self.stop, self.device)
        return self.stop

    def _is_finished(self) -> bool:
        """Whether the last step was taken, and evaluated and saved: a kill may come between."""
        return self.step >= self.total_steps and (self.position is None or resume.evaluated_step(self) == self.step)

    def _is_epoch_over(self, position: Mapping[str, Any]) -> bool:
        accum_freq = self.config.optim.accum_freq
        return position["batches"] // accum_freq >= position["of"] // accum_freq

    def _evaluate_or_leave(self, when: str, position: Any) -> None:
        """Evaluate. In one process a signal ends that at once: the run is saved as before it, and a resumed run repeats it.

        A signal that comes while weights are exchanged or files are written is heeded at the next step boundary.

        Args:
            position: of the end of the epoch just completed; None before the first step.
        """
        epoch, best, last, accuracy = self.epoch, self.best, self.last, self.zero_shot
        states = resume.rng_states()
        try:
            self._evaluate(when, interruptible=distributed.world_size() == 1)
        except StoppedBySignal:
            resume.set_rng_states(states)
            self.epoch, self.position = epoch - (position is not None), position
            self.best, self.last, self.zero_shot = best, last, accuracy
            self._leave()

    def _leave(self) -> NoReturn:
        """Save, unless this very state is saved already, and end the run with the status of a stop by a signal."""
        name = next(filter(None, distributed.gather_objects(self.signals.received)), "a signal")
        if self.step and self.saved != (self.step, self.epoch):
            self._save_checkpoint()
        kept = f"its checkpoint is kept in {self.folder / 'checkpoints'}" if self.step else "there is nothing to keep yet"
        advice = f"the same command with --name {self.folder.name} --resume latest continues it"
        self.log.say(f"{name}: stopped after step {self.step}; {kept}; {advice} (exit status {EXIT_STATUS})")
        raise StoppedBySignal

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return to_device(batch, self.device, self.train_transform)

    def _log_caption_stats(self) -> None:
        """After the first epoch: counts of positive captions by kind and of tokens by word class, over all ranks."""
        if self.caption_stats_logged:
            return
        self.caption_stats_logged = True
        if prepare.make_positives(self.model) is not None:
            counts: Counter[str] = sum(distributed.gather_objects(self.loader.positives_made), Counter())
            self.log.say("positive captions: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(counts.items())))
        if self.config.data.hard_negatives:
            drawn: Counter[str] = sum(distributed.gather_objects(self.loader.negatives_drawn), Counter())
            self.log.say(f"hard negatives: {drawn['filled']:,} of {drawn.total():,} places filled")
            if few := self.loader.few_negatives(drawn):
                logging.warning("hard negatives: below 10 %% of the places are filled%s", few)
        if self.model.coder.reads_tags:
            tagged: Counter[str] = sum(distributed.gather_objects(self.loader.tagged), Counter())
            self.log.say("tokens by class of word: " + ", ".join(f"{name} {tagged[name]:,}" for name in WORDS))
            for name, head in self.model.coder.heads.items():
                classes = [NAMES[code] for code in head.tag_classes()]
                if classes and not any(tagged[each] for each in classes):
                    logging.warning(
                        "no token belongs to a %s: the head %r has no word to read (does --tagger suit these captions?)",
                        " or ".join(classes),
                        name,
                    )
            if tagged["unmatched"]:
                self.log.say(
                    f"{tagged['unmatched']:,} of {tagged['captions']:,} captions: the tagger's words do not match the "
                    'tokens, all of which count as "other"'
                )

    # -- a step --------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        """A fused optimizer changes nothing where a value is not finite; before another's step the host reads the figures."""
        if self._result is None:
            return
        if self.accelerator.scaler is None and all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self._result.found_inf()
        else:
            self._result.check(overflow=self.accelerator.scaler is not None)

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Its kernels are queued, and the heads' state has not advanced: the host reads the figures, and why a step failed."""
        optimizer.found_inf = None
        if self._result is not None:
            self._result.check(overflow=self.accelerator.scaler is not None)

    @property
    def is_logging_step(self) -> bool:
        """Whether the current step writes a line to ``metrics.jsonl``: every ``--log-every-n-steps``, and an epoch's last."""
        return self._ends_epoch or self.step % self.config.run.log_every_n_steps == 0

    def training_step(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """One optimizer step: forward, loss, backward, clipping, optimizer, state. Override it to change what a step does.

        Args:
            batches: ``--accum-freq`` micro-batches on the device, each the keyword arguments of the model's forward (image
                [B, 3, H, W] or regions, text [B, T], image_id [B], …). Their pairs are all each other's negatives.

        Returns:
            What is logged: ``loss``, each term's loss, ``gradient_norm``.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite. Weights and state, BatchNorm's statistics too, are as before.
        """
        result = self.forward_backward(batches)
        self.clip_gradients(result)
        self.optimizer_step(result)
        assert result.gradient_norm is not None
        return {**result.metrics, "gradient_norm": result.gradient_norm}

    def forward_backward(self, batches: Sequence[Mapping[str, Any]]) -> StepResult:
        """Forward pass, loss and backward pass: gradients of all micro-batches are in ``.grad`` afterwards."""
        self._result = forward_backward(
            self.wrapped, self.loss, batches, self.accelerator, measure=self.is_logging_step, leaving=self._must_leave
        )
        return self._result

    def clip_gradients(self, result: StepResult) -> Tensor:
        """Unscale the gradients, clip them with ``--grad-clip-norm``, and return their norm before clipping, 0-d."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.accelerator.unscale_gradients(self.optimizer)
        result.norm = norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if self.config.optim.grad_clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.optim.grad_clip_norm, norm)
        return norm

    def optimizer_step(self, result: StepResult) -> None:
        """Step optimizer and schedule. Unless the loss scaler skips the step, the heads' state advances with it, once.

        Here the host waits for the device, once, and reads the norm with all figures of the step: once a fused
        optimizer's step is queued, or before that of another.

        Raises:
            NonFiniteError: a loss, a gradient, or what a head will write is NaN or infinite. The step was not taken, and the
                gradients have been dropped.
        """
        self._result, scaler = result, self.accelerator.scaler
        if scaler is not None:
            try:  # the fp16 loss scaler detects overflows, skips the step and lowers its scale
                result.check(overflow=True)
            except NonFiniteError:
                scaler.update()  # it may unscale the next step's gradients
                raise
        self.optimizer.step()
        self.schedule.step()
        self.skipped = self.skipped + 1 if self.accelerator.optimizer_step_was_skipped else 0
        if self.skipped > MAX_SKIPPED_STEPS:
            cause = result.explain_gradient()
            raise NonFiniteError(f"{cause} is not finite: the loss scaler has skipped {self.skipped} consecutive steps")
        self.optimizer.zero_grad()
        if not self.skipped:
            clamp_logit_scale(self.model)
            if self.average is not None:
                self.average.update(self.model)

    def _checked_step(self, batches: list[dict[str, Any]]) -> dict[str, float]:
        try:
            with tf32_products(self.config.optim.tf32):
                metrics = self.training_step(batches)
        except NonFiniteError as error:
            self.optimizer.zero_grad()
            if self.following is not None:
                self.following.step_failed()
            raise NonFiniteError(
                f"{error} at step {self.step} (epoch {self.epoch + 1}): the step was not taken and nothing was written; "
                f"lower --lr, lengthen --warmup or clip with --grad-clip-norm; {resume.advice(self.folder)}"
            ) from error
        if not isinstance(metrics, Mapping):
            raise CoderError(f"training_step returned {type(metrics).__name__}: it must return a dict of numbers to log")
        return {name: float(value) for name, value in metrics.items()}

    @property
    def is_last_epoch(self) -> bool:
        """Whether no step follows."""
        return self.stop or self.epoch == self.config.optim.epochs or self.step >= self.total_steps

    # -- evaluation and files ------------------------------------------------------------------------------------

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has its averaged weights, if ``--ema-decay`` keeps an average."""
        return self.average.applied(self.model) if self.average is not None else contextlib.nullcontext()

    def _is_due(self, frequency: int) -> bool:
        """Whether something is measured now that is measured every so many epochs, before the first step, and at the end."""
        return frequency > 0 and (self.is_last_epoch or self.epoch % frequency == 0)

    def _evaluate(self, when: str, *, interruptible: bool = False) -> None:
        options = self.config.evaluation
        recall = self.val is not None and self._is_due(options.val_frequency) and (self.step > 0 or self._measures_before)
        classes = self.classes if self._is_due(options.zeroshot_frequency) else None
        if not (recall or classes):
            return
        state_names = set(self.model.coder.state_names())  # equal on all ranks already
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and name not in state_names:
                distributed.broadcast(buffer)  # BatchNorm's statistics: all ranks evaluate the model that is exported
        now = {"epoch": self.epoch, "step": self.step}
        # the signal may interrupt within the averaged weights only, not while they are put in place or the model's own restored
        with self.averaged_weights(), self.signals.interrupting(interruptible):
            if recall:
                encoded = self.encoder(self.val)
                self.encoded = encoded if self.is_last_epoch else None  # large, so only kept for the report at the end
                last = {**evaluate(self.encoder, self.val, rerank=options.rerank, encoded=encoded), **now}
            if classes is not None:
                measured = accuracies(zero_shot(self.encoder, classes))
        results: dict[str, Any] = {}
        lines = []
        if recall:
            results = self.last = last
            rows = {"val": last, "val, shortlist": last.get("shortlist")}
            lines.append(format_table({name: row for name, row in rows.items() if row}) + format_skipped({"val": last}))
        if classes is not None:
            before = measured["zeroshot_top1"] if self.step == 0 else self.zero_shot.get("before")
            self.zero_shot = {**measured, **({} if before is None else {"before": before}), **now}
            results = {**results, **measured, **now}
            lines.append(fine_tuning.format_accuracy(self.zero_shot))
        shortlist = {f"shortlist/{k}": v for k, v in results.get("shortlist", {}).items()}
        skipped = {"skipped_samples": sum(results["skipped"].values())} if "skipped" in results else {}
        figures = {**results, **shortlist, **skipped}
        self.log.write({f"val/{k}": v for k, v in figures.items() if k != "step"}, step=self.step)
        self.log.say("\n".join([f"{when}:", *lines]))
        if recall and not self.step:
            self.before = self.last
        if recall and self.last["rsum"] > self.best.get("rsum", -1.0) and self.step:
            self.best = {**self.last, "checkpoint": self._checkpoint_name()}
            self._export("best")
        for callback in self.callbacks:
            callback.on_evaluation_end(self, results)

    def _checkpoint_name(self) -> str:
        return f"step_{self.step:08d}"

    def _save(self) -> None:
        path = self._save_checkpoint()
        self._export("last")
        for callback in self.callbacks:
            callback.on_save(self, path)

    def _save_checkpoint(self) -> Path:
        """Write a checkpoint; keep it, the one before, the best and those of ``--save-frequency``."""
        every = self.config.run.save_frequency
        manifest = {
            "step": self.step,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "memory_mb": peak_memory(self.device),
            "objective": self.objective.to_dict(),
            "config": self.config.to_dict(),
            "backbone": resume.describe_backbone(self.model),
            "last": self.last,
            "best": self.best,
            "before": self.before,
            "zero_shot": self.zero_shot,
            "changes": self.changes,
            "samples_per_epoch": self.loader.samples_per_epoch,
            "kept": bool(every and not self.position and self.epoch % every == 0),
            "versions": versions(),
        }
        common, own = resume.collect_state(self)
        directory, name = self.folder / "checkpoints", self._checkpoint_name()
        with writing("a checkpoint", directory / name, self.folder):
            checkpoint.save(directory, name, manifest=manifest, common=common, own=own)
            on_first_rank(lambda: self._prune(directory, name))
        self.saved = (self.step, self.epoch)
        return directory / name

    def _prune(self, directory: Path, name: str) -> None:
        found = checkpoint.checkpoints(directory)
        kept = [each.path.name for each in found if each.manifest.get("kept")]
        before = [each.path.name for each in found if each.path.name != name][:1]
        checkpoint.prune(directory, [*kept, *before, name, self.best.get("checkpoint", "")])

    def _export(self, tag: str) -> None:
        folder = self.folder / "export" / tag
        with writing("an export", folder, self.folder):
            on_first_rank(lambda: self._write_export(folder))

    def _write_export(self, folder: Path) -> None:
        with self.averaged_weights():
            options = inference_options(self.config)
            export_model(self.model, folder, tokenizer=self.tokenizer, options=options, step=self.step)

    def print_plan(self, *, as_json: bool = False) -> None:
        """Print the resolved plan, and where each value that is not a default comes from.

        Args:
            as_json: for machines: all of the plan, and every option.
        """
        plan = {**make_plan(self), "settings": options_with_origins(self.config)}
        if distributed.rank() == 0:
            echo(json.dumps(plan, indent=2) if as_json else format_plan(plan))
