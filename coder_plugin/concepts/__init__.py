"""CODER's concept vocabulary: which words are concepts, how often they co-occur, and their word vectors.

See ``docs/coder.md``. spaCy is imported only when a spaCy tagger is created.
"""

from coder_plugin.concepts.build import build_vocabulary, scenes_vocabulary
from coder_plugin.concepts.tagging import lexicon_tagger, scenes_tagger, spacy_tagger
from coder_plugin.concepts.vectors import ModelVectors, WordVectors
from coder_plugin.concepts.vocabulary import TYPES, Vocabulary, load_vocabulary
from coder_plugin.concepts.words import DEFAULT_STOP_WORDS

__all__ = [
    "DEFAULT_STOP_WORDS",
    "TYPES",
    "ModelVectors",
    "Vocabulary",
    "WordVectors",
    "build_vocabulary",
    "lexicon_tagger",
    "load_vocabulary",
    "scenes_tagger",
    "scenes_vocabulary",
    "spacy_tagger",
]
