"""The evidence pages have the tables of their numbers, and a comparison becomes one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest


def test_pages_have_the_tables_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evidence

    monkeypatch.setattr(evidence, "draw", lambda *_: None)
    shutil.copytree(evidence.DOCS / "evidence", tmp_path / "evidence")
    names = evidence.write(tmp_path)
    assert sorted(names) == sorted(path.stem for path in (tmp_path / "evidence").glob("*.json"))
    for page in (tmp_path / "evidence").glob("*.md"):
        assert page.read_text() == (evidence.DOCS / "evidence" / page.name).read_text(), f"{page.name}: run evidence.py"
    assert all((evidence.DOCS / "figures" / f"evidence-{name}.svg").is_file() for name in names)


def test_a_comparison_becomes_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import evidence

    kept = dict.fromkeys(evidence.KEPT) | {"val": {"rsum": [250.0, 252.0], "i2t_r1": [20.0, 21.0]}, "seeds": [0, 1]}
    difference = {"mean": 5.0, "low": 2.0, "high": 8.0, "seeds": 2}
    rows = {
        "clip": {**kept, "minutes": 1.5, "command": "/home/me/run"},
        "dcl": {**kept, "minutes": 2.0, "describe": "lr 0.0001", "difference": {"rsum": difference, "i2t_r1": difference}},
    }
    result = {"best_peer": "clip", "before": None, "rows": rows, "notes": [], "sentence": "use dcl"}
    (tmp_path / "comparison.json").write_text(json.dumps(result))
    for folder in ("evidence", "figures"):
        (tmp_path / folder).mkdir()
    (tmp_path / "evidence" / "page.md").write_text("# Page\n\n<!-- begin mine -->\nold\n<!-- end -->\n\nText.\n")
    monkeypatch.setattr(evidence, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--add", "mine", str(tmp_path / "comparison.json")])
    evidence.main()
    assert "written: mine" in capsys.readouterr().out
    assert (tmp_path / "evidence" / "page.md").read_text() == (
        "# Page\n\n<!-- begin mine -->\n\n| row | R@sum ± SD | difference [95 %] | minutes |\n| --- | --- | --- | --- |\n"
        "| clip | 251.0 ± 1.4 | the best peer | 1.5 |\n| dcl at lr 0.0001 | 251.0 ± 1.4 | +5.0 [+2.0, +8.0] | 2.0 |\n\n"
        "![Points of R@sum above clip](../figures/evidence-mine.svg)\n<!-- end -->\n\nText.\n"
    )
    saved = (tmp_path / "evidence" / "mine.json").read_text()
    assert "/home/me" not in saved and json.loads(saved)["rows"]["dcl"]["difference"] == {"rsum": difference}
    assert "<svg" in (tmp_path / "figures" / "evidence-mine.svg").read_text()


def test_a_row_is_pooled_over_settings() -> None:
    """Of settings on the same images the interval is as wide as theirs, not narrower by their number."""
    import evidence

    settings = [
        {"rows": {"dcl": {"difference": {"rsum": {"mean": mean, "low": mean - reach, "high": mean + reach, "seeds": 3}}}}}
        for mean, reach in ((6.0, 4.0), (2.0, 6.0))
    ]
    assert evidence.pooled("dcl", settings).startswith(
        "Over 2 settings `dcl` is +4.0 [-1.0, +9.0] from the best peer; in 1 of them the\ninterval"
    )
