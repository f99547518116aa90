"""Runs with hard negatives: from a CSV, shards and a table, through the model's heads; resumed; and which terms take them."""

from __future__ import annotations

import csv
import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.config import TrainConfig
from coder_plugin.data.hard_negatives import HardNegatives
from coder_plugin.data.tables import open_csv
from coder_plugin.errors import CoderError
from coder_plugin.training.loop import Trainer
from coder_plugin.training.prepare import make_objective
from tests.backbones import tiny_bert
from tests.backbones.test_region_text import TEXTS, images, made
from tests.training.test_trainer import losses, run_killed_after, weights

COLOURS = ("red", "green", "blue", "yellow")
IMAGES = 16
EVERY = "dcl + m_dcl + clip + triplet"


def negatives(n: int) -> list[str]:
    """The captions of the next one, two or three images."""
    return [f"a {COLOURS[(n + k) % 4]} square, number {(n + k) % IMAGES}" for k in range(1, 2 + n % 3)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """The same 16 pictures as a table, as a shard, and as a table without hard negatives with a file of them."""
    folder = tmp_path_factory.mktemp("data")
    with (
        (folder / "data.csv").open("w", newline="") as table,
        (folder / "plain.csv").open("w", newline="") as plain,
        (folder / "negatives.tsv").open("w", newline="") as file,
        tarfile.open(folder / "data.tar", "w") as tar,
    ):
        rows, plain_rows, listed = csv.writer(table), csv.writer(plain), csv.writer(file, "excel-tab")
        rows.writerow(["filepath", "title", "negatives"])
        plain_rows.writerow(["filepath", "title"])
        listed.writerow(["key", "negative", "negative_key"])
        for n in range(IMAGES):
            picture = io.BytesIO()
            Image.new("RGB", (16, 16), COLOURS[n % 4]).save(picture, "PNG")
            (folder / f"{n}.png").write_bytes(picture.getvalue())
            caption = f"a {COLOURS[n % 4]} square, number {n}"
            rows.writerow([f"{n}.png", caption, json.dumps(negatives(n))])
            plain_rows.writerow([f"{n}.png", caption])
            for k, negative in enumerate(negatives(n)):
                listed.writerow([f"{n}.png", negative, f"{(n + 1 + k) % IMAGES}.png"])
            note = json.dumps({"captions": [caption], "image_id": f"{n}.png", "negatives": negatives(n)}).encode()
            for extension, content in (("png", picture.getvalue()), ("json", note)):
                info = tarfile.TarInfo(f"{n:02d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return {name: str(folder / name) for name in ("data.csv", "plain.csv", "negatives.tsv", "data.tar")}


@pytest.fixture
def config(tiny_model, data, tmp_path):
    def make(name: str = "run", train: str = "data.csv", **options: Any) -> dict[str, Any]:
        defaults = {
            "model": tiny_model,
            "logs": str(tmp_path),
            "name": name,
            "train_data": data[train],
            "loss": EVERY,
            "set": ["momentum.bank_size=8"],
            "hard_negatives": 2,
            "batch_size": 4,
            "epochs": 2,
            "workers": 0,
            "warmup": 1,
            "log_every_n_steps": 1,
            "report": False,
        }
        return {**defaults, **options}

    return make


@pytest.mark.slow  # tests/data/test_reading_negatives.py goes on in mid-epoch
def test_a_run_resumed_in_mid_epoch_equals_the_uninterrupted_one_bit_for_bit(tmp_path, config, capsys):
    whole = Trainer.from_config(config("whole"))
    whole.run()
    assert "hard negatives: 26 of 32 places filled" in capsys.readouterr().out
    # three terms read features and one keys: all of them are trained with hard negatives
    assert str(whole.objective).count("hard_negatives=true") == 4
    run_killed_after(config("broken", save_every_steps=3), 5)
    Trainer.from_config(config("broken", resume="latest")).run()
    assert losses(tmp_path, "whole") == {**losses(tmp_path, "broken")}
    first, second = weights(tmp_path, "whole"), weights(tmp_path, "broken")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_table_trains_as_the_column_and_the_shard_do(tmp_path, config, data):
    """The ids of a table mask a text for the images that it is a caption of, which the others do not know."""
    Trainer.from_config(config("column", epochs=1, loss="dcl")).run()
    named = {"train": "plain.csv", "negatives_file": data["negatives.tsv"]}
    Trainer.from_config(config("table", epochs=1, loss="dcl", **named)).run()
    unmasked = {**named, "set": ["dcl.mask_same_image=false"]}
    Trainer.from_config(config("unmasked", epochs=1, loss="dcl", **unmasked)).run()
    shard = Trainer.from_config(config("shard", train="data.tar", epochs=1, loss="dcl"))
    batches = list(shard.loader.epoch(0))
    assert all(batch["text_negatives"].shape == (4, 2, 40) for batch in batches)
    of = {name: losses(tmp_path, name) for name in ("column", "table", "unmasked")}
    assert of["column"] == of["unmasked"]  # the same texts were drawn
    assert of["table"] != of["column"]
    assert shard.loader.negatives_drawn == {"filled": 26, "empty": 6}


def objective(loss: str, **options: Any) -> str:
    flat = {"loss": loss, "hard_negatives": 3, **options}
    return str(make_objective(TrainConfig().with_options(**flat)))


def test_the_flag_switches_on_every_term_that_takes_them(caplog):
    caplog.set_level(logging.INFO)
    assert objective("3*dcl(mu=0.05) + m_dcl + 0.5*clip + triplet + cra(hard_negatives=6)") == (
        "3*dcl(mu=0.05,hard_negatives=true) + m_dcl(hard_negatives=true) + 0.5*clip(hard_negatives=true)"
        " + triplet(hard_negatives=true) + cra(hard_negatives=6)"
    )
    assert objective("dcl + siglip + dcl@concepts") == "dcl(hard_negatives=true) + siglip + dcl@concepts"
    assert objective("clip(hard_negatives=false) + dcl") == "clip(hard_negatives=false) + dcl(hard_negatives=true)"
    assert objective("dcl + triplet(similarity=fusion)") == "dcl(hard_negatives=true) + triplet(similarity=fusion)"
    told = [record.getMessage() for record in caplog.records]
    assert "--hard-negatives: siglip does not take hard negatives and stays as it is" in told
    assert "--hard-negatives: dcl@concepts does not take hard negatives and stays as it is" in told
    assert any("'triplet': hard_negatives needs similarity=cosine" in each for each in told)
    assert not any("clip(hard" in each for each in told)


def test_mistakes_are_named(config, data, tmp_path):
    with pytest.raises(CoderError, match='no term of --loss "siglip" takes hard negatives'):
        objective("siglip")
    with pytest.raises(CoderError, match=r"dcl\(hard_negatives=true\) reads hard negatives: give --hard-negatives N"):
        objective("dcl(hard_negatives=true)", hard_negatives=0)
    with pytest.raises(CoderError, match="none of 16 images has a hard negative: .* columns are 'filepath', 'title'$"):
        Trainer.from_config(config(train="plain.csv"))
    lines = Path(data["plain.csv"]).read_text().splitlines()
    faulty = tmp_path / "faulty.csv"
    faulty.write_text("\n".join([lines[0] + ",negatives", *(f"{line}," for line in lines[1:-1]), f"{lines[-1]},a red dog"]))
    told = r"has a hard negative: .*; image '15.png': line 17: its .* are not a JSON list of texts, such as \[.a red dog.\]"
    with pytest.raises(CoderError, match=told):
        HardNegatives(1).check(open_csv(str(faulty), negatives_key="negatives"))
    with pytest.raises(CoderError, match="--negatives-file without --hard-negatives"):
        Trainer.from_config(config(negatives_file=data["negatives.tsv"], hard_negatives=0))


def texts(model: Any, captions: list[str]) -> torch.Tensor:
    import open_clip

    return open_clip.get_tokenizer("ViT-B-32")(captions, context_length=model.context_length)


@pytest.mark.parametrize("loss", ["clip(hard_negatives=true) + m_dcl", "dcl(hard_negatives=true) + ascl"])
def test_they_are_encoded_as_captions_are(loss):
    """Beside AsCL's generated texts too; and the captions are encoded as without them."""
    model = coder_plugin.create_model("coder-tiny", loss=loss).train()
    image, text = torch.rand(2, 3, 64, 64), texts(model, ["a dog", "two cows in a field"])
    further = texts(model, ["a cat", "", "a red cow", "one cow", "no", "a dog"])
    ids = torch.tensor([[1, -2, -1], [0, -1, 0]])
    torch.manual_seed(0)
    output = model(image, text, image_id=torch.arange(2), text_negatives=further.view(2, 3, -1), text_negative_ids=ids)
    assert output["coder_negative_ids"] is ids
    with torch.no_grad():
        want = model.encode_text(further, normalize=True).view(2, 3, -1)
        caption = model.encode_text(text, normalize=True)
    torch.testing.assert_close(output["coder_negative_features"], want)
    torch.testing.assert_close(output["text_features"], caption)
    if "ascl" in loss:
        torch.manual_seed(0)
        alone = model(image, text, image_id=torch.arange(2))
        for key in ("coder_positive_features", "coder_noised_features", "coder_noised_positive_features"):
            torch.testing.assert_close(output[key], alone[key])
    coder_plugin.create_loss(loss, model=model)(**output, output_dict=False).backward()
    assert all(p.grad is not None for p in model.transformer.parameters())


def test_keys_of_them_are_the_momentum_towers():
    """Terms that read keys alone do not have the live tower encode them."""
    loss = "m_dcl(hard_negatives=true)"
    model = coder_plugin.create_model("coder-tiny", loss=loss).train()
    with torch.no_grad():
        model.coder.post_step()  # until then the copy equals the model
        for parameter in model.coder.heads["momentum"].towers.parameters():
            parameter.mul_(1.1)  # not the live towers
    image, text, further = torch.rand(2, 3, 64, 64), texts(model, ["a dog", "a cow"]), texts(model, ["a cat", "an owl"])
    output = model(image, text, image_id=torch.arange(2), text_negatives=further[:, None])
    assert "coder_negative_features" not in output and output["coder_negative_ids"].tolist() == [[-1], [-1]]
    towers = model.coder.heads["momentum"].towers
    torch.testing.assert_close(output["coder_negative_keys"][:, 0], towers(image, further)[1])
    torch.testing.assert_close(output["coder_text_keys"], towers(image, text)[1])
    coder_plugin.create_loss(loss, model=model)(**output)
    model.coder.post_step()
    assert model.coder.heads["momentum"].bank.count == 2  # they are not written to the bank


def test_batch_statistics_are_of_the_captions_alone(tmp_path):
    """CAMERA's BatchNorm: hard negatives are normalised like captions, and count in no statistic."""
    model = made("region-bert-camera", tiny_bert.make(tmp_path / "bert"), "triplet(hard_negatives=true)").train()
    for module in model.modules():
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.training = module is model  # no dropout
    image, text = images(), model.tokenizer()(TEXTS)
    alone = model(image, text, image_id=torch.arange(len(text)))["text_features"]
    output = model(image, text, image_id=torch.arange(len(text)), text_negatives=text[:1].expand(len(text), 1, -1))
    torch.testing.assert_close(output["text_features"], alone)
    torch.testing.assert_close(output["coder_negative_features"][:, 0], alone[:1].expand_as(alone))


def test_wrong_shapes_and_forgotten_ones_are_named():
    loss = "dcl(hard_negatives=true)"
    model = coder_plugin.create_model("coder-tiny", loss=loss).train()
    image, text = torch.rand(2, 3, 64, 64), texts(model, ["a dog", "a cow"])
    with pytest.raises(ValueError, match=r"text_negatives must have shape \(2, n, \d+\)"):
        model(image, text, text_negatives=text)
    with pytest.raises(ValueError, match=r"text_negative_ids must have shape \(2, 1\)"):
        model(image, text, text_negatives=text[:, None], text_negative_ids=torch.zeros(2, 2))
    with pytest.raises(CoderError, match="needs coder_negative_features, coder_negative_ids, which the model did not return"):
        coder_plugin.create_loss(loss, model=model)(**model(image, text, image_id=torch.arange(2)))
