"""What turns pictures into regions, and what every such thing shares: weights from a file, their checksum.

Shapes: L regions of a picture, R channels of a region, G of a whole picture.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError


class Prepared(NamedTuple):
    """A picture as a loader's worker hands it over, and its own (width, height) in pixels.

    Bytes instead of tensors: a tensor that crosses processes holds an open file, and 1,024 of these are a usual limit.
    """

    pixels: Any
    size: tuple[int, int]


class Detector(ABC):
    """Pictures in, regions out. ``preprocess`` runs in workers, ``detect`` where the model is.

    Regions have float32 features [L, ``width``] and boxes in pixels of the picture as it was given, by falling score
    where there are scores. The same batch gives the same numbers on the same machine.
    """

    width: int
    #: A function of a picture that can be pickled without the model.
    preprocess: Callable[[Image], Prepared]

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The networks that the results depend on."""

    @abstractmethod
    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        """The regions of prepared pictures, in their order."""

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
    """The detector ``name`` of the entry points; options that are None count as not given, unknown ones are errors."""
    from coder_plugin.registry import load

    kind: Any = load("detectors", name)
    given = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(kind).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        known = [each.name for each in parameters]
        for key in given:
            if key not in known:
                raise CoderError(f"detector {name!r} has no option {key!r}; it has: {', '.join(sorted(known))}")
    return kind(device=device, **given)


def make_device(name: str) -> torch.device:
    """A device by name; one that this machine or this torch lacks is a CoderError."""
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise CoderError(f"device {name!r} is none that torch knows: {exc}") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CoderError(f"device {name!r}: this machine, or this torch, has no CUDA; give cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CoderError(f"device {name!r}: this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def need_weights(what: str, weights: str | None, allow_random: bool) -> None:
    """Features of an untrained network are noise that looks like features: they have to be asked for."""
    if weights is None and not allow_random:
        raise CoderError(
            f"{what}: no weights; give --weights FILE or --weights default (downloads them), "
            "or --allow-random for untrained ones"
        )


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file or of a torch file with a state dict, bare or under ``state_dict`` or ``model``.

    Nothing is unpickled but tensors.
    """
    if not Path(path).is_file():
        raise CoderError(f"weights {path!r}: no such file")
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch and safetensors raise nearly anything on a damaged file
        raise CoderError(f"weights {path!r} cannot be read: {' '.join(str(exc).split())[:300]}") from exc
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(each, Tensor) for each in content.values()):
        raise CoderError(f"weights {path!r}: not a state dict: names to tensors are expected")
    return dict(content)


def load_weights(module: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Fill a module whose names and shapes must all be in ``weights``; anything else is told of by name."""
    expected = module.state_dict()
    counters = {name for name in expected if name.endswith("num_batches_tracked")}  # evaluation does not read them
    lacking = sorted(set(expected) - set(weights) - counters)
    foreign = sorted(set(weights) - set(expected))
    if lacking or foreign:
        told = [
            f"{len(names)} {what} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"
            for what, names in (("missing", lacking), ("unknown", foreign))
            if names
        ]
        raise CoderError(f"weights {path!r} do not fit the model: {' and '.join(told)}")
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise CoderError(
                f"weights {path!r} do not fit the model: {name} has shape {list(value.shape)}, "
                f"not {list(expected[name].shape)}"
            )
    module.load_state_dict(weights, strict=False)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Initial weights inside are the same in every process, and the caller's randomness is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class WithWhole(Detector):
    """A detector's regions with a feature of the whole picture beside them, from a second network."""

    def __init__(self, detector: Detector, whole: Any) -> None:
        self.detector, self.whole = detector, whole
        self.width = detector.width
        self.preprocess = _Both(detector.preprocess, whole.preprocess)

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.detector.modules, *self.whole.modules]

    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        regions = self.detector.detect([Prepared(each.pixels[0], each.size) for each in pictures])
        features = self.whole.pooled([Prepared(each.pixels[1], each.size) for each in pictures])
        return [replace(each, global_feature=feature) for each, feature in zip(regions, features, strict=True)]


class _Both:
    def __init__(self, *steps: Callable[[Image], Prepared]) -> None:
        self.steps = steps

    def __call__(self, picture: Image) -> Prepared:
        return Prepared(tuple(step(picture).pixels for step in self.steps), picture.size)
