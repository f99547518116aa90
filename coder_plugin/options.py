"""Options of plugins (terms, heads, generators): checked against the signature of what they are passed to."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.expression import format_value


def check_options(group: str, name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Check the options of a term or a head: names, values of the annotated types, nothing required left out.

    A term is also built with them once, because it may refuse values itself.

    Returns:
        The options with values of the annotated types, in the order of the signature.

    Raises:
        CoderError: says which option is wrong and what is allowed.
    """
    ordered = check_types(group, name, options)
    if group == "losses":
        missing = [option for option in required_options(group, name) if option not in dict(ordered)]
        if missing:
            raise CoderError(f"{name!r}: missing required option {', '.join(f'{option}=…' for option in missing)}")
        try:
            registry.load(group, name)(**dict(ordered))
        except ValueError as error:
            raise CoderError(f"{name!r}: {error}") from error
    return ordered


def check_types(group: str, name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The part of :func:`check_options` that looks at one option at a time: names, types and finite numbers."""
    cls = registry.load(group, name)
    allowed = _parameters(group, cls)
    try:
        hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    except NameError as error:  # an annotation imported only for type checkers
        raise CoderError(f"{name!r} in {registry.PREFIX}{group}: its options' types cannot be read: {error}") from error
    checked = {}
    for option, value in options.items():
        if option not in allowed:
            raise CoderError(f"{name!r} has no option {option!r}; it has: {', '.join(allowed) or 'none'}")
        ok, checked[option] = _convert(value, hints.get(option, Any))
        if not ok:
            wanted = f"{_describe(hints[option])}, a finite number" if value in ("nan", "inf") else _describe(hints[option])
            raise CoderError(f"{name!r}: option {option}={format_value(value)} must be {wanted}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CoderError(f"{name!r}: option {option}={value} must be finite")
    return tuple((option, checked[option]) for option in allowed if option in checked)


def required_options(group: str, name: str) -> list[str]:
    """Options without a default."""
    parameters = _parameters(group, registry.load(group, name)).values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def default_options(group: str, name: str) -> dict[str, Any]:
    """The defaults of the options that have one.

    Example:
        >>> default_options("heads", "momentum")["bank_size"]
        4096
    """
    parameters = _parameters(group, registry.load(group, name)).values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _parameters(group: str, cls: Any) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters; of a loss, which is called without positional arguments, the others too."""
    kinds: set[Any] = {inspect.Parameter.KEYWORD_ONLY}
    if group == "losses":
        kinds.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p for p in inspect.signature(cls).parameters.values() if p.kind in kinds}


def _convert(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether a value fits an annotation, and the value in its type (an int becomes a float where one is expected)."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True, value
    if origin is typing.Literal:
        if value is None and "none" in typing.get_args(hint):
            return True, "none"  # the grammar reads the word before it knows the option's type
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)), value
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            ok, converted = _convert(value, choice)
            if ok:
                return True, converted
        return False, value
    if hint is float and type(value) is int:
        return True, float(value)
    if hint in (int, float, str, bool, type(None), None):
        return type(value) is (type(None) if hint is None else hint), value
    return True, value


def _describe(hint: Any) -> str:
    """An annotation in the words of the grammar: ``float or mu``."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(format_value, choices))
    if choices:
        return " or ".join(map(_describe, choices))
    return "none" if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))
