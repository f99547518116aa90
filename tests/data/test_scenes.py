"""The captions are read back by a small parser of their own and checked against the symbols and against the pixels."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from coder_plugin.data import scenes
from coder_plugin.data.item import stable_hash
from coder_plugin.data.scenes import Scene, Thing, captions, centre, draw, make_scene, open_scenes
from coder_plugin.errors import CoderError

PLAIN = {other: word for word, others in scenes.SYNONYMS.items() for other in others}
PLURAL = {"boxes": "square", "crosses": "cross", "ones": "one"}
ADJECTIVES = "|".join((*scenes.COLOURS, *scenes.LOOKS, *scenes.RADII))
PLACES = {place: (x, y) for y, row in enumerate(scenes.PLACES) for x, place in enumerate(row)}
PIECE = re.compile(
    rf"(?P<place>{'|'.join(PLACES)})"
    rf"|(?:an?|the) (?P<name>(?:(?:{ADJECTIVES}) )+(?:{'|'.join(scenes.SHAPES)}))"
    r"|(?P<relation>left of|right of|above|below)"
)
TOLD = re.compile(rf"(one|two|three|four) ({'|'.join((*scenes.SHAPES, *scenes.COLOURS))})")
STEPS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}


def plain(caption: str) -> str:
    words = [PLURAL.get(word, word) for word in caption.split()]
    words = [word[:-1] if word.endswith("s") and word[:-1] in {*PLAIN, *scenes.SHAPES} else word for word in words]
    return " ".join(PLAIN.get(word, word) for word in words)


def find(name: str, scene: Scene) -> Thing | None:
    facts = set(name.split())
    fitting = [t for t in scene.things if facts <= {t.shape, t.colour, t.look, t.size}]
    return fitting[0] if fitting else None  # a name holds colour and shape, so it fits one thing at most


def stands(thing: Thing, place: str) -> bool:
    """As a reader would take it: "at the top" is true of the whole top row, "in the middle" of the middle alone."""
    x, y = PLACES[place]
    return (x == 1 and y != 1 or thing.column == x) and (y == 1 and x != 1 or thing.row == y)


def is_true(caption: str, scene: Scene) -> bool:
    text = plain(caption)
    if (ground := re.search(r"on an? (\w+) background", text)) and ground[1] != scene.background:
        return False
    if "only" in text or " are " in text:
        total = re.match(r"the (\w+) shape", text)
        if total and scenes.NUMBERS.index(total[1]) != len(scene.things):
            return False
        told = {what: scenes.NUMBERS.index(n) for n, what in TOLD.findall(text)}
        return told in (dict(Counter(t.shape for t in scene.things)), dict(Counter(t.colour for t in scene.things)))
    if "alone" in text and len(scene.things) != 1:
        return False
    pieces = [(piece.lastgroup, piece[piece.lastgroup]) for piece in PIECE.finditer(text)]
    if pieces[0][0] != "name":  # "below the box is a star", "in the middle is a star"
        pieces = [*pieces[2:], *pieces[:2]] if len(pieces) == 3 else pieces[::-1]
    things = [find(piece, scene) if kind == "name" else None for kind, piece in pieces]
    for i, (kind, piece) in enumerate(pieces):
        if kind == "name" and things[i] is None:
            return False
        if kind == "place" and not stands(things[i - 1], piece):
            return False
        if kind == "relation":
            subject, other, (x, y) = things[0], things[i + 1], STEPS[piece]
            if other is None or (subject.column - other.column) * x + (subject.row - other.row) * y <= 0:
                return False
    return True


@pytest.fixture(scope="module")
def val() -> list[Scene]:
    return [make_scene("val", index) for index in range(500)]


def test_same_arguments_give_the_same_scene_words_and_bytes() -> None:
    scene = make_scene("train", 7)
    assert scene == make_scene("train", 7) != make_scene("train", 7, seed=1)
    assert draw(scene).tobytes() == draw(scene).tobytes()
    assert scene.description == "beige: large hollow red cross @0,0; large dotted red heart @2,0"
    assert stable_hash(scene.description, *captions(scene)) == 8728326379841639734  # new words: a new data set


def test_scenes_are_distinct_and_no_val_scene_is_in_any_train_split() -> None:
    train = [make_scene("train", i) for i in range(6000)]
    val = [make_scene("val", i) for i in range(500)]
    other_seed = [make_scene("train", i, seed=5) for i in range(1000)]
    assert len(set(train)) == 6000 and len(set(val)) == 500
    assert not set(val) & (set(train) | set(other_seed))
    assert len({draw(scene, 32).tobytes() for scene in val}) == 500


def test_five_distinct_plain_captions_in_a_small_vocabulary() -> None:
    words = set()
    for index in range(1500):
        told = captions(make_scene("train", index))
        assert len(told) == len(set(told)) == 5
        for caption in told:
            assert re.fullmatch(r"[a-z]+( [a-z]+)*", caption)
            assert len(caption.split()) <= 30
            words.update(caption.split())
    assert len(words) <= 90


def test_captions_are_true(val: list[Scene]) -> None:
    for scene in val:
        for caption in captions(scene):
            assert is_true(caption, scene), (caption, scene.description)


def test_pixels_show_what_the_symbols_say(val: list[Scene]) -> None:
    for scene in val[:50]:
        for size in (64, 192):
            picture = draw(scene, size)
            assert (picture.mode, picture.size) == ("RGB", (size, size))
            ground = scenes.BACKGROUNDS[scene.background]
            assert picture.getpixel((0, 0)) == ground
            for thing in scene.things:
                shown = ground if thing.look == "hollow" else scenes.COLOURS[thing.colour]
                assert picture.getpixel(centre(scene, thing, size)) == shown, (scene.description, thing)


@pytest.mark.parametrize("bad", [{"split": "test"}, {"count": 0}, {"count": -1}, {"size": 4}])
def test_impossible_requests_are_refused(bad: dict) -> None:
    with pytest.raises(CoderError, match="scenes: "):
        open_scenes(**{"split": "val", **bad})
