"""Trackers: every service or file format that accelerate can log to, and trackers that are registered with accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError, did_you_mean

#: By the tracker: the argument of its own start that names the run; its project is ``wandb_project_name``.
_RUN_NAME = {
    "clearml": "task_name", "mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"
}  # fmt: skip


def tracker_names(report_to: str) -> list[str]:
    """The trackers of ``--report-to``.

    Args:
        report_to: names separated by commas or blanks; ``all`` is every one that is installed. Besides accelerate's own, a
            name may be that of a class given to ``accelerate.tracking.register_tracker_class``.

    Raises:
        CoderError: an unknown tracker, or one that is not installed.
    """
    from accelerate import tracking
    from accelerate.utils import LoggerType

    own = {str(each.value) for each in LoggerType}
    registered = tracking.LOGGER_TYPE_TO_CLASS.keys() - own
    known = sorted((own | registered) - {"all"})
    installed = {str(each.value) for each in tracking.get_available_trackers()} | registered
    names = list(dict.fromkeys(report_to.replace(",", " ").split()))
    if "all" in names:
        names = [name for name in known if name in installed] or ["tensorboard"]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or ";"
            raise CoderError(f"--report-to: unknown tracker {name}{hint} known: {', '.join(known)}, all")
        if name not in installed:
            raise CoderError(f"--report-to {report_to}: {name} is not installed (pip install {name.replace('_', '-')})")
    return names


def start_tracker(accelerator: Any, name: str, folder: Path, *, project: str, config: dict[str, Any]) -> None:
    """Start one tracker of accelerate's, which its ``log`` then also writes to, and log the configuration to it.

    Trackers that write files write into ``folder``, the run's, whose name is the run's name; services, which collect runs in
    projects, put it into ``project``.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    options: dict[str, Any] = {_RUN_NAME[name]: folder.name} if name in _RUN_NAME else {}
    if name in ("wandb", "dvclive"):
        options["dir"] = str(folder if name == "wandb" else folder / "dvclive")
    started, accelerator.trackers = accelerator.trackers, []
    accelerator.log_with = [name]
    try:
        in_folder = LOGGER_TYPE_TO_CLASS[name].requires_logging_directory
        accelerator.init_trackers(folder.name if in_folder else project, config, {name: options})
    finally:
        accelerator.trackers = [*started, *accelerator.trackers]
