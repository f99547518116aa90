"""Queries by text without open_clip: the tower alone gives what the whole model gives, and nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.export_manifest import seal
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.pretrained.text_tower import TextTower
from tests.search.made import write_pictures

TEXTS = ["a red circle", "two small squares, and a very long tail of words " * 8, "", "Ünïcode &amp; 12 <b>"]


@pytest.mark.parametrize("options", [{}, {"force_quick_gelu": True}, {"force_custom_text": True}, {"force_context_length": 20}])
def test_the_tower_alone_encodes_as_the_whole_model_and_has_its_fingerprint(tiny_model: str, tmp_path: Path, options) -> None:
    model = coder_plugin.create_model(tiny_model, loss="siglip", **options)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # LayerNorm and biases start where an error would not show
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    export_model((model if options else model.half()).eval(), tmp_path)  # weights of both types are computed with in float32
    whole, tower = open_pretrained(tmp_path, device="cpu"), open_pretrained(tmp_path, device="cpu", texts_only=True)
    assert isinstance(tower.model, TextTower) and not isinstance(whole.model, TextTower)
    assert tower.tokenizer(TEXTS).equal(whole.tokenizer(TEXTS))
    assert tower.fingerprint() == whole.fingerprint()
    with pytest.raises(CoderError, match="texts only"):
        tower.encode_images([Image.new("RGB", (8, 8))])
    torch.testing.assert_close(tower.encode_texts(TEXTS), whole.encode_texts(TEXTS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["heads", "aggregator", "pooling", "option"])
def test_other_models_are_opened_whole(case: str, tiny_model: str, tmp_path: Path) -> None:
    if case == "pooling":
        config = json.loads(Path(tiny_model).read_text())
        config["text_cfg"]["pool_type"] = "last"
        (tmp_path / "other-pooling-for-tests.json").write_text(json.dumps(config))
    name = str(tmp_path / "other-pooling-for-tests.json") if case == "pooling" else tiny_model
    loss = "clip + selfalign" if case == "heads" else "clip"
    model = coder_plugin.create_model(name, loss=loss, aggregator="gpo" if case == "aggregator" else "tower")
    export_model(model.eval(), tmp_path / "export")
    options = {"force_context_length": 12} if case == "option" else {}
    pretrained = open_pretrained(tmp_path / "export", options, device="cpu", texts_only=True)
    assert not isinstance(pretrained.model, TextTower)
    expected = open_pretrained(tmp_path / "export", options, device="cpu").encode_texts(TEXTS)
    assert pretrained.encode_texts(TEXTS).equal(expected)


def test_a_configuration_that_does_not_fit_is_refused(tiny_model: str, tmp_path: Path) -> None:
    path = export_model(coder_plugin.create_model(tiny_model, loss="clip"), tmp_path).with_name("open_clip_config.json")
    whole = json.loads(path.read_text())
    own = whole["model_cfg"]["text_cfg"]
    wrong = [("width", 48), ("heads", 5), ("heads", 0), ("layers", 3), ("context_length", 41), ("vocab_size", 60_000)]
    for text_cfg in (*({**own, key: value} for key, value in wrong), None):
        path.write_text(json.dumps({**whole, "model_cfg": {**whole["model_cfg"], "text_cfg": text_cfg}}))
        seal(tmp_path, step=None)
        with pytest.raises(CoderError, match="cannot be created|belong to different models|is cut off|text_cfg"):
            open_pretrained(tmp_path, device="cpu", texts_only=True)


SEARCH = """
import sys
from coder_plugin.cli import main
status = main(["search", sys.argv[1], "--text", "a red circle", "-k", "3"])
print([name for name in ("torchvision", "timm", "open_clip", "transformers", "torch._dynamo") if name in sys.modules], status)
"""


@pytest.mark.slow
def test_a_search_of_text_imports_no_image_library(tmp_path: Path) -> None:
    export_model(coder_plugin.create_model("coder-tiny", loss="dcl").eval(), tmp_path / "export")
    flags = ["--data", str(write_pictures(tmp_path, 6)), "--output", str(tmp_path / "index"), "--workers", "0"]
    assert main(["index", str(tmp_path / "export"), *flags]) == 0
    command = [sys.executable, "-c", SEARCH, str(tmp_path / "index")]  # what a new process imports
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[-1] == "[] 0" and len(out) == 5
