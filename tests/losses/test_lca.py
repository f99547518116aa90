"""SelfAlign's local concept alignment: values, Sinkhorn, padding, derivatives, the term on one process and several."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import lca
from coder_plugin.heads.alignment import Alignment
from coder_plugin.losses.lca import LCA, correspondence, lca_from_scores, prototype_scores, sinkhorn_bias
from tests import gloo
from tests.losses import selfalign
from tests.losses.checks import compiles
from tests.losses.drawn import close, drawing, same_options, second_order, transforms, value_and_gradient, vectors
from tests.losses.selfalign import D, Model, joint, numbers, sets, valid, words_and_regions
from tests.references import selfalign as reference

ASSIGNMENTS = ("sinkhorn", "softmax")
OPTIONS = {"temperature": 0.1, "epsilon": 0.05, "iterations": 2}
K = 7


# -- values ----------------------------------------------------------------------------------------------------------


def test_expected_values() -> None:
    z = vectors("selfalign")
    names = ("words", "word_mask", "regions", "region_mask", "prototypes")
    for how in ASSIGNMENTS:
        close(lca(*(z[name] for name in names), assignment=how), z[f"lca_{how}"])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4).map(lambda some: [(2, 3), *some]),
    st.sampled_from(ASSIGNMENTS),
    st.sampled_from([0.05, 0.1, 1.0]),
    st.sampled_from([0.03, 0.05, 0.5]),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_equals_the_slow_reference(lengths, assignment, temperature, epsilon, iterations, seed) -> None:
    """Texts without words and images without regions count as zero."""
    words, word_mask = sets([words for words, _ in lengths], 4, seed)
    regions, region_mask = sets([regions for _, regions in lengths], 5, seed + 100)
    options = {"temperature": temperature, "assignment": assignment, "epsilon": epsilon, "iterations": iterations}
    prototypes = numbers(K, D, seed=seed)
    got = lca(words, word_mask, regions, region_mask, prototypes, **options)
    slow = valid(words, word_mask & region_mask.any(1, keepdim=True)), valid(regions, region_mask), prototypes.tolist()
    parts = reference.lca_parts(*slow, **options)
    close(got, parts[0])
    assert got.dtype == torch.float64 and got.shape == () and got >= 0
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    scores = prototype_scores(words, prototypes, word_mask), prototype_scores(regions, prototypes, region_mask)
    loss, entropy = lca_from_scores(scores[0], word_mask, scores[1], region_mask, matched, **options)
    close(loss, parts[0])
    close(entropy, parts[1])
    assert entropy <= loss + 1e-12 and entropy <= math.log(K) + 1e-12 and not entropy.requires_grad


def test_by_hand() -> None:
    """Two prototypes, along the axes. The word lies along the first; of its regions, at 60 and 30 degrees, it takes the
    second, which softmax gives to the prototypes by cosines of sqrt(3)/2 and 1/2."""
    half, root = 0.5, 3**0.5 / 2
    regions = torch.tensor([[[half, root], [root, half], [1.0, 0.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])  # the best of all is padding
    words, prototypes = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    one = torch.tensor([[True]])
    assert correspondence(words, one, regions, mask).argmax(2).item() == 1
    p = 1 / (1 + math.exp((half - root) / 0.2))
    log_q = [-math.log(1 + math.exp(-1 / 0.2)), -math.log(1 + math.exp(1 / 0.2))]
    got = lca(words, one, regions, mask, prototypes, temperature=0.2, assignment="softmax")
    close(got, -p * log_q[0] - (1 - p) * log_q[1])
    # Sinkhorn: the two regions mirror each other, so no prototype needs a push and 1 / 0.05 is all the sharpness
    p = 1 / (1 + math.exp((half - root) / 0.05))
    got = lca(words, one, regions, mask, prototypes, temperature=0.2)
    close(got, -p * log_q[0] - (1 - p) * log_q[1])


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_pair_without_words_or_without_regions_is_zero(assignment: str) -> None:
    """It has no share in the gradient either."""
    words, word_mask, regions, region_mask, prototypes = words_and_regions()
    passed = {"assignment": assignment}
    assert lca(words, torch.zeros_like(word_mask), regions, region_mask, prototypes, **passed) == 0
    assert lca(words, word_mask, regions, torch.zeros_like(region_mask), prototypes, assignment="softmax") == 0
    without = region_mask.clone()
    without[2] = False
    value, of_words = value_and_gradient(lambda w: lca(w, word_mask, regions, without, prototypes, **passed), words)
    keep = torch.tensor([0, 1, 3])
    rest = lca(words[keep], word_mask[keep], regions[keep], without[keep], prototypes, **passed)
    close(value, rest * 3 / 4)
    assert of_words.isfinite().all() and not of_words[2].any()


# -- Sinkhorn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extreme", [False, True])
def test_sinkhorns_marginals(extreme: bool) -> None:
    """Every region's assignment sums to one, and after enough iterations all prototypes are used alike."""
    scores = numbers(4, 6, K).tanh()
    if extreme:  # a prototype opposite to all regions, at the sharpest epsilon in float32
        scores, scores[..., 2] = scores.sign(), -1.0
        scores = scores.float()
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 4])[:, None]
    bias = sinkhorn_bias(scores, mask, epsilon=0.03 if extreme else 0.2, iterations=3000)
    assert torch.isfinite(bias).all()
    assigned = (scores / (0.03 if extreme else 0.2) + bias).softmax(-1)[mask]
    torch.testing.assert_close(assigned.sum(1), torch.ones_like(assigned[:, 0]))
    if not extreme:
        close(assigned.sum(0), torch.full((K,), 14 / K), rtol=1e-3, atol=0)
    few = (scores / 0.2 + sinkhorn_bias(scores, mask, epsilon=0.2, iterations=2)).softmax(-1)[mask]
    none = (scores / 0.2).softmax(-1)[mask]
    assert (few.sum(0) - 14 / K).abs().max() < (none.sum(0) - 14 / K).abs().max()


def test_balance_is_of_the_whole_batch_however_it_is_parted() -> None:
    scores, mask = numbers(4, 6, K).tanh(), torch.rand(4, 6, generator=drawing()) < 0.7
    wanted = sinkhorn_bias(scores, mask, iterations=3)
    sums: list[Tensor] = []

    def total(part: Tensor) -> Tensor:  # as another rank with the same features would add
        sums.append(part)
        return 2 * part

    got = sinkhorn_bias(scores, mask, iterations=3, total=total)
    assert len(sums) == 3 and all(part.shape == (K,) for part in sums)
    close(got.softmax(0), wanted.softmax(0))  # a constant for all prototypes is no difference
    close(sinkhorn_bias(scores.flatten(0, 1), mask.flatten(), iterations=3), wanted)


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_derivatives(assignment: str) -> None:
    """The assignment is a constant: finite differences are taken with the matches and targets of the start."""
    words, word_mask, regions, region_mask, prototypes = words_and_regions()
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    targets = prototype_scores(regions, prototypes, region_mask)
    options = {**OPTIONS, "assignment": assignment}

    def held(words: Tensor, prototypes: Tensor) -> Tensor:
        scores = prototype_scores(words, prototypes, word_mask)
        return lca_from_scores(scores, word_mask, targets, region_mask, matched, **options)[0]

    def whole(words: Tensor, prototypes: Tensor) -> Tensor:
        return lca(words, word_mask, regions, region_mask, prototypes, **options)

    second_order(held, words, prototypes)
    transforms(whole, words, prototypes)
    results = [value_and_gradient(each, words, prototypes) for each in (held, whole)]
    for one, other in zip(*results, strict=True):
        close(one, other)
    of_words = results[1][1]
    assert (of_words[~word_mask] == 0).all() and (of_words[word_mask].norm(dim=-1) > 0).all()
    leaf = regions.clone().requires_grad_()
    value = lca(words.requires_grad_(), word_mask, leaf, region_mask, prototypes, **options)
    assert torch.autograd.grad(value, leaf, allow_unused=True) == (None,)


@pytest.mark.parametrize("kept", [1, 4])
def test_finite_gradients_at_zero_vectors_and_single_pairs(kept: int) -> None:
    inputs = [x.float() if x.is_floating_point() else x for x in words_and_regions()]
    words, word_mask, regions, region_mask = (x[:kept].clone() for x in inputs[:4])
    prototypes = inputs[4]
    words[0, 0], regions[0, 0], prototypes[0] = 0, 0, 0
    results = value_and_gradient(lambda w, c: lca(w, word_mask, regions, region_mask, c), words, prototypes)
    assert all(torch.isfinite(x).all() for x in results)


# -- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("fill", [math.inf, math.nan])
def test_padding_counts_nowhere(assignment: str, fill: float) -> None:
    """Padding changes neither the value nor the gradient, whatever and however much it holds."""

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        words, word_mask, regions, region_mask, prototypes = inputs
        loss = lambda w, c: lca(w, word_mask, regions, region_mask, c, assignment=assignment)  # noqa: E731
        value, of_words, of_prototypes = value_and_gradient(loss, words, prototypes)
        return value, of_words[word_mask], of_prototypes

    for extra in (0, 3):
        for got, wanted in zip(run(words_and_regions(fill, extra)), run(words_and_regions()), strict=True):
            close(got, wanted)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_order_of_pairs_and_the_length_of_features_do_not_matter(assignment: str) -> None:
    words, word_mask, regions, region_mask, prototypes = words_and_regions()
    order, factors = torch.tensor([2, 0, 3, 1]), torch.linspace(0.01, 90, 4, dtype=torch.float64)[:, None, None]
    wanted = lca(words, word_mask, regions, region_mask, prototypes, assignment=assignment)
    moved = (x[order] for x in (words, word_mask, regions, region_mask))
    close(lca(*moved, prototypes, assignment=assignment), wanted)
    scaled = words * factors, word_mask, regions * factors.flip(0), region_mask
    close(lca(*scaled, prototypes * torch.linspace(0.1, 9, K)[:, None], assignment=assignment), wanted)


# -- precision and compilation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("assignment", [pytest.param("sinkhorn", marks=pytest.mark.slow), "softmax"])
def test_half_types_autocast_and_compilation(assignment: str) -> None:
    words, word_mask, regions, region_mask, prototypes = words_and_regions()

    def loss(words: Tensor, prototypes: Tensor, like: Tensor | None = None) -> Tensor:
        own = regions.to(words.dtype if like is None else like.dtype).to(words.dtype)
        return lca(words, word_mask, own, region_mask, prototypes, assignment=assignment)

    for dtype in (torch.bfloat16, torch.float16):
        halves = words.to(dtype), prototypes.to(dtype)
        got = loss(*halves)
        assert got.dtype == torch.float32
        close(got, loss(*(x.double() for x in halves), like=halves[0]), rtol=1e-5, atol=1e-5)
    floats = words.float(), prototypes.float()
    want = value_and_gradient(loss, *floats)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(*floats)
    assert torch.equal(value, want[0]) and value.dtype == torch.float32
    compiles(loss, words, prototypes)
    scores, mask = numbers(4, 6, K).tanh().bfloat16(), torch.ones(4, 6, dtype=torch.bool)
    torch.testing.assert_close(sinkhorn_bias(scores, mask), sinkhorn_bias(scores.float(), mask))


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": torch.zeros(4, D)}, r"words and regions must be \[b, t, d\] and \[b, l, d\]"),
        ({"words": torch.zeros(3, 4, D)}, r"words and regions must .* got \(3, 4, 5\) and \(4, 5, 5\)"),
        ({"word_mask": torch.ones(4, 4)}, "word_mask must be a bool tensor"),
        ({"region_mask": torch.ones(4, 6, dtype=torch.bool)}, "region_mask must"),
        ({"prototypes": torch.zeros(K, D + 1)}, r"prototypes must be \[k, 5\]"),
        ({"prototypes": torch.full((K, D), 1e30)}, "prototypes holds values"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor], message: str) -> None:
    names = ("words", "word_mask", "regions", "region_mask", "prototypes")
    with pytest.raises((ValueError, CoderError), match=message):
        lca(**{**dict(zip(names, words_and_regions(), strict=True)), **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": math.inf}, "temperature must be > 0"),
        ({"assignment": "sinkhon"}, "assignment must be 'sinkhorn' or 'softmax', got 'sinkhon'"),
        ({"epsilon": 0.01}, "epsilon must be >= 0.03"),
        ({"epsilon": math.nan}, "epsilon must be >= 0.03 and finite, got nan"),
        ({"iterations": 0}, "iterations must be >= 1"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    for call in (lambda: lca(*words_and_regions(), **options), lambda: LCA(**options)):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="direction must be one of word_to_region, region_to_word, dual, got 'both'"):
        LCA(direction="both")


# -- the term --------------------------------------------------------------------------------------------------------

#: label: objective, options of heads
LOSSES: dict[str, selfalign.Loss] = {
    "lca": ("lca", {}),
    "softmax": ("lca(assignment=softmax,temperature=0.3)", {}),
    "dual": ("lca(direction=dual,iterations=4,epsilon=0.1)", {}),
    "region to word": ("lca(direction=region_to_word)", {}),
    "noun": ("lca(direction=dual)", {"alignment.words": "noun"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_term_equals_its_function(name: str) -> None:
    model, batch = Model(LOSSES[name], local_loss=name == "softmax"), joint(2)
    got = model.loss()(**model(batch))
    assert got.keys() == {"lca_loss"}
    words, word_mask, regions, region_mask = model.towers(batch)
    if name == "noun":
        word_mask = word_mask & (batch["text_tags"] == 1)
        assert not word_mask.any(1).all()  # a text of which no word counts adds zero, in both directions
    options = dict(model.objective.terms[0].options)
    direction = options.pop("direction", "word_to_region")
    sides, prototypes = ((words, word_mask), (regions, region_mask)), model.coder.heads["alignment"].prototypes
    wanted = []
    if direction != "region_to_word":
        wanted.append(lca(*sides[0], *sides[1], prototypes, **options))
    if direction != "word_to_region":
        wanted.append(lca(*sides[1], *sides[0], prototypes, **options))
    close(got["lca_loss"], sum(wanted) / len(wanted))


@pytest.mark.parametrize("direction", ["word_to_region", "dual"])
def test_the_term_hands_its_parts_to_the_head(direction: str) -> None:
    model, batch = Model((f"2*lca(direction={direction})", {})), joint(2)
    head, loss = model.coder.heads["alignment"], model.loss()(**model(batch))
    assert loss.keys() == {"lca_loss"} and head.health() == {}
    model.coder.post_step()
    words, word_mask, regions, region_mask = model.towers(batch)
    sides = valid(words, word_mask), valid(regions, region_mask)
    parts = [reference.lca_parts(*sides, head.prototypes.tolist())]
    if direction == "dual":
        parts.append(reference.lca_parts(*sides[::-1], head.prototypes.tolist()))
    value, entropy = (sum(values) / len(parts) for values in zip(*parts, strict=True))
    assert loss["lca_loss"].item() == pytest.approx(2 * value, rel=1e-6)
    assert head.health() == pytest.approx({"divergence": value - entropy, "entropy": entropy}, rel=1e-6)
    assert model.coder.health().keys() == {"alignment/divergence", "alignment/entropy"}


def test_only_the_side_that_predicts_learns() -> None:
    """Word to region: the image's locals are targets; region to word: the words'."""
    for name, still in (("lca", "image"), ("region to word", "text")):
        model = Model(LOSSES[name])
        model.requires_grad_(True)
        sum(model.loss()(**model(joint(2))).values()).backward()  # type: ignore[union-attr]
        silent = {key.split(".")[0] for key, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert silent == {still, "image_context", "text_context"}


def test_options_of_the_term_are_those_of_its_function() -> None:
    same_options(LCA, lca, only_term={"direction"}, only_function=set())
    assert LCA().supports == {"same_image"}
    assert LCA(direction="dual").requires[-2:] == ("coder_word_regions", "coder_region_words")


# -- several ranks ---------------------------------------------------------------------------------------------------


def placed(ranks: int) -> dict[str, Any]:
    """A step whose prototypes start as regions: plain, and with the head's parameters sharded by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    found = {}
    for kind in ("plain", "sharded") if ranks > 2 else ("plain",):  # FSDP takes seconds to import
        model, batch = Model(LOSSES["lca"]), joint(ranks)
        torch.manual_seed(distributed.rank())  # ranks draw differently
        head = Alignment(selfalign.WIDTHS, prototypes=2 * ranks, init="regions").double()
        start = head.prototypes.detach().clone()
        distributed.broadcast(start)
        head.load_state_dict({**head.state_dict(), "prototypes": start})
        model.coder.heads["alignment"] = head
        if kind == "sharded":
            fully_shard(model.coder, mesh=init_device_mesh("cpu", (ranks,)))
        model.loss()(**model(selfalign.share(batch, distributed.rank())))["lca_loss"].backward()
        model.coder.post_step()
        weight = head.prototypes.detach()
        found[kind] = (weight.full_tensor() if kind == "sharded" else weight, start, head.health())
    return found


def work(ranks: int) -> dict[str, Any]:
    part = (torch.arange(3.0, dtype=torch.float64) + distributed.rank()).requires_grad_()
    sums = (distributed.all_sum(part), part.detach())
    cases = [(name, False) for name in LOSSES]
    return {"steps": selfalign.steps(LOSSES, cases, ranks), "sums": sums, "placed": placed(ranks)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return gloo.run(work, request.param, ranks=request.param, timeout=240)


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_equal_one_process_with_the_joint_batch(results: list[dict[str, Any]], name: str) -> None:
    selfalign.ranks_equal_one_process(LOSSES[name], [result["steps"][name, False] for result in results])


def test_the_comparison_can_fail(results: list[dict[str, Any]]) -> None:
    """Each option matters, and the ranks' own shares differ."""
    for other in ("noun", "dual"):
        one, two = (selfalign.alone(LOSSES[name], len(results))["losses"] for name in ("lca", other))
        assert one != pytest.approx(two, rel=1e-4)
    for name in ("lca", "noun"):
        local = [sum(result["steps"][name, False]["losses"].values()) for result in results]
        assert max(local) - min(local) > 1e-3, name


def test_regions_of_all_ranks_become_prototypes(results: list[dict[str, Any]]) -> None:
    """Each rank gives its share, and all ranks then have the same prototypes, sharded or not."""
    ranks = len(results)
    model, batch = Model(LOSSES["lca"]), joint(ranks)
    words, word_mask, regions, region_mask = model.towers(batch)
    units = normalize(regions, dim=-1).detach()
    for kind, (prototypes, start, health) in results[0]["placed"].items():
        assert all(torch.equal(each["placed"][kind][0], prototypes) for each in results)
        assert all(each["placed"][kind][2] == health for each in results) and health["placed"] == 1.0
        assert not torch.isclose(prototypes, start).all(1).any()
        for row, prototype in enumerate(prototypes):
            rank = row // 2  # of 2 * ranks prototypes each rank gives two
            own = slice(rank * selfalign.PAIRS, (rank + 1) * selfalign.PAIRS)
            assert (units[own][region_mask[own]] @ prototype).max() > 1 - 1e-10
        assert torch.unique(prototypes.round(decimals=8), dim=0).shape == prototypes.shape
        # the log has the means over ranks
        matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
        scores = prototype_scores(words, start), prototype_scores(regions, start)
        options = {"assignment": "sinkhorn", **OPTIONS}
        wanted = lca_from_scores(scores[0], word_mask, scores[1], region_mask, matched, **options)
        got = health["divergence"] + health["entropy"], health["entropy"]
        assert got == pytest.approx([value.item() for value in wanted], rel=1e-6)


def test_sum_over_ranks(results: list[dict[str, Any]]) -> None:
    ranks = len(results)
    for rank, result in enumerate(results):
        total, untouched = result["sums"]
        wanted = ranks * torch.arange(3.0, dtype=torch.float64) + sum(range(ranks))
        assert torch.equal(total, wanted) and not total.requires_grad
        assert torch.equal(untouched, torch.arange(3.0, dtype=torch.float64) + rank)
    part = torch.ones(2, requires_grad=True)  # on one process
    assert torch.equal(distributed.all_sum(part), part) and not distributed.all_sum(part).requires_grad


# -- accumulation ----------------------------------------------------------------------------------------------------


def test_accumulation_equals_the_joint_batch(tiny_model: str) -> None:
    from accelerate import Accelerator

    from coder_plugin.model import create_loss, create_model
    from coder_plugin.objective import Objective
    from coder_plugin.training.step import forward_backward

    torch.manual_seed(0)
    objective = Objective.parse("triplet + lca(direction=dual)").with_options({"alignment.prototypes": 5})
    model = create_model(tiny_model, loss=objective).train()
    loss, accelerator = create_loss(model.coder.objective, model=model), Accelerator(cpu=True)
    generator = drawing(1)
    words = torch.randint(1, 400, (10, 40), generator=generator)
    for row in range(10):  # texts of 4 to 22 tokens
        words[row, 3 + 2 * row], words[row, 4 + 2 * row :] = 49407, 0
    images = torch.randn(10, 3, 64, 64, generator=generator)
    joint_batch = {"image": images, "text": words, "image_id": torch.arange(10) // 2}

    def run(sizes: list[int]) -> tuple[dict[str, float], Tensor]:
        model.zero_grad()
        parts = {key: value.split(sizes) for key, value in joint_batch.items()}
        batches = [{key: parts[key][i] for key in parts} for i in range(len(sizes))]
        step = forward_backward(model, loss, batches, accelerator)
        return step.losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    (losses, gradient), (other, wanted) = run([3, 3, 4]), run([10])
    assert losses == pytest.approx(other, rel=1e-5) and set(losses) == {"triplet_loss", "lca_loss"}
    assert (gradient - wanted).norm() / wanted.norm() <= 1e-5
