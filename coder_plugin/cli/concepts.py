"""``coder-plugin concepts``: build the concept vocabulary of a data set's training captions."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

if TYPE_CHECKING:
    from coder_plugin.concepts.vectors import VectorSource

#: What ``--vectors`` begins with where it names a text model.
_MODEL = "model:"


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import READING

    parser = commands.add_parser(
        "concepts",
        help="make the concept vocabulary that CODER trains with, from captions",
        description="The most frequent nouns, verbs and adjectives of the training captions, how often they occur "
        "together, and "
        "their word vectors (see docs/equations.md), for --loss coder --concepts FILE.",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the .safetensors to write; a .json is written next to it"
    )
    parser.add_argument(
        "--vectors",
        required=True,
        metavar="FILE",
        help="word vectors: a GloVe or word2vec text file (also .gz or .zip); model:NAME, the embeddings of a text model: a "
        "run's or export's folder, open_clip's NAME:WEIGHTS, or a transformers encoder; or none for random vectors",
    )
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="with model:NAME, the text for a word, with {} in its place, such as 'a photo of a {}' [{}]",
    )
    parser.add_argument(
        "--center",
        action=argparse.BooleanOptionalAction,
        help="with model:NAME, subtract the mean of the words' embeddings [True]",
    )
    parser.add_argument("--size", type=int, default=400, help="number of concepts [400]")
    parser.add_argument(
        "--ratio",
        type=float,
        nargs=3,
        default=[7, 2, 1],
        metavar=("OBJECT", "MOTION", "PROPERTY"),
        help="shares of nouns, verbs and adjectives [7 2 1]",
    )
    parser.add_argument(
        "--lemmas",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count dog and dogs as one concept rather than two [True]",
    )
    parser.add_argument(
        "--stop-words",
        default="default",
        metavar="WORDS",
        help="words that are not concepts: default (be, have, other …), none, or a file with one word per line [default]",
    )
    parser.add_argument(
        "--tagger",
        metavar="NAME",
        help="part-of-speech tagger: a spaCy pipeline's name or folder, or scenes [en_core_web_sm; scenes on the scenes]",
    )
    parser.add_argument("--processes", type=int, default=1, help="number of spaCy processes [1]")
    parser.add_argument("--max-captions", type=int, metavar="N", help="read only the first N captions")
    parser.add_argument("--split", default="train", help="split of Karpathy files and scenes [train]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random vectors [0]")
    add_flags(parser, only=["train_data", *READING])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_exists, check_options
    from coder_plugin.cli.flags import read_options

    check_options(read_options(arguments), reads=["train_data", "image_root"])
    if arguments.max_captions is not None and arguments.max_captions < 1:
        raise CoderError(f"--max-captions is {arguments.max_captions}; it must be 1 or more")
    if arguments.vectors != "none" and not arguments.vectors.startswith(_MODEL):
        check_exists(arguments.vectors, flag="--vectors")
    echo(concepts_command(arguments))
    return 0


def concepts_command(arguments: argparse.Namespace) -> str:
    """Build and save the vocabulary; returns its description.

    Everything that can fail is checked first, since tagging a large corpus takes minutes.
    """
    from coder_plugin.cli.flags import read_options
    from coder_plugin.concepts.build import build_vocabulary
    from coder_plugin.concepts.tagging import make_tagger
    from coder_plugin.concepts.vocabulary import artefact_path, check_writable, describe
    from coder_plugin.concepts.words import read_stop_words
    from coder_plugin.config import READING, resolve
    from coder_plugin.data.from_config import make_captions, make_source

    flags = read_options(arguments)
    config = resolve([("flag", flags)])
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
    data = [f"--{name.replace('_', '-')}={flags[name]}" for name in ("train_data", *READING) if name in flags]
    return f"{describe(vocabulary)}\nwritten: {path}, {path.with_suffix('.json')}\nnext: " + shlex.join(
        ["coder-plugin", "train", *(["--model", "MODEL", *data] if data else ()), "--loss", "coder", "--concepts", str(path)]
    )


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
