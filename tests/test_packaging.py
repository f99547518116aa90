"""What is installed is what is written: wheel, editable install and `pyproject.toml` agree, and importing is cheap."""

from __future__ import annotations

import ast
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import coder_plugin
from coder_plugin import errors, registry

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: what pytest brings along there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Folders of the repository and the packages they are.
HOMES = {"coder_plugin": "coder_plugin", "integrations": "coder_plugin.integrations"}


def packages_on_disk() -> set[str]:
    return {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in HOMES.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }


def modules_on_disk() -> dict[str, Path]:
    """Every importable name and its file."""
    found = {}
    for folder, package in HOMES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, for setuptools leaves its build folder in the source; without network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in HOMES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=source, check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("coder_plugin-*.whl")
    return zipfile.ZipFile(path)


def test_the_package_list_is_whats_on_disk() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(set(listed)) == listed, "sorted, each once"
    assert set(listed) == packages_on_disk()
    homes = {name: folder for folder, name in HOMES.items() if name != folder}
    mapped = {
        each: each.replace(name, folder).replace(".", "/") for each in listed for name, folder in homes.items() if name in each
    }
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == mapped, "editable installs find no package below a mapped one"
    for folder in HOMES:
        folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
        homeless = {path for path in folders if not (path / "__init__.py").is_file()}
        assert not homeless, "a folder without __init__.py is in no wheel"


def test_wheel_and_editable_install_have_the_same_modules(wheel: zipfile.ZipFile) -> None:
    inside = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in wheel.namelist()
        if name.endswith(".py")
    }
    on_disk = modules_on_disk()
    assert inside.keys() == on_disk.keys()
    for module, path in on_disk.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, f"{module} is not in the editable install"
        assert Path(spec.origin).resolve() == path.resolve()
        assert wheel.read(inside[module]) == path.read_bytes(), module


def test_the_wheel_has_its_data_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    data = {name for name in wheel.namelist() if not name.endswith(".py") and ".dist-info/" not in name}
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "coder_plugin").rglob("model_configs/*.json")}
    assert "coder_plugin/backbones/model_configs/coder-tiny.json" in configs
    assert configs | {"coder_plugin/py.typed"} <= data
    on_disk = {
        prefix + path.relative_to(ROOT).as_posix()
        for folder, prefix in (("coder_plugin", ""), ("integrations", "coder_plugin/"))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data == on_disk, "a data file is left out (package-data), or a stray one is shipped"
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "coder_plugin",
        f"coder_plugin-{coder_plugin.__version__}.dist-info",
    }


def test_the_wheels_metadata(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("coder-plugin", coder_plugin.__version__)
    assert PYPROJECT["project"]["version"] == coder_plugin.__version__
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    for group, points in PYPROJECT["project"]["entry-points"].items():
        assert f"[{group}]" in entry_points
        for name, target in points.items():
            assert f"{name} = {target}" in entry_points
    assert "coder-plugin = coder_plugin.cli:main" in entry_points
    assert any(name.startswith(info) and "LICENSE" in name for name in wheel.namelist()), "license-files"


def test_all_say_the_same_version_and_pythons() -> None:
    project = PYPROJECT["project"]
    (version,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    (released, *_) = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == version == released
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert project["requires-python"] == f">={pythons[0]}"
    (matrix,) = re.findall(r"python: \[(.+)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert re.findall(r'"(.+?)"', matrix) == pythons, "the workflow tests what the classifiers promise"
    images = [(ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda")]
    assert all(set(re.findall(r"FROM python:(\S+)-slim", text)) <= set(pythons) for text in images)


def test_extras_that_are_named_exist() -> None:
    """In the installation's commands, and in messages."""
    for path in ("README.md", "CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml"):
        found = re.findall(r"(?:coder-plugin|-e \"?\.)\[([\w,-]+)\]", (ROOT / path).read_text())
        named = {extra for extras in found for extra in extras.split(",")}
        assert named and named <= set(PYPROJECT["project"]["optional-dependencies"]), path
    sources = (path.read_text() for folder in ("coder_plugin", "integrations") for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", "\n".join(sources)))
    assert len(named) > 8 and named <= set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///home/a%20b/clone", "dir_info": {"editable": true}}', 'pip install -e "/home/a b/clone[lora]"'),
        ('{"url": "file:///home/ab/clone", "dir_info": {}}', 'pip install "coder-plugin[lora]"'),
        (None, 'pip install "coder-plugin[lora]"'),
    ],
)
def test_messages_name_the_install_that_works(origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = SimpleNamespace(read_text=lambda name: origin if name == "direct_url.json" else None)
    monkeypatch.setattr(errors.metadata, "distribution", lambda name: distribution)
    assert errors.install_command.__wrapped__("lora") == command


def test_every_entry_point_of_ours_loads() -> None:
    plugins = [plugin for plugin in registry.list_plugins(check=True) if plugin.distribution == "coder-plugin"]
    assert {plugin.name: plugin.error for plugin in plugins if plugin.error} == {}
    registered = {(registry.PREFIX + plugin.group, plugin.name, plugin.target) for plugin in plugins}
    declared = {
        (group, name, target)
        for group, points in PYPROJECT["project"]["entry-points"].items()
        for name, target in points.items()
    }
    assert registered == declared, "the editable install is older than pyproject.toml: pip install -e . --no-deps"
    assert {group.removeprefix(registry.PREFIX) for group, _, _ in declared} <= set(registry.GROUPS)


def test_every_import_is_declared() -> None:
    """A dependency, or an extra for what is imported where it is used."""
    project = PYPROJECT["project"]
    required = {_distribution(text) for text in project["dependencies"]}
    optional = {extra: texts for extra, texts in project["optional-dependencies"].items() if extra != "test"}
    extras = {_distribution(text) for texts in optional.values() for text in texts}
    assert len(required) == len(project["dependencies"])
    names = {"PIL": "pillow", "faiss": "faiss-cpu", "sklearn": "scikit-learn"}
    names |= dict.fromkeys(("open_clip", "open_clip_train"), "open-clip-torch")
    names |= {"tomllib": "tomli"}  # Python 3.11 brings it
    undeclared = {}
    for module, path in modules_on_disk().items():
        for name, nested in _imports(path):
            distribution = names.get(name, name)
            if distribution.replace("_", "-") not in (required | extras if nested else required):
                undeclared.setdefault(distribution, module)
    assert undeclared == {}


def _distribution(text: str) -> str:
    return re.split(r"[^\w-]", text.replace("_", "-"), maxsplit=1)[0].lower()


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Imported top-level packages that are neither Python's nor ours, and whether they load with the module."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"coder_plugin"}:
            found.append((name, node.col_offset > 0))
    return found


HEAVY = ("torch", "numpy", "open_clip", "transformers", "timm", "accelerate", "faiss", "PIL", "webdataset")
LOADED = f"import sys; print('loaded', *(name for name in {HEAVY} if name in sys.modules))"


def test_imports_are_light() -> None:
    """tests/cli/test_slips.py has the commands."""
    code = "import coder_plugin; coder_plugin.list_plugins(); coder_plugin.CoderError; import coder_plugin.cli"
    assert python(f"{code}\n{LOADED}").split() == ["loaded"]


FORKS = """
import os, torch
for code in {}:
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, so that torch is imported once")
def test_imports_of_what_computes_are_torch_and_numpy() -> None:
    codes = (
        "import coder_plugin.functional",
        "import coder_plugin; coder_plugin.create_model; coder_plugin.create_loss",
        "from coder_plugin.objective import Objective; Objective.parse('dcl + triplet')",
    )
    loaded = python(f"{FORKS.format(codes)}\nexec(code)\n{LOADED}").splitlines()
    assert [set(line.split()) - {"torch", "numpy"} for line in loaded] == [{"loaded"}] * len(codes)


def test_the_module_is_the_command() -> None:
    module = [sys.executable, "-m", "coder_plugin.cli", "regions", "extract", "--help"]
    done = subprocess.run(module, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage: coder-plugin regions extract" in done.stdout
