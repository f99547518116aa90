"""Every command that README and docs show is read by the real parsers.

bash runs each block with stand-ins for the programs, which only write down their arguments: so variables, loops, quotes and
comments mean what they mean to a reader's shell. ``…`` stands for further options: what is then missing is not required.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from coder_plugin.cli import build_parser
from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective
from coder_plugin.recipes import has_recipe, load
from tests.documentation import PAGES, ROOT, Block, blocks, prose

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

PROGRAMS = ("coder-plugin", "python", "python3", "pip", "accelerate", "torchrun", "srun", "scontrol", "pytest", "git", "mkdocs")
PROGRAMS += ("curl",)
OTHERS = {"git", "scontrol", "mkdocs", "curl"}  # programs whose arguments are theirs
#: Flags of tools that the pages describe and this repository has no parser of.
THEIRS = {
    "--clock", "--json-text-key", "--force-reinstall", "--no-deps", "--val-retrieval-", "--slow", "--requeue", "--signal",
    "--open-mode", "--ntasks-per-node",
}

#: A command in prose.
QUOTED = re.compile(r"(?<!`)`((?:coder-plugin|accelerate launch|torchrun|python -m coder_plugin|python scripts)[^`]*)`")
STAND_IN = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\n' >> "$COMMANDS"
"""
PRELUDE = "command_not_found_handle() { return 0; }; source() { :; }; MINILM=minilm; FLICKR8K=flickr8k; IMAGENET=imagenet\n"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the programs, and the repository's shell scripts, are stand-ins."""
    folder = tmp_path_factory.mktemp("shell")
    for place in ("bin", ".venv/bin", "scripts"):
        (folder / place).mkdir(parents=True)
    names = [f"{place}/{name}" for place in ("bin", ".venv/bin") for name in PROGRAMS]
    for name in [*names, *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.sh"))]:
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    return folder


@cache
def commands(text: str, folder: Path) -> list[list[str]]:
    """The programs that a piece of bash starts, with their arguments."""
    written = folder / "commands"
    written.write_bytes(b"")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "COMMANDS": str(written)}
    script = PRELUDE + text.replace("#!/bin/bash", "")
    done = subprocess.run(["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, timeout=20)
    assert not re.search("syntax error|unexpected EOF", done.stderr), done.stderr
    every = written.read_text().split("\n\0")
    return [command.rstrip("\0").split("\0") for command in every if command]


def shown(page: Path) -> Iterator[Block]:
    """The page's commands: bash blocks, and what prose quotes, such as ``coder-plugin recipes``."""
    yield from blocks(page, "bash")
    text = prose(page)
    for quoted in QUOTED.finditer(text):
        command = " ".join(quoted[1].split())
        ending = "" if command.startswith("python scripts") else " …"  # a part of a command
        yield Block(page, text[: quoted.start()].count("\n") + 1, "bash", command + ending, None)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse by the real parser; after ``…`` nothing is required. Raises ValueError with argparse's own message."""

    def raise_error(message: str) -> None:
        raise ValueError(message)

    open_ended = "…" in arguments
    arguments = [each for each, after in zip(arguments, [*arguments[1:], None], strict=True) if each != "…" or after != "…"]
    for each in parsers_of(parser):
        each.error = raise_error  # type: ignore[method-assign, assignment]
        if open_ended:
            for action in each._actions:
                action.required = isinstance(action, argparse._SubParsersAction)
                if not action.option_strings and not isinstance(action, argparse._SubParsersAction) and action.nargs is None:
                    action.nargs = "?"
            for group in each._mutually_exclusive_groups:
                group.required = False
    try:
        found, unknown = parser.parse_known_args([each for each in arguments if each != "…"])
    except ValueError:
        if "…" not in arguments:
            raise
        found, unknown = parser.parse_known_args(arguments)  # the value of an option
    if set(unknown) - {"…"}:
        raise ValueError(f"unknown: {unknown}")
    return found


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_of(each)


@cache
def parser_of_ours(open_ended: bool) -> argparse.ArgumentParser:
    """Two of them: :func:`parse` changes what an open-ended command requires."""
    return build_parser()


def check_ours(arguments: list[str]) -> None:
    """A command of coder-plugin: its flags, and where they name a loss or a recipe, that this exists."""
    if arguments in (["…"], []) or {"--help", "--help-all"} & set(arguments):
        return
    found = vars(parse(parser_of_ours("…" in arguments), arguments))
    loss, recipe = found.get("loss") or "", found.get("recipe") or ""
    if loss and "…" not in loss and "spread" not in loss:  # ``spread`` is the page's reader's own, in docs/plugins.md
        Objective.parse(loss)
    if recipe and "…" not in recipe and not recipe.endswith(".toml"):
        if not has_recipe(recipe):
            raise ValueError(f"no recipe {recipe}")
        load(recipe)


def check_open_clip(arguments: list[str]) -> None:
    """A command of open_clip's trainer with our losses: both parsers."""
    if "--fsdp" in arguments or "…" in arguments:
        return  # main's alone; the pages say so
    flags = importlib.import_module("coder_plugin.integrations.open_clip.flags")
    params = importlib.import_module("open_clip_train.params")
    _, rest = flags.split(arguments)
    try:
        params.parse_args(rest)
    except SystemExit as error:
        raise ValueError(f"open_clip's trainer refuses {rest}") from error


def check_script(arguments: list[str]) -> None:
    """A script of the repository: it exists, and knows the flags."""
    path = ROOT / arguments[0]
    if not path.is_file():
        raise ValueError(f"{arguments[0]} does not exist")
    sources = [path, *path.parent.glob("*.py")] if path.parent.name != "scripts" else [path]
    text = "\n".join(source.read_text() for source in sources)
    for flag in (each for each in arguments[1:] if each.startswith("--")):
        if f'"{flag}"' not in text and f'"{flag[2:].replace("-", "_")}"' not in text:
            raise ValueError(f"{arguments[0]} has no {flag}")


def check_module(name: str, arguments: list[str]) -> None:
    if name == "coder_plugin.cli":
        check_ours(arguments)
    elif name == "coder_plugin.integrations.open_clip":
        check_open_clip(arguments)
    elif name not in ("venv", "pip", "spacy", "pytest", "build", "mkdocs", "http.server"):
        raise ValueError(f"module {name} is not known here")


def check_launcher(program: str, arguments: list[str]) -> None:
    """``accelerate launch`` or torchrun, by its own parser, and what it launches."""
    if program == "accelerate":
        if arguments[:1] != ["launch"]:
            return
        parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
        arguments = arguments[1:]
    else:
        parser = importlib.import_module("torch.distributed.run").get_args_parser()
    place = next((number for number, each in enumerate(arguments) if each.startswith("coder_plugin.")), None)
    if place is None:  # prose, about the launcher's own options
        assert "…" in arguments, arguments
        parse(parser, [each for each in arguments if each not in ("…", "--", "-m")] + ["script.py"])
        return
    end = ["-m", "--"] if program == "torchrun" else ["-m"]
    if arguments[place - len(end) : place] != end:
        raise ValueError(f"{program} must end in {' '.join(end)}")
    parse(parser, [each for each in arguments[: place + 1] if each != "--"])
    check_module(arguments[place], arguments[place + 1 :])


def check_pip(arguments: list[str]) -> None:
    """``pip install -e ".[extra]"``: the extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"(?:^\.|^coder-plugin)\[([\w,-]+)\]", "\n".join(arguments), flags=re.M):
        if unknown := set(named.split(",")) - set(extras):
            raise ValueError(f"no extra {sorted(unknown)}")


def check(command: list[str]) -> None:
    program, *arguments = command
    if program == "coder-plugin":
        check_ours(arguments)
    elif program in ("python", "python3"):
        if arguments[:1] == ["-m"]:
            check_module(arguments[1], arguments[2:])
        elif arguments and arguments[0].endswith(".py"):
            check_script(arguments)
        else:
            raise ValueError(f"cannot read {command}")
    elif program in ("accelerate", "torchrun"):
        check_launcher(program, arguments)
    elif program == "srun":
        start = next(number for number, each in enumerate(arguments) if each in PROGRAMS)
        check(arguments[start:])
    elif program == "pip":
        check_pip(arguments)
    elif program == "pytest":
        for path in (each for each in arguments if each.startswith("tests")):
            if not (ROOT / path.partition("::")[0]).exists():
                raise ValueError(f"{path} does not exist")
    elif program not in OTHERS and not (ROOT / "scripts" / program).is_file():
        raise ValueError(f"{program} is not known here")


def test_commands_are_read(shell: Path) -> None:
    """bash reads the blocks as they are meant: loops, variables and lines that go on."""
    faults, every = [], []
    for block in (block for page in PAGES for block in shown(page)):
        every += (found := commands(block.text, shell))
        for command in found if block.reason is None else ():
            try:
                check(command)
            except (ValueError, CoderError) as error:
                faults.append(f"{block.name}: {shlex.join(command)}: {error}")
    assert not faults, "\n".join(faults)
    programs = {command[0] for command in every}
    assert {"coder-plugin", "python", "torchrun", "accelerate", "pip", "srun", "f30k.sh"} <= programs
    assert sum(command[0] == "coder-plugin" for command in every) > 100
    looped = [command for command in every if command[:3] == ["coder-plugin", "regions", "convert"] and "--to-split" in command]
    assert [command[command.index("--to-split") + 1] for command in looped] == ["train", "dev", "test"]


def test_mistakes_are_found() -> None:
    for command, fault in (
        (["coder-plugin", "train", "--epoch", "3"], "--epoch"),
        (["coder-plugin", "train", "--loss", "dlc"], "dlc"),
        (["coder-plugin", "train", "--batch-size", "many"], "many"),
        (["coder-plugin", "train", "--recipe", "coder-f31k"], "coder-f31k"),
        (["coder-plugin", "index", "logs/my-run"], "required"),
        (["coder-plugin", "evaluate", "logs/my-run"], "evaluate"),
        (["torchrun", "--nproc_per_node", "2", "-m", "coder_plugin.cli", "train"], "-m --"),
        (["accelerate", "launch", "--processes", "2", "-m", "coder_plugin.cli", "train"], "--processes"),
        (["python", "-m", "coder_plugin.integrations.open_clip", "--loss", "clip", "--concepts", "f"], "concepts"),
        (["python", "scripts/bench/no_step.py"], "no_step"),
        (["python", "scripts/bench/loss_step.py", "--seizes", "1"], "--seizes"),
        (["pip", "install", "-e", ".[concept]"], "concept"),
        (["pytest", "tests/no_such.py"], "no_such"),
    ):
        with pytest.raises((ValueError, CoderError), match=fault):
            check(command)


def test_flags_in_prose_exist() -> None:
    """A renamed flag is found wherever a page mentions it."""
    sources = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]
    script_flags = set(re.findall(r"--[a-z][\w-]+", "\n".join(path.read_text() for path in sources)))
    ours = {flag for parser in parsers_of(build_parser()) for action in parser._actions for flag in action.option_strings}
    flags = importlib.import_module("coder_plugin.integrations.open_clip.flags")
    ours |= {flag for action in flags.parser()._actions for flag in action.option_strings}
    upstream = Path(importlib.import_module("open_clip_train.params").__file__ or "").read_text()
    launchers = [
        importlib.import_module("accelerate.commands.launch").launch_command_parser(),
        importlib.import_module("torch.distributed.run").get_args_parser(),
    ]
    theirs = {flag for parser in launchers for action in parser._actions for flag in action.option_strings}
    known_flags = ours | theirs | script_flags | THEIRS | set(re.findall(r"--[a-z][\w-]+", upstream))
    refused = set(re.findall(r"`--([\w-]+)`", (ROOT / "docs/open_clip.md").read_text().partition("## What differs")[2]))
    faults = [
        f"{page.relative_to(ROOT)}: {flag}"
        for page in PAGES
        for flag in re.findall(r"`(--[a-z][\w-]*)", page.read_text())
        if flag not in known_flags and flag[2:] not in refused
    ]
    assert not faults, faults
