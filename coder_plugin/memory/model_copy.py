"""A copy of a model's towers and aggregators, without gradient, that shares the model's frozen parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones.adapters import remove_adapters

Mode = Literal["eval", "train"]


class ModelCopy(nn.Module):
    """A copy of the model without its heads. It has no gradient, and its mode is fixed: :meth:`train` does nothing.

    Frozen parameters are shared with the model, so a locked tower or the base weights under LoRA are in memory once.
    The named modules, and with them the parameters, of a model with heads leave the copy out: they are not there to be
    adapted (peft), averaged or trained. State dicts and moves to a device include them.

    Args:
        mode: the copy's mode, ``"eval"`` (no dropout, running statistics) or ``"train"``.
        adapters: whether low-rank adapters are copied too; without them the copy computes the model without adapters.

    Example:
        >>> import coder_plugin
        >>> sizes = {"region_dim": 4, "embed_dim": 4, "word_dim": 4}
        >>> vocabulary = ["<pad>", "<start>", "<end>", "<unk>", "dog"]
        >>> model = coder_plugin.create_model("region-bigru", loss="clip", vocabulary=vocabulary, **sizes)
        >>> copied = ModelCopy()
        >>> copied.copy_from(model)
        >>> copied.model.logit_scale is model.logit_scale, copied.model.logit_scale.requires_grad
        (False, False)
    """

    def __init__(self, *, mode: Mode = "eval", adapters: bool = True) -> None:
        super().__init__()
        self.mode, self.adapters = mode, adapters
        self.model: Any = None
        self._shared: set[str] = set()  # names of the parameters that the copy shares with the model
        #: Whether nothing has used or loaded the copy since :meth:`copy_from`: until then it equals the model.
        self.fresh = False
        self._copied = False
        self.register_load_state_dict_pre_hook(ModelCopy._before_load)

    def copy_from(self, model: Any) -> None:
        """Replace the copy by the current model without the heads of ``model.coder``."""
        coder = model.coder
        model.coder = coder.without_heads()
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.coder = coder
        if (capture := getattr(self.model, "_coder_capture", None)) is not None:
            capture.restrict(aggregated=len(coder.aggregators) > 0)
        if not self.adapters:
            remove_adapters(self.model, merge=False)
        self.model.requires_grad_(False).train(self.mode == "train")
        self._shared.clear()
        self._share_frozen(model)
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                module.track_running_stats = False  # use batch statistics, and write none in forward
        self.fresh = self._copied = True

    @torch.no_grad()
    def refresh(self, model: Any) -> None:
        """Copy the model again where its modules were replaced (adapters), or where the copy is :attr:`fresh` and weights may
        have been loaded, locked or synchronised since."""
        if not self._copied or hasattr(model, "unshard"):  # FSDP2 shards both alike, from equal weights
            return
        if self._names(model) != self._names(self.model):
            self.copy_from(model)
        elif self.fresh:
            self._share_frozen(model)
            online = {**parameters_by_name(model), **dict(model.named_buffers())}
            own = {**parameters_by_name(self.model), **dict(self.model.named_buffers())}
            copy_values([(value, online[name]) for name, value in own.items() if name in online and value is not online[name]])

    def _names(self, model: Any) -> set[str]:
        names = {name for name in parameters_by_name(model) if not name.startswith("coder.heads.")}
        return names if self.adapters else {name for name in names if "lora_" not in name}

    def train(self, mode: bool = True) -> ModelCopy:
        return self

    @torch.no_grad()
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Images and ids [B, T] -> the copy's embeddings, [B, D] each, L2-normalised, float32."""
        self.fresh = False
        return self.model.embed_image(image).float(), self.model.embed_text(text).float()

    def _share_frozen(self, model: Any) -> None:
        """Share the model's frozen parameters, and copy those that are trained by now.

        A parameter that FSDP shards belongs to its module's group, and one of another dtype or device differs: both
        stay.
        """
        online = parameters_by_name(model, tied=True)
        owned: dict[int, nn.Parameter] = {}
        for prefix, module in self.model.named_modules():
            for name, average in module._parameters.items():
                path = f"{prefix}.{name}" if prefix else name
                current = online.get(plain_name(path))
                if average is None or current is None or distributed.is_sharded(current):
                    continue
                if average is current and current.requires_grad:
                    module._parameters[name] = _own(current, owned)
                    self._shared.discard(path)
                elif (
                    not current.requires_grad
                    and isinstance(current, nn.Parameter)
                    and (average.dtype, average.device) == (current.dtype, current.device)
                ):
                    module._parameters[name] = current
                    self._shared.add(path)

    def own(self, paths: Iterable[str]) -> None:
        """Replace shared parameters by copies of them."""
        owned: dict[int, nn.Parameter] = {}
        for path in paths:
            prefix, _, name = path.rpartition(".")
            parameters = self.model.get_submodule(prefix)._parameters
            parameters[name] = _own(parameters[name], owned)
        self._shared.difference_update(paths)


    def _before_load(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.fresh = self.fresh and not any(name.startswith(f"{prefix}model.") for name in state)


def parameters_by_name(model: nn.Module, *, tied: bool = False) -> dict[str, Tensor]:
    """A model's parameters by their :func:`plain_name`; ``tied``: tied ones by each name."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=not tied)}


class Counterparts:
    """Pairs of a copy's and its model's tensors of the same names, looked up once instead of in every step.

    They are looked up anew where a module holds another tensor than it did. A copy of this object starts empty, also a pickled
    one: else it would hold the model.
    """

    def __init__(self, kind: Literal["_parameters", "_buffers"]) -> None:
        self._kind = kind
        self._models: tuple[Any, ...] = ()  # weak references
        self._places: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def of(self, copied: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """(the copy's, the model's), as far as both have one of a :func:`plain_name`."""
        held = zip(self._places, self._pairs, strict=True)
        same = all(own.get(key) is one and other.get(its) is two for (own, key, other, its), (one, two) in held)
        if not same or [each() for each in self._models] != [copied, model]:
            self._models, online = (weakref.ref(copied), weakref.ref(model)), _places(model, self._kind)
            self._places = [(*place, *online[name]) for name, place in _places(copied, self._kind).items() if name in online]
            self._pairs = [(own[key], other[its]) for own, key, other, its in self._places]
        return self._pairs

    def __deepcopy__(self, memo: Any) -> Counterparts:
        return Counterparts(self._kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counterparts, (self._kind,)


def _places(model: nn.Module, kind: str) -> dict[str, tuple[dict[str, Any], str]]:
    """By plain name, the dict of the module that holds a tensor, and its key there; of tied ones the first name."""
    places: dict[str, tuple[dict[str, Any], str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        held = getattr(module, kind)
        for name, value in held.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                places[plain_name(f"{prefix}.{name}" if prefix else name)] = held, name
    return places


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and low-rank adapters put into it."""
    return name.replace("_orig_mod.", "").replace("base_layer.", "")


def copy_values(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])


def _own(parameter: Tensor, owned: dict[int, nn.Parameter]) -> nn.Parameter:
    """A copy of a parameter without gradient; of a tied one the same for each of its names."""
    if id(parameter) not in owned:
        owned[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    return owned[id(parameter)]
