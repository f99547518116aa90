"""What a model with heads consists of: its heads, under ``model.coder``, and its loss.

Shapes: B batch, D joint dimension.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones.gpo import Decoder
from coder_plugin.contrast import Implementation
from coder_plugin.distributed import SumWithGradient
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.heads.aggregator import Aggregator
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.heads.capabilities import AddsTexts, FollowsModel, KeepsState, Scores, heads_with
from coder_plugin.losses.base import Term, gathered_arguments
from coder_plugin.memory.model_copy import ModelCopy
from coder_plugin.memory.rows import reset_moments
from coder_plugin.memory.state_watch import StateWatch
from coder_plugin.objective import Objective, check_keys, check_takes_keys
from coder_plugin.resolver import Resolution
from coder_plugin.tensors import check_range

#: Training forwards in which heads that write buffers are looked for.
_CHECKED_FORWARDS = 3
AggregatorName = Literal["tower", "gpo", "gpo-mlp"]
GatherDtype = Literal["exact", "bfloat16"]
GatherForm = Literal["all", "ring"]
#: Losses whose negatives are the other pairs of a step.
_NEGATIVES_OF_BATCH = frozenset({"clip", "siglip", "dcl", "concept_dcl", "triplet"})


class Coder(nn.Module):
    """``model.coder``: the heads that an objective needs, run in order inside the model's forward.

    Args:
        objective: holds the options of the heads.
        resolution: names the heads, in order.
        backbone: sizes that the heads are built from.
        aggregator: ``"tower"``, the backbone's own pooling; ``"gpo"``, GPO over its tokens; or ``"gpo-mlp"``, GPO with the
            decoder that CODER prints.
        context_blocks: kept for exports; see :func:`coder_plugin.create_model`.
    """

    def __init__(
        self,
        objective: Objective,
        resolution: Resolution,
        backbone: BackboneInfo,
        *,
        aggregator: AggregatorName = "tower",
        context_blocks: int = 1,
    ) -> None:
        super().__init__()
        self.objective: Objective = objective
        self.backbone: BackboneInfo = backbone
        self.views: int = backbone.views
        self.context_blocks: int = context_blocks
        self.bindings: tuple[Mapping[str, str], ...] = resolution.bindings
        self.aggregators: Any = nn.ModuleDict()
        self.aggregator: AggregatorName = aggregator
        if aggregator != "tower":
            decoder: Decoder = "mlp" if aggregator == "gpo-mlp" else "linear"
            channels = {"image": backbone.image_tokens, "text": backbone.text_tokens}
            self.aggregators.update(
                {side: Aggregator(width, backbone.embed_dim, decoder=decoder) for side, width in channels.items()}
            )
        options: dict[str, Any] = dict(objective.heads)
        for name, given in resolution.options.items():
            options[name] = {**given, **dict(options.get(name, ()))}
        self.heads: Any = nn.ModuleDict()
        self._kept: dict[str, Any] | None = None
        #: What advances the state (:func:`coder_plugin.follow`), if anything does.
        self.followed_by: Any = None
        self._watch = StateWatch()
        self._required = resolution.required
        self._forwards_to_check = _CHECKED_FORWARDS
        #: Names of the heads that were passed as objects.
        self.passed_heads: tuple[str, ...] = tuple(resolution.targets)
        for name in resolution.heads:
            head = resolution.head(name)
            if not isinstance(head, Head):
                head = _make_head(name, head, backbone, dict(options.pop(name, ())))
            check_takes_keys(head, head, f"head {name!r}")
            head.requested_keys = resolution.reads
            self.heads[name] = head
        if options:
            logging.warning("options ignored: the loss needs no head %s", ", ".join(options))

    def aggregate(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The pooled features that replace the towers' own, where an aggregator pools the tokens."""
        pooled = {}
        for side, aggregator in self.aggregators.items():
            if f"{side}_tokens" in features:
                feature = aggregator(features[f"{side}_tokens"], features[f"{side}_mask"])
                pooled[f"{side}_features"] = F.normalize(feature.float(), dim=-1)
                if side == "image":
                    pooled["image_pooled"] = feature
        return pooled

    def embed(self, side: Literal["image", "text"], features: Mapping[str, Tensor]) -> Tensor:
        """Retrieval vectors of one side: the feature and the scoring heads' blocks, concatenated as sqrt(weight) * block."""
        base = 1.0
        blocks: list[tuple[float, Tensor]] = []
        scoring = heads_with(self.heads, Scores).values()
        # heads that interpolate come before heads that add, whatever their order in the loss
        for head in sorted(scoring, key=lambda head: head.adds_score):
            base_factor, weight = head.score_weights()
            if weight > 0:
                blocks = [(other * base_factor, block) for other, block in blocks]
                base *= base_factor
                blocks.append((weight, head.image_block(features) if side == "image" else head.text_block(features)))
        feature = features[f"{side}_features"]
        if not blocks:
            return feature
        scaled = [weight**0.5 * block.float() for weight, block in blocks]
        if feature.ndim == 3:  # an image of several features has the same block in each
            scaled = [block[:, None].expand(-1, feature.shape[1], -1) for block in scaled]
        return torch.cat([base**0.5 * feature, *scaled], -1)

    @property
    def adds_texts(self) -> AddsTexts | None:
        """The head that has further texts encoded, if there is one."""
        return next(iter(heads_with(self.heads, AddsTexts).values()), None)

    @property
    def encodes_negatives(self) -> bool:
        """Whether hard negatives are encoded together with the captions."""
        return any(head.encodes_negatives for head in self.heads.values())

    @property
    def reads_negatives(self) -> bool:
        """Whether a head cannot do without hard negatives."""
        return any("text_negatives" in head.requires for head in self.heads.values())

    @property
    def reads_tags(self) -> bool:
        """Whether a head reads the classes of the words."""
        return any(head.tag_classes() for head in self.heads.values())

    def without_heads(self) -> Coder:
        """A copy with the same aggregators and no heads, for momentum copies of the model."""
        bare = copy.copy(self)
        bare._modules = {**self._modules, "heads": nn.ModuleDict()}
        return bare

    def attach(self, model: Any) -> None:
        """Let heads that follow the model copy it: when the model is complete, and again after modules were replaced."""
        for head in heads_with(self.heads, FollowsModel).values():
            head.attach(model)
        if _refresh_copies not in model._load_state_dict_post_hooks.values():
            model.register_load_state_dict_post_hook(_refresh_copies)

    def refresh(self, model: Any, *, fresh: bool = False) -> None:
        """Let copies that no step has used yet follow the model's weights, and all copies its modules.

        Args:
            fresh: only those that no step has used.
        """
        for module in self.modules():
            if isinstance(module, ModelCopy) and (module.fresh or not fresh):
                module.refresh(model)

    def named_modules(self, memo: set[nn.Module] | None = None, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Without the modules of copies, which are not the model's to adapt, average or train; with those that FSDP2 shards."""
        memo = set() if memo is None else memo
        for head in self.heads.values():
            for child in head.children():
                if isinstance(child, ModelCopy) and child.model is not None and not hasattr(child, "unshard"):
                    memo.update(child.model.modules())
        yield from super().named_modules(memo, *args, **options)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model, such as an average of its weights, is not followed: it has no optimizer."""
        return {**self.__dict__, "followed_by": None, "_forward_pre_hooks": OrderedDict()}

    def discard(self) -> None:
        """Forget what the loss stashed: no step follows."""
        self._watch.advanced()
        for head in heads_with(self.heads, KeepsState).values():
            head.discard()

    def stashed(self) -> dict[str, Tensor]:
        """The floating-point values that the heads will write after this step, by name, to be checked before it."""
        return {
            f"{key} of head {name!r}": value
            for name, head in heads_with(self.heads, KeepsState).items()
            for key, value in head.stashed().items()
        }

    def check(self, *, batch: int, samples: int) -> None:
        """Raise :class:`CoderError` where a head cannot work with a global batch, or a run, of so many samples."""
        for name, head in self.heads.items():
            try:
                head.check(batch=batch, samples=samples)
            except ValueError as error:
                raise CoderError(f"head {name!r}: {error}") from error

    def watch(self, model: Any) -> None:
        """A training forward of ``model`` begins: refresh its copies, and warn if :meth:`post_step` is never called."""
        if torch.compiler.is_compiling():
            return
        if isinstance(next(model.parameters(), None), nn.Parameter):  # functional_call replaces them
            self.refresh(model, fresh=True)
        if torch.is_grad_enabled() and heads_with(self.heads, KeepsState):
            self._watch.at_forward(model)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The backbone's keys -> the heads' ``coder_*`` keys. A head with a missing input is left out.

        Raises:
            CoderError: values that are so large that heads and losses would overflow; a head that returns other keys than
                it provides, or changes its state.
        """
        pool = dict(features)
        checked = self._forwards_to_check and self.training and torch.is_grad_enabled()
        if check_state := bool(checked) and not torch.compiler.is_compiling():
            self._forwards_to_check -= 1
        if self.heads:
            check_range(**{key: value for key, value in pool.items() if isinstance(value, Tensor) and key != "image"})
        for name, head in self.heads.items():
            if all(key in pool for key in head.requires):
                kept = self._kept if head.cacheable else None
                if kept is not None and name in kept:
                    pool.update(kept[name])
                    continue
                before = _versions(head) if check_state else {}
                outputs = head(**{key: pool[key] for key in (*head.requires, *head.optional) if key in pool})
                if check_state and (changed := [buffer for buffer, _ in _versions(head).items() - before.items()]):
                    raise CoderError(
                        f"head {name!r} changes its buffer {changed[0]!r} in forward, which accumulation and resuming run "
                        "more than once: stash() the value, and write it in write() (KeepsState)"
                    )
                self._check_outputs(name, head, outputs, pool)
                if kept is not None:
                    kept[name] = outputs
                pool.update(outputs)
        return {key: value for key, value in pool.items() if key.startswith("coder_")}

    def _check_outputs(self, name: str, head: Head, outputs: Any, pool: Mapping[str, Any]) -> None:
        if not isinstance(outputs, dict):
            raise CoderError(f"head {name!r} returned a {type(outputs).__name__}: it must return a dict of tensors")
        if unknown := [key for key in outputs if key not in head.provides]:
            provides = ", ".join(head.provides)
            raise CoderError(f"head {name!r} returned {', '.join(unknown)}, not in its provides: {provides}")
        if missing := [key for key in head.provides if key in self._required and key not in outputs]:
            absent = [key for key in head.optional if key not in pool]
            without = f"; it was called without {', '.join(absent)}" if absent else ""
            raise CoderError(f"head {name!r} did not return {', '.join(missing)}, which the loss requires{without}")

    @contextlib.contextmanager
    def keeping(self, results: dict[str, Any]) -> Iterator[None]:
        """A context for two forward passes over the same batch, for accumulation.

        The first pass puts the outputs of heads that give the same both times
        (:attr:`~coder_plugin.heads.base.Head.cacheable`) into ``results``, and the second takes them from there.
        """
        self._kept = results
        try:
            yield
        finally:
            self._kept = None

    def post_step(self, optimizer: Any = None) -> None:
        """Write the heads' state: call once after every optimizer step that was performed (:func:`coder_plugin.follow` does).

        Args:
            optimizer: where a head re-initialises rows of a parameter, such as the classifier rows of new prototypes, the
                optimizer, or each of a list, forgets these rows (:func:`coder_plugin.memory.rows.reset_moments`). None: it
                keeps its moments.
        """
        self._watch.advanced()
        optimizers = optimizer if isinstance(optimizer, list) else [] if optimizer is None else [optimizer]
        stateful = heads_with(self.heads, KeepsState)
        self._watch.writing(stateful)
        for head in stateful.values():
            head.post_step()
            for parameter, rows in head.take_replaced_rows():
                for each in optimizers:
                    reset_moments(each, parameter, rows)

    def health(self) -> dict[str, float]:
        """Figures of the heads' state for the log, as ``head/figure``."""
        stateful = heads_with(self.heads, KeepsState)
        return {f"{name}/{figure}": value for name, head in stateful.items() for figure, value in head.health().items()}

    def state_names(self) -> list[str]:
        """Names, within the whole model, of the heads' accumulating buffers and frozen copies."""
        return [f"coder.heads.{name}.{inner}" for name, head in self.heads.items() for inner in head.state_names()]


def _refresh_copies(model: Any, _: Any) -> None:
    """After weights were loaded, such as those of the towers alone."""
    if hasattr(model, "coder"):
        model.coder.refresh(model, fresh=True)


def _make_head(name: str, cls: Any, backbone: BackboneInfo, options: dict[str, Any]) -> Head:
    try:
        inspect.signature(cls).bind_partial(backbone)
    except TypeError as error:
        message = "must take the backbone's sizes, then options as keywords: def __init__(self, backbone, *, …)"
        raise CoderError(f"head {name!r}: __init__ {message}") from error
    try:
        return cls(backbone, **options)
    except (ValueError, TypeError) as error:
        raise CoderError(f"head {name!r}: {error}") from error


def _versions(head: Head) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer of a head's state is, and how often it was changed in place."""
    return {name: (id(buffer), buffer._version) for name, buffer in head.state_buffers().items()}


class CoderLoss(nn.Module):
    """An objective's terms: takes the model's output as keywords and returns ``{"dcl_loss": …}``, as open_clip's losses do.

    The values are already weighted, so their sum is the objective. It has no parameters and no state.

    Args:
        bindings: for each term, the key that each of its arguments reads.
        heads: the model's heads by name.
        implementation: how losses of pairs are computed, as in :func:`coder_plugin.functional.dcl`.
        gather_dtype: how features, keys and the gradients that return travel between ranks: ``exact``, in their own types, or
            ``bfloat16``.
        gather: with several processes, ``all``: every rank gets the rows of all ranks; or ``ring``: one rank's after the other.

    Raises:
        CoderError: a term with parameters or buffers, one that gathers without ``compute``, or one without ``gather="ring"``.
    """

    def __init__(
        self,
        objective: Objective,
        bindings: tuple[Mapping[str, str], ...],
        heads: Mapping[str, Head],
        *,
        implementation: Implementation = "auto",
        gather_dtype: GatherDtype = "exact",
        gather: GatherForm = "all",
    ) -> None:
        super().__init__()
        if gather_dtype not in get_args(GatherDtype):
            raise ValueError(f"gather_dtype must be one of {', '.join(get_args(GatherDtype))}, got {gather_dtype!r}")
        if gather not in get_args(GatherForm):
            raise ValueError(f"gather must be one of {', '.join(get_args(GatherForm))}, got {gather!r}")
        if gather == "ring" and implementation == "reference":
            raise CoderError("gather='ring' computes losses by tiles: take another implementation than 'reference'")
        if gather == "ring" and gather_dtype != "exact":
            raise CoderError("gather='ring' sends features in their own type: leave out gather_dtype, or take gather='all'")
        self._warned: set[str] = set()
        self.gather: GatherForm = gather
        self.gather_dtype: torch.dtype | None = torch.bfloat16 if gather_dtype == "bfloat16" else None
        self.objective: Objective = objective
        self.bindings: tuple[Mapping[str, str], ...] = bindings
        self.terms: Any = nn.ModuleDict()
        self._heads: tuple[Mapping[str, Head]] = (heads,)  # in a tuple: they are the model's
        for label, spec in zip(objective.labels(), objective.terms, strict=True):
            term = copy.copy(_checked(spec.build(), spec.name))  # an object may be in losses of other models too
            if gather == "ring" and "ring" not in term.supports:
                raise CoderError(f"loss {str(replace(spec, weight=1.0))!r} does not support gather='ring': take gather='all'")
            term._modules = dict(term._modules)
            term.implementation, term.ring = implementation, gather == "ring"
            self.terms[label] = term.bind(heads, local_loss=objective.local_loss)

    def forward(
        self, *, output_dict: bool = True, sums: SumWithGradient | None = None, **outputs: Tensor
    ) -> dict[str, Tensor] | Tensor:
        """The model's outputs as keywords -> weighted scalars by name, or their sum with ``output_dict=False``.

        What the terms read of other ranks is gathered first, in one collective, and its gradient returns in one; with
        ``gather="ring"`` each term passes it on instead.

        Args:
            sums: numbers that travel with the gathered gradient.
        """
        ring = self.gather == "ring" and distributed.world_size() > 1
        arguments = self._arguments(outputs)
        if not torch.compiler.is_compiling():
            self._warn(outputs)
        names = [() if ring else term.gathers for term in self.terms.values()]
        together = list(zip(names, arguments, strict=True))
        gathered = gathered_arguments(together, dtype=self.gather_dtype, sums=sums)
        losses: dict[str, Tensor] = {}
        for (label, term), spec, own, every in zip(
            self.terms.items(), self.objective.terms, arguments, gathered, strict=True
        ):
            value = term(gathered=every, **own) if term.gathers else term(**own)
            values = value if isinstance(value, dict) else {"loss": value}
            for name, scalar in values.items():
                if not isinstance(scalar, Tensor) or scalar.ndim:
                    shape = f"of shape {list(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
                    raise CoderError(f"loss {spec.name!r} must return scalar tensors, and its {name!r} is {shape}")
                if not name.endswith("loss"):
                    raise CoderError(
                        f"loss {spec.name!r} returned {name!r}: every entry is added to the objective, so names end in 'loss'"
                    )
                losses[f"{label}_{name}"] = spec.weight * scalar
        return losses if output_dict else torch.stack(list(losses.values())).sum()

    def warn_once(self, about: str, message: str, *values: Any) -> None:
        """Log a warning, unless one about the same was logged before."""
        if about not in self._warned:
            self._warned.add(about)
            logging.warning(message, *values)

    def without_negatives(self) -> list[str]:
        """The terms that have no negatives in a batch of one pair: they take them from the other pairs of the batch alone."""
        return [
            spec.name
            for spec, term in zip(self.objective.terms, self.terms.values(), strict=True)
            if spec.name in _NEGATIVES_OF_BATCH
            and not {"coder_image_keys", "coder_negative_ids"} & {*term.requires}  # of the momentum banks, hard negatives
        ]

    def warn_of_one_pair(
        self, advice: str = "use a larger batch size, and leave out a last batch of one (drop_last)"
    ) -> None:
        """Warn once of a batch of one pair, if terms take their negatives from the other pairs of the batch alone."""
        if terms := self.without_negatives():
            names = " and ".join(terms)
            self.warn_once("one pair", "a batch of one pair has no negatives, and %s has no others: %s", names, advice)

    def _warn(self, outputs: Mapping[str, Tensor]) -> None:
        """Warn of what a batch lacks."""
        if len(outputs.get("image_features", ())) == 1 == distributed.world_size() and torch.is_grad_enabled():
            self.warn_of_one_pair()
        terms = zip(self.objective.terms, self.terms.values(), self.bindings, strict=True)
        names = [
            spec.name
            for spec, term, binding in terms
            if "coder_ids" in term.optional and binding.get("coder_ids", "coder_ids") not in outputs
        ]
        if names:
            self.warn_once(
                "ids",
                "%s: no image ids were passed, so other captions of an image count as its negatives: call "
                "model(image, text, image_id=ids)",
                " and ".join(names),
            )

    def _arguments(self, outputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Each term's arguments from this rank."""
        arguments = []
        for term, spec, binding in zip(self.terms.values(), self.objective.terms, self.bindings, strict=True):
            missing = [binding[argument] for argument in term.requires if binding[argument] not in outputs]
            if missing:
                raise CoderError(
                    f"loss {spec.name!r} needs {', '.join(missing)}, which the model did not return: is the model created "
                    "with this loss, in training mode, and given what its heads require"
                    f"{' (model(image, text, image_id=ids))' if 'coder_ids' in missing else ''}?"
                )
            arguments.append({argument: outputs[key] for argument, key in binding.items() if key in outputs})
        return arguments


def _checked(term: Any, name: str) -> Any:
    """The term, if it keeps what a term must keep."""
    module = getattr(term, "module", term)
    if next(term.parameters(), None) is not None:
        raise CoderError(f"loss {name!r} owns parameters, which nothing would train: put them into a head")
    if buffers := [buffer for buffer, _ in term.named_buffers()]:
        raise CoderError(
            f"loss {name!r} holds the buffer {buffers[0].removeprefix('module.')!r}, which no checkpoint would save: keep it "
            "in a head (KeepsState), which the loss reads with self.provider(KEY)"
        )
    gathers = check_keys(module, f"loss {name!r}", "gathers").gathers if hasattr(module, "gathers") else ()
    if unknown := [key for key in gathers if key not in (*module.requires, *getattr(module, "optional", ()))]:
        hint = did_you_mean(unknown[0], module.requires) or ":"
        raise CoderError(f"loss {name!r} gathers {unknown[0]!r}, which is not in its requires or optional{hint} add it there")
    if gathers and (type(module).forward is not Term.forward or type(module).compute is Term.compute):
        raise CoderError(
            f"loss {name!r} names {', '.join(gathers)} in 'gathers', and gathered rows go to compute(): derive it from "
            "coder_plugin.losses.base.Term and rename forward to compute"
        )
    return term
