"""Whether objective and model can be made from the flags and trained on the data, checked as a run would."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.backbones.base import Backbone
from coder_plugin.doctor.findings import Finding, is_absent, many, note, ok, problem, warning
from coder_plugin.errors import CoderError


@dataclass
class ModelFacts:
    """What the checks of data need to know of the model; None where it could not be facts."""

    tokenizer: Callable[[list[str]], Any] | None = None
    image_size: int | None = None
    region_dim: int | None = None


def check_recipe(config: Any, full_source: Any, source: Any, facts: ModelFacts) -> Iterator[Finding]:
    """Make recipe, model and loss on the CPU, as :class:`~coder_plugin.training.loop.Trainer` does; fills in ``facts``.

    Args:
        full_source: the training data. source: the part on this machine. Both None if the data cannot be read: checks that
            depend on them are left out then.
    """
    import torch

    from coder_plugin.model import create_loss, required_heads
    from coder_plugin.pretrained import build
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training import fine_tuning, prepare

    if "model" not in config.origins and not config.data.on_scenes and not _names_model(config):
        yield note("recipe.model", "no --model: objective and model were not checked", "add --model NAME, as for train")
        return
    config = resolve_config(config.given())
    objective = prepare.make_objective(config)
    heads = ", ".join(required_heads(objective)) or "none"
    yield ok("recipe.loss", f'--loss "{config.loss.expression}" is {objective}; heads: {heads}')
    if source is None:
        do = "fix the data, or run doctor on the machine that has them: some options depend on the data"
        yield note("recipe.data", "without readable training data the model was not checked", do)
        return
    samples = full_source.samples(config.data.captions, config.data.train_num_samples)
    objective = prepare.fit_objective(objective, config, samples_per_epoch=samples)
    offline, waived = _without_downloads(config)
    yield from waived
    trains = yield from _steps(config, samples)
    cpu = torch.device("cpu")
    model = yield from _unless_absent(config.model.name, prepare.make_training_model, offline, objective, cpu, source)
    if model is None:
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    subject = f"the tokenizer of {config.model.name}"
    facts.tokenizer = yield from _unless_absent(subject, build.make_tokenizer, offline.model, model)
    if isinstance(model, Backbone):
        facts.region_dim = getattr(model.transform(), "region_dim", None)
        reads = "regions" if facts.region_dim is None else f"regions of {facts.region_dim} channels"
    else:
        size = model.visual.image_size
        facts.image_size = size if isinstance(size, int) else min(size)
        reads = f"pictures of {size} pixels" if isinstance(size, int) else f"pictures of {size[0]} x {size[1]} pixels"
    texts = "" if facts.tokenizer is None else f" and texts of {facts.tokenizer(['a']).shape[1]} tokens"
    yield ok(
        "recipe.model", f"{config.model.name}: {type(model).__name__}, {parameters:,} parameters, reads {reads}{texts}"
    )
    loss = create_loss(objective, model=model)
    for advice in fine_tuning.advice(config, model, loss):
        yield warning(f"recipe.{advice.name}", advice.text, advice.do)
    yield from _unread_scale(config, model, loss)
    prepare.check_accumulation(model, config)
    prepare.make_train_transform(model, config)
    yield from _check_tagger(model, config)
    if trains:
        yield from _sizes(model, config, trains)


def _unless_absent(what: str, make: Callable[..., Any], *arguments: Any) -> Generator[Finding, None, Any]:
    """The result of ``make``; None, and a note, if it needs files of a hub that are not in the cache."""
    try:
        return make(*arguments)
    except CoderError as error:
        if not is_absent(error):
            raise
        text = f"not checked: {what} is downloaded when a run begins; it is not in the hub's cache, or incomplete"
        yield note("recipe.absent", text, "nothing, on a machine with a network; else download it beforehand")
        return None


def _names_model(config: Any) -> bool:
    from coder_plugin import recipes

    return config.run.recipe is not None and "model" in recipes.load(config.run.recipe).settings


def _without_downloads(config: Any) -> tuple[Any, list[Finding]]:
    """The configuration without weights that would be downloaded, and notes on what is not checked therefore."""
    import open_clip

    from coder_plugin.backbones import plugin_backbones

    notes = []
    pretrained = config.model.pretrained
    if (
        pretrained is not None
        and not Path(pretrained).is_file()
        and plugin_backbones.find_backbone(config.model.name) is None
    ):
        tags = open_clip.list_pretrained_tags_by_model(config.model.name)
        if tags and pretrained not in tags:
            text = f"--pretrained {pretrained} is neither a file nor a tag of {config.model.name}"
            notes.append(problem("recipe.pretrained.unknown", text, f"one of its tags: {', '.join(tags)}"))
        else:
            text = (
                f"the weights {pretrained} of {config.model.name} were not checked: open_clip downloads them when a run "
                "begins"
            )
            notes.append(
                note("recipe.pretrained", text, "nothing, on a machine with a network or with the weights in its cache")
            )
        config = config.with_options(pretrained=None)
    if config.model.pretrained_image:
        text = "--open-clip pretrained_image: timm's weights were not checked; they are downloaded when a run begins"
        notes.append(note("recipe.pretrained_image", text, "without a network: --pretrained-image-path FILE"))
        config = config.with_options(pretrained_image=False)
    return config, notes


def _check_tagger(model: Any, config: Any) -> Iterator[Finding]:
    from coder_plugin.training import prepare

    try:
        tags = prepare.make_tags(model, config)
    except CoderError as error:
        yield problem("recipe.tagger", str(error), "install or name the pipeline, as the message says")
    else:
        if tags is not None:
            yield ok("recipe.tagger", f"the tagger {tags.tagger} loads")


def _unread_scale(config: Any, model: Any, loss: Any) -> Iterator[Finding]:
    from coder_plugin.training.fine_tuning import starts_from_weights

    read = {key for binding in loss.bindings for key in binding.values()}
    if starts_from_weights(config) and hasattr(model, "logit_scale") and "logit_scale" not in read:
        text = "no term reads logit_scale, so it stays that of the weights: probabilities by it do not fit the new similarities"
        yield note("recipe.scale_unread", text, "nothing for ranking, which does not depend on it")


def check_zero_shot(config: Any) -> Iterator[Finding]:
    """Whether the pictures and names of ``--zeroshot`` can be read."""
    from coder_plugin.evaluation.zero_shot import read_classes

    options = config.evaluation
    classes = read_classes(options.zeroshot, options.classnames, options.templates or "openai")
    counts = f"{len(classes.label_of):,} pictures of {len(classes.names):,} classes, {len(classes.templates)} prompts each"
    yield ok("zeroshot", f"{options.zeroshot}: {counts}")


def _steps(config: Any, samples: int) -> Generator[Finding, None, int]:
    """Returns the number of samples that the whole run trains on, with one process."""
    batch = config.optim.batch_size * config.optim.accum_freq
    steps = samples // config.optim.batch_size // config.optim.accum_freq
    if not steps:
        text = f"an epoch of {samples:,} samples is shorter than one step of {batch:,} pairs"
        yield problem(
            "recipe.steps", text, f"--batch-size {max(1, samples // config.optim.accum_freq)} or less, or more data"
        )
        return 0
    left = samples - steps * batch
    total = f"{many(steps * config.optim.epochs, 'step')} in {many(config.optim.epochs, 'epoch')}, with one process"
    text = f"{samples:,} samples per epoch: {many(steps, 'step')} of {batch:,} pairs, {left:,} left over; {total}"
    yield ok("recipe.steps", text)
    if left > samples / 4:
        text = f"{left:,} of {samples:,} samples are left out of each epoch because they do not fill a step"
        yield warning("recipe.left_over", text, "use a smaller --batch-size")
    return batch * steps * config.optim.epochs


def _sizes(model: Any, config: Any, samples: int) -> Iterator[Finding]:
    try:
        model.coder.check(batch=config.optim.batch_size * config.optim.accum_freq, samples=samples)
    except CoderError as error:
        yield problem("recipe.sizes", str(error), "set the option that the message names")
    else:
        yield ok("recipe.sizes", "sizes of banks and prototypes suit the batch and the length of the run")
