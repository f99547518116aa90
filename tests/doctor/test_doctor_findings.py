"""Findings: a check that fails is one of them, what it logs is one, and how they are shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from coder_plugin.doctor import findings
from coder_plugin.doctor.findings import (
    Finding,
    format_findings,
    guarded,
    listed,
    note,
    ok,
    problem,
    share,
    some,
    worst,
)
from coder_plugin.errors import CoderError


def test_what_a_check_raises_is_a_finding() -> None:
    def fails(error: BaseException) -> Iterator[Finding]:
        yield ok("part.first", "all is well")
        raise error

    for error, name, text in (
        (CoderError("the file\nis gone"), "part.refused", "the file is gone"),
        (KeyError("x"), "part.failed", "KeyError: 'x' (test_doctor_findings.py, line"),
        (SystemExit(3), "part.failed", "SystemExit: 3"),
        (MemoryError(), "part.failed", "MemoryError"),
    ):
        first, second = guarded("part", fails, error)
        assert first.level == "ok" and (second.level, second.name) == ("problem", name)
        assert text in second.text and second.do


def test_our_own_warnings_are_findings_and_those_of_others_are_not(caplog, monkeypatch) -> None:
    from coder_plugin.data.bad_samples import BadSamples

    def warns() -> Iterator[Finding]:
        for _ in range(2):
            BadSamples("set").add(1, [("picture", "a", "broken")])
        logging.getLogger("somebody").warning("something else")
        yield ok("part.first", "well")

    before = logging.getLogger().handlers
    found = guarded("part", warns)
    assert [(each.level, each.name) for each in found] == [("warning", "part.said"), ("ok", "part.first")]
    assert "skipped sample 'a' (picture): broken" in found[0].text and not caplog.records
    assert logging.getLogger().handlers is before


def test_how_findings_are_shown() -> None:
    found = [ok("b.x", "well"), problem("a.y", "broken", "mend it"), note("b.z", "by the way", "nothing")]
    assert format_findings(found).splitlines() == [
        "b",
        "  ok       well",
        "  note     by the way",
        "             -> nothing",
        "a",
        "  problem  broken",
        "             -> mend it",
        "",
        "1 problem, 1 note",
    ]
    assert format_findings([ok("a", "well")]).endswith("nothing to do")
    assert worst(found) == "problem" and worst([]) == "ok" and worst(found[::2]) == "note"


def test_words_for_numbers_and_names() -> None:
    assert some(["a", "b"]) == "'a', 'b'" and some("abcde") == "'a', 'b', 'c' and 2 more"
    assert listed([f"place {'x' * 999} reason"]) == f"place {'x' * 143}…{'x' * 143} reason"
    assert len(findings.one_line("y " * 999)) == 400
    assert share(1, 8) == "1 of 8 (12 %)" and share(8, 8) == "8 of 8" and share(0, 8) == "0 of 8"
