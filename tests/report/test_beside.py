"""Models of several runs on one page: the same queries, chosen by their change of rank, recall, and a map of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.data import scenes
from coder_plugin.data.scenes import open_scenes
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report import compare, sections
from coder_plugin.report.charts import Html
from coder_plugin.report.compare import compare_runs
from coder_plugin.report.sections import Evaluated
from coder_plugin.training.loop import Trainer
from tests.report.browser import assert_readable
from tests.report.test_report_page import rows_of, section

IMAGES = 12


@pytest.fixture(scope="module")
def runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A base and a model of two losses on the built-in scenes."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenes.DEFAULT_COUNTS, "val", IMAGES)
        for name, loss in (("base", "clip"), ("model", "dcl")):
            config = {
                "model": tiny_model, "loss": loss, "logs": str(folder), "name": name, "batch_size": 8, "train_num_samples": 16,
                "epochs": 1, "workers": 0, "report": False,
            }  # fmt: skip
            Trainer.from_config(config).run()
        yield [str(folder / "base"), str(folder / "model")]


def test_the_command_shows_base_beside_model(runs: list[str], browser: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *runs, "--images", "2", "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Not shown" not in text
    recall = rows_of(section(text, "recall"))
    logged = rows_of(section(text, "runs"))["R@sum"]
    assert [recall["1 base"][0], recall["2 model"][0]] == [each.split()[0] for each in logged]
    assert section(text, "map").count("<svg") == 2
    assert section(text, "map").count(f"{IMAGES} images and their {5 * IMAGES} captions, by t-SNE") == 4  # and for readers
    examples = section(text, "examples")
    ranks = re.findall(r"rank ([\d,]+), (1 base|2 model)", examples)
    assert len(ranks) >= 4 and [name for _, name in ranks] == ["1 base", "2 model"] * (len(ranks) // 2)
    headings = re.split(r"<h3>(.*?)</h3>", examples)[1:]
    for title, part in zip(headings[::2], headings[1::2], strict=True):
        found = [int(rank) for rank, _ in re.findall(r"rank (\d+), (1 base|2 model)", part)]
        for base, model in zip(found[::2], found[1::2], strict=True):
            assert base > model if ", better in 2 model than in 1 base" in title else base < model, title
    assert_readable(browser, text, tmp_path, 1280)


def test_models_are_not_opened_unless_it_is_said(runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(compare, "open_runs", lambda *_, **__: 1 // 0)
    assert 'id="map"' not in compare_runs(runs).read_text(encoding="utf-8")
    assert main(["report", *runs, "--val-data", "x.csv"]) == 2
    assert "leave out --val-data, or add --images N to open their models" in capsys.readouterr().err


def test_runs_of_other_data_are_refused(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = compare.open_run
    counts = iter((IMAGES, IMAGES - 1))

    def other(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setitem(scenes.DEFAULT_COUNTS, "val", next(counts))
        return opened(*arguments, **options)

    monkeypatch.setattr(compare, "open_run", other)
    with pytest.raises(CoderError, match="1 base and 2 model read different data: name one for both with --val-data"):
        compare_runs(runs, images=1)


def made(name: str, i2t: list[int], t2i: list[int]) -> Evaluated:
    """Four scenes with two captions each, random vectors, and ranks from 1."""
    items = [replace(item, captions=item.captions[:2]) for _, item in ItemSource(open_scenes("val", count=4)).items()]
    generator = torch.Generator().manual_seed(len(name))
    encoded = Encoded(
        images=torch.randn(4, 3, generator=generator), texts=torch.randn(8, 3, generator=generator),
        image_of_text=torch.arange(4).repeat_interleave(2), image_ids=torch.tensor([item.image_id for item in items]),
        captions=[caption for item in items for caption in item.captions], index=torch.arange(4),
    )  # fmt: skip
    ranks = {"i2t_ranks": torch.tensor(i2t) - 1, "t2i_ranks": torch.tensor(t2i) - 1, "depth": None}
    return Evaluated(name, encoded, ItemSource(items), None, ranks)


def test_queries_are_chosen_by_the_ratio_of_their_ranks() -> None:
    """400 to 100 is as much as 4 to 1, more than 300 to 100 and less than 9 to 1; one caption of an image is shown."""
    first = made("one", [4, 300, 400, 7], [9, 9, 1, 1, 2, 5, 3, 3])
    last = made("two", [1, 100, 100, 7], [1, 1, 3, 2, 2, 5, 2, 2])
    blocks = compare.queries([first, last], 2)[1:]
    shown: dict[str, list[Any]] = {}
    for block in blocks:
        if "heading" in block:
            title = block["heading"]
        else:
            shown.setdefault(title, []).append(block["query"]["caption"] or block["query"]["image"]["alt"])
    captions = first.encoded.captions
    assert shown == {
        "Text to image, better in two than in one": [captions[0]] * 2 + [captions[6]] * 2,
        "Text to image, worse in two than in one": [captions[2]] * 2,
        "Image to text, better in two than in one": [captions[0]] * 2 + [captions[4]] * 2,
    }
    with pytest.raises(CoderError, match="every query has the same rank in one and in one"):
        compare.queries([first, first], 2)


@pytest.mark.parametrize(("count", "images", "captions"), [(3, 3, 6), (1000, 4, 8)])
def test_a_map_has_all_captions_of_its_images(monkeypatch: Any, count: int, images: int, captions: int) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(sections, "tsne", lambda vectors: vectors[:, :2])
    monkeypatch.setattr(sections, "scatter", lambda *points, linked: drawn.append((*points, linked)) or Html("<svg/>"))
    encoded = made("one", [1] * 4, [1] * 8).encoded
    figure = sections.map_figure(encoded, "1 one", images=count, all_captions=True)
    [(left, right, linked)] = drawn
    assert (figure.name, len(left), len(right), linked) == ("1 one", images, captions, False)
    kept = [0, 2, 3] if count == 3 else [0, 1, 2, 3]
    assert torch.equal(torch.as_tensor(left), encoded.images[kept, :2])
    assert torch.equal(torch.as_tensor(right), encoded.texts[[text for row in kept for text in (2 * row, 2 * row + 1)], :2])
