"""open_clip's models as folders of transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from PIL import Image

from coder_plugin import create_model
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.build import make_transform
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.to_transformers import save_as_transformers
from coder_plugin.training.prepare import add_lora
from tests.conftest import TINY

TEXTS = ["A dog, isn't it?", "two  small red balls & 12 CATS", "", "a " * 60]
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A tiny model of OpenAI's shape; keywords change its configuration, those of a tower with ``visual_`` or ``text_``."""

    def make_model(**changes: Any) -> Any:
        config = json.loads(json.dumps(TINY))
        for name, value in changes.items():
            side = {"visual": "vision_cfg", "text": "text_cfg"}.get(name.partition("_")[0])
            (config if side is None else config[side])[name if side is None else name.partition("_")[2]] = value
        (tmp_path / "as-openai-for-tests.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path / "as-openai-for-tests.json")
        torch.manual_seed(0)
        return open_clip.create_model("as-openai-for-tests", output_dict=True).eval()

    return make_model


@pytest.mark.parametrize(
    "changes",
    [
        {"quick_gelu": True, "visual_image_size": 32, "visual_mlp_ratio": 2.0},
        {"custom_text": True, "text_act_kwargs": {"approximate": "tanh"}},
    ],
    ids=["quick-gelu", "custom-text"],
)
def test_an_open_clip_model_opens_in_transformers(make: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    """open_clip #591 and #766, transformers #28072: a checkpoint of open_clip as a folder of ``CLIPModel``, features equal."""
    model = make(**changes)
    folder = save_as_transformers(model, tmp_path / "clip")
    own, report = transformers.CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    activations = [own.config.vision_config.hidden_act, own.config.text_config.hidden_act]
    assert activations == (["quick_gelu"] * 2 if "quick_gelu" in changes else ["gelu", "gelu_pytorch_tanh"])
    pixels = torch.randint(0, 256, (60 * 90 * 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    picture = Image.frombytes("RGB", (60, 90), pixels.numpy().tobytes()).resize((80, 70), Image.Resampling.BICUBIC)
    ids, image = open_clip.get_tokenizer("as-openai-for-tests")(TEXTS), make_transform(model)(picture)[None]
    inputs = {"input_ids": ids}
    if "quick_gelu" in changes:  # the tokenizer and the transform are the same in both
        processor = transformers.AutoProcessor.from_pretrained(folder)
        inputs = dict(processor(text=TEXTS, images=picture, padding="max_length", truncation=True, return_tensors="pt"))
        assert inputs["input_ids"].shape == ids.shape == (4, 40)
        assert (inputs.pop("pixel_values") - image).abs().max() < 0.1
        again = create_model(str(folder), loss="clip")
        assert again.visual.preprocess_cfg | {"size": None} == model.visual.preprocess_cfg | {"size": None}
    with torch.no_grad():
        expected = model(image, ids)
        outputs = own.eval()(pixel_values=image, **inputs)
    torch.testing.assert_close(outputs.image_embeds, expected["image_features"], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.text_embeds, expected["text_features"], atol=1e-5, rtol=0)
    logits = expected["logit_scale"] * expected["image_features"] @ expected["text_features"].T
    torch.testing.assert_close(outputs.logits_per_image, logits, atol=1e-4, rtol=0)


def test_a_trained_model_leaves_its_heads_and_merges_its_adapters(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    make()
    model = create_model("as-openai-for-tests", loss="coder").eval()
    add_lora(model, rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    path = save_as_transformers(model, tmp_path / "clip")
    own = transformers.CLIPModel.from_pretrained(path)
    ids = open_clip.get_tokenizer("as-openai-for-tests")(TEXTS)
    with torch.no_grad():
        expected = model(text=ids)["text_features"]
        feature = own.eval().get_text_features(ids).pooler_output
        torch.testing.assert_close(feature, model.encode_text(ids), atol=1e-4, rtol=1e-4)
    export_model(model, tmp_path / "export")
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'export'}", output_dict=True).eval()
    torch.testing.assert_close(plain(text=ids)["text_features"], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_logit_bias": -10.0}, "no place for logit_bias"),
        ({"visual_ls_init_value": 0.1}, "Unexpected key.*layers.0.ls_1.gamma"),
        ({"visual_no_ln_pre": True}, "Missing key.*pre_layrnorm"),
        ({"visual_attentional_pool": True}, "no place for visual.attn_pool"),
        ({"visual_pool_type": "avg"}, "image features would differ by 0"),
        ({"text_no_causal_mask": True, "custom_text": True}, "text features would differ by 0"),
        ({"visual_layers": [1, 1, 1, 1], "visual_patch_size": None}, "no place for visual.conv1|no place for visual.bn1"),
        ({"text_vocab_size": 60}, "knows 60 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_shapes_are_refused(make: Make, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CoderError, match=message):
        save_as_transformers(make(**changes), tmp_path / "clip")
    assert not (tmp_path / "clip").exists()
