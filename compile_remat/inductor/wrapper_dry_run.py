"""Dry run of the code that Inductor emitted: the bytes that a compiled graph will ask the allocator for.

Imports only `_torch`, `workspace` and `wrapper_names` of this package.  Inductor's output is a Python function, the wrapper, that
allocates every buffer, calls kernels and frees (torch 2.11 to 2.15: ``def call(self, args)`` of a class, or ``def call(args)``).
The dry run executes the wrapper's statements one by one on fake tensors, without the kernels, and counts the storages that the
variables hold.  The count therefore includes fusion, in-place reuse, buffer reuse, reordering and multi-output kernels as emitted;
the workspace of the operators that the wrapper calls is measured (`workspace`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile_remat._torch import sizes
from compile_remat._torch.offload.offload_ops import made_in_host_memory
from compile_remat._torch.operators import Like
from compile_remat.inductor.workspace import workspace_bytes
from compile_remat.inductor.wrapper_names import constants_of, names_of

SELECTOR = "_selector"
"""Suffix of the variable that selects the branch of a `cond`, from torch 2.15 on: ``buf1_selector = int(gt.item())``."""


class NotUnderstood(Exception):
    """The wrapper has statements that a dry run cannot follow."""


@dataclass(frozen=True)
class DryRun:
    """Allocations of one wrapper.

    Attributes:
        peak_bytes: The most bytes live at once, workspace included.
        output_bytes: Bytes of the counted storages that are returned.
        returned: For each returned value, its storage (a number that only this run knows) and the storage's bytes; None for a
            value that is no tensor, or that lies in an input that does not count.
        events: Allocations and frees in order: a storage and its bytes, or 0 for a free.
        moments: Live bytes of each statement in order, labelled by the kernel that it calls or the variable that it assigns.
        variables: Bytes of the counted storages that each variable held.
        at_peak: The variables that hold storages at the peak, with their bytes; each storage once.
        workspace: Label in `moments` of the statement at the peak, and the bytes of its workspace.
    """

    peak_bytes: int
    output_bytes: int
    returned: tuple[tuple[int, int] | None, ...]
    events: tuple[tuple[int, int], ...] = ()
    moments: tuple[tuple[str, int], ...] = ()
    variables: Mapping[str, int] = field(default_factory=dict)
    at_peak: tuple[tuple[str, int], ...] = ()
    workspace: tuple[str, int] = ("", 0)


Counted = Mapping[int, tuple[int, int]]
"""Inputs whose memory counts until the wrapper drops them (saved activations): for each position, a number for the input's
storage, and the storage's bytes."""


def dry_run(source_code: str, inputs: Sequence[object], counted: Counted | None = None) -> DryRun:
    """Run the wrapper without its kernels.

    Args:
        source_code: Inductor's output code.
        inputs: Arguments of the wrapper: real or fake tensors, of which only the layout is used; sizes, by their hints if symbolic.
        counted: Inputs that count; by default none.

    Raises:
        NotUnderstood: The wrapper has a statement that the dry run cannot follow.
    """
    try:
        module = ast.parse(source_code)
    except SyntaxError as error:
        raise NotUnderstood(f"the output code is not Python: {error}") from None
    function = _call_of(module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        constants = constants_of(source_code)
        given = [_copy(x) for x in inputs]
        run = _Run(names_of(module, constants), given, counted or {}, _functions_of(module), list(constants.values()))
        with run.workspace:
            run.block(function.body)
    return run.result()


def _call_of(module: ast.Module) -> ast.FunctionDef:
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(found) != 1:
        raise NotUnderstood("the output code has no single function `call`")
    return found[0]


def _functions_of(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """Module-level functions by name, which `call` may run.

    `call` runs ``partition_0``, ``partition_1``, ... by number, each a CUDA graph (``mode="reduce-overhead"``).  It runs the graphs
    of control flow, and of regions that are compiled once, by names such as ``true_graph_0``.
    """
    return {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        like = Like.of(value)
        return like.over(torch.empty(like.elements, dtype=value.dtype, device=value.device))
    if not isinstance(value, torch.SymInt | int) or isinstance(value, bool) or sizes.is_jagged(value):
        return value
    return sizes.hint_int(value)


class _Workspace(TorchDispatchMode):
    """Measures the operators that a statement runs, after torch has copied lazy operands, as it does for most operators.

    Attributes:
        nbytes: The most bytes that one operator takes beside its outputs, since `begin`; copies of lazy operands included.
        outside: Storages that operators have made in host memory, outside of the allocator that is counted, with their tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, torch.Tensor] = {}  # kept alive: a storage's address is its key
        self.begin()

    def begin(self) -> None:
        """Forget the operators of the statement before."""
        self.nbytes = 0
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(_tensors((args, kwargs)))
        copies_bytes = sum(self._made.get(key, 0) for key in given)
        self.nbytes = max(self.nbytes, workspace_bytes(func, args, kwargs) + copies_bytes)
        result = func(*args, **kwargs)
        self.outside |= {x.untyped_storage()._cdata: x for x in made_in_host_memory(func, result)}
        self._made |= {key: nbytes for key, nbytes in _tensors(result) if key not in given}
        return result


@dataclass(frozen=True)
class _State:
    """The names and storages of a `_Run` at one statement."""

    names: dict[str, Any]
    held: dict[str, list[int]]
    holders: dict[int, int]
    bytes: dict[int, int]
    live: int
    events: list[tuple[int, int]]


class _Run:
    """Executes statements in one name space and counts the storages that variables hold."""

    def __init__(
        self,
        names: Mapping[str, Any],
        inputs: list[object],
        counted: Counted,
        functions: Mapping[str, ast.FunctionDef],
        constants: Sequence[torch.Tensor] = (),
    ) -> None:
        self.inputs = inputs  # kept alive: a storage's address is its key
        self.header, self.functions = names, functions
        self.shared: dict[int, tuple[int, int]] = {}
        for position, (storage, nbytes) in counted.items():
            self.shared |= {key: (-1 - storage, nbytes) for key, _ in _tensors(inputs[position])}
        self.names = {**names, "args": inputs}
        self.holders: dict[int, int] = {}  # storage -> variables that hold it
        self.bytes: dict[int, int] = {}
        uncounted = [x for i, x in enumerate(inputs) if i not in counted]
        self.given = {key for key, _ in _tensors([uncounted, constants])}
        self.held: dict[str, list[int]] = {}
        self.live = 0
        self.workspace = _Workspace()
        self.peak = 0
        self.events: list[tuple[int, int]] = []
        self.moments: list[tuple[str, int]] = []
        self.variables: dict[str, int] = {}
        self.at_peak: dict[int, tuple[str, int]] = {}  # by storage
        self.workspace_at_peak = "", 0
        self.returned: Sequence[object] = ()

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def result(self) -> DryRun:
        returned = [next(self._counted(value), None) for value in self.returned]
        outputs = dict(filter(None, returned))
        dropped = [(k, 0) for k, count in self.holders.items() if count and self.bytes[k] and k not in outputs]
        events, moments = (*self.events, *dropped), tuple(self.moments)
        at_peak = tuple(self.at_peak.values())
        return DryRun(
            self.peak,
            sum(outputs.values()),
            tuple(returned),
            events,
            moments,
            self.variables,
            at_peak,
            self.workspace_at_peak,
        )

    def _function(self, node: ast.expr) -> ast.FunctionDef | None:
        """The module's own function that an expression calls; None for any other expression."""
        match node:
            case ast.Call(func=ast.Subscript(slice=ast.Constant(value=int(number)))):
                return self.functions.get(f"partition_{number}")
            case ast.Call(func=ast.Name(id=name)):
                return self.functions.get(name)
        return None

    def _run(self, function: ast.FunctionDef, call: ast.expr) -> Sequence[object]:
        """Run a function in a name space of its own; the function clears its argument list once it has unpacked the list."""
        match call:
            case ast.Call(args=[ast.Name(id=handed)]):
                pass
            case _:
                raise NotUnderstood(f"a call {ast.unparse(call)[:80]!r}")
        outer = self.names, self.held
        self.names, self.held = {**self.header, "args": self.names[handed]}, {"args": self.held.pop(handed)}
        self.block(function.body)
        for name in list(self.held):
            self._release(name)
        self.names, self.held = outer
        return self.returned

    def _blocks(self, node: ast.With | ast.If | ast.While) -> None:
        """Run a loop's body twice, as buffers of one iteration live beside buffers of the next; run both branches of an ``if``."""
        if isinstance(node, ast.If):
            self._branches(node)
            return
        for _ in range(2 if isinstance(node, ast.While) else 1):
            self.block(node.body)

    def _branches(self, node: ast.If) -> None:
        """Run both branches from the same state, and go on with the state that has more live bytes."""
        before = self._state()
        self.block(node.body)
        after = self._state()
        self._go_back(before)
        self.block(node.orelse)
        if after.live > self.live:
            self._go_back(after)

    def _state(self) -> _State:
        names, held, holders, nbytes = dict(self.names), dict(self.held), dict(self.holders), dict(self.bytes)
        return _State(names, held, holders, nbytes, self.live, list(self.events))

    def _go_back(self, state: _State) -> None:
        self.names, self.held, self.live = state.names, state.held, state.live
        self.holders, self.bytes, self.events = state.holders, state.bytes, state.events

    def _statement(self, node: ast.stmt) -> None:
        self.workspace.begin()
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name.endswith(SELECTOR):
                self.names[name] = None  # known at run time only: an expression that computes with it is not understood
            case ast.Assign():
                value = self._value(node.value)
                for target in node.targets:
                    self._assign(target, value)
            case ast.Delete():
                for target in node.targets:
                    self._delete(target)
            case ast.Expr():
                self._call(node.value)
                self._see(_called(node.value))
            case ast.With() | ast.If() | ast.While():
                self._blocks(node)
            case ast.Return(value=ast.expr() as returned):
                values = self._value(returned)
                self.returned = values if isinstance(values, tuple | list) else [values]
            case ast.Pass() | ast.Global() | ast.Return() | ast.Break():
                pass
            case _:
                raise NotUnderstood(f"a statement {ast.unparse(node)[:80]!r}")

    def _call(self, node: ast.expr) -> None:
        """Run a statement that is a call.  `set_device` is skipped: the device guard that would undo it is not entered here."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="clear")):
                self._release(name)
            case ast.Call(func=ast.Attribute(attr="set_device")):
                pass
            case _:
                self._value(node)

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._release(target.id)
            self.names.pop(target.id, None)

    def _value(self, node: ast.expr) -> Any:
        function = self._function(node)
        if function is not None:
            return self._run(function, node)
        self._check_names(node)
        code = compile(ast.Expression(node), "wrapper", "eval")
        try:
            return eval(code, {}, self.names)
        except (KeyError, NameError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
            raise NotUnderstood(f"{ast.unparse(node)[:80]!r}: {error}") from error

    def _check_names(self, node: ast.expr) -> None:
        """Refuse an expression with a name that a wrapper does not have.

        Taking the builtins from `eval` instead would break operators: their C++ code imports modules with the builtins of
        the Python frame that called it.
        """
        own = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        for part in ast.walk(node):
            is_unknown = isinstance(part, ast.Name) and part.id not in self.names and part.id not in own
            if is_unknown or (isinstance(part, ast.Attribute) and part.attr.startswith("__")):
                raise NotUnderstood(f"{ast.unparse(node)[:80]!r}: {ast.unparse(part)[:40]!r} is no name of a wrapper")

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._hold(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            if len(target.elts) != len(value):
                raise NotUnderstood(f"{len(target.elts)} names for {len(value)} values")
            for part, item in zip(target.elts, value, strict=True):
                self._assign(part, item)
        else:
            raise NotUnderstood(f"an assignment to {ast.unparse(target)[:80]!r}")

    def _hold(self, name: str, value: Any) -> None:
        storages = list(self._counted(value))
        for key, nbytes in storages:
            if self.holders.get(key, 0) == 0:
                self.bytes[key] = nbytes
                self.live += nbytes
                self._note(key, nbytes)
            self.holders[key] = self.holders.get(key, 0) + 1
        self._see(name, storages)  # the old storages of the variable are still live here
        self._release(name)
        self.names[name] = value
        self.held[name] = [k for k, _ in storages]
        if storages:
            self.variables[name] = sum(nbytes for _, nbytes in storages)

    def _see(self, label: str, new: Sequence[tuple[int, int]] = ()) -> None:
        """Record the live bytes under `label`, including the workspace of the statement's operators.

        Args:
            new: Storages, with their bytes, that the variable `label` is about to hold.
        """
        live_bytes = self.live + self.workspace.nbytes
        if live_bytes > self.peak:
            self.peak, self.workspace_at_peak = live_bytes, (label, self.workspace.nbytes)
            self.at_peak = {key: (name, self.bytes[key]) for name, keys in self.held.items() for key in keys}
            self.at_peak |= {key: (label, nbytes) for key, nbytes in new}
        self.moments.append((label, live_bytes))

    def _counted(self, value: object) -> Iterator[tuple[int, int]]:
        """Yields each counted storage of a value once, with its bytes; inputs that share a storage yield it once."""
        seen = set[int]()
        for key, nbytes in _tensors(value):
            found = self.shared.get(key, (key, nbytes))
            if key not in self.given and key not in self.workspace.outside and found[0] not in seen:
                seen.add(found[0])
                yield found

    def _release(self, name: str) -> None:
        for key in self.held.pop(name, ()):
            self.holders[key] -= 1
            if self.holders[key] == 0:
                self.live -= self.bytes[key]
                self._note(key, 0)

    def _note(self, key: int, nbytes: int) -> None:
        """Append an event of a storage, unless the storage has no bytes: the allocator is not asked for an empty storage."""
        if self.bytes[key]:
            self.events.append((key, nbytes))


def _called(node: ast.expr) -> str:
    """Name of the kernel that a statement calls, or of the variable that it writes into; empty for other calls."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="run")):
            return name
        case ast.Call(keywords=keywords):
            return next((k.value.id for k in keywords if k.arg == "out" and isinstance(k.value, ast.Name)), "")
    return ""


def _tensors(value: object) -> Iterator[tuple[int, int]]:
    """Yields the storage address of each tensor in a nest, and the bytes that the allocator takes for the storage."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, sizes.in_blocks(storage.nbytes(), leaf.device.type)
