"""What a configuration may not hold, key by key. ``tests/reliability/hostile_openings.py`` opens whole files of this kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from coder_plugin.backbones import untrusted
from coder_plugin.errors import CoderError
from tests.conftest import TINY

KEYS = (
    "auto_map trust_remote_code quantization_config custom_pipelines backbone backbone_config use_timm_backbone "
    "use_pretrained_backbone architecture model_args"
).split()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(({"a": [{key: "x"}]}, rf"a\.{key} names code or another model") for key in KEYS),
        ({"attn_implementation": "somebody/kernel"}, "attn_implementation is 'somebody/kernel'; it must be eager or sdpa"),
        ({"_experts_implementation": "somebody/kernel"}, "_experts_implementation is 'somebody/kernel'"),
        ({"text_config": {"_attn_implementation": "flash"}}, "text_config._attn_implementation is 'flash'"),
        ({"num_hidden_layers": 513}, "num_hidden_layers is 513; the most is 512"),
        ({"layers": [3, 4, 10**6]}, "layers is 1000000"),
        ({"image_size": [224, 5000]}, "image_size is 5000; the most is 4,096"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; the most is 16,777,216"),
        ({"vocab_size": -(10**9)}, "vocab_size is -1000000000"),
    ],
)
def test_refused_values(value: Any, message: str) -> None:
    with pytest.raises(CoderError, match=f"x.json: {message}"):
        untrusted.check_values(value, "x.json")


def test_values_that_are_fine() -> None:
    value = {"auto_map": None, "use_timm_backbone": False, "architectures": ["BertModel"], "attn_implementation": "sdpa"}
    untrusted.check_values({**value, "num_hidden_layers": 512, "vocab_size": 1 << 24, "layers": None}, "x.json")
    untrusted.check_values({"model_max_length": 10**30}, "tokenizer_config.json", sizes=False)
    assert untrusted.check_config(TINY, "x.json") == TINY


@pytest.mark.parametrize("name", ["text_cfg", "vision_cfg"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_kwargs": {"vocab_file": "/etc/passwd"}}, "tokenizer_kwargs.vocab_file is not an option that is passed on"),
        ({"timm_model_name": "hf-hub:somebody/evil"}, "not a model of the installed timm"),
        ({"timm_model_name": "resnet18.hf-hub:somebody/evil"}, "not a model of the installed timm"),
        ({"timm_model_name": "no_such_model"}, "not a model of the installed timm"),
        ({"timm_model_name": ["resnet18"]}, "not a model of the installed timm"),
    ],
)
def test_refused_towers(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CoderError, match=message):
        untrusted.check_config({**TINY, name: {**TINY[name], **options}}, "x.json")


def test_text_towers_that_a_file_names(tmp_path: Path) -> None:
    own, known = {"text_cfg": {"hf_model_name": "somebody/bert"}}, untrusted.known_names()
    assert "roberta-base" in known
    untrusted.check_text_names(own, "x.json")  # the user's own configuration
    untrusted.check_text_names(own, "x.json", on_hub={"somebody/bert"})
    for name in ("somebody/bert", str(tmp_path)):
        with pytest.raises(CoderError, match="which is not fetched because a file says so"):
            untrusted.check_text_names({"text_cfg": {"hf_tokenizer_name": name}}, "hf-hub:x", on_hub=known, folders=False)
    with pytest.raises(CoderError, match="must be a name"):
        untrusted.check_text_names({"text_cfg": {"hf_model_name": {"x": 1}}}, "x.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CoderError, match="model_type is missing"):
        untrusted.check_text_names({"text_cfg": {"hf_model_name": str(tmp_path)}}, "x.json", on_hub=known)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "evil.Tok"}}))
    with pytest.raises(CoderError, match="tokenizer_config.json: auto_map names code"):
        untrusted.check_text_names({"text_cfg": {"hf_tokenizer_name": str(tmp_path)}}, "x.json", on_hub=known)


@pytest.mark.parametrize("cfg", [CLIPVisionCfg, CLIPTextCfg])
def test_sizes_are_lower_bounds(cfg: Any) -> None:
    """About 60 % of the parameters of ViT-B/32's towers, and more with any one size."""
    sizes = vars(cfg())
    count = untrusted.tower_size(sizes)
    assert count == 768 * (14**2 + 12 * 7 * 768) if cfg is CLIPVisionCfg else count == 512 * (49408 + 77 + 12 * 7 * 512)
    grown = ["width", "layers", "mlp_ratio", "image_size" if cfg is CLIPVisionCfg else "context_length"]
    for name in grown:
        assert untrusted.tower_size({**sizes, name: 4 * sizes[name]}) > count, name
    assert untrusted.tower_size({"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 10}) == 720
    assert untrusted.tower_size({"width": 64, "layers": [3, 4, 6, 3]}) == 64 * 16 * 3 * 64
