"""Low-rank adapters (peft) in a model: merge them into its layers, or take them out."""

from __future__ import annotations

from typing import Any

from torch import nn


def remove_adapters(model: Any, *, merge: bool) -> None:
    """Replace layers with adapters by plain ones, in place. Without adapters nothing changes.

    Args:
        model: a model whose weights no other model shares; with ``merge`` they change.
        merge: whether the plain layers compute what those with adapters did; else what they computed before they had any.
    """
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    outer: list[str] = []
    for name, module in layers:
        if outer and name.startswith(f"{outer[-1]}."):
            continue  # part of an attention, which has been replaced already
        outer.append(name)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _plain_layer(module, merge=merge))


def _plain_layer(module: Any, *, merge: bool) -> nn.Module:
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    if merge:
        module.merge()
    return module.get_base_layer()
