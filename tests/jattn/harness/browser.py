"""Chromium without a window, driven through chromedriver by WebDriver's own HTTP: no package is needed for it."""

import base64
import contextlib
import json
import re
import subprocess
import time
import urllib.request

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name of a reference
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-device-scale-factor=1")


@contextlib.contextmanager
def browser(chromedriver, *, size=(960, 720)):
    """A `Browser`, for as long as the context lasts.

    Args:
        chromedriver: The program's path.
        size: The window's width and height.
    """
    command = [chromedriver, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            found = (re.search(r"successfully on port (\d+)", line) for line in driver.stdout)
            port = next(port[1] for port in found if port)
            arguments = [*_ARGUMENTS, f"--window-size={size[0]},{size[1]}"]
            wanted = {
                "goog:chromeOptions": {"args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            root = f"http://127.0.0.1:{port}/session"
            session = _call(root, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            one = Browser(f"{root}/{session}")
            try:
                yield one
            finally:
                _call(one.url, method="DELETE")
        finally:
            driver.terminate()


class Browser:
    """One window."""

    def __init__(self, url):
        self.url = url

    def open(self, address):
        _call(f"{self.url}/url", {"url": address})

    def run(self, script, *arguments):
        """What a script returns."""
        return _call(f"{self.url}/execute/sync", {"script": script, "args": arguments})

    def text(self, selector):
        """The texts of all elements that a selector finds, as they are seen."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector)

    def prefer_dark(self):
        """The page is told that its reader prefers a dark one."""
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        _call(f"{self.url}/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def type(self, selector, text):
        _call(f"{self._element(selector)}/value", {"text": text})

    def click(self, selector):
        _call(f"{self._element(selector)}/click", {})

    def wait_for(self, script, seconds=30):
        """What a script returns, once that is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < deadline, f"not so after {seconds} s: {script}; {self.text('body')}"
            time.sleep(0.05)
        return found

    def complaints(self):
        """What the browser's console says of errors since it was last asked."""
        entries = _call(f"{self.url}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def picture(self):
        """The window as a PNG."""
        return base64.b64decode(_call(f"{self.url}/screenshot"))

    def _element(self, selector):
        found = _call(f"{self.url}/element", {"using": "css selector", "value": selector})
        return f"{self.url}/element/{found[_ELEMENT]}"


def _call(url, body=None, method=None):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["value"]
