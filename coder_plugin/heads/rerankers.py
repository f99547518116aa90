"""Re-rankers by name, which ``--reranker`` names: the entry-point group ``coder_plugin.rerankers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coder_plugin import registry
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.expression import Expression, Item
from coder_plugin.options import check_types, required_options

if TYPE_CHECKING:
    from coder_plugin.heads.base import BackboneInfo
    from coder_plugin.heads.capabilities import Reranks

_FLAG = "--reranker"


def parse_reranker(text: str) -> Item:
    """Name and options of ``NAME`` or ``NAME(option=value, …)``; imports no re-ranker.

    Raises:
        CoderError: not of this form, or no re-ranker has this name.

    Example:
        >>> item = parse_reranker("maxsim(direction=both)")
        >>> item.name, item.options
        ('maxsim', {'direction': 'both'})
    """
    expression = Expression.parse(text, kind=_FLAG, item="the name of a re-ranker")
    item, *others = expression.items
    if others or item.weight is not None or item.source is not None:
        raise CoderError(f"{_FLAG} {text!r}: expected one re-ranker, NAME or NAME(option=value)")
    if item.name not in (names := registry.names("rerankers")):
        hint = did_you_mean(item.name, names) or ";"
        raise CoderError(f"{_FLAG} {item.name!r} is unknown{hint} known: {', '.join(names)}")
    return item


def required_keys(text: str) -> tuple[str, ...]:
    """The keys of ``describe_image`` and ``describe_text`` that a re-ranker reads: its ``requires``."""
    return tuple(_load(parse_reranker(text).name).requires)


def make_reranker(text: str, backbone: BackboneInfo) -> Reranks:
    """Build a re-ranker.

    Args:
        text: its name, with options or without.
        backbone: sizes of the model.

    Raises:
        CoderError: an unknown name or option; a value of the wrong type; a model that it cannot work with.

    Example:
        >>> from coder_plugin.heads.base import BackboneInfo
        >>> make_reranker("maxsim", BackboneInfo(embed_dim=8, image_contexts=8, text_contexts=8)).direction
        'text'
    """
    item = parse_reranker(text)
    target = _load(item.name)
    try:
        options = dict(check_types("rerankers", item.name, item.options))
        if missing := [option for option in required_options("rerankers", item.name) if option not in options]:
            raise ValueError(f"missing required option {', '.join(f'{option}=…' for option in missing)}")
        return target(backbone, **options).eval()
    except (CoderError, ValueError) as error:
        raise CoderError(f"{_FLAG} {text}: {error}") from error


def _load(name: str) -> Any:
    from coder_plugin.heads.capabilities import Reranks

    target = registry.load("rerankers", name)
    if not (isinstance(target, type) and issubclass(target, Reranks)):
        raise CoderError(f"{_FLAG} {name!r}: {target!r} is not a subclass of coder_plugin.heads.capabilities.Reranks")
    return target
