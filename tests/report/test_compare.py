"""The page that compares runs: numbers of the runs' files, differences and the best, what differs, and damaged folders."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_json
from coder_plugin.html import Html, render
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.report.compare import compare_runs
from coder_plugin.training.run_folder import RunFolder
from tests.report.browser import assert_readable, look
from tests.report.test_report_page import rows_of

FIGURES = [f"{way}_{name}" for way in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr")]


def results(rsum: float, epoch: int, step: int, **more: Any) -> dict[str, Any]:
    recalls = {key: rsum / 6 for key in FIGURES}
    return {**recalls, "rsum": rsum, "epoch": epoch, "step": step, "images": 40, "texts": 200, **more}


def make_run(
    folder: Path,
    sums: list[float],
    *,
    steps: int = 5,
    seconds: float = 30.0,
    losses: Any = None,
    plan: Any = (),
    **options: Any,
) -> Path:
    """A run with an evaluation after each epoch, as a trainer leaves it, without weights."""
    folder.mkdir(parents=True)
    epochs = max(len(sums), 1)
    config = resolve_config({"epochs": epochs, "logs": str(folder.parent), "name": folder.name, **options}).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    planned = {
        "objective": options.get("loss", "dcl"), "steps per epoch": steps, "epochs": epochs, "batch": {"global per step": 8},
        "validation data": {"name": "scenes (val)", "images": 40}, "versions": {"torch": "2.9"}, **dict(plan),
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(planned))
    losses = losses or [{"loss": 2.0 - step / 10} for step in range(steps * epochs)]
    rows = [{"step": step, **values} for step, values in enumerate(losses)]
    rows += [{"step": 0, **{f"val/{key}": 1.0 for key in (*FIGURES, "rsum")}, "val/epoch": 0}] * bool(sums)
    found = [results(value, epoch, epoch * steps) for epoch, value in enumerate(sums, 1)]
    rows += [{"step": each["step"], **{f"val/{key}": value for key, value in each.items() if key != "step"}} for each in found]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["step"])))
    manifest = {
        "format": 2, "step": steps * epochs, "epoch": epochs, "world_size": 1, "saved_at": time.time(),
        "files": dict.fromkeys(("state.pt", "rank0.pt"), {"bytes": 0}),
        "config": config, "last": found[-1] if found else {}, "best": max(found, key=lambda each: each["rsum"], default={}),
        "seconds": seconds,
    }  # fmt: skip
    place = folder / "checkpoints" / f"step_{manifest['step']:08d}"
    place.mkdir(parents=True)
    for name in manifest["files"]:
        (place / name).touch()
    (place / "manifest.json").write_text(json.dumps({**manifest, "manifest_sha256": sha256_json(manifest)}))
    assert RunFolder.read(folder).problems == ()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The second is longer and best in its second epoch; the third has no validation, and a term that is off at first."""
    off = [{"loss": 1.0, "dcl_loss": 1.0, "pgc_loss": 0.0 if step < 3 else 4.5} for step in range(5)]
    return [
        make_run(tmp_path / "first", [120.0], seconds=30.0),
        make_run(tmp_path / "second_run", [90.0, 150.04, 132.0], lr=2e-3, seconds=300.0, plan={"machine": "GPU"}),
        make_run(tmp_path / "third", [], losses=off, loss="dcl + pgc", val_frequency=0, seconds=0.0),
    ]


def section(text: str, name: str) -> str:
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def compared(folders: list[Path], **options: Any) -> str:
    return compare_runs(folders, **options).read_text(encoding="utf-8")


def test_one_table_has_recall_length_and_what_differs(runs: list[Path]) -> None:
    text = compared(runs)
    rows = rows_of(section(text, "runs"))
    assert re.findall(r'<th scope="col">(.*?)</th>', text.replace("<wbr>", "")) == ["", "1 first", "2 second_run", "3 third"]
    assert rows["epoch"] == ["1", "2", "no validation"]
    assert rows["R@sum"] == ["120.0", "150.0 ★ +30.0", "–"] and rows["i2t R@1"] == ["20.0", "25.0 ★ +5.0", "–"]
    assert rows["t2i MedR"] == ["20.0 ★", "25.0 +5.0", "–"]  # a low rank is better
    assert rows["epochs done"] == ["1 of 1", "3 of 3", "1 of 1"] and rows["steps done"] == ["5", "15", "5"]
    assert rows["time per epoch"] == ["30 s", "1 min 40 s", "–"]
    assert rows["lr"][1] == "0.002" and rows["lr"][0] == rows["lr"][2] != "0.002"
    assert rows["val_frequency"] == ["1", "1", "0"] and rows["machine"] == ["–", "GPU", "–"]
    assert rows["loss"] == ["dcl", "dcl", "dcl + pgc"]
    assert not {"name", "logs", "seed", "batch_size", "torch, version", "validation data"} & rows.keys()
    last = rows_of(section(compared(runs, export="last"), "runs"))
    assert last["epoch"][1] == "3" and last["R@sum"][1] == "132.0 ★ +12.0"


def test_curves_lie_over_each_other(runs: list[Path], monkeypatch: Any) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("coder_plugin.report.compare.lines", lambda series: drawn.append(series) or Html("<svg/>"))
    curves = section(compared(runs), "curves")
    names = re.findall(r'<p class="name">([^<]*)</p>', curves)
    charts = {name: [(each.name, each.colour) for each in series] for name, series in zip(names, drawn, strict=True)}
    assert charts["R@sum"] == [("1", 0), ("2", 1)] and charts["loss"] == [("1", 0), ("2", 1), ("3", 2)]
    assert charts["dcl_loss"] == [("3", 2)]  # the third run's colour, also where it is alone
    [[pgc]] = [series for name, series in zip(names, drawn, strict=True) if name == "pgc_loss"]
    assert (list(pgc.x), list(pgc.y)) == ([3, 4], [4.5, 4.5])  # off before
    assert "losses are not comparable" in curves


def test_missing_and_damaged_files_are_named(runs: list[Path]) -> None:
    (runs[0] / "plan.json").write_text("{")
    (runs[0] / "config.json").unlink()
    [manifest] = runs[0].glob("checkpoints/*/manifest.json")
    manifest.write_text("[]")
    (runs[1] / "metrics.jsonl").write_text("not JSON\n")
    (runs[2] / "metrics.jsonl").unlink()
    text = compared(runs)
    for said in (r"plan\.json: .* \(run 1\)", r"config\.json: .* \(run 1\)", r"checkpoints: .* \(run 1\)",
                 r"metrics\.jsonl: 1 line cannot be read \(run 2\)", r"metrics\.jsonl: .* \(run 3\)"):  # fmt: skip
        assert re.search(f"Missing or damaged: {said}", text), said
    rows = rows_of(section(text, "runs"))
    assert rows["loss"] == ["not known", "dcl", "dcl + pgc"] and rows["steps done"][0] == "not known"
    assert rows["R@sum"][0] == "120.0"  # of the log


def test_runs_of_other_data_are_not_compared_in_silence(runs: list[Path]) -> None:
    other = make_run(runs[0].parent / "other", [99.0], plan={"validation data": {"name": "flickr <8k>", "images": 1000}})
    text = section(compared([*runs, other]), "runs")
    assert "validated on different data" in text and "name flickr &lt;8k&gt;, images 1,000" in text.replace("<wbr>", "")
    same = compared([runs[0], make_run(runs[0].parent / "same", [110.0])])
    assert "validated on different data" not in same and "losses are not comparable" not in same


def test_names_are_told_apart_and_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>{{ 7 * 7 }}"
    folders = [make_run(tmp_path / each / '<b>"run', [100.0], plan={"objective": evil + each}) for each in ("a", "b")]
    text = compared(folders)
    assert '1 a/&lt;b&gt;&#34;run' in text.replace("<wbr>", "") and "2 b/" in text
    assert "<script" not in text and '<b>"run' not in text and "alert(1)" in text.replace("<wbr>", "")
    assert not re.findall(r'(?:src|href)\s*=\s*"(?!#)', text) and "default-src 'none'" in text


def test_the_command(runs: list[Path], tmp_path: Path, capsys: Any) -> None:
    names = list(map(str, runs))
    assert main(["report", *names]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path.resolve() / "comparison.html")
    assert main(["report", *names, "--output", str(tmp_path / "new" / "x.html"), "--export", "last"]) == 0
    assert "132.0" in section((tmp_path / "new" / "x.html").read_text(encoding="utf-8"), "runs")
    capsys.readouterr()
    for flags, said in (
        (["--images", "0"], "--images must be at least 1, got 0"),
        (["--split", "test"], "leave out --split, or add --images N"),
        ([names[0]], "is named twice"),
        ([str(tmp_path / "absent")], "absent"),
        ([str(tmp_path)], "not a training run's folder"),
    ):
        assert main(["report", *names, *flags]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    with pytest.raises(CoderError, match="two runs or more"):
        compare_runs(runs[:1])


@pytest.mark.slow
def test_a_browser_shows_the_page(runs: list[Path], browser: str, tmp_path: Path) -> None:
    objective = "3*dcl(diversity_over='batch+bank') + m_dcl(reverse='none') + concept_dcl(positive_weight=2.0) + pgc"
    plan = {"objective": objective, "training data": {"name": "/data/" + 12 * "long/"}}
    names = [tmp_path / f"2026_11_22-19_05_0{n}-model-of-a-long-name" for n in (1, 2)]
    long = [make_run(name, [100.0, 110.0], lr=n / 1e4, plan=plan) for n, name in enumerate(names, 1)]
    narrow, wide = assert_readable(browser, compared([*runs, *long]), tmp_path, 390, 1280)
    assert min(narrow["charts"], wide["charts"]) >= 4 and narrow["cut_tables"] == []


def test_a_table_that_is_cut_shows_it(browser: str, tmp_path: Path) -> None:
    """With a word and shadows at its edges; a table that fits has neither."""
    cells = "".join(f"<td>column {n}</td>" for n in range(40))
    page = render("base.html")
    tables = "".join(f'<div class="wrap"><table><tr>{row}</tr></table></div>' for row in (cells, "<td>a</td>"))
    [found] = look(browser, page.replace("</main>", f"{tables}</main>"), tmp_path, 390)
    assert len(found["cut_tables"]) == 1 and found["scrolled"] == 390
    cut, whole = found["hints"]
    assert cut > 10 and whole == 0
