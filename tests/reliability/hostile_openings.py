"""Hostile configurations, exports, shared models and checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.reliability.hostile import Case, Command, copy_export, copy_run

DEEP = "[" * 100_000 + "]" * 100_000
Write = Callable[[Path, Path], object]


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file's value in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def code(folder: Path, canary: Path) -> None:
    """A Python file that transformers would import as a tokenizer, a model or a configuration."""
    lines = [f"open({str(canary)!r}, 'w').close()", "from transformers import BertConfig as C, BertTokenizerFast as T"]
    (folder / "evil.py").write_text("\n".join([*lines, "class Tok(T): pass", "class Conf(C): pass", ""]))


# -- runs ----------------------------------------------------------------------------------------------------------------


def run_with(change: Callable[[dict[str, Any], Path], object]) -> Write:
    """A run whose ``config.json`` is changed; ``change`` gets the configuration and the canary."""

    def write(folder: Path, canary: Path) -> None:
        run = copy_run(folder)
        edit(run / "config.json", lambda config: change(config, canary))

    return write


def data(**locations: str) -> Write:
    """A run that reads data from elsewhere; ``{canary}`` in a location is the canary's path."""

    def change(config: dict[str, Any], canary: Path) -> None:
        config["data"].update({name: location.format(canary=canary) for name, location in locations.items()})

    return run_with(change)


def file_of_run(name: str, content: str) -> Write:
    def write(folder: Path, canary: Path) -> None:
        data(val="nowhere.tar")(folder, canary)  # a report without results takes no time
        (folder / "run" / name).write_text(content)

    return write


EVAL: Command = ["eval", "run", "--export", "last", "--workers", "0"]
REPORT: Command = ["report", "run", "--export", "last", "--workers", "0"]
PIPE = "pipe:touch {canary}; cat x.tar"
ASKS = "give it again on the command line"


def _config_file(folder: Path, canary: Path) -> None:
    data(train=PIPE)(folder, canary)
    (folder / "set-up.toml").write_text(f'train_data = "{PIPE.format(canary=canary)}"\nmodel = "coder-tiny"\n')
    (folder / "recipe.toml").write_text(f'[recipes.evil]\nloss = "dcl"\ntrain_data = "{PIPE.format(canary=canary)}"\n')


def _file_named_as_a_pipe(folder: Path, canary: Path) -> None:
    """A pattern that matches a file in the working directory whose name is a command."""
    data(val="pip*.tar")(folder, canary)
    (folder / "pipe:touch ..$(printf '\\57')canary #.tar").write_bytes(b"no tar file" * 100)


def _named_pipe(folder: Path, canary: Path) -> None:
    data(val="x.tar")(folder, canary)
    os.mkfifo(folder / "x.tar")


def _cache(config: dict[str, Any], canary: Path) -> None:
    config["model"]["cache_dir"] = str(canary)


RUNS = [
    Case(name="run-val-data-pipe-report", write=data(val=PIPE), commands=[REPORT], status=0, says=[ASKS]),
    Case(name="run-val-data-pipe-eval", write=data(val=PIPE), commands=[EVAL], says=[ASKS]),
    Case(
        name="run-val-data-pipe-braces", write=data(val="p{{i,o}}pe:touch {canary}"), commands=[EVAL], says=[ASKS]
    ),
    Case(
        name="run-train-data-pipe", write=data(train=PIPE), commands=[[*EVAL, "--split", "train"]], says=[ASKS]  # type: ignore[misc]
    ),
    Case(name="run-regions-pipe", write=data(regions=PIPE), commands=[EVAL], says=[ASKS]),
    *(
        Case(name=f"run-val-data-{scheme}", write=data(val=f"{scheme}://127.0.0.1:9/x.tar"), commands=[EVAL], says=[ASKS])
        for scheme in ("http", "https", "s3", "gs", "hf", "sftp", "htgs", "ais")
    ),
    *(
        Case(name=f"run-val-data-{name}", write=data(val=location), commands=[EVAL], says=[ASKS])
        for name, location in (
            ("control", "\x01pipe:touch {canary}"),
            ("variable", "${{HOME}}/x.tar"),
        )
    ),
    Case(
        name="run-val-data-file-named-as-a-pipe",
        write=_file_named_as_a_pipe,
        commands=[EVAL],
        says=["cannot be read"],
    ),
    Case(name="run-val-data-is-a-named-pipe", write=_named_pipe, commands=[EVAL], says=["regular file"]),
    Case(name="run-val-data-endless-braces", write=data(val="{{0..99999999999}}.tar"), commands=[EVAL], says=[ASKS]),
    Case(
        name="run-config-file-pipe",
        write=_config_file,
        commands=[
            ["train", "--config", "run/config.json", "--dry-run", "--logs", "logs"],
            ["train", "--config", "set-up.toml", "--dry-run", "--logs", "logs"],
            ["train", "--recipe", "recipe.toml", "--model", "coder-tiny", "--dry-run", "--logs", "logs"],
        ],
        says=[ASKS],
    ),
    Case(name="run-config-deep", write=file_of_run("config.json", DEEP), commands=[EVAL], says=["config.json"]),
    Case(name="run-metrics-deep", write=file_of_run("metrics.jsonl", DEEP), commands=[REPORT], status=0, says=["report.html"]),
    Case(
        name="run-config-is-no-text", write=file_of_run("config.json", '{"data": {"val": ["pipe:x"]}}'), commands=[EVAL],
        says=["--val-data"],
    ),
    Case(
        name="run-base-on-the-hub",
        write=run_with(lambda config, canary: config["model"].update(name="hf-hub:somebody/evil", pretrained="x.pt")),
        commands=[[*EVAL, "--wise-ft", "0.5"]],  # type: ignore[misc]
        says=["would fetch", "--model"],
    ),
    Case(
        name="run-base-by-url",
        write=run_with(lambda config, canary: config["model"].update(name="RN50", pretrained="http://127.0.0.1:9/x.pt")),
        commands=[[*EVAL, "--wise-ft", "0.5"]],  # type: ignore[misc]
        says=["would fetch"],
    ),
    Case(
        name="run-cache-elsewhere", write=run_with(_cache), commands=[[*EVAL, "--val-data", "nowhere.tar"]],  # type: ignore[misc]
        says=["nowhere.tar"],
    ),
]  # fmt: skip


# -- exports of open_clip's models -----------------------------------------------------------------------------------------


def export_with(change: Callable[[Path, Path], object], kind: str = "heads", *, sealed: bool = True) -> Write:
    """An export whose files are changed, its manifest written anew as the one who changed them would."""

    def write(folder: Path, canary: Path) -> None:
        from coder_plugin.pretrained.export_manifest import seal_again

        export = copy_export(folder, kind)
        change(export, canary)
        if sealed:
            seal_again(export)

    return write


def config_with(change: Callable[[dict[str, Any]], object], kind: str = "heads") -> Write:
    return export_with(lambda export, canary: edit(export / "open_clip_config.json", change), kind)


def tower(name: str, **values: Any) -> Write:
    return config_with(lambda config: config["model_cfg"][name].update(values))


def text_of(name: str, content: str, kind: str = "heads") -> Write:
    return export_with(lambda export, canary: (export / name).write_text(content), kind)


def values(name: str, kind: str = "heads", **changes: Any) -> Write:
    return export_with(lambda export, canary: edit(export / name, lambda value: value.update(changes)), kind)


def _from_pretrained() -> None:
    import coder_plugin

    coder_plugin.from_pretrained("export")


def _sentence_transformers() -> None:
    from coder_plugin.integrations.sentence_transformers import PictureText

    PictureText.load("export")


def _read_weights(name: str) -> None:
    from coder_plugin.detectors.base import read_weights

    read_weights(name)


def _load_model() -> None:
    from coder_plugin.pretrained.open import load_model

    load_model("export")


def _create_model() -> None:
    import coder_plugin

    coder_plugin.create_model("local-dir:export", loss="dcl")


#: Every way in which an export's configuration is opened.
WAYS: Sequence[Command] = [
    ["eval", "export"],
    ["eval", "--model", "local-dir:export"],
    ["eval", "--model", "local-dir:export", "--pretrained", "export/open_clip_model.safetensors"],
    ["share", "export", "--to", "shared"],
    ["train", "--model", "local-dir:export", "--dry-run", "--logs", "logs"],
    _from_pretrained,
    _sentence_transformers,
    _load_model,
    _create_model,
]
OPEN: Command = ["eval", "export"]
SHARE: Command = ["share", "export", "--to", "shared"]


def _trusting(export: Path, canary: Path) -> None:
    code(export, canary)
    edit(export / "tokenizer_config.json", lambda value: value.update(auto_map={"AutoTokenizer": ["evil.Tok", "evil.Tok"]}))
    edit(
        export / "open_clip_config.json",
        lambda config: config["model_cfg"]["text_cfg"].update(tokenizer_kwargs={"trust_remote_code": True}),
    )


def _mapped(file: str, entry: str) -> Write:
    def change(export: Path, canary: Path) -> None:
        code((export / file).parent, canary)
        edit(export / file, lambda value: value.update(auto_map={entry: "evil.Conf"}))

    return export_with(change, "bert")


def _heads(change: Callable[[dict[str, Any]], object]) -> Write:
    """An export whose heads' settings are changed."""

    def write(export: Path, canary: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = export / "coder.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        settings = json.loads(metadata["coder"])
        change(settings)
        save_file(load_file(path), path, metadata={**metadata, "coder": json.dumps(settings)})

    return export_with(write)


def _weights(content: bytes) -> Write:
    return export_with(lambda export, canary: (export / "open_clip_model.safetensors").write_bytes(content))


def header(value: Any, size: int | None = None) -> bytes:
    """A safetensors file of a header alone."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


class Evil:
    """Creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _pickled(name: str) -> Write:
    """An export whose weights are a pickle that runs a command."""

    def write(folder: Path, canary: Path) -> None:
        export = copy_export(folder)
        for each in ("open_clip_model.safetensors", "coder_export.json", "coder.safetensors"):
            (export / each).unlink()
        (export / name).write_bytes(pickle.dumps({"padding": bytes(1 << 22), "state_dict": Evil(canary)}))

    return write


def _pickle_file(folder: Path, canary: Path) -> None:
    import torch

    for name in ("evil.pt", "evil.pth", "evil.bin"):
        torch.save({"state_dict": {"x": Evil(canary)}, "coder": {}, "model": Evil(canary)}, folder / name)
    (folder / "raw.pt").write_bytes(pickle.dumps(Evil(canary)))


def _manifest(change: Callable[[dict[str, Any]], object]) -> Write:
    """An export whose manifest is changed, with a checksum that fits."""

    def write(export: Path, canary: Path) -> None:
        from coder_plugin.files import sha256_json

        path = export / "coder_export.json"
        manifest = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
        change(manifest)
        path.write_text(json.dumps({**manifest, "sha256": sha256_json(manifest)}))

    return export_with(write, sealed=False)


def _record(content: str) -> Write:
    return export_with(lambda export, canary: (export / "coder_run.json").write_text(content))


#: A text encoder that transformers would make of a model on the hub.
TIMM = {"model_type": "timm_backbone", "backbone": "hf-hub:somebody/evil", "use_pretrained_backbone": True}


def _text_config(config: dict[str, Any]) -> Write:
    return lambda export, canary: (export / "text" / "config.json").write_text(json.dumps(config))


def _adapter(export: Path, canary: Path) -> None:
    (export / "text" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/evil"}))


def _text_folder_away(export: Path, canary: Path) -> None:
    shutil.rmtree(export / "text")


def config_case(name: str, write: Write, *says: str, ways: Sequence[Command] = (OPEN,), **more: Any) -> Case:
    return Case(name=name, write=write, commands=ways, says=says, **more)


ENTRY = {"bytes": 1, "sha256": "0" * 64}

EXPORTS = [
    # code
    config_case("export-tokenizer-code", export_with(_trusting, "bert"), "trust_remote_code", ways=WAYS),
    config_case("export-tokenizer-auto-map", _mapped("tokenizer_config.json", "AutoTokenizer"), "auto_map"),
    config_case("export-text-auto-map", _mapped("text/config.json", "AutoConfig"), "auto_map"),
    config_case(
        "export-attention-of-the-hub",
        values("text/config.json", "bert", attn_implementation="somebody/evil-kernel"),
        "attn_implementation",
    ),
    *(
        config_case(f"export-text-is-{name}", export_with(_text_config(config), "bert"), says, ways=WAYS[:1])
        for name, says, config in (
            ("timm-backbone", "backbone", {**TIMM, "is_encoder_decoder": True}),
            ("timm-wrapper", "architecture", {"model_type": "timm_wrapper", "architecture": "hf-hub:somebody/evil"}),
            ("detr", "use_timm_backbone", {"model_type": "detr", "use_timm_backbone": True, "backbone": "resnet18"}),
            ("detr-of-defaults", "cannot be created", {"model_type": "detr"}),  # its default backbone is on the hub
            ("of-two", "text_config.backbone", {"model_type": "clip", "text_config": TIMM}),
        )
    ),
    config_case("export-adapter-of-the-hub", export_with(_adapter, "bert"), "adapter_config.json"),
    # names
    config_case("export-text-of-the-hub", tower("text_cfg", hf_model_name="somebody/evil"), "somebody/evil"),
    config_case("export-text-folder-missing", export_with(_text_folder_away, "bert"), "text", "not in the folder"),
    config_case("export-text-outside", tower("text_cfg", hf_model_name="../../outside"), "nothing is fetched"),
    config_case("export-timm-of-the-hub", tower("vision_cfg", timm_model_name="hf-hub:somebody/evil"), "timm", ways=WAYS),
    config_case("export-timm-of-a-folder", tower("vision_cfg", timm_model_name="local-dir:evil"), "timm"),
    # keys and types
    config_case("config-unknown-key", config_with(lambda c: c["model_cfg"].update(hook="os.system")), "'hook'"),
    config_case("config-unknown-tower-key", tower("text_cfg", custom_code="evil.py"), "custom_code"),
    config_case("config-layer-options", tower("vision_cfg", norm_kwargs={"device": "meta"}), "norm_kwargs.device"),
    config_case("config-tower-is-a-list", config_with(lambda c: c["model_cfg"].update(text_cfg=[1])), "text_cfg"),
    config_case("config-is-deep", text_of("open_clip_config.json", DEEP), "nested too deeply"),
    # sizes
    config_case("config-width-huge", tower("vision_cfg", width=10**12), "vision_cfg.width"),
    config_case("config-width-too-large-for-the-weights", tower("vision_cfg", width=65_536), "describes a model of over"),
    config_case("config-vocabulary-huge", tower("text_cfg", vocab_size=16_000_000), "describes a model of over"),
    config_case(
        "config-pictures-huge", config_with(lambda c: c["preprocess_cfg"].update(size=[10**9, 10**9])), "preprocess_cfg.size"
    ),
    config_case("config-mean-is-code", config_with(lambda c: c["preprocess_cfg"].update(mean="os.system")), "preprocess_cfg"),
    # options
    config_case("options-precision", values("coder_options.json", precision="evil"), "--precision"),
    config_case("options-are-deep", text_of("coder_options.json", DEEP), "coder_options.json"),
    # heads and vocabulary
    config_case("heads-of-no-package", _heads(lambda s: s.update(heads=["evil.module:Head"])), "evil.module:Head"),
    config_case("heads-option-unknown", _heads(lambda s: s["objective"]["heads"]["concepts"].update(code="x")), "code"),
    config_case(
        "heads-option-huge", _heads(lambda s: s["objective"]["heads"]["concepts"].update(dim=10**12)), "coder.safetensors"
    ),
    config_case("vocabulary-is-deep", text_of("concepts.json", DEEP), "concepts"),
    # weights
    config_case("weights-header-endless", _weights(header({}, size=2**62)), "open_clip_model.safetensors"),
    config_case(
        "weights-outside-of-the-file",
        _weights(header({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})),
        "open_clip_model.safetensors",
    ),
    config_case("weights-are-a-pickle", _pickled("open_clip_pytorch_model.bin"), "cannot be created"),
    Case(
        name="pickles-as-weights",
        write=_pickle_file,
        commands=[
            *(["eval", "--model", "coder-tiny", "--pretrained", name] for name in ("evil.pt", "evil.bin", "raw.pt")),
            ["train", "--model", "coder-tiny", "--pretrained", "evil.pt", "--dry-run", "--logs", "logs"],
            ["train", "--model", "coder-tiny", "--pretrained-image-path", "evil.pt", "--dry-run", "--logs", "logs"],
            *(partial(_read_weights, name) for name in ("evil.pth", "raw.pt")),
        ],
    ),
    # manifests and records
    *(
        config_case(
            f"manifest-lists-{number}", _manifest(lambda m, name=name: m["files"].update({name: ENTRY})), "not a file in its"
        )
        for number, name in enumerate(["../../outside/x", "/etc/hostname", "a/../../b", "a\\..\\b", "C:/x", "text/", ""])
    ),
    config_case("manifest-lists-nothing", _manifest(lambda m: m.update(files={})), "coder"),
    config_case("manifest-without-heads", _manifest(lambda m: m["files"].pop("coder.safetensors")), "coder.safetensors"),
    config_case("manifest-of-types", _manifest(lambda m: m.update(step="1")), "coder_export.json"),
    config_case(
        "manifest-is-deep",
        export_with(lambda export, canary: (export / "coder_export.json").write_text(DEEP), sealed=False),
        "coder_export.json",
    ),
    config_case("record-options", _record('{"options": [1]}'), "options is not an object", ways=[SHARE]),
    config_case("record-is-deep", _record(DEEP), "coder_run.json", ways=[SHARE]),
]  # fmt: skip


# -- exports of region models ----------------------------------------------------------------------------------------------


def region(kind: str = "regions", **options: Any) -> Write:
    return export_with(
        lambda export, canary: edit(export / "coder_model.json", lambda value: value["options"].update(options)), kind
    )


REGIONS = [
    config_case("regions-text-of-the-hub", region("regions-bert", text="somebody/evil"), "somebody/evil"),
    config_case("regions-text-outside", region("regions-bert", text="../../outside"), "outside"),
    config_case("regions-text-switched-to-bert", region(encoder="bert"), "nothing is fetched"),
    config_case("regions-vocabulary-is-a-file", region(vocabulary="/etc/passwd"), "vocabulary"),
    config_case("regions-unknown-option", region(hook="evil"), "hook"),
    config_case("regions-size-huge", region(embed_dim=10**9), "embed_dim"),
    config_case("regions-backbone-unknown", values("coder_model.json", "regions", backbone="os:system"), "os:system"),
    config_case("regions-configuration-is-deep", text_of("coder_model.json", DEEP, "regions"), "coder_model.json"),
    config_case("regions-code-beside-bert", _mapped("text/config.json", "AutoConfig"), "auto_map"),
]


# -- recipes and files of options --------------------------------------------------------------------------------------------


def recipe(says: str, *, loss: str = "dcl", options: str = "", file: bool = True, **settings: Any) -> dict[str, Any]:
    """A case whose recipe, which is also a file of ``--config``, has these settings; beside it a Python file and pickles."""

    def write(folder: Path, canary: Path) -> None:
        code(folder, canary)
        _pickle_file(folder, canary)
        lines = [f"{name} = {json.dumps(value)}" for name, value in {"loss": loss.format(canary=canary), **settings}.items()]
        (folder / "set-up.toml").write_text("\n".join(lines))
        (folder / "recipe.toml").write_text("\n".join(["[recipes.theirs]", *lines, "[recipes.theirs.options]", options]))

    model = [] if "model" in settings else ["--model", "coder-tiny"]
    ways = [["--recipe", "recipe.toml"], *([["--config", "set-up.toml"]] if file else [])]
    return {"write": write, "says": [says], "commands": [["train", *way, *model, "--logs", "logs"] for way in ways]}


RUNS_CODE = "runs a Python file"
FETCHES = "which would be fetched"
RECIPES = [
    Case(name="recipe-loss-in-a-python-file", **recipe(RUNS_CODE, loss="clip + 0.5*evil.py:Tok(x=1)")),
    Case(name="recipe-loss-that-is-code", **recipe("column", loss="__import__('os').system('touch {canary}')")),
    Case(name="recipe-loss-of-a-module", **recipe("unexpected ':'", loss="os:system")),
    Case(name="recipe-name-outside", **recipe("is not a folder's name", name="../../x")),
    Case(name="recipe-model-of-the-hub", **recipe(FETCHES, model="hf-hub:somebody/evil")),
    Case(name="recipe-weights-by-url", **recipe(FETCHES, pretrained="https://127.0.0.1:9/x.pt")),
    Case(name="recipe-text-of-the-hub", **recipe(FETCHES, model="region-bert", model_kwargs=["text=somebody/evil"])),
    Case(name="recipe-weights-pickled", **recipe("cannot be created", pretrained="evil.pt")),
    Case(
        name="recipe-teacher-pickled",
        **recipe("evil.pt", loss="dcl + distill", options='teacher.weights = "evil.pt"', file=False),
    ),
    Case(name="recipe-data-pickled", **recipe("evil.pt", train_data="evil.pt")),
    Case(name="recipe-base-outside", **recipe("unknown recipe", base="../outside/precious.txt", file=False)),
    Case(name="recipe-unknown-setting", **recipe("hook", hook="os.system")),
    Case(
        name="recipe-is-deep", write=lambda folder, canary: (folder / "recipe.toml").write_text("x = " + DEEP),
        commands=[["train", "--recipe", "recipe.toml"], ["train", "--config", "recipe.toml"]], says=["recipe.toml"],
    ),
    Case(
        name="recipe-is-a-device", write=lambda folder, canary: (folder / "recipe.toml").symlink_to("/dev/zero"),
        commands=[["train", "--recipe", "recipe.toml"], ["train", "--config", "recipe.toml"]], says=["regular file"],
    ),
]  # fmt: skip


# -- folders in the layout of the hub --------------------------------------------------------------------------------------


def clip_folder(change: Callable[[Path, Path], object]) -> Write:
    """A CLIP model in transformers' layout, changed."""

    def write(folder: Path, canary: Path) -> None:
        from tests.backbones import tiny_clip

        tiny_clip.clip(folder / "clip")
        code(folder / "clip", canary)
        change(folder / "clip", canary)

    return write


def clip_values(file: str, **values: Any) -> Write:
    return clip_folder(lambda clip, canary: edit(clip / file, lambda content: content.update(values)))


def _parts_outside(clip: Path, canary: Path) -> None:
    shutil.move(clip / "model.safetensors", clip.parents[1] / "outside" / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"logit_scale": "../../outside/model.safetensors"}}
    (clip / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled_clip(clip: Path, canary: Path) -> None:
    import torch

    (clip / "model.safetensors").unlink()
    torch.save({"logit_scale": Evil(canary)}, clip / "pytorch_model.bin")


def _modules(export: Path, canary: Path) -> None:
    code(export, canary)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Tok"}]
    (export / "modules.json").write_text(json.dumps(modules))
    (export / "config_sentence_transformers.json").write_text(json.dumps({"trust_remote_code": True}))


def _linked(name: str) -> Write:
    def write(export: Path, canary: Path) -> None:
        outside = export.parents[1] / "outside" / "precious.txt"
        if "/" in name:  # its folder is the link
            shutil.copytree(export / "text", outside.parent / "text")
            shutil.rmtree(export / "text")
            (export / "text").symlink_to(outside.parent / "text")
        else:
            (export / name).unlink(missing_ok=True)
            (export / name).symlink_to(outside)

    return export_with(write, "bert", sealed=False)


CLIP: Sequence[Command] = [["eval", "--model", name] for name in ("clip", "transformers:clip")]
HUB = [
    *(
        Case(
            name=f"hub-code-of-{entry}", write=clip_values(file, auto_map={entry: "evil.Conf"}), commands=CLIP,
            says=["auto_map names code"],
        )
        for file, entry in (
            ("config.json", "AutoModel"), ("tokenizer_config.json", "AutoTokenizer"),
            ("preprocessor_config.json", "AutoImageProcessor"),
        )
    ),
    Case(name="hub-weights-pickled", write=clip_folder(_pickled_clip), commands=CLIP, says=["no model.safetensors"]),
    Case(name="hub-parts-outside", write=clip_folder(_parts_outside), commands=CLIP, says=["index.json"]),
    Case(
        name="hub-modules-of-code", write=export_with(_modules), status=0,
        commands=[_from_pretrained, _load_model, ["share", "export", "--to", "shared"]],
    ),
    *(
        Case(name=f"hub-link-{name}", write=_linked(name), commands=[SHARE], says=["a link to another folder"])
        for name in ("README.md", "open_clip_model.safetensors", "coder_export.json", "text/config.json")
    ),
]  # fmt: skip

CASES = [*RUNS, *EXPORTS, *REGIONS, *RECIPES, *HUB]
