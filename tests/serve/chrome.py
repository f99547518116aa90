"""A browser without a window, steered through its DevTools protocol: a page is loaded, typed into and looked at."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START = "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


class Page:
    """A tab. ``events`` are those that the browser has sent, in order.

    Args:
        browser: the path of a Chromium or Chrome.
        folder: for its profile.
    """

    def __init__(self, browser: str, folder: Path) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--disable-background-networking", "about:blank"]
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the browser reads descriptor 3 and writes 4
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (to_browser, from_browser)]
        start = [sys.executable, "-c", _START, *map(str, theirs), browser, *flags]
        self._log = open(folder / "browser.log", "wb")
        self._process = subprocess.Popen(start, stdout=self._log, stderr=self._log, pass_fds=theirs)
        for each in (to_browser, from_browser, *theirs):
            os.close(each)
        self.events: list[dict[str, Any]] = []
        self._pending, self._number, self._session = b"", 0, None
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            content = os.read(self._read, 1 << 16)
            assert content, "the browser has ended"
            self._pending += content
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False, mobile: bool = False) -> None:
        """Load a page in a window of so many pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key, by its name in JavaScript, such as Enter or ArrowDown."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


    def complaints(self) -> list[str]:
        """What the page has written to the console, its exceptions, and requests that failed."""
        self.run("new Promise(done => setTimeout(done, 50))")
        found = []
        for event in self.events:
            kind, values = event["method"], event.get("params", {})
            if kind == "Runtime.consoleAPICalled":
                found.append(str(values["args"]))
            elif kind == "Runtime.exceptionThrown":
                found.append(values["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif kind == "Log.entryAdded":
                found.append(values["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses of all that was requested."""
        return [each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        self._log.close()


@contextmanager
def page(browser: str, folder: Path) -> Iterator[Page]:
    opened = Page(browser, folder)
    try:
        yield opened
    finally:
        opened.close()
