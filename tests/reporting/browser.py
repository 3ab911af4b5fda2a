"""Chromium without a window, driven through a pipe by its DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)


class Page:
    """A tab of a browser."""

    def __init__(self, commands, answers):
        self._commands, self._answers, self._session, self._count = (
            *(commands, answers),
            *(None, 0),
        )
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method, **params):
        """Sends a command, and returns its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(_until_zero(self._answers))
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url, width, scheme="light", height=900):
        """Opens a page in a window of a width, in light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1},
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        self.value(
            "new Promise((done) => document.readyState === 'complete' ? done(1) : "
            "addEventListener('load', () => done(1)))"
        )

    def value(self, expression):
        """Returns the value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector, text=""):
        """Clicks with the mouse on the first element, or the first with a text."""
        x, y = self.value(
            f"(() => {{ const one = [...document.querySelectorAll({selector!r})]"
            f".find((x) => x.textContent.includes({text!r})); one.scrollIntoView("
            "{block: 'center', inline: 'center'}); const r = "
            "one.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height /"
            " 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                **{"x": x, "y": y, "button": "left", "clickCount": 1},
            )

    def write(self, text):
        """Types a text into the focused element."""
        self.call("Input.insertText", text=text)

    def screenshot(self):
        """Returns the page as the bytes of a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


def _until_zero(file):
    found = bytearray()
    while (byte := file.read(1)) != b"\0":
        assert byte, "the browser has gone"
        found += byte
    return bytes(found)


_START = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]]
os.dup2(fds[0], 3)
os.dup2(fds[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that starts the browser, which reads from 3 and writes to 4."""


@contextlib.contextmanager
def running(folder):
    """Runs a browser with its files in a folder; gives a page."""
    (read, commands), (answers, write) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _START, str(read), str(write), CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
            f"--user-data-dir={folder}",
        ],
        pass_fds=(read, write),
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    with open(commands, "wb") as to, open(answers, "rb") as back:
        try:
            yield Page(to, back)
        finally:
            process.terminate()
            process.wait(60)
