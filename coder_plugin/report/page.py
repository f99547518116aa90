"""HTML pages of one file each: no script, no font, no request; readable on a phone, in the dark and in print.

A template in ``templates/`` extends ``base.html`` and fills its blocks ``title``, ``heading``, ``contents`` (a ``<nav>`` with a
``<ul>`` of links to sections, where there are many) and ``main``. ``base.html`` says what classes its style knows.
"""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image


class Html(str):
    """A text that is HTML already: :func:`render` escapes every other."""

    def __html__(self) -> str:
        return self


def render(template: str, **values: Any) -> str:
    """The page that a template makes of ``values``. Texts are escaped, except :class:`Html`.

    Args:
        template: its name in ``coder_plugin/report/templates``, such as ``run.html``.

    Raises:
        jinja2.UndefinedError: the template reads a value that is not given.
    """
    return _environment().get_template(template).render(**values)


def data_uri(picture: Image.Image, size: int = 160, *, quality: int = 78) -> str:
    """A picture as a small JPEG for ``<img src>``: its longer side at most ``size`` pixels, never enlarged."""
    small = picture.convert("RGB")
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=quality, optimize=True)
    return jpeg_uri(file.getvalue())


def jpeg_uri(content: bytes) -> str:
    """A JPEG file's content for ``<img src>``."""
    return "data:image/jpeg;base64," + base64.b64encode(content).decode("ascii")


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
