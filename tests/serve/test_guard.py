"""How many requests are answered at once, and how long a body may take."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from coder_plugin.serve.guard import Guard, Refused
from coder_plugin.serve.server import bind


async def request(guard: Guard, messages: Any = (), **scope: Any) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and content of the answer."""
    sent: list[Any] = []
    queue = [*messages, {"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if queue[0] is None:
            await asyncio.sleep(9)
        return queue.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), *scope.pop("headers", [])]
    await guard({"type": "http", "method": "POST", "headers": headers, **scope}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


async def respond(send: Any, content: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    async def check() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await respond(send, "done")

        guard = Guard(app, hosts=None, requests=2, body=9)
        waiting = [asyncio.create_task(request(guard)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        status, headers, content = await asyncio.wait_for(request(guard), 5)
        assert status == 503 and headers[b"retry-after"] == b"1"
        assert content["detail"] == "2 requests are being answered: try again in a second"
        go.set()
        assert [(status, content) for status, _, content in await asyncio.gather(*waiting)] == [(200, "done")] * 2
        assert (await request(guard))[0] == 200 and guard.running == 0

    asyncio.run(check())


def test_an_application_that_fails_is_counted_no_longer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    guard = Guard(app, hosts=None, requests=1, body=9)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            asyncio.run(request(guard))


async def read(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body, or with the refusal's words."""
    total, more = 0, True
    try:
        while more:
            message = await receive()
            total, more = total + len(message["body"]), message.get("more_body", False)
    except Refused as error:
        await respond(send, [error.status, error.detail])
    else:
        await respond(send, total)


def test_a_body_has_its_length_and_its_time() -> None:
    guard = Guard(read, hosts=None, requests=9, body=10, seconds=0.05)
    piece = {"type": "http.request", "body": b"x" * 5, "more_body": True}
    assert asyncio.run(request(guard, [piece, piece]))[2] == 10
    assert asyncio.run(request(guard, [piece, piece, {**piece, "body": b"x"}]))[2] == [413, "the request has over 10 bytes"]
    assert asyncio.run(request(guard, [piece, None]))[2] == [408, "the request did not arrive within 0.05 seconds"]


@pytest.mark.parametrize("length", [b"11", b"9" * 5000, b"-1", b"x", b""])
def test_a_length_that_is_announced(length: bytes) -> None:
    guard = Guard(read, hosts=None, requests=9, body=10)
    assert asyncio.run(request(guard, headers=[(b"content-length", length)]))[0] == 413
    assert asyncio.run(request(guard, headers=[(b"content-length", b"10")]))[0] == 200


def test_no_websocket() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(read, hosts=None, requests=9, body=10)
    asyncio.run(guard({"type": "websocket", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1003}]


def test_a_client_that_reads_nothing_leaves_its_place() -> None:
    """Under uvicorn, with an answer that no buffer holds."""
    import uvicorn

    piece, pieces, ended = b"x" * (1 << 18), 256, []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < pieces})
        ended.append(time.monotonic())

    async def check() -> None:
        guard = Guard(endless, hosts=None, requests=1, body=9, seconds=0.2)
        bound = bind("127.0.0.1", 0)
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(guard, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        with socket.create_connection(bound.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            started = time.monotonic()
            while not ended and time.monotonic() < started + 10:
                await asyncio.sleep(0.02)
            assert ended and 0.2 <= ended[0] - started < 10 and guard.running == 0
            client.settimeout(5)
            received = 0
            try:
                while content := client.recv(1 << 20):
                    received += len(content)
            except ConnectionResetError:
                pass
            assert 0 < received < len(piece) * pieces
            assert not server.server_state.connections
        server.should_exit = True
        await serving

    asyncio.run(check())


def test_another_server_ends_the_connection_of_such_a_client() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, "done")

    async def send(message: Any) -> None:
        await asyncio.sleep(9)

    guard = Guard(app, hosts=None, requests=1, body=9, seconds=0.01)
    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
        asyncio.run(guard({"type": "http", "method": "GET", "headers": []}, None, send))  # type: ignore[arg-type]
    assert guard.running == 0
