"""The options of region models, from which both towers are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

from coder_plugin.backbones.gpo import Decoder

Context = Literal["none", "camera", "vsrn"]
Pooling = Literal["gpo", "mean", "max", "views", "gru"]
TextPooling = Literal["gpo", "mean", "max", "last"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a region model; ``--model-kwargs`` sets them by name.

    Args:
        region_dim: R; the trainer reads it from the data. embed_dim: D.
        mlp: add a two-layer perceptron to the projection of the regions.
        context: context stage over the regions: none, camera or vsrn.
        boxes: whether CAMERA's context stage reads the regions' positions, as released. False (ours): for files without boxes.
        image_pooling: gpo, mean, max, views (CAMERA) or gru (VSRN).
        gpo_decoder: what scores positions in GPO, of images and of texts: linear, as released, or mlp, the two-layer perceptron
            that CODER prints.
        views: V, number of views of an image for ``image_pooling="views"``.
        heads: number of attention heads in CAMERA's context stages; a divisor of D.
        batch_norm: VSRN's variant for Flickr30K.
        encoder: text encoder, bert or bigru.
        text: hub name or folder of a transformers encoder, for bert.
        pretrained_text: load the encoder's weights; False: its architecture with random weights.
        frozen_text: do not train the encoder.
        text_context: context stage over the words: none or camera.
        text_pooling: gpo, mean, max, or last (the last state of a BiGRU).
        vocabulary: a vocabulary file or a list of words, for bigru; the trainer builds one from the training captions.
        word_dim, text_layers, bidirectional: channels of the word vectors, number of layers and directions of the BiGRU.
        word_projection: project word vectors to embed_dim before the BiGRU; these projections are the locals (SelfAlign's
            released VSRN). False: the word vectors are.
        normalise_locals: the locals are what the context stage reads, each channel divided by its norm over the image's regions
            or the text's words (released by SelfAlign's authors): CAMERA's regions and words, whose attention then reads the
            divided words too, and VSRN's regions without batch_norm. False: the projections, as the paper prints.
        context_length: number of token positions, start and end included.
        global_dim: channels of a feature of the whole image, for heads that read one (AsCL's fusion); 0: none. For a loss
            with such a head the trainer reads the number from the data.
        logit_bias: learn SigLIP's bias, from -10, and its temperature from 1 / 10; True by default for a loss that reads it.
    """

    region_dim: int = 2048
    embed_dim: int = 1024
    mlp: bool = True
    context: Context = "none"
    boxes: bool = True
    image_pooling: Pooling = "gpo"
    gpo_decoder: Decoder = "linear"
    views: int = 12
    heads: int = 64
    batch_norm: bool = False
    encoder: Literal["bert", "bigru"] = "bert"
    text: str = "bert-base-uncased"
    pretrained_text: bool = True
    frozen_text: bool = False
    text_context: Literal["none", "camera"] = "none"
    text_pooling: TextPooling = "gpo"
    vocabulary: str | Sequence[str] | None = None
    word_dim: int = 300
    word_projection: bool = False
    text_layers: int = 1
    bidirectional: bool = True
    normalise_locals: bool = False
    context_length: int = 50
    global_dim: int = 0
    logit_bias: bool = False

    def __post_init__(self) -> None:
        choices = {name: get_args(hint) for name, hint in get_type_hints(Options).items() if get_origin(hint) is Literal}
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name in choices:
                if value not in choices[name]:
                    raise ValueError(f"{name} must be one of {', '.join(choices[name])}, got {value!r}")
            elif option.default is not None and type(value) is not type(option.default):
                raise ValueError(f"{name} must be {type(option.default).__name__}, got {value!r}")
            elif type(value) is int and value < (least := 0 if name == "global_dim" else 1):
                raise ValueError(f"{name} must be {least} or more, got {value}")
        if self.encoder == "bigru" and self.text_context != "none":
            raise ValueError(f"text_context {self.text_context} works with BERT only: with bigru use text_context=none")
        if self.encoder == "bert" and self.word_projection:
            raise ValueError("word_projection works with bigru only: leave it out with bert")
        divided = self.text_context != "none" or (self.context != "none" and not self.batch_norm)
        if self.normalise_locals and not divided:
            raise ValueError(
                "normalise_locals changes nothing here: it needs context=camera, context=vsrn without batch_norm, or "
                "text_context=camera"
            )
