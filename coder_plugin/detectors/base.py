"""The interface of detectors, which turn pictures into regions, and what they share: devices, weights, checksums.

Shapes: L regions of a picture, R channels of a region.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError


class Prepared(NamedTuple):
    """A preprocessed picture from a loader worker, and its original (width, height) in pixels.

    An array instead of a tensor: a tensor sent between processes holds an open file, whose number is limited.
    """

    pixels: Any
    size: tuple[int, int]


class Detector(ABC):
    """Turns pictures into regions, by the network ``model``. ``preprocess`` runs in workers, ``detect`` on the model's device.

    Regions have float32 features [L, ``width``] and boxes in pixels of the original picture, in order of descending score if
    there are scores. The same batch gives the same numbers on the same machine.
    """

    model: Any
    width: int
    #: A function of a picture that can be pickled without the model.
    preprocess: Callable[[Image], Prepared]

    @property
    def modules(self) -> list[nn.Module]:
        """The networks that the results depend on."""
        return [self.model]

    @abstractmethod
    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        """The regions of preprocessed pictures, in their order."""

    def __call__(self, pictures: Sequence[Image]) -> list[Regions]:
        return self.detect([self.preprocess(picture) for picture in pictures])

    def checksum(self) -> str:
        """SHA-256 of all parameters and buffers, with their names."""
        digest = hashlib.sha256()
        for module in self.modules:
            for name, value in sorted(module.state_dict().items()):
                digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()


def pixels(picture: Image) -> Prepared:
    """The picture at its own size: uint8 [height, width, 3]."""
    return Prepared(np.asarray(picture.convert("RGB")), picture.size)


def make_detector(name: str, *, device: str = "cpu", **options: Any) -> Detector:
    """The detector ``name`` of the entry points; options that are None are ignored.

    Raises:
        CoderError: an unknown detector or option.
    """
    kind: Any = registry.load("detectors", name)
    options = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(kind).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        allowed = [each.name for each in parameters]
        for key in options:
            if key not in allowed:
                raise CoderError(f"detector {name!r} has no option {key!r}; it has: {', '.join(sorted(allowed))}")
    return kind(device=device, **options)


def make_device(name: str) -> torch.device:
    """A device by name; ``CoderError`` where this machine or this build of torch lacks it."""
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise CoderError(f"device {name!r} is unknown to torch: {exc}") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CoderError(f"device {name!r}: this machine or this build of torch has no CUDA; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CoderError(f"device {name!r}: this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def need_weights(what: str, weights: str | None, allow_random: bool) -> None:
    """Refuse an untrained network unless it is allowed explicitly: its features look real but are noise."""
    if weights is None and not allow_random:
        raise CoderError(
            f"{what}: no weights; use --weights FILE, --weights default (a download), or --allow-random (untrained)"
        )


def read_weights(path: str) -> dict[str, Tensor]:
    """The state dict of a ``.safetensors`` file or a torch file, there also under ``state_dict`` or ``model``.

    Only tensors are unpickled.

    Raises:
        CoderError: a missing or damaged file, or one without a state dict.
    """
    if not Path(path).is_file():
        raise CoderError(f"weights {path!r}: no such file")
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch and safetensors raise many kinds of errors on damaged files
        raise CoderError(f"weights {path!r} cannot be read: {' '.join(str(exc).split())[:300]}") from exc
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(each, Tensor) for each in content.values()):
        raise CoderError(f"weights {path!r}: not a state dict (names to tensors)")
    return dict(content)


def load_weights(module: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Load a state dict whose names and shapes must be exactly the module's; a ``CoderError`` lists the differences."""
    expected = module.state_dict()
    counters = {name for name in expected if name.endswith("num_batches_tracked")}  # not used in evaluation
    missing = sorted(set(expected) - set(weights) - counters)
    unexpected = sorted(set(weights) - set(expected))
    if missing or unexpected:
        differences = [
            f"{len(names)} {what} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("unknown", unexpected))
            if names
        ]
        raise CoderError(f"weights {path!r} do not fit the model: {' and '.join(differences)}")
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise CoderError(
                f"weights {path!r} do not fit the model: {name} has shape {list(value.shape)}, "
                f"not {list(expected[name].shape)}"
            )
    module.load_state_dict(weights, strict=False)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Initialise weights identically in every process, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
