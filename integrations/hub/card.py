"""The model card: what a model is, what it was trained on and with, how good it is, what nobody knows, and how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

#: Which terms and heads are of which paper.
_OF = {
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
_WAYS = {"i2t": "image to text", "t2i": "text to image"}
_RECALLS = {f"{way}_r{k}": f"{name} R@{k}" for way, name in _WAYS.items() for k in (1, 5, 10)}
#: Fewer images than this are few to learn from, whatever the towers began as.
_SMALL = 100_000


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
    """A whole ``README.md``: YAML for the hub, then Markdown.

    Args:
        name: the repository's or the folder's. record: what ``coder_run.json`` says. sizes: bytes of the files of weights.
        on_hub: whether ``name`` is a repository's. license, base_model, datasets: what nobody but the person who shares knows.
    """
    from huggingface_hub import ModelCard

    parts = [
        f"# {name}",
        _what(record, sizes),
        _training(record, base_model, datasets),
        _figures(record),
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
    plain = model["pictures"] and not model["heads"] and model["aggregator"] == "tower"
    reads = ["open_clip", "clip"] if model["pictures"] else ["region-features"]
    return ModelCardData(
        library_name="open_clip" if plain else "coder_plugin",
        tags=["coder_plugin", "image-text-retrieval", *reads],
        pipeline_tag="zero-shot-image-classification" if model["pictures"] else "feature-extraction",
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    ).to_yaml()


def _what(record: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    model = record["model"]
    named = f", `{record['options']['model']}`" if record["options"].get("model") else ""
    kind = f"an open_clip model ({model['class']}{named})" if model["pictures"] else f"a region model ({model['name']})"
    lines = [
        f"An image-text retrieval model: {kind}{_made(record)}. Texts and images become vectors; their inner product is the "
        "score.",
        "",
        f"- parameters: {model['parameters']:,}" + (", heads included" if model["heads"] else ""),
        f"- vectors: {model['dimensions']} dimensions, float32"
        + (f", {model['views']} of each image, the best of which counts" if model["views"] > 1 else ""),
    ]
    if model["aggregator"] == "gpo":
        lines.append("- features: pooled from patch and word tokens by GPO, instead of the towers' own")
    if model["heads"]:
        lines.append(f"- heads beside the towers: {', '.join(model['heads'])}")
    if model["concepts"]:
        lines.append(f"- concept vocabulary: {model['concepts']} words, in `concepts.json`")
    if model["re-ranks"]:
        lines.append("- a fusion score of regions and words re-orders the first candidates, which the vectors find")
    if not model["pictures"]:
        lines.append(f"- reads region features of images, {model['max_regions']} at most, and no pictures")
    lines.append("- weights: " + ", ".join(f"`{name}` {size / 1e6:.1f} MB" for name, size in sorted(sizes.items())))
    return "\n".join(lines)


def _made(record: Mapping[str, Any]) -> str:
    """How it came to be, as far as that is known."""
    if mixed := record.get("wise_ft"):
        return (
            f", its weights between those of two models (WiSE-FT, arXiv:2109.01903): {_of(mixed, 'alpha')} of the fine-tuned "
            f"one, `{_of(mixed, 'tuned')}`, and the rest of the one before, `{_of(mixed, 'base')}`"
        )
    return " trained with coder_plugin" if record["run"] or record["objective"] else ""


def _training(record: Mapping[str, Any], base_model: str | None, datasets: Sequence[str]) -> str:
    run, lines = record["run"], ["## Training", ""]
    whose = ", that of the fine-tuned model" if record.get("wise_ft") else ""
    objective = f"- objective{whose}: `{record['objective']}`"
    lines.append(objective if record["objective"] else "- objective: not known: the export had no run")
    for term in record["terms"].get("terms", []):
        options = ", ".join(f"{key}={value}" for key, value in term["options"].items())
        lines.append(f"  - {term['name']}: weight {term['weight']:g}" + (f", {options}" if options else ""))
    for head, options in record["terms"].get("heads", {}).items():
        lines.append(f"  - head {head}: " + ", ".join(f"{key}={value}" for key, value in options.items()))
    if base_model:
        lines.append(f"- began as: {base_model}")
    elif began := record["options"].get("pretrained") or record["options"].get("pretrained_image_path"):
        lines.append(f"- began from the weights `{began}`")
    if datasets:
        lines.append(f"- data sets: {', '.join(datasets)}")
    if data := run.get("training data"):
        captions = _of(data, "captions")
        lines.append(f"- training data: `{data['name']}`, {_count(data.get('images'))} images, captions: {captions}")
    if run:
        lines.append(
            f"- {_of(run, 'epochs')} epochs of {_of(run, 'steps per epoch')} steps, "
            f"{_of(run.get('batch', {}), 'global per step')} pairs a step, precision {_of(run, 'precision')}, "
            f"{_of(run, 'ranks')} x {_of(run, 'device')}, seed {_of(record['options'], 'seed')}"
        )
        if versions := run.get("versions"):
            lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    lines.append("- every option: `coder_run.json`")
    return "\n".join(lines)


def _figures(record: Mapping[str, Any]) -> str:
    results, lines = record["results"], ["## Recall", ""]
    if not results:
        return "\n".join([*lines, "Not measured: no validation, or an export without its run."])
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
        f"{measured}, every caption and every image a query among all of them, after epoch {results.get('epoch')} (step "
        f"{results.get('step')}); precision {record['run'].get('precision', 'unknown')}. Which epoch is shared may have been "
        "chosen by these figures.",
    ]
    return "\n".join(lines)


def _limits(record: Mapping[str, Any], license: str | None) -> str:
    model, run = record["model"], record["run"]
    images = (run.get("training data") or {}).get("images")
    lines = ["## Limits", ""]
    if isinstance(images, int) and images < _SMALL:
        lines.append(f"- {images:,} training images are few: things, scenes and wordings outside them were hardly seen.")
    if (record["objective"] or run) and not record.get("wise_ft"):
        lines.append("- One run with one seed: a difference of a point of R@1 to another model may be chance.")
    lines.append("- Not known: other data, other languages, fairness between groups of people, harmful or private content.")
    if model["re-ranks"]:
        lines.append("- The vectors alone give the shortlist's recall; the fusion score needs coder_plugin.")
    if model["pictures"] and (model["heads"] or model["aggregator"] == "gpo"):
        lines.append("- Plain open_clip opens the towers alone: its scores are not the ones above.")
    if not model["pictures"]:
        lines.append("- No part of it opens in plain open_clip.")
        lines.append("- Region features must come from the detector that made those it was trained on.")
    terms = "The terms of the training data, and of the weights it began from, are for the user to check."
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
        lines.append('scores = (images @ texts.T).amax(1)                 # the best of an image\'s features')
    else:
        lines.append("scores = texts @ images.T")
    lines += ["```", "", "```bash", f"coder-plugin eval {shlex.quote(spec)} {' '.join(flags)}", "```"]
    if model["pictures"]:
        lines += ["", *_open_clip(name, model, on_hub), "", *_sentence_transformers(name)]
    return "\n".join(lines)


def _open_clip(name: str, model: Mapping[str, Any], on_hub: bool) -> list[str]:
    """How plain open_clip opens the towers; a text tower that lies beside is found from the working directory alone."""
    beside = model["text tower"] == "text"
    where = "local-dir:." if beside else f"hf-hub:{name}" if on_hub else f"local-dir:{name}"
    lines = ["The towers in plain open_clip:", "", "```python", *(["import os", ""] if beside else []), "import open_clip"]
    if beside:
        lines += ["from huggingface_hub import snapshot_download", ""] if on_hub else [""]
        folder = f'snapshot_download("{name}")' if on_hub else f'"{name}"'
        lines.append(f"os.chdir({folder})  # open_clip looks for the text tower's folder, text, from here")
    lines += [
        "",
        f'model, preprocess = open_clip.create_model_from_pretrained("{where}")',
        f'tokenizer = open_clip.get_tokenizer("{where}")',
        "```",
    ]
    return lines


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
    wanted = [paper for paper, names in _OF.items() if used & set(names)]
    if record["model"]["pictures"]:
        wanted.append("open_clip")
    if not wanted:
        return ""
    return "## Citation\n\n```bibtex\n" + "\n\n".join(_CITATIONS[paper] for paper in wanted) + "\n```"


def _of(known: Mapping[str, Any], name: str) -> Any:
    return known.get(name, "unknown")


def _percent(figure: Any) -> str:
    return f"{figure:.2f}" if isinstance(figure, (int, float)) else "–"


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "an unknown number of"
