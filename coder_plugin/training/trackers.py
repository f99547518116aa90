"""Trackers: every service or file format that accelerate can log to, and trackers that are registered with accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError, did_you_mean

#: By the tracker: the argument of its own start that names the run; its project is ``--wandb-project-name``.
_RUN_NAME = {
    "clearml": "task_name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "trackio": "name",
    "wandb": "name",
}


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
    registered = {name for name in tracking.LOGGER_TYPE_TO_CLASS if name not in own}
    known = sorted((own | registered) - {"all"})
    installed = {str(each.value) for each in tracking.get_available_trackers()} | registered
    names = list(dict.fromkeys(report_to.replace(",", " ").split()))
    for name in names:
        if name not in (*known, "all"):
            hint = did_you_mean(name, known) or ";"
            raise CoderError(f"--report-to: unknown tracker {name}{hint} known: {', '.join(known)}, all")
    if "all" in names:
        names = [name for name in known if name in installed]
        if not names:
            raise CoderError("--report-to all: no tracker is installed (pip install tensorboard)")
    absent = [name for name in names if name not in installed]
    if absent:
        package = absent[0].replace("_", "-")
        raise CoderError(f"--report-to {report_to}: {', '.join(absent)} is not installed (pip install {package})")
    return names


def start_tracker(accelerator: Any, name: str, folder: Path, *, project: str, config: dict[str, Any]) -> Any:
    """Start a tracker and log the configuration to it.

    Args:
        accelerator: accelerate's, which knows the trackers' folder.
        name: one of :func:`tracker_names`.
        folder: the run's; its name is the run's name.
        project: what trackers of services, which collect runs in projects, put the run in.
        config: the run's options, by name.

    Returns:
        The ``accelerate.tracking.GeneralTracker``.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    cls: Any = LOGGER_TYPE_TO_CLASS[name]
    options: dict[str, Any] = {_RUN_NAME[name]: folder.name} if name in _RUN_NAME else {}
    if name in ("wandb", "dvclive"):
        options["dir"] = str(folder if name == "wandb" else folder / "dvclive")
    writes_files = cls.requires_logging_directory
    places = (folder.name, accelerator.logging_dir) if writes_files else (project,)
    tracker = cls(*places, **options)
    if hasattr(tracker, "start"):
        tracker.start()
    tracker.store_init_configuration(config)
    return tracker
