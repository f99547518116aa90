"""transformers' CLIPModel and SiglipModel as backbones: features, tokens, files, locks."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from coder_plugin import create_loss, create_model
from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.model import add_heads
from coder_plugin.pretrained.build import make_transform
from coder_plugin.training.optim import after_tower, in_text_encoder, layer_factors
from coder_plugin.training.prepare import add_lora
from tests.backbones import tiny_clip

TEXTS = ["a red circle above a zebra", "two dogs", "", " ".join(["small"] * 40)]
INTERMEDIATES = "image_tokens image_locals image_contexts image_pooled text_tokens text_locals text_contexts".split()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("transformers")
    return {"clip": tiny_clip.clip(root / "clip"), "siglip": tiny_clip.siglip(root / "siglip")}


@pytest.fixture(params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, folders: dict[str, str]) -> str:
    return folders[request.param]


@pytest.fixture
def altered(folders: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """A copy of the CLIP's folder with other values in one of its files."""

    def alter(file: str = "config.json", tower: str | None = None, **values: Any) -> str:
        copied = shutil.copytree(folders["clip"], tmp_path / "altered")
        content = json.loads((copied / file).read_text())
        changed = content if tower is None else content[tower]
        changed.update(values)
        (copied / file).write_text(json.dumps(content))
        return str(copied)

    return alter


def pictures(count: int = 3) -> Tensor:
    return torch.randn(count, 3, tiny_clip.IMAGE_SIZE, tiny_clip.IMAGE_SIZE, generator=torch.Generator().manual_seed(1))


def test_features_are_those_of_transformers(folder: str) -> None:
    own = transformers.AutoModel.from_pretrained(folder).eval()
    model = create_model(folder, loss="clip + dcl")
    assert isinstance(model, type(own)) and model.training and model.coder_name == folder
    processor = transformers.AutoProcessor.from_pretrained(folder)
    ids, images = model.tokenizer()(TEXTS), pictures(len(TEXTS))
    encoded = processor(text=TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    assert ids.equal(encoded["input_ids"]) and ids.shape == (4, model.context_length)
    plain = {name: value for name, value in model.state_dict().items() if not name.startswith("coder.")}
    assert plain.keys() == own.state_dict().keys()
    with torch.no_grad():
        expected = own(pixel_values=images, **encoded)
        outputs = model.eval()(images, ids)
        again = model(pixel_values=images, **encoded)
        embedded = model.embed_image(images), model.embed_text(ids)
    torch.testing.assert_close(outputs["image_features"], expected.image_embeds)
    torch.testing.assert_close(outputs["text_features"], expected.text_embeds)
    torch.testing.assert_close(embedded, (expected.image_embeds, expected.text_embeds))
    assert again.logits_per_image.equal(expected.logits_per_image)  # transformers' keywords: its own output
    logits = outputs["logit_scale"] * outputs["image_features"] @ outputs["text_features"].T
    torch.testing.assert_close(logits + outputs.get("logit_bias", 0), expected.logits_per_image)
    assert outputs["logit_scale"].ndim == outputs.get("logit_bias", outputs["logit_scale"]).ndim == 0


def test_pictures_are_prepared_as_its_processor_says(folder: str) -> None:
    """Torchvision's resizing of uint8 and PIL's differ by a level or two of 255."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    picture = Image.fromarray(pixels).resize((90, 60), Image.Resampling.BICUBIC)
    own = transformers.AutoProcessor.from_pretrained(folder)(images=picture, return_tensors="pt")["pixel_values"][0]
    ours = make_transform(create_model(folder, loss="clip"))(picture)
    assert ours.shape == own.shape and (ours - own).abs().max() < 2.5 / 255 / 0.26 and (ours - own).abs().mean() < 0.01
    assert own.std() > 0.3


def test_training_mode_takes_names_of_both_libraries(folder: str) -> None:
    model = create_model(folder, loss="clip").train()
    ids, images = model.tokenizer()(TEXTS), pictures(len(TEXTS))
    ours = model(images, ids, image_id=torch.arange(4))
    theirs = model(pixel_values=images, input_ids=ids, attention_mask=torch.ones_like(ids), image_id=torch.arange(4))
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    with pytest.raises(TypeError, match="return_loss cannot be given"):
        model(images, ids, return_loss=True)
    masked = {"pixel_values": images, "input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    if model.is_clip:  # a word attends only to words before it, so what follows the end changes nothing
        assert model(**masked)["text_features"].equal(ours["text_features"])
    else:
        with pytest.raises(CoderError, match="without a mask"):
            model(**masked)


def test_tokens_locals_and_contexts(folder: str) -> None:
    """Of each position alone, through the tower's norm and projection: the position that the tower pools gives its feature."""
    model = create_model(folder, loss="clip", return_intermediates=INTERMEDIATES).eval()
    ids, images = model.tokenizer()(TEXTS), pictures(2)
    with torch.no_grad():
        image, text = model.describe_image(images), model.describe_text(ids)
        own = model.vision_model(images, output_hidden_states=True)
        own_text = model.text_model(ids, output_hidden_states=True)
        feature = model.encode_text(ids)
    first = 1 if model.is_clip else 0
    assert image["image_tokens"].shape == image["image_locals"].shape[:2] + (32,) == (2, 16, 32)
    assert {features.shape[2] for features in (image["image_locals"], image["image_contexts"], text["text_locals"])} == {
        model.output_dim
    }
    torch.testing.assert_close(image["image_pooled"], model.encode_image(images))
    norm, last = model.vision_model.post_layernorm, own.hidden_states[-1][:, first:]
    torch.testing.assert_close(image["image_tokens"], norm(last))
    torch.testing.assert_close(text["text_tokens"], own_text.last_hidden_state)
    for name, states in (("image_locals", own.hidden_states[-2]), ("image_contexts", own.hidden_states[-1])):
        tokens = norm(states[:, first:])
        if model.is_clip:
            expected = model.visual_projection(tokens)
        else:  # each patch as the only one of a picture
            expected = model.vision_model.head(tokens.flatten(0, 1)[:, None]).unflatten(0, tokens.shape[:2])
        torch.testing.assert_close(image[name], expected)
    norm = model.text_model.final_layer_norm
    head = model.text_projection if model.is_clip else model.text_model.head
    torch.testing.assert_close(text["text_locals"], head(norm(own_text.hidden_states[-2])))
    end = ids.eq(model.processor.tokenizer.eos_token_id).int().argmax(1) if model.is_clip else torch.full((4,), 15)
    torch.testing.assert_close(text["text_contexts"][torch.arange(4), end], feature)
    lengths = [len(each) for each in model.processor.tokenizer(TEXTS, truncation=True)["input_ids"]]
    assert text["text_mask"].sum(1).tolist() == lengths and text["text_mask"][:, 0].all()
    assert text["text_context_mask"].sum(1).tolist() == [n - 1 if model.is_clip else n for n in lengths]
    assert image["image_mask"].all()


def test_context_blocks_move_the_locals(folder: str) -> None:
    keys = ["image_locals", "image_contexts", "text_locals"]
    one, two = (create_model(folder, loss="clip", return_intermediates=keys, context_blocks=n).eval() for n in (1, 2))
    with torch.no_grad():
        near, far = one.describe_image(pictures()), two.describe_image(pictures())
    assert near["image_contexts"].equal(far["image_contexts"]) and not near["image_locals"].equal(far["image_locals"])
    with pytest.raises(CoderError, match="the image tower has 2 blocks"):
        create_model(folder, loss="clip", return_intermediates=keys, context_blocks=3)


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_the_mask_of_siglips_texts(folders: dict[str, str], tmp_path: Path, pad: str) -> None:
    """SigLIP pads with its end token, SigLIP 2 with a token of its own; neither configuration says so."""
    folder = shutil.copytree(folders["siglip"], tmp_path / "model")
    tiny_clip.word_tokenizer(pad=pad).save_pretrained(folder)
    model = create_model(str(folder), loss="clip", return_intermediates=["text_mask"])
    masks = model.describe_text(model.tokenizer()(["a cat", "", "a " * 30]))["text_mask"]
    assert masks.sum(1).tolist() == [3, 1, 16] and masks[:, 0].all()
    blank = model.describe_text(torch.full((1, 16), model.processor.tokenizer.pad_token_id))["text_mask"]
    assert blank.sum() == blank[0, 0] == 1


# Locks, adapters, rates


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("side", ["image", "text"])
def test_locks(folder: str, side: str) -> None:
    prefix = {"image": ("vision_model.", "visual_"), "text": ("text_model.", "text_projection")}[side]
    unlocked, start = [], create_model(folder, loss="clip")
    for groups in range(5):
        model = copy.deepcopy(start)
        before = trained(model)
        getattr(model, f"lock_{side}_tower")(groups)
        assert {name for name in before - trained(model)} == {n for n in before if n.startswith(prefix)} - trained(model)
        unlocked.append({name for name in trained(model) if name.startswith(prefix)})
    blocks = [{n.partition("layers.")[2][0] for n in names if "layers." in n} for names in unlocked]
    assert not unlocked[0] and blocks == [set(), set(), {"1"}, {"0", "1"}, {"0", "1"}]
    assert all("embeddings" not in name for name in unlocked[3]) and any("embeddings" in name for name in unlocked[4])
    assert unlocked[1] and all(after_tower(n) or n.startswith("vision_model.head.") for n in unlocked[1])
    norm = "post_layernorm" if side == "image" else "final_layer_norm"
    assert {n for n in unlocked[2] if norm in n} and not {n for n in unlocked[1] if norm in n}


def test_lora_trains_adapters_and_projections(folder: str) -> None:
    pytest.importorskip("peft")
    model = create_model(folder, loss="clip")
    add_lora(model, rank=2)
    names = trained(model)
    towers = {name.split(".")[0] for name in names if "lora_" in name}
    assert towers == {"vision_model", "text_model"}
    others = {name for name in names if "lora_" not in name}
    projections = {"visual_projection.weight", "text_projection.weight"}
    assert others == ({*projections, "logit_scale"} if model.is_clip else
                      {"text_model.head.weight", "text_model.head.bias", "logit_scale", "logit_bias"})  # fmt: skip


def test_layer_decay(folder: str) -> None:
    model = create_model(folder, loss="clip")
    factor = layer_factors(model, 0.5)
    for tower in ("vision_model", "text_model"):
        assert factor(f"{tower}.encoder.layers.1.mlp.fc1.weight") == 0.5
        assert factor(f"{tower}.encoder.layers.0.mlp.fc1.weight") == 0.25
        assert factor(f"{tower}.embeddings.position_embedding.weight") == 0.125
    assert factor("vision_model.pre_layrnorm.weight") == (0.125 if model.is_clip else 1)
    assert factor("text_projection.weight") == factor("text_model.head.weight") == factor("logit_scale") == 1
    text = {name for name, _ in model.named_parameters() if in_text_encoder(name)}
    assert text == {n for n, _ in model.named_parameters() if n.startswith("text_model.") and ".head." not in n}


def test_recomputed_activations_give_the_same_gradient(folder: str) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = create_model(folder, loss="clip + lca")
        if recompute:
            model.set_grad_checkpointing()
            assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        outputs = model(pictures(4), model.tokenizer()(TEXTS), image_id=torch.arange(4))
        losses = create_loss("clip + lca", model=model)(**outputs)
        gradients.append(torch.autograd.grad(sum(losses.values()), [p for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(*gradients)


def test_a_momentum_copy_is_independent(folder: str) -> None:
    model = create_model(folder, loss="clip + m_dcl")
    ids, images = model.tokenizer()(TEXTS), pictures(4)
    keys = model(images, ids, image_id=torch.arange(4))["coder_image_keys"]
    with torch.no_grad():
        torch.testing.assert_close(keys, model.eval().embed_image(images))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5)
        moved = model.train()(images, ids, image_id=torch.arange(4))
    assert moved["coder_image_keys"].equal(keys) and not moved["image_features"].allclose(keys)
    assert copy.deepcopy(model).processor is model.processor


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "vit"}, "CLIPModel .clip. and SiglipModel"),
        ({"tower": "text_config", "vocab_size": 1 << 23}, "is it cut off"),
        ({"tower": "vision_config", "num_hidden_layers": 3}, "lack 16 tensors"),
        ({"tower": "vision_config", "hidden_size": 48}, "cannot be loaded"),
        ({"file": "preprocessor_config.json", "size": {"shortest_edge": 40}}, "resizes to .*40.*reads 32 x 32"),
        ({"file": "preprocessor_config.json", "resample": 1}, "resample 2, bilinear"),
        ({"file": "preprocessor_config.json", "rescale_factor": 1.0}, "scale pixels by 1/255"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_files_are_checked(altered: Callable[..., str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(CoderError, match=message):
        create_model(altered(**change), loss="clip")


def test_weights_in_parts_are_read_and_checked(folders: dict[str, str], tmp_path: Path) -> None:
    folder = folders["clip"]
    whole = create_model(folder, loss="clip").state_dict()
    parts = shutil.copytree(folder, tmp_path / "parts")
    (parts / "model.safetensors").unlink()
    transformers.AutoModel.from_pretrained(folder).save_pretrained(parts, max_shard_size="40KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert all(value.equal(whole[name]) for name, value in create_model(str(parts), loss="clip").state_dict().items())
    config = json.loads((parts / "config.json").read_text())
    config["text_config"]["vocab_size"] = 1 << 23
    (parts / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoderError, match="its parts have .* bytes: is it cut off"):
        create_model(str(parts), loss="clip")


def test_only_safetensors_are_read(folders: dict[str, str], tmp_path: Path) -> None:
    folder = folders["clip"]
    copied = shutil.copytree(folder, tmp_path / "pickled")
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(CoderError, match=r"has no model\.safetensors"):
        create_model(str(copied), loss="clip")
    with pytest.raises(CoderError, match="are a .safetensors file"):
        create_model(folder, loss="clip", pretrained=str(copied / "pytorch_model.bin"))
    with pytest.raises(CoderError, match="which has no option force_image_size"):
        create_model(folder, loss="clip", force_image_size=64)


def in_hub_cache(folder: str, cache: Path) -> Path:
    """A copy of the folder in the layout of the hub's cache, as OWNER/tiny's."""
    copy = cache / "models--owner--tiny"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, copy / "snapshots" / ("0" * 40)))


def test_a_search_opens_a_repository_that_is_named_again(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_hub_cache(folders["clip"], tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "pictures").mkdir()
    for value in (0, 255):
        Image.new("RGB", (32, 32), (value, 0, 0)).save(tmp_path / "pictures" / f"{value}.png")
    index, model = str(tmp_path / "index"), ["--model", "transformers:owner/tiny"]
    data = ["--data", str(tmp_path / "pictures"), "--workers", "0", "--thumbnails", "0"]
    assert main(["index", *model, *data, "--output", index]) == 0
    assert main(["search", index, "--text", "red"]) == 2
    assert "would fetch 'transformers:owner/tiny': if you trust it, give it yourself, with --model" in capsys.readouterr().err
    assert main(["search", index, "--text", "red", *model]) == 0
    assert "255.png" in capsys.readouterr().out
    Image.new("RGB", (32, 32)).save(tmp_path / "pictures" / "further.png")
    assert main(["index", "add", index, *data[:4], "--replace", *model]) == 0
    assert "3 images and 0 captions added" in capsys.readouterr().out


def test_a_repository_is_named_by_its_scheme(folders: dict[str, str], tmp_path: Path) -> None:
    folder = folders["siglip"]
    with pytest.raises(CoderError, match="-patch32 must be downloaded.*hf download openai/clip-vit-base-patch32 --.*: --model"):
        create_model("transformers:openai/clip-vit-base-patch32", loss="clip", cache_dir=str(tmp_path))
    files = in_hub_cache(folder, tmp_path)
    model = create_model("transformers:owner/tiny", loss="clip", cache_dir=str(tmp_path)).eval()
    own = create_model(folder, loss="clip").eval()
    ids = model.tokenizer()(TEXTS)
    with torch.no_grad():
        assert model.embed_text(ids).equal(own.embed_text(own.tokenizer()(TEXTS)))
    assert model.visual.preprocess_cfg == own.visual.preprocess_cfg
    torch.save(load_file(files / "model.safetensors"), files / "pytorch_model.bin")
    (files / "model.safetensors").unlink()
    with pytest.raises(CoderError, match="the weights of owner/tiny"):  # a pickle is not read
        create_model("transformers:owner/tiny", loss="clip", cache_dir=str(tmp_path))


def test_a_model_without_tokenizer_or_processor(folders: dict[str, str], tmp_path: Path) -> None:
    folder = folders["clip"]
    for file in ("config.json", "model.safetensors"):
        shutil.copy(Path(folder, file), tmp_path)
    model = create_model(str(tmp_path), loss="clip")
    assert model.visual.preprocess_cfg["size"] == 32
    with pytest.raises(CoderError, match=f"{re.escape(str(tmp_path))} has no tokenizer"):
        model.tokenizer()
    with pytest.raises(CoderError, match=f"{re.escape(str(tmp_path))} has no tokenizer"):
        create_model(str(tmp_path), loss="ascl")


# Existing models


def test_other_models_are_refused() -> None:
    tower = {**tiny_clip.TOWER, "image_size": 32, "patch_size": 8}
    with torch.device("meta"):
        models = [
            transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**tower)),
            torch.nn.Linear(2, 2),
        ]
    for model in models:
        with pytest.raises(CoderError, match=f"heads cannot be added to a {type(model).__name__}: only to"):
            add_heads(model, "any", loss="dcl")
