"""What all files of a folder of embeddings share: ``embed.json``, and the columns of a Parquet file that follow from it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder_plugin import files
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, sha256_json

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT, VERSION = "coder-plugin embeddings", 2
NOTE = "embed.json"
WHAT = ("both", "images", "captions")
DTYPES = ("float32", "float16")
#: Types of further columns.
COLUMN_TYPES = ("string", "int64", "float64", "bool")
#: Columns that every file has, or may have.
OWN_COLUMNS = ("key", "image_id", "captions", "path", "member", "image_vector", "text_vectors", "thumbnail")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_MOST = {"units": 1 << 32, "dimensions": 1 << 20, "views": 1 << 12}


@dataclass(frozen=True, kw_only=True)
class Header:
    """What all files of a folder share: the content of ``embed.json``.

    Args:
        model: fields about the model from which a search opens it again; ``fingerprint`` is required.
        plan: everything that decides what is in the files, as JSON values. Files with another plan are made again.
        units: number of files, from 1.
        dimensions: D, from 1.
        views: V, vectors of an image, from 1.
        dtype: of the vectors: "float32" or "float16".
        what: whose vectors: "both", "images" or "captions".
        columns: further columns, and the type of each: "string", "int64", "float64" or "bool".

    Raises:
        CoderError: a value that is none of these.

    Example:
        >>> header = Header(model={"fingerprint": "f" * 64}, plan={}, units=2, dimensions=8)
        >>> header.schema().names[:3], header.file(1)
        (['key', 'image_id', 'captions'], '00000001.parquet')
    """

    model: Mapping[str, Any]
    plan: Mapping[str, Any]
    units: int
    dimensions: int
    views: int = 1
    dtype: str = "float32"
    what: str = "both"
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, Mapping) or not isinstance(self.model.get("fingerprint"), str):
            raise CoderError("its model has no fingerprint")
        if not isinstance(self.plan, Mapping):
            raise CoderError("its plan is no object")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise CoderError(f"{name} is {str(value)[:60]!r}; it must be from 1 to {most:,}")
        for name, allowed in (("dtype", DTYPES), ("what", WHAT)):
            if getattr(self, name) not in allowed:
                raise CoderError(f"{name} is {str(getattr(self, name))[:60]!r}; it must be one of {', '.join(allowed)}")
        check_columns(self.columns)

    @functools.cached_property
    def plan_sha256(self) -> str:
        """The digest of the plan, which each file repeats."""
        return sha256_json(self.plan)

    def file(self, unit: int) -> str:
        """The name of a unit's file."""
        return f"{unit:08d}.parquet"

    def tokens_file(self, unit: int) -> str:
        """The name of the file of a unit's tokens for re-ranking."""
        return f"{unit:08d}.tokens.safetensors"

    def schema(self) -> pa.Schema:
        """The columns of a file, as Arrow types."""
        import pyarrow as pa

        number = pa.float16() if self.dtype == "float16" else pa.float32()
        vector = pa.list_(number, self.dimensions)
        fields = [
            ("key", pa.string()),
            ("image_id", pa.int64()),
            ("captions", pa.list_(pa.string())),
            ("path", pa.string()),
            ("member", pa.string()),
        ]
        if self.what != "captions":
            fields.append(("image_vector", vector if self.views == 1 else pa.list_(vector, self.views)))
        if self.what != "images":
            fields.append(("text_vectors", pa.list_(vector)))
        fields.append(("thumbnail", pa.binary()))
        types = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
        return pa.schema([*fields, *((name, types[kind]) for name, kind in self.columns.items())])

    def write(self, folder: Path) -> None:
        """Write ``embed.json``."""
        names = ("model", "plan", "units", "dimensions", "views", "dtype", "what", "columns")
        content = {"format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in names}}
        with atomic_write(folder / NOTE, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The content of ``embed.json``.

        Raises:
            CoderError: it is missing, damaged, of another format or version, or has fields of other types.
        """
        path = folder / NOTE
        if not path.exists():
            raise CoderError(f"{folder} holds no embeddings: it has no {NOTE} (coder-plugin embed writes one)")
        content = files.read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CoderError(f"{path} was not written by coder-plugin embed")
        if content.get("version") != VERSION:
            raise CoderError(
                f"{path} has version {str(content.get('version'))[:40]} of the format, and this coder-plugin reads {VERSION}: "
                "embed the data again"
            )
        fields = {name: value for name, value in content.items() if name not in ("format", "version")}
        if {*fields} != {*cls.__dataclass_fields__}:
            different = ", ".join(sorted({*fields} ^ {*cls.__dataclass_fields__}))[:200]
            raise CoderError(f"{path} was not written by coder-plugin embed: fields that are missing or unknown: {different}")
        try:
            header = cls(**fields)
            _ = header.plan_sha256
        except CoderError as error:
            raise CoderError(f"{path} was not written by coder-plugin embed: {error}") from error
        except RecursionError as error:
            raise CoderError(f"{path} cannot be read: it is nested too deeply") from error
        return header


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the names and types of further columns.

    Raises:
        CoderError: a name or type that is not allowed; says which are.
    """
    if not isinstance(columns, Mapping) or len(columns) > 500:
        raise CoderError("its columns are no names with types, or more than 500")
    lower = [name.lower() for name in columns if isinstance(name, str)]
    for name, kind in columns.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise CoderError(f"column {str(name)[:60]!r}: a name has letters, digits and _, and begins with no digit")
        if name.lower() in OWN_COLUMNS or lower.count(name.lower()) > 1:
            raise CoderError(f"column {name!r}: the file has a column of that name already (capitals do not count)")
        if kind not in COLUMN_TYPES:
            raise CoderError(f"column {name!r} has the type {str(kind)[:60]!r}; it must be one of {', '.join(COLUMN_TYPES)}")
