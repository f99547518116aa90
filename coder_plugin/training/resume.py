"""Resuming a run: find its checkpoint, check that the run is the same, and restore model, optimizer and random states."""

from __future__ import annotations

import json
import logging
import os
import random
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin import distributed, registry
from coder_plugin.backbones.base import Backbone
from coder_plugin.config import TrainConfig, flatten, get_option
from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.files import remove_leftovers
from coder_plugin.objective import Objective
from coder_plugin.training import checkpoint, exports, finite
from coder_plugin.training.disk import on_first_rank
from coder_plugin.training.metrics_file import cut_back
from coder_plugin.training.run_folder import FILES
from coder_plugin.training.saved_state import check_like, check_optimizer, reading

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer

#: Options that a resumed run must share with its checkpoint, because the optimizer's state depends on them.
FIXED = (
    "model opt wd beta1 beta2 eps momentum layer_decay lora_rank accum_freq lock_image lock_image_unlocked_groups "
    "lock_text lock_text_unlocked_layers aggregator context_blocks model_kwargs text_lr_scale heads_lr_scale"
).split()


#: Options that say where and how long a run is, not what it computes: their changes are not recorded.
_OF_RUN = frozenset("logs name resume config report report_to wandb_project_name dry_run device".split())
_log = logging.getLogger(__name__)


class SavedState(NamedTuple):
    """A checkpoint's content: its manifest, the state of all ranks, this rank's (None with another number of ranks), and its
    folder."""

    manifest: dict[str, Any]
    common: dict[str, Any]
    rank: dict[str, Any] | None
    path: Path


def check_run_exists(config: TrainConfig, folder: Path) -> None:
    """CoderError if ``--resume latest`` names a run that was never started, such as a mistyped name."""
    if config.run.resume != "latest" or any((folder / name).exists() for name in FILES):
        return
    names = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    hint = did_you_mean(folder.name, names)
    raise CoderError(f"--resume latest: {folder} holds no run{hint}; check --name and --logs, or start it without --resume")


def find_state(config: TrainConfig, folder: Path) -> SavedState | None:
    """The state that ``--resume`` names; None without ``--resume``, or if ``latest`` finds a run that has saved nothing yet.

    Every rank calls this. Rank 0 chooses the checkpoint, and all ranks load that one.

    Raises:
        CoderError: the folder holds a run and ``--resume`` is not given; the checkpoint cannot be read; there are checkpoints,
            and none is whole.
    """
    chosen: list[Path | None] = []
    on_first_rank(lambda: chosen.append(_choose(config, folder)))
    path = distributed.gather_objects(chosen[0] if chosen else None)[0]
    if path is None:
        return None
    # rank 0 has just compared the checksums; each other rank compares those of what it reads itself
    return SavedState(*checkpoint.load(path, rank=distributed.rank(), verify=not chosen), path)


def _choose(config: TrainConfig, folder: Path) -> Path | None:
    """The checkpoint to resume from, all of whose files have been compared with their checksums."""
    directory = folder / "checkpoints"
    problems: list[str] = []
    if config.run.resume is None:
        if checkpoint.checkpoints(directory, problems=problems) or problems:
            raise CoderError(f"{folder} holds a run already: resume it with --resume latest, or choose another --name")
        return None
    if config.run.resume == "latest":
        path = checkpoint.newest(directory, problems=problems)
        if path is None and problems:
            raise CoderError(
                f"no checkpoint in {directory} is whole, and nothing was changed: {'; '.join(problems)}. Bring one back from a "
                "copy, or start anew under another --name"
            )
        for problem in problems:
            _log.warning("skipped a checkpoint: %s", problem)
        return path
    path = checkpoint.find(config.run.resume)
    checkpoint.verify(path)
    return path


def changed_options(config: TrainConfig, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options that a resumed run has otherwise than its checkpoint, as ``{"step", "option", "was", "is"}``."""
    options, saved = json.loads(json.dumps(config.to_flat())), flatten(manifest["config"])
    names = [name for name in options if name not in _OF_RUN and saved.get(name) != options[name]]
    return [{"step": manifest["step"], "option": name, "was": saved.get(name), "is": options[name]} for name in names]


def begin_after(trainer: Trainer, state: SavedState | None) -> None:
    """Clear away, on rank 0, what the run will write again: later checkpoints and a later ``export/best`` are moved to
    ``set-aside``, later rows of ``metrics.jsonl`` are removed. Then ``export/best`` is that of the checkpoint's record."""
    metrics = trainer.folder / "metrics.jsonl"
    for name in ("plan.json", "config.json", "metrics.jsonl"):
        remove_leftovers(trainer.folder / name)
    checkpoint.tidy(trainer.folder / "checkpoints")
    if state is None:
        if metrics.exists():  # of a run that was killed before its first checkpoint
            old = metrics.with_name("metrics.jsonl.old")
            os.replace(metrics, old.with_name(f"{old.name}-{time.time_ns()}") if old.exists() else old)
    aside = trainer.folder / "set-aside"
    if place := exports.set_aside_best(trainer.folder, aside, after=trainer.step):
        trainer.log.say(f"moved export/best to {place}, because it is later than step {trainer.step}")
    if state is None:
        return
    exports.restore_best(trainer, state.path.parent)
    if moved := checkpoint.set_aside(trainer.folder / "checkpoints", aside, after=trainer.step):
        trainer.log.say(f"moved to {aside}, because they are later than step {trainer.step}: {', '.join(moved)}")
    evaluated = max(measured.get("step", -1) for measured in (trainer.last, trainer.zero_shot))
    cut_back(metrics, step=trainer.step, evaluated=evaluated, epochs=trainer.epoch)


def advice(folder: Path) -> str:
    """With which ``--resume`` a run goes on from before its loss or gradient became infinite."""
    found = checkpoint.checkpoints(folder / "checkpoints", problems=[])
    if not found:
        return "no checkpoint was saved yet: start it again (--save-every-steps saves within an epoch)"
    options = [f"--resume {shlex.quote(str(each.path))}" for each in found]
    older = f", or {options[1]} if the loss was already rising there" if len(found) > 1 else ""
    return f"go on with {options[0]}{older}"


@reading("the checkpoint")
def restore_model(trainer: Trainer, state: SavedState) -> None:
    """Load the model's weights and state.

    Raises:
        CoderError: the run has other options, another loss or another model than the checkpoint.
    """
    manifest, weights = state.manifest, state.common["model"]
    options, saved_options = trainer.config.to_flat(), flatten(manifest["config"])
    changed = [
        f"{get_option(name).flag} was {saved_options.get(name)}, is {options[name]}"
        for name in FIXED
        if saved_options.get(name) != options[name]
    ]
    if changed:
        raise CoderError(f"cannot resume with other options ({'; '.join(changed)}); --pretrained starts from the export")
    if saved_options.get("train_data") is not None and options["train_data"] is None:
        raise CoderError(
            f"the run was trained on {saved_options['train_data']}, and without --train-data it would go on with the built-in "
            f"scenes: repeat all flags of the run, or begin with --config {shlex.quote(str(trainer.folder / 'config.json'))}"
        )
    objects = [term for term in trainer.objective.terms if term.is_passed]
    _check_objective(trainer.objective, Objective.from_dict(manifest["objective"], objects=objects))
    options = describe_backbone(trainer.model).get("options", {})
    saved_options = (manifest.get("backbone") or {}).get("options", {})
    other = [name for name, value in saved_options.items() if options.get(name) != value]
    if other:
        raise CoderError(
            f"the checkpoint's model was made with other options: {', '.join(other)} (a BiGRU's vocabulary comes from the "
            "training captions: name the one it had with --model-kwargs vocabulary=FILE)"
        )
    _check_fixed_buffers(trainer.model, weights)
    finite.check_loaded(weights)
    try:
        trainer.model.load_state_dict(weights)
    except RuntimeError as error:
        raise CoderError(f"the checkpoint is of another model: {str(error)[:300]}") from error


@reading("the checkpoint")
def restore_training(trainer: Trainer, state: SavedState) -> None:
    """Load optimizer, schedule, weight average and counters; data position and random states if the rank count is the same."""
    manifest, common = state.manifest, state.common
    check_optimizer(common["optimizer"], trainer.optimizer)
    check_like(common["schedule"], trainer.schedule.state_dict(), "schedule")
    if trainer.average is not None:
        check_like(common.get("average", {}), trainer.average.state_dict(), "average")
    rates: list[Any] = list(trainer.schedule.base_lrs)
    try:
        trainer.optimizer.load_state_dict(common["optimizer"])
    except ValueError as error:
        raise CoderError(f"the checkpoint's optimizer does not fit this run: {error}") from error
    trainer.schedule.load_state_dict(common["schedule"])
    _set_rates(trainer, rates)
    if trainer.average is not None and "average" in common:
        trainer.average.load_state_dict(common["average"])
    if trainer.accelerator.scaler is not None and "scaler" in common:
        trainer.accelerator.scaler.load_state_dict(common["scaler"])
    trainer.step, trainer.epoch = manifest["step"], manifest["epoch"]
    trainer.best, trainer.last, trainer.zero_shot = manifest["best"], manifest["last"], manifest.get("zero_shot", {})
    trainer.seconds = manifest.get("seconds")
    changes = changed_options(trainer.config, manifest)
    trainer.changes = [*manifest.get("changes", []), *changes]
    for change in changes:
        flag = get_option(change["option"]).flag
        trainer.log.say(f"{flag} was {change['was']}, is {change['is']} from step {change['step']}")
    same_ranks = manifest["world_size"] == distributed.world_size()
    if same_ranks and state.rank is not None and flatten(manifest["config"])["batch_size"] == trainer.config.optim.batch_size:
        trainer.position = state.rank["position"]
    else:  # what all ranks have left of the epoch is dealt anew
        positions = [checkpoint.read_part(state.path, f"position-rank{rank}") for rank in range(manifest["world_size"])]
        trainer.position = None if None in positions else positions
    if trainer.position is None and state.rank is not None:  # between epochs data may change
        trainer.loader.log_changes(state.rank.get("data"))
    if same_ranks and state.rank is not None:
        set_rng_states(state.rank["rng"])
    else:
        trainer.log.say(
            f"the checkpoint was written by {manifest['world_size']} processes, this run has {distributed.world_size()}: "
            f"the samples left of epoch {trainer.epoch + 1} are dealt anew, with fresh random states"
        )
        seed_everything(trainer.config.run.seed + 1 + distributed.rank())
    trainer.log.say(f"resumed at step {trainer.step}, {trainer.epoch} of {trainer.config.optim.epochs} epochs done")


def _set_rates(trainer: Trainer, rates: list[Any]) -> None:
    """This run's rates and schedule in place of the checkpoint's; equal options give equal rates, bit for bit."""
    schedule = trainer.schedule
    schedule.base_lrs = rates
    for group, rate, factor in zip(trainer.optimizer.param_groups, rates, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]


def collect_state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint keeps: the state that all ranks share, and this rank's.

    Raises:
        NonFiniteError: weights or the heads' state hold NaN or infinity.
    """
    weights = trainer.model.state_dict()
    finite.check_before_saving(weights, trainer.step)
    common = {
        "model": weights,
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
    }
    if trainer.average is not None:
        common["average"] = trainer.average.state_dict()
    if trainer.accelerator.scaler is not None:
        common["scaler"] = trainer.accelerator.scaler.state_dict()
    return common, {"rng": rng_states(), "position": trainer.position, "data": trainer.loader.digest}


def describe_backbone(model: Any) -> dict[str, Any]:
    """How a region model was made, with its vocabulary as a hash; empty for an open_clip model."""
    if not isinstance(model, Backbone):
        return {}
    config = model.config()
    options = {
        name: stable_hash(*value) if isinstance(value, (list, tuple)) else value for name, value in config["options"].items()
    }
    return {**config, "options": options}


def comparable(objective: Objective) -> Objective:
    """The objective without what a resumed run may change: the options that each head declares, and how the ranks share the
    work, which may follow from their number."""
    heads = {
        name: tuple(option for option in options if option[0] not in registry.load("heads", name).free_on_resume)
        for name, options in objective.heads
    }
    return replace(objective, heads=tuple(heads.items()), local_loss=False)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_objective(objective: Objective, saved: Objective) -> None:
    if comparable(saved) == comparable(objective):
        return
    saved_heads, heads = dict(saved.heads), dict(objective.heads)
    other = [
        f"{name}: {dict(saved_heads.get(name, ()))} and {dict(heads.get(name, ()))}"
        for name in sorted(saved_heads.keys() | heads.keys())
        if saved_heads.get(name) != heads.get(name)
    ]
    difference = f" with other options of heads ({'; '.join(other)})"
    raise CoderError(
        f'the checkpoint was trained with --loss "{saved}", this run asks for "{objective}"'
        f"{difference if str(saved) == str(objective) else ''}: resume with its own loss, or start from its export: "
        "--pretrained"
    )


def _check_fixed_buffers(model: Any, weights: Mapping[str, Tensor]) -> None:
    """CoderError where a buffer differs that a head declares to be fixed on resuming."""
    current = model.state_dict()
    for name, head in model.coder.heads.items():
        for buffer, message in head.fixed_on_resume.items():
            key = f"coder.heads.{name}.{buffer}"
            if key in current and key in weights and not torch.equal(current[key].cpu(), weights[key]):
                raise CoderError(message)


def rng_states() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's generators."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_states` returned."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
