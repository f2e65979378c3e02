"""A headless Chromium for the tests, by its DevTools protocol over aiohttp, which fsspec's S3 brings anyway.

One browser serves all tests of a file with one set of fonts, whichever else the machine has. Everything it says on its
console, and every breach of a page's policy, is kept.
"""

import asyncio
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
FONT_SETS = {"no fonts": "", "DejaVu": "DejaVuSans.ttf", "Liberation": "LiberationSans-Regular.ttf"}  # a file of each
_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts")
_FONT_CONFIG = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>{fonts}
<cachedir>{folder}/font-cache</cachedir></fontconfig>"""
# As in fontconfig's own rules: letters are not moved to whole pixels, and a name that is not known is sans-serif.
_FONT_FAMILY = """<dir>{folder}</dir>
<match target="pattern"><edit name="hintstyle" mode="append"><const>hintslight</const></edit></match>
<match target="pattern">
<test qual="all" name="family" compare="not_eq"><string>sans-serif</string></test>
<test qual="all" name="family" compare="not_eq"><string>serif</string></test>
<test qual="all" name="family" compare="not_eq"><string>monospace</string></test>
<edit name="family" mode="append_last"><string>sans-serif</string></edit></match>
<alias><family>sans-serif</family><prefer><family>{name} Sans</family></prefer></alias>
<alias><family>serif</family><prefer><family>{name} Serif</family></prefer></alias>
<alias><family>monospace</family><prefer><family>{name} Mono</family><family>{name} Sans Mono</family></prefer></alias>
"""


def font_config(font_set: str, folder: Path) -> Path | None:
    """A file for FONTCONFIG_FILE, by which a browser finds the fonts of that set alone; None: they are not here."""
    file, fonts = FONT_SETS[font_set], ""
    if file:
        roots = [Path(each).expanduser() for each in _FONT_FOLDERS]
        found = next((path for root in roots if root.is_dir() for path in root.rglob(file)), None)
        if found is None:
            return None
        fonts = _FONT_FAMILY.format(folder=found.parent, name=font_set)
    config = folder / "fonts.conf"
    config.write_text(_FONT_CONFIG.format(fonts=fonts, folder=folder))
    return config


def program() -> str | None:
    """The browser that is installed; a stand-in that would fetch one, as some distributions have, is none."""
    found = [path for each in PROGRAMS if (path := shutil.which(each))]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return next((path for path in found if subprocess.run([path, "--version"], **quiet).returncode == 0), None)


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


@contextlib.contextmanager
def open_browser(chromium: str, folder: Path, *, fonts: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder` and the fonts of `font_config`, ended with all that it started."""
    import aiohttp

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "FONTCONFIG_FILE": str(fonts)},
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
