"""The commands of docs/paper_and_code.md, from made-up precomp folders in the downloaded layout to a table of results."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin import recipes
from coder_plugin.cli import main
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.shards import SHARDS
from coder_plugin.model import required_heads
from tests.backbones import tiny_bert
from tests.documentation import ROOT, blocks
from tests.test_recipes import objective_of
from tests.training import region_data

PAGE = ROOT / "docs" / "paper_and_code.md"
#: Sizes of the paper's setting that a test cannot have.
SMALL = ["--epochs", "1", "--max-steps", "2", "--batch-size", "8", "--workers", "0", "--warmup-epochs", "0"]
SIZES = ["embed_dim=16", "context_length=16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SCAN's layout without boxes and CAMERA's with boxes, a BERT, word vectors and a part-of-speech tagger."""
    folder = tmp_path_factory.mktemp("paper")
    boxes, scan = Path(region_data.write_precomp(folder / "camera")), folder / "scan"
    shutil.copytree(boxes, scan)
    for path in [*scan.glob("*_boxes.npy"), *scan.glob("*_img_sizes.npy")]:
        path.unlink()
    for path in scan.glob("test_*"):  # COCO's name of the whole test split
        shutil.copy(path, path.with_name(path.name.replace("test_", "testall_")))
    draw = np.random.default_rng(0)
    lines = [" ".join([word, *(f"{value:.3f}" for value in draw.standard_normal(8))]) for word in region_data.WORDS]
    (folder / "glove.txt").write_text("\n".join(lines) + "\n")
    return {
        "camera": str(boxes), "scan": str(scan), "glove": str(folder / "glove.txt"),
        "bert": tiny_bert.make(folder / "bert"),
    }  # fmt: skip


def tagger(folder: Path) -> str:
    """A spaCy pipeline of a table: words of the made captions, and nothing else, have a part of speech."""
    spacy = pytest.importorskip("spacy")
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("attribute_ruler")
    for word in region_data.WORDS:
        kind = "ADJ" if word in ("red", "green", "blue", "big", "small") else "NOUN"
        ruler.add([[{"LOWER": word}]], {"POS": kind, "LEMMA": word})
    pipeline.to_disk(folder)
    return str(folder)


def script(name: str, made: dict[str, str], logs: Path, *further: str, **environment: str) -> subprocess.CompletedProcess[str]:
    sizes = ["--model-kwargs", f"text={made['bert']}", *SIZES, "--set", "prototypes.clusters=4", "momentum.bank_size=16"]
    command = ["bash", str(ROOT / "scripts" / f"{name}.sh"), made["scan"], made["glove"], *SMALL, *sizes, "--no-report"]
    own = {"RUNS": str(logs), "TAGGER": tagger(logs.parent / "tagger"), "ACCELERATE_USE_CPU": "true", **environment}
    path = f"{own.get('PATH', Path(sys.executable).parent)}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **own, "PATH": path}
    done = subprocess.run([*command, *further], env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("name", "split"), [("f30k", "test"), pytest.param("coco", "testall", marks=pytest.mark.slow)])
def test_a_script_from_downloaded_files_to_the_table(
    name: str, split: str, made: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    """Its commands, run in this process, which has loaded the libraries."""
    shims, logs = tmp_path / "bin", tmp_path / "logs"
    shims.mkdir()
    for program in ("coder-plugin", "accelerate"):
        (shims / program).write_text("#!/bin/bash\nprintf '%s\\t' \"$(basename \"$0\")\" \"$@\"; echo\n")
        (shims / program).chmod(0o755)
    lines = [line.rstrip("\t").split("\t") for line in script(name, made, logs, PATH=str(shims)).stdout.splitlines()]
    concepts, train, evaluate = lines
    assert (concepts[:2], train[:6], evaluate[:2]) == (
        ["coder-plugin", "concepts"],
        ["accelerate", "launch", "--num_processes", "1", "-m", "coder_plugin.cli"],
        ["coder-plugin", "eval"],
    )
    for arguments in (concepts[1:], train[6:], evaluate[1:]):
        capsys.readouterr()
        assert main(arguments) == 0, arguments
    print(table := capsys.readouterr().out)
    assert "--split" in evaluate and evaluate[evaluate.index("--split") + 1] == split
    assert "R@sum" in table and ("mean of 5 folds" in table) == (name == "coco")
    config = json.loads((logs / f"coder-{name}" / "config.json").read_text())
    assert (config["run"]["recipe"], config["optim"]["lr"], config["run"]["resume"]) == (f"coder-{name}", 2e-4, None)
    again = script(name, made, logs, PATH=str(shims)).stdout.splitlines()
    assert len(again) == 2 and "--resume\tlatest" in again[0]  # the vocabulary stays, and the run goes on
    plain = script(name, {**made, "glove": "-"}, logs, PATH=str(shims), NAME="plain").stdout.splitlines()
    assert len(plain) == 2 and "--concepts" not in plain[0]  # a loss without a concept level needs no vocabulary
    assert plain[0].count("--batch-size") == 1  # that of SMALL: the recipe's stays, which is another one in CODER's figure 3
    four = script(name, {**made, "glove": "-"}, logs, PATH=str(shims), NAME="four", PROCESSES="4").stdout.splitlines()
    assert "--multi_gpu" in four[0] and "--batch-size\t32" in four[0]


@pytest.mark.slow
def test_the_scripts_continue_a_run_and_fold_coco(made: dict[str, str], tmp_path: Path) -> None:
    script("coco", made, tmp_path)
    again = script("coco", made, tmp_path, "--max-steps", "4")
    assert "resumed at step 2" in again.stdout + again.stderr and "fold" in again.stdout


def with_whole_image(record: Record) -> Record:
    return record._replace(regions=dataclasses.replace(record.regions, global_feature=np.ones(10, np.float32)))


#: Options of heads that a few made-up pairs can fill.
SETS = ["prototypes.clusters=4", "momentum.bank_size=16", "captioner.hidden=16", "captioner.word_dim=8"]
#: Options of the models.
KWARGS = {"region-bert-camera": ["heads=4", "views=3"], "region-bigru": ["word_dim=8"], "region-bigru-vsrn": ["word_dim=8"]}


def small(arguments: list[str], made: dict[str, str]) -> list[str]:
    """A command of the page, ``train`` in sizes that a test can have."""
    if arguments[0] == "concepts":
        return [*arguments, "--tagger", tagger(Path("tagger").resolve())]
    if arguments[0] != "train":
        return arguments
    recipe = arguments[arguments.index("--recipe") + 1]
    model = recipes.load(recipe).settings["model"]
    kwargs = [*SIZES, *KWARGS.get(model, []), *([f"text={made['bert']}"] if "bert" in model else [])]
    own = arguments.index("--model-kwargs") + 1 if "--model-kwargs" in arguments else 0
    arguments = [*arguments[:own], *kwargs, *arguments[own:]] if own else [*arguments, "--model-kwargs", *kwargs]
    heads = required_heads(objective_of(recipe))
    sets = [each for each in SETS if each.partition(".")[0] in heads]
    return [*arguments, *SMALL, "--no-report", *(["--set", *sets] if sets else [])]


def commands(section: str) -> list[list[str]]:
    """The page's commands of a section, as arguments, in their order."""
    start = PAGE.read_text(encoding="utf-8").index(f"\n## {section}\n")
    end = (PAGE.read_text(encoding="utf-8") + "\n## ").index("\n## ", start + 1)
    first, last = (PAGE.read_text(encoding="utf-8")[:place].count("\n") for place in (start, end))
    texts = [block.text.replace("\\\n", " ") for block in blocks(PAGE, "bash") if first < block.line < last]
    lines = [line for text in texts for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("coder-plugin")]


@pytest.mark.parametrize(
    ("section", "data", "count", "files"),
    [
        pytest.param(
            "CODER", "scan", 7, ["logs/comparison.html", "logs/coco-bigru/plan.json"], marks=pytest.mark.slow
        ),
        pytest.param(
            "AsCL", "scan", 2, ["figures/analyses.json", "figures/alignment.png", "figures/recall_by_length.png"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "SelfAlign", "camera", 7, ["logs/comparison.html", "figures/tsne.png", "logs/vsrn/plan.json"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_pages_commands_from_precomp_to_the_tables(
    section: str,
    data: str,
    count: int,
    files: list[str],
    made: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """As they stand on the page, one after the other, in a folder with the files that it names."""
    monkeypatch.chdir(tmp_path)
    files_of = {"f30k_precomp": made[data], "coco_precomp": made["scan"], "glove.6B.300d.txt": made["glove"]}
    for name, target in files_of.items():
        Path(name).symlink_to(target)
    every = commands(section)
    assert len(every) == count
    for command in every:
        capsys.readouterr()
        assert main(small(command, made)) == 0, command
        if command[0] == "eval":
            out = capsys.readouterr().out
            assert "R@sum" in out and ("ensemble of 2" in out) == (len(command[1:]) > 1 and command[2].startswith("logs/"))
            assert ("mean of 5 folds" in out) == ("--folds" in command)
    for name in files:
        assert Path(name).stat().st_size > 0
    if section == "AsCL":
        assert "V_g = V_g1" in Path("logs/ascl/plan.json").read_text()


def test_cameras_command_says_what_files_without_boxes_need(
    made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f30k_precomp").symlink_to(made["scan"])
    assert main(small(commands("SelfAlign")[0], made)) == 2
    assert "boxes=false" in capsys.readouterr().err


@pytest.mark.slow
def test_ascl_with_a_whole_image_feature(made: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """The page's command on shards, which have it."""
    for split in region_data.SPLITS:
        SHARDS.write(str(tmp_path / "shards"), map(with_whole_image, region_data.records(split)), split=split)
    train, val, test = (f"{tmp_path / 'shards'}/{split}-*.tar" for split in region_data.SPLITS)
    command = ["train", "--recipe", "ascl-f30k", "--train-data", train, "--val-data", val]
    assert main(small([*command, "--logs", str(tmp_path), "--name", "run"], made)) == 0
    assert "V_g" not in str(json.loads((tmp_path / "run" / "plan.json").read_text()).get("notes"))
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--val-data", test, "--split", "test", "--rerank", "all"]) == 0
    assert "R@sum" in capsys.readouterr().out


def test_the_papers_number_of_training_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flickr30K's own captions less the test split and the first 1,000 of the validation split: 29,783 of 31,783 images. Here
    there are 1,002 for validation, 3 for testing, and 9 that Karpathy's file leaves out."""
    monkeypatch.chdir(tmp_path)
    names = {"train": 4, "val": 1002, "test": 3}
    images = [{"filename": f"{split}{n}.jpg", "split": split} for split, count in names.items() for n in range(count)]
    Path("dataset_flickr30k.json").write_text(json.dumps({"images": images}))
    files = [each["filename"] for each in images] + [f"left{n}.jpg" for n in range(9)]
    lines = [f'{name}#{n}\tA dog , " {name} " {n} .\n' for name in files for n in range(5)]
    Path("results_20130124.token").write_text("".join(lines), encoding="utf-8")
    [block] = blocks(PAGE, "python")
    exec(block.text, {})
    rows = {split: list(csv.reader(open(f"{split}.csv", newline=""))) for split in ("train", "dev", "test")}
    assert [len({name for name, _ in table[1:]}) for table in rows.values()] == [15, 1000, 3]
    assert {name for name, _ in rows["train"][1:]} == {
        *(f"train{n}.jpg" for n in range(4)), "val1000.jpg", "val1001.jpg", *(f"left{n}.jpg" for n in range(9))
    }  # fmt: skip
    assert rows["train"][:2] == [["filepath", "title"], ["train0.jpg", 'A dog , " train0.jpg " 0 .']]
    [text] = [block.text.replace("\\\n", " ") for block in blocks(PAGE, "bash") if "f30k_29783" in block.text]
    (line,) = (line.strip() for line in text.splitlines() if "coder-plugin" in line)
    record = next(region_data.records("train"))
    SHARDS.write("REGIONS", (record._replace(name=Path(name).stem) for name in files), split="train")
    for split, table in rows.items():
        assert main(shlex.split(line.replace("$split", split))[1:]) == 0
        ids = Path("f30k_29783", f"{split}_ids.txt").read_text().split()
        assert len(np.load(f"f30k_29783/{split}_ims.npy", mmap_mode="r")) == len({name for name, _ in table[1:]})
        assert len(Path("f30k_29783", f"{split}_caps.txt").read_text().splitlines()) == len(table) - 1 == 5 * len(set(ids))


def test_the_page_names_recipes_that_exist() -> None:
    named = set(re.findall(r"`((?:coder|ascl|selfalign|camera|vsrn|vse)[\w/.-]*)`", PAGE.read_text(encoding="utf-8")))
    known = {*recipes.names(), *recipes.objectives()}
    assert {"coder-f30k-printed", "ascl/fig3-join"} <= named and named <= known, named - known
