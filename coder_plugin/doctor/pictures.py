"""Pictures, each decoded once: whether they can be, their size and mode, and what tells one from another."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import STORED
from coder_plugin.doctor.findings import Finding, bytes_text, listed, note, ok, one_line, problem, share, some, warning
from coder_plugin.doctor.machine import usable_cores

TINY = 32  # pixels: the shorter side
HUGE = 25_000_000  # pixels
SLIM = 3.0  # longer side over the shorter
_ORIENTATION = 0x0112  # of EXIF
_THUMBNAIL = 16


@dataclass(frozen=True, eq=False)
class Look:
    """What is kept of a picture.

    Args:
        error: why it cannot be read, and then nothing else is known. size: (width, height). mode: as its file has it.
        turned: its EXIF data ask for a rotation. pixels: digest of size and RGB values. dhash: uint64, whether brightness
            rises from each of 8 x 8 places to the next on its right. small: uint8 [16, 16, 3].
    """

    key: str
    error: str = ""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    turned: bool = False
    pixels: bytes = b""
    dhash: int = 0
    small: Any = None


def look_at(items: Sequence[Item], what: str, *, threads: bool = True) -> list[Look | Regions]:
    """Every item loaded; one that loads regions gives these. Decoding pictures leaves Python's lock alone, so ``threads``
    help; files of regions are not read by several."""
    from tqdm import tqdm

    with ThreadPoolExecutor(min(8, usable_cores()) if threads else 1) as pool:
        found = pool.map(_look, items)
        return list(tqdm(found, total=len(items), desc=what, unit="", unit_scale=True, disable=None, leave=False))


def _look(item: Item) -> Look | Regions:
    try:
        loaded = item.load()
    except (OSError, ValueError) as error:
        return Look(item.key, one_line(error) or type(error).__name__)
    if isinstance(loaded, Regions):
        return loaded
    digest = hashlib.blake2b(repr(loaded.size).encode() + loaded.tobytes(), digest_size=16)
    return Look(
        item.key,
        size=loaded.size,
        mode=loaded.info.get(STORED, loaded.mode),
        turned=loaded.getexif().get(_ORIENTATION, 1) not in (0, 1),
        pixels=digest.digest(),
        dhash=difference_hash(loaded),
        small=np.asarray(loaded.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)),
    )


def difference_hash(picture: Image.Image) -> int:
    """64 bits that survive another JPEG quality, size or brightness of a picture."""
    grey = np.asarray(picture.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    return int(np.packbits(grey[:, 1:] > grey[:, :-1]).view(">u8")[0])


def check_pictures(split: str, looks: Sequence[Look], total: int, config: Any, model: Any) -> Iterator[Finding]:
    """Findings on the pictures that were looked at, ``total`` being all; ``model``: :class:`~.recipe.Made`, or None."""
    name = f"{split}.pictures"
    good = [look for look in looks if not look.error]
    bad = [look for look in looks if look.error]
    if bad:
        expected = len(bad) * total / len(looks)
        level = problem if expected > config.data.max_bad_images or not good else warning
        first = f"{bad[0].key!r}: {bad[0].error}"
        more = f", so some {expected:,.0f} of {total:,}" if len(looks) < total else ""
        do = f"download them again, or leave them out; a run skips up to --max-bad-images {config.data.max_bad_images}"
        if not good:
            do = "are their folder and their names right? --image-root FOLDER (Karpathy, COCO), --csv-img-key (tables)"
        text = f"{share(len(bad), len(looks))} pictures cannot be read{more}: {first}{_others(bad)}"
        yield level(f"{name}.unreadable", text, do)
    if not good:
        return
    sides = sorted(min(look.size) for look in good), sorted(max(look.size) for look in good)
    middle = f"{sides[0][len(good) // 2]} and {sides[1][len(good) // 2]}"
    yield ok(
        name,
        f"{len(looks):,} of {total:,} pictures decoded: sides from {sides[0][0]} to {sides[1][-1]} pixels, the shorter and the "
        f"longer {middle} in the middle",
    )
    yield from _sizes(name, good, model)
    yield from _modes(name, good)


def _others(looks: Sequence[Look]) -> str:
    return f"; also {some(look.key for look in looks[1:])}" if len(looks) > 1 else ""


def _sizes(name: str, looks: Sequence[Look], model: Any) -> Iterator[Finding]:
    count = len(looks)
    tell = partial(_tell, looks)
    if tiny := [look for look in looks if min(look.size) < TINY]:
        do = "placeholders or thumbnails: look at them, and leave them out"
        yield warning(f"{name}.tiny", f"{tell(tiny)} have a side below {TINY} pixels: {_sized(tiny)}", do)
    if huge := [look for look in looks if look.size[0] * look.size[1] > HUGE]:
        biggest = max(look.size[0] * look.size[1] for look in huge)
        text = f"{tell(huge)} have over {HUGE // 10**6} million pixels, {bytes_text(3 * biggest)} decoded: {_sized(huge)}"
        yield warning(f"{name}.huge", text, "make them smaller beforehand: each loading process decodes them whole")
    if slim := [look for look in looks if max(look.size) > SLIM * min(look.size)]:
        do = "a centre crop sees little of them: --image-resize-mode longest or squash, or leave out banners"
        yield note(f"{name}.slim", f"{tell(slim)} are over {SLIM:g} times as long as wide: {_sized(slim)}", do)
    side = getattr(model, "image_size", None)
    if side is None:
        return
    small = [look for look in looks if TINY <= min(look.size) < side / 2]
    if len(small) > count / 10:
        text = f"{tell(small)} are less than half the model's {side} pixels: {_sized(small)}"
        yield warning(f"{name}.small", text, f"get larger ones, or a smaller model (--force-image-size {side // 2})")
    shorter = sorted(min(look.size) for look in looks)[count // 2]
    if shorter > 4 * side:
        text = f"the shorter side is {shorter} pixels in the middle, and the model reads {side}: decoding takes longest"
        yield note(f"{name}.large", text, f"store them with a shorter side of {int(1.15 * side)} or so")


def _modes(name: str, looks: Sequence[Look]) -> Iterator[Finding]:
    tell = partial(_tell, looks)
    modes = Counter(look.mode for look in looks)

    def of(*wanted: str) -> list[Look]:
        return [look for look in looks if look.mode in wanted]

    if found := of("CMYK", "YCCK"):
        do = "convert them to RGB with their colour profile: as they are read here, colours are off"
        yield warning(f"{name}.cmyk", f"{tell(found)} are CMYK, made for print: {some(look.key for look in found)}", do)
    if found := of("I", "F", *[mode for mode in modes if mode.startswith("I;16")]):
        do = "scale them to 8 bits: values above 255 are cut, and the picture is white"
        yield problem(
            f"{name}.deep", f"{tell(found)} have more than 8 bits a channel: {some(look.key for look in found)}", do
        )
    if found := of("RGBA", "LA", "PA", "RGBa", "La"):
        do = "fine for a few; else put them on a background: what is transparent shows whatever colour lies under it"
        yield note(
            f"{name}.alpha", f"{tell(found)} have transparency, which is dropped: {some(look.key for look in found)}", do
        )
    if found := [look for look in looks if look.turned]:
        do = "turn them upright (jpegtran, ImageMagick's -auto-orient): EXIF is not looked at in training, as in open_clip"
        yield warning(
            f"{name}.turned", f"{tell(found)} lie on their side, turned by EXIF: {some(look.key for look in found)}", do
        )
    if found := [look for look in looks if not np.ptp(look.small.reshape(-1, 3), axis=0).any()]:
        do = "placeholders, or failed downloads: look at them, and leave them out"
        yield warning(f"{name}.blank", f"{tell(found)} are of one colour: {some(look.key for look in found)}", do)


def _tell(looks: Sequence[Look], found: Sequence[Look]) -> str:
    return f"{share(len(found), len(looks))} pictures"


def _sized(looks: Sequence[Look]) -> str:
    return listed(f"{look.key!r} {look.size[0]} x {look.size[1]}" for look in looks)
