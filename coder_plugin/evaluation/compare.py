"""Compare models on one data set: the rows of ``coder-plugin eval``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.config import DataConfig
from coder_plugin.data.from_config import make_source
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import wise_ft
from coder_plugin.evaluation.benchmarks import Benchmarks, DataTruths, match_data, measure_benchmarks
from coder_plugin.evaluation.evaluate import (
    SHORTLIST,
    ensemble,
    measure,
    positive_scores,
    shortlist_length,
    without_tensors,
)
from coder_plugin.evaluation.metrics import METRICS, mean_over_runs
from coder_plugin.evaluation.sweep import sweep
from coder_plugin.evaluation.zero_shot import zero_shot
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.pretrained.open import PretrainedModel, open_pretrained, saved_data_config

#: What is averaged over runs.
_AVERAGED = (*METRICS, "folds", "shortlist", "eccv", "cxc")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is measured of the models, besides recall over the whole data set.

    Args:
        folds: also the mean over so many folds; 0: none.
        betas: a row for each of these weights of the instance level against the concept level, instead of the model's own.
        context_weights: a row for each of these weights of SelfAlign's context level, instead of the model's own.
        analyses: alignment, uniformity and recall by the length of queries, of each single model.
        benchmarks: breakdowns, ECCV Caption, CxC, zero-shot classification.
        fine_tuning: also the model before fine-tuning, and weights between the two.
    """

    folds: int = 0
    betas: Sequence[float] = ()
    context_weights: Sequence[float] = ()
    analyses: bool = False
    benchmarks: Benchmarks = field(default_factory=Benchmarks)
    fine_tuning: wise_ft.FineTuning | None = None

    def check(self, models: int) -> None:
        """Refuse measures that do not go together, or not with so many models.

        Raises:
            CoderError: names the flags.
        """
        weights = {"--beta": self.betas, "--context-weight": self.context_weights}
        flags = " and ".join(flag for flag, values in weights.items() if values)
        if models > 1 and flags:
            raise CoderError(f"{flags} is for one model: an ensemble has each model's own")
        if self.analyses and flags:
            raise CoderError(f"--analyses are of a model as it was trained: leave out {flags}")
        if self.fine_tuning is not None:
            tuning = self.fine_tuning.flags
            if models > 1:
                raise CoderError(f"{tuning} is for one model, and there are {models}")
            others = [*flags.split(" and ")] if flags else ["--analyses"] if self.analyses else []
            if others:
                raise CoderError(f"{tuning}: leave out {others[0]}, and measure it in a run of its own")


class _Row(NamedTuple):
    """One line of the results, encoded."""

    name: str
    encoded: Encoded
    depth: int | None  # candidates that a fusion score re-ranks; None: all
    truths: DataTruths
    zero_shot: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Setting:
    """What all rows share."""

    options: Mapping[str, Any]
    measures: Measures
    split: str
    opening: Mapping[str, Any]  # further arguments of ``open_pretrained``

    def data(self, spec: str | None) -> tuple[Any, DataConfig]:
        """The data set to evaluate on, and how it is read.

        Raises:
            CoderError: no data are named.
        """
        config = saved_data_config(spec, self.options)
        if spec is None and "model" not in self.options and not config.on_scenes:
            raise CoderError("--model is needed with --val-data, or a run's or an export's folder, such as --model ViT-B-32")
        source = make_source(config, split=self.split)
        if source is None:
            raise CoderError("no data to evaluate on: name them with --val-data")
        return source, config

    def open(self, spec: str | None, source: Any) -> PretrainedModel:
        return open_pretrained(spec, self.options, name=None if spec is None else str(spec), source=source, **self.opening)


def evaluate_models(
    specs: Sequence[str | None],
    options: Mapping[str, Any],
    measures: Measures,
    *,
    export: str | None = None,
    split: str = "val",
    return_intermediates: Collection[str] = (),
    on_model: Callable[[str, Encoder, Any, DataConfig], None] | None = None,
    reranker: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Figures of each model, and of several models also those of their ensemble, and means and standard deviations.

    Every rank encodes its share of the data; the first computes the figures.

    Args:
        specs: runs' or exports' folders, or ``hf-hub:OWNER/NAME``; None: ``options`` name the model.
        options: of model and data, by flat name, over those of the run.
        measures: what to measure.
        export: which export of a run, "best" or "last"; None: best, or last if there is no best.
        split: of the data.
        return_intermediates: as in :func:`coder_plugin.create_model`.
        on_model: called on the first rank with each model's name, its encoder, the data and how they are read, while the model
            is in memory.
        reranker: as in :func:`~coder_plugin.pretrained.open.open_pretrained`, for all models.

    Returns:
        By name what :func:`~coder_plugin.evaluation.evaluate.evaluate` returns: a row for each model and the ensemble, or for
        each weight, or before and after fine-tuning. Of several models the last row is :func:`mean_over_runs` of their recall,
        ECCV Caption and CxC. Further measures are under ``by``, ``eccv``, ``cxc``, ``zero_shot`` and
        ``analyses``. Empty on ranks but the first.

    Raises:
        CoderError: measures that do not go together, models or data that cannot be opened or do not fit.
    """
    specs = list(dict.fromkeys(specs)) or [None]
    measures.check(len(specs))
    opening = {"export": export, "return_intermediates": return_intermediates, "reranker": reranker}
    setting = _Setting(options, measures, split, opening)
    rows: Iterable[_Row]
    if measures.fine_tuning is not None:
        rows = _fine_tuning_rows(setting, specs[0], measures.fine_tuning)
    elif measures.betas or measures.context_weights:
        rows = _weight_rows(setting, specs[0])
    else:
        rows = _model_rows(setting, specs, on_model)
    results = {row.name: _measure_row(row, measures) for row in rows}
    if distributed.rank() != 0:
        return {}
    if len(specs) > 1:
        runs = [{key: row[key] for key in _AVERAGED if key in row} for row in list(results.values())[: len(specs)]]
        results[f"mean of {len(specs)} runs"] = mean_over_runs(runs)
    return results


def _measure_row(row: _Row, measures: Measures) -> dict[str, Any]:
    """The row's figures, on every rank."""
    result: dict[str, Any] = {}
    if distributed.rank() == 0:
        encoded = row.encoded
        measured = measure(encoded, measures.folds, row.depth)
        result = {**without_tensors(measured), **measure_benchmarks(measures.benchmarks, row.truths, encoded, measured)}
        if row.zero_shot is not None:
            result["zero_shot"] = row.zero_shot
        if measures.analyses and isinstance(encoded.images, Tensor):
            from coder_plugin.evaluation.analyses import analyse, token_means
            from coder_plugin.heads.fusion import Fusion

            vectors = encoded.images, encoded.texts
            fused: dict[str, Any] = {"ranked_by": "embeddings"}
            if encoded.items is not None:
                pairs = "all pairs" if row.depth is None else f"the first {row.depth} by embedding"
                fused = {"ranked_by": f"fused score of {pairs}", "fused_scores": positive_scores(encoded)}
                if row.depth is None and isinstance(encoded.items.head, Fusion):  # its towers' embeddings may be in no loss
                    vectors = token_means(encoded.items.images), token_means(encoded.items.texts)
                    fused["compared"] = "means of the fusion's tokens"
            of_texts = encoded.image_of_text, encoded.captions
            result["analyses"] = analyse(*vectors, *of_texts, t2i_ranks=measured["t2i_ranks"], **fused)
    return distributed.gather_objects(result)[0]


def _weight_rows(setting: _Setting, spec: str | None) -> Iterator[_Row]:
    """One model with other weights of its score's parts."""
    source, _ = setting.data(spec)
    model = setting.open(spec, source)
    encoder = model.encoder()
    depth, truths = shortlist_length(model.rerank, encoder), match_data(setting.measures.benchmarks, source)
    weights = {"betas": setting.measures.betas, "context_weights": setting.measures.context_weights}
    for name, encoded in sweep(encoder, source, **weights):
        yield _Row(f"{model.name}, {name}", encoded, depth, truths)


def _model_rows(
    setting: _Setting, specs: Sequence[str | None], on_model: Callable[[str, Encoder, Any, DataConfig], None] | None
) -> list[_Row]:
    """Each model, and the ensemble of several."""
    rows: list[_Row] = []
    depths: set[int | None] = set()  # of the models that re-rank
    for spec in specs:
        source, data = setting.data(spec)
        model = setting.open(spec, source)
        encoder = model.encoder()
        reranks = encoder.reranking is not None
        # in an ensemble --rerank is for the models that have a fusion score
        depth = shortlist_length(model.rerank if reranks or len(specs) == 1 else None, encoder)
        depths.update([depth] if reranks else [])
        truths = match_data(setting.measures.benchmarks, source)
        if on_model is not None and distributed.rank() == 0:
            on_model(model.name, encoder, source, data)
        rows.append(_Row(model.name, encoder(source), depth, truths))
        del model, encoder  # only one model at a time on the device
    if len(specs) > 1:
        if len(depths) > 1:
            different = " and ".join(sorted("all" if depth is None else str(depth) for depth in depths))
            raise CoderError(f"the models of this ensemble re-rank {different} candidates: set one number with --rerank")
        if setting.options.get("rerank") is not None and not depths:
            raise CoderError(f"--rerank {setting.options['rerank']}: none of the models has a fusion score to re-rank by")
        combined = ensemble([row.encoded for row in rows])
        rows.append(_Row(f"ensemble of {len(specs)}", combined, depths.pop() if depths else SHORTLIST, rows[0].truths))
    return rows


def _fine_tuning_rows(setting: _Setting, spec: str | None, tuning: wise_ft.FineTuning) -> Iterator[_Row]:
    """The model before fine-tuning if there is one, the weights between, and the model after; one model at a time."""
    source, _ = setting.data(spec)
    benchmarks = setting.measures.benchmarks
    truths = match_data(benchmarks, source)

    def row(name: str, encoder: Encoder, rerank: str | None) -> _Row:
        accuracy = None if benchmarks.classes is None else zero_shot(encoder, benchmarks.classes)
        return _Row(name, encoder(source), shortlist_length(rerank, encoder), truths, accuracy)

    named = {name: setting.opening[name] for name in ("export", "reranker")}
    before = wise_ft.open_base(spec, setting.options, source, tuning, **named)
    weights, base_name = None, ""
    if before is not None:
        base_name = before.name.removeprefix("before: ")
        yield row(before.name, before.encoder(), None)
        weights = wise_ft.plain_weights(before.model) if tuning.alphas else None
    del before
    model = setting.open(spec, source)
    encoder = model.encoder()
    if weights is None:
        yield row(model.name, encoder, model.rerank)
        return
    tuned = wise_ft.plain_weights(encoder.model)
    for alpha in tuning.alphas:
        wise_ft.interpolate(encoder.model, weights, tuned, alpha)
        if tuning.save is not None and alpha == tuning.save[0] and distributed.rank() == 0:
            wise_ft.save(model, tuning.save[1], alpha=alpha, tuned=model.name, base=base_name)
        yield row(f"{model.name}, wise-ft {alpha:g}", encoder, model.rerank)
    if 1.0 not in tuning.alphas:
        wise_ft.interpolate(encoder.model, weights, tuned, 1.0)
        yield row(model.name, encoder, model.rerank)
