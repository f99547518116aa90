"""Word vectors from text models: the embeddings by hand, and the models that ``--vectors model:NAME`` opens."""

from __future__ import annotations

import json

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, CLIPConfig, CLIPModel, T5Config, T5Model

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.concepts import ModelVectors, build_vocabulary, lexicon_tagger, load_vocabulary
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import load_model
from coder_plugin.pretrained.text_models import open_text_model
from tests.backbones import tiny_bert

TABLE = {"cat": [3.0, 4.0], "dog": [0.0, 2.0], "red": [-1.0, 0.0]}
WORDS = ["dog", "cats", "red", "running"]


def source(**options) -> ModelVectors:
    return ModelVectors(lambda texts: [TABLE[text.split()[-1]] for text in texts], name="table", **options)


def test_embeddings_are_unit_vectors_without_their_mean():
    units = np.array([[0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    found = source(center=False).read({"dog", "cat", "red"})
    np.testing.assert_allclose(torch.stack([found.vectors[word] for word in TABLE]), units, atol=1e-6)
    assert found.dim == 2 and found.sigma == pytest.approx(units.std(), rel=1e-5)
    moved = units - units.mean(0)
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    found = source().read(["red", "dog", "cat", "dog"])
    np.testing.assert_allclose(torch.stack([found.vectors[word] for word in TABLE]), moved, atol=1e-6)
    assert found.sigma == pytest.approx(moved.std(), rel=1e-5)
    assert source().read(["cat"]).vectors["cat"].tolist() == pytest.approx([0.6, 0.8]), "one word has no mean to lose"


def test_a_vocabulary_lacks_no_word():
    """Words are embedded as they are, whatever their surface forms."""
    tagger = lexicon_tagger({"dog": "NOUN", "cat": "NOUN", "red": "ADJ"}, {"dogs": "dog", "cats": "cat"})
    captions = ["red dogs", "a cat and cats"]
    asked: set[str] = set()

    def encode(texts: list[str]) -> list[list[float]]:
        asked.update(texts)
        return [TABLE[text] for text in texts]

    made = build_vocabulary(captions, tagger=tagger, size=3, vectors=ModelVectors(encode, name="table", center=False))
    assert asked == {"dog", "cat", "red"} and made.missing == () and made.settings["surface_vectors"] == {}
    for word, row in zip(made.words, made.vectors, strict=True):
        torch.testing.assert_close(row, normalize(torch.tensor(TABLE[word]), dim=0))
    assert (made.settings["vectors"], made.settings["template"], made.settings["center"]) == ("table", "{}", False)


# Models


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return tiny_bert.make(tmp_path_factory.mktemp("text_models") / "bert")


def hidden(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    batch = AutoTokenizer.from_pretrained(folder)(WORDS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state, batch["attention_mask"]


def sentence_transformer(bert: str, folder, pooling: dict, module: str = "Normalize") -> str:
    import shutil

    shutil.copytree(bert, folder)
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", module)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.mark.parametrize(
    ("pooling", "first"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, True),
        ({"pooling_mode": "mean"}, False),
    ],
)
def test_a_sentence_transformers_pooling_is_followed(bert, tmp_path, pooling, first):
    folder = sentence_transformer(bert, tmp_path / "sentences", {"word_embedding_dimension": 16, **pooling})
    tokens, mask = hidden(bert)
    average = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(open_text_model(folder, device="cpu")(WORDS), tokens[:, 0] if first else average)


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_a_dual_encoder_gives_its_text_features_and_of_two_halves_the_encoder_counts(tmp_path, kind):
    folder = tmp_path / kind
    tiny_bert.make(folder, layers=1)  # for its tokenizer
    names = ["input_ids", "attention_mask"]
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "num_layers": 1}
    if kind == "t5":
        model = T5Model(T5Config(d_model=16, d_ff=16, d_kv=8, num_heads=2, **size))
    else:
        tower = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        text = {**tower, "vocab_size": len(tokenizer), "eos_token_id": 3, "max_position_embeddings": 16}
        image = {**tower, "image_size": 8, "patch_size": 4}
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=6))
    model.eval().save_pretrained(folder)
    batch = tokenizer(WORDS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        if kind == "t5":
            want = (model.encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        else:
            want = F.normalize(model.text_projection(model.text_model(**batch).pooler_output), dim=1)  # retrieval vectors
    torch.testing.assert_close(open_text_model(str(folder), device="cpu")(WORDS), want)


def test_an_export_gives_its_retrieval_vectors(tiny_model, tmp_path):
    """Concepts included; so does the folder of the run that the export is in."""
    torch.manual_seed(0)
    objective = coder_plugin.objective.Objective.parse("concept_dcl").with_options({"concepts.vocabulary": "scenes"})
    model = coder_plugin.create_model(tiny_model, loss=objective).eval()
    folder = tmp_path / "run" / "export" / "best"
    export_model(model, folder)
    want = load_model(folder).embed_text(open_clip.get_tokenizer("ViT-B-32", context_length=40)(WORDS))
    assert want.shape[1] == 64
    for spec in (folder, tmp_path / "run"):
        torch.testing.assert_close(open_text_model(str(spec), device="cpu")(WORDS), want.detach())


# The command


@pytest.mark.parametrize(
    ("more", "template", "center"),
    [([], "{}", True), (["--template", "a picture of {}"], "a picture of {}", True), (["--no-center"], "{}", False)],
)
def test_the_command(bert, tmp_path, capsys, more, template, center):
    (tmp_path / "data.csv").write_text("filepath\ttitle\n0.png\ta red circle\n1.png\tblue boxes on the left\n")
    output = tmp_path / "c.safetensors"
    command = ["concepts", "--tagger", "scenes", "--train-data", str(tmp_path / "data.csv"), "--output", str(output)]
    assert main([*command, "--vectors", f"model:{bert}", *more]) == 0
    assert "word vectors: 5 of 5 from bert, 16 dimensions" in capsys.readouterr().out
    made = load_vocabulary(output)
    texts = [template.replace("{}", word) for word in made.words]
    units = normalize(open_text_model(bert, device="cpu")(texts), dim=1)
    want = normalize(units - units.mean(0), dim=1) if center else units
    assert made.missing == ()
    torch.testing.assert_close(made.vectors, want, rtol=1e-4, atol=1e-5)
    head = coder_plugin.registry.load("heads", "concepts")
    built = head(coder_plugin.heads.base.BackboneInfo(embed_dim=4, text_tokens=3), vocabulary=str(output))
    assert built.concepts().shape == (5, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vectors", "none", "--template", "a {}"], "--template and --center are for --vectors model:NAME"),
        (["--vectors", "none", "--center"], "--template and --center are for --vectors model:NAME"),
        (["--vectors", "model:no-such-model"], "text encoder 'no-such-model' cannot be loaded"),
    ],
)
def test_mistakes(tmp_path, capsys, more, message):
    assert main(["concepts", "--output", str(tmp_path / "c.safetensors"), *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
