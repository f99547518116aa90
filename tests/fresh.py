"""Processes that begin as a new interpreter does, but with the slow imports done: 0.1 s in place of 5 to 10.

They are forked from a server that has imported torch and the like and has done nothing else. What is about starting itself
(entry points, the cost of imports, packages that are missing) needs a real ``subprocess``.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

from torch import multiprocessing

PRELOADED = "pytest hypothesis torch._dynamo open_clip coder_plugin.training.loop tests.integrations.upstream_runs".split()
PRELOADED += ["tests.forked"]
ROOT = Path(__file__).parents[1]


def context() -> BaseContext:
    """For ``Process`` of :mod:`multiprocessing`. The server keeps the environment of its start: hand over what has changed."""
    multiprocessing.set_forkserver_preload(PRELOADED)
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
