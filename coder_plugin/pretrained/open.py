"""Open a model to embed images and texts: from an export, a run's folder, the Hugging Face Hub, or open_clip's names.

Opening reads the export: its configuration, its weights, the scoring heads beside them, and ``coder_options.json``. A run's
folder adds how its data were read: :data:`RUN_OPTIONS`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.names import TRANSFORMERS
from coder_plugin.config import OPENING, READING, DataConfig, ModelConfig, flatten, resolve
from coder_plugin.data.decode import decode_image, to_rgb
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.rerankers import make_reranker, required_keys
from coder_plugin.locations import local_only
from coder_plugin.objective import Objective
from coder_plugin.pretrained.build import make_model, make_tokenizer, make_transform
from coder_plugin.pretrained.device import default_device, make_autocast
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import (
    INFERENCE_OPTIONS,
    check_finite,
    export_files,
    heads_beside,
    load_heads,
    read_heads,
    read_inference_options,
    verify,
    weights_named,
)
from coder_plugin.pretrained.export_manifest import check_files, read_manifest
from coder_plugin.pretrained.hub_cache import fetch
from coder_plugin.pretrained.text_tower import open_text_tower, simple_tokenizer

_log = logging.getLogger(__name__)

#: Options of a run's ``config.json`` that opening its folder takes over.
RUN_OPTIONS = ("batch_size", "workers", "max_bad_samples")
#: Options that opening reads, by flat name; others, such as those of training, are ignored.
_OPTIONS = (*OPENING, "aggregator", "context_blocks", *RUN_OPTIONS, *INFERENCE_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """How an opened model reads images and computes.

    Args:
        max_regions: a region model reads at most so many regions of an image, the first.
        precision: auto (bf16 on a GPU, fp32 on a CPU), fp32, amp, amp_bf16 or amp_fp16.
        rerank: how many candidates are re-ranked in evaluation and search, or "all"; None: 32.
        batch_size: images, and captions, per forward.
        workers: data loading processes.
        max_bad_samples: encoding a data set stops above this fraction of samples that cannot be used.
        channels_last: keep images channels-last.
    """

    max_regions: int = 36
    precision: str = "auto"
    rerank: str | None = None
    batch_size: int = 64
    workers: int = 2
    max_bad_samples: float = 0.01
    channels_last: bool = False


@dataclass(frozen=True)
class PretrainedModel:
    """A model in eval mode, with its tokenizer and its image transform.

    Args:
        name: what messages and tables call it.
        objective: the loss that it was trained with, as text; may be empty.
        model: towers, aggregators and scoring heads.
        tokenizer: n texts -> int64 [n, length].
        transform: a picture (PIL) -> [3, H, W]; for a region model, regions -> a dict of tensors.
        device: of the model.
        config: how it reads and computes.
        reranker: how the re-ranker was named; None: the model's own head re-ranks, if it has one.
        reranking: the re-ranker of this name.
    """

    name: str
    objective: str
    model: Any
    tokenizer: Callable[[list[str]], Tensor]
    transform: Callable[..., Any]
    device: torch.device
    config: InferenceConfig
    reranker: str | None = None
    reranking: Reranks | None = None

    @property
    def rerank(self) -> str | None:
        """How many candidates are re-ranked, or "all"; None: 32."""
        return self.config.rerank

    def encoder(self, **options: Any) -> Encoder:
        """An encoder of data sets; ``options`` of :class:`Encoder` win over the model's :class:`InferenceConfig`."""
        defaults = {
            "batch_size": self.config.batch_size,
            "workers": self.config.workers,
            "max_bad_samples": self.config.max_bad_samples,
            "autocast": make_autocast(self.config.precision, self.device),
            "reranker": self.reranking,
        }
        return Encoder(self.model, self.tokenizer, self.transform, device=self.device, **{**defaults, **options})

    def encode_images(self, images: Iterable[Any], *, batch_size: int | None = None) -> Tensor:
        """Retrieval vectors of images; their inner products with :meth:`encode_texts` are the scores.

        With V vectors of an image, its greatest product counts. A model with a fusion score re-ranks the shortlists that these
        vectors make.

        Args:
            images: n pictures (PIL) or their paths; for a region model :class:`~coder_plugin.data.regions.base.Regions`.
            batch_size: images per forward; None: the model's.

        Returns:
            [n, D], or [n, V, D] for a model with V vectors of an image; float32, on the CPU.

        Raises:
            CoderError: a picture that cannot be read.
            ValueError: no images, or a single one that is not in a list.
        """
        encoder = self.encoder(workers=0)
        batches = _split(images, batch_size or encoder.batch_size, "images")
        return torch.cat([encoder.image([_load(each) for each in batch])[0] for batch in batches])

    def encode_texts(self, texts: Iterable[str], *, batch_size: int | None = None) -> Tensor:
        """Retrieval vectors of n texts.

        Args:
            texts: n strings.
            batch_size: texts per forward; None: the model's.

        Returns:
            [n, D], float32, on the CPU.

        Raises:
            ValueError: no texts, or a single one that is not in a list.
        """
        encoder = self.encoder(workers=0)
        return torch.cat([encoder.text(batch)[0] for batch in _split(texts, batch_size or encoder.batch_size, "texts")])

    def fingerprint(self) -> str:
        """A digest of everything that decides the retrieval vectors except the precision: architecture, weights, scoring heads,
        and how images and texts are prepared. Paths and versions do not change it.

        Returns:
            64 hexadecimal digits.
        """
        digest = hashlib.sha256()
        coder = self.model.coder
        preparation = {
            "preprocess": getattr(getattr(self.model, "visual", None), "preprocess_cfg", None),
            "max_regions": self.config.max_regions if isinstance(self.model, Backbone) else None,
            "context_length": getattr(self.tokenizer, "context_length", None),
            "architecture": _architecture(self.model),
            "pooling": [sorted(coder.aggregators), coder.context_blocks],
            "weights": _without_vocabulary(coder.objective.heads),
        }
        digest.update(json.dumps(preparation, sort_keys=True, default=str).encode())
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def inference_options(self) -> dict[str, Any]:
        """The options that an export of this model stores, for :func:`~coder_plugin.pretrained.export.export_model`."""
        options = {name: value for name, value in asdict(self.config).items() if name in INFERENCE_OPTIONS}
        return {**options, "objective": self.objective}


#: Parts of a configuration's names that say where weights came from or how training started, not how vectors are computed.
_ORIGINS = ("pretrained", "hf_model_name", "hf_tokenizer_name", "init_logit", "patch_dropout")


def _architecture(model: Any) -> Any:
    """What a model computes beyond its weights: activations, attention heads, poolings, masks."""
    hugging_face = getattr(getattr(getattr(model, "text", None), "transformer", None), "config", None)
    text = {name: getattr(hugging_face, name, None) for name in ("model_type", "num_attention_heads", "hidden_act")}
    if not isinstance(model, Backbone):
        return [text, _without_origins(model.coder_config)]
    config = model.config()
    options = {name: value for name, value in config["options"].items() if name not in ("text", "pretrained_text")}
    return [text, config["backbone"], options]


def _without_origins(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_origins(value) for key, value in config.items() if not any(word in key for word in _ORIGINS)}


def _without_vocabulary(heads: Any) -> Any:
    """Options of heads without the vocabulary's path; its content is in the state."""
    return [(name, [option for option in options if option[0] != "vocabulary"]) for name, options in heads]


def _load(image: Any) -> Any:
    """A picture (PIL, RGB) or regions, from itself or a picture's path."""
    try:
        if isinstance(image, (str, Path)):
            return decode_image(str(image))
        return to_rgb(image) if hasattr(image, "convert") else image
    except (OSError, ValueError) as error:
        raise CoderError(f"{image}: {error}") from error


def _split(items: Iterable[Any], size: int, what: str) -> list[list[Any]]:
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ValueError(f"{what} must be a list, also if there is only one, not a {type(items).__name__}")
    items = list(items)
    if not items:
        raise ValueError(f"no {what}")
    return [items[start : start + size] for start in range(0, len(items), size)]


def open_pretrained(
    spec: str | Path | None,
    options: Mapping[str, Any] | None = None,
    *,
    export: str | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    source: Any = None,
    return_intermediates: Collection[str] = (),
    reranker: str | None = None,
    texts_only: bool = False,
) -> PretrainedModel:
    """Open a model with the heads that score, in eval mode.

    Args:
        spec: an export's folder, a run's, ``hf-hub:OWNER/NAME[@REVISION]`` or ``transformers:OWNER/NAME``; None: ``options``
            name the model.
        options: of model, data reading and precision, flat or nested, over those of the run and those stored in the export.
        export: which export of a run: "best" or "last"; None: as :func:`default_export`.
        name: what messages call the model; None: its weights' path or its name.
        device: of the model; None: this process's GPU, or the CPU.
        source: data to check the model against; None: none.
        return_intermediates: as in :func:`coder_plugin.create_model`.
        reranker: what re-ranks shortlists in place of the model's own head: a name of the group ``coder_plugin.rerankers``,
            with options or without, such as ``maxsim`` or ``maxsim(direction=both)``. None: the model's head, if it has one.
        texts_only: only texts will be encoded. An export without heads whose text tower is open_clip's own transformer is then
            opened without open_clip; any other as usual.

    Raises:
        CoderError: no export there, or a damaged or incomplete one; weights with NaN; a configuration that holds what it may
            not, such as code or a name on the hub; unknown options; data that the model cannot read; a re-ranker that does not
            exist, or that the model gives no tokens for.
    """
    config, inference, objective_text = _resolve(spec, options or {}, export)
    verify(config.pretrained)
    heads = heads_beside(config.pretrained)
    if heads is not None:
        settings = read_heads(heads)
        objective, names = settings.objective, settings.heads
        config = replace(config, aggregator=settings.aggregator, context_blocks=settings.context_blocks)
    else:
        objective, names = Objective.parse("clip"), ()  # any loss without heads: the towers' features are the score
    device = default_device() if device is None else torch.device(device)
    tower = None
    if texts_only and heads is None and reranker is None and _is_export(config):
        tower = open_text_tower(config.pretrained)
    model = tower.to(device) if tower is not None else make_model(
        config,
        objective,
        device,
        source,
        max_regions=inference.max_regions,
        inference=names,
        return_intermediates={*return_intermediates, *(() if reranker is None else required_keys(reranker))},
    )
    if heads is not None:
        load_heads(model, heads)
    check_finite(model, str(config.pretrained or config.name))
    return PretrainedModel(
        name=name or str(config.pretrained or config.name),
        objective=str(objective) if heads is not None else objective_text,
        model=model.eval(),
        tokenizer=make_tokenizer(config, model) if tower is None else simple_tokenizer(tower.context_length),
        transform=make_transform(model, max_regions=inference.max_regions) if tower is None else _refuse_image,
        device=device,
        config=inference,
        reranker=reranker,
        reranking=None if reranker is None else make_reranker(reranker, model.coder.backbone).to(device),
    )


def _refuse_image(_: Any) -> Any:
    raise CoderError("this model was opened for texts only")


def _is_export(config: ModelConfig) -> bool:
    """Whether the model is that of an export of open_clip's, as it is."""
    place = None if config.pretrained is None else f"local-dir:{Path(config.pretrained).parent}"
    plain = ModelConfig(name=config.name, pretrained=config.pretrained, channels_last=config.channels_last)
    return config.name == place and replace(config, cache_dir=None) == plain


def _resolve(
    spec: str | Path | None, options: Mapping[str, Any], export: str | None
) -> tuple[ModelConfig, InferenceConfig, str]:
    """How to build the model, how it computes, and its loss as text."""
    options = {key: value for key, value in flatten(options).items() if key in _OPTIONS}
    if isinstance(spec, str) and spec.startswith(TRANSFORMERS):
        spec, options["model"] = None, spec
    saved = saved_options(spec)
    run = {name: saved[name] for name in RUN_OPTIONS if name in saved}
    if type(run.get("workers")) is int:
        run["workers"] = min(run["workers"], os.cpu_count() or 1)  # of another machine, or of somebody who means ill
    stored: dict[str, Any] = {}
    if spec is not None:
        folder = export_folder(spec, export=export, cache_dir=options.get("cache_dir"))
        stored = read_inference_options(folder)
        weights, configuration = export_files(folder)
        options["pretrained"] = str(weights)
        if configuration is not None:
            options.update(model=str(configuration), model_kwargs=[])
        elif (folder / "open_clip_config.json").is_file() or "model" not in options:
            options["model"] = f"local-dir:{folder}"
    elif str(options.get("model")).startswith("local-dir:") and options.get("pretrained") is None:
        weights, _ = export_files(Path(options["model"].removeprefix("local-dir:")))
        options["pretrained"] = None if weights is None else str(weights)  # with the heads beside them
    objective = stored.pop("objective", "")
    config = resolve([("run", run), ("export", stored), ("flag", options)])
    inference = InferenceConfig(
        max_regions=config.data.max_regions,
        precision=config.optim.precision,
        rerank=config.evaluation.rerank,
        batch_size=config.optim.batch_size,
        workers=config.data.workers,
        max_bad_samples=config.data.max_bad_samples,
        channels_last=bool(config.model.channels_last),
    )
    return replace(config.model, pretrained=weights_named(config.model.pretrained)), inference, objective


@functools.lru_cache(maxsize=1024)
def _note_default(run: str) -> None:
    """Log which export is opened, once for each run."""
    if distributed.rank() == 0:
        by_open_clip = any((Path(run) / "export").glob("epoch_*"))
        why = "open_clip's trainer writes none" if by_open_clip else "no validation was run, or it was removed"
        _log.warning("%s has no export/best (%s): using export/last", run, why)


def default_export(spec: str | Path | None) -> str:
    """The export of a run that is opened if none is named.

    Returns:
        "best", which the best evaluation writes; "last", with a warning, for a run that has only that, because it was trained
        without validation.

    Example:
        >>> default_export("logs/my-run")  # there is no such folder, which opening it will say
        'best'
    """
    exports = Path(spec or "") / "export"
    has_best = (exports / "best").exists() or (exports / ".best.old").exists()  # between the renames of its replacement
    if spec is None or has_best or export_files(exports / "last")[0] is None:
        return "best"
    _note_default(str(spec))
    return "last"


def export_folder(spec: str | Path, *, export: str | None = None, cache_dir: str | None = None) -> Path:
    """The folder of an export.

    Args:
        spec: the folder itself, a run's folder, or ``hf-hub:OWNER/NAME[@REVISION]``.
        export: which export of a run: "best" or "last"; None: as :func:`default_export`.
        cache_dir: of the hub's downloads; None: the hub's own.

    Raises:
        CoderError: no export there.
    """
    folder = fetch(spec, cache_dir=cache_dir)
    if export_files(folder)[0] is not None:
        return folder
    export = export or default_export(folder)
    place = folder / "export" / export
    if not place.exists() and (replaced := place.with_name(f".{place.name}.old")).is_dir():
        place = replaced  # its replacement was killed between two renames
    if export_files(place)[0] is None:
        if (manifest := read_manifest(folder)) is not None:
            check_files(folder, manifest["files"])  # names the missing weights
        others = [name for name in ("best", "last") if export_files(folder / "export" / name)[0] is not None]
        hint = f" (it has --export {others[0]})" if others else "" if folder.exists() else " (there is no such folder)"
        if (folder / "training_args.bin").exists():
            hint = ": transformers' Trainer wrote it; coder_plugin.save_pretrained(trainer.model, FOLDER) writes one that opens"
        raise CoderError(f"{folder} is neither an export nor a run with one in export/{export}{hint}")
    return place


def model_name(spec: str | Path | None, options: Mapping[str, Any], *, export: str | None = None) -> str:
    """The name or configuration file of the model that :func:`open_pretrained` opens with these arguments."""
    return _resolve(spec, options, export)[0].name


def saved_options(spec: str | Path | None) -> dict[str, Any]:
    """The options of a run's ``config.json`` by flat name; empty if ``spec`` is not a run's folder.

    Somebody else may have written the file: its locations of data that run a command or fetch are marked, and refused when they
    are opened (:mod:`coder_plugin.locations`).

    Raises:
        CoderError: the file is damaged, or holds an unknown option.
    """
    if spec is None or export_files(Path(spec))[0] is not None or not (file := Path(spec) / "config.json").is_file():
        return {}
    options = read_json(file)
    try:
        return local_only(flatten(options))
    except AttributeError as error:
        raise CoderError(f"{file} cannot be read: it is not an object") from error
    except CoderError as error:
        raise CoderError(f"{file} cannot be read: {error}") from error


def saved_data_config(spec: str | Path | None, options: Mapping[str, Any]) -> DataConfig:
    """How to read the data of an evaluation: the run's, or those that ``options`` name.

    Args:
        spec: a run's folder; None or anything else: only ``options`` count.
        options: by flat name, over the run's. With ``val_data``, the run's options for reading its own data do not apply.
    """
    options = flatten(options)
    saved = saved_options(spec)
    if "val_data" in options:
        saved = {key: value for key, value in saved.items() if key not in (*READING, "hold_aside")}
        options.setdefault("train_data", saved.get("train_data") or options["val_data"])  # not the built-in scenes
    data = {name: value for name, value in {**saved, **options}.items() if name not in ("model", "loss")}
    return resolve([("options", data)]).data


def load_model(folder: str | Path, *, device: Any = None) -> Any:
    """A trained model that is ready to embed: towers, aggregators, scoring heads and vocabulary, in eval mode.

    ``embed_image`` and ``embed_text`` give the retrieval vectors that the run was evaluated with. For a model with a fusion
    score, which re-ranks, they are those that make its shortlists (docs/ascl.md).

    Args:
        folder: an export, such as ``RUN/export/best``; a run's (:func:`default_export`); or ``hf-hub:OWNER/NAME``.
        device: None: the CPU.

    Returns:
        The model, an ``nn.Module``.

    Raises:
        CoderError: no export there, or a damaged one.

    Example:
        >>> import tempfile, torch, coder_plugin
        >>> from coder_plugin.pretrained.export import export_model
        >>> model = coder_plugin.create_model("coder-tiny", loss="dcl")
        >>> folder = tempfile.mkdtemp()
        >>> path = export_model(model, folder)
        >>> model = load_model(folder)
        >>> model.embed_text(torch.zeros(2, 40, dtype=torch.long)).shape
        torch.Size([2, 128])
    """
    return open_pretrained(folder, device=torch.device(device or "cpu")).model
