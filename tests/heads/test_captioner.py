"""What VSRN and CAMERA add: the captioner against a step-by-step reference, the overlap of views against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.basic import Views
from coder_plugin.heads.captioner import Captioner
from coder_plugin.losses.caption import Caption

CHANNELS, HIDDEN, WORDS, SIZE = 5, 6, 4, 11
WIDTHS = BackboneInfo(embed_dim=CHANNELS, image_tokens=CHANNELS, vocabulary=SIZE)


def captioner(dropout: float = 0.0, **options: int) -> Captioner:
    torch.manual_seed(0)
    return Captioner(WIDTHS, **{"hidden": HIDDEN, "word_dim": WORDS, **options}, dropout=dropout)


def inputs(lengths: list[int], texts: list[int], *, seed: int = 0) -> dict[str, Tensor]:
    """Images of so many tokens, texts of so many words; a padding word counts nowhere."""
    generator = torch.Generator().manual_seed(seed)
    places, positions = max(lengths), max(texts)
    mask = torch.arange(positions) < torch.tensor(texts)[:, None]
    text = torch.randint(1, SIZE, (len(texts), positions), generator=generator)
    return {
        "image_tokens": torch.randn(len(lengths), places, CHANNELS, generator=generator, dtype=torch.float64),
        "image_mask": torch.arange(places) < torch.tensor(lengths)[:, None],
        "text": text.masked_fill(~mask, 0),
        "text_mask": mask,
    }


# the reference: one image, one step, one sum at a time


def gate(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
    return list((weight @ x + bias).chunk(3))


def gru(state: dict[str, Tensor], ending: str, x: Tensor, hidden: Tensor) -> Tensor:
    r, z, n = gate(state[f"weight_ih{ending}"], state[f"bias_ih{ending}"], x)
    hr, hz, hn = gate(state[f"weight_hh{ending}"], state[f"bias_hh{ending}"], hidden)
    reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    return (1 - update) * torch.tanh(n + reset * hn) + update * hidden


def reference(head: Captioner, tokens: Tensor, text: list[int]) -> Tensor:
    """-log p(text | tokens [L, C]) with the attention's two-layer perceptron over [state ; hidden] as VSRN writes it."""
    weights = {key: value.detach().double() for key, value in head.state_dict().items()}

    def part(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}

    encoder, decoder, attend = part("encoder"), part("decoder"), part("attend")
    hidden = torch.zeros(len(weights["weigh.weight"][0]), dtype=torch.float64)
    states = []
    for token in tokens:
        hidden = gru(encoder, "_l0", weights["project.weight"] @ token + weights["project.bias"], hidden)
        states.append(hidden)
    total = torch.zeros((), dtype=torch.float64)
    for now, following in zip(text, text[1:], strict=False):
        scores = [
            weights["weigh.weight"][0] @ torch.tanh(attend["weight"] @ torch.cat([state, hidden]) + attend["bias"])
            for state in states
        ]
        shares = torch.stack(scores).softmax(0)
        context = sum(share * state for share, state in zip(shares, states, strict=True))
        hidden = gru(decoder, "", torch.cat([weights["embed.weight"][now], context]), hidden)
        logits = weights["out.weight"] @ hidden + weights["out.bias"]
        total = total - logits.log_softmax(0)[following]
    return total


def expected(head: Captioner, given: dict[str, Tensor]) -> Tensor:
    found = []
    for tokens, valid, text, words in zip(*given.values(), strict=True):
        found.append(reference(head, tokens[valid], text[words].tolist()))
    return torch.stack(found)


@pytest.mark.parametrize(("lengths", "texts"), [([3], [4]), ([1, 4, 2], [2, 5, 7])])
def test_nll_is_the_references(lengths, texts):
    head, given = captioner().double(), inputs(lengths, texts)
    found = head(**given)["coder_caption_nll"]
    assert found.shape == (len(lengths),)
    torch.testing.assert_close(found.double(), expected(head, given), rtol=1e-5, atol=1e-5)


@given(st.data())
def test_masked_tokens_may_stand_anywhere_and_hold_anything(data):
    rows = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    texts = data.draw(st.lists(st.integers(2, 5), min_size=rows, max_size=rows))
    head, made = captioner(), inputs(lengths, texts)
    made["image_tokens"] = made["image_tokens"].float()
    wanted = head(**made)["coder_caption_nll"]
    places = max(lengths) + data.draw(st.integers(0, 3))
    tokens = torch.full((rows, places, CHANNELS), torch.nan)
    mask = torch.zeros(rows, places, dtype=torch.bool)
    for row, length in enumerate(lengths):
        chosen = sorted(data.draw(st.permutations(range(places)))[:length])
        tokens[row, chosen] = made["image_tokens"][row, :length]
        mask[row, chosen] = True
    text = torch.nn.functional.pad(made["text"], (0, 3), value=SIZE - 1)  # beyond the mask's positions: not read
    tokens.requires_grad_()
    found = head(tokens, mask, text, made["text_mask"])["coder_caption_nll"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert (tokens.grad[~mask] == 0).all() and (tokens.grad[mask].abs().amax(-1) > 0).all()


def test_every_parameter_learns_and_a_caption_can_be_learnt():
    """Two images, each its own caption, by heart: possible only if the images are read."""
    head = captioner(hidden=32)
    made = inputs([3, 3], [5, 5])
    made["image_tokens"] = made["image_tokens"].float()
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-2)
    first = float(head(**made)["coder_caption_nll"].mean())
    for step in range(40):
        optimizer.zero_grad()
        Caption()(head(**made)["coder_caption_nll"]).backward()
        if not step:
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())
        optimizer.step()
    assert first > 8 and float(head(**made)["coder_caption_nll"].max()) < 0.3
    swapped = {**made, "image_tokens": made["image_tokens"].flip(0)}
    assert float(head(**swapped)["coder_caption_nll"].min()) > 3


def test_dropout_of_tokens_and_of_the_decoders_input():
    """0.2 for both, as in the authors' code."""
    head, seen = Captioner(WIDTHS), []
    head.dropout.register_forward_hook(lambda module, given, out: seen.append((module.p, given[0].shape[-1])))
    head.train()(**{k: v.float() if v.is_floating_point() else v for k, v in inputs([3], [4]).items()})
    assert seen == [(0.2, 512), *3 * [(0.2, 512 + 300)]]


@pytest.mark.parametrize(
    ("widths", "options", "message"),
    [
        (BackboneInfo(embed_dim=4, image_tokens=4), {}, "does not report its size"),
        (WIDTHS, {"hidden": 0}, "hidden and word_dim must be >= 1"),
        (WIDTHS, {"word_dim": 0}, "hidden and word_dim must be >= 1"),
        (WIDTHS, {"dropout": 1.0}, r"dropout in \[0, 1\)"),
    ],
)
def test_options_of_the_captioner(widths, options, message):
    with pytest.raises(ValueError, match=message):
        Captioner(widths, **options)


# views


def test_overlap_is_the_formula():
    """||A^T A - I||_F^2 with A's columns of unit length, summed entry by entry."""
    scores = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Views(WIDTHS)(scores)["coder_view_overlap"]
    for row, each in zip(scores, found, strict=True):
        total = 0.0
        for v in range(4):
            for w in range(4):
                product = sum(float(row[r, v] * row[r, w]) for r in range(5))
                product /= float(row[:, v].square().sum().sqrt() * row[:, w].square().sum().sqrt())
                total += (product - (v == w)) ** 2
        assert float(each) == pytest.approx(total, rel=1e-5)
