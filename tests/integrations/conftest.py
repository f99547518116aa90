import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations import hub_runs, upstream_runs


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What runs of open_clip's trainer need: paths of tiny ``models``, flags of ``data``, a ``pair`` of processes."""
    pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs pandas and fsspec: pip install .[open-clip]")
    folder = tmp_path_factory.mktemp("upstream")
    models, data = upstream_runs.write_models(folder), upstream_runs.write_scenes(folder)
    pair = upstream_runs.Pair()
    yield SimpleNamespace(models=models, data=data, pair=pair)
    pair.close()


@pytest.fixture(scope="session")
def released(upstream: SimpleNamespace) -> SimpleNamespace:
    """The same, where the open_clip that is installed is 3.3."""
    import open_clip

    if not open_clip.__version__.startswith("3.3."):
        pytest.skip(f"of open_clip 3.3's trainer, and {open_clip.__version__} is installed")
    return upstream


@pytest.fixture(scope="session")
def hub_models(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> SimpleNamespace:
    """Trained ``runs`` by name, each as a folder in ``shared``, and what is ``known`` of their vectors before that."""
    import coder_plugin

    pytest.importorskip("peft", reason="one of the runs has adapters: pip install .[lora]")
    runs = hub_runs.make(tmp_path_factory.mktemp("runs"), tiny_model)
    hub_runs.finish(runs["coder"], **hub_runs.FIGURES)
    shutil.copytree(runs["coder"] / "export" / "last", runs["coder"] / "export" / "best")
    shared = tmp_path_factory.mktemp("shared")
    for name, run in runs.items():
        assert coder_plugin.save_pretrained(run, shared / name, export="last") == shared / name
    return SimpleNamespace(runs=runs, shared=shared, known=hub_runs.known(runs, tmp_path_factory.mktemp("pictures")))


@pytest.fixture(scope="session")
def runs(hub_models: SimpleNamespace) -> dict[str, Path]:
    return hub_models.runs


@pytest.fixture(scope="session")
def shared(hub_models: SimpleNamespace) -> Path:
    return hub_models.shared


@pytest.fixture(scope="session")
def known(hub_models: SimpleNamespace) -> dict[str, Any]:
    return hub_models.known
