"""Downloads from the Hugging Face Hub on a machine without a network: one short attempt, then the cache alone."""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache

#: Seconds that a first answer may take; HF_HUB_ETAG_TIMEOUT, the hub's own variable, changes them.
PATIENCE = 4.0


@contextlib.contextmanager
def hub_access(needed: bool = True) -> Iterator[None]:
    """A context in which the hub's client reads its cache alone if the hub does not answer, and so fails at once.

    The client itself tries each file six times, over more than a minute. Proxies of the environment are used.

    Args:
        needed: whether anything may have to be downloaded; if not, nothing is asked.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or (needed and not is_reachable(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_offline() -> bool:
    """Whether the hub's client reads its cache alone: it was told to, or the hub has not answered."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


@cache
def is_reachable(address: str) -> bool:
    """Whether a server answers at all, with whatever status. Asked once in a process.

    Args:
        address: such as https://huggingface.co.
    """
    answered = threading.Event()
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE)

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # an answer
        except (OSError, ValueError) as error:
            if "CERTIFICATE" not in str(error):  # the client may know other certificates
                return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(seconds + 0.5)
    return answered.is_set()
