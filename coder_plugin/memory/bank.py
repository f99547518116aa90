"""Coupled first-in first-out banks of momentum keys (CODER section 3.2.3, docs/equations.md#m-dcl).

Shapes: N keys of the global batch, Q bank entries, n anchors, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from coder_plugin.memory.host_value import HostValue
from coder_plugin.memory.moments import CHUNK, Moments
from coder_plugin.tensors import check_range, is_on_cpu, mark_range_checked, range_checked

BankDtype = Literal["float32", "float16", "bfloat16"]


class CoupledBank(nn.Module):
    """The last Q image and text keys with their image ids, in a ring buffer. All state is persistent buffers.

    ``image`` and ``text`` [Q, D] in the storage dtype; ``ids`` int64 [Q]; 0-d int64 ``pointer``, the position of the
    next key, and ``count``, the number of filled entries; and the running moments of both banks.

    Args:
        size: Q, >= 1. dim: D.
        dtype: storage of the keys, ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        ValueError: another dtype, or a size below 1.

    Example:
        >>> bank = CoupledBank(2, 3)
        >>> bank.enqueue(torch.eye(3), torch.eye(3), torch.tensor([5, 6, 7]))
        >>> bank.ids.tolist(), bank.valid.tolist()
        ([7, 6], [True, True])
    """

    image: Tensor
    text: Tensor
    ids: Tensor
    pointer: Tensor
    count: Tensor

    def __init__(self, size: int, dim: int, *, dtype: BankDtype = "float32") -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"a bank must have at least 1 entry, got {size}")
        kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
        if dtype not in kinds:
            raise ValueError(f"a bank's dtype must be one of {', '.join(kinds)}, got {dtype!r}")
        self.size = size
        self.register_buffer("image", torch.zeros(size, dim, dtype=kinds[dtype]))
        self.register_buffer("text", torch.zeros(size, dim, dtype=kinds[dtype]))
        self.register_buffer("ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._pointer, self._count = HostValue(), HostValue()
        self._repeats = HostValue()  # the largest number of entries of one image, which belongs to the ids
        self.image_moments = Moments(dim)
        self.text_moments = Moments(dim)

    @property
    def valid(self) -> Tensor:
        """Bool [Q], True for the filled entries."""
        return torch.arange(self.size, device=self.count.device) < self.count

    @torch.no_grad()
    def enqueue(self, image_keys: Tensor, text_keys: Tensor, ids: Tensor, *, repeats: int | None = None) -> None:
        """Overwrite the oldest entries with keys [N, D] and ids int64 [N]; of more than Q keys the last Q stay.

        Call it with the same rows in the same order on every rank. With ``repeats`` it does not synchronise.

        Args:
            repeats: the value of :meth:`repeats_after`. None: computed here.

        Raises:
            ValueError: wrong shapes.
            CoderError: keys on a CPU that are so large that a loss of them would overflow.
        """
        n, dim = len(ids), self.image.shape[1]
        if image_keys.shape != (n, dim) or text_keys.shape != (n, dim) or ids.ndim != 1:
            shapes = f"{tuple(image_keys.shape)} and {tuple(text_keys.shape)}"
            raise ValueError(f"keys must have shape ({n}, {dim}) for {n} ids, got {shapes}")
        check_range(image_keys=image_keys, text_keys=text_keys)
        if repeats is None and n and not is_on_cpu(self.ids):
            repeats = int(self.repeats_after(ids))
        pointer, count = self._pointer.read(self.pointer), self._count.read(self.count)
        positions = self._next_positions(n)
        evicted = (positions < self.count).to(torch.float64)
        wrapped = pointer + n >= self.size
        dropped = max(0, n - self.size)
        for bank, moments, keys in (
            (self.image, self.image_moments, image_keys),
            (self.text, self.text_moments, text_keys),
        ):
            keys = keys[dropped:].detach().to(bank.dtype)
            if not wrapped:
                moments.add(bank[positions], -evicted.to(moments.first.dtype))
                moments.add(keys)
            was_checked = range_checked(bank)
            bank[positions] = keys
            if was_checked:
                mark_range_checked(bank)
        self.ids[positions] = ids[dropped:]
        if repeats is not None:
            self._repeats.keep(self.ids, repeats)
        self._pointer.write(self.pointer, (pointer + n) % self.size)
        self._count.write(self.count, min(count + n, self.size))
        if wrapped:  # once per turn of the ring, which is full then
            self.image_moments.rebuild(self.image)
            self.text_moments.rebuild(self.text)

    def _next_positions(self, n: int) -> Tensor:
        """The positions [min(N, Q)] that the next N keys take; of more than Q the last Q."""
        start = self._pointer.read(self.pointer)
        return torch.arange(start + max(0, n - self.size), start + n, device=self.ids.device) % self.size

    @torch.no_grad()
    def repeats_after(self, ids: Tensor) -> Tensor:
        """The largest number of entries of one image once keys with ids [N] are written: 0-d int64, on the device.

        With it on the host, :meth:`variance` compares anchors with no more entries than may show their images.
        """
        entries = self.ids.clone()
        entries[self._next_positions(len(ids))] = ids[max(0, len(ids) - self.size) :]
        ordered = entries[: min(self._count.read(self.count) + len(ids), self.size)].sort().values
        return (torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)).amax()

    @torch.no_grad()
    def variance(
        self,
        modality: Literal["image", "text"],
        anchors: Tensor,
        keys: Tensor,
        anchor_ids: Tensor,
        key_ids: Tensor,
        *,
        mask_entries: bool,
    ) -> Tensor:
        """Population variance of each anchor's similarities to its negatives: current keys and bank entries.

        Computed by tiles of at most 2,048 anchors and 2,048 keys: no tensor of size n x Q or n x k is formed.

        Args:
            modality: the modality of the keys and the bank.
            anchors: features of the other modality [n, D].
            keys: current keys [k, D].
            anchor_ids: image ids [n]. key_ids: [k]; keys of an anchor's own image are left out.
            mask_entries: whether entries of an anchor's own image are left out too.

        Returns:
            [n], >= 0, in the dtype of the moments (float64).
        """
        bank, moments = (self.image, self.image_moments) if modality == "image" else (self.text, self.text_moments)
        entries, masked = self._entries_with(anchor_ids) if mask_entries else (self.ids[:0], self.ids[:0].bool())
        entry_ids = self.ids[entries]
        variances = anchors.new_empty(len(anchors), dtype=moments.pivot.dtype)
        for part, live, ids in zip(variances.split(CHUNK), anchors.split(CHUNK), anchor_ids.split(CHUNK), strict=True):
            first, second = moments.sums(live)
            count = self.count.to(first.dtype).expand_as(first)
            live = live.to(first.dtype)

            def add(rows: Tensor, counted: Tensor, sign: int) -> None:
                """Add the similarities to ``rows`` [m, D], minus that to the pivot, where ``counted`` [n, m]."""
                nonlocal first, second, count
                distances = (live @ (rows.to(first.dtype) - moments.pivot).T).masked_fill_(~counted, 0)  # noqa: B023
                first = first + sign * distances.sum(1)
                second = second + sign * torch.linalg.vecdot(distances, distances)
                count = count + sign * counted.sum(1)

            for rows, of_rows in zip(keys.split(CHUNK), key_ids.split(CHUNK), strict=True):
                add(rows, ids[:, None] != of_rows, 1)
            for rows, of_rows, counted in zip(*(x.split(CHUNK) for x in (entries, entry_ids, masked)), strict=True):
                add(bank[rows], (ids[:, None] == of_rows) & counted, -1)
            variance = (second / count - (first / count).square()).clamp_(min=0)
            part.copy_(variance.masked_fill_(count == 0, 0))
        return variances

    def _entries_with(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [m] of the filled entries whose image is among ``ids`` [n], and bool [m], False where one is not.

        On a device, where reading m would synchronise, it is fixed: n times the largest number of entries of one image,
        at most Q.
        """
        ordered = ids.sort().values
        position = torch.searchsorted(ordered, self.ids).clamp(max=len(ordered) - 1)
        matches = (ordered[position] == self.ids) & self.valid
        if is_on_cpu(ids):
            entries = matches.nonzero().squeeze(1)
            return entries, matches[entries]
        every = torch.arange(self.size, device=ids.device)
        repeats = None if torch.compiler.is_compiling() else self._repeats.known(self.ids)
        room = self.size if repeats is None else min(self.size, repeats * len(ids))
        if room == self.size:
            return every, matches
        slot = torch.where(matches, matches.cumsum(0) - 1, room)
        entries = torch.zeros_like(every[: room + 1]).scatter_(0, slot, every)[:room]
        return entries, every[:room] < matches.sum()
