"""Make batches of (picture, caption, key) pairs, for a ``DataLoader`` or another trainer: :class:`ImageTextCollator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError

#: What the key of a pair is, for messages.
_KEY = "the picture's path or number, the same for all of its captions"


class ImageTextCollator:
    """A ``collate_fn``: n pairs -> ``image`` [n, 3, H, W], ``text`` int64 [n, T] and ``image_id`` int64 [n].

    The id is a hash of the key, the same in every process and epoch, in [0, 2**63). Captions of one picture must have its key:
    they are then not each other's negatives, neither in a batch nor in a bank.

    Args:
        transform: from a picture to a tensor [3, H, W], or to a dict of tensors.
        tokenizer: from a list of n captions to ids, int64 [n, T].
        columns: the names of picture, caption and key in pairs that are dicts, such as rows of a Hugging Face data set.

    Raises:
        CoderError: when it is called, pairs of another form, or paths that the transform does not read.

    Example:
        >>> collate = ImageTextCollator(
        ...     transform=lambda picture: torch.zeros(3, 2, 2), tokenizer=lambda texts: torch.ones(len(texts), 5).long()
        ... )
        >>> batch = collate([("picture", "a dog", "a.jpg"), {"image": "picture", "caption": "a brown dog", "key": "a.jpg"}])
        >>> batch["image"].shape, batch["text"].shape, len(batch["image_id"].unique())
        (torch.Size([2, 3, 2, 2]), torch.Size([2, 5]), 1)
    """

    def __init__(
        self,
        transform: Callable[[Any], Any],
        tokenizer: Callable[[list[str]], torch.Tensor],
        *,
        columns: tuple[str, str, str] = ("image", "caption", "key"),
    ) -> None:
        # Trainers save an attribute named "tokenizer" as one of transformers'.
        self._transform, self._tokenizer, self._columns = transform, tokenizer, columns

    def __call__(self, pairs: Sequence[Any]) -> dict[str, Any]:
        """Pairs, as tuples (picture, caption, key) or dicts -> the keyword arguments of the model's forward."""
        images, captions, keys = zip(*map(self._row, pairs), strict=True)
        for caption in captions:
            if not isinstance(caption, str):
                several = isinstance(caption, (list, tuple))
                hint = "make a pair of each caption, with the picture's key" if several else "pass a str"
                raise CoderError(f"the caption of a pair is a {type(caption).__name__}, not a text: {hint}")
        return {
            "image": default_collate([self._transformed(image) for image in images]),
            "text": self._tokenizer(list(captions)),
            "image_id": torch.tensor([stable_hash(key) for key in keys]),
        }

    def _row(self, pair: Any) -> tuple[Any, ...]:
        if isinstance(pair, (tuple, list)) and len(pair) == 3:
            return tuple(pair)
        if isinstance(pair, Mapping) and all(column in pair for column in self._columns):
            return tuple(pair[column] for column in self._columns)
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        found = f"is a {type(pair).__name__}{size}"
        if isinstance(pair, Mapping):
            found = f"has {', '.join(map(repr, pair)) or 'nothing'}"
            if set(pair) <= {"image", "text", "image_id"}:  # what transformers' Trainer keeps for the model
                found += " (with a Trainer of transformers give TrainingArguments(remove_unused_columns=False))"
        raise CoderError(
            f"a pair {found}: make it (picture, caption, key), or name the columns that hold them, as in "
            f"ImageTextCollator(..., columns={self._columns}); the key is {_KEY}"
        )

    def _transformed(self, image: Any) -> Any:
        try:
            return self._transform(image)
        except (TypeError, AttributeError) as error:
            if not isinstance(image, (str, bytes, Path, Mapping)):
                raise
            raise CoderError(
                f"the transform does not read a {type(image).__name__}: open the picture (PIL.Image.open), or cast "
                "the column of a Hugging Face data set: dataset.cast_column('image', datasets.Image())"
            ) from error
