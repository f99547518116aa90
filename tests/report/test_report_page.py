"""The report of a run: every section, numbers of the run's own files, truths where a brute-force ranking has them, hostile and
damaged runs, and the page as a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.data import scenes
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import Scores
from coder_plugin.evaluation.metrics import RECALL_COLUMNS
from coder_plugin.pretrained.encode import Items
from coder_plugin.report.run import write_report
from coder_plugin.training.loop import Trainer
from coder_plugin.training.run_folder import RunFolder
from tests.report.browser import assert_readable

SECTIONS = ("recall", "examples", "curves", "run", "concepts", "regions", "map", "state")
IMAGES = 24
EVIL = '<script>alert(1)</script> "quoted" <img src=x onerror=alert(2)> {{ 7 * 7 }} $x_'


@pytest.fixture(scope="module")
def made(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run of all losses on a few scenes, its report written by the command, and the trainer as it is at the end."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenes.DEFAULT_COUNTS, "val", IMAGES)
        options = ["prototypes.clusters=6", "momentum.bank_size=64", "alignment.prototypes=16", "dcl.epsilon=0.05"]
        config = {
            "model": tiny_model, "loss": "coder + selfalign", "set": options, "logs": str(folder), "name": "run",
            "batch_size": 8, "train_num_samples": 48, "epochs": 2, "workers": 0, "log_every_n_steps": 2,
        }  # fmt: skip
        trainer = Trainer.from_config(config)
        trainer.run()
        assert main(["report", str(trainer.folder), "--images", "3"]) == 0
        text = (trainer.folder / "report.html").read_text(encoding="utf-8")
        yield {"trainer": trainer, "folder": trainer.folder, "text": text, "encoded": trainer.encoder(trainer.val)}


@pytest.fixture
def few(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a report with the trainer's model and few images; its map is no t-SNE, which takes longer."""
    monkeypatch.setattr("coder_plugin.report.sections.tsne", lambda vectors: vectors[:, :2])
    trainer = made["trainer"]
    return {"encoder": trainer.encoder, "source": trainer.val, "encoded": made["encoded"], "images": 2}


def section(text: str, name: str) -> str:
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def rows_of(text: str) -> dict[str, list[str]]:
    """Texts of the cells of all tables by the row's name."""
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text, re.S)
    bare = lambda part: " ".join(html.unescape(re.sub(r"<[^>]*>", "", part)).split())  # noqa: E731
    return {bare(name): list(map(bare, re.findall(r"<td.*?</td>", cells, re.S))) for name, cells in found}


def test_every_section_shows_something(made: dict[str, Any]) -> None:
    text = made["text"]
    links = re.findall(r'href="#(\w+)"', text.split("</nav>")[0])
    assert tuple(re.findall(r'<section id="(\w+)"', text)) == SECTIONS == tuple(links)
    assert "Not shown" not in text and "Missing or damaged:" not in text and len(text) < 3_000_000
    assert section(text, "regions").count("data:image/jpeg") == 3 == section(text, "concepts").count("data:image/jpeg")
    right = {head: side for side, head in re.findall(r'<th scope="col"( class="n")?>(.*?)</th>', text)}
    assert right["R@sum"] and right["Captions"] and right["Weight"] and not (right["Options"] or right["Weights"])
    assert '<td class="n " data-label="R@sum">' in text and '<td class="" data-label="Options">' in text
    assert re.search(r"[\d.]+\u00a0%", section(text, "concepts")) and "by t-SNE" in section(text, "map")
    state = section(text, "state")
    for part in ("momentum: banks", "of 64 entries are filled", "prototypes: centres", "Age of the entries"):
        assert part in state


def test_the_tables_are_the_runs_numbers(made: dict[str, Any]) -> None:
    run, recall = RunFolder.read(made["folder"]), section(made["text"], "recall")
    best, last = run.results("best"), run.results("last")
    rows = rows_of(recall)
    for name, results in ((f"best: epoch {best['epoch']}", best), ("last: epoch 2", last)):
        keys = ["rsum", *(key for key in RECALL_COLUMNS.values() if key != "rsum")]
        assert rows[name] == [f"{results[key]:.1f}" for key in keys]
    assert "measured for this report, on scenes (val)" in recall
    assert rows["now: export/best"] == rows[f"best: epoch {best['epoch']}"]
    assert rows["all"][0] == f"{last['texts']:,.0f}"
    shown = rows_of(section(made["text"], "run"))
    assert shown["epochs done"] == ["2 of 2"] and "global per step 8" in shown["batch"][0]
    assert shown["torch, version"][0].startswith(torch.__version__.split("+")[0])
    assert "clusters=6" in shown["prototypes"][1]
    assert "epsilon=0.05" in shown["dcl"][1] and "epsilon" not in shown["m_dcl"][1]  # what was set
    assert shown["batch_size"] == ["8"]


def hits(block: str) -> list[tuple[str, bool, float]]:
    """What a query's candidates are, whether they are marked, and their scores."""
    found = re.findall(
        r'<li class="hit( true)?">\s*(?:<img src="data:[^"]*" alt="([^"]*)">|([^<]*?))\s*'
        r'<span class="score">(?:rank [\d,]+: )?([-\d.]+)</span>( <span class="mark">✓ match</span>)?',
        block,
    )
    assert len(found) == block.count("<li "), block[:500]
    for frame, *_, mark in found:
        assert bool(frame) == bool(mark)  # never by colour alone
    return [(html.unescape(alt or text).strip(), bool(mark), float(score)) for _, alt, text, score, mark in found]


def test_truths_are_where_brute_force_has_them(made: dict[str, Any]) -> None:
    encoded = made["encoded"]
    blocks = section(made["text"], "examples").split("<h3>")[1:]
    assert [block.split("<")[0] for block in blocks] == [
        f"{way}, {which}" for way in ("Text to image", "Image to text") for which in ("best", "worst")
    ]
    captions = list(encoded.captions)
    first = [captions[int((encoded.image_of_text == image).nonzero()[0])] for image in range(IMAGES)]
    for block in blocks:
        queries = block.split('<div class="query">')[1:]
        assert len(queries) == 3
        ranks = []
        for query in queries:
            ranks.append(int(re.findall(r"rank ([\d,]+)", query)[0].replace(",", "")))
            found = hits(query)
            scores = [score for _, _, score in found]
            assert scores == sorted(scores, reverse=True) and sum(mark for _, mark, _ in found[:5]) <= 5
            if block.startswith("Text"):
                caption = html.unescape(re.findall(r"<strong>(.*?)</strong>", query)[0])
                right = {first[int(encoded.image_of_text[captions.index(caption)])]}
            else:
                image = first.index(html.unescape(re.findall(r'<div class="ask">\s*<img src="[^"]*" alt="([^"]*)"', query)[0]))
                right = {captions[int(n)] for n in (encoded.image_of_text == image).nonzero()}
            assert all((name in right) == mark for name, mark, _ in found)
            place = next(number for number, (_, mark, _) in enumerate(found, 1) if mark)
            assert place == ranks[-1] if ranks[-1] <= 5 else (place == 6 and f"rank {ranks[-1]:,}: " in query)
        assert ranks == sorted(ranks, reverse=", worst" in block[:30])


class Minus(torch.nn.Module):
    """A head that orders a shortlist the other way round."""

    def scorer(self, images: dict[str, torch.Tensor], texts: dict[str, torch.Tensor]) -> Any:
        return Scores(images["x"], texts["x"], -images["x"] @ texts["x"].T)


def test_scores_of_two_kinds_are_told_apart(
    made: dict[str, Any], few: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("coder_plugin.evaluation.evaluate.SHORTLIST", 3)
    encoded = few["encoded"]
    few["encoded"] = encoded._replace(items=Items(Minus(), {"x": encoded.images}, {"x": encoded.texts}))
    text = write_report(made["folder"], output=tmp_path / "x.html", **few).read_text(encoding="utf-8")
    rows, shown = rows_of(section(text, "recall")), section(text, "examples")
    assert "now: model at the end, re-ranked 3" in rows and "now: model at the end, shortlist" in rows
    lists = re.findall(r'<ol class="hits.*?</ol>', shown, re.S)
    assert len(lists) == 8 and "It is the fusion score" in shown
    for each in lists:
        scores = re.findall(r'<span class="score">(?:rank [\d,]+: )?(product )?([-\d.]+)</span>', each)
        assert [bool(product) for product, _ in scores[:5]] == [False] * 3 + [True] * 2
        # in the order of the products the shortlist, turned round, is before the rest
        values = [float(score) for _, score in scores[:5]]
        assert values[0] >= values[1] >= values[2] and -values[0] >= values[3] >= values[4]
    assert "product" not in section(made["text"], "examples")


def test_the_ranks_have_nothing_to_do_together_afterwards(
    made: dict[str, Any], few: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    def collective(*_: Any, **__: Any) -> None:
        raise AssertionError("the other ranks are not here")

    monkeypatch.setattr("coder_plugin.distributed.world_size", lambda: 2)
    for name in ("gather", "gather_objects", "barrier", "broadcast"):
        monkeypatch.setattr(f"coder_plugin.distributed.{name}", collective)
    text = write_report(made["folder"], output=tmp_path / "x.html", **few).read_text(encoding="utf-8")
    assert "Not shown" not in text and "now: model at the end" in text
    monkeypatch.setattr("coder_plugin.distributed.rank", lambda: 1)
    monkeypatch.setattr("coder_plugin.report.run.RunFolder.read", collective)
    asked: list[Any] = []
    path = write_report(made["folder"], encoder=asked.append, source="data", output=tmp_path / "y.html")  # type: ignore[arg-type]
    assert path == tmp_path / "y.html" and asked == ["data"] and [each.name for each in tmp_path.iterdir()] == ["x.html"]


def assert_inert(text: str) -> None:
    """Nothing is loaded from elsewhere, and no text of a run is markup."""
    for address in re.findall(r'(?:src|href|action|data|poster|xlink:href)\s*=\s*"([^"]*)"', text):
        assert address.startswith(("data:image/jpeg;base64,", "#")), address[:80]
    assert not re.search(r"<script|<img src=x|<link|@import|url\((?!#)| on\w+=\"", text)
    assert "default-src 'none'" in text


def test_what_a_run_says_is_text(made: dict[str, Any], few: dict[str, Any], tmp_path: Path) -> None:
    """Captions, names, options, metrics and heads of somebody's run folder."""
    assert_inert(made["text"])
    folder = tmp_path / "<b>run"
    shutil.copytree(made["folder"], folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan |= {"objective": EVIL, "model": f"{EVIL} \ud800", "versions": {EVIL: EVIL}, "heads": {EVIL: 3}}
    (folder / "plan.json").write_text(json.dumps(plan))
    rows = [{"step": step, f"{EVIL}_loss": 1.0, f"coder/{EVIL}": 2.0, "share/a": 0.5, f"share/{EVIL}": 0.5} for step in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = [item for _, item in few["source"].items()][:8]
    bad = [Item(f'"><script>{number}', (f"{EVIL} {number}",), item.load) for number, item in enumerate(items)]
    few |= {"source": ItemSource(bad, name="<b>data"), "encoded": None, "weights": EVIL}
    text = write_report(folder, output=tmp_path / "x.html", **few).read_text(encoding="utf-8")
    assert_inert(text)
    assert "<b>data" not in text and "<b>run" not in text and "{{ 7 * 7 }} $x_ 0" in text
    for name in SECTIONS[:-1]:
        assert html.escape(EVIL, quote=False)[:30] in section(text, name) or name in ("regions", "map"), name


def test_damaged_parts_cost_their_sections_alone(made: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made["folder"], folder)
    (folder / "metrics.jsonl").unlink()
    [checkpoint] = [path for path in (folder / "checkpoints").iterdir() if path.name == "step_00000012"]
    for file in set(checkpoint.iterdir()) - {checkpoint / "manifest.json"}:
        file.write_bytes(b"damaged")
    shutil.rmtree(folder / "export" / "best")
    assert main(["report", str(folder), "--export", "best", "--output", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "it has --export last" in section(text, "examples") and "is refused" in section(text, "state")
    assert "no metrics.jsonl with records" in section(text, "curves")
    assert "best: epoch" in section(text, "recall")  # of the manifest
    assert "x.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"batch": [3], "heads": ["a"], "training data": "x", "versions": 1},
        {"parameters": "many", "options": {"terms": [{}]}, "ranks": "two"},
        {"epochs": 10**400, "trainable": 1e308, "model": ["a"], "objective": {"a": 1}},
    ],
)
def test_a_plan_of_another_kind_ends_no_report(made: dict[str, Any], tmp_path: Path, change: dict[str, Any]) -> None:
    plan = {**json.loads((made["folder"] / "plan.json").read_text()), **change}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shutil.copy(made["folder"] / "config.json", tmp_path)
    huge = json.dumps({"step": 10**400, "loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "val/i2t_r1": 1.0}\n' + huge)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert tuple(re.findall(r'<section id="(\w+)"', text)) == SECTIONS
    assert "options</summary>" in section(text, "run") and "<svg" in section(text, "curves")
    head = html.unescape(text.split("<nav")[0])
    for name in {"batch", "heads", "training data", "versions", "parameters", "ranks"} & change.keys():
        assert re.search(f"plan.json: its '{name}' is not (an object|a number)", head)


def test_mistakes(made: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "not a training run's folder" in capsys.readouterr().err
    assert main(["report", str(made["folder"]), "--images", "0"]) == 2
    absent = ["--val-data", str(tmp_path / "absent.csv"), "--output", str(tmp_path / "x")]
    assert main(["report", str(made["folder"]), *absent]) == 2  # named on the command line: a slip, and no poorer report
    assert "absent.csv" in capsys.readouterr().err and not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CoderError, match="cannot be written"):
        write_report(made["folder"], output=tmp_path / "file" / "x.html")


# -- in a browser ----------------------------------------------------------------------------------------------------


def test_a_browser_shows_the_page(made: dict[str, Any], browser: str, tmp_path: Path) -> None:
    for found in assert_readable(browser, made["text"], tmp_path, 390, 1280):
        assert found["pictures"] == made["text"].count("<img ") and found["charts"] == made["text"].count("<svg ") > 20
        assert found["cut_tables"] == []
