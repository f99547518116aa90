"""The objective: which loss terms, with which weights and options, from an expression or from objects.

The grammar is in :mod:`coder_plugin.expression`. A name in an expression is a loss term, or a named objective
(:mod:`coder_plugin.recipes`), whose terms take its place with their weights multiplied. ``term@head`` compares that head's
features instead of the backbone's. The option ``head=`` of any term names the head that provides what the term requires,
where several could.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coder_plugin import recipes, registry
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.expression import Expression, Item, format_value
from coder_plugin.locations import check_local_loss
from coder_plugin.options import check_options, check_types, required_options

#: What the field calls our losses, in lower case without "-", "_" and a final "loss".
_IN_THE_FIELD = {
    **dict.fromkeys(("infonce", "nce", "ntxent", "contrastive"), "'clip' (InfoNCE)"),
    "sigmoid": "'siglip'",
    "hinge": "'triplet'",
}


@dataclass(frozen=True)
class TermSpec:
    """One term of an objective: ``weight * name@source(options)``.

    Args:
        name: of the term, or ``PATH.py:NAME``, a class in a file.
        source: the head whose features the term compares, or None: the backbone's.
        head: the head that provides what the term requires, where several could.
        term: the term itself where it was passed as an object, not by name.
    """

    name: str
    weight: float = 1.0
    source: str | None = None
    head: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    term: Any = None

    def __str__(self) -> str:
        options = [*self.options, *([("head", self.head)] if self.head else [])]
        text = self.name + (f"@{self.source}" if self.source else "")
        text += f"({','.join(f'{k}={format_value(v)}' for k, v in options)})" if options else ""
        return text if self.weight == 1 else f"{_format_weight(self.weight)}*{text}"

    @property
    def is_passed(self) -> bool:
        """Whether a checkpoint cannot hold the term: it is an object, or in a Python file, which opening must not run."""
        return self.term is not None or registry.class_in_file(self.name) is not None

    @property
    def short_name(self) -> str:
        """The name, of ``PATH.py:NAME`` that of an object of the class."""
        cls = registry.class_in_file(self.name)
        return self.name if cls is None else _snake_case(cls)

    def build(self) -> Any:
        """The term: the object that was passed, or a new one of the registered class. A plain module is made a term.

        Raises:
            CoderError: the keys are not tuples, or the term does not take them.
        """
        from coder_plugin.losses.base import ModuleTerm, Term

        term = self.term if self.term is not None else registry.load("losses", self.name)(**dict(self.options))
        check_keys(term, f"loss {self.name!r}", "requires", "optional")
        function = term.compute if isinstance(term, Term) and type(term).compute is not Term.compute else term
        check_takes_keys(function, term, f"loss {self.name!r}")
        return term if isinstance(term, Term) else ModuleTerm(term)


@dataclass(frozen=True)
class UnavailableTerm:
    """Stands for an object or a class in a file, where a saved objective is read without it: for inference.

    Args:
        class_name: ``MODULE:CLASS`` of the object, or ``PATH.py:NAME``.
        requires, optional: the keys that the term reads.
    """

    class_name: str
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __call__(self, **outputs: Any) -> Any:
        raise CoderError(f"this model was opened without its term {self.class_name}, so its loss cannot be computed")


@dataclass(frozen=True)
class Objective:
    """Every option of every term and head. Trainers read it, checkpoints keep it and ``--dry-run`` prints it.

    Args:
        heads: options of heads, by the head's name.
        local_loss: each rank compares only its own anchors with the candidates of all ranks (open_clip's flag).
    """

    terms: tuple[TermSpec, ...]
    heads: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    local_loss: bool = False

    @classmethod
    def parse(cls, loss: Any, *, heads: Collection[str] = ()) -> Objective:
        """Read a loss.

        Args:
            loss: an expression, an :class:`Objective`, a term object (an ``nn.Module`` that names the keys it reads in
                ``requires``), or a list of these. ``(weight, loss)`` weighs any of them.
            heads: names of heads that are not registered, which ``term@head`` may name too.

        Raises:
            CoderError: an unknown name or option, a value of the wrong type; an expression's error names the column.

        Example:
            >>> objective = Objective.parse("3*dcl(mu=0.05) + clip")
            >>> [(term.weight, term.name) for term in objective.terms]
            [(3.0, 'dcl'), (1.0, 'clip')]
            >>> print(objective.with_options({"dcl.gamma": 0.2}))
            3*dcl(mu=0.05,gamma=0.2) + clip
        """
        if isinstance(loss, Objective):
            return loss
        if isinstance(loss, str):
            return _parse_expression(loss, heads, ())
        if isinstance(loss, tuple) and len(loss) == 2 and _is_weight(loss[0]):
            if not isinstance(loss[0], numbers.Real) or isinstance(loss[0], bool):
                raise CoderError(f"a weight must be a plain number, as in (0.5, term), got {loss[0]!r}")
            if not (float(loss[0]) > 0 and math.isfinite(loss[0])):
                raise CoderError(f"a weight must be > 0, got {loss[0]!r}; leave the term out instead")
            return cls.parse(loss[1], heads=heads).scaled(float(loss[0]))
        if isinstance(loss, Sequence):
            if not loss:
                raise CoderError("the loss is an empty list: it needs at least one term")
            return _sum([cls.parse(each, heads=heads) for each in loss])
        return cls((_spec_of_object(loss),))

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    def labels(self) -> list[str]:
        """A unique name for each term's loss: ``dcl``, ``dcl_concepts``, and ``dcl_2`` for a repeated one."""
        labels: list[str] = []
        for term in self.terms:
            base = re.sub(r"\W", "_", term.short_name + (f"_{term.source}" if term.source else ""))
            numbered = (f"{base}_{number}" for number in itertools.count(2))
            labels.append(next(label for label in itertools.chain([base], numbered) if label not in labels))
        return labels

    def scaled(self, factor: float) -> Objective:
        """The objective with every weight multiplied."""
        return replace(self, terms=tuple(replace(term, weight=term.weight * factor) for term in self.terms))

    def with_options(self, settings: Mapping[str, Any]) -> Objective:
        """Set options by ``"term.option"`` or ``"head.option"``, as the flag ``--set dcl.mu=0.07`` does.

        Raises:
            CoderError: no such term, head or option, or a value that the option refuses.
        """
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
        named = [term for term in self.terms if term.name == owner]
        if any(term.term is not None for term in named):
            raise CoderError(f"the term {owner!r} was passed as an object: set its options when you build it")
        if named:
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
        owners = sorted({term.name for term in self.terms} | set(registry.names("heads")))
        which = ", ".join(f"{owner}.{option}" for option in options)
        raise CoderError(f"option {which!r}: the loss has no term and no head {owner!r}; known: {', '.join(owners)}")

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold; :meth:`from_dict` reads it. Of an object, or of a class in a Python file, it holds the
        class's name and the keys."""
        terms = [_term_to_dict(term) for term in self.terms]
        heads = {name: dict(options) for name, options in self.heads}
        return json.loads(json.dumps({"terms": terms, "heads": heads, "local_loss": self.local_loss}))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, objects: Sequence[TermSpec] = (), inference: bool = False
    ) -> Objective:
        """Read what :meth:`to_dict` wrote. No Python file that it names is run.

        Args:
            data: the saved form.
            objects: this run's terms that are objects or in Python files. They stand for the saved terms of the same
                names, in order.
            inference: the terms will not be computed, so an :class:`UnavailableTerm` may stand for such a term.

        Raises:
            CoderError: a plugin that no longer exists, an option that it refuses, or a saved term that was an object or in
                a Python file and is not among ``objects``.
        """
        heads = tuple((name, check_options("heads", name, options)) for name, options in sorted(data["heads"].items()))
        remaining = list(objects)
        terms = tuple(_term_from_dict(fields, remaining, inference) for fields in data["terms"])
        return cls(terms, heads, bool(data.get("local_loss", False)))


def object_name(value: Any) -> str:
    """The name of a term or head that was passed as an object: its class's, in lower case with underscores.

    Example:
        >>> class SpreadLoss: ...
        >>> object_name(SpreadLoss)
        'spread_loss'
    """
    return _snake_case((value if isinstance(value, type) else type(value)).__name__)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def check_keys(value: Any, who: str, *attributes: str) -> Any:
    """The class or object, if what it declares are tuples of keys: the easiest slip is ``("key")`` for ``("key",)``."""
    for attribute in attributes:
        keys = getattr(value, attribute, () if attribute == "optional" else None)
        if not (isinstance(keys, (tuple, list)) and all(isinstance(key, str) for key in keys)):
            comma = f": write ({keys!r},), with a comma" if isinstance(keys, str) else ""
            raise CoderError(f"{who}: {attribute!r} must be a tuple of keys, got {keys!r}{comma}")
    return value


def check_takes_keys(function: Any, reader: Any, who: str) -> None:
    """Raise :class:`CoderError` unless a function, or a module's ``forward``, takes the keys of a term or head as keywords,
    with and without the optional ones."""
    function = getattr(function, "forward", function)
    signature, optional = inspect.signature(function), tuple(getattr(reader, "optional", ()))
    try:
        for keys in (reader.requires, (*reader.requires, *optional)):
            signature.bind(**dict.fromkeys(keys))
    except TypeError as error:
        takes = f"{getattr(function, '__name__', 'it')} takes ({', '.join(signature.parameters)})"
        keys = f"requires {', '.join(reader.requires) or 'no key'}" + (optional and f", optional {', '.join(optional)}" or "")
        raise CoderError(f"{who}: {takes}, but the class says: {keys} ({error})") from error


def _spec_of_object(term: Any) -> TermSpec:
    if isinstance(term, type):
        raise CoderError(f"{term.__name__} is a class: pass an instance, {term.__name__}(…)")
    if not (callable(term) and hasattr(term, "requires")):
        raise CoderError(
            f"{term!r} is not a loss: pass an expression, or an nn.Module that names the keys it reads in 'requires', such "
            "as requires = ('image_features', 'text_features')"
        )
    return TermSpec(object_name(term), term=term)


def check_names(text: str) -> Expression:
    """The parsed expression of a loss; its names are looked up, but no term is imported and no option is checked.

    Raises:
        CoderError: not of the grammar, or a name that neither a loss nor an objective nor a recipe has; names the column.

    Example:
        >>> len(check_names("3*dcl + clip").items)
        2
    """
    check_local_loss(text)
    expression = Expression.parse(text, kind="loss", item="a loss or an objective")
    groups = registry.names("losses"), recipes.objectives(), recipes.names()
    for item in expression.items:
        if not (registry.is_loss(item.name) or any(item.name in names for names in groups)):
            hint, known = did_you_mean(item.name, *groups), ", ".join([*groups[0], *groups[1]])
            if meant := _IN_THE_FIELD.get(re.sub("[-_]|loss$", "", item.name.lower())):
                hint = f"; did you mean {meant}?"
            message = (
                f"unknown loss or objective {item.name!r}{hint} (known: {known}; a class in a file is PATH.py:NAME; one "
                "that Python code registers is known in that process, one of an entry point everywhere: docs/plugins.md)"
            )
            raise expression.error(item.columns["name"], message)
    return expression


def _parse_expression(text: str, heads: Collection[str], parents: tuple[str, ...]) -> Objective:
    """Read an expression; ``parents`` are the named objectives that it is part of."""
    expression = check_names(text)
    objectives = [_parse_item(expression, item, heads, parents) for item in expression.items]
    try:
        return _sum(objectives)
    except CoderError as error:
        raise expression.error(1, str(error)) from error


def _parse_item(expression: Expression, item: Item, heads: Collection[str], parents: tuple[str, ...]) -> Objective:
    weight = 1.0 if item.weight is None else float(item.weight)
    if not (weight > 0 and math.isfinite(weight)):
        message = f"a weight must be > 0, got {item.weight}; leave the term out instead"
        raise expression.error(item.columns["weight"], message)
    if registry.is_loss(item.name):
        return Objective((_parse_term(expression, item, weight, heads),))
    column = item.columns["name"]
    try:
        named = recipes.find_objective(item.name)
    except CoderError as error:
        raise expression.error(column, str(error)) from error
    if named is not None:
        if item.source or item.options:
            after = column + len(item.name)
            after += len(expression.text[after - 1 :]) - len(expression.text[after - 1 :].lstrip())
            raise expression.error(after, f"{item.name!r} is an objective: set options with --set TERM.OPTION=…")
        if item.name in parents:
            raise expression.error(column, f"objectives contain each other: {' -> '.join([*parents, item.name])}")
        try:
            objective = _parse_expression(named.loss, heads, (*parents, item.name))
            return objective.with_options(named.options).scaled(weight)
        except CoderError as error:
            raise expression.error(column, f"the objective {item.name!r}: {error}") from error
    raise expression.error(column, _is_recipe(item.name))


def _is_recipe(name: str) -> str:
    recipe = recipes.load(name)
    objective = Objective.parse(recipe.loss).with_options(recipe.options)
    settings = [f"{owner}.{option}={format_value(value)}" for owner, pairs in objective.heads for option, value in pairs]
    options = f" with --set {' '.join(settings)}" if settings else ""
    return f'{name!r} is a recipe, a whole set-up: use --recipe {name}. Its loss is "{objective}"{options}'


def _parse_term(expression: Expression, item: Item, weight: float, heads: Collection[str]) -> TermSpec:
    options, columns = dict(item.options), item.columns
    try:
        registry.load("losses", item.name)
    except CoderError as error:
        raise expression.error(columns["name"], str(error)) from error
    known_heads = [*registry.names("heads"), *heads]
    head = options.pop("head", None)
    for name, place in ((item.source, "source"), (head, "option head")):
        if name is not None and name not in known_heads:
            hint = did_you_mean(name, known_heads) if isinstance(name, str) else ""
            raise expression.error(columns[place], f"unknown head {name!r} (known: {', '.join(known_heads)}){hint}")
    for option, value in options.items():  # one at a time, so that an error knows its column
        try:
            check_types("losses", item.name, {option: value})
        except CoderError as error:
            raise expression.error(columns[f"option {option}"], str(error)) from error
    try:
        checked = check_options("losses", item.name, options)
    except CoderError as error:
        raise expression.error(_refused_column(item, options), str(error)) from error
    return TermSpec(item.name, weight, item.source, head, checked)


def _refused_column(item: Item, options: Mapping[str, Any]) -> int:
    """The column of the first option that the term refuses together with those before it."""
    required = required_options("losses", item.name)
    subset: dict[str, Any] = {}
    for option in sorted(options, key=lambda option: option not in required):
        subset[option] = options[option]
        if subset.keys() >= set(required):
            try:
                check_options("losses", item.name, subset)
            except CoderError:
                return item.columns[f"option {option}"]
    return item.columns["name"]


def _sum(objectives: Sequence[Objective]) -> Objective:
    heads: dict[str, tuple[tuple[str, Any], ...]] = {}
    for objective in objectives:
        for name, options in objective.heads:
            if heads.setdefault(name, options) != options:
                raise CoderError(f"two objectives set the head {name!r} differently; use --set to choose")
    if len(objectives) == 1:
        return objectives[0]
    terms = tuple(term for objective in objectives for term in objective.terms)
    return Objective(terms, tuple(sorted(heads.items())), any(objective.local_loss for objective in objectives))


def _term_to_dict(term: TermSpec) -> dict[str, Any]:
    fields = {"name": term.name, "weight": term.weight, "source": term.source, "head": term.head}
    fields["options"] = dict(term.options)
    if term.is_passed:
        passed = term.build() if term.term is None else term.term
        cls = type(passed)
        name = term.name if term.term is None else f"{cls.__module__}:{cls.__qualname__}"
        fields["class"] = passed.class_name if isinstance(passed, UnavailableTerm) else name
        fields["requires"], fields["optional"] = list(passed.requires), list(getattr(passed, "optional", ()))
    return fields


def _term_from_dict(fields: Mapping[str, Any], objects: list[TermSpec], inference: bool) -> TermSpec:
    """Read a saved term. One that was an object or in a file is the first of ``objects`` with its name."""
    name, weight, options = fields["name"], float(fields["weight"]), fields["options"]
    if "class" in fields or registry.class_in_file(name) is not None:
        short_name = TermSpec(name).short_name
        for index, spec in enumerate(objects):
            if spec.short_name == short_name:
                del objects[index]
                options = () if spec.term is not None else check_options("losses", spec.name, options)
                return replace(spec, weight=weight, source=fields["source"], head=fields["head"], options=options)
        if inference:
            return _unavailable(fields)
        cls = fields.get("class", name)
        raise CoderError(f"the term {name!r} was an object of {cls}, which a checkpoint cannot hold: pass the object again")
    return TermSpec(name, weight, fields["source"], fields["head"], check_options("losses", name, options))


def _is_weight(value: Any) -> bool:
    """Whether the first of two values is meant as a weight: it is not a loss of any form."""
    return not isinstance(value, (str, Sequence, Objective)) and not hasattr(value, "requires")


def _unavailable(fields: Mapping[str, Any]) -> TermSpec:
    """A saved term without its object. The keys of heads are left out: a head may have been an object too."""

    keys = (tuple(key for key in fields.get(which, ()) if not key.startswith("coder_")) for which in ("requires", "optional"))
    term = UnavailableTerm(fields.get("class", fields["name"]), *keys)
    return TermSpec(fields["name"], float(fields["weight"]), options=tuple(fields["options"].items()), term=term)


def _format_weight(value: float) -> str:
    """The short form where it is the same number."""
    short = f"{value:.12g}"
    return short if float(short) == value else repr(value)
