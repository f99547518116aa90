"""A trained model, opened to embed: where evaluation, index, search, report and sharing begin.

It is named by a run's folder, by an export's (``RUN/export/best``, or one that was shared), by a repository that one was
shared to (``hf-hub:OWNER/NAME``), or by open_clip's ``--model`` and ``--pretrained``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones.base import Backbone
from coder_plugin.config import READING, TrainConfig, flatten
from coder_plugin.data.source import decode_image
from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.device import default_device, make_autocast
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import exported, heads_beside, load_heads, read_heads
from coder_plugin.pretrained.hub_cache import fetch, kept_options
from coder_plugin.pretrained.options import resolve_config

#: Of a run's options, those that say nothing of the model it has become.
_OF_TRAINING = {"resume": None, "lora_rank": 0, "pretrained_image_path": None, "pretrained_image": False, "report_to": ""}


@dataclass(frozen=True)
class Trained:
    """A model in eval mode with what it reads: texts -> ids [B, T], what an item loads -> a tensor or a dict of them."""

    name: str
    config: TrainConfig
    model: Any
    tokenizer: Callable[[list[str]], Tensor]
    transform: Callable[..., Any]
    device: torch.device

    def encoder(self, **options: Any) -> Encoder:
        """For data sets, as the configuration has it; ``options``: of :class:`Encoder`, instead."""
        config = self.config
        given = {
            "batch_size": config.optim.batch_size,
            "workers": config.data.workers,
            "max_bad": config.data.max_bad_images,
            "autocast": make_autocast(config.optim.precision, self.device),
        }
        return Encoder(self.model, self.tokenizer, self.transform, device=self.device, **{**given, **options})

    def encode_images(self, images: Iterable[Any], *, batch_size: int | None = None) -> Tensor:
        """Retrieval vectors [n, D], or [n, V, D] of a model that gives an image V features; float32, on the CPU.

        Their inner products with :meth:`encode_texts` are the scores (of V features the greatest); of a model that re-ranks,
        those of its shortlists.

        Args:
            images: n pictures (PIL) or their paths; for a region model :class:`~coder_plugin.data.regions.base.Regions`.
            batch_size: None: the configuration's.

        Raises:
            CoderError: a picture that cannot be read. ValueError: no images, or a single one that is not in a list.
        """
        encoder = self.encoder(workers=0)
        size = batch_size or encoder.batch_size
        return torch.cat([encoder.image([_loaded(each) for each in part])[0] for part in _parts(images, size, "images")])

    def encode_texts(self, texts: Iterable[str], *, batch_size: int | None = None) -> Tensor:
        """Retrieval vectors [n, D] of n texts, float32, on the CPU.

        Raises:
            ValueError: no texts, or a single one that is not in a list.
        """
        encoder = self.encoder(workers=0)
        size = batch_size or encoder.batch_size
        return torch.cat([encoder.text(part)[0] for part in _parts(texts, size, "texts")])

    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that decides the retrieval vectors but the arithmetic's precision: architecture,
        weights, scoring heads, and how pictures and texts are prepared. Paths and versions do not change it."""
        digest = hashlib.sha256()
        coder = self.model.coder
        preparation = {
            "preprocess": getattr(getattr(self.model, "visual", None), "preprocess_cfg", None),
            "max_regions": self.config.data.max_regions if isinstance(self.model, Backbone) else None,
            "context_length": getattr(self.tokenizer, "context_length", None),
            "architecture": _architecture(self.model),
            "pooling": [sorted(coder.aggregators), coder.context_blocks],
            "weights": _without_paths(coder.objective.heads),
        }
        digest.update(json.dumps(preparation, sort_keys=True, default=str).encode())
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


#: Of a configuration, what says where parts came from or how training began, and nothing of the vectors.
_ORIGINS = ("pretrained", "hf_model_name", "hf_tokenizer_name", "init_logit", "patch_dropout")


def _architecture(model: Any) -> Any:
    """How a model computes, which its weights do not say: activations, heads of attention, poolings, masks."""
    hugging = getattr(getattr(getattr(model, "text", None), "transformer", None), "config", None)
    named = {name: getattr(hugging, name, None) for name in ("model_type", "num_attention_heads", "hidden_act")}
    if not isinstance(model, Backbone):
        return [named, _without_origins(model.coder_config)]
    made = model.config()
    options = {name: value for name, value in made["options"].items() if name not in ("text", "pretrained_text")}
    return [named, made["backbone"], options]


def _without_origins(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_origins(value) for key, value in config.items() if not any(word in key for word in _ORIGINS)}


def _without_paths(heads: Any) -> Any:
    """Options of heads less where a vocabulary was: what it says is in the state."""
    return [(name, [option for option in options if option[0] != "vocabulary"]) for name, options in heads]


def _loaded(image: Any) -> Any:
    """What an item of a data set loads, of a picture or its path."""
    if isinstance(image, (str, Path)):
        try:
            return decode_image(str(image))
        except (OSError, ValueError) as error:
            raise CoderError(f"{image}: {error}") from error
    return image.convert("RGB") if hasattr(image, "convert") else image


def _parts(items: Iterable[Any], size: int, what: str) -> list[list[Any]]:
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ValueError(f"{what} must be a list, also of one, and not a {type(items).__name__}")
    items = list(items)
    if not items:
        raise ValueError(f"no {what}")
    return [items[at : at + size] for at in range(0, len(items), size)]


def trained_config(spec: str | Path | None, given: Mapping[str, Any], *, export: str = "best") -> TrainConfig:
    """The options that open a model.

    Args:
        spec: a run's folder, whose options hold as far as ``given`` does not say otherwise; an export's, or
            ``hf-hub:OWNER/NAME[@REVISION]``, one that was shared; None: ``given`` alone names the model.
        given: options, flat or nested.
        export: which of a run's, best or last.

    Raises:
        CoderError: nothing to open there.
    """
    given = flatten(given)
    if spec is not None:
        folder = fetch(spec, cache_dir=given.get("cache_dir"))
        given = {**_options_of(folder, given), **given, **_weights_of(folder, export)}
    return resolve_config({**given, **_OF_TRAINING})


def _is_run(folder: Path) -> bool:
    """Whether the options of a training run are there, and not an export's."""
    return exported(folder)[0] is None and (folder / "config.json").is_file()


def _weights_of(folder: Path, export: str) -> dict[str, Any]:
    """The options that name an export's weights, and its configuration with every option that the data decided."""
    place = folder if exported(folder)[0] is not None else folder / "export" / export
    weights, configuration = exported(place)
    if weights is None:
        there = [name for name in ("best", "last") if exported(folder / "export" / name)[0] is not None]
        hint = f" (it has --export {there[0]})" if there else "" if folder.exists() else " (there is no such folder)"
        raise CoderError(f"{folder} is neither an export nor a run with one in export/{export}{hint}")
    found: dict[str, Any] = {"pretrained": str(weights)}
    if configuration is not None:
        found.update(model=str(configuration), model_kwargs=[])
    elif not _is_run(folder) or _configuration_gone(folder):
        found.update(model=f"local-dir:{place}", model_kwargs=None)
    return found


def _configuration_gone(run: Path) -> bool:
    """Whether the run's model was a configuration's path that leads nowhere from here; its exports have it as well."""
    model = flatten(json.loads((run / "config.json").read_text())).get("model", "")
    return model.endswith(".json") and not Path(model).is_file()


def _options_of(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was trained with; of other data, how the run's were read says nothing. What came with a shared folder."""
    if not _is_run(folder):
        return kept_options(folder)
    trained = flatten(json.loads((folder / "config.json").read_text()))
    return {key: value for key, value in trained.items() if "val_data" not in given or key not in READING}


def open_trained(
    config: TrainConfig,
    *,
    name: str | None = None,
    device: torch.device | None = None,
    source: Any = None,
    return_intermediates: Collection[str] = (),
) -> Trained:
    """The model that :func:`trained_config` has named, with the heads that score, in eval mode.

    Args:
        device: None: this process's GPU, or the CPU.
        source: data to check it against. return_intermediates: as in :func:`coder_plugin.create_model`.
    """
    heads = heads_beside(config.model.pretrained)
    if heads is not None:
        made = read_heads(heads)
        objective = made.objective
        config = config.with_options(aggregator=made.aggregator, context_blocks=made.context_blocks)
    else:
        objective = Objective.parse(config.loss.expression)
    if device is None:
        device = default_device()
    model = build.make_model(
        config, objective, device, source, inference=True, return_intermediates=return_intermediates
    )
    if heads is not None:
        load_heads(model, heads)
    return Trained(
        name or str(config.model.pretrained or config.model.name),
        config,
        model.eval(),
        build.make_tokenizer(config, model),
        build.make_transforms(model, config)[1],
        device,
    )


def load_model(folder: str | Path, *, device: Any = None) -> Any:
    """A trained model, ready to embed: towers, aggregators, scoring heads and vocabulary of an export.

    In eval mode; ``embed_image`` and ``embed_text`` give the retrieval vectors that the run was evaluated with; of a model with
    a fusion score, which re-ranks, those of its shortlists (docs/ascl.md).

    Args:
        folder: an export, ``RUN/export/best`` or ``RUN/export/last``, or a run's folder: its best; or ``hf-hub:OWNER/NAME``.
        device: None: the CPU.

    Raises:
        CoderError: no export there, or one that is damaged.
    """
    return open_trained(trained_config(folder, {}), device=torch.device(device or "cpu")).model
