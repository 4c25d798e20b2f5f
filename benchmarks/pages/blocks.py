"""The generated blocks of the pages that show results, each between two marks, in pages that are otherwise written by hand.

    python -m benchmarks --markdown

Writes every block anew. A block is named after a file of `benchmarks/results` or after a table of `benchmarks.pages.overview`.
`tests/test_docs.py` compares the committed pages with what this writes.
"""

import re
from pathlib import Path

from benchmarks.pages import overview, reports

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs/results.md",
    *(ROOT / f"docs/guides/{name}.md" for name in ("lightning", "timm-diffusers")),
    *sorted((ROOT / "docs/results").glob("*.md")),
)

BLOCK = re.compile(r"<!-- ([\w./]+): begin -->(\n+).*?<!-- \1: end -->", re.DOTALL)
"""A block, with its name and the lines between a mark and the text."""


def filled(page: str) -> str:
    """Returns the text of a page with its blocks written anew.

    Raises:
        ValueError: A block has the name of no stored result and no table.
    """
    return BLOCK.sub(
        lambda found: f"<!-- {found[1]}: begin -->{found[2]}{_text(found[1])}{found[2]}<!-- {found[1]}: end -->", page
    )


def _text(name: str) -> str:
    if name in overview.TABLES:
        return overview.TABLES[name]()
    if name not in reports.names():
        raise ValueError(f"no result and no table is called {name!r}; see benchmarks/pages")
    return reports.text(name)


def unshown() -> set[str]:
    """Names of stored results that no page has a block for."""
    shown = {name for page in PAGES for name, _ in BLOCK.findall(page.read_text())}
    return reports.names() - shown


def write() -> None:
    """Writes the blocks of all pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))
