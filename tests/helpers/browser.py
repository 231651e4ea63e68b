"""A headless browser, for pages that are driven by keys."""

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _program(profile: Path) -> list[str]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    return [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]


_CODES = {" ": "Space", "Enter": "Enter", "Escape": "Escape"}
_NUMBERS = {"Enter": 13, "Escape": 27, " ": 32}


class Tab:
    """A page, driven through the DevTools protocol. Dialogs that ask for a text are answered with `answer`."""

    def __init__(self, socket: Any, answer: str):
        self.socket, self.answer, self._number = socket, answer, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number = number = self._number + 1
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        async for message in self.socket:
            found = message.json()
            if found.get("method") == "Page.javascriptDialogOpening":
                answer = {"accept": True, "promptText": self.answer}
                reply = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": answer}
                await self.socket.send_json(reply)
            elif found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
        raise ConnectionError("the browser has ended")

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        how = {"returnByValue": True, "awaitPromise": True}
        found = await self.call("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        end = time.monotonic() + 30
        while not await self.value(expression):
            assert time.monotonic() < end, (
                f"{expression}: {await self.value('document.body.innerText')}"
            )
            await asyncio.sleep(0.02)

    async def press(self, key: str, ctrl: bool = False, alt: bool = False) -> None:
        code = _CODES.get(key) or (f"Digit{key}" if key.isdigit() else f"Key{key.upper()}")
        number = _NUMBERS.get(key, ord(key[0].upper()))
        event = {
            "key": key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": alt + 2 * ctrl,
        }
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def tab(url: str, profile: Path, answer: str = "") -> AsyncIterator[Tab]:
    """A page in a browser of its own."""
    import aiohttp

    command = [*_program(profile), "--remote-debugging-port=0", "--window-size=1100,860"]
    browser = subprocess.Popen([*command, "about:blank"], stderr=subprocess.DEVNULL)
    try:
        port = profile / "DevToolsActivePort"
        while not (port.is_file() and "\n" in port.read_text()):
            assert browser.poll() is None
            await asyncio.sleep(0.02)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as listed:
                [page] = [each for each in await listed.json() if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Tab(socket, answer)
                await opened.call("Page.enable")
                await opened.call("Page.navigate", url=url)
                await opened.until(
                    "location.href != 'about:blank' && document.readyState == 'complete'"
                )
                yield opened
    finally:
        browser.terminate()
        browser.wait(20)
