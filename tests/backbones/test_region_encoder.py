"""Region and text encoders: the authors' formulas on sets without padding, padding, order, gradients, BatchNorm over masks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from coder_plugin.backbones.context import GatedSelfAttention, box_positions
from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.backbones.region_encoder import RegionEncoder
from coder_plugin.backbones.region_options import Options
from coder_plugin.backbones.text_encoder import BertText, BiGRUText
from scripts import convert_released
from tests.backbones import releases
from tests.references import camera, gpo, layers, vse_infinity, vsrn

REGIONS, DIM, HEADS, VIEWS = 5, 8, 2, 3
PEERS = ("vse", "camera", "vsrn", "vsrn bn")
OPTIONS: dict[str, dict[str, Any]] = {
    "vse": {},
    "camera": {"mlp": False, "context": "camera", "image_pooling": "views", "heads": HEADS, "views": VIEWS},
    "vsrn": {"mlp": False, "context": "vsrn", "image_pooling": "gru"},
    "vsrn bn": {"mlp": False, "context": "vsrn", "image_pooling": "gru", "batch_norm": True},
}
CAMERA_TEXT: dict[str, Any] = {"text_pooling": "mean", "text_context": "camera", "heads": HEADS}
BIGRU: dict[str, Any] = {"encoder": "bigru", "embed_dim": 4, "word_dim": 3}
LENGTHS = [[6, 2, 4], [1, 1], [4]]
SIZES = [(640.0, 480.0), (333.0, 500.0), (200.0, 200.0)]


def sized(**options: Any) -> Options:
    return Options(**{"region_dim": REGIONS, "embed_dim": DIM, **options})


class Bert(nn.Module):
    """Stands for a transformers encoder: a vector a token, whatever the others are."""

    config = SimpleNamespace(hidden_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(20, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.vectors(input_ids))


def made(kind: str) -> tuple[RegionEncoder, dict[str, Tensor]]:
    """One of the encoders in float64, and its weights under the authors' names."""
    torch.manual_seed(0)
    bert = Bert()
    image = {
        "vse": lambda: releases.vse_infinity(REGIONS, DIM),
        "camera": lambda: releases.camera(REGIONS, DIM, bert, heads=HEADS, views=VIEWS),
        "vsrn": lambda: releases.vsrn(REGIONS, DIM, batch_norm=False),
        "vsrn bn": lambda: releases.vsrn(REGIONS, DIM, batch_norm=True),
    }[kind]()[0]
    image = {name: value.double() if value.is_floating_point() else value for name, value in image.items()}
    encoder = RegionEncoder(sized(**OPTIONS[kind])).double()
    load(encoder, image, convert_released._IMAGE, "visual.")
    return encoder, image


def load(module: nn.Module, state: dict[str, Tensor], table: Any, prefix: str) -> None:
    ours = {name.removeprefix(prefix): value for name, value in convert_released._renamed("-", state, table).items()}
    module.load_state_dict({n: v.squeeze(2) if n.startswith("graph.") and v.ndim == 3 else v for n, v in ours.items()})


def pictures(lengths: list[int], *, fill: float = torch.nan) -> dict[str, Tensor]:
    """Images of so many regions; what stands at the padding is ``fill``."""
    generator = torch.Generator().manual_seed(0)
    rows, places = len(lengths), max(lengths)
    mask = torch.arange(places) < torch.tensor(lengths)[:, None]
    corner, size = (torch.rand(rows, places, 2, generator=generator, dtype=torch.float64) / 2 for _ in range(2))
    features = torch.randn(rows, places, REGIONS, generator=generator, dtype=torch.float64)
    boxes = torch.cat([corner, corner + size + 0.1], -1)
    aspect = torch.tensor([width / height for width, height in SIZES], dtype=torch.float64)[:rows]
    padding = ~mask[..., None]
    return {
        "features": features.masked_fill(padding, fill),
        "mask": mask,
        "boxes": boxes.masked_fill(padding, fill),
        "aspect": aspect,
    }


def expected(kind: str, batch: dict[str, Tensor], state: dict[str, Tensor], training: bool) -> Tensor:
    """What the authors' formulas give for the same images without their padding."""
    rows = [x[mask] for x, mask in zip(batch["features"], batch["mask"], strict=True)]
    if kind == "camera":
        return torch.stack(camera.image(rows, *pixels(batch), state, training=training)[0])
    if kind == "vse":
        return torch.stack(vse_infinity.image(rows, state, training=training))
    return torch.stack(vsrn.image(rows, state, training=training)[0])


def pixels(batch: dict[str, Tensor]) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """The boxes of each image's regions in pixels, and the images' sizes."""
    boxes = [x[mask] for x, mask in zip(batch["boxes"], batch["mask"], strict=True)]
    return [box * torch.tensor(size * 2) for box, size in zip(boxes, SIZES, strict=False)], SIZES[: len(boxes)]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def normed(pooled: Tensor) -> Tensor:
    return nn.functional.normalize(pooled, dim=-1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", PEERS)
def test_images_are_the_authors(kind: str, lengths: list[int], training: bool) -> None:
    if training and kind == "vsrn bn" and len(lengths) == 1:
        pytest.skip("BatchNorm over a batch of one")
    encoder, state = made(kind)
    batch = pictures(lengths)
    close(normed(encoder.train(training)(batch).pooled), expected(kind, batch, state, training))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["camera", "vsrn"])
def test_image_contexts_are_those_of_the_releases(kind: str, normalise: bool, training: bool) -> None:
    """SelfAlign's classes read the context stage's own output, before the base divides each channel by its norm."""
    encoder, state = made(kind)
    encoder.normalise_locals = normalise
    batch = pictures([6, 2, 4])
    rows = [x[mask] for x, mask in zip(batch["features"], batch["mask"], strict=True)]
    encoded = encoder.train(training)(batch)
    if kind == "camera":
        wanted = camera.image_contexts(rows, *pixels(batch), state, training=training)
        entering = [layers.unit_channels(layers.linear(x, state, "fc")) for x in rows]
    else:
        wanted, entering = vsrn.image_contexts(rows, state, training=training), vsrn.image_locals(rows, state)
    close(encoded.contexts[encoded.mask], torch.cat(wanted))
    close(encoded.tokens[encoded.mask], torch.cat([layers.unit_channels(x) for x in wanted]))
    projections = torch.cat([layers.linear(x, state, "fc") for x in rows])
    close(encoded.locals[encoded.mask], torch.cat(entering) if normalise else projections)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vse", {}),
        ("vse", {"image_pooling": "mean"}),
        ("vse", {"image_pooling": "max"}),
        ("vsrn", {}),
        ("camera", {"image_pooling": "gpo"}),
    ],
)
def test_padding_may_stand_anywhere(kind: str, options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    encoder = RegionEncoder(sized(**{**OPTIONS[kind], **options})).double().train(training)
    batch = pictures([6, 2, 4], fill=0.0)
    places = torch.tensor(
        [[0, 1, 2, 3, 4, 5], [2, 0, 3, 4, 1, 5], [4, 0, 1, 5, 2, 3]]
    )  # the valid ones keep their order
    moved = {**batch, "mask": batch["mask"].gather(1, places)}
    for name in ("features", "boxes"):
        moved[name] = batch[name].gather(1, places[..., None].expand_as(batch[name]))
        moved[name] = moved[name].masked_fill(~moved["mask"][..., None], torch.nan)
    close(encoder(moved).pooled, encoder(batch).pooled)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("kind", PEERS)
def test_gradients(kind: str, whole: bool) -> None:
    """By default one product of the Jacobian with vectors."""
    encoder, _ = made(kind)
    batch = pictures([3, 1])

    def run(features: Tensor) -> Tensor:
        rows = torch.full_like(batch["features"], torch.nan).masked_scatter(batch["mask"][..., None], features)
        return encoder.train()({**batch, "features": rows}).pooled

    valid = batch["features"][batch["mask"]].requires_grad_()
    assert torch.autograd.gradcheck(run, valid, fast_mode=not whole)
    features = batch["features"].clone().requires_grad_()
    encoder({**batch, "features": features}).pooled.square().sum().backward()
    assert features.grad is not None and (features.grad[~batch["mask"]] == 0).all()
    assert features.grad[0, :3].abs().sum() > 0
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_texts_are_the_authors(lengths: list[int], training: bool) -> None:
    ids = torch.randint(1, 20, (len(lengths), 8), generator=torch.Generator().manual_seed(0))
    ids = ids.masked_fill(torch.arange(8) >= torch.tensor(lengths)[:, None], 0)
    for kind in ("vse", "camera"):
        torch.manual_seed(0)
        bert = Bert()
        if kind == "vse":
            text, module = releases.vse_infinity(REGIONS, DIM, bert)[1], BertText(sized(), bert, pad=0)
        else:
            text = releases.camera(REGIONS, DIM, bert, heads=HEADS, views=VIEWS)[1]
            module = BertText(sized(**CAMERA_TEXT), bert, pad=0)
        text = {name: value.double() if value.is_floating_point() else value for name, value in text.items()}
        load(module.double(), text, convert_released._TEXT, "text.")
        hidden = [bert.vectors(row[:length]).detach() for row, length in zip(ids, lengths, strict=True)]
        wanted = camera.text(hidden, text, training=training) if kind == "camera" else vse_infinity.text(hidden, text)
        close(normed(module.train(training)(ids).pooled), torch.stack(wanted))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_cameras_text_contexts_are_those_of_the_releases(normalise: bool, training: bool) -> None:
    """The attention's output, before the perceptron: of CAMERA's class, and of SelfAlign's, which divides the words first."""
    lengths = [6, 2, 4]
    ids = torch.randint(1, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    ids = ids.masked_fill(torch.arange(8) >= torch.tensor(lengths)[:, None], 0)
    torch.manual_seed(0)
    bert = Bert()
    text = releases.camera(REGIONS, DIM, bert, heads=HEADS, views=VIEWS)[1]
    text = {name: value.double() if value.is_floating_point() else value for name, value in text.items()}
    module = BertText(sized(**CAMERA_TEXT, normalise_locals=normalise), bert, pad=0)
    load(module.double(), text, convert_released._TEXT, "text.")
    hidden = [bert.vectors(row[:length]).detach() for row, length in zip(ids, lengths, strict=True)]
    encoded = module.train(training)(ids)
    wanted = camera.text_contexts(hidden, text, training=training, normalise=normalise)
    close(encoded.contexts[encoded.mask], torch.cat(wanted))
    words = [layers.linear(x, text, "mapping") for x in hidden]
    close(encoded.locals[encoded.mask], torch.cat([layers.unit_channels(x) for x in words] if normalise else words))
    features = camera.text(hidden, text, training=training, normalise=normalise)
    close(normed(encoded.pooled), torch.stack(features))
    assert (encoded.tokens - encoded.contexts)[encoded.mask].abs().mean() > 0.1  # the perceptron's part


def test_vsrns_text_contexts_are_the_states_of_its_gru() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[1, 7, 8, 9, 2], [1, 4, 2, 0, 0]])
    options = sized(**BIGRU, word_projection=True, bidirectional=False, text_pooling="last")
    module = BiGRUText(options, words=14).double()
    encoded, state = module(ids), module.state_dict()
    for row, length in enumerate((5, 3)):
        words = layers.linear(state["embed.weight"][ids[row, :length]], state, "project")
        close(encoded.locals[row, :length], words)
        close(encoded.contexts[row, :length], vsrn.states(words, state, "rnn"))


def test_a_bigru() -> None:
    """Both directions averaged, then GPO; and the state after the last word, of one direction or of both."""
    torch.manual_seed(0)
    lengths, ids = [5, 1, 3], torch.tensor([[1, 7, 8, 9, 2, 0], [1, 0, 0, 0, 0, 0], [1, 4, 2, 0, 0, 0]])
    for bidirectional in (True, False):
        options = sized(**BIGRU, bidirectional=bidirectional)
        pooled = BiGRUText(options, words=14).double()
        last = BiGRUText(replace(options, text_pooling="last"), words=14).double()
        last.load_state_dict({name: v for name, v in pooled.state_dict().items() if not name.startswith("pool.")})
        found, ends, states = pooled(ids), last(ids).pooled, {k: v.tolist() for k, v in pooled.rnn.state_dict().items()}
        assert pooled.pool is not None
        parameters = {name: value.tolist() for name, value in pooled.pool.state_dict().items()}
        assert found.tokens.shape == (3, 5, 4) and found.mask.sum(1).tolist() == lengths
        for row, length in enumerate(lengths):
            words = pooled.embed(ids[row, :length]).tolist()
            directions = [torch.tensor(_gru(words, states, ""), dtype=torch.float64)]
            if bidirectional:
                directions.append(torch.tensor(_gru(words[::-1], states, "_reverse"), dtype=torch.float64))
            close(ends[row], torch.stack([states_of[-1] for states_of in directions]).mean(0))
            mixed = torch.stack([d if i == 0 else d.flip(0) for i, d in enumerate(directions)]).mean(0)
            close(found.tokens[row, :length], mixed)
            (wanted,) = gpo.pool([mixed.tolist()], [[True] * length], parameters, d_pe=32)
            close(found.pooled[row], torch.tensor(wanted, dtype=torch.float64))


def _gru(words: list[Any], states: dict[str, Any], end: str) -> list[Any]:
    return gpo.gru(words, *(states[f"{name}_l0{end}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")))


def test_positions_of_boxes() -> None:
    boxes = torch.tensor(
        [[[0.0, 0.1, 0.5, 0.6], [0.25, 0.25, 1.0, 0.5]], [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.75, 1.0]]]
    )
    boxes = boxes.double()
    found = box_positions(boxes, torch.tensor([640 / 480, 0.666], dtype=torch.float64))
    for row, size in enumerate([(640.0, 480.0), (333.0, 500.0)]):
        close(found[row], camera.positions(boxes[row] * torch.tensor(size * 2), *size))
    close(box_positions(boxes)[1, 1], torch.tensor([0.5, 0.5, 0.25, 0.5, 0.5, 0.125], dtype=torch.float64))
    assert box_positions(torch.zeros(1, 2, 4)).isfinite().all()


def test_positions_need_boxes() -> None:
    with pytest.raises(ValueError, match="needs the regions' boxes"):
        GatedSelfAttention(DIM, heads=2, positions=True)(torch.ones(1, 2, DIM), torch.ones(1, 2, dtype=torch.bool))


def _norms(channels: int) -> tuple[MaskedBatchNorm, nn.BatchNorm1d]:
    torch.manual_seed(0)
    ours, theirs = MaskedBatchNorm(channels).double(), nn.BatchNorm1d(channels).double()
    with torch.no_grad():
        for value in [*theirs.parameters(), theirs.running_mean, theirs.running_var]:
            assert value is not None
            value.uniform_(0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.booleans(), st.floats(-99, 99)
)
def test_a_masked_batch_norm_is_one_of_the_valid_rows(rows: list[list[bool]], training: bool, shift: float) -> None:
    mask = torch.tensor(rows)
    if mask.sum() < 2:
        mask[0, :2] = True
    ours, theirs = _norms(3)
    x = torch.randn(*mask.shape, 3, dtype=torch.float64) * 3 + shift
    given_x = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    valid = x[mask].requires_grad_()
    found, wanted = ours.train(training)(given_x, mask), theirs.train(training)(valid)
    close(found[mask], wanted)
    weight = torch.randn_like(wanted)
    (found[mask] * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert given_x.grad is not None and valid.grad is not None
    close(given_x.grad[mask], valid.grad)
    assert (given_x.grad[~mask] == 0).all() or not training
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        close(one.grad, other.grad)
    for kept, their in zip(ours.buffers(), theirs.buffers(), strict=True):
        close(kept.double(), their.double())
