"""Run commands on hostile files and say what they did: the harness of ``test_hostile_files.py``.

A case writes hostile files into a folder and names what is done with them. Each case runs in a process of its own, forked from
one that has imported everything, so that a crash or a hang ends only that case. The process is watched by an audit hook: a
command that starts a program, connects somewhere (which ends it), runs Python code of the case's folder, opens a file for
writing elsewhere, or opens one of the folder ``outside`` beside the case's own is reported, whether or not it left traces.

A file ``hostile_NAME.py`` beside this one defines ``CASES``, a list of :class:`Case`; ``test_hostile_files.py`` finds it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: A command line of coder-plugin, or a function that is called in the case's folder. A CoderError of it counts as status 2.
Command = Sequence[str] | Callable[[], object]
#: Imported before the first case, so that each case's process has them.
MODULES = (
    "coder_plugin.cli coder_plugin.integrations.hub coder_plugin.search.searcher coder_plugin.search.build "
    "coder_plugin.report.run "
    "coder_plugin.doctor.run coder_plugin.evaluation.compare coder_plugin.pretrained.text_models coder_plugin.training.loop "
    "coder_plugin.data.regions coder_plugin.data.tables h5py lmdb open_clip "
    "transformers.models.auto.tokenization_auto webdataset faiss PIL.Image sqlite3"
).split()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hostile files and what is done with them.

    Args:
        name: unique; shown by pytest.
        write: writes the files into the folder it is given. The second argument is a path outside of it: whatever the files
            could execute creates that file (``touch CANARY``), and it must never exist.
        commands: each is run in the folder, which is the working directory; all are run.
        status: the exit status of every command: 2, refused in one line; 0, where the bad parts are skipped, counted or
            escaped.
        says: every command prints each of these texts (on standard output or error).
        hides: no command prints any of these texts.
        seconds: each command's limit.
        check: called with the folder afterwards, in the test's process; it asserts.
    """

    name: str
    write: Callable[[Path, Path], object]
    commands: Sequence[Command]
    status: int = 2
    says: Sequence[str] = ()
    hides: Sequence[str] = ()
    seconds: float = 30.0
    check: Callable[[Path], object] | None = None


class Outcome(NamedTuple):
    """What a command did. ``status`` is None after a time-out and negative after a signal."""

    status: int | None
    output: str
    errors: str
    events: list[str]
    seconds: float


def run_case(case: Case, root: Path) -> list[Outcome]:
    """Run a case in new folders of ``root`` and assert all that every case promises."""
    prepare()
    folder, outside, canary = root / "case", root / "outside", root / "canary"
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / "precious.txt").write_text("unchanged")
    case.write(folder, canary)
    before = snapshot(outside)
    outcomes = [run(command, folder, seconds=case.seconds) for command in case.commands]
    for command, outcome in zip(case.commands, outcomes, strict=True):
        what = f"{case.name}: {command if callable(command) else ' '.join(command)}\n{outcome.output}\n{outcome.errors}"
        assert not canary.exists(), f"executed: {what}"
        assert not outcome.events, f"{outcome.events}: {what}"
        assert outcome.status is not None, f"no end after {case.seconds} s: {what}"
        assert "Traceback (most recent call last)" not in outcome.output + outcome.errors, what
        assert outcome.status == case.status, f"status {outcome.status}, not {case.status}: {what}"
        if case.status == 2:
            lines = [line for line in outcome.errors.splitlines() if line.startswith("coder-plugin: error: ")]
            assert len(lines) == 1, f"not one line of error: {what}"
        for text in case.says:
            assert text in outcome.output + outcome.errors, f"does not say {text!r}: {what}"
        for text in case.hides:
            assert text not in outcome.output + outcome.errors, f"prints {text!r}: {what}"
    assert snapshot(outside) == before, f"{case.name}: wrote into {outside}"
    names = sorted(path.name for path in root.iterdir())
    assert names == ["case", "outside"], f"{case.name}: wrote beside its folder: {names}"
    if case.check is not None:
        case.check(folder)
    return outcomes


def snapshot(folder: Path) -> dict[str, str]:
    """Every file of a folder with its content's checksum, and every folder and link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        else:
            found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@functools.cache
def prepare() -> None:
    """Import what commands import, once."""
    for module in MODULES:
        with suppress(ImportError):
            importlib.import_module(module)


def run(command: Command, folder: Path, *, seconds: float) -> Outcome:
    """Run a command in a forked process, in ``folder`` with a temporary folder of its own."""
    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = Path(short)  # short, because sockets of worker processes go there
        paths = [Path(logs) / name for name in ("output", "errors", "events")]
        sys.stdout.flush()
        sys.stderr.flush()
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            _child(command, folder, temporary, paths)  # does not return
        status = _wait(pid, started + seconds)
        taken = time.perf_counter() - started
        output, errors, events = (path.read_text("utf-8", "replace") if path.exists() else "" for path in paths)
    return Outcome(status, output, errors, events.splitlines(), taken)


def _wait(pid: int, deadline: float) -> int | None:
    while time.perf_counter() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(command: Command, folder: Path, temporary: Path, paths: Sequence[Path]) -> None:
    code = 120
    try:
        os.setsid()  # its workers end with it
        for number, path in zip((1, 2), paths[:2], strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
        for handler in list(logging.getLogger().handlers):  # pytest's, which would keep warnings
            logging.getLogger().removeHandler(handler)
        os.chdir(folder)
        _online()  # what would be fetched is seen, not refused beforehand
        os.environ.update(TMPDIR=str(temporary), MPLCONFIGDIR=str(temporary), HF_HOME=str(temporary))
        tempfile.tempdir = str(temporary)
        sys.dont_write_bytecode = True
        _watch(folder.resolve(), temporary.resolve(), paths[2])
        code = _run(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Connected(BaseException):
    """Ends a command that connects somewhere; no library takes it for a network that is down, and tries again."""


def _online() -> None:
    """End the hub's offline mode, which the tests start with."""
    from huggingface_hub import constants, utils

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    constants.HF_HUB_OFFLINE = False
    utils.close_session()  # the present client was made for the offline mode


def _run(command: Command) -> int:
    from coder_plugin.cli import main
    from coder_plugin.errors import CoderError

    if not callable(command):
        return main(list(command))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        command()
    except CoderError as error:  # as main prints it
        print(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


#: Audit events of starting a program.
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "urllib.Request")
#: Audit events whose first (and second) argument is a path that is changed.
_CHANGES = {f"os.{name}" for name in "rename remove rmdir mkdir link symlink truncate chmod".split()} | {"shutil.rmtree"}
#: Programs that libraries start to look at the machine, whatever the files.
_HARMLESS = ("/sbin/ldconfig", "ldconfig", "gcc", "cc", "ld", "objdump", "nvidia-smi", "lscpu", "uname", "file", "fc-list")


def _watch(folder: Path, temporary: Path, path: Path) -> None:
    """Write what a command must not do to ``path``."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    allowed = (str(folder), str(temporary), "/dev/", "/proc/self/")
    private = str(folder.parent / "outside")

    def outside(name: object) -> bool:
        if not isinstance(name, (str, bytes, os.PathLike)):
            return False  # a file descriptor
        full = os.path.realpath(os.fsdecode(name))
        return not full.startswith(allowed)

    def report(text: str) -> None:
        os.write(log, f"{' '.join(text.split())[:300]}\n".encode("utf-8", "replace"))

    def hook(event: str, values: tuple) -> None:
        if event == "open":
            name, mode, flags = values
            writes = (isinstance(mode, str) and set("wax+") & set(mode)) or (
                mode is None and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            )
            if writes and outside(name):
                report(f"opened for writing outside: {name}")
            elif isinstance(name, (str, bytes)) and os.path.realpath(os.fsdecode(name)).startswith(private):
                report(f"read outside: {name}")
        elif event in _STARTS:
            program = os.path.basename(os.fsdecode(values[0])) if isinstance(values[0], (str, bytes, os.PathLike)) else "?"
            if program not in _HARMLESS:
                report(f"started a program: {event} {values}")
        elif event in _NETWORK:
            address = values[-1] if event == "socket.connect" else values[0]
            if not isinstance(address, (str, bytes)) or event != "socket.connect":  # a text is a socket of this machine
                report(f"connected: {event} {values}")
                raise Connected(event)
        elif event == "exec":
            file = getattr(values[0], "co_filename", "")
            if isinstance(file, str) and file.startswith((str(folder), str(temporary))):
                report(f"ran Python code of the folder: {file}")
        elif event in _CHANGES and any(outside(each) for each in values[:2]):
            report(f"changed outside: {event} {values}")

    sys.addaudithook(hook)


# -- honest files to start from -----------------------------------------------------------------------------------------


@functools.cache
def _honest() -> Path:
    """A temporary folder for honest files, removed at the end."""
    import atexit

    folder, owner = Path(tempfile.mkdtemp(prefix="coder-honest-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


@functools.cache
def honest_run(loss: str = "dcl") -> Path:
    """The folder of a finished run of a tiny model on the built-in scenes; copy it, do not change it."""
    import json

    from coder_plugin import Trainer
    from tests.conftest import TINY

    model = _honest() / "tiny-vit-hostile.json"
    model.write_text(json.dumps(TINY))
    options = {
        "epochs": 1, "batch_size": 4, "train_num_samples": 8, "workers": 0, "val_frequency": 0, "report": False,
        "logs": str(_honest()), "name": f"run-{len(list(_honest().iterdir()))}", "model": str(model), "precision": "fp32",
    }  # fmt: skip
    trainer = Trainer(model=str(model), loss=loss, train="scenes", config=options)
    trainer.run()
    return trainer.folder


@functools.cache
def honest_export(kind: str = "heads") -> Path:
    """An export of an untrained tiny model; copy it, do not change it.

    Args:
        kind: "heads" has scoring heads and a vocabulary; "bert" a Hugging Face text tower and tokenizer; "regions" is a region
            model with a BiGRU, "regions-bert" one with BERT.
    """
    import json

    import coder_plugin
    from coder_plugin.config import ModelConfig
    from coder_plugin.objective import Objective
    from coder_plugin.pretrained.build import make_tokenizer
    from coder_plugin.pretrained.export import export_model
    from tests.backbones import tiny_bert
    from tests.conftest import TINY

    folder = _honest() / f"export-{kind}"
    if kind.startswith("regions"):
        options = {"region_dim": 8, "embed_dim": 16}
        words = {"vocabulary": ["<pad>", "<start>", "<end>", "<unk>", "a", "dog"], "word_dim": 8}
        more = words if kind == "regions" else {"text": tiny_bert.make(_honest() / "bert"), "heads": 2}
        name = "region-bigru" if kind == "regions" else "region-bert"
        model = coder_plugin.create_model(name, loss="dcl", **options, **more)
        export_model(model, folder)
        return folder
    config = dict(TINY)
    if kind == "bert":
        bert = tiny_bert.make(_honest() / "bert")
        tower = {"hf_model_name": bert, "hf_tokenizer_name": bert, "hf_pooler_type": "mean_pooler", "hf_proj_type": "mlp"}
        config["text_cfg"] = {**tower, "context_length": 24}
    path = _honest() / f"tiny-vit-{kind}-hostile.json"
    path.write_text(json.dumps(config))
    loss = Objective.parse("dcl + concept_dcl").with_options({"concepts.vocabulary": "scenes"}) if kind == "heads" else "dcl"
    model = coder_plugin.create_model(str(path), loss=loss)
    export_model(model, folder, tokenizer=make_tokenizer(ModelConfig(name=str(path)), model))
    return folder


def copy_run(folder: Path, *, loss: str = "dcl") -> Path:
    """Copy the honest run into ``folder / "run"``."""
    return Path(shutil.copytree(honest_run(loss), folder / "run"))


def copy_export(folder: Path, kind: str = "heads") -> Path:
    """Copy an honest export into ``folder / "export"``."""
    return Path(shutil.copytree(honest_export(kind), folder / "export"))
