"""Noise by its expression: mixtures, options, other people's generators, what a person is told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.noise.base import Noise
from coder_plugin.noise.generators import (
    Dropout,
    FeatureCutoff,
    Gaussian,
    Mixture,
    Shuffle,
    TokenCutoff,
    parse_noise,
)

THEIRS = """
from coder_plugin.noise.base import Noise

class Plus(Noise):
    def __init__(self, *, amount: float):
        if amount == 0:
            raise ValueError("amount must not be 0")
        self.amount = amount

    def noised(self, embeddings, words):
        return embeddings + self.amount

class Short(Noise):
    def noised(self, embeddings, words):
        return embeddings[:, 1:]

class Wider(Noise):
    def noised(self, embeddings, words):
        return embeddings.double()
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody else's distribution on the path, with generators of its own."""
    folder = tmp_path / "their_noise-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: their-noise\nVersion: 1.0\n")
    points = "\n".join(f"{name.lower()} = their_noise_of_a_test:{name}" for name in ("Plus", "Short", "Wider"))
    (folder / "entry_points.txt").write_text(f"[coder_plugin.negatives]\n{points}\n")
    (tmp_path / "their_noise_of_a_test.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry.refresh()
    yield
    sys.modules.pop("their_noise_of_a_test", None)
    monkeypatch.undo()
    registry.refresh()


def ones(n: int, t: int = 3, e: int = 2) -> tuple[Tensor, Tensor]:
    return torch.ones(n, t, e), torch.ones(n, t, dtype=torch.bool)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("mixture", [Gaussian, Shuffle, TokenCutoff, FeatureCutoff, Dropout]),
        ("token_cutoff+feature_cutoff", [TokenCutoff, FeatureCutoff]),
        ("mixture(of='shuffle + dropout(rate=0.5)')", [Shuffle, Dropout]),
        ("mixture + gaussian(std=0.3)", [Mixture, Gaussian]),
    ],
)
def test_several_are_a_mixture(text: str, kinds: list[type]) -> None:
    noise = parse_noise(text)
    assert isinstance(noise, Mixture)
    assert [type(each) for each in noise.generators] == kinds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gausian", r"'gausian'; did you mean 'gaussian'\? known: .*dropout, feature_cutoff, gaussian, mixture"),
        ("shuffle + cutoff", "'cutoff'.* known: "),
        ("gaussian(rate=0.1)", "'gaussian' has no option 'rate'; it has: std"),
        ("shuffle(rate=0.1)", "'shuffle' has no option 'rate'; it has: none"),
        ("gaussian(std=large)", "'gaussian': option std=large must be float"),
        ("dropout(rate=2)", r"'dropout': rate must be in \[0, 1\], got 2"),
        ("mixture(of='shuffle+nothing')", "'mixture': .*'nothing'.* known: "),
        ("mixture(of=3)", "'mixture': option of=3 must be str"),
        ("gaussian(std=0.1", "column 1"),
        ("shuffle+", "column 9"),
        ("", "column 1"),
        ("gaussian(std=0.1,std=0.2)", "column 18: option 'std' is given twice"),
    ],
)
def test_what_a_person_is_told(text: str, says: str) -> None:
    with pytest.raises(CoderError, match=says):
        parse_noise(text)


@pytest.mark.usefixtures("theirs")
def test_a_mixture_takes_each_of_its_generators_evenly() -> None:
    """One a text, for all its words; a part named twice is drawn twice as often."""
    n = 4000
    noise = parse_noise("plus(amount=1) + plus(amount=2) + plus(amount=3) + plus(amount=3)")
    torch.manual_seed(0)
    embeddings, words = ones(n)
    words[:, 2] = False
    after = noise(embeddings, words)
    assert (after[:, 2] == 1).all()
    assert (after[:, :2] == after[:, :1, :1]).all()
    counts = (after[:, 0, 0] - 1).long().bincount(minlength=4)
    assert counts[0] == 0
    for count, share in zip(counts[1:].tolist(), (0.25, 0.25, 0.5), strict=True):
        assert abs(count - n * share) < 4 * (n * share * (1 - share)) ** 0.5


def test_the_default_mixture_takes_all_five() -> None:
    """Told apart by what they do to a text of different words: only one of them leaves such a trace."""
    torch.manual_seed(0)
    embeddings = torch.randn(400, 6, 5)
    after = Mixture()(embeddings, torch.ones(400, 6, dtype=torch.bool))
    kinds = []
    for before, noised in zip(embeddings, after, strict=True):
        gone = noised == 0
        if not gone.any():
            kinds.append("shuffle" if torch.equal(before.sort(0)[0], noised.sort(0)[0]) else "gaussian")
        elif torch.equal(gone, gone[:, :1].expand(-1, 5)):
            kinds.append("token_cutoff")
        else:
            kinds.append("feature_cutoff" if torch.equal(gone, gone[:1].expand(6, -1)) else "dropout")
        assert not torch.equal(before, noised)
    shares = {kind: kinds.count(kind) / 400 for kind in set(kinds)}
    assert shares.keys() == {"gaussian", "shuffle", "token_cutoff", "feature_cutoff", "dropout"}
    assert all(abs(share - 0.2) < 4 * (0.16 / 400) ** 0.5 for share in shares.values())


@pytest.mark.usefixtures("theirs")
def test_other_peoples_generators() -> None:
    plus = parse_noise("plus(amount=2)")
    assert isinstance(plus, Noise)
    embeddings, words = ones(1)
    words[0, 0] = False
    assert plus(embeddings, words)[0, :, 0].tolist() == [1, 3, 3]
    with pytest.raises(CoderError, match="'plus': missing required option amount=…"):
        parse_noise("shuffle+plus")
    with pytest.raises(CoderError, match="'plus': amount must not be 0"):
        parse_noise("plus(amount=0)")
    with pytest.raises(CoderError, match="known: .*gaussian.*plus"):
        parse_noise("minus_")
    with pytest.raises(ValueError, match=r"Short returned float32 \[1, 2, 2\] for float32 \[1, 3, 2\]"):
        parse_noise("short")(embeddings, words)
    with pytest.raises(ValueError, match="Wider returned float64"):
        parse_noise("gaussian+wider")(embeddings, words)
