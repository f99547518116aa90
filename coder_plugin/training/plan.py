"""The resolved plan of a run: terms, heads, shapes, parameters, data, steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coder_plugin import distributed
from coder_plugin.config import TrainConfig, get_option, options_by_name
from coder_plugin.expression import format_value
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.options import default_options
from coder_plugin.terminal import plural
from coder_plugin.training import prepare
from coder_plugin.training.log import machine, versions
from coder_plugin.training.step import restored_buffers

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer


#: Options that the table shows where they are defaults too.
_ALWAYS = ("lr", "wd", "warmup")


#: The objectives whose options are those that the papers print; what they do not set is the default.
_PRINTED = "coder-printed + ascl-printed + selfalign-printed + triplet(mask_same_image=false)"
#: Options that no paper prints: of any term or head, or of one.
_NOT_PRINTED = frozenset(
    "vocabulary recluster steps_per_epoch effective_negatives warmup reduction freeze_steps init recompute pairs_per_tile "
    "bank_dtype mode weight iterations heads diversity_gradient margin mean_epochs triplet.similarity "
    "concepts.threshold concepts.scale concepts.norm lca.epsilon".split()
)
#: Values that a paper prints for one of its data sets.
_PRINTED_FOR_ONE = {
    "prototypes.clusters": (10_000, 20_000),
    "ascl.temperature": (0.01, 0.05),
    "fusion.local_weight": (0.6, 0.8),
}


def make_plan(trainer: Trainer) -> dict[str, Any]:
    """What ``--dry-run`` prints and ``plan.json`` holds. Call it on every rank: the forward pass may gather."""
    config, model, loader = trainer.config, trainer.model, trainer.loader
    training = model.training
    model.train()
    devices = [trainer.device] if trainer.device.type == "cuda" else []
    with torch.no_grad(), restored_buffers(model), torch.random.fork_rng(devices=devices):
        outputs = model(**prepare.example_batch(model, trainer.tokenizer, rows=2))
    model.train(training)
    parameters = list(model.parameters())
    optim = config.optim
    return {
        "run": str(trainer.folder),
        "objective": str(trainer.objective),
        "options": trainer.objective.to_dict(),
        "derived options": trainer.derived,
        "not as printed": not_as_printed(trainer.objective, model.coder.heads),
        "terms": trainer.objective.labels(),
        "heads": {name: sum(p.numel() for p in head.parameters()) for name, head in model.coder.heads.items()},
        "notes": {name: notes for name, head in model.coder.heads.items() if (notes := head.notes())},
        "model": f"{config.model.name} ({type(model).__name__})",
        "outputs": {key: ["B", *value.shape[1:]] if value.ndim else [] for key, value in outputs.items()},
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "frozen": frozen_parts(model, trainer.frozen),
        "frozen because no term reads them": trainer.frozen,
        "training data": {
            "name": loader.source.name,
            "images": loader.source.num_images,
            "samples per epoch": loader.samples_per_epoch,
            "captions": config.data.captions,
        },
        "validation data": None if trainer.val is None else {"name": trainer.val.name, "images": trainer.val.num_images},
        "batch": {
            "per rank and forward": optim.batch_size,
            "global per step": optim.batch_size * optim.accum_freq * distributed.world_size(),
        },
        "steps per epoch": trainer.steps_per_epoch,
        "epochs": optim.epochs,
        "steps": trainer.total_steps,
        "precision": {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision),
        "device": str(trainer.device),
        "machine": machine(trainer.device),
        "ranks": distributed.world_size(),
        "changed on resume": trainer.changes,
        "versions": versions(),
    }


def frozen_parts(model: nn.Module, unread: Collection[str]) -> dict[str, int]:
    """The parts of a model that flags, a recipe or the model itself freezes, with the number of their frozen parameters.

    Args:
        unread: parameters that are frozen for another reason, and are left out.

    Example:
        >>> towers = nn.ModuleDict({"visual": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "text": nn.Linear(2, 1)})
        >>> frozen_parts(towers.requires_grad_(False), ["text.bias"])
        {'visual': 9, 'text.weight': 2}
    """

    def parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, int]]:
        for name, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False):
            if not parameter.requires_grad and name not in unread:
                yield name, parameter.numel()
        for name, part in module.named_children():
            below = dict(part.named_parameters(prefix + name))
            frozen = {key: each for key, each in below.items() if not each.requires_grad and key not in unread}
            if frozen and len(frozen) == len(below):
                yield prefix + name, sum(each.numel() for each in frozen.values())
            elif frozen:
                yield from parts(part, f"{prefix}{name}.")

    return dict(parts(model, ""))


def not_as_printed(objective: Objective, heads: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Options of the papers' terms and heads whose value is not the one that their paper prints, as ``{"value", "printed"}``.

    Options that no paper prints are left out. Of those that the formulas imply the default is the printed value.

    Args:
        heads: the names of the model's heads; those that ``objective`` sets no options of have their defaults.

    Example:
        >>> not_as_printed(Objective.parse("dcl(gamma=0.5)"), ())["dcl.gamma"]
        {'value': 0.5, 'printed': 0.3}
    """
    as_printed = Objective.parse(_PRINTED)
    printed, given = _options(as_printed, required_heads(as_printed)), _options(objective, heads)
    found = {}
    for owner in (owner for owner in printed if owner in given):
        for option, default in default_options(*owner).items():
            key, wanted = f"{owner[1]}.{option}", printed[owner].get(option, default)
            value = given[owner].get(option, default)
            if not {option, key} & _NOT_PRINTED and value not in _PRINTED_FOR_ONE.get(key, (wanted,)):
                found[key] = {"value": value, "printed": wanted}
    return found


def _options(objective: Objective, heads: Iterable[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """The options that are set, by group and name of each term and head."""
    of_heads = dict(objective.heads)
    terms = {("losses", term.name): dict(term.options) for term in objective.terms}
    return terms | {("heads", name): dict(of_heads.get(name, ())) for name in heads}


def options_with_origins(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Every option that has a value, by flat name, with the layer that set it: default, scenes, model, recipe, file or flag."""
    values: Mapping[str, Any] = config.to_flat()
    return {
        name: {"value": values[name], "from": config.origins.get(name, "default")}
        for name in options_by_name()
        if values[name] not in (None, [])
    }


def format_plan(plan: Mapping[str, Any]) -> str:
    """A plan as a table to read: what is trained on what, for how long, where it goes, and which options are not defaults.

    Args:
        plan: of :func:`make_plan`, with ``settings`` of :func:`options_with_origins`.
    """
    data, validation, batch = plan["training data"], plan["validation data"], plan["batch"]
    steps, epochs = plan["steps per epoch"], plan["epochs"]
    pairs, per_forward, ranks = batch["global per step"], batch["per rank and forward"], plan["ranks"]
    captions = "one caption per image" if data["captions"] == "draw" else "every caption is a pair"
    images = "" if data["images"] is None else f"{data['images']:,} images, "
    pictures = "" if validation is None or validation["images"] is None else f": {validation['images']:,} images"
    rows = {
        "run": plan["run"],
        "objective": plan["objective"],
        "heads": ", ".join(f"{name} ({size:,} parameters)" for name, size in plan["heads"].items()) or "none",
        "derived": ", ".join(f"{name}={format_value(value)}" for name, value in plan["derived options"].items()),
        "not as in paper": ", ".join(
            f"{name}={format_value(each['value'])} (paper: {format_value(each['printed'])})"
            for name, each in plan["not as printed"].items()
        ),
        "model": f"{plan['model']}, {plan['trainable']:,} of {plan['parameters']:,} parameters are trained",
        "frozen": _name_frozen(plan["frozen"], plan["frozen because no term reads them"]),
        "training data": f"{data['name']}: {images}{data['samples per epoch']:,} samples per epoch ({captions})",
        "validation data": "none" if validation is None else f"{validation['name']}{pictures}",
        "batch": f"{pairs} pairs per step" + (f" ({per_forward} per process and forward)" if pairs != per_forward else ""),
        "length": f"{plural(epochs, 'epoch')} of {plural(steps, 'step')}, {plural(plan['steps'], 'step')} in all",
        "machine": f"{plan['precision']}, {plural(ranks, 'process')}, {'CPU' if plan['device'] == 'cpu' else plan['machine']}",
        "notes": "; ".join(f"{head}: {note}" for head, notes in plan["notes"].items() for note in notes),
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items() if value]
    settings = dict(plan["settings"])
    if not {"warmup", "warmup_epochs"} & settings.keys():
        settings["warmup"] = {"value": plan["steps"] // 20, "from": "default (5 % of all steps)"}
    chosen = {
        name: each
        for name, each in settings.items()
        if (each["from"] != "default" or name in _ALWAYS) and name != "dry_run"
    }
    flags = {name: " ".join(get_option(name).words(each["value"])) for name, each in chosen.items()}
    width = max(map(len, flags.values()))
    lines += ["", "rate, weight decay, warm-up, and options that are not defaults, with where they come from:"]
    lines += [f"  {flags[name]:<{width}}  {each['from']}" for name, each in chosen.items()]
    return "\n".join([*lines, "", "nothing was written; without --dry-run the run starts"])


def _name_frozen(parts: Mapping[str, int], unread: Sequence[str]) -> str:
    """Of many parts, such as those between LoRA's, the first."""
    named = [f"{name} ({size:,} parameters)" for name, size in parts.items()]
    named = [*named[:6], f"{len(named) - 6} more"] if len(named) > 7 else named
    return ", ".join([*named, *(f"{name} (no term reads it)" for name in unread)])
