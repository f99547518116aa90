"""What names the parts of a generator: ``join+truncate(shortest=0.3,words=4)``, for positives and for noise alike.

Grammar, one line::

    expression = part { "+" part }
    part       = name [ "(" [ option { "," option } ] ")" ]
    option     = key "=" value         number, true, false, none, word or 'quoted text', as in an objective
"""

from __future__ import annotations

import re
from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.objective import check_types, parse_value, required_options

_PART = re.compile(
    r"""\s*(?P<name>[A-Za-z_]\w*(?:[./-]\w+)*)\s*
        (?:\((?P<options>(?:'[^']*'|"[^"]*"|[^'"()])*)\)\s*)?
        (?P<end>\+|$)""",
    re.VERBOSE,
)
_OPTION = re.compile(r"""\s*(?P<key>[A-Za-z_]\w*)\s*=\s*(?P<value>'[^']*'|"[^"]*"|[^\s'",=]+)\s*(?P<end>,|$)""")


def split_expression(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names of an expression with their options, in its order; whether anybody knows them is not looked at.

    Raises:
        CoderError: not of this grammar, or an option given twice: with the column, counted from 1.
    """
    parts: list[tuple[str, dict[str, Any]]] = []
    at, more = 0, True
    while more:
        match = _PART.match(text, at)
        if not match:
            raise _fault(text, at, "expected NAME or NAME(option=value,…), several of them joined with '+'")
        start = match.start("options")
        parts.append((match["name"], _options(text, match["options"] or "", start)))
        at, more = match.end(), match["end"] == "+"
    return parts


def make_parts(group: str, text: str) -> list[tuple[str, Any]]:
    """Each name of an expression, and what its plugin of the entry-point group makes of the options.

    Raises:
        CoderError: not of the grammar; a name or an option that is not known, with those that are; an option of another
            type, or one that the plugin turns down.
    """
    made = []
    for name, given in split_expression(text):
        options = dict(check_types(group, name, given))
        if missing := [option for option in required_options(group, name) if option not in options]:
            raise CoderError(f"{name!r} must be given {', '.join(f'{option}=…' for option in missing)}")
        try:
            made.append((name, registry.load(group, name)(**options)))
        except ValueError as error:
            raise CoderError(f"{name!r}: {error}") from error
    return made


def _options(text: str, inside: str, start: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    at, more = 0, bool(inside.strip())
    while more:
        match = _OPTION.match(inside, at)
        if not match:
            raise _fault(text, start + at, "expected option=value, several of them separated by ','")
        if match["key"] in options:
            raise _fault(text, start + match.start("key"), f"option {match['key']!r} is given twice")
        options[match["key"]] = parse_value(match["value"])
        at, more = match.end(), match["end"] == ","
    return options


def _fault(text: str, at: int, message: str) -> CoderError:
    column = at + len(text[at:]) - len(text[at:].lstrip()) + 1
    return CoderError(re.sub(r"\s", " ", f'expression "{text}", column {column}: {message}'))
