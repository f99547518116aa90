"""Open the picture files that an index names: inside allowed folders only, and pictures only.

Somebody else may have written the index: a path counts after its links are followed, and a file's type is that of its content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from coder_plugin.data.tars import LARGEST_FILE, local_path, members
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.locations import is_local

#: Bytes of a picture that are read at once.
CHUNK = 1 << 18
_HEAD = 16
_MOST_MEMBERS = 200_000  # of a tar file, whose places are kept
#: The beginning of a picture's content, and its type: the formats that are read (``data/decode.py``).
_TYPES = (
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"RIFF....WEBP", re.S), "image/webp"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"BM....\0\0\0\0", re.S), "image/bmp"),
    (re.compile(rb"II\*\0|MM\0\*"), "image/tiff"),
)


class Original(NamedTuple):
    """A picture's file, opened; :meth:`chunks` closes it."""

    file: IO[bytes]
    start: int  # of the picture in the file, in bytes
    size: int
    media_type: str

    def chunks(self) -> Iterator[bytes]:
        """The content, :data:`CHUNK` bytes at a time."""
        with self.file:
            self.file.seek(self.start)
            left = self.size
            while left and (content := self.file.read(min(CHUNK, left))):
                left -= len(content)
                yield content


class Originals:
    """The pictures that an index names, as far as they lie in these folders.

    Args:
        folders: in which files may be opened. Keys that are relative paths begin in each of them in turn.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> from coder_plugin.search.records import Image as Record
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("RGB", (4, 2)).save(f"{folder}/a.png")
        ...     found = Originals([folder]).open(Record(0, "a.png", 1))
        ...     found.media_type, len(b"".join(found.chunks())) == found.size
        ...     Originals([folder]).open(Record(0, "../etc/passwd", 1)) is None
        ('image/png', True)
        True
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.folders = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))

    def open(self, image: Any) -> Original | None:
        """The picture's file; None where it is not known, not there, outside of the folders, too large, or no picture.

        Args:
            image: of the index's records.
        """
        places = [image.path] if image.path else [os.path.join(folder, image.key) for folder in self.folders]
        for place in places:  # joined to a folder, an absolute path stays as it is
            with suppress(OSError, ValueError):  # no such file, a NUL in its name, a damaged tar file (CoderError)
                if (original := self._open(place, image.member)) is not None:
                    return original
        return None

    def _open(self, path: str, member: str | None) -> Original | None:
        if not is_local(path):
            return None
        real = Path(os.path.realpath(local_path(path)))
        if not any(real.is_relative_to(folder) for folder in self.folders):
            return None
        with ExitStack() as opened:
            file = opened.enter_context(open_regular(real, "rb"))
            status = os.fstat(file.fileno())
            place: tuple[int, int] | None = (0, status.st_size)
            if member is not None:
                place = _members(str(real), status.st_mtime_ns, status.st_size).get(member)
            if place is None or place[1] > LARGEST_FILE:
                return None
            file.seek(place[0])
            head = file.read(min(_HEAD, place[1]))
            media_type = next((name for pattern, name in _TYPES if pattern.match(head)), None)
            if media_type is None:
                return None
            opened.pop_all()  # the file stays open
            return Original(file, *place, media_type)


@lru_cache(maxsize=8)
def _members(path: str, changed: int, length: int) -> Mapping[str, tuple[int, int]]:
    """Where the files in a tar file begin, and their sizes.

    Args:
        path: of the tar file.
        changed: when, in nanoseconds, and
        length: in bytes, so that a tar file that has changed is read again.
    """
    places = {}
    for member in members(path):
        places[member.name] = (member.offset_data, member.size)
        if len(places) > _MOST_MEMBERS:
            raise CoderError(f"{path} has over {_MOST_MEMBERS:,} files")
    return places


def recorded_folders(manifest: Mapping[str, Any]) -> list[str]:
    """The folders that an index's manifest says its pictures were read from: the data's, and its image root.

    Args:
        manifest: of the index; somebody else may have written it.

    Returns:
        Folders that exist, but for the root of the file system. A table's or a shard's is the folder that it lies in.

    Example:
        >>> recorded_folders({"plan": {"data": "/usr/{0..9}.tar", "image_root": "s3://bucket/pictures"}})
        ['/usr/']
    """
    plan, folders = manifest["plan"], []
    for value in (plan.get("data"), plan.get("image_root")):
        for part in value.split("::") if isinstance(value, str) else ():
            if not os.path.isabs(local_path(part)) or not is_local(part):
                continue
            folder = re.split(r"[*?{\[]", local_path(part), maxsplit=1)[0]
            folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
            if os.path.isdir(folder) and os.path.realpath(folder) != os.sep:
                folders.append(folder)
    return folders
