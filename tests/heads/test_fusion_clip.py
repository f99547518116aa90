"""The fusion on CLIP towers: tokens in the joint space, and no constant start token."""

from __future__ import annotations

import pytest
import torch

from tests.references import fusion as reference
from tests.test_model import EOT, batch, configs, make, text_tokens, vit_tokens  # noqa: F401


def test_a_clips_fusion_compares_patches_and_words_in_the_joint_space(make):  # noqa: F811
    model = make("vit", "ascl(similarity=fusion) + ascl").eval()
    head, (image, text) = model.coder.heads["fusion"], batch()
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {"image_to_text", "text_to_image"}  # nothing else
    with torch.no_grad():
        images, texts = head.image_item(model.describe_image(image)), head.text_item(model.describe_text(text))
        scores = head.scorer(images, texts).all_pairs()
        patches = vit_tokens(model, image) @ model.visual.proj
        words = text_tokens(model, text) @ model.text_projection
    torch.testing.assert_close(images["tokens"], patches)
    torch.testing.assert_close(texts["tokens"], words)
    eye = {name: torch.eye(patches.shape[2]) for name in ("query", "key", "output", "common")}
    for j, row in enumerate(text.tolist()):
        valid = list(range(1, row.index(EOT) + 1))  # the causal tower's start is the same in every text
        assert texts["mask"][j].nonzero().flatten().tolist() == valid
        for i in range(len(image)):
            want = reference.score(patches[i], words[j, valid], eye, eye, heads=4, local_weight=0.6)
            torch.testing.assert_close(scores[i, j], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "timm-convnext", "siglip"])
def test_gradients_of_the_fused_score_reach_the_towers_projections(make, name):  # noqa: F811
    model = make(name, "triplet(similarity=fusion)").train()
    image, text = batch(name)
    outputs = model(image, text, image_id=torch.arange(len(text)))
    outputs["coder_fusion"].diagonal().sum().backward()
    text_tower = getattr(model, "text", model)
    projection = text_tower.text_projection
    weight = projection.weight if isinstance(projection, torch.nn.Module) else projection
    assert weight.grad is not None and weight.grad.abs().sum() > 0
