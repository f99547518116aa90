"""The scripts that train on features of frozen towers: what they learn, select and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective
from tests.backbones import tiny_bert
from tests.doctor import made
from tests.training import region_data


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ascl_on_cached_words(tmp_path: Path) -> None:
    import frozen_ascl

    regions, text = region_data.write_precomp(tmp_path / "regions"), tiny_bert.make(tmp_path / "bert")
    data = [str(tmp_path / "words.pt"), "--text", text, *(f"--{name}-data={regions}" for name in ("train", "val", "report"))]
    frozen_ascl.main(["cache", *data, "--test-data", regions])
    words = torch.load(tmp_path / "words.pt", weights_only=True)
    texts = {split: len(content["ids"]) for split, content in words.items()}
    ids, states = words["train"]["ids"], words["train"]["states"]["noised"]
    assert len(states) == (ids != 0).sum() < ids.numel()
    assert texts == {"train": 240, "val": 120, "report": 120, "test": 120}
    assert set(words["train"]["states"]) == {"text", "positive", "noised", "noised_positive"}
    assert set(words["val"]["states"]) == {"text"} and words["train"]["changed"].float().mean() > 0.5
    train = ["train", *data, "--embed-dim=16", "--batch-size=8", "--epochs=8", "--lr=3e-2", "--eval-images=24", "--bf16"]
    train += ["--set", "ascl.temperature=0.1", "--threads", str(torch.get_num_threads()), "--json", str(tmp_path / "out.json")]
    fusion = ["--set", "fusion.heads=1", "fusion.recompute=false"]
    frozen_ascl.main([*train, "--losses", "ascl", "ascl(similarity=fusion)", *fusion])
    cosine, fused = records(tmp_path / "out.json")
    for record in (cosine, fused):
        rsum = [record["results"][epoch]["rsum"] for epoch in "12345678"]
        assert rsum[-1] > 1.15 * rsum[0] and record["losses"]["loss"][1] < record["losses"]["loss"][0]
        # the data to report on are those that the epoch was chosen on: its recall is that of the best epoch
        assert record["report"]["rsum"] == pytest.approx(max(rsum), abs=1e-3)
        assert len(record["report"]["i2t_ranks"]) == 24 and len(record["report"]["t2i_ranks"]) == 120
        assert record["test"] == record["report"]  # the same data
        assert record["fit"] > record["report"]["rsum"]  # it has seen these images
        assert record["set"] == ["ascl.temperature=0.1", "fusion.heads=1", "fusion.recompute=false"]
    assert "cosine" in fused["report"] and "cosine" not in cosine["report"]
    assert fused["report"]["cosine"] != fused["report"]["rsum"]
    for setting in ("negatives=gaussian", "positives=join", "noise_at=output"):
        with pytest.raises(SystemExit, match=f"asymmetry.{setting}: the cache"):
            frozen_ascl.main([*train, "--losses", "ascl", "--set", f"asymmetry.{setting}"])
    other = ["cache", str(tmp_path / "other.pt"), *data[1:], "--noise=shuffle", "--positives=join"]
    frozen_ascl.main(other)
    kinds = ["--set", "asymmetry.negatives=shuffle", "asymmetry.positives=join"]
    frozen_ascl.main([*train, "--losses", "ascl", *kinds, f"--texts={tmp_path / 'other.pt'}"])
    *_, texts = records(tmp_path / "out.json")
    assert texts["losses"] != cosine["losses"] and texts["test"]["rsum"] > 1.15 * texts["results"]["1"]["rsum"]
    short = [*train, "--epochs=1", *fusion, "--losses", "ascl(similarity=fusion)", "--set"]
    for settings in (["negatives"], ["positives"], ["negatives", "positives"]):
        frozen_ascl.main([*short, *(f"asymmetry.{name}=none" for name in settings)])
    losses = [record["losses"]["loss"][0] for record in records(tmp_path / "out.json")[3:]]
    assert len({round(loss, 3) for loss in (fused["losses"]["loss"][0], *losses)}) == 4


def test_all_three_methods_on_cached_words(tmp_path: Path) -> None:
    import frozen_ascl

    regions, text = region_data.write_precomp(tmp_path / "regions"), tiny_bert.make(tmp_path / "bert")
    data = [str(tmp_path / "words.pt"), "--text", text, *(f"--{name}-data={regions}" for name in ("train", "val", "report"))]
    frozen_ascl.main(["cache", *data])
    concepts = region_data.write_vocabulary(tmp_path / "concepts.safetensors")
    train = ["train", *data, "--embed-dim=16", "--batch-size=8", "--epochs=4", "--lr=1e-2", "--eval-images=24", "--bf16"]
    train += ["--concepts", concepts, "--json", str(tmp_path / "out.json"), "--threads", str(torch.get_num_threads())]
    frozen_ascl.main([*train, "--losses", "coder", "coder + ascl + selfalign"])
    coder, both = records(tmp_path / "out.json")
    for record in (coder, both):
        assert record["report"]["rsum"] > 1.15 * record["results"]["1"]["rsum"]
    assert both["losses"]["loss"][0] > coder["losses"]["loss"][0]
    # the context score is in the recall, and the cosine alone is that of a model without it
    assert "cosine" not in coder["report"] and abs(both["report"]["cosine"] - both["report"]["rsum"]) > 0.1
    without = ["--losses", "3*dcl + selfalign", "--set", "contexts.weight=0", "--epochs=1"]
    frozen_ascl.main([*train, *without])
    *_, last = records(tmp_path / "out.json")
    assert last["report"]["cosine"] == last["report"]["rsum"]
    with pytest.raises(CoderError, match="none.safetensors: no such file"):  # --concepts is an option that a head derives
        frozen_ascl.main([*train, "--losses", "coder", "--concepts", "none.safetensors"])


@pytest.mark.parametrize("loss", ["ascl(similarity=fusion)", "3*dcl + m_dcl + ascl + selfalign"])
def test_the_cache_gives_what_the_encoder_gives(loss: str, tmp_path: Path) -> None:
    import frozen_ascl

    regions, text = region_data.write_precomp(tmp_path / "regions"), tiny_bert.make(tmp_path / "bert")
    data = [str(tmp_path / "words.pt"), "--text", text, *(f"--{name}-data={regions}" for name in ("train", "val"))]
    frozen_ascl.main(["cache", *data])
    split = frozen_ascl.load(str(tmp_path / "words.pt"))["train"]
    features = torch.stack([torch.tensor(record.regions.features) for record in region_data.records("train")])
    objective = Objective.parse(loss).with_options({"asymmetry.negatives": None})
    if "fusion" in loss:
        objective = objective.with_options({"fusion.heads": 1})
    options = frozen_ascl.build_parser().parse_args(["train", *data, "--losses", "ascl"])
    torch.manual_seed(0)
    model = frozen_ascl.make_model(objective, options, region_dim=region_data.CHANNELS, embed_dim=16).train()
    captions = torch.tensor([3, 17, 100])
    images, ids = split["image_of_caption"][captions], split["ids"][captions]
    batch = frozen_ascl.region_batch(features[images])
    expected = model(batch, ids, image_id=images, text_positive=split["positive_ids"][captions])
    model.text.transformer = frozen_ascl.CachedEncoder(16)
    model.coder.attach(model)
    outputs = frozen_ascl.forward(model, features, split, captions)
    assert outputs.keys() == expected.keys() and any("positive" in name for name in outputs)
    assert ("coder_text_keys" in outputs) == ("m_dcl" in loss)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert torch.allclose(outputs[name], value, atol=0.02), name  # the cache is float16 of bfloat16


def grids(text: str) -> dict[str, dict[str, torch.Tensor]]:
    """A cache where the words of an image's captions are the channels of its cells."""
    generator = torch.Generator().manual_seed(0)
    channels, cells, hidden = 256, 4, json.loads((Path(text) / "config.json").read_text())["hidden_size"]
    splits = {}
    for split, images in (("train", 48), ("val", 16), ("report", 12), ("test", 10)):
        centre = torch.randn(images, 1, channels, generator=generator)
        owner = torch.arange(images).repeat_interleave(2)
        states = centre[owner, :, :hidden] + 0.1 * torch.randn(2 * images, 6, hidden, generator=generator)
        splits[split] = {
            "grids": (centre + 0.1 * torch.randn(images, cells, channels, generator=generator)).half(),
            "before": states.half(), "after": states.half(), "image_of_caption": owner,
            "ids": torch.randint(5, 20, (2 * images, 6), generator=generator),
        }  # fmt: skip
    return splits


def towers_and_data(folder: Path, numbers: dict[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
    """Flags of a tiny CLIP and of splits, each with as many pictures from a first one on."""
    import timm
    from safetensors.torch import save_file

    model, _ = tiny_bert.make_clip(folder)
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet", num_classes=5)
    save_file(network.state_dict(), folder / "image.safetensors")
    data = [f"--{name}-data={made.write_split(folder, name, *counts)}" for name, counts in numbers.items()]
    return ["--model", str(model), "--image-weights", str(folder / "image.safetensors")], data


def test_feature_maps_of_all_splits_are_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import frozen_selfalign

    numbers = {"train": (0, 6), "val": (20, 8), "report": (40, 3), "test": (60, 2)}
    towers, data = towers_and_data(tmp_path, numbers)
    frozen_selfalign.main(["cache", str(tmp_path / "grids.pt"), *towers, *data, "--threads", str(torch.get_num_threads())])
    splits = torch.load(tmp_path / "grids.pt", weights_only=True)
    images = [(name, len(split["grids"])) for name, split in splits.items()]
    assert images == [("train", 6), ("val", 8), ("report", 3), ("test", 2)]
    assert all(len(split["ids"]) == 2 * len(split["grids"]) for split in splits.values())
    first, last = splits["val"]["grids"].float(), splits["report"]["grids"].float()
    assert first.shape[1:] == (4, 256) and not torch.allclose(first[:3], last)
    frozen_selfalign.main(["check", str(tmp_path / "grids.pt"), *towers, *data, "--threads", str(torch.get_num_threads())])
    for line in capsys.readouterr().out.splitlines()[-2:]:
        assert float(line.split("smallest cosine ")[1].split(",")[0]) > 0.99


@pytest.mark.slow
def test_selfalign_on_cached_feature_maps(tmp_path: Path) -> None:
    import frozen_selfalign

    cache, out, (model, text) = tmp_path / "grids.pt", tmp_path / "out.json", tiny_bert.make_clip(tmp_path)
    splits = grids(text)
    torch.save(splits, cache)
    common = ["train", str(cache), "--epochs=3", "--batch-size=12", "--threads", str(torch.get_num_threads()), f"--json={out}"]
    clip = [*common, "--kind=clip", "--model", str(model), "--lr", "3e-2"]
    frozen_selfalign.main([*clip, "--losses", "clip", "clip + selfalign"])
    sizes = ["--model", text, "--embed-dim=32", "--cells=2", "--lr", "1e-2"]
    frozen_selfalign.main([*common, "--kind=camera", *sizes, "--losses", "dcl + 0.01*view_diversity"])
    plain, aligned, camera = records(out)
    for record in (plain, aligned, camera):
        rsum = [record["results"][epoch]["rsum"] for epoch in "123"]
        assert record["report"]["rsum"] not in rsum  # of other images
        assert len(record["report"]["i2t_ranks"]) == 12 and len(record["report"]["t2i_ranks"]) == 24
        assert len(record["test"]["i2t_ranks"]) == 10 and record["test"]["rsum"] not in rsum
    assert all(record["report"]["rsum"] > 300 for record in (plain, aligned))
    assert "cosine" not in plain["report"] and aligned["report"]["cosine"] != aligned["report"]["rsum"]
    out.unlink()
    torch.save({**splits, "report": splits["val"], "test": splits["val"]}, cache)
    frozen_selfalign.main([*clip, "--losses", "clip + selfalign"])
    [same] = records(out)  # the data to report on choose the epoch too: their recall is that of the best epoch
    assert same["results"] == aligned["results"]
    assert same["report"]["rsum"] == pytest.approx(max(same["results"][epoch]["rsum"] for epoch in "123"), abs=1e-3)
    assert same["test"] == same["report"]
    out.unlink()
    torch.save({name: split for name, split in splits.items() if name != "report"}, cache)
    frozen_selfalign.main([*clip, "0.3", "--losses", "clip"])
    again, fast = records(out)
    assert "report" not in again and again["results"] == plain["results"]
    assert (again["lr"], fast["lr"]) == (0.03, 0.3) and again["results"] != fast["results"]


def test_frozen_towers_take_the_settings_of_their_terms_and_heads() -> None:
    import frozen_towers

    pytest.importorskip("pytorch_metric_learning")
    settings = frozen_towers.parse_settings(
        ["dcl.mu=0.2", "pml.NTXentLoss.temperature=0.3", "momentum.momentum=0.9", "m_dcl.mu=0.4"]
    )
    objective = frozen_towers.with_settings(Objective.parse("dcl + pml.NTXentLoss"), settings)
    given = {term.name: dict(term.options) for term in objective.terms}
    assert given == {"dcl": {"mu": 0.2}, "pml.NTXentLoss": {"temperature": 0.3}}
    assert "momentum" not in dict(objective.heads)
    objective = frozen_towers.with_settings(Objective.parse("m_dcl"), settings)
    assert dict(dict(objective.heads)["momentum"])["momentum"] == 0.9 and dict(objective.terms[0].options) == {"mu": 0.4}
