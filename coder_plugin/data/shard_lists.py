"""Which shards a pattern or a folder names, and how many samples the files beside them say that they have."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import webdataset as wds

from coder_plugin.data.json_text import parse_json
from coder_plugin.data.remote import is_command, read_small
from coder_plugin.data.tars import local_path
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular, read_json
from coder_plugin.locations import is_local

NSHARDS = "nshards.txt"
SIZES = "sizes.json"
_LARGEST_SIZES = 1 << 26


def shard_labels(shards: Sequence[str]) -> dict[str, str]:
    """The names of shards in their images' keys, which survive moving the data: the stem or, where stems are not unique, the
    path below the folder that all are in.

    Example:
        >>> shard_labels(["data/a/0.tar", "data/b/0.tar"])
        {'data/a/0.tar': 'a/0', 'data/b/0.tar': 'b/0'}
    """
    stems = {shard: os.path.basename(shard).split(".tar")[0] for shard in shards}
    if len(set(stems.values())) == len(stems):
        return stems
    common = len(os.path.commonprefix([shard.split("/")[:-1] for shard in shards]))
    return {shard: "/".join(shard.split("/")[common:]).split(".tar")[0] for shard in shards}


def expand(spec: str) -> list[str]:
    """A shard pattern as a list. Local files must exist, so that missing ones are reported before training."""
    if not spec.strip() or not all(part.strip() for part in spec.split("::")):
        raise CoderError(f"shards: empty pattern {spec!r}; give tar files such as 'train-{{000000..000005}}.tar'")
    try:
        patterns = wds.SimpleShardList(spec).urls
    except (AssertionError, ValueError, IndexError) as exc:  # an unset ${variable}, unbalanced braces
        raise CoderError(f"shards: cannot expand {spec!r}: {exc}") from exc
    shards: list[str] = []
    for pattern in patterns:
        if not is_local(pattern) or os.path.exists(path := local_path(pattern)):
            shards.append(pattern)
        elif matching := sorted(glob.glob(path)):
            shards += [each if is_local(each) else os.path.join(".", each) for each in matching]  # a file named "pipe:…"
        elif glob.has_magic(path):
            raise CoderError(f"shards: no file matches {pattern!r}")
        else:
            raise CoderError(f"shards: missing shard {pattern!r}" + (f" (of {spec!r})" if pattern != spec else ""))
    return shards


def benchmark_shards(folder: str, split: str) -> list[str]:
    """CLIP_benchmark's shards of a split: ``0.tar``, ``1.tar`` …, their number in ``nshards.txt``."""
    notes = [os.path.join(folder, *part, NSHARDS) for part in ([split], [])]
    note = next(filter(os.path.exists, notes), None)
    if note is None:
        splits = sorted(os.path.basename(os.path.dirname(each)) for each in glob.glob(f"{glob.escape(folder)}/*/{NSHARDS}"))
        hint = f"splits present: {', '.join(splits)}" if splits else f"give its shards, such as '{folder}/*.tar'"
        raise CoderError(f"{folder}: no {NSHARDS} for split {split!r}; {hint}")
    try:
        with open_regular(note, encoding="utf-8") as file:
            count = int(file.read(20))
    except (OSError, ValueError) as exc:
        raise CoderError(f"{note}: cannot be read as a number: {exc}") from exc
    if count < 1:
        raise CoderError(f"{note}: says {count} shards; it must be > 0")
    present = sum(name.endswith(".tar") for name in os.listdir(os.path.dirname(note)))
    shards = [beside(note, f"{number}.tar") for number in range(min(count, present + 1))]
    missing = [shard for shard in shards if not os.path.exists(shard)]
    if missing:
        lacking = count - len(shards) + len(missing)
        raise CoderError(f"{note}: lists {count} shards, of which {lacking} are missing, the first: {missing[0]}")
    return shards


def beside(shard: str, name: str) -> str:
    return os.path.join(os.path.dirname(local_path(shard)), name)


def recorded_size(shards: Sequence[str]) -> int | None:
    """The number of samples from open_clip's ``sizes.json`` beside the shards, which may be remote; None where none says it."""
    folders: dict[str, list[str]] = {}
    for shard in map(local_path, shards):
        folders.setdefault(os.path.dirname(shard), []).append(os.path.basename(shard))
    total = 0
    for folder, names in folders.items():
        sizes = _sizes(folder)
        counts: list[Any] = [sizes.get(name) for name in names] if isinstance(sizes, dict) else [None]
        if not all(type(count) is int and count >= 0 for count in counts):
            return None
        total += sum(counts)
    return total


def _sizes(folder: str) -> Any:
    """What ``sizes.json`` of a folder holds; None where there is none."""
    path = os.path.join(folder, SIZES)
    if is_command(folder) or is_local(folder) and not os.path.exists(path):
        return None
    if is_local(folder):
        if not isinstance(sizes := read_json(path), dict):
            raise CoderError(f"{path}: expected an object, as open_clip writes it, got {type(sizes).__name__}")
        return sizes
    try:
        return parse_json(read_small(path, _LARGEST_SIZES) or b"")
    except ValueError:  # none, or a page that says so
        return None
