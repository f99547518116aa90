"""Retrieval vectors of a data set, and what re-ranking needs of its images and captions.

Shape letters: N images, T captions (texts), D joint dimensions, V embeddings of an image.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from coder_plugin import distributed
from coder_plugin.data.bad_samples import DEFAULT_RATE, BadSamples, total
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import Reranks, heads_with
from coder_plugin.progress import Progress

Item = dict[str, Tensor]
log = logging.getLogger(__name__)


class Items(NamedTuple):
    """What a re-ranker needs of a data set's images [N, ...] and captions [T, ...], on the CPU.

    Floating-point tensors are stored as float16, which halves memory and transport and changes AsCL's score and MaxSim by 1e-5
    to 1e-4 (bfloat16: eight times as much). A tensor with values beyond float16's range keeps its dtype.
    """

    head: Any
    images: Item
    texts: Item


class Encoded(NamedTuple):
    """A data set's retrieval vectors on the CPU, in the data's order; for an ensemble, lists with one entry per model."""

    images: Any  # [N, D] or [N, V, D]
    texts: Any  # [T, D]
    image_of_text: Tensor  # [T]
    image_ids: Tensor  # [N]
    captions: Sequence[str]  # T
    items: Any = None  # Items of a model that re-ranks, on the first rank only; None for other models
    skipped: Mapping[str, int] = {}  # samples that were left out, by kind of fault
    index: Any = None  # [N], positions of the images in the data set


class Encoder:
    """Computes retrieval vectors of a data set's images and captions; each rank encodes its share.

    Args:
        model: from :func:`coder_plugin.create_model`, or opened from an export.
        tokenizer: n texts -> int64 [n, length].
        transform: what an item of the data loads -> a tensor, or a dict of tensors for a region model.
        device: of the model.
        batch_size: images, and captions, per forward.
        workers: data loading processes.
        max_bad_samples: allowed fraction of samples that cannot be used.
        reranker: re-ranks shortlists in place of the model's own head; the model returns what it requires.
        autocast: gives the context manager that forwards run in.

    Example:
        >>> import torch, coder_plugin
        >>> from coder_plugin.backbones.tokenizers import build_vocabulary
        >>> words = build_vocabulary(["a cat", "a dog"] * 4)
        >>> sizes = {"region_dim": 4, "embed_dim": 8, "word_dim": 4}
        >>> model = coder_plugin.create_model("region-bigru", loss="dcl", vocabulary=words, **sizes)
        >>> encoder = Encoder(model.eval(), model.tokenizer(), model.transform(), device=torch.device("cpu"))
        >>> vectors, _ = encoder.text(["a cat", "a dog"])
        >>> vectors.shape, vectors.dtype
        (torch.Size([2, 8]), torch.float32)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[[list[str]], Tensor],
        transform: Callable[..., Tensor],
        *,
        device: torch.device,
        batch_size: int = 64,
        workers: int = 2,
        max_bad_samples: float = DEFAULT_RATE,
        reranker: Reranks | None = None,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.model, self.tokenizer, self.transform, self.device = model, tokenizer, transform, device
        self.batch_size, self.workers, self.autocast = batch_size, workers, autocast
        self.max_bad_samples, self._reranker = max_bad_samples, reranker

    @property
    def reranking(self) -> Any:
        """What re-ranks shortlists: the re-ranker that the encoder was given, or the model's head; None if there is neither.

        Raises:
            CoderError: the model has several heads that re-rank.
        """
        if self._reranker is not None:
            return self._reranker
        heads = heads_with(self.model.coder.heads, Reranks)
        if len(heads) > 1:
            raise CoderError(f"only one head can re-rank a model's shortlists, and this model has {', '.join(heads)}")
        return next(iter(heads.values()), None)

    @torch.no_grad()
    def __call__(self, source: Any) -> Encoded:
        """Encode every image of the data and its captions. Bad samples are left out, with a warning, and counted in the result.

        Raises:
            CoderError: no image could be used, or more than ``max_bad_samples`` of them could not.
        """
        head = self.reranking
        image_items: list[Item] = []
        text_items: list[Item] = []
        training = self.model.training
        own_bad = BadSamples(source.name, self.max_bad_samples)
        self.model.eval()
        try:
            share = self._encode_share(source, head, image_items, text_items, own_bad)
        finally:
            self.model.train(training)
        shares = distributed.gather_objects(share)
        parts = [part for part in shares if part is not None]
        bad = total(distributed.gather_objects(own_bad))
        if not parts:
            advice = f": {bad.missing_advice}" if bad.missing_advice else ""
            raise CoderError(f"{source.name}: no image can be used to evaluate: {bad}{advice}")
        bad.finish()
        if len(bad) and distributed.rank() == 0:
            log.warning("%s: %s: results are over the others", source.name, bad)
        index = torch.cat([part["index"] for part in parts])
        counts = torch.cat([part["counts"] for part in parts])
        order = index.argsort()
        image_row = _inverse(order)
        owner = image_row[torch.repeat_interleave(torch.arange(len(index)), counts)]
        text_order = owner.argsort(stable=True)
        text_row = _inverse(text_order)
        captions = [caption for part in parts for caption in part["captions"]]
        items = None
        if head is not None:
            images, texts = ([len(part[side]) if part else 0 for part in shares] for side in ("images", "texts"))
            joined = _gather_items(image_items, image_row.split(images)), _gather_items(text_items, text_row.split(texts))
            items = Items(head, *joined) if distributed.rank() == 0 else None
        return Encoded(
            torch.cat([part["images"] for part in parts])[order],
            torch.cat([part["texts"] for part in parts])[text_order],
            owner[text_order],
            torch.cat([part["image_ids"] for part in parts])[order],
            [captions[number] for number in text_order.tolist()],
            items,
            dict(bad.kinds),
            index[order],
        )

    def _encode_share(
        self, source: Any, head: Any, image_items: list[Item], text_items: list[Item], bad: BadSamples
    ) -> dict[str, Any] | None:
        """This rank's vectors; None if it has no image. Appends its re-ranking items, batch by batch, to the lists."""
        images, texts, index, ids = [], [], [], []  # type: list, list, list, list
        counts: list[int] = []
        captions: list[str] = []
        ranks = distributed.world_size()
        progress = Progress(getattr(source, "num_images", None), what="images", shown=distributed.rank() == 0)
        loaded = evaluation_batches(
            source,
            batch_size=self.batch_size,
            transform=self.transform,
            workers=self.workers,
            rank=distributed.rank(),
            world_size=ranks,
            bad=bad,
        )
        for batch in loaded:
            vectors, image_item = self.transformed(batch["image"], head)
            own_captions = [caption for each in batch["captions"] for caption in each]
            progress.advance(bad.read * ranks)
            images.append(vectors)
            index.append(batch["index"])
            ids.append(batch["image_id"])
            counts.extend(map(len, batch["captions"]))
            captions += own_captions
            if image_item is not None:
                image_items.append(image_item)
            for start in range(0, len(own_captions), self.batch_size):
                vectors, text_item = self.text(own_captions[start : start + self.batch_size], head)
                texts.append(vectors)
                if text_item is not None:
                    text_items.append(text_item)
        progress.close()
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
    def text(self, captions: list[str], head: Any = None) -> tuple[Tensor, Item | None]:
        """Vectors [n, D] of n texts, float32 on the CPU, and what ``head`` needs of them; the model must be in eval mode."""
        tokens = self.tokenizer(captions).to(self.device)
        with self.autocast():
            features = self.model.describe_text(tokens)
            vectors = self.model.coder.embed("text", features).float().cpu()
            return vectors, None if head is None else _to_half(head.text_item(features))

    @torch.no_grad()
    def image(self, loaded: Sequence[Any], head: Any = None) -> tuple[Tensor, Item | None]:
        """Vectors [n, D] or [n, V, D] of n pictures or regions, float32 on the CPU, and what ``head`` needs of them; the model
        must be in eval mode."""
        return self.transformed(default_collate([self.transform(each) for each in loaded]), head)

    @torch.no_grad()
    def transformed(self, batch: Any, head: Any = None) -> tuple[Tensor, Item | None]:
        """As :meth:`image` for a batch of what the transform gives: a tensor [n, ...], or a dict of them."""
        with self.autocast():
            features = self.model.describe_image(map_tensors(lambda each: each.to(self.device), batch))
            vectors = self.model.coder.embed("image", features).float().cpu()
            return vectors, None if head is None else _to_half(head.image_item(features))


def _inverse(order: Tensor) -> Tensor:
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    return position


def _to_half(item: Mapping[str, Tensor]) -> Item:
    """On the CPU, floating-point tensors as float16 where their values fit."""
    out = {}
    for name, value in item.items():
        half = value.half() if value.is_floating_point() else value
        out[name] = (half if torch.equal(half.isfinite(), value.isfinite()) else value).cpu()
    return out


def _gather_items(batches: list[Item], rows: Sequence[Tensor]) -> Item:
    """Every rank's batches of items as one on the first rank, padded with zeros to the longest; empty on the others.

    It goes batch by batch, so that no rank holds its items twice, and empties ``batches``.

    Args:
        batches: this rank's.
        rows: for each rank, the rows of its items in the result, in the order of its batches.
    """
    shapes = distributed.gather_objects(
        [{name: (len(value), value.shape[1:], value.dtype) for name, value in batch.items()} for batch in batches]
    )
    out: Item = {}
    if distributed.rank() == 0:
        all_batches = [batch for of_rank in shapes for batch in of_rank]
        for name in all_batches[0]:
            shape = [max(sizes) for sizes in zip(*(batch[name][1] for batch in all_batches), strict=True)]
            dtype = reduce(torch.promote_types, (batch[name][2] for batch in all_batches))
            out[name] = torch.zeros(sum(batch[name][0] for batch in all_batches), *shape, dtype=dtype)
    written = [0] * len(rows)
    batches.reverse()
    for _ in range(max(map(len, shapes))):
        for rank, batch in enumerate(_gather_to_first(batches.pop() if batches else None)):
            if batch is None:
                continue
            target_rows = rows[rank][written[rank] : written[rank] + len(next(iter(batch.values())))]
            written[rank] += len(target_rows)
            for name, value in batch.items():
                target: Any = (target_rows, *(slice(size) for size in value.shape[1:]))
                out[name][target] = value.to(out[name].dtype)
    return out


def _gather_to_first(value: Any) -> list[Any]:
    """An object of every rank, in rank order, on the first rank; an empty list on the others."""
    if distributed.world_size() == 1:
        return [value]
    values: list[Any] = [None] * distributed.world_size()
    dist.gather_object(value, values if distributed.rank() == 0 else None)
    return values if distributed.rank() == 0 else []
