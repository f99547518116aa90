"""torch.compile takes the loss of every recipe as one graph, where nothing is left to Python, and the heads of CODER.

``--torchcompile`` compiles model and loss.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin import Trainer, create_loss, create_model, recipes
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from tests.losses.drawn import tile_shape

NUMBERS = {
    "momentum.bank_size": 16,
    "prototypes.clusters": 3,
    "prototypes.recluster": 3,
    "alignment.prototypes": 5,
    "progress.steps_per_epoch": 2,
}
QUICK = "coder"  # tests/losses/ compiles each loss by itself
ALL = sorted({QUICK, "selfalign", "dcl", "triplet", "siglip", *recipes.objectives()})


#: The forms of the losses of pairs: all similarities at once, one tile, and tiles of a few rows, kept or not.
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "one tile": {"elements": 1 << 21, "one_tile": 1 << 24},
    "tiles": {"elements": 20},
    "kept tiles": {"elements": 20, "kept": 1 << 24},
}
#: What is fast enough to run always. Tests of each loss compile its tiles.
CASES = [
    pytest.param(name, form, marks=() if name == QUICK and form == "auto" else pytest.mark.slow)
    for name in ALL
    for form in FORMS
]


def made(name: str, model_name: str, implementation: str = "auto") -> tuple[Any, Any, dict[str, Any]]:
    """Model, loss and a batch."""
    objective = Objective.parse(name)
    torch.manual_seed(0)
    heads = required_heads(objective)
    objective = objective.with_options({key: value for key, value in NUMBERS.items() if key.split(".")[0] in heads})
    model = create_model(model_name, loss=objective).train()
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 400, (6, 40), generator=generator)
    for row in range(6):  # texts of 4 to 14 tokens
        words[row, 3 + 2 * row], words[row, 4 + 2 * row :] = 49407, 0
    batch = {"image": torch.randn(6, 3, 64, 64, generator=generator), "text": words, "image_id": torch.arange(6) // 2}
    batch |= {"text_positive": words.flip(0), "text_tags": (words > 0).long()}
    return model, create_loss(objective, model=model, implementation=implementation), batch


def leaves(outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
        for key, value in outputs.items()
    }


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_loss_of_a_recipe_is_one_graph(name: str, form: str, tiny_model: str) -> None:
    shape = FORMS[form]
    model, loss, batch = made(name, tiny_model, "tiled" if shape else "auto")
    outputs = model(**batch)
    eager, compiled = leaves(outputs), leaves(outputs)
    with tile_shape(**shape) if shape else contextlib.nullcontext():
        want = loss(**eager)
        torch._dynamo.reset()
        got = torch.compile(loss, backend="aot_eager", fullgraph=True)(**compiled)
    assert got.keys() == want.keys()
    sum(want.values()).backward(), sum(got.values()).backward()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)
    for key, value in eager.items():
        if isinstance(value, Tensor) and value.grad is not None:
            torch.testing.assert_close(compiled[key].grad, value.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_run_compiles_its_loss(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of a run that does not, also in steps that measure each term's gradient.

    The short form is the trainer's cell of tests/integrations/test_framework_cells.py.
    """
    compiled: list[str] = []
    compile_module = torch.nn.Module.compile

    def compile_eagerly(module: torch.nn.Module) -> None:
        compiled.append(type(module).__name__)
        compile_module(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    small = json.loads(Path(tiny_model).read_text())
    small["vision_cfg"]["layers"] = small["text_cfg"]["layers"] = 1
    (tmp_path / "small.json").write_text(json.dumps(small))
    options = {"batch_size": 4, "train_num_samples": 12, "epochs": 1, "workers": 0, "report": False, "logs": str(tmp_path)}
    found = []
    for name, more in (("eager", {}), ("compiled", {"torchcompile": True})):
        torch._dynamo.reset()
        config = {**options, "name": name, "log_every_n_steps": 2, **more}
        Trainer(model=str(tmp_path / "small.json"), loss="dcl + clip", train="scenes", config=config).run()
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found.append([[line["dcl_loss"], line["clip_loss"], line["share/dcl_loss"]] for line in lines if "dcl_loss" in line])
    assert len(compiled) == 2 and "CoderLoss" in compiled
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_heads_of_coder_compile(tiny_model: str) -> None:
    """All but the momentum towers, which are the backbone's own code. GPO's GRU, which torch does not trace, breaks it."""
    model, _, batch = made("3*dcl + concept_dcl + pgc", tiny_model)
    seen: list[dict[str, Tensor]] = []
    hook = model.coder.register_forward_pre_hook(lambda _, inputs: seen.append(dict(inputs[0])))
    model(**batch)
    hook.remove()
    features = {key: value.detach() if isinstance(value, Tensor) else value for key, value in seen[0].items()}
    want = model.coder(features)
    torch._dynamo.reset()
    got = torch.compile(model.coder, backend="eager")(features)
    assert {"coder_text_concepts", "coder_image_logits"} <= got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)
