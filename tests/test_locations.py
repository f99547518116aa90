"""Locations of data with absolute paths: what a run's folder holds, so that it can be used from any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coder_plugin.data.shard_lists import expand
from coder_plugin.locations import absolute, local_only


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.csv", "s0.tar", "s1.tar", "x/s2.tar", "y/s2.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("a.csv", "{}/a.csv"),
        ("./a.csv", "{}/a.csv"),
        ("x/../a.csv", "{}/x/../a.csv"),
        ("s{0..1}.tar", "{}/s{{0..1}}.tar"),
        ("{x,y}/s2.tar", "{}/{{x,y}}/s2.tar"),
        ("s*.tar", "{}/s*.tar"),
        ("s0.tar::x/s2.tar", "{0}/s0.tar::{0}/x/s2.tar"),
        ("s0.tar::pipe:cat s1.tar", "{}/s0.tar::pipe:cat s1.tar"),
    ],
)
def test_relative_paths_begin_with_the_working_directory(folder, location, expected):
    made = absolute(location)
    assert made == expected.format(folder) and absolute(made) == made
    if "pipe" not in location and ".tar" in location:
        assert expand(made) == [os.path.join(folder, each) for each in expand(location)]


@pytest.mark.parametrize(
    "location",
    [
        "scenes",
        "/elsewhere/a.csv",
        "nothing-there.csv",
        "hf://datasets/a/b/{0..3}.tar",
        "pipe:cat a.csv",
        "file:a.csv",
        "{/x,y}/s2.tar",
        "{y,/x}/s2.tar",
        "{a.csv",
        "a.csv\n",
        "${PWD}/a.csv",
    ],
)
def test_what_is_not_a_relative_path_stays_as_it_is(folder, location):
    assert absolute(location) == location
    marked = local_only({"val_data": location})["val_data"]
    assert absolute(marked) == marked


def test_a_folder_with_signs_of_a_glob_is_escaped(folder, monkeypatch):
    (folder / "run[1]").mkdir()
    for number in range(2):
        (folder / "run[1]" / f"{number}.tar").touch()
    monkeypatch.chdir(folder / "run[1]")
    assert absolute("0.tar") == f"{folder}/run[1]/0.tar" and expand(absolute("0.tar")) == [f"{folder}/run[1]/0.tar"]
    assert expand(absolute("*.tar")) == [f"{folder}/run[1]/{number}.tar" for number in range(2)]
