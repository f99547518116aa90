"""What tells a resumed run that its data have changed: files of regions, pictures under --image-root, another kind of data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coder_plugin.data import open_source
from coder_plugin.data.loader import TrainLoader
from coder_plugin.errors import CoderError


def tokens(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def loader_of(source: Any, **options: Any) -> TrainLoader:
    return TrainLoader(source, batch_size=2, transform=lambda _: torch.zeros(1), tokenizer=tokens, **options)


def write_precomp(folder: Path) -> str:
    np.save(folder / "train_ims.npy", np.arange(96, dtype=np.float32).reshape(8, 3, 4))
    (folder / "train_caps.txt").write_text("".join(f"caption {n}\n" for n in range(8)))
    return str(folder)


def test_features_that_were_written_again_are_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    spec = write_precomp(tmp_path)
    loader = loader_of(open_source(spec))
    next(loader.epoch(0))
    position = loader.position()
    next(loader_of(open_source(spec)).epoch(0, position))
    os.utime(tmp_path / "train_ims.npy", ns=(1, 1))
    with pytest.raises(CoderError, match="the data have changed since the checkpoint was written: the files"):
        loader_of(open_source(spec)).epoch(0, position)


def test_another_kind_of_data_is_a_change(tmp_path: Path) -> None:
    loader = loader_of(open_source("scenes", count=8))
    next(loader.epoch(0))
    position = loader.position()
    position["data"] = {"shards": 1}
    with pytest.raises(CoderError, match="the data have changed"):
        loader.epoch(0, position)


def test_bad_samples_of_one_rank_are_counted_once_when_more_ranks_go_on() -> None:
    loader = loader_of(open_source("scenes", count=16))
    next(loader.epoch(0))
    position = {**loader.position(), "bad": {"read": 3, "kinds": {"caption": 1}}}
    counts = []
    for rank in range(2):
        part = loader_of(open_source("scenes", count=16), rank=rank, world_size=2)
        part.epoch(0, [position])
        counts.append(len(part.bad))
    assert counts == [1, 0]
