"""COCO's ids of a data set's images and captions, by which ECCV Caption and CxC name them.

Shape letters: N images, T captions, T' captions that the benchmark has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import names_of
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
_HINT = (
    "give Karpathy's dataset_coco.json as --val-data with --split test (of region features --split testall), whose images and "
    "captions have COCO's numbers"
)


class Benchmark(NamedTuple):
    """The images and captions of a benchmark: 5,000 and 25,000 of Karpathy's test split of COCO."""

    name: str
    image_of: Mapping[int, int]  # id of a caption -> id of its image
    order: Sequence[int] | None = None  # ids of the captions, in the order of Karpathy's file


class Numbers(NamedTuple):
    """COCO's ids of encoded data, in the data's order."""

    images: list[int]  # N
    captions: list[int]  # T'
    texts: Tensor  # [T'] int64, the index of each among the T captions


def coco_numbers(items: Iterable[Item], benchmark: Benchmark) -> dict[int, tuple[int, list[int | None]]]:
    """COCO's ids of the images and captions of a data set.

    An image's id is its key or one of its names, or the number that such a file name ends in; all images use the same of
    these. If no caption has an id, and the images come in the order of Karpathy's file with five captions each, as in SCAN's
    features, the captions are taken to be in that order too, with a warning.

    Args:
        items: of the data, in their order.
        benchmark: whose images and captions the data must have.

    Returns:
        For each ``image_id`` of the data, COCO's id of the image and the ids of its captions; None for a caption that the
        benchmark does not have.

    Raises:
        CoderError: images or captions that are not of the benchmark, or not all of them.
    """
    names = [_Names(item.image_id, item.key, item.names, item.caption_names, len(item.captions)) for item in items]
    numbers = _image_numbers(names, benchmark)
    counts = [each.texts for each in names]
    numbered = [sum(name is not None for name in each.captions) for each in names]
    if not any(numbered):
        captions = _captions_by_order(numbers, counts, benchmark)
    elif numbered != counts:
        raise CoderError(f"{sum(counts) - sum(numbered)} of {sum(counts)} captions have no number: {_HINT}")
    else:
        captions = [[_number(name) for name in each.captions] for each in names]
    _check(numbers, captions, benchmark)
    return {
        each.image_id: (number, [caption if caption in benchmark.image_of else None for caption in image_captions])
        for each, number, image_captions in zip(names, numbers, captions, strict=True)
    }


class _Names(NamedTuple):
    """The names in an item, without its picture: items of shards hold theirs in memory."""

    image_id: int
    key: str
    others: tuple[str | None, ...]
    captions: tuple[str | None, ...]
    texts: int


def _image_numbers(names: Sequence[_Names], benchmark: Benchmark) -> list[int]:
    """COCO's ids of the images, from the kind of name that most of them share with the benchmark."""
    images = set(benchmark.image_of.values())
    kinds = zip(*([_number(name) for name in (each.key, *each.others)] for each in names), strict=False)
    best = max(kinds, key=lambda numbers: sum(number in images for number in numbers), default=())
    numbers = [number for number in best if number in images]
    split = f"{benchmark.name} needs COCO's Karpathy test split"
    if not numbers:
        example = f", such as {names[0].key!r}" if names else ""
        raise CoderError(f"{split}, and none of the {len(names)} images{example} has one of its ids: {_HINT}")
    absent = len(images) - len(set(numbers))
    if absent or len(numbers) != len(best) or len(numbers) != len(images):
        other = next((each.key for number, each in zip(best, names, strict=True) if number not in images), None)
        found = f"the data have {len(set(numbers)):,} of them" + (f", and {other!r} is none" if other is not None else "")
        raise CoderError(f"{split} of {len(images):,} images, and {found}, in {len(names):,} images: {_HINT}")
    return numbers  # type: ignore[return-value]


def of_encoded(
    numbers: Mapping[int, tuple[int, list[int | None]]], image_ids: Tensor, image_of_text: Tensor, name: str
) -> Numbers:
    """The ids of encoded data, in their order.

    Args:
        numbers: of :func:`coco_numbers`.
        image_ids: [N] int64.
        image_of_text: [T] int64, the image of each caption; the captions of an image in their order.
        name: of the benchmark, for messages.

    Raises:
        CoderError: an image was left out because it could not be read.
    """
    absent = len(numbers) - len(image_ids)
    if absent:
        raise CoderError(f"{name} needs all of its {len(numbers):,} images, and {absent} of them could not be read")
    images = [numbers[image_id][0] for image_id in image_ids.tolist()]
    nth = [0] * len(images)
    captions, texts = [], []
    for text, image in enumerate(image_of_text.tolist()):
        number = numbers[int(image_ids[image])][1][nth[image]]
        nth[image] += 1
        if number is not None:
            captions.append(number)
            texts.append(text)
    return Numbers(images, captions, torch.tensor(texts))


def _number(name: str | None) -> int | None:
    """The number that a name ends in: 391895 of ``"391895"`` and of ``"val2014/COCO_val2014_000000391895.jpg"``."""
    digits = names_of(name)[-1] if name else None
    return int(digits) if digits else None


def _captions_by_order(images: Sequence[int], counts: Sequence[int], benchmark: Benchmark) -> list[list[int | None]]:
    """The ids of the captions, if images and captions are in the order of Karpathy's file."""
    grouped: dict[int, list[int | None]] = {}
    for caption in benchmark.order or ():
        grouped.setdefault(benchmark.image_of[caption], []).append(caption)
    if list(grouped) != list(images) or [len(captions) for captions in grouped.values()] != list(counts):
        raise CoderError(f"{benchmark.name} names captions by COCO's numbers, and these data have none: {_HINT}")
    log.warning("%s: the captions have no numbers; they are taken to be in the order of Karpathy's file", benchmark.name)
    return list(grouped.values())


def _check(images: Sequence[int], captions: Sequence[Sequence[int | None]], benchmark: Benchmark) -> None:
    """Every caption of the benchmark once, with its image."""
    owners = benchmark.image_of
    pairs = [(each, image) for image, numbers in zip(images, captions, strict=True) for each in numbers if each in owners]
    if wrong := [number for number, image in pairs if owners[number] != image]:  # type: ignore[index]
        raise CoderError(f"{len(wrong)} captions belong to other images by COCO's numbers, such as {wrong[0]}: {_HINT}")
    if not len(pairs) == len({number for number, _ in pairs}) == len(owners):
        counts = f"{len(owners):,} captions, and the data have {len({number for number, _ in pairs}):,} of them"
        raise CoderError(f"{benchmark.name} needs {counts} by COCO's numbers, in {len(pairs):,} captions: {_HINT}")
