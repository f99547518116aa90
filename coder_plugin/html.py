"""HTML pages of one file each: no script, no font, no request. They can be read on a phone, in dark mode and in print.

A template in ``templates/`` extends ``base.html`` and fills its blocks ``title``, ``heading``, ``contents`` (a ``<nav>`` with
links to sections) and ``main``. The comment at the top of ``base.html`` lists the style's classes.
"""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image


class Html(str):
    """Text that is HTML already. :func:`render` escapes every other text.

    Example:
        >>> Html("<b>bold</b>").__html__()
        '<b>bold</b>'
    """

    def __html__(self) -> str:
        return self


def render(template: str, **values: Any) -> str:
    """Fill a template. Texts are escaped, except :class:`Html`.

    Args:
        template: a file name in ``coder_plugin/templates``, such as ``run.html``.
        **values: the variables of the template.

    Raises:
        jinja2.UndefinedError: the template reads a variable that is not in ``values``.

    Example:
        >>> page = render("search.html", name="<pets>", sizes="2 images", model="CLIP", recipe=None, queries=[])
        >>> "Search of &lt;pets&gt;" in page
        True
    """
    return _environment().get_template(template).render(**values)


def data_uri(picture: Image.Image, size: int = 160, *, quality: int = 78) -> str:
    """Encode a picture as a small JPEG for ``<img src>``.

    Args:
        picture: any mode; it is converted to RGB.
        size: the longest side in pixels. Smaller pictures are not enlarged.
        quality: of the JPEG, 1 to 95.

    Example:
        >>> data_uri(Image.new("RGB", (8, 8)))[:23]
        'data:image/jpeg;base64,'
    """
    small = picture.convert("RGB")
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=quality, optimize=True)
    return jpeg_uri(file.getvalue())


def jpeg_uri(content: bytes) -> str:
    """The content of a JPEG file for ``<img src>``."""
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
