"""Resuming a run: find its checkpoint, check that the run is the same, and restore model, optimizer and random states."""

from __future__ import annotations

import json
import logging
import random
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from coder_plugin.distributed import on_first_rank
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.files import move_into
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import export_model, exported_step, inference_options
from coder_plugin.training import checkpoint, finite
from coder_plugin.training.metrics_file import cut_back
from coder_plugin.training.run_folder import FILES

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer

#: Options that a resumed run must share with its checkpoint, because the optimizer's state depends on them.
FIXED = (
    "model opt wd beta1 beta2 eps momentum layer_decay lora_rank accum_freq lock_image lock_image_unlocked_groups "
    "lock_text lock_text_unlocked_layers aggregator context_blocks model_kwargs text_lr_scale heads_lr_scale"
).split()


#: Options that say where and how long a run is, not what it computes: their changes are not recorded.
_OF_RUN = frozenset("logs name resume config report report_to wandb_project_name dry_run device".split())
#: Entries of an optimizer's state that have their parameter's shape.
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
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
    path = on_first_rank(lambda: _choose(config, folder))
    if path is None:
        return None
    rank = distributed.rank()  # rank 0 has just compared the checksums
    manifest, common = checkpoint.load(path, verify=rank > 0)
    own = checkpoint.load_rank(path, rank, verify=rank > 0) if rank < manifest["world_size"] else None
    return SavedState(manifest, common, own, path)


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
    checkpoint.verify(Path(config.run.resume))
    return Path(config.run.resume)


def changed_options(config: TrainConfig, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options that a resumed run has otherwise than its checkpoint, as ``{"step", "option", "was", "is"}``."""
    options, saved = json.loads(json.dumps(config.to_flat())), flatten(manifest["config"])
    names = [name for name in options if name not in _OF_RUN and saved.get(name) != options[name]]
    return [{"step": manifest["step"], "option": name, "was": saved.get(name), "is": options[name]} for name in names]


def begin_after(trainer: Trainer, state: SavedState | None) -> None:
    """Clear away, on rank 0, what the run will write again: later checkpoints and a later ``export/best`` are moved to
    ``set-aside``, later rows of ``metrics.jsonl`` are removed. Then ``export/best`` is that of the checkpoint's record."""
    metrics = trainer.folder / "metrics.jsonl"
    if state is None and metrics.exists():  # of a run that was killed before its first checkpoint
        move_into(trainer.folder, metrics, name="metrics.jsonl.old")
    aside = trainer.folder / "set-aside"
    best = trainer.folder / "export" / "best"
    if (step := exported_step(best)) is not None and step > trainer.step:
        place = move_into(aside, best, name=f"export-best-step_{step:08d}")
        trainer.log.say(f"moved export/best to {place}, because it is later than step {trainer.step}")
    if state is None:
        return
    _restore_best(trainer, state.path.parent)
    if moved := checkpoint.set_aside(trainer.folder / "checkpoints", aside, after=trainer.step):
        trainer.log.say(f"moved to {aside}, because they are later than step {trainer.step}: {', '.join(moved)}")
    cut_back(metrics, step=trainer.step, evaluated=evaluated_step(trainer), epochs=trainer.epoch)


def _restore_best(trainer: Trainer, checkpoints: Path) -> None:
    """Write ``export/best`` from the best evaluation's checkpoint, if there is none. It needs no other rank.

    Without that checkpoint there is no ``export/best`` until an evaluation is better.

    Args:
        checkpoints: the folder of the checkpoint from which the run goes on.
    """
    name, folder = trainer.best.get("checkpoint"), trainer.folder / "export" / "best"
    if name is None or folder.exists():
        return
    own = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
    try:
        manifest, common = checkpoint.load(checkpoints / Path(name).name)
        if manifest["step"] != trainer.best["step"]:
            raise CoderError(f"its step is {manifest['step']}, not {trainer.best['step']}")
        weights = {**common["model"], **common.get("average", {})}
        finite.check_loaded(weights)
        trainer.model.load_state_dict(weights)
        options = inference_options(trainer.config)
        export_model(trainer.model, folder, tokenizer=trainer.tokenizer, options=options, step=manifest["step"])
    except (CoderError, KeyError, RuntimeError) as error:
        trainer.best = {}
        _log.warning("export/best is written at the next evaluation, because %s cannot be used: %s", name, error)
    finally:
        trainer.model.load_state_dict(own)


def evaluated_step(trainer: Trainer) -> int:
    """The step of the newest evaluation; -1 without one."""
    return max(measured.get("step", -1) for measured in (trainer.last, trainer.zero_shot))


def advice(folder: Path) -> str:
    """With which ``--resume`` a run goes on from before its loss or gradient became infinite."""
    found = checkpoint.checkpoints(folder / "checkpoints", problems=[])
    if not found:
        return "no checkpoint was saved yet: start it again (--save-every-steps saves within an epoch)"
    options = [f"--resume {shlex.quote(str(each.path))}" for each in found]
    older = f", or {options[1]} if the loss was already rising there" if len(found) > 1 else ""
    return f"go on with {options[0]}{older}"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Errors of using another's state, such as a missing key, as one line that names ``what``.

    Running out of memory passes unchanged.
    """
    try:
        yield
    except (CoderError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CoderError(f"{what} does not have the form that this version saves ({detail}): use another checkpoint") from error


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
    samples = manifest.get("samples_per_epoch"), trainer.loader.samples_per_epoch
    _check_objective(trainer.objective, Objective.from_dict(manifest["objective"], objects=objects), samples)
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
        raise CoderError(f"the checkpoint belongs to another model: {str(error)[:300]}") from error


@reading("the checkpoint")
def restore_training(trainer: Trainer, state: SavedState) -> None:
    """Load optimizer, schedule, weight average and counters; data position and random states if the rank count is the same."""
    manifest, common = state.manifest, state.common
    try:
        trainer.optimizer.load_state_dict(common["optimizer"])
    except ValueError as error:
        raise CoderError(f"the checkpoint's optimizer does not fit this run: {error}") from error
    for parameter, moments in trainer.optimizer.state.items():
        if wrong := [name for name in _SHAPED if name in moments and moments[name].shape != parameter.shape]:
            raise CoderError(f"the checkpoint's optimizer does not fit this run: {wrong[0]} has not its parameter's shape")
    _set_rates(trainer, common["schedule"])
    if trainer.average is not None and "average" in common:
        trainer.average.load_state_dict(common["average"])
    if trainer.accelerator.scaler is not None and "scaler" in common:
        trainer.accelerator.scaler.load_state_dict(common["scaler"])
    trainer.step, trainer.epoch = manifest["step"], manifest["epoch"]
    for name in ("best", "last", "zero_shot", "before", "seconds"):
        setattr(trainer, name, manifest[name])
    changes = changed_options(trainer.config, manifest)
    trainer.changes = [*manifest["changes"], *changes]
    for change in changes:
        flag = get_option(change["option"]).flag
        trainer.log.say(f"{flag} was {change['was']}, is {change['is']} from step {change['step']}")
    same_ranks = manifest["world_size"] == distributed.world_size()
    if same_ranks and state.rank is not None and flatten(manifest["config"])["batch_size"] == trainer.config.optim.batch_size:
        trainer.position = state.rank["position"]
    else:  # what all ranks have left of the epoch is dealt anew
        positions = [checkpoint.load_rank(state.path, rank)["position"] for rank in range(manifest["world_size"])]
        trainer.position = None if None in positions else positions
    if trainer.position is None and state.rank is not None:  # between epochs data may change
        trainer.loader.log_changes(state.rank.get("data"))
    if same_ranks and state.rank is not None:
        set_rng_states(state.rank["rng"])
    else:
        trainer.log.say(
            f"the checkpoint was written by {manifest['world_size']} processes, this run has {distributed.world_size()}: "
            f"the samples left of epoch {trainer.epoch + 1} are dealt anew (a stream goes on with the next epoch), "
            "with fresh random states"
        )
        seed_everything(trainer.config.run.seed + 1 + distributed.rank())
    trainer.log.say(f"resumed at step {trainer.step}, {trainer.epoch} of {trainer.config.optim.epochs} epochs done")


def _set_rates(trainer: Trainer, steps: int) -> None:
    """This run's schedule after so many steps, in place of the checkpoint's; equal options give equal rates, bit for bit."""
    schedule = trainer.schedule
    schedule.last_epoch = steps
    for group, rate, factor in zip(trainer.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(steps)
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
        "schedule": trainer.schedule.last_epoch,
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


def _check_objective(objective: Objective, saved: Objective, samples: tuple[int | None, int]) -> None:
    """:class:`CoderError` unless both train the same; ``samples``: of an epoch, in the checkpoint and now."""
    before, now = comparable(saved), comparable(objective)
    if before == now:
        return
    heads = {name: dict(options) for name, options in now.heads}
    changed = [
        f"{name}.{option}={value}"
        for name, options in before.heads
        for option, value in options
        if heads.get(name, {}).get(option, value) != value
    ]
    if str(saved) != str(objective) or not changed:
        raise CoderError(
            f'the checkpoint was trained with --loss "{saved}", this run asks for "{objective}": resume with its own loss, or '
            "start from its export: --pretrained"
        )
    reason = "the checkpoint was trained with other options of heads"
    if samples[0] not in (None, samples[1]):
        reason = (
            f"an epoch of the training data had {samples[0]:,} samples and has {samples[1]:,} now, and options of heads follow "
            "from that number"
        )
    raise CoderError(f"{reason}: keep the options with --set {' '.join(changed)}, or start from the export: --pretrained")


def _check_fixed_buffers(model: Any, weights: Mapping[str, Tensor]) -> None:
    """CoderError where a buffer differs that a head declares to be fixed on resuming."""
    current = model.state_dict()
    for name, head in model.coder.heads.items():
        for buffer, message in head.fixed_on_resume.items():
            key = f"coder.heads.{name}.{buffer}"
            if key in current and key in weights and not torch.equal(current[key].cpu(), weights[key]):
                raise CoderError(message)


def rng_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, of the accelerator too, as a checkpoint holds them."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    states = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if device := torch.accelerator.current_accelerator(check_available=True):
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_states` returned; the accelerator's only where this machine has one of the same type."""
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
