"""Parts of speech and lemmas of captions, from a spaCy pipeline or a fixed word list.

A tagger yields for each text its words as (surface form, lemma, part of speech), the latter in Universal Dependencies' names:
NOUN, PROPN, VERB, AUX, ADJ, ADP …
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from coder_plugin.errors import CoderError, install_command

Token = tuple[str, str, str]
_WORD = re.compile(r"[^\W\d_]+(?:[-'][^\W\d_]+)*")
_TAKES_ES = re.compile(r"(s|x|z|ch|sh|o)$")
_DOUBLES = re.compile(r"(^|[^aeiou])[aeiou][^aeiouwxy]$")


class Tagger(Protocol):
    """Tags a stream of texts in order, without holding it in memory."""

    name: str

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]: ...


def clean(text: str) -> str:
    """A caption normalised for taggers: compatible Unicode forms, straight apostrophes, single spaces, lower case.

    Example:
        >>> clean("The  dog’s Ball")
        "the dog's ball"
    """
    plain = unicodedata.normalize("NFKC", text).replace("\u2019", "'").replace("\u2010", "-").replace("\u2011", "-")
    return " ".join(plain.lower().split())


def is_word(text: str) -> bool:
    """Whether ``text`` consists of letters, with hyphens or apostrophes inside; numbers and punctuation are not concepts."""
    return _WORD.fullmatch(text) is not None


class lexicon_tagger:
    """A tagger with a fixed word list.

    Args:
        types: lemmas to parts of speech; other words are X.
        lemmas: surface forms to lemmas; other words are their own lemma.

    Example:
        >>> tagger = lexicon_tagger({"dog": "NOUN"}, {"dogs": "dog"})
        >>> next(tagger(["two dogs"]))
        [('two', 'two', 'X'), ('dogs', 'dog', 'NOUN')]
    """

    def __init__(self, types: Mapping[str, str], lemmas: Mapping[str, str], name: str = "lexicon") -> None:
        self.types, self.lemmas, self.name = dict(types), dict(lemmas), name

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]:
        for text in texts:
            words = _WORD.findall(text.lower())
            pairs = [(word, self.lemmas.get(word, word)) for word in words]
            yield [(word, lemma, self.types.get(lemma, "X")) for word, lemma in pairs]


def scenes_tagger() -> lexicon_tagger:
    """A tagger for the captions of the built-in scenes, whose only verbs are "is" and "are"."""
    from coder_plugin.data import scenes

    def with_synonyms(words: Iterable[str]) -> list[str]:
        return [each for word in words for each in scenes.SYNONYMS.get(word, (word,))]

    things = with_synonyms((*scenes.SHAPES, "shape", "background"))
    nouns = [*things, "picture", "corner", "middle", "top", "bottom", "left", "right"]
    looks = with_synonyms((*scenes.COLOURS, *scenes.BACKGROUNDS, *scenes.LOOKS, *scenes.RADII))
    types = {**dict.fromkeys(nouns, "NOUN"), **dict.fromkeys([*looks, "alone"], "ADJ"), "be": "AUX"}
    lemmas = {"is": "be", "are": "be", **{scenes._plural(noun): noun for noun in things}}
    return lexicon_tagger(types, lemmas, name="scenes")


def make_tagger(name: str, *, processes: int = 1) -> Tagger:
    """The tagger ``scenes``, or a spaCy pipeline by name or folder; see :class:`spacy_tagger`."""
    return scenes_tagger() if name == "scenes" else spacy_tagger(name, processes=processes)


class spacy_tagger:
    """A spaCy pipeline without parser and entity recogniser. Hyphenated words ("t-shirt") stay one word, as in word vectors.

    Args:
        model: a pipeline's name, a folder with ``config.cfg``, or an installed package with such a folder inside.
        processes: spaCy's processes; -1 for one per core.

    Raises:
        CoderError: spaCy or the pipeline is missing.
    """

    def __init__(self, model: str = "en_core_web_sm", batch_size: int = 1000, processes: int = 1) -> None:
        if processes < 1 and processes != -1:
            raise CoderError(f"processes is {processes}; it must be 1 or more, or -1 for one per core")
        try:
            import spacy
        except ImportError as error:
            raise CoderError(
                f"tagger {model!r} needs spaCy and a pipeline: {install_command('concepts')}, "
                "then python -m spacy download en_core_web_sm"
            ) from error
        self.name = Path(model).name
        self.batch_size, self.processes = batch_size, processes
        home = _pipeline_folder(model)
        try:
            self._pipeline: Any = spacy.load(home or model, exclude=["parser", "ner"])
        except (OSError, ValueError, ImportError) as error:
            installed = ", ".join(sorted(spacy.util.get_installed_models())) or "none"
            raise CoderError(
                f"spaCy pipeline {model!r} cannot be loaded ({' '.join(str(error).split())[:200]}); installed: {installed}. "
                f"Get one with python -m spacy download en_core_web_sm, or name a folder with config.cfg"
            ) from error
        self._keep_hyphens()
        self._verbs = _english_verbs(self._pipeline)

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]:
        for doc in self._pipeline.pipe(texts, batch_size=self.batch_size, n_process=self.processes):
            yield [(token.text, self._lemma(token), token.pos_) for token in doc]

    def _lemma(self, token: Any) -> str:
        """spaCy's lemma, with corrections for English verbs.

        spaCy lemmatises "rides" and "riding" as "rid" (whose forms are "rids" and "ridding"), and shortens forms of unknown
        words ("wooded" to "woode").
        """
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
    """The verbs of a rule-based English lemmatizer; empty for others."""
    lemmatizer: Any = pipeline.get_pipe("lemmatizer") if pipeline.has_pipe("lemmatizer") else None
    if pipeline.lang != "en" or getattr(lemmatizer, "mode", None) != "rule":
        return ()
    return frozenset(lemmatizer.lookups.get_table("lemma_index").get("verb", ()))


def _pipeline_folder(model: str) -> Path | None:
    """The pipeline's folder, if ``model`` is a folder or package with ``config.cfg`` in it or in one subfolder; else None,
    and spaCy resolves the name."""
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
            f"{folder}: has {len(inside)} pipelines ({', '.join(path.name for path in inside)}); name one"
        )
    return inside[0] if inside else None
