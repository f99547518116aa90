"""Words and their positions, with every kind of tokenizer."""

from __future__ import annotations

import logging

import open_clip
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.backbones.tokenizers import SPECIAL, SubwordTokenizer, WordTokenizer
from coder_plugin.errors import CoderError
from coder_plugin.report.words import WordReader, split_words
from tests.backbones import tiny_bert

ALL = [True] * 77


@pytest.fixture(scope="module")
def clip() -> open_clip.SimpleTokenizer:
    return open_clip.SimpleTokenizer(context_length=77)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


def test_clips_pieces_are_joined(clip) -> None:
    found = WordReader(clip).words("Two dogs, a T-shirt & 12 snowboarders!", ALL)
    assert [word.text for word in found] == ["two", "dogs", "a", "t-shirt", "12", "snowboarders"]
    ids = clip(["Two dogs, a T-shirt & 12 snowboarders!"])[0]
    for word in found:
        joined = clip.decode(ids[list(word.positions)].tolist()).replace(" ", "")
        assert joined == word.text, word
    assert len(found[-1].positions) > 1


def test_what_the_mask_leaves_out_is_no_word(clip) -> None:
    valid = [place < 3 for place in range(77)]  # start, two, dogs
    assert [word.text for word in WordReader(clip).words("two dogs run", valid)] == ["two", "dogs"]


@pytest.mark.parametrize("caption", ["", " ", "... !", "\u2615"])
def test_captions_without_words(clip, caption: str) -> None:
    assert WordReader(clip).words(caption, ALL) == []


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=60))
def test_any_text(caption: str) -> None:
    tokenizer = open_clip.tokenizer._tokenizer
    ids = tokenizer([caption])[0]
    end = ids.tolist().index(tokenizer.eot_token_id)
    places = [place for word in WordReader(tokenizer).words(caption, ALL) for place in word.positions]
    assert places == sorted(set(places)) and all(0 < place < end for place in places)


def test_transformers_pieces_and_unknown_words(bert: str) -> None:
    from transformers import AutoTokenizer

    own = SubwordTokenizer(AutoTokenizer.from_pretrained(bert), context_length=12)
    theirs = open_clip.tokenizer.HFTokenizer(bert, context_length=12)
    for tokenizer in (own, theirs):
        found = WordReader(tokenizer).words("The dog, running: zebra balloon", [True] * 12)
        assert [tuple(word) for word in found] == [
            ("the", (1,)),
            ("dog", (2,)),
            ("running", (4, 5, 6)),
            ("balloon", (9, 10)),  # 8 is the unknown zebra
        ]


def test_words_of_a_vocabulary() -> None:
    tokenizer = WordTokenizer([*SPECIAL, "a", "man", "'s", "dog"], context_length=8)
    found = WordReader(tokenizer).words("A man's zebra dog.", [True] * 8)
    assert [tuple(word) for word in found] == [("a", (1,)), ("man", (2,)), ("'s", (3,)), ("dog", (5,))]


def test_a_text_that_is_not_matched_is_told_of(caplog) -> None:
    shortening = open_clip.SimpleTokenizer(context_length=5, reduction_mask="random")
    with caplog.at_level(logging.WARNING):
        found = [WordReader(shortening).words("one two three four five six seven", [True] * 5) for _ in range(4)]
    assert [] in found and "cannot be matched" in caplog.text


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(CoderError):
        WordReader(object())


def test_split() -> None:
    assert split_words("A man's T-shirt, 3 dogs_") == ["a", "man's", "t-shirt", "3", "dogs"]
