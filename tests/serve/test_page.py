"""A running server and its page in a browser."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from coder_plugin.cli import main
from coder_plugin.cli.serve import _hint
from tests.serve.chrome import Page, page
from tests.serve.conftest import COUNT, NAME, Live, Made, running

RESULTS = "document.querySelectorAll('.hit').length === {} && !state.running"


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(tmp_path_factory.mktemp("server"), str(made.index)) as live:
        yield live


@pytest.fixture(scope="module")
def tab(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def load(tab: Page, server: Live, width: int, **options: Any) -> None:
    tab.events.clear()
    tab.open(server.url, width, **options)
    tab.until("Boolean(state.info)")


def assert_tidy(tab: Page, server: Live) -> None:
    """Nothing on the console, nothing requested from elsewhere, nothing wider than the page, no picture broken."""
    assert tab.complaints() == []
    assert all(each.startswith((server.url, "blob:", "data:")) for each in tab.requests())
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("[...document.images].filter(each => each.offsetParent && each.complete && !each.naturalWidth).length") == 0


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_a_text_is_searched_for_by_keyboard(tab: Page, server: Live, made: Made, width: int) -> None:
    load(tab, server, width, dark=width == 390, mobile=width == 390)
    tab.run("document.activeElement.blur()")
    tab.press("/")
    tab.press("/")  # in the box it is a slash
    assert tab.run("document.getElementById('text').value") == "/"
    tab.run("document.getElementById('text').select()")
    tab.type("a red circle")
    tab.press("Enter")
    tab.until(RESULTS.format(24))
    assert tab.run("document.getElementById('text').value") == "a red circle"
    assert tab.run("document.getElementById('status').textContent") == "24 of 30 pictures, the best first"
    assert tab.run("document.querySelector('.hit b').textContent") == "1"
    assert tab.run("location.hash") == "#text=a+red+circle&among=images"
    tab.press("ArrowDown")
    tab.press("ArrowRight")
    focused = "[...document.querySelectorAll('.hit a')].indexOf(document.activeElement)"
    assert tab.run(focused) == 1
    tab.press("ArrowDown")
    columns = tab.run("getComputedStyle(document.getElementById('results')).gridTemplateColumns.split(' ').length")
    assert tab.run(focused) == 1 + columns and columns == (2 if width == 390 else columns)
    link = tab.run("document.activeElement.href")
    assert link.startswith(f"{server.url}api/image/") and tab.run("document.activeElement.target") == "_blank"
    tab.press("m")  # more like it
    tab.until("state.query.key && !state.running")
    assert tab.run("document.querySelector('.hit .key').textContent") == tab.run("state.query.key")
    assert tab.run("document.querySelector('.hit a').href") == link  # itself
    tab.press("Escape")
    assert tab.run("document.activeElement.id") == "text"
    tab.press("Escape")
    tab.until("!document.getElementById('empty').hidden")
    tab.run("history.back()")
    tab.until(RESULTS.format(24) + " && Boolean(state.query.key)")
    assert_tidy(tab, server)


def test_everything_is_shown_and_hostile_texts_are_texts(tab: Page, server: Live) -> None:
    load(tab, server, 1280)
    tab.type("x")
    tab.press("Enter")
    tab.until(RESULTS.format(24))
    tab.run("document.getElementById('more').click()")
    tab.until(RESULTS.format(COUNT))
    assert tab.run("document.getElementById('more').hidden")
    assert tab.run(f"[...document.querySelectorAll('.key')].some(each => each.textContent.endsWith({json.dumps(NAME)}))")
    assert tab.run("document.querySelectorAll('.hit script, .hit img[onerror]').length") == 0
    tab.run("document.querySelector('input[value=captions]').click()")
    tab.until("Boolean(document.querySelector('.texts')) && !state.running")
    assert "captions, the best first" in tab.run("document.getElementById('status').textContent")
    assert_tidy(tab, server)


def test_results_are_filtered(tab: Page, server: Live) -> None:
    load(tab, server, 390, mobile=True)
    columns = "[...document.querySelectorAll('[data-column]')].map(each => each.dataset.column)"
    assert tab.run(columns) == ["source", "number", "note"]
    tab.type("a star")
    tab.press("Enter")
    tab.until(RESULTS.format(24))
    choose = """(() => {
      const field = document.querySelector('[data-column=source]');
      field.value = JSON.stringify("drawn");
      field.dispatchEvent(new Event('change'));
    })()"""
    tab.run(choose)
    tab.until(RESULTS.format(10))
    assert tab.run("document.getElementById('status').textContent") == "10 pictures, the best first"
    address = tab.run("location.href")
    tab.run("history.back()")
    tab.until(RESULTS.format(24))
    assert tab.run("document.querySelector('[data-column=source]').value") == ""
    load(tab, server._replace(url=address), 1280)
    tab.until(RESULTS.format(10))
    assert tab.run("document.querySelector('[data-column=source]').value") == '"drawn"'
    assert_tidy(tab, server)


def test_a_picture_is_searched_by(tab: Page, server: Live) -> None:
    load(tab, server, 390, mobile=True)
    drop = """fetch('api/image/7').then(answer => answer.blob()).then(picture => {
      const carried = new DataTransfer();
      carried.items.add(new File([picture], 'mine.png', {type: 'image/png'}));
      for (const kind of ['dragenter', 'dragover', 'drop'])
        document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: carried, bubbles: true, cancelable: true}));
    })"""
    tab.run(drop)
    tab.until(RESULTS.format(24))
    assert tab.run("document.querySelector('.hit a').href").endswith("api/image/7")
    assert tab.run("document.getElementById('named').textContent") == "Like the picture mine.png"
    tab.until("!document.getElementById('shown').hidden")
    assert tab.run("document.getElementById('drop').hidden")
    assert_tidy(tab, server)
    tab.run("searchPicture(new File(['no picture'], 'notes.txt'))")
    tab.until("Boolean(document.querySelector('#status.bad'))")
    assert tab.run("document.getElementById('status').textContent").startswith("The picture cannot be read: not an image")
    assert tab.run("document.querySelectorAll('.hit').length") == 0


def test_a_server_that_is_gone_is_said(tab: Page, server: Live) -> None:
    load(tab, server, 390)
    tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    try:
        tab.run("search({text: 'a dog', among: 'images', filters: {}})")
        assert tab.run("document.getElementById('status').textContent") == "The server does not answer: is it still running?"
    finally:
        tab.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)



@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("scenes", "the built-in scenes are drawn, so they have none"),
        ("s3://bucket/{0..9}.tar", "they were read from s3://bucket/{0..9}.tar, not from a folder of this machine"),
        ("hf-hub:owner/name", "they were read from hf-hub:owner/name, not from a folder of this machine"),
        ("/moved/pictures", "--data FOLDER says where they are"),
    ],
)
def test_the_hint_about_pictures_fits_the_data(data: str, words: str) -> None:
    assert _hint(data, None) == f": {words}"


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("coder-plugin: error: ")
    return printed


def test_a_port_in_use(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        printed = error(capsys, str(made.index), "--port", str(port))
    assert f"cannot listen at --host 127.0.0.1 --port {port} (Address already in use)" in printed and "--port 0" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: no such address"),
        (["--host", "203.0.113.9"], "cannot listen at --host 203.0.113.9 --port 8000 (Cannot assign requested address)"),
        (["--allow-host", "https://search.example.org"], "--allow-host https://search.example.org: give a name without https://"),
        (["--allow-host", "search.example.org", ""], "--allow-host : give a name without https://"),
        (["--port", "0", "--rerank", "8"], "--rerank 8: the index keeps nothing to re-rank by"),
        (["--port", "0", "--model", "nowhere"], "its model cannot be opened"),
    ],
)
def test_what_cannot_be_served(made: Made, capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert words in error(capsys, str(made.index), *flags)
