"""The one place where pictures are opened: few formats, a limit on pixels, regular files only."""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.errors import CoderError

#: Endings of picture files, and of the fields of shards that hold one.
PICTURES = ("jpg", "png", "jpeg", "webp")
#: Pillow's names of the formats that are read. Its further plugins, some of which start other programs, are never tried.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Most pixels of a picture, unless an option says otherwise: where Pillow begins to warn of decompression bombs.
MAX_PIXELS = 89_478_485
#: Most pixels that an option may allow: beyond, Pillow itself refuses to open a picture.
MOST_PIXELS = 2 * MAX_PIXELS
# Pillow's own warning would come first, once for each picture on a terminal and without its name. (Suppressing it for each
# picture alone is not possible in threads.)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
#: The key of a picture's ``info`` for the mode of its file, such as CMYK.
STORED = "stored mode"


def decode_image(data: bytes | str, *, max_pixels: int | None = None) -> Image.Image:
    """A file's content or path as an RGB picture.

    The format is that of the content, one of :data:`FORMATS`, whatever the file's name says.

    Args:
        data: the content of a file, or its path.
        max_pixels: pictures of more pixels are refused before decoding; None: :data:`MAX_PIXELS`.

    Raises:
        BadSample: a damaged or truncated file, another format, too many pixels, or no regular file (kinds ``picture``,
            ``picture_size`` and ``file``).
        OSError: no such file, or one that may not be read.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("L", (4, 2)).save(file, "PNG")
        >>> decode_image(file.getvalue()).mode
        'RGB'
        >>> decode_image(file.getvalue(), max_pixels=7)
        Traceback (most recent call last):
            ...
        coder_plugin.data.bad_samples.BadSample: 4 x 2 pixels are more than the 7 that --max-image-pixels allows
    """
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    with io.BytesIO(data) if isinstance(data, bytes) else _open(data) as file:
        try:
            with Image.open(file, formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > limit:
                    raise _too_many(f"{width} x {height}", limit)
                if picture.mode == "RGB" and picture.format == "JPEG":  # convert would copy it
                    picture.load()
                    picture.info[STORED] = picture.mode
                    return picture
                converted = picture.convert("RGB")
                converted.info[STORED] = picture.mode
                return converted
        except BadSample:
            raise
        except UnidentifiedImageError:  # its message shows the address of a buffer
            raise BadSample("picture", f"not an image that is read ({', '.join(FORMATS)})") from None
        except Image.DecompressionBombError as exc:
            pixels = re.search(r"\d+", str(exc))
            count = f"{int(pixels[0]):,}" if pixels else "its"
            raise _too_many(count, limit) from None
        except Exception as exc:  # Pillow raises many kinds of errors on damaged files
            name = "" if type(exc) in (OSError, ValueError) else f"{type(exc).__name__}: "
            raise BadSample("picture", f"{name}{exc}") from exc


def from_picture(picture: Image.Image, *, max_pixels: int | None = None) -> Image.Image:
    """A picture that is open already, as :func:`decode_image` returns those of files.

    Raises:
        BadSample: it has too many pixels, or cannot be decoded.
    """
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    width, height = picture.size
    if width * height > limit:
        raise _too_many(f"{width} x {height}", limit)
    try:
        converted = picture.convert("RGB")
    except Exception as exc:
        raise BadSample("picture", str(exc)) from exc
    converted.info[STORED] = picture.mode
    return converted


def _too_many(pixels: str, limit: int) -> BadSample:
    return BadSample("picture_size", f"{pixels} pixels are more than the {limit:,} that --max-image-pixels allows")


def _open(path: str) -> io.BufferedReader:
    """Open a regular file. Opening a named pipe would wait for ever."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except ValueError as exc:  # a NUL in the path
        raise BadSample("file", f"not a path: {exc}") from None
    if not regular:
        raise BadSample("file", f"not a regular file: {path!r}")
    return Path(path).open("rb")


def check_max_pixels(number: int | None) -> int | None:
    if number is not None and not 1 <= number <= MOST_PIXELS:
        raise CoderError(f"max_image_pixels is {number}; it must be 1 to {MOST_PIXELS:,}")
    return number
