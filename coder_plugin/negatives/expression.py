"""Generators from an expression such as ``join+truncate(shortest=0.3,words=4)``: positive captions and noise alike.

The grammar is that of :mod:`coder_plugin.expression`, without weights and heads.
"""

from __future__ import annotations

from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.expression import Expression
from coder_plugin.options import check_types, required_options


def split_expression(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names of an expression with their options, in order. Whether the names exist is not checked.

    Raises:
        CoderError: a syntax error, or an option that is set twice; names the column, counted from 1.

    Example:
        >>> split_expression("gaussian(std=0.2) + shuffle")
        [('gaussian', {'std': 0.2}), ('shuffle', {})]
    """
    expression = Expression.parse(text, kind="expression", item="NAME or NAME(option=value,…)")
    for item in expression.items:
        if item.weight is not None:
            raise expression.error(item.columns["weight"], f"generators have no weights: leave out {item.weight}*")
        if item.source is not None:
            raise expression.error(item.columns["source"], f"generators read no heads: leave out @{item.source}")
    return [(item.name, item.options) for item in expression.items]


def make_parts(group: str, text: str) -> list[tuple[str, Any]]:
    """Build each generator of an expression.

    Args:
        group: the entry-point group of the names, ``negatives`` or ``positives``.

    Returns:
        (name, generator), in order.

    Raises:
        CoderError: not of the grammar; an unknown name or option; a value of the wrong type, or one that a generator refuses.
    """
    generators = []
    for name, values in split_expression(text):
        options = dict(check_types(group, name, values))
        if missing := [option for option in required_options(group, name) if option not in options]:
            raise CoderError(f"{name!r} needs {', '.join(f'{option}=…' for option in missing)}")
        try:
            generators.append((name, registry.load(group, name)(**options)))
        except ValueError as error:
            raise CoderError(f"{name!r}: {error}") from error
    return generators
