import pytest

from tests.backbones import tiny_bert


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> str:
    """The folder of a tiny BERT without dropout."""
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))
