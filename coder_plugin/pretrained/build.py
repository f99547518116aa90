"""Model, tokenizer and transforms of a run, from its configuration."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones import own
from coder_plugin.backbones.base import Backbone
from coder_plugin.config import TrainConfig
from coder_plugin.data.source import map_tensors
from coder_plugin.data.tags import Tags
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import Head, TrainingFacts
from coder_plugin.heads.capabilities import AddsTexts, ReadsConcepts
from coder_plugin.model import create_model, reads_key, required_heads_with
from coder_plugin.negatives.positives import Positives
from coder_plugin.objective import Objective, parse_value
from coder_plugin.pretrained.data import captions_of, check_data, example_of
from coder_plugin.pretrained.export import start_heads
from coder_plugin.training.step import restored_buffers


def make_objective(config: TrainConfig) -> Objective:
    """The objective that ``--loss``, ``--set`` and ``--local-loss`` spell."""
    settings = {}
    for setting in config.set:
        path, equals, value = setting.partition("=")
        if not equals:
            raise CoderError(f"--set {setting}: write OWNER.OPTION=VALUE, such as dcl.mu=0.07")
        settings[path.strip()] = parse_value(value)
    objective = Objective.parse(config.loss).with_options(settings)
    given = {"negatives": config.negatives, "positives": config.positives}
    if any(value is not None for value in given.values()):
        makers = required_heads_with(objective, AddsTexts)
        if not makers:
            flags = " and ".join(f"--{name}" for name, value in given.items() if value is not None)
            raise CoderError(f'{flags}: no term of --loss "{config.loss}" reads generated texts (ascl does)')
        head = next(iter(makers))
        generated = {f"{head}.{name}": parse_value(value) for name, value in given.items() if value is not None}
        twice = sorted(generated.keys() & settings.keys())
        if twice:
            raise CoderError(f"--{twice[0].rpartition('.')[2]} and --set {twice[0]} say the same: give one")
        objective = objective.with_options(generated)
    return replace(objective, local_loss=objective.local_loss or config.local_loss)


def fit_objective(objective: Objective, config: TrainConfig, *, samples_per_epoch: int) -> Objective:
    """The objective with the options that its heads derive from the data, where nobody has set them.

    Raises:
        CoderError: a head needs something that the run does not have, or no head reads what ``--concepts`` names.
    """
    facts = TrainingFacts(
        loss=str(config.loss),
        samples_per_epoch=samples_per_epoch,
        captions=config.captions,  # type: ignore[arg-type]
        pairs_per_step=config.batch_size and config.batch_size * config.accum_freq * distributed.world_size(),
        concepts=config.concepts,
        on_scenes=config.on_scenes,
        train_data=config.train_data,
    )
    heads = required_heads_with(objective, Head)
    if config.concepts and not any(issubclass(head, ReadsConcepts) for head in heads.values()):
        raise CoderError(f'--concepts: no term of --loss "{config.loss}" reads concepts')
    options = {name: dict(values) for name, values in objective.heads}
    settings: dict[str, Any] = {}
    for name, head in heads.items():
        derived = head.options_from_data(options.get(name, {}), facts)
        settings.update({f"{name}.{option}": value for option, value in derived.items()})
    return objective.with_options(settings)


def make_positives(model: Any) -> Positives | None:
    """What makes positive captions of raw text, where a head of the model reads them."""
    head = model.coder.adds_texts
    return None if head is None or head.positives is None else Positives(head.positives)


def make_tags(model: Any, config: TrainConfig) -> Tags | None:
    """What gives the words' classes, where a head of the model reads them, its tagger loaded."""
    if not model.coder.reads_tags:
        if config.tagger is not None:
            raise CoderError(f'--tagger {config.tagger}: nothing in --loss "{config.loss}" as it is set reads word classes')
        return None
    tags = Tags(config.tagger or ("scenes" if config.on_scenes or config.train_data == "scenes" else "en_core_web_sm"))
    try:
        tags.load()
    except CoderError as error:
        raise CoderError(f'the classes of words that --loss "{config.loss}" reads come of --tagger: {error}') from error
    return tags


def check_accumulation(model: Any, config: TrainConfig) -> None:
    """CoderError where a head needs the whole batch in one forward, and there are several to a step."""
    whole = [name for name, head in model.coder.heads.items() if head.whole_batch]
    if config.accum_freq > 1 and whole:
        raise CoderError(
            f"--accum-freq {config.accum_freq}: the head {whole[0]!r} scores every pair of a batch inside the model, and "
            "accumulated batches meet only after it: take a larger --batch-size, or more processes"
        )


def make_accelerator(config: TrainConfig) -> Any:
    """accelerate's device, autocast, loss scaling and DDP, as the flags ask."""
    from accelerate import Accelerator, utils

    cuda = torch.cuda.is_available()
    mixed = mixed_precision(config)
    there = {"tensorboard": utils.is_tensorboard_available(), "wandb": utils.is_wandb_available()}
    trackers = [name for name in config.report_to.replace(",", " ").split()]
    unknown = set(trackers) - {"tensorboard", "wandb"}
    if unknown:
        raise CoderError(f"--report-to: unknown tracker {', '.join(sorted(unknown))}; known: tensorboard, wandb")
    absent = [name for name in trackers if not there[name]]
    if absent:
        raise CoderError(f"--report-to {config.report_to}: {', '.join(absent)} is not installed (pip install {absent[0]})")
    # accumulation is ours (cached features): what accelerate's own settings say of it must not divide gradients
    accumulation = utils.GradientAccumulationPlugin(num_steps=1)
    options = {"gradient_accumulation_plugin": accumulation, "project_dir": config.logs}
    try:
        return Accelerator(mixed_precision=mixed, cpu=not cuda, log_with=trackers or None, **options)
    except (ValueError, ImportError) as error:
        raise CoderError(f"accelerate: {error}") from error


def mixed_precision(config: TrainConfig) -> str:
    """accelerate's name of ``--precision``: no, bf16 or fp16."""
    cuda = torch.cuda.is_available()
    precision = {"auto": "bf16" if cuda else "no", "fp32": "no", "amp": "fp16", "amp_fp16": "fp16", "amp_bf16": "bf16"}
    mixed = precision[config.precision]
    if mixed == "fp16" and not cuda:
        raise CoderError(f"--precision {config.precision} needs a GPU; on a CPU use fp32 or amp_bf16")
    return mixed


def make_autocast(config: TrainConfig, device: torch.device) -> Callable[[], Any]:
    """Autocast contexts as ``--precision`` says, without an accelerator of that precision: a process has one."""
    mixed = mixed_precision(config)
    if mixed == "no":
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16 if mixed == "bf16" else torch.float16)


def make_model(
    config: TrainConfig,
    objective: Objective,
    device: torch.device,
    source: Any = None,
    *,
    inference: bool = False,
    return_intermediates: Collection[str] = (),
) -> Any:
    """The model with its heads (with ``inference`` those that score), towers locked, adapters in, on its device.

    ``source``: the data, from which a region model takes what its options leave open.
    """
    assert config.model is not None
    options: dict[str, Any] = {"cache_dir": config.cache_dir}
    found = own.find(config.model)
    example = None if source is None else example_of(source, config.max_bad_images, of_regions=found is not None)
    if found is not None:
        options.update(_own_options(config))
        if source is not None:
            captions = partial(captions_of, source)
            options.update(example=example, captions=captions)
            whole = getattr(example, "whole", None)
            # an export keeps what it was made with
            if whole is not None and "global_dim" not in found.options and reads_key(objective, "image_global"):
                options.setdefault("global_dim", len(whole))
    elif config.model_kwargs:
        raise CoderError(f"--model-kwargs are options of region models, and {config.model} is open_clip's")
    else:
        options |= {
            "pretrained_image": config.pretrained_image,
            "force_image_size": config.force_image_size,
            "force_context_length": config.force_context_length,
            "force_quick_gelu": config.force_quick_gelu,
            "force_patch_dropout": config.force_patch_dropout,
            "force_custom_text": config.force_custom_text,
            "force_preprocess_cfg": preprocess_overrides(config),
        }
    model = create_model(
        config.model,
        loss=objective,
        pretrained=config.pretrained,
        pretrained_image_path=config.pretrained_image_path,
        aggregator=config.aggregator,  # type: ignore[arg-type]
        context_blocks=config.context_blocks,
        inference=inference,
        return_intermediates=return_intermediates,
        device=device,
        **options,
    )
    if source is not None:
        check_data(model, example, source.name, config)
    if not inference:
        start_heads(model, config.pretrained)
    if config.lock_image:
        model.lock_image_tower(unlocked_groups=config.lock_image_unlocked_groups)
        if config.lock_image_freeze_bn_stats:
            freeze_batch_norm(model.visual)
    if config.lock_text:
        # all but open_clip's HF towers lock with their LayerNorms or not at all
        whole = not hasattr(getattr(model, "text", None), "pooler")
        model.lock_text_tower(
            unlocked_layers=config.lock_text_unlocked_layers,
            freeze_layer_norm=whole or config.lock_text_freeze_layer_norm,
        )
    if config.lora_rank:
        add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha)
    if config.channels_last:
        model.visual.to(memory_format=torch.channels_last)
    model.to(device)
    model.coder.attach(model)  # as it now is: adapters and layouts, but no checkpointing, which a copy has no use for
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    return model


def _own_options(config: TrainConfig) -> dict[str, Any]:
    """``--model-kwargs``, and the flags that region models have as well."""
    options: dict[str, Any] = {}
    for setting in config.model_kwargs or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise CoderError(f"--model-kwargs {setting}: write OPTION=VALUE, such as embed_dim=512")
        options[name] = parse_value(value)
    if config.force_context_length is not None:
        options["context_length"] = config.force_context_length
    return options


def freeze_batch_norm(tower: nn.Module) -> None:
    """Keep the BatchNorms of locked layers in eval mode for good, in place.

    open_clip's own ``freeze_bn_stats`` puts torchvision's frozen layer in their place, which has neither the activation
    that timm's BatchNorms hold nor their epsilon: an EfficientNet's features then overflow.
    """
    for module in tower.modules():
        locked = not any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and locked:
            cls = type(module.eval())
            members = {"train": lambda self, mode=True: self, "statistics_are_frozen": True, "__module__": cls.__module__}
            module.__class__ = type(cls.__name__, (cls,), members)


def preprocess_overrides(config: Any) -> dict[str, Any]:
    """open_clip's preprocessing options that the flags set."""
    named = {
        "mean": config.image_mean,
        "std": config.image_std,
        "interpolation": config.image_interpolation,
        "resize_mode": config.image_resize_mode,
    }
    return {key: value for key, value in named.items() if value is not None}


def add_lora(model: Any, *, rank: int, alpha: float | None = None) -> None:
    """Freeze the towers and put peft's low-rank adapters on the linear layers of their blocks, in place.

    Projections into the joint space, temperatures and our heads stay trainable as they are.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise CoderError('--lora-rank needs peft: pip install "coder-plugin[lora]"') from error
    from coder_plugin.training.optim import after_tower, in_block

    # of a region model all but the text encoder is new
    new = (lambda name: not name.startswith("text.transformer.")) if isinstance(model, Backbone) else after_tower
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and new(name)}
    targets: list[str] = []
    for name, module in model.named_modules():  # an attention's output layer belongs to its attention
        locked = not any(parameter.requires_grad for parameter in module.parameters())
        if not locked and in_block(f"{name}.") and isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            if not targets or not name.startswith(f"{targets[-1]}."):
                targets.append(name)
    if not targets:
        raise CoderError(f"--lora-rank: {type(model).__name__} has no unlocked linear layer in numbered blocks")
    # as one pattern for whole names: of a list peft takes the ends, and one tower's names end like the other's
    pattern = "|".join(re.escape(name) for name in targets)
    scale: Any = rank if alpha is None else alpha
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=scale, target_modules=f"(?:{pattern})"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name in trainable)


def make_transforms(model: Any, config: TrainConfig) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The training (augmenting) and evaluation transforms for this model: open_clip's, or a region model's own."""
    if isinstance(model, Backbone):
        options = {"max_regions": config.max_regions}
        return model.transform(**options, region_dropout=config.region_dropout), model.transform(**options)
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    augmentation = None
    if config.aug_cfg:
        pairs = [item.partition("=") for item in config.aug_cfg]
        augmentation = {key: _sequence(value) for key, _, value in pairs}
        known = AugmentationCfg.__dataclass_fields__
        for key in augmentation:
            if key not in known:
                raise CoderError(f"--aug-cfg: unknown option {key!r}; known: {', '.join(known)}")
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    return (
        image_transform_v2(preprocess, is_train=True, aug_cfg=augmentation),
        image_transform_v2(preprocess, is_train=False),
    )


def _sequence(text: str) -> Any:
    if "," in text or text[:1] in "([":
        return tuple(parse_value(item) for item in text.strip("()[] ").split(",") if item.strip())
    return parse_value(text)


def make_tokenizer(config: TrainConfig, model: Any, *, training: bool = False) -> Callable[[list[str]], Tensor]:
    """Texts -> ids; in training a region model's drops words."""
    if isinstance(model, Backbone):
        return model.tokenizer(word_dropout=config.word_dropout if training else 0.0)
    import open_clip

    from coder_plugin.backbones.clip import register_config

    assert config.model is not None
    name = register_config(config.model)
    try:
        return open_clip.get_tokenizer(name, context_length=config.force_context_length, cache_dir=config.cache_dir)
    except OSError as error:
        raise CoderError(f"tokenizer of {name!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def freeze_unread(model: Any, loss: Callable[..., Any], tokenizer: Callable[[list[str]], Tensor]) -> list[str]:
    """Freeze the parameters that no term reads, found by one backward pass over a made-up batch (rule 2).

    DDP fails on the second step where a parameter gets no gradient. Returns their names.
    """
    batch = example_batch(model, tokenizer)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        return []
    training = model.training
    model.train()
    devices = [batch["text"].device] if batch["text"].is_cuda else []
    with restored_buffers(model), torch.random.fork_rng(devices=devices):
        losses = loss(**model(**batch))
        model.coder.discard()
        gradients = torch.autograd.grad(sum(losses.values()), list(parameters.values()), allow_unused=True)
    model.train(training)
    unread = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    for name in unread:
        parameters[name].requires_grad_(False)
    return unread


def example_batch(model: Any, tokenizer: Callable[[list[str]], Tensor], rows: int = 4) -> dict[str, Any]:
    """A batch of noise and short sentences, shaped as the model wants it."""
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
        **({"text_tags": torch.ones_like(text)} if model.coder.reads_tags else {}),
    }
