"""Weights from files, checksums, and detectors by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coder_plugin import registry
from coder_plugin.detectors.base import Detector, load_weights, make_detector, make_device, read_weights
from coder_plugin.errors import CoderError


class Plain(Detector):
    width = 1

    def __init__(self, *, device: str = "cpu", size: int = 2) -> None:
        self.net, self.device, self.size = nn.Linear(size, 1), device, size

    @property
    def modules(self):
        return [self.net]

    def detect(self, pictures):
        return []


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(registry, "load", lambda group, name: Plain)


def fault(call, *args, **options) -> str:
    with pytest.raises(CoderError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options_that_are_none_are_not_given_and_unknown_ones_are_errors(plain):
    made = make_detector("plain", device="cpu", size=None)
    assert (made.size, made.device) == (2, "cpu")
    assert make_detector("plain", size=3).size == 3
    assert fault(make_detector, "plain", grid=6) == "detector 'plain' has no option 'grid'; it has: device, size"


@pytest.mark.parametrize("wrap", [lambda state: state, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}])
def test_weights_are_found_in_usual_files(tmp_path, wrap):
    state = nn.Linear(2, 1).state_dict()
    torch.save(wrap(state), tmp_path / "weights.pth")
    assert read_weights(str(tmp_path / "weights.pth")).keys() == state.keys()


@pytest.mark.parametrize("content", [[1, 2], {}, {"a": 3}])
def test_what_is_no_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    assert "state dict" in fault(read_weights, str(tmp_path / "weights.pth"))


def test_weights_that_do_not_fit_are_told_by_name():
    state = nn.Linear(2, 1).state_dict()
    module = nn.Linear(2, 1)
    assert "1 missing (bias)" in fault(load_weights, module, {"weight": state["weight"]}, "f")
    assert "1 unknown (scale)" in fault(load_weights, module, {**state, "scale": state["bias"]}, "f")
    assert "weight has shape [1, 3], not [1, 2]" in fault(load_weights, module, nn.Linear(3, 1).state_dict(), "f")


def test_the_counters_of_batch_norm_may_be_missing():
    module = nn.BatchNorm1d(2)
    state = {name: value + 2 for name, value in module.state_dict().items() if name != "num_batches_tracked"}
    load_weights(module, state, "f")
    assert torch.equal(module.running_mean, torch.full((2,), 2.0))


def test_the_checksum_tells_values_apart_and_copies_not():
    first, second = Plain(), Plain()
    assert first.checksum() != second.checksum()
    second.net.load_state_dict(first.net.state_dict())
    assert first.checksum() == second.checksum()


def test_devices():
    assert make_device("cpu").type == "cpu"
    assert "unknown to torch" in fault(make_device, "gpu0")
    if not torch.cuda.is_available():
        assert "no CUDA" in fault(make_device, "cuda")


def test_a_device_beyond_the_last_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "cuda:0 to cuda:1" in fault(make_device, "cuda:2")
    assert make_device("cuda:1").index == 1 and make_device("cuda").type == "cuda"
