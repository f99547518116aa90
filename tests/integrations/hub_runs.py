"""Tiny trained runs to share, and their vectors, here or in a process of its own: ``python -m tests.integrations.hub_runs``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

#: Somebody's name, in the path of everything that is made: it may be in nothing that is shared.
SOMEBODY = "janedoe"
TEXTS = ["a red circle", "two small blue squares above a green triangle", "a dog"]
CODER = ["momentum.bank_size=24", "prototypes.clusters=10", "prototypes.recluster=40", "concepts.warmup=2"]
SMALL = ["embed_dim=16", "context_length=16"]
#: A validation as a trainer would have written it.
FIGURES = {f"{way}_r{k}": 10.0 * k + 0.25 for way in ("i2t", "t2i") for k in (1, 5, 10)}
FIGURES |= {"rsum": 321.5, "images": 1234, "texts": 6170, "epoch": 1, "step": 2}


def make(folder: Path, tiny_model: str) -> dict[str, Path]:
    """Runs of every kind of model, one short epoch each, under a folder with somebody's name."""
    from coder_plugin.concepts import scenes_vocabulary
    from tests.backbones import tiny_bert
    from tests.conftest import TINY
    from tests.training import region_data

    home = folder / SOMEBODY
    bert = tiny_bert.make(home / "bert")
    tower = {"hf_model_name": bert, "hf_tokenizer_name": bert, "hf_pooler_type": "mean_pooler", "hf_proj_type": "mlp"}
    of_bert = home / "with-bert-for-tests.json"
    of_bert.write_text(json.dumps({**TINY, "text_cfg": {**tower, "context_length": 24}}))
    scenes_vocabulary().save(home / "words.safetensors")
    regions = region_data.write_precomp(home / "precomp")
    of_regions = {"train_data": regions, "val_data": regions, "model_kwargs": [*SMALL, f"text={bert}"], "max_regions": 5}
    bigru = {**of_regions, "model": "region-bigru", "model_kwargs": [*SMALL, "word_dim=8"]}
    runs: dict[str, dict[str, Any]] = {
        "coder": {"model": tiny_model, "loss": "coder", "set": CODER, "concepts": str(home / "words.safetensors")},
        "bert": {"model": str(of_bert), "loss": "dcl", "force_context_length": 20, "image_mean": [0.5, 0.5, 0.5]},
        "gpo": {"model": tiny_model, "loss": "dcl", "aggregator": "gpo", "channels_last": True},
        "lora": {"model": tiny_model, "loss": "clip", "lora_rank": 2, "lr": 1e-2},
        "bigru": {**bigru, "loss": "dcl"},
        "fusion": {**of_regions, "model": "region-bert", "loss": "ascl(similarity=fusion) + ascl", "set": ["fusion.heads=2"]},
    }
    return {name: train(home / "logs", name, **options) for name, options in runs.items()}


def train(logs: Path, name: str, **options: Any) -> Path:
    from coder_plugin.training.loop import Trainer

    given = {"epochs": 1, "train_num_samples": 16, "batch_size": 8, "workers": 0, "val_frequency": 0, "warmup": 1}
    Trainer.from_config({**given, "logs": str(logs), "name": name, **options}).run()
    return logs / name


def finish(run: Path, **figures: Any) -> None:
    """Give a run a validation, as a trainer would write it in its newest checkpoint."""
    from coder_plugin.files import sha256_json

    for path in (run / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["manifest_sha256"]
        manifest.update(last=figures, best={**figures, "checkpoint": path.parent.name})
        path.write_text(json.dumps({**manifest, "manifest_sha256": sha256_json(manifest)}))


def inputs(model: Any, folder: Path) -> list[Any]:
    """Pictures' paths, or regions where the model reads those."""
    from coder_plugin.backbones.base import Backbone
    from tests.training import region_data

    if isinstance(model, Backbone):
        return [record.regions for record in list(region_data.records("dev"))[:3]]
    return pictures(folder)


def pictures(folder: Path) -> list[str]:
    """Three pictures of different sizes and modes, the same ones every time."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number, (size, mode) in enumerate((((64, 64), "RGB"), ((90, 70), "RGBA"), ((40, 80), "L"))):
        channels = len(mode)
        noise = torch.randint(0, 256, (size[1], size[0], channels), generator=torch.Generator().manual_seed(number))
        picture = Image.frombytes(mode, size, bytes(noise.flatten().tolist()))
        path = folder / f"{number}.png"
        if not path.is_file():
            picture.save(path)
        made.append(str(path))
    return made


def picture(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def known(runs: dict[str, Path], pictures_at: Path) -> dict[str, Any]:
    """The exports' vectors, and the towers' own features of those that plain open_clip opens, in this process."""
    from coder_plugin.pretrained.open import open_pretrained

    found: dict[str, Any] = {"pictures": pictures_at, "towers": {}, "vectors": {}}
    for name, run in runs.items():
        model = open_pretrained(run, {}, export="last", device="cpu")
        seen = inputs(model.model, pictures_at)
        found["vectors"][name] = {"images": model.encode_images(seen), "texts": model.encode_texts(TEXTS)}
        if name in ("coder", "bert", "gpo", "lora"):
            model.model.visual.to(memory_format=torch.contiguous_format)  # as plain open_clip makes it
            with torch.no_grad():
                batch = torch.stack([model.transform(picture(path)) for path in seen])
                towers = model.model.encode_image(batch), model.model.encode_text(model.tokenizer(TEXTS))
            found["towers"][name] = dict(zip(("images", "texts"), towers, strict=True))
    return found


def vectors(spec: str | Path, folder: Path) -> dict[str, torch.Tensor]:
    from coder_plugin import from_pretrained

    model = from_pretrained(spec)
    return {"images": model.encode_images(inputs(model.model, folder)), "texts": model.encode_texts(TEXTS)}


def main(names: list[str], shared: Path, pictures_at: Path, out: Path) -> None:
    torch.save({name: vectors(shared / name, pictures_at) for name in names}, out)


def plain(names: list[str], shared: Path, pictures_at: Path, out: Path) -> None:
    """The towers' own features by open_clip alone."""
    import open_clip
    from PIL import Image

    found = {}
    for name in names:
        os.chdir(shared / name)  # where a text tower that lies beside is looked for
        model, preprocess = open_clip.create_model_from_pretrained("local-dir:.")
        tokenizer = open_clip.get_tokenizer("local-dir:.")
        batch = torch.stack([preprocess(Image.open(path).convert("RGB")) for path in pictures(pictures_at)])
        with torch.no_grad():
            found[name] = {"images": model.eval().encode_image(batch), "texts": model.encode_text(tokenizer(TEXTS))}
    torch.save(found, out)


if __name__ == "__main__":
    kind, names, *paths = sys.argv[1:]
    {"ours": main, "plain": plain}[kind](names.split(","), *map(Path, paths))
    assert kind == "ours" or not any(name.startswith("coder_plugin") for name in sys.modules)
