"""AsCL's generated texts through every kind of text tower: what is encoded, what the noise touches, what is refused."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from coder_plugin import create_loss
from coder_plugin.errors import CoderError
from coder_plugin.noise.base import Noise
from tests.backbones.test_region_text import TEXTS, images, made
from tests.few import few
from tests.test_model import EOT, KINDS, batch, configs, make  # noqa: F401

OPEN_CLIP = [name for name in KINDS if name != "coca"]
OURS = ["region-bert", "region-bigru", "region-bert-camera", "region-bigru-vsrn"]
MADE = ("coder_positive_features", "coder_noised_features", "coder_noised_positive_features")


class Recording(Noise):
    """Keeps what it is given and returns it unchanged."""

    def __call__(self, embeddings: Tensor, words: Tensor) -> Tensor:
        self.embeddings, self.words = embeddings.detach().clone(), words.clone()
        return embeddings


class Zero(Noise):
    def noised(self, embeddings: Tensor, words: Tensor) -> Tensor:
        return torch.zeros_like(embeddings)


def tokenizer_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """SigLIP's, which ends and pads with 1, would have to be downloaded."""
    if name != "siglip":
        return contextlib.nullcontext()


    def blank(texts: list[str], context_length: int) -> Tensor:
        return torch.ones(1, context_length, dtype=torch.int64)

    return mock.patch("open_clip.get_tokenizer", lambda *_, **__: blank)


@pytest.fixture(scope="module")
def model_of(make, tmp_path_factory):  # noqa: F811
    """A model of a kind with an objective, in training mode without dropout and with BatchNorm's running statistics, and its
    images and texts."""
    from tests.backbones import tiny_bert

    bert = tiny_bert.make(tmp_path_factory.mktemp("bert"))

    def build(name: str, objective: str = "ascl") -> tuple[Any, Any, Tensor]:
        if name in KINDS:
            with tokenizer_of(name):
                model = make(name, objective)
            image, text = batch(name)
            if "bert" not in name:  # their vocabulary is not that of CLIP's tokenizer
                model.word_embeddings._special = torch.tensor([EOT])
                model.word_embeddings.pad = KINDS[name].config["text_cfg"].get("pad_id", 0)
        else:
            model = made(name, bert, objective)
            image, text = images(), model.tokenizer()(TEXTS)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout) or type(module).__name__ == "PatchDropout":
                module.eval()
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        if hasattr(getattr(model, "text", None), "transformer"):
            model.text.transformer.eval()
        return model, image, text

    return build


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", few([*OPEN_CLIP, *OURS]))
@torch.no_grad()
def test_each_text_is_encoded_as_if_it_were_alone(model_of, name):
    model, image, text = model_of(name)
    positive = text.roll(1, 0)
    head = model.coder.heads["asymmetry"]
    head.noise = Recording()
    outputs = model(image, text, text_positive=positive)
    alone = model.encode_text(text, normalize=True)
    close(outputs["text_features"], alone)
    assert outputs["text_features"].shape == outputs["coder_noised_features"].shape
    close(outputs["coder_positive_features"], alone.roll(1, 0))
    close(outputs["coder_noised_features"], alone)
    close(outputs["coder_noised_positive_features"], alone.roll(1, 0))

    # the noise saw the embeddings of captions and positives, and their words alone
    rows = torch.cat([text, positive])
    length = head.noise.words.shape[1]
    assert head.noise.words.shape == head.noise.embeddings.shape[:2]
    words = model.word_embeddings.word_mask(rows)
    assert torch.equal(head.noise.words, words[:, :length]) and not words[:, length:].any()
    for row, flags in zip(rows, words, strict=True):
        if name in OURS:
            special = (0, 1, 2) if "bigru" in name else (0, 2, 3)  # padding, start, end
            assert flags.tolist() == [token not in special for token in row.tolist()]
        else:
            end = 3 if "bert" in name else EOT
            valid = KINDS[name].mask(row[None])[0]
            assert flags.tolist() == (valid & (row != end)).tolist() and flags.any()


NOISES = ["shuffle", "gaussian", "token_cutoff", "feature_cutoff", "dropout", "mixture"]


@pytest.mark.parametrize(("name", "noise"), few(zip([*OPEN_CLIP, *OURS], itertools.cycle(NOISES), strict=False), 2))
@torch.no_grad()
def test_noise_changes_the_texts_features_and_no_others(model_of, name, noise):
    model, image, text = model_of(name, "ascl + 0.1*dcl")
    head = model.coder.heads["asymmetry"]
    from coder_plugin.noise.generators import parse_noise

    head.noise = parse_noise(noise)
    torch.manual_seed(0)
    outputs = model(image, text, text_positive=text)
    close(outputs["text_features"], model.encode_text(text, normalize=True))
    close(outputs["coder_positive_features"], outputs["text_features"])
    moved = (outputs["coder_noised_features"] - outputs["text_features"]).norm(dim=-1)
    several = model.word_embeddings.word_mask(text).sum(1) > 1
    changed = several if noise == "shuffle" else model.word_embeddings.word_mask(text).any(1)
    assert (moved[changed] > 1e-4).all(), moved
    if noise == "shuffle":
        close(outputs["coder_noised_features"][~several], outputs["text_features"][~several])
    torch.manual_seed(0)
    again = model(image, text, text_positive=text)
    assert all(torch.equal(again[key], outputs[key]) for key in MADE)
    torch.manual_seed(1)
    assert not torch.equal(model(image, text, text_positive=text)["coder_noised_features"], outputs["coder_noised_features"])


@pytest.mark.parametrize("name", ["vit", "region-bert", "region-bigru"])
def test_a_text_that_its_noise_cannot_change_is_no_negative(model_of, name):
    """Captions of one word, shuffled: as negatives of their own images they would fight the positives to log 2."""
    from coder_plugin.noise.generators import parse_noise

    model, image, text = model_of(name)
    model.coder.heads["asymmetry"].noise = parse_noise("shuffle")
    words = model.word_embeddings.word_mask(text)
    if not (words.sum(1) == 1).any():  # cut the first one down to its first word
        first, many = int(words[0].nonzero()[1]), int(words[0].sum()) - 1
        text[0, first:] = text[0].masked_fill(words[0], 0).roll(-many)[first:]
    one = model.word_embeddings.word_mask(text).sum(1) == 1
    with torch.no_grad():
        outputs = model(image, text, text_positive=text, image_id=torch.arange(len(text)))
    assert one.any() and torch.equal(outputs["coder_noise_changed"], ~one[:, None].expand(-1, 2))
    loss = create_loss("ascl", model=model)
    close(loss(**outputs)["ascl_loss"], reference_loss(outputs, ~one))
    assert not torch.allclose(reference_loss(outputs, ~one), reference_loss(outputs, torch.ones_like(one)), atol=1e-4)


def reference_loss(outputs: dict[str, Tensor], counts: Tensor) -> Tensor:
    from coder_plugin.functional import ascl

    images = outputs["image_features"]
    halves = [
        ascl(images @ outputs[f"{name}_features"].T, images @ outputs[noised][counts].T, temperature=0.05)
        for name, noised in (("text", "coder_noised_features"), ("coder_positive", "coder_noised_positive_features"))
    ]
    return sum(halves) / 2


def test_batch_statistics_of_the_text_tower_are_the_captions_own(model_of):
    """CAMERA's BatchNorm: what was generated of the captions is normalised like them, and counts in no statistic."""
    model, image, text = model_of("region-bert-camera", "ascl")
    plain, _, _ = model_of("region-bert-camera", "dcl")
    for each in (model, plain):
        for module in each.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
    with torch.no_grad():
        close(model(image, text)["text_features"], plain(image, text)["text_features"])
    for (name, buffer), (_, other) in zip(model.text.named_buffers(), plain.text.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)


@pytest.mark.parametrize("name", ["vit", "timm-resnet-bert", "region-bigru"])
def test_noise_is_for_training_only_and_gone_after_an_error(model_of, name):
    model, image, text = model_of(name)
    model.coder.heads["asymmetry"].noise = Zero()
    model.eval()
    with torch.no_grad():
        wanted = model(image, text)["text_features"]
        assert "coder_noised_features" not in model(image, text)
        close(model.embed_text(text), wanted)
        model.train()
        with pytest.raises(Exception):  # noqa: B017
            model("no image", text)
        close(model.eval().encode_text(text, normalize=True), wanted)


@pytest.mark.parametrize("name", ["vit", "siglip", "timm-resnet-bert", "region-bigru"])
def test_a_token_prefix_stands_in_for_text_that_was_not_given(model_of, name):
    model, image, text = model_of(name)
    head, words = model.coder.heads["asymmetry"], model.word_embeddings
    torch.manual_seed(0)
    seen = set()
    for _ in range(30):
        short = head.truncated(words, text)
        assert short.shape == text.shape and short.dtype == text.dtype
        for row, cut in zip(text, short, strict=True):
            ours = row[words.word_mask(row[None])[0]].tolist()
            left = cut[words.word_mask(cut[None])[0]].tolist()
            assert left == ours[: len(left)]
            if len(ours) <= 3:
                assert torch.equal(row, cut)
            else:
                assert 3 <= len(left) < len(ours) and len(left) <= max(3, round(0.8 * len(ours)))
                seen.add(len(left) / len(ours))
            # what closes the text closes the shorter one
            end = int(words.mask(row[None]).sum()) - 1
            assert cut[int(words.mask(cut[None]).sum()) - 1] == row[end] or words.word_mask(row[None])[0, end]
    assert len(seen) > 2
    head._truncate = None
    assert torch.equal(head.truncated(words, text), text)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"positives": None}, {"coder_noised_features", "coder_noise_changed"}),
        ({"negatives": None}, {"coder_positive_features"}),
        ({"negatives": None, "positives": None}, set()),
        ({}, {*MADE, "coder_noise_changed"}),
    ],
)
def test_what_is_not_asked_for_is_not_made(make, options, keys):  # noqa: F811
    from coder_plugin.objective import Objective

    objective = Objective.parse("ascl").with_options({f"asymmetry.{key}": value for key, value in options.items()})
    model = make("vit", objective).train()
    image, text = batch()
    outputs = model(image, text, image_id=torch.arange(len(text)))
    assert {key for key in outputs if key in (*MADE, "coder_noise_changed")} == keys
    create_loss(objective, model=model)(**outputs, output_dict=False).backward()
    assert Objective.from_dict(objective.to_dict()) == objective


def test_noise_at_the_output_is_of_the_fusions_words(make):  # noqa: F811
    from coder_plugin.objective import Objective

    objective = Objective.parse("ascl(similarity=fusion) + clip").with_options(
        {"asymmetry.noise_at": "output", "asymmetry.negatives": "shuffle"}
    )
    model = make("vit", objective).train()
    image, text = batch()
    start = 1  # as of CLIP's tokenizer: no word, and no position of the fusion in a tower that reads in one direction
    assert not (text == start).any()
    text[:, 0] = start
    model.word_embeddings._special = torch.tensor([start, EOT])
    outputs = model(image, text, text_positive=text.roll(1, 0))
    assert "coder_noised_features" not in outputs
    # a fusion that attends to a set of words sees no order
    close(outputs["coder_fusion_noised"], outputs["coder_fusion"])
    close(outputs["coder_fusion_noised_positive"], outputs["coder_fusion_positive"])
    assert not torch.allclose(outputs["coder_fusion"], outputs["coder_fusion_positive"])
    model.coder.heads["asymmetry"].noise = Zero()
    assert not torch.allclose(model(image, text)["coder_fusion_noised"], outputs["coder_fusion"])

    objective = Objective.parse("ascl").with_options({"asymmetry.noise_at": "output"})
    with pytest.raises(CoderError, match="noise_at=output noises the words that the fusion reads"):
        create_loss(objective, model=make("vit", objective))


def test_coca_is_refused_by_name(make):  # noqa: F811
    with pytest.raises(CoderError, match="test-coca.*generates captions"):
        make("coca", "ascl")
