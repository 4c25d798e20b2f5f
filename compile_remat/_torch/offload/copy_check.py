"""Checks in Inductor's code that no kernel uses a tensor while it is copied, nor one whose memory a copy has freed.

The code is a wrapper whose statements run in order (`wrapper_dry_run`).  A buffer that Inductor writes over gets a new variable
(``buf9 = buf8; del buf8  # reuse``), also where a kernel writes in place, so that the names tell which tensor is meant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_remat._torch.offload.copy_order import CopiesMisplaced
from compile_remat._torch.offload.offload_ops import NAMESPACE

OPERATORS = ("stash", "release", "fetch", "arrived")


def check_copies(source_code: str) -> None:
    """Check that each copy is waited for once, by the variable that it copies, and that all users stand on the right side.

    Raises:
        CopiesMisplaced: The code does not keep to this.
    """
    if any(f"{NAMESPACE}.{operator}" in source_code for operator in OPERATORS):
        for function in ast.walk(ast.parse(source_code)):
            if isinstance(function, ast.FunctionDef):
                _check([_Statement.of(each) for each in _in_order(function.body)])


@dataclass(frozen=True)
class _Statement:
    """A statement without parts.

    Attributes:
        operator: The operator of offload that it calls; empty for all others.
        arguments: Texts of the operator's arguments.
        result: The variable that it assigns; empty if there is not one.
        value: Text of the value that is assigned.
        names: The variables that it reads, unless it only checks or deletes them.
        deleted: The variables that it deletes.
        written: The variable that it hands over to be written, by ``out=``.
    """

    operator: str
    arguments: tuple[str, ...]
    result: str
    value: str
    names: frozenset[str]
    deleted: frozenset[str]
    written: str

    def renames(self, tensor: str) -> bool:
        """True if the statement gives a tensor's memory another variable."""
        return bool(self.result) and self.value == tensor

    def views(self, tensor: str) -> bool:
        """True if it gives the memory another variable in another layout."""
        return bool(self.result) and self.value.startswith(f"reinterpret_tensor({tensor}, ")

    @staticmethod
    def of(node: ast.stmt) -> _Statement:
        """The facts of a statement."""
        value = getattr(node, "value", None)
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        operator = next((each for each in OPERATORS if called == f"torch.ops.{NAMESPACE}.{each}.default"), "")
        arguments = tuple(map(ast.unparse, value.args)) if isinstance(value, ast.Call) else ()
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        result = target.id if isinstance(target, ast.Name) else ""
        names = frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        deleted = names if isinstance(node, ast.Delete) else frozenset()
        used = frozenset() if deleted or called.startswith("assert_") else names - {result}
        keywords = value.keywords if isinstance(value, ast.Call) else []
        written = next((ast.unparse(each.value) for each in keywords if each.arg == "out"), "")
        return _Statement(
            operator, arguments, result, "" if value is None else ast.unparse(value), used, deleted, written
        )


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of blocks one after the other."""
    for node in body:
        if isinstance(node, ast.With | ast.If | ast.While):
            yield from _in_order([*node.body, *getattr(node, "orelse", ())])
        elif not isinstance(node, ast.FunctionDef):
            yield node


def _check(statements: Sequence[_Statement]) -> None:
    for begin, statement in enumerate(statements):
        if statement.operator == "stash":
            _check_out(statements, begin, statement.arguments[0])
        elif statement.operator == "fetch":
            _check_back(statements, begin, _element(statements, statement.result, 0))


def _check_out(statements: Sequence[_Statement], begin: int, tensor: str) -> None:
    end = _end(statements, begin, "release", tensor)
    for statement in statements[begin + 1 : end]:
        if statement.renames(tensor) or tensor in statement.deleted or statement.written == tensor:
            raise CopiesMisplaced(f"{tensor} is freed or written over before its copy to the host has ended")
    views = {each.result for each in statements[:end] if each.views(tensor)}
    for statement in statements[end + 1 :]:
        if statement.renames(tensor) or statement.views(tensor) or tensor in statement.deleted:
            break  # from here on the memory is another tensor's
        if statement.names & {tensor, *views}:
            raise CopiesMisplaced(f"{tensor} is read behind the place where the plan frees it")


def _check_back(statements: Sequence[_Statement], begin: int, made: str) -> None:
    end = _end(statements, begin, "arrived", made)
    for statement in statements[begin + 1 : end]:
        if made in statement.names | statement.deleted:
            raise CopiesMisplaced(f"{made} is used before its copy from the host has ended")


def _end(statements: Sequence[_Statement], begin: int, operator: str, tensor: str) -> int:
    """Place of the statement that waits for the copy which starts at `begin`."""
    ticket = _element(statements, statements[begin].result, 1)
    ends = [
        place for place, each in enumerate(statements) if each.operator == operator and each.arguments[-1] == ticket
    ]
    if len(ends) != 1 or ends[0] < begin or statements[ends[0]].arguments[0] != tensor:
        raise CopiesMisplaced(f"the copy of {tensor} has no {operator} of its own")
    return ends[0]


def _element(statements: Sequence[_Statement], results: str, place: int) -> str:
    """The variable that is assigned one of an operator's results."""
    found = [each.result for each in statements if each.value == f"{results}[{place}]"]
    if len(found) != 1:
        raise CopiesMisplaced(f"{results}[{place}] has no variable")
    return found[0]
