"""``coder-plugin concepts``: build the concept vocabulary of a data set's training captions."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, READING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

if TYPE_CHECKING:
    from coder_plugin.concepts.vectors import VectorSource

#: What ``--vectors`` begins with where it names a text model.
_MODEL = "model:"


@dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of ``coder-plugin concepts``."""

    output: str = option(MISSING, "the .safetensors to write; a .json is written next to it", metavar="FILE")
    vectors: str = option(
        MISSING, "word vectors: a GloVe or word2vec text file (also .gz or .zip); model:NAME, the embeddings of a text model: "
        "a run's or export's folder, open_clip's NAME:WEIGHTS, or a transformers encoder; or none for random vectors",
        metavar="FILE"
    )
    template: str | None = option(
        None, "with model:NAME, the text for a word, with {} in its place, such as 'a photo of a {}' [{}]", metavar="TEXT"
    )
    center: bool | None = option(None, "with model:NAME, subtract the mean of the words' embeddings [True]")
    size: int = option(400, "number of concepts")
    ratio: list[float] = option(
        [7, 2, 1], "shares of nouns, verbs and adjectives [7 2 1]", metavar=("OBJECT", "MOTION", "PROPERTY")
    )
    lemmas: bool = option(True, "count dog and dogs as one concept rather than two")
    stop_words: str = option(
        "default", "words that are not concepts: default (be, have, other …), none, or a file with one word per line",
        metavar="WORDS"
    )
    tagger: str | None = option(
        None, "part-of-speech tagger: a spaCy pipeline's name or folder, or scenes [en_core_web_sm; scenes on the scenes]"
    )
    processes: int = option(1, "number of spaCy processes")
    max_captions: int | None = option(None, "read only the first N captions", at_least=1)
    split: str = option("train", "split of Karpathy files and scenes")
    seed: int = option(0, "seed of the random vectors [0]")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "concepts",
        help="make the concept vocabulary that CODER trains with, from captions",
        description="The most frequent nouns, verbs and adjectives of the training captions, how often they occur "
        "together, and "
        "their word vectors (see docs/coder.md), for --loss coder --concepts FILE.",
    )
    add_command(parser, Command, run, options=["train_data", *READING])


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_exists, check_options

    check_options(options, reads=["train_data", "image_root"])
    if arguments.vectors != "none" and not arguments.vectors.startswith(_MODEL):
        check_exists(arguments.vectors, flag="--vectors")
    from coder_plugin.concepts.build import build_vocabulary
    from coder_plugin.concepts.tagging import make_tagger
    from coder_plugin.concepts.vocabulary import artefact_path, check_writable, describe
    from coder_plugin.concepts.words import read_stop_words
    from coder_plugin.config import resolve
    from coder_plugin.data.from_config import make_captions, make_source

    config = resolve([("flag", options)])  # all that can fail is checked first: tagging a large corpus takes minutes
    path = artefact_path(arguments.output)
    check_writable(path)
    vectors = _vectors(arguments.vectors, template=arguments.template, center=arguments.center)
    stop_words = read_stop_words(arguments.stop_words)
    if config.data.train is not None:
        source = make_captions(config.data, config.data.train, split=arguments.split)
    elif config.data.on_scenes:
        source = make_source(config.data, split=arguments.split)
    else:
        raise CoderError(f"--dataset-type {config.data.dataset_type} needs --train-data")
    on_scenes = config.data.on_scenes or config.data.train == "scenes"
    vocabulary = build_vocabulary(
        _captions(source, arguments.max_captions),
        tagger=make_tagger(arguments.tagger or ("scenes" if on_scenes else "en_core_web_sm"), processes=arguments.processes),
        size=arguments.size,
        ratio=tuple(arguments.ratio),
        lemmas=arguments.lemmas,
        stop_words=stop_words,
        vectors=vectors,
        seed=arguments.seed,
        source=source.name,
    )
    vocabulary.save(path)
    data = [f"--{name.replace('_', '-')}={options[name]}" for name in ("train_data", *READING) if name in options]
    command = ["train", *(["--model", "MODEL", *data] if data else ()), "--loss", "coder", "--concepts", str(path)]
    echo(f"{describe(vocabulary)}\nwritten: {path}, {path.with_suffix('.json')}")
    echo(f"next: {shlex.join(['coder-plugin', *command])}")
    return 0


def _vectors(spec: str, *, template: str | None, center: bool | None) -> VectorSource | None:
    """The source of word vectors that ``--vectors`` names."""
    from coder_plugin.concepts.vectors import ModelVectors, WordVectors

    if spec.startswith(_MODEL):
        from coder_plugin.pretrained.text_models import open_text_model

        model = spec.removeprefix(_MODEL)
        # like a file of vectors, a folder is recorded without its path, which may be private
        name = ":".join(Path(part).name if Path(part).exists() else part for part in model.split(":", 1))
        template = "{}" if template is None else template
        return ModelVectors(open_text_model(model), name=name, template=template, center=center is not False)
    if template is not None or center is not None:
        raise CoderError(f"--template and --center are for --vectors model:NAME, got --vectors {spec}")
    return None if spec == "none" else WordVectors(spec)


def _captions(source: Any, limit: int | None) -> Iterator[str]:
    """The captions of a source, image by image; no picture is decoded."""
    from coder_plugin.data.from_config import captions_of
    from coder_plugin.progress import track

    return track(islice(captions_of(source), limit), limit, what="captions")
