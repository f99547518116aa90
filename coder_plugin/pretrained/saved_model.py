"""Models that a file names: a run's configuration, an export's options, an index's manifest. None is fetched for that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin import registry
from coder_plugin.backbones.names import TRANSFORMERS
from coder_plugin.backbones.transformers_files import find_location
from coder_plugin.backbones.untrusted import check_config, check_text_names, known_names
from coder_plugin.config import OPENING, get_option
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.heads.rerankers import parse_reranker

#: Options by flat name that a file may set when a model is opened; the folder of downloads is the user's own.
SAVED_OPTIONS = tuple(name for name in OPENING if name != "cache_dir")
_EXPORTS = ("best", "last")


def check_model_record(record: Any, where: str, *, spec: str | None = None) -> dict[str, Any]:
    """The specification of a model in an index's manifest, which somebody else may have written.

    Args:
        record: the manifest's ``model``: ``spec``, ``export``, ``options``, ``name``, ``objective``, ``fingerprint``,
            ``reranker``.
        where: the file, for messages.
        spec: the model that the user has named instead, which may be anywhere; None: the record's.

    Returns:
        The record, its ``options`` without ``cache_dir``.

    Raises:
        CoderError: a repository on the hub, an option that does not open models, or a value of another type; says which flag
            asks for it.

    Example:
        >>> check_model_record({"spec": "hf-hub:somebody/model", "options": {}}, "index.json")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: index.json would fetch 'hf-hub:somebody/model': ...
    """
    if not isinstance(record, Mapping):
        raise CoderError(f"{where}: its model is not an object")
    texts = {"name": "", "objective": "", "fingerprint": "", "spec": None, "export": "best", "reranker": None}
    for name in texts:
        if not isinstance(record.get(name, ""), (str, type(None))):
            raise CoderError(f"{where}: {name} of its model is not a text")
    checked = {**texts, **{name: value for name, value in record.items() if value is not None}}
    options = checked.get("options", {})
    if not isinstance(options, Mapping):
        raise CoderError(f"{where}: the options of its model are not an object")
    if checked["export"] not in _EXPORTS:
        raise CoderError(f"{where}: export is {checked['export'][:80]!r}; it must be best or last")
    if spec is not None:
        checked["spec"] = spec
    elif checked["spec"] is not None:
        _check_place(checked["spec"], where)
    return {**checked, "options": check_saved_model(options, where)}


def check_saved_reranker(text: str, where: str) -> None:
    """Refuse a re-ranker of another package, which is not loaded because a file names it.

    Raises:
        CoderError: it is not ours, or unknown.
    """
    name = parse_reranker(text).name
    if not any(plugin.name == name and plugin.distribution == "coder-plugin" for plugin in registry.list_plugins("rerankers")):
        raise CoderError(f"{where} names the re-ranker {name!r} of another package: if you trust it, give it yourself, with "
                         f"--reranker {name}")


def check_saved_model(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of opening by flat name, from a file.

    Args:
        options: with types as on the command line. None counts as not given.
        where: the file, for messages.

    Returns:
        The options that are given, without ``cache_dir``.

    Raises:
        CoderError: an unknown option, a value of another type, a repository on the hub, or a tag that is not open_clip's.
    """
    checked = {}
    for name, value in options.items():
        if name not in OPENING:
            raise CoderError(f"{where} sets {str(name)[:60]!r}, which does not describe a model")
        if value is not None and name != "cache_dir":
            checked[name] = get_option(name).check(value, where)
    for name in ("force_image_size", "force_context_length", "max_regions"):
        numbers = checked.get(name, 0)
        if any(not 0 <= number <= 4096 for number in (numbers if isinstance(numbers, list) else [numbers])):
            raise CoderError(f"{where}: {name} is {str(numbers)[:80]}; it must be at most 4096")
    if "model" in checked:
        _check_name(checked["model"], where)
    if (weights := checked.get("pretrained")) and not Path(weights).exists():
        _check_place(weights, where)
        _check_tag(weights, checked.get("model", ""), where)
    for setting in checked.get("model_kwargs", ()):
        name, _, value = setting.partition("=")
        if name == "text" and not Path(value).is_dir():
            raise CoderError(f"{where} names the text encoder {value[:200]!r}, which is not fetched because a file says so")
    return checked


def _check_place(spec: str, where: str) -> None:
    on_hub = spec.startswith(TRANSFORMERS) and not Path(spec.removeprefix(TRANSFORMERS)).is_dir()
    if on_hub or "://" in spec or spec.startswith(("hf-hub:", "pipe:")):
        raise CoderError(f"{where} would fetch {spec[:200]!r}: if you trust it, give it yourself, with --model")


def _check_name(name: str, where: str) -> None:
    import open_clip

    from coder_plugin.backbones.clip import register_config

    _check_place(name, where)
    if name in registry.names("backbones"):
        return
    if name.endswith(".json") and find_location(name) is None and Path(name).is_file():
        config = read_json(name)
        if isinstance(config, Mapping) and "backbone" in config:
            return  # an export's, checked where it is opened
        check_text_names(check_config(config, name), name, on_hub=known_names())
        return
    if name.startswith("local-dir:") or find_location(name) is not None:
        return  # checked where it is opened
    if register_config(name).replace("/", "-") not in open_clip.list_models():
        raise CoderError(f"{where} names the model {name[:200]!r}, which is not here: name the model yourself (--model)")


def _check_tag(tag: str, model: str, where: str) -> None:
    import open_clip

    if tag not in open_clip.list_pretrained_tags_by_model(model.replace("/", "-")):
        raise CoderError(f"{where} names the weights {tag[:200]!r}, which are not here: name them yourself (--pretrained)")
