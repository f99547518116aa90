"""The model card: what a model is, how it was trained, its recall, its limits, and how to use and cite it.

Its text is the template ``card.md`` beside this file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: The loss terms and heads of each paper.
_TERMS = {
    "coder": ("dcl", "m_dcl", "concept_dcl", "pgc"),
    "ascl": ("ascl", "fusion"),
    "selfalign": ("lca", "cra"),
}
_CITATIONS = {
    "coder": """@inproceedings{wang2022coder,
  title     = {{CODER}: Coupled Diversity-Sensitive Momentum Contrastive Learning for Image-Text Retrieval},
  author    = {Wang, Haoran and He, Dongliang and Wu, Wenhao and Xia, Boyang and Yang, Min and Li, Fu and Yu, Yunlong
               and Ji, Zhong and Ding, Errui and Wang, Jingdong},
  booktitle = {European Conference on Computer Vision (ECCV)},
  year      = {2022},
  note      = {arXiv:2208.09843}
}""",
    "ascl": """@inproceedings{gong2024ascl,
  title     = {{AsCL}: An Asymmetry-sensitive Contrastive Learning Method for Image-Text Retrieval with Cross-Modal Fusion},
  author    = {Gong, Ziyu and Mai, Chengcheng and Huang, Yihua},
  booktitle = {IEEE International Conference on Multimedia and Expo (ICME)},
  year      = {2024},
  note      = {arXiv:2405.10029}
}""",
    "selfalign": """@article{zhuang2023selfalign,
  title   = {Towards Fast and Accurate Image-Text Retrieval with Self-Supervised Fine-Grained Alignment},
  author  = {Zhuang, Jiamin and Yu, Jing and Ding, Yang and Qu, Xiangyan and Hu, Yue},
  journal = {IEEE Transactions on Multimedia},
  year    = {2023},
  note    = {arXiv:2308.14009}
}""",
    "open_clip": """@software{ilharco2021openclip,
  title     = {{OpenCLIP}},
  author    = {Ilharco, Gabriel and Wortsman, Mitchell and Wightman, Ross and Gordon, Cade and Carlini, Nicholas
               and Taori, Rohan and Dave, Achal and Shankar, Vaishaal and Namkoong, Hongseok and Miller, John
               and Hajishirzi, Hannaneh and Farhadi, Ali and Schmidt, Ludwig},
  publisher = {Zenodo},
  year      = {2021},
  doi       = {10.5281/zenodo.5143773}
}""",
}
_DIRECTIONS = {"i2t": "image to text", "t2i": "text to image"}
_RECALLS = {f"{direction}_r{k}": f"{name} R@{k}" for direction, name in _DIRECTIONS.items() for k in (1, 5, 10)}
#: With fewer training images the card warns of a small data set.
_FEW_IMAGES = 100_000


def card_text(
    name: str,
    record: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    on_hub: bool,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """The text of a model card, ``README.md``: metadata for the hub as YAML, then Markdown.

    Args:
        name: the name of the repository or folder.
        record: the content of ``coder_run.json``.
        sizes: bytes of each weights file.
        on_hub: whether ``name`` is a repository.
        license: the licence of the weights by the hub's name for it.
        base_model: the repository of the model that training started from.
        datasets: names of the training data.
    """
    from huggingface_hub import ModelCard

    model, run, results, wise_ft = record["model"], record["run"], record["results"], record.get("wise_ft")
    library = _library(model)
    images = (run.get("training data") or {}).get("images")
    vectors = f"re-ranked, {results['rerank']}" if "rerank" in results and "shortlist" in results else "vectors"
    rows = {vectors: results, "vectors alone": results.get("shortlist")}
    used = {term["name"] for term in record["terms"].get("terms", [])} | set(model["heads"])
    papers = [paper for paper, names in _TERMS.items() if used & set(names)]
    papers += ["open_clip"] if model["pictures"] and library == "open_clip" else []
    card = ModelCard.from_template(
        _metadata(name, record, license, base_model, datasets),
        template_path=str(Path(__file__).with_name("card.md")),
        **{key: record[key] for key in ("model", "objective", "terms", "options", "run", "results")},
        name=name,
        kind=_kind(model, record["options"].get("model")),
        origin=_origin(record),
        wise_ft=wise_ft,
        sizes=sizes,
        library=library,
        base_model=base_model,
        datasets=datasets,
        license=license,
        rows=[(label, row) for label, row in rows.items() if row],
        columns=[*_RECALLS, "rsum"],
        few=isinstance(images, int) and images < _FEW_IMAGES,
        on_hub=on_hub,
        command_name=shlex.quote(f"hf-hub:{name}" if on_hub else name),
        citations=[_CITATIONS[paper] for paper in papers],
        count=lambda number: f"{number:,}" if isinstance(number, int) else "an unknown number of",
        percent=lambda figure: f"{figure:.2f}" if isinstance(figure, (int, float)) else "–",
    )
    return f"{card.content.rstrip()}\n"


def _metadata(
    name: str, record: Mapping[str, Any], license: str | None, base_model: str | None, datasets: Sequence[str]
) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    model, results = record["model"], record["results"]
    validation: str = (record["run"].get("validation data") or {}).get("name", "")
    figures = {**_RECALLS, "rsum": "R@sum"} if results and validation else {}
    evaluated = [
        EvalResult(
            task_type="image-text-retrieval",
            task_name="Image-text retrieval",
            dataset_type=validation,
            dataset_name=validation,
            dataset_split="validation",
            metric_type="recall",
            metric_name=label,
            metric_value=round(results[key], 4),
        )
        for key, label in figures.items()
        if isinstance(results.get(key), (int, float))
    ]
    library = _library(model)
    opens_in_library = model["pictures"] and not model["heads"] and model["aggregator"] == "tower"
    inputs = [library, "clip"] if model["pictures"] else ["region-features"]
    return ModelCardData(
        library_name=library if opens_in_library else "coder_plugin",
        tags=["coder_plugin", "image-text-retrieval", *inputs],
        pipeline_tag="zero-shot-image-classification" if model["pictures"] else "feature-extraction",
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )


def _library(model: Mapping[str, Any]) -> str:
    """The library of a model that reads pictures."""
    return "transformers" if model.get("library") == "transformers" else "open_clip"


def _kind(model: Mapping[str, Any], option: str | None) -> str:
    if not model["pictures"]:
        return f"a region model ({model['name']})"
    article = {"open_clip": "an open_clip model", "transformers": "a model of transformers"}[_library(model)]
    return f"{article} ({model['class']}{f', `{option}`' if option else ''})"


def _origin(record: Mapping[str, Any]) -> str:
    """How the model was made, as far as the record says."""
    if wise_ft := record.get("wise_ft"):
        alpha, tuned, base = (wise_ft.get(key, "unknown") for key in ("alpha", "tuned", "base"))
        return (
            f" with weights interpolated between two models (WiSE-FT, arXiv:2109.01903): {alpha} of the fine-tuned model, "
            f"`{tuned}`, and the rest of the model before fine-tuning, `{base}`"
        )
    return " trained with coder_plugin" if record["run"] or record["objective"] else ""
