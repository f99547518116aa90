"""The JSON API: what it finds, what it refuses, and what it sends with every answer."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coder_plugin.errors import CoderError
from coder_plugin.html import asset
from coder_plugin.search.searcher import Searcher, open_searcher
from coder_plugin.serve.app import LOCAL, Engine, make_app
from coder_plugin.serve.originals import Originals
from tests.serve.conftest import COUNT, HOSTILE, NAME, SOURCE, Made

testclient = pytest.importorskip("fastapi.testclient")
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def searcher(made: Made) -> Searcher:
    return open_searcher(made.index)


@pytest.fixture(scope="module")
def engine(searcher: Searcher) -> Iterator[Engine]:
    engine = Engine(searcher)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(engine: Engine, made: Made) -> Any:
    return connect(engine, made)


def connect(engine: Engine, made: Made, **options: Any) -> Any:
    app = make_app(engine, Originals([made.pictures]), **{"hosts": LOCAL, **options})
    return testclient.TestClient(app, base_url=URL, raise_server_exceptions=False)


def found(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def png(size: tuple[int, int] = (9, 7), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


def test_a_text_finds_what_the_searcher_finds(client: Any, searcher: Searcher) -> None:
    [query] = searcher.text(["a red circle"])
    hits = searcher.search(query, 7)
    for _ in range(2):  # the second time without encoding it
        results = found(client.post("/api/search", json={"text": "a red circle", "k": 7}))
        assert [each["key"] for each in results] == [hit.image.key for hit in hits]
        assert [each["score"] for each in results] == [hit.score for hit in hits]
        assert [each["rank"] for each in results] == [1, 2, 3, 4, 5, 6, 7]
        assert all(each["fused"] is None and each["text"] is None for each in results)
        rows = [each["row"] for each in results]
        assert [tuple(each["captions"]) for each in results] == [searcher.index.records.captions_of(row) for row in rows]
        assert [each["image"] for each in results] == [f"api/image/{row}" for row in rows]
        assert [each["metadata"] for each in results] == [searcher.index.records.metadata(row) for row in rows]
        assert {*results[0]["metadata"]} == {"source", "number", "note"}
    texts = found(client.post("/api/search", json={"text": "a red circle", "among": "captions"}))
    assert [each["text"] for each in texts] == [hit.text for hit in searcher.search(query, 10, among="captions")]
    assert all(each["captions"] == [] for each in texts)


def test_a_picture_and_a_key_find_what_the_searcher_finds(client: Any, searcher: Searcher, made: Made) -> None:
    path = made.pictures / "007.png"
    file = {"picture": ("any name <b>.svg", path.read_bytes(), "text/html")}  # neither counts
    results = found(client.post("/api/picture", files=file, data={"k": "3", "among": "images"}))
    assert [each["key"] for each in results][:1] == [str(path)] and len(results) == 3
    by_key = found(client.post("/api/search", json={"key": str(path), "k": 3, "among": "images"}))
    assert [each["key"] for each in by_key] == [each["key"] for each in results]
    [query] = searcher.image([Image.open(path).convert("RGB")])
    texts = found(client.post("/api/picture", files=file))
    assert [each["text"] for each in texts] == [hit.text for hit in searcher.search(query, 10)]
    by_key = found(client.post("/api/search", json={"key": str(path)}))
    assert [each["text"] for each in by_key] == [each["text"] for each in texts]
    for kind in ("JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        assert len(found(client.post("/api/picture", files={"picture": png(kind=kind)}, data={"k": 2}))) == 2


JSON: dict[str, tuple[Any, int, str]] = {
    "nothing": ({}, 422, "give a text or a key"),
    "both": ({"text": "x", "key": "y"}, 422, "give a text or a key"),
    "blank": ({"text": " \n "}, 400, "an empty text cannot be searched for"),
    "number": ({"text": 5}, 422, "text: Input should be a valid string"),
    "long": ({"text": "x " * 1001}, 422, "text: String should have at most 2000 characters"),
    "surrogate": (b'{"text": "\\ud800"}', 422, ""),
    "k none": ({"text": "x", "k": 0}, 422, "k: Input should be greater than or equal to 1"),
    "k many": ({"text": "x", "k": 10**9}, 422, "k: Input should be less than or equal to 200"),
    "k huge": (b'{"text": "x", "k": 1e999}', 422, "k"),
    "column": ({"text": "x", "filters": {"path": "x"}}, 422, "the index has no column 'path' to filter by, only"),
    "filters": ({"text": "x", "filters": [1]}, 422, "filters: Input should be"),
    "filter": ({"text": "x", "filters": {"source": {"a": 1}}}, 422, "filters.source"),
    "long filter": ({"text": "x", "filters": {"source": "x" * 201}}, 422, "filters.source"),
    "many filters": ({"text": "x", "filters": {"source": ["x" * 199] * 99}}, 422, "the filters are too long"),
    "among": ({"text": "x", "among": "videos"}, 422, "among: Input should be 'images' or 'captions'"),
    "unknown": ({"text": "x", "rerank": "all"}, 422, "rerank: no such field"),
    "key": ({"key": "nobody's"}, 404, 'the index has no image "nobody\'s"'),
    "list": ([], 422, "object"),
    "no json": (b"text=x", 422, "JSON decode error"),
    "deep": (b"[" * 20_000, 400, "error parsing the body"),
    "too long": (b'"' + b"x" * 70_000, 413, "the request has over 65,536 bytes"),
}


@pytest.mark.parametrize("name", JSON)
def test_a_search_in_json_is_refused(client: Any, name: str) -> None:
    content, status, words = JSON[name]
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = client.post("/api/search", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"] and len(answer.json()["detail"]) < 300


def bomb() -> bytes:
    """A PNG file of a few bytes that says that it has 40,000 x 40,000 pixels."""
    content = bytearray(png())
    content[16:24] = (40_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


UPLOADS: dict[str, tuple[dict[str, Any], int, str]] = {
    "text": ({"files": {"picture": b"no picture"}}, 400, "the picture cannot be read: not an image that is read"),
    "svg": ({"files": {"picture": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}}, 400, "not an image that is read"),
    "empty": ({"files": {"picture": b""}}, 400, "the picture cannot be read"),
    "torn": ({"files": {"picture": png((300, 300))[:200]}}, 400, "the picture cannot be read"),
    "bomb": ({"files": {"picture": bomb()}}, 400, "pixels are more than the 50,000,000 that --max-image-pixels allows"),
    "eps": ({"files": {"picture": b"%!PS-Adobe-3.0 EPSF-3.0\n"}}, 400, "not an image that is read"),
    "no file": ({"files": {"other": png()}}, 422, "picture: Field required"),
    "a field": ({"files": {"x": (None, "y"), "picture": (None, "text")}}, 422, "picture: "),
    "fields": ({"files": {"picture": png()}, "data": {f"f{n}": "x" for n in range(1001)}}, 400, "Too many fields"),
    "k": ({"files": {"picture": png()}, "data": {"k": "many"}}, 422, "k: Input should be a valid integer"),
    "text too": ({"files": {"picture": png()}, "data": {"text": "x"}}, 422, "text: no such field"),
    "unknown": ({"files": {"picture": png()}, "data": {"size": "9"}}, 422, "size: no such field"),
    "filters": ({"files": {"picture": png()}, "data": {"filters": "{"}}, 422, "filters: Invalid JSON"),
    "two": ({"files": [("picture", png()), ("picture", png((8, 8)))]}, 422, "picture: the form has 2 of it: give one"),
    "k twice": ({"files": {"picture": png()}, "data": {"k": ["2", "3"]}}, 422, "k: the form has 2 of it"),
    "no form": ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    "kind": ({"content": png(), "headers": {"content-type": "image/png"}}, 422, "picture: Field required"),
    "no kind": ({"content": b"{}"}, 422, "picture: Field required"),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_is_refused(client: Any, name: str) -> None:
    request, status, words = UPLOADS[name]
    answer = client.post("/api/picture", **request)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"] and len(answer.json()["detail"]) < 300


def test_a_request_has_a_most_length(engine: Engine, made: Made) -> None:
    client = connect(engine, made, upload_bytes=1000)
    assert len(found(client.post("/api/picture", files={"picture": png()}, data={"k": 2}))) == 2
    answer = client.post("/api/picture", files={"picture": b"x" * 1001})
    assert answer.status_code == 413 and answer.json()["detail"] == "the request has over 1,000 bytes"

    def pieces() -> Iterator[bytes]:  # sent without a length
        yield b'--x\r\ncontent-disposition: form-data; name="picture"; filename="a"\r\n\r\n'
        for _ in range(99):
            yield b"x" * 100

    answer = client.post("/api/picture", content=pieces(), headers={"content-type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 413 and answer.json()["detail"] == "the request has over 1,000 bytes"


def test_a_picture_has_a_most_number_of_pixels(engine: Engine, made: Made) -> None:
    client = connect(engine, made, pixels=62)
    answer = client.post("/api/picture", files={"picture": png((9, 7))})
    assert answer.status_code == 400 and "9 x 7 pixels are more than the 62" in answer.json()["detail"]


def test_pictures_and_thumbnails(client: Any, made: Made, searcher: Searcher) -> None:
    answer = client.get("/api/image/7")
    assert answer.content == (made.pictures / "007.png").read_bytes() and answer.headers["content-type"] == "image/png"
    assert answer.headers["content-security-policy"].endswith("sandbox")
    assert answer.headers["x-content-type-options"] == "nosniff"
    answer = client.get("/api/thumbnail/7?v=1")
    assert answer.content == searcher.index.records.thumbnail(7) and answer.headers["content-type"] == "image/jpeg"
    for path in ("image", "thumbnail"):
        for row, status in (("30", 404), ("-1", 404), ("9" * 40, 404), ("x", 422), ("1.5", 422), ("..%2f..%2fetc", 404)):
            answer = client.get(f"/api/{path}/{row}")
            assert answer.status_code == status and isinstance(answer.json()["detail"], str), (path, row)


FILTERS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "one": ({"source": "drawn"}, {*range(0, COUNT, 3)}),
    "quotes": ({"source": SOURCE, "number": [4, 5, 6, 7]}, {4, 7}),
    "null": ({"source": [None, "drawn"], "number": [4, 5, 6, 7]}, {5, 6}),
    "none": ({"source": "nobody's"}, set()),
    "no filters": ({}, {*range(COUNT)}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_results_have_the_values_of_filters(client: Any, made: Made, name: str) -> None:
    filters, rows = FILTERS[name]
    wanted = {"k": COUNT, "among": "images", "filters": filters}
    assert {each["row"] for each in found(client.post("/api/search", json={"text": "a star", **wanted}))} == rows
    by_key = {"key": str(made.pictures / "007.png"), **wanted}
    assert {each["row"] for each in found(client.post("/api/search", json=by_key))} == rows
    form = {**wanted, "filters": json.dumps(filters)}
    assert {each["row"] for each in found(client.post("/api/picture", files={"picture": png()}, data=form))} == rows
    captions = found(client.post("/api/search", json={"text": "a star", **wanted, "k": 2 * COUNT, "among": "captions"}))
    assert {each["row"] for each in captions} == rows


def test_what_can_be_filtered_by(client: Any) -> None:
    filters = {each["name"]: each for each in client.get("/api/info").json()["filters"]}
    assert {*filters} == {"source", "number", "note"} and filters["source"]["values"] == ["drawn", SOURCE]
    assert filters["number"] == {"name": "number", "type": "int64", "values": [*range(COUNT)]}


def test_a_picture_outside_is_shown_by_its_thumbnail(engine: Engine, searcher: Searcher, tmp_path: Path) -> None:
    client = testclient.TestClient(make_app(engine, Originals([tmp_path])), base_url=URL)
    answer = client.get("/api/image/7")
    assert answer.content == searcher.index.records.thumbnail(7) and answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["content-security-policy"].endswith("sandbox")


def test_hostile_captions_and_keys_are_data(client: Any) -> None:
    results = found(client.post("/api/search", json={"text": "x", "k": COUNT}))
    [hostile] = [each for each in results if each["key"].endswith(NAME)]
    assert hostile["captions"] == [HOSTILE] and hostile["image"] == "api/image/3"
    for path in ("/", "/serve.js", "/api/info", "/openapi.json"):
        assert "alert(" not in client.get(path).text


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8000", 200), ("localhost", 200), ("LOCALHOST:9", 200), ("[::1]:8000", 200), ("evil.example", 421),
     ("127.0.0.1.evil.example:8000", 421), ("localhost@evil.example", 421), ("[::1].evil.example", 421), ("", 421)],
)  # fmt: skip
def test_names_that_the_server_is_called_by(client: Any, host: str, status: int) -> None:
    for path in ("/", "/api/info", "/healthz", "/api/thumbnail/0"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (URL, 200),
        ("http://localhost:8000", 200),
        ("http://evil.example", 403),
        ("null", 403),
        ("https://127.0.0.1.evil.example", 403),
    ],
)
def test_pages_elsewhere_cannot_search(client: Any, origin: str, status: int) -> None:
    answer = client.post("/api/search", json={"text": "x"}, headers={"origin": origin})
    assert answer.status_code == status
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = client.options("/api/search", headers={"origin": origin, "access-control-request-method": "POST"})
    assert asked.status_code in (403, 405) and not [name for name in asked.headers if name.startswith("access-control")]


def test_any_name_where_none_is_asked_for(engine: Engine, made: Made) -> None:
    client = connect(engine, made, hosts=None)
    assert client.get("/", headers={"host": "server.example"}).status_code == 200
    answer = client.post("/api/search", json={"text": "x"}, headers={"host": "server.example", "origin": "http://evil.example"})
    assert answer.status_code == 403


def test_every_answer_has_its_headers(client: Any) -> None:
    answers = [client.get(path) for path in ("/", "/serve.css", "/serve.js", "/api/info", "/openapi.json", "/nowhere", "/docs")]
    answers += [client.post("/api/search", json={}), client.get("/", headers={"host": "evil"}), client.put("/")]
    assert [each.status_code for each in answers] == [200, 200, 200, 200, 200, 404, 404, 422, 421, 405]
    for each in answers:
        policy = dict(part.split(" ", 1) for part in each.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in each.headers["content-security-policy"] and policy["frame-ancestors"] == "'none'"
        assert each.headers["x-content-type-options"] == "nosniff" and each.headers["referrer-policy"] == "no-referrer"
        assert each.headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_loads_nothing_from_elsewhere_and_sets_no_html(client: Any, made: Made) -> None:
    page = client.get("/").text
    assert f"<title>Search of {made.index.name}</title>" in page
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,", "serve.css", "serve.js", "openapi.json"}
    assert not re.search(r"https?://|url\(|@import|style=|\son\w+=", page + asset("serve.css"))
    assert "<script>" not in page and client.get("/serve.js").headers["content-type"].startswith("text/javascript")
    script = asset("serve.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", script)


def test_the_openapi_description(client: Any) -> None:
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.")
    paths = {"/healthz", "/api/info", "/api/search", "/api/picture", "/api/image/{row}", "/api/thumbnail/{row}"}
    assert {*described["paths"]} == paths
    schemas = described["components"]["schemas"]
    for name, own in (("search", {"text", "key"}), ("picture", {"picture"})):
        [body] = described["paths"][f"/api/{name}"]["post"]["requestBody"]["content"].values()
        request = schemas[body["schema"]["$ref"].rpartition("/")[2]]["properties"]
        assert {*request} == {*own, "k", "among", "filters"} and request["k"]["maximum"] == 200
    result = schemas["Found"]["properties"]
    assert {*result} == {*found(client.post("/api/search", json={"text": "x", "k": 1}))[0]}
    assert client.get("/healthz").json() == {"status": "ok"}


def test_what_is_served_is_named_without_folders(client: Any, made: Made) -> None:
    info = client.get("/api/info").json()
    assert (info["name"], info["images"], info["captions"]) == ("index", COUNT, 2 * COUNT - 1)
    assert info["model"] == "export" and info["among"] == ["images", "captions"] and info["pictures"] is True
    assert str(made.index.parent) not in json.dumps(info)


def test_a_failure_tells_the_log_alone(client: Any, searcher: Searcher, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    for error in (CoderError("/secret/index is damaged"), RuntimeError("/secret/cuda"), IndexError("/secret"), KeyError()):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(searcher, "search", fail)
        answer = client.post("/api/search", json={"text": "x"})
        assert answer.status_code == 500 and answer.json() == {"detail": "the search failed: the server's log says why"}
    assert "/secret/index is damaged" in caplog.text


def test_an_answer_cuts_what_somebody_elses_index_has(client: Any, searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    read, long = searcher.search, "long" * 1000

    def search(*arguments: Any, **options: Any) -> Any:
        hits = read(*arguments, **options)
        return [
            hit._replace(image=hit.image._replace(key=long), text=None if hit.text is None else long) for hit in hits
        ]

    limits = []

    def captions_of(row: int, **options: Any) -> tuple[str, ...]:
        limits.append(options)
        return ()

    monkeypatch.setattr(searcher, "search", search)
    monkeypatch.setattr(searcher.index.records, "captions_of", captions_of)
    [image] = found(client.post("/api/search", json={"text": "x", "k": 1}))
    [caption] = found(client.post("/api/search", json={"text": "x", "k": 1, "among": "captions"}))
    assert len(image["key"]) == len(caption["key"]) == len(caption["text"]) == 2000
    assert [each for each in limits if each] == [{"limit": 10, "characters": 2000}]  # the others are not shown


def test_an_index_without_some_vectors(made: Made, tmp_path: Path) -> None:
    from coder_plugin.cli import main

    flags = ["--data", str(made.pictures / "all.csv"), "--workers", "0", "--what", "captions", "--thumbnails", "0"]
    assert main(["index", str(made.index.parent / "export"), *flags, "--output", str(tmp_path / "index")]) == 0
    engine = Engine(open_searcher(tmp_path / "index"))
    client = connect(engine, made)
    assert client.get("/api/info").json()["among"] == ["captions"]
    assert found(client.post("/api/search", json={"text": "a circle"}))[0]["text"] is not None
    assert "no vectors of images" in client.post("/api/search", json={"text": "x", "among": "images"}).json()["detail"]
    assert "no vectors of images" in client.post("/api/search", json={"key": str(made.pictures / "007.png")}).json()["detail"]
    assert client.get("/api/thumbnail/0").json()["detail"] == "image 0 has no thumbnail"
    assert client.get("/api/image/7").content == (made.pictures / "007.png").read_bytes()
    engine.close()
