"""Parts of speech and lemmas of captions: by a spaCy pipeline, or by a word list where the language is small and known.

A tagger is called with texts and gives for each its words as (surface, lemma, part of speech), the latter in Universal
Dependencies' names: NOUN, PROPN, VERB, AUX, ADJ, ADP …
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from coder_plugin.errors import CoderError

Token = tuple[str, str, str]
_WORD = re.compile(r"[^\W\d_]+(?:[-'][^\W\d_]+)*")
_TAKES_ES = re.compile(r"(s|x|z|ch|sh|o)$")
_DOUBLES = re.compile(r"(^|[^aeiou])[aeiou][^aeiouwxy]$")


class Tagger(Protocol):
    """Anything that tags a stream of texts in order, without holding it."""

    name: str

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]: ...


def clean(text: str) -> str:
    """A caption as taggers get it: compatible Unicode forms and straight apostrophes, single spaces, lower case."""
    plain = unicodedata.normalize("NFKC", text).replace("\u2019", "'").replace("\u2010", "-").replace("\u2011", "-")
    return " ".join(plain.lower().split())


def is_word(text: str) -> bool:
    """Whether ``text`` is made of letters alone, with hyphens or apostrophes inside: numbers and signs are no concepts."""
    return _WORD.fullmatch(text) is not None


class lexicon_tagger:
    """A tagger of a known small language: ``types`` gives a lemma's part of speech (X where it has none), ``lemmas`` the
    lemma of a surface form that is not its own."""

    def __init__(self, types: Mapping[str, str], lemmas: Mapping[str, str], name: str = "lexicon") -> None:
        self.types, self.lemmas, self.name = dict(types), dict(lemmas), name

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]:
        for text in texts:
            words = _WORD.findall(text.lower())
            pairs = [(word, self.lemmas.get(word, word)) for word in words]
            yield [(word, lemma, self.types.get(lemma, "X")) for word, lemma in pairs]


def scenes_tagger() -> lexicon_tagger:
    """Tags the captions of the built-in scenes. They hold no verbs but "is" and "are"."""
    from coder_plugin.data import scenes

    def worded(words: Iterable[str]) -> list[str]:
        return [each for word in words for each in scenes.SYNONYMS.get(word, (word,))]

    things = worded((*scenes.SHAPES, "shape", "background"))
    nouns = [*things, "picture", "corner", "middle", "top", "bottom", "left", "right"]
    looks = worded((*scenes.COLOURS, *scenes.BACKGROUNDS, *scenes.LOOKS, *scenes.RADII))
    types = {**dict.fromkeys(nouns, "NOUN"), **dict.fromkeys([*looks, "alone"], "ADJ"), "be": "AUX"}
    lemmas = {"is": "be", "are": "be", **{scenes._plural(noun): noun for noun in things}}
    return lexicon_tagger(types, lemmas, name="scenes")


class spacy_tagger:
    """A spaCy pipeline without its parser and entity recogniser, which nothing here reads.

    ``model`` is a pipeline's name, a folder that holds ``config.cfg``, or an installed package whose folder holds one
    inside. Hyphenated words stay whole ("t-shirt"), as word vectors have them.
    """

    def __init__(self, model: str = "en_core_web_sm", batch_size: int = 1000, processes: int = 1) -> None:
        if processes < 1 and processes != -1:
            raise CoderError(f"processes is {processes}; it must be 1 or more, or -1 for one per core")
        try:
            import spacy
        except ImportError as error:
            raise CoderError(
                f'tagger {model!r} needs spaCy and a pipeline: pip install "coder-plugin[concepts]", '
                "then python -m spacy download en_core_web_sm"
            ) from error
        self.name = Path(model).name
        self.batch_size, self.processes = batch_size, processes
        home = _pipeline_folder(model)
        try:
            self._pipeline: Any = spacy.load(home or model, exclude=["parser", "ner"])
        except (OSError, ValueError, ImportError) as error:
            known = ", ".join(sorted(spacy.util.get_installed_models())) or "none"
            raise CoderError(
                f"spaCy pipeline {model!r} cannot be loaded ({' '.join(str(error).split())[:200]}); installed: {known}. "
                f"Get one with python -m spacy download en_core_web_sm, or name a folder that holds config.cfg"
            ) from error
        self._keep_hyphens()
        self._verbs = _english_verbs(self._pipeline)

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]:
        for doc in self._pipeline.pipe(texts, batch_size=self.batch_size, n_process=self.processes):
            yield [(token.text, self._lemma(token), token.pos_) for token in doc]

    def _lemma(self, token: Any) -> str:
        """spaCy's lemma, but for three of its guesses at English verbs: it makes "rid" of rides, which would be rids,
        and of riding, which would be ridding; and it shortens forms of words that it does not know (wooded: "woode")."""
        lemma, form = token.lemma_, token.lower_
        if token.pos_ != "VERB" or not self._verbs:
            return lemma
        if lemma not in self._verbs:
            return form
        es = form == f"{lemma}es" and not _TAKES_ES.search(lemma)
        ing = form == f"{lemma}ing" and _DOUBLES.search(lemma)
        return f"{lemma}e" if (es or ing) and f"{lemma}e" in self._verbs else lemma

    def _keep_hyphens(self) -> None:
        from spacy.util import compile_infix_regex

        infixes = [
            each for each in self._pipeline.Defaults.infixes or () if not compile_infix_regex([each]).search("t-shirt")
        ]
        self._pipeline.tokenizer.infix_finditer = compile_infix_regex(infixes).finditer


def _english_verbs(pipeline: Any) -> Collection[str]:
    """The verbs that the rules of an English pipeline know; empty for other lemmatizers."""
    lemmatizer: Any = pipeline.get_pipe("lemmatizer") if pipeline.has_pipe("lemmatizer") else None
    if pipeline.lang != "en" or getattr(lemmatizer, "mode", None) != "rule":
        return ()
    return frozenset(lemmatizer.lookups.get_table("lemma_index").get("verb", ()))


def _pipeline_folder(model: str) -> Path | None:
    """Where the pipeline lies, if ``model`` is a folder or a package with ``config.cfg`` in it or in its one subfolder;
    None leaves the name to spaCy."""
    folder = Path(model)
    if not folder.is_dir():
        if not model.isidentifier():
            return None
        spec = importlib.util.find_spec(model)
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(next(iter(spec.submodule_search_locations)))
    if (folder / "config.cfg").is_file():
        return folder
    inside = sorted(path.parent for path in folder.glob("*/config.cfg"))
    if len(inside) > 1:
        raise CoderError(
            f"{folder}: holds {len(inside)} pipelines ({', '.join(path.name for path in inside)}); name one"
        )
    return inside[0] if inside else None
