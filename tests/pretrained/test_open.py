"""Opening an export: which heads it builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import coder_plugin
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.evaluate import shortlist_length
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import HEADS, export_model, read_heads
from coder_plugin.pretrained.open import InferenceConfig, load_model, open_pretrained
from tests import fresh


class Spread(nn.Module):
    requires = ("image_features", "text_features")

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return -(image_features.var(0).sum() + text_features.var(0).sum())


SCRIPT = """
import sys
from coder_plugin.pretrained.open import load_model
print(list(load_model(sys.argv[1]).coder.heads), "coder_plugin.heads.momentum" in sys.modules)
"""


def test_an_export_names_its_heads_and_opens_without_the_others(tmp_path: Path) -> None:
    objective = Objective.parse("coder").with_options({"concepts.vocabulary": "scenes", "prototypes.clusters": 3})
    model = coder_plugin.create_model("coder-tiny", loss=objective).eval()
    file = export_model(model, tmp_path).with_name(HEADS)
    assert read_heads(file).heads == ("concepts",) and len(model.coder.heads) > 1
    texts = torch.randint(1, 90, (3, model.context_length))
    with torch.no_grad():
        assert load_model(tmp_path).embed_text(texts).equal(model.embed_text(texts))
    out = fresh.run(["-c", SCRIPT, str(tmp_path)]).stdout
    assert out.splitlines()[-1] == "['concepts'] False"


def test_an_export_opens_without_the_term_objects_of_its_run(tmp_path: Path) -> None:
    loss = ["triplet(similarity=fusion)", (0.5, Spread())]
    model = coder_plugin.create_model("coder-tiny", loss=loss).eval()
    assert export_model(model, tmp_path).with_name(HEADS).exists()
    opened = open_pretrained(tmp_path, device="cpu")
    assert opened.objective == str(model.coder.objective) and list(opened.model.coder.heads) == ["fusion"]
    assert shortlist_length(None, opened.encoder()) == 32  # the object trains the towers' features
    texts = torch.randint(1, 90, (3, model.context_length))
    with torch.no_grad():
        assert opened.model.embed_text(texts).equal(model.embed_text(texts))


def test_a_run_is_opened_with_its_way_of_reading_data(tmp_path: Path) -> None:
    model = coder_plugin.create_model("coder-tiny", loss="dcl").eval()
    export_model(model, tmp_path / "export" / "best")
    run = {
        "optim": {"batch_size": 7, "lr": 1.0},
        "data": {"workers": 0, "max_bad_samples": 0.03},
        "model": {"name": "no-such"},
    }
    (tmp_path / "config.json").write_text(json.dumps(run))
    config = open_pretrained(tmp_path, {"max_bad_samples": 0.05}, device="cpu").config
    assert (config.batch_size, config.workers, config.max_bad_samples) == (7, 0, 0.05)
    assert open_pretrained(tmp_path / "export" / "best", device="cpu").config == InferenceConfig()
    (tmp_path / "config.json").write_text('{"optim":')
    with pytest.raises(CoderError, match=r"config\.json cannot be read"):
        open_pretrained(tmp_path, device="cpu")
