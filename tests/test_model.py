"""open_clip's models with our heads inside: what stays upstream's to the bit, what is added, what goes wrong politely.

Shapes: B images, T text positions, C channels. Every model is tiny and made from a configuration written here.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn

from coder_plugin import create_loss, create_model, registry
from coder_plugin.backbones import clip as backbone
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.losses.base import Term
from coder_plugin.pretrained.export import export_model, plain_state
from coder_plugin.pretrained.open import load_model
from tests.few import few

B, T, VOCABULARY, EOT = 3, 16, 120, 119
TOKEN_KEYS = ("coder_image_tokens", "coder_image_mask", "coder_text_tokens", "coder_text_mask")

# Losses and heads of somebody else's


class ReadsTokens(Term):
    requires = TOKEN_KEYS

    def forward(self, **tokens: Tensor) -> Tensor:
        pairs = (("coder_image_tokens", "coder_image_mask"), ("coder_text_tokens", "coder_text_mask"))
        return sum((tokens[key] * tokens[mask].unsqueeze(-1)).square().mean() for key, mask in pairs)


class Bank(KeepsState):
    """A first-in-first-out bank of one slot a step, whose loss stashes the mean text."""

    requires = ("text_features",)
    provides = ("coder_bank_texts",)

    def __init__(self, backbone: BackboneInfo, *, size: int = 3) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.register_buffer("rows", torch.zeros(size, backbone.embed_dim))
        self.register_buffer("pointer", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(()))
        self.momentum = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, text_features: Tensor) -> dict[str, Tensor]:
        return {"coder_bank_texts": text_features * self.scale}

    def write(self, row: Tensor) -> None:
        self.rows[self.pointer] = row
        self.pointer.copy_((self.pointer + 1) % len(self.rows))


class ReadsBank(Term):
    requires = ("coder_bank_texts",)

    def forward(self, coder_bank_texts: Tensor) -> dict[str, Tensor]:
        bank = self.heads["bank"]
        bank.stash(row=coder_bank_texts.detach().mean(0))
        pull = (coder_bank_texts - bank.rows.mean(0)).square().mean()
        return {"pull_loss": pull, "push_loss": coder_bank_texts.sum()}


class Pair(Head):
    """Features of its own, for ``term@pair``; swaps the towers so that one can tell."""

    requires = ("image_features", "text_features", "kept_inside")
    provides = ("coder_pair_images", "coder_pair_texts")
    feature_keys = ("coder_pair_images", "coder_pair_texts")

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_features: Tensor, text_features: Tensor, kept_inside: Tensor) -> dict[str, Tensor]:
        return {"coder_pair_images": text_features + 0 * kept_inside, "coder_pair_texts": image_features}


class Inside(Head):
    """Provides a key that stays inside the model."""

    requires = ("text_features",)
    provides = ("kept_inside",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, text_features: Tensor) -> dict[str, Tensor]:
        return {"kept_inside": text_features}


class Owner(Term):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


PLUGINS = {
    "losses": {"reads_tokens": ReadsTokens, "reads_bank": ReadsBank, "owner": Owner},
    "heads": {"bank": Bank, "pair": Pair, "inside": Inside},
}


@pytest.fixture(autouse=True, scope="module")
def plugins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        module = type(sys)("zzmod_model")
        patch.setitem(sys.modules, "zzmod_model", module)
        for group, members in PLUGINS.items():
            theirs = []
            for name, member in members.items():
                setattr(module, name, member)
                theirs.append(
                    registry.Plugin(
                        group=group, name=name, distribution="theirs", version="1", target=f"zzmod_model:{name}"
                    )
                )
            patch.setitem(registry._cache, group, (*registry._discover(group), *theirs))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads that share a busy core wait for each other longer than these tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """open_clip warns of random weights at every model."""
    logging.getLogger().setLevel(logging.ERROR)
    yield
    logging.getLogger().setLevel(logging.WARNING)


# The models

VIT = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}
TEXT = {"context_length": T, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 2}
HF_TEXT = {"hf_proj_type": "linear", "hf_pooler_type": "mean_pooler", "context_length": T}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a red blue circle square and two on the left of".split()]

Tokens = Callable[[nn.Module, Tensor], Tensor]


def vit_tokens(model: nn.Module, image: Tensor) -> Tensor:
    visual = model.visual
    tokens = visual.transformer(visual._embeds(image))
    normed = visual.attn_pool is None and not visual.final_ln_after_pool
    return (visual.ln_post(tokens) if normed else tokens)[:, 1:]


def text_tokens(model: nn.Module, text: Tensor) -> Tensor:
    tower = getattr(model, "text", model)
    x = tower.token_embedding(text) + tower.positional_embedding
    return tower.ln_final(tower.transformer(x, attn_mask=tower.attn_mask))


def resnet_tokens(model: nn.Module, image: Tensor) -> Tensor:
    visual = model.visual
    grid = visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(image)))))
    return torch.stack([grid[:, :, y, x] for y in range(grid.shape[2]) for x in range(grid.shape[3])], dim=1)


def timm_grid_tokens(model: nn.Module, image: Tensor) -> Tensor:
    grid = model.visual.trunk.forward_features(image)
    return torch.stack([grid[:, :, y, x] for y in range(grid.shape[2]) for x in range(grid.shape[3])], dim=1)


def timm_vit_tokens(model: nn.Module, image: Tensor) -> Tensor:
    trunk = model.visual.trunk
    return trunk.forward_features(image)[:, trunk.num_prefix_tokens :]


def hf_tokens(model: nn.Module, text: Tensor) -> Tensor:
    return model.text.transformer(input_ids=text, attention_mask=(text != 0).long()).last_hidden_state


def coca_text_tokens(model: nn.Module, text: Tensor) -> Tensor:
    return model.text(text)[1]


def to_end(text: Tensor) -> Tensor:
    """Up to the end-of-text token and with it: slow and by hand."""
    return torch.tensor([[t <= row.index(EOT) for t in range(len(row))] for row in text.tolist()])


def not_pad(pad: int) -> Callable[[Tensor], Tensor]:
    return lambda text: torch.tensor([[token != pad for token in row] for row in text.tolist()])


@dataclass(frozen=True)
class Kind:
    """A configuration and, computed another way, its last-layer tokens and text mask."""

    config: dict[str, Any]
    cls: type[nn.Module]
    image_tokens: Tokens
    text_tokens: Tokens = text_tokens
    mask: Callable[[Tensor], Tensor] = to_end
    size: int = 32


def kind(
    image_tokens: Tokens,
    vision: dict[str, Any],
    text: dict[str, Any],
    cls: type[nn.Module] = open_clip.CLIP,
    **more: Any,
) -> Kind:
    fields = {key: more.pop(key) for key in ("text_tokens", "mask", "size") if key in more}
    config = {"embed_dim": 32, "vision_cfg": {**VIT, **vision}, "text_cfg": text, **more}
    return Kind(config, cls, image_tokens, **fields)


RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None, "head_width": 64}
CUSTOM = open_clip.CustomTextCLIP
KINDS = {
    "vit": kind(vit_tokens, {}, TEXT),
    "vit-dropout": kind(vit_tokens, {"patch_dropout": 0.5}, TEXT),
    "vit-average": kind(vit_tokens, {"pool_type": "avg", "final_ln_after_pool": True}, TEXT, CUSTOM, custom_text=True),
    "vit-no-projection": kind(vit_tokens, {}, {**TEXT, "proj_type": "none"}),
    "resnet": kind(resnet_tokens, RESNET, TEXT, size=64),
    "custom-text": kind(vit_tokens, {}, {**TEXT, "proj_bias": True}, CUSTOM, custom_text=True),
    "eos": kind(vit_tokens, {}, {**TEXT, "pool_type": "eos", "eos_id": EOT}),
    "siglip": kind(
        timm_vit_tokens,
        {"timm_model_name": "test_vit", "timm_pool": "avg", "image_size": 160},
        {**TEXT, "pool_type": "last", "no_causal_mask": True, "proj_bias": True, "pad_id": 1},
        CUSTOM,
        custom_text=True,
        init_logit_bias=-10,
        mask=not_pad(1),
        size=160,
    ),
    "timm-resnet-bert": kind(
        timm_grid_tokens,
        {"timm_model_name": "test_resnet", "image_size": 64},
        HF_TEXT,
        CUSTOM,
        text_tokens=hf_tokens,
        mask=not_pad(0),
        size=64,
    ),
    "timm-vit-dropout": kind(
        timm_vit_tokens,
        {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 160, "patch_dropout": 0.5},
        TEXT,
        size=160,
    ),
    "timm-convnext": kind(timm_grid_tokens, {"timm_model_name": "test_convnext", "image_size": 64}, TEXT, size=64),
    "coca": kind(
        vit_tokens,
        {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5, "output_tokens": True},
        {**TEXT, "embed_cls": True, "output_tokens": True},
        CoCa,
        text_tokens=coca_text_tokens,
        custom_text=True,
        multimodal_cfg={"context_length": T, "width": 32, "heads": 2, "layers": 1, "attn_pooler_heads": 2},
    ),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration of each kind, and a BERT with its tokenizer for those that want one."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("configs")
    bert = folder / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(WORDS))
    (bert / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=T,
    )
    BertModel(config).save_pretrained(bert)
    for name, made in KINDS.items():
        config = copy.deepcopy(made.config)
        if "hf_proj_type" in config["text_cfg"]:
            config["text_cfg"].update(hf_model_name=str(bert), hf_tokenizer_name=str(bert))
        (folder / f"test-{name}.json").write_text(json.dumps(config))
    return folder


Make = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def make(configs: Path) -> Make:
    """`make("vit", "clip")` is ours with that objective, `make("vit")` plain open_clip's; equal weights at every call. Each is
    made once and copied."""

    @functools.cache
    def first(name: str, loss: str | None) -> nn.Module:
        return new(name, loss)

    def build(name: str, loss: str | None = None, **options: Any) -> nn.Module:
        return new(name, loss, **options) if options else copy.deepcopy(first(name, loss))

    def new(name: str, loss: str | None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        path = str(configs / f"test-{name}.json")
        if loss is not None:
            model = create_model(path, loss=loss, **options)
        else:
            model = open_clip.create_model(backbone.register_config(path), output_dict=True, **options)
        if isinstance(model, CoCa) and not options:  # upstream leaves it as the memory was
            nn.init.normal_(model.text_decoder.text_projection, generator=torch.Generator().manual_seed(0))
        return model

    return build


def batch(name: str = "vit") -> tuple[Tensor, Tensor]:
    """Images [B, 3, S, S], and texts [B, T] of different lengths, one of which fills its row."""
    made = KINDS[name]
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(B, 3, made.size, made.size, generator=generator)
    text = torch.randint(5, len(WORDS), (B, T), generator=generator)
    pad = made.config["text_cfg"].get("pad_id", 0)
    for row, end in enumerate((5, 9, T - 1)):
        text[row, end] = 3 if "hf_proj_type" in made.config["text_cfg"] else EOT
        text[row, end + 1 :] = pad
    return image, text


def seeded(model: nn.Module, *inputs: Tensor, **keywords: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return model(*inputs, **keywords)


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(mine[key], theirs[key]), key


# What stays upstream's


@pytest.mark.parametrize("name", few(KINDS))
def test_class_attributes_and_keys_are_upstreams(make: Make, name: str) -> None:
    plain, ours = make(name), make(name, "clip + reads_tokens + reads_bank")
    assert type(plain) is KINDS[name].cls and isinstance(ours, KINDS[name].cls)
    assert type(ours).__mro__[3:] == type(plain).__mro__  # after the mixin and its base, without which nothing is pickled
    assert vars(plain).keys() <= vars(ours).keys()
    assert all(module.training for module in ours.modules()), "looking at the tokens' widths leaves no trace"
    for attribute in ("context_length", "vocab_size", "output_dict", "pad_id"):
        assert getattr(ours, attribute, None) == getattr(plain, attribute, None)
    assert ours.visual.image_size == plain.visual.image_size
    assert ours.visual.preprocess_cfg == plain.visual.preprocess_cfg
    assert isinstance(ours.visual, type(plain.visual))

    mine = [key for key in ours.state_dict() if not key.startswith("coder.")]
    assert mine == list(plain.state_dict())
    assert [n for n, _ in ours.named_parameters() if not n.startswith("coder.")] == [
        n for n, _ in plain.named_parameters()
    ]
    for key, value in plain.state_dict().items():  # the same seed makes the same weights
        assert torch.equal(ours.state_dict()[key], value), key
    if hasattr(plain, "lock_image_tower"):
        ours.lock_image_tower()
        ours.lock_text_tower()
        towers = [p for n, p in ours.named_parameters() if n.startswith("visual.trunk.") or ".resblocks." in n]
        assert towers and not any(parameter.requires_grad for parameter in towers)
    ours.set_grad_checkpointing()


@pytest.mark.parametrize("name", few(KINDS))
def test_evaluation_is_upstreams_to_the_bit(make: Make, name: str) -> None:
    plain, ours = make(name).eval(), make(name, "clip + reads_tokens + reads_bank").eval()
    image, text = batch(name)
    with torch.no_grad():
        assert_same(ours(image, text), plain(image, text))
        assert_same(ours(image=image, text=text), plain(image=image, text=text))
        assert torch.equal(ours.encode_image(image), plain.encode_image(image))
        assert torch.equal(ours.encode_text(text), plain.encode_text(text))
        assert_same(ours(image, text, image_id=torch.arange(B)), plain(image, text))

        if not isinstance(plain, CoCa):
            image_only, text_only = ours(image), ours(text=text)
            assert torch.equal(image_only["image_features"], plain(image)["image_features"])
            assert image_only["text_features"] is None and text_only["image_features"] is None
        images, texts = ours.embed_image(image), ours.embed_text(text)
        features = plain(image, text)
    assert images.dtype == texts.dtype == torch.float32
    torch.testing.assert_close(images @ texts.T, features["image_features"] @ features["text_features"].T)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(B))


@pytest.mark.parametrize("name", few(KINDS))
def test_training_features_are_upstreams_to_the_bit(make: Make, name: str) -> None:
    """Dropout and patch dropout included: taking the tokens out draws no random number."""
    image, text = batch(name)
    plain, bare, tapped = make(name).train(), make(name, "clip").train(), make(name, "clip + reads_tokens").train()
    wanted = seeded(plain, image, text)
    assert_same(seeded(bare, image, text), wanted)
    got = seeded(tapped, image, text)
    assert set(got) == set(wanted) | set(TOKEN_KEYS)
    assert_same({key: got[key] for key in wanted}, wanted)
    for buffers in zip(plain.named_buffers(), bare.named_buffers(), tapped.named_buffers(), strict=True):
        assert torch.equal(buffers[0][1], buffers[1][1]) and torch.equal(buffers[0][1], buffers[2][1]), buffers[0][0]


# Tokens


@pytest.mark.parametrize("name", few(KINDS))
def test_tokens_and_masks(make: Make, name: str) -> None:
    made = KINDS[name]
    image, text = batch(name)
    model = make(name, "clip + reads_tokens").train()
    got = seeded(model, image, text)
    images, texts = (got["coder_image_tokens"], got["coder_text_tokens"])
    assert images.ndim == texts.ndim == 3 and len(images) == len(texts) == B
    assert got["coder_image_mask"].dtype == got["coder_text_mask"].dtype == torch.bool
    assert torch.equal(got["coder_image_mask"], torch.ones(images.shape[:2], dtype=torch.bool))

    plain = make(name).train()
    torch.manual_seed(2)
    torch.testing.assert_close(images, made.image_tokens(plain, image))
    if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in plain.modules()):
        torch.testing.assert_close(texts, made.text_tokens(plain, text))

    mask = got["coder_text_mask"]
    assert torch.equal(mask, made.mask(text))
    assert mask.sum(1).tolist() == [6, 10, 16], "the end token counts, the padding does not"
    assert texts.shape[1] == T
    widths = backbone.probe_backbone(model, model._coder_capture)
    assert widths == BackboneInfo(embed_dim=32, image_tokens=images.shape[2], text_tokens=texts.shape[2])
    assert widths.embed_dim == got["image_features"].shape[1]


@pytest.mark.parametrize("name", few(KINDS))
def test_the_tokens_gradient_reaches_both_towers(make: Make, name: str) -> None:
    image, text = batch(name)
    model = make(name, "reads_tokens").train()
    loss = create_loss("reads_tokens", model=model)
    sum(loss(**seeded(model, image, text)).values()).backward()
    visual = [p.grad for n, p in model.named_parameters() if n.startswith("visual.") and p.ndim == 4]
    words = next(p.grad for n, p in model.named_parameters() if "token_embedding" in n or "word_embeddings" in n)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in (visual[0], words))
    used = set(text[KINDS[name].mask(text)].tolist())
    assert {row for row in range(len(words)) if words[row].abs().sum() > 0} >= used - {0}


@pytest.mark.parametrize("name", ["vit", "timm-resnet-bert", "coca"])
def test_no_cost_when_nobody_needs_tokens(make: Make, name: str) -> None:
    plain, ours = make(name), make(name, "reads_bank + clip")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, kind) for module in ours.modules() for kind in hooks)
    modules = dict(ours.named_modules())
    for module_name, module in plain.named_modules():
        if module_name:
            assert type(modules[module_name]) is type(module), module_name
    assert ours._coder_capture is None
    tapped = make(name, "reads_tokens")
    changed = type(tapped.visual) is not type(plain.visual)
    assert changed or any(module._forward_hooks for module in tapped.visual.modules()), "what is looked for does exist"


@pytest.mark.parametrize("name", ["vit", "timm-resnet-bert", "coca"])
def test_a_copy_is_independent(make: Make, name: str) -> None:
    image, text = batch(name)
    model = make(name, "clip + reads_tokens + reads_bank").train()
    seeded(model, image, text)
    model.encode_image(image)
    twin = copy.deepcopy(model)
    assert_same(seeded(twin, image, text), seeded(model, image, text))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.coder.heads["bank"].rows.fill_(1)
    assert seeded(model, image, text)["coder_image_tokens"].abs().sum() > 0
    assert seeded(twin, image, text)["coder_text_tokens"].abs().sum() == 0
    assert model.coder.heads["bank"].rows.abs().sum() == 0


def test_towers_without_tokens_are_refused_by_name(make: Make) -> None:
    from coder_plugin.backbones.feature_capture import FeatureCapture

    for tower, called in (("visual", "an image"), ("text", "a text")):
        model = make("custom-text")
        setattr(model, tower, nn.Linear(1, 1))
        with pytest.raises(CoderError, match=f"no token features from {called} tower of type Linear"):
            FeatureCapture(model, {"image_tokens", "text_tokens"})
    model = make("timm-convnext")
    model.visual.trunk = nn.Linear(1, 1)
    with pytest.raises(CoderError, match="no token features from timm's Linear"):
        FeatureCapture(model, {"image_tokens", "text_tokens"})
    model = make("timm-convnext", "reads_tokens").train()
    trunk = type(model.visual.trunk)
    flat = type("Flat", (trunk,), {"forward_intermediates": lambda self, x, **_: (x, [x.new_zeros(B, 7)])})
    model.visual.trunk.__class__ = flat
    model.visual.trunk.forward_head = lambda x: x.new_zeros(B, model.visual.head.proj.in_features)
    with pytest.raises(CoderError, match=r"must have 3 or 4 dimensions, this tower gives \(3, 7\)"):
        model(*batch("timm-convnext"))


# Heads


def test_heads_keys_and_what_stays_inside(make: Make) -> None:
    image, text = batch()
    model = make("vit", "reads_bank + clip@pair").train()
    assert list(model.coder.heads) == ["bank", "inside", "pair"]
    got = model(image, text)
    assert got.keys() - {"image_features", "text_features", "logit_scale"} == {
        *("coder_bank_texts", "coder_pair_images", "coder_pair_texts")
    }
    assert all(len(got[key]) == B for key in got if key.startswith("coder_"))


# State


def test_state_is_named_saved_and_read_back(make: Make) -> None:
    image, text = batch()
    model = make("vit", "reads_bank + dcl").train()
    prefix = "coder.heads.bank."
    assert model.coder.state_names() == [prefix + "rows", prefix + "pointer", prefix + "momentum"]
    names = {*(name for name, _ in model.named_buffers()), *(name for name, _ in model.named_parameters())}
    assert set(model.coder.state_names()) <= names

    loss = create_loss("reads_bank", model=model)
    loss(**model(image, text))
    model.coder.post_step()
    state = copy.deepcopy(model.state_dict())
    fresh = make("vit", "reads_bank + dcl")
    assert not torch.equal(fresh.coder.heads["bank"].rows, model.coder.heads["bank"].rows)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.coder.heads["bank"].rows, model.coder.heads["bank"].rows)
    assert int(fresh.coder.heads["bank"].pointer) == 1
    assert_same(fresh.state_dict(), state)
    assert not any(key.startswith("coder.") for key in make("vit", "clip + dcl + reads_tokens").state_dict())


# Losses


def test_inputs_of_another_kind_are_refused(tiny_model: str) -> None:
    model = create_model(tiny_model, loss="clip").train()
    image, text = torch.rand(2, 3, 64, 64), torch.ones(2, 40).long()
    for inputs, message in (
        (([object()], text), "image is list: make_transform.model. makes a tensor"),
        (((255 * image).byte(), text), "image is torch.uint8: make_transform"),
        ((text, image), "image is torch.int64: make_transform"),
        ((image, ["a dog", "a cat"]), "text is list: the tokenizer makes"),
        ((image, image), "text is torch.float32: the tokenizer makes .*; images come before them"),
        ((image, text, [1, 2]), "image_id is list: ids are integers"),
        ((image, text, torch.rand(2)), "image_id is torch.float32: ids are integers"),
    ):
        ids = {"image_id": inputs[2]} if len(inputs) > 2 else {}
        with pytest.raises(CoderError, match=message):
            model(*inputs[:2], **ids)
    with pytest.raises(CoderError, match="pretrained is True: name a tag of open_clip, such as 'openai'"):
        create_model("ViT-B-32", loss="clip", pretrained=True)


# Temperature and bias


@pytest.mark.parametrize(
    ("objective", "trains"),
    [("dcl", False), ("reads_bank + triplet", False), ("clip", True), ("dcl + clip", True), ("clip@pair", True)],
)
def test_the_temperature_trains_only_where_it_is_read(make: Make, objective: str, trains: bool) -> None:
    model = make("vit", objective)
    assert model.logit_scale.requires_grad is trains
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad and not n.startswith("coder.")}
    assert frozen == (set() if trains else {"logit_scale"})
    assert make("vit").logit_scale.item() == model.logit_scale.item()


def test_siglip_adds_a_bias_where_there_is_none(make: Make) -> None:
    plain, model = make("vit"), make("vit", "siglip").train()
    assert plain.logit_bias is None and model.logit_bias.item() == -10
    assert model.logit_scale.item() == pytest.approx(math.log(10))
    assert model.logit_scale.requires_grad and model.logit_bias.requires_grad
    assert set(model.state_dict()) - set(plain.state_dict()) == {"logit_bias"}
    outputs = model(*batch())
    mine = create_loss("siglip", model=model)(**outputs)["siglip_loss"]
    keys = ("image_features", "text_features", "logit_scale", "logit_bias")
    torch.testing.assert_close(mine, open_clip.loss.SigLipLoss()(*(outputs[key] for key in keys)))
    assert make("vit", "clip").logit_bias is None


# Weights in and out


@pytest.mark.parametrize("form", ["plain", "trainer", "safetensors", "ours"])
def test_a_plain_checkpoint_starts_a_run(make: Make, tmp_path: Path, form: str) -> None:
    plain = make("vit").eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.01)
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file({key: value.contiguous() for key, value in plain.state_dict().items()}, path)
    elif form == "trainer":  # open_clip's own, from a DDP run
        state = {f"module.{key}": value for key, value in plain.state_dict().items()}
        torch.save({"epoch": 3, "name": "x", "state_dict": state}, path)
    elif form == "ours":
        path = export_model(_with_weights(make("vit", "reads_bank"), plain), tmp_path / "export")
    else:
        torch.save(plain.state_dict(), path)
    model = make("vit", "reads_bank + clip", pretrained=str(path)).eval()
    with torch.no_grad():
        assert_same(model(*batch()), plain(*batch()))
    assert model.coder.heads["bank"].rows.abs().sum() == 0


def _with_weights(model: nn.Module, plain: nn.Module) -> nn.Module:
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


@torch.no_grad()
def test_load_model_embeds_as_the_model_that_was_exported(make: Make, tmp_path: Path) -> None:
    model = make("vit", "dcl").eval()
    image, text = batch("vit")
    export_model(model, tmp_path / "export" / "best")
    opened = load_model(tmp_path)
    assert torch.equal(opened.embed_image(image), model.embed_image(image))
    assert torch.equal(opened.embed_text(text), model.embed_text(text)) and not opened.training


@pytest.mark.parametrize("name", few(KINDS))
def test_the_export_opens_in_plain_open_clip(make: Make, tmp_path: Path, name: str) -> None:
    model = make(name, "clip + reads_tokens + reads_bank")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.eval()
    assert plain_state(model).keys() == make(name).state_dict().keys()
    path = export_model(model, tmp_path / "export")
    opened = [open_clip.create_model(f"test-{name}", pretrained=str(path), output_dict=True)]
    opened.append(open_clip.create_model(f"local-dir:{path.parent}", output_dict=True))
    for plain in opened:
        assert type(plain) is KINDS[name].cls
        with torch.no_grad():
            assert_same(plain.eval()(*batch(name)), model(*batch(name)))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "siglip"},
        {"force_image_size": 16},
        {"force_context_length": 12},
        {"force_custom_text": True},
        {"force_quick_gelu": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_export_of_a_model_with_overrides_opens(make: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    model = make("vit", **{"loss": "clip", **options}).eval()
    path = export_model(model, tmp_path / "export")
    plain = open_clip.create_model(f"local-dir:{path.parent}", output_dict=True).eval()
    size, (image, text) = model.visual.image_size, batch()
    size = size[0] if isinstance(size, tuple) else size
    inputs = (image[:, :, :size, :size], text[:, : model.context_length].contiguous())
    with torch.no_grad():
        assert_same(plain(*inputs), model(*inputs))


# The image tower's own weights


def test_timm_weights_start_the_image_tower(make: Make, tmp_path: Path) -> None:
    import timm

    torch.manual_seed(5)
    trunk = timm.create_model("test_resnet", num_classes=10)
    torch.save(trunk.state_dict(), tmp_path / "trunk.pt")
    before = make("timm-resnet-bert", "clip")
    model = make("timm-resnet-bert", "clip", pretrained_image_path=str(tmp_path / "trunk.pt"))
    for key, value in model.visual.trunk.state_dict().items():
        assert torch.equal(value, trunk.state_dict()[key]), key
    assert torch.equal(model.visual.head.proj.weight, before.visual.head.proj.weight)
    assert_same(model.text.state_dict(), before.text.state_dict())


@pytest.mark.parametrize(("name", "whole"), [("vit", True), ("resnet", False), ("timm-convnext", True)])
def test_another_clips_image_tower(make: Make, tmp_path: Path, name: str, whole: bool) -> None:
    """A ViT's names are in CLIP's text tower too."""
    other, fresh = make(name), make(name, "clip")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    torch.save((other if whole else other.visual).state_dict(), tmp_path / "weights.pt")
    model = make(name, "clip", pretrained_image_path=str(tmp_path / "weights.pt"))
    tower = "visual.trunk." if hasattr(model.visual, "trunk") else "visual."
    for key, value in model.state_dict().items():
        assert torch.equal(value, (other if key.startswith(tower) else fresh).state_dict()[key]), key


def test_image_tower_mistakes(make: Make, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(CoderError) as caught:
            make("vit", "clip", pretrained_image_path=str(path))
        assert len(str(caught.value).splitlines()) == 1 and str(path) in str(caught.value)
        return str(caught.value)

    assert "do not exist" in refused(tmp_path / "gone.pt")
    (tmp_path / "garbage.pt").write_text("no weights")
    assert "cannot be read" in refused(tmp_path / "garbage.pt")
    torch.save(make("resnet").visual.state_dict(), tmp_path / "other.pt")
    assert "does not fit the image tower VisionTransformer" in refused(tmp_path / "other.pt")
    weights = make("vit").visual.state_dict()
    weights["conv1.weight"] = weights["conv1.weight"][:, :, :4]
    torch.save(weights, tmp_path / "shape.pt")
    message = refused(tmp_path / "shape.pt")
    assert message.endswith("0 of 32 tensors missing, 1 of another shape (such as conv1.weight)")
    del weights["conv1.weight"], weights["proj"]
    torch.save(weights, tmp_path / "part.pt")
    assert "2 of 32 tensors missing (such as proj), 0 of another shape" in refused(tmp_path / "part.pt")


# Mistakes


def refused(name: str, **options: Any) -> str:
    with pytest.raises(CoderError) as caught:
        create_model(name, **{"loss": "clip", **options})
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 2000
    return message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("ViT-B-23", "ViT-B-32"), ("RN50x", "RN50"), ("coder-tinny", "coder-tiny"), ("vit-b-32", "ViT-B-32")],
)
def test_an_unknown_model_names_the_nearest(name: str, nearest: str) -> None:
    message = refused(name)
    assert message.startswith(f"unknown model {name!r}; did you mean ") and nearest in message.split("(")[0]


def test_model_configuration_mistakes(configs: Path, tmp_path: Path, make: Make) -> None:
    assert "does not exist" in refused(str(tmp_path / "gone.json"))
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json cannot be read as JSON: Expecting property name" in refused(str(tmp_path / "broken.json"))
    for text, message in (('{"embed_dim": 3}', "it lacks text_cfg, vision_cfg"), ("[]", "configuration is an object")):
        (tmp_path / "ViT-B-32.json").write_text(text)  # not what open_clip has under this name
        assert message in refused(str(tmp_path / "ViT-B-32.json"))
    config = json.loads((configs / "test-vit.json").read_text())
    config["vision_cfg"]["no_such_field"] = 1
    (tmp_path / "field.json").write_text(json.dumps(config))
    assert "unexpected keyword argument 'no_such_field'" in refused(str(tmp_path / "field.json"))
    assert make("vit", "clip") is not None, "a bad file leaves nothing behind"
    for dimensions in (24, 40):  # a file that was changed is read again, and one that was not is not
        (tmp_path / "field.json").write_text(json.dumps({**KINDS["vit"].config, "embed_dim": dimensions}))
        assert create_model(str(tmp_path / "field.json"), loss="clip").visual.output_dim == dimensions
    known = len(open_clip.factory._MODEL_CONFIG_PATHS)
    create_model(str(tmp_path / "field.json"), loss="clip")
    assert len(open_clip.factory._MODEL_CONFIG_PATHS) == known


def test_weights_mistakes(configs: Path, tmp_path: Path, make: Make) -> None:
    name = str(configs / "test-vit.json")
    assert "--pretrained 'gone.pt' is neither a file nor a tag of test-vit (tags: none)" in refused(
        name, pretrained="gone.pt"
    )
    assert "laion2b_s34b_b79k" in refused("ViT-B-32", pretrained="laion3b")
    for suffix in ("pt", "safetensors"):
        (tmp_path / f"garbage.{suffix}").write_text("no weights at all")
        assert "'test-vit' cannot be created: " in refused(name, pretrained=str(tmp_path / f"garbage.{suffix}"))
    torch.save(make("resnet").state_dict(), tmp_path / "other.pt")
    assert "Missing key(s)" in refused(name, pretrained=str(tmp_path / "other.pt"))
    assert "cannot be created" in refused(f"local-dir:{tmp_path / 'nowhere'}")
    assert "cannot be created" in refused(name, no_such_option=1)


def test_text_masks_of_towers_that_pool_the_last_position() -> None:
    """SigLIP's tokenizer pads with its end token, whatever pad_id the configuration has."""
    from coder_plugin.backbones.feature_capture import mask_by_pool

    text = torch.tensor([[5, 6, 1, 1, 1], [5, 1, 6, 7, 1], [5, 6, 7, 8, 9], [1, 1, 1, 1, 1]])
    want = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert mask_by_pool("last", None, pad=0)(text).int().tolist() == want
    told = mask_by_pool("last", None, pad=1)(text).int().tolist()  # an end token that is padding goes as well
    assert told == [[1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
