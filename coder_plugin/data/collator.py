"""Make batches of (picture, caption, key) pairs, for a ``DataLoader`` or another trainer: :class:`ImageTextCollator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError


class ImageTextCollator:
    """A ``collate_fn``: n pairs -> ``image`` [n, 3, H, W], ``text`` int64 [n, T] and ``image_id`` int64 [n].

    The id is a hash of the key, the same in every process and epoch, in [0, 2**63). Captions of one picture must have its key:
    they are then not each other's negatives, neither in a batch nor in a bank.

    Args:
        transform: from a picture to a tensor [3, H, W], or to a dict of tensors.
        tokenizer: from a list of n captions to ids, int64 [n, T].
        columns: the names of picture, caption and key in pairs that are dicts, such as rows of a Hugging Face data set.

    Raises:
        CoderError: when it is called, a dict without one of the columns.

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
        return {
            "image": default_collate([self._transform(image) for image in images]),
            "text": self._tokenizer(list(captions)),
            "image_id": torch.tensor([stable_hash(key) for key in keys]),
        }

    def _row(self, pair: Any) -> tuple[Any, ...]:
        if not isinstance(pair, Mapping):
            return tuple(pair)
        missing = [column for column in self._columns if column not in pair]
        if missing:
            raise CoderError(
                f"a pair has no {missing[0]!r}; it has {', '.join(map(repr, pair)) or 'nothing'}: name the columns of picture, "
                "caption and key with ImageTextCollator(..., columns=(...)); the key is the same for all captions of a picture"
            )
        return tuple(pair[column] for column in self._columns)
