"""Memory that the operators used most in training take beside their outputs, on this machine.

    python -m benchmarks.workspaces [--operator kthvalue] [--json OUT]

Each operator runs once by itself, and the allocator is watched.  Inductor then emits code for it alone (nothing is compiled):
does that call the operator, or has Inductor a kernel of its own?  `plan` is what our memory model counts for it: nothing where
Inductor has a kernel.  The exit status is 1 where Inductor calls an operator whose bytes the plan does not count.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.common import harness
from benchmarks.common.code_only import without_compiler
from benchmarks.common.harness import mib
from benchmarks.common.used_operators import UsedOperator, used_operators
from compile_remat.compilation.feedback import Emissions
from compile_remat.cost_models import UnitCost
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor.entry import compile_with_partitioner
from compile_remat.inductor.workspace import node_workspace_bytes
from compile_remat.passes import build_problem

TITLES = ("operator", "outputs", "beside", "Inductor calls it", "plan")
SMALL_BYTES = 64 << 10
"""Memory beside the outputs up to this size need not be counted by a plan."""


@dataclass(frozen=True)
class WorkspaceRow:
    """One operator.

    Attributes:
        output_bytes: Of its results.
        beside_bytes: The most that it held beside them.
        is_called: True if Inductor calls the operator; False if Inductor emits a kernel.
        plan_bytes: Bytes beside its outputs that a plan counts for the operator.
    """

    operator: str
    output_bytes: int
    beside_bytes: int
    is_called: bool
    plan_bytes: int

    @property
    def is_missed(self) -> bool:
        """True if the operator takes more than `SMALL_BYTES` in a compiled step that no plan counts."""
        return self.is_called and self.beside_bytes - self.plan_bytes > SMALL_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--operator", action="append", help="those whose name holds this; may be repeated; default all")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex")
    rows = []
    for used in used_operators():
        if not arguments.operator or any(part in used.name for part in arguments.operator):
            harness.progress(used.name)
            rows.append(row_of(used))
            harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    print(summary(rows))
    return int(any(row.is_missed for row in rows))


def row_of(used: UsedOperator) -> WorkspaceRow:
    """Run it, have Inductor emit code for it, and ask the memory model."""
    tensors, function = _function_of(used)
    with torch.no_grad():
        measured = peak_bytes(lambda: function(*tensors), "cpu")
    beside_bytes = measured.peak_bytes - measured.end_bytes
    return WorkspaceRow(
        used.name, measured.end_bytes, beside_bytes, _is_called(function, tensors), _plan(function, tensors)
    )


def _function_of(used: UsedOperator) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Its tensors, and a function of these alone."""
    leaves, spec = torch.utils._pytree.tree_flatten((list(used.args), dict(used.kwargs)))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for k, tensor in zip(at, tensors, strict=True):
            given[k] = tensor
        args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
        return used.target(*args, **kwargs)

    return [leaves[k] for k in at], function


def _is_called(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> bool:
    """True if the wrapper that Inductor emits calls any operator."""
    emissions = Emissions()
    with without_compiler(), torch.no_grad():
        module = make_fx(function, tracing_mode="fake")(*tensors)
        choose = min_cut_rematerialization_partition
        compile_with_partitioner(module, list(tensors), choose, {}, guarded=False, observer=emissions)
    (emitted,) = emissions.seen
    body = emitted.source_code.partition("def call(")[2].partition("\ndef ")[0]
    return re.search(r"(torch\.ops\.(?!inductor)\w+\.\w+|extern_kernels\.\w+)[\w.]*\(", body) is not None


def _plan(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> int:
    """The most bytes beside outputs that the memory model counts at once."""
    with torch.no_grad():
        module = make_fx(function, select_decomp_table(), tracing_mode="fake")(*tensors)
    outputs = len(module.graph.output_node().all_input_nodes)
    problem = build_problem(module, num_fwd_outputs=outputs, cost=UnitCost(), workspace=node_workspace_bytes)
    return max((value.workspace_bytes for value in problem.values), default=0)


def table(rows: Sequence[WorkspaceRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each operator."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: WorkspaceRow) -> list[str]:
    sizes = mib(row.output_bytes), mib(row.beside_bytes)
    return [row.operator, *sizes, "yes" if row.is_called else "no", mib(row.plan_bytes) if row.is_called else "-"]


def summary(rows: Sequence[WorkspaceRow]) -> str:
    """Text with the number of operators that take more than `SMALL_BYTES`, and of those that plans count."""
    called = [row for row in rows if row.is_called]
    taking = [row for row in called if row.beside_bytes > SMALL_BYTES]
    missed = [row.operator for row in rows if row.is_missed]
    return (
        f"{len(rows)} operators, {len(called)} of them called by Inductor; of these {len(taking)} take more than "
        f"{SMALL_BYTES >> 10} KiB beside their outputs, and plans count {len(taking) - len(missed)}"
        + (f", not {', '.join(missed)}" if missed else "")
    )


if __name__ == "__main__":
    sys.exit(main())
