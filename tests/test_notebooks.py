"""The notebooks run from their first cell to their last: in Jupyter's kernel, or in a short form, with smaller numbers in the
cell of parameters and in the shell of that kernel alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import fresh

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
#: What the short form puts in place of each notebook's cell of parameters.
SHORT = {
    "finetune_and_search": "PICTURES, HELD_OUT, EPOCHS, MORE_EPOCHS = 128, 20, 1, 1",
    "your_own_loss": "PICTURES, HELD_OUT, EPOCHS, STEPS = 64, 20, 1, 4",
}
LARGEST = 300_000  # bytes of a notebook with its outputs
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

SHELL = """
import sys

import nbformat
from IPython.core.interactiveshell import InteractiveShell

path, parameters = sys.argv[1:]
shell = InteractiveShell.instance()
cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
[chosen] = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
chosen.source = parameters
for cell in cells:
    shell.run_cell(cell.source, store_history=True).raise_error()
"""


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder; returns what its cells print."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=550, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def test_the_notebooks_are_those_of_the_folder() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_short_form_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    environment = {**os.environ, **ENVIRONMENT, "IPYTHONDIR": str(tmp_path / "ipython")}
    arguments = ["-c", SHELL, str(ROOT / "notebooks" / f"{name}.ipynb"), SHORT[name]]
    done = fresh.run(arguments, env=environment, cwd=tmp_path, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "i2t R@1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_runs_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "i2t R@1" in run(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", SHORT)
def test_outputs_are_small_and_complete(name: str) -> None:
    """The committed outputs are of one run of all cells, without an error, and name no folder of the machine that ran them."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < LARGEST
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert not any(place in text for place in ("/home/", "/Users/", "/root/", "site-packages"))
