"""Every option of a training run, once: the dataclass is the command line's flags and a config file's fields alike.

Names are open_clip's wherever open_clip has the flag.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective


def _flag(default: Any, group: str, help: str, *, choices: Sequence[str] | None = None) -> Any:
    metadata = {"group": group, "help": help, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of ``coder-plugin train``. A field that is None takes a default of the objective or the data (see below)."""

    model: str | None = _flag(
        None, "model", "open_clip model name, path of a model configuration (.json), or region-bert and its like [coder-tiny]"
    )
    model_kwargs: list[str] | None = _flag(
        None, "model", "options of a region model, key=value, such as text=FOLDER embed_dim=512"
    )
    pretrained: str | None = _flag(None, "model", "CLIP weights to start from: an open_clip tag or a file (our exports too)")
    pretrained_image: bool = _flag(False, "model", "start the image tower from timm's ImageNet weights (downloads)")
    pretrained_image_path: str | None = _flag(None, "model", "start the image tower from this file (timm/torchvision keys)")
    lock_image: bool = _flag(False, "model", "freeze the image tower (LiT)")
    lock_image_unlocked_groups: int = _flag(0, "model", "leave the image tower's last n layer groups unlocked")
    lock_image_freeze_bn_stats: bool = _flag(False, "model", "freeze BatchNorm statistics of the locked image layers")
    lock_text: bool = _flag(False, "model", "freeze the text tower")
    lock_text_unlocked_layers: int = _flag(0, "model", "leave the text tower's last n layers unlocked")
    lock_text_freeze_layer_norm: bool = _flag(False, "model", "freeze LayerNorm of the locked text layers as well")
    force_image_size: int | None = _flag(None, "model", "override the model's image size")
    force_context_length: int | None = _flag(None, "model", "override the model's text length")
    force_quick_gelu: bool = _flag(False, "model", "use QuickGELU, as OpenAI's weights want")
    force_patch_dropout: float | None = _flag(None, "model", "override the model's patch dropout")
    force_custom_text: bool = _flag(False, "model", "use open_clip's CustomTextCLIP for built-in text towers")
    image_mean: list[float] | None = _flag(None, "model", "override the image mean")
    image_std: list[float] | None = _flag(None, "model", "override the image standard deviation")
    image_interpolation: str | None = _flag(None, "model", "image resize", choices=("bicubic", "bilinear", "random"))
    image_resize_mode: str | None = _flag(None, "model", "evaluation resize", choices=("shortest", "longest", "squash"))
    aug_cfg: list[str] | None = _flag(None, "model", "open_clip's augmentation options, key=value")
    cache_dir: str | None = _flag(None, "model", "where open_clip keeps downloads")
    grad_checkpointing: bool = _flag(False, "model", "recompute activations in the backward pass")
    channels_last: bool = _flag(False, "model", "keep images channels-last, faster for convolutional towers")
    torchcompile: bool = _flag(False, "model", "compile the model with torch.compile")
    aggregator: str = _flag(
        "tower", "model", "the instance features: the towers' own, or GPO over their tokens", choices=("tower", "gpo")
    )
    context_blocks: int = _flag(
        1, "model", "last blocks of open_clip's towers between what SelfAlign reads as locals and as contexts"
    )
    lora_rank: int = _flag(0, "model", "train low-rank adapters of this rank in the towers instead of their weights (peft)")
    lora_alpha: float | None = _flag(None, "model", "scale of the adapters [rank]")

    loss: str = _flag("dcl", "loss", 'loss expression, such as "3*dcl + 0.5*triplet(margin=0.1)", or an objective\'s name')
    concepts: str | None = _flag(None, "loss", "concept vocabulary, a file of coder-plugin concepts [scenes: their own]")
    negatives: str | None = _flag(
        None, "loss", "AsCL's noised negatives: mixture, or names with options, such as 'gaussian(std=0.2)+shuffle', or none"
    )
    positives: str | None = _flag(None, "loss", "AsCL's positive captions: join, truncate, both with +, or none [both]")
    tagger: str | None = _flag(
        None,
        "loss",
        "tells the classes of words: a spaCy pipeline by name or folder, or scenes [en_core_web_sm; scenes for scenes]",
    )
    set: list[str] = _flag([], "loss", "options of terms and heads, such as dcl.mu=0.07")
    local_loss: bool = _flag(False, "loss", "each rank compares its own anchors alone with all candidates")

    train_data: str | None = _flag(None, "data", "training data: shards (brace pattern), .csv, Karpathy .json; none: scenes")
    val_data: str | None = _flag(None, "data", "validation data, likewise")
    dataset_type: str = _flag(
        "auto", "data", "the reader: webdataset, csv, karpathy, coco, img2dataset, precomp, caps, scenes, or a plugin's"
    )
    image_root: str | None = _flag(None, "data", "image folder of a Karpathy file")
    regions: str | None = _flag(None, "data", "region features of the images, one file or folder or several with ::")
    regions_type: str = _flag("auto", "data", "their layout: tsv, lxmert, hdf5, lmdb, folder, precomp, shards, or a plugin's")
    max_regions: int = _flag(36, "data", "regions of an image that are read, the first in the file")
    region_dropout: float = _flag(None, "data", "share of the regions left out at random in training [0.2; camera, vsrn: 0]")
    word_dropout: float = _flag(None, "data", "share of the words masked, replaced or left out likewise [0.2; camera, vsrn: 0]")
    train_num_samples: int | None = _flag(None, "data", "samples per epoch of shards that cannot be counted")
    dataset_resampled: bool = _flag(False, "data", "draw shards with replacement")
    captions: str = _flag(
        None, "data", "one caption per image and epoch, or every caption a pair [draw]", choices=("draw", "all")
    )
    csv_separator: str | None = _flag(None, "data", "column separator of CSV files [tab]")
    csv_img_key: str | None = _flag(None, "data", "CSV column of image paths [filepath]")
    csv_caption_key: str | None = _flag(None, "data", "CSV column of captions [title]")
    max_bad_images: int = _flag(100, "data", "stop after so many images that do not decode")
    workers: int = _flag(2, "data", "data loading processes per rank")

    batch_size: int | None = _flag(None, "optimisation", "pairs per rank and forward [64; scenes: 128]")
    accum_freq: int = _flag(1, "optimisation", "forwards per step; all their pairs are each other's negatives")
    epochs: int | None = _flag(None, "optimisation", "passes over the data [32; scenes: 6]")
    lr: float | None = _flag(None, "optimisation", "learning rate [5e-4; scenes: 1e-3]")
    wd: float = _flag(None, "optimisation", "weight decay of matrices [0.2]")
    beta1: float | None = _flag(None, "optimisation", "Adam's first beta")
    beta2: float | None = _flag(None, "optimisation", "Adam's second beta")
    eps: float | None = _flag(None, "optimisation", "Adam's epsilon")
    momentum: float | None = _flag(None, "optimisation", "momentum of optimizers that have one")
    opt: str = _flag(None, "optimisation", "any timm optimizer [adamw]")
    warmup: int | None = _flag(None, "optimisation", "steps of linear warm-up [5 % of all]")
    warmup_epochs: float | None = _flag(None, "optimisation", "the same in epochs")
    lr_scheduler: str = _flag(
        None, "optimisation", "after the warm-up [cosine]", choices=("cosine", "const", "step")
    )
    lr_step_epochs: int = _flag(None, "optimisation", "epochs between the drops of --lr-scheduler step [15]")
    lr_step_gamma: float = _flag(None, "optimisation", "factor of each drop [0.1]")
    layer_decay: float = _flag(1.0, "optimisation", "learning-rate factor per layer towards the towers' inputs")
    heads_lr_scale: float = _flag(None, "optimisation", "learning-rate factor of the heads [1; selfalign-clip: 100]")
    text_lr_scale: float = _flag(None, "optimisation", "learning-rate factor of the text tower's encoder [1; region-bert: 0.1]")
    grad_clip_norm: float | None = _flag(None, "optimisation", "clip the gradient's norm")
    ema_decay: float | None = _flag(None, "optimisation", "evaluate and export an average of the weights with this decay")
    precision: str = _flag(
        "auto", "optimisation", "autocast [bf16 on GPU, none on CPU]", choices=("auto", "fp32", "amp", "amp_bf16", "amp_fp16")
    )

    logs: str = _flag("./logs", "run", "where runs are kept")
    name: str | None = _flag(None, "run", "the run's folder [date-model]")
    resume: str | None = _flag(None, "run", "a checkpoint folder, or 'latest' of --name")
    save_frequency: int = _flag(0, "run", "keep the checkpoint of every n-th epoch beside best and last")
    save_every_steps: int = _flag(0, "run", "save in mid-epoch, every n steps")
    rerank: str | None = _flag(
        None, "run", "a fusion score re-orders each query's first so many in evaluation, or all: every pair [32]"
    )
    val_frequency: int = _flag(1, "run", "evaluate every n epochs (0: never)")
    log_every_n_steps: int = _flag(20, "run", "steps between log lines")
    report: bool = _flag(True, "run", "write report.html into the run's folder when it ends")
    report_to: str = _flag("", "run", "trackers: tensorboard, wandb, or both with a comma")
    wandb_project_name: str = _flag("coder-plugin", "run", "project of the W&B tracker")
    seed: int = _flag(0, "run", "seed of weights, order and augmentation")
    dry_run: bool = _flag(False, "run", "print the resolved plan and stop")

    @property
    def on_scenes(self) -> bool:
        """Whether no training data are named: then the built-in scenes."""
        return self.train_data is None and self.dataset_type in ("auto", "scenes")

    def resolved(self) -> TrainConfig:
        """With every data-dependent default filled in."""
        from coder_plugin.backbones import plugin_backbones
        from coder_plugin.pretrained.export import weights_named

        if self.pretrained is not None and (weights := weights_named(self.pretrained)) != self.pretrained:
            return replace(self, pretrained=weights).resolved()
        if self.train_data is None and not self.on_scenes:
            raise CoderError(f"--dataset-type {self.dataset_type} needs --train-data")
        named = dict(Objective.parse(self.loss).training)
        unknown = sorted(set(named) - {item.name for item in fields(self)})
        if unknown:
            raise CoderError(f"the objective {self.loss!r} sets unknown training options: {', '.join(unknown)}")
        if self.on_scenes:  # pictures, whatever the objective was made for
            named.pop("model", None)
        elif self.model is None and "model" not in named:
            raise CoderError("--model is needed with --train-data, such as --model ViT-B-32")
        backbone = plugin_backbones.find_backbone(self.model or named.get("model", ""))
        if backbone is None:
            named.pop("model_kwargs", None)
            for name in ("region_dropout", "word_dropout"):
                named.pop(name, None)
                if getattr(self, name):
                    raise CoderError(f"--{name.replace('_', '-')} is of region models, and {self.model} is open_clip's")
        if self.warmup is not None:
            named.pop("warmup_epochs", None)
        of_model = {} if backbone is None else backbone.training
        defaults = {**DEFAULTS, **(SCENES_DEFAULTS if self.on_scenes else {}), **of_model, **named}
        given = asdict(self)
        filled = {key: value for key, value in defaults.items() if given[key] is None}
        if self.model_kwargs and "model_kwargs" in named:  # the objective's, but for those that are given
            own = {setting.partition("=")[0] for setting in self.model_kwargs}
            others = [setting for setting in named["model_kwargs"] if setting.partition("=")[0] not in own]
            filled["model_kwargs"] = [*others, *self.model_kwargs]
        return replace(self, **filled).checked()

    def checked(self) -> TrainConfig:
        for name in ("batch_size", "accum_freq", "epochs", "log_every_n_steps", "lr_step_epochs"):
            if getattr(self, name) < 1:
                raise CoderError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not self.lr > 0:  # type: ignore[operator]
            raise CoderError(f"--lr must be > 0, got {self.lr}")
        for name in ("text_lr_scale", "heads_lr_scale"):
            if not getattr(self, name) >= 0:
                raise CoderError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(self, name)}")
        if self.warmup_epochs is not None and not self.warmup_epochs >= 0:
            raise CoderError(f"--warmup-epochs must be >= 0, got {self.warmup_epochs}")
        if self.warmup is not None and self.warmup_epochs is not None:
            raise CoderError("--warmup and --warmup-epochs both say how long the warm-up is: give one")
        if not 0 < self.layer_decay <= 1:
            raise CoderError(f"--layer-decay must be in (0, 1], got {self.layer_decay}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise CoderError(f"--ema-decay must be in (0, 1), got {self.ema_decay}")
        if self.resume == "latest" and self.name is None:
            raise CoderError("--resume latest needs --name, the run to go on with")
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise CoderError(f"unknown option {', '.join(unknown)} in the configuration; known: {', '.join(sorted(known))}")
        return cls(**data)


#: Which model is opened, and how exactly it computes.
OPENING = (
    "model",
    "pretrained",
    "force_image_size",
    "force_context_length",
    "force_quick_gelu",
    "force_custom_text",
    "image_mean",
    "image_std",
    "image_interpolation",
    "image_resize_mode",
    "cache_dir",
    "model_kwargs",
    "max_regions",
    "precision",
)

#: How data are read, and not which: what goes with a data set, and not over to another.
READING = (
    "dataset_type",
    "image_root",
    "csv_separator",
    "csv_img_key",
    "csv_caption_key",
    "regions",
    "regions_type",
)

DEFAULTS = {
    "batch_size": 64,
    "epochs": 32,
    "lr": 5e-4,
    "wd": 0.2,
    "opt": "adamw",
    "lr_scheduler": "cosine",
    "lr_step_epochs": 15,
    "lr_step_gamma": 0.1,
    "captions": "draw",
    "region_dropout": 0.0,
    "word_dropout": 0.0,
    "text_lr_scale": 1.0,
    "heads_lr_scale": 1.0,
}
SCENES_DEFAULTS = {"model": "coder-tiny", "batch_size": 128, "epochs": 6, "lr": 1e-3}


def add_flags(
    parser: argparse.ArgumentParser, config: type = TrainConfig, only: Sequence[str] | None = None, *, prefix: str = ""
) -> None:
    """One flag for each field (or those in ``only``), in the groups that their metadata name, ``prefix`` before each name."""
    parser.add_argument(f"--{prefix}config", dest="config", metavar="FILE", help="JSON file of these options; flags win")
    groups: dict[str, Any] = {}
    hints = typing.get_type_hints(config)
    for item in fields(config):
        if only is not None and item.name not in only:
            continue
        group = item.metadata["group"]
        groups.setdefault(group, parser.add_argument_group(group))
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(item)}
        kind = _inner(hints[item.name])
        if kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction if item.default else "store_true"
        elif typing.get_origin(kind) is list:
            kwargs.update(nargs="+", type=typing.get_args(kind)[0])
            if item.name in ("set", "aug_cfg", "model_kwargs"):
                kwargs["action"] = "extend"
            if item.name in ("set", "model_kwargs"):
                kwargs["metavar"] = "OWNER.OPTION=VALUE" if item.name == "set" else "OPTION=VALUE"
        else:
            kwargs.update(type=kind, choices=item.metadata["choices"])
        groups[group].add_argument(f"--{prefix}{item.name.replace('_', '-')}", dest=item.name, **kwargs)


def read_config(arguments: argparse.Namespace) -> TrainConfig:
    """The configuration that flags and file ask for."""
    return TrainConfig.from_dict(read_flags(arguments))


def read_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the configuration file, if one is named, and the flags over it set; nothing that is left at its default."""
    given = {key: value for key, value in vars(arguments).items() if key in {f.name for f in fields(TrainConfig)}}
    data: dict[str, Any] = {}
    if path := getattr(arguments, "config", None):
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CoderError(f"--config {path}: {error}") from error
    return {**data, **given}


def _inner(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(choice for choice in typing.get_args(hint) if choice is not type(None))
    return hint


def _help(item: Any) -> str:
    text = item.metadata["help"]
    default = None if item.default is MISSING else item.default
    if default in (None, False, "", 0) or "[" in text:
        return text.replace("%", "%%")
    return f"{text} [{default!r}]".replace("%", "%%")
