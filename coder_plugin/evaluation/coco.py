"""COCO's own numbers of a data set's images and captions, which ECCV Caption and CxC speak of."""

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
    """The 5,000 images and 25,000 captions of the test split of Karpathy's, as a benchmark knows them."""

    name: str
    image_of: Mapping[int, int]  # captions' numbers to their image's
    order: Sequence[int] | None = None  # the captions' numbers as they come in Karpathy's file


class Numbers(NamedTuple):
    """Of encoded data."""

    images: list[int]  # N
    captions: list[int]  # T' of the test set's
    texts: Tensor  # [T'] int64: their places among the T captions


def coco_numbers(items: Iterable[Item], known: Benchmark) -> dict[int, tuple[int, list[int | None]]]:
    """An item's ``image_id`` to COCO's number of the image and those of its captions, None of one beyond the test set's five.

    The image's number is its key or one of its names, of the same kind for all images: what a file name ends in, too. Where
    the data set knows no numbers of captions and its images come in the order of Karpathy's file with five captions each, as
    SCAN's features do, these are taken to be in that order as well, with a warning.

    Raises:
        CoderError: images or captions that are not of the test set, or not all that it has.
    """
    there = [_Names(item.image_id, item.key, item.names, item.caption_names, len(item.captions)) for item in items]
    numbers = _image_numbers(there, known)
    counts = [each.texts for each in there]
    named = [sum(name is not None for name in each.captions) for each in there]
    if not any(named):
        captions = _by_place(numbers, counts, known)
    elif named != counts:
        raise CoderError(f"{sum(counts) - sum(named)} of {sum(counts)} captions have no number: {_HINT}")
    else:
        captions = [[_number(name) for name in each.captions] for each in there]
    _check(numbers, captions, known)
    return {
        each.image_id: (number, [caption if caption in known.image_of else None for caption in own])
        for each, number, own in zip(there, numbers, captions, strict=True)
    }


class _Names(NamedTuple):
    """An item without its picture, which those of shards hold."""

    image_id: int
    key: str
    others: tuple[str | None, ...]
    captions: tuple[str | None, ...]
    texts: int


def _image_numbers(there: Sequence[_Names], known: Benchmark) -> list[int]:
    images = set(known.image_of.values())
    kinds = zip(*([_number(name) for name in (each.key, *each.others)] for each in there), strict=False)
    best = max(kinds, key=lambda numbers: sum(number in images for number in numbers), default=())
    found = [number for number in best if number in images]
    what = f"{known.name} is of COCO's Karpathy test split"
    if not found:
        example = f", such as {there[0].key!r}" if there else ""
        raise CoderError(f"{what}, and none of the {len(there)} images{example} has a number of its: {_HINT}")
    strangers = [each.key for number, each in zip(best, there, strict=True) if number not in images]
    if strangers:
        raise CoderError(f"{what}, and {len(strangers)} of {len(there)} images are not, the first: {strangers[0]!r}: {_HINT}")
    if len(found) != len(images) or len(set(found)) != len(images):
        raise CoderError(f"{what} of {len(images):,} images, and the data have {len(set(found)):,} of them: {_HINT}")
    return found  # type: ignore[return-value]


def of_encoded(
    numbers: Mapping[int, tuple[int, list[int | None]]], image_ids: Tensor, image_of_text: Tensor, name: str
) -> Numbers:
    """The numbers of encoded data, in their order.

    Args:
        image_ids: [N]. image_of_text: [T], the captions of an image in their order.

    Raises:
        CoderError: an image was left out, for it could not be read.
    """
    absent = len(numbers) - len(image_ids)
    if absent:
        raise CoderError(f"{name} is of {len(numbers):,} images, and {absent} of them could not be read")
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
    """Of ``"391895"`` and ``"val2014/COCO_val2014_000000391895.jpg"``: 391895."""
    digits = names_of(name)[-1] if name else None
    return int(digits) if digits else None


def _by_place(images: Sequence[int], counts: Sequence[int], known: Benchmark) -> list[list[int | None]]:
    """Captions in the order of Karpathy's file, where the images are in it."""
    grouped: dict[int, list[int | None]] = {}
    for caption in known.order or ():
        grouped.setdefault(known.image_of[caption], []).append(caption)
    if list(grouped) != list(images) or [len(own) for own in grouped.values()] != list(counts):
        raise CoderError(f"{known.name} names captions by COCO's numbers, and these data have none: {_HINT}")
    log.warning("%s: the captions have no numbers; they are taken to be in the order of Karpathy's file", known.name)
    return list(grouped.values())


def _check(images: Sequence[int], captions: Sequence[Sequence[int | None]], known: Benchmark) -> None:
    pairs = [(number, image) for image, own in zip(images, captions, strict=True) for number in own if number is not None]
    wrong = [number for number, image in pairs if number in known.image_of and known.image_of[number] != image]
    if wrong:
        raise CoderError(f"{len(wrong)} captions are other images' by COCO's numbers, the first: {wrong[0]}: {_HINT}")
    present = [number for number, _ in pairs if number in known.image_of]
    if len(set(present)) != len(known.image_of) or len(present) != len(set(present)):
        counts = f"{len(known.image_of):,} captions, and the data have {len(set(present)):,} of them"
        raise CoderError(f"{known.name} is of {counts} by COCO's numbers, in {len(present):,} captions: {_HINT}")
