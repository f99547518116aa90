"""Whether objective and model can be made from the flags; ``train --dry-run`` says what else a run would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coder_plugin.doctor.data import Split
from coder_plugin.doctor.findings import Finding, note, ok, problem, warning
from coder_plugin.errors import CoderError
from coder_plugin.hub_access import is_download_error
from coder_plugin.terminal import plural


def check_recipe(config: Any, split: Split | None, tokenizers: list[Any]) -> Iterator[Finding]:
    """Make recipe, model and loss on the CPU, as a run does.

    Args:
        split: the training data; None: they were not read, and the model is made without them, or of the built-in scenes.
        tokenizers: the model's is added.
    """
    import torch

    from coder_plugin.data.from_config import make_source
    from coder_plugin.model import required_heads
    from coder_plugin.pretrained import build
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training import fine_tuning, prepare
    from coder_plugin.training.optim import total_steps, with_epochs

    if "model" not in config.origins and not config.data.on_scenes and not _recipe_names_model(config):
        yield note("recipe.model", "no --model: objective and model were not checked", "add --model NAME, as for train")
        return
    config = resolve_config(config.given())
    objective = prepare.make_objective(config)
    heads = ", ".join(required_heads(objective)) or "none"
    yield ok("recipe.loss", f'--loss "{config.loss.expression}" is {objective}; heads: {heads}')
    source = split.source if split is not None else make_source(config.data, split="train") if config.data.on_scenes else None
    if source is None or (split is not None and (split.broken or not split.items)):
        do = "fix the data, or run doctor on the machine that has them: some options depend on the data"
        yield note("recipe.data", "without readable training data the model was not checked", do)
        return
    samples = source.samples(config.data.captions, config.data.train_num_samples)
    objective = prepare.fit_objective(objective, config, samples_per_epoch=samples)
    offline, findings = _without_downloads(config)
    yield from findings
    try:
        model = prepare.make_training_model(offline, objective, torch.device("cpu"), source)
        tokenizer = build.make_tokenizer(offline.model, model)
    except CoderError as error:
        if not is_download_error(error):
            raise
        text = f"not checked: {config.model.name} or its tokenizer is not in the hub's cache; a run downloads it when it begins"
        yield note("recipe.absent", text, "nothing, on a machine with a network; else download it beforehand")
        return
    tokenizers.append(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = tokenizer(["a"]).shape[1]
    text = f"{config.model.name}: {type(model).__name__}, {parameters:,} parameters, texts of {tokens} tokens"
    yield ok("recipe.model", text)
    loss = prepare.make_loss(config, objective, model)
    for advice in fine_tuning.advice(config, model, loss):
        yield warning(f"recipe.{advice.name}", advice.text, advice.do)
    read = {key for binding in loss.bindings for key in binding.values()}
    if fine_tuning.starts_from_weights(config) and hasattr(model, "logit_scale") and "logit_scale" not in read:
        text = "no term reads logit_scale, so it stays that of the weights: probabilities by it do not fit the new similarities"
        yield note("recipe.scale_unread", text, "nothing for ranking, which does not depend on it")
    prepare.make_train_transform(model, config)
    prepare.make_tags(model, config)
    try:
        steps = prepare.steps_per_epoch(config, source.name, samples)
    except CoderError:
        if split is None:
            raise
        return  # check_epoch reports it
    prepare.check_run(config, model, loss, tokenizer, total_steps(with_epochs(config, steps), steps))


def check_epoch(config: Any, split: Split) -> Iterator[Finding]:
    """Whether the training data have a step for each epoch, and their hard negatives can be read."""
    from coder_plugin.data.from_config import make_negatives
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training.prepare import steps_per_epoch

    with contextlib.suppress(CoderError):  # no model is named; other refusals are check_recipe's
        config = resolve_config(config.given())
    source = split.source
    steps = steps_per_epoch(config, source.name, source.samples(config.data.captions, config.data.train_num_samples))
    make_negatives(config.data, source)
    pairs = config.optim.batch_size * config.optim.accum_freq
    yield ok("train.steps", f"an epoch has {plural(steps, 'step')} of {plural(pairs, 'pair')}, in one process")


def _recipe_names_model(config: Any) -> bool:
    from coder_plugin import recipes

    return config.run.recipe is not None and "model" in recipes.load(config.run.recipe).settings


def _without_downloads(config: Any) -> tuple[Any, list[Finding]]:
    """The configuration without weights that would be downloaded, and what is not checked therefore."""
    import open_clip

    from coder_plugin.backbones import plugin_backbones

    name, tag = config.model.name, config.model.pretrained
    findings = []
    if tag is not None and not Path(tag).is_file() and plugin_backbones.find_backbone(name) is None:
        tags = open_clip.list_pretrained_tags_by_model(name)
        if tags and tag not in tags:
            text = f"--pretrained {tag} is neither a file nor a tag of {name}"
            findings.append(problem("recipe.pretrained.unknown", text, f"one of its tags: {', '.join(tags)}"))
        else:
            text = f"the weights {tag} of {name} were not checked: open_clip downloads them when a run begins"
            findings.append(note("recipe.pretrained", text, "nothing, on a machine with a network or with them in its cache"))
        config = config.with_options(pretrained=None)
    if config.model.pretrained_image:
        text = "--open-clip pretrained_image: timm's weights were not checked; they are downloaded when a run begins"
        findings.append(note("recipe.pretrained_image", text, "without a network: --pretrained-image-path FILE"))
        config = config.with_options(pretrained_image=False)
    return config, findings


def check_zero_shot(config: Any) -> Iterator[Finding]:
    """Whether the pictures and names of ``--zeroshot`` can be read."""
    from coder_plugin.evaluation.zero_shot import read_classes

    options = config.evaluation
    classes = read_classes(options.zeroshot, options.classnames, options.templates or "openai")
    counts = f"{len(classes.label_of):,} pictures of {len(classes.names):,} classes, {len(classes.templates)} prompts each"
    yield ok("zeroshot", f"{options.zeroshot}: {counts}")
