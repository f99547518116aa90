"""The command, from a data set to the file that training reads; and real captions through a real pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.concepts import (
    TYPES,
    WordVectors,
    build_vocabulary,
    load_vocabulary,
    spacy_tagger,
)
from coder_plugin.concepts.vocabulary import describe
from coder_plugin.data import open_source
from tests.concepts.test_tagging import MODEL, needs_spacy

SHARED = Path(__file__).parents[3] / "shared/data"
needs_shared = pytest.mark.skipif(not (SHARED / "word_vectors").exists(), reason="../shared/data is not here")
CAPTIONS = ["a red circle", "red squares on the left", "a blue circle and a red box", "two blue boxes"]


@pytest.fixture
def files(tmp_path):
    """A table of images that do not exist, a Karpathy file of the same, and vectors of some of their words."""
    rows = [f"{number // 2}.png\t{caption}\n" for number, caption in enumerate(CAPTIONS)]
    (tmp_path / "data.csv").write_text("".join(["filepath\ttitle\n", *rows]))
    images = [
        {"filename": f"{split}.png", "split": split, "sentences": [{"raw": text} for text in texts]}
        for split, texts in (("train", CAPTIONS[:2]), ("restval", CAPTIONS[2:]), ("val", ["a green star"]))
    ]
    (tmp_path / "data.json").write_text(json.dumps({"images": images}))
    (tmp_path / "vectors.txt").write_text("red 1 2 3\ncircle 4 5 6\nboxes 7 8 9\n")
    return tmp_path


@pytest.fixture
def run(files, monkeypatch, capsys):
    monkeypatch.chdir(files)

    def call(*more: str, vectors: str = "vectors.txt", output: str = "out/c.safetensors") -> tuple[int, str, str]:
        status = main(["concepts", "--tagger", "scenes", "--vectors", vectors, "--output", output, *more])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_table(run):
    status, out, _ = run("--train-data", "data.csv", "--size", "4", "--ratio", "2", "0", "2")
    assert status == 0
    made = load_vocabulary("out/c.safetensors")
    assert made.words == ("box", "circle", "red", "blue") and made.counts.tolist() == [2, 2, 3, 2]
    assert made.vectors[:3].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]] and made.missing == ("blue",)
    for line in (
        "captions: 4 of data.csv, tagged by scenes",
        "object            2         2         4  box, circle",
        "property          2         2         2  red, blue",
        "4 concepts; the rarest is in 2 captions",
        "word vectors: 3 of 4 from vectors.txt, 3 dimensions",
        "1 taken from a surface form, since the word has none: box (boxes)",
        "1 missing, random from N(0, 2.58): blue",
        "written: out/c.safetensors, out/c.json",
        "next: coder-plugin train --model MODEL --train-data=data.csv --loss coder --concepts out/c.safetensors",
    ):
        assert line in out
    assert f"{describe(made)}\n" in out


@pytest.mark.parametrize("split, words", [("train", {"red", "blue"}), ("val", {"green"})])
def test_a_split_of_a_karpathy_file(run, split, words):
    """The images are not looked for; training captions only, unless another split is named."""
    assert run("--train-data", "data.json", "--split", split, "--ratio", "0", "0", "1", vectors="none")[0] == 0
    assert set(load_vocabulary("out/c.safetensors").words) == words


def test_options_reach_the_vocabulary(run, files):
    (files / "stop.txt").write_text("# colours\nblue\n red # too\n\n")
    options = "--no-lemmas --stop-words stop.txt --max-captions 3 --seed 5".split()
    status, out, _ = run("--train-data", "data.csv", *options, vectors="none")
    made = load_vocabulary("out/c.safetensors")
    assert status == 0 and made.words == ("circle", "box", "left", "squares") and made.settings["captions"] == 3
    assert made.settings["stop_words"] == ["blue", "red"] and not made.settings["lemmas"] and made.settings["seed"] == 5
    assert "4 concepts, fewer than the 400 requested" in out
    assert "word vectors: no file: all 4 are random, N(0, 1), 300 dimensions" in out


def test_the_scenes_without_any_option(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main("concepts --vectors none --output s.safetensors --max-captions 500".split()) == 0
    made = load_vocabulary("s.safetensors")
    assert made.settings["tagger"] == "scenes" and {"circle", "red"} <= set(made.words)
    assert "next: coder-plugin train --loss coder --concepts s.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, words",
    [
        (["--train-data", "absent.csv"], ["absent.csv"]),
        (["--train-data", "data.json", "--split", "dev"], ["'dev'", "restval, train, val"]),
        (["--train-data", "data.csv", "--csv-caption-key", "text"], ["'text'", "'title'"]),
        (["--train-data", "data.csv", "--size", "0"], ["size is 0"]),
        (["--train-data", "data.csv", "--ratio", "0", "0", "0"], ["ratio is"]),
        (["--train-data", "data.csv", "--ratio", "0", "1", "0"], ["no motion word in 4 captions"]),
        (["--train-data", "data.csv", "--max-captions", "0"], ["--max-captions must be at least 1, got 0"]),
        (["--train-data", "data.csv", "--stop-words", "absent.txt"], ["absent.txt", "default, none"]),
        (["--train-data", "data.csv", "--vectors", "absent.txt"], ["absent.txt"]),
        (["--train-data", "data.csv", "--output", "c.json"], ["c.json", ".safetensors"]),
        (["--train-data", "data.csv", "--output", "data.csv/c.safetensors"], ["cannot be written"]),
        (["--train-data", "data.csv", "--tagger", "no_such_pipeline"], ["no_such_pipeline", "pip"]),
        (["--dataset-type", "csv"], ["--train-data"]),
    ],
)
def test_mistakes_are_told_in_one_line(run, files, more, words):
    status, out, err = run(*more)
    lines = [line for line in err.splitlines() if not line.startswith("WARNING")]
    assert status == 2 and not out and len(lines) == 1 and lines[0].startswith("coder-plugin: error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert not list(files.rglob("*.safetensors*"))


# real captions


@pytest.mark.slow
@needs_shared
@needs_spacy
def test_flickr8k(tmp_path):
    assert MODEL is not None
    source = open_source(str(SHARED / "flickr8k/train-{000000..000005}.tar"))
    vectors = WordVectors(SHARED / "word_vectors/concepts.300d.txt")
    captions = (caption for _, item in source.items() for caption in item.captions)
    made = build_vocabulary(captions, tagger=spacy_tagger(MODEL), vectors=vectors)
    assert [len(made.of_type(kind)) for kind in TYPES] == [280, 80, 40] and made.settings["captions"] == 30000
    assert set(made.of_type("object")[:5]) == {"dog", "man", "boy", "girl", "woman"}
    assert {"run", "play", "ride", "leap"} <= set(made.of_type("motion"))
    assert {"white", "black", "tan", "wooden"} <= set(made.of_type("property"))
    assert {"shorts", "jeans", "clothes", "t-shirt"} <= set(made.of_type("object"))
    assert not {"rid", "woode", "be", "other"} & set(made.words)
    assert made.vectors.shape == (400, 300) and len(made.missing) < 200 and torch.isfinite(made.vectors).all()
    made.save(tmp_path / "f8k.safetensors")
    assert load_vocabulary(tmp_path / "f8k.safetensors").fingerprint == made.fingerprint
