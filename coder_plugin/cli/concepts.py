"""``coder-plugin concepts``: build the concept vocabulary of a data set's training captions."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Any

from coder_plugin.concepts.build import build_vocabulary
from coder_plugin.concepts.tagging import make_tagger
from coder_plugin.concepts.vectors import WordVectors
from coder_plugin.concepts.vocabulary import artefact_path, check_writable, describe
from coder_plugin.concepts.words import read_stop_words
from coder_plugin.errors import CoderError


def concepts_command(arguments: argparse.Namespace) -> str:
    """Build and save the vocabulary; returns its description.

    Everything that can fail is checked first, since tagging a large corpus takes minutes.
    """
    from coder_plugin.cli.flags import read_options
    from coder_plugin.config import READING, resolve
    from coder_plugin.data.from_config import make_captions, make_source

    flags = read_options(arguments)
    config = resolve([("flag", flags)])
    if arguments.max_captions is not None and arguments.max_captions < 1:
        raise CoderError(f"--max-captions is {arguments.max_captions}; it must be 1 or more")
    path = artefact_path(arguments.output)
    check_writable(path)
    vectors = None if arguments.vectors == "none" else WordVectors(arguments.vectors)
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


def _captions(source: Any, limit: int | None) -> Iterator[str]:
    """The captions of a source, image by image; no picture is decoded."""
    from tqdm import tqdm

    from coder_plugin.data.from_config import captions_of

    return iter(tqdm(islice(captions_of(source), limit), desc="captions", unit="", unit_scale=True, disable=None, leave=False))
