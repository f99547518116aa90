"""Losses and heads on inputs of every kind: each value and gradient is finite, or a ``ValueError`` names the input.

The inputs are finite numbers; NaN and infinities are looked for by the trainer. The long form: ``pytest -m slow … -s``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin import create_loss, create_model, functional, masked, tensors
from coder_plugin.errors import CoderError
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from tests.backbones import test_region_text as regions
from tests.backbones import tiny_bert
from tests.conftest import TINY

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS = "units units zeros equal opposite denormal tiny some_zero onehot long huge largest".split()
#: Cases of each function, and of each model, in the ordinary and the long form.
SHORT, LONG = (12, 4), (900, 150)


class Fuzz:
    """Random shapes and values from a seed."""

    def __init__(self, seed: int, *, widen: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = self.choose(KINDS)
        self.dtype = self.choose(DTYPES)
        self.widen = widen  # the same values in float32
        self.leaves: list[Tensor] = []

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choose(self, values: Any) -> Any:
        return values[self.integer(0, len(values) - 1)]

    def chance(self) -> bool:
        return self.integer(0, 1) == 1

    def values(self, shape: tuple[int, ...], *, kind: str | None = None) -> Tensor:
        """Features [..., d] of this case's kind, usually one kind for all of its inputs."""
        kind = kind or (self.kind if self.integer(0, 3) else self.choose(KINDS[:-2]))
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        if kind == "zeros":
            x = torch.zeros(shape)
        elif kind == "equal":
            x = unit.flatten(0, -2)[:1].expand(unit.flatten(0, -2).shape).reshape(shape) if x.numel() else x
        elif kind == "opposite":
            x = unit * torch.randint(0, 2, shape[:-1], generator=self.generator)[..., None].mul(2).sub(1)
            x = x.flatten(0, -2)[:1].abs() * x.sign() if x.numel() else x
        elif kind == "some_zero":
            x = unit * torch.randint(0, 2, shape[:-1], generator=self.generator)[..., None]
        elif kind == "onehot":
            x = torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0) if x.numel() else x
        else:
            size = torch.finfo(self.dtype)
            small = {"denormal": size.tiny / 8, "tiny": size.tiny * 1e3}
            large = {"long": 50.0, "huge": size.max**0.5, "largest": size.max / 8}
            x = unit * {**small, **large}.get(kind, 1.0)
        x = x.to(self.dtype).float() if self.widen else x.to(self.dtype)
        self.leaves.append(x.requires_grad_())
        return x

    def ids(self, n: int) -> Tensor | None:
        """All distinct, some equal, all equal, or none given."""
        most = self.choose((0, 1, 2, 10**6))
        return None if not most else torch.randint(0, most, (n,), generator=self.generator)

    def mask(self, rows: int, length: int, *, empty: bool = True) -> Tensor:
        """Full, of random lengths, of one position each, or (some rows) empty."""
        lengths = torch.full((rows,), length)
        form = self.integer(0, 3 if empty else 2)
        if form:
            lengths = torch.randint(1, length + 1, (rows,), generator=self.generator) if form == 1 else lengths * 0 + 1
        if form == 3:
            lengths = lengths * torch.randint(0, 2, (rows,), generator=self.generator)
        return torch.arange(length)[None] < lengths[:, None]


def _dcl_options(fuzz: Fuzz) -> dict[str, Any]:
    return {
        "mu": fuzz.choose((0.1, 0.05, 0.01, 1e-4)),
        "epsilon": fuzz.choose((0.1, 1e-3, 5.0)),
        "diversity": fuzz.choose(("std", "entropy", "none")),
        "positive_weight": fuzz.choose((1.0, "mu", 0.0)),
        "diversity_gradient": fuzz.chance(),
        "effective_negatives": fuzz.choose((None, 1, 4096)),
    }


def _dcl(fuzz: Fuzz) -> Tensor:
    n, d = fuzz.integer(0, 6), fuzz.integer(1, 9)
    shape = (n, fuzz.integer(1, 3), d) if fuzz.integer(0, 4) == 0 else (n, d)
    return functional.dcl(fuzz.values(shape), fuzz.values((n, d)), image_ids=fuzz.ids(n), **_dcl_options(fuzz))


def _m_dcl(fuzz: Fuzz) -> Tensor:
    n, q, d = fuzz.integer(0, 5), fuzz.integer(0, 7), fuzz.integer(1, 9)
    valid = None if fuzz.chance() else torch.rand(q, generator=fuzz.generator) < fuzz.choose((0.0, 0.5, 1.0))
    return functional.m_dcl(
        *(fuzz.values((n, d)) for _ in range(4)),
        *(fuzz.values((q, d)) for _ in range(2)),
        image_ids=fuzz.ids(n),
        bank_ids=fuzz.ids(q),
        bank_valid=valid,
        reverse=fuzz.choose(("paired", "all", "none")),
        diversity_over=fuzz.choose(("batch", "bank", "batch+bank")),
        **_dcl_options(fuzz),
    )


def _diversity(fuzz: Fuzz) -> Tensor:
    n, q = fuzz.integer(0, 5), fuzz.integer(0, 7)
    negatives = torch.rand(n, q, generator=fuzz.generator) < fuzz.choose((0.0, 0.5, 1.0))
    kind = fuzz.choose(("std", "entropy", "none"))
    return functional.diversity(fuzz.values((n, q)), negatives, kind=kind, epsilon=fuzz.choose((0.1, 1e-3, 5.0)))


def _pgc(fuzz: Fuzz) -> Tensor:
    n, f, k = fuzz.integer(0, 5), fuzz.integer(1, 9), fuzz.integer(1, 6)
    labels = torch.randint(0, k, (n,), generator=fuzz.generator)
    return functional.pgc(fuzz.values((n, f)), fuzz.values((n, f)), fuzz.values((k, f)), labels)


def _triplet(fuzz: Fuzz) -> Tensor:
    n = fuzz.integer(0, 6)
    options = {"hardest": fuzz.chance(), "reduction": fuzz.choose(("mean", "sum")), "margin": fuzz.choose((0.2, 0.0, -1.0))}
    return functional.triplet(fuzz.values((n, n)), image_ids=fuzz.ids(n), **options)


def _ascl(fuzz: Fuzz) -> Tensor:
    n, m = fuzz.integer(0, 6), fuzz.integer(0, 7)
    noise = None if fuzz.chance() else fuzz.values((n, m))
    valid = torch.rand(m, generator=fuzz.generator) < 0.5 if noise is not None and fuzz.chance() else None
    temperature = fuzz.choose((0.01, 0.05, 1.0, 1e-3))
    return functional.ascl(fuzz.values((n, n)), noise, temperature=temperature, image_ids=fuzz.ids(n), noise_valid=valid)


def _lca(fuzz: Fuzz) -> Tensor:
    b, t, length, d, k = (fuzz.integer(low, 5) for low in (0, 1, 1, 1, 1))
    return functional.lca(
        fuzz.values((b, t, d)), fuzz.mask(b, t), fuzz.values((b, length, d)), fuzz.mask(b, length), fuzz.values((k, d)),
        temperature=fuzz.choose((0.1, 0.01, 1.0)), assignment=fuzz.choose(("sinkhorn", "softmax")),
        epsilon=fuzz.choose((0.05, 0.03, 1.0)), iterations=fuzz.integer(1, 3),
    )  # fmt: skip


def _cra(fuzz: Fuzz) -> Tensor:
    b, length, d = fuzz.integer(0, 5), fuzz.integer(1, 5), fuzz.integer(1, 9)
    options = {"temperature": fuzz.choose((0.7, 0.05, 0.01)), "hard_negatives": fuzz.choose((1, 3, 512))}
    values = fuzz.values((b, d)), fuzz.values((b, length, d)), fuzz.mask(b, length)
    return functional.cra(*values, image_ids=fuzz.ids(b), **options)


def _concept_embedding(fuzz: Fuzz) -> Tensor:
    n, f, g = fuzz.integer(0, 5), fuzz.integer(1, 9), fuzz.integer(0, 6)
    made = fuzz.values((n, f)), fuzz.values((f, f)), fuzz.values((g, f))
    return torch.cat([each.flatten() for each in functional.concept_embedding(*made, scale=fuzz.choose((10.0, 1.0, 100.0)))])


def _concept_graph(fuzz: Fuzz) -> Tensor:
    g = fuzz.integer(0, 6)
    most = fuzz.choose((1, 10, 2**40))
    counts = torch.randint(0, most, (g,), generator=fuzz.generator)
    pairs = torch.randint(0, most, (g, g), generator=fuzz.generator)
    number = fuzz.choose((torch.int64, torch.float32, torch.float64))
    return functional.concept_graph(pairs.to(number), counts.to(number), rescale=fuzz.chance())


def _cosine(fuzz: Fuzz) -> Tensor:
    n, q, d = fuzz.integer(0, 5), fuzz.integer(0, 7), fuzz.integer(1, 9)
    return functional.cosine(fuzz.values((n, d), kind="units"), fuzz.values((q, d), kind="equal"))


def _distill(fuzz: Fuzz) -> Tensor:
    n, d = fuzz.integer(0, 6), fuzz.integer(1, 9)
    kind = fuzz.choose(("features", "similarity"))
    e = d if kind == "features" else fuzz.integer(1, 9)
    scales = {name: fuzz.choose((1.0, 14.0, 100.0)) for name in ("logit_scale", "teacher_logit_scale")}
    features = [fuzz.values((n, width), kind=fuzz.choose(KINDS[:-4])) for width in (d, d, e, e)]
    return functional.distill(*features, kind=kind, **scales)


def _maxsim(fuzz: Fuzz) -> Tensor:
    n, m, length, t, d = (fuzz.integer(low, 5) for low in (0, 0, 1, 1, 1))
    return functional.maxsim(
        fuzz.values((n, length, d)), fuzz.mask(n, length), fuzz.values((m, t, d)), fuzz.mask(m, t),
        direction=fuzz.choose(("text", "image", "both")), reduction=fuzz.choose(("mean", "sum")),
        tile=fuzz.choose((1, 7, 1 << 22)),
    )  # fmt: skip


FUNCTIONS: dict[str, Callable[[Fuzz], Tensor]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.removeprefix("_") in functional.__all__ and callable(function)
}


def check(case: str, fuzz: Fuzz, compute: Callable[[], Tensor], names: set[str], wide: Callable[[], Fuzz] | None = None) -> str:
    """Run a case; returns what became of it.

    A gradient beyond float16's range is infinite as float16. ``wide`` computes the case in float32, to tell.
    """
    try:
        value = compute()
    except ValueError as error:
        words = set(re.findall(r"\w+", str(error)))
        assert words & names, f"{case}: the message names none of {sorted(names)}: {error}"
        return "refused"
    assert bool(value.isfinite().all()), f"{case}: {value}"
    leaves = [leaf for leaf in fuzz.leaves if leaf.requires_grad]
    if value.requires_grad and value.numel():
        gradients = torch.autograd.grad(value.double().sum(), leaves, allow_unused=True)
        if wide is not None and any(gradient is not None and gradient.isinf().any() for gradient in gradients):
            gradients = [leaf.grad for leaf in wide().leaves]
            assert max(float(gradient.abs().max()) for gradient in gradients if gradient is not None) > 6e4, case
        for number, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if gradient is not None and not bool(gradient.isfinite().all()):
                shown = f"{leaf.detach().flatten()[:6]}: {gradient.flatten()[:9]}"
                raise AssertionError(f"{case}: gradient of input {number}, {shown}")
    return "finite"


def run_function(name: str, count: int, first: int = 0) -> Counter[str]:
    names = set(inspect.signature(getattr(functional, name)).parameters)
    results: Counter[str] = Counter()
    for seed in range(first, first + count):
        fuzz = Fuzz(seed)
        wide = partial(_in_float32, name, seed) if fuzz.dtype == torch.float16 else None
        results[check(f"{name} {seed} {fuzz.kind} {fuzz.dtype}", fuzz, partial(FUNCTIONS[name], fuzz), names, wide)] += 1
    return results


def _in_float32(name: str, seed: int) -> Fuzz:
    fuzz = Fuzz(seed, widen=True)
    FUNCTIONS[name](fuzz).double().sum().backward()
    return fuzz


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    results = run_function(name, SHORT[0])
    assert results["finite"] >= SHORT[0] // 4


def test_every_function_is_there() -> None:
    assert set(FUNCTIONS) == set(functional.__all__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_without_a_direction(dtype: torch.dtype) -> None:
    """They stay zero and get no gradient; others are what ``normalize`` gives, to the last bit."""
    x = torch.tensor([[0.0, 0.0], [1e-13, 0.0], [3.0, 4.0], [1e-3, -2e5]], dtype=dtype, requires_grad=True)
    unit = tensors.unit(x)
    assert torch.equal(unit[2:], torch.nn.functional.normalize(x[2:], dim=-1)) and not unit[:2].any()
    (unit * torch.arange(8, dtype=dtype).view(4, 2)).sum().backward()
    assert x.grad is not None and not x.grad[:2].any() and x.grad[2:].all() and x.grad.abs().max() < 10
    mask = torch.tensor([[False, False], [True, False]])
    tokens = torch.ones(2, 2, 3, dtype=dtype, requires_grad=True)
    means, channels = masked.mean(tokens, mask), masked.unit_channels(tokens, mask)
    assert means.tolist() == [[0.0] * 3, [1.0] * 3] and not channels[0].any() and channels[1, 0].tolist() == [1.0] * 3
    (means.sum() + channels.sum()).backward()
    assert tokens.grad is not None and tokens.grad.isfinite().all() and not tokens.grad[0].any()


def test_padding_and_pairs_without_words_count_as_zero() -> None:
    words, regions, prototypes = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(6, 4)
    masks = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    empty = torch.tensor([[True] * 5, [False] * 5])
    one = functional.lca(words[:1], masks[0][:1], regions[:1], masks[1][:1], prototypes)
    assert torch.allclose(functional.lca(words, masks[0], regions, empty, prototypes), one / 2)
    context, ids = torch.randn(2, 4), torch.tensor([1, 1])  # of one image: no negatives, so each local's loss is zero
    assert functional.cra(context, regions, empty, image_ids=ids) == 0
    assert functional.cra(context, regions, ~masks[1]) == 0
    third, full = torch.randn(3, 4), torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    locals_ = torch.randn(3, 5, 4)
    both = functional.cra(third[::2], locals_[::2], full[::2])
    assert torch.allclose(functional.cra(third, locals_, full), both * 2 / 3)


def test_what_could_overflow_is_named() -> None:
    fine, huge = torch.full((2, 3), 1e7), torch.full((2, 3), 1e8)
    assert functional.dcl(fine, fine, diversity_gradient=True).isfinite()
    with pytest.raises(CoderError, match=r"text_features holds values of 1.0e\+08, which overflow: normalise it"):
        functional.dcl(fine, huge)
    assert functional.dcl(fine.double(), huge.double()).isfinite()
    assert not functional.dcl(fine, huge * torch.inf).isfinite()  # NaN and infinities are the trainer's to name


# -- heads and terms: what a model's towers give is replaced, the heads and the loss are computed ------------------------

MODELS = {
    "clip": ("clip", "siglip + clip + dcl + m_dcl + concept_dcl + pgc"),
    "coder": ("region-bigru", "clip + dcl + m_dcl + concept_dcl + pgc + triplet"),
    "options": (
        "region-bigru",
        "dcl(diversity=entropy) + m_dcl(reverse=all) + dcl@concepts + triplet(hardest=false) + 2*triplet(mean_epochs=1)",
    ),
    "ascl": ("region-bigru", "ascl(similarity=fusion) + ascl + triplet(similarity=fusion)"),
    "selfalign": ("region-bigru", "triplet + lca + cra(hard_negatives=6)"),
    "vsrn": ("region-bigru-vsrn", "triplet + caption + lca + cra(hard_negatives=6)"),
    "camera": ("region-bert-camera", "triplet + view_diversity + cra(hard_negatives=6)"),
}
WITH = {**regions.SMALL, "alignment.prototypes": 6, "progress.steps_per_epoch": 2, "concepts.vocabulary": "scenes"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


@cache
def _model(name: str, bert: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model in training mode, its loss, and what its towers give for a batch."""
    torch.manual_seed(0)
    backbone, text = MODELS[name]
    objective = Objective.parse(text)
    heads = required_heads(objective)
    objective = objective.with_options({key: value for key, value in WITH.items() if key.partition(".")[0] in heads})
    if backbone == "clip":
        path = Path(bert).parent / "tiny-vit-siglip.json"
        path.write_text(json.dumps({**TINY, "init_logit_bias": -10.0}))
        model = create_model(str(path), loss=objective).train()
        text_ids = torch.zeros(4, 40, dtype=torch.int64)
        for row, length in enumerate((5, 9, 2, 40)):
            text_ids[row, : length - 1], text_ids[row, length - 1] = torch.arange(1, length), 49407
        batch = {"image": torch.randn(4, 3, 64, 64), "text": text_ids, "image_id": torch.arange(4)}
    else:
        projection = {"word_projection": True} if "bigru" in backbone else {}
        model = create_model(backbone, loss=objective, **{**regions.options(backbone, bert), **projection}).train()
        batch = regions.batch(model)
    features: dict[str, Any] = {}
    forward, model.coder.forward = model.coder.forward, lambda values: features.update(values) or {}
    outputs = model(**batch, **({"text_positive": batch["text"].flip(0)} if name == "ascl" else {}))
    del model.coder.forward
    assert forward is not None
    return model, create_loss(model.coder.objective, model=model), {**outputs, **features}


def run_model(name: str, bert: str, count: int, first: int = 0) -> Counter[str]:
    model, loss, features = _model(name, bert)
    results: Counter[str] = Counter()
    for seed in range(first, first + count):
        fuzz = Fuzz(seed)
        fuzz.dtype = fuzz.choose((torch.float32, torch.float32, torch.bfloat16))
        torch.manual_seed(seed)

        def compute(fuzz: Fuzz = fuzz) -> Tensor:
            given = _mutate(fuzz, features)
            outputs = {**given, **model.coder(given)}
            losses = loss(**{key: value for key, value in outputs.items() if isinstance(value, Tensor)})
            return torch.stack([value.float() for value in losses.values()])

        result = check(f"{name} {seed} {fuzz.kind} {fuzz.dtype}", fuzz, compute, set(features) | {"temperature"})
        results[result] += 1
        if result == "finite" and fuzz.chance():
            model.coder.post_step()
        else:
            model.coder.discard()
        state = {key: value for key, value in model.coder.state_dict().items() if value.is_floating_point()}
        broken = [key for key, value in state.items() if not value.isfinite().all()]
        assert not broken, f"{name} {seed} {fuzz.kind}: {broken}"
    return results


def _mutate(fuzz: Fuzz, features: Mapping[str, Any]) -> dict[str, Any]:
    """Other values, masks and ids in the shapes of a model's features; normalised where a model's are."""
    rows = features["image_features"].shape[0]
    given = dict(features)
    for key, value in features.items():
        if not isinstance(value, Tensor) or key in ("logit_scale", "logit_bias", "image"):
            continue
        if key.endswith("_mask"):
            given[key] = fuzz.mask(*value.shape, empty=False)
        elif value.is_floating_point() and key.endswith("_features"):
            made = fuzz.values(tuple(value.shape), kind=fuzz.choose(KINDS[:-3]))
            given[key] = made
        elif value.is_floating_point():
            given[key] = fuzz.values(tuple(value.shape))
        elif key == "image_id":
            ids = fuzz.ids(rows)
            given[key] = torch.arange(rows) if ids is None else ids
    return given


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_terms(name: str, bert: str) -> None:
    results = run_model(name, bert, SHORT[1])
    assert results["finite"] >= SHORT[1] // 3


@pytest.mark.slow
def test_many(bert: str) -> None:
    total: Counter[str] = Counter()
    for name in FUNCTIONS:
        results = run_function(name, LONG[0], first=1000)
        print(f"{name}: {dict(results)}")
        total += results
    for name in MODELS:
        results = run_model(name, bert, LONG[1], first=1000)
        print(f"{name}: {dict(results)}")
        total += results
    print(f"all: {dict(total)}")
    assert total.total() >= 10_000
