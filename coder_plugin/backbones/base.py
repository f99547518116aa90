"""What a backbone is, and the forward that all models with heads share.

A :class:`Backbone` of ours has two towers that return named tensors. open_clip's models are extended in place instead
(``backbones/clip.py``). Both run :func:`forward_with_heads` in training, so trainers, heads and losses see no difference.

Shapes: B batch, D joint dimension, V features of one image, T text positions, E channels of the word embeddings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones.norm import statistics_of
from coder_plugin.backbones.word_embeddings import WordEmbeddings
from coder_plugin.data.item import UNKNOWN_IMAGE

#: The file of an export that holds a backbone's name and options.
CONFIG = "coder_model.json"
#: The keys that a backbone returns; ``logit_bias`` if it has one.
OUTPUT_KEYS = frozenset({"image_features", "text_features", "logit_scale", "logit_bias"})


@dataclass(frozen=True, kw_only=True)
class BackboneInfo:
    """Sizes of a backbone that heads are built from. A size of 0 means that the backbone has no such features.

    Args:
        embed_dim: D, channels of the joint space.
        image_tokens, text_tokens: channels of the last layer's tokens.
        image_locals, text_locals: channels of the tokens before the context stage.
        image_contexts, text_contexts: channels of the tokens after the context stage.
        image_global: channels of a feature of the whole image.
        views: V, the number of joint features of one image.
        vocabulary: number of tokens that the tokenizer knows.
    """

    embed_dim: int
    image_tokens: int = 0
    text_tokens: int = 0
    image_locals: int = 0
    text_locals: int = 0
    image_contexts: int = 0
    text_contexts: int = 0
    image_global: int = 0
    views: int = 1
    vocabulary: int = 0


def forward_with_heads(
    model: Any,
    run_towers: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]],
    image: Any,
    text: Tensor | None,
    *,
    text_positive: Tensor | None = None,
    text_tags: Tensor | None = None,
    image_id: Tensor | None = None,
    text_negatives: Tensor | None = None,
    text_negative_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Towers, aggregators and heads of a model in training mode. Further captions enter here and nowhere else.

    Args:
        model: has ``coder`` and, if a head adds texts, ``word_embeddings``.
        run_towers: (image, ids [R, T]) -> the backbone's outputs, and what heads may read besides.
        image: images as the towers read them. text: int64 [B, T].
        text_positive: positive captions [B, T]. text_tags: classes of words [B, T]. image_id: [B].
        text_negatives: hard negatives of each image [B, n, T]. text_negative_ids: the ids of the images that they are captions
            of [B, n]; -1 where that is not known, -2 where there is no text. None: no image is known.

    Returns:
        the backbone's outputs and the heads' ``coder_*`` keys.

    Raises:
        ValueError: hard negatives or ids of other shapes.
    """
    model.coder.watch(model)
    generator = model.coder.adds_texts
    texts = None
    if generator is not None and text is not None:
        texts = generator.further_texts(model.word_embeddings, text, text_positive)
    rows = text if texts is None else texts.ids
    encoded: tuple[int, int] | None = None
    if text is not None and text_negatives is not None:
        text_negative_ids = _negative_ids(text, text_negatives, text_negative_ids)
        if model.coder.encodes_negatives:  # after the captions and before generated texts, the last of which are noised
            generated = [] if texts is None else [texts.ids[len(text) :]]
            rows = torch.cat([text, text_negatives.flatten(0, 1), *generated])
            encoded = len(text), text_negatives.shape[1]
    with contextlib.ExitStack() as stack:
        if texts is not None:
            stack.enter_context(model.word_embeddings.noise_in(texts))
        if text is not None and rows is not text:
            stack.enter_context(statistics_of(model, len(text)))
        outputs, intermediates = run_towers(image, rows)
    features = _present({**outputs, **intermediates})
    features.update(model.coder.aggregate(features))
    if encoded is not None:
        features = _split_negatives(features, *encoded)
    if texts is not None:
        features = texts.split(features)
    outputs = {key: features.get(key, value) for key, value in outputs.items()}
    inputs = {
        "image": image,
        "text": text,
        "text_positive": text_positive,
        "text_tags": text_tags,
        "image_id": image_id,
        "text_negatives": text_negatives,
        "text_negative_ids": text_negative_ids,
    }
    outputs = {**outputs, **model.coder({**features, **_present(inputs)})}
    # DDP with find_unused_parameters takes a parameter that is itself an output for unused
    return {key: value.view_as(value) if isinstance(value, nn.Parameter) else value for key, value in outputs.items()}


def as_weights(model: Any, image: Any) -> Any:
    """Images, or the floating-point tensors of a dict of them, in the type of the weights, except under autocast."""
    dimensions = 2 if isinstance(model, Backbone) else 4  # open_clip's bf16 leaves other parameters than these in float32
    weights = next((parameter for parameter in model.parameters() if parameter.ndim == dimensions), None)
    if weights is None:
        return image
    if isinstance(image, Mapping):
        return {key: as_weights(model, value) for key, value in image.items()}
    if not isinstance(image, Tensor) or not image.is_floating_point() or image.dtype == weights.dtype:
        return image
    autocast = torch.is_autocast_enabled(image.device.type) or distributed.is_sharded(weights)  # FSDP2 casts, too
    return image if autocast else image.to(weights.dtype)


def _negative_ids(text: Tensor, negatives: Tensor, ids: Tensor | None) -> Tensor:
    """The ids of the hard negatives' images, checked."""
    if negatives.ndim != 3 or (len(negatives), negatives.shape[2]) != tuple(text.shape):
        raise ValueError(
            f"text_negatives must have shape ({len(text)}, n, {text.shape[1]}), as text has {tuple(text.shape)}, got "
            f"{tuple(negatives.shape)}"
        )
    if ids is None:
        return text.new_full(negatives.shape[:2], UNKNOWN_IMAGE)
    if ids.shape != negatives.shape[:2]:
        raise ValueError(f"text_negative_ids must have shape {tuple(negatives.shape[:2])}, got {tuple(ids.shape)}")
    return ids


def _split_negatives(features: Mapping[str, Any], batch: int, each: int) -> dict[str, Any]:
    """Every ``text_KEY`` without the rows of hard negatives, ``each`` of an image, that follow those of the captions; and of
    them ``negative_features`` [B, n, D]."""
    split = dict(features)
    for key, value in features.items():
        if key.startswith("text_"):
            captions, negatives, generated = value.split([batch, batch * each, len(value) - batch * (1 + each)])
            split[key] = torch.cat([captions, generated]) if len(generated) else captions
            if key == "text_features":
                split["negative_features"] = negatives.unflatten(0, (batch, each))
    return split


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Backbone(nn.Module):
    """Base of the entry points of ``coder_plugin.backbones``: callables of keyword options that return one of these.

    Among their options are ``cache_dir`` and, in a trainer, ``example``, an image as the data load it, and ``captions``, a
    callable that iterates over the data's captions. A callable may have two attributes: ``training``, defaults of training
    options, and ``logit_bias``, True if it has an option of this name, which a loss that reads SigLIP's bias sets.

    A subclass gives the two towers, their sizes and what reads its data. ``create_model`` puts the heads under ``coder``.
    """

    #: The keys that heads may read besides :data:`OUTPUT_KEYS`; see ``resolver.INTERMEDIATE_KEYS``.
    intermediate_keys: frozenset[str] = frozenset()
    #: The input that Hugging Face's Trainer hands to metrics.
    main_input_name = "image"

    coder: Any
    logit_scale: nn.Parameter
    logit_bias: nn.Parameter | None
    word_embeddings: WordEmbeddings

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("logit_bias", None)

    def info(self) -> BackboneInfo:
        """Sizes that heads are built from."""
        raise NotImplementedError

    def image_side(self, image: Any) -> dict[str, Tensor]:
        """``image_features`` [B, D] or [B, V, D], L2-normalised, and the image's :attr:`intermediate_keys`."""
        raise NotImplementedError

    def text_side(self, text: Tensor) -> dict[str, Tensor]:
        """Ids [B, T] -> ``text_features`` [B, D], L2-normalised, and the text's :attr:`intermediate_keys`."""
        raise NotImplementedError

    def text_mask(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> bool [B, T], True up to a text's end."""
        raise NotImplementedError

    def word_embedding(self) -> nn.Module:
        """The layer that looks up ids [B, T], or the first positions of them, and returns vectors [B, T, E]."""
        raise NotImplementedError

    def tokenizer(self, *, word_dropout: float = 0.0) -> Callable[[list[str]], Tensor]:
        """Texts -> int64 ids [B, T]. ``word_dropout``: rate of words that are dropped, in [0, 1), for training."""
        raise NotImplementedError

    def transform(self, *, max_regions: int = 36, region_dropout: float = 0.0) -> Callable[[Any], Any]:
        """What an item loads -> a tensor or a dict of tensors, of the same shapes for every image."""
        raise NotImplementedError

    def example_image(self, rows: int) -> Any:
        """A random batch of ``rows`` images, on the CPU."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """``{"backbone": name, "options": …}``, all that ``create_model`` needs to make it again; JSON-serialisable."""
        raise NotImplementedError

    def save_config(self, folder: Path) -> Path:
        """Write all files but the weights that ``create_model(FOLDER)`` reads. Returns the configuration's path."""
        raise NotImplementedError

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower, except its last ``unlocked_groups`` groups of layers."""
        raise NotImplementedError

    def lock_text_tower(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze the text encoder except its last ``unlocked_layers`` layers and, unless ``freeze_layer_norm``, LayerNorms."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the towers' layers in the backward pass."""
        raise NotImplementedError

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """The name by which the trainers of Hugging Face call :meth:`set_grad_checkpointing`."""
        self.set_grad_checkpointing(True)

    def forward(
        self,
        image: Any = None,
        text: Tensor | None = None,
        *,
        text_positive: Tensor | None = None,
        text_tags: Tensor | None = None,
        image_id: Tensor | None = None,
        text_negatives: Tensor | None = None,
        text_negative_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Images and ids [B, T] -> :data:`OUTPUT_KEYS` and, in training mode, the heads' ``coder_*`` keys.

        Args: see :func:`forward_with_heads`.
        """
        if not self.training:
            return self._run_towers(image, text)[0]
        return forward_with_heads(
            self,
            self._run_towers,
            image,
            text,
            text_positive=text_positive,
            text_tags=text_tags,
            image_id=image_id,
            text_negatives=text_negatives,
            text_negative_ids=text_negative_ids,
        )

    def _run_towers(self, image: Any, text: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        features = {"logit_scale": self.logit_scale.exp()}
        if self.logit_bias is not None:
            features["logit_bias"] = self.logit_bias
        if image is not None:
            features.update(self.image_side(as_weights(self, image)))
        if text is not None:
            features.update(self.text_side(text))
        outputs = {key: value for key, value in features.items() if key in OUTPUT_KEYS}
        return outputs, {key: value for key, value in features.items() if key not in OUTPUT_KEYS}

    def encode_image(self, image: Any, normalize: bool = False) -> Tensor:
        """Pooled features of images [B, D]; with ``normalize`` those that the score compares, [B, V, D] for V views."""
        features = self.image_side(image)
        return features["image_features"] if normalize else features["image_pooled"]

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Ids [B, T] -> pooled features of texts [B, D]."""
        features = self.text_side(text)
        return features["text_features"] if normalize else features["text_pooled"]

    def embed_image(self, image: Any) -> Tensor:
        """Retrieval vectors of images [B, F], or [B, V, F], F >= D: their (greatest) inner product with
        :meth:`embed_text` is the score."""
        return self.coder.embed("image", self.describe_image(image))

    def embed_text(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> retrieval vectors of texts [B, F], F >= D."""
        return self.coder.embed("text", self.describe_text(text))

    def describe_image(self, image: Any) -> dict[str, Tensor]:
        """All keys of images alone, from which :meth:`embed_image` and re-ranking are computed."""
        return self.image_side(as_weights(self, image))

    def describe_text(self, text: Tensor) -> dict[str, Tensor]:
        """All keys of texts alone, from which :meth:`embed_text` and re-ranking are computed."""
        return self.text_side(text)


def make_word_embeddings(model: Backbone) -> WordEmbeddings:
    """The word embeddings of a backbone's text tower."""
    return WordEmbeddings(model.word_embedding(), model.text_mask, model.tokenizer()([""]))
