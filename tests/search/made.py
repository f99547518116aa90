"""Made-up embeddings, indexes of given vectors, pictures with captions, and small models."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coder_plugin
from coder_plugin.data.scenes import open_scenes
from coder_plugin.pretrained.export import export_model
from coder_plugin.search.build import build_index
from coder_plugin.search.index import Index
from coder_plugin.search.parquet import Rows, schema_of, write_file

COLUMNS = {"source": "string", "width": "int64", "sharp": "bool", "score": "float64"}


def embed(
    folder: Path,
    *,
    units: int = 3,
    rows: int = 20,
    dimensions: int = 8,
    views: int = 1,
    seed: int = 0,
    name: str = "a",
    tokens: bool = False,
    fingerprint: str = "f" * 64,
    dtype: str = "float32",
    what: str = "both",
    columns: dict[str, str] = COLUMNS,
    bad: Sequence[tuple[str, str]] = (),
) -> dict[str, np.ndarray]:
    """Write a folder; image ``number`` of unit ``u`` has the key ``NAME-u-number`` and ``number % 3`` captions.

    Returns:
        The vectors "images" [N, V, D] and "captions" [T, D].
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    images, captions = [], []
    names = ["image_tokens_t", "text_tokens_t"] if tokens else []
    schema = schema_of(dimensions, views=views, dtype=dtype, what=what, columns=columns, tokens=names)
    model = {"fingerprint": fingerprint, "name": f"model {fingerprint[0]}", "reranker": None}
    for unit in range(units):
        numbers = range(rows)
        keys = [f"{name}-{unit}-{number}" for number in numbers]
        texts = [[f"caption {which} of {key}" for which in range(number % 3)] for number, key in enumerate(keys)]
        vectors = rng.standard_normal((rows, views, dimensions), dtype=np.float32)
        text_vectors = rng.standard_normal((sum(map(len, texts)), dimensions), dtype=np.float32)
        values = {
            "source": ["coco" if number % 2 else None for number in numbers],
            "width": [100 * number for number in numbers],
            "sharp": [number % 4 == 0 for number in numbers],
            "score": [number / 7 for number in numbers],
        }
        made = Rows(
            keys, texts,
            None if what == "captions" else (vectors if views > 1 else vectors[:, 0]),
            None if what == "images" else text_vectors,
            [f"/pictures/{key}.jpg" for key in keys], [None] * rows,
            [b"\xff\xd8\xff" + key.encode() if number % 5 else b"" for number, key in enumerate(keys)],
            {each: values[each] for each in columns},
            image_tokens={"t": rng.standard_normal((rows, 2 + unit, 3)).astype(np.float16)} if tokens else {},
            text_tokens={"t": list(rng.standard_normal((len(text_vectors), 2, 3)).astype(np.float16))} if tokens else {},
        )  # fmt: skip
        header = {"model": model, "plan": {"seed": seed, "name": name}, "units": units, "unit": unit, "bad": list(bad)}
        write_file(folder / f"{unit:08d}.parquet", schema, header, [made])
        images.append(vectors)
        captions.append(text_vectors)
    return {"images": np.concatenate(images), "captions": np.concatenate(captions)}


def plant(
    folder: Path,
    images: Any,
    captions: Any,
    owners: list[int],
    *,
    texts: list[str] | None = None,
    keys: list[str] | None = None,
    factory: str = "Flat",
) -> Index:
    """An index of these vectors [N, V, D] or [N, D] and [T, D]; ``owners`` are the images of the captions, ascending."""
    images, captions = np.asarray(images, dtype=np.float32), np.asarray(captions, dtype=np.float32)
    texts = texts or [f"text {row}" for row in range(len(captions))]
    keys = keys or [f"{row}.jpg" for row in range(len(images))]
    of = [[text for text, owner in zip(texts, owners, strict=True) if owner == row] for row in range(len(images))]
    none = [None] * len(images)
    schema = schema_of(images.shape[-1], views=images.shape[1] if images.ndim == 3 else 1)
    header = {"model": {"fingerprint": "f"}, "plan": {}, "units": 1, "unit": 0, "bad": []}
    embeddings = folder.with_name(f"{folder.name}-embeddings")
    embeddings.mkdir(parents=True)
    images = images[:, 0] if images.ndim == 3 and images.shape[1] == 1 else images
    write_file(embeddings / "00000000.parquet", schema, header, [Rows(keys, of, images, captions, none, none)])
    build_index(folder, embeddings, factory=factory)
    return Index(folder)


def write_pictures(folder: Path, count: int, *, name: str = "{:03d}.png") -> Path:
    """Write scenes as PNG files, and a table with two captions of each; returns the path of the table, ``all.csv``."""
    scenes = open_scenes("val")
    with open(folder / "all.csv", "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title", "source", "width"])
        for number in range(count):
            item, path = scenes[number], folder / name.format(number)
            item.load().save(path)
            source = ("coco", "it's", "")[number % 3]
            table.writerows([[str(path), caption, source, 10 * number] for caption in item.captions[:2]])
    return folder / "all.csv"


def write_model(folder: Path, loss: Any, *, seed: int = 0) -> Path:
    """Export ``coder-tiny`` with random weights; returns ``folder``."""
    torch.manual_seed(seed)
    export_model(coder_plugin.create_model("coder-tiny", loss=loss), folder)
    return folder
