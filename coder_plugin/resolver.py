"""From an objective to the heads it needs: terms and heads say what they require, heads what they provide."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective, TermSpec

#: What a model's forward is given; heads may require it.
INPUTS = frozenset({"image", "text", "image_id", "text_positive", "text_tags"})
#: What backbones give their heads and do not return: their last tokens, tokens before the context stage (locals) and after it
#: (contexts; of open_clip's towers both are in the joint space where tokens have a way there), masks, pooled features before
#: normalisation, the regions' scores for an image's views, and a feature of the whole image. Each backbone has its own of
#: these.
INTERMEDIATE_KEYS = frozenset(
    "image_tokens image_mask image_locals image_contexts image_context_mask image_pooled image_views image_global "
    "text_tokens text_mask text_locals text_contexts text_context_mask text_pooled".split()
)
#: Made by heads from the backbone's own features alone, so a term that compares a head's features cannot use them.
_KEYS = frozenset({"coder_image_keys", "coder_text_keys", "coder_noised_features", "coder_positive_features"})

OWN_DISTRIBUTION = "coder-plugin"


@dataclass(frozen=True)
class Resolution:
    """What an objective makes of a backbone.

    ``heads``: names, providers before their readers. ``bindings``: for each term its arguments and the keys they read.
    ``reads``: every key that some term or head reads.
    """

    heads: tuple[str, ...]
    bindings: tuple[Mapping[str, str], ...]
    reads: frozenset[str]

    def of_heads(self, names: Sequence[str]) -> Resolution:
        """Of these heads alone, which must need no other; no term is left."""
        reads = frozenset(key for name in names for key in (*_head(name).requires, *_head(name).uses))
        return Resolution(tuple(names), (), reads)


def resolve(objective: Objective, available: Set[str], inside: Set[str] = INTERMEDIATE_KEYS) -> Resolution:
    """The heads, and no others, that provide what the terms require.

    Args:
        available: keys that the backbone returns, such as ``image_features`` and ``logit_scale``.
        inside: those of :data:`INTERMEDIATE_KEYS` that it gives its heads.

    Raises:
        CoderError: a key nobody provides or several heads do, a circle of heads, ``term@head`` of a head without pair.
    """
    return _Resolver(available | INPUTS | inside).run(objective)


class _Resolver:
    def __init__(self, available: Set[str]) -> None:
        self.available = available
        self.heads: list[str] = []
        self.open: list[str] = []
        self.reads: set[str] = set()
        self.model: str | None = None

    def run(self, objective: Objective) -> Resolution:
        self.model = dict(objective.training).get("model")
        bindings = []
        for term in objective.terms:
            who = f"loss {term.name!r}"
            # an instance, because options may change what a term requires
            made = _declared(registry.load("losses", term.name)(**dict(term.options)), who, "requires", "uses")
            binding = _bind(term, made)
            if term.head and not set(binding.values()) & set(_head(term.head).provides):
                raise CoderError(f"{who}: head {term.head!r} provides nothing that it requires")
            for argument, key in binding.items():
                preferred = term.source if key != argument else term.head
                self.need(key, who, preferred, unasked=_unasked(term) if argument in made.uses else None)
            bindings.append(binding)
        self.check_overlap()
        return Resolution(tuple(self.heads), tuple(bindings), frozenset(self.reads))

    def need(self, key: str, who: str, preferred: str | None, *, unasked: Set[str] | None = None) -> None:
        """Build what provides a key. With ``unasked`` it may stay absent, and heads of other distributions than these
        provide it only where ``head=`` names them."""
        self.reads.add(key)
        if key in self.available:
            return
        providers = _providers(key)
        if preferred and preferred in providers:
            self.build(preferred, who)
            return
        if unasked is not None:
            providers = {name: distribution for name, distribution in providers.items() if distribution in unasked}
        if providers:
            self.build(_choose(providers, key, who), who)
        elif unasked is None:
            made_for = f"; the objective was made for --model {self.model} and its data" if self.model else ""
            raise CoderError(f"{who} requires {key!r}, which neither this model nor any head provides{made_for}")

    def build(self, name: str, who: str) -> None:
        if name in self.heads:
            return
        if name in self.open:
            raise CoderError(f"heads require each other: {' -> '.join([*self.open, name])}")
        self.open.append(name)
        for key in _head(name).requires:
            self.need(key, f"head {name!r} (for {who})", None)
        self.reads.update(_head(name).uses)
        self.open.pop()
        self.heads.append(name)

    def check_overlap(self) -> None:
        """Keys are one name space: of two heads that provide the same one, only the later would be read."""
        provider: dict[str, str] = {}
        for name in self.heads:
            for key in _head(name).provides:
                if provider.setdefault(key, name) != name:
                    raise CoderError(
                        f"the heads {provider[key]!r} and {name!r} both provide {key!r}: an objective can have one of "
                        "them, chosen with head=NAME in every term that requires it"
                    )


def _bind(term: TermSpec, made: Any) -> dict[str, str]:
    keys = {argument: argument for argument in (*made.requires, *made.uses)}
    if term.source:
        if _KEYS & keys.keys():
            raise CoderError(
                f"{term.name}@{term.source}: the momentum banks hold the backbone's own features, and generated texts have no "
                f"others: not those of {term.source!r}; use a term of the pairs alone, such as dcl@{term.source}"
            )
        pair = _head(term.source).feature_keys
        if pair is None:
            raise CoderError(f"{term.name}@{term.source}: head {term.source!r} has no features of its own to compare")
        instead = dict(zip(("image_features", "text_features"), pair, strict=True))
        if not instead.keys() & keys.keys():
            raise CoderError(f"{term.name}@{term.source}: {term.name!r} compares no features, so none can stand in")
        keys.update({argument: key for argument, key in instead.items() if argument in keys})
    return keys


def _unasked(term: TermSpec) -> set[str]:
    """Our distribution and the term's own."""
    return {OWN_DISTRIBUTION} | {p.distribution for p in registry.list_plugins("losses") if p.name == term.name}


def _head(name: str) -> Any:
    return _declared(registry.load("heads", name), f"head {name!r}", "requires", "uses", "provides")


def _declared(cls: Any, who: str, *attributes: str) -> Any:
    """The class or instance, if what it declares can be read: the easiest slip is ``("key")`` for ``("key",)``."""
    for attribute in attributes:
        keys = getattr(cls, attribute, None)
        if not (isinstance(keys, (tuple, list)) and all(isinstance(key, str) for key in keys)):
            raise CoderError(f"{who} is at fault: its {attribute!r} is {keys!r}, not a tuple of keys")
    return cls


def _providers(key: str) -> dict[str, str]:
    """Heads that provide a key, by name, with their distribution. A broken one is reported, not fatal."""
    found = {}
    for plugin in registry.list_plugins("heads"):
        try:
            if key in _head(plugin.name).provides:
                found[plugin.name] = plugin.distribution
        except CoderError as error:
            logging.getLogger(__name__).warning("head left out: %s", error)
    return found


def _choose(providers: Mapping[str, str], key: str, who: str) -> str:
    """Our own head where there is one, so that installing somebody's package never changes what an objective means."""
    own = [name for name, distribution in providers.items() if distribution == OWN_DISTRIBUTION]
    names = own or list(providers)
    if len(names) > 1:
        raise CoderError(f"{who}: {key!r} is provided by the heads {', '.join(names)}; choose with head=NAME")
    return names[0]
