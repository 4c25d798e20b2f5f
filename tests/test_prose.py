"""Sentences of docstrings, comments and pages have a subject; `make lint` runs this file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import BENCHMARKS, PAGES, SOURCES, TESTS, docstrings, name_of

CLAUSE = "(What|Whether|Whatever|Who|Whose) "
NO_SUBJECT = re.compile(rf"(?:\A|[.:;] +|\n\s*\n\s*){CLAUSE}")
"""A sentence that begins with a clause in place of a subject."""


def test_sentences_of_docstrings_and_comments_have_a_subject() -> None:
    assert {name_of(path): found for path in [*SOURCES, *BENCHMARKS, *TESTS] if (found := without_subject(path))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_of_pages_have_a_subject(page: Path) -> None:
    """Headings and output in blocks apart."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert NO_SUBJECT.findall(prose) == []


def without_subject(path: Path) -> list[str]:
    """Returns the docstrings and comments of a module that have such a sentence."""
    text = path.read_text()
    if not re.search(CLAUSE, text):
        return []  # most modules need not be parsed
    return [prose for prose in (*docstrings(ast.parse(text)), *comments(text)) if NO_SUBJECT.search(prose)]


def comments(text: str) -> Iterator[str]:
    """Yields the comments of a module, each line by itself."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
