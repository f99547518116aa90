"""The adapter's own flags, taken off the command line before upstream's parser sees it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coder_plugin.config import TrainConfig, get_option, merge, read_file, resolve
from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective

#: Options that are flags here, with ``--coder-`` before the name; all others are upstream's.
OURS = (
    "concepts",
    "negatives",
    "positives",
    "tagger",
    "set",
    "aggregator",
    "context_blocks",
    "captions",
    "heads_lr_scale",
    "loss_impl",
    "gather_dtype",
    "hard_negatives",
    "negatives_file",
    "csv_negatives_key",
)
#: Flags of upstream that our heads do not support, and why.
REFUSED = {
    "torchscript": "the heads cannot be scripted; --torchcompile works",
    "trace": "a traced model cannot be trained",
    "horovod": "the losses gather over torch.distributed: launch with torchrun",
    "use_naflex": "NaFlex gives images as dicts of patches, which the heads do not read",
    "force_naflex_vision": "NaFlex gives images as dicts of patches, which the heads do not read",
    "loss_dist_impl": "it belongs to upstream's own SigLIP loss: write siglip(dist_impl='...')",
    "use_bnb_linear": "it replaces the towers' layers after the momentum towers have copied them",
}


def parser() -> argparse.ArgumentParser:
    """The parser of our flags. It allows no abbreviations, because upstream's names may begin like ours."""
    ours = argparse.ArgumentParser(prog="python -m coder_plugin.integrations.open_clip", add_help=False, allow_abbrev=False)
    ours.add_argument(
        "--loss",
        metavar="EXPRESSION",
        help='loss expression, such as "clip + 0.5*selfalign", or a named objective, such as coder; without it everything is '
        "upstream's own",
    )
    ours.add_argument(
        "--coder-config", dest="config", metavar="FILE", help="JSON or TOML file of the options below; flags win over it"
    )
    for name in OURS:
        option = get_option(name)
        kind: dict[str, Any] = {"type": option.kind, "choices": option.choices}
        if option.is_list:
            kind = {"nargs": "+", "action": "extend", "metavar": "OWNER.OPTION=VALUE"}
        text = option.help.replace("%", "%%")
        ours.add_argument(f"--coder-{name.replace('_', '-')}", dest=name, default=argparse.SUPPRESS, help=text, **kind)
    return ours


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into our flags and upstream's.

    Raises:
        CoderError: our flags without ``--loss`` or without their ``coder-``, or unknown names.
    """
    ours, rest = parser().parse_known_args(list(argv))
    given = [name for name in ("config", *OURS) if name in vars(ours) and vars(ours)[name] is not None]
    if ours.loss is None and given:
        flags = ", ".join(f"--coder-{name.replace('_', '-')}" for name in given)
        raise CoderError(f"{flags} without --loss: name the loss that they belong to, such as --loss coder")
    for flag in rest:
        name = flag.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in OURS:
            raise CoderError(f"{name} is --coder-{name[2:]} here")
        if name.startswith("--coder-"):
            known = ", ".join(f"--coder-{each.replace('_', '-')}" for each in ("config", *OURS))
            raise CoderError(f"{name} is no flag; known: {known}")
    return ours, rest


def options(ours: argparse.Namespace, args: Any) -> TrainConfig:
    """Our flags, and the corresponding flags of upstream, as a configuration.

    Raises:
        CoderError: flags of upstream that our heads do not support, each with its reason.
    """
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise CoderError(f"--{name.replace('_', '-')} does not go with --loss: {why}")
    if getattr(args, "precision", "") in ("fp16", "pure_fp16"):
        raise CoderError(f"--precision {args.precision} does not go with --loss: float16 weights overflow; take amp")
    if getattr(args, "coca_contrastive_loss_weight", 1.0) != 1.0:
        raise CoderError("--coca-contrastive-loss-weight does not go with --loss: weigh the terms, as in 0.5*clip")
    file = {} if ours.config is None else read_file(ours.config)
    flags = {name: value for name, value in vars(ours).items() if name in OURS}
    given, _ = merge([(f"--coder-config {ours.config}", file), ("flag", flags)])
    if foreign := sorted(given.keys() - {"loss", *OURS}):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise CoderError(f"--coder-config {ours.config}: {named} must be set by upstream's own flags here")
    is_table = args.dataset_type in ("csv", "synthetic") or str(args.train_data).endswith((".csv", ".tsv"))
    if given.get("csv_negatives_key") and not is_table:
        raise CoderError("--csv-negatives-key is for tables: shards have their hard negatives in json, under negatives")
    if given.get("captions") and is_table:
        raise CoderError("--coder-captions is for shards: rows of a table are pairs")
    upstream = {
        "model": args.model,
        "train_data": args.train_data or "synthetic",
        "local_loss": args.local_loss,
        "batch_size": args.batch_size,
        "accum_freq": args.accum_freq,
        "epochs": args.epochs,
        "cache_dir": args.cache_dir,
        "force_context_length": args.force_context_length,
    }
    config = resolve([("flag", {**given, "loss": ours.loss, **upstream})])
    for flag in ("train_data", "val_data"):
        path = getattr(args, flag)
        if path and (args.dataset_type == "csv" or path.endswith((".csv", ".tsv"))) and not Path(path).is_file():
            raise CoderError(f"--{flag.replace('_', '-')} {path} does not exist")
    if args.siglip and "siglip" not in [term.name for term in Objective.parse(config.loss.expression).terms]:
        raise CoderError(
            f'--siglip starts with a temperature for the sigmoid loss, which --loss "{config.loss.expression}" does not use: '
            "leave it out, or name the term siglip"
        )
    return config


def renamed(message: str) -> str:
    """A message with the flags as they are called here."""
    names = "|".join(name.replace("_", "-") for name in ("config", *OURS))
    return re.sub(rf"(?<![\w-])--({names})(?![\w-])", r"--coder-\1", message)
