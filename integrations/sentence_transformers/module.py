"""A model of ours as a module of ``SentenceTransformer``, which encodes texts and pictures and trains with a loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.backbones.base import Backbone
from coder_plugin.config import ModelConfig
from coder_plugin.errors import CoderError
from coder_plugin.integrations.sentence_transformers.heads import is_checkpoint, load_state, save_state
from coder_plugin.pretrained.build import make_tokenizer, make_transform
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.hub_cache import HUB, fetch
from coder_plugin.pretrained.open import open_pretrained

#: The files of a folder that sentence-transformers' loader reads.
FILES = ("modules.json", "config_sentence_transformers.json")


def write_files(folder: Path) -> None:
    """Add to an export's folder the files that ``SentenceTransformer(folder, trust_remote_code=True)`` reads."""
    module_type = f"{__name__}.{PictureText.__name__}"
    modules = [{"idx": 0, "name": "0", "path": "", "type": module_type}]
    options = {"model_type": "SentenceTransformer", "similarity_fn_name": "dot"}
    for name, value in zip(FILES, (modules, options), strict=True):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")


class PictureText(nn.Module):
    """Encode texts (str) and PIL pictures in any order to ``sentence_embedding`` [n, D], whose inner product is the score.

    The parts that scoring heads add to the features are included. A string is always a text, also if it looks like a file
    name. ``SentenceTransformer(modules=[PictureText(model)], similarity_fn_name="dot")`` holds a model that was just created.

    Args:
        model: of :func:`coder_plugin.create_model`; one that reads pictures.
        tokenizer: n texts -> int64 [n, T]; None: found by the model's name.
        transform: a picture (PIL) -> [3, H, W]; None: that of evaluation.

    Raises:
        CoderError: the model reads region features, or its tokenizer cannot be loaded.

    Example:
        >>> import coder_plugin
        >>> module = PictureText(coder_plugin.create_model("coder-tiny", loss="clip"))
        >>> module(module.preprocess(["a red circle", "a dog"]))["sentence_embedding"].shape[0]
        2
    """

    save_in_root = True
    #: "message" is sentence-transformers' word for a batch of texts and pictures.
    modalities = ["text", "image", "message"]

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Callable[[list[str]], Tensor] | None = None,
        transform: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Backbone):
            raise CoderError(f"{model.coder_name} reads region features, but sentence-transformers passes texts and pictures")
        self.model = model
        config = ModelConfig(name=model.coder_name, force_context_length=model.context_length)
        self.tokenizer = tokenizer or make_tokenizer(config, model)
        self.transform = transform or make_transform(model)

    @property
    def max_seq_length(self) -> int | None:
        """The number of tokens of a text that the model reads."""
        return getattr(self.tokenizer, "context_length", None)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **_: Any,
    ) -> PictureText:
        """Open a shared folder or repository, or a checkpoint of the trainer. sentence-transformers calls this."""
        folder = Path(model_name_or_path)
        if not folder.is_dir():
            folder = fetch(f"{HUB}{model_name_or_path}", revision=revision, cache_dir=cache_folder, token=token)
        opened = open_pretrained(folder, name=model_name_or_path, device="cpu")
        if is_checkpoint(folder):
            load_state(opened.model, folder)
        return cls(opened.model, tokenizer=opened.tokenizer, transform=opened.transform)

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the files that :meth:`load` reads. sentence-transformers adds its own files.

        The trainer's checkpoints (``checkpoint-10``) also hold the heads that only training needs, with their banks.
        """
        folder = Path(output_path)
        export_model(self.model, folder, tokenizer=self.tokenizer)
        if is_checkpoint(folder):
            save_state(self.model, folder)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Tensor]:
        """Tokenize texts and transform pictures.

        Args:
            inputs: n texts (str) and PIL pictures.
            prompt: put before each text.

        Returns:
            ``is_text`` [n], and if there are any, ``input_ids``: token ids [t, T] with ``is_empty`` [t], and ``pixel_values``
            [i, 3, H, W] with ``image_id``, int64 [i], which pictures of equal pixels share. The trainer finds the features of a
            column by the names ``input_ids`` and ``pixel_values``.

        Raises:
            ValueError: an input is neither a text nor a picture.
        """
        texts = [each for each in inputs if isinstance(each, str)]
        pictures = [each for each in inputs if hasattr(each, "convert")]
        if len(texts) + len(pictures) != len(inputs):
            other = next(each for each in inputs if not isinstance(each, str) and not hasattr(each, "convert"))
            raise ValueError(f"this model reads texts (str) and pictures (PIL), not a {type(other).__name__}")
        features = {"is_text": torch.tensor([isinstance(each, str) for each in inputs])}
        if texts:
            features["input_ids"] = self.tokenizer([f"{prompt or ''}{text}" for text in texts])
            features["is_empty"] = torch.tensor([not text.strip() for text in texts])
        if pictures:
            features["pixel_values"] = torch.stack([self.transform(each.convert("RGB")) for each in pictures])
            features["image_id"] = torch.tensor([_content_id(each) for each in features["pixel_values"]])
        return features

    def tokenize(self, texts: Sequence[Any], **options: Any) -> dict[str, Tensor]:
        """The name of :meth:`preprocess` before sentence-transformers 5.4."""
        return self.preprocess(texts, **options)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` [n, D], float32.

        Features without ``is_text`` are the pairs of a loss: ``pixel_values``, ``input_ids`` and ``image_id`` of as many rows,
        and perhaps ``text_negatives`` and ``text_negative_ids``. They give what the model returns in training mode, the heads'
        keys included, while dropout and batch statistics keep their mode.
        """
        if "is_text" not in features:
            training, self.model.training = self.model.training, True  # of the model alone: it then runs its heads
            others = {key: value for key, value in features.items() if key not in ("pixel_values", "input_ids")}
            try:
                return self.model(features["pixel_values"], features["input_ids"], **others)
            finally:
                self.model.training = training
        is_text: Tensor = features["is_text"]
        parts = {}
        if "input_ids" in features:
            parts[True] = self.model.embed_text(features["input_ids"]).float()
        if "pixel_values" in features:
            parts[False] = self.model.embed_image(features["pixel_values"]).float()
        vectors = next(iter(parts.values()))
        if len(parts) == 2:
            vectors = vectors.new_zeros(len(is_text), vectors.shape[1])
            vectors[is_text], vectors[~is_text] = parts[True], parts[False]
        return {**features, "sentence_embedding": vectors}

    @torch.no_grad()
    def get_embedding_dimension(self) -> int:
        """The dimension D of the features. It grows while a model trains whose heads begin to score after a warm-up."""
        training = self.model.training
        device = next(self.model.parameters()).device
        try:
            return int(self.model.eval().embed_text(self.tokenizer(["a picture"]).to(device)).shape[-1])
        finally:
            self.model.train(training)

    def get_sentence_embedding_dimension(self) -> int:
        """The name of :meth:`get_embedding_dimension` before sentence-transformers 5.4."""
        return self.get_embedding_dimension()


def _content_id(pixels: Tensor) -> int:
    """A 63-bit hash of a picture's pixels."""
    return int.from_bytes(hashlib.blake2b(pixels.numpy().tobytes(), digest_size=8).digest(), "little") >> 1
