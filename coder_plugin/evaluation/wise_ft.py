"""A fine-tuned CLIP beside the one that it came from, and weights between them (WiSE-FT; Wortsman et al., CVPR 2022)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.backbones import plugin_backbones
from coder_plugin.config import TrainConfig, flatten
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import export_heads, export_model, exported, plain_state
from coder_plugin.pretrained.hub_cache import WISE_FT, is_on_hub
from coder_plugin.pretrained.open import Trained, open_trained, trained_config

#: Options of a run that say nothing of the plain CLIP that it began with.
_PLAIN = {"loss": "clip", "set": [], "aggregator": "tower", "context_blocks": 1, "negatives": None, "positives": None}
_NAMED = {"zeroshot": "--zeroshot", "base": "--base", "wise_ft": "--wise-ft", "wise_ft_save": "--wise-ft-save"}


class Asked(NamedTuple):
    """What the flags ask for."""

    base: str | None
    alphas: tuple[float, ...]  # ascending; none: no weights between
    save: tuple[float, Path] | None
    classifies: bool


def asked(arguments: Any, runs: Sequence[str | None]) -> Asked | None:
    """None: nothing of a model before and after fine-tuning.

    Raises:
        CoderError: flags that do not go together, a weight out of range, a folder that holds a model already or that cannot
            be made.
    """
    given = {flag: value for name, flag in _NAMED.items() if (value := getattr(arguments, name, None)) is not None}
    if not given:
        return None
    flags = " and ".join(given)
    if len(runs) > 1:
        raise CoderError(f"{flags}: of one model, and there are {len(runs)}")
    for other in ("beta", "context_weight", "analyses", "pictures"):
        if getattr(arguments, other, None):
            raise CoderError(f"{flags}: leave out --{other.replace('_', '-')}, and ask for it by itself")
    save = None
    if "--wise-ft-save" in given:
        alpha, folder = given["--wise-ft-save"]
        try:
            save = float(alpha), Path(folder)
        except ValueError:
            raise CoderError(f"--wise-ft-save {alpha} {folder}: a number from 0 to 1, then a folder") from None
    alphas = [*given.get("--wise-ft", ()), *([] if save is None else save[:1])]
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise CoderError(f"--wise-ft goes from 0, the model before, to 1, the fine-tuned one, got {alpha}")
    if save is not None:
        _make(save[1])  # now, and not when everything has been encoded
    return Asked(given.get("--base"), tuple(sorted(set(alphas))), save, "--zeroshot" in given)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise CoderError(f"--wise-ft-save {folder}: cannot be made a new folder: {error}") from error
    if used:
        raise CoderError(f"--wise-ft-save {folder}: there is something already: name a new folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CoderError(f"--wise-ft-save {folder}: nothing can be written there")


def open_base(
    run: str | None, given: Mapping[str, Any], tuned: TrainConfig, source: Any, tuning: Asked, *, export: str
) -> Trained | None:
    """The model that a run was fine-tuned from, None where none is named and the run began with random towers.

    Args:
        run: the run's folder, or an export's; None: ``given`` names the model.
        given: options of the command line. tuned: the fine-tuned model's.
        source: the data to evaluate on. export: which of a base that is a run, best or last.

    Raises:
        CoderError: a model of regions, weights between that want a base, or a fine-tuned model, where there is none, a base
            whose architecture nothing says.
    """
    if (tuning.classifies or tuning.alphas) and plugin_backbones.find_backbone(tuned.model.name) is not None:
        what = "--wise-ft goes between two CLIPs" if tuning.alphas else "--zeroshot classifies pictures"
        raise CoderError(f"{what}, and this model reads region features")
    if tuning.alphas and tuned.model.pretrained is None:
        raise CoderError("--wise-ft goes to a fine-tuned model, which nothing names: give a run, an export or --pretrained")
    options: dict[str, Any] = {}
    if run is not None and exported(Path(run))[0] is None and (file := Path(run) / "config.json").is_file():
        options = flatten(json.loads(file.read_text()))
    name = tuning.base or options.get("pretrained")
    if name is None:
        if tuning.alphas:
            what = "the model before fine-tuning, which nothing names (--pretrained of the run)"
            raise CoderError(f"--wise-ft goes from {what}: name it with --base")
        return None
    if tuning.base is not None and (is_on_hub(name) or Path(name).is_dir()):
        kept = ("batch_size", "workers", "precision", "cache_dir", "train_data")
        config = trained_config(name, {key: given[key] for key in kept if key in given}, export=export)
    else:
        options = {**options, **given, "pretrained": name}
        if options.get("model") is None and not tuned.data.on_scenes:
            raise CoderError(f"--base {name}: {run} does not say of which architecture these weights are: name it with --model")
        config = trained_config(None, {**options, **_PLAIN})
    where = Path(name).parent if Path(name).is_file() else name  # as a person names it
    return open_trained(config, name=f"before: {where}", source=source)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Those of the plain CLIP, copied to the CPU."""
    return {name: value.detach().cpu().clone() for name, value in plain_state(model).items()}


class Between:
    """A fine-tuned model whose towers are put between those that it came from and its own.

    All parameters and floating-point buffers of the plain CLIP are interpolated, the temperature with them (as the logarithm
    that it is stored as: it moves no rank). Whole numbers stay the fine-tuned, SigLIP's bias where one of the two has none,
    and the scoring heads. The fine-tuned weights are those of the model as it was opened (of its image size, in its
    precision), copied to the CPU: in memory are the model, and the weights of both.

    Args:
        model: the fine-tuned, an open_clip model with heads.
        base: the weights of the other, by the same names and of the same shapes.

    Raises:
        CoderError: another architecture.
    """

    def __init__(self, model: Any, base: Mapping[str, Tensor]) -> None:
        tuned = weights_of(model)
        odd = sorted((tuned.keys() ^ base.keys()) - {"logit_bias"})
        odd += sorted(name for name in tuned.keys() & base.keys() if tuned[name].shape != base[name].shape)
        if odd:
            raise CoderError(
                f"--wise-ft: the model before fine-tuning is of another architecture: {len(odd)} weights differ in name or "
                f"shape, such as {odd[0]}"
            )
        self.model, self.base = model, base
        self.tuned = {name: value for name, value in tuned.items() if name in base and value.is_floating_point()}

    @torch.no_grad()
    def to(self, alpha: float) -> None:
        """Put the towers at ``(1 - alpha) * base + alpha * fine-tuned``; 0 and 1 are these to the bit."""
        live = plain_state(self.model)
        for name, tuned in self.tuned.items():
            # in float32, whatever the model is in; exact at both ends
            live[name].copy_(torch.lerp(self.base[name].float(), tuned.float(), alpha))


def save(encoder: Encoder, folder: Path, **made: Any) -> None:
    """The model as it now is, as a run exports it, and of what it was ``made``, which a model card tells.

    Raises:
        CoderError: it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        export_model(encoder.model, folder, tokenizer=encoder.tokenizer)
        export_heads(encoder.model, folder)
        (folder / WISE_FT).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CoderError(f"--wise-ft-save {folder}: cannot be written: {error}") from error
