"""Headless Chromium through chromedriver, by the W3C's WebDriver protocol: the few commands that tests of a page need."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PROGRAMS = ("chromium", "chromedriver")


def missing_programs() -> list[str]:
    """Those of the programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """What a condition gives once that is something; `AssertionError` if it stays nothing."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"no {what} within {seconds} s"
        time.sleep(0.1)
    return found


class Browser:
    """One window; a context manager.

    Args:
        folder: For the profile.
        dark: Whether pages are asked for dark colours.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 1200, dark: bool = False) -> None:
        port = free_port()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
        arguments += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
        arguments += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        wanted = {
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        try:
            wait_until(self._is_up, 20, "chromedriver")
            session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self.driver.kill()
            raise
        self.session = f"/session/{session['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._send("DELETE", self.session)
        finally:
            self.driver.kill()
            self.driver.wait()

    def _is_up(self) -> bool:
        try:
            return bool(self._send("GET", "/status")["ready"])
        except OSError:
            return False

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, url: str) -> None:
        self._send("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript returns."""
        return self._send("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The visible text of the first match; "" if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def _element(self, selector: str) -> str:
        found = self._send("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def type(self, selector: str, text: str) -> None:
        self._send("POST", f"{self.session}/element/{self._element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._send("POST", f"{self.session}/element/{self._element(selector)}/click", {})

    def requested(self) -> list[str]:
        """Addresses that pages asked for, of which nothing was returned before."""
        lines = self._send("POST", f"{self.session}/se/log", {"type": "performance"})
        messages = [json.loads(line["message"])["message"] for line in lines]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def errors(self) -> list[str]:
        """Errors in the console, of which nothing was returned before."""
        lines = self._send("POST", f"{self.session}/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", f"{self.session}/screenshot")))
