"""Zero-shot classification of an image folder, which shows what fine-tuning for retrieval changed elsewhere.

Shape letters: C classes, T templates, B images of a batch, D joint dimensions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.backbones.base import Backbone
from coder_plugin.data.bad_samples import BadSamples, total
from coder_plugin.data.decode import decode_image
from coder_plugin.data.item import Item
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.loader import evaluation_batches
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.evaluate import evaluating
from coder_plugin.evaluation.metrics import align, row_ranks
from coder_plugin.heads.capabilities import Scores, heads_with
from coder_plugin.pretrained.encode import Encoder

_NAMES = "classnames.txt"
log = logging.getLogger(__name__)
#: Features that score the classes, and their heading in tables; retrieval vectors only if heads or aggregators change them.
_SCORES = {"towers": "CLIP", "vectors": "vectors"}

Template = Callable[[str], str]


class ImageClasses(NamedTuple):
    """An image folder with its class names and templates."""

    source: ItemSource  # the caption of an image is the name of its class
    names: list[str]  # C
    label_of: dict[int, int]  # by image_id
    templates: list[Template]


def read_classes(folder: str, classnames: str | None = None, templates: str = "openai") -> ImageClasses:
    """Read a folder with a subfolder for each class, as torchvision's ImageFolder does.

    Args:
        folder: has a subfolder of pictures for each class.
        classnames: a file with the names of the classes: JSON, folder to name, or lines of folder, tab, name. None:
            ``folder/classnames.txt`` if it exists, else the folders' names with blanks for underscores.
        templates: as in :func:`read_templates`.

    Raises:
        CoderError: no such folder, a class without pictures or without a name, two classes with the same name.
    """
    from torchvision.datasets import ImageFolder

    try:
        pictures = ImageFolder(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CoderError(f"--zeroshot {folder}: {reason}; it needs FOLDER/CLASS/*.jpg") from error
    depths = {os.path.relpath(path, folder).count(os.sep) for path, _ in pictures.samples}
    if 1 not in depths:
        raise CoderError(f"--zeroshot {folder}: no class folder contains pictures: name that of one split, such as val")
    if len(pictures.classes) < 2:
        raise CoderError(f"--zeroshot {folder}: there is only one class, and two are needed: FOLDER/CLASS/*.jpg")
    default_file = os.path.join(folder, _NAMES)
    name_of = _read_names(classnames or default_file) if classnames or os.path.isfile(default_file) else {}
    if name_of and (missing := [each for each in pictures.classes if each not in name_of]):
        raise CoderError(f"{classnames or default_file}: {len(missing)} classes have no name, the first: {missing[0]!r}")
    names = [name_of.get(each, each.replace("_", " ")) for each in pictures.classes]
    for name in names:
        if names.count(name) > 1:
            raise CoderError(f"--zeroshot {folder}: two classes are called {name!r}: rename one in {default_file}")
    items = [
        Item(os.path.relpath(path, folder), (names[label],), partial(decode_image, path)) for path, label in pictures.samples
    ]
    labels = {item.image_id: label for item, (_, label) in zip(items, pictures.samples, strict=True)}
    return ImageClasses(ItemSource(items, name=folder), names, labels, read_templates(templates))


def _read_names(path: str) -> dict[str, str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("{"):
            pairs = list(parse_json(text).items())
        else:
            pairs = [line.split("\t") for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise CoderError(f"{path}: cannot be read as names of classes: {error}") from error
    wrong = [pair for pair in pairs if len(pair) != 2 or not all(isinstance(part, str) and part.strip() for part in pair)]
    if wrong:
        raise CoderError(f"{path}: a class is its folder, a tab and its name, or JSON of folder to name, got {wrong[0]!r}")
    return {folder.strip(): name.strip() for folder, name in pairs}


def read_templates(spec: str) -> list[Template]:
    """Prompt templates.

    Args:
        spec: ``openai`` (open_clip's 80 for ImageNet), ``simple`` (its 7), or a file with a template per line, where {} stands
            for the class's name.

    Returns:
        Functions from a class's name to a text.

    Raises:
        CoderError: an unreadable file, or a line without {}.
    """
    import open_clip

    builtin = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
    if spec in builtin:
        return list(builtin[spec])
    try:
        lines = [line.strip() for line in Path(spec).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CoderError(f"--templates {spec}: use openai, simple, or a file that can be read: {error}") from error
    if not lines or (wrong := [line for line in lines if "{}" not in line]):
        got = repr(wrong[0]) if lines else "nothing"
        raise CoderError(f"--templates {spec}: each line must have {{}} for the class's name, got {got}")
    return [lambda name, line=line: line.replace("{}", name) for line in lines]  # type: ignore[misc]


def check_model(model: Any) -> None:
    """:class:`CoderError` for a model that cannot classify pictures."""
    if isinstance(model, Backbone):
        raise CoderError("--zeroshot classifies pictures, and this model reads region features")


def zero_shot(encoder: Encoder, classes: ImageClasses) -> dict[str, Any]:
    """Zero-shot accuracy in percent, computed as CLIP's.

    The texts of all templates describe a class. Their features are normalised, averaged and normalised again (as in
    open_clip), and an image gets the class with the greatest product. A tie counts against the right class. All processes get
    the same numbers.

    Args:
        encoder: of an open_clip model.
        classes: of :func:`read_classes`.

    Returns:
        ``classes``, ``images`` and ``templates`` (counts), and under ``towers``: ``top1``, ``top5`` (None with five classes
        or fewer), ``mean_per_class``, and ``per_class``, which maps each name to ``count`` and ``top1``. If heads or
        aggregators change the retrieval vectors, ``vectors`` has the same figures by these.

    Raises:
        CoderError: a model that reads regions; no picture could be read.
    """
    model = encoder.model
    check_model(model)
    # image features stay unnormalised: their length does not change the order of the classes
    ways: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {"towers": (model.encode_image, model.encode_text)}
    if len(model.coder.aggregators) or heads_with(model.coder.heads, Scores):
        ways["vectors"] = (model.embed_image, model.embed_text)
    with evaluating(model):
        weights = {name: _classifier(encoder, classes, text) for name, (_, text) in ways.items()}
        ranks = _ranks(encoder, classes, {name: image for name, (image, _) in ways.items()}, weights)
    labels = ranks.pop("label")
    if not len(labels):
        raise CoderError(f"{classes.source.name}: none of its pictures can be read")
    counts = {"classes": len(classes.names), "images": len(labels), "templates": len(classes.templates)}
    return {**counts, **{name: _accuracy(each, labels, classes.names) for name, each in ranks.items()}}


def _classifier(encoder: Encoder, classes: ImageClasses, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean text feature of each class [C, D], on the encoder's device, by open_clip's own function."""
    from open_clip import build_zero_shot_classifier

    def encode_text(texts: Tensor, normalize: bool) -> Tensor:
        with encoder.autocast():
            features = [encode(part) for part in texts.split(encoder.batch_size)]
        return F.normalize(torch.cat(features).float(), dim=-1)

    model: Any = SimpleNamespace(encode_text=encode_text)
    return build_zero_shot_classifier(model, encoder.tokenizer, classes.names, classes.templates, 1, encoder.device).T


def _ranks(
    encoder: Encoder,
    classes: ImageClasses,
    encoders: Mapping[str, Callable[[Tensor], Tensor]],
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """``label`` of each image, and for each encoder the 0-based rank of its class, int64; of all processes."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("label", *encoders)}
    own_bad = BadSamples(classes.source.name, encoder.max_bad_samples)
    batches = evaluation_batches(
        classes.source,
        batch_size=encoder.batch_size,
        transform=encoder.transform,
        workers=encoder.workers,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        bad=own_bad,
    )
    for batch in batches:
        labels = torch.tensor([classes.label_of[image_id] for image_id in batch["image_id"].tolist()])
        parts["label"].append(labels)
        for name, encode in encoders.items():
            with encoder.autocast():
                features = encode(batch["image"].to(encoder.device)).float()
            scores = (features @ weights[name].T).cpu()
            parts[name].append(row_ranks(scores, torch.arange(len(scores)), labels))
    bad = total(distributed.gather_objects(own_bad))
    bad.finish()
    if len(bad) and distributed.rank() == 0:
        log.warning("%s: %s: accuracies are over the others", classes.source.name, bad)
    empty = torch.empty(0, dtype=torch.int64)
    shares = distributed.gather_objects({name: torch.cat([empty, *each]) for name, each in parts.items()})
    return {name: torch.cat([share[name] for share in shares]) for name in parts}


def _accuracy(ranks: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Any]:
    per_class = {}
    for label, name in enumerate(names):
        class_ranks = ranks[labels == label]
        top1 = 100 * float((class_ranks == 0).double().mean()) if len(class_ranks) else None
        per_class[name] = {"count": len(class_ranks), "top1": top1}
    accuracies = [each["top1"] for each in per_class.values() if each["top1"] is not None]
    return {
        "top1": 100 * float((ranks == 0).double().mean()),
        "top5": 100 * float((ranks < 5).double().mean()) if len(names) > 5 else None,
        "mean_per_class": sum(accuracies) / len(accuracies),
        "per_class": per_class,
    }


def accuracies(result: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies that :func:`zero_shot` returned, in percent, by flat names, as training logs them.

    Example:
        >>> accuracies({"classes": 2, "towers": {"top1": 62.5, "top5": None, "mean_per_class": 60.0, "per_class": {}}})
        {'zeroshot_top1': 62.5, 'zeroshot_mean_per_class': 60.0}
    """
    return {
        f"zeroshot_{'' if way == 'towers' else f'{way}_'}{figure}": result[way][figure]
        for way in _SCORES
        for figure in ("top1", "top5", "mean_per_class")
        if way in result and result[way][figure] is not None
    }


def format_zero_shot(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain text table of retrieval and classification, percent: a line for each model.

    Args:
        rows: name to the figures of `recall`, with what `zero_shot` returned under ``zero_shot``.
    """
    ways = [way for way in _SCORES if any(way in row["zero_shot"] for row in rows.values())]
    lines = [["name", "i2t R@1", "t2i R@1", "R@sum"]]
    for way in ways:
        lines[0] += [f"{_SCORES[way]} top-1", "top-5", "mean per class"]
    for name, row in rows.items():
        cells = [row["i2t_r1"], row["t2i_r1"], row["rsum"]]
        for way in ways:
            accuracy = row["zero_shot"].get(way, {})
            cells += [accuracy.get(figure) for figure in ("top1", "top5", "mean_per_class")]
        lines.append([name, *("-" if cell is None else f"{cell:.1f}" for cell in cells)])
    first = next(iter(rows.values()))["zero_shot"]
    counts = f"{first['images']} pictures of {first['classes']} classes, {first['templates']} templates"
    return f"{align(lines)}\nzero-shot: {counts}, chance {100 / first['classes']:.1f} %"
