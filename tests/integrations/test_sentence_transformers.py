"""A shared folder in sentence-transformers: the same vectors, texts and pictures mixed; and what it calls, without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.integrations.sentence_transformers import PictureText
from coder_plugin.pretrained.export import export_model
from tests.integrations import hub_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """A model with a concept head, shared."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = coder_plugin.create_model(tiny_model, loss="dcl + concept_dcl").eval()
    with torch.no_grad():
        model.coder.heads["concepts"].steps.fill_(10**6)  # warmed up
    export_model(model, place / "export")
    return coder_plugin.save_pretrained(place / "export", place / "shared")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Image.Image]:
    return [Image.open(path) for path in hub_runs.pictures(tmp_path_factory.mktemp("pictures"))]


def both(folder: Path, pictures: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    model = coder_plugin.from_pretrained(folder)
    return model.encode_images(pictures), model.encode_texts(hub_runs.TEXTS)


def test_the_module_gives_the_same_vectors(folder: Path, pictures: list[Image.Image]) -> None:
    module = PictureText.load(str(folder))
    images, texts = both(folder, pictures)
    with torch.no_grad():
        found = module(module.preprocess(hub_runs.TEXTS))["sentence_embedding"]
        assert torch.equal(found, texts) and found.dtype == torch.float32
        assert torch.equal(module(module.tokenize(pictures))["sentence_embedding"], images)
        mixed = [pictures[0], hub_runs.TEXTS[0], pictures[1], hub_runs.TEXTS[2]]
        found = module(module.preprocess(mixed))["sentence_embedding"]
        prompted = module(module.preprocess(["dog"], prompt="a "))["sentence_embedding"]
    expected = torch.stack([images[0], texts[0], images[1], texts[2]])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(prompted, texts[2:])
    assert module.get_embedding_dimension() == module.get_sentence_embedding_dimension() == texts.shape[1] == 64
    assert module.max_seq_length == 40
    for wrong in ([3], [np.zeros((8, 8, 3))], [{"role": "user", "content": "a dog"}]):
        with pytest.raises(ValueError, match=f"not a {type(wrong[0]).__name__}"):
            module.preprocess(wrong)


def test_it_trains(folder: Path, pictures: list[Image.Image]) -> None:
    module = PictureText.load(str(folder)).train()
    module(module.preprocess([pictures[0], "a dog"]))["sentence_embedding"].sum().backward()
    assert module.model.visual.proj.grad.abs().sum() > 0 and module.model.text_projection.grad.abs().sum() > 0


def test_it_is_opened_by_the_library(folder: Path, pictures: list[Image.Image], tmp_path: Path) -> None:
    import sentence_transformers as library

    model = library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    images, texts = both(folder, pictures)
    alone = coder_plugin.from_pretrained(folder).encode_texts(hub_runs.TEXTS[:1])
    assert torch.equal(torch.from_numpy(model.encode(hub_runs.TEXTS[:1])), alone)
    close(model.encode(hub_runs.TEXTS), texts)
    close(model.encode(pictures), images)
    close(model.encode([pictures[1], "a dog", pictures[0]]), torch.stack([images[1], texts[2], images[0]]))
    close(model.encode("a dog"), texts[2])
    close(model.similarity(model.encode(hub_runs.TEXTS), model.encode(pictures)), texts @ images.T)
    assert model.similarity_fn_name == "dot" and model.max_seq_length == 40
    dimension = getattr(model, "get_embedding_dimension", model.get_sentence_embedding_dimension)
    assert dimension() == 64
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True, device="cpu")
    assert np.array_equal(again.encode(pictures), model.encode(pictures))
    assert again.similarity_fn_name == "dot"
    kind = json.loads((tmp_path / "saved" / "modules.json").read_text())[0]["type"]
    assert kind == "coder_plugin.integrations.sentence_transformers.module.PictureText"


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected)
