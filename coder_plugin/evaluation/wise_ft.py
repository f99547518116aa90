"""A fine-tuned CLIP, the model it was fine-tuned from, and weights between the two (WiSE-FT; Wortsman et al., CVPR 2022)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones import plugin_backbones
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.pretrained.export import export_model, plain_state
from coder_plugin.pretrained.hub_cache import WISE_FT, is_on_hub
from coder_plugin.pretrained.open import PretrainedModel, model_name, open_pretrained, saved_options
from coder_plugin.pretrained.saved_model import SAVED_OPTIONS, check_saved_model

#: Options of a run that do not apply to the plain CLIP that it started from.
_PLAIN = {"aggregator": "tower", "context_blocks": 1}


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What to compare with the model before fine-tuning; see :func:`fine_tuning`.

    Args:
        base: the model before; None: the run's ``--pretrained``.
        alphas: weights between the two, ascending; none: only before and after.
        save: the weight at which the model is exported, and the folder.
        classifies: whether pictures are classified.
        flags: the flags that were given, for messages.
    """

    base: str | None
    alphas: tuple[float, ...]
    save: tuple[float, Path] | None
    classifies: bool
    flags: str


def fine_tuning(
    *,
    zeroshot: str | None = None,
    base: str | None = None,
    alphas: Sequence[float] | None = None,
    save: Sequence[str] | None = None,
) -> FineTuning | None:
    """The options of ``--zeroshot``, ``--base``, ``--wise-ft`` and ``--wise-ft-save``, checked; None if none was given.

    Raises:
        CoderError: a weight out of range, a folder that is not new or cannot be written.
    """
    values = {"--zeroshot": zeroshot, "--base": base, "--wise-ft": alphas, "--wise-ft-save": save}
    flags = " and ".join(flag for flag, value in values.items() if value is not None)
    if not flags:
        return None
    export: tuple[float, Path] | None = None
    if save is not None:
        alpha, folder = save
        try:
            export = float(alpha), Path(folder)
        except ValueError:
            raise CoderError(f"--wise-ft-save {alpha} {folder}: give a number from 0 to 1, then a folder") from None
    weights = [*(alphas or ()), *([] if export is None else export[:1])]
    for weight in weights:
        if not 0 <= weight <= 1:
            raise CoderError(f"--wise-ft goes from 0, the model before, to 1, the fine-tuned one, got {weight}")
    if export is not None:
        _make_new_folder(export[1])  # before everything is encoded
    return FineTuning(
        base=base, alphas=tuple(sorted(set(weights))), save=export, classifies=zeroshot is not None, flags=flags
    )


def _make_new_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise CoderError(f"--wise-ft-save {folder}: the folder cannot be made: {error}") from error
    if used:
        raise CoderError(f"--wise-ft-save {folder}: the folder is not empty: name a new one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CoderError(f"--wise-ft-save {folder}: the folder cannot be written")


def open_base(
    spec: str | None,
    options: Mapping[str, Any],
    source: Any,
    tuning: FineTuning,
    *,
    export: str | None = None,
    reranker: str | None = None,
) -> PretrainedModel | None:
    """The model that a run was fine-tuned from; None if none is named and the run started from random towers.

    Args:
        spec: the run's or the export's folder; None: ``options`` name the model.
        options: of model and data, by flat name.
        source: the data to evaluate on.
        tuning: which base, and what is done with it.
        export: which export, if the base is a run: "best" or "last"; None: best, or last if there is no best.
        reranker: as in :func:`~coder_plugin.pretrained.open.open_pretrained`.

    Raises:
        CoderError: a region model; no base or no fine-tuned model where weights between them are asked for; a base whose
            architecture is unknown.
    """
    reads_regions = plugin_backbones.find_backbone(model_name(spec, options, export=export)) is not None
    if reads_regions and (tuning.classifies or tuning.alphas):
        reason = "--wise-ft goes between two CLIPs" if tuning.alphas else "--zeroshot classifies pictures"
        raise CoderError(f"{reason}, and this model reads region features")
    if tuning.alphas and spec is None and options.get("pretrained") is None:
        raise CoderError("--wise-ft goes to a fine-tuned model, which nothing names: give a run, an export or --pretrained")
    saved = {key: value for key, value in saved_options(spec).items() if key not in ("cache_dir", *options)}
    if tuning.base is not None:
        saved.pop("pretrained", None)
    opened = {key: value for key, value in saved.items() if key in SAVED_OPTIONS}
    saved = {**saved, **check_saved_model(opened, f"{spec}/config.json")}
    name = tuning.base or saved.get("pretrained")
    if name is None:
        if tuning.alphas:
            raise CoderError(
                "--wise-ft goes from the model before fine-tuning, which nothing names (--pretrained of the run): name it with "
                "--base"
            )
        return None
    label = f"before: {Path(name).parent if Path(name).is_file() else name}"
    if tuning.base is not None and (is_on_hub(name) or Path(name).is_dir()):
        opening = {key: options[key] for key in ("batch_size", "workers", "precision", "cache_dir") if key in options}
        return open_pretrained(name, opening, export=export, name=label, source=source, reranker=reranker)
    opening = {**saved, **options, "pretrained": name, **_PLAIN}
    if opening.get("model") is None and not source.name.startswith("scenes"):
        raise CoderError(f"--base {name}: {spec} does not say of which architecture these weights are: name it with --model")
    return open_pretrained(None, opening, name=label, source=source, reranker=reranker)


def plain_weights(model: Any) -> dict[str, Tensor]:
    """The state dict of the plain CLIP, copied to the CPU."""
    return {name: value.detach().cpu().clone() for name, value in plain_state(model).items()}


def interpolate(model: Any, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], alpha: float) -> None:
    """Set a fine-tuned model's towers to ``(1 - alpha) * base + alpha * tuned``, exactly these at 0 and 1.

    All parameters and floating-point buffers of the plain CLIP are interpolated, also the logarithm of the temperature. Integer
    buffers, the scoring heads, and SigLIP's bias where only one of the two has one, stay the fine-tuned ones.

    Args:
        model: the fine-tuned open_clip model, with its heads.
        base: the weights before, of :func:`plain_weights`.
        tuned: the weights after.
        alpha: from 0 to 1.

    Raises:
        CoderError: the two models have different architectures.
    """
    different = sorted((tuned.keys() ^ base.keys()) - {"logit_bias"})
    different += sorted(name for name in tuned.keys() & base.keys() if tuned[name].shape != base[name].shape)
    if different:
        raise CoderError(
            f"--wise-ft: the model before fine-tuning has another architecture: {len(different)} weights differ in name "
            f"or shape, such as {different[0]}"
        )
    live = plain_state(model)
    with torch.no_grad():
        for name in tuned.keys() & base.keys():
            if tuned[name].is_floating_point():  # in float32 whatever the model's dtype, so that both ends are exact
                live[name].copy_(torch.lerp(base[name].float(), tuned[name].float(), alpha))


def save(pretrained: PretrainedModel, folder: Path, **origin: Any) -> None:
    """Export the model as it is now, with ``origin`` (weight and the two models' names) for the model card.

    Raises:
        CoderError: it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        options = pretrained.inference_options()
        export_model(pretrained.model, folder, tokenizer=pretrained.tokenizer, options=options)
        with atomic_write(folder / WISE_FT, "w") as file:
            file.write(json.dumps(origin, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        raise CoderError(f"--wise-ft-save {folder}: cannot be written: {error}") from error
