"""A running server under clients that send too much, too slowly, or anything but a search, while others search."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.serve.conftest import Live, Made, running

#: As the server's own, but soon enough for a test.
SECONDS, WAITING = 1.0, 40


def serve(arguments: list[str]) -> int:
    from coder_plugin.cli import main
    from coder_plugin.serve import app

    app.SECONDS, app.WAITING = SECONDS, WAITING
    return main(arguments)


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(tmp_path_factory.mktemp("server"), str(made.index), "--max-requests", "16", main=serve) as live:
        yield live


def address(server: Live) -> tuple[str, int]:
    host, _, port = server.url.split("/")[2].partition(":")
    return host, int(port)


def connect(server: Live) -> socket.socket:
    return socket.create_connection(address(server), timeout=20)


def png(size: tuple[int, int] = (90, 70)) -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", size, random.Random(0).randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


def form(content: bytes, **fields: str) -> tuple[bytes, str]:
    part = "--x\r\ncontent-disposition: form-data; name="
    begin = "".join(f'{part}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    begin += f'{part}"picture"; filename="../../a.png"\r\n\r\n'
    return begin.encode() + content + b"\r\n--x--\r\n", "multipart/form-data; boundary=x"


def post(server: Live, path: str, body: bytes, kind: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address(server), timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": kind, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def get(server: Live, path: str) -> int:
    connection = http.client.HTTPConnection(*address(server), timeout=60)
    try:
        connection.putrequest("GET", path, skip_accept_encoding=True)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@lru_cache
def bomb() -> bytes:
    """A PNG file of 1 MB whose 200 MB of pixels are zeros, and which says so."""
    rows = zlib.compress(bytes(14_000 * 14_001), 1)

    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = (14_000).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def garbage() -> list[Callable[[Live], int]]:
    """Requests that a server refuses with a status of 400 to 499."""
    pictures = {
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "bomb": bomb(),
        "text": b"no picture",
        "torn": png()[:3000],
        "pickle": b"cos\nsystem\n(S'true'\ntR.",
    }
    uploads = [form(content) for content in pictures.values()]
    uploads += [form(png(), k="many"), form(png(), filters="{"), form(png(), size="9"), (b"x", "multipart/form-data")]
    texts = [
        b"", b"[" * 60_000, b'{"text": ' + b"9" * 60_000 + b"}", b'{"text": "x"' * 9000, b'{"text": 5}', b"\xff\xfe", b"{}",
        b'{"text": "x", "k": 1e999}', b'{"text": "x", "filters": {"path": "x"}}', b'{"text": "\\ud800"}',
        b'{"key": "../../etc/passwd"}',
    ]  # fmt: skip
    paths = [
        "/api/image/../../etc/passwd", "/api/image/..%2f..%2fetc%2fpasswd", "/%2e%2e/etc/passwd", "/../app.py", "/serve.py",
        "/api/image/99999999999999999999", "/api/image/%00", "/api/thumbnail/-1",
    ]  # fmt: skip
    made: list[Callable[[Live], int]] = [partial(_status, path="/api/picture", body=body, kind=kind) for body, kind in uploads]
    made += [partial(_status, path="/api/search", body=body) for body in texts]
    made += [partial(get, path=path) for path in paths]
    made.append(partial(_status, path="/api/search", body=b'{"text": "x"}', host="evil.example"))
    made.append(partial(_status, path="/api/search", body=b'{"text": "x"}', origin="http://evil.example"))
    return [*made, announced]


def _status(server: Live, *, path: str, body: bytes, kind: str = "application/json", **headers: str) -> int:
    return post(server, path, body, kind, **headers)[0]


def announced(server: Live) -> int:
    """The status of a request that says that it has 9 GB."""
    with connect(server) as client:
        client.sendall(b"POST /api/picture HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000000\r\n\r\n")
        return int(client.recv(1000).split()[1])


def memory(server: Live) -> int:
    """The server's resident memory in MB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) >> 10  # type: ignore[index]


def good(server: Live, number: int) -> int:
    """The status of a search that is answered: by text, by picture."""
    if number % 3 == 0:
        status, content = post(server, "/api/picture", *form(png((64, 64 + number % 9)), k="5"))
    else:
        body = json.dumps({"text": f"a red circle {number}", "k": 5}).encode()
        status, content = post(server, "/api/search", body, "application/json")
    return status if status != 200 or len(json.loads(content)["results"]) == 5 else 0


def mixed(server: Live, clients: int, seconds: float) -> tuple[Counter[int], Counter[int], list[int]]:
    """Half of the clients search, half send garbage: the statuses of both, and the server's memory over time."""
    deadline = time.monotonic() + seconds
    searched: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    held: list[int] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        bad, count = garbage(), number
        try:
            while time.monotonic() < deadline:
                count += clients
                if number % 2:
                    refused[bad[count // clients % len(bad)](server)] += 1
                else:
                    searched[good(server, count)] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        held.append(memory(server))
        time.sleep(0.2)
    assert not failures, failures
    return searched, refused, held


def test_each_kind_of_garbage_is_refused(server: Live) -> None:
    statuses = [each(server) for each in garbage()]
    assert all(400 <= each < 500 for each in statuses), statuses
    assert good(server, 0) == good(server, 1) == 200
    assert "Traceback" not in server.errors.read_text()


@pytest.mark.parametrize("seconds", [0.8, pytest.param(60.0, marks=pytest.mark.slow)])
def test_searches_are_answered_under_garbage_and_memory_stays(server: Live, seconds: float) -> None:
    mixed(server, 8, 0.5)  # the memory that its threads keep
    searched, refused, held = mixed(server, 8, seconds)
    sizes = f"{held[0]} MB at first, {max(held)} at most, {held[-1]} at the end"
    print(f"{dict(searched)} searches, {dict(refused)} refused, {sizes}")
    assert {*searched} == {200} and searched[200] >= seconds
    assert all(400 <= status < 500 for status in refused) and refused.total() >= seconds
    assert sum(held[-3:]) / 3 < held[0] + 120


def test_half_open_requests_keep_nobody_out(server: Live) -> None:
    """Neither without headers, nor with half of them, nor with half a body; and their connections end."""
    halves = (b"", b"GET / HTTP/1.1\r\nhost: local", b"POST /api/picture HTTP/1.1\r\nhost: localhost\r\n"
              b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 900\r\n\r\n--x")  # fmt: skip
    with contextlib.ExitStack() as held:
        clients = []
        for number in range(240):
            clients.append(held.enter_context(connect(server)))
            clients[-1].sendall(halves[number % 3])
            if number % 40 == 39:
                assert good(server, 1) == 200
        time.sleep(SECONDS)
        assert good(server, 2) == 200
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


def test_a_client_that_drips_is_cut_off(server: Live) -> None:
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
        started = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for number in range(1000):
                client.sendall(f"x-{number}: 1\r\n".encode())
                time.sleep(0.05)
        assert SECONDS / 2 < time.monotonic() - started < 10


def test_a_connection_may_be_used_again_until_it_is_idle(server: Live) -> None:
    connection = http.client.HTTPConnection(*address(server), timeout=20)
    for _ in range(3):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        time.sleep(0.4 * SECONDS)
    time.sleep(1.5 * SECONDS)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
        connection.request("GET", "/healthz")
        connection.getresponse()


def test_a_client_that_reads_nothing_is_cut_off(server: Live) -> None:
    connections = {each for each in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(300):  # answers that no buffer holds
            try:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
            except OSError:
                break
        deadline = time.monotonic() + 10 * SECONDS
        while len([*Path(f"/proc/{server.process.pid}/fd").iterdir()]) > len(connections):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_client_that_leaves_in_an_upload_is_one_line(server: Live) -> None:
    before = len(server.errors.read_text().splitlines())
    held = memory(server)
    begin = form(b"")[0].partition(b"--x--")[0]
    head = b"POST /api/picture HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
    for _ in range(8):
        with connect(server) as client:
            client.sendall(head + b"content-length: 20000000\r\n\r\n" + begin)
            client.sendall(bytes(10_000_000))
    deadline = time.monotonic() + 10
    while len(lines := server.errors.read_text().splitlines()[before:]) < 8:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    assert all("a client left, or took too long, before its request had arrived" in each for each in lines) and len(lines) == 8
    assert memory(server) < held + 40
    names = [os.readlink(each) for each in Path(f"/proc/{server.process.pid}/fd").iterdir() if each.is_symlink()]
    assert not [name for name in names if "deleted" in name]  # the file in which an upload is kept


def test_more_requests_than_allowed_are_told_to_come_back_and_ctrl_c_ends_it(made: Made, tmp_path: Path) -> None:
    main, flags = partial(crowded, go=tmp_path / "go"), ["--max-requests", "1", "--data", str(tmp_path)]
    with running(tmp_path, str(made.index), *flags, main=main) as live, contextlib.ExitStack() as held:
        shown = "the pictures' own files are not found, so thumbnails are shown: --data FOLDER says where they are"
        assert shown in live.errors.read_text()
        deadline = time.monotonic() + 30
        while get(live, "/healthz") != 503:  # of those that come at the same moment some may be closed as waiting
            client = held.enter_context(connect(live))
            client.sendall(b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                           b'content-length: 13\r\n\r\n{"text": "x"}')  # fmt: skip
            assert time.monotonic() < deadline
        (tmp_path / "go").touch()
        while get(live, "/healthz") != 200:
            assert time.monotonic() < deadline
        held.close()
        os.kill(live.process.pid, signal.SIGINT)
        live.process.join(20)
        assert live.process.exitcode == 130
        assert live.errors.read_text().splitlines()[-1] == "coder-plugin: interrupted"
        assert "Traceback" not in live.errors.read_text()


def crowded(arguments: list[str], go: Path) -> int:
    """A server whose searches by "x" wait for a file."""
    from coder_plugin.cli import main
    from coder_plugin.serve import app

    search = app.Engine.text

    def text(self: Any, text: str, *others: Any, **options: Any) -> Any:
        while text == "x" and not go.exists():
            time.sleep(0.02)
        return search(self, text, *others, **options)

    app.Engine.text = text  # type: ignore[method-assign]
    return main(arguments)
