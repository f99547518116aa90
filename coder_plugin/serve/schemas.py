"""What the API takes and gives, as its OpenAPI description shows it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from coder_plugin.errors import CoderError

try:
    from pydantic import BaseModel, ConfigDict, Field
except ImportError as error:
    raise CoderError(f'serve needs FastAPI and uvicorn: pip install "coder-plugin[serve]" ({error})') from error

#: The most results of a search, and characters of a text or a key.
MOST_RESULTS, MOST_TEXT = 200, 2000

#: A value of a metadata column; None: images without one.
Value = Annotated[str, Field(max_length=200)] | bool | int | float | None


class SearchRequest(BaseModel):
    """What to search for: a text, or the key of an image of the index."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(max_length=MOST_TEXT)] | None = None
    key: Annotated[str, Field(max_length=MOST_TEXT)] | None = None
    k: Annotated[int, Field(ge=1, le=MOST_RESULTS, description="results")] = 10
    among: Annotated[
        Literal["images", "captions"] | None,
        Field(description="what to search for; by default images for a text, captions for an image, as far as there are some"),
    ] = None
    filters: Annotated[
        dict[str, Value | list[Value]],
        Field(max_length=20, description="metadata columns and the value, or one of several values, that an image must have"),
    ] = {}


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
    most_results: int
    most_text: int = Field(description="characters of a text")
    most_bytes: int = Field(description="of a request, its picture included")
    most_pixels: int
    formats: list[str]
    version: str = Field(description="of coder-plugin")


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


#: The body of a search, for the OpenAPI description: FastAPI cannot describe one of two kinds.
BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": SearchRequest.model_json_schema()},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["picture"],
                "properties": {
                    "picture": {"type": "string", "format": "binary"},
                    **{name: SearchRequest.model_json_schema()["properties"][name] for name in ("k", "among")},
                    "filters": {"type": "string", "description": "as of a search in JSON, written as JSON"},
                },
            }
        },
    },
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "Not a picture, or not a text that can be searched for",
        404: "No such image in the index",
        408: "The request did not arrive in time",
        413: "Too long a request",
        415: "Neither JSON nor a form",
        422: "A value of the wrong type or out of its range",
        503: "Too many requests at once",
    }.items()
}
