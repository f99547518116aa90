"""Models of transformers as names and files: which folder or repository a name stands for, and its processor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from coder_plugin.backbones.base import CONFIG
from coder_plugin.backbones.names import TRANSFORMERS
from coder_plugin.backbones.untrusted import check_bytes, check_folder, tower_size
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.hub_access import loading

#: ``model_type`` and class of the models that can be trained.
MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
#: The weights in a folder.
WEIGHTS = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
#: PIL's numbers of ways to resize that open_clip's transform has.
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}


class Location(NamedTuple):
    """Where a model of transformers is read from.

    Args:
        name: a folder, or a repository of the Hugging Face Hub.
        reads_weights: whether its weights are read, or its configuration alone.
    """

    name: str
    reads_weights: bool = True

    @property
    def folder(self) -> Path | None:
        """The folder; None for a repository."""
        return Path(self.name) if Path(self.name).is_dir() else None


def find_location(name: str) -> Location | None:
    """The location that a model's name stands for; None for models that are not of transformers.

    Args:
        name: ``transformers:OWNER/NAME``, a folder with a ``config.json`` that has a ``model_type``, or the path of such a
            ``config.json``, which stands for the architecture with random weights.

    Example:
        >>> find_location("transformers:openai/clip-vit-base-patch32")
        Location(name='openai/clip-vit-base-patch32', reads_weights=True)
        >>> find_location("ViT-B-32") is None
        True
    """
    if name.startswith(TRANSFORMERS):
        return Location(name.removeprefix(TRANSFORMERS))
    path = Path(name)
    if path.is_dir() and not (path / CONFIG).exists() and _kind(path) is not None:
        return Location(name)
    if path.name == "config.json" and path.is_file() and _kind(path.parent) is not None:
        return Location(str(path.parent), reads_weights=False)
    return None


def _kind(folder: Path) -> Any:
    """``model_type`` in the folder's ``config.json``, or None."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    return config.get("model_type") if isinstance(config, Mapping) else None


def has_configuration(folder: Path) -> bool:
    """Whether a folder holds the configuration of a model that can be trained."""
    return _kind(folder) in MODELS


def check_kind(kind: Any, where: str) -> str:
    """A ``model_type`` that can be trained.

    Raises:
        CoderError: another one.
    """
    if kind == "siglip2":
        raise CoderError(
            f"{where} is a Siglip2Model (NaFlex), which reads pictures as patches of any number: take a SigLIP 2 checkpoint of "
            "a fixed size, whose class is SiglipModel, such as transformers:google/siglip2-base-patch16-224"
        )
    if kind not in MODELS:
        raise CoderError(
            f"{where}: its model_type is {str(kind)[:80]!r}; of transformers' models CLIPModel (clip) and SiglipModel (siglip) "
            "can be trained"
        )
    return kind


def check_files(folder: Path) -> None:
    """Check the files of a folder before transformers reads them; somebody else may have written them.

    Raises:
        CoderError: another kind of model; files that name code or another model; sizes that do not fit the weights.
    """
    check_kind(_kind(folder), str(folder))
    check_folder(folder, encoder=True)
    config = read_json(folder / "config.json")
    index = folder / f"{WEIGHTS}.index.json"
    weights = folder / WEIGHTS if (folder / WEIGHTS).is_file() else index
    if weights.is_file():
        parts = [file for file in folder.glob("*.safetensors") if file.is_file()] if weights == index else []
        towers = [config.get(name) for name in ("text_config", "vision_config")]
        count = sum(tower_size(tower) for tower in towers if isinstance(tower, Mapping))
        check_bytes(count, weights, folder / "config.json", parts=parts)


def reading(what: str, location: Location) -> AbstractContextManager[None]:
    """A context in which transformers reads files of a model (:func:`~coder_plugin.hub_access.loading`)."""
    downloads = {} if location.folder else {f"the repository {location.name}": "--model FOLDER"}
    return loading(f"{what} of {location.name} cannot be loaded", downloads, [location.name])


@dataclass(frozen=True)
class Processor:
    """How a model's texts and pictures are prepared: transformers' own objects, which copies of a model share.

    Args:
        tokenizer: None if the folder has none.
        images: the image processor.
    """

    tokenizer: Any
    images: Any

    def __deepcopy__(self, memo: Any) -> Processor:
        return self


def load_processor(location: Location | None, kind: str, image_size: int, *, cache_dir: str | None = None) -> Processor:
    """The tokenizer and the image processor of a model. Without files of an image processor: that of the model's class.

    Args:
        location: None: a model that was made in Python.
        kind: its ``model_type``. image_size: its pictures' height and width in pixels.

    Raises:
        CoderError: files that cannot be loaded, or that name code.
    """
    import transformers

    options: dict[str, Any] = {"cache_dir": cache_dir, "trust_remote_code": False}
    tokenizer = images = None
    if location is not None:
        folder = location.folder
        if folder is None or any((folder / name).is_file() for name in _TOKENIZER_FILES):
            with reading("the tokenizer", location):
                tokenizer = transformers.AutoTokenizer.from_pretrained(location.name, **options)
        if folder is None or any((folder / name).is_file() for name in _IMAGE_FILES):
            with reading("the image processor", location):
                images = transformers.AutoImageProcessor.from_pretrained(location.name, **options)
    if images is None:
        square = {"height": image_size, "width": image_size}
        if kind == "clip":
            images = transformers.CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=square)
        else:
            images = transformers.SiglipImageProcessor(size=square)
    return Processor(tokenizer, images)


def preprocess_config(images: Any, image_size: int, where: str) -> dict[str, Any]:
    """open_clip's ``preprocess_cfg`` of an image processor.

    Args:
        images: transformers' image processor.
        image_size: of the model's pictures, in pixels.
        where: for messages.

    Returns:
        The keyword arguments of ``open_clip.transform.PreprocessCfg``.

    Raises:
        CoderError: what open_clip's transform cannot do, or pictures of another size than the model's.
    """
    settings = images.to_dict()
    size, crop = _lengths(settings.get("size")), _lengths(settings.get("crop_size"))
    if not settings.get("do_center_crop"):
        crop = {}
    square = {"height": image_size, "width": image_size}
    if size == {"shortest_edge": image_size} and crop == square:
        mode = "shortest"
    elif size == square and crop in ({}, square):
        mode = "squash"
    else:
        raise CoderError(
            f"{where}: its image processor resizes to {size} and crops to {crop or 'nothing'}, and its model reads "
            f"{image_size} x {image_size} pixels: set size in preprocessor_config.json to the model's, and crop_size the same"
        )
    interpolation = _INTERPOLATIONS.get(int(settings.get("resample") or 0))
    scales = settings.get("do_rescale", True) and abs(settings.get("rescale_factor", 1 / 255) * 255 - 1) < 1e-3
    if interpolation is None or not scales or not settings.get("do_resize", True):
        raise CoderError(
            f"{where}: its image processor must resize (resample 2, bilinear, or 3, bicubic) and scale pixels by 1/255; its "
            f"resample is {settings.get('resample')}, its rescale_factor {settings.get('rescale_factor')}"
        )
    normalises = settings.get("do_normalize", True)
    return {
        "size": image_size,
        "mode": "RGB",
        "mean": tuple(settings["image_mean"]) if normalises else (0.0, 0.0, 0.0),
        "std": tuple(settings["image_std"]) if normalises else (1.0, 1.0, 1.0),
        "interpolation": interpolation,
        "resize_mode": mode,
        "fill_color": 0,
    }


def _lengths(size: Any) -> dict[str, int]:
    return {name: length for name, length in dict(size or {}).items() if length is not None}


class TransformersTokenizer:
    """Texts -> ids int64 [n, T], as the model's processor prepares them with ``padding="max_length"``.

    Args:
        tokenizer: transformers' own.
        context_length: T; longer texts are cut.
    """

    def __init__(self, tokenizer: Any, *, context_length: int) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length

    def __call__(self, texts: str | list[str]) -> Tensor:
        texts = [texts] if isinstance(texts, str) else list(texts)
        options: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return self.tokenizer(texts, max_length=self.context_length, **options)["input_ids"]

    def clean_fn(self, text: str) -> str:
        """The text itself: what open_clip's tokenizers do before they encode it, this one leaves to transformers."""
        return text
