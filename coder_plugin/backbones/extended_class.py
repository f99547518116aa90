"""Subclasses that are made of a mixin and the class of an object, as whose instances pickle and copy rebuild the object."""

from __future__ import annotations

import functools
from typing import Any


class Extended:
    """Base of the mixins of :func:`extended_class`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__bases__, type(self).__name__), *super().__reduce_ex__(protocol)[2:]


@functools.cache
def extended_class(bases: tuple[type, ...], name: str) -> Any:
    """The subclass of a mixin and a class; pickle cannot find it by its name, and makes it again."""
    return type(name, bases, {"__module__": bases[-1].__module__})


def _new(bases: tuple[type, ...], name: str) -> Any:
    made = extended_class(bases, name)
    return made.__new__(made)
