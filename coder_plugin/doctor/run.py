"""A training run, an export or an index on disk: whether it is whole, and whether its figures are those of a sound model."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coder_plugin.config import flatten
from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, warning
from coder_plugin.doctor.offline import is_absent
from coder_plugin.errors import CoderError
from coder_plugin.index.manifest import BUILDING, FORMAT, MANIFEST

#: Of a bank's keys: below it they are nearly one point.
SPREAD = 0.05
DRIFT = 0.5
IDLE = 0.5
USED = 0.1
_CHANCE = 3  # times chance: less is no retrieval
_EARLY = 10  # log lines: towers that have just been drawn give all keys alike, and fill prototypes unevenly
_WORSE = 0.9  # of the best rsum, that the last should have

Rows = list[dict[str, Any]]


def is_index(folder: Path) -> bool:
    """Whether ``coder-plugin index`` has made it, or begun to."""
    try:
        for name in (MANIFEST, BUILDING):
            if (folder / name).is_file():
                found = json.loads((folder / name).read_text())
                return isinstance(found, dict) and found.get("format") == FORMAT
    except (OSError, ValueError):
        pass
    return False


def check_index(folder: Path) -> Iterator[Finding]:
    """Whether its files are those of its manifest, and FAISS reads them."""
    from coder_plugin.index.search import Index

    try:
        index = Index(folder, gpu=False)
    except CoderError as error:
        yield problem("index", one_line(error), "coder-plugin index with what it was made with; it goes on, or begins anew")
    else:
        yield ok("index", f"{folder}: an index of {' and '.join(index.vectors)}, whole by its checksums")


def check_checkpoints(folder: Path) -> Iterator[Finding]:
    """Every checkpoint's files against the checksums in its manifest."""
    from coder_plugin.training import checkpoint

    directory = folder / "checkpoints"
    if not directory.is_dir():
        do = "fine for an export that was copied; a run that has not saved yet has no more than its log"
        yield note("run.checkpoints", f"{folder} has no checkpoints to resume from", do)
        return
    sound = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            if path.name.endswith((".writing", ".removing", ".old")):
                text = f"{path.name}: a save that is going on, or was interrupted"
                yield note("run.checkpoints.unfinished", text, "nothing: the next save tidies up")
            continue
        try:
            manifest = checkpoint.verify(path)
            sound.append(f"{path.name} (epoch {manifest.get('epoch', '?')})")
        except (CoderError, OSError) as error:
            do = "delete this folder: --resume latest passes it over for the one before"
            yield problem("run.checkpoints.damaged", one_line(error), do)
    if sound:
        yield ok("run.checkpoints", f"checkpoints, whole by their checksums: {', '.join(sound)}")


def check_exports(folder: Path) -> Iterator[Finding]:
    """Whether the exports open, embed a text, and hold numbers."""
    from coder_plugin.pretrained.export import export_files

    places = [folder] if export_files(folder)[0] is not None else [folder / "export" / tag for tag in ("best", "last")]
    there = [place for place in places if export_files(place)[0] is not None]
    if not there:
        yield note("run.exports", f"no export in {folder / 'export'} yet", "one is written after each epoch")
    for place in there:
        yield from _check_export(folder, place)


def _check_export(folder: Path, place: Path) -> Iterator[Finding]:
    import torch

    from coder_plugin.pretrained.open import open_pretrained

    try:
        trained = open_pretrained(place, {"precision": "fp32"}, device="cpu")
    except CoderError as error:
        if is_absent(error):
            text = f"{place}: not looked at: its towers' configuration or tokenizer is the hub's, and not in its cache here"
            yield note("run.export.absent", text, "nothing, where a network is; else run doctor where it was trained")
            return
        yield problem("run.export", f"{place}: {one_line(error)}", "train or export it again; another export may be whole")
        return
    if bad := not_finite(trained.model.state_dict()):
        text = f"{place}: {len(bad)} tensors hold NaN or infinity, such as {bad[0]}"
        yield problem(
            "run.export.finite", text, "use an earlier checkpoint, and train with a lower --lr or --grad-clip-norm"
        )
        return
    with torch.no_grad():
        vector = trained.model.embed_text(trained.tokenizer(["a dog"]))
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    yield ok("run.export", f"{place}: opens, {count:,} parameters, retrieval vectors of {vector.shape[1]} dimensions")


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; an attention mask has its -inf by right."""
    return [name for name, value in state.items() if not (name.endswith("attn_mask") or value.isfinite().all())]


def check_log(folder: Path) -> Iterator[Finding]:
    """The figures of ``metrics.jsonl``: losses, recall, and the health of banks and prototypes."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        yield note(
            "run.log", f"{folder} has no metrics.jsonl", "fine for an export; a run that is beginning writes it soon"
        )
        return
    rows: Rows = []
    broken = 0
    for line in file.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows.append(row if isinstance(row, dict) else {})
        except ValueError:
            broken += 1
    if broken:
        do = "harmless if the run was killed while it wrote; else the disk is to be looked at"
        yield warning("run.log.broken", f"{broken} lines of {file} are not JSON", do)
    evaluated = [row for row in rows if any(key.startswith("val/") for key in row)]
    trained = [row for row in rows if not any(key.startswith("val/") for key in row)]
    yield from _losses(trained)
    yield from _recalls(evaluated)
    yield from _health(trained)
    yield from _finished(folder, evaluated, trained)


def _losses(rows: Rows) -> Iterator[Finding]:
    # what is not finite is not written
    lost = [row.get("step") for row in rows if not math.isfinite(row.get("loss", math.nan))]
    if lost:
        do = "a lower --lr, a longer --warmup, --grad-clip-norm 1; with fp16 try --precision amp_bf16"
        yield problem("run.loss.finite", f"the loss is not finite at {len(lost)} logged steps, first at {lost[0]}", do)
    losses = [row["loss"] for row in rows if "loss" in row]
    if len(losses) < _EARLY:
        return
    tenth = max(3, len(losses) // 10)
    first, last = statistics.median(losses[:tenth]), statistics.median(losses[-tenth:])
    if last >= first and not _grown(rows[:tenth], rows[-tenth:]):
        text = f"the loss has not fallen: {first:.4g} at the start, {last:.4g} at the end"
        yield warning("run.loss.flat", text, "another --lr, lower first; do captions and pictures belong together?")
    else:
        yield ok("run.loss", f"the loss went from {first:.4g} to {last:.4g}")


def _grown(first: Rows, last: Rows) -> bool:
    """Whether a term has begun in between, as prototypes' do when all are filled: then sums cannot be compared."""

    def silent(rows: Rows) -> set[str]:
        return {key for key in rows[0] if key.endswith("_loss") and all(row.get(key) == 0 for row in rows)}

    return bool(silent(first) - silent(last))


def _recalls(rows: Rows) -> Iterator[Finding]:
    if not rows:
        yield note("run.recall", "no recall in the log", "--val-data FILE, and --val-frequency 1")
        return
    broken = [row for row in rows if not math.isfinite(row.get("val/rsum", math.nan))]
    if broken:
        text = f"recall is missing or not finite at step {broken[0].get('step')}"
        yield problem("run.recall.finite", text, "look at the loss: vectors are NaN")
        return
    best = max(rows, key=lambda row: row["val/rsum"])
    last = rows[-1]
    told = f"best rsum {best['val/rsum']:.1f} (epoch {best.get('val/epoch')}), last {last['val/rsum']:.1f}"
    images = last.get("val/images")
    chance = 2 * 100 * (1 + 5 + 10) / images if images else 0.0
    if images and images >= 100 and best["val/rsum"] < _CHANCE * chance:
        text = f"{told}: that is little more than chance, {chance:.1f}"
        do = "train longer; else look at pairs of the data: do captions and pictures belong together?"
        yield warning("run.recall.chance", text, do)
    elif last["val/rsum"] < _WORSE * best["val/rsum"]:
        do = "use export/best; fewer --epochs or more data, weight decay or augmentation keep it from falling"
        yield warning("run.recall.fallen", f"recall has fallen since its best: {told}", do)
    else:
        yield ok("run.recall", told)


def _health(rows: Rows) -> Iterator[Finding]:
    figures: dict[str, float] = {}
    if len(rows) < _EARLY:
        return
    for row in rows:  # the latest of each
        figures.update({key: value for key, value in row.items() if key.startswith("coder/")})
    alarmed = False
    for key, value in figures.items():
        head, _, figure = key.removeprefix("coder/").rpartition("/")
        found = _alarm(head, figure, value)
        if found is not None:
            alarmed = True
            yield found
    if figures and not alarmed:
        told = ", ".join(f"{key.removeprefix('coder/')} {value:.3g}" for key, value in figures.items())
        yield ok("run.health", f"banks and prototypes: {told}")


def _alarm(head: str, figure: str, value: float) -> Finding | None:
    if figure.endswith("_spread") and value < SPREAD:
        text = (
            f"{head}: the {figure.removesuffix('_spread')} keys of the bank have collapsed to one point: spread {value:.3g}"
        )
        return problem("run.health.collapse", text, "a lower --lr and a longer --warmup; start from --pretrained")
    if figure == "drift" and value > DRIFT:
        text = f"{head}: the momentum towers are {value:.2g} of the model's norm away from it, and the bank's keys are old"
        return warning("run.health.drift", text, "a lower --lr, or a lower momentum: --set momentum.momentum=0.99")
    if figure == "images" and value < 0.5:
        text = f"{head}: {100 * value:.0f} % of the bank's entries are of different images: it is larger than the data"
        return note("run.health.bank", text, "--set momentum.bank_size= at most the number of training images")
    if figure == "idle" and value > IDLE:
        text = f"{head}: {100 * value:.0f} % of the prototypes are chosen by no pair of late"
        return warning("run.health.idle", text, "fewer of them: --set prototypes.clusters= half as many")
    if figure == "used" and value < USED:
        text = f"{head}: pairs crowd in few prototypes: {100 * value:.1f} % of them in effect"
        return warning("run.health.crowded", text, "fewer of them: --set prototypes.clusters= half as many")
    return None


def _finished(folder: Path, evaluated: Rows, trained: Rows) -> Iterator[Finding]:
    try:
        epochs = flatten(json.loads((folder / "config.json").read_text()))["epochs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        do = "it can still be evaluated by its export and flags; --resume needs only the checkpoint"
        yield warning("run.config", f"{folder / 'config.json'} cannot be read: {one_line(error)}", do)
        return
    # rows of training tell the epoch that they are in, from 0
    rows = [row.get("val/epoch", 0) for row in evaluated] + [row.get("epoch", 0) for row in trained]
    done = max([*rows, *_saved_epochs(folder)], default=0)
    if done < epochs:
        text = f"{done:g} of {epochs} epochs are done: it is still running, or was stopped"
        yield note("run.unfinished", text, f"if it was stopped: train … --name {folder.name} --resume latest")


def _saved_epochs(folder: Path) -> Iterator[int]:
    """How many epochs were done at each checkpoint; :func:`check_checkpoints` tells of damaged ones."""
    for path in folder.glob("checkpoints/[!.]*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield int(json.loads(path.read_text())["epoch"])


def check_run(folder: Path) -> Sequence[tuple[str, Any, Path]]:
    """The checks that are for this folder, by name; CoderError where it is nothing of ours."""
    from coder_plugin.pretrained.export import export_files

    if is_index(folder):
        return [("index", check_index, folder)]
    if export_files(folder)[0] is not None:
        return [("run", check_exports, folder)]
    if any((folder / name).exists() for name in ("config.json", "plan.json", "checkpoints", "metrics.jsonl")):
        return [("run", check, folder) for check in (check_checkpoints, check_exports, check_log)]
    raise CoderError(f"{folder} is neither a run's folder, an export's, nor an index")
