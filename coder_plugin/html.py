"""HTML pages of one file each: no script, no font, no request. They can be read on a phone, in dark mode and in print.

A template in ``templates/`` extends ``base.html`` and fills its blocks ``title``, ``heading``, ``contents`` (a ``<nav>`` with
links to sections) and ``main``. The comment at the top of ``base.html`` lists the style's classes.
"""

from __future__ import annotations

import base64
import io
import re
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

_SPACE = re.compile(r"(\s+)")
#: Places in a name where a line may break.
_BREAK = re.compile(r"(?<=[\w.}\]][/_=-])(?=[\w{\[])|(?<=\w)(?=\.[A-Za-z])")


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
        >>> values = {"title": "<pets>", "subtitle": "", "written": "", "version": ""}
        >>> page = render("report.html", tiles=(), problems=(), sections=(), **values)
        >>> "<h1>&lt;pets&gt;</h1>" in page
        True
    """
    return _environment().get_template(template).render(**values)


def asset(name: str) -> str:
    """The text of a file in ``coder_plugin/templates`` as it is, such as a script that a template names.

    Args:
        name: of the file.
    """
    return Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")


def breakable(text: Any, longer: int = 0) -> Html:
    """A name or a path, escaped, with places for a line to break: after a slash, an underscore, a hyphen or an equals sign, and
    before the ending of a file's name.

    Args:
        text: the name, or a text with names in it.
        longer: only words of more characters get such places.

    Example:
        >>> breakable("logs/my_run.tar"), breakable("my_run of logs/2026/my_run.tar", longer=12)
        ('logs/<wbr>my_<wbr>run<wbr>.tar', 'my_run of logs/<wbr>2026/<wbr>my_<wbr>run<wbr>.tar')
    """
    words = _SPACE.split(str(text))
    return Html("".join("<wbr>".join(map(escape, _BREAK.split(word) if len(word) > longer else [word])) for word in words))


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

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment
