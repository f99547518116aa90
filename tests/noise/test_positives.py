"""Positive captions: what joining and truncating make of any caption, and which of them is taken."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin import registry
from coder_plugin.data.item import NO_POSITIVE
from coder_plugin.errors import CoderError
from coder_plugin.noise.positives import Join, Positives, Truncate

LONG = "a dog runs over the green grass"
OTHERS = ("two men sit", "a red car")
pieces = st.sampled_from(["a", "dog", "Ein", "zwölf", "3", "it's", ".", ",", "--", "!", "猫"])
spaces = st.sampled_from([" ", "  ", "\t", "\n"])
texts = st.lists(st.tuples(pieces, spaces), max_size=14).map(lambda each: "".join(map("".join, each)))


def words(text: str) -> list[str]:
    return [piece for piece in text.split() if any(map(str.isalnum, piece))]


def fault(*args) -> str:
    with pytest.raises(CoderError) as caught:
        Positives(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# truncating


@given(texts, st.floats(0.05, 1), st.floats(0.05, 1), st.integers(1, 5), st.integers(0, 2**32))
def test_a_truncated_caption_is_a_proper_prefix_of_so_many_words(caption, one, other, least, seed):
    shortest, longest = sorted((one, other))
    random.seed(seed)
    made = Truncate(shortest=shortest, longest=longest, words=least)(caption, OTHERS)
    count = len(words(caption))
    if count <= least:
        assert made is None
        return
    assert made is not None and caption.lstrip().startswith(made)
    kept = len(words(made))
    assert least <= kept < count and words(made) == words(caption)[:kept]
    assert min(round(shortest * count), count - 1) <= kept <= max(round(longest * count), least)
    assert made.split()[-1] == words(made)[-1]  # it ends with a word


def test_three_words_or_fewer_are_not_truncated():
    for caption in ("", " ", "dog.", "a big dog", "a big dog . . .", "猫が走る"):
        assert Truncate()(caption, OTHERS) is None, caption


@pytest.mark.parametrize(
    "options", [{"shortest": 0.0}, {"shortest": 0.9}, {"longest": 1.1}, {"longest": float("nan")}, {"words": 0}]
)
def test_shares_and_words_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Truncate(**options)


# joining


@given(texts, st.lists(texts, max_size=4).map(tuple), st.integers(0, 2**32))
def test_a_joined_caption_is_the_caption_and_another_one(caption, others, seed):
    random.seed(seed)
    made = Join()(caption, others)
    different = {other.strip() for other in others if other.split() and other.lower().split() != caption.lower().split()}
    if not different:
        assert made is None
    else:
        assert made in {f"{caption.strip()} {other}" for other in different}


def test_a_caption_is_not_joined_with_its_own_copy():
    for others in ((), ("a  dog",), ("A dog", " a dog\n"), ("  ",)):
        assert Join()("a dog", others) is None, others


# which one


@pytest.mark.parametrize(
    "caption, others, kinds",
    [
        (LONG, OTHERS, {"join", "truncate"}),
        (LONG, (), {"truncate"}),
        (LONG, (LONG,), {"truncate"}),
        ("dog", OTHERS, {"join"}),
        ("dog", (), {NO_POSITIVE}),
    ],
)
def test_evenly_among_those_that_are_possible(caption, others, kinds):
    random.seed(3)
    made = Positives()
    counts = Counter()
    for _ in range(600):
        text, kind = made(caption, others)
        counts[kind] += 1
        assert (text == caption) == (kind == NO_POSITIVE)
        assert len(text) > len(caption) if kind == "join" else len(text) <= len(caption)
    assert counts.keys() == kinds and all(abs(count - 600 / len(kinds)) < 50 for count in counts.values())


# expressions


def test_expressions():
    for text, kinds in (("join", {"join"}), (" truncate( words = 1,longest=0.5 ) ", {"truncate"})):
        assert {Positives(text)(LONG, OTHERS)[1] for _ in range(30)} == kinds
    assert {Positives("truncate(shortest=0.2,longest=0.2,words=1)")(LONG, ())[0] for _ in range(9)} == {"a"}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", ["column 1", "NAME"]),
        ("join+", ["column 6", "NAME"]),
        ("join join", ["column 6", "'+'"]),
        ("jion", ["'jion'", "'join'", "join, truncate"]),
        ("join(words=2)", ["'join'", "'words'"]),
        ("join+truncate(word=2)", ["'word'", "shortest, longest, words"]),
        ("truncate(words=2.5)", ["words=2.5", "int"]),
        ("truncate(words)", ["column 15", "'=' after 'words'"]),
        ("truncate(words=2,)", ["column 18", "an option"]),
        ("truncate(words=2,words=3)", ["column 18", "twice"]),
        ("truncate(shortest=0.9)", ["'truncate'", "shortest=0.9", "longest=0.8"]),
    ],
)
def test_faults_of_an_expression_say_what_is_known(text, said):
    message = fault(text)
    assert all(each in message for each in said), message


def test_a_positive_that_makes_no_text_is_named(monkeypatch):

    class Number:
        def __call__(self, caption, others):
            return 3

    load = registry.load
    monkeypatch.setattr(registry, "load", lambda group, name: Number if name == "number" else load(group, name))
    monkeypatch.setattr("coder_plugin.noise.expression.check_types", lambda *_: ())
    monkeypatch.setattr("coder_plugin.noise.expression.required_options", lambda *_: [])
    with pytest.raises(CoderError, match="'number' in coder_plugin.positives returned 3, not a text"):
        Positives("number")("a dog", ())
