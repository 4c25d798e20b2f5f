"""Pictures of a page for the manual: `python -m tests.browser.screenshots [--out FOLDER]`.

The page is that of the benchmarks' GPT inside 120 MiB, on a laptop and a phone, light, dark and in grey.  Needs a chromium
and the extra plot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from compile_remat import explain
from tests.browser.chromium import LAPTOP, PHONE, chromium, screenshot

SIZES = {"laptop": (LAPTOP[0], 1330), "phone": (PHONE[0], 1080)}
"""Sizes of the windows: high enough to show the tensors, and on a phone the chart."""

COLOURS = 200
"""Colours of the pictures: enough for smooth text, at a third of the bytes."""


def main(argv: list[str] | None = None) -> int:
    """Write six PNGs; status 1 without a chromium."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--budget", default="120MiB")
    arguments = parser.parse_args(argv)
    if chromium() is None:
        print("no chromium", file=sys.stderr)
        return 1
    from benchmarks import models

    case = models.build("gpt")
    report = explain(case.module, *case.inputs, memory_budget=arguments.budget, device="cpu")
    with TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        report.to_html(page)
        print(f"{page.stat().st_size / 1024:.0f} KiB of HTML")
        for device, size in SIZES.items():
            for theme in ("light", "dark", "grey"):
                _shoot(page, arguments.out / f"page_{device}_{theme}.png", size, theme)
    return 0


def _shoot(page: Path, picture: Path, size: tuple[int, int], theme: str) -> None:
    from PIL import Image

    picture = picture.absolute()
    picture.parent.mkdir(parents=True, exist_ok=True)
    screenshot(page, picture, size=size, is_dark=theme == "dark")
    with Image.open(picture) as image:
        seen = image.convert("L") if theme == "grey" else image
        small = (
            seen.convert("RGB")
            .crop((0, 0, *size))
            .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        )
    small.save(picture, optimize=True)
    print(f"{picture} {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
