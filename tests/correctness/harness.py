"""One way to ask whether a model trains as it does without us: `Case` says what is run, `check` compares.

A case is a function that gets `wrap` (what to do with a callable before it is called: nothing, plain torch.compile, or
ours) and returns what can be observed of some training steps: outputs, gradients, buffers, parameters.  The same
function runs under every setting, so the expected numbers never come from us.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import PlannerWarning

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Observed = Mapping[str, Any]

A_FRACTION_IS_MISSED = r"compile_remat: memory_budget = 0\.\d+ allows "
"""The warning for a fraction below the floor: the lowest plan runs."""

RUNS_UNFUSED = r"compile_remat: memory_budget may not hold, because compiler = 'eager'"
"""The warning of a budget, where Inductor does not run the plan."""

BUDGETS: Sequence[float | str] = ("min",)
"""The budgets of `make test`."""

MORE_BUDGETS: Sequence[float | str] = (0.5, "min")
"""The budgets of `make test` for the cases that stand for a kind, in eager mode."""

FULL_BUDGETS: Sequence[float | str] = ("max", 0.8, 0.5, 0.3, 0.2, "min")
"""The budgets of `make test-full`."""

KERNEL_ROUNDING = (1e-5, 5e-5)
"""Relative and absolute difference allowed in float32 between Inductor's kernels and eager ones: they add in another order,
and in which one depends on the CPU."""


@dataclass(frozen=True)
class Case:
    """A way to train something, and what its results are compared with.

    Attributes:
        run: Builds everything from the seed that `check` sets, wraps what is to be compiled, trains, and returns what it
            saw by name; tensors are compared by value, anything else by `==`.
        reference: `eager` for the truth itself; `compiled` for plain torch.compile with the same compiler, where numbers
            are drawn (Inductor draws others than eager mode does).
        plans: True if our planner must have run; False for inference and the like.
        rtol, atol: Largest difference allowed; None takes the default of `torch.testing` for the dtype, and
            `KERNEL_ROUNDING` between Inductor and eager mode.
        compilers: Values of the option `compiler` that the case runs with.
        options: Further options of the backend, beside `memory_budget` and `compiler`.
        is_full: True if the case runs with `--full` alone, as a variant of another case.
    """

    name: str
    run: Callable[[Wrap], Observed]
    reference: str = "eager"
    plans: bool = True
    rtol: float | None = None
    atol: float | None = None
    compilers: tuple[str, ...] = ("eager", "inductor")
    options: Mapping[str, Any] = field(default_factory=dict)
    is_full: bool = False

    def __str__(self) -> str:
        return self.name


def check(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    """Run the case under each budget; everything observed must equal the reference, and no fallback may help."""
    expected = observe(case, reference_wrap(case.reference, compiler))
    for budget in budgets:
        compile_remat.reset_reports()
        options = {"memory_budget": budget, "compiler": compiler, **case.options}
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlannerWarning)
            warnings.filterwarnings("ignore", A_FRACTION_IS_MISSED, PlannerWarning)
            warnings.filterwarnings("ignore", RUNS_UNFUSED, PlannerWarning)
            actual = observe(case, functools.partial(_ours, options))
        assert any(r.status != "NOT_PLANNED" for r in compile_remat.reports()) == case.plans, (
            "the planner ran" if not case.plans else "no graph was planned"
        )
        _compare(actual, expected, case, compiler, f"{case.name}, {compiler}, memory_budget {budget}")


def _ours(options: Mapping[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=remat, options=dict(options))  # type: ignore[arg-type]


def _compare(actual: Observed, expected: Observed, case: Case, compiler: str, where: str) -> None:
    assert actual.keys() == expected.keys(), where
    is_rounded_otherwise = compiler == "inductor" and case.reference == "eager" and case.rtol is None
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert actual[name] == value, f"{where}: {name}"
            continue
        kernels = is_rounded_otherwise and value.dtype == torch.float32
        rtol, atol = KERNEL_ROUNDING if kernels else (case.rtol, case.atol)
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: f"{where}: {n}: {m}",
        )


def reference_wrap(reference: str, compiler: str) -> Wrap:
    """Returns plain torch's wrap: no compilation, Inductor, or the joint graph of `compiler="eager"` under torch's partitioner."""
    if reference == "eager":
        return lambda function: function
    if compiler == "inductor":
        return lambda function: torch.compile(function)
    return lambda function: torch.compile(function, backend=plain_eager())


def plain_eager() -> Any:
    """The backend behind `compiler="eager"` with torch's own partitioner."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )


def observe(case: Case, wrap: Wrap) -> Observed:
    """Everything that the case returns, and the final state of the random numbers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with without_caches():
        seen = {name: _keep(value) for name, value in case.run(wrap).items()}
    if case.reference == "compiled":
        seen["random state"] = torch.get_rng_state()
    torch.compiler.reset()
    return seen


def _keep(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def without_caches() -> Iterator[None]:
    """Compile anew: on a hit nothing of ours would run."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


# -- what most cases do -----------------------------------------------------------------------------------------------


def train(
    module: nn.Module,
    inputs: Sequence[Any],
    wrap: Wrap,
    *,
    steps: int = 2,
    loss: Callable[[Any], torch.Tensor] | None = None,
    learning_rate: float = 0.01,
) -> Observed:
    """Some steps of SGD; output and gradients of each step, gradients of the inputs that ask for one, state at the end."""
    call, loss = wrap(module), loss or weighted_sum
    optimizer = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad] or [torch.zeros(1)], lr=learning_rate
    )
    seen: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        output = call(*inputs)
        loss(output).backward()
        for k, tensor in enumerate(tensors_of(output)):
            seen[f"step {step} output {k}"] = _keep(tensor)
        for name, parameter in module.named_parameters():
            seen[f"step {step} gradient of {name}"] = None if parameter.grad is None else _keep(parameter.grad)
        for k, tensor in enumerate(tensors_of(inputs)):
            if tensor.is_leaf and tensor.requires_grad:
                seen[f"step {step} gradient of input {k}"] = None if tensor.grad is None else _keep(tensor.grad)
                tensor.grad = None
        optimizer.step()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        seen[f"final {name}"] = tensor
    return seen


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def weighted_sum(output: Any) -> torch.Tensor:
    """A loss that gives every element of every output its own gradient."""
    total = torch.zeros(())
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            flat = tensor.reshape(-1)
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            total = total + (flat.float() * torch.linspace(0.5, 1.5, max(1, flat.numel()))[: flat.numel()]).sum()
    return total


def attention_dtype() -> torch.dtype:
    """The most exact dtype in which plain torch.compile can train attention on CPU.

    Torch 2.11 gives its logsumexp a wrong dtype, float32, and its own Inductor then fails on float64.
    """
    q = torch.empty(1, 1, 4, 4, dtype=torch.float64, device="meta")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype
