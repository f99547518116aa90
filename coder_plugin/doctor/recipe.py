"""Whether the recipe and the model that the flags name can be made and trained on these data, as a run would find out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.backbones.base import Backbone
from coder_plugin.doctor.findings import Finding, many, note, ok, problem, warning
from coder_plugin.doctor.offline import is_absent
from coder_plugin.errors import CoderError


@dataclass
class Made:
    """What the checks of data want to know of the model, as far as it could be made."""

    tokenizer: Callable[[list[str]], Any] | None = None
    image_size: int | None = None
    region_dim: int | None = None


def check_recipe(config: Any, whole: Any, source: Any, made: Made) -> Iterator[Finding]:
    """Make recipe, model and loss on the CPU, as :class:`~coder_plugin.training.loop.Trainer` does; fills in ``made``.

    ``whole``: the training data, ``source``: what of them is on this machine; None where they cannot be read, and then what
    depends on them is left out.
    """
    import torch

    from coder_plugin.model import create_loss, required_heads
    from coder_plugin.pretrained import build
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training import prepare

    if "model" not in config.origins and not config.data.on_scenes and not _names_model(config):
        yield note("recipe.model", "no --model: recipe and model were not checked", "--model NAME, as train has it")
        return
    config = resolve_config(config.given())
    objective = prepare.make_objective(config)
    heads = ", ".join(required_heads(objective)) or "none"
    yield ok("recipe.loss", f'--loss "{config.loss.expression}" is {objective}; heads: {heads}')
    if source is None:
        do = "mend them, or run doctor where they are: what the recipe takes from the data is not known"
        yield note("recipe.data", "without training data the model is not checked", do)
        return
    samples = whole.samples(config.data.captions, config.data.train_num_samples)
    objective = prepare.fit_objective(objective, config, samples_per_epoch=samples)
    offline, waived = _without_downloads(config)
    yield from waived
    trains = yield from _steps(config, samples)
    cpu = torch.device("cpu")
    model = yield from _unless_absent(config.model.name, prepare.make_training_model, offline, objective, cpu, source)
    if model is None:
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    of_model = f"the tokenizer of {config.model.name}"
    made.tokenizer = yield from _unless_absent(of_model, build.make_tokenizer, offline.model, model)
    if isinstance(model, Backbone):
        made.region_dim = getattr(model.transform(), "region_dim", None)
        reads = "regions" if made.region_dim is None else f"regions of {made.region_dim} channels"
    else:
        size = model.visual.image_size
        made.image_size = size if isinstance(size, int) else min(size)
        reads = f"pictures of {size} pixels" if isinstance(size, int) else f"pictures of {size[0]} x {size[1]} pixels"
    texts = "" if made.tokenizer is None else f" and texts of {made.tokenizer(['a']).shape[1]} tokens"
    yield ok("recipe.model", f"{config.model.name}: {type(model).__name__}, {parameters:,} parameters, reads {reads}{texts}")
    create_loss(objective, model=model)
    prepare.check_accumulation(model, config)
    prepare.make_train_transform(model, config)
    yield from _check_tagger(model, config)
    if trains:
        yield from _sizes(model, config, trains)


def _unless_absent(what: str, make: Callable[..., Any], *arguments: Any) -> Generator[Finding, None, Any]:
    """What ``make`` gives; None, and a note, where only a hub has files for it."""
    try:
        return make(*arguments)
    except CoderError as error:
        if not is_absent(error):
            raise
        text = f"not looked at: {what} is downloaded when a run begins, for the hub's cache has it not, or not whole"
        yield note("recipe.absent", text, "nothing, where the machine has a network; else download it beforehand")
        return None


def _names_model(config: Any) -> bool:
    from coder_plugin import recipes

    return config.run.recipe is not None and "model" in recipes.load(config.run.recipe).settings


def _without_downloads(config: Any) -> tuple[Any, list[Finding]]:
    """The configuration without the weights that would be downloaded, and what is not checked for that."""
    import open_clip

    from coder_plugin.backbones import plugin_backbones

    said = []
    pretrained = config.model.pretrained
    if pretrained is not None and not Path(pretrained).is_file() and plugin_backbones.find_backbone(config.model.name) is None:
        tags = open_clip.list_pretrained_tags_by_model(config.model.name)
        if tags and pretrained not in tags:
            text = f"--pretrained {pretrained} is neither a file nor a tag of {config.model.name}"
            said.append(problem("recipe.pretrained.unknown", text, f"one of its tags: {', '.join(tags)}"))
        else:
            text = (
                f"the weights {pretrained} of {config.model.name} were not looked at: open_clip downloads them when a run "
                "begins"
            )
            said.append(
                note("recipe.pretrained", text, "nothing, where the machine has a network or the weights in its cache")
            )
        config = config.with_options(pretrained=None)
    if config.model.pretrained_image:
        text = "--pretrained-image: timm's weights were not looked at; they are downloaded when a run begins"
        said.append(note("recipe.pretrained_image", text, "without a network: --pretrained-image-path FILE"))
        config = config.with_options(pretrained_image=False)
    return config, said


def _check_tagger(model: Any, config: Any) -> Iterator[Finding]:
    from coder_plugin.training import prepare

    try:
        tags = prepare.make_tags(model, config)
    except CoderError as error:
        yield problem("recipe.tagger", str(error), "install or name the pipeline, as it says")
    else:
        if tags is not None:
            yield ok("recipe.tagger", f"the tagger {tags.tagger} loads")


def _steps(config: Any, samples: int) -> Generator[Finding, None, int]:
    """Returns how many samples the whole run trains on, on one process."""
    batch = config.optim.batch_size * config.optim.accum_freq
    steps = samples // config.optim.batch_size // config.optim.accum_freq
    if not steps:
        text = f"an epoch of {samples:,} samples holds no step of {batch:,} pairs"
        yield problem("recipe.steps", text, f"--batch-size {max(1, samples // config.optim.accum_freq)} or less, or more data")
        return 0
    left = samples - steps * batch
    total = f"{many(steps * config.optim.epochs, 'step')} in {many(config.optim.epochs, 'epoch')}, on one process"
    text = f"{samples:,} samples an epoch: {many(steps, 'step')} of {batch:,} pairs, {left:,} left over; {total}"
    yield ok("recipe.steps", text)
    if left > samples / 4:
        text = f"{left:,} of {samples:,} samples are left over each epoch, for they do not fill a step"
        yield warning("recipe.left_over", text, "a smaller --batch-size")
    return batch * steps * config.optim.epochs


def _sizes(model: Any, config: Any, samples: int) -> Iterator[Finding]:
    try:
        model.coder.check(batch=config.optim.batch_size * config.optim.accum_freq, samples=samples)
    except CoderError as error:
        yield problem("recipe.sizes", str(error), "set the option that it names")
    else:
        yield ok("recipe.sizes", "banks and prototypes suit the batch and the length of the run")
