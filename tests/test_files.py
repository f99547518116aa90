"""Files and folders are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coder_plugin.errors import CoderError
from coder_plugin.files import (
    atomic_folder,
    atomic_write,
    locked,
    move_into,
    recover,
    refuse_links,
    remove_leftovers,
    temporary_path,
)
from tests import fresh


class Broken(Exception):
    pass


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_is_complete_or_as_it_was(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "inner" / "file.txt"
    if old is not None:
        path.parent.mkdir()
        path.write_text(old)

    def content() -> str | None:
        return path.read_text() if path.exists() else None

    with pytest.raises(Broken), atomic_write(path, "w") as file:
        file.write("half")
        file.flush()
        assert content() == old, "nobody sees the half"
        raise Broken
    assert content() == old
    assert list(path.parent.iterdir()) == ([] if old is None else [path])
    with atomic_write(path, "w") as file:
        file.write("whole é")
        assert content() == old
    assert path.read_bytes() == "whole é".encode() and list(path.parent.iterdir()) == [path]
    with atomic_write(path) as file:
        file.write(b"\x00")
    assert path.read_bytes() == b"\x00"


@pytest.mark.parametrize("old", [None, "old"])
def test_a_folder_is_complete_or_as_it_was(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "folder"
    if old is not None:
        path.mkdir()
        (path / "a").write_text(old)

    def content() -> dict[str, str] | None:
        return {each.name: each.read_text() for each in path.iterdir()} if path.exists() else None

    before = content()
    with pytest.raises(Broken), atomic_folder(path) as folder:
        (folder / "b").write_text("half")
        assert content() == before
        raise Broken
    assert content() == before
    assert list(tmp_path.iterdir()) == ([] if old is None else [path])
    with atomic_folder(path) as folder:
        (folder / "b").write_text("whole")
        assert content() == before
    assert content() == {"b": "whole"} and list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"), atomic_write(path, "w") as file:
        file.write("new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_kill_between_the_renames_of_a_folder_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "a").write_text("old")
    replace, renames = os.replace, []

    def killed_at_the_second(source: Path, target: Path) -> None:
        renames.append(target)
        if len(renames) == 2:
            raise Broken
        replace(source, target)

    with monkeypatch.context() as context, pytest.raises(Broken):
        context.setattr(os, "replace", killed_at_the_second)
        with atomic_folder(path):
            pass
    assert not path.exists() and (tmp_path / ".folder.old" / "a").read_text() == "old"
    with pytest.raises(Broken), atomic_folder(path):
        raise Broken
    assert (path / "a").read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_temporary_names_differ_and_only_those_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    script = f"from coder_plugin.files import temporary_path; temporary_path({str(path)!r}).mkdir()"
    assert fresh.run(["-c", script]).returncode == 0
    [killed] = tmp_path.iterdir()
    assert killed.name.endswith(".writing") and killed.name.startswith(".folder.")
    running, elsewhere = temporary_path(path), tmp_path / ".folder.another-host.1.01234567.writing"
    assert running != temporary_path(path)
    of_another = killed.with_name(killed.name.replace("folder", "index"))
    for other in (running, elsewhere, of_another):
        other.mkdir()
    with atomic_folder(path) as folder:
        assert folder != running
    assert set(tmp_path.iterdir()) == {path, running, elsewhere, of_another}
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {path, running, elsewhere}


def test_recover_cleans_up_after_a_killed_writer_of_any_machine(tmp_path: Path) -> None:
    for name in ("whole", ".whole.old", ".torn.old", ".new.elsewhere.1.01234567.writing", ".mine"):
        (tmp_path / name).mkdir()
    (tmp_path / ".log.elsewhere.1.01234567.writing").write_text("half")
    (tmp_path / ".notes.old").write_text("mine")
    recover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "torn", ".mine", ".notes.old"}


def test_links_are_refused_by_name(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    refuse_links(folder)
    folder.mkdir()
    outside.write_text("mine")
    os.link(outside, folder / "log")
    refuse_links(folder)  # a second name matters only where a file is written in place
    with pytest.raises(CoderError, match="folder/log is a link"):
        refuse_links(folder, appended=("log",))
    for name, target in ((".hidden", outside), ("dangling", tmp_path / "none"), ("sub", tmp_path)):
        (folder / name).symlink_to(target)
        with pytest.raises(CoderError, match=f"folder/{name} is a link: writing there would change files elsewhere"):
            refuse_links(folder)
        (folder / name).unlink()
    (tmp_path / "linked").symlink_to(folder)
    refuse_links(tmp_path / "linked")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "folder"
    with locked(folder):
        script = f"from coder_plugin.files import locked\nwith locked({str(folder)!r}): pass"
        done = fresh.run(["-c", script])
        assert "CoderError" in done.stderr and "is being written by another process" in done.stderr
    with locked(folder):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(CoderError, match="file/x cannot be written"), locked(tmp_path / "file" / "x"):
        pass


def test_nothing_is_moved_over_what_is_there(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "log").write_text(text)
        move_into(tmp_path / "aside", tmp_path / "log", name="old")
    assert sorted(path.read_text() for path in (tmp_path / "aside").iterdir()) == ["one", "two"]
    assert (tmp_path / "aside" / "old").read_text() == "one" and not (tmp_path / "log").exists()
