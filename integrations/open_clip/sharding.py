"""FSDP2 for the parts that upstream does not know: heads, and the momentum towers and the teacher inside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from coder_plugin.coder import Coder
from coder_plugin.memory.model_copy import ModelCopy


def shard_heads(coder: Coder, blocks: Sequence[nn.Module], **options: Any) -> None:
    """Shard ``model.coder``, before the model that contains it.

    Momentum towers and a teacher are sharded like the towers that they copy, block by block and in the same precision, so each
    rank holds, and averages, its own part. Heads keep float32 parameters, also with towers in bfloat16.

    Args:
        blocks: blocks of these towers.
        options: arguments of ``fully_shard``, as upstream calls it.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    _give_dimension(coder)
    copies = [module for module in coder.modules() if isinstance(module, ModelCopy)]
    for module in (*blocks, *copies):
        fully_shard(module, **options)
    fully_shard(coder, **{**options, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)})
    # methods that read parameters outside forward
    register_fsdp_forward_method(coder, "embed")
    if len(coder.aggregators):
        register_fsdp_forward_method(coder, "aggregate")


def _give_dimension(module: nn.Module) -> None:
    """Give 0-d parameters a dimension, as upstream does in the model: they could not be sharded otherwise."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(owner, name, nn.Parameter(parameter.data[None], requires_grad=parameter.requires_grad))
