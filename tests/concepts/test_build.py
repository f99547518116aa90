"""From captions to a vocabulary: hand-counted corpora, and random ones against a slow reference."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.concepts import (
    DEFAULT_STOP_WORDS,
    TYPES,
    WordVectors,
    build,
    build_vocabulary,
    lexicon_tagger,
    scenes_vocabulary,
)
from coder_plugin.concepts.build import build_scenes_vocabulary, largest_remainder
from coder_plugin.concepts.words import count_words
from coder_plugin.errors import CoderError

PARTS = dict.fromkeys("dog cat man park ball jean bus".split(), "NOUN") | {
    **dict.fromkeys("run play see".split(), "VERB"), **dict.fromkeys("red big old".split(), "ADJ"),
    "be": "AUX", "have": "AUX", "a": "DET", "the": "DET", "in": "ADP",
}  # fmt: skip
LEMMAS = {"dogs": "dog", "cats": "cat", "men": "man", "runs": "run", "running": "run", "plays": "play", "is": "be",
          "are": "be", "jeans": "jean", "saw": "see"}  # fmt: skip
TAGGER = lexicon_tagger(PARTS, LEMMAS, name="by hand")
CAPTIONS = [
    "A red dog runs in the park.",
    "The dogs are running; dogs play!",
    "2 men run, a red ball",
    "the old red park is big",
    "The in a ...",
]


class Marked:
    """A tagger for captions that are written tagged: "runs/run/VERB"."""

    name = "marked"

    def __call__(self, texts):
        for text in texts:
            tokens = [token.split("/") for token in text.split()]
            yield [(surface, lemma, part.upper()) for surface, lemma, part in tokens]


def vocabulary(captions=CAPTIONS, **options):
    return build_vocabulary(captions, **{"tagger": TAGGER, "vectors": None, **options})


def counts(made) -> dict[str, int]:
    return dict(zip(made.words, made.counts.tolist(), strict=True))


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# by hand


def test_a_small_corpus():
    made = vocabulary(size=7, ratio=(4, 2, 1), source="hand")
    assert made.words == ("dog", "park", "ball", "man", "run", "play", "red")
    assert made.types == ("object",) * 4 + ("motion",) * 2 + ("property",)
    assert made.counts.tolist() == [2, 2, 1, 1, 3, 1, 3]
    assert made.cooccurrence.tolist() == [
        # dog park ball man run play red
        [0, 1, 0, 0, 2, 1, 1],
        [1, 0, 0, 0, 1, 0, 2],
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1, 0, 1, 0, 1],
        [2, 1, 1, 1, 0, 1, 2],
        [1, 0, 0, 0, 1, 0, 0],
        [1, 2, 1, 1, 2, 0, 0],
    ]
    told = made.settings
    assert (told["captions"], told["source"], told["tagger"], told["lemmas"]) == (5, "hand", "by hand", True)
    assert told["selected"] == {"object": 4, "motion": 2, "property": 1}
    assert told["available"] == {"object": 4, "motion": 2, "property": 3}


def test_stop_words_stop_forms_and_lemmas():
    assert {"be", "have"} <= DEFAULT_STOP_WORDS
    assert "be" not in counts(vocabulary())
    everything = counts(vocabulary(stop_words=()))
    assert everything["be"] == 2 and everything["dog"] == 2
    assert counts(vocabulary(lemmas=False, stop_words=()))["is"] == 1
    assert not {"is", "are", "be"} & set(vocabulary(lemmas=False).words)
    assert "dog" not in counts(vocabulary(stop_words={"dog"})) and counts(vocabulary(stop_words={"Dogs"}))["dog"] == 1


def test_a_word_is_what_it_mostly_is():
    captions = [
        "play/play/noun",
        "plays/play/verb",
        "playing/play/verb",
        "the/the/det like/like/adp likes/like/verb like/like/adp",
    ]
    made = vocabulary(captions, tagger=Marked())
    assert made.words == ("play",) and made.types == ("motion",) and made.counts.tolist() == [3]


def test_a_caption_counts_a_word_once_and_numbers_and_signs_not_at_all():
    made = vocabulary(["Dog dog DOGS 3 - dog", "cat\u00a0dog"])
    assert counts(made) == {"dog": 2, "cat": 1} and made.cooccurrence.tolist() == [[0, 1], [1, 0]]


# shares


def test_ratio_of_the_paper():
    assert largest_remainder(400, (7, 2, 1)) == (280, 80, 40)
    assert largest_remainder(10, (1, 1, 1)) == (4, 3, 3)
    assert largest_remainder(5, (7, 2, 1)) == (4, 1, 0)  # 3.5, 1, 0.5: of equal remainders the first
    assert largest_remainder(3, (0, 0, 2)) == (0, 0, 3)


@pytest.mark.parametrize("size, ratio", [(0, (7, 2, 1)), (-4, (7, 2, 1)), (9, (0, 0, 0)), (9, (7, -2, 1)),
                                         (9, (7, 2)), (9, (float("nan"), 1, 1)), (9, (float("inf"), 1, 1))])  # fmt: skip
def test_impossible_shares(size, ratio):
    with pytest.raises(CoderError, match="size is|ratio is"):
        vocabulary(size=size, ratio=ratio)


def test_fewer_words_than_asked_for(caplog):
    with caplog.at_level(logging.WARNING):
        made = vocabulary(["dog cat red"])
    assert len(made) == 3
    assert "concepts: requested 400 words, found 3" in messages(caplog)
    assert "concepts: the captions have no motion word (requested: 80)" in messages(caplog)
    assert "concepts: no word vectors: all 3 are random, drawn from N(0, 1)" in messages(caplog)


# against a slow reference

WORDS = sorted(set(PARTS) | set(LEMMAS))


@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=12), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_counts_and_cooccurrence(captions, size, at_once):
    tally = count_words([" ".join(words) for words in captions], TAGGER, stop_words={"jean"})
    chosen = build.choose(tally, size, (2, 1, 1))
    before, build._PAIRS_AT_ONCE = build._PAIRS_AT_ONCE, at_once
    try:
        found, both = build.cooccurrence(tally, chosen)
    finally:
        build._PAIRS_AT_ONCE = before
    held = [
        [bool(forms & {*words}) for forms in map(set, (tally.forms[number] for number in chosen))] for words in captions
    ]
    assert len(set(chosen)) == len(chosen) <= size
    assert not {"jean", "jeans"} & {form for number in chosen for form in tally.forms[number]}
    assert found.tolist() == [sum(words[i] for words in held) for i in range(len(chosen))]
    expected = [
        [sum(words[i] and words[j] for words in held) if i != j else 0 for j in range(len(chosen))]
        for i in range(len(chosen))
    ]
    assert both.dtype == torch.int64 and both.tolist() == expected


# vectors


@pytest.fixture
def vectors(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("dog 1 2\nrunning 3 4\nruns 5 6\nred -7 8\nunused 0 9\n")
    return WordVectors(path)


def test_vectors_of_words_of_their_forms_and_of_neither(vectors, caplog):
    captions = [*CAPTIONS, "running"]
    with caplog.at_level(logging.WARNING):
        made = vocabulary(captions, size=7, ratio=(4, 2, 1), vectors=vectors, seed=3)
    row = dict(zip(made.words, made.vectors, strict=True))
    assert row["dog"].tolist() == [1, 2] and row["red"].tolist() == [-7, 8]
    assert row["run"].tolist() == [3, 4], "of its forms that have one, the most frequent"
    assert made.settings["surface_vectors"] == {"run": "running"}
    assert made.missing == ("park", "ball", "man", "play")
    sigma = float(np.std([1, 2, 3, 4, 5, 6, -7, 8, 0, 9]))
    assert made.settings["sigma"] == pytest.approx(sigma) and made.settings["vectors"] == "some.txt"
    drawn = sigma * torch.randn(4, 2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.stack([row[word] for word in made.missing]), drawn)
    assert "no vector in some.txt for 4 of 7 words, random instead: park, ball, man, play" in messages(caplog)[-1]


# the built-in scenes


def test_the_scenes_vocabulary(caplog):
    with caplog.at_level(logging.WARNING):
        made = scenes_vocabulary()
    assert not caplog.records and scenes_vocabulary() is made
    built = build_scenes_vocabulary()
    assert (built.fingerprint, dict(built.settings)) == (made.fingerprint, dict(made.settings)), "write the file again"
    assert made.vectors.shape == (48, 300) and made.settings["captions"] == 30000
    assert set(made.types) == {"object", "property"} and TYPES[0] == made.types[0]
    assert {"circle", "box", "object", "corner"} <= set(made.of_type("object"))
    assert {"red", "violet", "tiny", "striped"} <= set(made.of_type("property"))
    box, square = made.words.index("box"), made.words.index("square")
    assert 0 < made.cooccurrence[box, square] < made.counts[box] < made.counts[square]
