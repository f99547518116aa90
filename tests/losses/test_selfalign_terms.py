"""The terms ``lca`` and ``cra``: equal to their functions on one process, and to the joint batch on two and three.

The worker functions run on all ranks and return their results; the tests compare. One start serves all tests of a world size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from coder_plugin import distributed
from coder_plugin.coder import Coder, CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.functional import cosine, cra, lca, triplet
from coder_plugin.functional.lca_loss import correspondence, lca_from_scores, prototype_scores
from coder_plugin.heads.alignment import Alignment
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.objective import Objective
from coder_plugin.resolver import INTERMEDIATE_KEYS, resolve
from tests import gloo
from tests.references import selfalign as reference
from tests.references.triplet import triplet as reference_triplet

PAIRS, L, T, D, K = 4, 3, 6, 5, 4  # pairs of each rank
LONGEST = (4, 6, 2)  # text of each rank, whose tower cuts the rest
KEYS = frozenset({"image_features", "text_features", "logit_scale"})
WIDTHS = BackboneInfo(embed_dim=D, image_locals=D, text_locals=D, image_contexts=D, text_contexts=D)

#: label: objective, options of heads
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "lca": ("lca", {}),
    "lca softmax": ("lca(assignment=softmax,temperature=0.3)", {}),
    "lca dual": ("lca(direction=dual,iterations=4,epsilon=0.1)", {}),
    "lca region to word": ("lca(direction=region_to_word)", {}),
    "lca noun": ("lca(direction=dual)", {"alignment.words": "noun"}),
    "cra": ("cra(hard_negatives=4)", {}),
    "cra not masked": ("cra(hard_negatives=4,mask_same_image=false)", {}),
    "cra all negatives": ("cra(hardest=false,margin=0.5,temperature=0.2)", {}),
    "cra sum": ("cra(hard_negatives=7,reduction=sum,margin=0.5)", {}),
    "cra sum all": ("cra(hard_negatives=7,reduction=sum,hardest=false,margin=0.5)", {}),
    "cra combined": ("cra(hard_negatives=4,ca_on=combined,margin=0.5)", {}),
    "cra combined sum": ("cra(hard_negatives=1,ca_on=combined,reduction=sum,margin=0.5)", {}),
    "cra combined weighted": ("cra(hard_negatives=4,ca_on=combined,margin=0.5)", {"contexts.weight": 0.3}),
    "cra mean of cosines": ("cra(hard_negatives=4,ca_on=combined)", {"contexts.score": "mean_of_cosines"}),
    "cra without triplet": ("cra(hard_negatives=4,ca_on='none')", {}),
    "cra text_global": ("cra(hard_negatives=4)", {"contexts.branches": "text_global"}),
    "cra image_global": ("cra(hard_negatives=4)", {"contexts.branches": "image_global", "contexts.gate": "mlp"}),
    "cra without contrast": ("cra", {"contexts.branches": "none"}),
    "all": ("triplet(reduction=sum) + 0.5*lca + 2*cra(hard_negatives=4,reduction=sum)", {}),
}
CASES = [(name, False) for name in LOSSES]
CASES += [(name, True) for name in ("cra", "cra sum", "cra sum all", "cra combined", "cra combined weighted", "all")]


class Model(nn.Module):
    """Towers of a matrix for the locals and one for the contexts, with the objective's heads."""

    def __init__(self, name: str, *, local_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        text, options = LOSSES[name]
        with_lca = {"alignment.prototypes": K} if "lca" in text else {}
        self.objective = replace(Objective.parse(text).with_options({**with_lca, **options}), local_loss=local_loss)
        resolution = resolve(self.objective, KEYS, INTERMEDIATE_KEYS)
        self.image, self.text, self.image_context, self.text_context = (nn.Linear(D, D) for _ in range(4))
        self.coder = Coder(self.objective, resolution, WIDTHS)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
        self.double()
        # DDP needs every parameter to get a gradient: freeze what no term reads, and the side that is a constant target
        frozen: list[nn.Module] = [] if "cra" in text else [self.image_context, self.text_context]
        frozen += [] if "lca" in text and ("region_to_word" in text or "dual" in text) else [self.image]
        frozen += [] if "lca" in text and "region_to_word" not in text else [self.text]
        if name == "cra without triplet":
            frozen += [guide.gate for guide in self.coder.heads["contexts"].guides.values()]
        for module in frozen:
            module.requires_grad_(False)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = {key: batch[key] for key in ("image_context_mask", "text_context_mask", "text", "image_id", "text_tags")}
        for side in ("image", "text"):
            inputs[f"{side}_locals"] = getattr(self, side)(batch[side + "_tokens"])
            inputs[f"{side}_contexts"] = getattr(self, f"{side}_context")(batch[side + "_tokens"])
            sums = (inputs[f"{side}_contexts"] * batch[f"{side}_context_mask"][..., None]).sum(1)
            inputs[f"{side}_features"] = normalize(sums, dim=1)
        features = {key: inputs[key] for key in ("image_features", "text_features")}
        return {**features, **self.coder(inputs)}

    def loss(self) -> CoderLoss:
        return CoderLoss(self.objective, self.coder.bindings, self.coder.heads)


def joint(ranks: int) -> dict[str, Tensor]:
    """Pairs of all ranks. The first of every rank is one image, and rank 0 has another one twice; rank 1 has no noun."""
    generator = torch.Generator().manual_seed(ranks)
    rows = ranks * PAIRS
    longest = torch.tensor(LONGEST[:ranks]).repeat_interleave(PAIRS)
    lengths = (torch.randint(1, T + 1, (rows,), generator=generator)).minimum(longest)
    lengths[::PAIRS] = longest[::PAIRS]
    ids = torch.arange(rows) + 2**62
    ids[::PAIRS] = 2**62
    ids[2] = ids[1]
    tags = torch.randint(0, 3, (rows, T), generator=generator)
    tags[PAIRS : 2 * PAIRS] = 4
    regions = torch.randint(1, L + 1, (rows,), generator=generator)
    return {
        "image_tokens": torch.randn(rows, L, D, generator=generator, dtype=torch.float64),
        "image_context_mask": torch.arange(L) < regions[:, None],
        "text_tokens": torch.randn(rows, T, D, generator=generator, dtype=torch.float64),
        "text_context_mask": torch.arange(T) < lengths[:, None],
        "text": torch.zeros(rows, T, dtype=torch.int64),
        "text_tags": tags,
        "image_id": ids,
    }


def share(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    part = {key: value[rank * PAIRS : (rank + 1) * PAIRS] for key, value in batch.items()}
    return part | {key: part[key][:, : LONGEST[rank]] for key in ("text_tokens", "text_context_mask")}


def step(name: str, local_loss: bool, ranks: int) -> dict[str, Any]:
    """Losses, gradients and statistics of this process's share of the joint batch; of all of it on one process."""
    model = Model(name, local_loss=local_loss)
    loss, batch = model.loss(), joint(ranks)
    several = distributed.world_size() > 1
    if several:
        batch = share(batch, distributed.rank())
    # its buffers are not broadcast: each rank must compute the same statistics
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if several else model
    for _ in range(2):  # DDP tells of unused parameters at the second step
        model.zero_grad()
        losses = loss(**wrapped(batch))
        sum(losses.values()).backward()  # type: ignore[union-attr]
    return {
        "losses": {key: value.item() for key, value in losses.items()},
        "gradients": {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad},
        "buffers": {key: value.clone() for key, value in model.named_buffers()},
    }


def place(ranks: int) -> dict[str, Any]:
    """A step of LCA whose prototypes start as regions: plain, and with the head's parameters sharded by FSDP2."""
    found = {}
    for kind in ("plain", "sharded"):
        model, batch = Model("lca"), joint(ranks)
        torch.manual_seed(distributed.rank())  # ranks draw differently
        widths = BackboneInfo(embed_dim=D, image_locals=D, text_locals=D)
        head = Alignment(widths, prototypes=2 * ranks, init="regions").double()
        start = head.prototypes.detach().clone()
        distributed.broadcast(start)
        head.load_state_dict({**head.state_dict(), "prototypes": start})
        model.coder.heads["alignment"] = head
        if kind == "sharded":
            fully_shard(model.coder, mesh=init_device_mesh("cpu", (ranks,)))
        if distributed.world_size() > 1:
            batch = share(batch, distributed.rank())
        model.loss()(**model(batch))["lca_loss"].backward()
        model.coder.post_step()
        weight = head.prototypes.detach()
        found[kind] = (weight.full_tensor() if kind == "sharded" else weight, start, head.health())
    return found


def work(ranks: int) -> dict[str, Any]:
    steps = {case: step(*case, ranks) for case in CASES}
    rank = distributed.rank()
    part = (torch.arange(3.0, dtype=torch.float64) + rank).requires_grad_()
    sums = (distributed.all_sum(part), part.detach())
    return {"steps": steps, "sums": sums, "placed": place(ranks)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return gloo.run(work, request.param, ranks=request.param, timeout=240)


@cache
def expected(name: str, ranks: int) -> dict[str, Any]:
    return step(name, False, ranks)


def close(got: Tensor, wanted: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(("name", "local_loss"), CASES)
def test_ranks_equal_one_process_with_the_joint_batch(results, name, local_loss):
    ranks = len(results)
    wanted, per_rank = expected(name, ranks), [result["steps"][name, local_loss] for result in results]
    for key, value in wanted["losses"].items():
        assert sum(each["losses"][key] for each in per_rank) / ranks == pytest.approx(value, rel=1e-10, abs=1e-12)
    for each in per_rank:
        for kind in ("gradients", "buffers"):
            assert each[kind].keys() == wanted[kind].keys()
            for key, value in wanted[kind].items():
                close(each[kind][key], value, key)
        assert all(torch.equal(value, per_rank[0]["buffers"][key]) for key, value in each["buffers"].items())


def test_the_comparison_can_fail(results):
    """Each option matters, and the ranks' own shares differ."""
    ranks = len(results)
    for one, two in (("cra", "cra not masked"), ("cra", "cra all negatives"), ("lca", "lca noun"), ("lca", "lca dual")):
        assert expected(one, ranks)["losses"] != pytest.approx(expected(two, ranks)["losses"], rel=1e-4)
    for name in LOSSES:
        gradients = expected(name, ranks)["gradients"]
        assert all(value.norm() > 1e-4 for key, value in gradients.items() if key.endswith("weight")), name
    for name in ("lca", "lca noun", "cra sum", "cra combined", "all"):
        local = [sum(result["steps"][name, (name, True) in CASES]["losses"].values()) for result in results]
        assert max(local) - min(local) > 1e-3, name


def test_regions_of_all_ranks_become_prototypes(results):
    """Each rank gives its share, and all ranks then have the same prototypes, sharded or not."""
    ranks = len(results)
    model, batch = Model("lca"), joint(ranks)
    units = normalize(model.image(batch["image_tokens"]), dim=-1).detach()
    for kind in ("plain", "sharded"):
        prototypes, start, health = results[0]["placed"][kind]
        assert all(torch.equal(each["placed"][kind][0], prototypes) for each in results)
        assert all(each["placed"][kind][2] == health for each in results) and health["placed"] == 1.0
        assert not torch.isclose(prototypes, start).all(1).any()
        for row, prototype in enumerate(prototypes):
            rank = row // 2  # of 2 * ranks prototypes each rank gives two
            own = slice(rank * PAIRS, (rank + 1) * PAIRS)
            candidates = units[own][batch["image_context_mask"][own]]
            assert (candidates @ prototype).max() > 1 - 1e-10
        assert torch.unique(prototypes.round(decimals=8), dim=0).shape == prototypes.shape
        # the log has the means over ranks
        loss = health["divergence"] + health["entropy"]
        pairs = towers(batch, model, "locals")
        matched = correspondence(*pairs).argmax(2)
        scores = prototype_scores(pairs[0], start), prototype_scores(pairs[2], start)
        options = {"temperature": 0.1, "assignment": "sinkhorn", "epsilon": 0.05, "iterations": 2}
        wanted = lca_from_scores(scores[0], pairs[1], scores[1], pairs[3], matched, **options)
        assert (loss, health["entropy"]) == pytest.approx([value.item() for value in wanted], rel=1e-6)


def test_sum_over_ranks(results):
    ranks = len(results)
    for rank, result in enumerate(results):
        total, untouched = result["sums"]
        wanted = ranks * torch.arange(3.0, dtype=torch.float64) + sum(range(ranks))
        assert torch.equal(total, wanted) and not total.requires_grad
        assert torch.equal(untouched, torch.arange(3.0, dtype=torch.float64) + rank)


def test_sum_on_one_process():
    part = torch.ones(2, requires_grad=True)
    assert torch.equal(distributed.all_sum(part), part) and not distributed.all_sum(part).requires_grad


# equal to their functions


def towers(batch: dict[str, Tensor], model: Model, kind: str) -> tuple[Tensor, ...]:
    suffix = "_context" if kind == "contexts" else ""
    image, text = getattr(model, f"image{suffix}")(batch["image_tokens"]), getattr(model, f"text{suffix}")(batch["text_tokens"])
    return text, batch["text_context_mask"], image, batch["image_context_mask"]


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("lca")])
def test_lca_equals_its_function(name, local_loss):
    model, batch = Model(name, local_loss=local_loss), joint(2)
    got = model.loss()(**model(batch))
    assert got.keys() == {"lca_loss"}
    words, word_mask, regions, region_mask = towers(batch, model, "locals")
    if name == "lca noun":
        word_mask = word_mask & (batch["text_tags"] == 1)
    options = dict(model.objective.terms[0].options)
    direction = options.pop("direction", "word_to_region")
    prototypes = model.coder.heads["alignment"].prototypes
    wanted = []
    if direction != "region_to_word":
        wanted.append(lca(words, word_mask, regions, region_mask, prototypes, **options))
    if direction != "word_to_region":
        # the function wants a target in each row; a text of which no word counts adds zero
        rows = word_mask.any(1)
        part = lca(regions[rows], region_mask[rows], words[rows], word_mask[rows], prototypes, **options)
        wanted.append(part * rows.sum() / len(rows))
        assert rows.all() == (name != "lca noun")
    close(got["lca_loss"], sum(wanted) / len(wanted))


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("cra")])
def test_cra_equals_its_functions(name, local_loss):
    model, batch = Model(name, local_loss=local_loss), joint(2)
    out, options = model(batch), dict(model.objective.terms[0].options)
    got = model.loss()(**out)
    ids = batch["image_id"] if options.get("mask_same_image", True) else None
    wanted = {}
    contrast = {key: options[key] for key in ("temperature", "hard_negatives") if key in options}
    branches = [
        cra(
            out[f"coder_{guide}_guide"],
            out[f"coder_{side}_locals"],
            out[f"coder_{side}_locals_mask"],
            image_ids=ids,
            **contrast,
        )
        for guide, side in (("text", "image"), ("image", "text"))
        if f"coder_{guide}_guide" in out
    ]
    assert len(branches) == {"cra text_global": 1, "cra image_global": 1, "cra without contrast": 0}.get(name, 2)
    if branches:
        wanted["cra_contrast_loss"] = sum(branches) / 2
    score = cosine(out["coder_image_contexts"], out["coder_text_contexts"])
    if options.get("ca_on") == "combined":
        score = (0.3 if name == "cra combined weighted" else 1.0) * score + cosine(out["image_features"], out["text_features"])
    if options.get("ca_on") != "none":
        options_of_triplet = {key: options[key] for key in ("margin", "hardest", "reduction") if key in options}
        wanted["cra_triplet_loss"] = triplet(score, image_ids=ids, **options_of_triplet)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        close(got[key], value, key)
        assert value > 0.01


def test_the_combined_hinge_takes_the_best_view():
    model = Model("cra combined")
    out = model(joint(2))
    views = normalize(torch.randn(2 * PAIRS, 3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=-1)
    out["image_features"] = views
    base = torch.einsum("ivd,td->itv", views, out["text_features"]).amax(2)
    score = base + out["coder_image_contexts"] @ out["coder_text_contexts"].T
    close(model.loss()(**out)["cra_triplet_loss"], triplet(score, margin=0.5, image_ids=joint(2)["image_id"]))


@pytest.mark.parametrize("weight", [0.3, 2.5])
def test_the_combined_hinge_weighs_the_context_score(weight):
    """S_b + weight * S_c, the score that retrieval uses, against one pair at a time."""
    LOSSES["weighted"] = ("cra(ca_on=combined,margin=0.5)", {"contexts.weight": weight})
    try:
        model = Model("weighted")
    finally:
        del LOSSES["weighted"]
    batch = joint(2)
    out = model(batch)
    rows = {key: out[key].tolist() for key in ("image_features", "text_features")}
    blocks = {side: out[f"coder_{side}_contexts"].tolist() for side in ("image", "text")}

    def inner(one: list[float], other: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(one, other, strict=True))

    score = [
        [inner(v, t) + weight * inner(image, text) for t, text in zip(rows["text_features"], blocks["text"], strict=True)]
        for v, image in zip(rows["image_features"], blocks["image"], strict=True)
    ]
    wanted = reference_triplet(score, batch["image_id"].tolist(), margin=0.5)
    assert model.loss()(**out)["cra_triplet_loss"].item() == pytest.approx(wanted, rel=1e-10)
    plain = [
        [value + (1 - weight) * inner(image, text) for value, text in zip(row, blocks["text"], strict=True)]
        for row, image in zip(score, blocks["image"], strict=True)
    ]
    assert abs(reference_triplet(plain, batch["image_id"].tolist(), margin=0.5) - wanted) > 1e-3


@pytest.mark.parametrize("direction", ["word_to_region", "dual"])
def test_lca_hands_its_parts_to_the_head(direction):
    LOSSES["parts"] = (f"2*lca(direction={direction})", {})
    try:
        model = Model("parts")
    finally:
        del LOSSES["parts"]
    batch, head = joint(2), model.coder.heads["alignment"]
    loss = model.loss()(**model(batch))
    assert loss.keys() == {"lca_loss"} and head.health() == {}
    model.coder.post_step()
    words, word_mask, regions, region_mask = towers(batch, model, "locals")
    pairs = (words, word_mask), (regions, region_mask)
    sides = [[row[mask].tolist() for row, mask in zip(*side, strict=True)] for side in pairs]
    parts = [reference.lca_parts(sides[0], sides[1], head.prototypes.tolist())]
    if direction == "dual":
        parts.append(reference.lca_parts(sides[1], sides[0], head.prototypes.tolist()))
    value, entropy = (sum(values) / len(parts) for values in zip(*parts, strict=True))
    assert loss["lca_loss"].item() == pytest.approx(2 * value, rel=1e-6)
    assert head.health() == pytest.approx({"divergence": value - entropy, "entropy": entropy}, rel=1e-6)
    assert model.coder.health().keys() == {"alignment/divergence", "alignment/entropy"}


def test_only_the_side_that_predicts_learns():
    """Word to region: the image's locals are targets; region to word: the words'."""
    for name, still in (("lca", "image"), ("lca region to word", "text")):
        model = Model(name)
        model.requires_grad_(True)
        sum(model.loss()(**model(joint(2))).values()).backward()  # type: ignore[union-attr]
        silent = {key.split(".")[0] for key, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert silent == {still, "image_context", "text_context"}


# refusals


def test_nothing_to_learn_is_an_error():
    LOSSES["nothing"] = ("cra(ca_on='none')", {"contexts.branches": "none"})
    try:
        model = Model("nothing")
        with pytest.raises(ValueError, match=r"cra\(ca_on=none\) with contexts.branches=none leaves nothing to learn"):
            model.loss()(**model(joint(2)))
    finally:
        del LOSSES["nothing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lca(direction=both)", "direction"),
        ("lca(assignment=hard)", "assignment"),
        ("lca(temperature=0.0)", "temperature must be > 0"),
        ("lca(epsilon=0.001)", "epsilon must be >= 0.03"),
        ("lca(iterations=0)", "iterations must be >= 1"),
        ("cra(hard_negatives=0)", "hard_negatives must be >= 1"),
        ("cra(temperature=-1.0)", "temperature must be > 0"),
        ("cra(ca_on=all)", "ca_on"),
        ("cra(reduction=max)", "reduction"),
    ],
)
def test_options_out_of_range_are_named(text, message):
    with pytest.raises((ValueError, CoderError), match=message):
        resolve(Objective.parse(text), KEYS, INTERMEDIATE_KEYS)


# accumulation


@pytest.mark.parametrize("text", ["triplet + lca", "triplet + lca(direction=dual)"])
def test_accumulated_lca_equals_the_joint_batch(tiny_model, text):
    from accelerate import Accelerator

    from coder_plugin.model import create_loss, create_model
    from coder_plugin.training.step import forward_backward

    torch.manual_seed(0)
    model = create_model(tiny_model, loss=Objective.parse(text).with_options({"alignment.prototypes": 5})).train()
    loss, accelerator = create_loss(model.coder.objective, model=model), Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 400, (10, 40), generator=generator)
    for row in range(10):  # texts of 4 to 22 tokens
        words[row, 3 + 2 * row], words[row, 4 + 2 * row :] = 49407, 0
    joint_batch = {
        "image": torch.randn(10, 3, 64, 64, generator=generator),
        "text": words,
        "image_id": torch.arange(10) // 2,
    }

    def run(sizes: list[int]) -> tuple[dict[str, float], Tensor]:
        model.zero_grad()
        parts = {key: value.split(sizes) for key, value in joint_batch.items()}
        batches = [{key: parts[key][i] for key in parts} for i in range(len(sizes))]
        step = forward_backward(model, loss, batches, accelerator)
        return step.losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    (losses, gradient), (other, wanted) = run([3, 3, 4]), run([10])
    assert losses == pytest.approx(other, rel=1e-5) and set(losses) == {"triplet_loss", "lca_loss"}
    assert (gradient - wanted).norm() / wanted.norm() <= 1e-5
