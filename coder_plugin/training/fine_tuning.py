"""What fine-tuning loses: advice before it begins, and the zero-shot accuracy while it goes on.

The thresholds are rules of thumb, explained in docs/finetune_clip.md#what-train-and-doctor-warn-of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coder_plugin import distributed
from coder_plugin.backbones import transformers_clip
from coder_plugin.backbones.plugin_backbones import find_backbone
from coder_plugin.coder import CoderLoss
from coder_plugin.config import TrainConfig
from coder_plugin.training.optim import IMAGE_TOWER, after_tower, parameter_groups

#: Learning rates, by a part of the optimizer's name, above which pretrained towers lose what they know. Usual with
#: Adam: 1e-5 to 3e-5; reported to fail: 1e-4 with Lion, whose steps are larger. Other optimizers' rates have another scale.
LARGEST_RATES = {"lion": 1e-5, "adam": 5e-5}
#: Pairs of a step below which most batches hold no negative that a pretrained CLIP confuses with the positive.
FEWEST_PAIRS = 32


class Advice(NamedTuple):
    """A set-up that trains badly: what it is, and what to change."""

    name: str
    text: str
    do: str


def advice(config: TrainConfig, model: Any, loss: CoderLoss, *, pretrained: bool = True) -> list[Advice]:
    """What is likely to harm a fine-tuning.

    Args:
        config: the run's options.
        model: as it is trained, with locks and adapters.
        loss: of the model.
        pretrained: whether ``config`` tells which weights the model started from; a model made elsewhere is not judged by them.

    Returns:
        At most one piece of advice for each of ``rate``, ``batch``, ``logit_scale``, ``frozen`` and ``teacher``.
    """
    found = [*_small_batch(config, loss), *_frozen_scale(model, loss)]
    if pretrained:
        found += [*_rate(config, model), *_frozen_at_random(config, model), *_random_teacher(config, loss)]
    return found


def starts_from_weights(config: TrainConfig) -> bool:
    """Whether the model, or one of its towers, starts from trained weights."""
    model = config.model
    location = transformers_clip.find_location(model.name)
    named = model.name.startswith(("hf-hub:", "local-dir:"))
    named = named or (location is not None and location.reads_weights)
    return bool(named or model.pretrained or model.pretrained_image or model.pretrained_image_path)


def starts_at_random(config: TrainConfig) -> bool:
    """Whether all weights are random at the start: none are named, and no run is resumed."""
    return not starts_from_weights(config) and not config.run.resume


def tower_rate(config: TrainConfig, model: Any) -> float | None:
    """The median learning rate of the towers' trained parameters, without projections, heads and adapters; None if none is
    trained. With ``--layer-decay`` it is about that of the layers in the middle."""
    optim = config.optim
    towers = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not after_tower(name) and "lora_" not in name
    }
    groups = parameter_groups(
        model, lr=optim.lr, weight_decay=0.0, layer_decay=optim.layer_decay, text_lr_scale=optim.text_lr_scale
    )
    rates = sorted(group["lr"] for group in groups for parameter in group["params"] if id(parameter) in towers)
    return rates[len(rates) // 2] if rates else None


def _rate(config: TrainConfig, model: Any) -> Iterator[Advice]:
    optimizer = config.optim.opt.removeprefix("timm/")
    limit = next((rate for part, rate in LARGEST_RATES.items() if part in optimizer.lower()), None)
    rate = None if find_backbone(config.model.name) is not None else tower_rate(config, model)
    if limit is None or rate is None:
        return
    if starts_from_weights(config) and rate > limit:
        given = f"--lr {config.optim.lr:g}"
        if "lr" not in config.origins:
            given = f"--lr is not given, and the default, {config.optim.lr:g}, is the rate for training from scratch"
        of_towers = "" if rate == config.optim.lr else f" (the median of the towers' layers: {rate:.2g})"
        yield Advice(
            "rate",
            f"{given}{of_towers}: with {optimizer}, pretrained weights seldom bear more than {limit:g}",
            "recall and zero-shot accuracy may fall within some hundred steps. Give --lr 1e-5, or train fewer weights "
            "(--lora-rank 8)",
        )
    elif starts_at_random(config) and rate <= limit:
        yield Advice(
            "rate",
            f"the towers start from random weights, and --lr {config.optim.lr:g} is a rate for pretrained ones",
            "recall stays near chance for many epochs. Start from weights (--pretrained), or give --lr 5e-4",
        )


def _frozen_at_random(config: TrainConfig, model: Any) -> Iterator[Advice]:
    if find_backbone(config.model.name) is not None or not starts_at_random(config):
        return
    tower = [p for name, p in model.named_parameters() if name.startswith(IMAGE_TOWER) and not after_tower(name)]
    if tower and not any(parameter.requires_grad for parameter in tower):
        yield Advice(
            "frozen",
            "the image tower is frozen at random weights, so it learns nothing",
            "give trained ones (--pretrained, --pretrained-image-path), or a recipe and flags that do not lock it",
        )


def _small_batch(config: TrainConfig, loss: CoderLoss) -> Iterator[Advice]:
    pairs = config.optim.batch_size * config.optim.accum_freq * distributed.world_size()
    has_bank = any("coder_image_keys" in term.requires for term in loss.terms.values())
    if any(spec.name == "clip" for spec in loss.objective.terms) and 1 < pairs < FEWEST_PAIRS and not has_bank:
        yield Advice(
            "batch",
            f"clip compares an image with the {pairs} captions of a step, which a pretrained model seldom confuses",
            f"give steps of {FEWEST_PAIRS} pairs or more: --batch-size, or --accum-freq where memory is short",
        )


def _frozen_scale(model: Any, loss: CoderLoss) -> Iterator[Advice]:
    scale = getattr(model, "logit_scale", None)
    if scale is None or scale.requires_grad:
        return
    reading = [label for label, binding in zip(loss.terms, loss.bindings, strict=True) if "logit_scale" in binding.values()]
    if reading:
        yield Advice(
            "logit_scale",
            f"{' and '.join(reading)} reads logit_scale, which is frozen at {float(scale.exp()):.4g}: the temperature stays",
            "make the model with this loss (create_model(loss=…) freezes a scale that its loss does not read), or call "
            "model.logit_scale.requires_grad_(True)",
        )


def _random_teacher(config: TrainConfig, loss: CoderLoss) -> Iterator[Advice]:
    teachers = [term.head_options.get("teacher", {}).get("weights") for term in loss.terms.values()]
    if "base" in teachers and starts_at_random(config):
        yield Advice(
            "teacher",
            "distill(teacher=base) keeps the model near random weights, because training starts from none",
            "name some with --pretrained, or another teacher",
        )


def format_accuracy(figures: Mapping[str, float]) -> str:
    """A line on zero-shot accuracy, percent.

    Args:
        figures: of :func:`~coder_plugin.evaluation.zero_shot.accuracies`; ``before`` is the top-1 accuracy before training.

    Example:
        >>> format_accuracy({"zeroshot_top1": 61.25, "zeroshot_mean_per_class": 60.0, "before": 63.5})
        'zero-shot: top-1 61.2 % (before the first step 63.5 %: -2.2), mean per class 60.0 %'
    """
    names = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}
    parts = []
    for prefix, what in (("", ""), ("vectors_", " by vectors")):
        for figure, name in names.items():
            if (value := figures.get(f"zeroshot_{prefix}{figure}")) is not None:
                part = f"{name}{what} {value:.1f} %"
                if prefix + figure == "top1" and "before" in figures and figures.get("step") != 0:
                    part += f" (before the first step {figures['before']:.1f} %: {value - figures['before']:+.1f})"
                parts.append(part)
    return f"zero-shot: {', '.join(parts)}"
