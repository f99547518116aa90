"""Runs of open_clip's trainer on tiny models and scenes, in this process or in two that share a gloo group."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import pickle
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests import fresh
from tests.backbones import tiny_bert

_VIT = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}
_TEXT: dict[str, Any] = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
_POOLER = {"attn_pooler_heads": 2}


def _timm(name: str) -> dict[str, Any]:
    return {"timm_model_name": name, "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}


#: Of each kind that open_clip has, a model that takes a step in milliseconds.
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"vision_cfg": _VIT, "text_cfg": _TEXT},
    "resnet": {
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 64},
        "text_cfg": _TEXT,
    },
    "timm-hf": {
        "vision_cfg": _timm("test_efficientnet"),
        "text_cfg": {"hf_proj_type": "linear", "hf_pooler_type": "mean_pooler", "context_length": 24},
    },
    "custom": {"vision_cfg": _VIT, "text_cfg": {**_TEXT, "proj_bias": True}, "custom_text": True},
    "sigmoid": {  # a name with siglip in it would ask for a tokenizer from the net
        "vision_cfg": {**_VIT, "pool_type": "avg"},
        "text_cfg": {**_TEXT, "pool_type": "last", "no_causal_mask": True, "proj_bias": True},
        "custom_text": True,
        "init_logit_bias": -10.0,
    },
    "coca": {
        "vision_cfg": {**_VIT, "attentional_pool": True, **_POOLER, "attn_pooler_queries": 5, "output_tokens": True},
        "text_cfg": {**_TEXT, "vocab_size": len(tiny_bert.PIECES), "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**_TEXT, "vocab_size": len(tiny_bert.PIECES), "layers": 1, **_POOLER},
        "custom_text": True,
    },
}


def write_models(folder: Path) -> dict[str, str]:
    """The configurations as files; their paths by name."""
    bert = tiny_bert.make(folder / "bert")
    paths = {}
    for name, config in MODELS.items():
        text = config["text_cfg"]
        if text.get("vocab_size") != _TEXT["vocab_size"]:
            text = {**text, "hf_tokenizer_name": bert, **({"hf_model_name": bert} if "hf_pooler_type" in text else {})}
        path = folder / f"tiny-upstream-{name}.json"
        path.write_text(json.dumps({"embed_dim": 32, **config, "text_cfg": text}))
        paths[name] = str(path)
    return paths


def write_scenes(folder: Path, images: int = 32) -> dict[str, list[str]]:
    """Built-in scenes as upstream reads them, 32 pairs each: a table of half of the images with two captions of each, and pairs
    of shards with several captions an image or with one. What upstream's flags say of them, by the kind of data."""
    from coder_plugin.data import open_source

    scenes = open_source("scenes", split="train", kind="scenes")
    items = [item for _, item in zip(range(images), (item for _, item in scenes.items()), strict=False)]
    blobs = []
    for item in items:
        item.load().save(blob := io.BytesIO(), "png")
        blobs.append(blob.getvalue())
    with open(folder / "pairs.csv", "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title"])
        for number, item in enumerate(items[: images // 2]):
            (folder / f"{number}.png").write_bytes(blobs[number])
            table.writerows([str(folder / f"{number}.png"), caption] for caption in item.captions[:2])
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar, tarfile.open(folder / f"one-{shard}.tar", "w") as one:
            for number in range(shard * images // 2, (shard + 1) * images // 2):
                captions = items[number].captions
                _add(tar, f"{number:05d}.json", json.dumps({"captions": captions}).encode())
                for each in (tar, one):
                    _add(each, f"{number:05d}.png", blobs[number])
                    _add(each, f"{number:05d}.txt", captions[0].encode())
    number = ["--train-num-samples", str(images)]
    return {
        "csv": ["--train-data", str(folder / "pairs.csv"), "--dataset-type", "csv"],
        "webdataset": ["--train-data", f"{folder}/{{0..1}}.tar", "--dataset-type", "webdataset", *number],
        "webdataset-one": ["--train-data", f"{folder}/one-{{0..1}}.tar", "--dataset-type", "webdataset", *number],
        "synthetic": ["--dataset-type", "synthetic", *number],
    }


def _add(tar: tarfile.TarFile, name: str, blob: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(blob)
    tar.addfile(info, io.BytesIO(blob))


def command(folder: Path, name: str, model: str, data: list[str], *further: str, **flags: object) -> list[str]:
    """A command line: four epochs of two steps of 16 pairs by default, no weight decay, every step logged."""
    options = {
        "model": model,
        "logs": folder,
        "name": name,
        "batch-size": 16,
        "epochs": 4,
        "workers": 0,
        "warmup": 1,
        "lr": 2e-3,
        "wd": 0,
        "precision": "fp32",
        "save-frequency": 2,
        "log-every-n-steps": 1,
        "report-to": "tensorboard",
        "device": "cpu",
        **{key.replace("_", "-"): value for key, value in flags.items()},
    }
    return [*data, *further, *(part for key, value in options.items() for part in (f"--{key}", str(value)))]


@dataclass
class Ran:
    """What is known of a run when it is over: its folder, and which parameters of its model were trained and which not."""

    folder: Path
    trained: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def logged(self, tag: str = "train/loss") -> list[float]:
        """TensorBoard's values, in the order of steps."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return [event.value for event in sorted(events.Scalars(tag), key=lambda event: event.step)]

    def tags(self) -> list[str]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(self.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload().Tags()["scalars"]

    def saved(self, epoch: int) -> dict[str, Any]:
        """A checkpoint, its names without DDP's prefix."""
        checkpoint = torch.load(self.folder / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True)
        state = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
        return {**checkpoint, "state_dict": state}


def train(argv: list[str], *, plain: bool = False) -> Ran:
    """Upstream's ``main`` in this process, with our adapter or ``plain``, leaving logging and random state as they were."""
    from coder_plugin.integrations.open_clip import adapted

    folder = Path(argv[argv.index("--logs") + 1], argv[argv.index("--name") + 1])
    with _tidy():
        if plain:
            with _mended() as trainer:
                assert trainer.main(argv) is None
            return Ran(folder)
        with adapted() as adapter:
            assert adapter.trainer.main(argv) is None
        if adapter.run is None:
            return Ran(folder)
        model = adapter.run.model
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    frozen = frozenset(name for name, _ in model.named_parameters()) - trained
    return Ran(folder, trained, frozen, {name: value.clone() for name, value in model.state_dict().items()})


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """What upstream sets for a whole process put back; shuffling within shards by one seed, which webdataset takes
    of time and process."""
    from webdataset import filters

    from coder_plugin.integrations.open_clip.overrides import Shadow, overridden

    seeds = {"time": Shadow(time, time=lambda: 0.0), "os": Shadow(os, getpid=lambda: 0)}
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {logger: logger.level for logger in _loggers()}
    with torch.random.fork_rng(), warnings.catch_warnings(), overridden(filters, seeds):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for handler in set(root.handlers) - set(handlers):
                root.removeHandler(handler)
                handler.close()
            for logger in _loggers():
                logger.setLevel(levels.get(logger, logging.NOTSET))
            torch._dynamo.reset()


def _loggers() -> list[logging.Logger]:
    root = logging.getLogger()
    return [root, *(logging.getLogger(name) for name in root.manager.loggerDict)]


@contextlib.contextmanager
def _mended() -> Iterator[Any]:
    """Upstream's trainer, less what keeps it from running here at all: the end marks of webdataset 1, devices of DDP
    on a CPU, a CoCa's layer of uninitialised memory."""
    import open_clip
    from open_clip_train import data, main

    from coder_plugin.backbones.clip import init_decoder

    expand, parallel = data.tar_file_expander, torch.nn.parallel.DistributedDataParallel

    def create(name: str, *args: Any, **options: Any) -> Any:
        open_clip.add_model_config(name)
        model, *transforms = own(Path(name).stem, *args, **options)
        init_decoder(model)
        return (model, *transforms)

    def on_cpu(module: Any, device_ids: Any = None, **options: Any) -> Any:
        return parallel(module, **options)

    own, tokenizer = main.create_model_and_transforms, main.get_tokenizer
    with (
        mock.patch.object(data, "tar_file_expander", lambda *a, **k: expand(*a, **{"eof_value": None, **k})),
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", on_cpu),
        mock.patch.object(main, "create_model_and_transforms", create),
        mock.patch.object(main, "get_tokenizer", lambda name, **k: tokenizer(Path(name).stem, **k)),
    ):
        yield main


class Pair:
    """Two processes for runs one after the other, since starting them takes longer than a run does. One that fails ends both,
    and the next run starts others.

    ``ranks``: another number of them. ``path``: where they look for modules first, such as another open_clip.
    """

    def __init__(self, timeout: float = 240, *, ranks: int = 2, path: tuple[str, ...] = ()) -> None:
        self.timeout, self.ranks, self.path = timeout, ranks, path
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def train(self, argv: list[str], **options: Any) -> Ran:
        """As :func:`train`, from rank 0."""
        return self(train, argv, **options)[0]

    def __call__(self, function: Callable[..., Any], argv: list[str], **options: Any) -> list[Any]:
        """``function(argv, **options)`` on both ranks, with a group that is theirs alone -> its results."""
        if not self.processes:
            self._start()
        with tempfile.TemporaryDirectory() as meeting:
            for rank, pipe in enumerate(self.pipes):
                url = f"file://{meeting}/meet?rank={rank}&world_size={self.ranks}"
                pipe.send((function, [*argv, "--dist-url", url], options))
            return self._results()

    def _results(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        results: dict[int, Any] = {}
        while len(results) < self.ranks:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))
            failed = None if ready else f"{self.ranks} processes took longer than {self.timeout:g} s"
            for pipe in ready:
                try:
                    failed, results[self.pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    failed = "a process has died"
                if failed:
                    break
            if failed:
                self.close()  # the other waits for it in a collective
                raise RuntimeError(failed)
        return [results[rank] for rank in range(self.ranks)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn") if self.path else fresh.context()
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, theirs), daemon=True)
            with mock.patch.object(sys, "path", [*self.path, *sys.path]):  # which a process begins with
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _serve(rank: int, ranks: int, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is then no matter
    torch.set_num_threads(1)
    while True:
        function, argv, options = pipe.recv()
        failed, result = None, None
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
                result = function(argv, **options)
        except BaseException:
            failed = f"rank {rank}: {traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps((failed, result)))
        if dist.is_initialized():
            dist.destroy_process_group()
