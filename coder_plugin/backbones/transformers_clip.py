"""transformers' CLIPModel and SiglipModel as backbones: extended in place with the methods of open_clip's models.

An instance keeps its attributes and state-dict keys, and in eval mode it answers to transformers' keywords as before. SigLIP 2
checkpoints of a fixed size are SiglipModels. Texts are encoded without a mask, as SigLIP was trained; CLIP's causal attention
needs none.

Shapes: B batch, T text positions, L image positions, C channels, D joint dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones.clip import CoderCLIP
from coder_plugin.backbones.feature_capture import FeatureCapture, context_keys, mask_by_pool, part_of
from coder_plugin.backbones.names import TRANSFORMERS
from coder_plugin.backbones.plugin_backbones import fit_weights, read_weights
from coder_plugin.backbones.token_projection import attention_values
from coder_plugin.backbones.transformers_files import (
    MODELS,
    WEIGHTS,
    Location,
    Processor,
    TransformersTokenizer,
    check_files,
    check_kind,
    find_location,
    load_processor,
    preprocess_config,
    reading,
)
from coder_plugin.backbones.word_embeddings import WordEmbeddings
from coder_plugin.errors import CoderError

#: What of a tower's configuration decides its features besides the weights.
_COMPUTATION = ("hidden_act", "num_attention_heads", "layer_norm_eps", "eos_token_id", "image_size", "patch_size")


class TransformersTowers:
    """Mixin of CLIPModel and SiglipModel: what heads, losses and trainers use of open_clip's models.

    Args of its ``forward`` are open_clip's, images [B, 3, H, W] and ids [B, T]. transformers' own keywords (``pixel_values``,
    ``input_ids``, …) go to transformers' forward.
    """

    processor: Processor
    config: Any
    vision_model: Any
    text_model: Any
    logit_scale: nn.Parameter

    @property
    def visual(self) -> Any:
        """The image tower."""
        return self.vision_model

    @property
    def output_dim(self) -> int:
        """D."""
        return self.config.projection_dim if self.is_clip else self.config.text_config.projection_size

    @property
    def context_length(self) -> int:
        """T, the number of positions that the text tower has."""
        return self.config.text_config.max_position_embeddings

    @property
    def is_clip(self) -> bool:
        """Whether this is a CLIPModel; else a SiglipModel."""
        return self.config.model_type == "clip"

    def forward(self, image: Tensor | None = None, text: Tensor | None = None, **upstream: Any) -> Any:
        """Images and ids -> ``image_features``, ``text_features`` [B, D], L2-normalised, ``logit_scale``, ``logit_bias``.

        Raises:
            TypeError: transformers' keywords besides images or ids.
        """
        if upstream and image is None and text is None:
            return super().forward(**upstream)  # type: ignore[misc]
        if upstream:
            raise TypeError(f"{type(self).__name__}: {', '.join(upstream)} cannot be given besides image and text")
        # 0-d as open_clip's, where SiglipModel has one element
        outputs: dict[str, Tensor] = {"logit_scale": self.logit_scale.exp().reshape(())}
        if (bias := getattr(self, "logit_bias", None)) is not None:
            outputs["logit_bias"] = bias.reshape(())
        if image is not None:
            outputs["image_features"] = self.encode_image(image, normalize=True)
        if text is not None:
            outputs["text_features"] = self.encode_text(text, normalize=True)
        return outputs

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Images [B, 3, H, W] -> features [B, D], those of transformers' ``get_image_features``."""
        feature = self.vision_model(pixel_values=image).pooler_output
        feature = self.visual_projection(feature) if self.is_clip else feature  # type: ignore[attr-defined]
        return F.normalize(feature, dim=-1) if normalize else feature

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Ids [B, T] -> features [B, D], those of transformers' ``get_text_features``."""
        feature = self.text_model(input_ids=text).pooler_output
        feature = self.text_projection(feature) if self.is_clip else feature  # type: ignore[attr-defined]
        return F.normalize(feature, dim=-1) if normalize else feature

    def tokenizer(self) -> TransformersTokenizer:
        """The tokenizer of the model's folder or repository.

        Raises:
            CoderError: it has none, or the model was made in Python.
        """
        if self.processor.tokenizer is None:
            raise CoderError(
                f"{name_of(self) or 'this model'} has no tokenizer: save one into its folder "
                "(AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)), and name the folder"
            )
        return TransformersTokenizer(self.processor.tokenizer, context_length=self.context_length)

    def make_word_embeddings(self) -> WordEmbeddings:
        """The word embeddings of the text tower, for heads that generate texts.

        Raises:
            CoderError: no tokenizer, or one that pads at the left.
        """
        tokenizer = self.tokenizer()
        if tokenizer.tokenizer.padding_side != "right":
            raise CoderError("generated texts need padding at the right: set padding_side in tokenizer_config.json")
        return WordEmbeddings(self.text_model.embeddings.token_embedding, text_mask(self), tokenizer([""]))

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze the image tower, except its last groups: projection or pooling head, last block with norm, blocks, stem."""
        tower = self.vision_model
        head = self.visual_projection if self.is_clip else tower.head  # type: ignore[attr-defined]
        stem = [tower.embeddings, *([tower.pre_layrnorm] if self.is_clip else [])]
        _lock(stem, tower.encoder.layers, [tower.post_layernorm], [head], unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze the text tower, except its last groups: projection, last block with the norm, other blocks, embeddings.

        LayerNorms are locked with their blocks."""
        tower = self.text_model
        head = self.text_projection if self.is_clip else tower.head  # type: ignore[attr-defined]
        _lock([tower.embeddings], tower.encoder.layers, [tower.final_layer_norm], [head], unlocked_layers)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the towers' layers in the backward pass."""
        name = "activation" if hasattr(self, "activation_checkpointing_enable") else "gradient"  # until transformers 5
        if enable:
            getattr(self, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        else:
            getattr(self, f"{name}_checkpointing_disable")()

    def save_files(self, folder: Path) -> None:
        """Write all files but the weights that transformers' ``from_pretrained`` reads: configuration, tokenizer, processor."""
        config = copy.deepcopy(self.config)
        config.architectures, config._name_or_path = [MODELS[config.model_type]], ""
        name = "dtype" if hasattr(type(config)(), "dtype") else "torch_dtype"  # until transformers 4.56
        for each in (config, config.text_config, config.vision_config):
            setattr(each, name, self.logit_scale.dtype)  # transformers loads weights in this type
        config.save_pretrained(folder)
        if self.processor.tokenizer is not None:
            self.processor.tokenizer.save_pretrained(folder)
        self.processor.images.save_pretrained(folder)


class CoderTransformers(CoderCLIP):
    """Mixin of these models with heads: in training mode, transformers' names of images and ids are accepted, too."""

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        *args: Any,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As :meth:`CoderCLIP.forward`. In training mode ``pixel_values`` is ``image`` and ``input_ids`` is ``text``; in eval
        mode these names give transformers' own output.

        Raises:
            CoderError: in training mode, an ``attention_mask`` that a SiglipModel would have to follow.
        """
        own = {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}
        own = {name: value for name, value in own.items() if value is not None}
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(image, text, *args, **own, **keywords)
        if attention_mask is not None and not (self.is_clip or attention_mask.all()):  # type: ignore[attr-defined]
            raise CoderError('SigLIP reads padding, as it was trained: tokenize with padding="max_length", without a mask')
        image = pixel_values if image is None else image
        text = input_ids if text is None else text
        return super().forward(image, text, *args, **keywords)

    def gradient_checkpointing_enable(self, *args: Any, **keywords: Any) -> None:
        super(CoderCLIP, self).gradient_checkpointing_enable(*args, **keywords)  # type: ignore[misc]


class TransformersCapture(FeatureCapture):
    """Captures features of CLIPModel or SiglipModel at the places where :class:`FeatureCapture` does of open_clip's ViT."""

    def __init__(self, model: Any, keys: Iterable[str], *, context_blocks: int = 1) -> None:
        self._model_is_clip: bool = model.is_clip
        self._pooled: nn.Module = model.visual_projection if model.is_clip else model.vision_model
        super().__init__(model, set(keys), context_blocks=context_blocks)

    def _hook_pooled(self, model: Any) -> None:
        self._on_output(self._pooled, "image_pooled", _pooled)

    def _hook_image(self, visual: Any) -> None:
        patches = slice(1 if self._model_is_clip else 0, None)  # CLIP's first position is the class token
        if self._model_is_clip:  # its pooling normalises the class token alone
            self._on_output(visual.encoder, "image_tokens", partial(_normed, visual.post_layernorm, patches))
        else:
            self._on_output(visual.post_layernorm, "image_tokens")
        self._on_output(visual.encoder, "image_contexts", partial(_hidden, patches))
        if self.keys & context_keys("image"):
            self._on_input(self._block(visual.encoder.layers, "image"), "image_locals", part_of(patches))
            head = self._pooled if self._model_is_clip else visual.head
            project = _linear if self._model_is_clip else _attention_pooling
            self._projections["image"] = partial(project, visual.post_layernorm, head)

    def _hook_text(self, model: Any) -> None:
        text = model.text_model
        self._text_mask, self._causal = text_mask(model), model.is_clip
        self._on_output(text.final_layer_norm, "text_tokens")
        self._on_input(text.final_layer_norm, "text_contexts")
        if self.keys & context_keys("text"):
            self._on_input(self._block(text.encoder.layers, "text"), "text_locals")
            head = model.text_projection if model.is_clip else text.head
            self._projections["text"] = partial(_linear, text.final_layer_norm, head)


def _pooled(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


def _hidden(positions: slice, output: Any) -> Tensor:
    """The last hidden states at some positions, of an encoder's output."""
    return output[0][:, positions]


def _normed(norm: nn.Module, positions: slice, output: Any) -> Tensor:
    return norm(_hidden(positions, output))


def _linear(norm: nn.Module, projection: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens [B, L, C] -> [B, L, D]: the tower's last norm and projection, of each token alone."""
    return projection(norm(tokens))


def _attention_pooling(norm: nn.Module, head: Any, tokens: Tensor) -> Tensor:
    """Tokens [B, L, C] -> [B, L, D] by SigLIP's pooling, of each token alone: attention over one token is its value."""
    value = attention_values(head.attention, norm(tokens))
    return value + head.mlp(head.layernorm(value))


def text_mask(model: Any) -> Callable[[Tensor], Tensor]:
    """A function of the text tower's input: ids [B, T] -> bool [B, T], True up to the text's end."""
    if model.is_clip:
        end = model.config.text_config.eos_token_id
        # 2 is a fault of old configurations; transformers then takes the largest id for the end
        return mask_by_pool("argmax" if end == 2 else "eos", end, pad=0)
    tokenizer = model.processor.tokenizer
    if tokenizer is None or tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # SigLIP pads with its end token
        return mask_by_pool("last", None, pad=0)
    return partial(_mask_by_padding, tokenizer.pad_token_id, 0 if tokenizer.padding_side == "right" else -1)


def _mask_by_padding(pad: int, always: int, text: Tensor) -> Tensor:
    mask = text != pad
    mask[:, always] = True  # an empty text keeps a token
    return mask


def _lock(stem: list[Any], layers: Any, norm: list[Any], head: list[Any], unlocked: int) -> None:
    """Freeze a tower's groups of modules, from the stem to the head, except the last ``unlocked``."""
    groups = [stem, *([layer] for layer in layers[:-1]), [layers[-1], *norm], head]
    for number, group in enumerate(reversed(groups)):
        for module in group:
            module.requires_grad_(number < unlocked)


def class_name(model: Any) -> str | None:
    """``CLIPModel`` or ``SiglipModel``, if a model is one of transformers', with or without heads; else None."""
    classes = type(model).__mro__
    names = {each.__name__ for each in classes if each.__module__.startswith("transformers.models.")}
    return next((name for name in MODELS.values() if name in names), None)


def name_of(model: Any) -> str | None:
    """The name that :func:`create` opens a model of transformers by, from its folder or repository; None if it has none."""
    place = getattr(model.config, "_name_or_path", None)
    return None if not place else place if Path(place).is_dir() else f"{TRANSFORMERS}{place}"


def adapt(model: Any, name: str, *, cache_dir: str | None = None) -> Any:
    """Give a CLIPModel or SiglipModel the methods of :class:`TransformersTowers`, in place. Returns the same object.

    Args:
        model: of transformers; one that has the methods is left as it is.
        name: the folder or repository of its tokenizer and image processor; any other name means that it has none.
        cache_dir: folder of downloads.

    Raises:
        CoderError: an image processor that open_clip's transform cannot follow; a SigLIP without its pooling head.
    """
    if isinstance(model, TransformersTowers):
        return model
    kind, vision = model.config.model_type, model.config.vision_config
    if kind == "siglip" and not vision.vision_use_head:
        raise CoderError(f"{name}: its image tower has no pooling head (vision_use_head), so it gives no image features")
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    location = find_location(name)
    processor = load_processor(location, kind, size, cache_dir=cache_dir)
    cls = type(model)
    members = {"__module__": cls.__module__, "capture_class": TransformersCapture, "coder_class": CoderTransformers}
    model.__class__ = type(cls.__name__, (TransformersTowers, cls), members)
    model.processor = processor
    model.visual.preprocess_cfg = preprocess_config(processor.images, size, name)
    model.visual.image_size = size
    model.visual.grid_size = (size // vision.patch_size,) * 2
    towers = {"text": model.config.text_config, "vision": vision}
    model.coder_config = {
        "model_type": kind,
        **{side: {key: getattr(config, key, None) for key in _COMPUTATION} for side, config in towers.items()},
    }
    return model


def create(
    location: Location,
    *,
    pretrained: str | None = None,
    cache_dir: str | None = None,
    device: Any = None,
    **options: Any,
) -> Any:
    """A CLIPModel or SiglipModel, in float32 and training mode, with the methods of :class:`TransformersTowers`.

    Code that comes with the files is not run, and weights are read from safetensors alone.

    Args:
        location: where it is read from.
        pretrained: a ``.safetensors`` file of weights instead of the location's.
        cache_dir: folder of downloads. device: of the model.
        options: options of open_clip's models, which these do not have; all must be unset.

    Raises:
        CoderError: another kind of model; files that do not fit, name code, or cannot be loaded; an option that is set.
    """
    import transformers

    name, folder = location.name, location.folder
    if refused := sorted(option for option, value in options.items() if value not in (None, False, {}, [], "fp32")):
        raise CoderError(f"{name} is a model of transformers, which has no option {', '.join(refused)}: leave it out")
    if folder is not None:
        check_files(folder)
    with reading("the configuration", location):
        config = transformers.AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=False)
    cls = getattr(transformers, MODELS[check_kind(config.model_type, name)])
    if location.reads_weights and pretrained is None:
        if folder is not None and not any((folder / file).is_file() for file in (WEIGHTS, f"{WEIGHTS}.index.json")):
            raise CoderError(f"{name} has no {WEIGHTS}: save it as safetensors (save_pretrained), or give --pretrained FILE")
        with reading("the weights", location):
            model, report = cls.from_pretrained(
                name, config=config, cache_dir=cache_dir, use_safetensors=True, output_loading_info=True
            )
        if missing := sorted(report["missing_keys"]):
            raise CoderError(f"{name}: its weights lack {len(missing)} tensors of a {cls.__name__}, such as {missing[0]}")
    else:
        model = cls(config)
        if pretrained is not None:
            if Path(pretrained).suffix != ".safetensors":
                raise CoderError(f"--pretrained {pretrained}: weights of a model of transformers are a .safetensors file")
            weights: Mapping[str, Tensor] = read_weights(pretrained)
            # older files hold a buffer that newer ones leave out
            fit_weights(model, {key: value for key, value in weights.items() if not key.endswith("position_ids")}, pretrained)
    model = adapt(model.float().train(), name if folder is not None else f"{TRANSFORMERS}{name}", cache_dir=cache_dir)
    return model if device is None else model.to(device)
