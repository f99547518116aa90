"""The grammar of loss expressions and of generator expressions.

One line::

    expression = item { "+" item }
    item       = [ number "*" ] name [ "@" name ] [ "(" [ option { "," option } ] ")" ]
    option     = key "=" value            number, true, false, none, word or 'quoted text'

A name may hold dots, dashes and slashes (``coder-clip``, ``coder/table2-1``), which Python's grammar reads as operators.
Each word, number and quoted text is therefore replaced by a placeholder of the same length before :mod:`ast` reads the
expression, so columns stay what they were. What may follow what is checked beforehand, because Python's own messages and
columns differ between its versions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coder_plugin.errors import CoderError

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
            |(?P<name>[A-Za-z_]\w*(?:[./-]\w+)*)
            |'(?P<single>[^']*)'|"(?P<double>[^"]*)"
            |(?P<mark>[*@()=,+]))""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}

#: For each state of an expression, what is expected next, and the state that each token or kind of token leads to.
_STATES: dict[str, tuple[str, dict[str, str]]] = {
    "item": ("{item}", {"number": "weight", "name": "name"}),
    "weight": ("'*' after the weight", {"*": "weighted"}),
    "weighted": ("{item}", {"name": "name"}),
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
    start: int
    #: Counted from 1; of a quoted text, that of its first character inside the quotes.
    column: int
    length: int


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
        draft = cls(text, kind)
        tokens = list(draft._scan())
        draft._check(tokens, item)
        source = [" "] * len(text)
        for token in tokens[:-1]:
            placeholder = {"mark": token.text, "number": "0" * token.length}.get(token.kind, "x" * token.length)
            source[token.start : token.start + token.length] = placeholder
        by_start = {token.start: token for token in tokens}
        body = ast.parse("".join(source).strip(), mode="eval").body
        indent = len(text) - len("".join(source).lstrip())
        return cls(text, kind, tuple(draft._item(node, by_start, indent) for node in _summands(body)))

    def error(self, column: int, message: str) -> CoderError:
        """One line that quotes the expression and names the column."""
        return CoderError(re.sub(r"\s", " ", f'{self.kind} "{self.text}", column {column}: {message}'))

    def _scan(self) -> Iterator[_Token]:
        position, previous = 0, ""
        while self.text[position:].strip():
            match = _TOKEN.match(self.text, position)
            if not match:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip()) + 1
                raise self.error(column, f"unexpected {self.text[column - 1]!r}")
            kind = match.lastgroup or ""
            start, text, position = match.start(kind), match[kind], match.end()
            if kind == "number" and text[0] == "+" and previous in ("name", "text", "number", ")"):
                kind, text, position = "mark", "+", start + 1  # "a +2*b": the plus stands between two items
            column, length = start + 1, len(text)
            if kind in ("single", "double"):
                kind, start, length = "text", start - 1, length + 2
            previous = text if kind == "mark" else kind
            yield _Token(kind, text, start, column, length)
        yield _Token("end", "end of the expression", len(self.text), len(self.text) + 1, 0)

    def _check(self, tokens: list[_Token], item: str) -> None:
        state, previous = "item", ""
        for token in tokens:
            expected, following = _STATES[state]
            key = token.text if token.kind == "mark" else token.kind
            if key not in following:
                expected = expected.format(item=item, previous=previous)
                if token.kind == "end":  # "'=' after 'mu'" names what is before it already
                    after = f" after {previous!r}" if previous else ""
                    raise self.error(token.column, f"{expected.removesuffix(after)} is missing{after}")
                raise self.error(token.column, f"expected {expected}, found {token.text!r}")
            state, previous = following[key], token.text

    def _item(self, node: ast.expr, by_start: dict[int, _Token], indent: int) -> Item:
        def token_of(node: ast.expr | ast.keyword) -> _Token:
            return by_start[node.col_offset + indent]

        weight: ast.expr | None = None
        source: ast.expr | None = None
        call: ast.Call | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):  # (weight * name) @ source(…)
            source, node = node.right, node.left
            if isinstance(source, ast.Call):
                call, source = source, source.func
        if isinstance(node, ast.BinOp):
            weight, node = node.left, node.right
        if isinstance(node, ast.Call):
            call, node = node, node.func
        places = {"weight": weight, "name": node, "source": source}
        tokens = {place: token_of(part) for place, part in places.items() if part is not None}
        columns = {place: token.column for place, token in tokens.items()}
        options: dict[str, Any] = {}
        for keyword in call.keywords if call else ():
            key, value = token_of(keyword), token_of(keyword.value)
            if key.text in options:
                raise self.error(key.column, f"option {key.text!r} is given twice")
            columns[f"option {key.text}"] = key.column
            options[key.text] = value.text if value.kind == "text" else parse_value(value.text)
        return Item(
            name=tokens["name"].text,
            weight=tokens["weight"].text if weight else None,
            source=tokens["source"].text if source else None,
            options=options,
            columns=columns,
        )


def _summands(node: ast.expr) -> list[ast.expr]:
    summands: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        summands.append(node.right)
        node = node.left
    return [node, *reversed(summands)]


def parse_value(text: str) -> Any:
    """One option value as the grammar reads it: a number, true, false, none, or text.

    Example:
        >>> parse_value("0.05"), parse_value("true"), parse_value("fusion"), parse_value("'12'")
        (0.05, True, 'fusion', '12')
    """
    text = text.strip()
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
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
