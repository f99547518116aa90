"""The one place where pictures are opened: few formats, a limit on pixels, regular files only, all as 8-bit RGB."""

from __future__ import annotations

import io
import os
import re
import warnings
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular

#: Fields of shards that hold a picture.
PICTURES = ("jpg", "png", "jpeg", "webp")
#: Pillow's names of the formats that are read. Its further plugins, some of which start other programs, are never tried.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: Most pixels of a picture, unless :func:`set_max_pixels` says otherwise: where Pillow begins to warn of decompression bombs.
MAX_PIXELS = 89_478_485
#: Most pixels that may be set: beyond, Pillow itself refuses to open a picture.
MOST_PIXELS = 2 * MAX_PIXELS
# Pillow's own warning would come first, once for each picture on a terminal and without its name. (Suppressing it for each
# picture alone is not possible in threads.)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
#: The key of a picture's ``info`` for the mode of its file, such as CMYK.
STORED = "stored mode"
_VARIABLE = "CODER_PLUGIN_MAX_IMAGE_PIXELS"  # in the environment, which worker processes inherit


def set_max_pixels(number: int | None) -> None:
    """Set the most pixels of a picture, for this process and those that it starts later; None: :data:`MAX_PIXELS`.

    Raises:
        CoderError: not from 1 to :data:`MOST_PIXELS`.
    """
    if check_max_pixels(number) is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = str(number)


def check_max_pixels(number: int | None) -> int | None:
    if number is not None and not 1 <= number <= MOST_PIXELS:
        raise CoderError(f"max_image_pixels is {number}; it must be 1 to {MOST_PIXELS:,}")
    return number


def decode_image(data: bytes | str, *, max_pixels: int | None = None) -> Image.Image:
    """A file's content or path as an RGB picture.

    The format is that of the content, one of :data:`FORMATS`, whatever the file's name says. Values of more than 8 bits are
    scaled to 0–255: of 16 bits by 1/257; 32-bit integers and floats from the first of the ranges 0–1 (floats only), 0–255
    and 0–65,535 that has all of the picture's values, else from their own minimum and maximum.

    Args:
        data: the content of a file, or its path.
        max_pixels: pictures of more pixels are refused before decoding; None: the limit of :func:`set_max_pixels`.

    Raises:
        BadSample: a damaged or truncated file, another format, too many pixels, values that are not finite (kind
            ``picture``), or what is no path (kind ``file``).
        OSError: no such file, no regular file, or one that may not be read.

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
    with io.BytesIO(data) if isinstance(data, bytes) else _open(data) as file:
        try:
            with Image.open(file, formats=FORMATS) as picture:
                return from_picture(picture, max_pixels=max_pixels)
        except UnidentifiedImageError:  # its message shows the address of a buffer
            raise BadSample("picture", f"not an image that is read ({', '.join(FORMATS)})") from None
        except Image.DecompressionBombError as exc:
            pixels = re.search(r"\d+", str(exc))
            raise _too_many(f"{int(pixels[0]):,}" if pixels else "its", max_pixels) from None
        except BadSample:
            raise
        except Exception as exc:  # Pillow raises many kinds of errors on damaged files
            raise _damaged(exc) from exc


def from_picture(picture: Image.Image, *, max_pixels: int | None = None) -> Image.Image:
    """A picture that is open already, as :func:`decode_image` returns those of files; ``BadSample`` as there."""
    width, height = picture.size
    if width * height > _limit(max_pixels):
        raise _too_many(f"{width} x {height}", max_pixels)
    return to_rgb(picture)


def to_rgb(picture: Image.Image) -> Image.Image:
    """An open picture of any mode and size as RGB, as by :func:`decode_image`; ``BadSample`` where it cannot be."""
    try:
        if picture.mode == "RGB" and picture.format == "JPEG":  # convert would copy it
            picture.load()
            rgb = picture
        else:
            deep = picture.mode[0] in "IF"
            rgb = (_to_8_bit(picture) if deep else picture).convert("RGB")
    except BadSample:
        raise
    except Exception as exc:
        raise _damaged(exc) from exc
    rgb.info[STORED] = picture.mode
    return rgb


def _to_8_bit(picture: Image.Image) -> Image.Image:
    """A grey picture of the modes I;16, I and F, which Pillow would clip to 0–255, in mode L."""
    values = np.asarray(picture).astype(np.float32)
    if not np.isfinite(values).all():
        raise BadSample("picture", "it has values that are not finite")
    low, high = float(values.min()), float(values.max())
    sixteen = picture.mode.startswith("I;16") or picture.format == "PNG"  # mode I in older versions of Pillow
    tops = (65535,) if sixteen else (1, 255, 65535) if picture.mode == "F" else (255, 65535)
    top = next((top for top in tops if 0 <= low and high <= top), None)
    start, width = (0.0, top) if top is not None else (low, high - low or 1.0)
    return Image.fromarray(np.rint((values - start) * (255 / width)).astype(np.uint8))


def is_picture(path: str) -> bool:
    """Whether a file is a JPEG, PNG, WebP or GIF by its content. (Cameras' raw files begin as TIFF, and texts may as BMP.)"""
    try:
        with _open(path) as file, Image.open(file, formats=FORMATS[:4]):
            return True
    except Image.DecompressionBombError:
        return True
    except Exception:  # as in decode_image
        return False


def _limit(max_pixels: int | None) -> int:
    return int(os.environ.get(_VARIABLE, MAX_PIXELS)) if max_pixels is None else max_pixels


def _too_many(pixels: str, max_pixels: int | None) -> BadSample:
    return BadSample("picture", f"{pixels} pixels are more than the {_limit(max_pixels):,} that --max-image-pixels allows")


def _damaged(error: Exception) -> BadSample:
    name = "" if type(error) in (OSError, ValueError) else f"{type(error).__name__}: "
    return BadSample("picture", f"{name}{error}")


def _open(path: str) -> IO[Any]:
    try:
        return open_regular(path, "rb")
    except ValueError as exc:  # a NUL in the path
        raise BadSample("file", f"not a path: {exc}") from None
