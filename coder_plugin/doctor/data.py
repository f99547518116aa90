"""A split's images and captions: readable, ids that clash, repeated and truncated captions, pictures that occur twice, leaks.

Two pictures are the same if their sizes and RGB values are. They are copies (another JPEG quality, size or brightness) if their
difference hashes differ in few bits and small versions of them correlate. Mirrored pictures and other parts of one photograph
are not detected.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from coder_plugin.config import TrainConfig
from coder_plugin.data.bad_samples import allowed, describe
from coder_plugin.data.from_config import make_source
from coder_plugin.data.item import Item
from coder_plugin.doctor.findings import Finding, listed, note, ok, one_line, problem, share, some, warning
from coder_plugin.errors import CoderError
from coder_plugin.progress import track
from coder_plugin.terminal import plural

#: Most images of a split that are read without --all; of a split with more than SMALL, ``--samples`` pictures are decoded.
MOST, SMALL = 200_000, 10_000
_TEXTS = 20_000  # captions that are tokenised
_AMBIGUOUS = 0.01  # share of captions that several images share, or that are truncated, above which recall suffers
_BITS, _CORRELATION = 8, 0.98  # of copies: bits of 64 that may differ, and the least correlation
_REGIONS = 2**64 - 1  # in place of a difference hash
_ONES = np.array([number.bit_count() for number in range(256)], np.uint8)  # in each byte
_REMOTE = re.compile(r"(?:^|::)(?:pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


@dataclass
class Split:
    """The images of a split that can be read, why others cannot, and whether the reader stopped at an error."""

    name: str
    source: Any
    items: list[Item] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    broken: bool = False

    def sample(self, size: int, seed: int) -> list[Item]:
        """``size`` images spread over the data: one drawn from each of ``size`` consecutive parts of equal length."""
        if size >= len(self.items):
            return self.items
        rng = random.Random(seed)
        bounds = [number * len(self.items) // size for number in range(size + 1)]
        return [self.items[rng.randrange(low, high)] for low, high in zip(bounds, bounds[1:], strict=False)]


def read_split(splits: dict[str, Split], name: str, config: TrainConfig, most: int | None = MOST) -> Iterator[Finding]:
    """Read a split into ``splits``, up to the first error of its reader. Nothing remote is fetched, and no command run."""
    if _REMOTE.search(getattr(config.data, name) or ""):
        do = "nothing is downloaded: run doctor on the machine that has the data, or on a copy of some"
        yield note(f"{name}.remote", "not checked: the data are not on this machine", do)
        return
    split = splits[name] = Split(name, make_source(config.data, split=name))
    items, error = (item for _, item in split.source.items()), None
    try:
        for item in islice(items, most):
            if item.fault is None:
                split.items.append(item)
            else:
                split.refused.append(f"image {item.key!r}: {item.fault}")
        if next(items, None) is not None:
            text = f"only the first {len(split.items):,} images were read; findings on the split are about these"
            yield note(f"{name}.partial", text, "--all reads all")
    except CoderError as raised:
        error = raised
    split.broken = error is not None
    if error is not None:
        do = f"training would stop here; the {plural(len(split.items), 'image')} before it were checked"
        yield problem(f"{name}.broken", one_line(error), f"make or download the file again; {do}")
    rate = config.data.max_bad_samples
    if split.refused:
        level = problem if len(split.refused) > allowed(rate, len(split.items)) or not split.items else warning
        do = f"fix them or leave them out: they are skipped, and more than {rate:g} (--max-bad-samples) end a run"
        text = f"{plural(len(split.refused), 'sample')} refused: {listed(split.refused)}"
        yield level(f"{name}.samples.refused", text, do)


# -- captions and ids -----------------------------------------------------------------------------------------------------


def check_captions(split: Split) -> Iterator[Finding]:
    """How many there are, and captions that several images share."""
    name, items = split.name, split.items
    texts = sum(len(item.captions) for item in items)
    counts = sorted({len(item.captions) for item in items})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    yield ok(f"{name}.captions", f"{split.source.name}: {len(items):,} images, {texts:,} captions, {each} per image")
    if name == "val" and len(counts) > 1:
        do = "fine, but recall is not comparable with papers, which use five captions per image"
        yield note(f"{name}.captions.uneven", f"images have {each} captions", do)
    owners: dict[str, set[str]] = {}
    twice: list[str] = []
    for item in items:
        own = [_plain(caption) for caption in item.captions]
        if len(set(own)) < len(own):
            twice.append(item.key)
        for caption in own:
            owners.setdefault(caption, set()).add(item.key)
    if twice:
        do = "harmless, but --captions all trains on the same pair twice"
        yield note(f"{name}.captions.twice", f"{share(len(twice), len(items))} images have a caption twice: {some(twice)}", do)
    shared = {caption: keys for caption, keys in owners.items() if len(keys) > 1}
    if shared:
        caption, keys = max(shared.items(), key=lambda pair: (len(pair[1]), pair[0]))
        count = sum(map(len, shared.values()))
        text = f"{share(count, texts)} captions are shared word for word by other images; {one_line(repr(caption))} by "
        do = "as each other's negatives they are wrong training signal: leave them out, or keep batches small"
        if name == "val":
            do = "recall counts only one of these images as right: remove template captions, or expect less than 100 %"
        level = warning if count > _AMBIGUOUS * texts else note
        yield level(f"{name}.captions.shared", f"{text}{len(keys)}: {some(sorted(keys))}", do)


def _plain(caption: str) -> str:
    return " ".join(caption.lower().split())


def check_lengths(split: Split, tokenizer: Callable[[list[str]], Any]) -> Iterator[Finding]:
    """Captions that the tokenizer truncates: further words do not change their tokens."""
    texts = [caption for item in split.items for caption in item.captions]
    texts = texts[:: -(-len(texts) // _TEXTS)]
    width = tokenizer(["a"]).shape[1]
    long = [text for text in texts if len(text.encode("utf-8", "surrogatepass")) + 2 >= width]  # a token is a byte or more
    cut: list[str] = []
    for start in range(0, len(long), 512):
        part = long[start : start + 512]
        same = (tokenizer(part) == tokenizer([f"{text} dog dog dog" for text in part])).all(1).tolist()
        cut += [text for text, filled in zip(part, same, strict=True) if filled]
    if not cut:
        yield ok(f"{split.name}.captions.length", f"captions fit into {width} tokens ({len(texts):,} checked)")
        return
    text = f"{share(len(cut), len(texts))} captions fill all {width} tokens and are truncated, such as {one_line(repr(cut[0]))}"
    do = "shorten them, or use a longer context: --open-clip force_context_length=N (ours: --model-kwargs context_length=N)"
    yield (warning if len(cut) > _AMBIGUOUS * len(texts) else note)(f"{split.name}.captions.long", text, do)


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
    text = f"{share(len(repeated), len(owners))} ids occur in several samples"
    differing = [key for key, items in islice(repeated.items(), 64) if len({look_at(each).pixels for each in items[:4]}) > 1]
    if differing:
        do = "give each image its own id ('image_id' in json, or unique names): captions with one id are never negatives"
        yield problem(f"{name}.ids.clash", f"{text}, with different pictures: {some(differing)}", do)
    else:
        do = "put all captions of an image into one sample (the list 'captions' in json): recall counts each as an image"
        yield warning(f"{name}.ids.repeated", f"{text} with the same picture: {some(repeated)}", do)


def check_leaks(train: Split, val: Split) -> Iterator[Finding]:
    """Ids and captions that both splits have."""
    keys = {item.key: item for item in train.items}
    both = [item for item in val.items if item.key in keys]
    if both:
        same = [item.key for item in both[:64] if _same(look_at(item), look_at(keys[item.key]))]
        text = f"{share(len(both), len(val.items))} validation images share an id with a training image"
        if same:
            do = "check whether both splits name one file; leave these images out of training"
            yield problem("leak.ids", f"{text}, and {len(same)} of {len(both[:64])} the picture: {some(same)}", do)
        else:
            do = "harmless in training; use distinct ids before joining the splits with other files by id"
            yield note("leak.ids.shared", f"{text}, with different pictures: {some(item.key for item in both)}", do)
    else:
        yield ok("leak.ids", "no id occurs in both splits")
    captions = {frozenset(map(_plain, item.captions)): item.key for item in train.items}
    equal = [(captions[texts], item.key) for item in val.items if (texts := frozenset(map(_plain, item.captions))) in captions]
    if equal:
        pairs = listed(f"{ours!r} = {theirs!r}" for ours, theirs in equal)
        text = f"{share(len(equal), len(val.items))} validation images have exactly the captions of a training image: {pairs}"
        if Counter(len(item.captions) for item in val.items).most_common(1)[0][0] == 1:
            yield note("leak.captions", text, "with one caption per image this can be chance: look at them")
        else:
            yield warning("leak.captions", text, "they are most likely the same images: leave them out of training")


# -- pictures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Look:
    """A decoded picture: why it cannot be read (then the rest is empty), a digest of size and RGB values, a difference hash of
    64 bits, and a small version [768] of mean 0 per channel and norm 1 (0: of one colour, or regions)."""

    key: str
    error: str = ""
    pixels: bytes = b""
    bits: int = 0
    small: np.ndarray = field(default_factory=lambda: np.zeros(768, np.float32))


def look_at(item: Item) -> Look:
    """Load an item: its picture, or its regions, of which only the digest is taken."""
    try:
        loaded = item.load()
    except (OSError, ValueError) as error:
        return Look(item.key, describe(item.key, error)[2])
    if not isinstance(loaded, Image.Image):
        content = np.ascontiguousarray(loaded.features).tobytes()
        return Look(item.key, pixels=hashlib.blake2b(content).digest(), bits=_REGIONS)
    digest = hashlib.blake2b(repr(loaded.size).encode() + loaded.tobytes())
    grey = np.asarray(loaded.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    small = np.asarray(loaded.resize((16, 16), Image.Resampling.BOX), np.float32)
    small = (small - small.mean((0, 1))).reshape(-1)
    norm = float(np.linalg.norm(small))
    # less than 2 of 255 in standard deviation is no picture to compare
    small = small / norm if norm > 2 * small.size**0.5 else np.zeros(small.size, np.float32)
    return Look(item.key, "", digest.digest(), int(np.packbits(grey[:, 1:] > grey[:, :-1]).view(">u8")[0]), small)


def _same(ours: Look, theirs: Look) -> bool:
    return not ours.error and (ours.pixels == theirs.pixels or bool(_copies([ours], [theirs])))


def _copies(ours: Sequence[Look], theirs: Sequence[Look], *, within: bool = False) -> list[tuple[Look, Look]]:
    """Each of ``theirs`` with the first of ``ours`` that it is a copy of, so that N similar pictures give N - 1 pairs.

    Pictures with equal pixels are left out. ``within``: both are one list, in which a picture is compared with those before it
    of other keys.
    """
    if not ours:
        return []
    bits, small = np.array([look.bits for look in ours], np.uint64), np.stack([look.small for look in ours])
    pairs = []
    for place, look in enumerate(theirs):
        before = place if within else len(ours)
        differing = _ONES[(bits[:before] ^ np.uint64(look.bits)).view(np.uint8).reshape(-1, 8)].sum(1)
        for number in np.flatnonzero(differing <= _BITS).tolist():
            other = ours[number]
            differ = other.key != look.key if within else other.pixels != look.pixels
            if differ and float(small[number] @ look.small) >= _CORRELATION:
                pairs.append((other, look))
                break
    return pairs


def check_pictures(split: Split, config: TrainConfig, looks: dict[str, list[Look]], most: int | None) -> Iterator[Finding]:
    """Decode pictures, or load regions, into ``looks``: unreadable ones, blank ones, and pictures that occur twice."""
    name, total = f"{split.name}.pictures", len(split.items)
    items = split.items if most is None or total <= SMALL else split.sample(most, config.run.seed)
    with ThreadPoolExecutor(1 if config.data.regions else 8) as pool:
        read = list(track(pool.map(look_at, items), len(items), what=f"images of {split.name} loaded"))
    bad, good = [look for look in read if look.error], [look for look in read if not look.error]
    looks[split.name] = read
    if bad:
        expected, rate = len(bad) * total / len(read), config.data.max_bad_samples
        level = problem if expected > allowed(rate, total) or not good else warning
        more = f", so about {expected:,.0f} of {total:,}" if len(read) < total else ""
        do = f"download them again, or leave them out; a run skips up to --max-bad-samples {rate:g} of all"
        if not good:
            do = "check the folder (--image-root FOLDER) and, of a table, the column (--csv-img-key)"
        reasons = listed(f"{look.key!r}: {look.error}" for look in bad)
        yield level(f"{name}.unreadable", f"{share(len(bad), len(read))} pictures cannot be read{more}: {reasons}", do)
    if good:
        what = "regions read" if good[0].bits == _REGIONS else "pictures decoded"
        yield ok(name, f"{len(good):,} of {total:,} {what}")
    if blank := [look.key for look in good if look.bits != _REGIONS and not look.small.any()]:
        do = "check whether they are placeholders or failed downloads, and leave them out"
        yield warning(f"{name}.blank", f"{share(len(blank), len(good))} pictures are of one colour: {some(blank)}", do)
    good = [look for look in good if look.small.any()]
    first: dict[bytes, Look] = {}
    same = [(first.setdefault(look.pixels, look), look) for look in good]
    same = [(ours, theirs) for ours, theirs in same if ours.key != theirs.key]
    do = "keep one of each, with the captions of both: as each other's negatives they are wrong training signal"
    if same:
        yield warning(f"{name}.twice", f"{plural(len(same), 'pair')} of images with the same picture: {_named(same)}", do)
    distinct = list(first.values())
    if near := _copies(distinct, distinct, within=True):
        yield note(f"{name}.alike", f"{plural(len(near), 'pair')} of images that look the same: {_named(near)}", do)


def check_copies(looks: Mapping[str, Sequence[Look]], totals: Mapping[str, int]) -> Iterator[Finding]:
    """Pictures of the validation data that are in the training data."""
    train, val = ([look for look in looks[name] if look.small.any()] for name in ("train", "val"))
    if not train or not val:
        return
    first: dict[bytes, Look] = {}
    for look in train:
        first.setdefault(look.pixels, look)
    same = [(first[look.pixels], look) for look in val if look.pixels in first]
    near = _copies(list(first.values()), [look for look in val if look.pixels not in first])
    if same:
        text = f"{plural(len(same), 'validation picture')} also in training, with the same pixels: {_named(same)}"
        yield problem("leak.pictures", text, "leave them out of training: recall on them means nothing")
    if near:
        text = f"{plural(len(near), 'validation picture')} almost the same as one in training: {_named(near)}"
        do = "look at them: leave copies out of training; pictures of one series make recall look too good, too"
        yield warning("leak.pictures.alike", text, do)
    seen = " and ".join(f"{len(looks[name]):,} of {totals[name]:,} {name}" for name in ("train", "val"))
    if not same and not near:
        yield ok("leak.pictures", f"no picture occurs in both splits; compared: {seen} pictures")
    if any(len(looks[name]) < totals[name] for name in ("train", "val")):
        yield note("leak.pictures.partial", f"compared: {seen} pictures", "--all compares all, --samples N more of them")


def _named(pairs: Sequence[tuple[Look, Look]]) -> str:
    return listed(f"{ours.key!r} = {theirs.key!r}" for ours, theirs in pairs)
