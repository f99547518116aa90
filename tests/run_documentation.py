"""Run the Python of pages: ``python -m tests.run_documentation FOLDER PAGE …`` prints, as JSON, the output of pages that fail.

The blocks of a page are one program. Each page runs in a process forked after the imports, in a copy of a folder that holds
what pages name: pictures; and if one of the pages names something trained, the run ``logs/my-run``, its shared model
``my-model``, ``pictures.index``, captions of the pictures ``pairs.csv``, ``pairs.index``, and SCAN's ``f30k_precomp``. Then the
README's figure is drawn, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy
import torch

import coder_plugin
import coder_plugin.training.loop  # noqa: F401  (all that pages need: forked processes share it)
from coder_plugin.cli import main as command
from coder_plugin.data.scenes import open_scenes
from coder_plugin.functional import dcl  # noqa: F401
from coder_plugin.report.callback import WriteReport
from tests import huge_pages
from tests.documentation import ROOT, blocks, needs_a_run

#: Imported where they are used, which is in most pages.
LATE = ("open_clip", "coder_plugin.integrations", "coder_plugin.cli.index", "sklearn.manifold", "matplotlib.figure")
FIGURE = "scripts/figures/search_scenes.py"


def make_pictures() -> None:
    scenes = open_scenes("train", count=16)
    Path("pictures").mkdir()
    for number, scene in enumerate(scenes):
        scene.load().save(f"pictures/{number}.png")
    for name in ("a.jpg", "b.jpg", "query.jpg"):
        scenes[0].load().save(name)


def make_run() -> None:
    """What takes training, in the working directory, made by the package itself."""
    scenes = open_scenes("train", count=16)
    config = {"epochs": 1, "batch_size": 8, "workers": 0, "name": "my-run", "report": False}
    val = open_scenes("val", count=16)
    coder_plugin.Trainer(model="coder-tiny", loss="dcl", train=scenes, val=val, config=config).run()
    coder_plugin.save_pretrained("logs/my-run", "my-model")
    shutil.copytree("logs/my-run", "logs/scenes")
    if command(["index", "logs/my-run", "--data", "pictures", "--output", "pictures.index", "--workers", "0"]):
        raise RuntimeError("no index")
    rows = [f"pictures/{number}.png\t{caption}\n" for number, scene in enumerate(scenes) for caption in scene.captions]
    Path("pairs.csv").write_text("filepath\ttitle\n" + "".join(rows))
    if command(["index", "logs/my-run", "--data", "pairs.csv", "--output", "pairs.index", "--workers", "0"]):
        raise RuntimeError("no index of captions")
    Path("f30k_precomp").mkdir()
    numpy.save("f30k_precomp/test_ims.npy", numpy.random.default_rng(0).random((8, 36, 2048), dtype=numpy.float32))
    Path("f30k_precomp/test_ids.txt").write_text("".join(f"{number}\n" for number in range(8)))
    Path("f30k_precomp/test_caps.txt").write_text("a dog runs\n" * 40)


def in_process(work: Callable[[], None], log: Path) -> bool:
    """Run something in a forked process whose output goes to ``log``. Whether it succeeded."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_page(page: Path) -> None:
    """The page's program; lines keep their numbers, so that a traceback names the page's line."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if block.reason is None:
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    exec(compile("\n".join(lines), str(page), "exec"), {"__name__": "__main__"})


def draw_figure() -> None:
    """The README's figure, with the small run."""
    sys.argv = [FIGURE, "logs/my-run", "figure.png"]
    runpy.run_path(str(ROOT / FIGURE), run_name="drawn")["main"]()


def main(folder: Path, pages: list[Path]) -> int:
    torch.set_num_threads(1)
    with_run = any(map(needs_a_run, pages))
    for name in LATE if with_run else ():
        with suppress(ImportError):
            importlib.import_module(name)
    WriteReport.on_train_end = lambda *_: None  # type: ignore[method-assign]  # takes longer than a run; tests/report/ has it
    gc.freeze()
    huge_pages.use()
    made, failures = folder / "made", {}
    made.mkdir()
    os.chdir(made)
    make_pictures()
    if with_run and not in_process(make_run, folder / "made.log"):
        print(json.dumps({"what pages name could not be made": (folder / "made.log").read_text()}))
        return 1
    for number, page in enumerate(pages):
        copy, log = folder / f"{number}", folder / f"{number}.log"
        shutil.copytree(made, copy)
        os.chdir(copy)
        if not in_process(lambda page=page: run_page(page), log):
            failures[str(page.relative_to(ROOT))] = log.read_text()
    os.chdir(made)
    log = folder / "figure.log"
    if with_run and not (in_process(draw_figure, log) and 1_000 < Path("figure.png").stat().st_size < 150_000):
        failures[FIGURE] = log.read_text()
    print(json.dumps(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]))
