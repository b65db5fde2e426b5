"""A real browser without a driver: Chromium spoken to over its debugging pipe, one JSON message after the other."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tests.waiting import PATIENCE


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def _is_complaint(message: dict[str, Any]) -> bool:
    """What a developer would find in red or yellow in the console."""
    if message.get("method") == "Runtime.consoleAPICalled":
        return message["params"]["type"] in ("error", "warning", "assert")
    return message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One page of a headless Chromium."""

    def __init__(self) -> None:
        program = find_chromium()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="tilewise-chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._input, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--no-first-run", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._attach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._input)
        os.close(self._write)
        self._profile.cleanup()

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(120.0)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            assert select.select([self._input], [], [], max(end - time.monotonic(), 0))[0], (
                "the browser does not answer"
            )
            self._buffer += os.read(self._input, 1 << 20)
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if _is_complaint(message):
            self.errors.append(json.dumps(message["params"])[:300])
        return message

    # --- what a person does ---

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, expression: str, timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while True:
            reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
            if reply["result"].get("value") is True:
                return
            assert time.monotonic() < end, f"never became true: {expression}"
            time.sleep(0.05)

    def key(self, name: str, code: int) -> None:
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Into a field that is emptied first, as typed text."""
        self.js(f"(() => {{ const f = document.querySelector({selector!r}); f.focus(); f.select(); }})()")
        self.call("Input.insertText", text=text)

    def screen(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
