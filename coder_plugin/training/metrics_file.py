"""``metrics.jsonl``: one JSON object a line, appended as a whole, and cut back to the step from which a run is resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from coder_plugin.files import atomic_write


def append_line(path: Path, line: str) -> None:
    """Append a line as a whole: if the disk takes only a part of it, the part is removed again.

    Raises:
        OSError: the line was not written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = f"{line}\n".encode()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(size)
            raise


def cut_back(path: Path, *, step: int, evaluated: int, epochs: int = 0) -> int:
    """Remove the rows that a resumed run writes again, and lines that a kill has cut short.

    Args:
        path: the file; nothing happens if it does not exist.
        step: steps that the checkpoint has taken. The row of a training step has the number of steps before it.
        evaluated: the step of the last evaluation that the checkpoint knows; -1 for none.
        epochs: epochs that the checkpoint has completed.

    Returns:
        The number of rows that were removed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> for line in ('{"step": 0, "loss": 2.0}', '{"step": 1, "loss": 1.0}', '{"step": 1, "val/rsum": 50.0}'):
        ...     append_line(path, line)
        >>> cut_back(path, step=1, evaluated=1)  # the second training step was after the checkpoint
        1
        >>> path.read_text().splitlines()
        ['{"step": 0, "loss": 2.0}', '{"step": 1, "val/rsum": 50.0}']
    """
    if not path.is_file():
        return 0
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _is_before(line, step, evaluated, epochs)]
    if kept != lines:
        with atomic_write(path) as file:
            file.write(b"".join(kept))
    return len(lines) - len(kept)


def _is_before(line: bytes, step: int, evaluated: int, epochs: int) -> bool:
    try:
        record: dict[str, Any] = json.loads(line)
        if any(key.startswith("epoch/") for key in record):
            return record["epoch"] < epochs
        is_evaluation = any(key.startswith("val/") for key in record)
        return record["step"] <= evaluated if is_evaluation else record["step"] < step
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
