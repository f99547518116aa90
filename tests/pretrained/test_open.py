"""Opening an export: which heads it builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import coder_plugin
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import export_heads, export_model, read_heads
from coder_plugin.pretrained.open import load_model

SCRIPT = """
import sys
from coder_plugin.pretrained.open import load_model
print(list(load_model(sys.argv[1]).coder.heads), "coder_plugin.heads.momentum" in sys.modules)
"""


def test_an_export_names_its_heads_and_opens_without_the_others(tmp_path: Path) -> None:
    objective = Objective.parse("coder").with_options({"concepts.vocabulary": "scenes", "prototypes.clusters": 3})
    model = coder_plugin.create_model("coder-tiny", loss=objective).eval()
    export_model(model, tmp_path)
    file = export_heads(model, tmp_path)
    assert file is not None and read_heads(file).heads == ("concepts",) and len(model.coder.heads) > 1
    texts = torch.randint(1, 90, (3, model.context_length))
    with torch.no_grad():
        assert load_model(tmp_path).embed_text(texts).equal(model.embed_text(texts))
    out = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "['concepts'] False"
