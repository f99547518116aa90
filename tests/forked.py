"""Imported last by the server of tests/fresh.py: what it holds by now is cheap to fork, and garbage is not looked for in it."""

import gc

from tests import huge_pages

gc.collect()
gc.freeze()
huge_pages.use()
