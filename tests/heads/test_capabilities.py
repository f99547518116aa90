"""Capabilities: what heads declare, what they derive from the data, and that nobody asks for a head by its name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import coder_plugin
from coder_plugin import registry
from coder_plugin.heads.base import BackboneInfo, Head, TrainingFacts
from coder_plugin.heads.capabilities import (
    AddsTexts,
    FollowsModel,
    KeepsState,
    Reranks,
    Scores,
    affects_ranking,
    heads_having,
    heads_with,
)

CAPABILITIES = {
    "alignment": {KeepsState},
    "asymmetry": {AddsTexts},
    "captioner": set(),
    "concepts": {KeepsState, Scores},
    "contexts": {Scores},
    "fusion": {Reranks},
    "hard_negatives": set(),
    "ids": set(),
    "momentum": {FollowsModel, KeepsState},
    "progress": {KeepsState},
    "prototypes": {KeepsState},
    "teacher": {FollowsModel},
    "tokens": set(),
    "views": set(),
}
ALL = (AddsTexts, FollowsModel, KeepsState, Reranks, Scores)


def ours():
    return {p.name: registry.load("heads", p.name) for p in registry.list_plugins("heads") if p.distribution == "coder-plugin"}


def test_what_each_head_can_do():
    found = {name: {each for each in ALL if issubclass(head, each)} for name, head in ours().items()}
    assert found == CAPABILITIES
    assert {name for name, head in ours().items() if affects_ranking(head)} == {"concepts", "contexts", "fusion"}
    assert list(heads_having(ours(), "image_attention")) == list(heads_having(ours(), "text_attention")) == ["concepts"]
    assert list(heads_having(ours(), "maps")) == ["contexts"]


def test_heads_are_asked_for_by_capability():
    model = coder_plugin.create_model("coder-tiny", loss="coder")
    assert list(heads_with(model.coder.heads, Scores)) == ["concepts"]
    assert list(heads_with(model.coder.heads, KeepsState)) == ["momentum", "concepts", "prototypes"]
    heads = model.coder.heads
    assert [name for name, head in heads.items() if head.cacheable] == ["momentum"]
    assert not any((model.coder.reads_negatives, model.coder.encodes_negatives, model.coder.reads_tags))


def test_no_head_is_asked_for_by_name():
    names = "|".join(ours())
    asked = re.compile(rf"""heads\[["']({names})["']\]|heads\.get\(["']({names})["']|["']({names})["'] (not )?in [\w.]*heads""")
    root = Path(coder_plugin.__file__).parent
    files = [path for folder in (root, root.parent / "integrations") for path in folder.rglob("*.py")]
    assert len(files) > 100
    lines = [(path, line.strip()) for path in files for line in path.read_text().splitlines() if asked.search(line)]
    assert not [(path, line) for path, line in lines if not line.startswith(">>>")]  # an example may


def test_options_from_data():
    heads = ours()
    facts = TrainingFacts(loss="x", samples_per_epoch=1000, pairs_per_step=64)
    assert heads["prototypes"].options_from_data({}, facts)["clusters"] == 333  # 1,000 images, five captions each
    assert heads["prototypes"].options_from_data({"clusters": 9, "recluster": 9}, facts) == {}
    every = TrainingFacts(loss="x", samples_per_epoch=1000, captions="all")
    assert heads["momentum"].options_from_data({}, facts) == {"bank_size": 142}  # a seventh of 1,000
    assert heads["momentum"].options_from_data({"bank_size": 9}, facts) == {}
    run = TrainingFacts(loss="x", samples_per_epoch=145_000, captions="all", pairs_per_step=128, epochs=30)
    assert heads["momentum"].options_from_data({}, run) == {"bank_size": 4096, "momentum": 0.995}  # the paper's
    assert heads["momentum"].options_from_data({"bank_size": 9, "momentum": 0.5}, run) == {}
    for epochs, momentum in ((1, 0.9), (3, 0.9474), (15, 0.9899), (300, 0.995)):
        assert heads["momentum"].options_from_data({}, replace(run, epochs=epochs))["momentum"] == momentum
    assert heads["momentum"].options_from_data({}, every) == {"bank_size": 28}  # 200 images
    f30k = TrainingFacts(loss="x", samples_per_epoch=145_000, captions="all", pairs_per_step=128)
    assert heads["momentum"].options_from_data({}, f30k) == {"bank_size": 4096}
    few = TrainingFacts(loss="x", samples_per_epoch=100, pairs_per_step=64)
    assert heads["momentum"].options_from_data({}, few) == {"bank_size": 64}, "a whole batch at least"
    assert heads["prototypes"].options_from_data({}, every)["clusters"] == 66
    large = TrainingFacts(loss="x", samples_per_epoch=10**6)
    assert heads["prototypes"].options_from_data({}, large)["clusters"] == 10_000
    assert heads["prototypes"].options_from_data({}, TrainingFacts(loss="x", samples_per_epoch=1))["clusters"] == 2
    assert heads["alignment"].options_from_data({"freeze_steps": "epoch"}, facts) == {"freeze_steps": 15}
    assert heads["alignment"].options_from_data({"freeze_steps": 3}, facts) == {}
    assert heads["alignment"].options_from_data({}, facts) == {}
    for name, head in heads.items():
        if name not in ("prototypes", "momentum", "alignment", "concepts", "progress"):
            assert head.options_from_data({}, facts) == {} == Head.options_from_data({}, facts)


@pytest.mark.parametrize("name", ["concepts", "progress"])
def test_values_that_a_head_has_no_place_for_are_not_dropped(name):
    """These count steps and write nothing else; a term that stashes with them hears of it."""
    sizes = BackboneInfo(embed_dim=4, text_tokens=4)
    head = registry.load("heads", name)(sizes, **({"steps_per_epoch": 2} if name == "progress" else {}))
    head.post_step()
    head.stash(pairs=3)
    with pytest.raises(NotImplementedError, match=r"must override write\(\): pairs were stashed"):
        head.post_step()
    head.post_step()
    assert int(head.steps) + 2 * int(getattr(head, "epoch", 0)) == 3, "steps are counted all the same"
