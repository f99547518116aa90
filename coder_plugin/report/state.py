"""Banks and centres in a run's newest checkpoint. Q bank entries, K centres, D dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.report.charts import Figure, format_number, histogram
from coder_plugin.report.page import Block, figures, heading
from coder_plugin.training.checkpoint import read_model
from coder_plugin.training.run_folder import RunFolder

_READ = frozenset("pointer count image text ids ready centres counts passed changed restarted".split())


def state_blocks(run: RunFolder) -> list[Block]:
    """Tiles and figures of each bank and each set of centres. The model's weights are not read.

    Raises:
        CoderError: no checkpoint, one that cannot be read, or an objective that keeps no such state.
    """
    if run.checkpoint is None:
        raise CoderError("there is no complete checkpoint to read banks and centres from")
    tensors = _model_state(run.checkpoint)
    blocks: list[Block] = []
    for name in sorted(tensors):
        owner, _, last = name.rpartition(".")
        head = owner.removeprefix("coder.heads.").removesuffix(".bank").removesuffix(".centres")
        if last == "pointer" and {f"{owner}.{each}" for each in ("image", "text", "ids", "count")} <= tensors.keys():
            blocks += [heading(f"{head}: banks"), *_bank(tensors, owner, run.pairs_per_step)]
        elif last == "ready" and {f"{owner}.{each}" for each in ("centres", "counts")} <= tensors.keys():
            blocks += [heading(f"{head}: centres"), *_centres(tensors, owner)]
    if not blocks:
        raise CoderError("the objective keeps no banks and no centres")
    return blocks


def _model_state(checkpoint: Path) -> Mapping[str, Tensor]:
    """The tensors of banks and centres in a checkpoint by their names in the model."""
    tensors = read_model(checkpoint)
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in _READ}


def entry_ages(pointer: int, count: int, size: int, pairs_per_step: int) -> Tensor:
    """Steps since each filled entry [count] of a ring buffer was written, 0 for those of the last step.

    Example:
        >>> entry_ages(pointer=4, count=4, size=8, pairs_per_step=2)
        tensor([1, 1, 0, 0])
    """
    return (pointer - 1 - torch.arange(count)) % size // pairs_per_step


def _norms(vectors: Tensor, what: str) -> tuple[str, str]:
    """A tile of the least and the greatest norm of vectors that should have length one."""
    low, high = vectors.float().norm(dim=1).aminmax()
    return f"{low:.3f}–{high:.3f}", f"norms of the {what}: any other than 1 is a fault"


def _bank(tensors: Mapping[str, Tensor], owner: str, pairs_per_step: int | None) -> list[Block]:
    count, pointer = (int(tensors[f"{owner}.{each}"]) for each in ("count", "pointer"))
    size, images = len(tensors[f"{owner}.image"]), len(tensors[f"{owner}.ids"][:count].unique())
    tiles = [(f"{count:,}", f"of {size:,} entries are filled"), (f"{images:,}", "different images among them")]
    made = []
    if count:
        tiles += [_norms(tensors[f"{owner}.{side}"][:count], f"{side} entries") for side in ("image", "text")]
    if count and pairs_per_step:
        ages = entry_ages(pointer, count, size, pairs_per_step)
        tiles.append((f"{int(ages.max()):,}", f"steps since the oldest entry was written ({pairs_per_step} entries a step)"))
        chart = histogram(ages.tolist(), x_label="steps ago")
        made.append(Figure("Age of the entries", chart, f"median {int(ages.median()):,} steps"))
    return [{"tiles": tiles}, *figures(made)]


def _centres(tensors: Mapping[str, Tensor], owner: str) -> list[Block]:
    counts = tensors[f"{owner}.counts"].double()
    if not bool(tensors[f"{owner}.ready"]):
        return [{"tiles": [(f"{len(counts):,}", "centres, not yet clustered")]}]
    passed, changed, restarted = (
        float(tensors[f"{owner.removesuffix('.centres')}.{each}"]) for each in ("passed", "changed", "restarted")
    )
    tiles = [
        (f"{len(counts):,}", "centres"),
        (f"{100 * changed:.0f} %", "of the pairs changed their label in the last clustering"),
        (f"{restarted:,.0f}", "clusters had become empty and started anew so far"),
        _norms(tensors[f"{owner}.centres"], "centres"),
    ]
    chart = histogram(counts.tolist(), x_label="pairs assigned")
    largest = f"median {format_number(float(counts.median()))}, largest {format_number(float(counts.max()))}"
    return [{"tiles": tiles}, *figures([Figure("Sizes of the clusters", chart, f"{largest}, of {passed:,.0f} pairs in all")])]
