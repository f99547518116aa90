"""Reading integer buffers without synchronising with a device."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class HostValue:
    """The host's copy of the value of a 0-d integer buffer, which the host can read without synchronising.

    The buffer is saved and loaded, and decides: if something else has written or replaced it, such as the loading of a
    state, the value is read from it again. Copies of this object start unread.

    Example:
        >>> import torch
        >>> buffer, value = torch.tensor(3), HostValue()
        >>> value.read(buffer)
        3
        >>> value.write(buffer, 5)
        >>> buffer, value.read(buffer)
        (tensor(5), 5)
        >>> _ = buffer.fill_(7)
        >>> value.read(buffer)
        7
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._version = 0
        self._value = 0

    def read(self, buffer: Tensor) -> int:
        """The buffer's value. It synchronises only where something else has written the buffer."""
        value = self.known(buffer)
        if value is None:
            value = int(buffer)
            self.keep(buffer, value)
        return value

    def write(self, buffer: Tensor, value: int) -> None:
        """Write the value into the buffer too."""
        buffer.fill_(value)
        self.keep(buffer, value)

    def keep(self, buffer: Tensor, value: int) -> None:
        """Remember a value that belongs to what the buffer holds now: its own, or one computed from it."""
        self._buffer, self._version, self._value = buffer, buffer._version, value

    def known(self, buffer: Tensor) -> int | None:
        """The value that was kept; None if the buffer has been written since."""
        return self._value if buffer is self._buffer and buffer._version == self._version else None

    def __deepcopy__(self, memo: Any) -> HostValue:
        return HostValue()

    def __reduce__(self) -> tuple[type[HostValue], tuple[()]]:
        return HostValue, ()
