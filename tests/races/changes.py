"""Faults that are put into the product one at a time, each with the text of its row in the table of `mutations`.

A wait is left out of the trace of a step.  Other faults change the emitted code, or the product while the code is compiled or runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from compile_remat._torch.offload import copy_order, inductor_lowering, offload_ops
from compile_remat._torch.offload.streams import Direction

OUT, BACK = Direction.OUT, Direction.BACK

WAITS = {
    f"stash: {OUT} for kernels": "a copy to the host does not wait for the kernel that completes the tensor",
    f"release: kernels for {OUT}": "release does not wait",
    f"fetch: {BACK} for kernels": "a copy back does not wait for the kernels that used the memory before",
    f"fetch: {BACK} for {OUT}": "a copy back does not wait for the copy to the host",
    f"arrived: kernels for {BACK}": "arrive does not wait",
    f"unfinished: kernels for {OUT}": "a forward that raises does not wait for its copy to the host",
    f"unfinished: kernels for {BACK}": "a backward that raises does not wait for its copy back",
    f"stash: host for {OUT}": "hooks of saved tensors run before the copy to the host has ended",
}
"""Rows of left-out waits, by the kind of the wait."""


def unknown_kinds(kinds: Sequence[str]) -> set[str]:
    """Kinds of waits that have no row."""
    return set(kinds) - set(WAITS)


# -- the emitted code -------------------------------------------------------------------------------------------------

Lines = list[str]
Edit = Callable[[Lines, int], Lines | None]
"""Returns the lines of a code with the operator in one line moved; None if there is nowhere to move it to."""


def edits(source: str, operator: str, edit: Edit) -> Iterator[str]:
    """Yields the code once for each of its calls of an operator, with this call edited."""
    lines = source.splitlines()
    for place, line in enumerate(lines):
        if f"torch.ops.compile_remat.{operator}.default(" in line:
            changed = edit(list(lines), place)
            if changed is not None:
                yield "\n".join(changed)


def left_out(lines: Lines, place: int) -> Lines:
    """Without the call."""
    lines[place] = f"{_indent(lines[place])}pass"
    return lines


def behind_its_reader(lines: Lines, place: int) -> Lines | None:
    """The call behind the next statement that reads its tensor."""
    name = _arguments(lines[place])[0]
    for reader in range(place + 1, len(lines)):
        if f"del {name}" in lines[reader]:  # a kernel writes over the tensor, which has another variable from here on
            return None
        if _reads(lines[reader], name):
            lines.insert(reader, lines[place])  # behind the reader, once the call's own line is gone
            lines[reader], lines[reader + 1] = lines[reader + 1], lines[reader]
            kept = _without_deletes(lines, place, reader + 2)
            del kept[place]
            return kept
    return None


def before_its_writer(lines: Lines, place: int) -> Lines | None:
    """The call before the last statement that writes or reads its tensor."""
    name = _arguments(lines[place])[0]
    for writer in range(place - 1, 0, -1):
        if lines[writer].strip().startswith(f"{name} = "):  # an operator, or no kernel, has made the tensor
            return None
        if _reads(lines[writer], name):
            lines.insert(writer, lines.pop(place))
            return lines
    return None


def before_a_reader(lines: Lines, place: int) -> Lines | None:
    """The call before the last statement that reads its tensor, and behind its ticket."""
    name, ticket = _arguments(lines[place])
    for reader in range(place - 1, 0, -1):
        if lines[reader].strip().startswith(f"{ticket} = "):
            return None
        if _reads(lines[reader], name):
            lines.insert(reader, lines.pop(place))
            return lines
    return None


def _without_deletes(lines: Lines, begin: int, end: int) -> Lines:
    """Lines in which no variable of a moved call is deleted before its new place."""
    return [
        line
        for place, line in enumerate(lines)
        if not (begin < place < end and re.fullmatch(r"\s*del \w+", line) and _used(lines[end - 1], line.split()[-1]))
    ]


def _used(line: str, name: str) -> bool:
    return bool(re.search(rf"\b{name}\b", line))


def _reads(line: str, name: str) -> bool:
    """True if a line is a call of a kernel or an operator with a variable among its arguments."""
    text = line.strip()
    if not re.search(rf"\b{name}\b", text) or text.startswith(("del ", "assert_", "#", "return")):
        return False
    statement = ast.parse(text).body[0]
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and not ast.unparse(value.func).startswith(("empty_strided", "reinterpret"))


def _arguments(line: str) -> list[str]:
    call: Any = ast.parse(line.strip()).body[0].value  # type: ignore[attr-defined]
    return [ast.unparse(argument) for argument in call.args]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


EDITS: dict[str, tuple[str, Edit]] = {
    "stash before the last kernel that writes or reads its tensor": ("stash", before_its_writer),
    "arrive behind the first reader": ("arrived", behind_its_reader),
    "arrive left out": ("arrived", left_out),
    "release left out": ("release", left_out),
    "release before the last reader": ("release", before_a_reader),
}
"""Operator and edit, by the text of the row."""


# -- the product while it compiles ------------------------------------------------------------------------------------


@contextmanager
def not_realized() -> Iterator[None]:
    """Stash's lowering writes its tensor to a buffer of its own, which release does not know."""
    stash, release = inductor_lowering._stash, inductor_lowering._release

    def stash_copy(given: Any) -> Any:
        return stash(inductor_lowering.ir.ExternKernel.copy_input(given))

    def realize_for_release(given: Any, ticket: Any) -> None:
        given.realize()
        release(given, ticket)

    with mock.patch.multiple(inductor_lowering, _stash=stash_copy, _release=realize_for_release):
        yield


@contextmanager
def not_released() -> Iterator[None]:
    """Release's lowering emits nothing: Inductor takes the memory from the last reader on."""
    with mock.patch.object(inductor_lowering, "_release", lambda given, ticket: None):
        yield


@contextmanager
def readable_on_the_host() -> Iterator[None]:
    """Inductor may read the tensor on the host, to give it the graph's strides."""
    lower = inductor_lowering._stash

    def lowered(given: Any) -> Any:
        nodes = inductor_lowering.V.graph.current_node.users
        kept = {node: node.meta["val"] for node in nodes}
        result = lower(given)
        for node, value in kept.items():
            node.meta["val"] = value
        return result

    with (
        mock.patch.object(inductor_lowering, "_stash", lowered),
        mock.patch.object(copy_order, "_check_host", lambda nodes, groups: None),
    ):
        yield


@contextmanager
def reusable_host() -> Iterator[None]:
    """Fetch's lowering lets Inductor take the host tensor for another one."""

    def lowered(host: Any, ticket: Any, device: torch.device) -> Any:
        results = inductor_lowering.ir.FallbackKernel.create(offload_ops.FETCH, host, ticket, device)
        return [inductor_lowering.TensorBox.create(made) for made in results]

    with mock.patch.object(inductor_lowering, "_fetch", lowered):
        yield


@contextmanager
def anywhere() -> Iterator[None]:
    """The copies stay where Inductor's own order has them."""
    with mock.patch("compile_remat.inductor.kernel_order.has_copies", lambda nodes: False):
        yield


Change = Callable[[], AbstractContextManager[None]]

COMPILED: dict[str, Change] = {
    "stash of a second buffer with the tensor's numbers": not_realized,
    "no release for Inductor": not_released,
    "Inductor may reuse the tensor on the host": reusable_host,
    "copies where Inductor's own order has them": anywhere,
}


# -- the product while it runs ----------------------------------------------------------------------------------------


@contextmanager
def let_go() -> Iterator[None]:
    """A ticket does not keep the tensor until the copy has ended."""

    class Careless(offload_ops.Transfer):
        def __init__(self, done: Any, tensor: torch.Tensor) -> None:
            super().__init__(done, tensor)
            self.tensor = torch.empty(0, device="meta")

    with mock.patch.object(offload_ops, "Transfer", Careless):
        yield


LET_GO = "a ticket lets its tensor go before the copy has ended, in a forward that raises"
READABLE = "Inductor may read the tensor on the host"
"""Row of `readable_on_the_host`: Inductor wants other strides for outputs of convolutions."""

FREE = "Inductor may reuse buffers and sort kernels"
"""Row of `FREE_OPTIONS`, under which emitted code is changed, too: code that keeps no buffer for another one has fewer races."""

FREE_OPTIONS = {"allow_buffer_reuse": True, "reorder_for_peak_memory": True}
