"""Whether images are what their ids say: one id for one image, and no image under two ids or in two splits.

What counts as the same picture, and as a copy: :mod:`coder_plugin.doctor.copies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from coder_plugin.data.item import Item
from coder_plugin.doctor.copies import Pair, alike, copies, textured
from coder_plugin.doctor.findings import Finding, listed, many, note, ok, problem, share, some, warning
from coder_plugin.doctor.pictures import Look, look_at
from coder_plugin.doctor.walk import Walked

_COMPARED = 64  # ids whose pictures are compared


def check_ids(split: Walked) -> Iterator[Finding]:
    """One id in several samples of a split: of one picture, or of several."""
    name = split.name
    owners: dict[str, list[Item]] = {}
    for item in split.items:
        owners.setdefault(item.key, []).append(item)
    repeated = {key: items for key, items in owners.items() if len(items) > 1}
    if not repeated:
        yield ok(f"{name}.ids", f"{len(owners):,} ids, each of one image, such as {split.items[0].key!r}")
        return
    looked = [item for items in list(repeated.values())[:_COMPARED] for item in items[:4]]
    pictures: dict[str, set[object]] = {}
    for item, look in zip(looked, look_at(looked, f"{name}: ids", threads=split.threads), strict=True):
        told = (look.error or look.pixels) if isinstance(look, Look) else look.features.tobytes()
        pictures.setdefault(item.key, set()).add(told)
    differing = [key for key, found in pictures.items() if len(found) > 1]
    text = f"{share(len(repeated), len(owners))} ids are of several samples"
    if differing:
        do = "give each an id of its own ('image_id' in json, or unique names): captions of one id are never negatives"
        yield problem(f"{name}.ids.clash", f"{text}, and of different pictures: {some(differing)}", do)
    else:
        do = "put all captions of an image into one sample (the list 'captions' in json): recall counts each as an image"
        yield warning(f"{name}.ids.repeated", f"{text} with the same picture: {some(repeated)}", do)


def check_ids_across(train: Walked, val: Walked) -> Iterator[Finding]:
    """Ids that both splits have: of the same pictures they are a leak, of others they are only confusing."""
    known = {item.key: item for item in train.items}
    both = [(known[item.key], item) for item in val.items if item.key in known]
    if not both:
        yield ok("leak.ids", "no id is in both splits")
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
    text = f"{share(len(both), len(val.items))} validation images have an id that a training image has too"
    if same:
        text = f"{text}; of {len(compared)} compared, {len(same)} are the same picture: {some(same)}"
        yield problem("leak.ids", text, "is one file named for both splits? leave these images out of training")
    else:
        do = "harmless in training; give splits ids of their own before joining them with other files by id"
        yield note("leak.ids.shared", f"{text}, of other pictures: {some(item.key for item, _ in both)}", do)


def check_copies(looks: Mapping[str, Sequence[Look]], totals: Mapping[str, int]) -> Iterator[Finding]:
    """Pictures that are in both splits, and that a split has twice, among those that were looked at."""
    read = {name: [look for look in found if not look.error] for name, found in looks.items()}
    good = {name: [look for look in found if textured(look)] for name, found in read.items()}
    for name, found in good.items():
        same, near = copies(found)
        if same:
            do = "keep one of each and put their captions together: as each other's negatives they teach the wrong thing"
            yield warning(
                f"{name}.pictures.twice",
                f"{many(len(same), 'pair')} of images with one and the same picture: {_named(same)}",
                do,
            )
        if near:
            do = "look at them; copies are better left out, pictures of one series may stay"
            yield note(
                f"{name}.pictures.alike", f"{many(len(near), 'pair')} of images that look the same: {_named(near)}", do
            )
    if not (read.get("train") and read.get("val")):
        return
    same, near = copies(good["train"], good["val"])
    if same:
        text = f"{_of_val(same)} also in training, value for value: {_named(same)}"
        yield problem("leak.pictures", text, "leave them out of training: recall on them says nothing")
    if near:
        do = "look at them: copies must be left out of training; recall on pictures of one series is flattered, too"
        yield warning("leak.pictures.alike", f"{_of_val(near)} much like one in training: {_named(near)}", do)
    seen = " and ".join(f"{len(read[name]):,} of {totals[name]:,} {name}" for name in ("train", "val"))
    if not same and not near:
        yield ok("leak.pictures", f"no picture is in both splits, of {seen} pictures compared")
    if any(len(looks[name]) < totals[name] for name in ("train", "val")):
        yield note("leak.pictures.partial", f"compared: {seen} pictures", "--all compares all; --samples N more of them")


def _of_val(pairs: Sequence[Pair]) -> str:
    return many(len({theirs.key for _, theirs in pairs}), "validation picture")


def _named(pairs: Sequence[Pair]) -> str:
    return listed(f"{ours.key!r} = {theirs.key!r}" for ours, theirs in pairs)
