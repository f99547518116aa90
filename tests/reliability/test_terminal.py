"""Text from data reaches a terminal without characters that the terminal acts on."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from coder_plugin.cli import main
from coder_plugin.terminal import PrintableFormatter, echo, printable

ROOT = Path(__file__).parents[2]
#: Clear the screen, set the window's title, C1's form of the same, a bell, backspaces, a return over what stands there,
#: a reversed order of letters, halves of characters, a null, DEL, and separators that are lines to some terminals.
HOSTILE = (
    "\x1b[2J \x1b]0;root\x07 \x9b31m \x9d0;t\x9c "
    "\x08\x08 \r \u202egnp.exe\u2066 \ud83d \x00 \x7f \x85 \u2028\u2029 \x0b\x0c"
)


def is_harmless(text: str) -> bool:
    """No control character but tab and newline, no mark of direction, and text that can be encoded."""
    text.encode()
    return not any(
        ord(each) < 32 and each not in "\t\n" or 127 <= ord(each) < 160 or each in "\u202e\u2066\u2028\u2029\u200e\u200f\u061c"
        for each in text
    )


def test_every_control_character_is_escaped() -> None:
    assert not any(is_harmless(each) for each in ("\x1b", "\x9b", "\u202e", "\r"))
    for number in [*range(0x3000), *range(0xD800, 0xE000)]:
        assert is_harmless(printable(chr(number))), hex(number)
    assert printable(HOSTILE).startswith("\\u001b[2J \\u001b]0;root\\u0007 \\u009b31m")


def test_ordinary_text_stays() -> None:
    for text in ("naïve 猫\n\ta b", "👩\u200d🚀", "می\u200cخواهم", "שלום", 'a "b" \\u0041'):
        assert printable(text) == text


def test_json_keeps_its_value() -> None:
    value = {"caption": HOSTILE.replace("\ud83d", ""), "猫": [1]}
    text = printable(json.dumps(value, indent=2, ensure_ascii=False))
    assert is_harmless(text) and json.loads(text) == value


def test_what_the_stream_cannot_encode_is_escaped() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    echo("猫 \x1b", file=file)
    file.seek(0)
    assert file.read() == "\\u732b \\u001b\n"


def test_errors_that_quote_names(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for argv in (["search", f"{tmp_path}/\x1b[2J\x9b\u202e"], ["eval", f"{tmp_path}/\x1b]0;t\x07"], ["report", "\x1b[2J"]):
        assert main([*argv, *(["--text", "x"] if argv[0] == "search" else [])]) == 2
        error = capsys.readouterr().err
        assert is_harmless(error) and "\\u001b" in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["doctor", "--\x1b[2J"])
    assert is_harmless(capsys.readouterr().err)


def test_warnings_that_quote_names() -> None:
    record = logging.LogRecord("coder_plugin", logging.WARNING, "x.py", 1, "skipped %s", ("a\x1b[2J\r.png",), None)
    assert PrintableFormatter("%(levelname)s %(message)s").format(record) == "WARNING skipped a\\u001b[2J\\u000d.png"
    code = "import logging; from coder_plugin.cli import main; main(['plugins']); logging.getLogger('x').warning('\\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "WARNING x: \\u001b[2J" in done.stderr and "\x1b" not in done.stderr


def test_nothing_else_prints() -> None:
    """A bare ``print`` would show text as it is; ``sys.stdout.write`` as well."""
    allowed = ROOT / "coder_plugin" / "terminal.py"
    found = []
    for path in [*(ROOT / "coder_plugin").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in ("print", "write") and path != allowed:
                called = ast.unparse(node.func)
                if called == "print" or called.endswith(("stdout.write", "stderr.write")):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, f"use coder_plugin.terminal.echo: {', '.join(found)}"
