"""``coder-plugin duplicates``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.cli.encoding import IndexFlags
from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

#: Groups that the table shows, and images of each.
_GROUPS, _MEMBERS = 20, 10


@dataclass(frozen=True, kw_only=True)
class Command(IndexFlags):
    """The flags of ``coder-plugin duplicates``."""

    threshold: float = option(0.93, "the cosine from which on two images are near-duplicates; it depends on the model")
    json: bool = option(False, "print all groups as JSON instead of a table")
    html: str | None = option(None, "also write a page with pictures", metavar="FILE")
    keys_file: str | None = option(
        None, "also write the keys of all images but the first of each group, one a line, for coder-plugin index remove",
        metavar="FILE"
    )
    exact: bool | None = option(
        None, "compare all pairs, or only each image with the neighbours that the index finds [all pairs of a flat index, or "
        "where the vectors have different lengths]"
    )


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "duplicates",
        help="find near-duplicate images in an index",
        description="Group the images of an index whose vectors have a high cosine. Prints the largest groups, and writes all "
        "as JSON, as a page with pictures, or as a list of keys to remove.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.checks import check_folder, check_parent, writing

    check_folder(arguments.index, "an index", command="coder-plugin index")
    if not 0 < arguments.threshold <= 1:
        raise CoderError(f"--threshold is a cosine, above 0 and at most 1, got {arguments.threshold}")
    check_parent(arguments.html, "--html")
    check_parent(arguments.keys_file, "--keys-file")
    from coder_plugin.search.duplicates import find_duplicates
    from coder_plugin.search.index import Index

    index = Index(arguments.index, verify=arguments.verify, parameters=arguments.search_parameters, gpu=arguments.gpu)
    found = find_duplicates(index, threshold=arguments.threshold, exact=arguments.exact, gpu=arguments.gpu)
    summary = summarize(found, arguments.threshold)
    if arguments.html is not None:
        with writing(arguments.html, "--html"):
            _write_page(Path(arguments.html), index, found.groups, summary)
    if arguments.keys_file is not None:
        with writing(arguments.keys_file, "--keys-file"):
            _write_keys(Path(arguments.keys_file), index, found.groups)
    if arguments.json:
        echo(summary, file=sys.stderr)
        echo(json.dumps([_row(index, group) for group in found.groups], indent=2, ensure_ascii=False))
    else:
        echo("\n".join([summary, *_table(index, found.groups)]))
    return 0


def summarize(found: Any, threshold: float) -> str:
    """What was found, and how far it can be relied on, in a few sentences."""
    import numpy as np

    from coder_plugin.search.duplicates import MOST_NEIGHBOURS, ROUNDING

    copies = sum(len(group.rows) - 1 for group in found.groups)
    text = (
        f"{plural(len(found.groups), 'group')} of near-duplicates among {plural(found.images, 'image')}, "
        f"by a cosine of at least {threshold:g}; keeping the first of each would remove {plural(copies, 'image')}."
    )
    if loose := sum(int((group.similarities < np.float32(threshold - ROUNDING)).sum()) for group in found.groups):
        text += (
            f" Only a chain of others joins {loose:,} of these to the first, with a lower cosine: look at them (--html) before "
            "you remove any."
        )
    if not found.exact:
        text += " Each image was compared with the neighbours that the index finds."
    if not found.lossless:
        text += " The index stores compressed vectors: cosines are approximate, and different images may have equal vectors."
    if found.crowded:
        text += f" {plural(found.crowded, 'image')} had over {MOST_NEIGHBOURS:,} near-duplicates: remove some, run it again."
    return text


def _write_page(path: Path, index: Any, groups: Sequence[Any], summary: str) -> None:
    from coder_plugin.files import atomic_write
    from coder_plugin.search.page import duplicates_page

    with atomic_write(path, "w") as file:
        file.write(duplicates_page(index, groups, summary))
    echo(f"page: {path}", file=sys.stderr)


def _write_keys(path: Path, index: Any, groups: Sequence[Any]) -> None:
    """A key a line. Removing a key removes all images that have it, so those of images that are kept are left out."""
    from coder_plugin.files import atomic_write

    kept = {image.key for image in index.records.images([int(group.rows[0]) for group in groups])}
    left_out = 0
    with atomic_write(path, "w") as file:
        for group in groups:
            for image in index.records.images(group.rows[1:].tolist()):
                if image.key in kept or not image.key or {"\n", "\r"} & {*image.key}:
                    left_out += 1
                else:
                    file.write(f"{image.key}\n")
    echo(f"keys: {path}", file=sys.stderr)
    if left_out:
        echo(f"left out: {plural(left_out, 'key')} that an image which is kept has too, or with a line break", file=sys.stderr)


def _images(index: Any, group: Any, most: int | None = None) -> Iterator[tuple[Any, float]]:
    """The images of a group, or the first of them, with their cosines."""
    return zip(index.records.images(group.rows[:most].tolist()), group.similarities.tolist(), strict=False)


def _row(index: Any, group: Any) -> list[dict[str, Any]]:
    return [
        {
            "key": image.key, "image_id": image.image_id, "path": image.path, "member": image.member,
            "similarity": round(similarity, 6),
        }
        for image, similarity in _images(index, group)
    ]  # fmt: skip


def _table(index: Any, groups: Sequence[Any]) -> list[str]:
    """The lines of the largest groups."""
    lines = []
    for group in groups[:_GROUPS]:
        lines += ["", plural(len(group.rows), "image")]
        for image, similarity in _images(index, group, _MEMBERS):
            lines.append(f"  {similarity:.4f}  {' '.join(image.key[:500].split())}")
        if len(group.rows) > _MEMBERS:
            lines.append(f"  and {len(group.rows) - _MEMBERS:,} more")
    if len(groups) > _GROUPS:
        lines += ["", f"and {plural(len(groups) - _GROUPS, 'group')} more, which --json prints"]
    return lines
