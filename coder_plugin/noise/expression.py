"""Generators from an expression such as ``join+truncate(shortest=0.3,words=4)``: positive captions and noise alike.

The grammar is that of :mod:`coder_plugin.expression`, without weights and heads.
"""

from __future__ import annotations

from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.expression import Expression
from coder_plugin.options import check_types, required_options


def make_parts(group: str, text: str) -> list[tuple[str, Any]]:
    """Build each generator of an expression.

    Args:
        group: the entry-point group of the names, ``negatives`` or ``positives``.

    Returns:
        (name, generator), in order.

    Raises:
        CoderError: a syntax error, with its column; an unknown name or option; a value of the wrong type, or one that a
            generator refuses.

    Example:
        >>> [(name, generator.std) for name, generator in make_parts("negatives", "gaussian(std=0.2) + gaussian")]
        [('gaussian', 0.2), ('gaussian', 0.1)]
    """
    expression = Expression.parse(text, kind="expression", item="NAME or NAME(option=value,…)")
    for item in expression.items:
        if item.weight is not None:
            raise expression.error(item.columns["weight"], f"generators have no weights: leave out {item.weight}*")
        if item.source is not None:
            raise expression.error(item.columns["source"], f"generators read no heads: leave out @{item.source}")
    generators = []
    for item in expression.items:
        options = dict(check_types(group, item.name, item.options))
        if missing := [option for option in required_options(group, item.name) if option not in options]:
            raise CoderError(f"{item.name!r}: missing required option {', '.join(f'{option}=…' for option in missing)}")
        try:
            generators.append((item.name, registry.load(group, item.name)(**options)))
        except ValueError as error:
            raise CoderError(f"{item.name!r}: {error}") from error
    return generators
