"""Small data sets of distinct pictures and captions, in which tests plant a fault, and the doctor's word on them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from coder_plugin.concepts import Vocabulary
from coder_plugin.config import resolve
from coder_plugin.doctor.examine import check_training
from coder_plugin.doctor.findings import Finding

Sample = dict[str, bytes]
THINGS = "dog cat ball tree house boat horse bird train kite".split()
PLACES = "grass sand snow street water hill bridge roof field path".split()


def picture(number: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """Coarse colours, as no other number has them."""
    rows = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(rows).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def captions(number: int) -> list[str]:
    thing, place = THINGS[number % 10], PLACES[number // 10 % 10]
    return [f"a {thing} on the {place} number {number}", f"the {place} with {thing} {number}"]


def sample(number: int, **fields: Any) -> Sample:
    """One sample's files by their ending; ``json=…`` takes anything that JSON can say."""
    about = fields.pop("json", {"image_id": f"image {number}", "captions": captions(number)})
    made = {"jpg": encoded(picture(number), quality=90), "json": json.dumps(about).encode(), **fields}
    return {ending: content for ending, content in made.items() if content is not None}


def write_tar(path: Path, samples: dict[str, Sample]) -> str:
    with tarfile.open(path, "w") as tar:
        for stem, fields in samples.items():
            for ending, content in fields.items():
                member = tarfile.TarInfo(f"{stem}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return str(path)


def write_split(folder: Path, name: str, first: int, count: int = 12, **planted: Sample) -> str:
    """Two shards of ``count`` images from number ``first``; ``planted`` samples come after them."""
    samples = {f"{number:04d}": sample(number) for number in range(first, first + count)} | planted
    stems = list(samples)
    half = len(stems) // 2
    for shard, part in enumerate((stems[:half], stems[half:])):
        write_tar(folder / f"{name}-{shard}.tar", {stem: samples[stem] for stem in part})
    return str(folder / f"{name}-{{0..1}}.tar")


def write_vocabulary(path: Path, names: list[str], missing: tuple[str, ...] = ()) -> str:
    size = len(names)
    Vocabulary(
        words=tuple(names),
        types=("object",) * size,
        counts=torch.full((size,), 60),
        cooccurrence=10 * (1 - torch.eye(size, dtype=torch.int64)),
        vectors=torch.randn(size, 8, generator=torch.Generator().manual_seed(0)),
        missing=missing,
        settings={"source": "somewhere"},
    ).save(path)
    return str(path)


def examine(*, samples: int = 256, whole: bool = False, **flags: Any) -> list[Finding]:
    """What the doctor finds in data and recipe, by default with batches that fit a small split."""
    flags = {"batch_size": 2, **flags}
    return check_training(resolve([("flag", flags)]), flags, samples=samples, check_all=whole)


def amiss(found: list[Finding]) -> dict[str, Finding]:
    """The findings that are not ok, by name; each has its advice."""
    wrong = {each.name: each for each in found if each.level != "ok"}
    assert all(each.do and "\n" not in each.text + each.do for each in wrong.values())
    return wrong
