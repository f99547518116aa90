"""Terms on one process, through the objective's loss: equal to their functions, and what CoderLoss does with them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import registry
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import ascl, cosine, cra, dcl, lca, m_dcl, triplet
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.ids import Ids
from coder_plugin.losses.clip import Clip
from coder_plugin.losses.dcl import DCL
from coder_plugin.losses.siglip import SigLip
from coder_plugin.losses.triplet import Triplet
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests.references import dcl as reference

KEYS = frozenset({"image_features", "text_features", "logit_scale", "logit_bias"})
TERMS = {"clip": Clip, "siglip": SigLip, "dcl": DCL, "triplet": Triplet}


def make(expression: str, *, local_loss: bool = False, heads: Mapping | None = None) -> CoderLoss:
    objective = replace(Objective.parse(expression), local_loss=local_loss)
    return CoderLoss(objective, resolve(objective, KEYS).bindings, heads or {})


def outputs(n: int = 8, *, dtype: torch.dtype = torch.float64, leaves: bool = False) -> dict[str, Tensor]:
    """A model's keys; the pairs 0, 3 and 1, 4 show one image each."""
    generator = torch.Generator().manual_seed(n)
    images, texts = (normalize(torch.randn(n, 6, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    ids = torch.arange(n) + 2**62
    ids[3:5] = ids[:2].clone()
    keys = {
        "image_features": images.to(dtype),
        "text_features": texts.to(dtype),
        "logit_scale": torch.tensor(5.0, dtype=dtype),
        "logit_bias": torch.tensor(-3.0, dtype=dtype),
    }
    if leaves:
        keys = {key: value.requires_grad_() for key, value in keys.items()}
    return {**keys, "coder_ids": ids}


def features(model_output: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model_output["image_features"], model_output["text_features"]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


DCL_OPTIONS = [
    {},
    {"mu": 0.07},
    {"gamma": 0.1},
    {"epsilon": 0.5},
    {"diversity": "entropy"},
    {"diversity": "none"},
    {"positive_weight": "mu"},
    {"positive_weight": 0.5},
    {"mu": 0.3, "gamma": -0.2, "diversity": "entropy", "epsilon": 2.0, "positive_weight": 0.0},
]
TRIPLET_OPTIONS = [
    {},
    {"margin": 0.6},
    {"hardest": False},
    {"reduction": "sum"},
    {"hardest": False, "reduction": "sum"},
]


def expression(name: str, options: Mapping) -> str:
    written = [f"{k}={str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in options.items()]
    return f"{name}({','.join(written)})"


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("options", DCL_OPTIONS, ids=str)
def test_dcl_equals_its_function(options: dict, local_loss: bool) -> None:
    model_output = outputs()
    got = make(expression("dcl", options), local_loss=local_loss)(**model_output)
    assert got.keys() == {"dcl_loss"}
    want = dcl(*features(model_output), image_ids=model_output["coder_ids"], **options)
    same(got["dcl_loss"], want)
    default = dcl(*features(model_output), image_ids=model_output["coder_ids"])
    assert not options or abs(want - default) > 1e-5  # the options matter


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("options", [{}, {"mu": 0.07, "gamma": 0.1}, {"positive_weight": 2.0}, {"diversity": "none"}], ids=str)
def test_concept_dcl_is_twice_the_loss_of_the_concept_embeddings(options: dict, masked: bool, local_loss: bool) -> None:
    """L(V_C, W_C) + L(W_C, V_C), each with both directions (CODER, below eq. 14), by a slow reference."""
    model_output = outputs()
    images, texts = features(model_output)
    keys = {"coder_image_concepts": images, "coder_text_concepts": texts, "coder_ids": model_output["coder_ids"]}
    loss = make(expression("concept_dcl", {**options, "mask_same_image": masked}), local_loss=local_loss)
    ids = keys["coder_ids"].tolist() if masked else None
    rows = images.tolist(), texts.tolist()
    want = reference.dcl(*rows, ids, **options) + reference.dcl(*reversed(rows), ids, **options)
    assert float(loss(**keys, output_dict=False)) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("options", TRIPLET_OPTIONS, ids=str)
def test_triplet_equals_its_function(options: dict, local_loss: bool) -> None:
    model_output = outputs()
    got = make(expression("triplet", options), local_loss=local_loss)(**model_output)
    assert got.keys() == {"triplet_loss"}
    want = triplet(cosine(*features(model_output)), image_ids=model_output["coder_ids"], **options)
    same(got["triplet_loss"], want)
    assert not options or abs(want - triplet(cosine(*features(model_output)), image_ids=model_output["coder_ids"])) > 1e-3


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize(("epoch", "hardest"), [(0, False), (1, False), (2, True), (7, True)])
def test_triplet_takes_all_negatives_in_its_first_epochs(epoch: int, hardest: bool, local_loss: bool) -> None:
    """Value and gradient are those of the one form alone."""
    grads = []
    model_output, plain = outputs(leaves=True), outputs(leaves=True)
    loss = make("triplet(margin=0.3,reduction=sum,mean_epochs=2)", local_loss=local_loss)
    got = loss(**model_output, coder_epoch=torch.full((8,), epoch), output_dict=False)
    want = triplet(cosine(*features(plain)), image_ids=plain["coder_ids"], margin=0.3, hardest=hardest, reduction="sum")
    same(got, want)
    for value, keys in ((got, model_output), (want, plain)):
        value.backward()
        grads.append(keys["image_features"].grad)
    same(*grads)
    other = triplet(cosine(*features(plain)), image_ids=plain["coder_ids"], margin=0.3, hardest=not hardest, reduction="sum")
    assert abs(want - other) > 1


@pytest.mark.parametrize(
    ("options", "requires"),
    [
        ({}, ("image_features", "text_features")),
        ({"mean_epochs": 1}, ("image_features", "text_features", "coder_epoch")),
        ({"mean_epochs": 1, "similarity": "fusion"}, ("coder_fusion", "coder_epoch")),
    ],
)
def test_triplet_needs_the_epoch_for_its_schedule_alone(options: dict, requires: tuple) -> None:
    assert Triplet(**options).requires == requires
    objective = Objective.parse(expression("triplet", options))
    available = KEYS | {"coder_fusion"}
    assert resolve(objective, available).heads == (("progress", "ids") if options else ("ids",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum', got 'max'"),
        ({"similarity": "sum"}, "similarity must be 'cosine' or 'fusion', got 'sum'"),
        ({"mean_epochs": -1}, "mean_epochs must be >= 0, got -1"),
        ({"mean_epochs": 1, "hardest": False}, "leave out mean_epochs"),
    ],
)
def test_triplets_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Triplet(**options)


@pytest.mark.parametrize("similarity", ["cosine", "fusion"])
def test_ascl_reads_the_generated_texts_of_its_similarity_alone(similarity: str) -> None:
    """The mean of the captions' and the positives' loss, each with its own noised texts (AsCL eq. 5-7)."""
    model_output, generator = outputs(), torch.Generator().manual_seed(3)
    texts = ("noised", "positive", "noised_positive")
    keys = {f"coder_{text}_features": normalize(torch.randn(8, 6, generator=generator).double(), dim=1) for text in texts}
    scores = {f"coder_fusion{text}": torch.rand(8, 8, generator=generator).double() for text in ("", *(f"_{t}" for t in texts))}
    loss = make(expression("ascl", {"similarity": similarity, "temperature": 0.5}))
    got = loss(**model_output, **keys, **scores, output_dict=False)
    images, captions = features(model_output)
    if similarity == "cosine":
        noised, positive, noised_positive = (images @ value.T for value in keys.values())
        pairs = [(images @ captions.T, noised), (positive, noised_positive)]
        assert not any("fusion" in key for key in loss.bindings[0].values())
    else:
        caption, noised, positive, noised_positive = scores.values()
        pairs = [(caption, noised), (positive, noised_positive)]
    ids = model_output["coder_ids"]
    same(got, sum(ascl(score, noise, temperature=0.5, image_ids=ids) for score, noise in pairs) / 2)


@pytest.mark.parametrize("bias", [False, True])
def test_clip_is_open_clips(bias: bool) -> None:
    model_output = outputs()
    if not bias:
        del model_output["logit_bias"]
    got = make("clip")(**model_output)
    assert got.keys() == {"clip_loss"}
    want = ClipLoss()(*features(model_output), model_output["logit_scale"], logit_bias=model_output.get("logit_bias"))
    assert torch.equal(got["clip_loss"], want)


@pytest.mark.parametrize("dist_impl", ["bidir", "shift", "reduce", "gather"])
def test_siglip_is_open_clips(dist_impl: str) -> None:
    model_output = outputs()
    loss = make(f"siglip(dist_impl={dist_impl})")
    assert loss.terms["siglip"].loss.dist_impl == dist_impl
    got = loss(**model_output)
    assert got.keys() == {"siglip_loss"}
    want = SigLipLoss()(*features(model_output), model_output["logit_scale"], model_output["logit_bias"])
    assert torch.equal(got["siglip_loss"], want)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_reach_what_a_term_reads(name: str) -> None:
    model_output = outputs(leaves=True)
    make(name)(**model_output, output_dict=False).backward()
    for key in KEYS:
        reads = key in TERMS[name].requires
        # clip also takes the bias, which its softmax ignores
        assert (model_output[key].grad is not None and bool(model_output[key].grad.abs().max() > 1e-6)) == reads, key


def test_dcl_passes_its_gradient_option_on() -> None:
    gradients = []
    for through in (False, True):
        term, function = outputs(leaves=True), outputs(leaves=True)
        make(f"dcl(epsilon=0.5,diversity_gradient={str(through).lower()})")(**term, output_dict=False).backward()
        dcl(*features(function), image_ids=function["coder_ids"], epsilon=0.5, diversity_gradient=through).backward()
        same(term["image_features"].grad, function["image_features"].grad)
        gradients.append(term["image_features"].grad)
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[0].norm()


@pytest.mark.parametrize("name", ["dcl", "triplet"])
def test_siblings_are_masked_by_ids(name: str) -> None:
    model_output = outputs()
    without = {key: value for key, value in model_output.items() if key != "coder_ids"}
    options = {"hardest": False} if name == "triplet" else {}
    masking = make(expression(name, options))
    not_masking = make(expression(name, {**options, "mask_same_image": False}))
    unmasked = not_masking(**model_output, output_dict=False)
    assert abs(masking(**model_output, output_dict=False) - unmasked) > 1e-3
    same(not_masking(**without, output_dict=False), unmasked)
    same(masking(**without, output_dict=False), unmasked)  # no ids, nothing to mask
    assert TERMS[name].masks_same_image and not Clip.masks_same_image and not SigLip.masks_same_image


@pytest.mark.parametrize("name", ["dcl", "triplet"])
def test_half_features_and_autocast_give_a_float32_loss(name: str) -> None:
    model_output = outputs(dtype=torch.bfloat16)
    raised = {
        **model_output,
        "image_features": model_output["image_features"].float(),
        "text_features": model_output["text_features"].float(),
    }
    want = make(name)(**raised, output_dict=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for each in (model_output, raised):
            got = make(name)(**each, output_dict=False)
            assert got.dtype == torch.float32 and torch.equal(got, want)


@pytest.mark.parametrize("name", ["dcl", "triplet"])
def test_batches_of_one_pair_and_of_one_image(name: str) -> None:
    for n, ids in ((1, torch.tensor([5])), (6, torch.full((6,), 5))):
        model_output = outputs(8, leaves=True)
        pair = {key: model_output[key][:n] for key in ("image_features", "text_features")}
        value = make(name)(**pair, coder_ids=ids, output_dict=False)
        value.backward()
        assert value.isfinite() and model_output["image_features"].grad.isfinite().all()


def test_pairs_that_do_not_match_are_refused() -> None:
    model_output = outputs()
    for change in ({"text_features": model_output["text_features"][:5]}, {"coder_ids": model_output["coder_ids"][:5]}):
        for name in ("dcl", "triplet"):
            with pytest.raises(ValueError, match=r"(\[n, d\]|\[n, n\]|\(8,\)), got"):
                make(name)(**{**model_output, **change})


# CoderLoss


def test_weights_multiply_and_the_sum_is_the_objective() -> None:
    model_output = outputs()
    alone = {name: make(name)(**model_output, output_dict=False) for name in ("dcl", "triplet", "clip")}
    loss = make("3*dcl + 0.25*triplet + clip")
    got = loss(**model_output)
    assert list(got) == ["dcl_loss", "triplet_loss", "clip_loss"]
    for name, weight in (("dcl", 3), ("triplet", 0.25), ("clip", 1)):
        same(got[f"{name}_loss"], weight * alone[name])
    same(loss(**model_output, output_dict=False), 3 * alone["dcl"] + 0.25 * alone["triplet"] + alone["clip"])


def test_a_term_may_come_twice() -> None:
    model_output = outputs()
    got = make("dcl + 2*dcl(mu=0.3)")(**model_output)
    assert list(got) == ["dcl_loss", "dcl_2_loss"]
    same(got["dcl_2_loss"], 2 * dcl(*features(model_output), image_ids=model_output["coder_ids"], mu=0.3))


def test_keys_that_no_term_reads_are_ignored() -> None:
    model_output = outputs()
    more = {**model_output, "coder_other": torch.zeros(8, 3), "image_tokens": torch.zeros(8, 2, 3)}
    same(make("dcl")(**more, output_dict=False), make("dcl")(**model_output, output_dict=False))


@pytest.mark.parametrize(
    ("name", "key"),
    [("dcl", "text_features"), ("triplet", "image_features"), ("clip", "logit_scale"), ("siglip", "logit_bias")],
)
def test_a_missing_key_is_named_with_its_term(name: str, key: str) -> None:
    model_output = outputs()
    del model_output[key]
    other = "dcl" if key.startswith("logit") else "clip"
    with pytest.raises(CoderError, match=f"loss '{name}' needs {key}, which the model did not return"):
        make(f"{name} + {other}")(**model_output)


def test_several_missing_keys_are_all_named() -> None:
    with pytest.raises(CoderError, match="loss 'dcl' needs image_features, text_features, which"):
        make("dcl")(logit_scale=torch.tensor(1.0))


def test_a_term_reads_the_keys_it_is_bound_to() -> None:
    model_output = outputs()
    objective = Objective.parse("dcl")
    binding = {"image_features": "coder_a", "text_features": "coder_b", "coder_ids": "coder_ids"}
    loss = CoderLoss(objective, (binding,), {})
    images, texts = features(model_output)
    named = {"coder_a": images, "coder_b": texts, "coder_ids": model_output["coder_ids"]}
    got = loss(**named, image_features=torch.zeros(8, 6), output_dict=False)
    same(got, make("dcl")(**model_output, output_dict=False))
    with pytest.raises(CoderError, match="loss 'dcl' needs coder_b"):
        loss(coder_a=named["coder_a"], **model_output)


@pytest.mark.parametrize("text", ["dcl + triplet + clip + siglip", *TERMS])
def test_a_loss_owns_nothing(text: str) -> None:
    heads = {"ids": Ids(BackboneInfo(embed_dim=6))}
    loss = make(text, heads=heads)
    assert not list(loss.parameters()) and not list(loss.buffers()) and not loss.state_dict()
    assert loss.load_state_dict({}) is not None
    loss(**outputs())
    assert not loss.state_dict()
    for term in loss.terms.values():
        assert term.heads is heads and term.local_loss is False
    assert not any(isinstance(module, Ids) for module in loss.modules())  # heads are the model's
    assert all(term.local_loss for term in make(text, local_loss=True).terms.values())


def test_each_of_our_terms_is_made_without_options_and_owns_nothing() -> None:
    ours = [plugin.name for plugin in registry.list_plugins("losses") if plugin.distribution == "coder-plugin"]
    assert set(TERMS) <= set(ours)
    for name in ours:
        term = registry.load("losses", name)()
        assert not list(term.parameters()) and not term.state_dict(), name
        assert not term.heads and not set(term.requires) & set(term.uses), name
    assert all(registry.load("losses", name) is cls for name, cls in TERMS.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mu": 0.0}, "mu must be > 0, got 0"),
        ({"epsilon": -0.1}, "epsilon must be > 0, got -0.1"),
        ({"positive_weight": -1.0}, "positive_weight must be a number >= 0 or 'mu', got -1"),
    ],
)
def test_options_out_of_range_are_refused_before_the_first_batch(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCL(**options)
    with pytest.raises(CoderError, match=message):
        Objective.parse(expression("dcl", options))


# A term of somebody else


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution whose loss ``zz-two`` returns two scalars."""
    info = tmp_path / "zz_terms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-terms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[coder_plugin.losses]\nzz-two = zz_terms:Two\n")
    (tmp_path / "zz_terms.py").write_text(
        "from coder_plugin.losses.base import Term\n"
        "class Two(Term):\n"
        "    requires = ('image_features',)\n"
        "    uses = ('logit_scale',)\n"
        "    def __init__(self, *, power: int = 1) -> None:\n"
        "        super().__init__()\n"
        "        self.power = power\n"
        "    def forward(self, image_features, logit_scale=None):\n"
        "        seen = image_features.new_tensor(10.0) if logit_scale is None else logit_scale\n"
        "        return {'sum_loss': image_features.sum() ** self.power, 'scale_loss': seen}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.refresh()
    yield
    registry.refresh()


def test_a_term_may_return_several_losses(theirs: None) -> None:
    model_output = outputs()
    loss = make("0.5*zz-two(power=3) + dcl")
    got = loss(**model_output)
    assert list(got) == ["zz_two_sum_loss", "zz_two_scale_loss", "dcl_loss"]
    same(got["zz_two_sum_loss"], 0.5 * model_output["image_features"].sum() ** 3)
    same(got["zz_two_scale_loss"], 0.5 * model_output["logit_scale"])
    same(loss(**model_output, output_dict=False), sum(got.values()))
    del model_output["logit_scale"]  # a key that is used, not required, is left out
    assert loss(**model_output)["zz_two_scale_loss"] == 5


# Options


_DCL = "mu gamma epsilon diversity positive_weight diversity_gradient effective_negatives"
OPTIONS = [
    ("dcl", dcl, _DCL, "diversity_over mask_same_image hard_negatives"),
    ("concept_dcl", dcl, _DCL, "mask_same_image"),
    ("m_dcl", m_dcl, f"{_DCL} reverse diversity_over", "mask_same_image hard_negatives warmup"),
    ("triplet", triplet, "margin hardest reduction", "mean_epochs similarity mask_same_image hard_negatives"),
    ("lca", lca, "temperature assignment epsilon iterations", "direction"),
    ("cra", cra, "temperature hard_negatives", "margin hardest reduction ca_on mask_same_image"),
]


@pytest.mark.parametrize(("name", "function", "shared", "others"), OPTIONS, ids=[name for name, *_ in OPTIONS])
def test_a_term_takes_the_options_of_its_function(name: str, function: Callable, shared: str, others: str) -> None:
    """Names, defaults and types are the function's; tensors and callables are no options."""
    cls = registry.load("losses", name)
    options, declared = inspect.signature(cls).parameters, inspect.signature(function).parameters
    assert set(options) == {*shared.split(), *others.split()}
    hints, wanted = typing.get_type_hints(cls.__init__), typing.get_type_hints(function)
    for option in shared.split():
        assert options[option].default == declared[option].default and hints[option] == wanted[option]
        assert options[option].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", TERMS)
def test_a_term_outside_a_loss_computes_all_rows(name: str) -> None:
    """Where nobody says ``local_loss``, every rank has the loss of the joint batch."""
    term = TERMS[name]()
    assert term.local_loss is False
    assert term.bind({}, local_loss=True).local_loss is True and TERMS[name]().local_loss is False


def test_an_unknown_option_is_named_and_defaults_are_complete() -> None:
    with pytest.raises(TypeError, match="'mo'"):
        DCL(mo=0.1)
    declared = inspect.signature(dcl).parameters
    assert DCL(mu=0.2).options == {**{key: declared[key].default for key in DCL().options}, "mu": 0.2}
