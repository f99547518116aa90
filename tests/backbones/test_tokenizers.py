"""Token ids: transformers' own where nothing is dropped, words of a vocabulary, and what word dropout does to both."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.backbones.tokenizers import (
    SPECIAL,
    SubwordTokenizer,
    WordTokenizer,
    build_vocabulary,
    read_vocabulary,
    split_words,
)
from coder_plugin.data.source import isolated_rng
from coder_plugin.errors import CoderError

TEXTS = [
    "a red ball",
    "The Man, walking with two dogs.",
    "",
    "   ",
    "balloons runner playing jumps",
    "naïve café 狗 🐶 \u200b man\ttree\nhouse",
    "it's a dog's ball; don't run",
    " ".join(["running"] * 60),
    "[MASK] red [SEP] ball [PAD] tree",
    "a [PAD]",
    "xylophone " * 3,
]
VOCABULARY = [*SPECIAL, "a", "red", "ball", "dog", "'s", "2", "été"]


@pytest.fixture(scope="module")
def theirs(bert):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bert)


def subwords(theirs, **options) -> SubwordTokenizer:
    return SubwordTokenizer(theirs, **{"context_length": 12, **options})


def reference(theirs, texts: list[str], length: int) -> torch.Tensor:
    return theirs(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")["input_ids"]


# subwords


@pytest.mark.parametrize("length", [3, 12, 50])
def test_ids_are_transformers_own(theirs, length):
    ids = subwords(theirs, context_length=length)(TEXTS)
    assert ids.dtype == torch.int64 and ids.shape == (len(TEXTS), length)
    assert torch.equal(ids, reference(theirs, TEXTS, length))


@given(st.lists(st.text(max_size=80), min_size=1, max_size=4), st.integers(3, 30))
def test_ids_are_transformers_own_for_any_text(theirs, texts, length):
    assert torch.equal(subwords(theirs, context_length=length)(texts), reference(theirs, texts, length))


def test_what_is_no_berts_tokenizer_is_refused(theirs):
    slow = type("Slow", (), {"is_fast": False})()
    with pytest.raises(CoderError, match="Slow is not a fast tokenizer"):
        subwords(slow)

    class Bare:
        is_fast, cls_token_id, sep_token_id, bos_token_id, eos_token_id, pad_token_id = True, None, None, 1, 2, None
        mask_token_id = unk_token_id = 0

        def __len__(self) -> int:
            return 3

    with pytest.raises(CoderError, match="Bare has no start, end or padding token"):
        subwords(Bare())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 2}, "context length must be >= 3"),
        ({"word_dropout": 1.0}, r"word dropout must be in \[0, 1\), got 1"),
        ({"word_dropout": -0.1}, "word dropout"),
        ({"word_dropout": float("nan")}, "word dropout"),
    ],
)
def test_options_out_of_range(theirs, options, message):
    with pytest.raises(CoderError, match=message):
        subwords(theirs, **options)
    with pytest.raises(CoderError, match=message):
        WordTokenizer(VOCABULARY, **{"context_length": 12, **options})


# word dropout


def test_shares_of_masked_random_and_deleted_words(theirs):
    """20 % of the words are dropped: of these half masked, a tenth replaced at random, two fifths deleted."""
    words, texts = 20, 500
    tokenizer = subwords(theirs, context_length=64, word_dropout=0.2)
    red, mask = theirs.convert_tokens_to_ids("red"), theirs.mask_token_id
    with isolated_rng("shares"):
        ids = tokenizer([" ".join(["red"] * words)] * texts)
    count = Counter(ids.flatten().tolist())
    total = words * texts
    kept, masked = count[red] / total, count[mask] / total
    body = [[i for i in row if i != theirs.pad_token_id][1:-1] for row in ids.tolist()]
    deleted = 1 - sum(map(len, body)) / total
    drawn = sum(i not in (red, mask) for row in body for i in row) / total
    assert kept == pytest.approx(0.8, abs=0.015)
    assert masked == pytest.approx(0.1, abs=0.012)
    assert deleted == pytest.approx(0.08, abs=0.012)
    assert drawn == pytest.approx(0.02, abs=0.006)
    random_ids = {i for row in body for i in row} - {red, mask}
    assert len(random_ids) > 30 and max(random_ids) < len(theirs)  # anywhere in the vocabulary


def test_all_pieces_of_a_word_are_dropped_together(theirs):
    whole = theirs.convert_tokens_to_ids(["run", "##n", "##ing", "##s"])
    tokenizer = subwords(theirs, context_length=64, word_dropout=0.5)
    assert theirs("runnings", add_special_tokens=False)["input_ids"] == whole
    seen = Counter()
    with isolated_rng("pieces"):
        for row in tokenizer(["runnings"] * 400).tolist():
            body = [i for i in row if i != tokenizer.pad][1:-1]
            seen["kept" if body == whole else "masked" if body == [tokenizer.mask] * 4 else f"length {len(body)}"] += 1
    # a random word has as many pieces; padding drawn among them would shorten it here
    assert seen["kept"] > 150 and seen["masked"] > 60 and seen["length 0"] > 40
    assert sum(seen.values()) - seen["kept"] - seen["masked"] - seen["length 0"] == pytest.approx(20, abs=15)
    assert not {"length 1", "length 2"} & seen.keys()


@pytest.mark.parametrize("kind", ["subwords", "words"])
def test_tokenizers_travel_to_workers(theirs, kind):
    options = {"context_length": 12, "word_dropout": 0.3}
    tokenizer = subwords(theirs, **options) if kind == "subwords" else WordTokenizer(VOCABULARY, **options)
    copy = pickle.loads(pickle.dumps(tokenizer))
    with isolated_rng("same"):
        ours = tokenizer(TEXTS)
    with isolated_rng("same"):
        assert torch.equal(copy(TEXTS), ours)


# words of a vocabulary


def test_words_and_unknown_words():
    tokenizer = WordTokenizer(VOCABULARY, context_length=8)
    assert tokenizer.size == len(VOCABULARY) and tokenizer(["A RED ball"]).tolist() == [[1, 4, 5, 6, 2, 0, 0, 0]]
    assert tokenizer(["the dog's 2, été", "", " \n"]).tolist() == [
        [1, 3, 7, 8, 9, 3, 10, 2],
        [1, 2, 0, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 0, 0, 0],
    ]
    assert tokenizer(["a " * 60]).tolist() == [[1, 4, 4, 4, 4, 4, 4, 2]]


def test_words_of_a_text():
    """As the Treebank parts them: clitics and signs by themselves."""
    assert split_words("Don't STOP: the man's 2nd well-known café (été).") == [
        "do", "n't", "stop", ":", "the", "man", "'s", "2nd", "well-known", "café", "(", "été", ")", ".",
    ]  # fmt: skip
    assert split_words("they're 3.5 t-shirt, 狗") == ["they", "'re", "3.5", "t-shirt", ",", "狗"]
    assert split_words(" \n\t") == []


def test_vocabulary_of_captions():
    captions = ["a red ball", "a red dog", "a ball", "A RED cat", "a cat a"]
    assert build_vocabulary(captions, least=2) == [*SPECIAL, "a", "red", "ball", "cat"]
    assert build_vocabulary(captions, least=1) == [*SPECIAL, "a", "red", "ball", "cat", "dog"]
    assert build_vocabulary(iter(reversed(captions)), least=1) == build_vocabulary(captions, least=1)
    assert build_vocabulary(captions) == [*SPECIAL, "a"]  # four times, as SCAN's and VSRN's
    with pytest.raises(CoderError, match="no word occurs 9 times"):
        build_vocabulary(captions, least=9)


@pytest.mark.parametrize("form", ["list", "word2idx"])
def test_files_of_vocabularies(tmp_path, form):
    path = tmp_path / "vocab.json"
    places = {word: place for place, word in reversed(list(enumerate(VOCABULARY)))}
    content = VOCABULARY if form == "list" else {"word2idx": places, "idx2word": {}, "idx": len(VOCABULARY)}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_vocabulary(str(path)) == VOCABULARY


BAD = {
    "absent": (None, "cannot be read"),
    "no JSON": ("{", "cannot be read"),
    "a number": ("3", "neither a list of words nor"),
    "a list of numbers": (json.dumps([*SPECIAL, 1]), "neither a list of words nor"),
    "another object": (json.dumps({"words": []}), "neither a list of words nor"),
    "no special words": (
        json.dumps(["a", "b"]),
        "a vocabulary must begin with <pad>, <start>, <end>, <unk>; this one begins with a, b",
    ),
    "twice": (json.dumps([*SPECIAL, "a", "a"]), "1 words of the vocabulary occur twice"),
    "a gap": (json.dumps({"word2idx": {"<pad>": 0, "a": 2}}), "are not 0 to 1, each once"),
    "an id twice": (json.dumps({"word2idx": {"<pad>": 0, "a": 0}}), "are not 0 to 1, each once"),
    "ids of two kinds": (json.dumps({"word2idx": {"<pad>": 0, "a": "1"}}), "are not 0 to 1, each once"),
    "ids that are lists": (json.dumps({"word2idx": {"<pad>": [0], "a": [1]}}), "are not 0 to 1, each once"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_vocabulary_file_is_named(tmp_path, what):
    content, message = BAD[what]
    path = tmp_path / "vocab.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CoderError, match=message) as caught:
        read_vocabulary(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
