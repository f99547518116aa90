"""The value itself and its two files: what is refused, and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from coder_plugin.concepts import Vocabulary, load_vocabulary
from coder_plugin.errors import CoderError


def make(**changes) -> Vocabulary:
    parts = {
        "words": ("dog", "café", "run"),
        "types": ("object", "object", "motion"),
        "counts": torch.tensor([5, 2, 3]),
        "cooccurrence": torch.tensor([[0, 1, 3], [1, 0, 0], [3, 0, 0]]),
        "vectors": torch.arange(6.0).view(3, 2),
        "missing": ("run",),
        "settings": {"source": "here", "ratio": [7, 2, 1]},
    }
    return Vocabulary(**{**parts, **changes})


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "made" / "words.safetensors"
    make().save(path)
    return path


def fault(path) -> str:
    with pytest.raises(CoderError) as caught:
        load_vocabulary(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_saved_comes_back(saved):
    back, made = load_vocabulary(saved), make()
    for name in ("words", "types", "missing", "settings", "fingerprint"):
        assert getattr(back, name) == getattr(made, name)
    for name in ("counts", "cooccurrence", "vectors"):
        assert torch.equal(getattr(back, name), getattr(made, name))
    assert load_vocabulary(str(saved)).words == made.words
    assert sorted(path.name for path in saved.parent.iterdir()) == ["words.json", "words.safetensors"]
    assert "café" in saved.with_suffix(".json").read_text(encoding="utf-8")


def test_the_fingerprint_is_of_what_training_sees():
    assert make(settings={}).fingerprint == make().fingerprint
    for changes in ({"vectors": torch.ones(3, 2)}, {"words": ("dog", "cat", "run")}, {"types": ("object",) * 3}):
        assert make(**changes).fingerprint != make().fingerprint


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"words": ()}, "no concepts"),
        ({"words": ("dog", "dog", "run")}, "distinct"),
        ({"words": ("dog", "", "run")}, "not empty"),
        ({"words": "dog"}, "must be a list of words"),
        ({"words": ("dog", 3, "run")}, "must be a list of words"),
        ({"types": ("object", "object")}, "3 words but 2 types"),
        ({"types": ("object", "object", "verb")}, "unknown type 'verb'"),
        ({"missing": ("cat",)}, "'cat' is not among the words"),
        ({"counts": torch.tensor([5, 2])}, r"counts is torch.int64 \[2\]"),
        ({"counts": torch.tensor([5.0, 2, 3])}, "counts is torch.float32"),
        ({"cooccurrence": torch.zeros(3, 2, dtype=torch.int64)}, r"\[3, 2\]"),
        ({"cooccurrence": torch.eye(3, dtype=torch.int64)}, "zero diagonal"),
        ({"cooccurrence": torch.tensor([[0, 1, 3], [1, 0, 0], [2, 0, 0]])}, "symmetric"),
        ({"cooccurrence": torch.tensor([[0, 3, 0], [3, 0, 0], [0, 0, 0]])}, "exceeds counts"),
        ({"vectors": torch.zeros(2, 2)}, r"vectors is torch.float32 \[2, 2\]"),
        ({"vectors": torch.tensor(3.0)}, "vectors is"),
        ({"vectors": torch.zeros(3, 0)}, "at least one dimension"),
        ({"vectors": torch.full((3, 2), torch.nan)}, "finite"),
    ],
)
def test_what_is_no_vocabulary(changes, words):
    with pytest.raises(CoderError, match=words):
        make(**changes)


def test_two_files_that_do_not_belong_together(saved, tmp_path):
    other = tmp_path / "other.safetensors"
    replace(make(), vectors=torch.ones(3, 2)).save(other)
    saved.write_bytes(other.read_bytes())
    assert "do not belong together" in fault(saved)


def test_a_word_changed_by_hand(saved):
    texts = json.loads(saved.with_suffix(".json").read_text())
    texts["words"][0] = "wolf"
    saved.with_suffix(".json").write_text(json.dumps(texts))
    assert "one was changed" in fault(saved)


@pytest.mark.slow
def test_importing_loads_neither_spacy_nor_pillow():
    code = "import coder_plugin.concepts, sys; print(*{'spacy', 'PIL', 'open_clip'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
