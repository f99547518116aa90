"""The page and the JSON API over an opened index."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Collection
from pathlib import PurePath
from typing import Any

from coder_plugin import __version__
from coder_plugin.errors import CoderError

try:
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
    from pydantic import ValidationError
except ImportError as error:
    raise CoderError(f'serve needs FastAPI and uvicorn: pip install "coder-plugin[serve]" ({error})') from error

from coder_plugin.backbones.base import Backbone
from coder_plugin.data.decode import FORMATS, decode_image
from coder_plugin.data.source import text_fault
from coder_plugin.html import asset, render
from coder_plugin.search.parquet import KINDS
from coder_plugin.search.records import SHOWN
from coder_plugin.serve.engine import Engine, Result, UnknownKey
from coder_plugin.serve.filters import expression, offered
from coder_plugin.serve.guard import Guard, Refused
from coder_plugin.serve.originals import Originals
from coder_plugin.serve.schemas import (
    BODY,
    MOST_RESULTS,
    MOST_TEXT,
    REFUSALS,
    Filter,
    Info,
    SearchAnswer,
    SearchRequest,
)

log = logging.getLogger(__name__)
#: Bytes of a search in JSON, or of a field of a form: a character takes twelve at most.
_MOST_JSON = 1 << 16
#: Pictures that are decoded and searched for at once: one of 50,000,000 pixels takes up to 460 MB.
_PICTURES = 4
#: A picture opened by itself may run nothing, whatever it holds.
_PICTURE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
_TYPES = {"css": "text/css", "js": "text/javascript"}


def make_app(
    engine: Engine,
    originals: Originals,
    *,
    hosts: Collection[str] | None = None,
    requests: int = 128,
    upload_bytes: int = 20 << 20,
    pixels: int = 50_000_000,
) -> Any:
    """The ASGI application.

    Args:
        engine: answers the searches.
        originals: opens the pictures' own files.
        hosts: names that requests may be addressed to, in lower case; None: any.
        requests: that are answered at once.
        upload_bytes: of a request.
        pixels: of a picture that is a query.

    Returns:
        What uvicorn, or another server, runs.
    """
    index = engine.searcher.index
    records, columns = index.records, index.note["columns"]
    info = _describe(engine, upload_bytes, pixels)
    version = hashlib.sha256(json.dumps(index.note, sort_keys=True).encode()).hexdigest()[:12]
    page, assets = render("serve.html", name=info.name), {ending: asset(f"serve.{ending}") for ending in _TYPES}
    few_pictures = asyncio.Semaphore(_PICTURES)
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

    @app.get("/serve.{ending}", include_in_schema=False)
    async def style_or_script(ending: str) -> Response:
        if ending not in assets:
            raise HTTPException(404, "there is no such page")
        return Response(assets[ending], media_type=_TYPES[ending], headers={"cache-control": "no-cache"})

    @app.get("/healthz", summary="Whether the server answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/info", summary="What is searched, and the limits")
    async def api_info() -> Info:
        return info

    @app.post(
        "/api/search",
        summary="Search by a text, a picture, or the key of an image",
        response_model=SearchAnswer,
        responses=REFUSALS,
        openapi_extra={"requestBody": BODY},
    )
    async def search(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            results = await by_text_or_key(_parse(await _read(request, _MOST_JSON)))
        elif kind == "multipart/form-data":
            results = await by_picture(request)
        else:
            raise HTTPException(415, "send JSON (content-type application/json), or a picture as multipart/form-data")
        return JSONResponse({"results": [_found(rank, each, version) for rank, each in enumerate(results, 1)]})

    async def by_text_or_key(wanted: SearchRequest) -> list[Result]:
        if (wanted.text is None) == (wanted.key is None):
            raise HTTPException(422, "give a text or a key")
        if wanted.key is not None:
            if "images" not in index.vectors:
                raise HTTPException(422, "this index has no vectors of images: search by a text")
            return await asyncio.wrap_future(engine.key(wanted.key, wanted.k, **options(wanted, "captions")))
        assert wanted.text is not None
        if fault := text_fault(wanted.text, "text"):
            raise HTTPException(400, f"{fault} cannot be searched for")
        return await asyncio.wrap_future(engine.text(wanted.text, wanted.k, **options(wanted, "images")))

    async def by_picture(request: Request) -> list[Result]:
        if not info.pictures:
            raise HTTPException(422, "this index's model reads regions, not pictures: search by a text or a key")
        async with request.form(max_files=1, max_fields=8, max_part_size=_MOST_JSON) as form:
            file = form.get("picture")
            if file is None or isinstance(file, str):
                raise HTTPException(422, "the form has no file named picture")
            wanted = _parse_form({name: value for name, value in form.items() if isinstance(value, str)})
            if wanted.text is not None or wanted.key is not None:
                raise HTTPException(422, "give a picture, or a text, or a key")
            found = options(wanted, "captions")
            async with few_pictures:
                picture = await run_in_threadpool(_decode, file.file, pixels)
                return await asyncio.wrap_future(engine.picture(picture, wanted.k, **found))

    def recorded(row: int) -> Any:
        if not 0 <= row < index.size("images"):
            raise HTTPException(404, f"the index has no image {row}")
        return records.images([row])[0]

    def options(wanted: SearchRequest, usual: str) -> dict[str, Any]:
        if wanted.among is not None and wanted.among not in index.vectors:
            raise HTTPException(422, f"this index has no vectors of {wanted.among}")
        among = wanted.among or (usual if usual in index.vectors else info.among[0])
        try:
            where = expression(wanted.filters, columns)
        except CoderError as error:
            raise HTTPException(422, str(error)) from None
        return {"among": among} if where is None else {"among": among, "where": where}

    pictures: Any = {"response_class": Response, "responses": {200: {"content": {"image/*": {}}}, 404: REFUSALS[404]}}

    @app.get("/api/image/{row}", summary="A picture's own file, or its thumbnail where that cannot be opened", **pictures)
    def image(row: int) -> Response:
        original = originals.open(recorded(row))
        if original is None:
            return Response(thumbnail(row).body, media_type="image/jpeg", headers=_PICTURE_HEADERS)
        headers = {**_PICTURE_HEADERS, "content-length": str(original.size)}
        return StreamingResponse(original.chunks(), media_type=original.media_type, headers=headers)

    @app.get("/api/thumbnail/{row}", summary="A picture's thumbnail, a JPEG file", **pictures)
    def thumbnail(row: int) -> Response:
        file = records.thumbnail(recorded(row).row)
        if file is None:
            raise HTTPException(404, f"image {row} has no thumbnail")
        # its address has the index's version, so it does not change
        headers = {**_PICTURE_HEADERS, "cache-control": "private, max-age=86400"}
        return Response(file, media_type="image/jpeg", headers=headers)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse({"detail": error.detail}, error.status, {"connection": "close"})

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse({"detail": _first_fault(error.errors())}, 422)

    @app.exception_handler(UnknownKey)
    async def unknown_key(_: Request, error: UnknownKey) -> Response:
        return JSONResponse({"detail": f"the index has no image {str(error.args[0])[:200]!r}"}, 404)

    @app.exception_handler(CoderError)
    async def failed(_: Request, error: CoderError) -> Response:  # its message names files: it is for the log alone
        log.error("a search failed: %s", error)
        return JSONResponse({"detail": "the search failed: the server's log says why"}, 500)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "the search failed: the server's log says why"}, 500)

    return Guard(app, hosts=hosts, requests=requests, body=upload_bytes)


def _describe(engine: Engine, upload_bytes: int, pixels: int) -> Info:
    searcher = engine.searcher
    note = searcher.index.note
    return Info(
        name=searcher.index.folder.resolve().name,
        images=searcher.index.size("images"),
        captions=searcher.index.size("captions"),
        model=PurePath(note["model"].get("name", "")).name,  # the server's folders are nobody's business
        objective=note["model"].get("objective", ""),
        among=[kind for kind in KINDS if kind in searcher.index.vectors],
        filters=[Filter(**each) for each in offered(searcher.index.records, note["columns"])],
        pictures=not isinstance(searcher.pretrained.model, Backbone),  # which read regions
        most_results=MOST_RESULTS,
        most_text=MOST_TEXT,
        most_bytes=upload_bytes,
        most_pixels=pixels,
        formats=list(FORMATS),
        version=__version__,
    )


def _parse_form(fields: dict[str, str]) -> SearchRequest:
    """A form's fields; ``filters`` is JSON."""
    try:
        filters = json.loads(fields.pop("filters", "{}"))
    except (ValueError, RecursionError):
        raise HTTPException(422, "filters: Invalid JSON") from None
    return _parse(json.dumps({**fields, "filters": filters}))


async def _read(request: Request, most: int) -> bytes:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise HTTPException(413, f"a search in JSON has over {most:,} bytes")
    return content


def _parse(content: bytes | str) -> SearchRequest:
    try:
        return SearchRequest.model_validate_json(content)
    except ValidationError as error:
        raise HTTPException(422, _first_fault(error.errors(include_url=False))) from None


def _first_fault(faults: Any) -> str:
    """One of pydantic's faults as a line, without the value, which may be long."""
    place = ".".join(str(part)[:40] for part in faults[0]["loc"])
    if faults[0]["type"] == "extra_forbidden":
        return f"{place}: no such field; there are {', '.join(SearchRequest.model_fields)}"
    return f"{place}: {faults[0]['msg']}" if place else faults[0]["msg"]


def _decode(file: Any, pixels: int) -> Any:
    try:
        return decode_image(file.read(), max_pixels=pixels)
    except (OSError, ValueError) as error:
        raise HTTPException(400, f"the picture cannot be read: {error}") from None


def _found(rank: int, result: Result, version: str) -> dict[str, Any]:
    hit = result.hit
    return {
        "rank": rank,
        "score": hit.score,
        "fused": hit.fused,
        "row": hit.image.row,
        "key": hit.image.key[:SHOWN],
        "text": None if hit.text is None else hit.text[:SHOWN],
        "captions": result.captions,
        "metadata": result.metadata,
        "image": f"api/image/{hit.image.row}",
        "thumbnail": f"api/thumbnail/{hit.image.row}?v={version}",
    }
