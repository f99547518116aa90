"""Processes that begin as a new interpreter does, but with the slow imports done: 0.1 s in place of 5 to 10.

They are forked from a server that has imported torch and the like and has done nothing else: a fork of pytest's own process
before its first test. What is about starting itself (entry points, the cost of imports, packages that are missing) needs a
real ``subprocess``.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
from torch import multiprocessing

from coder_plugin import registry

PRELOADED = "torch._dynamo open_clip coder_plugin.training.loop tests.integrations.upstream_runs tests.forked".split()
ROOT = Path(__file__).parents[1]


def start() -> None:
    """Start the server, as a fork of this process, which has the imports done."""

    def fork(executable: str, arguments: Sequence[str], keep: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            faulthandler.disable()
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in keep:
                    with suppress(OSError):
                        os.close(int(name))
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            logging.root.handlers.clear()
            atexit._clear()
            forkserver.main(*keep, PRELOADED)
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr("multiprocessing.util.spawnv_passfds", fork)
        forkserver.ensure_running()


def context() -> BaseContext:
    """For ``Process`` of :mod:`multiprocessing`. The server keeps the environment of its start: hand over what has changed."""
    return multiprocessing.get_context("forkserver")


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``, where they begin with -c, -m or the
    path of a script."""
    with tempfile.TemporaryDirectory() as folder:
        started = context().Process(target=_interpreter, args=(list(arguments), dict(env or os.environ), str(cwd), folder))
        started.start()
        started.join(timeout)
        if started.is_alive():
            started.kill()
            started.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        output, errors = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(list(arguments), started.exitcode, output, errors)


def _interpreter(arguments: list[str], environment: dict[str, str], cwd: str, folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(cwd)
    registry.refresh()  # pytest's plugins are listed without those of PYTHONPATH
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    option, *rest = arguments
    sys.argv = [option, *(rest[1:] if option in ("-c", "-m") else rest)]
    status: object = 0
    try:
        if option == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif option == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path.insert(0, os.path.dirname(option))
            runpy.run_path(option, run_name="__main__")
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
