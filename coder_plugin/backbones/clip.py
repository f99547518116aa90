"""open_clip's models, extended in place with the objective's heads (DESIGN, rule 5).

The instance keeps its class's behaviour, attributes and state-dict keys; its class becomes a subclass that adds
``coder``, ``embed_image`` and ``embed_text``, and whose forward in training mode returns the heads' keys as well.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import registry
from coder_plugin.backbones.tokens import TokenTaps, text_mask_of, word_embedding_of
from coder_plugin.backbones.words import Words
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo

CONFIGS = Path(__file__).parent / "model_configs"
#: Under which key a checkpoint of open_clip's trainer says what its heads were made with.
MADE_WITH = "coder"
#: Where an export has the shape of a Hugging Face text tower, as transformers writes it.
TEXT_FOLDER = "text"
#: What of ``resolver.INTERMEDIATE_KEYS`` open_clip's towers give.
INTERMEDIATE_KEYS = frozenset(
    "image_tokens image_mask image_locals image_contexts image_context_mask image_pooled "
    "text_tokens text_mask text_locals text_contexts text_context_mask".split()
)
#: Keys whose last dimension heads are told.
_MEASURED = [f"{side}_{stage}" for side in ("image", "text") for stage in ("tokens", "locals", "contexts")]


class CoderCLIP:
    """What is mixed into an open_clip model. See :func:`coder_plugin.create_model`."""

    coder: Any
    words: Words
    _coder_taps: tuple[TokenTaps, ...]

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        *args: Any,
        text_positive: Tensor | None = None,
        text_tags: Tensor | None = None,
        image_id: Tensor | None = None,
        **upstream: Any,
    ) -> Any:
        """Image [B, 3, H, W], text [B, T] -> upstream's keys and, in training mode, the heads' ``coder_*`` keys.

        ``text_positive`` [B, T], ``text_tags`` [B, T] and ``image_id`` [B] are read by the heads that require them.
        """
        if isinstance(image, Mapping):
            raise CoderError("NaFlex image dicts are not supported: give images as one tensor [B, 3, H, W]")
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(image, text, *args, **upstream)  # type: ignore[misc]
        self._listen()
        texts = self.coder.further_texts(text, text_positive)
        rows = text if texts is None else texts.ids
        with self.words.noised(texts) if texts is not None else contextlib.nullcontext():
            outputs = super().forward(image, rows, *args, **upstream)  # type: ignore[misc]
        known = {**outputs, **self._caught(rows)}
        known = {key: value for key, value in known.items() if value is not None}
        known.update(self.coder.aggregate(known))
        if texts is not None:
            known = texts.parted(known)
        outputs.update({key: known[key] for key in outputs if key in known})
        given = {"image": image, "text": text, "text_positive": text_positive, "text_tags": text_tags, "image_id": image_id}
        return {**outputs, **self.coder({**known, **{key: value for key, value in given.items() if value is not None}})}

    def embed_image(self, image: Tensor) -> Tensor:
        """The retrieval vectors of images [B, D or more]: their product with :meth:`embed_text` is the score.

        The instance feature, L2-normalised, and each scoring head's block, weighted by square roots (DESIGN, rule 5).
        """
        return self.coder.embed("image", self.describe_image(image))

    def embed_text(self, text: Tensor) -> Tensor:
        """The retrieval vectors of texts [B, D or more]."""
        return self.coder.embed("text", self.describe_text(text))

    def describe_image(self, image: Tensor) -> dict[str, Tensor]:
        """All that is known of images on their own: what :meth:`embed_image` and re-ranking are made of."""
        self._listen()
        feature = F.normalize(self.encode_image(image).float(), dim=-1)  # type: ignore[attr-defined]
        known = {"image_features": feature, **self._caught(None)}
        return {**known, **self.coder.aggregate(known)}

    def describe_text(self, text: Tensor) -> dict[str, Tensor]:
        """All that is known of texts on their own."""
        self._listen()
        feature = F.normalize(self.encode_text(text).float(), dim=-1)  # type: ignore[attr-defined]
        known = {"text_features": feature, **self._caught(text)}
        return {**known, **self.coder.aggregate(known)}

    def _listen(self) -> None:
        for taps in self._coder_taps:
            taps.listen()

    def _caught(self, text: Tensor | None) -> dict[str, Tensor]:
        caught: dict[str, Tensor] = {}
        for taps in self._coder_taps:
            caught.update(taps.take(text))
        return caught


def create_clip(
    name: str,
    *,
    pretrained: str | None = None,
    pretrained_image_path: str | None = None,
    needs_logit_bias: bool = False,
    create: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """An open_clip model that returns a dict, with every fault of its name or files told in one line.

    Args:
        name: a name of ``open_clip.list_models()``, one of ours, ``local-dir:DIR``, ``hf-hub:REPO``, or the path of an
            open_clip model configuration (``.json``).
        pretrained: open_clip tag or file. pretrained_image_path: weights for the image tower alone, checked.
        needs_logit_bias: add SigLIP's bias and temperature where the configuration has none.
        create: what makes the model, in place of ``open_clip.create_model``.
        options: passed on to it.
    """
    import open_clip

    name = register_config(name)
    config = read_config(name, options.get("cache_dir"))
    schema, _ = open_clip.factory.parse_model_name(name)
    if schema:
        if pretrained and not Path(pretrained).is_file():
            raise CoderError(f"--pretrained {pretrained!r} is no file, and {name} takes no tag")
    else:
        if not config:
            near = difflib.get_close_matches(name, [*open_clip.list_models(), *registry.names("backbones")], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise CoderError(f"unknown model {name!r}{hint} (all: open_clip.list_models(), or a config file's path)")
        if pretrained and not Path(pretrained).is_file():
            tags = open_clip.list_pretrained_tags_by_model(name)
            if pretrained not in tags:
                known = ", ".join(tags) or "none"
                raise CoderError(f"--pretrained {pretrained!r} is neither a file nor a tag of {name} (tags: {known})")
    if kept := kept_preprocessing(pretrained):
        options = {**options, "force_preprocess_cfg": {**kept, **(options.get("force_preprocess_cfg") or {})}}
    if needs_logit_bias and "init_logit_bias" not in config:
        options = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0, **options}
    if schema == "local-dir" and "hf_model_name" in config.get("text_cfg", {}):
        options = {**text_beside(Path(name.partition(":")[2]), config["text_cfg"]), **options}
    trained = is_training_checkpoint(pretrained)
    try:
        create = create or open_clip.create_model
        model = create(name, None if schema or trained else pretrained, output_dict=True, **options)
        if trained:
            load_training_checkpoint(model, pretrained)  # type: ignore[arg-type]
        elif schema and pretrained:  # open_clip takes a schema's own weights alone
            open_clip.load_checkpoint(model, pretrained)
    except (CoderError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what open_clip, timm, transformers and torch raise for a file or option has no end
        raise CoderError(f"model {name!r} cannot be made: {_cause(error)}") from error
    if not (schema or pretrained):
        draw_decoder(model)
    if pretrained_image_path:
        load_image_tower(model, pretrained_image_path)
    model.coder_config = effective_config(config, options) if config else None
    return model


def text_beside(folder: Path, text_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Options that give a Hugging Face text tower the shape that an export carries: no hub is asked, and the path it was made
    from need not exist here."""
    if not (folder / TEXT_FOLDER / "config.json").is_file():
        return {}
    return {"text_cfg": {**text_cfg, "hf_model_name": str(folder / TEXT_FOLDER), "hf_model_pretrained": False}}


def kept_preprocessing(pretrained: str | None) -> dict[str, Any]:
    """The mean, std and resizing that weights were trained with, where an export's configuration lies beside them or their
    checkpoint says so: open_clip knows them for tags alone."""
    beside = Path(pretrained or "").parent / "open_clip_config.json"
    if pretrained and beside.is_file():
        try:
            kept = json.loads(beside.read_text()).get("preprocess_cfg", {})
        except (OSError, ValueError, AttributeError) as error:
            raise CoderError(f"{beside} cannot be read: {_cause(error)}") from error
    elif (found := read_training_checkpoint(pretrained)) is not None:
        kept = found[MADE_WITH].get("preprocess_cfg", {})
    else:
        return {}
    return {key: value for key, value in kept.items() if key != "size"}


def read_training_checkpoint(path: str | None) -> Mapping[str, Any] | None:
    """What open_clip's trainer saved with our heads in the model (coder_plugin.integrations.open_clip), not yet in memory;
    None for any other file, and for a name that is no file."""
    if not path or Path(path).suffix != ".pt" or not Path(path).is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # open_clip says what is wrong with it
        return None
    return found if isinstance(found, Mapping) and {"state_dict", MADE_WITH} <= found.keys() else None


def is_training_checkpoint(path: str | None) -> bool:
    return read_training_checkpoint(path) is not None


def load_training_checkpoint(model: Any, path: str) -> None:
    """Put the towers of a checkpoint with heads into a plain open_clip model.

    Raises:
        CoderError: the checkpoint is of another model.
    """
    import open_clip

    try:
        found = open_clip.load_checkpoint(model, path, strict=False)
    except RuntimeError as error:
        raise CoderError(f"{path} is of another model: {_cause(error)}") from error
    other = [key for key in found.unexpected_keys if not key.startswith("coder.")]
    if found.missing_keys or other:
        raise CoderError(f"{path} is of another model: it lacks or adds {', '.join([*found.missing_keys, *other][:4])}")
    logging.info("%s: the towers are loaded (open_clip, which made the model, knew of no weights)", path)


def draw_decoder(model: Any) -> None:
    """First values for the output layer of a new CoCa's decoder: open_clip leaves it as memory happens to be, NaN at times."""
    decoder = getattr(model, "text_decoder", None)
    if decoder is not None:
        nn.init.normal_(decoder.text_projection, std=decoder.text_projection.shape[0] ** -0.5)


def read_config(name: str, cache_dir: str | None = None) -> dict[str, Any]:
    """The configuration of a name that open_clip knows, or that a ``local-dir:`` or ``hf-hub:`` model carries; empty where
    there is none, or it cannot be read here."""
    import open_clip
    from open_clip.factory import _get_hf_config

    schema, place = open_clip.factory.parse_model_name(name)
    if not schema:
        return open_clip.get_model_config(name.replace("/", "-")) or {}
    try:
        if schema == "hf-hub":
            return _get_hf_config(place, cache_dir)["model_cfg"]
        return json.loads((Path(place) / "open_clip_config.json").read_text())["model_cfg"]
    except Exception:  # open_clip says what is wrong when it makes the model
        return {}


def effective_config(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration with what ``open_clip.create_model`` was told to override: exports need it to open."""
    effective = copy.deepcopy(dict(config))
    places = {
        "force_image_size": ("vision_cfg", "image_size"),
        "force_patch_dropout": ("vision_cfg", "patch_dropout"),
        "force_context_length": ("text_cfg", "context_length"),
    }
    for option, (tower, key) in places.items():
        if options.get(option) is not None:
            effective[tower][key] = options[option]
    for option, key in {"force_quick_gelu": "quick_gelu", "force_custom_text": "custom_text"}.items():
        if options.get(option):
            effective[key] = True
    effective.update({key: options[key] for key in ("init_logit_scale", "init_logit_bias") if key in options})
    return effective


def register_config(name: str) -> str:
    """Make our configurations, and the one at the path ``name`` if it is one, known to open_clip; returns the name."""
    import open_clip

    if CONFIGS.is_dir() and any(path.stem not in open_clip.list_models() for path in CONFIGS.glob("*.json")):
        open_clip.add_model_config(CONFIGS)
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise CoderError(f"model configuration {name} does not exist")
        try:  # before open_clip does: it keeps a file's path, and would fail on it again for every later one
            config = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise CoderError(f"model configuration {name} cannot be read: {_cause(error)}") from error
        if not (isinstance(config, dict) and {"embed_dim", "vision_cfg", "text_cfg"} <= config.keys()):
            raise CoderError(f"{name} is no open_clip model configuration: it needs embed_dim, vision_cfg and text_cfg")
        open_clip.add_model_config(name)
        return Path(name).stem
    return name


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def load_image_tower(model: Any, path: str) -> None:
    """Load a backbone's published weights (timm, torchvision) into the image tower: all of them, or an error.

    The file's keys are those of ``model.visual``, of its timm trunk, or of a whole CLIP. A classifier in the file is
    left out, and a timm tower's projection keeps its fresh weights.
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
    for prefix in ("visual.", "trunk."):  # of a whole CLIP, of open_clip's timm tower
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


def extend(model: Any, coder: nn.Module, taps: TokenTaps | None) -> Any:
    """Make ``model`` an instance of a subclass of its class that runs ``coder`` inside forward."""
    cls = type(model)
    extended = type(f"Coder{cls.__name__}", (CoderCLIP, cls), {"__module__": cls.__module__})
    model.__class__ = extended
    model.coder = coder
    model._coder_taps = () if taps is None else (taps,)
    return model


def words_of(model: Any, name: str, cache_dir: str | None) -> Words:
    """What tells the words of the model's input from the rest, and noises them; asks the model's own tokenizer.

    Raises:
        CoderError: a tokenizer that cannot be loaded, a model that reads captions together with images (CoCa).
    """
    import open_clip

    if hasattr(model, "text_decoder"):
        raise CoderError(f"{name} writes captions, image by image, so that generated texts cannot be encoded beside them")
    try:
        tokenizer = open_clip.get_tokenizer(register_config(name), cache_dir=cache_dir)
    except Exception as error:  # what transformers and its hub raise has no end
        raise CoderError(f"the tokenizer of {name!r}, which tells words from special tokens, fails: {_cause(error)}") from error
    blank = tokenizer([""], context_length=model.context_length)
    return Words(word_embedding_of(model), text_mask_of(model), blank)


def probe_backbone(model: Any, taps: TokenTaps | None) -> BackboneInfo:
    """Joint and token dimensions, read off one forward of a blank input where tokens are asked for."""
    embed_dim = _embed_dim(model)
    if taps is None:
        return BackboneInfo(embed_dim=embed_dim)
    size = model.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    stem = next(parameter for parameter in model.visual.parameters() if parameter.ndim == 4)
    training = model.training
    model.eval()
    taps.listen()
    with torch.no_grad():
        text = torch.ones(1, model.context_length or 1, dtype=torch.long, device=stem.device)
        image = torch.zeros(1, 3, height, width, dtype=stem.dtype, device=stem.device)
        model(image, text)
    model.train(training)
    caught = taps.take(text)
    widths = {key: caught[key].shape[-1] for key in _MEASURED if key in caught}
    return BackboneInfo(embed_dim=embed_dim, **widths)


def _embed_dim(model: Any) -> int:
    text = getattr(model, "text", model)
    projection = getattr(text, "text_projection", None)
    if isinstance(projection, nn.Linear):
        return projection.out_features
    if projection is not None:
        return projection.shape[1]
    return text.output_dim if hasattr(text, "output_dim") else text.transformer.width
