"""What a model's configuration may not hold, because somebody else may have written it.

open_clip, transformers and timm run code, fetch, or take memory because a configuration says so. Keys that do are refused,
names must be of installed models or of files beside the configuration, and sizes must fit the weights. Besides,
:func:`coder_plugin.hub_access.hub_access` keeps the hub out of reach while files of this machine are opened.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from coder_plugin.errors import CoderError
from coder_plugin.files import read_json

#: Folder in an export with the configuration of a Hugging Face text tower, in transformers' format.
TEXT_FOLDER = "text"
#: Keys by which transformers and open_clip run code, load with another library, or build a part from another model's name.
_REFUSED = frozenset(
    "auto_map trust_remote_code quantization_config custom_pipelines backbone backbone_config use_timm_backbone "
    "use_pretrained_backbone architecture model_args".split()
)
#: Options that open_clip passes on to tokenizers and layers.
_PASSED_ON = frozenset("clean strip_sep_token language reduction_mask eps approximate".split())
#: Files in a folder that transformers reads.
_TRANSFORMERS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_TEXT_NAMES = ("hf_model_name", "hf_tokenizer_name")


def check_values(value: Any, where: str | Path, *, sizes: bool = True, key: str = "", depth: int = 0) -> None:
    """Check a JSON value of any shape for keys that run code or fetch, and for huge numbers.

    Args:
        value: any JSON value. where: the file, for messages. sizes: whether integers are checked.
        key, depth: of ``value`` in the file.

    Raises:
        CoderError: names the key.
    """
    if depth > 50:
        raise CoderError(f"{where}: nested over 50 levels deep")
    if isinstance(value, Mapping):
        for name, each in value.items():
            full = f"{key}.{name}" if key else str(name)
            if name in _REFUSED and each:
                raise CoderError(f"{where}: {full} names code or another model, which is not followed: remove it")
            if ("attn_implementation" in name or "experts_implementation" in name) and each not in (None, "eager", "sdpa"):
                raise CoderError(f"{where}: {full} is {_short(each)}; it must be eager or sdpa")
            check_values(each, where, sizes=sizes, key=full, depth=depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            check_values(each, where, sizes=sizes, key=key, depth=depth + 1)
    elif isinstance(value, int) and sizes:
        name = key.rpartition(".")[2]
        most = 512 if "layer" in name else 4096 if name in ("image_size", "size") else 1 << 24
        if abs(value) > most:
            raise CoderError(f"{where}: {key} is {_short(value)}; the most is {most:,}")


def check_config(config: Any, where: str | Path) -> dict[str, Any]:
    """A configuration of open_clip, as ``model_cfg`` of ``open_clip_config.json`` holds it.

    Names of text towers are checked by :func:`check_text_names`; keys and types that open_clip does not know, by open_clip.

    Args:
        config: any JSON value.
        where: the file, for messages.

    Returns:
        ``config``.

    Raises:
        CoderError: not such a configuration, or one that could run code, fetch, or take all memory; names the key.
    """
    if not isinstance(config, Mapping):
        raise CoderError(f"{where}: a model's configuration is an object, not {_short(config)}")
    if missing := {"embed_dim", "vision_cfg", "text_cfg"} - config.keys():
        raise CoderError(f"{where} is not an open_clip model configuration: it lacks {', '.join(sorted(missing))}")
    check_values(config, where)
    for name in ("vision_cfg", "text_cfg", "multimodal_cfg"):
        tower = config.get(name, {})
        if not isinstance(tower, Mapping):
            raise CoderError(f"{where}: {name} must be an object, got {_short(tower)}")
        for key, value in tower.items():
            if isinstance(value, Mapping) and (other := sorted(value.keys() - _PASSED_ON)):
                raise CoderError(f"{where}: {name}.{key}.{other[0]} is not an option that is passed on; remove it")
            if key == "timm_model_name" and value is not None:
                import timm

                if not (isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) and timm.is_model(value)):
                    raise CoderError(f"{where}: {name}.{key} is {_short(value)}, which is not a model of the installed timm")
    return dict(config)


def check_preprocessing(config: Any, where: str | Path) -> dict[str, Any]:
    """``preprocess_cfg`` of an ``open_clip_config.json``: how pictures are prepared.

    Raises:
        CoderError: open_clip's transform cannot be made of it, or fails on a picture.
    """
    from open_clip.transform import PreprocessCfg, image_transform_v2

    check_values(config, where, key="preprocess_cfg")
    try:
        image_transform_v2(PreprocessCfg(**config), is_train=False)(Image.new("RGB", (8, 8)))
    except Exception as error:  # open_clip and torchvision raise many types
        raise CoderError(f"{where}: preprocess_cfg cannot be used: {type(error).__name__}: {error}") from error
    return dict(config)


def check_folder(folder: Path, *, encoder: bool = False) -> None:
    """The files in a folder that transformers reads.

    Args:
        folder: any.
        encoder: whether a model is built from its ``config.json``, which must then name the model's kind.

    Raises:
        CoderError: a file that names code or another model, or holds a huge number.
    """
    if (folder / "adapter_config.json").exists():
        raise CoderError(f"{folder / 'adapter_config.json'} names a base model to fetch: adapters must be merged before")
    for file in (folder / name for name in _TRANSFORMERS):
        if file.is_file():
            value = read_json(file)
            check_values(value, file, sizes=file.name == "config.json")
            if encoder and file.name == "config.json" and not (isinstance(value, Mapping) and value.get("model_type")):
                raise CoderError(f"{file}: model_type is missing: name the kind of text encoder, such as bert")


@functools.cache
def known_names() -> frozenset[str]:
    """The text towers and tokenizers on the hub that the configurations of the installed open_clip name."""
    import open_clip

    files = open_clip.factory._MODEL_CONFIG_PATHS[0].glob("*.json")
    towers = [read_json(file).get("text_cfg", {}) for file in files]
    return frozenset(tower[key] for tower in towers for key in _TEXT_NAMES if tower.get(key))


def check_text_names(
    config: Mapping[str, Any], where: str, *, on_hub: Collection[str] | None = None, folders: bool = True
) -> None:
    """The text tower and the tokenizer that a configuration names.

    Args:
        config: checked by :func:`check_config`, or open_clip's own.
        where: for messages.
        on_hub: names on the hub that may be fetched, such as :func:`known_names`; None: any, because the user has named them.
        folders: whether they may be folders of this machine.

    Raises:
        CoderError: another name on the hub; a folder with files that :func:`check_folder` refuses.
    """
    for key in _TEXT_NAMES:
        name = config.get("text_cfg", {}).get(key) or ""
        if not isinstance(name, str):
            raise CoderError(f"{where}: text_cfg.{key} must be a name, got {_short(name)}")
        if folders and name and Path(name).is_dir():
            check_folder(Path(name), encoder=key == "hf_model_name")
        elif name and on_hub is not None and name not in on_hub:
            raise CoderError(
                f"{where}: text_cfg.{key} is {_short(name)}, which is not fetched because a file says so: download it, and "
                "give a model configuration (--model FILE.json) that names its folder"
            )


def tower_size(tower: Mapping[str, Any]) -> int:
    """A lower bound on the parameters of a tower, from its configuration in open_clip's or transformers' format."""

    def largest(*names: str) -> float:
        values = [tower[name] for name in names if type(tower.get(name)) in (int, float)]
        return max((value for value in values if math.isfinite(value)), default=0)

    layers = tower.get("layers")
    depth = sum(layers) if isinstance(layers, (list, tuple)) else largest(
        "layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"
    )
    width = largest("width", "hidden_size", "d_model", "dim", "n_embd")
    inner = max(largest("intermediate_size", "d_ff", "hidden_dim"), width * largest("mlp_ratio"))
    patches = (largest("image_size") // (largest("patch_size") or 32)) ** 2
    positions = largest("vocab_size") + largest("max_position_embeddings", "context_length") + patches
    return int(width * (positions + depth * (3 * width + inner)))


def config_size(config: Mapping[str, Any], folder: Path) -> int:
    """A lower bound on the parameters of an open_clip model; a tower of timm counts nothing.

    Args:
        config: checked by :func:`check_config`.
        folder: of the export, with the configuration of a Hugging Face text tower.
    """
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    vision, text = ({**vars(cfg()), **config[name]} for cfg, name in ((CLIPVisionCfg, "vision_cfg"), (CLIPTextCfg, "text_cfg")))
    towers = [] if vision["timm_model_name"] else [vision]
    towers.append(read_json(folder / TEXT_FOLDER / "config.json") if text["hf_model_name"] else text)
    projected = sum(tower["width"] for tower in towers if type(tower.get("width")) is int)
    return sum(map(tower_size, towers)) + projected * (config["embed_dim"] if type(config["embed_dim"]) is int else 0)


def check_bytes(count: int, weights: Path, where: str | Path, *, parts: Sequence[Path] = ()) -> None:
    """Refuse a model of ``count`` parameters or more, if the weights' file, with its further ``parts``, has fewer bytes.

    Raises:
        CoderError: it has.
    """
    if count > (size := sum(file.stat().st_size for file in (weights, *parts))):
        raise CoderError(
            f"{where} describes a model of over {count:,} parameters, and {weights} {'and its parts have' if parts else 'has'} "
            f"{size:,} bytes: is it cut off?"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
