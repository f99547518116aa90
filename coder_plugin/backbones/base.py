"""What a backbone of ours is: two towers that give named tensors, with the objective's heads run inside forward.

open_clip's models are extended in place instead (``backbones/clip.py``); to trainers, heads and losses both look alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coder_plugin.backbones.words import Words
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.norm import statistics_of

#: The file of an export that says how its model is made.
CONFIG = "coder_model.json"


class Backbone(nn.Module):
    """Base of the entry points of ``coder_plugin.backbones``: a callable of keyword options that returns one of these.

    Among its options are ``cache_dir``, and in a trainer ``example``, an image as the data load it, and ``captions``, a
    callable that iterates over the data's captions. The callable may have ``training``, defaults of training options.

    A subclass gives the two sides, their widths and what reads its data; ``create_model`` puts the heads under ``coder``.
    """

    #: The keys that heads may read and that do not leave the model; see ``resolver.INTERMEDIATE_KEYS``.
    inside: frozenset[str] = frozenset()

    coder: Any
    logit_scale: nn.Parameter
    words: Words

    def info(self) -> BackboneInfo:
        """Dimensions that heads are built from."""
        raise NotImplementedError

    def image_side(self, image: Any) -> dict[str, Tensor]:
        """``image_features`` [B, D] or [B, V, D], L2-normalised, and what of :attr:`inside` is the image's."""
        raise NotImplementedError

    def text_side(self, text: Tensor) -> dict[str, Tensor]:
        """``text_features`` [B, D], L2-normalised, and what of :attr:`inside` is the text's."""
        raise NotImplementedError

    def text_mask(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> bool [B, T], True up to a text's end: AsCL's generated texts need to know."""
        raise NotImplementedError

    def word_embedding(self) -> nn.Module:
        """The layer that looks up ids [B, T], or the first positions of them, and gives vectors [B, T, E]."""
        raise NotImplementedError

    def tokenizer(self, *, word_dropout: float = 0.0) -> Callable[[list[str]], Tensor]:
        """Texts -> ids [B, T]; training drops so many of the words."""
        raise NotImplementedError

    def transform(self, *, max_regions: int = 36, region_dropout: float = 0.0) -> Callable[[Any], Any]:
        """What an item loads -> a tensor or a dict of tensors, of the same shapes for every image."""
        raise NotImplementedError

    def example_image(self, rows: int) -> Any:
        """A made-up batch of images, on the CPU."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """``{"backbone": name, "options": …}``, all that ``create_model`` needs to make it again; for JSON."""
        raise NotImplementedError

    def save_config(self, folder: Path) -> Path:
        """Write what, with the weights beside it, ``create_model(FOLDER)`` opens again; returns the configuration's path."""
        raise NotImplementedError

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower, but for its last so many groups of layers."""
        raise NotImplementedError

    def lock_text_tower(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze the text tower's encoder, but for its last so many layers and, if asked for, its LayerNorms."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations of the towers' layers in the backward pass."""
        raise NotImplementedError

    def forward(
        self,
        image: Any = None,
        text: Tensor | None = None,
        *,
        text_positive: Tensor | None = None,
        text_tags: Tensor | None = None,
        image_id: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """-> ``image_features``, ``text_features``, ``logit_scale`` and, in training mode, the heads' ``coder_*`` keys."""
        known: dict[str, Any] = {"logit_scale": self.logit_scale.exp()}
        if image is not None:
            known.update(self.image_side(image))
        texts = self.coder.further_texts(text, text_positive) if self.training else None
        if texts is not None:
            with self.words.noised(texts), statistics_of(self, texts.batch):
                known.update(self.text_side(texts.ids))
            known = texts.parted(known)
        elif text is not None:
            known.update(self.text_side(text))
        outputs = {key: value for key, value in known.items() if key in RETURNED}
        if not self.training:
            return outputs
        given = {"image": image, "text": text, "text_positive": text_positive, "text_tags": text_tags, "image_id": image_id}
        return {**outputs, **self.coder({**known, **{key: value for key, value in given.items() if value is not None}})}

    def encode_image(self, image: Any, normalize: bool = False) -> Tensor:
        """The pooled features of images [B, D]; normalised, as the score compares them, that is [B, V, D] for V views."""
        features = self.image_side(image)
        return features["image_features"] if normalize else features["image_pooled"]

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """The pooled features of texts [B, D]."""
        features = self.text_side(text)
        return features["text_features"] if normalize else features["text_pooled"]

    def embed_image(self, image: Any) -> Tensor:
        """The retrieval vectors of images [B, D or more], or [B, V, D or more]: their (greatest) product with
        :meth:`embed_text` is the score."""
        return self.coder.embed("image", self.describe_image(image))

    def embed_text(self, text: Tensor) -> Tensor:
        """The retrieval vectors of texts [B, D or more]."""
        return self.coder.embed("text", self.describe_text(text))

    def describe_image(self, image: Any) -> dict[str, Tensor]:
        """All that is known of images on their own: what :meth:`embed_image` and re-ranking are made of."""
        return self.image_side(image)

    def describe_text(self, text: Tensor) -> dict[str, Tensor]:
        """All that is known of texts on their own."""
        return self.text_side(text)


def words_of(model: Backbone) -> Words:
    """What tells a backbone's words from the rest of its input, and noises them."""
    return Words(model.word_embedding(), model.text_mask, model.tokenizer()([""]))


#: What leaves a backbone.
RETURNED = frozenset({"image_features", "text_features", "logit_scale"})
