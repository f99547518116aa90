"""The command ``coder-plugin eval``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.cli.encoding import OPENING_AND_READING, ExportFlag, RerankerFlag
from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

_METRICS, _TUNING = "more metrics", "before and after fine-tuning"


@dataclass(frozen=True, kw_only=True)
class Command(ExportFlag, RerankerFlag):
    """The flags of ``coder-plugin eval``."""

    run_folder: list[str] = option(
        [], "folder of a run (its options and best export), an export or a shared model; several: also their ensemble, and the "
        "mean and standard deviation over them",
        metavar="RUN", positional=True
    )
    folds: int = option(0, "also report the mean over N folds (COCO 1K: 5)")
    beta: list[float] = option(
        [], "weights of CODER's instance score, instead of the trained one: a row for each; the concept score has 1 - B",
        metavar="B"
    )
    context_weight: list[float] = option(
        [], "weights of SelfAlign's context score, instead of the trained one: a row for each; 0 leaves it out (one run only, "
        "without --pictures)", metavar="W"
    )
    analyses: str | None = option(
        None, "also report alignment, uniformity and recall by query length (AsCL, section III); write numbers and plots to "
        "FOLDER", metavar="FOLDER"
    )
    pictures: str | None = option(
        None, "also write figures to FOLDER: which region or patch each word attends to, the context map, and t-SNE of words "
        "and regions (SelfAlign, figures 4 and 5)", metavar="FOLDER"
    )
    pictures_count: int | None = option(None, "draw the first N images [8]", at_least=1)
    pictures_concepts: str | None = option(
        None, "words to show in the t-SNE, such as dog,water,snow [the ten most frequent]", metavar="WORDS"
    )
    json: str | None = option(None, "write the numbers to FILE ('-': standard output)", metavar="FILE")
    split: str = option("val", "split of Karpathy files, precomp folders and scenes")
    by: list[str] = option(
        [], "recall by kind of caption: words (colour, number, relation, size, people, action), length, or place in the "
        "image's list of captions; with counts and 95 % intervals", choices=("words", "length", "place"), metavar="KIND",
        group=_METRICS
    )
    eccv: bool = option(
        False, "ECCV Caption on COCO's Karpathy test split: mAP@R, R-Precision and recall, with CxC's and COCO's recall",
        group=_METRICS
    )
    cxc: str | None = option(
        None, "CxC's recalls, i2t t2i i2i t2t, on that split: the folder of its csv files", metavar="FOLDER",
        group=_METRICS
    )
    zeroshot: str | None = option(
        None, "zero-shot classification of the pictures in FOLDER/CLASS/, before and after fine-tuning", metavar="FOLDER",
        group=_TUNING
    )
    classnames: str | None = option(
        None, "class names for --zeroshot: JSON, or lines of folder TAB name [FOLDER/classnames.txt]", metavar="FILE",
        group=_TUNING
    )
    templates: str | None = option(
        None, "prompts for --zeroshot: openai (80), simple (7) or a file with one per line, {} for the class [openai]",
        group=_TUNING
    )
    base: str | None = option(
        None, "the model before fine-tuning: a run, an export, or weights of the same architecture [the run's --pretrained]",
        metavar="MODEL", group=_TUNING
    )
    wise_ft: list[float] | None = option(
        None, "also evaluate interpolated weights, (1 - A) * before + A * after: a row for each (WiSE-FT)", metavar="A",
        group=_TUNING
    )
    wise_ft_save: list[str] | None = option(
        None, "write the interpolated model at A as an export", metavar=("A", "FOLDER"), group=_TUNING
    )


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="recall of a model on a data set",
        description="Image-to-text and text-to-image recall of a run's export, a shared model, or any open_clip model.",
    )
    add_command(parser, Command, run, options=[*OPENING_AND_READING, "val_data", "rerank"])


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_exists, check_model, check_options, check_parent

    for folder in arguments.run_folder:
        check_model(folder)
    check_options(options, reads=["val_data" if "val_data" in options else "train_data", "image_root"])
    if not arguments.run_folder and "model" not in options:
        raise CoderError("name the model: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    for flag in ("cxc", "zeroshot", "classnames"):
        if (path := getattr(arguments, flag)) is not None:
            check_exists(path, flag=f"--{flag}")
    check_parent(arguments.json, "--json")
    results = evaluate_command(arguments, options)
    if not results:
        return 0  # another rank prints
    if arguments.json:
        rows = [{"name": name, **result} for name, result in results.items()]
        single = len(rows) == 1 and not (arguments.beta or arguments.context_weight)
        text = json.dumps(rows[0] if single else rows, indent=2)
        if arguments.json == "-":
            echo(text)
            return 0
        with open(arguments.json, "w") as file:
            file.write(text + "\n")
    echo(_format(results, arguments))
    return 0


def evaluate_command(arguments: Command, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of :func:`~coder_plugin.evaluation.compare.evaluate_models` for the flags; writes analyses and pictures.

    Args:
        arguments: the flags.
        options: of model and data, by flat name.

    Raises:
        CoderError: flags that do not go together, models or data that cannot be opened.
    """
    from coder_plugin.data.from_config import pictures_under_regions
    from coder_plugin.evaluation.benchmarks import load_benchmarks
    from coder_plugin.evaluation.compare import Measures, evaluate_models
    from coder_plugin.evaluation.wise_ft import fine_tuning

    drawing: Any = None
    on_model: Any = None
    collected: dict[str, Any] = {}
    if any(each is not None for each in (arguments.pictures, arguments.pictures_count, arguments.pictures_concepts)):
        from coder_plugin.report import eval_figures
        from coder_plugin.report.alignment import LOCALS

        drawing = eval_figures.figure_options(
            arguments.pictures,
            images=arguments.pictures_count,
            concepts=arguments.pictures_concepts,
            reweighted=bool(arguments.beta or arguments.context_weight),
        )

        def on_model(name: str, encoder: Any, source: Any, data: Any) -> None:
            pictures = pictures_under_regions(data, arguments.split)
            collected[name] = eval_figures.collect(drawing, encoder, source, pictures)

    tuning = fine_tuning(
        zeroshot=arguments.zeroshot, base=arguments.base, alphas=arguments.wise_ft, save=arguments.wise_ft_save
    )
    if tuning is not None and drawing is not None:
        raise CoderError(f"{tuning.flags}: leave out --pictures, and draw them in a run of their own")
    measures = Measures(
        folds=arguments.folds,
        betas=arguments.beta,
        context_weights=arguments.context_weight,
        analyses=bool(arguments.analyses),
        benchmarks=load_benchmarks(
            eccv_caption=arguments.eccv,
            cxc_folder=arguments.cxc,
            **{name: getattr(arguments, name) for name in ("by", "zeroshot", "classnames", "templates")},
        ),
        fine_tuning=tuning,
    )
    if arguments.analyses:
        from coder_plugin.report.figures import check_figures, plot_analyses

        measures.check(len(set(arguments.run_folder)) or 1)  # before the folder is made
        check_figures("--analyses", arguments.analyses, "draws with matplotlib", "matplotlib")
    results = evaluate_models(
        arguments.run_folder,
        options,
        measures,
        export=arguments.export,
        split=arguments.split,
        return_intermediates=() if drawing is None else LOCALS,
        on_model=on_model,
        reranker=arguments.reranker,
    )
    if results and arguments.analyses:
        rows = analyses_of(results)
        (Path(arguments.analyses) / "analyses.json").write_text(json.dumps(rows, indent=2) + "\n")
        plot_analyses(rows, Path(arguments.analyses))
    if results and drawing is not None:
        for name, measured in eval_figures.write(drawing, collected).items():
            results[name]["concept_words"] = measured
    return results


def analyses_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The analyses among the rows, by name."""
    return {name: result["analyses"] for name, result in results.items() if "analyses" in result}


def _format(results: Mapping[str, Mapping[str, Any]], arguments: Command) -> str:
    """The tables that the command prints."""
    from coder_plugin.evaluation import format_analyses, format_table
    from coder_plugin.evaluation.benchmarks import format_benchmarks
    from coder_plugin.evaluation.metrics import format_skipped

    rows = {}
    for name, result in results.items():
        first = f"{name}, re-ranked {result['rerank']}" if "rerank" in result else name
        for label, figures in ((first, result), (f"{name}, shortlist", result.get("shortlist"))):
            if figures is not None:
                rows[label] = figures
                if "folds" in figures:
                    rows[f"{label}, mean of {arguments.folds} folds"] = figures["folds"]
    parts = [format_table(rows) + format_skipped(results), format_benchmarks(results)]
    if analyses := analyses_of(results):
        parts.append(format_analyses(analyses))
    if arguments.pictures:
        from coder_plugin.report.eval_figures import format_measured

        measured = {name: result["concept_words"] for name, result in results.items() if "concept_words" in result}
        parts.append("\n".join([*format_measured(measured), f"pictures: {arguments.pictures}"]))
    return "\n\n".join(part for part in parts if part)
