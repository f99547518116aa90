"""open_clip's models, extended in place with the heads of a loss.

The instance keeps its attributes and state-dict keys. Its class becomes a subclass that adds ``coder``, ``embed_image`` and
``embed_text``, and whose forward in training mode returns the heads' keys as well.

Shapes: B batch, T text positions, H x W pixels, D joint dimension, F channels of a retrieval vector.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.backbones.base import BackboneInfo, as_weights, forward_with_heads
from coder_plugin.backbones.extended_class import Extended, extended_class
from coder_plugin.backbones.feature_capture import FeatureCapture, text_mask_of, word_embedding_of
from coder_plugin.backbones.names import CONFIGS, unknown_model
from coder_plugin.backbones.untrusted import (
    TEXT_FOLDER,
    check_bytes,
    check_config,
    check_folder,
    check_preprocessing,
    check_text_names,
    config_size,
    known_names,
)
from coder_plugin.backbones.word_embeddings import WordEmbeddings
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.hub_access import hub_access, loading

log = logging.getLogger(__name__)
#: Key in a checkpoint of open_clip's trainer, with the options of the heads.
HEAD_OPTIONS = "coder"
#: The keys of ``resolver.INTERMEDIATE_KEYS`` that open_clip's towers have.
INTERMEDIATE_KEYS = frozenset(
    "image_tokens image_mask image_locals image_contexts image_context_mask image_pooled "
    "text_tokens text_mask text_locals text_contexts text_context_mask".split()
)
#: The keys whose number of channels heads are built from.
_CHANNEL_KEYS = [f"{side}_{stage}" for side in ("image", "text") for stage in ("tokens", "locals", "contexts")]


class CoderCLIP(Extended):
    """Mixin of open_clip models with heads. See :func:`coder_plugin.create_model`."""

    coder: Any
    word_embeddings: WordEmbeddings
    _coder_capture: FeatureCapture | None
    #: The input that Hugging Face's Trainer hands to metrics.
    main_input_name = "image"

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Recompute activations in the backward pass; the trainers of Hugging Face call it."""
        self.set_grad_checkpointing(True)  # type: ignore[attr-defined]

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        *args: Any,
        text_positive: Tensor | None = None,
        text_tags: Tensor | None = None,
        image_id: Tensor | None = None,
        text_negatives: Tensor | None = None,
        text_negative_ids: Tensor | None = None,
        **upstream: Any,
    ) -> Any:
        """Images [B, 3, H, W] and ids [B, T] -> open_clip's keys and, in training mode, the heads' ``coder_*`` keys.

        ``text_positive`` [B, T], ``text_tags`` [B, T], ``image_id`` [B], ``text_negatives`` [B, n, T] and ``text_negative_ids``
        [B, n] are for the heads that require them (:func:`coder_plugin.backbones.base.forward_with_heads`).

        Raises:
            CoderError: an image dict of NaFlex; in training mode, images, texts or ids that are no tensors of their kind.
        """
        if isinstance(image, Mapping):
            raise CoderError("NaFlex image dicts are not supported: give images as one tensor [B, 3, H, W]")
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(image, text, *args, **upstream)  # type: ignore[misc]
        _check_inputs(image, text, image_id)
        return forward_with_heads(
            self,
            functools.partial(self._run_towers, args, upstream),
            image,
            text,
            text_positive=text_positive,
            text_tags=text_tags,
            image_id=image_id,
            text_negatives=text_negatives,
            text_negative_ids=text_negative_ids,
        )

    def _run_towers(
        self, args: tuple[Any, ...], upstream: dict[str, Any], image: Tensor | None, text: Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self._start_capture()
        image = as_weights(self, image)
        outputs = super().forward(image, text, *args, **upstream)  # type: ignore[misc]
        return outputs, self._collect(text)

    def embed_image(self, image: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> retrieval vectors [B, F]. Their inner products with :meth:`embed_text` are the scores.

        A vector is the L2-normalised feature and each scoring head's block, multiplied by the roots of their weights.
        """
        return self.coder.embed("image", self.describe_image(image))

    def embed_text(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> retrieval vectors of texts [B, F]."""
        return self.coder.embed("text", self.describe_text(text))

    def describe_image(self, image: Tensor) -> dict[str, Tensor]:
        """All keys of images alone, from which :meth:`embed_image` and re-ranking are computed."""
        self._start_capture()
        image = as_weights(self, image)
        feature = F.normalize(self.encode_image(image).float(), dim=-1)  # type: ignore[attr-defined]
        features = {"image_features": feature, **self._collect(None)}
        return {**features, **self.coder.aggregate(features)}

    def describe_text(self, text: Tensor) -> dict[str, Tensor]:
        """All keys of texts alone, from which :meth:`embed_text` and re-ranking are computed."""
        self._start_capture()
        feature = F.normalize(self.encode_text(text).float(), dim=-1)  # type: ignore[attr-defined]
        features = {"text_features": feature, **self._collect(text)}
        return {**features, **self.coder.aggregate(features)}

    def _start_capture(self) -> None:
        if self._coder_capture is not None:
            self._coder_capture.start()

    def _collect(self, text: Tensor | None) -> dict[str, Tensor]:
        return {} if self._coder_capture is None else self._coder_capture.collect(text)


def _check_inputs(image: Any, text: Any, image_id: Any) -> None:
    """Raise CoderError for pictures, texts or numbers in place of tensors, and for arguments in another order."""
    for name, value, is_float, what in (
        ("image", image, True, "make_transform(model) makes a tensor of a picture, and torch.stack the batch [B, 3, H, W]"),
        ("text", text, False, "the tokenizer makes the ids, int64 [B, T], of a list of texts; images come before them"),
        ("image_id", image_id, False, "ids are integers, a tensor int64 [B]"),
    ):
        kind: Any = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if value is not None and (not isinstance(value, Tensor) or value.is_floating_point() != is_float):
            raise CoderError(f"{name} is {kind}: {what}")


def create_clip(
    name: str,
    *,
    pretrained: str | None = None,
    pretrained_image_path: str | None = None,
    needs_logit_bias: bool = False,
    create: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """An open_clip model that returns a dict. Faults in the name or the files raise one-line errors.

    Args:
        name: a name of ``open_clip.list_models()`` or of ``model_configs/``, ``local-dir:DIR``, ``hf-hub:REPO``, or the path
            of an open_clip model configuration (``.json``).
        pretrained: open_clip tag or file. pretrained_image_path: weights for the image tower alone, checked.
        needs_logit_bias: add SigLIP's bias and temperature where the configuration has none.
        create: a function to call instead of ``open_clip.create_model``.
        options: passed on to it.

    Raises:
        CoderError: an unknown name or tag, or files that do not fit.
    """
    import open_clip

    name = register_config(name)
    config = read_config(name, options.get("cache_dir"))
    schema, location = open_clip.factory.parse_model_name(name)
    if schema:
        if pretrained and not Path(pretrained).is_file():
            raise CoderError(f"--pretrained {pretrained!r} is not a file, and {name} has no tags")
    else:
        if not config:
            raise unknown_model(name, [*open_clip.list_models(), *registry.names("backbones")])
        if pretrained and not Path(pretrained).is_file():
            tags = open_clip.list_pretrained_tags_by_model(name)
            if pretrained not in tags:
                allowed = ", ".join(tags) or "none"
                raise CoderError(f"--pretrained {pretrained!r} is neither a file nor a tag of {name} (tags: {allowed})")
    if saved := saved_preprocessing(pretrained):
        options = {**options, "force_preprocess_cfg": {**saved, **(options.get("force_preprocess_cfg") or {})}}
    if needs_logit_bias and "init_logit_bias" not in config:
        options = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0, **options}
    if schema == "local-dir" and "hf_model_name" in config.get("text_cfg", {}):
        options = {**exported_text_config(Path(location), config["text_cfg"]), **options}
    if schema == "local-dir" and config and pretrained and Path(pretrained).is_file():
        check_bytes(config_size(config, Path(pretrained).parent), Path(pretrained), name)
    trained = is_training_checkpoint(pretrained)
    weights = Path(pretrained or Path(location) / "open_clip_model.safetensors") if schema == "local-dir" else None
    text_tower = {**config.get("text_cfg", {}), **options.get("text_cfg", {})}.get("hf_model_name")
    tag = {} if schema or pretrained is None else open_clip.get_pretrained_cfg(name, pretrained) or {}
    fetches_weights = pretrained and not schema and not Path(pretrained).is_file()
    fetches_text = text_tower and not Path(text_tower).is_dir()
    downloads = [  # whether something must be downloaded, what, the flag that takes a copy instead, and its repository
        (fetches_weights, f"its weights {pretrained!r}", "--pretrained FILE", tag.get("hf_hub")),
        (schema == "hf-hub", f"the repository {location!r}", "--model local-dir:FOLDER", location),
        (options.get("pretrained_image"), "timm's weights of its image tower", "--pretrained-image-path FILE", None),
        (fetches_text, f"its text tower {text_tower!r}", "--model CONFIGURATION.json", text_tower),
    ]
    needed = {what: flag for is_needed, what, flag, _ in downloads if is_needed}
    repositories = ["/".join(source.split("/")[:2]) for is_needed, _, _, source in downloads if is_needed and source]
    with loading(f"model {name!r} cannot be created", needed, repositories), without_weights_warning():
        create = create or open_clip.create_model
        model = create(name, None if schema or trained else pretrained, output_dict=True, **options)
        if trained:
            load_training_checkpoint(model, pretrained)  # type: ignore[arg-type]
        elif schema and pretrained:  # with a schema open_clip loads only the schema's weights
            open_clip.load_checkpoint(model, pretrained)
    if weights is not None and weights.is_file():
        _check_positions(model, weights, options)
    _check_context(name, model)
    if not (schema or pretrained):
        init_decoder(model)
    if pretrained_image_path:
        load_image_tower(model, pretrained_image_path)
    model.coder_config = effective_config(config, options)
    return model


@contextlib.contextmanager
def without_weights_warning() -> Iterator[None]:
    """A context without open_clip's warnings that a model starts with random weights, or that a download failed: weights may
    be loaded afterwards, and our own messages say so."""
    loggers = logging.getLogger(), logging.getLogger("open_clip.factory")

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("No pretrained weights loaded", "Failed to download weights"))

    for logger in loggers:
        logger.addFilter(other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(other)


def _check_context(name: str, model: Any) -> None:
    """Refuse a Hugging Face text tower with fewer positions than its texts may have tokens: a long caption would end a run.

    Raises:
        CoderError: names both numbers.
    """
    tower = getattr(getattr(model, "text", None), "transformer", None)
    for path, layer in tower.named_modules() if tower is not None else ():
        if path.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            first = 0 if layer.padding_idx is None else layer.padding_idx + 1  # of RoBERTa
            positions = layer.num_embeddings - first
            if positions < (model.context_length or 0):
                raise CoderError(
                    f"model {name!r}: its texts may have {model.context_length} tokens and its text tower has {positions} "
                    f"positions: set --open-clip force_context_length={positions}"
                )


def _check_positions(model: Any, weights: Path, options: Mapping[str, Any]) -> None:
    """Refuse an export whose positional embeddings open_clip has resized, unless another size was asked for.

    Raises:
        CoderError: names the tensor.
    """
    from safetensors import safe_open

    if weights.suffix != ".safetensors":
        return
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    with safe_open(weights, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if name in expected}
    asked = {"visual.": "force_image_size", "": "force_context_length"}
    for name, shape in shapes.items():
        option = asked["visual." if name.startswith("visual.") else ""]
        if name.endswith(("positional_embedding", "pos_embed")) and shape != expected[name] and not options.get(option):
            raise CoderError(
                f"{weights}: {name} has shape {list(shape)}, and the configuration beside it describes {list(expected[name])}: "
                f"they belong to different models (to resize it, set the option {option})"
            )


def exported_text_config(folder: Path, text_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Options that build a Hugging Face text tower from the configuration in an export's folder.

    Neither the hub nor the tower's original path is needed.
    """
    if not (folder / TEXT_FOLDER / "config.json").is_file():
        return {}
    return {"text_cfg": {**text_cfg, "hf_model_name": str(folder / TEXT_FOLDER), "hf_model_pretrained": False}}


def saved_preprocessing(pretrained: str | None) -> dict[str, Any]:
    """The mean, std and resizing of the weights' training; open_clip has them for its own tags only.

    Read from the export's configuration in the folder of the weights, or from the checkpoint; empty if neither has them.

    Raises:
        CoderError: a configuration that cannot be read, or that holds what it may not.
    """
    path = Path(pretrained or "").parent / "open_clip_config.json"
    if pretrained and path.is_file():
        config = _read_export_config(path).get("preprocess_cfg", {})
    elif (checkpoint := read_training_checkpoint(pretrained)) is not None:
        options = checkpoint[HEAD_OPTIONS]
        config = options.get("preprocess_cfg", {}) if isinstance(options, Mapping) else {}
        path = Path(pretrained or "")
    else:
        return {}
    config = check_preprocessing(config, path)
    return {key: value for key, value in config.items() if key != "size"}


def read_training_checkpoint(path: str | None) -> Mapping[str, Any] | None:
    """A checkpoint of open_clip's trainer with our heads in it (coder_plugin.integrations.open_clip), memory-mapped.

    None for any other file, and if there is no such file.
    """
    if not path or Path(path).suffix != ".pt" or not Path(path).is_file():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # open_clip reports the error
        return None
    is_ours = isinstance(checkpoint, Mapping) and {"state_dict", HEAD_OPTIONS} <= checkpoint.keys()
    return checkpoint if is_ours else None


def is_training_checkpoint(path: str | None) -> bool:
    return read_training_checkpoint(path) is not None


def load_training_checkpoint(model: Any, path: str) -> None:
    """Load the towers of a checkpoint with heads into a plain open_clip model, in place.

    Raises:
        CoderError: the checkpoint belongs to another model.
    """
    import open_clip

    try:
        keys = open_clip.load_checkpoint(model, path, strict=False)
    except RuntimeError as error:
        raise CoderError(f"{path} belongs to another model: {_cause(error)}") from error
    other = [key for key in keys.unexpected_keys if not key.startswith("coder.")]
    if differences := [*keys.missing_keys, *other]:
        raise CoderError(f"{path} belongs to another model; missing or unexpected tensors: {', '.join(differences[:4])}")
    log.info("%s: loaded the towers", path)


def init_decoder(model: Any) -> None:
    """Initialise the output layer of a new CoCa's decoder, in place: open_clip leaves it uninitialised, sometimes NaN."""
    decoder = getattr(model, "text_decoder", None)
    if decoder is not None:
        nn.init.normal_(decoder.text_projection, std=decoder.text_projection.shape[0] ** -0.5)


def read_config(name: str, cache_dir: str | None = None) -> dict[str, Any]:
    """open_clip's configuration of a model name, or that of a ``local-dir:`` or ``hf-hub:`` model; empty if there is none, or
    if the hub does not give it.

    Raises:
        CoderError: a configuration of a folder or a repository that holds what it may not
            (:mod:`coder_plugin.backbones.untrusted`).
    """
    import open_clip
    from open_clip.factory import _get_hf_config

    schema, location = open_clip.factory.parse_model_name(name)
    if not schema:
        config = open_clip.get_model_config(name.replace("/", "-")) or {}
        check_text_names(config, name)
        return config
    if schema == "local-dir":
        path = Path(location) / "open_clip_config.json"
        if not path.is_file():
            return {}  # open_clip reports it when it creates the model
        config = check_config(_read_export_config(path).get("model_cfg"), path)
        check_preprocessing(_read_export_config(path).get("preprocess_cfg") or {}, path)
        check_folder(Path(location))
        if name := config["text_cfg"].get("hf_model_name"):
            if not (Path(location) / TEXT_FOLDER / "config.json").is_file():
                raise CoderError(
                    f"{location}: its text tower is {name!r}, whose configuration is not in the folder {TEXT_FOLDER} there; "
                    "nothing is fetched because a file says so: name the model yourself, with --model and the weights' file "
                    "as --pretrained"
                )
            check_folder(Path(location) / TEXT_FOLDER, encoder=True)
        return config
    try:
        with hub_access():
            stored = _get_hf_config(location, cache_dir)
    except Exception:  # open_clip reports the error when it creates the model
        return {}
    if not isinstance(stored, dict):
        raise CoderError(f"{name}: its open_clip_config.json is not an object")
    config = check_config(stored.get("model_cfg"), name)
    check_preprocessing(stored.get("preprocess_cfg") or {}, name)
    check_text_names(config, name, on_hub=known_names() | {location}, folders=False)
    return config


def _read_export_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise CoderError(f"{path} cannot be read: it is not an object")
    return config


def effective_config(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration with the overrides of ``open_clip.create_model`` merged in: an export needs it to be loaded."""
    effective = copy.deepcopy(dict(config))
    overrides = {
        "force_image_size": ("vision_cfg", "image_size"),
        "force_patch_dropout": ("vision_cfg", "patch_dropout"),
        "force_context_length": ("text_cfg", "context_length"),
    }
    for option, (tower, key) in overrides.items():
        if options.get(option) is not None:
            effective[tower][key] = options[option]
    for option, key in {"force_quick_gelu": "quick_gelu", "force_custom_text": "custom_text"}.items():
        if options.get(option):
            effective[key] = True
    effective.update({key: options[key] for key in ("init_logit_scale", "init_logit_bias") if key in options})
    return effective


def register_config(name: str) -> str:
    """Register our configurations with open_clip, and the one at the path ``name`` if it is a path. Returns the model name.

    Raises:
        CoderError: a path without a readable open_clip configuration.
    """
    import open_clip

    if CONFIGS.is_dir() and any(path.stem not in open_clip.list_models() for path in CONFIGS.glob("*.json")):
        open_clip.add_model_config(CONFIGS)
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise CoderError(f"model configuration {name} does not exist")
        try:  # checked first: open_clip keeps the path of a broken file and fails on it in every later call
            config = read_json(name)
        except CoderError as error:
            raise CoderError(f"model configuration {error}") from error
        check_text_names(check_config(config, name), name)
        if open_clip.get_model_config(Path(name).stem) != config:  # it reads every configuration again, those added before too
            open_clip.add_model_config(name)
        return Path(name).stem
    return name


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def load_image_tower(model: Any, path: str) -> None:
    """Load a backbone's published weights (timm, torchvision) into the image tower, in place.

    The file's keys are those of ``model.visual``, of its timm trunk, or of a complete CLIP model. A classifier in the file is
    left out, and a timm tower's projection keeps its initial weights.

    Raises:
        CoderError: no such file, or tensors of the tower that are missing or of another shape.
    """
    from open_clip.factory import load_state_dict

    if not Path(path).is_file():
        raise CoderError(f"image tower weights {path} do not exist")
    try:
        weights: Mapping[str, Tensor] = load_state_dict(path)
    except Exception as error:
        raise CoderError(f"image tower weights {path} cannot be read: {_cause(error)}") from error
    tower = model.visual.trunk if hasattr(model.visual, "trunk") else model.visual
    expected = tower.state_dict()
    for prefix in ("visual.", "trunk."):  # keys of a complete CLIP model, of open_clip's timm tower
        if any(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    missing = [key for key in expected if key not in weights and not key.endswith("num_batches_tracked")]
    wrong = [key for key in expected if key in weights and weights[key].shape != expected[key].shape]
    if missing or wrong:
        raise CoderError(
            f"{path} does not fit the image tower {type(tower).__name__}: {len(missing)} of {len(expected)} tensors "
            f"missing{f' (such as {missing[0]})' if missing else ''}, {len(wrong)} of another shape"
            f"{f' (such as {wrong[0]})' if wrong else ''}"
        )
    tower.load_state_dict({key: value for key, value in weights.items() if key in expected}, strict=False)
    left = [key for key in weights if key not in expected]
    logging.info("image tower: %d tensors from %s; left out: %s", len(expected), path, ", ".join(left) or "none")


def available_keys(model: Any) -> set[str]:
    """The keys that this model's own forward returns."""
    keys = {"image_features", "text_features", "logit_scale"}
    if getattr(model, "logit_bias", None) is not None:
        keys.add("logit_bias")
    return keys


def extend(model: Any, coder: nn.Module, capture: FeatureCapture | None) -> Any:
    """Make ``model`` an instance of a subclass of its class that runs ``coder`` inside forward. Returns the same object."""
    cls = type(model)
    mixin = getattr(model, "coder_class", CoderCLIP)  # transformers' models have one of their own
    model.__class__ = extended_class((mixin, cls), f"Coder{cls.__name__}")
    model.coder = coder
    model._coder_capture = capture
    return model


def retract(model: Any) -> None:
    """Undo :func:`extend`, in place: the model has its own class again, and no heads. The hooks of its capture stay and, as
    nothing starts it, do nothing."""
    model.__class__ = type(model).__bases__[-1]
    del model.coder, model._coder_capture


def make_word_embeddings(model: Any, name: str, cache_dir: str | None) -> WordEmbeddings:
    """The word embeddings of the model's text tower; the tokenizer of ``name`` says which ids are words.

    Raises:
        CoderError: a tokenizer that cannot be loaded, a model that reads captions together with images (CoCa).
    """
    import open_clip

    if hasattr(model, "make_word_embeddings"):  # a model of transformers
        return model.make_word_embeddings()
    if hasattr(model, "text_decoder"):
        raise CoderError(f"{name} generates captions from images, so generated texts cannot be encoded with its captions")
    try:
        tokenizer = open_clip.get_tokenizer(register_config(name), cache_dir=cache_dir)
    except Exception as error:  # transformers and its hub raise many types
        raise CoderError(f"the tokenizer of {name!r}, which identifies special tokens, fails: {_cause(error)}") from error
    blank = tokenizer([""], context_length=model.context_length)
    return WordEmbeddings(word_embedding_of(model), text_mask_of(model), blank)


def probe_backbone(model: Any, capture: FeatureCapture | None) -> BackboneInfo:
    """Sizes of an open_clip model. Token channels are measured in one forward of a blank image and text."""
    dim = embed_dim(model)
    if capture is None:
        return BackboneInfo(embed_dim=dim)
    size = model.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    stem = next(parameter for parameter in model.visual.parameters() if parameter.ndim == 4)
    training = model.training
    model.eval()
    capture.start()
    with torch.no_grad():
        text = torch.ones(1, model.context_length or 1, dtype=torch.long, device=stem.device)
        image = torch.zeros(1, 3, height, width, dtype=stem.dtype, device=stem.device)
        model(image, text)
    model.train(training)
    features = capture.collect(text)
    channels = {key: features[key].shape[-1] for key in _CHANNEL_KEYS if key in features}
    return BackboneInfo(embed_dim=dim, **channels)


def embed_dim(model: Any) -> int:
    """D of an open_clip model."""
    text = getattr(model, "text", model)
    projection = getattr(text, "text_projection", None)
    if isinstance(projection, nn.Linear):
        return projection.out_features
    if projection is not None:
        return projection.shape[1]
    return text.output_dim if hasattr(text, "output_dim") else text.transformer.width
