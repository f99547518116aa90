"""The page that compares runs: numbers of the runs' files, differences and the best, what differs, and damaged folders."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_json
from coder_plugin.html import render
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.report import recall_table
from coder_plugin.report.compare import compare_runs
from coder_plugin.training.run_folder import RunFolder
from tests.report.browser import assert_readable, look

FIGURES = [f"{way}_{name}" for way in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr")]


def results(rsum: float, epoch: int, step: int, **more: Any) -> dict[str, Any]:
    recalls = {key: rsum / 6 for key in FIGURES}
    return {**recalls, "rsum": rsum, "epoch": epoch, "step": step, "images": 40, "texts": 200, **more}


def make_run(
    folder: Path,
    sums: list[float],
    *,
    steps: int = 5,
    seconds: float | None = 30.0,
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
        "format": 1, "step": steps * epochs, "epoch": epochs, "world_size": 1, "saved_at": time.time(), "files": {},
        "config": config, "last": found[-1] if found else {}, "best": max(found, key=lambda each: each["rsum"], default={}),
        "seconds": seconds,
    }  # fmt: skip
    place = folder / "checkpoints" / f"step_{manifest['step']:08d}"
    place.mkdir(parents=True)
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
        make_run(tmp_path / "third", [], losses=off, loss="dcl + pgc", val_frequency=0, seconds=None),
    ]


def section(text: str, name: str) -> str:
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def rows_of(text: str) -> dict[str, list[str]]:
    """Texts of a table's cells by the row's name."""
    found = re.findall(r'<tr><th scope="row"[^>]*>(.*?)</th>(.*?)</tr>', text, re.S)
    bare = lambda part: " ".join(html.unescape(re.sub(r"<[^>]*>", "", part)).split())  # noqa: E731
    return {bare(name): [bare(cell) for cell in re.findall(r'<td class="(?!group).*?</td>|<td data.*?</td>', cells, re.S)]
            for name, cells in found}  # fmt: skip


def compared(folders: list[Path], **options: Any) -> str:
    return compare_runs(folders, **options).read_text(encoding="utf-8")


def test_recall_with_differences_and_the_best_marked(runs: list[Path]) -> None:
    rows = rows_of(section(compared(runs), "recall"))
    assert list(rows) == ["1 first (epoch 1)", "2 second_run (epoch 2)", "3 third (no validation)"]
    assert rows["1 first (epoch 1)"] == ["120.0", *["20.0"] * 3, "20.0 ★", *["20.0"] * 3, "20.0 ★"]  # a low rank is better
    assert rows["2 second_run (epoch 2)"] == ["150.0 ★+30.0", *(["25.0 ★+5.0"] * 3 + ["25.0+5.0"]) * 2]
    assert rows["3 third (no validation)"] == ["–"] * 9
    last = rows_of(section(compared(runs, export="last"), "recall"))
    assert last["2 second_run (epoch 3)"][0] == "132.0 ★+12.0"


def test_equal_numbers_have_no_best() -> None:
    table = recall_table.compared_cells([{"rsum": 100.01}, {"rsum": 100.04}, {}])
    assert [row[0] for row in table] == [("100.0", "", False), ("100.0", "±0", False), ("–", "", False)]


def test_curves_of_a_run_have_one_colour(runs: list[Path]) -> None:
    curves = section(compared(runs), "curves")
    charts = dict(re.findall(r'<p class="name">([^<]*)</p>(.*?)</figure>', curves, re.S))
    assert [name for name in charts if "R@" in name] == [
        "R@sum", *(f"{way} R@{k}, %" for way in ("Text to image", "Image to text") for k in (1, 5, 10))
    ]  # fmt: skip
    strokes = {name: re.findall(r'<polyline[^>]*stroke="([^"]*)"', chart) for name, chart in charts.items()}
    assert strokes["R@sum"] == ["var(--c0)", "var(--c1)"]
    assert strokes["loss"] == ["var(--c0)", "var(--c1)", "var(--c2)"]
    assert strokes["dcl_loss"] == ["var(--c2)"]  # the third run's, also where it is alone
    assert "<title>third: 4.5 at step 4</title>" in charts["pgc_loss"] and "at step 2<" not in charts["pgc_loss"]
    assert "1: last 120; 2: last 132, highest 150" in charts["R@sum"]
    assert "losses are not comparable" in curves


def test_only_what_differs_is_listed(runs: list[Path]) -> None:
    text = compared(runs)
    rows = rows_of(section(text, "options"))
    assert rows["lr"][1] == "0.002" and rows["lr"][0] == rows["lr"][2] != "0.002"
    assert rows["epochs"] == ["1", "3", "1"] and rows["val_frequency"] == ["1", "1", "0"]
    assert rows["loss"] == ["dcl", "dcl", "dcl + pgc"] and rows["machine"] == ["–", "GPU", "–"]
    assert not {"name", "logs", "seed", "batch_size", "torch, version", "validation data"} & rows.keys()
    same = compared([runs[0], make_run(runs[0].parent / "same", [110.0])])
    assert "All options that are known are the same." in same and "losses are not comparable" not in same


def test_time_of_an_epoch(runs: list[Path]) -> None:
    rows = rows_of(section(compared(runs), "time"))
    assert rows["1 first"] == ["dcl", "1 of 1", "5", "8", "30 s"]
    assert rows["2 second_run"] == ["dcl", "3 of 3", "15", "8", "1 min 40 s"]
    assert rows["3 third"][-1] == "–"


def test_missing_and_damaged_files_are_named(runs: list[Path]) -> None:
    (runs[0] / "plan.json").write_text("{")
    (runs[0] / "config.json").unlink()
    [manifest] = runs[0].glob("checkpoints/*/manifest.json")
    manifest.write_text("[]")
    (runs[1] / "metrics.jsonl").write_text("not JSON\n")
    (runs[2] / "metrics.jsonl").unlink()
    text = compared(runs)
    for file in ("plan.json", "config.json", "checkpoints"):
        assert f"Missing or damaged in 1 first: {file}" in text
    assert "Missing or damaged in 2 second_run: metrics.jsonl: 1 line cannot be read" in text
    assert "Missing or damaged in 3 third: metrics.jsonl" in text and "could not be made" not in text
    rows = rows_of(section(text, "options"))
    assert rows["loss"] == ["not known", "dcl", "dcl + pgc"]
    assert rows_of(section(text, "recall"))["1 first (epoch 1)"][0] == "120.0"  # of the log
    assert rows_of(section(text, "time"))["1 first"] == ["–"] * 5


def test_a_fault_of_a_part_ends_no_page(runs: list[Path], monkeypatch: Any) -> None:
    monkeypatch.setattr("coder_plugin.report.compare.lines", lambda *_, **__: 1 // 0)
    text = compared(runs)
    assert section(text, "curves").count("ZeroDivisionError") == 2 and "120.0" in section(text, "recall")


def test_runs_of_other_data_are_not_compared_in_silence(runs: list[Path]) -> None:
    other = make_run(runs[0].parent / "other", [99.0], plan={"validation data": {"name": "flickr <8k>", "images": 1000}})
    text = section(compared([*runs, other]), "recall")
    assert "validated on different data" in text and "flickr &lt;8k&gt; (40 images, 200 captions): 4" in text
    assert "validated on different data" not in compared(runs)


def test_names_that_are_alike_are_told_apart(tmp_path: Path) -> None:
    text = compared([make_run(tmp_path / each / "run", [100.0]) for each in ("a", "b")])
    assert {"1 a/run (epoch 1)", "2 b/run (epoch 1)"} == set(rows_of(section(text, "recall")))


def test_what_names_say_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>{{ 7 * 7 }}"
    folders = [make_run(tmp_path / each, [100.0], plan={"objective": evil}) for each in ('<b>"one', "two")]
    text = compared(folders)
    assert "<script" not in text and "<b>&#34;one" not in text and '<b>"one' not in text and "alert(1)" in text
    assert not re.findall(r'(?:src|href)\s*=\s*"(?!#)', text) and "url(" not in text and "default-src 'none'" in text


def test_many_runs_differ_in_colour_or_dashes(tmp_path: Path) -> None:
    text = compared([make_run(tmp_path / f"run{number}", [100.0 + number]) for number in range(12)])
    swatches = re.findall(r'<svg class="swatch".*?</svg>', text.split("<nav")[0])
    assert len(set(swatches)) == len(swatches) == 12


def test_the_command(runs: list[Path], tmp_path: Path, capsys: Any) -> None:
    names = list(map(str, runs))
    assert main(["report", *names]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path.resolve() / "comparison.html")
    assert main(["report", *names, "--output", str(tmp_path / "new" / "x.html"), "--export", "last"]) == 0
    assert "132.0" in section((tmp_path / "new" / "x.html").read_text(encoding="utf-8"), "recall")
    capsys.readouterr()
    for flags, said in (
        (["--images", "3"], "leave out --images"),
        (["--val-data", "x.csv"], "leave out --val-data"),
        ([names[0]], "is named twice"),
        ([str(tmp_path / "absent")], "absent"),
        ([str(tmp_path)], "not a training run's folder"),
    ):
        assert main(["report", *names, *flags]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    with pytest.raises(CoderError, match="two runs or more"):
        compare_runs(runs[:1])


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page(runs: list[Path], browser: str, tmp_path: Path, width: int) -> None:
    objective = "3*dcl(diversity_over='batch+bank') + m_dcl(reverse='none') + concept_dcl(positive_weight=2.0) + pgc"
    plan = {"objective": objective, "training data": {"name": "/data/" + 12 * "long/"}}
    names = [tmp_path / f"2026_11_22-19_05_0{n}-model-of-a-long-name" for n in (1, 2)]
    long = [make_run(name, [100.0, 110.0], lr=n / 1e4, plan=plan) for n, name in enumerate(names, 1)]
    found = assert_readable(browser, compared([*runs, *long]), tmp_path, width)
    assert found["charts"] > 10 and (found["cut_tables"] == [] or width == 1280)


def test_a_table_that_is_cut_shows_it(browser: str, tmp_path: Path) -> None:
    """With a word and shadows at its edges; a table that fits has neither."""
    cells = "".join(f"<td>column {n}</td>" for n in range(40))
    page = render("search.html", name="x", sizes="", model="", objective="", queries=[])
    tables = "".join(f'<div class="wrap"><table><tr>{row}</tr></table></div>' for row in (cells, "<td>a</td>"))
    found = look(browser, page.replace("</main>", f"{tables}</main>"), tmp_path, 390)
    assert len(found["cut_tables"]) == 1 and found["scrolled"] == 390
    cut, whole = found["hints"]
    assert cut > 10 and whole == 0
