"""``comparison.html``: what it shows, and that it can be read."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin.compare import measure
from coder_plugin.compare import page as pages
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.pretrained.encode import Encoded
from tests.compare.conftest import CAPTIONS, IMAGES, World, write_comparison
from tests.report.browser import look
from tests.report.conftest import browser  # noqa: F401

Compare = Callable[..., str]


class Run:
    """An encoder that finds the right pictures, better if it was trained with ``dcl``."""

    reranking = None

    def __init__(self, folder: Path, items: list[Item]) -> None:
        self.folder, self.items = folder, items

    def __call__(self, source: Any) -> Encoded:
        owner = torch.arange(IMAGES).repeat_interleave(CAPTIONS)
        noise = torch.randn(len(owner), IMAGES, generator=torch.Generator().manual_seed(len(self.folder.name)))
        texts = torch.eye(IMAGES)[owner] + (0.2 if "dcl" in self.folder.name else 0.5) * noise
        ids = torch.tensor([item.image_id for item in self.items])
        captions = [caption for item in self.items for caption in item.captions]
        return Encoded(torch.eye(IMAGES), texts, owner, ids, captions, index=torch.arange(IMAGES))


@pytest.fixture
def page(world: World, command: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def item(number: int) -> Item:
        captions = tuple(f"picture <{number}>, caption {caption}" for caption in range(CAPTIONS))
        return Item(f"{number}.jpg", captions, lambda: Image.new("RGB", (64, 48), (7 * number % 256, 31 * number % 256, 99)))

    items = list(map(item, range(IMAGES)))
    source = ItemSource(items)
    monkeypatch.setattr(pages, "write_comparison", write_comparison)
    monkeypatch.setattr(measure, "of_run", lambda folder, *_: measure.ranks_of(Run(folder, items), source, None))
    monkeypatch.setattr(measure, "open_run", lambda folder, *_: (Run(folder, items), source, None))
    monkeypatch.setattr(measure, "before", lambda *_: measure.ranks_of(Run(Path("before"), items), source, None))
    command("--lr 1e-5 1e-4 1e-3 --seeds 3")
    return (tmp_path / "out" / "comparison.html").read_text()


def test_the_page_says_what_to_use_and_shows_why(page: str, tmp_path: Path) -> None:
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    text = html.unescape(re.sub(r"<wbr>|<[^>]+>", "", page))
    sentence = result["sentence"].removeprefix("use ")
    assert f"Use {sentence}. Measured on 80 images of the validation split of the built-in scenes." in text
    for name in ("Result", "Differences", "Curves", "Where the rows differ", "Chosen settings", "Commands"):
        assert f"<h2>{name}</h2>" in page
    assert page.count("<svg") == 4 and "Not shown" not in page
    assert "--lr 0.0001" in text and result["rows"]["dcl"]["command"] in text
    assert "2.0 GB" in text and "2 of 3, 2 of 3, 2 of 3" in text
    for title in ("Text to image, better in dcl than in clip", "Image to text, better in dcl than in clip"):
        shown = text.partition(title)[2]
        assert len(re.findall(r"rank \d+, (clip|dcl)", shown[:3000])) >= 6 and shown.index("clip") < shown.index("dcl")
    assert page.count("data:image/jpeg") >= 9 and "picture <" not in page.replace("&lt;", "")


@pytest.mark.slow
def test_the_page_can_be_read(browser: str, page: str, tmp_path: Path) -> None:  # noqa: F811
    """In light and in dark colours, on a wide screen and on a phone."""
    schemes = [f"--blink-settings=preferredColorScheme={number}" for number in (1, 0)]
    light, dark = (look(browser, page, tmp_path, 1280, 390, flags=(scheme,)) for scheme in schemes)
    for found in [*light, *dark]:
        assert found["scrolled"] == found["width"]
        assert found["wide"] == [] and found["outside"] == [] and found["broken"] == 0
    assert not set(light[0]["colours"]) & set(dark[0]["colours"])
