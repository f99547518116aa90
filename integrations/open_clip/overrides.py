"""Temporary replacements for names in upstream's modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from coder_plugin.errors import CoderError


@contextlib.contextmanager
def overridden(module: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """Replace names of a module inside the context, and restore them afterwards.

    Raises:
        CoderError: the module has no such name, so the replacement would silently have no effect.
    """
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise CoderError(f"{module.__name__} has no {', '.join(missing)}: the adapter does not know this version of it")
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Shadow:
    """A stand-in for a module, with some names replaced and all others passed through."""

    def __init__(self, module: Any, **names: Any) -> None:
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise CoderError(f"{module.__name__} has no {', '.join(missing)}: the adapter does not know this version of it")
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
