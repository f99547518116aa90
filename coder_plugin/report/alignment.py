"""Which region each word of a caption finds, and how relevant each region is to its context (SelfAlign, figure 4).

Shapes: L regions or patches of an image, T text positions, W words, D channels, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin.backbones.base import Backbone
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import Unusable, map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.functional import correspondence
from coder_plugin.heads.capabilities import MapsContext, heads_with
from coder_plugin.report.places import blank, grid_boxes, grid_of, tower_picture
from coder_plugin.report.words import Word, WordReader

#: What ``create_model(..., return_intermediates=LOCALS)`` must catch, so that words and regions can be compared.
LOCALS = frozenset({"image_locals", "image_mask", "text_locals", "text_mask"})


@dataclass(frozen=True, eq=False)
class Alignment:
    """What a model makes of one image and one of its captions.

    Args:
        key: the image's name. caption: as written.
        words: W, special tokens and punctuation left out; a word of several pieces has their mean embedding.
        similarity: [W, L] cosines of words and regions before the context stage (eq. 1), float32.
        boxes: [L, 4] float32, left, top, right, bottom as fractions of the picture; None: the regions' are not known.
        grid: rows and columns where the regions are a grid's cells, row by row.
        region_context: [L] cosines of the text's global context with each region's local one, or None: the model has no
            head ``contexts`` with that branch. word_context: [W], of the image's with each word's; likewise.
        picture: uint8 [H, W, 3], in which the boxes lie; None: not known.
    """

    key: str
    caption: str
    words: tuple[str, ...]
    similarity: np.ndarray
    boxes: np.ndarray | None = None
    grid: tuple[int, int] | None = None
    region_context: np.ndarray | None = None
    word_context: np.ndarray | None = None
    picture: np.ndarray | None = None

    @property
    def regions(self) -> np.ndarray:
        """[W] the most similar region of each word, an index into the regions in the data's order."""
        return self.similarity.argmax(1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the picture: ``words`` (each with its region, that one's box, their similarity, that with every
        region, and its context) and ``regions`` (boxes and context)."""
        words = []
        for number, (word, region) in enumerate(zip(self.words, self.regions.tolist(), strict=True)):
            words.append(
                {
                    "word": word,
                    "region": region,
                    "box": None if self.boxes is None else _plain(self.boxes[region]),
                    "similarity": _plain(self.similarity[number, region]),
                    "similarities": _plain(self.similarity[number]),
                    "context": None if self.word_context is None else _plain(self.word_context[number]),
                }
            )
        return {
            "image": self.key,
            "caption": self.caption,
            "words": words,
            "grid": None if self.grid is None else list(self.grid),
            "regions": {
                "count": self.similarity.shape[1],
                "boxes": None if self.boxes is None else _plain(self.boxes),
                "context": None if self.region_context is None else _plain(self.region_context),
            },
        }


class Seen(NamedTuple):
    """What a model knows of one image: keys of a batch of one, and where the regions that are not padding lie."""

    known: Mapping[str, Tensor]
    regions: Tensor  # [L, D]
    boxes: np.ndarray | None
    grid: tuple[int, int] | None
    picture: np.ndarray | None


class Read(NamedTuple):
    """What a model knows of one caption."""

    known: Mapping[str, Tensor]
    words: list[Word]
    vectors: Tensor  # [W, D]


class Aligner:
    """Describes images and captions with a model that gives :data:`LOCALS`.

    Args:
        encoder: a :class:`~coder_plugin.pretrained.encode.Encoder`: the model with its tokenizer, evaluation transform, device
            and autocast.

    Raises:
        CoderError: a tokenizer that does not tell words, a model that does not give its locals or gives those of words and
            regions in spaces of different dimensions.
    """

    def __init__(self, encoder: Any) -> None:
        self.encoder, self.model = encoder, encoder.model
        self.reader = WordReader(encoder.tokenizer)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in eval mode, without gradients; ``see`` and ``read`` are called inside."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def see(self, item: Item, picture: Any = None) -> Seen | None:
        """The image of an item of the data; None: it cannot be read or used, which encoding the data counts and tells of.

        Args:
            picture: what lies under an image's regions, where that is known.
        """
        try:
            loaded = item.load()
        except (OSError, ValueError):
            return None
        try:
            image = self.encoder.transform(loaded)
        except Unusable:
            return None
        batch = map_tensors(lambda each: each[None].to(self.encoder.device), image)
        with self.encoder.autocast():
            known = self.model.describe_image(batch)
        valid = _key(known, "image_mask")[0]
        regions = _key(known, "image_locals")[0][valid].float()
        if not isinstance(self.model, Backbone):
            grid = grid_of(self.model, len(regions))
            return Seen(known, regions, grid_boxes(*grid), grid, tower_picture(image, self.model.visual.preprocess_cfg))
        assert isinstance(loaded, Regions)
        boxes = loaded.fractions
        if boxes is None:
            return Seen(known, regions, None, None, None)
        under = blank(loaded.size) if picture is None else np.asarray(picture.convert("RGB"))
        return Seen(known, regions, boxes[: len(regions)], None, under)

    def read(self, caption: str) -> Read:
        ids = self.reader.ids(caption).to(self.encoder.device)
        with self.encoder.autocast():
            known = self.model.describe_text(ids)
        locals_, mask = _key(known, "text_locals")[0].float(), _key(known, "text_mask")[0]
        words = self.reader.words(caption, mask.tolist())
        return Read(known, words, average(locals_, words))

    def compare(self, read: Read, seen: Seen) -> np.ndarray:
        """Cosines [W, L] of a caption's words and an image's regions, float32 on the CPU."""
        channels = read.vectors.shape[1], seen.regions.shape[1]
        if channels[0] != channels[1]:
            raise CoderError(
                f"words of {channels[0]} channels and regions of {channels[1]} cannot be compared before the context stage: "
                "pictures need a model whose words and regions share a space there (of BiGRU's: --model-kwargs "
                "word_projection=true, in training)"
            )
        if not read.words:
            return np.zeros((0, len(seen.regions)), np.float32)
        masks = (torch.ones(1, len(each), dtype=torch.bool, device=each.device) for each in (read.vectors, seen.regions))
        words_there, regions_there = masks
        cosines = correspondence(read.vectors[None], words_there, seen.regions[None], regions_there)
        return cosines[0].float().cpu().numpy()

    def align(self, key: str, caption: str, seen: Seen) -> Alignment:
        """One caption of an image that :meth:`see` has described."""
        read = self.read(caption)
        found = Alignment(key, caption, tuple(word.text for word in read.words), self.compare(read, seen))
        found = replace(found, boxes=seen.boxes, grid=seen.grid, picture=seen.picture)
        head = next(iter(heads_with(self.model.coder.heads, MapsContext).values()), None)
        if head is None:
            return found
        with self.encoder.autocast():
            maps = head.maps({**seen.known, **read.known})
        if "image" in maps:
            valid = seen.known["image_mask"][0]
            found = replace(found, region_context=maps["image"][0][valid].float().cpu().numpy())
        if "text" in maps:
            cosines = average(maps["text"][0][:, None].float(), read.words)[:, 0]
            found = replace(found, word_context=cosines.cpu().numpy())
        return found


def average(tokens: Tensor, words: Sequence[Word]) -> Tensor:
    """The mean over each word's pieces: [T, D] -> [W, D]."""
    rows = [tokens[list(word.positions)].mean(0) for word in words]
    return torch.stack(rows) if rows else tokens[:0]


def _key(known: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in known:
        raise CoderError(f"the model gives no {name}: make it with create_model(..., return_intermediates={sorted(LOCALS)})")
    return known[name]


def _plain(values: Any) -> Any:
    """For JSON: lists of numbers of four decimals, which is more than a cosine of half precision has."""
    return np.asarray(values, np.float64).round(4).tolist()
