"""From an objective to the heads it needs: terms and heads name the keys they require, heads the keys they provide."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.objective import Objective, TermSpec, check_keys

#: The inputs of a model's forward; heads may require them.
INPUTS = frozenset({"image", "text", "image_id", "text_positive", "text_tags", "text_negatives", "text_negative_ids"})
#: What backbones give their heads but do not return: last tokens, tokens before the context stage (locals) and after it
#: (contexts; of open_clip's towers both are projected to the joint space where the tower can project tokens), masks, pooled
#: features before normalisation, the regions' scores for each view of an image, and a feature of the whole image. Each
#: backbone gives a subset.
INTERMEDIATE_KEYS = frozenset(
    "image_tokens image_mask image_locals image_contexts image_context_mask image_pooled image_views image_global "
    "text_tokens text_mask text_locals text_contexts text_context_mask text_pooled".split()
)
#: Computed by heads only from the backbone's own features, so a term that compares a head's features cannot use them.
_BACKBONE_ONLY = frozenset(
    "coder_image_keys coder_text_keys coder_noised_features coder_positive_features coder_negative_features".split()
)

OWN_DISTRIBUTION = "coder-plugin"


@dataclass(frozen=True)
class Resolution:
    """The heads that an objective needs on a backbone.

    Args:
        heads: names, providers before their readers.
        bindings: for each term, the key that each of its arguments reads.
        reads: every key that some term or head reads.
        required: those that a term or head cannot do without.
        targets: the class or object of each head that was passed as an object.
        options: options of heads, by head, that terms set.
    """

    heads: tuple[str, ...]
    bindings: tuple[Mapping[str, str], ...]
    reads: frozenset[str]
    targets: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def of_heads(self, names: Sequence[str]) -> Resolution:
        """The same with only these heads, which must need no others, and without terms."""
        heads = [self.head(name) for name in names]
        reads = frozenset(key for head in heads for key in (*head.requires, *head.optional))
        targets, options = ({name: each[name] for name in each if name in names} for each in (self.targets, self.options))
        return Resolution(tuple(names), (), reads, targets, options)

    def head(self, name: str) -> Any:
        """The class, or the object that was passed, of a head."""
        return self.targets[name] if name in self.targets else registry.load("heads", name)


def resolve(
    objective: Objective,
    available: Set[str],
    intermediates: Set[str] = INTERMEDIATE_KEYS,
    *,
    heads: Mapping[str, Any] | None = None,
) -> Resolution:
    """Find the heads that provide what the terms require, and what they and those heads may read besides.

    An optional key of a term or head is provided by a head of ours, one that was passed as an object or registered in
    this process, or one of the reader's own distribution; otherwise it stays absent.

    Args:
        available: keys that the backbone returns, such as ``image_features`` and ``logit_scale``.
        intermediates: those of :data:`INTERMEDIATE_KEYS` that it gives its heads.
        heads: further heads besides the registered ones, classes or objects, by name. Where one of them provides a key, it
            is preferred.

    Raises:
        CoderError: a key that nothing provides or several heads do, heads that require each other in a circle, or
            ``term@head`` of a head without features to compare.
    """
    return _Resolver(available, INPUTS | intermediates, heads or {}).run(objective)


class _Resolver:
    def __init__(self, returned: Set[str], inside: Set[str], extra: Mapping[str, Any]) -> None:
        self.returned = returned
        self.available = returned | inside
        self.extra = extra
        self.heads: list[str] = []
        self.open: list[str] = []
        self.reads: set[str] = set()
        self.required: set[str] = set()
        self.options: dict[str, dict[str, Any]] = {}

    def run(self, objective: Objective) -> Resolution:
        bindings = []
        for spec in objective.terms:
            who = f"loss {spec.name!r}"
            term = spec.build()  # an instance: options may change what a term requires
            binding = self.bind(spec, (*term.requires, *term.optional))
            if spec.head and not set(binding.values()) & set(self.head(spec.head).provides):
                raise CoderError(f"{who}: head {spec.head!r} provides nothing that it requires")
            for argument, key in binding.items():
                if argument in term.requires and key in self.available - self.returned:
                    ids = "the ids of the images are 'coder_ids'; " if key == "image_id" else ""
                    raise CoderError(f"{who} requires {key!r}, which only heads can read: {ids}{self.keys()}")
                preferred = spec.source if key != argument else spec.head
                trusted = None if argument in term.requires else _trusted("losses", spec.name)
                self.need(key, who, preferred, trusted=trusted)
            self.check_leaves(binding.values(), who)
            bindings.append(binding)
            for name, options in term.head_options.items():
                self.set_options(spec.head or name, options, who)
        self.check_overlap()
        targets = {name: self.extra[name] for name in self.heads if name in self.extra}
        options = {name: self.options[name] for name in self.heads if name in self.options}
        reads, required = frozenset(self.reads), frozenset(self.required)
        return Resolution(tuple(self.heads), tuple(bindings), reads, targets, options, required)

    def set_options(self, head: str, options: Mapping[str, Any], who: str) -> None:
        """Options of a head that follow from a term's. Two terms must agree."""
        for option, value in options.items():
            other = self.options.setdefault(head, {}).setdefault(option, value)
            if other != value:
                raise CoderError(f"{who} needs {head}.{option}={value}, and another term needs {other}: a loss can have one")

    def need(self, key: str, who: str, preferred: str | None, *, trusted: Set[str] | None = None) -> None:
        """Build the head that provides a key.

        Args:
            trusted: for an optional key, the distributions whose heads may provide it without being named by ``head=``; it
                may also stay absent. None: the key is required.
        """
        self.reads.add(key)
        if trusted is None:
            self.required.add(key)
        if key in self.available:
            return
        providers = self.providers.get(key, {})
        if preferred and preferred in providers:
            self.build(preferred, who)
            return
        if trusted is not None:
            providers = {name: source for name, source in providers.items() if source in trusted or name in self.extra}
        if providers:
            self.build(self.choose(providers, key, who), who)
        elif trusted is None:
            absent = f"{who} requires {key!r}, which neither this model nor any head provides"
            if key == "logit_bias":
                raise CoderError(f"{absent}: take a SigLIP model, which has one, or a loss without it such as clip")
            hint = did_you_mean(key, self.returned, self.providers)
            known = "" if hint else f"; {self.keys()}"
            raise CoderError(
                f"{absent}{hint or ';'} pass a head of yours to create_model(custom_heads=[…]) or register it{known}"
            )

    def keys(self) -> str:
        """What terms can read, for messages."""
        of_heads = ", ".join(sorted(self.providers)) or "none"
        return f"this model returns {', '.join(sorted(self.returned))}; heads provide {of_heads}"

    def build(self, name: str, who: str) -> None:
        if name in self.heads:
            return
        if name in self.open:
            raise CoderError(f"heads require each other: {' -> '.join([*self.open, name])}")
        self.open.append(name)
        head, reader = self.head(name), f"head {name!r} (for {who})"
        for key in head.requires:
            self.need(key, reader, None)
        for key in head.optional:
            self.need(key, reader, None, trusted=_trusted("heads", name))
        self.open.pop()
        self.heads.append(name)

    def check_leaves(self, keys: Iterable[str], who: str) -> None:
        """Refuse a key of a term that a head provides only inside the model."""
        for key in keys:
            names = [name for name in self.heads if key in self.head(name).provides]
            if names and key not in self.returned and not key.startswith("coder_"):
                raise CoderError(
                    f"{who} reads {key!r}, which head {names[0]!r} provides inside the model only: keys that leave the "
                    f"model must start with 'coder_': call it 'coder_{key}' in both"
                )

    def check_overlap(self) -> None:
        """Refuse two heads that provide the same key: only the later one's value would be read."""
        provider: dict[str, str] = {}
        for name in self.heads:
            for key in self.head(name).provides:
                if provider.setdefault(key, name) != name:
                    raise CoderError(
                        f"the heads {provider[key]!r} and {name!r} both provide {key!r}: a loss can have one of them, "
                        "chosen with head=NAME in every term that requires it"
                    )

    def bind(self, spec: TermSpec, arguments: Sequence[str]) -> dict[str, str]:
        """The key that each argument of a term reads: its own name, or with ``term@head`` that head's features."""
        keys = {argument: argument for argument in arguments}
        if spec.source:
            if _BACKBONE_ONLY & keys.keys():
                raise CoderError(
                    f"{spec.name}@{spec.source}: hard negatives, momentum banks and generated texts have the backbone's own "
                    f"features only, not those of {spec.source!r}: leave out @{spec.source}, or take dcl@{spec.source} without "
                    f"hard negatives"
                )
            pair = self.head(spec.source).feature_keys
            if pair is None:
                raise CoderError(f"{spec.name}@{spec.source}: head {spec.source!r} has no features of its own to compare")
            replacements = dict(zip(("image_features", "text_features"), pair, strict=True))
            if not replacements.keys() & keys.keys():
                raise CoderError(f"{spec.name}@{spec.source}: {spec.name!r} compares no features, so none can be replaced")
            keys.update({argument: key for argument, key in replacements.items() if argument in keys})
        return keys

    def head(self, name: str) -> Any:
        target = self.extra[name] if name in self.extra else registry.load("heads", name)
        return check_keys(target, f"head {name!r}", "requires", "optional", "provides")

    @functools.cached_property
    def providers(self) -> dict[str, dict[str, str]]:
        """For each key the heads that provide it, with their distributions. A broken plugin is reported and left out."""
        providers: dict[str, dict[str, str]] = {}
        heads = {plugin.name: plugin.distribution for plugin in registry.list_plugins("heads")}
        for name, distribution in {**heads, **dict.fromkeys(self.extra, "")}.items():
            try:
                keys = self.head(name).provides
            except CoderError as error:
                if name in self.extra:
                    raise
                logging.getLogger(__name__).warning("head left out: %s", error)
                continue
            for key in keys:
                providers.setdefault(key, {})[name] = distribution
        return providers

    def choose(self, providers: Mapping[str, str], key: str, who: str) -> str:
        """A head that was passed as an object first, then our own: installing a package must not change what a loss means."""
        extra = [name for name in providers if name in self.extra]
        ours = [name for name, distribution in providers.items() if distribution == OWN_DISTRIBUTION]
        names = extra or ours or list(providers)
        if len(names) > 1:
            raise CoderError(f"{who}: {key!r} is provided by the heads {', '.join(names)}; choose with head=NAME")
        return names[0]


def _trusted(group: str, name: str) -> set[str]:
    """The distributions whose heads provide a reader's optional keys: ours, its own, and what is registered here."""
    own = {plugin.distribution for plugin in registry.list_plugins(group) if plugin.name == name}
    return {OWN_DISTRIBUTION, registry.REGISTERED, *own}
