"""JSON of unknown origin."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or lists or objects are nested too deep to be read.

    Example:
        >>> parse_json('{"captions": ["a dog"]}')
        {'captions': ['a dog']}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None
