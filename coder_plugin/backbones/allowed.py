"""What a model's configuration may hold, if somebody else may have written it.

open_clip passes a configuration's values on to constructors, to transformers and to timm. Some of them run code
(``tokenizer_kwargs={"trust_remote_code": true}``, ``auto_map``), fetch (a name on the hub), or take all memory. So keys and
types are on a list, numbers have bounds, and names of models are those of installed packages or of files in the same folder.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import read_json

#: Folder in an export with the configuration of a Hugging Face text tower, in transformers' format.
TEXT_FOLDER = "text"
_TOP = {
    "embed_dim": int,
    "quick_gelu": bool,
    "custom_text": bool,
    "nonscalar_logit_scale": bool,
    "init_logit_scale": float,
    "init_logit_bias": float,
}
#: Options of tokenizers and layers, with their types.
_NESTED: dict[str, dict[str, type]] = {
    "tokenizer_kwargs": {"clean": str, "strip_sep_token": bool, "language": str, "reduction_mask": str},
    "norm_kwargs": {"eps": float},
    "act_kwargs": {"approximate": str},
}
_MODEL_NAMES = ("hf_model_name", "hf_tokenizer_name", "timm_model_name")
_WORD = re.compile(r"[A-Za-z0-9_.+-]{0,100}")
_MOST, _MOST_LAYERS, _MOST_PIXELS = 1 << 24, 512, 4096
#: Files of transformers in which a name can stand for code.
_CODE = ("auto_map", "trust_remote_code", "quantization_config", "custom_pipelines")
_TRANSFORMERS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
#: ``model_type`` of the encoders of texts in transformers, of pairs of towers with one, and of their other halves.
#: None builds a part from a name, as those with a backbone of timm or of the hub do.
_ENCODERS = frozenset(
    """albert bart bert bert-generation big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm fnet funnel
    gemma gemma2 gpt2 gpt_neo gpt_neox ibert llama longformer longt5 luke m2m_100 marian mbart megatron-bert mistral mobilebert
    modernbert mpnet mra mt5 nezha nystromformer opt pegasus qwen2 qwen3 rembert roberta roberta-prelayernorm roc_bert roformer
    splinter squeezebert switch_transformers t5 umt5 xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
    align align_text_model align_vision_model altclip altclip_text_model altclip_vision_model chinese_clip
    chinese_clip_text_model chinese_clip_vision_model clip clip_text_model clip_vision_model siglip siglip_text_model
    siglip_vision_model siglip2 siglip2_text_model siglip2_vision_model""".split()
)
#: Values of a ``config.json`` from which transformers builds another model, by name.
_PARTS = ("backbone", "use_timm_backbone", "use_pretrained_backbone", "backbone_config", "architecture", "model_args")
#: Names of the sizes of encoders in transformers.
_TRANSFORMERS_SIZES = {
    "width": ("hidden_size", "d_model", "dim", "n_embd"),
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "inner": ("intermediate_size", "d_ff", "hidden_dim"),
    "words": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}


def check_config(config: Any, where: str | Path) -> Mapping[str, Any]:
    """A configuration of open_clip, as ``model_cfg`` of ``open_clip_config.json`` holds it.

    Names on the hub are not judged here: :func:`check_hub_names` does.

    Args:
        config: any JSON value.
        where: the file, for messages.

    Returns:
        ``config``.

    Raises:
        CoderError: a key that is not on the list, or a value of another type or range; names it.
    """
    from open_clip.coca_model import MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    towers = {"vision_cfg": CLIPVisionCfg, "text_cfg": CLIPTextCfg, "multimodal_cfg": MultimodalCfg}
    if not isinstance(config, Mapping):
        raise CoderError(f"{where}: a model's configuration is an object, not {_short(config)}")
    for key, value in config.items():
        if key in towers:
            _check_tower(value, key, {field.name: field.default for field in fields(towers[key])}, where)
        elif key not in _TOP:
            raise _unknown(key, where)
        elif not _is_a(value, _TOP[key]):
            raise CoderError(f"{where}: {key} must be {_TOP[key].__name__}, got {_short(value)}")
    missing = {"embed_dim", "vision_cfg", "text_cfg"} - config.keys()
    if missing:
        raise CoderError(f"{where} is not an open_clip model configuration: it lacks {', '.join(sorted(missing))}")
    return config


def _check_tower(tower: Any, name: str, defaults: Mapping[str, Any], where: str | Path) -> None:
    if not isinstance(tower, Mapping):
        raise CoderError(f"{where}: {name} must be an object, got {_short(tower)}")
    for key, value in tower.items():
        full = f"{name}.{key}"
        if key not in defaults:
            raise _unknown(full, where)
        if key in _NESTED and value is not None:
            if not isinstance(value, Mapping):
                raise CoderError(f"{where}: {full} must be an object, got {_short(value)}")
            for option, each in value.items():
                if option not in _NESTED[key]:
                    raise _unknown(f"{full}.{option}", where)
                if not _is_a(each, _NESTED[key][option]):
                    raise CoderError(f"{where}: {full}.{option} must be {_NESTED[key][option].__name__}, got {_short(each)}")
        elif key in _MODEL_NAMES:
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= 1000):
                raise CoderError(f"{where}: {full} must be a name, got {_short(value)}")
            if key == "timm_model_name" and value is not None:
                _check_timm(value, f"{where}: {full}")
        else:
            _check_value(value, key, defaults[key], f"{where}: {full}")


def _check_timm(name: str, where: str) -> None:
    import timm

    if not _WORD.fullmatch(name) or not timm.is_model(name):
        raise CoderError(f"{where} is {_short(name)}, which is no model of the installed timm")


def _check_value(value: Any, key: str, default: Any, where: str) -> None:
    """A value of the kind of the field's default, in its range."""
    most = _MOST_LAYERS if key == "layers" else _MOST_PIXELS if key in ("image_size", "size") else _MOST
    lists = key in ("layers", "image_size", "patch_size", "size", "mean", "std", "fill_color")
    values = value if lists and isinstance(value, (list, tuple)) and 0 < len(value) <= 16 else [value]
    number = type(default[0] if isinstance(default, (list, tuple)) else default)
    for each in values:
        if each is None:
            fits = default is None or number is str or key == "patch_size"
        elif isinstance(each, bool):
            fits = number in (bool, type(None))
        elif isinstance(each, str):
            fits = (number in (str, type(None)) or key == "attentional_pool") and _WORD.fullmatch(each) is not None
        elif isinstance(each, int):
            fits = number in (int, float, type(None)) and abs(each) <= most
        else:
            real = number in (float, type(None)) or key == "mlp_ratio"
            fits = isinstance(each, float) and real and math.isfinite(each) and abs(each) <= most
        if not fits:
            kind = "a plain word" if number is str else "true or false" if number is bool else f"a number up to {most:,}"
            raise CoderError(f"{where} must be {kind}, got {_short(value)}")


def check_preprocessing(config: Any, where: str | Path) -> Mapping[str, Any]:
    """``preprocess_cfg`` of an ``open_clip_config.json``: how pictures are prepared.

    Raises:
        CoderError: an unknown key, or a value of another type or range.
    """
    from open_clip.transform import PreprocessCfg

    if not isinstance(config, Mapping):
        raise CoderError(f"{where}: preprocess_cfg must be an object, got {_short(config)}")
    defaults = {field.name: field.default for field in fields(PreprocessCfg)}
    for key, value in config.items():
        if key not in defaults:
            raise _unknown(f"preprocess_cfg.{key}", where)
        _check_value(value, key, defaults[key], f"{where}: preprocess_cfg.{key}")
        if key in ("mean", "std") and not (isinstance(value, (list, tuple)) and len(value) in (1, 3)):
            raise CoderError(f"{where}: preprocess_cfg.{key} must be one number per channel, got {_short(value)}")
    return config


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """The files beside an ``open_clip_config.json`` that its text tower and its tokenizer are read from.

    Raises:
        CoderError: a text tower whose configuration is not in the folder, or files that name code.
    """
    name = config["text_cfg"].get("hf_model_name")
    if name is not None and not (folder / TEXT_FOLDER / "config.json").is_file():
        raise CoderError(
            f"{folder}: its text tower is {name!r}, whose configuration is not in the folder {TEXT_FOLDER} there; nothing is "
            "fetched because a file says so: name the model yourself, with --model and the weights' file as --pretrained"
        )
    check_transformers(folder)
    if name is not None:
        check_encoder(folder / TEXT_FOLDER)


def check_text_folders(config: Mapping[str, Any]) -> None:
    """The folders that a configuration of open_clip names in place of models on the hub.

    Args:
        config: checked by :func:`check_config`, or open_clip's own.

    Raises:
        CoderError: as :func:`check_encoder` and :func:`check_transformers`.
    """
    text = config.get("text_cfg", {})
    for key, check in (("hf_model_name", check_encoder), ("hf_tokenizer_name", check_transformers)):
        if (name := text.get(key)) and Path(name).is_dir():
            check(Path(name))


def check_encoder(folder: Path) -> None:
    """The files of a text encoder in transformers' format, as :func:`check_transformers`, and what kind of model it is.

    Raises:
        CoderError: also for a kind that is no encoder of texts, or one that is built from another model's name.
    """
    check_transformers(folder)
    file = folder / "config.json"
    if file.is_file():
        config = read_json(file)
        if not isinstance(config, Mapping) or "model_type" not in config:  # transformers would take the folder's name
            raise CoderError(f"{file}: model_type is missing: name the kind of text encoder, such as bert")
        _check_kind(config, file)


def _check_kind(value: Any, where: Path) -> None:
    if isinstance(value, Mapping):
        kind = value.get("model_type", "bert")
        if not isinstance(kind, str) or kind not in _ENCODERS and kind != "":
            raise CoderError(f"{where}: model_type is {_short(kind)}, which is no text encoder that is opened from files")
        for name in _PARTS:
            if value.get(name):
                raise CoderError(f"{where}: {name} builds a part from another model, which is not followed: remove it")
        for each in value.values():
            _check_kind(each, where)
    elif isinstance(value, list):
        for each in value:
            _check_kind(each, where)


def check_transformers(folder: Path) -> None:
    """The files in a folder that transformers reads: none may name code, another model or another implementation.

    Raises:
        CoderError: one does; or a ``config.json`` with values out of range.
    """
    if (folder / "adapter_config.json").exists():
        raise CoderError(f"{folder / 'adapter_config.json'} names a base model to fetch: adapters must be merged before")
    for file in (folder / each for each in _TRANSFORMERS):
        if file.is_file():
            _check_no_code(read_json(file), file)


def _check_no_code(value: Any, where: Path, *, key: str = "", depth: int = 0) -> None:
    if depth > 50:
        raise CoderError(f"{where}: nested over 50 levels deep")
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name in _CODE and each:
                raise CoderError(f"{where}: {name} names code or another library's, which is not followed: remove it")
            if name.endswith("attn_implementation") and each not in (None, "eager", "sdpa"):
                raise CoderError(f"{where}: {name} is {_short(each)}; it must be eager or sdpa")
            _check_no_code(each, where, key=name, depth=depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_no_code(each, where, key=key, depth=depth + 1)
    elif isinstance(value, int) and where.name == "config.json":
        most = _MOST_LAYERS if key in _TRANSFORMERS_SIZES["layers"] else _MOST
        if abs(value) > most:
            raise CoderError(f"{where}: {key} is {_short(value)}; the most is {most:,}")


@functools.cache
def known_hub_names() -> frozenset[str]:
    """The text towers and tokenizers on the hub that the configurations of the installed open_clip name."""
    import open_clip

    names = set()
    for model in open_clip.factory._MODEL_CONFIG_PATHS[0].glob("*.json"):
        text = read_json(model).get("text_cfg", {})
        names |= {text[key] for key in _MODEL_NAMES if text.get(key)}
    return frozenset(names)


def check_hub_names(config: Mapping[str, Any], where: str, *, repository: str | None = None) -> None:
    """The text tower and the tokenizer of a configuration that is not in an export's folder.

    Args:
        config: checked by :func:`check_config`.
        where: for messages.
        repository: on the hub, that the configuration came from and the user has named.

    Raises:
        CoderError: a name on the hub that neither the user nor the installed open_clip has named.
    """
    text = config["text_cfg"]
    for key in ("hf_model_name", "hf_tokenizer_name"):
        name = text.get(key)
        if name and name != repository and name not in known_hub_names():
            raise CoderError(
                f"{where}: text_cfg.{key} is {name!r}, which is not fetched because a file says so: download it, and give a "
                "model configuration (--model FILE.json) that names its folder"
            )


def check_size(config: Mapping[str, Any], weights: Path, where: str | Path) -> None:
    """Refuse towers of more parameters than the weights' file has bytes, before memory is taken for them.

    Args:
        config: checked by :func:`check_config`. A tower of timm counts nothing.
        weights: the file that would be loaded.
        where: for messages.

    Raises:
        CoderError: the file is too small for the towers.
    """
    vision, text = config["vision_cfg"], config["text_cfg"]
    count = 0
    if not vision.get("timm_model_name"):
        width, layers = vision.get("width", 768), vision.get("layers", 12)
        if isinstance(layers, (list, tuple)):
            count += 12 * (8 * width) ** 2 * layers[-1]  # the last stage of a ResNet
        else:
            count += 8 * width**2 * layers
    if text.get("hf_model_name"):
        count += transformers_size(weights.parent / TEXT_FOLDER)
    else:
        width = text.get("width", 512)
        count += 8 * width**2 * text.get("layers", 12) + text.get("vocab_size", 49408) * width
    check_bytes(count, weights, where)


def transformers_size(folder: Path) -> int:
    """A lower bound on the parameters of an encoder from the ``config.json`` in its folder; 0 without one."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if not isinstance(config, Mapping):
        raise CoderError(f"{folder / 'config.json'} cannot be read: it is not an object")
    return encoder_size(config)


def encoder_size(config: Mapping[str, Any]) -> int:
    """A lower bound on the parameters of an encoder from its configuration in transformers' format."""
    sizes = {
        size: max((config[name] for name in names if type(config.get(name)) is int), default=0)
        for size, names in _TRANSFORMERS_SIZES.items()
    }
    inner = sizes["layers"] * (3 * sizes["width"] + sizes["inner"])
    return sizes["width"] * (sizes["words"] + sizes["positions"] + inner)


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


def _is_a(value: Any, kind: type) -> bool:
    if value is None:
        return True
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST
    if isinstance(value, str):
        return kind is str and _WORD.fullmatch(value) is not None
    return isinstance(value, kind)


def _unknown(key: str, where: str | Path) -> CoderError:
    return CoderError(f"{where}: {str(key)[:100]!r} is nothing that a model's configuration may hold here; remove it")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
