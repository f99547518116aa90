"""Parameter groups, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from coder_plugin.config import TrainConfig
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.device import mixed_precision

# numbered blocks of open_clip's and transformers' towers, and ResNet's stages
_LAYER = re.compile(r"(?:^|[._])(?:resblocks|layers?|blocks?|h)\.(\d+)\.|(?:^|\.)layer([1-4])\.")
# before the first block: token and patch embeddings, positions, the stem
_STEM = re.compile(
    r"(?:^|\.)(?:conv\d?|conv_stem|bn\d|ln_pre|pre_layrnorm|class_embedding|positional_embedding|token_embedding|embeddings|"
    r"patch_embed|pos_embed|cls_token)(?:\.|$)"
)
# what projects into the joint space, and temperatures; of open_clip's and transformers' models
_AFTER_TOWER = re.compile(
    r"coder\.|logit_|visual\.(proj|head)(\.|$)|text\.proj(\.|$)|(text\.)?text_projection|visual_projection|text_model\.head\."
)
# how the names of an image tower's parameters begin
IMAGE_TOWER = ("visual.", "vision_model.")


def create_optimizer(model: Any, config: TrainConfig) -> Optimizer:
    """Any timm optimizer over the trainable parameters, grouped by weight decay and layer.

    Vectors and scalars (norms, biases, temperatures) and parameters that the model lists in ``no_weight_decay()`` get no
    weight decay.

    Raises:
        CoderError: an unknown optimizer, or options that it does not take.
    """
    from timm.optim import create_optimizer_v2

    optim = config.optim
    options: dict[str, Any] = {name: value for name in ("eps", "momentum") if (value := getattr(optim, name)) is not None}
    if optim.beta1 is not None or optim.beta2 is not None:
        options["betas"] = (0.9 if optim.beta1 is None else optim.beta1, 0.999 if optim.beta2 is None else optim.beta2)
    factors = {name: getattr(optim, name) for name in ("layer_decay", "text_lr_scale", "heads_lr_scale")}
    groups = parameter_groups(model, lr=optim.lr, weight_decay=optim.wd, **factors)
    try:
        name = optim.opt.removeprefix("timm/")  # open_clip writes timm/NAME
        if has_fused_step(name, config, (parameter for group in groups for parameter in group["params"])):
            options["fused"] = True
        return create_optimizer_v2(groups, opt=name, lr=optim.lr, weight_decay=optim.wd, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise CoderError(f"--opt {optim.opt}: {error} (names: timm.optim.list_optimizers())") from error


def has_fused_step(name: str, config: TrainConfig, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the optimizer makes its step in one kernel for many parameters: torch's Adam and AdamW, on a CPU and on CUDA.

    Not with a loss scaler (``--precision amp``): a fused optimizer skips a step itself, which accelerate does not report.
    """
    fits = all(each.device.type in ("cpu", "cuda") and each.is_floating_point() for each in parameters)
    return name in ("adam", "adamw") and fits and mixed_precision(config.optim.precision) != "fp16"


def parameter_groups(
    model: Any,
    *,
    lr: float | None,
    weight_decay: float,
    layer_decay: float = 1.0,
    text_lr_scale: float = 1.0,
    heads_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Trainable parameters by (learning-rate factor, weight decay): ``[{"params", "lr", "weight_decay", "lr_scale"}, …]``.

    ``text_lr_scale`` is the factor of the text tower's encoder: not of projections, poolings and heads. ``heads_lr_scale`` is
    that of the objective's heads, which begin anew where the towers are pretrained.
    """
    skip = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    factor = layer_factors(model, layer_decay)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim < 2 or name in skip else weight_decay
            scale = factor(name) * (text_lr_scale if in_text_encoder(name) else 1.0)
            scale *= heads_lr_scale if name.startswith("coder.heads.") else 1.0
            groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": (lr or 0.0) * scale, "weight_decay": decay, "lr_scale": scale}
        for (scale, decay), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def layer_factors(model: Any, layer_decay: float) -> Callable[[str], float]:
    """A function from a parameter's name to ``layer_decay ** (layers above it in its tower)``; 1 for projections and heads.

    timm trunks number their layers (``group_matcher``); in other towers the names do.
    """
    if layer_decay == 1:
        return lambda name: 1.0
    towers: dict[str, dict[str, int]] = {}
    for name, _ in model.named_parameters():
        tower = "image" if name.startswith(IMAGE_TOWER) else "text"
        if not name.startswith("coder.") and (layer := _layer_of(name)) is not None:
            towers.setdefault(tower, {})[name] = layer
    trunk = getattr(model.visual, "trunk", None)
    if trunk is not None and hasattr(trunk, "group_matcher"):
        from timm.models import group_parameters

        towers["image"] = {
            f"visual.trunk.{name}": layer
            for layer, names in group_parameters(trunk, trunk.group_matcher(coarse=False)).items()
            for name in names
        }
    scales = {
        name: layer_decay ** (max(layers.values()) + 1 - layer)
        for layers in towers.values()
        for name, layer in layers.items()
    }
    return lambda name: scales.get(name, 1.0)


def _layer_of(name: str) -> int | None:
    """0 before the blocks, 1 + n for block n, None after them."""
    if match := _LAYER.search(name):
        return int(match[1]) + 1 if match[1] is not None else int(match[2])
    return 0 if _STEM.search(name) else None


def create_schedule(optimizer: Optimizer, config: TrainConfig, steps_per_epoch: int) -> LambdaLR:
    """Linear warm-up, then cosine to zero, constant, or drops. Step it once per optimizer step."""
    total, warmup, optim = max(1, total_steps(config, steps_per_epoch)), warmup_steps(config, steps_per_epoch), config.optim

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if optim.lr_scheduler == "const":
            return 1.0
        if optim.lr_scheduler == "step":
            return optim.lr_step_gamma ** (step // max(1, steps_per_epoch) // optim.lr_step_epochs)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    return LambdaLR(optimizer, factor)


def with_epochs(config: TrainConfig, steps_per_epoch: int) -> TrainConfig:
    """The configuration with as many epochs as ``--max-steps`` needs, or fewer where ``--epochs`` is given, too."""
    if config.optim.max_steps is None:
        return config
    needed = -(-config.optim.max_steps // steps_per_epoch)
    given = config.optim.epochs if "epochs" in config.origins else needed
    return config.with_options(epochs=min(needed, given))


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the run: those of ``--epochs``, at most ``--max-steps``."""
    steps = steps_per_epoch * config.optim.epochs
    return steps if config.optim.max_steps is None else min(steps, config.optim.max_steps)


def warmup_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Steps of the linear warm-up: ``--warmup``, ``--warmup-epochs``, or 5 % of all steps."""
    if config.optim.warmup_epochs is not None:
        return round(config.optim.warmup_epochs * steps_per_epoch)
    return max(1, total_steps(config, steps_per_epoch)) // 20 if config.optim.warmup is None else config.optim.warmup


def after_tower(name: str) -> bool:
    """Whether a parameter projects into the joint space, scales the logits, or belongs to a head."""
    return _AFTER_TOWER.match(name) is not None


def in_text_encoder(name: str) -> bool:
    """Whether a parameter belongs to the text tower's encoder: transformers', a region model's, or open_clip's."""
    if name.startswith((*IMAGE_TOWER, "coder.")) or after_tower(name):
        return False
    return _layer_of(name) is not None or name.startswith(("text.transformer.", "text_model.", "ln_final.", "text.ln_"))


def in_block(name: str) -> bool:
    """Whether a parameter or module belongs to a numbered block of a tower."""
    return not name.startswith("coder.") and _LAYER.search(name) is not None
