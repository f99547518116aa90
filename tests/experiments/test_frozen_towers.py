"""Losses on cached features of frozen towers: what is learned, held out and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.compare.runs import _own_result
from coder_plugin.heads.base import TrainingFacts
from tests.backbones import tiny_bert
from tests.doctor import made


def test_features_of_both_splits_are_cached(tmp_path: Path) -> None:
    import frozen_towers
    import timm
    from safetensors.torch import save_file

    model, _ = tiny_bert.make_clip(tmp_path)
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet", num_classes=5)
    save_file(network.state_dict(), tmp_path / "image.safetensors")
    counts = {"train": (0, 6), "val": (20, 8)}
    data = [f"--{name}-data={made.write_split(tmp_path, name, *numbers)}" for name, numbers in counts.items()]
    cache = str(tmp_path / "frozen.pt")
    threads = ["--threads", str(torch.get_num_threads())]
    frozen_towers.main(
        ["cache", cache, "--model", str(model), "--image-weights", str(tmp_path / "image.safetensors"), *data, *threads]
    )
    splits = torch.load(cache, weights_only=True)
    sizes = [(name, len(split["images"]), len(split["ids"])) for name, split in splits.items()]
    assert sizes == [("train", 6, 12), ("val", 8, 16)]
    assert not torch.allclose(splits["train"]["images"][0], splits["train"]["images"][1])
    assert splits["val"]["tokens"].shape[:2] == splits["val"]["ids"].shape
    frozen_towers.main(["train", cache, "--model", str(model), "--loss", "dcl", "--epochs=1", "--batch-size=4", "--hold-out=2",
                        "--output", str(tmp_path / "output.json"), *threads])  # fmt: skip
    assert len(_own_result(tmp_path)["val"]["t2i_ranks"]) == 16  # type: ignore[index]


@pytest.mark.parametrize("loss", ["clip + selfalign", "3*dcl"])
def test_cached_cells_and_words_give_the_features_of_the_whole_model(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import frozen_towers
    import timm
    from safetensors.torch import save_file

    from coder_plugin.data.from_config import make_source
    from coder_plugin.pretrained import build
    from coder_plugin.pretrained.options import resolve_config

    path, _ = tiny_bert.make_clip(tmp_path)
    torch.manual_seed(0)
    weights = str(tmp_path / "image.safetensors")
    save_file(timm.create_model("test_efficientnet", num_classes=5).state_dict(), weights)
    data = {f"{name}_data": str(made.write_split(tmp_path, name, 0, 6)) for name in ("train", "val")}
    paths = [f"--{name.replace('_', '-')}={value}" for name, value in data.items()]
    cache = str(tmp_path / "cells.pt")
    threads = ["--threads", str(torch.get_num_threads())]
    frozen_towers.main(["cache", cache, "--cells", "--model", str(path), "--image-weights", weights, *paths, *threads])
    split = torch.load(cache, weights_only=True)["train"]
    frozen_towers.CachedTransformer.take(split)
    objective = frozen_towers.Objective.parse(loss)
    cached = frozen_towers.make_model(objective, 0, str(path)).eval()

    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = resolve_config({"model": str(path), "pretrained_image_path": weights, **means, **data})
    whole = build.make_model(config.model, objective, torch.device("cpu")).eval()
    whole.load_state_dict(cached.state_dict(), strict=False)  # the projections and heads
    transform = build.make_transform(whole)
    images = torch.stack([transform(item.load()) for _, item in make_source(config.data, split="train").items()])
    with torch.no_grad():
        expected = {**whole.describe_image(images), **whole.describe_text(split["ids"])}
        got = {**cached.describe_image(split["images"].float()), **cached.describe_text(split["ids"])}
    assert expected.keys() == got.keys() and len(got) == (2 if "dcl" in loss else 10)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, atol=2e-3, rtol=2e-3, msg=key)
    output, steps, make = tmp_path / "output.json", [], frozen_towers.create_schedule
    monkeypatch.setattr(frozen_towers, "create_schedule", lambda *words: steps.append(words[2]) or make(*words))
    frozen_towers.main(["train", cache, "--model", str(path), "--loss", loss, "--captions=draw", "--epochs=1", "--batch-size=4",
                        "--hold-out=2", "--output", str(output), *threads])  # fmt: skip
    assert len(_own_result(tmp_path)["val"]["t2i_ranks"]) == 12  # type: ignore[index]
    assert steps == [1]  # 4 images with a caption each


def test_an_epoch_has_all_captions_or_one_of_each_image() -> None:
    from frozen_towers import epoch_order

    image_of = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    generator = torch.Generator().manual_seed(0)
    assert epoch_order(image_of, "all", generator).sort().values.tolist() == list(range(8))
    drawn = torch.stack([epoch_order(image_of, "draw", generator) for _ in range(200)])
    assert image_of[drawn].sort(1).values.tolist() == [[0, 1, 2, 3]] * 200
    assert len(image_of[drawn].unique(dim=0)) == 24  # all orders of the images
    counts = drawn.flatten().bincount()
    assert counts[5] == 200 and counts.min() > 40  # and all captions


def make_cache(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A cache where captions have their image's feature."""
    model, text = tiny_bert.make_clip(tmp_path)
    generator = torch.Generator().manual_seed(0)
    width, channels, cache = 256, json.loads((Path(text) / "config.json").read_text())["hidden_size"], {}
    for split, images in (("train", 60), ("val", 20)):
        features, image_of = torch.randn(images, width, generator=generator), torch.arange(images).repeat_interleave(2)
        ids = torch.randint(5, 20, (2 * images, 6), generator=generator)
        tokens = features[image_of, None, :channels].expand(-1, 6, -1).half().contiguous()
        cache[split] = {"images": features, "ids": ids, "tokens": tokens, "image_of_caption": image_of}
    return str(model), cache


def train(folder: Path, model: str, cache: dict[str, Any], *more: str) -> dict[str, Any]:
    import frozen_towers

    torch.save(cache, folder / "frozen.pt")
    words = ["--loss", "clip", "--lr=3e-2", "--epochs=4", "--batch-size=20", "--hold-out=20", "--model", model, *more]
    output = ["--output", str(folder / "output.json"), "--threads", str(torch.get_num_threads())]
    frozen_towers.main(["train", str(folder / "frozen.pt"), *words, *output])
    return _own_result(folder)  # type: ignore[return-value]


def rsum(val: dict[str, Any]) -> float:
    from coder_plugin.compare.measure import hits

    return float(hits(val, val).recalls(torch.ones(len(val["i2t_ranks"])))[0, 0])


def test_a_run_learns_and_reports_its_best_epoch(tmp_path: Path) -> None:
    import frozen_towers

    model, cache = make_cache(tmp_path)
    result = train(tmp_path, model, cache)
    assert len(result["held_aside"]) == len(result["seconds"]) == 4 and result["seconds"] == sorted(result["seconds"])
    assert result["held_aside"][-1] > 1.5 * result["before"] and result["memory_mb"] > 100
    assert len(result["val"]["i2t_ranks"]) == 20 and len(result["val"]["t2i_ranks"]) == 40
    assert rsum(result["val"]) not in [pytest.approx(score) for score in result["held_aside"]]  # of other images
    assert train(tmp_path, model, cache)["held_aside"] == result["held_aside"]
    assert train(tmp_path, model, cache, "--seed=1")["held_aside"] != result["held_aside"]
    # where the held-out images are those reported too, their recall is that of the best epoch, which is not the last
    cache["val"] = frozen_towers.hold_out(cache["train"], 20, 0)[1]
    result = train(tmp_path, model, cache, "--lr=0.1", "--epochs=8")
    assert rsum(result["val"]) == pytest.approx(max(result["held_aside"]), abs=0.01)
    assert max(result["held_aside"]) > result["held_aside"][-1]


def test_images_held_aside_are_drawn_with_all_of_their_captions(tmp_path: Path) -> None:
    import frozen_towers

    _, cache = make_cache(tmp_path)
    split = cache["train"]
    kept, held = frozen_towers.hold_out(split, 20, 0)
    assert len(held["images"]) == 20 and len(held["ids"]) == 40 and len(kept["images"]) == 40 and len(kept["ids"]) == 80
    every = {tuple(feature.tolist()) for part in (kept, held) for feature in part["images"]}
    assert every == {tuple(feature.tolist()) for feature in split["images"]}
    before = frozen_towers.hold_out({**split, "before": split["tokens"]}, 20, 0)
    assert all(torch.equal(part["before"], part["tokens"]) for part in before)
    for part in (kept, held):  # a caption's features are those of its image
        own = part["images"][part["image_of_caption"], : part["tokens"].shape[2]]
        assert torch.equal(part["tokens"][:, 0], own.half())
    assert not torch.equal(held["images"], split["images"][40:])
    assert not torch.equal(held["images"], frozen_towers.hold_out(split, 20, 1)[1]["images"])


def test_a_loss_takes_the_settings_of_its_terms_and_heads() -> None:
    import frozen_towers

    pytest.importorskip("pytorch_metric_learning")
    settings = ["dcl.mu=0.2", "pml.NTXentLoss.temperature=0.3", "momentum.momentum=0.9", "m_dcl.mu=0.4"]
    facts = TrainingFacts(loss="dcl", samples_per_epoch=100, captions="all", pairs_per_step=10, epochs=1)
    objective = frozen_towers.make_objective("dcl + pml.NTXentLoss", settings, facts)
    given = {term.name: dict(term.options) for term in objective.terms}
    assert given == {"dcl": {"mu": 0.2}, "pml.NTXentLoss": {"temperature": 0.3}}
    assert "momentum" not in dict(objective.heads)
    objective = frozen_towers.make_objective("m_dcl", settings, facts)
    assert dict(dict(objective.heads)["momentum"])["momentum"] == 0.9 and dict(objective.terms[0].options)["mu"] == 0.4
