"""The loss expression: which terms, with which weights and options.

Grammar, one line::

    objective  = item { "+" item }
    item    = [ number "*" ] name [ "@" head ] [ "(" [ option { "," option } ] ")" ]
    option  = key "=" value            number, true, false, none, word or 'quoted text'

A name is a loss term, or an objective of the group ``coder_plugin.recipes``, which is put in its place with its weights
multiplied. ``term@head`` reads that head's features instead of the backbone's; the option ``head=`` of any term names
which head provides what it requires, where several could.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
            |(?P<name>[A-Za-z_]\w*(?:[./-]\w+)*)
            |'(?P<single>[^']*)'|"(?P<double>[^"]*)"
            |(?P<mark>[*@()=,+]))""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class TermSpec:
    """One term of an objective: ``weight * name@source(options)``."""

    name: str
    weight: float = 1.0
    source: str | None = None
    head: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = [*self.options, *([("head", self.head)] if self.head else [])]
        text = self.name + (f"@{self.source}" if self.source else "")
        text += f"({','.join(f'{k}={_format(v)}' for k, v in options)})" if options else ""
        return text if self.weight == 1 else f"{_weight(self.weight)}*{text}"


@dataclass(frozen=True)
class Objective:
    """Every option of every term and head: what both trainers read, checkpoints keep and ``--dry-run`` prints (rule 8).

    ``heads`` holds options by head name, ``local_loss`` is open_clip's flag of that name. ``training`` holds a named
    objective's defaults for training options, over which flags win.
    """

    terms: tuple[TermSpec, ...]
    heads: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    local_loss: bool = False
    training: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str | Objective) -> Objective:
        """Read an expression, checking every name and option; :class:`CoderError` names the offending column."""
        if isinstance(text, Objective):
            return text
        return _Parser(text).objective()

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    def labels(self) -> list[str]:
        """A name for each term's loss, unique: ``dcl``, ``dcl_concepts``, and ``dcl_2`` for a repeated one."""
        labels: list[str] = []
        for term in self.terms:
            base = re.sub(r"\W", "_", term.name + (f"_{term.source}" if term.source else ""))
            numbered = (f"{base}_{number}" for number in itertools.count(2))
            labels.append(next(label for label in itertools.chain([base], numbered) if label not in labels))
        return labels

    def scaled(self, factor: float) -> Objective:
        return replace(self, terms=tuple(replace(term, weight=term.weight * factor) for term in self.terms))

    def with_options(self, settings: Mapping[str, Any]) -> Objective:
        """Set options by ``"term.option"`` or ``"head.option"``: what the flag ``--set dcl.mu=0.07`` does."""
        owners: dict[str, dict[str, Any]] = {}
        for path, value in settings.items():
            owner, dot, option = path.rpartition(".")
            if not dot:
                raise CoderError(f"option {path!r}: write OWNER.OPTION=VALUE, such as dcl.mu=0.07")
            owners.setdefault(owner, {})[option] = value
        objective = self
        for owner, options in owners.items():
            objective = objective._with_options_of(owner, options)
        return objective

    def _with_options_of(self, owner: str, options: Mapping[str, Any]) -> Objective:
        if any(term.name == owner for term in self.terms):
            terms = tuple(
                replace(term, options=check_options("losses", owner, {**dict(term.options), **options}))
                if term.name == owner
                else term
                for term in self.terms
            )
            return replace(self, terms=terms)
        if owner in registry.names("heads"):
            heads = dict(self.heads)
            heads[owner] = check_options("heads", owner, {**dict(heads.get(owner, ())), **options})
            return replace(self, heads=tuple(sorted(heads.items())))
        known = sorted({term.name for term in self.terms} | set(registry.names("heads")))
        which = ", ".join(f"{owner}.{option}" for option in options)
        raise CoderError(f"option {which!r}: the objective has no term and no head {owner!r}; known: {', '.join(known)}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; :meth:`from_dict` reads it."""
        data = asdict(self)
        data["terms"] = [{**term, "options": dict(term["options"])} for term in data["terms"]]
        data["heads"] = {name: dict(options) for name, options in self.heads}
        data["training"] = dict(self.training)
        return json.loads(json.dumps(data))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Objective:
        terms = tuple(
            TermSpec(
                **{
                    **term,
                    "weight": float(term["weight"]),
                    "options": check_options("losses", term["name"], term["options"]),
                }
            )
            for term in data["terms"]
        )
        heads = tuple((name, check_options("heads", name, options)) for name, options in sorted(data["heads"].items()))
        training = tuple(data.get("training", {}).items())
        return cls(terms=terms, heads=heads, local_loss=bool(data.get("local_loss", False)), training=training)


def check_options(group: str, name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options of a term or head against its ``__init__``: known names, values of the annotated types, in order.

    A term is also made with them once, so that it can turn values down itself.
    """
    ordered = check_types(group, name, options)
    if group == "losses":
        missing = [option for option in required_options(group, name) if option not in dict(ordered)]
        if missing:
            raise CoderError(f"{name!r} must be given {', '.join(f'{option}=…' for option in missing)}")
        try:
            registry.load(group, name)(**dict(ordered))
        except ValueError as error:
            raise CoderError(f"{name!r}: {error}") from error
    return ordered


def check_types(group: str, name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The part of :func:`check_options` that holds for each option by itself."""
    cls = registry.load(group, name)
    allowed = _keyword_only(cls)
    try:
        hints = typing.get_type_hints(cls.__init__)
    except NameError as error:  # an annotation imported for type checkers alone
        raise CoderError(f"{name!r} in {registry.PREFIX}{group}: its options' types cannot be read: {error}") from error
    checked = {}
    for option, value in options.items():
        if option not in allowed:
            raise CoderError(f"{name!r} has no option {option!r}; it has: {', '.join(allowed) or 'none'}")
        ok, checked[option] = _coerce(value, hints.get(option, Any))
        if not ok:
            raise CoderError(f"{name!r}: option {option}={_format(value)} must be {_wanted(hints[option])}")
    return tuple((option, checked[option]) for option in allowed if option in checked)


def required_options(group: str, name: str) -> list[str]:
    """Options without a default."""
    parameters = _keyword_only(registry.load(group, name)).values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _keyword_only(cls: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def _coerce(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether a value fits an annotation, and the value in its type (an int becomes a float where one is asked for)."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True, value
    if origin is typing.Literal:
        if value is None and "none" in typing.get_args(hint):
            return True, "none"  # the grammar reads that word before it knows what is asked for
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)), value
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            ok, coerced = _coerce(value, choice)
            if ok:
                return True, coerced
        return False, value
    if hint is float and type(value) is int:
        return True, float(value)
    if hint in (int, float, str, bool, type(None), None):
        return type(value) is (type(None) if hint is None else hint), value
    return True, value


def _wanted(hint: Any) -> str:
    """An annotation in the words of the grammar: ``float or mu``."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(_format, choices))
    if choices:
        return " or ".join(map(_wanted, choices))
    return "none" if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))


def _format(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_]\w*(?:[./-]\w+)*", value) and parse_value(value) == value:
            return value
        return f'"{value}"' if "'" in value else f"'{value}'"
    return repr(value)


def _weight(value: float) -> str:
    """The short form where it is the same number."""
    short = f"{value:.12g}"
    return short if float(short) == value else repr(value)


def parse_value(text: str) -> Any:
    """One option value as the grammar reads it: a number, true, false, none, or text."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text.strip("'\"")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


class _Parser:
    """Recursive descent over the tokens; every error carries its column, counted from 1."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._scan())
        self.at = 0

    def _scan(self) -> Iterator[_Token]:
        position = 0
        while self.text[position:].strip():
            match = _TOKEN.match(self.text, position)
            if not match:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip()) + 1
                raise self._error(column, f"unexpected {self.text[column - 1]!r}")
            kind = match.lastgroup or ""
            yield _Token(kind if kind not in ("single", "double") else "text", match[kind], match.start(kind) + 1)
            position = match.end()
        yield _Token("end", "end of the expression", len(self.text) + 1)

    def _error(self, column: int, message: str) -> CoderError:
        line = f'objective "{self.text}", column {column}: {message}'
        return CoderError(re.sub(r"\s", " ", line))  # one line, with the same columns

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self, kind: str, text: str | None = None, expected: str = "") -> _Token:
        token = self.next
        if token.kind != kind or (text is not None and token.text != text):
            raise self._error(token.column, f"expected {expected or text}, found {token.text!r}")
        self.at += 1
        return token

    def accept(self, mark: str) -> bool:
        if self.next.kind == "mark" and self.next.text == mark:
            self.at += 1
            return True
        return False

    def objective(self) -> Objective:
        recipes = [self.item()]
        while self.next.kind != "end":
            # "a +2*b" scans as the number +2: a sign there is the plus between items
            if self.next.kind == "number" and self.next.text.startswith("+"):
                self.tokens[self.at] = replace(self.next, text=self.next.text[1:], column=self.next.column + 1)
            else:
                self.take("mark", "+", "'+'")
            recipes.append(self.item())
        heads: dict[str, tuple[tuple[str, Any], ...]] = {}
        for objective in recipes:
            for name, options in objective.heads:
                if heads.setdefault(name, options) != options:
                    raise self._error(1, f"two recipes set the head {name!r} differently; use --set to choose")
        terms = tuple(term for objective in recipes for term in objective.terms)
        local_loss = any(objective.local_loss for objective in recipes)
        # of a sum nobody has said how it is trained
        training = recipes[0].training if len(recipes) == 1 else ()
        return Objective(terms, tuple(sorted(heads.items())), local_loss, training)

    def item(self) -> Objective:
        weight = 1.0
        if self.next.kind == "number":
            token = self.take("number")
            weight = float(token.text)
            if not (weight > 0 and math.isfinite(weight)):
                raise self._error(token.column, f"a weight must be > 0, got {token.text}; leave the term out instead")
            self.take("mark", "*", "'*' after the weight")
        name = self.take("name", expected="a loss or an objective")
        if name.text in registry.names("losses"):
            return Objective((self.term(name, weight),))
        if name.text in registry.names("recipes"):
            if self.next.text in ("@", "("):
                raise self._error(self.next.column, f"{name.text!r} is an objective: set options with --set TERM.OPTION=…")
            preset = registry.load("recipes", name.text)
            try:
                return Objective.parse(preset() if callable(preset) else preset).scaled(weight)
            except CoderError as error:
                raise self._error(name.column, f"the objective {name.text!r} is at fault: {error}") from error
        known = [*registry.names("losses"), *registry.names("recipes")]
        near = difflib.get_close_matches(name.text, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise self._error(
            name.column, f"unknown loss or objective {name.text!r}{hint} (known: {', '.join(known)})"
        )

    def term(self, name: _Token, weight: float) -> TermSpec:
        source = None
        if self.accept("@"):
            token = self.take("name", expected="a head after '@'")
            source = token.text
            if source not in registry.names("heads"):
                raise self._error(
                    token.column, f"unknown head {source!r} (known: {', '.join(registry.names('heads'))})"
                )
        options: dict[str, Any] = {}
        columns: dict[str, int] = {}
        if self.accept("("):
            while not self.accept(")"):
                if options:
                    self.take("mark", ",", "',' or ')'")
                key = self.take("name", expected="an option")
                self.take("mark", "=", f"'=' after {key.text!r}")
                if key.text in options:
                    raise self._error(key.column, f"option {key.text!r} is given twice")
                columns[key.text] = key.column
                options[key.text] = self.value()
        head = options.pop("head", None)
        if head is not None and head not in registry.names("heads"):
            raise self._error(
                columns["head"], f"unknown head {head!r} (known: {', '.join(registry.names('heads'))})"
            )
        for option, value in options.items():  # one at a time, so that an error knows its column
            try:
                check_types("losses", name.text, {option: value})
            except CoderError as error:
                raise self._error(columns[option], str(error)) from error
        try:
            checked = check_options("losses", name.text, options)
        except CoderError as error:
            raise self._error(self._blamed(name, options, columns), str(error)) from error
        return TermSpec(name.text, weight, source, head, checked)

    def _blamed(self, name: _Token, options: Mapping[str, Any], columns: Mapping[str, int]) -> int:
        """The column of the first option that the term turns down together with those before it."""
        needed = required_options("losses", name.text)
        given: dict[str, Any] = {}
        for option in sorted(options, key=lambda option: option not in needed):
            given[option] = options[option]
            if given.keys() >= set(needed):
                try:
                    check_options("losses", name.text, given)
                except CoderError:
                    return columns[option]
        return name.column

    def value(self) -> Any:
        token = self.next
        if token.kind not in ("number", "name", "text"):
            raise self._error(token.column, f"expected a value, found {token.text!r}")
        self.at += 1
        return token.text if token.kind == "text" else parse_value(token.text)
