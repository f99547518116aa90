"""What an image tower still knows of its first task after fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def kept_classes(trunk: Any, encode: Any, weights: Path) -> float:
    """Share of the pictures whose ImageNet class has not changed since the tower was pretrained.

    The class is that of the pretrained network's own classifier, on the tower's features before and after training. No labels
    are needed: what is measured is whether the features still mean the same to the classifier.

    Args:
        trunk: a timm network without its classifier, as open_clip has it. Its weights are the same afterwards.
        encode: encodes the same pictures, in the same order, each time it is called.
        weights: safetensors of the pretrained network under timm's names, with ``classifier.weight`` and ``classifier.bias``.

    Returns:
        From 0 to 1.
    """
    pretrained = load_file(weights)
    trained = {name: value.clone() for name, value in trunk.state_dict().items()}

    def classes() -> Tensor:
        features: list[Tensor] = []
        hook = trunk.register_forward_hook(lambda _, __, output: features.append(output.float()))
        try:
            encode()
        finally:
            hook.remove()
        return (torch.cat(features) @ pretrained["classifier.weight"].T + pretrained["classifier.bias"]).argmax(1)

    after = classes()
    trunk.load_state_dict({name: pretrained.get(name, value) for name, value in trained.items()})
    before = classes()
    trunk.load_state_dict(trained)
    return float((before == after).double().mean())
