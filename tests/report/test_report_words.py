"""Words and their positions, with every kind of tokenizer."""

from __future__ import annotations

import open_clip
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.backbones.tokenizers import SubwordTokenizer
from coder_plugin.report.words import WordReader
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
