"""A headless Chromium for the tests, by its DevTools protocol over aiohttp, which fsspec's S3 brings anyway.

One browser serves all tests of a file. Everything it says on its console, and every breach of a page's policy, is kept.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*"),
)
_START_SECONDS = 90.0


def program() -> str | None:
    """The browser that is installed."""
    return next((found for each in PROGRAMS if (found := shutil.which(each))), None)


class Browser:
    """One page in one browser."""

    def __init__(self, websocket: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._websocket, self._loop = websocket, loop
        self._numbers = itertools.count(1)
        self.said: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A call of the protocol and its answer; what comes in between is kept."""
        return self._loop.run_until_complete(self._call(method, params))

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._websocket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._websocket.receive_json(timeout=120)
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.said.append(f"console: {[each.get('value') for each in params['args']]}")
            case "Runtime.exceptionThrown":
                self.said.append(f"exception: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.said.append(f"log: {params['entry']['text']}")
            case "Page.javascriptDialogOpening":
                self.said.append(f"dialog: {params['message']}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    self.said.append(f"request: {url}")
            case "Page.loadEventFired":
                self._loaded = True
            case _:
                pass

    def open(self, file: Path, *, width: int, height: int = 900, scheme: str = "light", script: bool = True) -> None:
        """Load a file in a window of that size; what the page before said is forgotten."""
        self.said.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + _START_SECONDS
        while not self._loaded and time.monotonic() < deadline:
            self.call("Runtime.getIsolateId")
        assert self._loaded

    def run(self, expression: str) -> Any:
        """The value of a script's expression, once its promise has it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, *, count: int = 0) -> None:
        """A real movement or press; kind: mouseMoved, mousePressed, mouseReleased."""
        button = "none" if kind == "mouseMoved" and not count else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=count)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as a PNG."""
        params: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params |= {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"]))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`, ended with all that it started."""
    import aiohttp

    chromium = program()
    assert chromium is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    loop = asyncio.new_event_loop()
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + _START_SECONDS
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]

        async def connect() -> tuple[Any, Any]:
            session = aiohttp.ClientSession()
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            return session, await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

        session, websocket = loop.run_until_complete(connect())
        try:
            yield Browser(websocket, loop)
        finally:

            async def disconnect() -> None:
                await websocket.close()
                await session.close()
                await asyncio.sleep(0)

            loop.run_until_complete(disconnect())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        loop.close()
