"""Training pictures as 8-bit tensors, normalised once a batch: a quarter of the bytes between workers and to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from coder_plugin.errors import CoderError


def to_device(
    batch: Mapping[str, Any], device: torch.device | str, transform: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """A loader's batch on a device, its 8-bit pictures normalised there: what a training loop of your own gives the model.

    Args:
        batch: of :class:`~coder_plugin.data.loader.TrainLoader` or :func:`~coder_plugin.data.loader.evaluation_batches`.
        device: where its tensors go.
        transform: the loader's. An :class:`EightBit` normalises its pictures, uint8 [B, 3, H, W] from 0 to 255, to float32.

    Returns:
        The batch with its tensors, also those in dicts such as regions, on the device, and other values as they are.

    Raises:
        CoderError: 8-bit pictures without the transform that normalises them.

    Example:
        >>> pixels = EightBit(lambda picture: picture, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> batch = {"image": torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), "keys": ["a.jpg", "b.jpg"]}
        >>> moved = to_device(batch, "cpu", pixels)
        >>> moved["image"].dtype, moved["image"].max().item(), moved["keys"]
        (torch.float32, 1.0, ['a.jpg', 'b.jpg'])
    """
    moved = {name: _moved(value, device) for name, value in batch.items()}
    image = moved.get("image")
    if isinstance(image, Tensor) and image.dtype == torch.uint8:
        if transform is None:
            raise CoderError("the batch has 8-bit pictures: pass the loader's transform, which normalises them")
        if isinstance(transform, EightBit):
            moved["image"] = transform.normalize(image)
    return moved


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Mapping):
        return {name: _moved(each, device) for name, each in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def tensors_of(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of a batch, also those in dicts such as regions."""
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from tensors_of(value)
        elif isinstance(value, Tensor):
            yield value


def eight_bit(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same transform as :class:`EightBit`, if it ends with torchvision's ``ToTensor`` and ``Normalize``; else itself.

    open_clip's training transforms end so, also those made by timm without random erasing.

    Example:
        >>> from open_clip.transform import PreprocessCfg, image_transform_v2
        >>> transform = image_transform_v2(PreprocessCfg(size=32), is_train=True)
        >>> isinstance(eight_bit(transform), EightBit), eight_bit(len) is len
        (True, True)
    """
    from torchvision.transforms import Compose, Normalize, ToTensor

    steps = getattr(transform, "transforms", None)
    if not isinstance(transform, Compose) or not isinstance(steps, list) or len(steps) < 2:
        return transform
    to_tensor, normalize = steps[-2:]
    # timm and open_clip have classes of their own that pass tensors on
    makes_tensor = isinstance(to_tensor, ToTensor) or type(to_tensor).__name__ == "MaybeToTensor"
    if not makes_tensor or type(normalize) is not Normalize:
        return transform
    before = copy.copy(transform)
    before.transforms = steps[:-2]
    return EightBit(before, normalize.mean, normalize.std)


class EightBit:
    """A transform to 8-bit pixels, and the normalisation of their batches.

    ``normalize(stack(pictures))`` equals the stack of ``Normalize(mean, std)(ToTensor()(picture))``: bit for bit on a CPU, and
    within a rounding of float32 on a GPU.

    Args:
        picture_transform: from a picture to an RGB picture (PIL) of fixed size.
        mean: of each channel, in units of the full range (0 to 1).
        std: of each channel, in the same units.

    Example:
        >>> from PIL import Image
        >>> transform = EightBit(lambda picture: picture, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> pixels = transform(Image.new("RGB", (4, 2), (0, 255, 51)))
        >>> pixels.dtype, tuple(pixels.shape)
        (torch.uint8, (3, 2, 4))
        >>> transform.normalize(pixels[None])[0, :, 0, 0].tolist()
        [-1.0, 1.0, -0.6000000238418579]
    """

    def __init__(
        self, picture_transform: Callable[[Any], Any], mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor
    ) -> None:
        self._transform = picture_transform
        self._mean, self._std = (torch.as_tensor(each, dtype=torch.float32).reshape(-1, 1, 1) for each in (mean, std))
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, picture: Any) -> Tensor:
        """A picture -> uint8 [3, H, W], from 0 to 255."""
        return pil_to_tensor(self._transform(picture))

    def normalize(self, pictures: Tensor) -> Tensor:
        """Pictures of this transform, uint8 [B, 3, H, W] on any device -> float32 [B, 3, H, W], contiguous."""
        if pictures.device not in self._on:
            self._on[pictures.device] = self._mean.to(pictures.device), self._std.to(pictures.device)
        mean, std = self._on[pictures.device]
        pixels = pictures.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.div_(255).sub_(mean).div_(std)
