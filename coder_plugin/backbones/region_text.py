"""Region features with BERT or a BiGRU, the papers' setup, with the same inputs and outputs as CLIP models.

Shapes: B batch, L regions, R their channels, T text positions, D joint dimension, V views.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from coder_plugin.backbones.base import CONFIG, Backbone, BackboneInfo
from coder_plugin.backbones.region_encoder import Encoded, RegionEncoder
from coder_plugin.backbones.region_options import Options
from coder_plugin.backbones.text_encoder import BertText, BiGRUText, TextEncoder, load_transformer
from coder_plugin.backbones.tokenizers import (
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    build_vocabulary,
    check_vocabulary,
    read_vocabulary,
)
from coder_plugin.backbones.untrusted import TEXT_FOLDER, check_bytes, check_folder, tower_size
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.transform import RegionTransform
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json
from coder_plugin.masked import without_start
from coder_plugin.tensors import unit


class RegionText(Backbone):
    """A model from region features and texts to joint features.

    ``image`` is a dict: ``features`` [B, L, R], bool ``mask`` [B, L], and, for CAMERA's context stage, ``boxes`` [B, L, 4]
    (fractions of the image) with ``aspect`` [B].

    Heads can read the regions and words before the context stage (``*_locals``), as it returns them (``*_contexts``), as the
    model pools them (``*_tokens``) and pooled before normalisation (``*_pooled``). CAMERA's and VSRN's regions are pooled after
    each channel was divided by its norm over the image, CAMERA's words after a perceptron; other contexts are the tokens. With
    CAMERA's pooling an image has V features, and its score is the highest of their scores.
    """

    intermediate_keys = frozenset(
        "image_locals image_tokens image_contexts image_mask image_context_mask image_pooled "
        "text_locals text_tokens text_contexts text_mask text_context_mask text_pooled".split()
    )

    def __init__(self, options: Options, *, name: str, cache_dir: str | None = None) -> None:
        super().__init__()
        self.name, self.options = name, options
        self.visual = RegionEncoder(options)
        self.text, self._tokenizer = _text_side(options, cache_dir)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10 if options.logit_bias else 1 / 0.07)))
        if options.logit_bias:
            self.logit_bias = nn.Parameter(torch.tensor(-10.0))
        if options.frozen_text:
            self.lock_text_tower()
        if options.image_pooling == "views":
            self.intermediate_keys = self.intermediate_keys | {"image_views"}
        if options.global_dim:
            self.intermediate_keys = self.intermediate_keys | {"image_global"}
        self.train()  # transformers loads in eval mode

    def info(self) -> BackboneInfo:
        options = self.options
        plain = options.encoder == "bigru" and not options.word_projection
        return BackboneInfo(
            embed_dim=options.embed_dim,
            image_tokens=options.embed_dim,
            text_tokens=options.embed_dim,
            image_locals=options.embed_dim,
            image_global=options.global_dim,
            text_locals=options.word_dim if plain else options.embed_dim,
            image_contexts=options.embed_dim,
            text_contexts=options.embed_dim,
            views=options.views if options.image_pooling == "views" else 1,
            vocabulary=self._tokenizer.size,
        )

    def image_side(self, image: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(image, Mapping) or not {"features", "mask"} <= image.keys():
            raise CoderError(f"{self.name} reads regions: image must be a dict with features [B, L, R] and mask [B, L]")
        if image["features"].shape[-1] != self.options.region_dim:
            raise CoderError(
                f"{self.name} expects regions of {self.options.region_dim} channels, these have "
                f"{image['features'].shape[-1]}"
            )
        if self._reads_boxes and "boxes" not in image:
            raise CoderError(f"{self.name} needs the boxes of regions, which these data lack: use --model-kwargs boxes=false")
        encoded = self.visual(image)
        more = {} if encoded.scores is None else {"image_views": encoded.scores}
        if self.options.global_dim:
            if "global" not in image:
                raise CoderError(
                    f"{self.name} reads a feature of the whole image, which these data lack: turn it off with --model-kwargs "
                    "global_dim=0"
                )
            more["image_global"] = image["global"]
        return {**_keys("image", encoded), **more}

    @property
    def _reads_boxes(self) -> bool:
        return self.options.context == "camera" and self.options.boxes

    def text_side(self, text: Tensor) -> dict[str, Tensor]:
        keys = _keys("text", self.text(text))
        if self.text.reads_forward:
            keys["text_context_mask"] = without_start(keys["text_mask"])
        return keys

    def text_mask(self, text: Tensor) -> Tensor:
        return self.text.mask(text)

    def word_embedding(self) -> nn.Module:
        return self.text.word_embedding()

    def tokenizer(self, *, word_dropout: float = 0.0) -> Tokenizer:
        options: dict[str, Any] = {"context_length": self.options.context_length, "word_dropout": word_dropout}
        if isinstance(self._tokenizer, SubwordTokenizer):
            return SubwordTokenizer(self._tokenizer.tokenizer, **options)
        return WordTokenizer(list(self._tokenizer.ids), **options)

    def transform(self, *, max_regions: int = 36, region_dropout: float = 0.0) -> RegionTransform:
        options = self.options
        return RegionTransform(
            options.region_dim,
            max_regions=max_regions,
            dropout=region_dropout,
            boxes=self._reads_boxes,
            global_dim=options.global_dim,
        )

    def example_image(self, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        corner = torch.rand(rows, 8, 2, generator=generator) / 2
        return {
            "features": torch.randn(rows, 8, self.options.region_dim, generator=generator),
            "mask": torch.ones(rows, 8, dtype=torch.bool),
            "boxes": torch.cat([corner, corner + 0.25], -1),
            "global": torch.randn(rows, self.options.global_dim, generator=generator),
        }

    def config(self) -> dict[str, Any]:
        vocabulary = {} if isinstance(self.text, BertText) else {"vocabulary": list(self._tokenizer.ids)}
        return {"backbone": self.name, "options": {**asdict(self.options), **vocabulary}}

    def save_config(self, folder: Path) -> Path:
        config = self.config()
        if isinstance(self.text, BertText):
            self.text.transformer.config.save_pretrained(folder / TEXT_FOLDER)
            self._tokenizer.tokenizer.save_pretrained(folder / TEXT_FOLDER)
            config["options"].update(text=TEXT_FOLDER, pretrained_text=False)
        path = folder / CONFIG
        with atomic_write(path, "w") as file:
            file.write(json.dumps(config, indent=1))
        return path

    def lock_image_tower(self, unlocked_groups: int = 0, **_: Any) -> None:
        if unlocked_groups:
            raise CoderError("a region encoder has no layer groups to unlock: leave out lock_image_unlocked_groups")
        self.visual.requires_grad_(False)

    def lock_text_tower(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze the transformer except its last layers, or the entire BiGRU. BERT's projection and pooling stay trainable."""
        tower = self.text.transformer if isinstance(self.text, BertText) else self.text
        tower.requires_grad_(False)
        if unlocked_layers:
            layers = next((m for m in tower.modules() if isinstance(m, nn.ModuleList)), None)
            if layers is None or not isinstance(self.text, BertText):
                raise CoderError(f"{type(tower).__name__} has no layers to unlock")
            for layer in list(layers)[-unlocked_layers:]:
                layer.requires_grad_(True)
        if not freeze_layer_norm:
            for module in tower.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(True)
        if isinstance(self.text, BertText):
            self.text.frozen = not any(parameter.requires_grad for parameter in tower.parameters())
            self.text.train(self.text.training)  # a frozen transformer goes into eval mode

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if isinstance(self.text, BertText):
            transformer = self.text.transformer
            if enable:
                transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                transformer.gradient_checkpointing_disable()


def _keys(side: str, encoded: Encoded) -> dict[str, Tensor]:
    return {
        f"{side}_features": unit(encoded.pooled),
        f"{side}_pooled": encoded.pooled.mean(1) if encoded.pooled.ndim == 3 else encoded.pooled,
        f"{side}_locals": encoded.locals,
        f"{side}_tokens": encoded.tokens,
        f"{side}_contexts": encoded.contexts,
        f"{side}_mask": encoded.mask,
        f"{side}_context_mask": encoded.mask,
    }


def _text_side(options: Options, cache_dir: str | None) -> tuple[TextEncoder, Any]:
    if options.encoder == "bigru":
        words = options.vocabulary
        if words is None:
            raise CoderError(
                "a BiGRU needs a vocabulary: --model-kwargs vocabulary=FILE (the trainer builds one from the training captions)"
            )
        if not isinstance(words, (str, list, tuple)):
            raise CoderError(f"vocabulary must be a file or a list of words, got {words!r}")
        words = read_vocabulary(words) if isinstance(words, str) else check_vocabulary(words)
        tokens = WordTokenizer(words, context_length=options.context_length)
        return BiGRUText(options, words=tokens.size, pad=tokens.pad), tokens
    transformer, tokenizer = load_transformer(options.text, pretrained=options.pretrained_text, cache_dir=cache_dir)
    subwords = SubwordTokenizer(tokenizer, context_length=options.context_length)
    return BertText(options, transformer, pad=subwords.pad), subwords


@dataclass(frozen=True)
class Preset:
    """An entry point: region models with preset options, and the defaults of their training options.

    ``preset(**options)`` is a :class:`RegionText`; these options override the preset's. Besides the fields of
    :class:`Options` it takes:

    Args:
        cache_dir: where transformers keeps downloads.
        example: an image of the data; the default of ``region_dim`` is its number of channels.
        captions: returns the data's captions; the default ``vocabulary`` of a BiGRU is built from them.

    Raises:
        CoderError: an unknown option, or one out of range.
    """

    name: str
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    logit_bias: ClassVar[bool] = True

    def saved_options(self, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """The options of an export's configuration, which somebody else may have written, with the text encoder's folder.

        Args:
            options: from the file.
            path: the file, ``coder_model.json``.

        Raises:
            CoderError: an encoder that is not in the export, a vocabulary that is a file, or sizes that do not fit the weights.
        """
        options = dict(options)
        folder, weights = path.parent, path.with_name("coder_model.safetensors")
        if "vocabulary" in options and not isinstance(options["vocabulary"], (list, type(None))):
            raise CoderError(f"{path}: the vocabulary must be a list of words, got {str(options['vocabulary'])[:80]!r}")
        encoder = {**self.options, **options}.get("encoder", "bert")
        text = options.pop("text", None)
        if encoder == "bert":
            if text != TEXT_FOLDER or not (folder / TEXT_FOLDER / "config.json").is_file():
                raise CoderError(
                    f"{path}: its text encoder is {str(text)[:100]!r}; it must be the folder {TEXT_FOLDER} beside it, with a "
                    "config.json: nothing is fetched because a file says so"
                )
            check_folder(folder / TEXT_FOLDER, encoder=True)
            options.update(text=str(folder / TEXT_FOLDER), pretrained_text=False)
        sizes = {name: value for name, value in options.items() if type(value) is int}
        if large := [name for name, value in sizes.items() if value > 1 << 20]:
            raise CoderError(f"{path}: {large[0]} is {sizes[large[0]]}; the most is {1 << 20:,}")
        if weights.is_file():
            words = len(options.get("vocabulary") or ()) * sizes.get("word_dim", 0)
            count = sizes.get("embed_dim", 0) * sizes.get("region_dim", 0) + words
            if encoder == "bert":
                count += tower_size(read_json(folder / TEXT_FOLDER / "config.json"))
            else:
                count += 3 * sizes.get("embed_dim", 0) ** 2 * sizes.get("text_layers", 1)
            check_bytes(count, weights, path)
        return options

    def __call__(
        self,
        *,
        cache_dir: str | None = None,
        example: Regions | None = None,
        captions: Callable[[], Iterable[str]] | None = None,
        **options: Any,
    ) -> RegionText:
        allowed = [field.name for field in fields(Options)]
        unknown = sorted(options.keys() - set(allowed))
        if unknown:
            raise CoderError(f"{self.name} has no option {', '.join(unknown)}; it has: {', '.join(allowed)}")
        for key in ("context", "text_context"):  # the command line parses "none" as None
            if key in options and options[key] is None:
                options[key] = "none"
        merged = {**self.options, **options}
        if isinstance(example, Regions):
            merged.setdefault("region_dim", example.features.shape[1])
        if captions is not None and merged.get("encoder") == "bigru" and merged.get("vocabulary") is None:
            merged["vocabulary"] = build_vocabulary(captions())
        try:
            return RegionText(Options(**merged), name=self.name, cache_dir=cache_dir)
        except (ValueError, TypeError) as error:
            raise CoderError(f"{self.name}: {error}") from error


#: VSE-infinity's augmentation and learning-rate factor for BERT; CAMERA and VSRN have no augmentation.
_VSE_INFINITY = {"region_dropout": 0.2, "word_dropout": 0.2}
_BERT = {"text_lr_scale": 0.1}

#: VSE-infinity's encoders with either text encoder, on which CODER is built.
region_bert = Preset("region-bert", {}, {**_VSE_INFINITY, **_BERT})
region_bigru = Preset("region-bigru", {"encoder": "bigru"}, _VSE_INFINITY)
#: CAMERA (ACM MM 2020): frozen BERT, 32 tokens, 64 heads, 12 views, D 2048.
region_bert_camera = Preset(
    "region-bert-camera",
    {
        "embed_dim": 2048,
        "mlp": False,
        "context": "camera",
        "image_pooling": "views",
        "text_context": "camera",
        "text_pooling": "mean",
        "frozen_text": True,
        "context_length": 32,
    },
    _BERT,
)
#: VSRN (ICCV 2019): graph layers and a GRU over regions, a GRU's last state over words, D 2048.
region_bigru_vsrn = Preset(
    "region-bigru-vsrn",
    {
        "embed_dim": 2048,
        "mlp": False,
        "context": "vsrn",
        "image_pooling": "gru",
        "encoder": "bigru",
        "text_pooling": "last",
    },
    {},
)
