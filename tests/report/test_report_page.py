"""The report of a run: every section, numbers of the run's own files, truths where a brute-force ranking has them, broken runs,
and the page as a browser shows it."""

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
from PIL import Image

from coder_plugin.cli import main
from coder_plugin.data import scenes
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import recall_from_embeddings, two_stage
from coder_plugin.objective import Objective
from coder_plugin.pretrained.encode import Items
from coder_plugin.report import sections
from coder_plugin.report.charts import format_number
from coder_plugin.report.curves import active_curve
from coder_plugin.report.run import write_report
from coder_plugin.training.loop import Trainer
from coder_plugin.training.run_folder import RunFolder, metric_names
from tests.report.browser import assert_readable, browse

SECTIONS = ("recall", "examples", "curves", "run", "concepts", "regions", "map", "state")
OF_THE_MODEL = ("examples", "concepts", "regions", "map", "state")
IMAGES = 40
#: Charts whose names are not those of the log.
NAMES = {
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
    "image_rank": "effective rank (images)",
    "text_rank": "effective rank (texts)",
}


@pytest.fixture(scope="module")
def made(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run of all losses on a few scenes, its report written by the command, and the trainer as it is at the end."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenes.DEFAULT_COUNTS, "val", IMAGES)
        options = ["prototypes.clusters=6", "momentum.bank_size=64", "alignment.prototypes=16", "dcl.epsilon=0.05"]
        config = dict(
            model=tiny_model,
            loss="coder + selfalign",
            set=options,
            logs=str(folder),
            name="run",
            batch_size=8,
            train_num_samples=48,
            epochs=2,
            workers=0,
            log_every_n_steps=2,
        )
        trainer = Trainer.from_config(config)
        trainer.run()
        assert main(["report", str(trainer.folder), "--images", "3"]) == 0
        text = (trainer.folder / "report.html").read_text(encoding="utf-8")
        yield {"trainer": trainer, "folder": trainer.folder, "text": text}


def section(text: str, name: str) -> str:
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def test_every_section_is_there_and_shows_something(made: dict[str, Any]) -> None:
    text = made["text"]
    for name in SECTIONS:
        assert f'href="#{name}"' in text
        assert "Not shown" not in section(text, name), name
    assert "could not be made" not in text and "Missing or damaged:" not in text
    assert len(text) < 3_000_000


def test_results_come_before_what_was_run(made: dict[str, Any]) -> None:
    assert tuple(re.findall(r'<section id="(\w+)"', made["text"])) == SECTIONS
    assert tuple(re.findall(r'href="#(\w+)"', made["text"].split("</nav>")[0])) == SECTIONS
    assert made["text"].split("<nav")[0].count("per epoch, without evaluation and saving") == 1


def test_every_figure_of_the_log_has_its_curve(made: dict[str, Any]) -> None:
    run = RunFolder.read(made["folder"])
    curves, state = section(made["text"], "curves"), section(made["text"], "state")
    terms = [key for key in metric_names(run.steps) if key.endswith("_loss") and "/" not in key]
    assert {"dcl_loss", "m_dcl_loss", "concept_dcl_loss", "pgc_loss", "lca_loss"} <= set(terms)
    for key in metric_names(run.steps):
        steps, values, _ = active_curve(run.steps, key)
        said = f"{format_number(values[-1])} at step {steps[-1]}"
        if key.startswith("coder/"):
            name = key.removeprefix("coder/").replace("/", ": ").replace("_", " ")
            assert f'<p class="name">{name}</p>' in state and said in state
        elif key.startswith("share/"):
            assert (
                f">{key.removeprefix('share/').removesuffix('_loss')}: {format_number(values[0])} at step 0<" in curves
            )
        else:
            name = NAMES.get(key, key)
            [figure] = re.findall(rf'<p class="name">{re.escape(name)}</p>(.*?)</figure>', curves, re.S)
            assert f"last {said}" in figure
            for step, value in zip(steps, values, strict=True):
                assert f"<title>{format_number(value)} at step {step}</title>" in figure
    [rsum] = re.findall(r'<p class="name">R@sum</p>(.*?)</figure>', curves, re.S)
    records = [json.loads(line) for line in (made["folder"] / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if "val/rsum" in record:
            assert f"<title>{format_number(record['val/rsum'])} at step {record['step']}</title>" in rsum


def test_the_tables_are_the_runs_numbers(made: dict[str, Any]) -> None:
    run, recall = RunFolder.read(made["folder"]), section(made["text"], "recall")
    best, last = run.results("best"), run.results("last")
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', recall)
    numbers = {name: re.findall(r'<td class="n[^>]*>([^<]*)</td>', cells) for name, cells in rows}
    for name, figures in ((f"best: epoch {best['epoch']}", best), ("last: epoch 2", last)):
        columns = ["rsum", *(f"{way}_{figure}" for way in ("i2t", "t2i") for figure in ("r1", "r5", "r10", "medr"))]
        assert numbers[name] == [f"{figures[key]:.1f}" for key in columns]
    assert "measured for this report, on scenes (val)" in recall
    assert numbers["now: export/best"] == numbers[f"best: epoch {best['epoch']}"]
    assert numbers["all"][0] == f"{last['texts']:,.0f}"
    shown = section(made["text"], "run")
    assert (
        "8 pairs per step" in shown
        and "2 epochs of 6 steps" in shown
        and f"torch {torch.__version__.split('+')[0]}" in shown
    )
    for part in ("coder-plugin train", "--batch-size 8", "--loss &#39;coder + selfalign&#39;", "coder-plugin eval"):
        assert part in shown
    assert "clusters=6" in shown and "epsilon=0.1" in shown  # what was set, and what was left


def hits(block: str) -> list[tuple[str, bool, float]]:
    """What a query's candidates are, whether they are marked, and their scores."""
    found = re.findall(
        r'<li class="hit( true)?">\s*(?:<img src="data:[^"]*" alt="([^"]*)">|([^<]*?))\s*(?:<span>[^<]*</span> )?'
        r'\s*<span class="score">([-\d.]+)</span>( <span class="mark">✓ match</span>)?',
        block,
    )
    assert len(found) == block.count("<li "), block[:500]
    for frame, *_, mark in found:
        assert bool(frame) == bool(mark)  # never by colour alone
    return [(html.unescape(alt or text).strip(), bool(mark), float(score)) for _, alt, text, score, mark in found]


def test_truths_are_where_brute_force_has_them(made: dict[str, Any], tmp_path: Path) -> None:
    trainer = made["trainer"]
    encoded = trainer.encoder(trainer.val)
    text = write_report(
        trainer.folder, encoder=trainer.encoder, source=trainer.val, output=tmp_path / "x.html", images=3
    )
    blocks = section(text.read_text(encoding="utf-8"), "examples").split("<h3>")[1:]
    assert [block.split("<")[0] for block in blocks] == [
        f"{way}, {which}" for way in ("Text to image", "Image to text") for which in ("best", "worst")
    ]
    scores = encoded.images.float() @ encoded.texts.float().T
    captions = list(encoded.captions)
    first = [captions[int((encoded.image_of_text == image).nonzero()[0])] for image in range(IMAGES)]
    ranks: dict[str, list[int]] = {}
    for block, wanted in zip(blocks, ("low", "high", "low", "high"), strict=True):
        queries = block.split('<div class="query">')[1:]
        assert len(queries) == 3
        for query in queries:
            rank = int(re.findall(r"rank ([\d,]+)", query)[0].replace(",", "")) - 1
            found = hits(query)
            if block.startswith("Text"):
                text_index = captions.index(html.unescape(re.findall(r"<strong>(.*?)</strong>", query)[0]))
                own = int(encoded.image_of_text[text_index])
                row, right = scores[:, text_index], torch.arange(IMAGES) == own
                names = first
            else:
                image = first.index(
                    html.unescape(re.findall(r'<div class="ask">\s*<img src="[^"]*" alt="([^"]*)"', query)[0])
                )
                row, right = scores[image], encoded.image_of_text == image
                names = captions
            best = row[right].max()
            assert rank == int((row[~right] >= best).sum())
            order = row.argsort(descending=True)[:5].tolist()
            shown = found[:5]
            assert [score for _, _, score in shown] == pytest.approx(row[order].tolist(), abs=6e-4)
            assert [mark for _, mark, _ in shown] == right[order].tolist()
            assert [name for name, _, _ in shown] == [names[each] for each in order]
            if not any(mark for _, mark, _ in shown):
                assert found[5][1] and found[5][2] == pytest.approx(float(best), abs=6e-4)
            else:
                assert len(found) == 5
            ranks.setdefault(f"{block[:5]}{wanted}", []).append(rank)
    result = recall_from_embeddings(encoded.images, encoded.texts, encoded.image_of_text)
    for way, name in (("t2i", "Text "), ("i2t", "Image")):
        every, low, high = result[f"{way}_ranks"], ranks[f"{name}low"], ranks[f"{name}high"]
        assert low == sorted(low) and low[0] == int(every.min())
        assert high == sorted(high, reverse=True) and high[0] == int(every.max())


class Minus(torch.nn.Module):
    """A head that orders a shortlist the other way round."""

    def scorer(self, images: dict[str, torch.Tensor], texts: dict[str, torch.Tensor]) -> Any:
        return two_stage._ScoreMatrix(-images["x"] @ texts["x"].T)


def test_scores_of_two_kinds_are_told_apart(made: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("coder_plugin.evaluation.evaluate.SHORTLIST", 3)
    trainer = made["trainer"]
    encoded = trainer.encoder(trainer.val)
    encoded = encoded._replace(items=Items(Minus(), {"x": encoded.images}, {"x": encoded.texts}))
    path = write_report(
        made["folder"],
        encoder=trainer.encoder,
        source=trainer.val,
        encoded=encoded,
        output=tmp_path / "x.html",
        images=2,
    )
    text = path.read_text(encoding="utf-8")
    recall, shown = section(text, "recall"), section(text, "examples")
    assert "Rows that begin with “now” were measured" in recall
    assert "now: model at the end, re-ranked 3<" in recall and "now: model at the end, shortlist<" in recall
    lists = re.findall(r'<ol class="hits.*?</ol>', shown, re.S)
    assert len(lists) == 8 and "The score is the fusion score" in " ".join(shown.split())
    for each in lists:
        scores = re.findall(r'<span class="score">(product )?([-\d.]+)</span>', each)
        assert [bool(product) for product, _ in scores[:5]] == [False] * 3 + [True] * 2
        # in the order of the products the shortlist, turned round, is before the rest
        values = [float(score) for _, score in scores[:5]]
        assert values[0] >= values[1] >= values[2] and -values[0] >= values[3] >= values[4]
    assert "product" not in section(made["text"], "examples")


def test_the_trainers_own_model_gives_every_section(made: dict[str, Any], tmp_path: Path) -> None:
    """As it is at the end of a run: in memory, with training heads and no further keys to catch."""
    trainer = made["trainer"]
    output = tmp_path / "new" / "x.html"
    path = write_report(trainer.folder, encoder=trainer.encoder, source=trainer.val, output=output, images=2)
    text = path.read_text(encoding="utf-8")
    assert "could not be made" not in text and "Not shown" not in text
    assert "now: model at the end" in text
    assert not list(path.parent.glob(".*"))  # nothing is left aside


def test_diversity_is_of_the_features_that_dcl_compares(made: dict[str, Any], monkeypatch: Any) -> None:
    trainer, given = made["trainer"], []
    values = {"image to text": [0.9, 0.8]}
    monkeypatch.setattr(sections, "anchor_diversity", lambda encoded, **_: given.append(encoded) or values)
    model = sections.Evaluated(trainer.encoder, trainer.val, trainer.encoder(trainer.val), "x")
    figure = sections.diversity(model, RunFolder.read(made["folder"]))
    trainer.model.eval()
    with torch.no_grad():
        images = torch.stack([trainer.encoder.transform(item.load()) for _, item in trainer.val.items()])
        expected = trainer.model.describe_image(images)["image_features"]
        texts = trainer.model.describe_text(trainer.tokenizer(list(model.encoded.captions)))["text_features"]
    torch.testing.assert_close(given[0].images, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given[0].texts, texts, atol=1e-5, rtol=1e-5)
    assert model.encoded.images.shape[1] > expected.shape[1]  # concepts and contexts are in the score
    assert "which dcl compares" in figure.note and "(std, ε = 0.05)" in figure.note
    assert "the diversity over the bank, which is not shown" in figure.note
    assert "(std, ε = 0.05)" in section(made["text"], "state")  # of the export, too


@pytest.mark.parametrize(
    ("loss", "term"),
    [
        ("clip", None),
        ("dcl(diversity=none)", None),
        ("dcl@concepts + concept_dcl", None),
        ("m_dcl(diversity_over=bank)", None),
        ("dcl@concepts + dcl(epsilon=0.3)", ("dcl", "batch", 0.3)),
        ("clip + m_dcl", ("m_dcl", "batch+bank", 0.1)),
    ],
)
def test_recipes_that_weigh_by_diversity(loss: str, term: tuple[str, str, float] | None) -> None:
    objective = Objective.parse(loss)
    if term is None:
        with pytest.raises(CoderError, match="no term weighs"):
            sections.weighting_term(objective)
    else:
        name, options = sections.weighting_term(objective)
        assert (name, options["diversity_over"], options["epsilon"]) == term


def test_what_is_encoded_leaves_the_ranks_nothing_to_do_together(
    made: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    trainer = made["trainer"]
    given = {"encoder": trainer.encoder, "source": trainer.val, "encoded": trainer.encoder(trainer.val), "images": 2}

    def collective(*_: Any, **__: Any) -> None:
        raise AssertionError("the other ranks are not here")

    monkeypatch.setattr("coder_plugin.distributed.world_size", lambda: 2)
    for name in ("gather", "gather_objects", "barrier", "broadcast"):
        monkeypatch.setattr(f"coder_plugin.distributed.{name}", collective)
    text = write_report(trainer.folder, output=tmp_path / "x.html", **given).read_text(encoding="utf-8")
    assert "could not be made" not in text and "Not shown" not in text
    monkeypatch.setattr("coder_plugin.distributed.rank", lambda: 1)
    monkeypatch.setattr("coder_plugin.report.run.RunFolder.read", collective)
    write_report(trainer.folder, output=tmp_path / "y.html", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_other_ranks_encode_and_write_nothing(made: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    asked = []

    def encoder(source: Any) -> None:
        asked.append(source)

    monkeypatch.setattr("coder_plugin.distributed.rank", lambda: 1)
    path = write_report(made["folder"], encoder=encoder, source="data", output=tmp_path / "x.html")  # type: ignore[arg-type]
    assert path == tmp_path / "x.html" and asked == ["data"] and not list(tmp_path.iterdir())


def test_nothing_is_loaded_from_elsewhere(made: dict[str, Any]) -> None:
    text = made["text"]
    for address in re.findall(r'(?:src|href|action|data|poster|xlink:href)\s*=\s*"([^"]*)"', text):
        assert address.startswith(("data:image/jpeg;base64,", "#")), address[:80]
    assert "url(" not in text and "@import" not in text and "<script" not in text and "<link" not in text
    assert "default-src 'none'" in text


def test_what_captions_say_is_text(made: dict[str, Any], tmp_path: Path) -> None:
    trainer = made["trainer"]
    evil = '<script>alert(1)</script> "quoted" <img src=x onerror=alert(2)> {{ 7 * 7 }}'
    items = [item for _, item in trainer.val.items()][:8]
    bad = [Item(f'"><script>{number}', (f"{evil} {number}",), item.load) for number, item in enumerate(items)]
    text = write_report(
        trainer.folder,
        encoder=trainer.encoder,
        source=ItemSource(bad, name="<b>data"),
        output=tmp_path / "x.html",
        images=2,
    ).read_text(encoding="utf-8")
    assert "<script" not in text and "<img src=x" not in text and "<b>data" not in text and "{{ 7 * 7 }} 0" in text
    assert html.escape(evil, quote=False)[:30] in text


def test_a_run_without_anything_but_metrics(made: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(made["folder"] / "metrics.jsonl", tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "lo')
    path = write_report(tmp_path)
    text = path.read_text(encoding="utf-8")
    for told in (
        "config.json: No such file",
        "plan.json: No such file",
        "no complete checkpoint",
        "1 line cannot be read",
    ):
        assert f"Missing or damaged: {html.escape(told)}" in text or told in text
    assert "dcl_loss" in section(text, "curves") and "no model and no validation data were given" in section(
        text, "examples"
    )
    for name in OF_THE_MODEL:
        assert "Not shown" in section(text, name)


def test_damaged_parts_cost_their_sections_alone(made: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made["folder"], folder)
    (folder / "metrics.jsonl").unlink()
    [checkpoint] = [path for path in (folder / "checkpoints").iterdir() if path.name == "step_00000012"]
    (checkpoint / "state.pt").write_bytes(b"damaged")
    shutil.rmtree(folder / "export" / "best")
    assert main(["report", str(folder), "--export", "best", "--output", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "it has --export last" in section(text, "examples") and "state.pt is refused" in section(text, "state")
    assert "no metrics.jsonl with records" in section(text, "curves")
    assert "best: epoch" in section(text, "recall")  # of the manifest
    assert (
        main(["report", str(folder), "--output", str(tmp_path / "y.html"), "--images", "2"]) == 0
    )  # the export that there is
    assert "now: export/last" in (tmp_path / "y.html").read_text(encoding="utf-8")
    assert "y.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        ({"batch": {"per rank": 3}}, None),
        ({"batch": [3], "heads": ["a"], "training data": "x", "versions": 1}, None),
        ({"epochs": None, "model": None, "parameters": None}, None),
        ({"trainable": None, "options": None}, None),
        ({"parameters": "many", "heads": {"a": "few"}, "options": {"terms": [{}]}, "ranks": "two"}, None),
        ({}, [{"step": 5, "val/rsum": 1.0}]),
        ({}, [{"step": 5, "val/i2t_r1": 1.0}]),
    ],
)
def test_a_plan_of_another_kind_ends_no_report(
    made: dict[str, Any], tmp_path: Path, change: dict[str, Any], metrics: list[dict[str, Any]] | None
) -> None:
    plan = {**json.loads((made["folder"] / "plan.json").read_text()), **change}
    (tmp_path / "plan.json").write_text(json.dumps({name: value for name, value in plan.items() if value is not None}))
    shutil.copy(made["folder"] / "config.json", tmp_path)
    if metrics is None:
        shutil.copy(made["folder"] / "metrics.jsonl", tmp_path)
    else:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    for name in SECTIONS:
        section(text, name)
    assert "Commands" in text and ("<svg" in section(text, "curves"))
    if isinstance(change.get("batch"), list):
        for name in ("batch", "heads", "training data", "versions"):
            assert f"plan.json: its &#39;{name}&#39; is not an object" in text
        assert "Validation data" in section(text, "run")
    if "parameters" in change and change["parameters"]:
        for damaged in ("&#39;heads&#39;, &#39;a&#39;: not a number", "&#39;parameters&#39;", "&#39;ranks&#39;"):
            assert damaged in text.split("<nav")[0], "each damaged entry is named, and the rest of the section is shown"
        assert section(text, "run").count("Not shown: this section could not be made") == 1
    if metrics and "val/rsum" in metrics[0]:
        assert "R@sum (last)" in text or "R@sum (best" in text


def test_a_persons_mistakes(made: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "not a training run's folder" in capsys.readouterr().err
    assert main(["report", str(made["folder"]), "--images", "0"]) == 2
    absent = ["--val-data", str(tmp_path / "absent.csv"), "--output", str(tmp_path / "x")]
    assert (
        main(["report", str(made["folder"]), *absent]) == 2
    )  # named on the command line: a slip, and no poorer report
    assert "absent.csv" in capsys.readouterr().err and not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CoderError, match="cannot be written"):
        write_report(made["folder"], output=tmp_path / "file" / "x.html")


def test_a_fault_of_a_part_ends_no_report(made: dict[str, Any], tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    trainer = made["trainer"]
    monkeypatch.setattr("coder_plugin.report.sections.place_vectors", lambda encoded: 1 // 0)
    path = write_report(
        trainer.folder, encoder=trainer.encoder, source=trainer.val, output=tmp_path / "x.html", images=2
    )
    text = path.read_text(encoding="utf-8")
    assert "ZeroDivisionError" in section(text, "map") and "ZeroDivisionError" in caplog.text
    assert "Not shown" not in section(text, "examples")


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [("phone", 390), ("desktop", 1280)])
def test_a_browser_shows_the_page(made: dict[str, Any], browser: str, tmp_path: Path, name: str, width: int) -> None:
    """No horizontal overflow at either width, every picture decoded, and a screenshot with something on it."""
    found = assert_readable(browser, made["text"], tmp_path, width)
    assert found["pictures"] == made["text"].count("<img ") and found["charts"] == made["text"].count("<svg ") > 20
    assert found["cut_tables"] == []
    url = (made["folder"] / "report.html").as_uri()
    dom = browse(browser, tmp_path, "--dump-dom", url)
    for section_name in SECTIONS:
        assert f'id="{section_name}"' in dom
    shot = tmp_path / f"{name}.png"
    browse(browser, tmp_path, f"--window-size={width},3000", f"--screenshot={shot}", url)
    with Image.open(shot) as picture:
        assert picture.width == width
        colours = picture.convert("RGB").getcolors(2**24)
    assert len(colours) > 50 and max(count for count, _ in colours) < 0.97 * picture.width * picture.height


def test_it_prints(made: dict[str, Any], browser: str, tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    url = (made["folder"] / "report.html").as_uri()
    browse(browser, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={path}", url)
    content = path.read_bytes()
    assert content.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", content)) >= len(SECTIONS)
