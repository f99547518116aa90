"""Words and their regions, from planted features and from models; what the figures draw of them.

L regions, W words, D channels.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin import create_model
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.build import make_transform
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.report.alignment import LOCALS, Aligner, Alignment
from coder_plugin.report.figures import plot_alignment, write_alignments
from tests import region_model
from tests.training import region_data

RECORDS = list(region_data.records("dev"))


def region_encoder(objective: str = "dcl", **options: Any) -> Encoder:
    model = region_model.make(objective, **{"word_dim": 16, "context_length": 12, **options})
    return Encoder(model, model.tokenizer(), model.transform(max_regions=8), device=torch.device("cpu"), workers=0)


def item(regions: Any, caption: str = "a man and a dog with the tree") -> Item:
    return Item("x", (caption,), lambda: regions)


# Computation


def test_cosines_are_those_of_the_models_locals() -> None:
    encoder = region_encoder()
    aligner, regions = Aligner(encoder), RECORDS[0].regions
    with aligner.evaluating():
        seen = aligner.describe_image(item(regions))
        found = aligner.align("x", "a man and zebra dog!", seen)
        image = {name: value[None] for name, value in encoder.transform(regions).items()}
        features = encoder.model.describe_image(image)["image_locals"][0, : len(regions)].double()
        text = encoder.model.describe_text(encoder.tokenizer(["a man and zebra dog!"]))
        words = text["text_locals"][0, [1, 2, 3, 5]].double()
    assert found.words == ("a", "man", "and", "dog")  # neither start nor sign nor the unknown zebra
    expected = torch.stack([torch.cosine_similarity(word, features) for word in words])
    np.testing.assert_allclose(found.similarity, expected, atol=1e-6)
    assert found.regions.tolist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(found.boxes, regions.fractions)  # 6 regions, of which the padding to 8 is none
    assert found.picture.shape == (288, 320, 3) and found.grid is found.region_context is found.word_context is None
    assert encoder.model.training


def test_pieces_of_a_word_are_averaged(monkeypatch) -> None:
    encoder = region_encoder()
    aligner = Aligner(encoder)
    planted = torch.zeros(1, 12, 16)
    planted[0, 2, 0], planted[0, 3, 1] = 3, 1  # "t" and "shirt" as two pieces of one word
    known = {"text_locals": planted, "text_mask": torch.ones(1, 12, dtype=torch.bool)}
    monkeypatch.setattr(encoder.model, "describe_text", lambda ids: known)
    monkeypatch.setattr(
        aligner.reader, "words", lambda caption, valid: [SimpleNamespace(text="t-shirt", positions=(2, 3))]
    )
    with aligner.evaluating():
        read = aligner.describe_caption("t-shirt")
    assert read.vectors.tolist() == [[1.5, 0.5, *[0] * 14]]


def test_the_map_is_the_heads() -> None:
    encoder = region_encoder("dcl + cra")
    aligner = Aligner(encoder)
    caption, regions = "a man and zebra dog!", RECORDS[0].regions
    with aligner.evaluating():
        found = aligner.align("x", caption, aligner.describe_image(item(regions)))
        image = {name: value[None] for name, value in encoder.transform(regions).items()}
        known = {**encoder.model.describe_image(image), **encoder.model.describe_text(encoder.tokenizer([caption]))}
        maps = encoder.model.coder.heads["contexts"].maps(known)
    np.testing.assert_allclose(found.region_context, maps["image"][0, :6], atol=1e-6)
    np.testing.assert_allclose(found.word_context, maps["text"][0, [1, 2, 3, 5]], atol=1e-6)
    assert np.isfinite(found.region_context).all() and len(set(found.region_context.tolist())) > 1


def test_patches_of_a_clip(tiny_model: str) -> None:
    """Cells, the transformed picture, and CLIP's own pieces."""
    torch.manual_seed(0)
    model = create_model(tiny_model, loss="clip", return_intermediates=LOCALS)
    import open_clip

    tokenizer = open_clip.SimpleTokenizer(context_length=40)
    encoder = Encoder(model, tokenizer, make_transform(model), device=torch.device("cpu"), workers=0)
    aligner = Aligner(encoder)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    with aligner.evaluating():
        found = aligner.align("x", "Two dogs, snowboarding", aligner.describe_image(item(Image.fromarray(pixels))))
        known = model.describe_text(tokenizer(["Two dogs, snowboarding"]))
    assert found.words == ("two", "dogs", "snowboarding") and found.grid == (4, 4)
    assert found.similarity.shape == (3, 16) and found.boxes[5].tolist() == [0.25, 0.25, 0.5, 0.5]
    np.testing.assert_array_equal(found.picture, pixels)
    assert known["text_locals"].shape[-1] == 32


def test_what_cannot_be_read_is_none_and_what_is_wrong_is_told() -> None:
    aligner = Aligner(region_encoder())

    def broken() -> Any:
        raise OSError("gone")

    with aligner.evaluating():
        assert aligner.describe_image(Item("x", ("a",), broken)) is None
        with pytest.raises(CoderError, match="the data are pictures"):
            aligner.describe_image(item(Image.new("RGB", (8, 8))))
        other = Aligner(region_encoder(word_dim=10))
        with pytest.raises(CoderError, match="words of 10 channels and regions of 16"):
            other.align("x", "a man", other.describe_image(item(RECORDS[0].regions)))


# Figures


def alignment(words: str = "a dog and two dogs", *, context: bool = True, picture: bool = True) -> Alignment:
    boxes = np.array([[0.1, 0.1, 0.5, 0.9], [0.4, 0.0, 1.0, 0.6], [0.0, 0.5, 0.3, 1.0]], np.float32)
    similarity = np.random.default_rng(0).uniform(0, 0.4, (len(words.split()), 3)).astype(np.float32)
    similarity[1:2], similarity[-1] = [0.1, 0.9, 0.2], [0.1, 0.8, 0.2]
    return Alignment(
        "images/1.jpg",
        f"{words} for $5",
        tuple(words.split()),
        similarity,
        boxes=boxes,
        region_context=np.array([0.1, 0.5, -0.2], np.float32) if context else None,
        word_context=np.arange(len(words.split())) / 10 if context else None,
        picture=np.full((40, 80, 3), 200, np.uint8) if picture else None,
    )


def test_outlines_are_the_words_regions() -> None:
    figure = plot_alignment(alignment())
    axes = figure.axes[0]
    drawn = {patch.get_label().split()[0]: patch for patch in axes.patches}
    assert list(drawn) == ["dog", "two", "dogs"] == [text.get_text() for text in axes.texts]  # no articles
    for number, word in ((1, "dog"), (4, "dogs")):  # of one region: one within the other
        box = drawn[word]
        left, top, right, bottom = (np.array([0.4, 0.0, 1.0, 0.6]) * [80, 40, 80, 40]).tolist()
        assert left <= box.get_x() <= left + 3 and box.get_x() + box.get_width() <= right, number
        assert top <= box.get_y() <= top + 3 and box.get_y() + box.get_height() <= bottom
    assert drawn["dogs"].get_x() > drawn["dog"].get_x() and drawn["dogs"].get_width() < drawn["dog"].get_width()
    assert len({patch.get_edgecolor() for patch in drawn.values()}) == 3
    assert drawn["dog"].get_label() == "dog 0.90"
    heights = [text.xyann[1] for text in axes.texts]
    assert heights[0] != heights[2]  # names do not cover each other


def test_files(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = write_alignments([alignment(), alignment(picture=False), alignment("_x")], tmp_path / "new")
    assert [path.name for path in paths] == ["alignment-000.png", "alignment-002.png", "alignment.json"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    rows = json.loads(paths[-1].read_text())
    assert [row["figure"] for row in rows] == ["alignment-000.png", None, "alignment-002.png"]
    with pytest.raises(CoderError, match="no boxes"):
        plot_alignment(alignment(picture=False))


def test_autocast_is_the_encoders() -> None:
    encoder = region_encoder()
    entered = []

    @contextlib.contextmanager
    def noted():
        entered.append(1)
        yield

    encoder.autocast = noted
    aligner = Aligner(encoder)
    with aligner.evaluating():
        aligner.align("x", "a dog", aligner.describe_image(item(Regions(RECORDS[0].regions.features))))
    assert len(entered) == 2
