"""Re-ranking by MaxSim: which tokens it reads, what it keeps of them, and its scores of shortlists and of all pairs."""

from __future__ import annotations

import open_clip
import pytest
import torch
import torch.nn.functional as F

import coder_plugin
from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.maxsim import MaxSim, maxsim
from coder_plugin.heads.rerankers import make_reranker, parse_reranker, required_keys
from coder_plugin.pretrained.encode import _to_half

SIDES = ("image", "text")
SIZES = BackboneInfo(embed_dim=8, image_contexts=8, text_contexts=8)


def items(images: int = 7, texts: int = 9, *, seed: int = 0):
    """What a head reads: patches without padding, words of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 6, (texts, 1), generator=generator)
    features = {
        "image_contexts": torch.randn(images, 4, 8, generator=generator),
        "image_context_mask": torch.ones(images, 4, dtype=torch.bool),
        "text_contexts": torch.randn(texts, 11, 8, generator=generator),
        "text_context_mask": (torch.arange(11) > 0) & (torch.arange(11) <= length),  # the start is left out
    }
    whole = {
        f"{side}_features": F.normalize(torch.randn(count, 8, generator=generator))
        for side, count in (("image", images), ("text", texts))
    }
    return features, whole


@pytest.mark.parametrize("direction", ["text", "image", "both"])
@pytest.mark.parametrize("memory, local_weight", [(0, 1.0), (1 << 30, 0.6)])
def test_scores_of_shortlists_and_of_all_pairs(direction, memory, local_weight):
    features, whole = items()
    head = MaxSim(SIZES, direction=direction, local_weight=local_weight)
    features |= whole
    images, texts = head.image_item(features), head.text_item(features)
    assert texts["tokens"].shape[1] == texts["mask"].shape[1] <= 6, "padding after the longest text is cut"
    cosines = whole["image_features"] @ whole["text_features"].T
    tokens = [features[f"{side}_context{part}"] for side in SIDES for part in ("s", "_mask")]
    want = local_weight * maxsim(*tokens, direction=direction) + (1 - local_weight) * cosines
    torch.testing.assert_close(head.scorer(images, texts, memory=memory).all_pairs(), want)
    halves = head.scorer(_to_half(images), _to_half(texts), memory=memory)
    torch.testing.assert_close(halves.all_pairs(), want, atol=1e-3, rtol=1e-3)
    image_index, text_index = torch.tensor([[0, 3], [6, 6], [1, 2]]), torch.tensor([[8], [0], [4]])
    pairs = halves(image_index, text_index)
    torch.testing.assert_close(pairs[:, :, 0], want[image_index, text_index], atol=1e-3, rtol=1e-3)


def test_a_clip_gives_its_words_and_patches():
    """Each token through the tower's own projection; neither the start of a text nor its padding counts."""
    torch.manual_seed(0)
    model = coder_plugin.create_model("coder-tiny", loss="clip", return_intermediates=required_keys("maxsim")).eval()
    head = make_reranker("maxsim", model.coder.backbone)
    ids = open_clip.get_tokenizer("ViT-B-32", context_length=model.context_length)(["a red circle", "two"])
    with torch.no_grad():
        features = model.describe_text(ids)
        images = head.image_item(model.describe_image(torch.rand(1, 3, 64, 64)))
        texts = head.text_item(features)
    assert texts["mask"].sum(1).tolist() == [4, 2]  # words and the end, not the start
    end = features["text_features"][0]  # CLIP's feature of a text is its projected end token
    torch.testing.assert_close(texts["tokens"][0, 4], end, atol=1e-5, rtol=1e-4)
    assert images["mask"].all() and images["tokens"].shape[2] == texts["tokens"].shape[2] == 128
    torch.testing.assert_close(images["tokens"].norm(dim=-1), torch.ones(images["mask"].shape))


@pytest.mark.parametrize(
    "text, message",
    [
        ("maxsin", "--reranker 'maxsin' is unknown; did you mean 'maxsim'"),
        ("maxsim + maxsim", "expected one re-ranker"),
        ("2*maxsim", "expected one re-ranker"),
        ("maxsim(", "is missing"),
        ("maxsim(direction=up)", r"--reranker maxsim\(direction=up\): .* must be text or image or both"),
        ("maxsim(k=3)", "'maxsim' has no option 'k'; it has: direction, reduction, local_weight"),
        ("maxsim(local_weight=2)", r"--reranker maxsim\(local_weight=2\): local_weight must be in \[0, 1\], got 2"),
    ],
)
def test_slips_are_named(text, message):
    with pytest.raises(CoderError, match=message):
        make_reranker(text, SIZES)


def test_models_that_it_cannot_read():
    with pytest.raises(CoderError, match="--reranker maxsim: the model gives no tokens of one of its towers"):
        make_reranker("maxsim", BackboneInfo(embed_dim=8, image_contexts=8))
    with pytest.raises(CoderError, match="images have 16 channels and those of its texts 8: they cannot be compared"):
        make_reranker("maxsim", BackboneInfo(embed_dim=8, image_contexts=16, text_contexts=8))


def test_a_class_that_does_not_rerank_is_refused():
    registry.register("rerankers", "plain", BackboneInfo)
    try:
        assert parse_reranker("plain").name == "plain"
        with pytest.raises(CoderError, match="is not a subclass of coder_plugin.heads.capabilities.Reranks"):
            make_reranker("plain", SIZES)
    finally:
        registry.unregister("rerankers", "plain")
