"""Distillation: a slow reference, open_clip's own class, derivatives, what is refused, and the term on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from open_clip.loss import DistillClipLoss
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import create_loss, create_model
from coder_plugin.errors import CoderError
from coder_plugin.functional import distill
from coder_plugin.losses.distill import Distill
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from tests.losses.checks import compiles, raises_halves, ranks_equal_one_process
from tests.losses.drawn import drawing, make_loss, second_order, transforms
from tests.references import distill as reference

NAMES = ("image_features", "text_features", "teacher_image_features", "teacher_text_features")
SIMILARITY = {"kind": "similarity", "logit_scale": 3.0, "teacher_logit_scale": 2.0}


def features(n: int = 7, d: int = 6, e: int = 6, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = drawing(n)
    drawn = [torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (d, d, e, e)]
    return {name: normalize(each, dim=1).to(dtype) for name, each in zip(NAMES, drawn, strict=True)}


def outputs(given: dict[str, Tensor], scale: float = 8.0, teacher_scale: float = 5.0) -> dict[str, Tensor]:
    """A model's keys."""
    keys = {f"coder_{name}" if name.startswith("teacher") else name: value for name, value in given.items()}
    n, dtype = len(given["image_features"]), given["image_features"].dtype
    scales = {"logit_scale": torch.tensor(scale, dtype=dtype)}
    return {**keys, **scales, "coder_teacher_logit_scale": torch.full((n,), teacher_scale, dtype=dtype)}


@pytest.mark.parametrize("local_loss", [False, True])
def test_features_by_the_slow_reference(local_loss: bool) -> None:
    given = features()
    want = reference.of_features(*(given[name].tolist() for name in NAMES))
    assert float(distill(**given)) == pytest.approx(want, rel=1e-12)
    value = make_loss("distill", local_loss=local_loss)(**outputs(given))["distill_loss"]
    assert float(value) == pytest.approx(want, rel=1e-12)
    cosines = [(given[name] * given[f"teacher_{name}"]).sum(1).mean() for name in NAMES[:2]]
    assert float(distill(**given)) == pytest.approx(float(4 - 2 * sum(cosines)), rel=1e-12)  # of unit vectors
    assert float(distill(**{**given, **{f"teacher_{name}": given[name] for name in NAMES[:2]}})) == 0


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("e", [6, 9])
def test_similarity_by_the_slow_reference(e: int, local_loss: bool) -> None:
    """Also of a teacher of another width; each with its own scale, or both at one temperature."""
    given = features(e=e)
    rows = [given[name].tolist() for name in NAMES]
    for options, scales in (("", (8.0, 5.0)), (",temperature=0.5", (2, 2))):
        value = make_loss(f"distill(kind=similarity{options})", local_loss=local_loss)(**outputs(given))["distill_loss"]
        assert float(value) == pytest.approx(reference.of_similarity(*rows, *scales), rel=1e-12)
    assert reference.of_similarity(*rows, 8.0, 5.0) != pytest.approx(reference.of_similarity(*rows, 5.0, 8.0), rel=1e-3)


def test_similarity_is_open_clips_own_distillation() -> None:
    given = features(dtype=torch.float32)
    student = {name: given[name].clone().requires_grad_() for name in NAMES[:2]}
    theirs = {name: given[name].clone().requires_grad_() for name in NAMES[:2]}
    scale, their_scale = (torch.tensor(8.0, requires_grad=True) for _ in range(2))
    ours = make_loss("clip + distill(kind=similarity)")(**{**outputs(given), **student, "logit_scale": scale})
    want = DistillClipLoss()(
        **theirs,
        logit_scale=their_scale,
        dist_image_features=given["teacher_image_features"],
        dist_text_features=given["teacher_text_features"],
        dist_logit_scale=torch.tensor(5.0),
        output_dict=True,
    )
    torch.testing.assert_close(ours["distill_loss"], want["distill_loss"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours["clip_loss"], want["contrastive_loss"], rtol=1e-6, atol=1e-6)
    sum(ours.values()).backward()
    sum(want.values()).backward()
    for name in student:
        torch.testing.assert_close(student[name].grad, theirs[name].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale.grad, their_scale.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["features", "similarity"])
def test_the_gradient_reaches_the_student_alone(kind: str) -> None:
    given = {name: value.requires_grad_() for name, value in features(n=4, d=3, e=3).items()}
    scales = [torch.tensor(scale, dtype=torch.float64, requires_grad=True) for scale in (3.0, 2.0)]
    options = {"kind": kind, "logit_scale": scales[0], "teacher_logit_scale": scales[1]}

    def value(images: Tensor, texts: Tensor) -> Tensor:
        return distill(images, texts, given["teacher_image_features"], given["teacher_text_features"], **options)

    student = given["image_features"], given["text_features"]
    second_order(value, *student)
    transforms(value, *student)
    plain = {key: each.detach() for key, each in options.items() if isinstance(each, Tensor)} | {"kind": kind}
    if kind == "features":
        compiles(lambda *x: distill(*x, given[NAMES[2]].detach(), given[NAMES[3]].detach(), **plain), *student)
    value(*student).backward()
    assert [value.grad is None for value in given.values()] == [False, False, True, True]
    assert [scale.grad is None for scale in scales] == [kind == "features", True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "logits"}, "kind must be 'features' or 'similarity', got 'logits'"),
        ({"teacher_text_features": torch.ones(7, 3)}, r"must have one shape \[n, d\]"),
        (dict.fromkeys(NAMES[2:], torch.ones(7, 3)), "take kind='similarity'"),
        ({"kind": "similarity", "logit_scale": 2.0}, "needs logit_scale and teacher_logit_scale"),
        ({**SIMILARITY, **dict.fromkeys(NAMES[2:], torch.ones(3, 3))}, "7 pairs of the student, 3"),
        ({"image_features": torch.full((7, 6), 1e30)}, "image_features holds values"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        distill(**{**features(), **change})


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("distill(kind=logits)", "option kind=logits must be features or similarity"),
        ("distill(kind=similarity,temperature=0)", "temperature must be > 0"),
        ("distill(temperature=0.1)", "temperature applies only to kind='similarity'"),
        ("distill(teacher=7)", "teacher"),
        ("distill(teacher=base) + distill(teacher=other,kind=similarity)", "another term needs base"),
    ],
)
def test_bad_options(expression: str, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        required_heads(Objective.parse(expression))


@pytest.mark.parametrize("expression", ["clip + distill", "distill(kind=similarity)"])
def test_in_a_ring_only_features(expression: str, tiny_model: str) -> None:
    model = create_model(tiny_model, loss=expression)
    if "similarity" in expression:
        with pytest.raises(CoderError, match="does not support gather='ring'"):
            create_loss(expression, model=model, gather="ring")
    else:
        assert create_loss(expression, model=model, gather="ring").terms["distill"].ring


def test_by_hand() -> None:
    """Two pairs, whose first image is (1, 0) of the student and (0.6, 0.8) of the teacher."""
    eye, teacher = torch.eye(2, dtype=torch.float64), torch.tensor([[0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    assert float(distill(eye, eye, teacher, eye)) == pytest.approx((0.4**2 + 0.8**2) / 2)
    p = 1 / (1 + math.exp(-2.0))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)  # of the same features the teacher's own
    scales = {"logit_scale": 2.0, "teacher_logit_scale": 2.0}
    assert float(distill(eye, eye, eye, eye, kind="similarity", **scales)) == pytest.approx(entropy)


@pytest.mark.parametrize("options", [{}, SIMILARITY], ids=str)
def test_half_types_are_raised_and_autocast_changes_nothing(options: dict[str, Any]) -> None:
    raises_halves(lambda *x: distill(*x, **options), *features(n=5).values())


@pytest.mark.parametrize("options", [{}, SIMILARITY], ids=str)
def test_degenerate_batches_stay_finite(options: dict[str, Any]) -> None:
    one, given = features(n=1), features()
    same = {name: given["image_features"][:1].expand(7, 6) for name in NAMES}
    opposite = {**given, "text_features": -given["image_features"]}
    for case in (one, same, {name: each * 0 for name, each in given.items()}, opposite):
        leaves = {name: each.clone().requires_grad_() for name, each in case.items()}
        value = distill(**leaves, **options)
        gradients = torch.autograd.grad(value, [leaves[name] for name in NAMES[:2]])
        assert value.isfinite() and all(each.isfinite().all() for each in gradients)
    with pytest.raises(ValueError, match="hold no pair"):
        distill(**{name: each[:0] for name, each in given.items()}, **options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        Distill(kind="similarity", temperature=temperature)
    with pytest.raises(ValueError, match="kind must be 'features' or 'similarity', got 'logits'"):
        Distill(kind="logits")  # type: ignore[arg-type]


def joint() -> dict[str, Tensor]:
    keys = outputs(features(n=12))
    learned = ("image_features", "text_features", "logit_scale")
    return {key: each.requires_grad_(key in learned) for key, each in keys.items()}


EXPRESSIONS = ("distill", "distill(kind=similarity)", "distill(kind=similarity,temperature=0.3)")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_two_ranks_equal_one_process_with_the_joint_batch(expression: str) -> None:
    ranks_equal_one_process(joint, EXPRESSIONS, expression)
