"""Released checkpoints: every layout computes what its authors' formulas give, and a file that does not fit says why."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import coder_plugin
from coder_plugin.errors import CoderError
from scripts import convert_released
from scripts.convert_released import describe_released, main
from tests.backbones import releases
from tests.few import few
from tests.references import camera, vse_infinity, vsrn

REGIONS = 6
KINDS = ("vse", "vse without mlp", "vse bigru", "camera", "vsrn", "vsrn bn", "vsrn two layers")


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmno"]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    BertConfig(vocab_size=20, max_position_embeddings=40, **sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bert(bert_folder: str) -> Any:
    torch.manual_seed(1)
    return BertModel(BertConfig.from_pretrained(bert_folder)).eval()


@pytest.fixture
def extra(bert_folder: str) -> dict[str, Any]:
    """What a release does not hold: BERT's shape and words, and the BiGRU's words."""
    return {"bert": {"text": bert_folder, "pretrained_text": False}, "bigru": {"vocabulary": releases.VOCABULARY}}


def states(kind: str, bert: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    return {
        "vse": lambda: releases.vse_infinity(REGIONS, 8, bert),
        "vse without mlp": lambda: releases.vse_infinity(REGIONS, 8, bert, mlp=False),
        "vse bigru": lambda: releases.vse_infinity(REGIONS, 8),
        "camera": lambda: releases.camera(REGIONS, 8, bert, heads=2, views=3),
        "vsrn": lambda: releases.vsrn(REGIONS, 8, batch_norm=False),
        "vsrn bn": lambda: releases.vsrn(REGIONS, 8, batch_norm=True),
        "vsrn two layers": lambda: releases.vsrn(REGIONS, 8, batch_norm=True, layers=2),
    }[kind]()


def build(path: str, extra: dict[str, Any], **more: Any) -> Any:
    """The model that a file describes, with its weights, in evaluation and float64."""
    _, options = describe_released(path)
    return convert_released.build(path, **{**extra[options["encoder"]], **more}).double()


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found.double(), torch.stack(list(expected)), rtol=0, atol=1e-6)  # unit() makes float32


def picture(rows: int = 3, regions: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    corner, size = (torch.rand(rows, regions, 2, generator=generator, dtype=torch.float64) / 2 for _ in range(2))
    return {
        "features": torch.randn(rows, regions, REGIONS, generator=generator, dtype=torch.float64),
        "mask": torch.ones(rows, regions, dtype=torch.bool),
        "boxes": torch.cat([corner, corner + size + 0.1], -1),
        "aspect": torch.tensor([640 / 480, 333 / 500, 1.0], dtype=torch.float64)[:rows],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_authors(kind: str, bert: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    image, text = states(kind, bert)
    model = build(releases.save(tmp_path / "a.pth", image, text), extra)
    batch, sizes = picture(), [(640.0, 480.0), (333.0, 500.0), (200.0, 200.0)]
    rows = list(batch["features"])
    with torch.no_grad():
        found = model.image_side(batch)
        if kind == "camera":
            boxes = [box * torch.tensor(size * 2) for box, size in zip(batch["boxes"], sizes, strict=True)]
            expected, scores = camera.image(rows, boxes, sizes, doubled(image))
            close(found["image_views"], scores)
        elif kind.startswith("vsrn"):
            expected, _ = vsrn.image(rows, doubled(image))
        elif kind == "vse without mlp":
            projected = [vse_infinity.linear(x, doubled(image), "fc") for x in rows]
            expected = [vse_infinity.unit(vse_infinity.pool(x, doubled(image))) for x in projected]
        else:
            expected = vse_infinity.image(rows, doubled(image))
        close(found["image_features"], expected)
        ids = torch.tensor([[2, 7, 8, 9, 3], [2, 5, 5, 6, 3]])
        if "bigru" not in model.name:
            bert.load_state_dict({name[5:]: value for name, value in text.items() if name.startswith("bert.")})
            hidden = list(bert.double()(input_ids=ids).last_hidden_state)
            reference = camera.text if kind == "camera" else vse_infinity.text
            close(model.text_side(ids)["text_features"], reference(hidden, doubled(text)))
        elif kind in ("vsrn", "vsrn bn"):
            ids = torch.tensor([[1, 7, 8, 9, 2], [1, 5, 2, 0, 0]])
            close(model.text_side(ids)["text_features"], vsrn.text([[1, 7, 8, 9, 2], [1, 5, 2]], doubled(text)))


def test_descriptions(bert: Any, tmp_path: Path) -> None:
    def of(kind: str) -> tuple[str, dict[str, Any]]:
        return describe_released(releases.save(tmp_path / "a.pth", *states(kind, bert)))

    sizes = {"embed_dim": 8, "region_dim": REGIONS}
    vse = {"context": "none", "image_pooling": "gpo", "text_context": "none", "text_pooling": "gpo", "encoder": "bert"}
    assert of("vse") == ("region-bert", {**sizes, **vse, "mlp": True})
    assert of("vse without mlp") == ("region-bert", {**sizes, **vse, "mlp": False})
    gru = {"encoder": "bigru", "word_dim": 5, "text_layers": 1, "bidirectional": True}
    assert of("vse bigru") == ("region-bigru", {**sizes, **vse, "mlp": True, **gru})
    assert of("camera") == (
        "region-bert-camera",
        {
            **sizes, "mlp": False, "context": "camera", "image_pooling": "views", "text_context": "camera",
            "text_pooling": "mean", "views": 3, "heads": 2, "encoder": "bert",
        },
    )  # fmt: skip
    ours = {
        **sizes, "mlp": False, "context": "vsrn", "image_pooling": "gru", "text_pooling": "last", "text_context": "none",
        **gru, "word_dim": 7, "bidirectional": False,
    }  # fmt: skip
    assert of("vsrn") == ("region-bigru-vsrn", {**ours, "batch_norm": False})
    assert of("vsrn bn") == ("region-bigru-vsrn", {**ours, "batch_norm": True})
    assert of("vsrn two layers") == ("region-bigru-vsrn", {**ours, "batch_norm": True, "text_layers": 2})


def test_names_of_old_berts(bert: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    image, text = states("camera", bert)
    expected = build(releases.save(tmp_path / "a.pth", image, text), extra).state_dict()
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, value in text.items():
        end = next((end for end in ends if name.endswith(end)), "")
        old[name.removesuffix(end) + ends.get(end, "")] = value
    assert sum(name.endswith("gamma") for name in old) == 5
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    found = build(releases.save(tmp_path / "b.pth", image, old), extra).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name != "logit_scale")


def test_counts_that_old_files_lack(bert: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    image, text = states("vsrn bn", bert)
    image = {name: value for name, value in image.items() if not name.endswith("num_batches_tracked")}
    model = build(releases.save(tmp_path / "a.pth", image, text), extra)
    assert int(model.visual.norm.num_batches_tracked) == 0
    del image["bn.running_var"]
    with pytest.raises(CoderError, match=r"a\.pth lacks BatchNorm's visual\.norm\.running_var"):
        build(releases.save(tmp_path / "a.pth", image, text), extra)


@pytest.mark.parametrize("kind", ["vse bigru", "camera"])
def test_the_script_writes_an_export(kind: str, bert: Any, extra: Any, tmp_path: Path, capsys: Any) -> None:
    path = releases.save(tmp_path / "a.pth", *states(kind, bert))
    model = build(path, extra)
    (tmp_path / "words.json").write_text(json.dumps(releases.VOCABULARY))
    option = f"text={extra['bert']['text']}" if kind == "camera" else f"vocabulary={tmp_path / 'words.json'}"
    assert main([path, str(tmp_path / "export"), option]) == 0 and model.name in capsys.readouterr().out
    opened = coder_plugin.load_model(tmp_path / "export").double()
    with torch.no_grad():
        assert torch.equal(opened.embed_image(picture()), model.embed_image(picture()))
        ids = torch.tensor([[1, 7, 8, 9, 2]])
        assert torch.equal(opened.embed_text(ids), model.embed_text(ids)) and opened.logit_scale == model.logit_scale
    assert main([path, str(tmp_path / "other"), "mlp=false"]) == 2 and "decides mlp" in capsys.readouterr().err


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    linear, gru = torch.nn.Linear(6, 8), torch.nn.GRU(5, 8, bidirectional=True)
    words = releases.named({"embed": torch.nn.Embedding(14, 5), "rnn": gru})
    for name, image, message in [
        ("SCAN", releases.named({"fc": linear}), "is a checkpoint of SCAN .* without pooling"),
        (
            "weight norm",
            {"fc.weight_g": torch.ones(()), "fc.weight_v": linear.weight, "fc.bias": linear.bias},
            "is a checkpoint of SCAN",
        ),
        ("VSE-infinity on grids", {"backbone.conv.weight": torch.ones(3)}, "reads pictures"),
        ("VSE++", {"cnn.conv.weight": torch.ones(3), "fc.weight": linear.weight.data}, "reads pictures"),
        ("something else", {"tower.weight": torch.ones(3)}, r"is not a checkpoint of .* has \['tower\.weight'\]"),
        ("no projection", {"mvs.convs_fc.weight": torch.ones(3, 4)}, "embed_dim"),
        ("odd projection", {"fc.weight": torch.ones(3), "gpool.linear.weight": torch.ones(1)}, "names suggest"),
    ]:
        path = releases.save(tmp_path / "a.pth", {k: v.detach() for k, v in image.items()}, words)
        with pytest.raises(CoderError, match=message):
            describe_released(path)
        assert name


def test_files_that_are_no_release(tmp_path: Path) -> None:
    for content, message in [
        ({"state_dict": {}}, "has no 'model'"),
        ([1, 2], "has no 'model'"),
        ({"model": OrderedDict(a=torch.ones(2))}, "has no 'model'"),
        ({"model": [{"a": torch.ones(2)}]}, "has no 'model'"),
        ({"model": [{"a": torch.ones(2)}, 7]}, "not a dict of tensors"),
        ({"model": [{"a": 3}, {}]}, "'a' is not a tensor"),
    ]:
        torch.save(content, tmp_path / "a.pth")
        with pytest.raises(CoderError, match=rf"a\.pth.*{message}"):
            describe_released(str(tmp_path / "a.pth"))
    with pytest.raises(CoderError, match=r"b\.pth cannot be read"):
        describe_released(str(tmp_path / "b.pth"))


@pytest.mark.parametrize("kind", few(KINDS))
def test_a_tensor_more_less_or_of_another_shape(kind: str, bert: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    image, text = states(kind, bert)
    with pytest.raises(CoderError, match=r"a tensor 'extra\.weight' that none"):
        build(releases.save(tmp_path / "a.pth", {**image, "extra.weight": torch.ones(2)}, text), extra)
    known = re.compile(r"1 tensors missing \['visual\.fc\.bias'\]")
    with pytest.raises(CoderError, match=known):
        build(releases.save(tmp_path / "a.pth", {k: v for k, v in image.items() if k != "fc.bias"}, text), extra)
    with pytest.raises(CoderError, match=r"1 of another shape \['visual\.fc\.bias'\]"):
        build(releases.save(tmp_path / "a.pth", {**image, "fc.bias": torch.ones(9)}, text), extra)
