"""Imported last by the server of tests/fresh.py: what it holds by now is cheap to fork, and garbage is not looked for in it."""

import gc

from coder_plugin.concepts import scenes_vocabulary
from coder_plugin.data.scenes import DEFAULT_COUNTS, open_scenes
from tests import huge_pages

DEFAULT_COUNTS["val"] = 100  # as in tests/conftest.py
open_scenes("train"), open_scenes("val"), scenes_vocabulary()  # which keep their results
gc.collect()
gc.freeze()
huge_pages.use()
