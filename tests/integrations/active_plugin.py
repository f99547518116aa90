"""A pytest plugin that runs open_clip's own tests with our adapter active: ``-p active_plugin``, this folder on the path."""

from __future__ import annotations

import contextlib

import pytest

_ACTIVE = pytest.StashKey[contextlib.ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    from coder_plugin.integrations.open_clip import adapted

    stack = config.stash[_ACTIVE] = contextlib.ExitStack()
    stack.enter_context(adapted())


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_ACTIVE].close()


def pytest_report_header() -> str:
    import open_clip
    from open_clip_train import main

    owner = main.parse_args.__self__
    return f"open_clip {open_clip.__version__} with coder-plugin's {type(owner).__name__} active"
