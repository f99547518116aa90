"""Typed options by subject: what to train (model, loss, data), how (optim), and what a run writes (evaluation, run).

Every option is a field of one of the small dataclasses below. It has a *flat name*, which is its flag on the command line
(``lr`` is ``--lr``, ``train_data`` is ``--train-data``), and a *place*, which is where code reads it (``config.optim.lr``,
``config.data.train``). Flag names are open_clip's wherever open_clip has the flag.

Options come from several layers: field defaults, the built-in scenes' defaults, the backbone's, a recipe, a file, flags.
Each layer is a sparse mapping; :func:`resolve` merges them, checks types and remembers where each value came from.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import read_options
from coder_plugin.locations import local_only


def option(default: Any, help: str, *, flag: str | None = None, **declared: Any) -> Any:
    """A field of a dataclass of options, from which its flag is made; the only place where an option is declared.

    Args:
        default: its default; ``dataclasses.MISSING`` for an option that must be given.
        help: its text in ``--help``.
        flag: its flat name, if it is not the field's.
        declared: ``choices``, ``at_least`` … ``group`` of :class:`Option`.
    """
    metadata = {"flag": flag, "help": help, **declared}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _check_settings(settings: Sequence[str], flag: str, form: str) -> None:
    if wrong := next((each for each in settings if "=" not in each), None):
        raise CoderError(f"{flag} {wrong}: write {form}")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised, and what its terms need besides the data."""

    expression: str = option(
        "dcl", 'what to minimise: a loss expression, such as "3*dcl + 0.5*triplet(margin=0.1)"', flag="loss",
        metavar="EXPRESSION", common=True
    )
    set: list[str] = option(
        [], "options of terms and heads, such as dcl.mu=0.07", metavar="OWNER.OPTION=VALUE",
        uses=("loss",), common=True
    )
    concepts: str | None = option(
        None, "concept vocabulary, a file made by coder-plugin concepts [scenes: built in]", metavar="FILE", uses=("loss",),
        common=True
    )
    negatives: str | None = option(
        None, "AsCL's noised negatives: mixture, none, or names with options, such as 'gaussian(std=0.2)+shuffle'",
        uses=("loss",)
    )
    positives: str | None = option(
        None, "AsCL's positive captions: join, truncate, join+truncate or none [join+truncate]", uses=("loss",)
    )
    tagger: str | None = option(
        None, "part-of-speech tagger: a spaCy pipeline's name or folder, or scenes [en_core_web_sm; scenes on the scenes]",
        uses=("loss",)
    )
    local_loss: bool | None = option(
        None, "each rank compares only its own anchors with the candidates of all ranks; the loss is the same [with several "
        "processes]"
    )
    gather_dtype: str = option(
        "exact", "how features, and the gradients that return, travel between ranks: in their own type (exact), or rounded to "
        "bfloat16, in half the bytes", choices=("exact", "bfloat16")
    )
    gather: str = option(
        "all", "with several processes: each rank gets the features of all ranks (all), or of one rank after the other, so "
        "that none holds the global batch (ring; docs/multi_node.md names what it serves)", choices=("all", "ring")
    )
    loss_impl: str = option(
        "auto", "how losses of pairs are computed: with all similarities at once (reference), or by tiles, equal up to "
        "rounding, in memory that grows with the batch size alone (tiled)", choices=("auto", "reference", "tiled")
    )

    def __post_init__(self) -> None:
        _check_settings(self.set, "--set", "OWNER.OPTION=VALUE, such as dcl.mu=0.07")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, which weights it starts from, and which of its layers train."""

    name: str = option(
        "coder-tiny", "open_clip model or configuration (.json), CLIPModel or SiglipModel of transformers (folder, "
        "transformers:OWNER/NAME), or a region model such as region-bert; required with --train-data [scenes: coder-tiny]",
        flag="model", uses=("opening",), common=True
    )
    kwargs: list[str] = option(
        [], "options of a region model, OPTION=VALUE, such as text=FOLDER embed_dim=512", flag="model_kwargs",
        metavar="OPTION=VALUE", uses=("opening",)
    )
    pretrained: str | None = option(
        None, "CLIP weights to start from: an open_clip tag, a file, or an export's folder", metavar="WEIGHTS",
        uses=("opening",), common=True
    )
    pretrained_image: bool = option(False, "start the image tower from timm's ImageNet weights (downloads)", listed=True)
    pretrained_image_path: str | None = option(
        None, "start the image tower from this file (timm or torchvision keys)", metavar="FILE"
    )
    lock_image: bool = option(False, "freeze the image tower (LiT)", common=True)
    lock_image_unlocked_groups: int = option(0, "leave the image tower's last n layer groups unlocked", at_least=0, listed=True)
    lock_image_freeze_bn_stats: bool = option(
        True, "keep the BatchNorm statistics of frozen image layers (--lock-image, --lora-rank) as they are"
    )
    lock_text: bool = option(False, "freeze the text tower", common=True)
    lock_text_unlocked_layers: int = option(0, "leave the text tower's last n layers unlocked", at_least=0, listed=True)
    lock_text_freeze_layer_norm: bool = option(False, "also freeze LayerNorm of the locked text layers")
    force_image_size: int | list[int] | None = option(None, "override the model's image size in pixels", uses=("opening",))
    force_context_length: int | None = option(
        None, "override the model's text length in tokens", listed=True, uses=("opening",)
    )
    force_quick_gelu: bool = option(False, "use QuickGELU, which OpenAI's weights need", listed=True, uses=("opening",))
    force_patch_dropout: float | None = option(None, "override the model's patch dropout", listed=True)
    force_custom_text: bool = option(
        False, "use open_clip's CustomTextCLIP for built-in text towers", listed=True, uses=("opening",)
    )
    image_mean: list[float] | None = option(None, "override the image mean, one value per channel", uses=("opening",))
    image_std: list[float] | None = option(
        None, "override the image standard deviation, one value per channel", uses=("opening",)
    )
    image_interpolation: str | None = option(
        None, "image resize", choices=("bicubic", "bilinear", "random"), listed=True, uses=("opening",)
    )
    image_resize_mode: str | None = option(
        None, "evaluation resize", choices=("shortest", "longest", "squash"), listed=True, uses=("opening",)
    )
    aug_cfg: list[str] = option([], "open_clip's augmentation options, OPTION=VALUE", metavar="OPTION=VALUE")
    cache_dir: str | None = option(None, "folder for open_clip's downloads", listed=True, uses=("opening",))
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass: slower, less memory", common=True)
    channels_last: bool | None = option(
        None, "keep images channels-last, which is faster for convolutional towers [no; scenes: yes]"
    )
    torchcompile: bool = option(False, "compile the model and the loss with torch.compile", listed=True)
    aggregator: str = option(
        "tower", "the features of an image or a text: the towers' own, GPO over their tokens, or GPO with the decoder that "
        "CODER prints", choices=("tower", "gpo", "gpo-mlp")
    )
    context_blocks: int = option(
        1, "SelfAlign on open_clip towers: blocks between the layer that gives local features and the layer that gives "
        "contexts", at_least=1
    )
    lora_rank: int = option(
        0, "train low-rank adapters of this rank instead of the towers' weights (needs peft)", at_least=0, common=True
    )
    lora_alpha: float | None = option(None, "scale of the adapters [their rank]", above=0)

    def __post_init__(self) -> None:
        _check_settings(self.kwargs, "--model-kwargs", "OPTION=VALUE, such as embed_dim=512")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data are read, and how."""

    train: str | None = option(
        None, "training data: a .csv, Karpathy or COCO .json, shards (brace pattern, also https://, hf://, s3://, gs:// or "
        "pipe:COMMAND), a folder of img2dataset or precomp, or of Hugging Face: hf:OWNER/NAME, .parquet files, a saved folder "
        "[the built-in scenes]", flag="train_data", metavar="DATA", common=True
    )
    val: str | None = option(
        None, "validation data, of any kind that training takes", flag="val_data", metavar="DATA", common=True
    )
    dataset_type: str = option(
        "auto", "the reader: webdataset, csv, karpathy, coco, img2dataset, hf, hf-streaming, precomp, caps, scenes, or a "
        "plugin's", uses=("reading",)
    )
    image_root: str | None = option(
        None, "folder of the pictures that a table or a .json names", metavar="FOLDER", uses=("reading",), common=True
    )
    regions: str | None = option(
        None, "region features: files or folders joined with ::", metavar="DATA", uses=("reading",), common=True
    )
    regions_type: str = option(
        "auto", "layout of the region features: precomp, shards, or a plugin's",
        uses=("reading",)
    )
    max_regions: int = option(36, "read at most the first n regions of an image", at_least=1, uses=("opening",))
    region_dropout: float = option(
        0.0, "share of regions dropped at random in training [0; region-bert, region-bigru: 0.2]", at_least=0, below=1
    )
    word_dropout: float = option(
        0.0, "share of words masked, replaced or dropped at random in training [0; region-bert, region-bigru: 0.2]",
        at_least=0, below=1
    )
    train_num_samples: int | None = option(
        None, "samples per epoch, where the data cannot be counted or should be fewer", at_least=1
    )
    hold_aside: int = option(
        0, "keep N images of --train-data, drawn at random, out of training; without --val-data recall is measured on them [0]",
        at_least=0
    )
    hold_aside_seed: int = option(0, "seed of the draw of --hold-aside")
    dataset_resampled: bool = option(False, "draw shards with replacement", listed=True)
    captions: str = option(
        "draw", "draw: one caption per image and epoch; all: every caption is a pair", choices=("draw", "all"), common=True
    )
    csv_separator: str | None = option(
        None, "column separator of CSV files [detected: tab, comma, semicolon or |]", metavar="CHARACTER", uses=("reading",)
    )
    csv_img_key: str | None = option(
        None, "CSV column of image paths [filepath]", metavar="COLUMN", uses=("reading",), common=True
    )
    csv_caption_key: str | None = option(
        None, "CSV column of captions [title]", metavar="COLUMN", uses=("reading",), common=True
    )
    csv_negatives_key: str | None = option(
        None, "CSV column of hard negatives, a JSON list of texts [negatives]", metavar="COLUMN"
    )
    negatives_file: str | None = option(
        None, "table of hard negatives: columns key (the image's), negative, negative_key, separated by tabs", metavar="FILE",
        common=True
    )
    hard_negatives: int = option(
        0, "hard negatives drawn for each image and step, for the terms clip, dcl, m_dcl and triplet; 0: none", at_least=0,
        common=True
    )
    image_column: str | None = option(
        None, "column of the pictures of Hugging Face data [its images]", metavar="COLUMN", uses=("reading",)
    )
    caption_column: list[str] = option(
        [], "columns of the captions of Hugging Face data [captions, caption, text ...]", metavar="COLUMN", uses=("reading",)
    )
    key_column: str | None = option(
        None, "column of the images' names in Hugging Face data [key, image_id, filename ...]", metavar="COLUMN",
        uses=("reading",)
    )
    max_bad_samples: float = option(
        0.01, "stop above this fraction of samples that cannot be used; fewer than 1,000 count as 1,000", at_least=0, below=1
    )
    max_image_pixels: int | None = option(
        None, "refuse pictures of more pixels before decoding [89,478,485; at most twice that]", at_least=1, below=178_956_971
    )
    workers: int = option(2, "data loading processes per rank", at_least=0, common=True)

    @property
    def on_scenes(self) -> bool:
        """Whether to train on the built-in scenes, because no training data are named."""
        return self.train is None and self.dataset_type in ("auto", "scenes")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Batches, optimizer, schedule and precision."""

    batch_size: int = option(64, "pairs per rank and forward pass [64]", at_least=1, common=True)
    accum_freq: int = option(
        1, "forward passes per optimizer step; the pairs of all of them are each other's negatives", at_least=1, common=True
    )
    epochs: int = option(32, "passes over the data [32; scenes: 4]", at_least=1, common=True)
    max_steps: int | None = option(None, "optimizer steps, instead of --epochs", at_least=1, common=True)
    lr: float = option(5e-4, "learning rate [5e-4; scenes: 1e-3]", common=True)
    wd: float = option(0.2, "weight decay; not applied to biases, norms and temperatures", at_least=0, common=True)
    beta1: float | None = option(None, "Adam's first beta [the optimizer's]", listed=True)
    beta2: float | None = option(None, "Adam's second beta [the optimizer's]", listed=True)
    eps: float | None = option(None, "Adam's epsilon [the optimizer's]", listed=True)
    momentum: float | None = option(None, "momentum, for optimizers that have one [the optimizer's]", listed=True)
    opt: str = option("adamw", "name of a timm optimizer")
    warmup: int | None = option(None, "linear warm-up in steps [5 % of all steps]", at_least=0, common=True)
    warmup_epochs: float | None = option(None, "linear warm-up in epochs, instead of --warmup", at_least=0)
    lr_scheduler: str = option("cosine", "schedule after the warm-up", choices=("cosine", "const", "step"))
    lr_step_epochs: int = option(15, "epochs between the drops of --lr-scheduler step", at_least=1)
    lr_step_gamma: float = option(0.1, "factor of each drop of --lr-scheduler step")
    layer_decay: float = option(
        1.0, "factor on the learning rate per layer, from the towers' outputs to their inputs", common=True
    )
    heads_lr_scale: float = option(1.0, "factor on the learning rate of the heads that the loss adds", at_least=0)
    text_lr_scale: float = option(1.0, "factor on the text encoder's learning rate [1; region-bert: 0.1]", at_least=0)
    grad_clip_norm: float | None = option(None, "clip the gradient to this norm [no clipping]")
    ema_decay: float | None = option(
        None, "decay of an exponential moving average of the weights, which is evaluated and exported [no average]"
    )
    precision: str = option(
        "auto", "autocast [bf16 on GPU, fp32 on CPU]", choices=("auto", "fp32", "amp", "amp_bf16", "amp_fp16"),
        uses=("opening",), common=True
    )
    tf32: bool = option(True, "multiply float32 matrices in TF32 on GPUs that have it, in losses too, while training")

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise CoderError(f"--lr must be > 0, got {self.lr}")
        if self.warmup is not None and self.warmup_epochs is not None:
            raise CoderError("--warmup and --warmup-epochs both set the length of the warm-up: give one")
        if not 0 < self.layer_decay <= 1:
            raise CoderError(f"--layer-decay must be in (0, 1], got {self.layer_decay}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise CoderError(f"--ema-decay must be in (0, 1), got {self.ema_decay}")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and how a model is evaluated."""

    val_frequency: int = option(1, "evaluate every n epochs, and at the end; 0: never", at_least=0)
    val_before: bool = option(False, "also evaluate random weights before the first step; trained weights always are evaluated")
    rerank: str | None = option(
        None, "candidates per query that are re-ranked, or all: every pair [32; all if only the fusion is trained]", metavar="K"
    )
    zeroshot: str | None = option(
        None, "also measure zero-shot accuracy on the pictures in FOLDER/CLASS/, before and during training, to "
        "see what training costs elsewhere", metavar="FOLDER", common=True
    )
    zeroshot_frequency: int = option(1, "measure zero-shot accuracy every n epochs, and at the end", at_least=1, listed=True)
    classnames: str | None = option(
        None, "class names for --zeroshot: JSON, or lines of folder TAB name [FOLDER/classnames.txt]", metavar="FILE"
    )
    templates: str | None = option(
        None, "prompts for --zeroshot: openai (80), simple (7) or a file with one per line, {} for the class [openai]",
        common=True
    )

    def __post_init__(self) -> None:
        for name in ("classnames", "templates"):
            if self.zeroshot is None and getattr(self, name) is not None:
                raise CoderError(f"--{name} {getattr(self, name)} needs --zeroshot FOLDER, the pictures to classify")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run is written, what it resumes, what it saves and reports."""

    logs: str = option("./logs", "folder that holds the runs' folders", metavar="FOLDER", common=True)
    recipe: str | None = option(
        None, "a whole set-up, --loss included: a name that coder-plugin recipes lists, or a .toml file; --config and other "
        "flags win over it", common=True, group="objective"
    )
    name: str | None = option(None, "the run's folder in --logs [date and model]", common=True)
    resume: str | None = option(
        None, "a checkpoint's folder, or latest: the newest of --name; repeat the run's other flags", metavar="CHECKPOINT",
        common=True
    )
    save_frequency: int = option(
        0, "keep the checkpoint of every n-th epoch, besides the best and the last [0: no others]", at_least=0
    )
    save_every_steps: int = option(0, "also save every n steps within an epoch [0: never]", at_least=0)
    log_every_n_steps: int = option(20, "steps between log lines; an epoch's last step has one too", at_least=1)
    report: bool = option(True, "write the run's report.html at its end", common=True)
    report_to: str = option(
        "", "trackers, separated by commas: tensorboard, wandb, mlflow, trackio, aim, clearml, comet_ml, dvclive, swanlab; or "
        "all: every one that is installed", metavar="TRACKERS", common=True
    )
    wandb_project_name: str = option("coder-plugin", "project of the trackers that collect runs in projects", listed=True)
    seed: int = option(0, "seed of weights, data order and augmentation [0]", common=True)
    rank_timeout: float = option(
        3600.0, "with several processes: end the run when one makes no progress for so many seconds; must exceed the longest "
        "evaluation", at_least=1
    )
    dry_run: bool = option(False, "print the plan of the run, write nothing, and stop", common=True)

    def __post_init__(self) -> None:
        if self.resume == "latest" and self.name is None:
            raise CoderError("--resume latest needs --name, the run to resume")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All options of a training run, by subject.

    Make one with :func:`coder_plugin.pretrained.options.resolve_config`, which also fills in the defaults that depend on the
    data, the model and the recipe.

    Args:
        origins: for each option that is not a field's default, by flat name, where its value came from.

    Example:
        >>> config = TrainConfig(optim=OptimConfig(lr=1e-3))
        >>> config.optim.lr, config.data.captions
        (0.001, 'draw')
        >>> config.with_options(lr=2e-3).optim.lr
        0.002
    """

    loss: LossConfig = field(default_factory=LossConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def with_options(self, **options: Any) -> TrainConfig:
        """A copy with other values for options, given by their flat names."""
        changed = {subject: replace(getattr(self, subject), **values) for subject, values in nest(options).items()}
        return replace(self, **changed, origins={**self.origins, **dict.fromkeys(options, "code")})

    def given(self) -> dict[str, Any]:
        """The options that some layer has set, by flat name; the others have their fields' defaults."""
        return {name: value for name, value in self.to_flat().items() if name in self.origins}

    def to_flat(self) -> dict[str, Any]:
        """Every option by its flat name."""
        return {name: getattr(getattr(self, option.subject), option.field) for name, option in options_by_name().items()}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Every option by subject and field: what ``config.json`` of a run holds."""
        return nest(self.to_flat())


#: In the order of ``train --help``.
SUBJECTS: dict[str, type] = {
    "loss": LossConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "evaluation": EvalConfig,
    "run": RunConfig,
}

#: Defaults of training on the built-in scenes.
SCENES_DEFAULTS: Mapping[str, Any] = {
    "model": "coder-tiny", "batch_size": 64, "epochs": 4, "lr": 1e-3, "channels_last": True
}

#: Lists of OPTION=VALUE, which later layers change option by option.
_KEY_VALUE_LISTS = ("set", "model_kwargs", "aug_cfg")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its flat name, its place, its type, and what :func:`option` declares of it.

    Args:
        name: its flat name; field: its dataclass's; subject: where in :class:`TrainConfig`.
        kind: type of a single value: bool, int, float or str.
        is_list: whether a list of them may be given.
        is_single: whether a single one may be given.
        optional: whether None is a value.
        default: its default; ``dataclasses.MISSING`` for an option that must be given.
        help: its text in ``--help``.
        choices, at_least, above, below: what is allowed.
        metavar: its value in ``--help``; several for as many values.
        common: whether ``--help`` shows it, or only ``--help-all``; None: it does not show options of training.
        listed: whether the command line sets it in the list of ``--open-clip``.
        uses: what else reads it: ``opening`` a model, ``reading`` a data set, or the ``loss``.
        positional: whether it is an argument without a flag.
        group: the title above it in ``--help``.
    """

    name: str
    subject: str
    field: str
    kind: type
    is_list: bool
    is_single: bool
    optional: bool
    default: Any
    help: str
    choices: Sequence[str] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | tuple[str, ...] | None = None
    common: bool | None = None
    listed: bool = False
    uses: Collection[str] = ()
    positional: bool = False
    group: str | None = None

    @property
    def flag(self) -> str:
        if self.listed:
            return f"--open-clip {self.name}"
        return f"-{self.name}" if len(self.name) == 1 else "--" + self.name.replace("_", "-")

    def words(self, value: Any) -> list[str]:
        """The words of a command line that set the option."""
        values = list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]
        if self.listed:
            return ["--open-clip", f"{self.name}={','.join(values)}"]
        if self.kind is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        return [self.flag, *values]

    def check(self, value: Any, origin: str) -> Any:
        """The value in its declared type (an int where a float is declared becomes a float).

        Raises:
            CoderError: a value of another type, one that is not among the choices, or one out of range.
        """
        where = "" if origin in ("flag", "argument") else f" (set by {origin})"
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, list) and self.is_list:
            return [self._check_single(each, where) for each in value]
        if not self.is_single:
            raise CoderError(f"{self.flag} is {value!r}; it must be a list, each item {_KIND_NAMES[self.kind]}{where}")
        return self._check_single(value, where)

    def _check_single(self, value: Any, where: str) -> Any:
        if self.kind is float and isinstance(value, (int, float)) and type(value) is not bool:  # NumPy's too
            value = float(value)
        if type(value) is not self.kind:
            raise CoderError(f"{self.flag} is {value!r}; it must be {_KIND_NAMES[self.kind]}{where}")
        if self.choices and value not in self.choices:
            raise CoderError(f"{self.flag} is {value!r}; allowed: {', '.join(self.choices)}{where}")
        number: Any = value
        if self.at_least is not None and not number >= self.at_least:
            least = f"at least {self.at_least:g}" if self.kind is int else f">= {self.at_least:g}"
            raise CoderError(f"{self.flag} must be {least}, got {value}{where}")
        if self.above is not None and not number > self.above:
            raise CoderError(f"{self.flag} must be > {self.above:g}, got {value}{where}")
        if self.below is not None and not number < self.below:
            fraction = " (a fraction of all)" if self.at_least == 0 and self.below == 1 else ""
            raise CoderError(f"{self.flag} must be < {self.below:g}{fraction}, got {value}{where}")
        return value


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def options_of(cls: type, subject: str = "") -> dict[str, Option]:
    """The options that a dataclass declares with :func:`option`, by flat name."""
    options, hints = {}, typing.get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        alternatives = typing.get_args(hint) if union else (hint,)
        lists = [each for each in alternatives if typing.get_origin(each) is list]
        singles = [each for each in alternatives if each not in lists and each is not type(None)]
        declared = dict(item.metadata)
        name = declared.pop("flag") or item.name
        options[name] = Option(
            name=name,
            subject=subject,
            field=item.name,
            kind=singles[0] if singles else typing.get_args(lists[0])[0],
            is_list=bool(lists),
            is_single=bool(singles),
            optional=type(None) in alternatives,
            default=item.default if item.default_factory is MISSING else item.default_factory(),
            **declared,
        )
    return options


@cache
def options_by_name() -> Mapping[str, Option]:
    """Every option of training by its flat name, in the order of the subjects and their fields."""
    return {name: each for subject, cls in SUBJECTS.items() for name, each in options_of(cls, subject).items()}


def _used(what: str) -> tuple[str, ...]:
    return tuple(name for name, each in options_by_name().items() if what in each.uses)


#: Options that decide which model is opened, and its arithmetic.
OPENING = _used("opening")
#: Options that say how a data set is read. They belong to that data set and do not carry over to another.
READING = _used("reading")
#: Options that belong to a loss and do not carry over to another.
LOSS_OPTIONS = _used("loss")


def get_option(name: str) -> Option:
    """The option of a flat name.

    Raises:
        CoderError: there is no such option; names the nearest.
    """
    options = options_by_name()
    if name not in options:
        raise _unknown(name, list(options))
    return options[name]


def _unknown(name: str, names: Sequence[str], subject: str = "") -> CoderError:
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    within = f" of {subject}" if subject else ""
    known = "" if nearest else f"; known: {', '.join(sorted(names))}"
    return CoderError(f"unknown option {name}{hint}{within} in the configuration{known}")


def flatten(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by flat name, from flat names or nested by subject as in ``config.json``, or a mixture; None is left out.

    Raises:
        CoderError: an unknown option.

    Example:
        >>> flatten({"optim": {"lr": 0.001}, "model": "RN50", "data": {"train": None}})
        {'lr': 0.001, 'model': 'RN50'}
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name in SUBJECTS and isinstance(value, Mapping):
            places = {option.field: each for each, option in options_by_name().items() if option.subject == name}
            for place, each in value.items():
                if place not in places:
                    raise _unknown(place, list(places), name)
                flat[places[place]] = each
        else:
            flat[get_option(name).name] = value
    return {name: value for name, value in flat.items() if value is not None}


def nest(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by subject and field, from options by flat name; the inverse of :func:`flatten`.

    Example:
        >>> nest({"lr": 0.001, "model": "RN50"})
        {'optim': {'lr': 0.001}, 'model': {'name': 'RN50'}}
    """
    nested: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        option = get_option(name)
        nested.setdefault(option.subject, {})[option.field] = value
    return nested


def read_file(path: str | Path) -> dict[str, Any]:
    """Options by flat name from a JSON or TOML file, flat or nested by subject; a run's ``config.json`` is one.

    Locations of data that run a command or fetch are marked, and refused when they are opened.

    Raises:
        CoderError: the file cannot be read, or holds an unknown option.
    """
    options = read_options(path, f"--config {path}", toml=str(path).endswith(".toml"))
    if not isinstance(options, dict):
        raise CoderError(f"--config {path}: it must hold an object of options, not a {type(options).__name__}")
    try:
        return local_only(flatten(options))
    except CoderError as error:
        raise CoderError(f"--config {path}: {error}") from error


def merge(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers of options, later ones over earlier ones; see :func:`resolve`.

    Returns:
        The options by flat name, and for each the name of the layer that set it.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        options = flatten(layer)
        if "warmup" in options and "warmup_epochs" not in options:  # two names of one length: the later layer decides
            values.pop("warmup_epochs", None)
        elif "warmup_epochs" in options and "warmup" not in options:
            values.pop("warmup", None)
        if "max_steps" in options and "epochs" not in options:  # a weaker layer's length does not shorten it
            values.pop("epochs", None)
        if "loss" in values and options.get("loss", values["loss"]) != values["loss"]:
            for name in LOSS_OPTIONS:
                values.pop(name, None)
        for name, value in options.items():
            value = get_option(name).check(value, origin)
            if name in _KEY_VALUE_LISTS and value and values.get(name):
                keys = {setting.partition("=")[0] for setting in value}
                value = [*(each for each in values[name] if each.partition("=")[0] not in keys), *value]
            values[name], origins[name] = value, origin
    return values, {name: origins[name] for name in values}


def resolve(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> TrainConfig:
    """Merge layers of options over the fields' defaults.

    Args:
        layers: (name, options) from the weakest to the strongest. Options are flat or nested; a value of None counts as not
            given. Lists of OPTION=VALUE are merged option by option, and an empty list clears them. A layer that replaces the
            loss of a weaker one also drops that loss's options (:data:`LOSS_OPTIONS`).

    Returns:
        The configuration; its ``origins`` holds the layer's name for each option that a layer set.

    Raises:
        CoderError: an unknown option, a value of the wrong type or range, or options that exclude each other.

    Example:
        >>> config = resolve([("recipe coder", {"lr": 0.0002, "epochs": 30}), ("flag", {"optim": {"lr": 0.001}})])
        >>> config.optim.lr, config.optim.epochs, dict(config.origins)
        (0.001, 30, {'lr': 'flag', 'epochs': 'recipe coder'})
    """
    values, origins = merge(layers)
    return TrainConfig(**{subject: SUBJECTS[subject](**given) for subject, given in nest(values).items()}, origins=origins)
