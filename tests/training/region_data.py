"""Generated region features whose content is the captions' words, so that a model can learn to match them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coder_plugin.data.regions.base import Record, Regions

WORDS = "man dog cat ball tree house red green blue big small picture".split()
SPLITS = {"train": 48, "dev": 24, "test": 20}
REGIONS, CHANNELS = 6, 12
FORMS = (
    "a {0} and a {1} with the {2}",
    "{1} {0} {2}",
    "the {2} of a {0} and {1}",
    "two {1} on {2} with {0}",
    "{2} in {1}, {0}",
)


def records(split: str) -> Iterator[Record]:
    """Images of three words each, no two of the same three; each word has two regions, and each region a box."""
    sets = list(itertools.combinations(range(len(WORDS)), 3))
    random.Random(0).shuffle(sets)
    start = list(SPLITS).index(split) * 60
    for number, words in enumerate(sets[start : start + SPLITS[split]]):
        rng = np.random.default_rng(start + number)
        features = 2 * np.eye(CHANNELS)[list(words) * 2] + 0.1 * rng.standard_normal((REGIONS, CHANNELS))
        corner = rng.random((REGIONS, 2)) * 50
        boxes = np.concatenate([corner, corner + 40], 1).astype(np.float32)
        captions = tuple(form.format(*(WORDS[word] for word in words)) for form in FORMS)
        yield Record(f"{split}_{number:03d}", Regions(features.astype(np.float32), boxes, (100.0, 90.0)), captions)


def write_precomp(folder: Path) -> str:
    from coder_plugin.data.regions.precomp import PRECOMP

    for split in SPLITS:
        PRECOMP.write(str(folder), records(split), split=split)
    return str(folder)


def write_karpathy(path: Path) -> str:
    """The same images and captions as a Karpathy file, without pictures."""
    names = {"train": "train", "dev": "val", "test": "test"}
    images = [
        {"filename": f"{record.name}.jpg", "split": names[split], "sentences": [{"raw": text} for text in record.captions]}
        for split in SPLITS
        for record in records(split)
    ]
    path.write_text(json.dumps({"images": images, "dataset": "made"}))
    return str(path)


def write_vocabulary(path: Path) -> str:
    import torch

    from coder_plugin.concepts import Vocabulary

    size = len(WORDS)
    Vocabulary(
        words=tuple(sorted(WORDS)),
        types=("object",) * size,
        counts=torch.full((size,), 60),
        cooccurrence=10 * (1 - torch.eye(size, dtype=torch.int64)),
        vectors=torch.randn(size, 8, generator=torch.Generator().manual_seed(0)),
        missing=(),
        settings={},
    ).save(path)
    return str(path)
