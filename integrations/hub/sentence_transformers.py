"""A shared model in sentence-transformers: ``SentenceTransformer(FOLDER, trust_remote_code=True)``.

sentence-transformers accepts any module with the methods below, so it is not imported here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.backbones.base import Backbone
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.hub_cache import HUB, fetch
from coder_plugin.pretrained.open import PretrainedModel, open_pretrained

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
    name.

    Args:
        trained: a model that reads pictures.

    Raises:
        CoderError: the model reads region features.
    """

    save_in_root = True
    #: "message" is sentence-transformers' word for a batch of texts and pictures.
    modalities = ["text", "image", "message"]

    def __init__(self, trained: PretrainedModel) -> None:
        super().__init__()
        if isinstance(trained.model, Backbone):
            raise CoderError(f"{trained.name} reads region features, but sentence-transformers passes texts and pictures")
        self.model, self.trained = trained.model, trained
        self.tokenizer = trained.tokenizer
        self._dimension = int(trained.encode_texts(["a picture"]).shape[-1])

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
        """Open a shared folder or repository. sentence-transformers calls this."""
        folder = Path(model_name_or_path)
        if not folder.is_dir():
            folder = fetch(f"{HUB}{model_name_or_path}", revision=revision, cache_dir=cache_folder, token=token)
        return cls(open_pretrained(folder, name=model_name_or_path, device="cpu"))

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the files that :meth:`load` reads. sentence-transformers adds its own files."""
        export_model(self.model, Path(output_path), tokenizer=self.tokenizer)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Tokenize texts and transform pictures.

        Args:
            inputs: n texts (str) and PIL pictures.
            prompt: put before each text.

        Returns:
            ``is_text`` [n], and if there are any, ``text``: token ids [t, T], and ``image``: pixels [i, 3, H, W].

        Raises:
            ValueError: an input is neither a text nor a picture.
        """
        texts = [f"{prompt or ''}{each}" for each in inputs if isinstance(each, str)]
        pictures = [each for each in inputs if hasattr(each, "convert")]
        if len(texts) + len(pictures) != len(inputs):
            other = next(each for each in inputs if not isinstance(each, str) and not hasattr(each, "convert"))
            raise ValueError(f"this model reads texts (str) and pictures (PIL), not a {type(other).__name__}")
        features: dict[str, Any] = {"is_text": torch.tensor([isinstance(each, str) for each in inputs])}
        if texts:
            features["text"] = self.tokenizer(texts)
        if pictures:
            features["image"] = torch.stack([self.trained.transform(each.convert("RGB")) for each in pictures])
        return features

    def tokenize(self, texts: Sequence[Any], **options: Any) -> dict[str, Any]:
        """The name of :meth:`preprocess` before sentence-transformers 5.4."""
        return self.preprocess(texts, **options)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` [n, D], float32."""
        is_text: Tensor = features["is_text"]
        vectors = torch.zeros(len(is_text), self._dimension, device=is_text.device)
        if "text" in features:
            vectors[is_text] = self.model.embed_text(features["text"]).float()
        if "image" in features:
            vectors[~is_text] = self.model.embed_image(features["image"]).float()
        return {**features, "sentence_embedding": vectors}

    def get_embedding_dimension(self) -> int:
        """The dimension D of the features."""
        return self._dimension

    def get_sentence_embedding_dimension(self) -> int:
        """The name of :meth:`get_embedding_dimension` before sentence-transformers 5.4."""
        return self._dimension
