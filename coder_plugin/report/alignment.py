"""Which region each word of a caption matches, and how relevant each region is to the caption (SelfAlign, figure 4).

Shapes: L regions or patches of an image, T text positions, W words, D channels, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from coder_plugin.backbones.base import Backbone
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions, grid_boxes
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.evaluate import evaluating
from coder_plugin.heads.capabilities import heads_having
from coder_plugin.losses.lca import correspondence
from coder_plugin.report.words import Word, WordReader

#: What ``create_model(..., return_intermediates=LOCALS)`` must return, so that words and regions can be compared.
LOCALS = frozenset({"image_locals", "image_mask", "text_locals", "text_mask"})
#: Longer side, in pixels, of the blank canvas that stands for a missing picture.
_CANVAS = 320


@dataclass(frozen=True, eq=False)
class Alignment:
    """Similarities of the words of one caption with the regions of its image.

    Args:
        key: the image's name.
        caption: as written.
        words: W words, without special tokens and punctuation. A word of several pieces has their mean embedding.
        similarity: [W, L] float32, cosines of words and regions before the context stage (SelfAlign, eq. 1).
        boxes: [L, 4] float32, left, top, right, bottom as fractions of the picture; None if unknown.
        grid: rows and columns, if the regions are the cells of a grid, row by row.
        region_context: [L] cosines of the text's global context with each region's local context, or None if no head
            computes them. word_context: [W], the same for the image's context and each word.
        picture: uint8 [H, W, 3], the picture under the boxes; None if unknown.
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
        """[W] index of the most similar region of each word."""
        return self.similarity.argmax(1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the picture. Numbers have four decimals, which is more than a cosine in half precision has."""

        def plain(values: Any) -> Any:
            return None if values is None else np.asarray(values, np.float64).round(4).tolist()

        words = [
            {
                "word": word,
                "region": region,
                "box": None if self.boxes is None else plain(self.boxes[region]),
                "similarity": plain(self.similarity[number, region]),
                "similarities": plain(self.similarity[number]),
                "context": None if self.word_context is None else plain(self.word_context[number]),
            }
            for number, (word, region) in enumerate(zip(self.words, self.regions.tolist(), strict=True))
        ]
        return {
            "image": self.key,
            "caption": self.caption,
            "words": words,
            "grid": None if self.grid is None else list(self.grid),
            "regions": {
                "count": self.similarity.shape[1],
                "boxes": plain(self.boxes),
                "context": plain(self.region_context),
            },
        }


class ImageFeatures(NamedTuple):
    """Features of one image: the model's output for a batch of one, and its valid regions with their places."""

    output: Mapping[str, Tensor]
    regions: Tensor  # [L, D]
    boxes: np.ndarray | None
    grid: tuple[int, int] | None
    picture: np.ndarray | None


class CaptionFeatures(NamedTuple):
    """Features of one caption: the model's output for a batch of one, and its words."""

    output: Mapping[str, Tensor]
    words: list[Word]
    vectors: Tensor  # [W, D]


class Aligner:
    """Compares the words of captions with the regions of images.

    Args:
        encoder: a :class:`~coder_plugin.pretrained.encode.Encoder` of a model that returns :data:`LOCALS`.

    Raises:
        CoderError: the tokenizer does not report which characters a token stands for, or the model does not return its
            local features, or words and regions have different numbers of channels.
    """

    def __init__(self, encoder: Any) -> None:
        self.encoder, self.model = encoder, encoder.model
        self.reader = WordReader(encoder.tokenizer)

    def evaluating(self) -> Any:
        """The model in eval mode, without gradients. Call the other methods inside."""
        return evaluating(self.model)

    def describe_image(self, item: Item, picture: Image.Image | None = None) -> ImageFeatures | None:
        """Features of an item's image; None if it cannot be read (encoding the data set counts and reports these).

        Args:
            picture: the picture under an image's regions, if the model reads regions.
        """
        loaded = load_image(self.encoder, item)
        if loaded is None:
            return None
        source, image = loaded
        with self.encoder.autocast():
            output = self.model.describe_image(map_tensors(lambda each: each[None].to(self.encoder.device), image))
        valid = _key(output, "image_mask")[0]
        regions = _key(output, "image_locals")[0][valid].float()
        if not isinstance(self.model, Backbone):
            grid = grid_of(self.model, len(regions))
            shown = tower_picture(image, self.model.visual.preprocess_cfg)
            return ImageFeatures(output, regions, grid_boxes(*grid), grid, shown)
        assert isinstance(source, Regions)
        if source.fractions is None:
            return ImageFeatures(output, regions, None, None, None)
        under = blank(source.size) if picture is None else np.asarray(picture.convert("RGB"))
        return ImageFeatures(output, regions, source.fractions[: len(regions)], None, under)

    def describe_caption(self, caption: str) -> CaptionFeatures:
        ids = self.reader.ids(caption).to(self.encoder.device)
        with self.encoder.autocast():
            output = self.model.describe_text(ids)
        tokens, mask = _key(output, "text_locals")[0].float(), _key(output, "text_mask")[0]
        words = self.reader.words(caption, mask.tolist())
        return CaptionFeatures(output, words, _average(tokens, words))

    def compare(self, caption: CaptionFeatures, image: ImageFeatures) -> np.ndarray:
        """Cosines [W, L] of a caption's words and an image's regions, float32 on the CPU."""
        channels = caption.vectors.shape[1], image.regions.shape[1]
        if channels[0] != channels[1]:
            raise CoderError(
                f"words of {channels[0]} channels and regions of {channels[1]} channels cannot be compared before the context "
                "stage: train the model with --model-kwargs word_projection=true, which gives both the same channels"
            )
        if not caption.words:
            return np.zeros((0, len(image.regions)), np.float32)
        words, regions = caption.vectors[None], image.regions[None]
        masks = [torch.ones(1, each.shape[1], dtype=torch.bool, device=each.device) for each in (words, regions)]
        return correspondence(words, masks[0], regions, masks[1])[0].float().cpu().numpy()

    def align(self, key: str, text: str, image: ImageFeatures) -> Alignment:
        """Compare one caption with an image that :meth:`describe_image` has described."""
        caption = self.describe_caption(text)
        alignment = Alignment(
            key,
            text,
            tuple(word.text for word in caption.words),
            self.compare(caption, image),
            boxes=image.boxes,
            grid=image.grid,
            picture=image.picture,
        )
        head = next(iter(heads_having(self.model.coder.heads, "maps").values()), None)
        if head is None:
            return alignment
        with self.encoder.autocast():
            maps = head.maps({**image.output, **caption.output})
        if "image" in maps:
            cosines = maps["image"][0][image.output["image_mask"][0]]
            alignment = replace(alignment, region_context=cosines.float().cpu().numpy())
        if "text" in maps:
            cosines = _average(maps["text"][0][:, None].float(), caption.words)[:, 0]
            alignment = replace(alignment, word_context=cosines.cpu().numpy())
        return alignment


def load_image(encoder: Any, item: Item) -> tuple[Any, Any] | None:
    """An item's image as loaded and as transformed; None if it cannot be read or used."""
    try:
        loaded = item.load()
    except (OSError, ValueError):
        return None
    try:
        return loaded, encoder.transform(loaded)
    except BadSample:
        return None


def _average(tokens: Tensor, words: Sequence[Word]) -> Tensor:
    """The mean over each word's pieces: [T, D] -> [W, D]."""
    rows = [tokens[list(word.positions)].mean(0) for word in words]
    return torch.stack(rows) if rows else tokens[:0]


def _key(output: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in output:
        options = f"return_intermediates={sorted(LOCALS)}"
        raise CoderError(f"the model returns no {name}: make it with create_model(..., {options})")
    return output[name]


# -- where regions are in a picture -----------------------------------------------------------------------------------


def grid_of(model: Any, count: int) -> tuple[int, int]:
    """Rows and columns of the ``count`` cells (row by row) that an open_clip image tower returns.

    ViTs store their grid. The cells of other towers are square, so theirs is the grid of ``count`` cells whose aspect ratio
    is nearest to the picture's.

    Raises:
        CoderError: no grid of so many cells is near the picture's aspect ratio.
    """
    visual = model.visual
    for owner in (visual, getattr(getattr(visual, "trunk", None), "patch_embed", None)):
        grid = getattr(owner, "grid_size", None)
        if grid is not None and math.prod(grid) == count:
            return int(grid[0]), int(grid[1])
    size = visual.image_size
    height, width = (size, size) if isinstance(size, int) else size

    def distance(rows: int) -> float:
        return abs(math.log(rows / (count // rows) * width / height))

    rows = min((rows for rows in range(1, count + 1) if count % rows == 0), key=distance)
    if distance(rows) > math.log(1.9):
        features = f"{type(visual).__name__} returns {count} features of a picture of {height} x {width}"
        raise CoderError(f"{features}: they form no grid that could be drawn")
    return rows, count // rows


def tower_picture(image: Tensor, preprocess: Any) -> np.ndarray:
    """The picture that a tower read: undo mean and std of its ``preprocess_cfg``, [3, H, W] -> uint8 [H, W, 3]."""
    mean, std = (np.asarray(preprocess[name], np.float32) for name in ("mean", "std"))
    pixels = image.float().cpu().numpy().transpose(1, 2, 0) * std + mean
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def blank(size: tuple[float, float]) -> np.ndarray:
    """A light canvas uint8 [H, W, 3] with the aspect ratio of ``size`` (width, height)."""
    scale = _CANVAS / max(size)
    return np.full((max(1, round(size[1] * scale)), max(1, round(size[0] * scale)), 3), 235, np.uint8)


def brightness(values: np.ndarray, boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Values [L] drawn into their boxes [L, 4] (fractions) as an image [height, width], scaled to [0, 1].

    Where boxes overlap, the greatest value counts. Pixels without a box are 0.
    """
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.ones_like(values)
    out = np.zeros((height, width), np.float32)
    edges = np.round(boxes * [width, height, width, height]).astype(int).clip(0)
    for value, (left, top, right, bottom) in zip(scaled, edges, strict=True):
        covered = out[top : max(bottom, top + 1), left : max(right, left + 1)]
        np.maximum(covered, value, out=covered)
    return out
