"""How flickr8k.py makes the models of its points, and goes on after a stop."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.experiments.plans import points_of
from tests.training import region_data


def test_a_run_on_frozen_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k
    import frozen_towers
    import torch

    from tests.backbones import tiny_bert

    _, text = tiny_bert.make_clip(tmp_path)
    generator = torch.Generator().manual_seed(0)
    width, channels, cache = 256, json.loads((Path(text) / "config.json").read_text())["hidden_size"], {}
    for split, images in (("train", 60), ("val", 20)):
        features, image_of = torch.randn(images, width, generator=generator), torch.arange(images).repeat_interleave(2)
        ids = torch.randint(5, 20, (2 * images, 6), generator=generator)
        tokens = features[image_of, None, :channels].expand(-1, 6, -1).half().contiguous()
        cache[split] = {"images": features, "ids": ids, "tokens": tokens, "image_of_caption": image_of}
    torch.save(cache, tmp_path / "frozen.pt")
    plan = flickr8k.Plan("cpu", ["frozen"], ["clip"])
    setting = plan.settings["frozen"]
    setting["flags"] = shlex.split("train frozen.pt --model tiny.json --hold-out 20 --epochs 4 --batch-size 20")

    def start(command: list[str], *, cwd: Path, **_: Any) -> Any:
        monkeypatch.chdir(cwd)
        frozen_towers.main(command[2:])
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=start, STDOUT=None))
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), torch.get_num_threads())
    point = flickr8k.Point("frozen", "clip", 3e-2, (), 0)
    work.evaluate(point, work.splits("frozen"))
    result = work.results.get(point)
    assert result["machine"]["threads"] == torch.get_num_threads() and torch.__version__.startswith(result["machine"]["torch"])
    assert len(result["held_out"]) == 4 and len(result["val"]["scores"]) == 20
    assert np.mean(result["val"]["scores"]) == pytest.approx(result["val"]["rsum"], abs=1e-3)
    record = json.loads((tmp_path / f"{flickr8k.make_run(plan, point).folder}.json").read_text())
    assert result["held_out"][-1] > 1.5 * record["results"]["0"]["rsum"]  # it has learned
    # the images reported are others than those held out; where they are the same, their recall is that of the best epoch
    assert record["report"]["rsum"] != record["results"][str(result["best_epoch"])]["rsum"]
    assert "test" not in result and work.splits("frozen") == ["val"]
    torch.save({**cache, "test": frozen_towers.hold_out(cache, 20)["val"]}, tmp_path / "frozen.pt")
    assert work.splits("frozen") == ["val", "test"]
    work.evaluate(point, ["val", "test"])  # the result has no test split, so the model is trained again
    again = work.results.get(point)
    assert {**again, "test": None} == {**result, "test": None}
    assert again["test"]["rsum"] == pytest.approx(max(again["held_out"]), abs=0.01)
    other = {name: value for name, value in again.items() if name != "test"} | {"held_out": [99.0], "val": {"rsum": 1.0}}
    work.results.write(point, other)  # of a machine with other numbers
    work.evaluate(point, ["val", "test"])
    replaced = work.results.get(point)
    assert (replaced["val"], replaced["test"], replaced["held_out"]) == (again["val"], again["test"], again["held_out"])
    assert replaced["chosen_by"] == [99.0]
    cache["val"] = frozen_towers.hold_out(cache, 20)["val"]
    torch.save(cache, tmp_path / "frozen.pt")
    point = flickr8k.Point("frozen", "clip", 0.3, (), 0)  # too high: the last epoch is not the best
    (tmp_path / f"{flickr8k.make_run(plan, point).folder}.json").write_text('{"results": {"1"')  # what a stopped run has left
    result = work.train(point)
    assert result["best_epoch"] == result["held_out"].index(max(result["held_out"])) + 1 < 4
    assert result["val"]["rsum"] == pytest.approx(max(result["held_out"]), abs=0.01)


def test_a_record_of_a_script_has_its_splits_and_levels(tmp_path: Path) -> None:
    import flickr8k

    run = flickr8k.make_run(flickr8k.Plan("cpu", ["frozen"]), flickr8k.Point("frozen", "coder", 1e-4, (), 0))
    ranks = {"i2t_ranks": [0, 7], "t2i_ranks": [0, 0, 4, 20]}
    report = {"rsum": 300.0, "instance rsum": 290.0, "concept rsum": 90.0, **ranks}
    record = {"results": {"0": {"rsum": 1.0}, "1": {"rsum": 280.0}}, "losses": {"dcl_loss": [2.0, 1.0]}, "report": report}
    for more in ({}, {"test": {**report, "rsum": 301.0}}):
        (tmp_path / "run.json").write_text(json.dumps({**record, **more}))
        measured = run.measured(tmp_path / "run")
        assert measured["held_out"] == [280.0] and measured["last_step"] == {"dcl_loss": 1.0, "rsum": 280.0}
        assert measured["val"] == {"rsum": 300.0, "instance level": 290.0, "concept level": 90.0, "scores": [600.0, 200.0]}
        assert measured.get("test") == ({**measured["val"], "rsum": 301.0} if more else None)


def test_the_base_is_trained_first_and_once_and_mines_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    plan = flickr8k.Plan("cpu", ["clip-distill"], ["finetune-clip", "finetune-clip-mined"])
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), 1)
    names: list[str] = []
    status, mined = 1, []

    def mine(command: list[str], **_: Any) -> Any:
        mined.append(command[3:])
        if not status:
            (tmp_path / command[-1]).touch()
        return SimpleNamespace(returncode=status)

    def train(command: list[str], **_: Any) -> Any:
        """In place of the process: writes what a run leaves, and no result."""
        logs, name = (command[command.index(flag) + 1] for flag in ("--logs", "--name"))
        names.append(name)
        (tmp_path / logs / name / "export" / "best").mkdir(parents=True, exist_ok=True)
        record = {"val/rsum": 1.0, "val/epoch": 1}
        (tmp_path / logs / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=train, run=mine, STDOUT=None))
    points = points_of(plan, "clip-distill")
    with pytest.raises(SystemExit, match=r"coder-plugin mine .* failed, see .*finetune-clip-mined.log"):
        work.train(points[-1])
    status = 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work.train, [*points, replace(points[-1], seed=1)]))
    assert mined[1][:4] == ["mine", "runs/cpu/clip-base-1/base-lr0.0003-seed1", "--data", "shards/train/*.tar"]
    assert len(mined) == 2
    command = flickr8k.make_run(plan, points[-1]).command
    assert command[command.index("--negatives-file") + 1] == mined[1][-1] == "runs/cpu/clip-distill/finetune-clip-mined.tsv"
    assert "--negatives-file" not in flickr8k.make_run(plan, points[0]).command
    with pytest.raises(SystemExit, match="row finetune-clip-mined mines .* setting frozen has none"):
        flickr8k.make_run(plan, replace(points[-1], setting="frozen"))
    base = plan.base("clip-distill")
    points.append(replace(points[-1], seed=1))
    assert base is not None and names[0] == base.name and sorted(names[1:]) == sorted(point.name for point in points)
    assert work.results.get(base) is not None
    work.results.file(points[0]).unlink()
    assert work.train(points[0])["held_out"] == [1.0] and len(names) == 1 + len(points)  # known from its folder
    finished = work.run_folder(points[0]) / "result.json"
    finished.write_text(json.dumps({**json.loads(finished.read_text()), "command": "of another loss"}))
    work.results.file(points[0]).unlink()
    work.train(points[0])
    assert names.pop() == points[0].name and len(names) == 1 + len(points)  # trained again
    (work.run_folder(base) / "result.json").unlink()
    work.model(base)  # an export alone may be that of an epoch before a stop
    assert names[-1] == base.name and names.count(base.name) == 2


def test_weights_half_way_from_the_base_need_its_fine_tuned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    plan = flickr8k.Plan("cpu", ["clip"], ["clip", "clip-wise-ft"])
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), 1)
    calls: list[list[str]] = []

    def call(command: list[str], **_: Any) -> Any:
        """In place of the process: writes what training or the evaluation of the interpolated weights leaves."""
        calls.append(command)
        if "train" in command:
            logs, name = (command[command.index(flag) + 1] for flag in ("--logs", "--name"))
            (tmp_path / logs / name).mkdir(parents=True)
            (tmp_path / logs / name / "metrics.jsonl").write_text('{"val/rsum": 3.0, "val/epoch": 1}\n')
        else:
            folder = tmp_path / command[command.index("--wise-ft-save") + 2]
            folder.mkdir()  # which has to be new
            measured = {"before: base": 1.0, "clip, wise-ft 0.5": 4.004, "clip": 3.0}
            (tmp_path / command[command.index("--json") + 1]).write_text(
                json.dumps([{"name": name, "rsum": rsum} for name, rsum in measured.items()])
            )
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=call, STDOUT=None))
    tried = plan.grid("clip", "clip", lambda row: pytest.fail(row))
    for point in tried:
        work.train(point)
    [point] = plan.grid("clip", "clip-wise-ft", lambda row: work.results.chosen("clip", row))
    tuned = work.results.chosen("clip", "clip")
    assert flickr8k.make_run(plan, point).needs == tuned and point.lr == tuned.lr
    assert flickr8k.make_run(plan, tuned).needs == plan.base("clip")
    work.run_folder(point).mkdir()  # what a stopped evaluation leaves
    result = work.train(point)
    assert result["held_out"] == [4.0] and result["command"].startswith(f"coder-plugin eval runs/cpu/clip/{tuned.name} ")
    assert f"--wise-ft-save 0.5 runs/cpu/clip/{point.name} " in result["command"] and len(calls) == 1 + len(tried) + 1
    other_seed = flickr8k.Point("clip", point.row, point.lr, point.options, 1)
    work.train(other_seed)  # trains what it lies before
    assert len(calls) == len(tried) + 4 and calls[-2][calls[-2].index("--name") + 1] == tuned.name.replace("seed0", "seed1")


def test_the_classes_that_training_keeps(tmp_path: Path) -> None:
    import timm
    import torch
    from flickr8k_kept import kept_classes
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network, pictures = timm.create_model("test_efficientnet", num_classes=5).eval(), torch.randn(64, 3, 32, 32)
    save_file(network.state_dict(), tmp_path / "pretrained.safetensors")
    wanted = network(pictures).argmax(1)
    trunk = timm.create_model("test_efficientnet", num_classes=0).eval()
    trunk.load_state_dict({name: value for name, value in network.state_dict().items() if not name.startswith("classifier.")})
    assert kept_classes(trunk, lambda: trunk(pictures), tmp_path / "pretrained.safetensors") == 1
    with torch.no_grad():
        for weight in trunk.parameters():
            weight += 0.05 * torch.randn_like(weight)
        changed = {name: value.clone() for name, value in trunk.state_dict().items()}
        now = (trunk(pictures) @ network.classifier.weight.T + network.classifier.bias).argmax(1)
        kept = kept_classes(trunk, lambda: trunk(pictures), tmp_path / "pretrained.safetensors")
    assert kept == (now == wanted).double().mean() and 0.1 < kept < 1
    assert all(torch.equal(value, changed[name]) for name, value in trunk.state_dict().items())


@pytest.mark.slow
def test_the_smallest_size_from_training_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    work, page = tmp_path / "work", tmp_path / "page.md"
    for name in ("regions", "regions-val", "regions-test"):
        region_data.write_precomp(work / name)
    region_data.write_vocabulary(work / "concepts.safetensors")
    page.write_text("<!-- begin a regions-bigru -->\n<!-- end -->\n<!-- begin i regions-bigru -->\n<!-- end -->\n")

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["flickr8k.py", *arguments])
        flickr8k.main()

    rows = ["clip", "dcl", "m_dcl", "coder-paper"]
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--jobs", "2")
    results = sorted(work.glob("results/smoke/regions-bigru/*.json"))
    before = {path: path.stat().st_mtime_ns for path in results}
    call("run", str(work), "--size", "smoke", "--rows", *rows)  # nothing to do
    assert {path: path.stat().st_mtime_ns for path in results} == before and len(results) == 8
    published = flickr8k.Results(work / "results", flickr8k.Plan("smoke"))
    point = published.chosen("regions-bigru", "dcl")
    before_loss = published.get(point)
    published.write(point, {name: value for name, value in before_loss.items() if name != "val"})
    shutil.rmtree(work / "runs")  # a result without its model: it is trained again where it has to be evaluated
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--results", str(work / "results"))
    assert published.get(point) == before_loss and len(list(work.glob("runs/smoke/regions-bigru/*/export"))) == 1
    other = {name: value for name, value in before_loss.items() if name != "val"} | {"held_out": [99.0, 99.0]}
    published.write(point, other)  # as of a machine where the same command gives other numbers
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--results", str(work / "results"))
    again = published.get(point)
    assert all(again[name] == before_loss[name] for name in ("held_out", "val", "test")) and again["chosen_by"] == [99.0, 99.0]
    other = {name: value for name, value in other.items() if name != "test"} | {"val": {"rsum": 1.0, "scores": []}}
    published.write(point, other)
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--results", str(work / "results"))
    again = published.get(point)
    assert all(again[name] == before_loss[name] for name in ("held_out", "val", "test"))
    call("page", str(work / "results"), str(page), "--size", "smoke")
    numbers = json.loads(page.with_suffix(".json").read_text())["settings"]["regions-bigru"]
    assert list(numbers) == rows
    assert all(len(each["val"]["rsum"]) == len(each["test"]["rsum"]) == 2 for each in numbers.values())
    assert page.read_text().count("figures/page-") == 2 and "instance / concept level" in page.read_text()


def test_prepare_makes_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k_prepare
    import torch

    calls: list[list[str]] = []

    def run(command: list[str], *, cwd: Path) -> Any:
        """In place of the process: writes the files that the next steps look for."""
        calls.append(command[1:])
        if "towers" in command:
            (cwd / "towers").mkdir()
            (cwd / "towers" / "lite0.safetensors").touch()
            (cwd / "towers" / "lite0-minilm.json").write_text(json.dumps({"text_cfg": {"hf_model_name": str(tmp_path)}}))
        elif "extract" in command:
            pass
        elif "convert" in command:
            folder = cwd / command[command.index("convert") + 2]
            folder.mkdir(exist_ok=True)
            (folder / f"{command[-1]}_ims.npy").touch()
        elif "cache" in command:
            splits = ["train", "val", *(["test"] if "--test-data" in command else [])]
            torch.save(dict.fromkeys(splits, 0), cwd / command[command.index("cache") + 1])
        else:
            (cwd / command[command.index("--output") + 1]).touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(flickr8k_prepare, "subprocess", SimpleNamespace(run=run))
    options = SimpleNamespace(work=tmp_path / "work", train_data="a.tar", held_out="b.tar", val_data="c.tar", test_data=None)
    options.vectors, options.tagger, options.settings = "none", "en_core_web_sm", []
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="a.tar: a.tar does not exist"):
        flickr8k_prepare.prepare(options)
    for name in "abcd":
        Path(f"{name}.tar").touch()
    with pytest.raises(SystemExit, match="--vectors words.txt: no such file"):
        flickr8k_prepare.prepare(SimpleNamespace(**{**vars(options), "vectors": "words.txt"}))
    assert not calls
    flickr8k_prepare.prepare(options)
    [concepts] = [command for command in calls if "concepts" in command]
    assert concepts[concepts.index("--vectors") + 1] == "none"
    assert len(calls) == 17  # towers, regions of three splits in two steps, three caches and six of other texts, concepts
    noise = {call[call.index("cache") + 1]: call[call.index("--noise") + 1] for call in calls if "--noise" in call}
    assert noise["words-shuffle.pt"] == "shuffle" and len(noise) == 4
    assert not any("--test-data" in command for command in calls)
    flickr8k_prepare.prepare(options)
    assert len(calls) == 17
    options.test_data, test = "d.tar", str(Path("d.tar").absolute())
    for _ in range(2):  # the second time there is nothing to do
        flickr8k_prepare.prepare(options)
        assert calls[17][3:6] == ["extract", test, "regions-test-shards"] and len(calls) == 22
        assert calls[18][3:6] == ["convert", "regions-test-shards", "regions-test"]
        assert [command[command.index("--test-data") + 1] for command in calls[19:]] == [test, test, "regions-test"]
    assert (tmp_path / "work" / "shards" / "test" / "d.tar").is_symlink()
    calls.clear()
    options.test_data, options.work, options.settings = None, tmp_path / "one", ["frozen"]
    flickr8k_prepare.prepare(options)
    assert [command[2] for command in calls if "cache" in command] == ["frozen.pt"]
    assert len(calls) == 9  # with towers, regions of three splits and concepts
    options.test_data = "d.tar"
    flickr8k_prepare.prepare(options)
    assert [command[2] for command in calls if "cache" in command] == ["frozen.pt", "frozen.pt"] and len(calls) == 12
