"""A headless chromium: what a page looks like after its script ran, what it complained about, and pictures of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAPTOP, PHONE = (1280, 800), (390, 844)
"""Width and height of windows."""


def chromium() -> str | None:
    """The program: `CHROMIUM`, else one on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


MARGIN = 120
"""Pixels by which a window is higher than the part of the page that it shows."""

HOST = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><script>
addEventListener("message", (event) => {
  const made = document.createElement("pre");
  made.id = "found";
  made.textContent = event.data;
  document.body.append(made);
});
</script><iframe src="PAGE" style="border:0;display:block;width:WIDTHpx;height:HEIGHTpx"></iframe></body>"""
"""Holds a page in a frame, since no headless window is narrower than 500, and shows what the page posts to it."""


def _run(page: Path, *arguments: str, is_dark: bool, size: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        host = Path(folder, "host.html")
        text = HOST.replace("PAGE", page.as_uri()).replace("WIDTH", str(size[0])).replace("HEIGHT", str(size[1]))
        host.write_text(text, encoding="utf-8")
        command = [
            str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            "--disable-background-networking", "--no-first-run", f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=2000", f"--window-size={max(500, size[0])},{size[1] + MARGIN}",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", *arguments, host.as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def complaints(stderr: str) -> list[str]:
    """Lines that the page's script, or the browser about the page, wrote to the console."""
    return [line for line in stderr.splitlines() if re.search(r"\bCONSOLE\b", line)]


def posted(page: Path, *, size: tuple[int, int] = LAPTOP, is_dark: bool = False) -> tuple[str, list[str]]:
    """Returns the text that the page posts to its parent, and the lines of the console."""
    done = _run(page, "--dump-dom", is_dark=is_dark, size=size)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return unescape(found[1]) if found else "", complaints(done.stderr)


def screenshot(page: Path, picture: Path, *, size: tuple[int, int] = LAPTOP, is_dark: bool = False) -> None:
    """A PNG of the top of the page, on a white ground where the page is narrower than 500."""
    _run(page, f"--screenshot={picture}", is_dark=is_dark, size=size)
