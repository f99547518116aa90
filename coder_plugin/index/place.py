"""Where a found picture is: for people, and as a link. Somebody else may have written the index, so a path may be anything."""

from __future__ import annotations

from pathlib import Path

from coder_plugin.index.records import Image

#: A longer path is not linked: no file system has one.
_LONGEST = 4096


def place(image: Image) -> str:
    """The path or URL of a picture; of one in a shard ``TAR:MEMBER``; its key where the path is not known.

    Example:
        >>> place(Image(row=0, key="dog", image_id=1, path="/data/0.tar", member="dog.jpg"))
        '/data/0.tar:dog.jpg'
    """
    if image.path is None:
        return image.key
    return image.path if image.member is None else f"{image.path}:{image.member}"


def link(image: Image) -> str | None:
    """The address that opens a picture in a browser: ``file://`` for a file on this machine, else its ``http(s)://`` URL.

    None for a picture in a shard, for one whose path is not known, and for other addresses, such as ``javascript:`` or a
    network share, which a click should not open.

    Example:
        >>> link(Image(row=0, key="dog", image_id=1, path="/data/a dog.jpg"))
        'file:///data/a%20dog.jpg'
    """
    path = image.path
    if path is None or image.member is not None or len(path) > _LONGEST or not path.isprintable():
        return None
    if path.startswith(("https://", "http://")):
        return path
    if path.startswith(("//", "\\\\")) or not Path(path).is_absolute():
        return None
    return Path(path).as_uri()
