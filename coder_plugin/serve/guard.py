"""What every request passes first: whom it is addressed to, from where it comes, how many there are, how long its body is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Names of this machine for itself.
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Headers of every answer. The page loads only this server's style, script and pictures, and one that its user chose.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")


class Refused(Exception):
    """A body over its limit, or one that takes too long; ``status`` is HTTP's. The application inside answers with it."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class Guard:
    """An ASGI application around another one, which refuses what would harm it.

    Args:
        app: the other one.
        hosts: names that requests may be addressed to, in lower case; None: any. A page elsewhere whose name is made to lead to
            this machine (DNS rebinding) is refused by its name.
        requests: that are answered at once; 503 beyond.
        body: the most bytes of a request; 413 beyond.
        seconds: in which a body must arrive; 408 beyond. And in which the client must take each piece of an answer; beyond, the
            connection ends.
    """

    def __init__(
        self, app: Any, *, hosts: Collection[str] | None, requests: int, body: int, seconds: float = 30.0
    ) -> None:
        self.app, self.hosts, self.requests, self.body, self.seconds = app, hosts, requests, body, seconds
        self.running = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSocket
            await send({"type": "websocket.close", "code": 1003})
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            try:
                await asyncio.wait_for(send(message), self.seconds)
            except (asyncio.TimeoutError, TimeoutError):
                transport = getattr(getattr(send, "__self__", None), "transport", None)  # uvicorn's
                if transport is None:
                    raise
                transport.abort()  # to close it would wait for the client to read what is in the buffer

        if refusal := self._refusal(scope["method"], headers):
            await _answer(send_with_headers, *refusal)
            return
        self.running += 1
        try:
            await self.app(scope, self._limited(receive), send_with_headers)
        finally:
            self.running -= 1

    def _refusal(self, method: str, headers: dict[bytes, str]) -> tuple[int, str] | None:
        host = headers.get(b"host", "")
        if self.hosts is not None and name_of(host) not in self.hosts:
            return 421, f"this server is not {name_of(host)[:100] or 'without a name'!r}: start it with --allow-host NAME"
        origin = headers.get(b"origin")
        if origin is not None and method not in ("GET", "HEAD"):
            netloc = urlsplit(origin).netloc.lower() if origin.isascii() else ""
            if netloc != host.lower() and name_of(netloc) not in (self.hosts or ()):
                return 403, "pages of other servers may not use this one"
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.body:
            return 413, f"the request has over {self.body:,} bytes"
        if self.running >= self.requests:
            return 503, f"{self.requests} requests are being answered: try again in a second"
        return None

    def _limited(self, receive: Receive) -> Receive:
        """``receive`` until the body is too long or takes too long."""
        left, deadline, ended = self.body, asyncio.get_running_loop().time() + self.seconds, False

        async def limited() -> Message:
            nonlocal left, ended
            if ended:  # what follows is that the client leaves, at any time
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - asyncio.get_running_loop().time())
            except (asyncio.TimeoutError, TimeoutError):
                raise Refused(408, f"the request did not arrive within {self.seconds:g} seconds") from None
            left -= len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if left < 0:
                raise Refused(413, f"the request has over {self.body:,} bytes")
            return message

        return limited


def name_of(host: str) -> str:
    """The name in a ``Host`` header, without its port, in lower case; empty if it is none.

    Example:
        >>> name_of("LocalHost:8000"), name_of("[::1]:8000"), name_of("example.org."), name_of("[::1].example.org")
        ('localhost', '[::1]', 'example.org', '')
    """
    found = _HOST.fullmatch(host.strip().lower())
    return found[1].rstrip(".") if found else ""


async def _answer(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
