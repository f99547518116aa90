"""Whether an image has one id, and whether pictures occur twice: within a split, or in both.

Two pictures are the same if their sizes and RGB values are. They are copies (another JPEG quality, size or brightness, a few
pixels cropped) if their difference hashes differ in few bits and small versions of them correlate. Of Flickr8k's 1,000
validation pictures this detects 999 at JPEG quality 30, 998 at less than half the size, and 913 with 3 of 224 pixels cropped on
each side; among its 6,000 training pictures it reports a single pair, which is identical. Mirrored pictures and other parts
of one photograph are not detected.

N pictures, M others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from coder_plugin.data.item import Item
from coder_plugin.doctor.findings import Finding, listed, many, note, ok, problem, share, some, warning
from coder_plugin.doctor.images import Look, look_at
from coder_plugin.doctor.split import Split

_COMPARED = 64  # ids whose pictures are compared
BITS = 8  # of 64, in which the hashes of copies may differ
CORRELATION = 0.98
_AT_ONCE = 256
_COLUMNS = 4096  # products of so many at a time: 4 MiB
_PLAIN = 2.0  # of 255: standard deviation

Pair = tuple[Look, Look]


def textured(look: Look) -> bool:
    """Whether a picture has enough contrast for its hash to mean something. Blank pictures have a finding of their own."""
    return float(look.small.std((0, 1)).max()) > _PLAIN


def copies(ours: Sequence[Look], theirs: Sequence[Look] | None = None) -> tuple[list[Pair], list[Pair]]:
    """Pairs with the same pixels, and pairs of copies: between two lists, or within one between different keys.

    Each picture is paired only with the first that it equals or copies, so N similar pictures give N - 1 pairs.
    """
    first = _first(ours)
    if theirs is None:
        repeated = ((first[look.pixels], look) for look in ours)
        same = [(look, other) for look, other in repeated if look.key != other.key]
    else:
        same = [(first[look.pixels], look) for look in theirs if look.pixels in first]
    firsts = list(first.values())
    if theirs is None:
        return same, list(_close(firsts, firsts, lambda look: look.key, within=True))
    return same, list(_close(firsts, list(_first(theirs).values()), lambda look: look.pixels, within=False))


def _first(looks: Sequence[Look]) -> dict[bytes, Look]:
    """The first of the pictures with the same pixels, by their digest."""
    first: dict[bytes, Look] = {}
    for look in looks:
        first.setdefault(look.pixels, look)
    return first


def alike(ours: Look, theirs: Look) -> bool:
    """Whether two pictures are copies."""
    return any(_close([ours], [theirs], id, within=False))


def _close(
    ours: Sequence[Look], theirs: Sequence[Look], differ: Callable[[Look], object], *, within: bool
) -> Iterator[Pair]:
    """Each of ``theirs`` that is a copy, with the first of ``ours`` that it copies.

    Pictures with equal ``differ(look)`` are not compared; ``within`` one list a picture is compared with those before it.
    """
    from coder_plugin.search.vectors import import_faiss

    if not ours or not theirs:
        return
    index = import_faiss().IndexBinaryFlat(64)
    index.add(_hashes(ours))
    hashes, small, other_small = _hashes(theirs), _small(ours), _small(theirs)
    numbers: dict[object, int] = {}
    marks, other_marks = (
        np.array([numbers.setdefault(differ(look), len(numbers)) for look in looks]) for looks in (ours, theirs)
    )
    for start in range(0, len(theirs), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(theirs)))
        limits, _, matches = index.range_search(hashes[rows], BITS + 1)
        bounds = limits.astype(np.int64)
        places = np.repeat(rows, bounds[1:] - bounds[:-1])
        fit = (marks[matches] != other_marks[places]) & (matches < places if within else True)
        places, matches = places[fit], matches[fit]
        hit = np.zeros(len(ours), bool)
        hit[matches] = True
        columns = np.flatnonzero(hit)
        hashed = np.zeros((len(rows), len(columns)), bool)
        hashed[places - start, (np.cumsum(hit) - 1)[matches]] = True
        for at in range(0, len(columns), _COLUMNS):  # in order, so that the first match counts
            part = slice(at, at + _COLUMNS)
            left = np.flatnonzero(hashed[:, part].any(1))
            if not len(left):
                continue
            near = hashed[left, part] & (other_small[rows[left]] @ small[columns[part]].T >= CORRELATION)
            for row, column in zip(left[near.any(1)], near[near.any(1)].argmax(1), strict=True):
                yield ours[columns[at + column]], theirs[rows[row]]
                hashed[row] = False


def _hashes(looks: Sequence[Look]) -> np.ndarray:
    """[N, 8] uint8."""
    return np.array([look.dhash for look in looks], np.uint64).view(np.uint8).reshape(len(looks), 8)


def _small(looks: Sequence[Look]) -> np.ndarray:
    """Small versions [N, 768] float32 of mean 0 per channel and norm 1: their product is a correlation."""
    rows = np.stack([look.small for look in looks]).astype(np.float32)
    rows -= rows.mean((1, 2), keepdims=True)
    rows = rows.reshape(len(looks), -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def check_ids(split: Split) -> Iterator[Finding]:
    """Ids that several samples of a split share, with the same picture or different ones."""
    name = split.name
    owners: dict[str, list[Item]] = {}
    for item in split.items:
        owners.setdefault(item.key, []).append(item)
    repeated = {key: items for key, items in owners.items() if len(items) > 1}
    if not repeated:
        yield ok(f"{name}.ids", f"{len(owners):,} ids, each with one image, such as {split.items[0].key!r}")
        return
    looked = [item for items in list(repeated.values())[:_COMPARED] for item in items[:4]]
    pictures: dict[str, set[object]] = {}
    for item, look in zip(looked, look_at(looked, f"{name}: ids", threads=split.threads), strict=True):
        content = (look.error or look.pixels) if isinstance(look, Look) else look.features.tobytes()
        pictures.setdefault(item.key, set()).add(content)
    differing = [key for key, contents in pictures.items() if len(contents) > 1]
    text = f"{share(len(repeated), len(owners))} ids occur in several samples"
    if differing:
        do = (
            "give each image its own id ('image_id' in json, or unique names): captions with one id are never negatives"
        )
        yield problem(f"{name}.ids.clash", f"{text}, with different pictures: {some(differing)}", do)
    else:
        do = (
            "put all captions of an image into one sample (the list 'captions' in json): recall counts each as an image"
        )
        yield warning(f"{name}.ids.repeated", f"{text} with the same picture: {some(repeated)}", do)


def check_ids_across(train: Split, val: Split) -> Iterator[Finding]:
    """Ids that both splits have. With the same picture they are a leak; with different ones they are only confusing."""
    in_train = {item.key: item for item in train.items}
    both = [(in_train[item.key], item) for item in val.items if item.key in in_train]
    if not both:
        yield ok("leak.ids", "no id occurs in both splits")
        return
    compared = both[:: -(-len(both) // _COMPARED)]
    looks = look_at([item for pair in compared for item in pair], "ids of both splits", threads=train.threads)
    same = []
    for (item, _), ours, theirs in zip(compared, looks[::2], looks[1::2], strict=True):
        if isinstance(ours, Look) and isinstance(theirs, Look):
            one_picture = not ours.error and not theirs.error and (ours.pixels == theirs.pixels or alike(ours, theirs))
        else:
            one_picture = type(ours) is type(theirs) and np.array_equal(ours.features, theirs.features)  # type: ignore[union-attr]
        if one_picture:
            same.append(item.key)
    text = f"{share(len(both), len(val.items))} validation images share an id with a training image"
    if same:
        text = f"{text}; of {len(compared)} compared, {len(same)} are the same picture: {some(same)}"
        yield problem("leak.ids", text, "check whether both splits name one file; leave these images out of training")
    else:
        do = "harmless in training; use distinct ids before joining the splits with other files by id"
        yield note("leak.ids.shared", f"{text}, with different pictures: {some(item.key for item, _ in both)}", do)


def check_copies(looks: Mapping[str, Sequence[Look]], totals: Mapping[str, int]) -> Iterator[Finding]:
    """Pictures that occur in both splits or twice in one, among those that were decoded."""
    read = {name: [look for look in each if not look.error] for name, each in looks.items()}
    good = {name: [look for look in each if textured(look)] for name, each in read.items()}
    for name, each in good.items():
        same, near = copies(each)
        if same:
            do = "keep one of each, with the captions of both: as each other's negatives they are wrong training signal"
            yield warning(
                f"{name}.pictures.twice",
                f"{many(len(same), 'pair')} of images with the same picture: {_named(same)}",
                do,
            )
        if near:
            do = "look at them: leave out copies; different pictures of one series may stay"
            yield note(
                f"{name}.pictures.alike", f"{many(len(near), 'pair')} of images that look the same: {_named(near)}", do
            )
    if not (read.get("train") and read.get("val")):
        return
    same, near = copies(good["train"], good["val"])
    if same:
        text = f"{_of_val(same)} also in training, with the same pixels: {_named(same)}"
        yield problem("leak.pictures", text, "leave them out of training: recall on them means nothing")
    if near:
        do = "look at them: leave copies out of training; pictures of one series make recall look too good, too"
        yield warning("leak.pictures.alike", f"{_of_val(near)} almost the same as one in training: {_named(near)}", do)
    seen = " and ".join(f"{len(read[name]):,} of {totals[name]:,} {name}" for name in ("train", "val"))
    if not same and not near:
        yield ok("leak.pictures", f"no picture occurs in both splits; compared: {seen} pictures")
    if any(len(looks[name]) < totals[name] for name in ("train", "val")):
        yield note(
            "leak.pictures.partial", f"compared: {seen} pictures", "--all compares all, --samples N more of them"
        )


def _of_val(pairs: Sequence[Pair]) -> str:
    return many(len({theirs.key for _, theirs in pairs}), "validation picture")


def _named(pairs: Sequence[Pair]) -> str:
    return listed(f"{ours.key!r} = {theirs.key!r}" for ours, theirs in pairs)
