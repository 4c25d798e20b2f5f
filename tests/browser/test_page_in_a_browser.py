"""The page in a real browser: nothing on the console, and the figures of the plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compile_remat._util.units import format_bytes
from compile_remat.pages.figures import FrontierPoint, Kind, PageFigures, StepFigures
from compile_remat.pages.page import PAGE_BINS, binned, html_page, notebook_html
from tests.browser.chromium import LAPTOP, PHONE, chromium, complaints, posted, screenshot
from tests.pages.examples import HOSTILE, MIB, hostile, large, small

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        chromium() is None, reason="no chromium: install Debian's package, or set CHROMIUM to a program"
    ),
]

PROBE = """<script>
(async () => {
  await new Promise((resolve) => setTimeout(resolve, 200));
  const text = (id) => document.getElementById(id)?.textContent;
  const state = () => ({
    where: text("where"), total: text("now-sum"), other: text("now-other"), rest: text("rest"),
    kinds: Object.fromEntries(KINDS.map((kind) => [kind, text("now-" + kind)])),
    alive: [...document.querySelectorAll("#alive tr")].map((row) => [...row.cells].map((cell) => cell.textContent)),
    said: document.getElementById("slider").getAttribute("aria-valuetext"),
  });
  const found = { first: state(), bins: {}, width: innerWidth, needed: document.documentElement.scrollWidth };
  const slider = document.getElementById("slider");
  slider.focus();
  found.focus = document.activeElement.id;
  for (const bin of BINS) {
    slider.value = bin;
    slider.dispatchEvent(new Event("input"));
    found.bins[bin] = state();
  }
  const plot = document.getElementById("step"), box = plot.getBoundingClientRect();
  const clientX = box.left + box.width * (BINS[0] + 0.5) / COUNT;
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: box.top + 5 }));
  found.pointed = state();
  found.ground = getComputedStyle(document.body).backgroundColor;
  found.names = [...document.querySelectorAll("[role=img], [role=group]")].map((chart) => chart.getAttribute("aria-label"));
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true });
  const texts = [...document.querySelectorAll(".label, .tick")].filter(isShown);
  found.labels = texts.filter((text) => text.matches(".label")).map((label) => label.textContent);
  found.ticks = [...document.querySelectorAll(".tick")].map((tick) => tick.textContent);
  found.areas = [...document.querySelectorAll("#step path[fill^=url]")].map((area) => {
    const { width, height } = area.getBoundingClientRect();
    return [area.getAttribute("class"), width / box.width, height / box.height];
  });
  const frame = (node) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return range.getBoundingClientRect();
  };
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const pairs = texts.flatMap((a, k) => texts.slice(k + 1).map((b) => [a, b]));
  found.overlaps = pairs.filter(([a, b]) => meet(frame(a), frame(b))).map((pair) => pair.map((text) => text.textContent));
  const curve = document.getElementById("plans"), length = curve.getTotalLength(), toScreen = curve.getScreenCTM();
  const places = Array.from({ length: 500 }, (_, k) => curve.getPointAtLength(length * k / 499).matrixTransform(toScreen));
  const within = ({ left, right, top, bottom }) => ({ x, y }) => left < x && x < right && top < y && y < bottom;
  found.crossed = texts.filter((text) => places.some(within(frame(text)))).map((text) => text.textContent);
  found.inside = texts.filter((text) => frame(text).right > innerWidth || frame(text).left < 0).map((text) => text.textContent);
  found.legend = frame(document.querySelector(".legend")).bottom;
  const rows = () => [...document.querySelectorAll("#modules tbody tr")].filter(isShown).length;
  found.rows = [rows()];
  for (const button of document.querySelectorAll(".fold")) button.click();
  found.rows.push(rows());
  document.querySelector(".dot.plan").click();
  found.copied = text("copied");
  parent.postMessage(JSON.stringify(found), "*");
})();
</script>"""


def probed(
    figures: PageFigures, folder: Path, bins: list[int], size: tuple[int, int] = LAPTOP, is_dark: bool = False
) -> dict[str, Any]:
    """Returns the figures that the page shows at these bins."""
    count = len(binned(figures.known_step(), PAGE_BINS).columns)
    probe = PROBE.replace("KINDS", json.dumps([k.value for k in Kind])).replace("BINS", json.dumps(bins))
    page = folder / "page.html"
    page.write_text(
        html_page(figures).replace("</body>", f"{probe.replace('COUNT', str(count))}</body>"), encoding="utf-8"
    )
    text, console = posted(page, size=size, is_dark=is_dark)
    assert console == []
    found: dict[str, Any] = json.loads(text)
    return found


def expected_bytes(step: StepFigures, bin_: int) -> tuple[str, str | None, dict[str, str]]:
    """Sum, other plan and kinds at a bin, as Python writes them."""
    kinds = {kind.value: format_bytes(area[bin_]) for kind, area in step.areas.items()}
    other = None if step.other is None else format_bytes(step.other.live_bytes[bin_])
    return format_bytes(step.live_bytes[bin_]), other, kinds


def expected_tensors(step: StepFigures, bin_: int) -> list[str]:
    """Bytes of the largest tensors at a bin, as Python writes them."""
    alive = sorted((t.nbytes for t in step.tensors if t.begin <= bin_ <= t.end), reverse=True)
    return [format_bytes(nbytes) for nbytes in alive[:12]]


def test_each_moment_has_the_figures_of_the_plan(tmp_path: Path) -> None:
    figures, step = small(), small().known_step()
    found = probed(figures, tmp_path, [0, 1, 2, 3, 4, 5])
    for bin_, state in enumerate(found["bins"].values()):
        assert (state["total"], state.get("other"), state["kinds"]) == expected_bytes(step, bin_)
        assert [row[1] for row in state["alive"]] == expected_tensors(step, bin_)
    assert found["first"] == found["bins"]["3"], "the page opens at the peak"
    assert found["first"]["where"] == "backward, at b"
    assert found["first"]["said"] == "backward, at b: 9.0 MiB live"
    assert found["first"]["rest"] == "0 more tensors and workspaces: 1.0 MiB"  # 9 MiB less a, b and out
    assert found["bins"]["0"]["rest"] == ""
    assert found["first"]["alive"][0] == [
        "a float32[1024, 1024]",
        "4.0 MiB",
        "saved for the backward",
        "body.0 u/m.py:3",
    ]
    assert found["pointed"] == found["bins"]["0"] and found["focus"] == "slider"
    assert len(found["names"]) == 2 and all("9.0 MiB" in name for name in found["names"])


def test_the_charts_have_their_shapes_and_texts(tmp_path: Path) -> None:
    found = probed(small(), tmp_path, [0])
    top = 12 * 1.12  # MiB
    areas = {name: (width, height) for name, width, height in found["areas"]}
    assert areas["output"] == pytest.approx((1, 1 / top), abs=0.01)
    assert areas["temporary"] == pytest.approx((1, 9 / top), abs=0.01), "down to 0, under the other ones"
    assert set(found["labels"]) == {
        "plain torch.compile 12.0 MiB",
        "12.0 MiB, +0.0 %",
        "9.0 MiB, +5.0 %",
        "8.0 MiB, +9.0 %",
    }
    assert {"5 MiB", "10 MiB", "0 %", "5 %"} <= set(found["ticks"])


def test_a_large_page_has_the_figures_of_the_plan(tmp_path: Path) -> None:
    figures = large()
    step = binned(figures.known_step(), PAGE_BINS)
    wanted = [0, 17, 300, len(step.columns) - 1]
    found = probed(figures, tmp_path, wanted)
    for bin_, state in zip(wanted, found["bins"].values(), strict=True):
        assert (state["total"], state.get("other"), state["kinds"]) == expected_bytes(step, bin_)
        assert [row[1] for row in state["alive"]] == expected_tensors(step, bin_)


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_the_window_and_follows_the_theme(tmp_path: Path, size: tuple[int, int], is_dark: bool) -> None:
    found = probed(many_points(), tmp_path, [0], size, is_dark)
    assert found["needed"] <= found["width"] == size[0]
    assert found["legend"] < size[1], "colours are named on the first screen"
    assert (found["overlaps"], found["crossed"], found["inside"]) == ([], [], [])
    assert len(found["labels"]) > 3
    assert found["ground"] == ("rgb(21, 23, 28)" if is_dark else "rgb(255, 255, 255)")


def many_points() -> PageFigures:
    """A page with twelve plans, some of them near each other, a budget far above all, and an axis that ends in a tick."""
    plans = [FrontierPoint(k * MIB // 4, 10_000_000 + 40_000_000 // k, is_chosen=k == 20) for k in range(12, 58, 4)]
    peaks = (("plain torch.compile", 14 * MIB), *small().peaks[1:])
    return replace(small(), budget_bytes=21 << 30, peaks=peaks, frontier=tuple(plans))


def test_modules_fold_and_a_budget_is_copied(tmp_path: Path) -> None:
    found = probed(small(), tmp_path, [0])
    assert found["rows"] == [1, 1], "one row is no group"
    assert found["copied"] == '"memory_budget": "9MiB"'
    rows = tuple(replace(small().modules[0], path=f"layers.{k}.mlp") for k in range(30))
    assert probed(replace(small(), modules=rows), tmp_path, [0])["rows"] == [1, 31], "many rows begin folded"


def test_kinds_are_told_apart_in_grey(tmp_path: Path) -> None:
    """Their hatching: tiles differ by more than four of 255 levels, wherever each begins."""
    (defs,) = re.findall("<defs>.*</defs>", notebook_html(small()), re.DOTALL)
    fills = re.findall(r'id="(hatch\w*-\w+)"', defs)
    tiles = "".join(f'<rect x="{64 * k}" width="64" height="64" fill="url(#{fill})"/>' for k, fill in enumerate(fills))
    page, picture = tmp_path / "tiles.html", tmp_path / "tiles.png"
    page.write_text(f'<body style="margin:0"><svg width="400" height="64">{defs}{tiles}</svg></body>', encoding="utf-8")
    screenshot(page, picture)
    with Image.open(picture) as image:
        grey = np.asarray(image.convert("L"), dtype=float)
    seen = [grey[:64, 64 * k : 64 * k + 64] for k in range(len(fills))]
    shifts = list(product(range(8), range(8)))
    for a, b in combinations(range(len(Kind)), 2):
        least = min(np.abs(seen[a][8:56, 8:56] - seen[b][8 + y : 56 + y, 8 + x : 56 + x]).mean() for y, x in shifts)
        assert least > 4, (fills[a], fills[b])


def test_names_that_look_like_html_are_text(tmp_path: Path) -> None:
    found = probed(hostile(), tmp_path, [0, 3])
    assert found["bins"]["3"]["where"] == f"backward, at {HOSTILE}"
    assert found["bins"]["3"]["alive"][0][2] == HOSTILE


def test_an_error_in_a_script_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(html_page(small()).replace("</body>", "<script>missing()</script></body>"), encoding="utf-8")
    _, console = posted(page)
    assert len(console) == 1 and "missing is not defined" in console[0]
    assert complaints("[1:ERROR:dbus] nothing of the page's") == []
