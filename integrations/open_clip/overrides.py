"""Names of upstream's modules, replaced for a while: nothing of upstream is edited, and nothing stays replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from coder_plugin.errors import CoderError


@contextlib.contextmanager
def overridden(module: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """Other values for these names of ``module`` inside the context.

    Raises:
        CoderError: a name that the module has not: an override that nobody calls would change nothing, unseen.
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
    """A module as one other module is to see it: some names replaced, all else its own."""

    def __init__(self, module: Any, **names: Any) -> None:
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise CoderError(f"{module.__name__} has no {', '.join(missing)}: the adapter does not know this version of it")
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
