"""Prepare a run: options, data, objective, model, transforms, frozen parameters."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones import transformers_clip
from coder_plugin.backbones.base import Backbone
from coder_plugin.coder import CoderLoss
from coder_plugin.concepts.tags import Tags
from coder_plugin.config import LOSS_OPTIONS, TrainConfig, flatten, get_option
from coder_plugin.contrast.pairs import Implementation
from coder_plugin.data.from_config import make_source, object_source
from coder_plugin.data.huggingface import is_dataset
from coder_plugin.data.loader import count_steps
from coder_plugin.data.pixels import eight_bit
from coder_plugin.data.source import ItemSource, map_tensors
from coder_plugin.errors import CoderError, install_command
from coder_plugin.evaluation.zero_shot import check_model
from coder_plugin.expression import parse_value
from coder_plugin.heads.base import Head, TrainingFacts
from coder_plugin.heads.capabilities import AddsTexts, heads_having, heads_with
from coder_plugin.locations import absolute
from coder_plugin.memory.model_copy import ModelCopy
from coder_plugin.model import add_heads, create_loss, required_heads_with
from coder_plugin.noise.positives import Positives
from coder_plugin.objective import Objective, TermSpec
from coder_plugin.options import check_options, default_options
from coder_plugin.pretrained.build import make_model
from coder_plugin.pretrained.export import start_heads
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.fine_tuning import starts_at_random
from coder_plugin.training.optim import IMAGE_TOWER, after_tower, in_block
from coder_plugin.training.step import restored_buffers

log = logging.getLogger(__name__)


def config_of_objects(
    config: TrainConfig | Mapping[str, Any] | None, *, model: Any, loss: Any, train: Any, val: Any
) -> TrainConfig:
    """The configuration that a trainer's arguments describe. It holds names as options, and of objects their names.

    Paths of data are absolute in it, so that the run can be evaluated and resumed from another folder.

    Args:
        config: a configuration, options (flat or nested), or None.
        model, loss, train, val: as in :class:`~coder_plugin.Trainer`.

    Raises:
        CoderError: a plain open_clip model without ``config={"model": NAME}``, or options that do not go together.
    """
    options: dict[str, Any] = {"train_data": _data_name(train), "val_data": _data_name(val)}
    if options["train_data"] == "scenes":  # the scenes need no name, nor does their validation split
        options["train_data"] = None
        options["val_data"] = None if options["val_data"] == "scenes" else options["val_data"]
    options["loss"] = loss if isinstance(loss, str) else str(_parse_loss(loss, model))
    if isinstance(model, str):
        options["model"] = model
    elif isinstance(model, Backbone):
        options["model"] = model.config()["backbone"]
    elif hasattr(model, "coder_name"):
        options["model"] = model.coder_name
    elif transformers_clip.class_name(model) is not None and (name := transformers_clip.name_of(model)) is not None:
        options["model"] = name
    elif not (isinstance(config, Mapping) and "model" in flatten(config)) and not isinstance(config, TrainConfig):
        raise CoderError('give the name of the model, which selects its tokenizer: config={"model": "ViT-B-32"}')
    if isinstance(config, TrainConfig):
        changed = {name: value for name, value in options.items() if config.to_flat()[name] != value}
        if "loss" in changed:  # a recipe's options are for the recipe's loss
            of_recipe = [name for name in LOSS_OPTIONS if config.origins.get(name, "").startswith("recipe ")]
            changed.update({name: get_option(name).default for name in of_recipe})
        config = config.with_options(**changed) if changed else config
    else:
        config = resolve_config({**flatten(config or {}), **options}, flags_name="argument")

    def located(options: Any, *names: str) -> Any:
        return replace(options, **{name: absolute(path) for name in names if (path := getattr(options, name)) is not None})

    data = located(config.data, "train", "val", "image_root", "regions", "negatives_file")
    return replace(config, data=data, evaluation=located(config.evaluation, "zeroshot", "classnames"))


def _data_name(data: Any) -> str | None:
    if data is None or isinstance(data, (str, Path)):
        return None if data is None else str(data)
    return str(getattr(data, "name", f"<{type(data).__name__}>"))


def _parse_loss(loss: Any, model: Any = None) -> Objective:
    custom_heads = model.coder.passed_heads if hasattr(model, "coder") else ()
    return loss.objective if isinstance(loss, CoderLoss) else Objective.parse(loss, heads=custom_heads)


#: Options that take effect when a model is made; of a plain open_clip model, when its heads are added.
_MAKING_MODEL = (
    "model_kwargs pretrained pretrained_image pretrained_image_path force_image_size force_context_length force_quick_gelu "
    "force_patch_dropout force_custom_text image_mean image_std image_interpolation image_resize_mode channels_last"
).split()
_ADDING_HEADS = ("aggregator", "context_blocks", "concepts")


def check_objects(config: TrainConfig, objective: Objective, *, model: Any, loss: Any) -> None:
    """Check that no option is set that a finished model or loss no longer takes.

    Args:
        config: the run's options.
        objective: the loss with the options that ``config`` sets.
        model, loss: as in :class:`~coder_plugin.Trainer`.

    Raises:
        CoderError: such an option, or a loss that was made for another model.
    """
    if isinstance(loss, CoderLoss):
        heads = model.coder.heads if hasattr(model, "coder") else None
        if any(term.heads is not heads for term in loss.terms.values()):
            raise CoderError("the loss reads the heads of another model: make it with create_loss(..., model=MODEL)")
        if objective != loss.objective:
            options = {name: getattr(config.loss, name) for name in ("set", "local_loss", "negatives", "positives")}
            names = [name for name, value in options.items() if value is not None and value != []]
            raise CoderError(
                f"{', '.join(names)}: the loss is made and no longer takes options: give them when the loss is made, such as "
                "create_loss(Objective.parse(LOSS).with_options({'dcl.mu': 0.07}), model=MODEL)"
            )
    if model is None or isinstance(model, str):
        return
    options = config.to_flat()
    of_model = {"force_context_length": getattr(model, "context_length", None)}
    names = list(_MAKING_MODEL)
    if hasattr(model, "coder"):
        names += _ADDING_HEADS
        of_model["aggregator"] = model.coder.aggregator
        of_model["context_blocks"] = model.coder.context_blocks
    refused = [
        name
        for name in names
        if options[name] not in (get_option(name).default, of_model.get(name, get_option(name).default))
        and not config.origins.get(name, "").startswith(("model ", "scenes"))  # a default of the backbone or the data
    ]
    if hasattr(model, "coder"):
        refused += _refused_head_options(config, objective, model)
    if refused:
        raise CoderError(f"{', '.join(refused)}: the model is made and takes no such options: pass them to create_model")


def _refused_head_options(config: TrainConfig, objective: Objective, model: Any) -> list[str]:
    """The options of heads that ``config`` sets otherwise than the model's heads were made with."""
    settings = {setting.partition("=")[0].strip() for setting in config.loss.set}
    generated = {name for name in ("negatives", "positives") if getattr(config.loss, name) is not None}
    options_of_model = dict(model.coder.objective.heads)
    refused = []
    for name, options in objective.heads:
        defaults = default_options("heads", name)
        for option, value in options:
            if f"{name}.{option}" in settings or option in generated:
                of_model = dict(options_of_model.get(name, ())).get(option, defaults.get(option))
                if name not in model.coder.heads or of_model != value:
                    refused.append(f"{name}.{option}")
    return refused


def open_data(config: TrainConfig, data: Any, split: str) -> Any:
    """The data source of a trainer's argument: a path, ``"scenes"``, a source, a data set of ``datasets``, a list of items,
    or None: the images that ``--hold-aside`` keeps out of training, if it does."""
    if data is None:
        return make_source(config.data, split=split) if config.data.hold_aside else None
    if isinstance(data, (str, Path)):
        options = {"train_data": "scenes"} if split == "train" else {"val_data": "scenes"}
        named = data != "scenes" or config.data.on_scenes
        return make_source((config if named else config.with_options(**options)).data, split=split)
    if config.data.hold_aside and split == "train":
        raise CoderError("hold_aside draws images of data that are named, not of an object: pass both parts, as train and val")
    if is_dataset(data):
        return object_source(config.data, data, split=split)
    return ItemSource(data, name=f"{split} items") if isinstance(data, Sequence) else data


def make_objective(config: TrainConfig, loss: Any = None, model: Any = None) -> Objective:
    """The objective of ``--loss``, or of a loss object, with the options that the other loss flags set.

    Args:
        config: ``--loss``, ``--set``, ``--negatives``, ``--positives`` and ``--local-loss``.
        loss: replaces ``--loss``: a loss in any form that :meth:`Objective.parse` reads, or a loss object.
        model: a model made by :func:`coder_plugin.create_model`, whose custom heads the loss may name.

    Raises:
        CoderError: a wrong expression, an option that does not exist, or an option that is set twice.
    """
    expression = config.loss.expression if loss is None else loss
    settings = {}
    for setting in config.loss.set:
        path, _, value = setting.partition("=")
        settings[path.strip()] = parse_value(value)
    objective = _parse_loss(expression, model).with_options(settings)
    flags = {"negatives": config.loss.negatives, "positives": config.loss.positives}
    objective = _with_hard_negatives(objective, config, made=isinstance(loss, CoderLoss))
    generators = {name: value for name, value in flags.items() if value is not None}
    if generators:
        has_heads = hasattr(model, "coder")
        heads = heads_with(model.coder.heads, AddsTexts) if has_heads else required_heads_with(objective, AddsTexts)
        if not heads:
            names = " and ".join(f"--{name}" for name in generators)
            raise CoderError(f'{names}: no term of --loss "{config.loss.expression}" reads generated texts (ascl does)')
        head = next(iter(heads))
        head_options = {f"{head}.{name}": parse_value(value) for name, value in generators.items()}
        repeated = sorted(head_options.keys() & settings.keys())
        if repeated:
            raise CoderError(f"--{repeated[0].rpartition('.')[2]} and --set {repeated[0]} set the same option: give one")
        objective = objective.with_options(head_options)
    local_loss = config.loss.local_loss
    if local_loss is False and config.loss.gather == "ring":
        raise CoderError("--gather ring compares each rank's own anchors: leave out --no-local-loss, or --gather ring")
    if local_loss is None:  # a loss that is made is computed as it was made
        local_loss = objective.local_loss or (distributed.world_size() > 1 and not isinstance(loss, CoderLoss))
    return replace(objective, local_loss=local_loss)


def _with_hard_negatives(objective: Objective, config: TrainConfig, *, made: bool) -> Objective:
    """The objective in which ``--hard-negatives`` has set the option ``hard_negatives`` of all terms that have it.

    Args:
        made: the loss is made, and its terms stay as they are.

    Raises:
        CoderError: a term reads hard negatives and none are drawn, or the other way round.
    """
    count, terms = config.data.hard_negatives, []
    for spec in objective.terms:
        if count and not made and "hard_negatives" not in dict(spec.options):
            term = spec.build()
            if spec.term is None and spec.source is None and "hard_negatives" in term.supports:
                try:
                    options = check_options("losses", spec.name, {**dict(spec.options), "hard_negatives": True})
                    spec = replace(spec, options=options)
                except CoderError as error:
                    _say(f"--hard-negatives: {error}; the term stays as it is")
            elif not _reads_negatives(spec):
                _say(f"--hard-negatives: {spec} does not take hard negatives and stays as it is")
        terms.append(spec)
    readers = [str(spec) for spec in terms if _reads_negatives(spec)]
    if count and not readers:
        raise CoderError(
            f'--hard-negatives {count}: no term of --loss "{objective}" takes hard negatives (clip, dcl, m_dcl and triplet do)'
        )
    if readers and not count:
        raise CoderError(f"{readers[0]} reads hard negatives: give --hard-negatives N, how many are drawn for each image")
    return replace(objective, terms=tuple(terms))


def _reads_negatives(spec: TermSpec) -> bool:
    return any(key.startswith("coder_negative_") for key in spec.build().requires)


def _say(text: str) -> None:
    if distributed.rank() == 0:
        log.info(text)


def fit_objective(objective: Objective, config: TrainConfig, *, samples_per_epoch: int) -> Objective:
    """The objective with the options that its heads derive from the data. Options that are already set stay as they are.

    Args:
        objective: what ``--loss`` and the other loss flags describe.
        config: the run's options.
        samples_per_epoch: samples over all ranks.

    Raises:
        CoderError: a head needs something that the run does not have, or ``--concepts`` is given and no head reads concepts.
    """
    facts = TrainingFacts(
        loss=str(config.loss.expression),
        samples_per_epoch=samples_per_epoch,
        captions=config.data.captions,  # type: ignore[arg-type]
        pairs_per_step=config.optim.batch_size and config.optim.batch_size * config.optim.accum_freq * distributed.world_size(),
        concepts=config.loss.concepts,
        epochs=config.optim.epochs,
        on_scenes=config.data.on_scenes,
        train_data=config.data.train,
    )
    heads = required_heads_with(objective, Head)
    if config.loss.concepts and not heads_having(heads, "image_attention"):
        raise CoderError(f'--concepts: no term of --loss "{config.loss.expression}" reads concepts')
    return with_derived_options(objective, facts)


def with_derived_options(objective: Objective, facts: TrainingFacts) -> Objective:
    """The objective with the options that its heads derive from what is known of a run. Set options stay as they are.

    Raises:
        CoderError: a head needs something that the run does not have.
    """
    options = {name: dict(values) for name, values in objective.heads}
    settings: dict[str, Any] = {}
    for name, head in required_heads_with(objective, Head).items():
        derived = head.options_from_data(options.get(name, {}), facts)
        settings.update({f"{name}.{option}": value for option, value in derived.items()})
    return objective.with_options(settings)


def say_random_weights(config: TrainConfig) -> None:
    """Say that open_clip has weights for this model where none are asked for."""
    import open_clip

    model = config.model
    if not starts_at_random(config) or distributed.rank():
        return
    if tags := open_clip.list_pretrained_tags_by_model(model.name):
        tag = next((tag for tag in reversed(tags) if tag.startswith("laion2b_s")), tags[-1])  # those that our pages name
        log.warning("%s starts from random weights; open_clip has trained ones, such as --pretrained %s", model.name, tag)


def make_training_model(
    config: TrainConfig, objective: Objective, device: torch.device, source: Any = None, *, model: Any = None
) -> Any:
    """The model to train on ``device``: with the objective's heads, those of ``--pretrained`` loaded, locks and adapters.

    Args:
        config: the run's options.
        objective: the objective, fitted to the data.
        device: where the model is put.
        source: the training data, from which a region model takes the options that are not set.
        model: a model to use; heads are added if it has none. None or a name: make the one that ``config`` names.
    """
    if model is None or isinstance(model, str):
        model = make_model(config.model, objective, device, source, max_regions=config.data.max_regions)
    elif not hasattr(model, "coder"):
        model.output_dict = True
        aggregator: Any = config.model.aggregator
        model = add_heads(
            model, config.model.name, loss=objective, aggregator=aggregator, context_blocks=config.model.context_blocks
        )
    start_heads(model, config.model.pretrained)
    if config.model.lock_image:
        with _partly_locked("--open-clip lock_image_unlocked_groups", config.model.name):
            model.lock_image_tower(unlocked_groups=config.model.lock_image_unlocked_groups)
    if config.model.lock_text:
        # open_clip's Hugging Face text towers can leave LayerNorms unlocked; its others always lock them, or cannot be locked
        always = not hasattr(getattr(model, "text", None), "pooler")
        with _partly_locked("--open-clip lock_text_unlocked_layers", config.model.name):
            model.lock_text_tower(
                unlocked_layers=config.model.lock_text_unlocked_layers,
                freeze_layer_norm=always or config.model.lock_text_freeze_layer_norm,
            )
    if config.model.lora_rank:
        add_lora(model, rank=config.model.lora_rank, alpha=config.model.lora_alpha)
    freeze_batch_norm(model, image=config.model.lock_image_freeze_bn_stats)
    model.to(device)
    model.coder.attach(model)  # a momentum copy has the adapters, and no checkpointing
    if config.model.grad_checkpointing:
        model.set_grad_checkpointing()
    return model


@contextlib.contextmanager
def _partly_locked(flag: str, name: str) -> Iterator[None]:
    """A context in which a tower is locked. open_clip's towers that can only be locked as a whole assert it."""
    try:
        yield
    except AssertionError as error:
        raise CoderError(f"{flag}: this tower of {name} can only be locked as a whole ({error}): leave out {flag}") from error


def make_train_transform(model: Any, config: TrainConfig) -> Callable[..., Any]:
    """The training transform: open_clip's augmentation, or a region model's own with region dropout.

    open_clip's yields 8-bit pictures, which the trainer normalises on the device (:class:`~coder_plugin.data.pixels.EightBit`).

    Raises:
        CoderError: an unknown option of ``--aug-cfg``.
    """
    if isinstance(model, Backbone):
        return model.transform(max_regions=config.data.max_regions, region_dropout=config.data.region_dropout)
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    augmentation = None
    if config.model.aug_cfg:
        pairs = [item.partition("=") for item in config.model.aug_cfg]
        augmentation = {key: _parse_sequence(value) for key, _, value in pairs}
        options = AugmentationCfg.__dataclass_fields__
        for key in augmentation:
            if key not in options:
                raise CoderError(f"--aug-cfg: unknown option {key!r}; known: {', '.join(options)}")
    return eight_bit(image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=True, aug_cfg=augmentation))


def _parse_sequence(text: str) -> Any:
    if "," in text or text[:1] in "([":
        return tuple(parse_value(item) for item in text.strip("()[] ").split(",") if item.strip())
    return parse_value(text)


def freeze_batch_norm(model: nn.Module, *, image: bool = True) -> None:
    """Keep frozen normalisations in eval mode, also when the model is set to training mode; in place.

    A normalisation with running statistics is frozen if its parameters are; one without parameters, if all parameters of the
    module around it are. Copies of the model inside heads keep their own mode.

    open_clip's own ``freeze_bn_stats`` replaces BatchNorms by torchvision's frozen layer, which has neither the activation nor
    the epsilon of timm's BatchNorms: an EfficientNet's features then overflow.

    Args:
        model: a model, or one of its towers.
        image: whether the image tower's statistics are frozen, too.
    """
    modules = dict(model.named_modules())
    copies = {id(each) for copied in modules.values() if isinstance(copied, ModelCopy) for each in copied.modules()}
    for name, module in modules.items():
        if not isinstance(module, nn.modules.batchnorm._NormBase) or id(module) in copies:
            continue
        if not image and name.startswith(IMAGE_TOWER):
            continue
        owner = name
        while owner and next(modules[owner].parameters(), None) is None:
            owner = owner.rpartition(".")[0]
        if any(parameter.requires_grad for parameter in modules[owner].parameters()):
            continue
        cls = type(module.eval())
        if not getattr(cls, "statistics_are_frozen", False):
            members = {"train": lambda self, mode=True: self, "statistics_are_frozen": True, "__module__": cls.__module__}
            module.__class__ = type(cls.__name__, (cls,), members)


def add_lora(model: Any, *, rank: int, alpha: float | None = None) -> None:
    """Freeze the towers and add peft's low-rank adapters to the linear layers of their blocks, in place.

    Projections into the joint space, temperatures and heads stay trainable without adapters. Locked layers get no adapters.

    Args:
        model: an open_clip model or a region model.
        rank: rank of the adapters.
        alpha: their scale; None: ``rank``.

    Raises:
        CoderError: peft is not installed, or the model has no unlocked linear layer in numbered blocks.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise CoderError(f"--lora-rank needs peft: {install_command('lora')}") from error
    # in a region model only the text encoder is pretrained
    is_new = (lambda name: not name.startswith("text.transformer.")) if isinstance(model, Backbone) else after_tower
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and is_new(name)}
    targets: list[str] = []
    for name, module in model.named_modules():  # peft handles an attention's output layer with the attention
        locked = not any(parameter.requires_grad for parameter in module.parameters())
        if not locked and in_block(f"{name}.") and isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            if not targets or not name.startswith(f"{targets[-1]}."):
                targets.append(name)
    if not targets:
        raise CoderError(f"--lora-rank: {type(model).__name__} has no unlocked linear layer in numbered blocks")
    if not isinstance(model, Backbone):
        trained = {_tower(name) for name, p in model.named_parameters() if p.requires_grad and not after_tower(name)}
        for tower in sorted(trained - {_tower(name) for name in targets}):
            log.warning(
                "--lora-rank: the %s tower has no linear layers in numbered blocks, so it gets no adapters and stays as it is",
                tower,
            )
    # one pattern of full names, because peft matches the items of a list with the ends of names, which both towers share
    pattern = "|".join(re.escape(name) for name in targets)
    scale: Any = rank if alpha is None else alpha
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=scale, target_modules=f"(?:{pattern})"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name in trainable)


def _tower(name: str) -> str:
    return "image" if name.startswith(IMAGE_TOWER) else "text"


def make_positives(model: Any) -> Positives | None:
    """The generator of positive captions, if a head of the model reads them."""
    head = model.coder.adds_texts
    return None if head is None or head.positives is None else Positives(head.positives)


def make_tags(model: Any, config: TrainConfig) -> Tags | None:
    """The word classes of captions, with their tagger loaded, if a head of the model reads them.

    Raises:
        CoderError: the tagger cannot be loaded, or ``--tagger`` is given and no head reads word classes.
    """
    if not model.coder.reads_tags:
        if config.loss.tagger is not None:
            expression = config.loss.expression
            reason = f'no head of --loss "{expression}" with these options reads word classes'
            raise CoderError(f"--tagger {config.loss.tagger}: {reason}")
        return None
    scenes = config.data.on_scenes or config.data.train == "scenes"
    tags = Tags(config.loss.tagger or ("scenes" if scenes else "en_core_web_sm"))
    try:
        tags.load()
    except CoderError as error:
        reads = f'--loss "{config.loss.expression}" reads word classes'
        raise CoderError(f"{reads}, which needs a tagger (--tagger): {error}") from error
    return tags


def steps_per_epoch(config: TrainConfig, name: str, samples: int) -> int:
    """Optimizer steps of an epoch.

    Args:
        config: the run's options.
        name: of the data, for messages.
        samples: of an epoch, over all ranks.

    Raises:
        CoderError: a batch is larger than the data, or ``--accum-freq`` than the batches of an epoch.
    """
    batches, accum_freq = count_steps(name, samples, config.optim.batch_size, distributed.world_size()), config.optim.accum_freq
    if accum_freq > batches:
        raise CoderError(f"--accum-freq {accum_freq} is more than the {batches} batches of an epoch")
    return batches // accum_freq


def make_loss(config: TrainConfig, objective: Objective, model: Any) -> CoderLoss:
    """The objective as a module, computed as ``--loss-impl``, ``--gather`` and ``--gather-dtype`` say."""
    return create_loss(
        objective,
        model=model,
        implementation=cast(Implementation, config.loss.loss_impl),
        gather_dtype=config.loss.gather_dtype,  # type: ignore[arg-type]
        gather=config.loss.gather,  # type: ignore[arg-type]
    )


def check_run(
    config: TrainConfig, model: Any, loss: CoderLoss, tokenizer: Callable[[list[str]], Tensor], steps: int
) -> list[str]:
    """Check that a run can train this model with this loss, and freeze the parameters that no term reads. A run begins with
    it, and ``coder-plugin doctor`` reports what it refuses.

    Args:
        config: the run's options.
        model: with its heads; its parameters are frozen in place.
        loss: called with the model's outputs.
        tokenizer: list of texts -> tokens [B, T].
        steps: optimizer steps of the run.

    Returns:
        The names of the parameters that are frozen because no term reads them.

    Raises:
        CoderError: batch, accumulation or length of the run do not fit the loss or a head, or nothing is left to train.
    """
    if config.evaluation.zeroshot is not None:
        check_model(model)
    check_pairs(config, loss)
    check_accumulation(model, config)
    pairs = config.optim.batch_size * config.optim.accum_freq * distributed.world_size()
    model.coder.check(batch=pairs, samples=pairs * steps)
    unread = freeze_unread(model, loss, tokenizer)
    freeze_batch_norm(model, image=config.model.lock_image_freeze_bn_stats)  # of a model that was passed, too
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoderError("nothing is left to train: both towers are locked and the objective's heads have no parameters")
    return unread


def check_pairs(config: TrainConfig, loss: CoderLoss) -> None:
    """Check that a step has enough pairs for the loss to learn from; warn where only some of its terms can learn.

    Raises:
        CoderError: a step has one pair, and all terms take their negatives from the other pairs of the step.
    """
    if config.optim.batch_size * config.optim.accum_freq * distributed.world_size() > 1:
        return
    if len(loss.without_negatives()) == len(loss.terms):
        raise CoderError(
            f'--batch-size 1: a step has one pair and therefore no negatives, from which --loss "{loss.objective}" learns: '
            "use --batch-size 2 or more, or --accum-freq where memory is short"
        )
    loss.warn_of_one_pair("use a larger --batch-size")


def check_accumulation(model: Any, config: TrainConfig) -> None:
    """Raise :class:`CoderError` if a step has several forward passes and a head needs the whole batch in one."""
    whole_batch_heads = [name for name, head in model.coder.heads.items() if head.whole_batch]
    if config.optim.accum_freq > 1 and whole_batch_heads:
        raise CoderError(
            f"--accum-freq {config.optim.accum_freq}: the head {whole_batch_heads[0]!r} scores every pair of a batch inside "
            "the model, and accumulated batches are only joined after the model: use a larger --batch-size, or more processes"
        )


def freeze_unread(model: Any, loss: Callable[..., Any], tokenizer: Callable[[list[str]], Tensor]) -> list[str]:
    """Freeze the parameters that no term reads: those without a gradient after a backward pass over a batch of noise.

    DDP fails on the second step if a trainable parameter gets no gradient.

    Args:
        model: with its heads; its parameters are frozen in place.
        loss: called with the model's outputs.
        tokenizer: list of texts -> tokens [B, T].

    Returns:
        The names of the parameters that are frozen because no term reads them.
    """
    batch = example_batch(model, tokenizer)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # create_model has frozen these if no term names them
    scalars = [key for key in ("logit_scale", "logit_bias") if not getattr(getattr(model, key, None), "requires_grad", True)]
    if not parameters:
        return scalars
    training = model.training
    model.train()
    devices = [batch["text"].device] if batch["text"].is_cuda else []
    with restored_buffers(model), torch.random.fork_rng(devices=devices):
        outputs = model(**batch)
        _check_rows(outputs, len(batch["text"]))
        losses = loss(**outputs)
        model.coder.discard()
        gradients = torch.autograd.grad(sum(losses.values()), list(parameters.values()), allow_unused=True)
    model.train(training)
    unread = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    for name in unread:
        parameters[name].requires_grad_(False)
    return scalars + unread


def _check_rows(outputs: Mapping[str, Tensor], rows: int) -> None:
    """:class:`CoderError` for a head's output that has not one row for each pair: steps could not split or gather it."""
    for key, value in outputs.items():
        if key.startswith("coder_") and (value.ndim == 0 or len(value) != rows):
            raise CoderError(
                f"a head returned {key} of shape {list(value.shape)} for a batch of {rows} pairs: what leaves the model has "
                "one row for each pair. Expand the value over the batch, or let the loss read the parameter from the head "
                f"(self.provider({key!r}))"
            )


def example_batch(model: Any, tokenizer: Callable[[list[str]], Tensor], rows: int = 4) -> dict[str, Any]:
    """A batch of noise and short sentences in the shapes that the model takes: keyword arguments of its forward."""
    device = next(model.parameters()).device
    if isinstance(model, Backbone):
        image = model.example_image(rows)
    else:
        size = model.visual.image_size
        height, width = (size, size) if isinstance(size, int) else size
        image = torch.randn(rows, 3, height, width, generator=torch.Generator().manual_seed(0))
        image = image.to(next(parameter.dtype for parameter in model.visual.parameters() if parameter.ndim == 4))
    text = tokenizer([f"a picture of {n} things" for n in range(rows)]).to(device)
    return {
        "image": map_tensors(lambda each: each.to(device), image),
        "text": text,
        "image_id": torch.arange(rows, device=device),
        **({"text_negatives": text[:, None]} if model.coder.reads_negatives else {}),
        **({"text_tags": torch.ones_like(text)} if model.coder.reads_tags else {}),
    }
