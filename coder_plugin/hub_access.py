"""Downloads from the Hugging Face Hub on a machine without a network: one short attempt, then the cache alone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from coder_plugin.errors import CoderError

#: Seconds that a first answer may take; HF_HUB_ETAG_TIMEOUT, the hub's own variable, changes them.
PATIENCE = 4.0


@contextlib.contextmanager
def hub_access(needed: bool = True) -> Iterator[None]:
    """A context in which the hub's client reads its cache alone if the hub does not answer, and so fails at once.

    The client itself tries each file six times, over more than a minute.

    Args:
        needed: whether anything may have to be downloaded. If not, the hub is not asked, whatever the opened files name.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not needed or not is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def loading(failure: str, downloads: Mapping[str, str], repositories: Sequence[str] = ()) -> Iterator[None]:
    """A context in which a library reads a model's files: :func:`hub_access`, no progress bars, and one-line errors.

    Args:
        failure: how the error begins, such as "the weights of NAME cannot be loaded".
        downloads: what may have to be downloaded, and for each the flag that names a copy of it. Empty: nothing is fetched.
        repositories: of these downloads on the hub, as far as they are known.

    Raises:
        CoderError: for any error inside.
    """
    from torch import OutOfMemoryError
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # each rank would show its own
    try:
        with hub_access(bool(downloads)):
            try:
                yield
            except (CoderError, OutOfMemoryError):
                raise
            except Exception as error:  # open_clip, timm, transformers and the hub raise many types
                if downloads and is_offline() and is_download_error(error):
                    commands = (f"hf download {name} --local-dir FOLDER" for name in repositories or ["OWNER/NAME"])
                    raise CoderError(
                        f"{failure}: {' and '.join(downloads)} must be downloaded, and the Hugging Face Hub cannot be "
                        f"reached: download where there is a network ({'; '.join(commands)}), and name "
                        f"the copy: {' and '.join(downloads.values())}"
                    ) from error
                raise CoderError(f"{failure}: {type(error).__name__}: {' '.join(str(error).split())[:500]}") from error
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def is_offline() -> bool:
    """Whether the hub's client reads its cache alone: it was told to, or the hub has not answered."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


@cache
def is_reachable(address: str) -> bool:
    """Whether a server answers the hub's client, with its proxies and certificates, with whatever status. Asked once in a
    process.

    Args:
        address: such as https://huggingface.co.
    """
    from huggingface_hub.utils import get_session

    answered = threading.Event()
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE)

    def ask() -> None:
        with contextlib.suppress(Exception):  # the client's, of which it has had several with errors of their own
            get_session().head(address, timeout=seconds)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(seconds + 0.5)
    return answered.is_set()


def is_download_error(error: BaseException | None) -> bool:
    """Whether an error comes of a file of the hub that is not in the cache and cannot be downloaded."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            return True
        error = error.__cause__ or error.__context__
    return False
