"""NaN and infinity put into a trainer's step, on one rank or on all (docs/RELIABILITY.md, Numbers)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from coder_plugin import distributed

LOSS = "3*dcl(diversity_over='batch+bank') + m_dcl"


@contextlib.contextmanager
def fault(trainer: Any, kind: str, *, rank: int | None = 1, value: float = torch.nan) -> Iterator[None]:
    """Inside the context a step meets ``value`` in its loss, gradient, key, stash or bank.

    Args:
        rank: where; None: on all ranks.
    """
    if rank is not None and distributed.rank() != rank:
        yield
        return
    with _FAULTS[kind](trainer, value):
        yield


@contextlib.contextmanager
def _output(trainer: Any, value: float, key: str, gradient: bool = False) -> Iterator[None]:
    def poison(module: Any, inputs: Any, output: Any) -> Any:
        row = torch.zeros_like(output[key])
        row[0] = value
        if gradient:
            output[key].register_hook(lambda received: received + row)
            return output
        return {**output, key: output[key] + row}

    hook = trainer.model.register_forward_hook(poison)
    yield
    hook.remove()


@contextlib.contextmanager
def _stash(trainer: Any, value: float) -> Iterator[None]:
    """What will be written differs from what the loss has seen."""
    head = trainer.model.coder.heads["momentum"]
    stash = head.stash
    head.stash = lambda **values: stash(**{**values, "text_keys": values["text_keys"] * value})
    yield
    del head.stash


@contextlib.contextmanager
def _bank(trainer: Any, value: float) -> Iterator[None]:
    image = trainer.model.coder.heads["momentum"].bank.image
    before = image[0].clone()
    image[0] = value
    yield
    image[0] = before


_FAULTS: dict[str, Callable[[Any, float], contextlib.AbstractContextManager[None]]] = {
    "loss": lambda trainer, value: _output(trainer, value, "image_features"),
    "gradient": lambda trainer, value: _output(trainer, value, "text_features", gradient=True),
    "key": lambda trainer, value: _output(trainer, value, "coder_image_keys"),
    "stash": _stash,
    "bank": _bank,
}
KINDS = tuple(_FAULTS)

#: What the message says, by kind, where the fault is on rank 1 of two.
SAID = {
    "loss": r"image_features is not finite on rank 1: loss dcl_loss = (nan|inf)",
    "gradient": r"gradient of .*text|gradient of dcl",
    "key": r"coder_image_keys is not finite on rank 1: .*loss m_dcl_loss = (nan|inf)",
    "stash": r"text_keys of head 'momentum' is not finite$",
    "bank": r"coder.heads.momentum.bank.image holds NaN on rank 1: .*loss m_dcl_loss = nan",
}
