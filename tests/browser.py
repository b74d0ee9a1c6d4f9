"""Chromium without a window, told what to do over a pair of pipes, in its DevTools protocol."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"


class Browser:
    """One page. Messages end in a zero byte: commands go to descriptor 3, answers come from 4."""

    def __init__(self, profile: Path) -> None:
        read_commands, commands = os.pipe()
        answers, write_answers = os.pipe()
        inherited = read_commands, write_answers
        command = (
            f"exec {shlex.quote(CHROMIUM)} {FLAGS} --user-data-dir={shlex.quote(str(profile))}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{read_commands} 4>&{write_answers}"],
            pass_fds=inherited,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in inherited:
            os.close(descriptor)
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb")
        self._sent, self._session = 0, {}
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message)

    def open(self, url: str) -> None:
        """Go to ``url``; return when the page and what it loads are there."""
        self.events.clear()
        self("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, expression: str) -> Any:
        """The value of JavaScript, as after a click of the user; a promise is waited for."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        result = self("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        self("Browser.close")
        self._process.wait()
        self._commands.close()
        self._answers.close()


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
