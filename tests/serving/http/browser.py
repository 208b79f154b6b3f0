"""A headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

#: As Linux distributions, Chrome and the variable of other tools call it.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_SECONDS = 60.0
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")


def find_chromium() -> str | None:
    """Where Chromium lies; None where there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class ProtocolError(Exception):
    """What the browser was asked for it could not do."""


class Page:
    """One tab.

    Attributes:
        requests: addresses that it asked for, so far.
        problems: what its console and its content security policy complained of.
    """

    def __init__(self, connection: ClientConnection, session: str) -> None:
        self._connection = connection
        self._session = session
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; what happened meanwhile is noted."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, "sessionId": self._session}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == number:
                if "error" in answer:
                    raise ProtocolError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Log.entryAdded":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20.0) -> Any:
        """Until an expression is true; fails with the page's text if that takes too long.

        On the way from one document to the next, what it reads may not be there.
        """
        deadline = time.monotonic() + seconds
        careful = f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        while True:
            try:
                value = self.evaluate(careful)
            except ProtocolError:
                value = None
            if value:
                return value
            if time.monotonic() > deadline:
                text = self.evaluate("`${location.href}: ${document.body?.innerText}`")
                raise AssertionError(f"not so: {script}\n{text[:2000]}")
            time.sleep(0.05)

    def go(self, url: str) -> None:
        """Load an address, and wait until it is shown."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the same address again."""
        before = self.evaluate("performance.timeOrigin")
        self.call("Page.reload")
        self.wait_for(f"performance.timeOrigin !== {before} && document.readyState === 'complete'")

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a screen of that size and scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def without_scripts(self) -> None:
        """Run no script of pages that are loaded from now on; `evaluate` still works."""
        self.call("Emulation.setScriptExecutionDisabled", value=True)

    def press(self, key: str) -> None:
        """A key, such as "Tab" or "Enter"."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        facts = {"key": key, "code": "Space" if key == " " else key}
        facts["windowsVirtualKeyCode"] = codes[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **facts, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def type(self, text: str) -> None:
        """Text, into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path) -> Path:
        """The whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))
        return file


@contextmanager
def chromium(binary: str, folder: Path) -> Iterator[Page]:
    """A tab of a browser that ends with the block.

    Args:
        binary: see `find_chromium`.
        folder: for its profile; empty.
    """
    command = [
        binary, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (found := _LISTENING.search(log.read_text(errors="replace"))):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        with connect(found[1], max_size=None, proxy=None) as connection:
            yield Page(connection, _attach(connection))
    finally:
        process.kill()
        process.wait(30)


def _attach(connection: ClientConnection) -> str:
    """The session of a new tab."""

    def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(connection.recv(timeout=60))).get("id") != number:
            pass
        return answer["result"]

    target = call(-1, "Target.createTarget", url="about:blank")["targetId"]
    return call(-2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
