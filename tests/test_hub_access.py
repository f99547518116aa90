"""Downloads without a network: one short attempt, then the cache alone."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from coder_plugin import create_model, hub_access
from coder_plugin.errors import CoderError


class Missing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asking = hub_access.is_reachable
    asking.cache_clear()
    yield
    asking.cache_clear()


def test_any_answer_is_an_answer() -> None:
    server = HTTPServer(("127.0.0.1", 0), Missing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert hub_access.is_reachable(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


def test_nobody_is_waited_for_longer_than_the_patience(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts, and never answers
        start = time.monotonic()
        assert not hub_access.is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 3
    assert not hub_access.is_reachable("http://127.0.0.1:1")


def test_only_the_cache_is_read_where_the_hub_does_not_answer(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: bool(asked.append(address)))
    with hub_access.hub_access(needed=False):
        assert hub_access.is_offline() and asked == []
    assert not hub_access.is_offline()
    with hub_access.hub_access():
        assert hub_access.is_offline() and asked == [constants.ENDPOINT]
    assert not hub_access.is_offline()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub_access.hub_access():
        assert hub_access.is_offline() and len(asked) == 1
    assert hub_access.is_offline()


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("ViT-B-32", {"pretrained": "laion2b_s34b_b79k"}, [
            "weights 'laion2b_s34b_b79k'", "--pretrained FILE", "download laion/CLIP-ViT-B-32-laion2B-s34B-b79K --",
        ]),
        ("hf-hub:owner/name", {}, ["the repository 'owner/name'", "--model local-dir:FOLDER", " owner/name --local-dir"]),
        ("roberta-ViT-B-32", {}, ["text tower 'roberta-base'", "(hf download roberta-base --local-dir FOLDER)"]),
        ("region-bert", {"text": "bert-base-nobody-has", "region_dim": 4}, [
            "'bert-base-nobody-has'", "text=FOLDER", "download bert-base-nobody-has --",
        ]),
    ],
)
def test_what_would_be_downloaded_is_named_at_once(name, options, words, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: False)
    start = time.monotonic()
    with pytest.raises(CoderError, match="must be downloaded, and the Hugging Face Hub cannot be reached") as caught:
        create_model(name, loss="clip", **options)
    assert time.monotonic() - start < 60, "the hub's client retries for longer"
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not hub_access.is_offline()
