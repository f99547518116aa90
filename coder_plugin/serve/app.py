"""A page and a JSON API over an opened index: FastAPI, on uvicorn.

Whoever reaches the server may send anything. FastAPI checks the values; :class:`Guard` the addresses and the length of a
request; :class:`Protocol` the time in which a request must arrive and its answer be taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from coder_plugin import __version__
from coder_plugin.backbones.base import Backbone
from coder_plugin.data.decode import FORMATS, decode_image
from coder_plugin.data.source import text_fault
from coder_plugin.errors import CoderError, install_command
from coder_plugin.html import asset, render
from coder_plugin.search.parquet import KINDS
from coder_plugin.search.records import SHOWN
from coder_plugin.search.searcher import Query, Searcher
from coder_plugin.search.vectors import import_faiss
from coder_plugin.serve.originals import Originals

try:
    import h11
    import python_multipart  # noqa: F401 - by which FastAPI reads uploads
    import uvicorn
    from fastapi import Depends, FastAPI, File, HTTPException, Request, Response, UploadFile
    from fastapi.datastructures import Headers
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field, Json
    from starlette.datastructures import MutableHeaders
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise CoderError(f"serve needs FastAPI and uvicorn: {install_command('serve')} ({error})") from error

log = logging.getLogger(__name__)
#: The most results of a search, characters of a text or a key, and bytes of a search in JSON.
MOST_RESULTS, MOST_TEXT, MOST_JSON = 200, 2000, 1 << 16
#: Uploaded pictures that are decoded at once: one of 50,000,000 pixels takes up to 460 MB. Texts whose vectors are kept.
PICTURES, TEXTS = 2, 256
#: Seconds in which a request must arrive, and in which a client must take a part of its answer.
SECONDS = 30.0
#: Connections that may wait for a request, or for the rest of one. Of more, those that have waited longest are closed.
WAITING = 256
#: Different values of a column that the page offers as a list; of more it takes a typed one.
MOST_VALUES = 100
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
#: A picture opened by itself may run nothing, whatever it holds.
_SANDBOX = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
_TEXTS = {"css": "text/css", "js": "text/javascript"}
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")

#: A value of a metadata column; None: images without one.
Value = Annotated[str, Field(max_length=200)] | bool | int | float | None
Filters = Annotated[
    dict[str, Value | Annotated[list[Value], Field(min_length=1, max_length=100)]],
    Field(max_length=20, description="metadata columns and the value, or one of several values, that an image must have"),
]
Among = Annotated[
    Literal["images", "captions"] | None,
    Field(description="what to search for; by default images for a text, captions for an image, as far as there are some"),
]
Count = Annotated[int, Field(ge=1, le=MOST_RESULTS, description="results")]
Text = Annotated[str, Field(max_length=MOST_TEXT)] | None


class SearchRequest(BaseModel):
    """What to search for: a text, or the key of an image of the index."""

    model_config = ConfigDict(extra="forbid")
    text: Text = None
    key: Text = None
    k: Count = 10
    among: Among = None
    filters: Filters = {}


class PictureRequest(BaseModel):
    """A picture to search by; ``filters`` is written as JSON."""

    model_config = ConfigDict(extra="forbid")
    picture: UploadFile
    k: Count = 10
    among: Among = None
    filters: Json[Filters] = {}  # type: ignore[assignment]  # the value, not its JSON


class Found(BaseModel):
    """A result. ``score`` is the inner product of retrieval vectors; ``fused`` the score that re-ranked it, if one did."""

    rank: int
    score: float
    fused: float | None
    row: int = Field(description="of the image")
    key: str
    text: str | None = Field(description="the caption, in a search among captions")
    captions: list[str] = Field(description="of the image, in a search among images")
    metadata: dict[str, str | bool | int | float | None] = Field(description="the image's values of the metadata columns")
    image: str = Field(description="address of the picture's file, from this server's own")
    thumbnail: str = Field(description="address of its thumbnail")


class SearchAnswer(BaseModel):
    """The best results first."""

    results: list[Found]


class Filter(BaseModel):
    """A metadata column to filter by."""

    name: str
    type: Literal["string", "int64", "float64", "bool"]
    values: list[Value] | None = Field(description="all of them; null where there are many")


class Info(BaseModel):
    """What is searched, and the limits of a search."""

    name: str
    images: int
    captions: int
    model: str
    objective: str
    among: list[str] = Field(description="what can be searched for")
    filters: list[Filter]
    pictures: bool = Field(description="whether a picture can be a query")
    most_results: int = MOST_RESULTS
    most_text: int = Field(default=MOST_TEXT, description="characters of a text")
    most_bytes: int = Field(description="of a request, its picture included")
    most_pixels: int
    formats: list[str] = list(FORMATS)
    version: str = Field(default=__version__, description="of coder-plugin")


class Engine:
    """Encodes one query after the other, and searches for as many at once as there are cores. For any thread.

    Args:
        searcher: an index and its model, which only this engine uses from now on.
        rerank: as in :meth:`~coder_plugin.search.searcher.Searcher.search`.
    """

    def __init__(self, searcher: Searcher, *, rerank: int | str | None = None) -> None:
        self.searcher, self.rerank = searcher, rerank
        one = any(vectors.on_gpu for vectors in searcher.index.vectors.values())  # a GPU's indexes are for one thread
        self._encoding = ThreadPoolExecutor(1, "encode")
        # FAISS's own threads would only wait for those of the other queries
        initializer = partial(import_faiss().omp_set_num_threads, 1)
        self._searching = ThreadPoolExecutor(1 if one else os.cpu_count(), "search", initializer)
        self._text = lru_cache(TEXTS)(lambda text: searcher.text([text])[0])
        self._pictures = threading.Semaphore(PICTURES)

    def text(self, text: str, k: int, **options: Any) -> list[dict[str, Any]]:
        """Results for a text; ``options`` are ``among`` and ``where`` of a search."""
        return self._search(self._encoding.submit(self._text, text).result(), k, **options)

    def picture(self, file: Any, pixels: int, k: int, **options: Any) -> list[dict[str, Any]]:
        """Results for a picture's file of at most so many pixels; ``ValueError`` or ``OSError``: it is none."""
        with self._pictures:
            picture = decode_image(file.read(), max_pixels=pixels)
            [query] = self._encoding.submit(self.searcher.image, [picture]).result()
        return self._search(query, k, **options)

    def key(self, key: str, k: int, **options: Any) -> list[dict[str, Any]]:
        """Results for an image of the index; ``LookupError``: there is none of this key."""
        if self.searcher.index.records.row_of(key) is None:
            raise LookupError(key)
        return self._search(self.searcher.key(key), k, **options)

    def close(self) -> None:
        """End the threads. What waits is not answered."""
        for each in (self._encoding, self._searching):
            each.shutdown(wait=False, cancel_futures=True)

    def _search(self, query: Query, k: int, **options: Any) -> list[dict[str, Any]]:
        return self._searching.submit(self._results, query, k, **options).result()

    def _results(self, query: Query, k: int, among: str, where: str | None) -> list[dict[str, Any]]:
        rerank = self.rerank if query.kind != among else None
        records = self.searcher.index.records
        return [
            {
                "rank": rank,
                "score": hit.score,
                "fused": hit.fused,
                "row": hit.image.row,
                "key": hit.image.key[:SHOWN],
                "text": None if hit.text is None else hit.text[:SHOWN],
                "captions": records.captions_of(hit.image.row, limit=10, characters=SHOWN) if hit.text is None else [],
                "metadata": records.metadata(hit.image.row, characters=SHOWN),
                "image": f"api/image/{hit.image.row}",
            }
            for rank, hit in enumerate(self.searcher.search(query, k, among=among, where=where, rerank=rerank), 1)
        ]


def make_app(
    engine: Engine,
    originals: Originals,
    *,
    hosts: Collection[str] | None = None,
    upload_bytes: int = 20 << 20,
    pixels: int = 50_000_000,
    requests: int = 128,
) -> Any:
    """The ASGI application.

    Args:
        engine: answers the searches.
        originals: opens the pictures' own files.
        hosts: names that requests may be addressed to, in lower case; None: any.
        upload_bytes: of a request.
        pixels: of a picture that is a query.
        requests: answered at once; further ones are answered with 503.

    Returns:
        What :func:`run`, or another server, runs.
    """
    index = engine.searcher.index
    records, columns = index.records, index.note["columns"]
    info = _describe(engine, upload_bytes, pixels)
    version = hashlib.sha256(json.dumps(index.note, sort_keys=True).encode()).hexdigest()[:12]
    files = {kind: (asset(f"serve.{kind}"), media_type) for kind, media_type in _TEXTS.items()}
    page = render("serve.html", name=info.name)
    app = FastAPI(
        title=f"Search of {info.name}",
        version=__version__,
        description="Search for pictures and captions by a text, a picture, or an image of the index.",
        docs_url=None,  # these pages load scripts from another server
        redoc_url=None,
    )

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return HTMLResponse(page, headers={"cache-control": "no-cache"})

    @app.get("/serve.{kind}", include_in_schema=False)
    async def style_or_script(kind: Literal["css", "js"]) -> Response:
        content, media_type = files[kind]
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    @app.get("/healthz", summary="Whether the server answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/info", summary="What is searched, and the limits")
    async def api_info() -> Info:
        return info

    def options(wanted: SearchRequest | PictureRequest, usual: str) -> dict[str, Any]:
        if wanted.among is not None and wanted.among not in index.vectors:
            raise HTTPException(422, f"this index has no vectors of {wanted.among}")
        among = wanted.among or (usual if usual in index.vectors else info.among[0])
        return {"k": wanted.k, "among": among, "where": expression(wanted.filters, columns)}

    def answer(results: list[dict[str, Any]]) -> Any:
        return {"results": [{**each, "thumbnail": f"api/thumbnail/{each['row']}?v={version}"} for each in results]}

    @app.post("/api/search", summary="Search by a text, or by the key of an image of the index")
    def search(wanted: SearchRequest) -> SearchAnswer:
        if (wanted.text is None) == (wanted.key is None):
            raise HTTPException(422, "give a text or a key")
        if wanted.text is not None:
            if fault := text_fault(wanted.text, "text"):
                raise HTTPException(400, f"{fault} cannot be searched for")
            return answer(engine.text(wanted.text, **options(wanted, "images")))
        if "images" not in index.vectors:
            raise HTTPException(422, "this index has no vectors of images: search by a text")
        try:
            return answer(engine.key(str(wanted.key), **options(wanted, "captions")))
        except LookupError:
            raise HTTPException(404, f"the index has no image {str(wanted.key)[:200]!r}") from None

    async def once(request: Request) -> None:
        form = await request.form()
        if repeated := [name for name in form if len(form.getlist(name)) > 1]:
            raise HTTPException(422, f"{repeated[0][:40]}: the form has {len(form.getlist(repeated[0]))} of it: give one")

    @app.post("/api/picture", summary="Search by a picture", dependencies=[Depends(once)])
    def search_by_picture(wanted: Annotated[PictureRequest, File()]) -> SearchAnswer:
        if not info.pictures:
            raise HTTPException(422, "this index's model reads regions, not pictures: search by a text or a key")
        found = options(wanted, "captions")
        try:
            return answer(engine.picture(wanted.picture.file, pixels, **found))
        except (OSError, ValueError) as error:
            raise HTTPException(400, f"the picture cannot be read: {error}") from None

    def recorded(row: int) -> Any:
        if not 0 <= row < index.size("images"):
            raise HTTPException(404, f"the index has no image {row}")
        return records.images([row])[0]

    @app.get("/api/image/{row}", summary="A picture's own file, or its thumbnail where that cannot be opened")
    def image(row: int) -> Response:
        original = originals.open(recorded(row))
        if original is None:
            return Response(thumbnail(row).body, media_type="image/jpeg", headers=_SANDBOX)
        headers = {**_SANDBOX, "content-length": str(original.size)}
        return StreamingResponse(original.chunks(), media_type=original.media_type, headers=headers)

    @app.get("/api/thumbnail/{row}", summary="A picture's thumbnail, a JPEG file")
    def thumbnail(row: int) -> Response:
        file = records.thumbnail(recorded(row).row)
        if file is None:
            raise HTTPException(404, f"image {row} has no thumbnail")
        # its address has the index's version, so it does not change
        return Response(file, media_type="image/jpeg", headers={**_SANDBOX, "cache-control": "private, max-age=86400"})

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        fault = error.errors()[0]  # without its input, which may be long
        place = ".".join(str(part)[:40] for part in fault["loc"][1:])
        reason = "no such field" if fault["type"] == "extra_forbidden" else fault["msg"]
        return JSONResponse({"detail": f"{place}: {reason}" if place else reason}, 422)

    @app.exception_handler(CoderError)
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # its message names files: it is for the log alone
        log.error("a search failed: %s", error)
        return JSONResponse({"detail": "the search failed: the server's log says why"}, 500)

    return Guard(app, hosts=hosts, most=upload_bytes, requests=requests)


def _describe(engine: Engine, upload_bytes: int, pixels: int) -> Info:
    index, note = engine.searcher.index, engine.searcher.index.note
    filters = []
    for name, kind in note["columns"].items():
        values = index.records.values(name, MOST_VALUES)
        if values or (values is None and kind == "string"):  # nobody types one of many numbers
            filters.append(Filter(name=name, type=kind, values=values))
    return Info(
        name=index.folder.resolve().name,
        images=index.size("images"),
        captions=index.size("captions"),
        model=PurePath(note["model"].get("name", "")).name,  # the server's folders are nobody's business
        objective=note["model"].get("objective", ""),
        among=[kind for kind in KINDS if kind in index.vectors],
        filters=filters,
        pictures=not isinstance(engine.searcher.pretrained.model, Backbone),  # which read regions
        most_bytes=upload_bytes,
        most_pixels=pixels,
    )


#: Types of a value that each type of column can have.
_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "int64": (int, float), "float64": (int, float), "bool": (bool, int)}


def expression(filters: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """Filters as a search's ``where``: each column has its value, or one of its values; None without filters.

    Args:
        filters: a value or a list of values for each column: texts, numbers, bool, or None for images without a value.
        columns: the index's metadata columns, and the type of each.

    Raises:
        HTTPException: the index has no such column; a value that no column of its type has.

    Example:
        >>> print(expression({"source": ["coco", "it's", None], "safe": True}, {"source": "string", "safe": "bool"}))
        ("source" IN ('coco', 'it''s') OR "source" IS NULL) AND ("safe" IN (1))
    """
    parts = []
    for name, value in filters.items():
        if name not in columns:
            known = ", ".join(columns) or "none"
            raise HTTPException(422, f"the index has no column {name[:100]!r} to filter by, only {known}")
        values = value if isinstance(value, list) else [value]
        literals = ", ".join(_literal(name, each, columns[name]) for each in values if each is not None)
        either = [f'"{name}" IN ({literals})'] * bool(literals) + [f'"{name}" IS NULL'] * (None in values)
        parts.append(f"({' OR '.join(either)})")
    whole = " AND ".join(parts)
    if len(whole) > 8000:
        raise HTTPException(422, "the filters are too long: give fewer values")
    return whole or None


def _literal(name: str, value: Any, kind: str) -> str:
    """A value in SQL."""
    if isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool)):
        if isinstance(value, str) and "\0" not in value:
            return "'" + value.replace("'", "''") + "'"
        if isinstance(value, int) and abs(value) < 1 << 63:
            return str(int(value))
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
    raise HTTPException(422, f"the filter {name} has a value that no column of type {kind} has")


class Guard:
    """An ASGI application around another one: refuses requests that are not for this server or too long, adds headers.

    Args:
        app: the other one.
        hosts: names that requests may be addressed to, in lower case; None: any. A page elsewhere whose name is made to lead to
            this machine (DNS rebinding) is refused by its name.
        most: bytes of a form; of other requests :data:`MOST_JSON`.
        requests: answered at once; one counts from when it has arrived whole.
    """

    def __init__(self, app: Any, *, hosts: Collection[str] | None, most: int, requests: int) -> None:
        self.app, self.hosts, self.most, self.requests = app, hosts, most, requests
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope)
        form = headers.get("content-type", "").startswith("multipart/form-data")
        left = most = self.most if form else min(self.most, MOST_JSON)
        ended = counted = False

        def count() -> None:
            nonlocal counted
            if self.running >= self.requests:
                headers = {"retry-after": "1", "connection": "close"}
                raise HTTPException(503, f"{self.requests} requests are being answered", headers)
            counted = True
            self.running += 1

        async def limited() -> Any:
            nonlocal left, ended
            message = await receive()
            if message["type"] == "http.disconnect" and not ended:
                log.warning("a client left, or took too long, before its request had arrived")
            ended = not message.get("more_body", False)
            if ended and not counted and message["type"] == "http.request":
                count()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the request has over {most:,} bytes", {"connection": "close"})
            return message

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    own.setdefault(name, value)
            await send(message)

        try:
            if refusal := self._refusal(scope["method"], headers, most):
                raise HTTPException(*refusal, {"connection": "close"})
            if scope["method"] in ("GET", "HEAD"):
                count()
            await self.app(scope, limited, send_with_headers)
        except HTTPException as refused:  # the application answers those that its reading of the request meets
            answer = JSONResponse({"detail": refused.detail}, refused.status_code, refused.headers)
            await answer(scope, receive, send_with_headers)
        finally:
            self.running -= counted

    def _refusal(self, method: str, headers: Headers, most: int) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and name_of(host) not in self.hosts:
            return 421, f"this server is not {name_of(host)[:100] or 'without a name'!r}: start it with --allow-host NAME"
        if origin is not None and method not in ("GET", "HEAD"):
            netloc = urlsplit(origin).netloc.lower() if origin.isascii() else ""
            if netloc != host.lower() and name_of(netloc) not in (self.hosts or ()):
                return 403, "pages of other servers may not use this one"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            return 413, f"the request has over {most:,} bytes"
        return None


def name_of(host: str) -> str:
    """The name in a ``Host`` header, without its port, in lower case; empty if it is none.

    Example:
        >>> name_of("LocalHost:8000"), name_of("[::1]:8000"), name_of("example.org."), name_of("[::1].example.org")
        ('localhost', '[::1]', 'example.org', '')
    """
    found = _HOST.fullmatch(host.strip().lower())
    return found[1].rstrip(".") if found else ""


class Protocol(H11Protocol):
    """uvicorn's connection, with the limits of time that it lacks.

    A connection that has not sent a whole request within :data:`SECONDS`, its headers and body included, is closed. So is one
    that does not take its answer, and of more than :data:`WAITING` that wait for a request the one that has waited longest:
    connections that are held half-open keep nobody else out.
    """

    waiting: ClassVar[dict[Protocol, TimerHandle]] = {}
    _unread: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SECONDS, self.transport.abort)  # to close it would wait for the client

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _watch(self) -> None:
        """Start the clock where a request is awaited, and stop it where one has arrived."""
        if self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self not in self.waiting:
            self.waiting[self] = self.loop.call_later(SECONDS, self._close)
            if len(self.waiting) > WAITING:
                next(iter(self.waiting))._close()

    def _stop(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def _close(self) -> None:
        self._stop()
        self.connections.discard(self)  # at once: uvicorn counts them
        self.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, so that a wrong one is noticed before the model is opened; port 0: any free one.

    Raises:
        CoderError: the port is in use or not allowed; no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise CoderError(f"--host {host}: no such address ({getattr(error, 'strerror', None) or error})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise CoderError(
            f"cannot listen at --host {host} --port {port} ({error.strerror}): choose an address of this machine and another "
            "port from 1024 on, or --port 0 for any that is free"
        ) from error
    return bound


def run(app: Any, bound: socket.socket, *, requests: int) -> None:
    """Answer requests until a signal ends the process, such as Ctrl-C (``KeyboardInterrupt``).

    Args:
        app: the application.
        bound: the socket.
        requests: answered at once, for the number of connections.
    """
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,  # the command's own
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=requests + WAITING + 1,  # uvicorn's is the first number of connections that it refuses
        timeout_keep_alive=int(SECONDS),
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[bound])
