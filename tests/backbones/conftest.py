import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.backbones import tiny_bert, towers


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> str:
    """The folder of a tiny BERT without dropout."""
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """One thread, and no warnings of random weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``make("vit")``, ``make(text="t5")``: a model with that tower, see tests/backbones/towers.py."""
    return towers.maker(tmp_path_factory.mktemp("towers"))
