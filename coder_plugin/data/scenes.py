"""The built-in data set: small generated pictures with five captions each; nothing is downloaded.

A scene is symbolic: a background and one to four things on a 3 x 3 grid. Picture and captions are both generated from it, so
captions are always correct. They range from a rich one to a poor one that many pictures share, since the losses here are about
this asymmetry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count as naturals
from itertools import islice
from random import Random
from typing import TypeVar

from PIL import Image, ImageChops, ImageDraw

from coder_plugin.data.item import Item, stable_hash
from coder_plugin.errors import CoderError

DEFAULT_COUNTS = {"train": 6000, "val": 500}
COLOURS = {
    "red": (222, 30, 38),
    "orange": (255, 140, 0),
    "yellow": (240, 205, 0),
    "green": (30, 160, 60),
    "blue": (45, 90, 250),
    "purple": (145, 40, 180),
    "pink": (255, 130, 190),
    "brown": (125, 70, 25),
}
BACKGROUNDS = {"white": (255, 255, 255), "gray": (150, 150, 150), "black": (0, 0, 0), "beige": (232, 214, 176)}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
LOOKS = ("solid", "striped", "dotted", "hollow")
RADII = {"small": 6.2, "large": 9.8}  # in 64ths of the picture; a grid cell is 21.3 wide, so things never overlap
SYNONYMS = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "purple": ("purple", "violet"),
    "gray": ("gray", "grey"),
    "large": ("large", "big"),
    "small": ("small", "little", "tiny"),
    "solid": ("solid", "plain"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted"),
    "hollow": ("hollow", "empty"),
    "above": ("above", "over"),
    "below": ("below", "under"),
    "background": ("background", "backdrop"),
    "shape": ("shape", "thing", "object"),
}
NUMBERS = ("no", "one", "two", "three", "four")
PLACES = (
    ("in the top left corner", "at the top", "in the top right corner"),
    ("on the left", "in the middle", "on the right"),
    ("in the bottom left corner", "at the bottom", "in the bottom right corner"),
)
#: The kinds of a scene's five captions, in their order.
KINDS = ("relations", "listing", "pair", "tally", "glimpse")
_VAL_SHARE = 8  # one scene in eight belongs to val, for every seed
_SUPERSAMPLING = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class Thing:
    """One object and the grid cell it stands in (column 0 is left, row 0 is at the top)."""

    shape: str
    colour: str
    look: str
    size: str
    column: int
    row: int


@dataclass(frozen=True)
class Scene:
    """The content of a picture. No two things share both colour and shape, so "the red star" is unique; things are in
    reading order, so equal pictures are equal scenes."""

    background: str
    things: tuple[Thing, ...]

    @property
    def description(self) -> str:
        """The scene in one canonical line, from which its split, wording and small shifts are hashed."""
        rows = (f"{t.size} {t.look} {t.colour} {t.shape} @{t.column},{t.row}" for t in self.things)
        return f"{self.background}: " + "; ".join(rows)


def make_scene(split: str, index: int, seed: int = 0) -> Scene:
    """Scene number ``index`` of a split: a pure function of its arguments; every index gives a different scene.

    Example:
        >>> make_scene("train", 0) == make_scene("train", 0) != make_scene("train", 1)
        True
    """
    if index < 0:
        raise CoderError(f"scenes: index is {index}; it must be 0 or more")
    # Uniqueness needs all scenes before this one; powers of two let neighbouring calls share a cached result.
    return _first_scenes(split, max(512, 1 << index.bit_length()), seed)[index]


def open_scenes(split: str = "train", *, count: int | None = None, size: int = 64, seed: int = 0) -> list[Item]:
    """The reader ``scenes``. Pictures are drawn when they are loaded.

    A scene belongs to the same split for every ``seed``, so a validation picture never occurs in a training set.

    Args:
        split: ``train`` or ``val``.
        count: number of pictures (default: 6,000 and 500). A smaller count gives a prefix of a larger one.
        size: width and height in pixels, from 16.

    Raises:
        CoderError: an unknown split, or a value out of range.

    Example:
        >>> item = open_scenes("val", count=2)[0]
        >>> item.key, len(item.captions), item.load().size
        ('scenes/val/000000', 5, (64, 64))
    """
    count = DEFAULT_COUNTS.get(split, 1) if count is None else count
    if count < 1:
        raise CoderError(f"scenes: count is {count}; it must be 1 or more")
    if size < 16:
        raise CoderError(f"scenes: size is {size}; it must be 16 pixels or more")
    return list(_items(split, count, size, seed))


@lru_cache(maxsize=8)  # a data set is opened several times in a run's life
def _items(split: str, count: int, size: int, seed: int) -> tuple[Item, ...]:
    scenes = enumerate(_first_scenes(split, count, seed))
    return tuple(Item(f"scenes/{split}/{index:06d}", captions(s), partial(draw, s, size)) for index, s in scenes)


@lru_cache(maxsize=16)
def _first_scenes(split: str, number: int, seed: int) -> tuple[Scene, ...]:
    if split not in DEFAULT_COUNTS:
        raise CoderError(f"scenes: unknown split {split!r}; allowed: {', '.join(DEFAULT_COUNTS)}")
    return tuple(islice(_distinct_scenes(split, seed), number))


def _distinct_scenes(split: str, seed: int) -> Iterator[Scene]:
    """Draw scenes, and yield new ones that hash to this split."""
    seen: set[Scene] = set()
    for attempt in naturals():
        scene = _draw_scene(Random(stable_hash("scene", split, seed, attempt)))
        is_val = stable_hash("split", scene.description) % _VAL_SHARE == 0
        if is_val == (split == "val") and scene not in seen:
            seen.add(scene)
            yield scene


def _draw_scene(rng: Random) -> Scene:
    background = _pick(rng, tuple(BACKGROUNDS))
    number = _pick(rng, (1, 2, 2, 2, 3, 3, 3, 4, 4, 4))
    cells = [(row, column) for row in range(3) for column in range(3)]
    things: list[Thing] = []
    while len(things) < number:
        # Sometimes repeat a shape or a colour, so that there are things to count and to distinguish.
        repeat_shape, repeat_colour = (bool(things) and rng.random() < 0.25 for _ in range(2))
        shape = _pick(rng, things).shape if repeat_shape else _pick(rng, SHAPES)
        colour = _pick(rng, things).colour if repeat_colour else _pick(rng, tuple(COLOURS))
        if any((t.shape, t.colour) == (shape, colour) for t in things):
            continue
        row, column = cells.pop(int(rng.random() * len(cells)))
        things.append(Thing(shape, colour, _pick(rng, LOOKS), _pick(rng, tuple(RADII)), column, row))
    return Scene(background, tuple(sorted(things, key=lambda t: (t.row, t.column))))


def _pick(rng: Random, options: Sequence[_T]) -> _T:
    """Choose by ``random()``, the only method whose sequence Python guarantees not to change."""
    return options[int(rng.random() * len(options))]


def captions(scene: Scene) -> tuple[str, ...]:
    """Five captions, from rich to poor: all things with their relations, all things as a list, two things, numbers of
    colours or shapes, and one thing (:data:`KINDS`)."""
    rng = Random(stable_hash("words", scene.description))
    things = list(scene.things)
    things = [things.pop(int(rng.random() * len(things))) for _ in scene.things]
    return (
        _relations(rng, scene, things),
        _listing(rng, scene, things[::-1]),
        _pair(rng, things),
        _tally(rng, scene, things),
        _glimpse(rng, things),
    )


def _relations(rng: Random, scene: Scene, things: list[Thing]) -> str:
    first, *others = (_name(rng, thing, "size", "look", "colour") for thing in things)
    if not others:
        return f"{first} is {_place(things[0])} {_on_background(rng, scene)}"
    clauses = (f"{_relation(rng, things[0], thing)} {other}" for thing, other in zip(things[1:], others, strict=True))
    return _pick(rng, ("{} is {}", "{} {}", "there is {} {}")).format(first, " and ".join(clauses))


def _listing(rng: Random, scene: Scene, things: list[Thing]) -> str:
    names = " and ".join(_name(rng, thing, "size", "colour", "look") for thing in things)
    on = _on_background(rng, scene)
    return _pick(rng, (f"{on} there is {names}", f"{names} {on}", f"a picture of {names} {on}", f"{on} {names}"))


def _pair(rng: Random, things: list[Thing]) -> str:
    """Two things with their relation or positions; a single thing with its position."""
    article = _pick(rng, ("a", "the"))
    first, *others = (_name(rng, thing, "colour", article=article) for thing in things[:2])
    places = [_place(thing) for thing in things[:2]]
    if not others:
        return _pick(rng, ("{1} is {0} alone", "{0} alone {1}")).format(first, places[0])
    if rng.random() < 0.3:
        return f"{first} {places[0]} and {others[0]} {places[1]}"
    relation = _relation(rng, things[0], things[1])
    relation = f"to the {relation}" if relation.endswith(" of") else relation
    return _pick(rng, ("{0} {1} {2}", "{0} is {1} {2}", "{1} {2} is {0}")).format(first, relation, others[0])


def _tally(rng: Random, scene: Scene, things: list[Thing]) -> str:
    """The number of things of every shape or every colour."""
    noun = _word(rng, "shape")
    by_shape = rng.random() < 0.5
    as_sentence = len(things) > 1 and rng.random() < 0.5
    parts = []
    for value, number in Counter(t.shape if by_shape else t.colour for t in things).items():
        what = _word(rng, value) if by_shape else f"{_word(rng, value)} {'one' if as_sentence else noun}"
        parts.append(f"{NUMBERS[number]} {_plural(what) if number > 1 else what}")
    counts, on = " and ".join(parts), _on_background(rng, scene)
    if as_sentence:
        return f"the {NUMBERS[len(things)]} {noun}s {on} are {counts}"
    return _pick(rng, ("only {0} {1}", "{1} only {0}")).format(counts, on)


def _glimpse(rng: Random, things: list[Thing]) -> str:
    facts = _pick(rng, (("colour",), ("size", "colour"), ("look", "colour")))
    return _pick(rng, ("{}", "there is {}", "a picture with {}")).format(_name(rng, _pick(rng, things), *facts))


def _name(rng: Random, thing: Thing, *facts: str, article: str = "a") -> str:
    words = " ".join(_word(rng, getattr(thing, fact)) for fact in (*facts, "shape"))
    return _a(words) if article == "a" else f"{article} {words}"


def _relation(rng: Random, thing: Thing, other: Thing) -> str:
    """The position of ``thing`` relative to ``other``, along the axis with the greater distance."""
    across, down = thing.column - other.column, thing.row - other.row
    if abs(across) == abs(down):
        across, down = _pick(rng, ((across, 0), (0, down)))
    if abs(across) > abs(down):
        return "left of" if across < 0 else "right of"
    return _word(rng, "above" if down < 0 else "below")


def _place(thing: Thing) -> str:
    return PLACES[thing.row][thing.column]


def _on_background(rng: Random, scene: Scene) -> str:
    return f"on {_a(_word(rng, scene.background))} {_word(rng, 'background')}"


def _word(rng: Random, word: str) -> str:
    """A word or one of its synonyms; mostly the word itself."""
    return word if rng.random() < 0.5 else _pick(rng, SYNONYMS.get(word, (word,)))


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _plural(word: str) -> str:
    return word + ("es" if word.endswith(("s", "x")) else "s")


def draw(scene: Scene, size: int = 64) -> Image.Image:
    """The picture of a scene, ``size`` pixels wide and high, pasted from cached anti-aliased shapes."""
    picture = Image.new("RGB", (size, size), BACKGROUNDS[scene.background])
    for thing in scene.things:
        x, y = centre(scene, thing, size)
        stamp = _stamp(thing.shape, thing.look, RADII[thing.size] * size / 64)
        picture.paste(COLOURS[thing.colour], (x - stamp.width // 2, y - stamp.height // 2), stamp)
    return picture


def centre(scene: Scene, thing: Thing, size: int = 64) -> tuple[int, int]:
    """The centre pixel of a thing: the middle of its cell with a small shift inside the cell."""
    room = 64 / 6 - RADII[thing.size] - 0.5
    rng = Random(stable_hash("shift", scene.description, thing.column, thing.row))
    x, y = ((cell + 0.5) * 64 / 3 + room * (2 * rng.random() - 1) for cell in (thing.column, thing.row))
    return int(x * size / 64), int(y * size / 64)


@lru_cache(maxsize=256)
def _stamp(shape: str, look: str, radius: float) -> Image.Image:
    """The mask of a thing: 255 where it has its colour, 0 where the background is visible."""
    side = 2 * math.ceil(radius) + 1
    scale = radius * _SUPERSAMPLING
    middle = side * _SUPERSAMPLING / 2
    full = Image.new("L", (side * _SUPERSAMPLING,) * 2)
    corners = [(middle + scale * x, middle + scale * y) for x, y in _corners(shape)]
    ImageDraw.Draw(full).polygon(corners, fill=255)
    if look != "solid":
        inside = full.copy()
        rim = round(scale * (0.36 if look == "hollow" else 0.18))  # half of it is inside the outline
        ImageDraw.Draw(inside).line([*corners, *corners[:2]], fill=0, width=rim, joint="curve")
        full = ImageChops.subtract(full, ImageChops.multiply(inside, _holes(look, full.width, scale)))
    return full.resize((side, side), Image.Resampling.BOX)


def _holes(look: str, width: int, scale: float) -> Image.Image:
    """The parts of a shape's inside that a look removes; the exact centre of stripes and dots stays."""
    if look == "hollow":
        return Image.new("L", (width, width), 255)
    holes = Image.new("L", (width, width))
    pen, middle, step = ImageDraw.Draw(holes), width / 2, scale * 0.5
    for i in range(-3, 3):
        y = middle + (i + 0.5) * step
        if look == "striped":
            pen.rectangle((0, y - step * 0.25, width, y + step * 0.25), fill=255)
            continue
        for j in range(-3, 3):
            x, dot = middle + (j + 0.5) * step, step * 0.32
            pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=255)
    return holes


def _corners(shape: str) -> list[tuple[float, float]]:
    """The outline of a shape of radius one around the origin, y pointing down."""
    if shape == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if shape == "triangle":
        return [(0, -1), (1, 0.8), (-1, 0.8)]
    if shape == "cross":
        arm = [(-0.36, -1.0), (0.36, -1.0), (0.36, -0.36)]
        return [*arm, *((-y, x) for x, y in arm), *((-x, -y) for x, y in arm), *((y, -x) for x, y in arm)]
    if shape == "star":
        turns = [(i * math.pi / 5, 1.0 if i % 2 == 0 else 0.47) for i in range(10)]
        return [(r * math.sin(turn), -r * math.cos(turn)) for turn, r in turns]
    turns_of = [i * math.tau / 48 for i in range(48)]
    if shape == "heart":
        waves = ((t, 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) for t in turns_of)
        return [(math.sin(t) ** 3, -(wave + 2.5) / 15) for t, wave in waves]
    return [(0.95 * math.cos(t), 0.95 * math.sin(t)) for t in turns_of]
