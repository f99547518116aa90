"""``coder-plugin concepts``: the vocabulary of a data set's training captions, written to a file and told of."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from coder_plugin.concepts.build import build_vocabulary
from coder_plugin.concepts.tagging import Tagger, scenes_tagger, spacy_tagger
from coder_plugin.concepts.vectors import WordVectors
from coder_plugin.concepts.vocabulary import TYPES, Vocabulary, artefact_path, check_writable
from coder_plugin.concepts.words import DEFAULT_STOP_WORDS
from coder_plugin.errors import CoderError

_TOP = 10


def concepts_command(arguments: argparse.Namespace) -> str:
    """Build and save the vocabulary that the arguments ask for; returns the report.

    What can fail at once is asked first: tagging a large corpus takes minutes.
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
    vocabulary = build_vocabulary(
        _captions(source, arguments.max_captions),
        tagger=_tagger(arguments, on_scenes=config.data.on_scenes or config.data.train == "scenes"),
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
    return f"{report(vocabulary)}\nwritten: {path}, {path.with_suffix('.json')}\nnext: " + shlex.join(
        ["coder-plugin", "train", *(["--model", "MODEL", *data] if data else ()), "--loss", "coder", "--concepts", str(path)]
    )


def report(vocabulary: Vocabulary) -> str:
    """What a vocabulary holds and what it lacks, for a person to read before training on it."""
    from coder_plugin.functional import concept_graph

    settings = vocabulary.settings
    lines = [
        f"captions: {settings['captions']}, of {settings['source'] or 'no named source'}, tagged by {settings['tagger']}"
    ]
    lines.append(f"{'type':<9} {'asked':>6} {'taken':>6} {'in all':>7}  most frequent")
    for kind in TYPES:
        numbers = f"{settings['asked'][kind]:>6} {settings['found'][kind]:>6} {settings['there'][kind]:>7}"
        lines.append(f"{kind:<9} {numbers}  {', '.join(vocabulary.of_type(kind)[:_TOP])}")
    g, dim = vocabulary.vectors.shape
    total = f"{g} concepts" if g == settings["size"] else f"{g} concepts, fewer than the {settings['size']} asked for"
    lines.append(f"{total}; the rarest is in {int(vocabulary.counts.min())} captions")
    graph = concept_graph(vocabulary.cooccurrence, vocabulary.counts)
    linked = graph.fill_diagonal_(0) > 0
    edges, alone = int(linked.sum()), int((~linked.any(0) & ~linked.any(1)).sum())
    lines.append(
        f"graph: {edges} edges, {100 * edges / max(1, g * (g - 1)):.2f} % of all; {alone} concepts without one"
    )
    if settings["vectors"] is None:
        return "\n".join([*lines, f"word vectors: none given: all {g} are random, N(0, 1), {dim} dimensions"])
    named, lacking = settings["surface_vectors"], vocabulary.missing
    lines.append(f"word vectors: {g - len(lacking)} of {g} from {settings['vectors']}, {dim} dimensions")
    if named:
        forms = ", ".join(f"{word} ({form})" for word, form in named.items())
        lines.append(f"  {len(named)} of a surface form, the word itself having none: {forms}")
    if lacking:
        lines.append(f"  {len(lacking)} missing, random from N(0, {settings['sigma']:.3g}): {', '.join(lacking)}")
    return "\n".join(lines)


def read_stop_words(spec: str) -> Collection[str]:
    """``default``, ``none``, or a file of one word a line, where # begins a comment."""
    if spec == "default":
        return DEFAULT_STOP_WORDS
    if spec == "none":
        return ()
    try:
        with open(spec, encoding="utf-8-sig") as file:
            words = {line.partition("#")[0].strip() for line in file}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CoderError(f"--stop-words {spec}: {reason}; give default, none or a file of one word a line") from error
    return words - {""}


def _tagger(arguments: argparse.Namespace, *, on_scenes: bool) -> Tagger:
    name = arguments.tagger or ("scenes" if on_scenes else "en_core_web_sm")
    return scenes_tagger() if name == "scenes" else spacy_tagger(name, processes=arguments.processes)


def _captions(source: Any, limit: int | None) -> Iterator[str]:
    """The captions of a source, image by image; no picture is decoded."""
    from tqdm import tqdm

    from coder_plugin.data.from_config import captions_of

    return iter(tqdm(islice(captions_of(source), limit), desc="captions", unit="", unit_scale=True, disable=None, leave=False))
