"""The grammar of loss expressions and of generator expressions.

One line::

    expression = item { "+" item }
    item       = [ number "*" ] name [ "@" name ] [ "(" [ option { "," option } ] ")" ]
    option     = key "=" value            number, true, false, none, word or 'quoted text'

An expression has at most :data:`MOST_ITEMS` items. A name may hold single dots, dashes and slashes (``coder-clip``,
``coder/table2-1``). The name of an item may also be a class in a file, ``PATH.py:NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coder_plugin.errors import CoderError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<file>[\w.~/][\w.~/-]*\.py:[A-Za-z_]\w*)
            |(?P<number>{_NUMBER})(?![\w.])
            |(?P<name>[A-Za-z_]\w*(?:[./-]\w+)*)
            |'(?P<single>[^']*)'|"(?P<double>[^"]*)"
            |(?P<mark>[*@()=,+]))""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}
#: Most items of an expression.
MOST_ITEMS = 100
_NO_MINUS = "'-' is not possible: the items are added, and each weight must be > 0"

#: For each state of an expression, what is expected next, and the state that each token or kind of token leads to.
_STATES: dict[str, tuple[str, dict[str, str]]] = {
    "item": ("{item}", {"number": "weight", "name": "name", "file": "name"}),
    "weight": ("'*' after the weight", {"*": "weighted"}),
    "weighted": ("{item}", {"name": "name", "file": "name"}),
    "name": ("'+'", {"@": "at", "(": "opened", "+": "item", "end": "end"}),
    "at": ("a head after '@'", {"name": "source"}),
    "source": ("'+'", {"(": "opened", "+": "item", "end": "end"}),
    "opened": ("an option", {"name": "key", ")": "closed"}),
    "key": ("'=' after {previous!r}", {"=": "equals"}),
    "equals": ("a value", {"number": "value", "name": "value", "text": "value"}),
    "value": ("',' or ')'", {",": "comma", ")": "closed"}),
    "comma": ("an option", {"name": "key"}),
    "closed": ("'+'", {"+": "item", "end": "end"}),
}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    #: Counted from 1; of a quoted text, that of its first character inside the quotes.
    column: int


@dataclass(frozen=True)
class Item:
    """One item of an expression: ``weight * name@source(options)``.

    Args:
        weight: its number as it was written, or None.
        columns: where ``"weight"``, ``"name"``, ``"source"`` and each option (``"option mu"``) were written, from 1.
    """

    name: str
    weight: str | None = None
    source: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Args:
        kind: how messages call the expression, such as ``loss``.

    Example:
        >>> [(item.weight, item.name, item.options) for item in Expression.parse("3*dcl(mu=0.05) + coder-clip").items]
        [('3', 'dcl', {'mu': 0.05}), (None, 'coder-clip', {})]
    """

    text: str
    kind: str = "expression"
    items: tuple[Item, ...] = ()

    @classmethod
    def parse(cls, text: str, *, kind: str = "expression", item: str = "a name") -> Expression:
        """Read an expression.

        Args:
            item: how messages call what an item names, such as "a loss or an objective".

        Raises:
            CoderError: not of the grammar, or an option given twice; names the column, counted from 1.
        """
        return cls(text, kind, tuple(cls(text, kind)._read(item)))

    def error(self, column: int, message: str) -> CoderError:
        """One line that quotes the expression, of a long one the beginning, and names the column."""
        text = self.text if len(self.text) <= 300 else f"{self.text[:300]}…"
        return CoderError(re.sub(r"\s", " ", f'{self.kind} "{text}", column {column}: {message}'))

    def _scan(self) -> Iterator[_Token]:
        position, previous = 0, ""
        while self.text[position:].strip():
            match = _TOKEN.match(self.text, position)
            if not match:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip()) + 1
                character = self.text[column - 1]
                raise self.error(column, _NO_MINUS if character == "-" else f"unexpected {character!r}")
            kind = match.lastgroup or ""
            start, text, position = match.start(kind), match[kind], match.end()
            if kind == "number" and text[0] == "+" and previous in ("name", "file", "text", "number", ")"):
                kind, text, position = "mark", "+", start + 1  # "a +2*b": the plus stands between two items
            kind = "text" if kind in ("single", "double") else kind
            previous = text if kind == "mark" else kind
            yield _Token(kind, text, start + 1)
        yield _Token("end", "end of the expression", len(self.text) + 1)

    def _read(self, item: str) -> Iterator[Item]:
        state, previous, key = "item", "", ""
        parts: dict[str, str] = {}
        options: dict[str, Any] = {}
        columns: dict[str, int] = {}
        items = 0
        for token in self._scan():
            state = self._next_state(state, token, previous, item)
            previous = token.text
            if state in ("weight", "name", "source"):
                parts[state], columns[state] = token.text, token.column
            elif state == "key":
                key = token.text
                if key in options:
                    raise self.error(token.column, f"option {key!r} is given twice")
                columns[f"option {key}"] = token.column
            elif state == "value":
                options[key] = token.text if token.kind == "text" else parse_value(token.text)
            elif state in ("item", "end"):
                items += 1
                if state == "item" and items == MOST_ITEMS:
                    raise self.error(token.column, f"an expression may have at most {MOST_ITEMS} items")
                yield Item(**parts, options=options, columns=columns)
                parts, options, columns = {}, {}, {}

    def _next_state(self, state: str, token: _Token, previous: str, item: str) -> str:
        expected, following = _STATES[state]
        key = token.text if token.kind == "mark" else token.kind
        if key in following:
            return following[key]
        expected = expected.format(item=item, previous=previous)
        if token.kind == "end":  # "'=' after 'mu'" names what is before it already
            after = f" after {previous!r}" if previous else ""
            raise self.error(token.column, f"{expected.removesuffix(after)} is missing{after}")
        minus = "+" in following and token.text.startswith("-")
        raise self.error(token.column, _NO_MINUS if minus else f"expected {expected}, found {token.text!r}")


def parse_value(text: str) -> Any:
    """One option value as the grammar reads it: a number, true, false, none, or text.

    Example:
        >>> parse_value("0.05"), parse_value("true"), parse_value("fusion"), parse_value("'12'"), parse_value("nan")
        (0.05, True, 'fusion', '12', 'nan')
    """
    text = text.strip()
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if re.fullmatch(_NUMBER, text):
        try:
            return int(text)
        except ValueError:
            return float(text)
    return text.strip("'\"")


def format_value(value: Any) -> str:
    """A value as the grammar writes it; the inverse of :func:`parse_value`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_]\w*(?:[./-]\w+)*", value) and parse_value(value) == value:
            return value
        return f'"{value}"' if "'" in value else f"'{value}'"
    return repr(value)
