"""Embeddings folders of made-up vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.index.embeddings_header import Header
from coder_plugin.index.unit_file import Rows, write_unit

COLUMNS = {"source": "string", "width": "int64", "sharp": "bool", "score": "float64"}
ROWS = 20


def embed(
    folder: Path,
    *,
    units: int = 5,
    rows: int = ROWS,
    dimensions: int = 8,
    views: int = 1,
    seed: int = 0,
    name: str = "a",
    tokens: bool = False,
    fingerprint: str = "f" * 64,
    bad: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write a folder; image ``number`` of unit ``u`` has the key ``NAME-u-number`` and ``number % 3`` captions.

    ``bad`` are the kind and the key of each unit's unreadable samples.

    Returns:
        The vectors "images" [N, V, D] and "captions" [T, D].
    """
    rng = np.random.default_rng(seed)
    options = {"columns": COLUMNS, **options}
    header = Header(
        model={"fingerprint": fingerprint, "name": f"model {fingerprint[0]}"}, plan={"seed": seed}, units=units,
        dimensions=dimensions, views=views, **options,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    header.write(folder)
    images, captions = [], []
    for unit in range(units):
        keys = [f"{name}-{unit}-{number}" for number in range(rows)]
        texts = [[f"caption {which} of {key}" for which in range(number % 3)] for number, key in enumerate(keys)]
        vectors = rng.standard_normal((rows, views, dimensions), dtype=np.float32)
        text_vectors = rng.standard_normal((sum(map(len, texts)), dimensions), dtype=np.float32)
        numbers = range(rows)
        columns = {
            "source": ["coco" if number % 2 else None for number in numbers],
            "width": [100 * number for number in numbers],
            "sharp": [number % 4 == 0 for number in numbers],
            "score": [number / 7 for number in numbers],
        }
        made = Rows(
            keys, texts,
            None if header.what == "captions" else (vectors if views > 1 else vectors[:, 0]),
            None if header.what == "images" else text_vectors,
            [f"/pictures/{key}.jpg" for key in keys], [None] * rows,
            [b"\xff\xd8\xff" + key.encode() if number % 5 else b"" for number, key in enumerate(keys)],
            {each: columns[each] for each in header.columns},
            image_tokens={"tokens": rng.standard_normal((rows, 2 + unit, 3), dtype=np.float32)} if tokens else {},
            text_tokens={"tokens": rng.standard_normal((len(text_vectors), 2, 3), dtype=np.float32)} if tokens else {},
        )  # fmt: skip
        write_unit(folder / header.file(unit), header, unit, [made], bad=bad)
        images.append(vectors)
        captions.append(text_vectors)
    return {"images": np.concatenate(images), "captions": np.concatenate(captions)}
