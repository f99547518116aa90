"""``python -m coder_plugin.integrations.open_clip``: upstream's trainer with all of its flags, and ours."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

if TYPE_CHECKING:
    from coder_plugin.integrations.open_clip.adapter import Adapter


@contextlib.contextmanager
def adapted() -> Iterator[Adapter]:
    """Inside the context, ``open_clip_train.main`` knows ``--loss`` and the flags that belong to it.

    ``with adapted(): open_clip_train.main.main([...])`` is the same as the command.

    Raises:
        CoderError: open_clip's trainer, or something that it needs, is not installed or is of an unknown version.
    """
    adapter = find_adapter()
    with adapter.active():
        try:
            yield adapter
        except CoderError as error:
            from coder_plugin.integrations.open_clip import flags

            raise CoderError(flags.renamed(str(error))) from error


def find_adapter() -> Adapter:
    """The adapter for the installed open_clip.

    Raises:
        CoderError: its trainer cannot be imported, or is of an unknown version.
    """
    try:
        import open_clip
        from open_clip_train import main as trainer
    except ImportError as error:
        raise CoderError(
            f"open_clip's trainer cannot be imported ({error}): it needs the extra open-clip (pip install pandas fsspec)"
        ) from error
    version = open_clip.__version__
    if hasattr(trainer, "create_task") and version.startswith("4."):
        from coder_plugin.integrations.open_clip.tasks import TaskLayer

        return TaskLayer(trainer)
    if hasattr(trainer, "create_loss") and version.startswith("3.3."):
        from coder_plugin.integrations.open_clip.released import Released

        return Released(trainer)
    raise CoderError(
        f"the adapter knows the trainers of open_clip 3.3 and of 4, with its tasks; this is {version}: "
        'pip install "open_clip_torch>=3.3,<3.4"'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run upstream's ``main`` with our flags; returns the exit status: 0, or 2 for a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        return _help()
    try:
        with adapted() as adapter:
            status = adapter.trainer.main(argv)
    except CoderError as error:
        echo(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        echo("coder-plugin: interrupted", file=sys.stderr)
        return 130
    finally:  # upstream sets every logger there is to INFO, and the compiler's then print figures when Python ends
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch._dynamo", "torch._subclasses")):
                logging.getLogger(name).setLevel(logging.WARNING)
    return 0 if status is None else 2  # upstream returns -1 after printing its error


def _help() -> int:
    from coder_plugin.integrations.open_clip import flags

    flags.parser().print_help()
    echo("\nEvery flag of open_clip's own trainer:\n")
    try:
        with adapted() as adapter, contextlib.suppress(SystemExit):
            adapter.own["parse_args"](["--help"])
    except CoderError as error:
        echo(error)
    return 0
