"""Training of transformers' CLIPModel and SiglipModel: losses fall, and exports open in transformers with equal features."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from torch import Tensor

import coder_plugin
from coder_plugin import create_loss, create_model
from coder_plugin.cli import main
from coder_plugin.data.scenes import open_scenes
from coder_plugin.distributed import rank, world_size
from coder_plugin.objective import Objective
from coder_plugin.pretrained.build import make_transform
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.training.prepare import freeze_unread
from tests import gloo
from tests.backbones import tiny_clip

LOSSES = {
    "clip + dcl": {},
    "coder": {"concepts.vocabulary": "scenes", "prototypes.clusters": 3, "momentum.bank_size": 16},
    "clip + selfalign": {"alignment.prototypes": 8},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("transformers")
    return {"clip": tiny_clip.clip(root / "clip"), "siglip": tiny_clip.siglip(root / "siglip")}


def batch(model: Any, count: int = 8) -> dict[str, Tensor]:
    items = open_scenes("train", count=count)
    transform = make_transform(model)
    return {
        "image": torch.stack([transform(item.load()) for item in items]),
        "text": model.tokenizer()([item.captions[0] for item in items]),
        "image_id": torch.arange(count),
    }


def table(folder: Path) -> str:
    """A table of 16 pictures."""
    rows = ["filepath\ttitle"]
    for index, scene in enumerate(open_scenes("train", count=16)):
        scene.load().save(folder / f"scene-{index}.png")
        rows.append(f"scene-{index}.png\t{scene.captions[0]}")
    (folder / "scenes.csv").write_text("\n".join(rows) + "\n")
    return str(folder / "scenes.csv")


def assert_transformers_opens(folder: Path, model: Any, inputs: dict[str, Tensor]) -> None:
    """``AutoModel`` and ``AutoProcessor`` open an export without a word, and give the model's features to 1e-5."""
    own, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(own).__name__ == type(model).__name__.removeprefix("Coder") and own.logit_scale.dtype == torch.float32
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor(text=["a red circle"], padding="max_length", return_tensors="pt")["input_ids"]
    assert text.equal(model.tokenizer()(["a red circle"]))
    assert transformers_size(processor) == model.visual.image_size
    with torch.no_grad():
        outputs = own.eval()(pixel_values=inputs["image"], input_ids=inputs["text"])
        expected = model.eval()(inputs["image"], inputs["text"])
    torch.testing.assert_close(outputs.image_embeds, expected["image_features"], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.text_embeds, expected["text_features"], atol=1e-5, rtol=0)
    logits = expected["logit_scale"] * expected["image_features"] @ expected["text_features"].T
    torch.testing.assert_close(outputs.logits_per_image, logits + expected.get("logit_bias", 0), atol=1e-4, rtol=0)


def transformers_size(processor: Any) -> int:
    return dict(processor.image_processor.size).get("shortest_edge") or dict(processor.image_processor.size)["height"]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("clip", "clip + dcl"), ("siglip", "coder"), pytest.param("clip", "clip + selfalign", marks=pytest.mark.slow),
        pytest.param("siglip", "siglip", marks=pytest.mark.slow), pytest.param("clip", "ascl", marks=pytest.mark.slow),
    ],  # fmt: skip
)
def test_it_trains_and_goes_back(folders: dict[str, str], tmp_path: Path, kind: str, loss: str) -> None:
    """open_clip #766, #591, transformers #28072: a model of transformers is trained as it is, so its export is one."""
    torch.manual_seed(0)
    objective = Objective.parse(loss).with_options(LOSSES.get(loss, {}))
    model = create_model(folders[kind], loss=objective)
    coder_loss = create_loss(objective, model=model)
    inputs = batch(model)
    extra = {"text_positive": inputs["text"].roll(1, 1)} if loss == "ascl" else {}
    unread = freeze_unread(model, coder_loss, model.tokenizer())
    assert set(unread) <= {"logit_scale", "logit_bias"}, unread
    rate = 3e-4 if loss == "ascl" else 2e-3  # each step draws other noise
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    coder_plugin.follow(model, optimizer)
    values = []
    for _ in range(8):
        losses = coder_loss(**model.train()(**inputs, **extra))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not silent and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        values.append(float(sum(losses.values()).detach()))
    assert values[-1] < values[0] - 0.05 and all(map(lambda value: value == value, values)), values
    export_model(model, tmp_path / "export")
    assert_transformers_opens(tmp_path / "export", model, inputs)
    opened = open_pretrained(tmp_path / "export", device="cpu")
    with torch.no_grad():
        for name in ("image", "text"):
            vectors = getattr(model.eval(), f"embed_{name}")(inputs[name])
            assert getattr(opened.model, f"embed_{name}")(inputs[name]).equal(vectors)
    assert opened.objective == str(objective) and opened.transform(open_scenes("val", count=1)[0].load()).shape == (3, 32, 32)


@pytest.mark.slow
def test_a_run_from_a_folder_to_a_search(folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``train``, ``eval``, ``index`` and ``search``; the export opens in transformers, and starts another run."""
    data = table(tmp_path)
    options = ["--logs", str(tmp_path), "--epochs", "1", "--batch-size", "8", "--workers", "0", "--no-report"]
    options += ["--train-data", data, "--val-data", data, "--concepts", "scenes"]
    run = tmp_path / "run"
    flags = ["--loss", "coder", "--lora-rank", "2", "--grad-checkpointing", "--layer-decay", "0.8"]
    sizes = ["--set", "momentum.bank_size=16", "prototypes.clusters=4"]
    assert main(["train", "--model", folders["clip"], "--name", "run", *flags, *sizes, *options]) == 0
    best = run / "export" / "best"
    opened = open_pretrained(run, device="cpu")
    assert_transformers_opens(best, opened.model, batch(opened.model))
    assert list(opened.model.coder.heads) == ["concepts"]
    assert not any("lora" in name for name in opened.model.state_dict())
    capsys.readouterr()
    assert main(["eval", str(run), "--workers", "0"]) == 0 and "R@sum" in capsys.readouterr().out
    assert main(["eval", folders["clip"], "--val-data", data, "--workers", "0"]) == 0
    assert main(["index", str(run), "--data", data, "--output", str(tmp_path / "index"), "--workers", "0"]) == 0
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "--text", "a red circle", "-k", "2", "--json"]) == 0
    assert capsys.readouterr().out.count('"key": "scene-') == 2
    again = ["--model", str(best), "--lock-image", "--name", "again", "--loss", "clip + dcl"]
    assert main(["train", *again, *options[:-2]]) == 0
    with_new = transformers.AutoModel.from_pretrained(tmp_path / "again" / "export" / "last").state_dict()
    before = opened.model.state_dict()
    same = {name for name, value in with_new.items() if value.equal(before[name])}
    assert {name for name in with_new if name.startswith(("vision_model.", "visual_projection."))} <= same != with_new.keys()


def test_hugging_faces_trainer_trains_and_resumes_it(folders: dict[str, str], tmp_path: Path) -> None:
    """Bit for bit, banks and momentum towers included, though the Trainer saves it as a model of transformers."""
    from coder_plugin.integrations.transformers import CoderTrainer

    def trainer() -> Any:
        torch.manual_seed(0)
        model = create_model(folders["clip"], loss="clip + m_dcl")
        inputs = batch(model)
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
        options = {"report_to": "none", "disable_tqdm": True, "save_steps": 1, "learning_rate": 1e-3, "use_cpu": True}
        args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, **options)
        return CoderTrainer(model=model, loss="clip + m_dcl", args=args, train_dataset=rows)

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    state = resumed.model.state_dict()
    assert all(value.equal(state[name]) for name, value in whole.model.state_dict().items())
    assert whole.model.coder.heads["momentum"].bank.count == 8
    export_model(whole.model, tmp_path / "export")
    assert_transformers_opens(tmp_path / "export", whole.model, batch(whole.model))


def test_a_repository_of_transformers_is_opened(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_pretrained("OWNER/NAME")`` downloads the weights that transformers has saved, which open_clip's repositories
    have other names for."""

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert name == "owner/siglip"
        files = [path.name for path in Path(folders["siglip"]).iterdir()]
        (tmp_path / "cache").mkdir(exist_ok=True)
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            shutil.copy(Path(folders["siglip"], file), tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    opened = coder_plugin.from_pretrained("owner/siglip")
    assert opened.encode_texts(["a dog"]).equal(coder_plugin.from_pretrained(folders["siglip"]).encode_texts(["a dog"]))


def ranks_gradient(folder: str, loss: str) -> dict[str, Tensor]:
    """This rank's share of a batch of 8 -> the averaged gradient of the towers."""
    torch.manual_seed(0)
    model = create_model(folder, loss=loss)
    share = {name: value.chunk(world_size())[rank()] for name, value in batch(model).items()}
    losses = create_loss(loss, model=model)(**model(**share))
    sum(losses.values()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_losses_see_the_pairs_of_all_ranks(folders: dict[str, str]) -> None:
    """transformers #22252: CLIPModel's own loss sees one process's pairs. Ours see all: the average of two ranks' gradients is
    that of one process."""
    one = ranks_gradient(folders["clip"], "clip + dcl")
    two = gloo.run(ranks_gradient, folders["clip"], "clip + dcl")
    averaged = {name: (two[0][name] + two[1][name]) / 2 for name in one}
    torch.testing.assert_close(averaged, one, atol=1e-5, rtol=1e-4)
