from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.integrations import upstream_runs


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What runs of open_clip's trainer need: paths of tiny ``models``, flags of ``data``, a ``pair`` of processes."""
    pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs pandas and fsspec: pip install .[open_clip]")
    folder = tmp_path_factory.mktemp("upstream")
    models, data = upstream_runs.write_models(folder), upstream_runs.write_scenes(folder)
    pair = upstream_runs.Pair()
    yield SimpleNamespace(models=models, data=data, pair=pair)
    pair.close()
