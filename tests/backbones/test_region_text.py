"""Region models under every objective they serve: keys, score, gradients, padding, batches, refusals, exports."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin import create_loss, create_model
from coder_plugin.backbones.base import OUTPUT_KEYS
from coder_plugin.backbones.tokenizers import SPECIAL
from coder_plugin.errors import CoderError
from coder_plugin.heads.basic import Tokens
from coder_plugin.masked import unit_channels
from coder_plugin.pretrained.export import HEADS, export_model
from coder_plugin.tensors import cosine
from tests.few import few

REGIONS, CHANNELS, ROWS, DIM = 5, 6, 4, 16
WORDS = [*SPECIAL, "a", "red", "ball", "dog", "and", "tree", "of", "picture"]
TEXTS = ["a red ball", "dog and a tree and a ball", "a", "red dog"]
NAMES = ("region-bert", "region-bigru", "region-bert-camera", "region-bigru-vsrn")
ASCL = ["ascl", "ascl(similarity=fusion) + ascl", "triplet(similarity=fusion) + dcl"]
ANY = ["dcl", "triplet", "dcl + concept_dcl", "triplet + caption"]
RECIPES = {
    "region-bert": [*ANY, "coder", "clip", *ASCL],
    "region-bigru": [*ANY, "coder", "clip", "siglip", *ASCL],
    "region-bert-camera": [*ANY, *ASCL, "triplet + 0.01*view_diversity(reduction='sum')"],
    "region-bigru-vsrn": [*ANY, "coder", "clip", *ASCL],
}
CASES = [(name, objective) for name, recipes in RECIPES.items() for objective in recipes]
#: Each backbone and each kind of head; the rest is slow.
ORDINARY = {
    ("region-bert", "coder"),
    ("region-bert", "ascl"),
    ("region-bigru", "siglip"),
    ("region-bigru", "triplet + caption"),
    ("region-bert-camera", "ascl(similarity=fusion) + ascl"),
    ("region-bert-camera", "triplet + 0.01*view_diversity(reduction='sum')"),
    ("region-bigru-vsrn", "dcl + concept_dcl"),
}
SMALL = {
    "momentum.bank_size": 8,
    "prototypes.clusters": 4,
    "concepts.warmup": 0,
    "captioner.hidden": 8,
    "captioner.word_dim": 5,
}


def options(name: str, bert: str) -> dict[str, Any]:
    sides = {"text": bert} if "bert" in name else {"vocabulary": WORDS, "word_dim": 7}
    return {"region_dim": CHANNELS, "embed_dim": DIM, "context_length": 12, "heads": 4, "views": 3, **sides}


def recipe_of(text: str) -> Any:
    from coder_plugin.model import required_heads
    from coder_plugin.objective import Objective

    objective = Objective.parse(text)
    heads = required_heads(objective)
    return objective.with_options({key: value for key, value in SMALL.items() if key.split(".")[0] in heads})


def made(name: str, bert: str, objective: str = "dcl", **given: Any) -> Any:
    """A model whose zero-initialised layers were given values, as training would: a fresh VSRN's graph is the identity."""
    torch.manual_seed(0)
    model = create_model(name, loss=recipe_of(objective), **{**options(name, bert), **given})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.rpartition(".")[0].rpartition(".")[2]:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if "running" in key:
                buffer.add_(0.1 * torch.rand_like(buffer))
    model.coder.attach(model)
    return model


def images(
    lengths: tuple[int, ...] = (5, 2, 1, 4), *, width: int = REGIONS, fill: float = 0.0, boxes: bool = True
) -> dict:
    generator = torch.Generator().manual_seed(1)
    features = torch.full((len(lengths), width, CHANNELS), fill)
    corners = torch.full((len(lengths), width, 4), fill)
    for row, length in enumerate(lengths):
        generator.manual_seed(row)
        features[row, :length] = torch.randn(length, CHANNELS, generator=generator)
        corner = torch.rand(length, 2, generator=generator) / 2
        corners[row, :length] = torch.cat([corner, corner + 0.3], 1)
    image = {"features": features, "mask": torch.arange(width) < torch.tensor(lengths)[:, None]}
    return image | ({"boxes": corners, "aspect": torch.tensor([0.5, 1.0, 1.5, 2.0])[: len(lengths)]} if boxes else {})


def batch(model: Any) -> dict[str, Any]:
    return {"image": images(), "text": model.tokenizer()(TEXTS), "image_id": torch.arange(ROWS)}


def rows(image: dict[str, Tensor], which: slice) -> dict[str, Tensor]:
    return {key: value[which] for key, value in image.items()}


@pytest.fixture(scope="module")
def models(bert):
    return cache(lambda name, objective="dcl": made(name, bert, objective))


# keys, score, gradients


@pytest.mark.parametrize(
    ("name", "objective"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in ORDINARY)) for case in CASES]
)
def test_keys_losses_and_gradients(models, name, objective):
    model = models(name, objective).train()
    loss = create_loss(model.coder.objective, model=model)
    outputs = model(**batch(model))
    views = (3,) if "camera" in name else ()
    assert outputs["image_features"].shape == (ROWS, *views, DIM) and outputs["text_features"].shape == (ROWS, DIM)
    for key in ("image_features", "text_features"):
        torch.testing.assert_close(outputs[key].norm(dim=-1), torch.ones(outputs[key].shape[:-1]))
    assert all(key.startswith("coder_") for key in outputs.keys() - OUTPUT_KEYS)
    assert all(len(value) == ROWS for key, value in outputs.items() if key.startswith("coder_"))
    losses = loss(**outputs)
    assert len(losses) >= len(loss.objective.terms) and all(torch.isfinite(value) for value in losses.values())

    model.zero_grad()
    sum(losses.values()).backward()
    model.coder.discard()
    assert {key for key in dead(model) if not cancels(key)} == set()


def dead(model: Any) -> set[str]:
    """Parameters that are to be trained and got no gradient, or nothing but rounding."""
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    return {key for key, p in trained.items() if p.grad is None or not p.grad.abs().max() > 1e-9}


def cancels(key: str) -> bool:
    """Biases that the authors' models have and that nothing can depend on: a BatchNorm takes them away, or a softmax."""
    before_norm = ("mlp.hidden.bias", ".out.bias", "attention.value.bias")
    silent = ("self.key.bias", "pool.score.bias", "prototypes.classifier.weight")  # pgc speaks when it has its centres
    return key.endswith((*before_norm, *silent)) and not key.endswith("mlp.out.bias")


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_gives_the_backbones_keys_alone(models, name):
    model = models(name, "dcl + concept_dcl").eval()
    outputs = model(**batch(model))
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    assert model(image=images()).keys() == {"image_features", "logit_scale"}
    assert model(text=model.tokenizer()(TEXTS)).keys() == {"text_features", "logit_scale"}
    with torch.no_grad():
        image, text = images(), model.tokenizer()(TEXTS)
        assert torch.equal(model.encode_image(image, normalize=True), outputs["image_features"])
        assert torch.equal(model.encode_text(text, normalize=True), outputs["text_features"])
        assert model.encode_image(image).shape == model.encode_text(text).shape == (ROWS, DIM)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_product_of_the_retrieval_vectors_is_the_score(models, name):
    plain, blended = models(name, "dcl").eval(), models(name, "dcl + concept_dcl").eval()
    for model in (plain, blended):
        image, text = model.embed_image(images()), model.embed_text(model.tokenizer()(TEXTS))
        outputs = model(**batch(model))
        instance = torch.einsum(
            "nvd,td->ntv", outputs["image_features"].reshape(ROWS, -1, DIM), outputs["text_features"]
        )
        expected = instance.amax(-1)
        if model is blended:
            head = model.coder.heads["concepts"]
            known = {**model.image_side(images()), **model.text_side(model.tokenizer()(TEXTS))}
            concepts = head(known["image_pooled"], known["text_tokens"], known["text_mask"])
            level = concepts["coder_image_concepts"] @ concepts["coder_text_concepts"].T
            expected = 0.9 * expected + 0.1 * level
            torch.testing.assert_close(image.norm(dim=-1), torch.ones(image.shape[:-1]))
        assert image.ndim == (3 if "camera" in name else 2)
        torch.testing.assert_close(cosine(image, text), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_locals_stand_before_the_context_stage_and_contexts_after_it(models, name):
    model = models(name).eval()
    widths = model.info()
    for side, known in (("image", model.describe_image(images())), ("text", model.describe_text(model.tokenizer()(TEXTS)))):
        assert known.keys() - {"image_views"} <= {f"{side}_features"} | model.intermediate_keys
        contexts, mask = known[f"{side}_contexts"], known[f"{side}_mask"]
        pooled = contexts  # what the tower pools
        if side == "image" and model.options.context != "none":
            pooled = unit_channels(contexts, mask)
        elif side == "text" and model.options.text_context != "none":
            stage = model.text.context
            pooled = contexts + stage.norm(stage.out(stage.hidden(contexts).relu()), mask)
        assert (known[f"{side}_tokens"] is contexts) == (pooled is contexts)
        torch.testing.assert_close(known[f"{side}_tokens"][mask], pooled[mask])
        for stage in ("locals", "contexts"):
            assert known[f"{side}_{stage}"].shape[:2] == known[f"{side}_mask"].shape
            assert known[f"{side}_{stage}"].shape[2] == getattr(widths, f"{side}_{stage}")


@torch.no_grad()
def test_normalised_locals_are_what_the_context_stage_reads(bert, tmp_path):
    """As SelfAlign's authors have them: CAMERA's regions and words, whose attention reads them too, and VSRN's regions."""
    for name in ("region-bert-camera", "region-bigru-vsrn"):
        plain = made(name, bert).eval()
        model = made(name, bert, normalise_locals=True).eval()
        model.load_state_dict(plain.state_dict())
        text = model.tokenizer()(TEXTS)
        known, other = ({**each.describe_image(images()), **each.describe_text(text)} for each in (model, plain))
        mask = known["image_mask"]
        energy = known["image_locals"].where(mask[..., None], torch.zeros(())).square().sum(1)
        torch.testing.assert_close(energy, torch.ones_like(energy))
        torch.testing.assert_close(known["image_locals"][mask], unit_channels(other["image_locals"], mask)[mask])
        assert torch.equal(known["image_contexts"], other["image_contexts"])  # the graph and the attention read them anyway
        if name == "region-bert-camera":
            mask = known["text_mask"]
            torch.testing.assert_close(known["text_locals"][mask], unit_channels(other["text_locals"], mask)[mask])
            attended = model.text.context.attention(known["text_locals"], mask)
            torch.testing.assert_close(known["text_contexts"][mask], attended[mask])
            assert not torch.allclose(known["text_features"], other["text_features"], atol=1e-3)
        else:
            assert torch.equal(known["text_locals"], other["text_locals"])
        opened = create_model(str(export_model(model, tmp_path / name).parent), loss="dcl")
        assert opened.options.normalise_locals
    for given in ({}, {"context": "vsrn", "image_pooling": "gru", "batch_norm": True}):
        with pytest.raises(CoderError, match="normalise_locals changes nothing here: it needs context=camera"):
            made("region-bert", bert, normalise_locals=True, **given)


@torch.no_grad()
def test_projected_words_are_what_the_gru_reads(bert):
    """SelfAlign's VSRN: locals of both sides in D channels, before the graph and before the GRU."""
    model = made("region-bigru-vsrn", bert, word_projection=True).eval()
    ids, text = model.tokenizer()(TEXTS), model.text
    known = model.describe_text(ids)
    words = text.project(text.embed(ids[:, : known["text_locals"].shape[1]]))
    torch.testing.assert_close(known["text_locals"], words)
    assert words.shape[2] == DIM == model.info().text_locals == text.rnn.input_size
    one = text.rnn(words[2:3, :3])[0].unflatten(-1, (2, -1)).mean(-2)  # the text of one word, its start and end
    torch.testing.assert_close(known["text_contexts"][2:3, :3], one)
    plain = made("region-bigru-vsrn", bert)
    assert plain.info().text_locals == 7 and "text.project.weight" not in plain.state_dict()
    with pytest.raises(CoderError, match="word_projection works with bigru only"):
        made("region-bert", bert, word_projection=True)


def test_an_export_keeps_the_word_projection(tmp_path, bert):
    model = made("region-bigru", bert, word_projection=True)
    weights = export_model(model, tmp_path)
    opened = create_model(str(tmp_path), loss="dcl", pretrained=str(weights))
    assert all(torch.equal(*pair) for pair in zip(embeddings(opened), embeddings(model), strict=True))


# padding and batches


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in NAMES), ("region-bert-camera", False)])
@torch.no_grad()
def test_padding_means_nothing(models, name, training):
    """Neither how much there is of it nor what stands there: of regions NaN, of texts none."""
    model = models(name, "dcl + concept_dcl").train(training)
    text = model.tokenizer()(TEXTS)
    longer = torch.nn.functional.pad(text, (0, 9), value=model.tokenizer().pad)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = [
        model(image=image, text=ids) for image, ids in ((images(), text), (images(width=9, fill=torch.nan), longer))
    ]
    model.load_state_dict(state)
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5, msg=key)
    embedded = [model.embed_image(image) for image in (images(), images(width=9, fill=torch.inf))]
    model.load_state_dict(state)
    torch.testing.assert_close(*embedded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_gets_and_gives_no_gradient(models, name):
    model = models(name, "dcl").train()
    image = images(fill=torch.nan)
    image["features"].requires_grad_()
    outputs = model(image=image, text=model.tokenizer()(TEXTS))
    sum((value * torch.arange(value.shape[-1])).sum() for value in outputs.values() if value.ndim > 1).backward()
    gradient = image["features"].grad
    assert (gradient[~image["mask"]] == 0).all() and torch.isfinite(gradient).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other_in_evaluation(models, name):
    model = models(name, "dcl + concept_dcl").eval()
    image, text = images(), model.tokenizer()(TEXTS)
    together = model.embed_image(image), model.embed_text(text)
    for row in range(ROWS):
        one = slice(row, row + 1)
        torch.testing.assert_close(model.embed_image(rows(image, one)), together[0][one], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.embed_text(text[one]), together[1][one], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_padding_token_inside_a_text_is_a_word(models, name):
    """Word dropout may draw it; the text does not end there."""
    model = models(name).eval()
    text = model.tokenizer()(["a red ball", "a dog"])
    text[0, 2] = model.tokenizer().pad
    known = model.text_side(text)
    assert known["text_mask"].tolist() == [[True] * 5, [True] * 4 + [False]]
    other = text.clone()
    other[0, 3] = text[1, 2]
    assert not torch.allclose(model.embed_text(other)[0], model.embed_text(text)[0])
    nothing = torch.full((2, 12), model.tokenizer().pad)  # not even a start: still finite
    assert torch.isfinite(model.embed_text(nothing)).all()


@torch.no_grad()
def test_camera_reads_boxes_and_their_aspect(models, bert):
    model = models("region-bert-camera").eval()
    image = images()
    moved = {**image, "boxes": image["boxes"] * 0.5}
    wider = {**image, "aspect": image["aspect"] * 3}
    square = {key: value for key, value in image.items() if key != "aspect"}
    first = model.embed_image(image)
    for other in (moved, wider, square):
        assert not torch.allclose(model.embed_image(other), first, atol=1e-6)
    ones = {**image, "aspect": torch.ones(ROWS)}
    assert torch.equal(model.embed_image(square), model.embed_image(ones))
    with pytest.raises(CoderError, match="region-bert-camera needs the boxes of regions.*boxes=false"):
        model.embed_image(images(boxes=False))
    blind = made("region-bert-camera", bert, boxes=False).eval()
    assert blind.visual.attention.position is None
    assert torch.equal(blind.embed_image(image), blind.embed_image(images(boxes=False)))


# what is refused


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.randn(ROWS, 3, 8, 8), "region-bert reads regions: image must be a dict with features"),
        ({"features": torch.randn(ROWS, REGIONS, CHANNELS)}, "region-bert reads regions"),
        (
            {"features": torch.randn(ROWS, 2, 9), "mask": torch.ones(ROWS, 2, dtype=torch.bool)},
            "of 6 channels, these have 9",
        ),
    ],
)
def test_other_images_are_refused(models, image, message):
    model = models("region-bert")
    with pytest.raises(CoderError, match=message):
        model(image=image, text=model.tokenizer()(TEXTS))
    with pytest.raises(CoderError, match=message):
        model.embed_image(image)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("region-bert", {"embed_dims": 8}, "region-bert has no option embed_dims; it has: region_dim, embed_dim"),
        ("region-bert", {"embed_dim": 0}, "embed_dim must be 1 or more, got 0"),
        ("region-bert", {"region_dim": -3}, "region_dim must be 1 or more, got -3"),
        ("region-bert", {"embed_dim": "big"}, "embed_dim must be int, got 'big'"),
        ("region-bert", {"embed_dim": 8.5}, "embed_dim must be int, got 8.5"),
        ("region-bert", {"embed_dim": None}, "embed_dim must be int, got None"),
        ("region-bert", {"mlp": "no"}, "mlp must be bool, got 'no'"),
        ("region-bert", {"heads": True}, "heads must be int, got True"),
        ("region-bert", {"context": "graph"}, "context must be one of none, camera, vsrn, got 'graph'"),
        ("region-bert", {"image_pooling": "avg"}, "image_pooling must be one of gpo, mean, max, views, gru, got 'avg'"),
        ("region-bert", {"text_pooling": "cls"}, "text_pooling must be one of gpo, mean, max, last, got 'cls'"),
        ("region-bert", {"gpo_decoder": "rnn"}, "gpo_decoder must be one of linear, mlp, got 'rnn'"),
        ("region-bert", {"text_pooling": "last"}, "text pooling 'last' needs a recurrent encoder"),
        ("region-bert", {"encoder": "lstm"}, "encoder must be one of bert, bigru, got 'lstm'"),
        ("region-bert", {"text_context": "vsrn"}, "text_context must be one of none, camera, got 'vsrn'"),
        ("region-bert", {"context": "camera", "heads": 3}, "heads must divide the dimension 16, got 3"),
        ("region-bert", {"image_pooling": "views", "views": 0}, "views must be 1 or more, got 0"),
        ("region-bert", {"context_length": 2}, "context length must be >= 3"),
        ("region-bert", {"text": "nowhere/no-such-bert"}, "text encoder 'nowhere/no-such-bert' cannot be loaded"),
        ("region-bigru", {"text_context": "camera"}, "text_context camera works with BERT only"),
        ("region-bigru", {"text_layers": 0}, "text_layers must be 1 or more"),
        ("region-bigru", {"vocabulary": None}, "a BiGRU needs a vocabulary: --model-kwargs vocabulary=FILE"),
        ("region-bigru", {"vocabulary": "none.json"}, "vocabulary none.json cannot be read"),
        ("region-bigru", {"vocabulary": ["a", "dog"]}, "a vocabulary must begin with <pad>"),
        ("region-bigru", {"vocabulary": [*SPECIAL, 5]}, "a vocabulary is a list of words, this one holds 5"),
    ],
)
def test_options_are_checked(bert, name, given, message):
    with pytest.raises(CoderError, match=message) as caught:
        create_model(name, loss="dcl", **{**options(name, bert), **given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["region-bert", "region-bigru"])
def test_the_decoder_of_gpo_is_an_option_of_both_towers(name, bert):
    """Their features change with the first layer of the perceptron, and the export has it."""
    for decoder, layers in (("linear", 0), ("mlp", 2)):
        model = made(name, bert, gpo_decoder=decoder).eval()
        pools = {"image": model.visual.pool, "text": model.text.pool}
        assert [sum(isinstance(m, torch.nn.Linear) for m in pool.score.children()) for pool in pools.values()] == [layers] * 2
        assert model.config()["options"]["gpo_decoder"] == decoder
        if decoder == "mlp":
            inputs = {"image": images(), "text": model.tokenizer()(TEXTS)}
            for side, pool in pools.items():
                embed = getattr(model, f"embed_{side}")
                before = embed(inputs[side])
                torch.nn.init.normal_(pool.score[0].weight, std=3.0)
                # a row of one token is that token, whatever its weight
                changed = (embed(inputs[side]) - before).abs().amax(1) > 1e-4
                assert changed.any(), side


def test_siglip_adds_a_bias_where_there_is_none(bert, tmp_path):
    import open_clip

    plain, model = made("region-bert", bert, "clip"), made("region-bert", bert, "siglip").train()
    assert plain.logit_bias is None and "logit_bias" not in plain(**batch(plain))
    assert model.logit_bias.item() == -10 and model.logit_scale.item() == pytest.approx(math.log(10))
    assert set(model.state_dict()) - set(plain.state_dict()) == {"logit_bias"}
    outputs = model(**batch(model))
    losses = create_loss("siglip", model=model)(**outputs)
    keys = ("image_features", "text_features", "logit_scale", "logit_bias")
    torch.testing.assert_close(losses["siglip_loss"], open_clip.loss.SigLipLoss()(*(outputs[key] for key in keys)))
    losses["siglip_loss"].backward()
    assert model.logit_bias.grad is not None and model.logit_scale.grad is not None

    with torch.no_grad():
        model.logit_bias.fill_(-7)
    weights = str(export_model(model, tmp_path / "siglip"))
    again = create_model(str(tmp_path / "siglip"), loss="dcl", pretrained=weights)
    assert again.logit_bias.item() == -7 and not again.logit_bias.requires_grad
    weights = str(export_model(plain, tmp_path / "clip"))
    tuned = create_model(str(tmp_path / "clip"), loss="siglip", pretrained=weights)
    assert tuned.logit_bias.item() == -10 and tuned.logit_bias.requires_grad
    assert torch.equal(tuned.logit_scale, plain.logit_scale)


def test_a_backbone_without_a_bias_cannot_serve_siglip(bert, monkeypatch):
    from coder_plugin.backbones.region_text import Preset

    monkeypatch.setattr(Preset, "logit_bias", False)
    with pytest.raises(CoderError, match="loss 'siglip' requires 'logit_bias', which neither this model"):
        create_model("region-bert", loss="siglip", **options("region-bert", bert))


# frozen and adapted text


def dropout_bert(folder: Path) -> str:
    from tests.backbones import tiny_bert

    return tiny_bert.make(folder, dropout=0.5)


def test_a_frozen_bert_is_in_evaluation_mode_and_gets_no_gradient(tmp_path):
    """From the first forward, whatever mode transformers loads in, and after later calls of train()."""
    folder = dropout_bert(tmp_path)
    for given in ({}, {"pretrained_text": False}):
        model = create_model("region-bert-camera", loss="dcl", **{**options("region-bert-camera", folder), **given})
        assert model.training and model.text.proj.training and not model.text.transformer.training
        text = model.tokenizer()(TEXTS)
        for _ in range(2):
            first, second = (model.text.words(text, model.text.mask(text))[1] for _ in range(2))
            assert torch.equal(first, second) and first.requires_grad
            model.eval().train()
        first.sum().backward()
        assert all(p.grad is None and not p.requires_grad for p in model.text.transformer.parameters())
        assert model.text.proj.weight.grad is not None


def test_a_trained_bert_is_in_training_mode_from_the_start(tmp_path):
    model = create_model("region-bert", loss="dcl", **options("region-bert", dropout_bert(tmp_path)))
    assert model.text.transformer.training
    text = model.tokenizer()(TEXTS)
    assert not torch.equal(model.encode_text(text), model.encode_text(text))
    model.eval()
    assert torch.equal(model.encode_text(text), model.encode_text(text))
    model.train().lock_text_tower()
    assert not model.text.transformer.training and torch.equal(model.encode_text(text), model.encode_text(text))


@pytest.mark.parametrize(("layers", "norms"), [(0, True), (2, True), (1, False)])
def test_locking_leaves_the_last_layers_and_what_is_new(models, bert, layers, norms):
    model = made("region-bert", bert)
    model.lock_text_tower(unlocked_layers=layers, freeze_layer_norm=norms)
    for key, parameter in model.text.named_parameters():
        inside = key.startswith("transformer.")
        last = any(f"layer.{number}." in key for number in range(2 - layers, 2))
        assert parameter.requires_grad == (not inside or last or (not norms and "LayerNorm" in key)), key
    model.train()(image=images(), text=model.tokenizer()(TEXTS))["text_features"][:, 0].sum().backward()
    locked = [p for p in model.text.transformer.parameters() if not p.requires_grad]
    assert locked and all(p.grad is None for p in locked)
    assert all(p.grad is not None for p in model.text.parameters() if p.requires_grad)


def test_locking_a_bigru_or_the_image(bert):
    model = made("region-bigru", bert)
    model.lock_text_tower()
    assert not any(p.requires_grad for p in model.text.parameters()) and model.visual.fc.weight.requires_grad
    with pytest.raises(CoderError, match="has no layers to unlock"):
        model.lock_text_tower(unlocked_layers=1)
    model.lock_image_tower()
    assert not any(p.requires_grad for p in model.visual.parameters())
    with pytest.raises(CoderError, match="no layer groups to unlock"):
        model.lock_image_tower(unlocked_groups=1)


def test_checkpointing_changes_no_gradient(bert):
    gradients = []
    for enable in (False, True):
        model = made("region-bert", bert).train()
        model.set_grad_checkpointing(enable)
        model(image=images(), text=model.tokenizer()(TEXTS))["text_features"][:, 0].sum().backward()
        gradients.append({key: p.grad for key, p in model.text.named_parameters()})
    assert all(torch.allclose(gradients[0][key], gradients[1][key], atol=1e-6) for key in gradients[0])


@pytest.mark.parametrize("name", ["region-bert", "region-bigru-vsrn"])
def test_momentum_copies_follow(models, bert, name):
    """Keys are the copy's embeddings of the dict of regions; after a step it has moved by 1 - m of the way."""
    model = made(name, bert, "dcl + m_dcl").train()
    towers = model.coder.heads["momentum"].towers
    outputs = model(**batch(model))
    model.eval()
    with torch.no_grad():
        expected = model.embed_image(images()), model.embed_text(model.tokenizer()(TEXTS))
    # the copy has its statistics from before this forward: only what they do not touch agrees exactly
    torch.testing.assert_close(outputs["coder_text_keys"], expected[1], rtol=1e-4, atol=1e-5)
    assert outputs["coder_image_keys"].shape == expected[0].shape and not outputs["coder_image_keys"].requires_grad
    before = {key: p.clone() for key, p in towers.model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    model.coder.post_step()
    online = dict(model.named_parameters())
    moved = [(key, p) for key, p in towers.model.named_parameters() if online[key].requires_grad]
    assert moved and all(torch.allclose(p, before[key] + 0.005, atol=1e-5) for key, p in moved)
    with torch.no_grad():
        assert torch.isfinite(towers(images(), model.tokenizer()(TEXTS))[0]).all()


def test_momentum_towers_in_training_mode_have_berts_dropout(tmp_path):
    """A copy has no gradient either, but was not frozen."""
    objective = "dcl + m_dcl"
    for name, mode, same in (("train", "train", False), ("eval", "eval", True)):
        given = options("region-bert", dropout_bert(tmp_path / name))
        model = create_model("region-bert", loss=recipe_of(objective).with_options({"momentum.mode": mode}), **given)
        found = [model(**batch(model))["coder_text_keys"] for _ in range(2)]
        assert torch.equal(*found) == same


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tokens_leave_the_model_at_the_inputs_length(models, name):
    """A tower runs over the longest text of its batch; micro-batches and ranks are joined at one length."""
    model = models(name).eval()
    text = torch.nn.functional.pad(model.tokenizer()(TEXTS), (0, 3), value=model.tokenizer().pad)
    known = {**model.image_side(images()), **model.text_side(text), "text": text}
    assert known["text_tokens"].shape[1] < text.shape[1] == 15
    head = Tokens(model.info())
    found = head(**{key: known[key] for key in head.requires})
    assert found["coder_text_tokens"].shape == (ROWS, 15, DIM) and found["coder_image_tokens"].shape == (ROWS, REGIONS, DIM)
    expected = model.text.mask(text)
    assert torch.equal(found["coder_text_mask"], expected) and torch.equal(found["coder_image_mask"], images()["mask"])
    torch.testing.assert_close(found["coder_text_tokens"][expected], known["text_tokens"][known["text_mask"]])


# exports


def embeddings(model: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return model.eval().embed_image(images()), model.embed_text(model.tokenizer()(TEXTS))


@pytest.mark.parametrize("name", few(NAMES))
@pytest.mark.parametrize("by", few(["folder", "json", "local-dir"]))
def test_an_export_is_the_model_to_the_bit(tmp_path, bert, name, by):
    own_bert = tmp_path / "bert"
    shutil.copytree(bert, own_bert)
    model = made(name, str(own_bert))
    expected = embeddings(model)
    weights = export_model(model, tmp_path / "made" / "here")
    assert not weights.with_name(HEADS).exists()  # dcl: the score is the towers' own
    shutil.rmtree(own_bert)
    folder = tmp_path / "moved"
    shutil.move(weights.parent, folder)
    names = {"folder": str(folder), "json": str(folder / "coder_model.json"), "local-dir": f"local-dir:{folder}"}
    opened = create_model(names[by], loss="dcl", pretrained=str(folder / weights.name))
    assert opened.name == name and all(torch.equal(*pair) for pair in zip(embeddings(opened), expected, strict=True))
    texts = ["a red xylophone", "dog", ""]
    assert torch.equal(opened.tokenizer()(texts), model.tokenizer()(texts))
    other = create_model(names[by], loss="dcl")  # without weights: the same shape, fresh
    assert other.state_dict().keys() == opened.state_dict().keys()
    again = export_model(opened, tmp_path / "again")  # an export of an export
    opened = create_model(str(again.parent), loss="dcl", pretrained=str(again))
    assert all(torch.equal(*pair) for pair in zip(embeddings(opened), expected, strict=True))


def test_what_is_no_export(tmp_path, bert):
    weights = export_model(made("region-bigru", bert), tmp_path)
    with pytest.raises(CoderError, match="weights nowhere.safetensors do not exist"):
        create_model(str(tmp_path), loss="dcl", pretrained="nowhere.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CoderError, match="coder_model.safetensors has 100 bytes: is it cut off"):
        create_model(str(tmp_path), loss="dcl", pretrained=str(weights))
    path = tmp_path / "coder_model.json"
    made_of = json.loads(path.read_text())
    path.write_text(json.dumps({**made_of, "backbone": "region-bort"}))
    with pytest.raises(CoderError, match="region-bort"):
        create_model(str(path), loss="dcl")
    path.write_text(json.dumps({**made_of, "options": {"depth": 3}}))
    with pytest.raises(CoderError, match="has no option depth"):
        create_model(str(path), loss="dcl")
    path.write_text("{")
    with pytest.raises(CoderError, match="coder_model.json cannot be read"):
        create_model(str(path), loss="dcl")
