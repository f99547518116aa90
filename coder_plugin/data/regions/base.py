"""An image as a set of regions, and what every file format of them gives and takes.

Shapes: L regions of an image (any number from one), R channels of a region, G of the whole image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one image, in the file's order (detectors': by falling score).

    Args:
        features: [L, R] of a float dtype, as stored.
        boxes: [L, 4] float32, left, top, right, bottom, in units in which the image is ``size`` wide and high; or None.
        size: (width, height) of the image in the boxes' units: pixels, or (1, 1) where boxes are fractions.
        whole: [G] feature of the whole image, or None.
        extras: further arrays [L, …] that a format carries, such as LXMERT's ``objects_id``.

    Raises:
        ValueError: other shapes, no region, NaN or infinity in features or boxes: says which.
    """

    features: np.ndarray
    boxes: np.ndarray | None = None
    size: tuple[float, float] = (1.0, 1.0)
    whole: np.ndarray | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or not self.features.size or self.features.dtype.kind != "f":
            raise ValueError(
                f"features are {self.features.dtype} of shape {list(self.features.shape)}; "
                "they must be floats [regions, channels] of at least one region"
            )
        if self.boxes is not None and self.boxes.shape != (len(self), 4):
            raise ValueError(f"boxes have shape {list(self.boxes.shape)}, not [{len(self)}, 4] for {len(self)} regions")
        if self.boxes is not None and not (self.size[0] > 0 and self.size[1] > 0):
            raise ValueError(f"the image's size is {self.size[0]:g} x {self.size[1]:g}; both must be > 0")
        for name, array in (("features", self.features), ("boxes", self.boxes), ("whole-image feature", self.whole)):
            if array is not None and not np.isfinite(array).all():
                count = int((~np.isfinite(array)).sum())
                raise ValueError(f"{count} of {array.size} numbers in the {name} are NaN or infinite")
        for name, array in self.extras.items():
            if len(array) != len(self):
                raise ValueError(f"{name} has {len(array)} rows beside {len(self)} regions")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def fractions(self) -> np.ndarray | None:
        """The boxes [L, 4] as fractions of the image's width and height, float32."""
        if self.boxes is None:
            return None
        width, height = self.size
        return (self.boxes / np.asarray([width, height, width, height])).astype(np.float32)


class Record(NamedTuple):
    """An image on its way from one file to another: its name, its regions, and its captions where they are known."""

    name: str
    regions: Regions
    captions: tuple[str, ...] = ()


#: Names of images to their regions, in the file's order: ``file[name]`` reads one image and raises ``KeyError`` where there
#: is none of that name and ``ValueError`` where its entry is damaged. It can be pickled, for the loader's workers, opens its
#: file in each process anew, and holds neither all features in memory nor mapped pages (a whole file may be read through
#: within 300 MB). ``close()`` is not needed.
RegionFile = Mapping[str, Regions]


#: What a record may have beside its name, features and boxes.
PARTS = ("captions", "whole", "extras")


@dataclass(frozen=True, kw_only=True)
class RegionFormat:
    """One file layout, as an entry point of the group ``coder_plugin.regions``.

    Args:
        open: ``open(path, *, split)`` -> :data:`RegionFile`; a file that is not of this layout, truncated or foreign, is a
            CoderError that names it and what is wrong. ``split`` is looked at where a layout keeps several in one place.
        write: ``write(path, records, *, split)`` -> how many were written. Takes any iterable of :class:`Record` once, keeps
            one at a time, and leaves no half file under the final name when it fails.
        matches: ``matches(path)``: whether a path looks like this layout, from its name and, for a folder, its files' names.
        keeps: which of :data:`PARTS` the layout has a place for. ``convert`` tells of captions that are left behind, and
            refuses to lose the others.
    """

    open: Callable[..., RegionFile]
    write: Callable[..., int]
    matches: Callable[[str], bool]
    keeps: tuple[str, ...] = PARTS


#: What :func:`names_of` makes of a name, in this order.
DERIVATIONS = ("as it is", "without folders", "without folders and ending", "the digits at its end", "the number at its end")


def names_of(name: str) -> tuple[str | None, ...]:
    """What else an image that captions call ``name`` may be called in a file of regions, the most exact first.

    Always one for each of :data:`DERIVATIONS`, None where there is none: a place means the same for every name.
    """
    base = os.path.basename(name)
    stem = os.path.splitext(base)[0]
    digits = stem.rpartition("_")[2]  # COCO's file names end in the image's number
    if not (digits.isascii() and digits.isdigit()):
        return name, base or None, stem or None, None, None
    return name, base, stem, digits, digits.lstrip("0") or "0"
