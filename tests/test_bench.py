"""The scripts of scripts/bench: steps in turns, ratios to a peer of the same run, lines of JSON; each script at a tiny size."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize

from tests import fresh

SCRIPTS = Path(__file__).parents[1] / "scripts" / "bench"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return load("common")


def results_of(common: ModuleType, file: Path, *arguments: str) -> object:
    options = common.parser("A benchmark.", repeats=3).parse_args(["--json", str(file), *arguments])
    return common.Results("made", options, ["open_clip_torch", "no-such-package"])


def test_steps_take_turns_in_rotating_order(common, tmp_path, monkeypatch) -> None:
    order: list[str] = []

    def measured(timer: torch.utils.benchmark.Timer, min_run_time: float) -> torch.utils.benchmark.Measurement:
        order.append(timer._task_spec.sub_label)
        return timer.timeit(1)

    monkeypatch.setattr(torch.utils.benchmark.Timer, "blocked_autorange", measured)
    results_of(common, tmp_path / "made").compare("a case", {name: torch.rand(3).sum for name in "abc"})
    assert "".join(order) == "abc" + "bca" + "cab"


def test_results_are_lines_of_json_with_ratios_of_the_same_rounds(common, tmp_path, capsys) -> None:
    results = results_of(common, tmp_path / "made", "--wall")
    # the machine becomes slower from one round to the next: ratios of the medians would be 3 and 1.5
    times = {"peer": [1.0, 2.0, 4.0], "ours": [2.0, 6.0, 8.0], "theirs": [1.0, 3.0, 2.0]}
    spec = {name: results.timer("a case", name, int)._task_spec for name in times}
    found = {
        name: [torch.utils.benchmark.Measurement(1, [value], spec[name]) for value in values] for name, values in times.items()
    }
    assert results.report("a case", found, peers=2, n=3) == {"ours": 2.0, "theirs": 1.0}
    machine, case = map(json.loads, (tmp_path / "made").read_text().splitlines())
    assert machine["bench"] == "made" and machine["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert machine["machine"]["no-such-package"] == "not installed" and machine["machine"]["threads"] == 1
    assert case["seconds"] == {"peer": 2.0, "ours": 6.0, "theirs": 2.0} and case["n"] == 3
    assert case["ratio"] == {"ours": 2.0, "theirs": 1.0} and case["quartiles"]["theirs"] == [0.5, 1.5]
    assert case["ratios"]["ours"] == {"peer": 0.5, "theirs": 0.5}
    printed = capsys.readouterr().out
    assert "ours: 2.000 x peer (quartiles 2.000 to 3.000)" in printed and "a case" in printed


def test_cpu_time_is_measured_unless_the_clock_is_asked_for(common, tmp_path) -> None:
    by_cpu, by_clock = (results_of(common, tmp_path / "made", *flags).timer("a case", "int", int) for flags in ([], ["--wall"]))
    assert by_cpu._timer.timer is common.cpu_seconds and by_clock._timer.timer is not common.cpu_seconds
    begun = common.cpu_seconds()
    assert sum(range(1_000_000)) and common.cpu_seconds() > begun


def test_infonce_from_one_product_is_clip_loss(monkeypatch) -> None:
    from open_clip.loss import ClipLoss

    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    torch.manual_seed(0)
    images, texts = (normalize(torch.randn(7, 5, dtype=torch.float64), dim=1) for _ in range(2))
    scale = torch.tensor(9.0, dtype=torch.float64)
    found = load("loss_step").one_product_infonce(images, texts, scale)
    assert torch.allclose(found, ClipLoss()(images, texts, scale), rtol=1e-12)
    sys.modules.pop("common")


SLOW = pytest.mark.slow
#: Script, options, and the steps that are compared with the peer of each case.
SMALL = [
    ("loss_step", "--sizes 8x4", [["one-product InfoNCE", "tiled float32", "bare products"]]),
    pytest.param("loss_step", "--sizes 8x4 --loss ascl --forms reference",
                 [["one-product InfoNCE", "reference float32", "bare products"]], marks=SLOW),
    ("bank_step", "--sizes 4x16 --dim 4", [["reference", "tiled"], ["S and its SD", "moments", "write"]]),
    ("evaluate", "--images 20 --dim 8", [["evaluation", "plain"]]),
    ("fusion", "--images 6 --texts 30 --dim 16 --top 4", [["re-ranked"]]),
    pytest.param("coder_step", "--bank 64 --clusters 8 --batch-size 4 --no-memory", [["coder"]], marks=SLOW),
    pytest.param("paper_schedule", "--tiny --steps 1 --workers 0", [["fed by the loader"]], marks=SLOW),
    pytest.param("papers", "--small --candidates 50", [["CAMERA + SelfAlign"], ["VSRN + SelfAlign"], ["D 128", "D 192"],
                                                       ["CODER", "AsCL's fusion, 1/4 of the pairs"]], marks=SLOW),
    pytest.param("search", "--items 300 --dimensions 8", [["Index", "Searcher"]], marks=SLOW),
    pytest.param("data_feed", "--samples 9 --batch-size 4 --size 32", [["TrainLoader"], ["webdataset"]], marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("script", "options", "steps"), SMALL)
def test_scripts_compare_with_their_peers(script, options, steps, tmp_path) -> None:
    command = [str(SCRIPTS / f"{script}.py"), *options.split(), "--repeats", "1", "--block", "0.01"]
    done = fresh.run([*command, "--json", str(tmp_path / "results")], timeout=300)
    assert done.returncode == 0, done.stderr
    machine, *lines = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert machine["bench"] == script and machine["machine"]["processor"] in done.stdout
    assert [list(line["ratio"]) for line in lines] == steps
    for line in lines:
        assert min([*line["ratio"].values(), *line["seconds"].values()]) > 0
        assert all(f"{name}: " in done.stdout for name in line["ratio"] if script != "fusion")
        assert all(error < 1e-5 for error in line.get("error", {}).values()) if script == "loss_step" else True
    if script == "search":
        assert lines[0]["recall"] == {"Index": 1.0} and lines[0]["build_seconds"] > 0 and lines[0]["open_seconds"] > 0
    if script == "papers":  # SelfAlign's head on VSRN; the recipe `vsrn` has no projection of words
        base, both = (float(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines() if "bigru-vsrn, " in line)
        assert both - base == pytest.approx(0.065, abs=0.012)


@pytest.mark.slow
def test_peak_memory_of_steps_beside_clip(tmp_path) -> None:
    options = "--bank 64 --clusters 8 --batch-size 8 --repeats 1".split()
    done = fresh.run([str(SCRIPTS / "coder_step.py"), *options, "--json", str(tmp_path / "results")], timeout=300)
    assert done.returncode == 0, done.stderr
    memory = json.loads((tmp_path / "results").read_text().splitlines()[-1])
    assert memory["peak_memory"]["clip"] > 20e6 and 1 < memory["memory_ratio"]["coder"] < 3
