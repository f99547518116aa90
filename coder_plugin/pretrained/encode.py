"""Retrieval vectors of a data set, and what a score of pairs needs of its images and captions.

Shape letters: N images, T captions (texts), D joint dimensions, V embeddings of an image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from coder_plugin import distributed
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import BadImages, map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import Reranks, heads_with

Item = dict[str, Tensor]


class Items(NamedTuple):
    """What a re-ranking head keeps of a data set's images [N, ...] and captions [T, ...], on the CPU.

    Floating point numbers are float16: half the memory and transport, and AsCL's score moves by 1e-5 to 1e-4 (bfloat16's
    moves eight times as far). A batch with a number beyond float16's range keeps all of that name in its own dtype.
    """

    head: Any
    images: Item
    texts: Item


class Encoded(NamedTuple):
    """A data set's retrieval vectors on the CPU, in the data's order, of one model or, as lists, of several."""

    images: Any  # [N, D] or [N, V, D]
    texts: Any  # [T, D]
    image_of_text: Tensor  # [T]
    image_ids: Tensor  # [N]
    captions: Sequence[str]  # T
    items: Any = None  # Items of a model that re-ranks, on the first rank alone; of several models a list, with None


class Batch(NamedTuple):
    """Images of a data set and their captions, encoded; on the CPU."""

    positions: Tensor  # [b] in the data
    image_ids: Tensor  # [b]
    keys: list[str]  # b
    captions: list[tuple[str, ...]]  # b
    images: Tensor  # [b, D] or [b, V, D]
    texts: list[Tensor]  # of b's captions one after the other, in pieces [up to a batch, D]; empty where none was asked for
    image_item: Item | None  # what the re-ranking head keeps
    text_items: list[Item]
    beside: list[Any]  # b, where asked for


class _Both:
    """A transform, and what else is made of an image where it is decoded."""

    def __init__(self, transform: Callable[..., Any], beside: Callable[[Any], Any]) -> None:
        self.transform, self.beside = transform, beside

    def __call__(self, loaded: Any) -> dict[str, Any]:
        return {"image": self.transform(loaded), "beside": self.beside(loaded)}


class Encoder:
    """Retrieval vectors of a data set's images and captions, each rank encoding its share."""

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[[list[str]], Tensor],
        transform: Callable[..., Tensor],
        *,
        device: torch.device,
        batch_size: int = 64,
        workers: int = 2,
        max_bad: int = 100,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.model, self.tokenizer, self.transform, self.device = model, tokenizer, transform, device
        self.batch_size, self.workers, self.max_bad, self.autocast = batch_size, workers, max_bad, autocast

    @property
    def reranking(self) -> Any:
        """The head that re-ranks, if the model has one.

        Raises:
            CoderError: it has several.
        """
        found = heads_with(self.model.coder.heads, Reranks)
        if len(found) > 1:
            raise CoderError(f"one head re-ranks a model's shortlists, and this model has {', '.join(found)}")
        return next(iter(found.values()), None)

    @torch.no_grad()
    def __call__(self, source: Any) -> Encoded:
        """Every image of the data and its captions; images that cannot be read are left out."""
        head = self.reranking
        image_items: list[Item] = []
        text_items: list[Item] = []
        training = self.model.training
        self.model.eval()
        try:
            share = self._own_share(source, head, image_items, text_items)
        finally:
            self.model.train(training)
        shares = distributed.gather_objects(share)
        parts = [part for part in shares if part is not None]
        if not parts:
            raise CoderError("the validation data hold no image")
        index = torch.cat([part["index"] for part in parts])
        counts = torch.cat([part["counts"] for part in parts])
        place = _inverse(index.argsort())
        owner = place[torch.repeat_interleave(torch.arange(len(index)), counts)]
        text_order = owner.argsort(stable=True)
        text_place = _inverse(text_order)
        captions = [caption for part in parts for caption in part["captions"]]
        items = None
        if head is not None:
            images, texts = ([len(part[side]) if part else 0 for part in shares] for side in ("images", "texts"))
            joined = _join(image_items, place.split(images)), _join(text_items, text_place.split(texts))
            items = Items(head, *joined) if distributed.rank() == 0 else None
        return Encoded(
            torch.cat([part["images"] for part in parts])[index.argsort()],
            torch.cat([part["texts"] for part in parts])[text_order],
            owner[text_order],
            torch.cat([part["image_ids"] for part in parts])[index.argsort()],
            [captions[number] for number in text_order.tolist()],
            items,
        )

    def _own_share(
        self, source: Any, head: Any, image_items: list[Item], text_items: list[Item]
    ) -> dict[str, Any] | None:
        """This rank's vectors, None where it has no image; its items, batch by batch, are added to the lists."""
        images, texts, index, ids = [], [], [], []  # type: list, list, list, list
        counts: list[int] = []
        captions: list[str] = []
        for batch in self.batches(source, head):
            images.append(batch.images)
            texts += batch.texts
            index.append(batch.positions)
            ids.append(batch.image_ids)
            counts.extend(len(own) for own in batch.captions)
            captions.extend(caption for own in batch.captions for caption in own)
            if batch.image_item is not None:
                image_items.append(batch.image_item)
            text_items += batch.text_items
        if not images:
            return None
        return {
            "images": torch.cat(images),
            "texts": torch.cat(texts),
            "index": torch.cat(index),
            "image_ids": torch.cat(ids),
            "counts": torch.tensor(counts),
            "captions": captions,
        }

    @torch.no_grad()
    def batches(
        self,
        source: Any,
        head: Any = None,
        *,
        texts: bool = True,
        bad: BadImages | None = None,
        beside: Callable[[Any], bytes | str] | None = None,
    ) -> Iterator[Batch]:
        """This rank's share of the data, batch by batch in their order; the model must be in eval mode.

        Args:
            head: that re-ranks, whose items are wanted too.
            texts: whether captions are encoded. bad: counts the images that cannot be read.
            beside: makes something else of what an item loads, such as a small picture's file, in the process that loads it.
        """
        found = evaluation_batches(
            source,
            batch_size=self.batch_size,
            transform=self.transform if beside is None else _Both(self.transform, beside),
            workers=self.workers,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            max_bad=self.max_bad,
            bad=bad,
        )
        for batch in found:
            image, made = batch["image"], []
            if beside is not None:
                image, made = image["image"], image["beside"]
            vectors, item = self._image(image, head)
            captions = [caption for own in batch["captions"] for caption in own] if texts else []
            pieces = [self.text(captions[at : at + self.batch_size], head) for at in range(0, len(captions), self.batch_size)]
            yield Batch(
                torch.as_tensor(batch["index"]),
                batch["image_id"],
                batch["keys"],
                batch["captions"],
                vectors,
                [vector for vector, _ in pieces],
                item,
                [item for _, item in pieces if item is not None],
                made,
            )

    @torch.no_grad()
    def texts_alone(self, source: Any) -> Iterator[Batch]:
        """The same of captions, for which no image is loaded: ``images`` [b, 0]."""
        found = source.items(distributed.rank(), distributed.world_size(), block=self.batch_size)
        for _, block in groupby(found, key=lambda pair: pair[0] // self.batch_size):
            positions, items = zip(*block, strict=True)
            captions = [caption for item in items for caption in item.captions]
            pieces = [self.text(captions[at : at + self.batch_size])[0] for at in range(0, len(captions), self.batch_size)]
            yield Batch(
                torch.tensor(positions),
                torch.tensor([item.image_id for item in items]),
                [item.key for item in items],
                [item.captions for item in items],
                torch.zeros(len(items), 0),
                pieces,
                None,
                [],
                [],
            )

    @torch.no_grad()
    def text(self, captions: list[str], head: Any = None) -> tuple[Tensor, Item | None]:
        """Vectors [n, D] of n texts, and what ``head`` keeps of them; the model must be in eval mode."""
        tokens = self.tokenizer(captions).to(self.device)
        with self.autocast():
            known = self.model.describe_text(tokens)
            vectors = self.model.coder.embed("text", known).float().cpu()
            return vectors, None if head is None else _kept(head.text_item(known))

    @torch.no_grad()
    def image(self, loaded: Sequence[Any], head: Any = None) -> tuple[Tensor, Item | None]:
        """Vectors [n, D] or [n, V, D] of n pictures or regions, as an item loads them, and what ``head`` keeps of them; the
        model must be in eval mode."""
        return self._image(default_collate([self.transform(each) for each in loaded]), head)

    def _image(self, batch: Any, head: Any) -> tuple[Tensor, Item | None]:
        with self.autocast():
            known = self.model.describe_image(map_tensors(lambda each: each.to(self.device), batch))
            vectors = self.model.coder.embed("image", known).float().cpu()
            return vectors, None if head is None else _kept(head.image_item(known))


def _inverse(order: Tensor) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place


def _kept(item: Mapping[str, Tensor]) -> Item:
    return {name: _narrow(value).cpu() for name, value in item.items()}


def _narrow(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    half = value.half()
    return half if torch.equal(half.isfinite(), value.isfinite()) else value


def _join(batches: list[Item], places: Sequence[Tensor]) -> Item:
    """Every rank's batches of items as one on the first rank, padded with zeros to the longest; empty on the others.

    Batch after batch, so that no rank ever holds its items twice; what ``batches`` held is given up.

    Args:
        batches: this rank's. places: of each rank, where its rows go, in the order of its batches.
    """
    described = distributed.gather_objects(
        [{name: (len(value), value.shape[1:], value.dtype) for name, value in batch.items()} for batch in batches]
    )
    whole: Item = {}
    if distributed.rank() == 0:
        everything = [batch for own in described for batch in own]
        for name in everything[0]:
            shape = [max(sizes) for sizes in zip(*(batch[name][1] for batch in everything), strict=True)]
            dtype = reduce(torch.promote_types, (batch[name][2] for batch in everything))
            whole[name] = torch.zeros(sum(batch[name][0] for batch in everything), *shape, dtype=dtype)
    done = [0] * len(places)
    batches.reverse()
    for _ in range(max(map(len, described))):
        for rank, batch in enumerate(_to_first(batches.pop() if batches else None)):
            if batch is None:
                continue
            rows = places[rank][done[rank] : done[rank] + len(next(iter(batch.values())))]
            done[rank] += len(rows)
            for name, value in batch.items():
                at: Any = (rows, *(slice(size) for size in value.shape[1:]))
                whole[name][at] = value.to(whole[name].dtype)
    return whole


def _to_first(value: Any) -> list[Any]:
    """An object of every rank, in rank order, on the first rank; nothing on the others."""
    if distributed.world_size() == 1:
        return [value]
    values: list[Any] = [None] * distributed.world_size()
    dist.gather_object(value, values if distributed.rank() == 0 else None)
    return values if distributed.rank() == 0 else []
