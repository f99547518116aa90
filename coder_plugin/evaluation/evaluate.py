"""Encode a data set and read its recall (METHODS 10), by a fusion score in two stages (METHODS 8), and analyse it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.config import TrainConfig
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import wise_ft as retention
from coder_plugin.evaluation.evaluation_sets import Known, Sets, asked, further, known_of
from coder_plugin.evaluation.sweep import sweep
from coder_plugin.evaluation.two_stage import measure, plain
from coder_plugin.evaluation.zero_shot import zero_shot
from coder_plugin.objective import Objective
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.pretrained.open import open_trained, trained_config
from coder_plugin.report import eval_figures
from coder_plugin.report.alignment import LOCALS
from coder_plugin.report.figures import check_figures
from coder_plugin.resolver import resolve

__all__ = ["Encoded", "Encoder", "analyses_of", "ensemble", "evaluate", "evaluate_command", "shortlist_length"]

#: Candidates of each query that a fusion score re-orders where nothing else is said.
SHORTLIST = 32


def evaluate(
    encoder: Encoder, source: Any, *, folds: int = 0, rerank: int | str | None = None, encoded: Encoded | None = None
) -> dict[str, Any]:
    """Recall over the whole set, and with ``folds`` also their mean (COCO's 1K protocol) under ``folds``.

    Of a model with a fusion score, recall is that of the re-ranked shortlists; ``rerank`` says how long these were, and
    ``shortlist`` holds the same figures of the embeddings alone. Every rank gets the numbers; rank 0 computes them.

    Args:
        rerank: how many candidates of each query the fusion score re-orders, or "all": it scores every pair, as the paper
            does. None: 32, and all where no term has trained the towers' own features, which make the shortlist.
        encoded: what the encoder gives of the source, where it is at hand.

    Raises:
        CoderError: ``rerank`` is neither, or the model has no fusion score.
    """
    depth = shortlist_length(rerank, encoder)
    return _result(_Row("", encoder(source) if encoded is None else encoded, depth), folds, Sets())


def shortlist_length(rerank: int | str | None, encoder: Encoder) -> int | None:
    """Candidates of each query that are re-ranked, None for all pairs, from what a person asked for: "K", "all" or None.

    Raises:
        CoderError: it is neither, or the model has no fusion score to re-rank by.
    """
    if rerank is None:
        return SHORTLIST if encoder.reranking is None or _trains_towers(encoder.model.coder.objective) else None
    if rerank == "all" or (str(rerank).isdecimal() and int(rerank) > 0):
        if encoder.reranking is None:
            raise CoderError(
                f"--rerank {rerank} orders candidates by a fusion score, and this model has no fusion head: leave it out, or "
                'train one, such as --loss "ascl(similarity=fusion) + ascl"'
            )
        return None if rerank == "all" else int(rerank)
    raise CoderError(f"--rerank must be a number of candidates, 1 or more, or all, got {rerank!r}")


def _trains_towers(objective: Objective) -> bool:
    """Whether some term compares the towers' own features."""
    bindings = resolve(objective, {"image_features", "text_features", "logit_scale", "logit_bias"}).bindings
    return any("image_features" in binding.values() for binding in bindings)


def ensemble(encoded: Sequence[Encoded]) -> Encoded:
    """Several models' vectors of the same images as one: its score is the mean of their similarities (METHODS 10).

    Shortlists are by the mean product; where one of them re-ranks, the mean is of the others' products and its fusion score.

    Raises:
        CoderError: the models did not read the same images and captions.
    """
    first = encoded[0]
    for other in encoded[1:]:
        if not torch.equal(first.image_ids, other.image_ids) or not torch.equal(first.image_of_text, other.image_of_text):
            common = len(set(first.image_ids.tolist()) & set(other.image_ids.tolist()))
            raise CoderError(
                f"the models of an ensemble read different images: {len(first.image_ids)} and {len(other.image_ids)}, "
                f"{common} in common, or in another order: evaluate them on the same data (--val-data)"
            )
    return Encoded(
        [each.images for each in encoded],
        [each.texts for each in encoded],
        first.image_of_text,
        first.image_ids,
        first.captions,
        [each.items for each in encoded],
    )


class _Row(NamedTuple):
    """One line of the command's table, encoded."""

    name: str
    encoded: Encoded
    depth: int | None
    known: Known | None = None
    zero_shot: dict[str, Any] | None = None


def _result(row: _Row, folds: int, sets: Sets, *, analyses: bool = False) -> dict[str, Any]:
    """Its figures, on every rank; with ``analyses`` those of a single model are under that key."""
    result: dict[str, Any] = {}
    if distributed.rank() == 0:
        encoded = row.encoded
        measured = measure(encoded, folds, row.depth)
        result = plain(measured)
        if row.known is not None:
            result.update(further(sets, row.known, encoded, measured))
        if row.zero_shot is not None:
            result["zero_shot"] = row.zero_shot
        if analyses and isinstance(encoded.images, Tensor):
            from coder_plugin.evaluation.analyses import analyse

            vectors = encoded.images, encoded.texts, encoded.image_of_text
            result["analyses"] = analyse(*vectors, encoded.captions, t2i_ranks=measured["t2i_ranks"])
    return distributed.gather_objects(result)[0]


def evaluate_command(arguments: Any) -> dict[str, dict[str, Any]]:
    """``coder-plugin eval``: recall by the model's name, once for each ``--beta`` and ``--context-weight``, of several models
    each and together, and with ``--zeroshot``, ``--base`` or ``--wise-ft`` of the model before and after fine-tuning (empty on
    ranks but the first), as :func:`evaluate` gives it. What further flags ask for is under ``by``, ``eccv``, ``cxc`` and
    ``zero_shot``. With ``--analyses FOLDER``, each model's are under ``analyses`` and written there with their figures; with
    ``--pictures FOLDER``, those of words and regions are written there, and what t-SNE's points measure is under
    ``concept_words``."""
    runs = list(dict.fromkeys(arguments.run_folder)) or [None]
    weights = {"--beta": arguments.beta, "--context-weight": arguments.context_weight}
    weights = {flag: given for flag, given in weights.items() if given}
    flags = " and ".join(weights)
    if len(runs) > 1 and weights:
        raise CoderError(f"{flags} is for one model: an ensemble has each model's own")
    folder = getattr(arguments, "analyses", None)
    if folder and weights:
        raise CoderError(f"--analyses are of a model as it was trained: leave out {flags}")
    if folder:
        check_figures("--analyses", folder, "draws with matplotlib", "matplotlib")
    wanted = eval_figures.figure_options(
        getattr(arguments, "pictures", None),
        images=getattr(arguments, "pictures_count", None),
        concepts=getattr(arguments, "pictures_concepts", None),
        reweighted=bool(getattr(arguments, "beta", None) or getattr(arguments, "context_weight", None)),
    )
    tuning = retention.asked(arguments, runs)
    sets = asked(arguments)
    drawn: dict[str, eval_figures.FigureData] = {}
    rows: Iterable[_Row]
    if tuning is not None:
        rows = _tuned_rows(arguments, runs[0], tuning, sets)
    elif weights:
        rows = _weighed_rows(arguments, runs[0], weights, sets)
    else:
        rows = _model_rows(arguments, runs, sets, wanted, drawn)
    results = {row.name: _result(row, arguments.folds, sets, analyses=bool(folder)) for row in rows}
    if distributed.rank() != 0:
        return {}
    if folder:
        _write_analyses(analyses_of(results), Path(folder))
    if wanted is not None:
        for name, measured in eval_figures.write(wanted, drawn).items():
            results[name]["concept_words"] = measured
    return results


def _weighed_rows(
    arguments: Any, run: str | None, weights: Mapping[str, Sequence[float]], sets: Sets
) -> Iterator[_Row]:
    """One model with other weights of its score's parts."""
    one = _evaluated(arguments, run)
    depth, known = shortlist_length(one.rerank, one.encoder), known_of(sets, one.source)
    betas, context_weights = (weights.get(flag, ()) for flag in ("--beta", "--context-weight"))
    for name, each in sweep(one.encoder, one.source, betas=betas, context_weights=context_weights):
        yield _Row(f"{one.name}, {name}", each, depth, known)


def _model_rows(
    arguments: Any,
    runs: Sequence[str | None],
    sets: Sets,
    wanted: eval_figures.FigureOptions | None,
    drawn: dict[str, eval_figures.FigureData],
) -> list[_Row]:
    """Each model, and several together. ``drawn``: takes what ``wanted`` pictures are made of, by name."""
    rows: list[_Row] = []
    fused: set[int | None] = set()  # of those that re-rank
    for run in runs:
        one = _evaluated(arguments, run)
        fuses = one.encoder.reranking is not None
        # in an ensemble the flag is for those that have a fusion score
        depth = shortlist_length(one.rerank if fuses or len(runs) == 1 else None, one.encoder)
        fused.update([depth] if fuses else [])
        known = known_of(sets, one.source)
        if wanted is not None and distributed.rank() == 0:
            drawn[one.name] = eval_figures.collect(wanted, one.encoder, one.source, one.beside)
        rows.append(_Row(one.name, one.encoder(one.source), depth, known))
        del one  # one model at a time on the device
    if len(runs) > 1:
        if len(fused) > 1:
            kinds = " and ".join(sorted("all" if depth is None else str(depth) for depth in fused))
            raise CoderError(f"the models of this ensemble re-rank {kinds} candidates: say how many with --rerank")
        given = getattr(arguments, "rerank", None)
        if given is not None and not fused:
            raise CoderError(f"--rerank {given}: none of the models has a fusion score to order candidates by")
        together = ensemble([row.encoded for row in rows])
        rows.append(_Row(f"ensemble of {len(runs)}", together, fused.pop() if fused else SHORTLIST, rows[0].known))
    return rows


def _tuned_rows(arguments: Any, run: str | None, tuning: retention.Asked, sets: Sets) -> Iterator[_Row]:
    """The model before fine-tuning, where there is one, the weights between, and the model after; one at a time."""
    config, source = _data_of(arguments, run)
    known = known_of(sets, source)

    def row(name: str, encoder: Encoder, rerank: str | None) -> _Row:
        accuracy = None if sets.classes is None else zero_shot(encoder, sets.classes)
        return _Row(name, encoder(source), shortlist_length(rerank, encoder), known, accuracy)

    before = retention.open_base(run, _given(arguments), config, source, tuning, export=arguments.export)
    weights, base = None, ""
    if before is not None:
        base = before.name.removeprefix("before: ")
        yield row(before.name, before.encoder(), None)
        weights = retention.weights_of(before.model) if tuning.alphas else None
    del before
    one = _evaluated(arguments, run, data=(config, source))
    if weights is None:
        yield row(one.name, one.encoder, one.rerank)
        return
    between = retention.Between(one.encoder.model, weights)
    for alpha in tuning.alphas:
        between.to(alpha)
        if tuning.save is not None and alpha == tuning.save[0] and distributed.rank() == 0:
            retention.save(one.encoder, tuning.save[1], alpha=alpha, tuned=one.name, base=base)
        yield row(f"{one.name}, wise-ft {alpha:g}", one.encoder, one.rerank)
    if 1.0 not in tuning.alphas:
        between.to(1.0)
        yield row(one.name, one.encoder, one.rerank)


def analyses_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The analyses among :func:`evaluate_command`'s rows, for ``format_analyses``."""
    return {name: result["analyses"] for name, result in results.items() if "analyses" in result}


def _write_analyses(rows: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    from coder_plugin.report.figures import plot_analyses

    (folder / "analyses.json").write_text(json.dumps(rows, indent=2) + "\n")
    plot_analyses(rows, folder)


class _Evaluated(NamedTuple):
    name: str
    source: Any
    encoder: Encoder
    rerank: str | None
    beside: Any = None  # pictures of what is read as regions, where --pictures asks for them


def _given(arguments: Any) -> dict[str, Any]:
    """The options that the flags and a file set."""
    given = dict(arguments.options)
    if given.get("val_data") and not given.get("train_data"):
        given["train_data"] = given["val_data"]  # evaluation alone: not the built-in scenes
    return given


def _data_of(arguments: Any, run: str | None) -> tuple[TrainConfig, Any]:
    """The options that open one run's export, or what the flags name, and its data."""
    config = trained_config(run, _given(arguments), export=arguments.export)
    if run is not None and not (Path(run) / "config.json").is_file() and config.data.val is None:
        raise CoderError(f"{run} is an export, which names no data: say what to evaluate on with --val-data")
    source = make_source(config, split=arguments.split)
    if source is None:
        raise CoderError("no data to evaluate on: name them with --val-data")
    return config, source


def _evaluated(arguments: Any, run: str | None, *, data: tuple[TrainConfig, Any] | None = None) -> _Evaluated:
    """The name, the data, the model and the shortlist's length of one run's export, or of what the flags name."""
    config, source = data or _data_of(arguments, run)
    drawing = bool(getattr(arguments, "pictures", None))
    trained = open_trained(config, name=run and str(run), source=source, return_intermediates=LOCALS if drawing else ())
    beside = pictures_under_regions(config, arguments.split) if drawing else None
    return _Evaluated(trained.name, source, trained.encoder(), config.evaluation.rerank, beside)
