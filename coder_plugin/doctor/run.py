"""A training run or an export on disk: is it complete, and do its logged metrics look healthy?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from coder_plugin.doctor.findings import Finding, note, ok, one_line, problem, warning
from coder_plugin.errors import CoderError
from coder_plugin.hub_access import is_download_error
from coder_plugin.training.run_folder import Record, RunFolder, describe

#: Variance of a bank's keys below which they have collapsed to nearly one point.
SPREAD = 0.05
DRIFT = 0.5
USED = 0.1
_CHANCE = 3  # times the R@sum of chance, below which a model retrieves nothing
_EARLY = 10  # log lines before figures mean anything: fresh towers give nearly equal keys and fill prototypes unevenly
_WORSE = 0.9  # of the best R@sum, and of the zero-shot accuracy before training, which the last should reach

Records = Sequence[Record]


def checks_for(folder: Path) -> list[Callable[[Path], Iterator[Finding]]]:
    """The checks for a folder.

    Raises:
        CoderError: the folder is neither a run's nor an export's.
    """
    from coder_plugin.pretrained.export import export_files

    if export_files(folder)[0] is not None:
        return [check_exports]
    if any((folder / name).exists() for name in ("config.json", "plan.json", "checkpoints", "metrics.jsonl")):
        return [check_checkpoints, check_exports, check_log]
    raise CoderError(f"{folder} is neither a run's folder nor an export's")


def check_checkpoints(folder: Path) -> Iterator[Finding]:
    """Every checkpoint's files against the checksums in its manifest."""
    from coder_plugin.training import checkpoint

    directory = folder / "checkpoints"
    if not directory.is_dir():
        do = "nothing, for a copied export or a run that has not saved yet"
        yield note("run.checkpoints", f"{folder} has no checkpoints to resume from", do)
        return
    sound, damaged = [], []
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            if path.name.endswith((".writing", ".old")):
                text = f"{path.name}: a save in progress, or an interrupted one"
                yield note("run.checkpoints.unfinished", text, "nothing: the next save removes it")
            continue
        try:
            manifest = checkpoint.verify(path)
            sound.append(f"{path.name} (epoch {manifest.get('epoch', '?')})")
        except (CoderError, OSError) as error:
            damaged.append(one_line(error))
    do = "bring one back from a copy, or start anew under another --name: no checkpoint here is whole"
    if sound:
        do = "delete this folder: --resume latest uses the newest whole checkpoint"
    for text in damaged:
        yield problem("run.checkpoints.damaged", text, do)
    if sound:
        yield ok("run.checkpoints", f"checkpoints whose checksums match: {', '.join(sound)}")


def check_exports(folder: Path) -> Iterator[Finding]:
    """Whether the exports open, encode a text, and hold finite numbers."""
    from coder_plugin.pretrained.export import export_files

    folders = [folder] if export_files(folder)[0] is not None else [folder / "export" / tag for tag in ("best", "last")]
    exports = [each for each in folders if export_files(each)[0] is not None]
    if not exports:
        yield note("run.exports", f"no export in {folder / 'export'} yet", "wait: one is written after each epoch")
    for export in exports:
        yield from _check_export(export)


def _check_export(export: Path) -> Iterator[Finding]:
    import torch

    from coder_plugin.pretrained.export import NOT_FINITE
    from coder_plugin.pretrained.open import open_pretrained

    try:
        trained = open_pretrained(export, {"precision": "fp32"}, device="cpu")
    except CoderError as error:
        if is_download_error(error):
            text = f"{export}: not checked: its configuration or tokenizer is on a hub, and not in the cache here"
            yield note(
                "run.export.absent", text, "nothing, on a machine with a network; else run doctor where it was trained"
            )
            return
        if NOT_FINITE in str(error):
            do = "use an earlier checkpoint, and train with a lower --lr or with --grad-clip-norm"
            yield problem("run.export.finite", one_line(error), do)
            return
        yield problem("run.export", f"{export}: {one_line(error)}", "train or export it again, or use another export")
        return
    with torch.no_grad():
        vector = trained.model.embed_text(trained.tokenizer(["a dog"]))
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    yield ok("run.export", f"{export}: opens, {count:,} parameters, retrieval vectors of {vector.shape[1]} dimensions")


def check_log(folder: Path) -> Iterator[Finding]:
    """Losses, recall, and the state of banks and prototypes in ``metrics.jsonl``."""
    if not (folder / "metrics.jsonl").is_file():
        do = "nothing, for an export; a run that has just started writes it soon"
        yield note("run.log", f"{folder} has no metrics.jsonl", do)
        return
    run = RunFolder.read(folder, must_exist=False)
    if broken := describe(run.problems, "metrics.jsonl"):
        do = "nothing, if the run was killed while it wrote; otherwise check the disk"
        yield warning("run.log.broken", f"{folder / 'metrics.jsonl'}: {broken}", do)
    yield from _losses(run.steps)
    yield from _recalls([each for each in run.evaluations if "rsum" in each or "zeroshot_top1" not in each])
    yield from _accuracies(run.evaluations)
    yield from _state(run.steps)
    if unread := describe(run.problems, "config.json"):
        do = "nothing for evaluation, which reads the export; --resume needs only the checkpoint"
        yield warning("run.config", f"{folder / 'config.json'} cannot be read: {unread}", do)
    elif run.config and (epochs := run.config.get("epochs")):
        # a training record holds the epoch that it is in, counted from 0
        epochs_done = [
            *(each.get("epoch", 0) for each in (*run.evaluations, *run.steps)),
            (run.manifest or {}).get("epoch", 0),
        ]
        if max(epochs_done) < epochs:
            text = f"{max(epochs_done):g} of {epochs} epochs are done: it is still running, or was stopped"
            do = f"if it was stopped: train … --name {folder.resolve().name} --resume latest"
            yield note("run.unfinished", text, do)


def _losses(records: Records) -> Iterator[Finding]:
    lost = [each["step"] for each in records if "loss" not in each]  # the log leaves out what is not finite
    if lost:
        do = "a lower --lr, a longer --warmup, or --grad-clip-norm 1; instead of fp16 --precision amp_bf16"
        yield problem("run.loss.finite", f"the loss is not finite at {len(lost)} logged steps, first at {lost[0]}", do)
    losses = [each["loss"] for each in records if "loss" in each]
    if len(losses) < _EARLY:
        return
    tenth = max(3, len(losses) // 10)
    first, last = statistics.median(losses[:tenth]), statistics.median(losses[-tenth:])
    if last >= first and not _term_started(records[:tenth], records[-tenth:]):
        text = f"the loss has not fallen: {first:.4g} at the start, {last:.4g} at the end"
        do = "try another --lr, a lower one first; check that captions and pictures belong together"
        yield warning("run.loss.flat", text, do)
    else:
        yield ok("run.loss", f"the loss went from {first:.4g} to {last:.4g}")


def _term_started(first: Records, last: Records) -> bool:
    """Whether a term was 0 at first and is not any more, as ``pgc`` before the first clustering: the sums differ then."""

    def zero(records: Records) -> set[str]:
        return {key for key in records[0] if key.endswith("_loss") and all(each.get(key) == 0 for each in records)}

    return bool(zero(first) - zero(last))


def _recalls(records: Records) -> Iterator[Finding]:
    if not records:
        yield note("run.recall", "no recall in the log", "train with --val-data FILE and --val-frequency 1")
        return
    if broken := [each["step"] for each in records if "rsum" not in each]:
        text = f"recall is missing or not finite at step {broken[0]}"
        yield problem("run.recall.finite", text, "check the loss: the vectors hold NaN")
        return
    best, last = max(records, key=lambda each: each["rsum"]), records[-1]
    figures = f"best R@sum {best['rsum']:.1f} (epoch {best.get('epoch')}), last {last['rsum']:.1f}"
    images = last.get("images")
    chance = 2 * 100 * (1 + 5 + 10) / images if images else 0.0
    if images and images >= 100 and best["rsum"] < _CHANCE * chance:
        do = "train longer; check that captions and pictures belong together"
        yield warning("run.recall.chance", f"{figures}: hardly more than chance, which is {chance:.1f}", do)
    elif last["rsum"] < _WORSE * best["rsum"]:
        do = "use export/best; fewer --epochs, more data, weight decay or augmentation prevent it"
        yield warning("run.recall.fallen", f"recall has fallen since its best: {figures}", do)
    else:
        yield ok("run.recall", figures)


def _accuracies(records: Records) -> Iterator[Finding]:
    measured = [each for each in records if "zeroshot_top1" in each]
    if not measured or measured[0]["step"] != 0:
        return
    before, last = measured[0]["zeroshot_top1"], measured[-1]["zeroshot_top1"]
    figures = f"zero-shot top-1 {last:.1f} %, {before:.1f} % before the first step"
    if last < _WORSE * before:
        do = "weights between before and after: eval --wise-ft; next time a lower --lr, or --recipe finetune-clip"
        yield warning("run.zeroshot.fallen", figures, do)
    else:
        yield ok("run.zeroshot", figures)


def _state(records: Records) -> Iterator[Finding]:
    latest: dict[str, float] = {}
    if len(records) < _EARLY:
        return
    for each in records:
        latest.update({key.removeprefix("coder/"): value for key, value in each.items() if key.startswith("coder/")})
    alarms = [
        alarm for name, value in latest.items() if (alarm := _alarm(*name.rpartition("/")[::2], value)) is not None
    ]
    yield from alarms
    if latest and not alarms:
        yield ok(
            "run.health", f"banks and prototypes: {', '.join(f'{name} {value:.3g}' for name, value in latest.items())}"
        )


def _alarm(head: str, metric: str, value: float) -> Finding | None:
    fewer = "use fewer prototypes: --set prototypes.clusters= half as many"
    if metric.endswith("_spread") and value < SPREAD:
        side = metric.removesuffix("_spread")
        text = f"{head}: the {side} embeddings have collapsed to nearly one point: spread {value:.3g}"
        do = "a lower --lr and a longer --warmup, or start from --pretrained; for concepts: concept_dcl.positive_weight=2"
        return problem("run.health.collapse", text, do)
    if metric == "drift" and value > DRIFT:
        text = f"{head}: the momentum towers differ from the model by {value:.2g} of its norm: the bank's keys are outdated"
        return warning("run.health.drift", text, "a lower --lr, or a lower momentum: --set momentum.momentum=0.99")
    if metric == "images" and value < 0.5:
        text = f"{head}: {100 * value:.0f} % of the bank's entries are of different images: the bank is larger than the data"
        return note("run.health.bank", text, "--set momentum.bank_size= at most the number of training images")
    if metric == "used" and value < USED:
        text = f"{head}: nearly all pairs choose a few prototypes, in effect {100 * value:.1f} % of them"
        return warning("run.health.crowded", text, fewer)
    return None
