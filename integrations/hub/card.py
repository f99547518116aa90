"""The model card: what a model is, how it was trained, its recall, its limits, and how to use and cite it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
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

    parts = [
        f"# {name}",
        _description(record, sizes),
        _training(record, base_model, datasets),
        _recall(record),
        _limits(record, license),
        _use(name, record, on_hub),
        _citations(record),
    ]
    header = _header(name, record, license, base_model, datasets)
    return str(ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(parts) + "\n", ignore_metadata_errors=False))


def _header(name: str, record: Mapping[str, Any], license: str | None, base_model: str | None, datasets: Sequence[str]) -> str:
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
    ).to_yaml()


def _library(model: Mapping[str, Any]) -> str:
    """The library of a model that reads pictures; records of earlier versions do not name it."""
    return "transformers" if model.get("library") == "transformers" else "open_clip"


def _description(record: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    model = record["model"]
    option = record["options"].get("model")
    model_name = f", `{option}`" if option else ""
    article = {"open_clip": "an open_clip model", "transformers": "a model of transformers"}[_library(model)]
    kind = f"{article} ({model['class']}{model_name})" if model["pictures"] else f"a region model ({model['name']})"
    lines = [
        f"An image-text retrieval model: {kind}{_origin(record)}. Texts and images become vectors; their inner product is the "
        "score.",
        "",
        f"- parameters: {model['parameters']:,}" + (", heads included" if model["heads"] else ""),
        f"- vectors: {model['dimensions']} dimensions, float32"
        + (f", {model['views']} per image; the score is the largest of their inner products" if model["views"] > 1 else ""),
    ]
    if model["aggregator"] != "tower":
        lines.append("- features: patch and word tokens pooled by GPO, instead of the towers' pooled features")
    if model["heads"]:
        lines.append(f"- scoring heads: {', '.join(model['heads'])}")
    if model["concepts"]:
        lines.append(f"- concept vocabulary: {model['concepts']} words, in `concepts.json`")
    if model["re-ranks"]:
        lines.append("- re-ranking: a fusion score of regions and words re-orders the candidates of highest inner product")
    if not model["pictures"]:
        lines.append(f"- images: features of {model['max_regions']} regions at most; it does not read pictures")
    lines.append("- weights: " + ", ".join(f"`{name}` {size / 1e6:.1f} MB" for name, size in sorted(sizes.items())))
    return "\n".join(lines)


def _origin(record: Mapping[str, Any]) -> str:
    """How the model was made, as far as the record says."""
    if wise_ft := record.get("wise_ft"):
        return (
            f" with weights interpolated between two models (WiSE-FT, arXiv:2109.01903): {_get(wise_ft, 'alpha')} of the "
            f"fine-tuned model, `{_get(wise_ft, 'tuned')}`, and the rest of the model before fine-tuning, "
            f"`{_get(wise_ft, 'base')}`"
        )
    return " trained with coder_plugin" if record["run"] or record["objective"] else ""


def _training(record: Mapping[str, Any], base_model: str | None, datasets: Sequence[str]) -> str:
    run, lines = record["run"], ["## Training", ""]
    owner = " of the fine-tuned model" if record.get("wise_ft") else ""
    objective = f"- objective{owner}: `{record['objective']}`"
    lines.append(objective if record["objective"] else "- objective: unknown, because the export had no run")
    for term in record["terms"].get("terms", []):
        options = ", ".join(f"{key}={value}" for key, value in term["options"].items())
        lines.append(f"  - {term['name']}: weight {term['weight']:g}" + (f", {options}" if options else ""))
    for head, options in record["terms"].get("heads", {}).items():
        lines.append(f"  - head {head}: " + ", ".join(f"{key}={value}" for key, value in options.items()))
    if base_model:
        lines.append(f"- fine-tuned from: {base_model}")
    elif weights := record["options"].get("pretrained") or record["options"].get("pretrained_image_path"):
        lines.append(f"- started from the weights `{weights}`")
    if datasets:
        lines.append(f"- data sets: {', '.join(datasets)}")
    if data := run.get("training data"):
        captions = _get(data, "captions")
        lines.append(f"- training data: `{data['name']}`, {_count(data.get('images'))} images, captions: {captions}")
    if run:
        lines.append(
            f"- {_get(run, 'epochs')} epochs of {_get(run, 'steps per epoch')} steps, "
            f"{_get(run.get('batch', {}), 'global per step')} pairs per step, precision {_get(run, 'precision')}, "
            f"{_get(run, 'ranks')} process{'es' * (run.get('ranks') != 1)} on {_get(run, 'device')}, "
            f"seed {_get(record['options'], 'seed')}"
        )
        if versions := run.get("versions"):
            lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    lines.append("- every option: `coder_run.json`")
    return "\n".join(lines)


def _recall(record: Mapping[str, Any]) -> str:
    results, lines = record["results"], ["## Recall", ""]
    if not results:
        return "\n".join([*lines, "Not measured: the run had no validation data, or the export had no run."])
    columns = [*_RECALLS, "rsum"]
    names = ["image→text R@1", "R@5", "R@10", "text→image R@1", "R@5", "R@10", "R@sum"]
    lines += [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    ranked = f"re-ranked, {results['rerank']}" if "rerank" in results else "vectors"
    for label, row in ((ranked if "shortlist" in results else "vectors", results), ("vectors alone", results.get("shortlist"))):
        if row:
            lines.append(f"| {label} | {' | '.join(_percent(row.get(key)) for key in columns)} |")
    data = (record["run"].get("validation data") or {}).get("name")
    measured = f"Percent, on {_count(results.get('images'))} images and {_count(results.get('texts'))} captions"
    measured += f" of `{data}`" if data else ""
    lines += [
        "",
        f"{measured}; every caption and every image is a query against all of them. Measured after epoch "
        f"{results.get('epoch')} (step {results.get('step')}), precision {record['run'].get('precision', 'unknown')}. "
        "The epoch may have been selected by these figures.",
    ]
    return "\n".join(lines)


def _limits(record: Mapping[str, Any], license: str | None) -> str:
    model, run = record["model"], record["run"]
    images = (run.get("training data") or {}).get("images")
    lines = ["## Limits", ""]
    if isinstance(images, int) and images < _FEW_IMAGES:
        lines.append(f"- {images:,} training images are few: expect lower recall on other objects, scenes and wordings.")
    if (record["objective"] or run) and not record.get("wise_ft"):
        lines.append("- One run with one seed: a difference of 1 point of R@1 from another model may be chance.")
    lines.append("- Not tested: other data, other languages, fairness between groups of people, harmful or private content.")
    if model["re-ranks"]:
        lines.append("- The vectors alone reach the recall of the shortlist; the fusion score needs coder_plugin.")
    if model["pictures"] and (model["heads"] or model["aggregator"] != "tower"):
        lines.append(f"- Plain {_library(model)} opens only the towers: its scores differ from those above.")
    if not model["pictures"]:
        lines.append("- It does not open in plain open_clip.")
        lines.append("- Region features must come from the same detector as those in training.")
    terms = "Check the terms of the training data and of the pretrained weights."
    lines.append(f"- {terms}" if license else f"- No licence was stated. {terms}")
    return "\n".join(lines)


def _use(name: str, record: Mapping[str, Any], on_hub: bool) -> str:
    model, options = record["model"], record["options"]
    precision = options.get("precision", "auto")
    flags = ["--val-data DATA", *(["--regions FEATURES"] if not model["pictures"] else [])]
    flags += [f"--precision {precision}"] if precision != "auto" else []
    spec = f"hf-hub:{name}" if on_hub else name
    lines = ["## Use", "", "```python", "import coder_plugin", "", f'model = coder_plugin.from_pretrained("{name}")']
    if model["pictures"]:
        lines.append('images = model.encode_images(["a.jpg", "b.jpg"])    # paths or PIL pictures -> [2, D]')
    else:
        lines.append("images = model.encode_images(regions)               # coder_plugin.data.regions.base.Regions -> [n, D]")
    lines.append('texts = model.encode_texts(["a dog in the snow"])   # [1, D]')
    if model["views"] > 1:
        lines.append('scores = (images @ texts.T).amax(1)                 # the largest over an image\'s vectors')
    else:
        lines.append("scores = texts @ images.T")
    lines += ["```", "", "```bash", f"coder-plugin eval {shlex.quote(spec)} {' '.join(flags)}", "```"]
    if model["pictures"]:
        towers = _transformers(name) if _library(model) == "transformers" else _open_clip(name, model, on_hub)
        lines += ["", *towers, "", *_sentence_transformers(name)]
    return "\n".join(lines)


def _open_clip(name: str, model: Mapping[str, Any], on_hub: bool) -> list[str]:
    """How plain open_clip opens the towers. It reads a text tower's folder relative to the working directory."""
    has_text_folder = model["text tower"] == "text"
    where = "local-dir:." if has_text_folder else f"hf-hub:{name}" if on_hub else f"local-dir:{name}"
    lines = ["The towers in plain open_clip:", "", "```python"]
    lines += ["import os", "", "import open_clip"] if has_text_folder else ["import open_clip"]
    if has_text_folder:
        lines += ["from huggingface_hub import snapshot_download", ""] if on_hub else [""]
        folder = f'snapshot_download("{name}")' if on_hub else f'"{name}"'
        lines.append(f"os.chdir({folder})  # open_clip reads the text tower from the folder text in here")
    lines += [
        "",
        f'model, preprocess = open_clip.create_model_from_pretrained("{where}")',
        f'tokenizer = open_clip.get_tokenizer("{where}")',
        "```",
    ]
    return lines


def _transformers(name: str) -> list[str]:
    return [
        "The towers in transformers:",
        "",
        "```python",
        "from transformers import AutoModel, AutoProcessor",
        "",
        f'model, processor = AutoModel.from_pretrained("{name}"), AutoProcessor.from_pretrained("{name}")',
        "```",
    ]


def _sentence_transformers(name: str) -> list[str]:
    return [
        "The same vectors in sentence-transformers (`trust_remote_code` lets it import coder_plugin, which must be installed):",
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{name}", trust_remote_code=True)',
        'vectors = model.encode(["a dog in the snow", picture])   # texts and PIL pictures; similarity: dot',
        "```",
    ]


def _citations(record: Mapping[str, Any]) -> str:
    used = {term["name"] for term in record["terms"].get("terms", [])} | set(record["model"]["heads"])
    papers = [paper for paper, names in _TERMS.items() if used & set(names)]
    if record["model"]["pictures"]:
        papers += ["open_clip"] if _library(record["model"]) == "open_clip" else []
    if not papers:
        return ""
    return "## Citation\n\n```bibtex\n" + "\n\n".join(_CITATIONS[paper] for paper in papers) + "\n```"


def _get(values: Mapping[str, Any], name: str) -> Any:
    return values.get(name, "unknown")


def _percent(figure: Any) -> str:
    return f"{figure:.2f}" if isinstance(figure, (int, float)) else "–"


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "an unknown number of"
