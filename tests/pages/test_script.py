"""The pure functions of the page's script, under node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compile_remat._util.units import GIB, KIB, MIB, format_bytes
from compile_remat.pages import page
from compile_remat.pages.page import PAGE_BINS, page_data
from tests.pages.examples import small

NODE = shutil.which("node")
HEIGHT = 1000

pytestmark = pytest.mark.skipif(NODE is None, reason="no node")


def called(function: str, *arguments: object) -> Any:
    """Returns the result of a function of the script."""
    script = Path(page.__file__).with_name("page.js").read_text(encoding="utf-8")
    program = f"{script}\nconsole.log(JSON.stringify({function}(...{json.dumps(arguments)})))"
    done = subprocess.run([str(NODE), "-"], input=program, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_bytes_are_written_as_in_python() -> None:
    amounts = [
        0,
        1023,
        KIB,
        KIB + 51,
        1023 * KIB + 971,
        MIB - 1,
        MIB,
        5 * MIB // 4,
        3 * MIB // 20,
        77 * GIB,
        5 << 40,
        9 << 50,
    ]
    assert called("((...amounts) => amounts.map(bytes))", *amounts) == [format_bytes(n) for n in amounts]


def test_the_largest_tensors_of_a_moment() -> None:
    step = page_data(small(), PAGE_BINS)["script"]
    found = called("alive", step, step["peak"], 2)
    assert [size for size, *_ in found["kept"]] == [4 * MIB, 3 * MIB]
    assert (found["others"], found["left"]) == (1, 2 * MIB), "the output of 1 MiB, and 1 MiB of workspace"
