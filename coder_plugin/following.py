"""Let the state of a model's heads follow an optimizer, in any training loop: :func:`follow`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from coder_plugin.coder import Coder
from coder_plugin.errors import CoderError

#: Attributes under which wrappers keep an optimizer (accelerate, Lightning) or a model (DDP, ``torch.compile``).
_OPTIMIZER, _MODEL = ("optimizer", "_optimizer"), ("module", "_orig_mod")
#: Those under which an optimizer keeps the one that it extends (SAM, timm's Lookahead).
_BASE = ("base_optimizer", "_base_optimizer")


class Following:
    """What :func:`follow` returns. Until :meth:`remove` the heads' state advances with the optimizers' steps.

    Attributes:
        steps: how often the state has advanced.
    """

    def __init__(
        self, coder: Coder, optimizers: list[list[torch.optim.Optimizer]], after_step: Callable[[], object] | None
    ) -> None:
        self.steps = 0
        self._coder, self._optimizers, self._after_step = coder, optimizers, after_step
        self._stepped: set[int] = set()
        self._stepping: set[int] = set()  # optimizers whose step() runs now
        self._hooks: list[Any] = []
        for number, (outer, *inner) in enumerate(optimizers):
            self._hooks.append(outer.register_step_post_hook(partial(self._on_step, number)))
            self._hooks.append(outer.register_step_pre_hook(partial(self._before_step, number)))
            self._hooks += [each.register_step_post_hook(partial(self._on_inner_step, number)) for each in inner]
        if len(optimizers) > 1:
            self._hooks.append(coder.register_forward_pre_hook(self._on_forward))

    def step_failed(self) -> None:
        """The step that has begun was not performed: an error ended it."""
        self._stepping.clear()

    def remove(self) -> None:
        """Stop: the optimizers' steps advance nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._coder.followed_by is self:
            self._coder.followed_by = None

    def advances_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is among those whose steps advance the state."""
        return any(optimizer is each for chain in self._optimizers for each in chain)

    @property
    def stepping(self) -> bool:
        """Whether a step runs now, which may call the model itself (a closure)."""
        return bool(self._stepping)

    @torch.compiler.disable
    def _on_step(self, number: int, optimizer: Any, *_: Any) -> None:
        self._stepping.discard(number)
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and overflow.item():  # GradScaler calls a fused optimizer, which skips the step itself
            return
        self._stepped.add(number)
        if len(self._stepped) == len(self._optimizers):
            self._advance()

    def _before_step(self, number: int, *_: Any) -> None:
        self._stepping.add(number)

    def _on_inner_step(self, number: int, optimizer: Any, *_: Any) -> None:
        """SAM's ``second_step`` steps the optimizer inside, without a step of its own."""
        if number not in self._stepping:
            self._on_step(number, optimizer)

    def _on_forward(self, coder: Any, *_: Any) -> None:
        """The heads run in training mode only: a new step begins."""
        if self._stepped:  # one of the last step's optimizers was not called, or had an overflow
            self._advance()

    def _advance(self) -> None:
        self._stepped.clear()
        self.steps += 1
        self._coder.post_step([each for chain in self._optimizers for each in chain])
        if self._after_step is not None:
            self._after_step()


def follow(model: Any, optimizer: Any, *, after_step: Callable[[], object] | None = None) -> Following:
    """Advance banks, momentum towers and centres exactly once after every optimizer step that is performed.

    Call it once, when the optimizer exists and before the first step, in whatever loop trains the model. It counts steps that
    were performed: micro-batches that only accumulate gradients and steps that a loss scaler skips, also those of a fused
    optimizer, advance nothing. With several optimizers a step is over when each has stepped, or when the next forward
    pass in training mode begins. Of an optimizer that extends another (SAM, timm's Lookahead) the step is over when its own
    is, or when it steps the other by itself, as in SAM's ``second_step``.

    Args:
        model: of :func:`coder_plugin.create_model`; also wrapped by DDP or ``torch.compile``, or a module that contains one.
        optimizer: a torch optimizer, or accelerate's or Lightning's wrapper of one; or a list of those that together make a
            step.
        after_step: called after each advance.

    Returns:
        A handle with ``remove()`` and the number of ``steps``.

    Raises:
        CoderError: no model with heads, or several, in ``model``; no torch optimizer, or none with a parameter of the model;
            the model is followed already.

    Example:
        >>> import coder_plugin
        >>> model = coder_plugin.create_model("coder-tiny", loss="dcl + m_dcl").train()
        >>> loss = coder_plugin.create_loss("dcl + m_dcl", model=model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> following = coder_plugin.follow(model, optimizer)
        >>> image, text = torch.rand(4, 3, 64, 64), torch.ones(4, 40, dtype=torch.long)
        >>> sum(loss(**model(image, text, image_id=torch.arange(4))).values()).backward()
        >>> optimizer.step()
        >>> following.steps, model.coder.heads["momentum"].bank.count.item()
        (1, 4)
    """
    inner = find_model(model)
    coder = inner.coder
    optimizers = [_unwrap(each) for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
    if not optimizers or len({id(each[-1]) for each in optimizers}) < len(optimizers):
        raise CoderError("follow needs an optimizer, or a list of different ones")
    held = {id(parameter) for each, *_ in optimizers for group in each.param_groups for parameter in group["params"]}
    own = [*inner.parameters(), *(model.parameters() if isinstance(model, nn.Module) else ())]  # a wrapper may hold them
    if any(each.requires_grad for each in own) and held.isdisjoint(map(id, own)):
        raise CoderError(
            "the optimizer holds no parameter of the model: make it from this model's parameters, then call follow"
        )
    if coder.followed_by is not None:
        raise CoderError("the model's state follows an optimizer already: call remove() of what follow() returned first")
    coder.refresh(inner)
    coder.followed_by = following = Following(coder, optimizers, after_step)
    return following


def _unwrap(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizer that a framework has wrapped, and those that it extends, as far as their ``step`` runs torch's hooks."""
    inner: Any = optimizer
    while True:
        wrapped = (getattr(inner, name, None) for name in _OPTIMIZER)
        deeper = next((each for each in wrapped if isinstance(each, torch.optim.Optimizer)), None)
        if deeper is None:
            break
        inner = deeper
    if not isinstance(inner, torch.optim.Optimizer):
        raise CoderError(
            f"follow needs a torch optimizer, got {type(optimizer).__name__}: without one call model.coder.post_step() after "
            "every performed step"
        )
    chain = [inner]
    while base := [each for name in _BASE if isinstance(each := getattr(chain[-1], name, None), torch.optim.Optimizer)]:
        chain.append(base[0])
    chain = [each for each in chain if hasattr(each, "_optimizer_step_post_hooks")]
    if not chain:
        raise CoderError(
            f"{type(inner).__name__} does not call torch.optim.Optimizer.__init__, so nothing can notice its steps: call it "
            "there, or call model.coder.post_step() after every performed step"
        )
    for each in chain:
        each._patch_step_function()  # does nothing but for timm's Lookahead, which does not call Optimizer.__init__
    return chain


def find_model(model: Any) -> Any:
    """The model with heads: this one, or the only one inside its wrappers or this module.

    Raises:
        CoderError: there is none, or there are several.
    """
    for name in _MODEL:
        while isinstance(getattr(model, name, None), nn.Module):
            model = getattr(model, name)
    if _has_heads(model):
        return model
    models = list(_outermost(model)) if isinstance(model, nn.Module) else []
    if len(models) != 1:
        there = f"{len(models)} models with heads in" if models else "no model of coder_plugin.create_model in"
        hint = "" if models else ", made by create_model or given heads by add_heads"
        raise CoderError(f"there is {there} the {type(model).__name__}: pass the model that is trained{hint}")
    return models[0]


def _has_heads(module: Any) -> bool:
    return isinstance(getattr(module, "coder", None), Coder)


def _outermost(module: nn.Module) -> Iterable[nn.Module]:
    """The models with heads inside a module, but not their momentum copies."""
    for child in module.children():
        if _has_heads(child):
            yield child
        else:
            yield from _outermost(child)


def clamp_logit_scale(model: Any) -> None:
    """Keep a trained ``logit_scale`` between 0 and log(100), in place, as CLIP does after every step."""
    scale = getattr(model, "logit_scale", None)
    if scale is not None and scale.requires_grad:
        with torch.no_grad():
            scale.clamp_(0, math.log(100))
