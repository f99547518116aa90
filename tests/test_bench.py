"""What the scripts of scripts/bench share: steps in turns, ratios to a peer of the same run, results as lines of JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize

from tests import fresh

SCRIPTS = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_common", SCRIPTS / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_take_turns_in_rotating_order_after_the_warm_up(common) -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    times = common.measure(steps, repeats=3, warm_up=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.slow
def test_the_feed_is_compared_with_decoding_alone(tmp_path) -> None:
    """In its smallest form: the figures mean nothing."""
    options = "--samples 9 --batch-size 4 --size 32 --repeats 2 --picture 40 30 --clock cpu".split()
    feeds = ["loader, 0 workers", "loader, 1 worker, normalized"]
    done = fresh.run(
        [str(SCRIPTS / "data_feed.py"), *options, "--json", str(tmp_path / "feed"), "--feeds", *feeds], timeout=300
    )
    assert done.returncode == 0, done.stderr
    machine, case = map(json.loads, (tmp_path / "feed").read_text().splitlines())
    assert machine["bench"] == "data_feed" and {"torchvision", "pillow", "webdataset"} <= machine["machine"].keys()
    assert case["samples"] == 8 and list(case["rate_ratio"]) == list(case["ratio_to_second"]) == feeds
    assert (case["peer"], case["second"]) == ("decode", "decode, float") and list(case["ratio"]) == [*feeds, case["second"]]
    assert "of decode\n" in done.stdout and "of decode, float\n" in done.stdout
    for name in feeds:
        assert case["samples_per_second"][name] == pytest.approx(8 / case["seconds"][name])
        assert min(case["seconds"][name], case["ratio"][name], case["rate_ratio"][name]) > 0


@pytest.mark.parametrize(
    ("script", "options", "peers"),
    [
        ("loss_step", "--sizes 8x4 --modes eager --repeats 2 --block 0", ["ClipLoss", "one-product InfoNCE"]),
        ("bank_step", "--anchors 4 --entries 16 --dim 4 --repeats 2", ["InfoNCE"]),
        ("coder_step", "--bank 64 --clusters 8 --batch-size 4 --repeats 2 --no-memory", ["clip"]),
    ],
)
def test_losses_and_steps_are_compared_with_their_peers(script, options, peers, tmp_path) -> None:
    command = [str(SCRIPTS / f"{script}.py"), *options.split(), "--threads", "1", "--json", str(tmp_path / "results")]
    done = fresh.run(command, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    (case,) = [line for line in lines if "ratio" in line]
    assert [case.get("peer"), case.get("second")][: len(peers)] == peers and set(case["repeats"].values()) == {2}
    for peer in peers:
        assert f" x {peer}" in done.stdout
    assert "(2 repetitions)" in done.stdout and "processor" in lines[0]["machine"] and "processor" in done.stdout


def test_the_papers_figures_of_speed_in_their_smallest_form(tmp_path) -> None:
    options = "--small --candidates 50 --repeats 1".split()
    done = fresh.run([str(SCRIPTS / "papers.py"), *options, "--json", str(tmp_path / "papers")], timeout=300)
    assert done.returncode == 0, done.stderr
    _, camera, vsrn, scoring, pairs = map(json.loads, (tmp_path / "papers").read_text().splitlines())
    assert [list(case["ratio"]) for case in (camera, vsrn, scoring, pairs)] == [
        ["CAMERA + SelfAlign"], ["VSRN + SelfAlign"], ["D 128", "D 192"], ["CODER", "AsCL's fusion"],
    ]  # fmt: skip
    base, both = (float(each) for each in re.findall(r"region-bigru-vsrn, .*: (.*) M parameters", done.stdout))
    assert both - base == pytest.approx(0.065, abs=0.012)  # the recipe `vsrn` has no projection of words
    assert pairs["kilo_pairs_per_second"]["CODER"] == pytest.approx(20 * 100 / pairs["seconds"]["CODER"] / 1e3)


def test_results_are_lines_of_json_with_ratios_of_the_same_repetitions(common, tmp_path, capsys) -> None:
    threads = torch.get_num_threads()
    options = argparse.Namespace(threads=threads, json=tmp_path / "results.jsonl", device="cpu")
    results = common.Results("made", options, ["open_clip_torch", "no-such-package"])
    # the machine becomes slower from one repetition to the next: ratios of the medians would be 3 and 1.5
    times = {"peer": [1.0, 2.0, 4.0], "ours": [2.0, 6.0, 8.0], "theirs": [1.0, 3.0, 2.0]}
    assert results.compare("a case", times, peer="peer", n=3) == {"ours": 2.0, "theirs": 1.0}
    machine, case = map(json.loads, options.json.read_text().splitlines())
    assert machine["bench"] == "made" and machine["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert machine["machine"]["no-such-package"] == "not installed"
    assert case["peer"] == "peer" and case["seconds"]["ours"] == 6.0 and case["ratio"]["theirs"] == 1.0 and case["n"] == 3
    assert "2.000 x peer" in capsys.readouterr().out


def test_the_plain_peer_computes_what_clip_loss_does(common) -> None:
    torch.manual_seed(0)
    images, texts = (normalize(torch.randn(7, 5, dtype=torch.float64), dim=1) for _ in range(2))
    name, loss = common.clip_loss()
    assert name == "ClipLoss"
    scale = torch.tensor(9.0, dtype=torch.float64)
    assert torch.allclose(common.plain_infonce(images, texts, scale), loss(images, texts, scale), rtol=1e-12)
    assert torch.allclose(common.one_product_infonce(images, texts, scale), loss(images, texts, scale), rtol=1e-12)
    expected = -torch.stack([(scale * images @ texts.T).log_softmax(dim).diag().mean() for dim in (0, 1)]).mean()
    assert torch.allclose(common.plain_infonce(images, texts, scale), expected, rtol=1e-12)
