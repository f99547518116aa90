"""Classification by names against open_clip's own, weights between two models, and the command's rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.config import TrainConfig
from coder_plugin.data import scenes
from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import wise_ft
from coder_plugin.evaluation.benchmarks import Benchmarks, match_data
from coder_plugin.evaluation.zero_shot import read_classes, read_templates, zero_shot
from coder_plugin.objective import Objective
from coder_plugin.pretrained import build
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import WEIGHTS, export_model
from coder_plugin.pretrained.export_manifest import seal_again
from coder_plugin.pretrained.open import open_pretrained
from tests import gloo
from tests.search.made import write_pictures
from tests.training import region_data

COLOURS = {
    "red_wine": (200, 20, 60), "green": (20, 200, 20), "blue": (20, 20, 200), "white": (250, 250, 250), "black": (5, 5, 5),
    "sun_yellow": (250, 230, 20), "grey": (128, 128, 128),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven classes, of 1 to 3 pictures."""
    root = tmp_path_factory.mktemp("classes")
    for number, (name, colour) in enumerate(COLOURS.items()):
        (root / name).mkdir()
        for picture in range(1 + number % 3):
            shade = tuple(min(255, part + 3 * picture) for part in colour)
            Image.new("RGB", (64, 64), shade).save(root / name / f"{picture}.png")
    return str(root)


def concepts() -> Objective:
    return Objective.parse("dcl + concept_dcl").with_options({"concepts.vocabulary": "scenes"})


def make_encoder(name: str, *, seed: int = 0, loss: str | Objective = "clip", **options: Any) -> Encoder:
    torch.manual_seed(seed)
    model = coder_plugin.create_model(name, loss=loss, **options)
    config = TrainConfig().with_options(model=name)
    transform = build.make_transform(model)
    tokenizer = build.make_tokenizer(config.model, model)
    return Encoder(model, tokenizer, transform, device=torch.device("cpu"), batch_size=5, workers=0)


@pytest.mark.parametrize("templates", ["simple", "openai"])
def test_as_open_clip_classifies(tiny_model: str, folder: str, templates: str) -> None:
    encoder = make_encoder(tiny_model)
    classes = read_classes(folder, None, templates)
    assert sorted(classes.names) == sorted(name.replace("_", " ") for name in COLOURS)
    got = zero_shot(encoder, classes)
    model = encoder.model.eval()
    known = {"simple": open_clip.SIMPLE_IMAGENET_TEMPLATES, "openai": open_clip.OPENAI_IMAGENET_TEMPLATES}[templates]
    classifier = open_clip.build_zero_shot_classifier(model, encoder.tokenizer, classes.names, known, 3, "cpu")
    ranks, labels = [], []
    with torch.no_grad():
        for _, item in classes.source.items():
            logits = model.encode_image(encoder.transform(item.load())[None], normalize=True) @ classifier
            labels.append(classes.names.index(item.captions[0]))
            ranks.append(int((logits[0] > logits[0, labels[-1]]).sum()))
    assert got["images"] == len(ranks) == 13 and got["classes"] == 7 and got["templates"] == len(known)
    towers = got["towers"]
    assert towers["top1"] == pytest.approx(100 * sum(rank == 0 for rank in ranks) / 13)
    assert towers["top5"] == pytest.approx(100 * sum(rank < 5 for rank in ranks) / 13)
    shares = []
    for number, name in enumerate(classes.names):
        hits = [rank == 0 for rank, label in zip(ranks, labels, strict=True) if label == number]
        shares.append(100 * sum(hits) / len(hits))
        assert towers["per_class"][name] == {"count": len(hits), "top1": shares[-1]}
    assert towers["mean_per_class"] == pytest.approx(sum(shares) / 7)
    assert "vectors" not in got and model.training is False


def planted(encoder: Encoder, colours: dict[str, Tensor], sign: float = 1.0) -> Encoder:
    model = encoder.model
    model.encode_image = lambda images: images.mean((2, 3)) * 100
    model.encode_text = lambda texts: sign * torch.stack([colours[bytes(row.tolist()).decode()] for row in texts])
    encoder.tokenizer = lambda texts: torch.tensor([list(text.ljust(12).encode()) for text in texts])
    return encoder


def test_the_right_class_and_the_wrong_one(tiny_model: str, folder: str, tmp_path: Path) -> None:
    """Names that stand for their colours classify all pictures, their opposites none; where all are alike, ties count."""
    (tmp_path / "plain.txt").write_text("{}\n")
    classes = read_classes(folder, None, str(tmp_path / "plain.txt"))
    encoder = make_encoder(tiny_model)
    encoder.transform = lambda image: torch.tensor(image.getpixel((0, 0)))[:, None, None].float() / 255 - 0.5
    colours = {name.replace("_", " ").ljust(12): torch.tensor(colour) / 255 - 0.5 for name, colour in COLOURS.items()}
    got = zero_shot(planted(encoder, colours), classes)["towers"]
    assert got["top1"] >= 80 and got["top5"] == 100  # black, grey and white lie on a line
    assert zero_shot(planted(encoder, colours, -1.0), classes)["towers"]["top1"] < 20
    alike = dict.fromkeys(colours, torch.ones(3))
    assert zero_shot(planted(encoder, alike), classes)["towers"]["top1"] == 0


def test_places_and_templates_of_any_length(tiny_model: str, folder: str, tmp_path: Path) -> None:
    """All pictures look the same, and the classes are at places 0 to 6 from there, their second template's feature being a
    hundred times as long: it counts as much as the first."""
    (tmp_path / "two.txt").write_text("1 {}\n2 {}\n")
    classes = read_classes(folder, None, str(tmp_path / "two.txt"))
    angles = {name: 0.2 * place for place, name in enumerate(classes.names)}

    def encode(row: bytes) -> Tensor:
        number, _, name = row.decode().strip().partition(" ")
        # the first is 1.4 away the other way round, so that the order of the first or the second alone is another
        angle = torch.tensor(angles[name] + (0.7 if number == "1" else -0.7) * (1 if len(name) % 2 else -1))
        return torch.stack([angle.cos(), angle.sin()]) * (1 if number == "1" else 100)

    encoder = make_encoder(tiny_model)
    encoder.model.encode_image = lambda images: torch.tensor([[3.0, 0.0]]).expand(len(images), -1)
    encoder.model.encode_text = lambda texts: torch.stack([encode(bytes(row.tolist())) for row in texts])
    encoder.tokenizer = lambda texts: torch.tensor([list(text.ljust(16).encode()) for text in texts])
    got = zero_shot(encoder, classes)["towers"]
    counts = [got["per_class"][name]["count"] for name in classes.names]
    assert got["top1"] == pytest.approx(100 * counts[0] / 13) and got["top5"] == pytest.approx(100 * sum(counts[:5]) / 13)
    assert [each["top1"] for each in got["per_class"].values()] == [100.0, *6 * [0.0]]


def test_names_and_templates(folder: str, tmp_path: Path) -> None:
    named = tmp_path / "names.txt"
    named.write_text("\n".join(f"{name}\tthe colour {number}" for number, name in enumerate(COLOURS)) + "\nanother\tunused\n")
    assert read_classes(folder, str(named)).names[0] == "the colour 4"  # black, by alphabet
    as_json = tmp_path / "names.json"
    as_json.write_text(json.dumps({name: name.upper() for name in COLOURS}))
    classes = read_classes(folder, str(as_json))
    assert classes.names == sorted(name.upper() for name in COLOURS) and len(classes.templates) == 80
    (tmp_path / "templates.txt").write_text("a {}\n\nthe {} of {}\n")
    assert [template("cat") for template in read_templates(str(tmp_path / "templates.txt"))] == ["a cat", "the cat of cat"]


def test_what_is_no_classification_set(folder: str, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    (tmp_path / "empty").mkdir()
    (tmp_path / "deep" / "val" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "deep" / "val" / "cat" / "a.png")
    for make, match in (
        (lambda: read_classes(str(tmp_path / "nowhere")), "nowhere"),
        (lambda: read_classes(str(tmp_path / "empty")), r"find any class folder.*; it needs FOLDER/CLASS/\*.jpg"),
        (lambda: read_classes(str(tmp_path / "deep")), "name that of one split"),
        (lambda: read_classes(folder, str(tmp_path / "absent")), "cannot be read as names"),
        (lambda: (names.write_text("red_wine\tred\n"), read_classes(folder, str(names)))[1], "6 classes have no name"),
        (lambda: (names.write_text("red_wine red\n"), read_classes(folder, str(names)))[1], "a tab and its name"),
        (
            lambda: (names.write_text("".join(f"{n}\tx\n" for n in COLOURS)), read_classes(folder, str(names)))[1],
            "two classes are called 'x'",
        ),
        (lambda: read_templates("nothing"), "openai, simple, or a file"),
        (lambda: (names.write_text("a photo\n"), read_templates(str(names)))[1], "got 'a photo'"),
        (lambda: (names.write_text("\n"), read_templates(str(names)))[1], "got nothing"),
    ):
        with pytest.raises(CoderError, match=match):
            make()


# weights between


@pytest.fixture(scope="module")
def models(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A base, and a fine-tuned model with a scoring head, exported."""
    base = make_encoder(tiny_model).model
    tuned = make_encoder(tiny_model, seed=1, loss=concepts(), inference=True)
    tuned.model.register_buffer("steps", torch.tensor(7))
    base.register_buffer("steps", torch.tensor(3))
    out = tmp_path_factory.mktemp("tuned")
    export_model(tuned.model, out, tokenizer=tuned.tokenizer)
    return {"base": base, "tuned": tuned, "file": str(out / WEIGHTS)}


def test_between_is_the_weighted_sum_and_exact_at_the_ends(models: dict[str, Any]) -> None:
    tuned, base = models["tuned"].model, wise_ft.plain_weights(models["base"])
    whole = {name: value.clone() for name, value in tuned.state_dict().items()}
    after = wise_ft.plain_weights(tuned)
    for alpha in (0.5, 0.0, 0.25, 1.0):  # in any order: none begins with the one before
        wise_ft.interpolate(tuned, base, after, alpha)
        for name, value in tuned.state_dict().items():
            if name.startswith("coder.") or not value.is_floating_point():
                assert torch.equal(value, whole[name]), name
            elif alpha in (0.0, 1.0):
                assert torch.equal(value, whole[name] if alpha else base[name]), name
            else:
                torch.testing.assert_close(value, (1 - alpha) * base[name] + alpha * whole[name])
    assert int(tuned.steps) == 7 and tuned.logit_scale.item() == pytest.approx(whole["logit_scale"].item())


# the command


@pytest.fixture(scope="module")
def runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``clip``, and one of ``dcl`` that began with it."""
    logs = tmp_path_factory.mktemp("logs")
    common = ["--model", tiny_model, "--logs", str(logs), "--train-num-samples", "64", "--batch-size", "16", "--epochs", "1"]
    common += ["--workers", "0", "--warmup", "1", "--val-frequency", "0"]
    assert main(["train", *common, "--loss", "clip", "--name", "before"]) == 0
    tuned = ["--loss", "dcl", "--pretrained", str(logs / "before/export/last"), "--name", "after", "--lr", "0.01"]
    assert main(["train", *common, *tuned]) == 0
    return logs


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Validation data of 16 scenes."""
    return ["--val-data", str(write_pictures(tmp_path_factory.mktemp("few"), 16))]


def rows(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", "--export", "last", "--workers", "0", "--json", "-", *arguments]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    return found if isinstance(found, list) else [found]


def test_between_is_of_the_model_as_opened_and_not_of_its_file(runs: Path, tmp_path: Path) -> None:
    """A file in half precision rounds no weight of the base; nor are the file's image size and names what count."""
    before, after = (runs / name / "export/last" for name in ("before", "after"))
    half = Path(shutil.copytree(after, tmp_path / "half"))
    with safe_open(after / WEIGHTS, "pt") as opened:
        metadata = opened.metadata()
    save_file({name: value.bfloat16() for name, value in load_file(after / WEIGHTS).items()}, half / WEIGHTS, metadata)
    seal_again(half)
    for file, given in ((half, {}), (after, {"force_image_size": 32}), (after, {"force_custom_text": True})):
        base, tuned = (open_pretrained(each, given, device="cpu").model for each in (before, file))
        ends = wise_ft.plain_weights(base), wise_ft.plain_weights(tuned)
        for alpha in (0, 1):
            wise_ft.interpolate(tuned, *ends, alpha)
            assert all(torch.equal(value, ends[alpha][name]) for name, value in wise_ft.plain_weights(tuned).items()), given


def test_before_after_and_between(
    runs: Path, folder: str, few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, half = str(runs / "after"), tmp_path / "half"
    zero = ["--zeroshot", folder, "--templates", "simple", *few]
    got = rows([run, *zero, "--wise-ft", "1", "0", "--wise-ft-save", "0.5", str(half)], capsys)
    assert [row["name"] for row in got] == [
        f"before: {runs / 'before/export/last'}", *(f"{run}, wise-ft {alpha}" for alpha in ("0", "0.5", "1"))
    ]  # fmt: skip
    figures = [{name: value for name, value in row.items() if name != "name"} for row in got]
    assert figures[0] == figures[1] and figures[1] != figures[3]
    alone = rows([run, *zero], capsys)
    assert [row["zero_shot"] for row in alone] == [got[0]["zero_shot"], got[3]["zero_shot"]]
    assert alone[1]["rsum"] == got[3]["rsum"]
    named = rows([run, "--base", str(runs / "before"), *few], capsys)
    assert [row["rsum"] for row in named] == [got[0]["rsum"], got[3]["rsum"]] and "zero_shot" not in named[0]
    # the fine-tuned model has a row where A does not name it
    between = rows([run, *few, "--wise-ft", "0.5"], capsys)
    assert [row["name"] for row in between] == [got[0]["name"], f"{run}, wise-ft 0.5", run]
    assert [row["rsum"] for row in between] == [got[0]["rsum"], got[2]["rsum"], got[3]["rsum"]]
    # what was saved is an export, of the mean of both
    ends = [load_file(runs / name / "export/last" / WEIGHTS) for name in ("before", "after")]
    for name, value in load_file(half / WEIGHTS).items():
        torch.testing.assert_close(value, (ends[0][name] + ends[1][name]) / 2, msg=name)
    [again] = rows([str(half), *few], capsys)
    assert again["rsum"] == got[2]["rsum"]
    made = {"alpha": 0.5, "tuned": run, "base": str(runs / "before/export/last")}
    assert json.loads((half / "wise_ft.json").read_text()) == made
    assert main(["eval", run, "--wise-ft", "0.5", "--wise-ft-save", "1", str(half)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_kinds_of_captions(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenes.DEFAULT_COUNTS, "val", 20)
    *got, mean = rows([str(runs / "before"), str(runs / "after"), "--by", "place", "words", "length"], capsys)
    assert mean["name"] == "mean of 2 runs" and mean["rsum"] == pytest.approx((got[0]["rsum"] + got[1]["rsum"]) / 2)
    assert [row["name"].split("/")[-1] for row in got] == ["before", "after", "ensemble of 2"]
    for row in got:
        assert list(row["by"]) == ["place", "words", "length"]
        assert list(row["by"]["place"]) == ["relations", "listing", "pair", "tally", "glimpse"]
        places = row["by"]["place"].values()
        assert [place["t2i"]["count"] for place in places] == 5 * [20]
        assert sum(place["t2i"]["r10"] for place in places) / 5 == pytest.approx(row["t2i_r10"])
        assert all(place["i2t"]["r10"] <= row["i2t_r10"] + 1e-9 for place in places)
    assert main(["eval", str(runs / "before"), "--export", "last", "--workers", "0", "--by", "place"]) == 0
    assert "glimpse" in capsys.readouterr().out
    # data of somebody's, whatever their keys are
    items = [Item(f"scenes/{number}", tuple("abcdefg"[: 6 - number]), lambda: None) for number in range(2)]
    assert match_data(Benchmarks(("place",)), ItemSource(items, name="scenes/captions.csv")).caption_names is None


def test_what_does_not_go_together(runs: Path, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "after")
    regions = region_data.write_precomp(tmp_path / "regions")
    for arguments, match in (
        ([run, "--wise-ft", "1.5"], "from 0, the model before, to 1"),
        ([run, "--wise-ft-save", "half", "x"], "give a number from 0 to 1, then a folder"),
        ([run, str(runs / "before"), "--zeroshot", folder], "--zeroshot is for one model, and there are 2"),
        ([run, "--zeroshot", folder, "--beta", "0.5"], "--zeroshot: leave out --beta"),
        ([run, "--wise-ft", "0.5", "--analyses", str(tmp_path / "new")], "--wise-ft: leave out --analyses"),
        ([run, "--templates", "simple"], "--templates simple needs --zeroshot FOLDER"),
        ([run, "--cxc", str(tmp_path)], "has no sits_test.csv"),
        (["--model", "region-bigru", "--val-data", regions, "--split", "dev", "--zeroshot", folder], "reads region features"),
        (["--model", "region-bigru", "--val-data", regions, "--split", "dev", "--wise-ft", "0"], "goes between two CLIPs"),
    ):
        assert main(["eval", *arguments]) == 2, arguments
        assert match in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def on_ranks(name: str, folder: str) -> dict[str, Any]:
    return zero_shot(make_encoder(name), read_classes(folder, None, "simple"))


def test_ranks_classify_their_shares(tiny_model: str, folder: str) -> None:
    alone = on_ranks(tiny_model, folder)
    assert gloo.run(on_ranks, tiny_model, folder) == [alone, alone]
