"""Whether a program trains right under us, by two ways in.

`dynamo` goes through ``torch.compile``, as users do, against eager mode, or where numbers are drawn, against torch.compile
that recomputes nothing.  `graph` traces once without Dynamo and runs many plans of the one joint graph against that graph as it is,
which costs a tenth.  Both also force plans that no planner would choose: any legal plan must give the right gradients.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import fx
from torch._inductor.decomposition import select_decomp_table

import compile_remat
from compile_remat import _torch, partition
from compile_remat._torch_inductor import CustomPartitionerFn, compile_eager, compile_with_partitioner
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import load_device, make_cost_model
from compile_remat.errors import BudgetError, PlannerWarning
from compile_remat.passes import Plan, Planner, build_problem, extract
from tests.correctness.harness import Case, Observed, Wrap, observe, train, weighted_sum
from tests.fuzz.program import Program

TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2}
"""Largest difference from another way to compute the same, as a part of the largest element."""


@dataclass(frozen=True)
class Trial:
    """A program and how it is run.

    Attributes:
        entry: `graph` or `dynamo`.
        budgets: Values of `memory_budget`.
        masks: Seeds of the plans that are forced.
        dynamic: Whether sizes are symbols.
        compiler: `eager`, or with `dynamo` also `inductor`.
    """

    program: Program
    entry: str = "graph"
    budgets: tuple[float | str, ...] = ("max", "min")
    masks: tuple[int, ...] = (0,)
    dynamic: bool = False
    compiler: str = "eager"

    @property
    def tolerance(self) -> float:
        """That of the least exact type in the program."""
        dtypes = {leaf.dtype for leaf in self.program.leaves}
        dtypes |= {str(a) for top in self.program.body for op in top.walk() if op.kind == "to" for a in op.attrs}
        return max(value for dtype, value in TOLERANCES.items() if dtype in dtypes | {"float64"})

    def run(self) -> None:
        """AssertionError where anything differs."""
        if self.entry == "graph":
            check_graph(self)
        else:
            check_dynamo(self)


# -- plans that nobody would choose -----------------------------------------------------------------------------------


def random_plan(planner: Planner, seed: int) -> Plan:
    """A legal plan: what must be saved, and any part of what may be."""
    source = random.Random(seed)
    share = source.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    values = planner.problem.values
    mask = np.array([v.is_saveable and source.random() < share for v in values], dtype=bool)
    return planner.plan_of(mask | planner.pinned, None)


class Forced(CustomPartitionerFn):
    """A partitioner that takes the plan of a seed, for our entries to torch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split as the plan says."""
        joint = _prepare(gm, keywords)
        if not joint.has_backward:
            return _torch.torch_partition(gm, joint_inputs, **_shape_of_graph(keywords))
        return extract(joint, random_plan(_planner(joint), self.seed))

    def uuid(self) -> object:
        """Nothing is cached in these runs."""
        return self.seed


class Unplanned(CustomPartitionerFn):
    """Torch's partition that saves whatever the backward reads."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split, recomputing nothing."""
        modules: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
            gm, joint_inputs, **_shape_of_graph(keywords)
        )
        return modules

    def uuid(self) -> object:
        """Nothing is cached in these runs."""
        return type(self).__name__


def _shape_of_graph(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: keywords.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}


def _prepare(gm: fx.GraphModule, keywords: Mapping[str, Any]) -> _torch.Joint:
    return _torch.prepare(gm, **_shape_of_graph(keywords))


def _planner(joint: _torch.Joint) -> Planner:
    cost = make_cost_model("roofline", load_device("cpu"))
    return Planner(build_problem(joint, cost=cost, reference=_torch.torch_choice(joint)))


# -- comparing --------------------------------------------------------------------------------------------------------


def assert_same(actual: Observed, expected: Observed, tolerance: float, where: str) -> None:
    """Equal by name; the tolerance of a tensor is a part of its largest element, or of 1."""
    assert actual.keys() == expected.keys(), where
    for name, wanted in expected.items():
        found = actual[name]
        if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
            assert type(found) is type(wanted) and found == wanted, f"{where}: {name}: {found} instead of {wanted}"
            continue
        largest = float(wanted.abs().max()) if wanted.numel() and wanted.dtype.is_floating_point else 0.0
        atol = tolerance * (max(1.0, largest) if math.isfinite(largest) else 1.0)
        torch.testing.assert_close(
            found, wanted, rtol=0.0, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{where}: {n}: {m}"
        )


# -- through Dynamo ---------------------------------------------------------------------------------------------------


def check_dynamo(trial: Trial) -> None:
    """Two training steps under each budget, then under forced plans."""
    case = Case("fuzz", functools.partial(_train, trial), reference="compiled")
    expected = _expected(trial)
    for budget in trial.budgets:
        compile_remat.reset_reports()
        options = {"memory_budget": budget, "compiler": trial.compiler}
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlannerWarning)
            try:
                actual = observe(case, lambda f: torch.compile(f, backend=remat, options=options))  # noqa: B023
            except BudgetError as error:
                assert isinstance(budget, float) and error.budget_bytes < error.floor_bytes
                continue
        assert_promise_holds(budget)
        assert_same(actual, expected, trial.tolerance, f"memory_budget {budget}")
    for seed in trial.masks:
        actual = observe(case, functools.partial(_compiled, trial.compiler, Forced(seed)))
        assert_same(actual, expected, trial.tolerance, f"forced plan {seed}")


def _expected(trial: Trial) -> Observed:
    """Eager mode's numbers; where it would draw or round others, those of torch when it recomputes nothing.

    Torch's usual partition is no reference: it reads a buffer again that the forward has changed since (torch 2.13).
    """
    plain = replace(trial, program=trial.program.without_checkpoints())
    case = Case("fuzz", functools.partial(_train, plain), reference="compiled")
    if runs_in_eager_mode(trial.program):
        return observe(case, lambda function: function)
    return observe(case, functools.partial(_compiled, trial.compiler, Unplanned()))


def assert_promise_holds(budget: float | str) -> None:
    """Each graph has a report, and no predicted peak exceeds what was asked."""
    reports = compile_remat.reports()
    assert reports, "no graph was planned"
    for report in reports:
        assert report.budget == str(MemoryBudget.parse(budget))
        assert report.plan.is_feasible
        assert report.budget_bytes is None or report.predicted_peak_bytes <= report.budget_bytes


def _train(trial: Trial, wrap: Wrap) -> Observed:
    module, inputs = trial.program.module()
    with torch._dynamo.config.patch(assume_static_by_default=not trial.dynamic):
        return train(module, inputs, wrap, learning_rate=1e-3)


def _compiled(compiler: str, partitioner: CustomPartitionerFn, function: Callable[..., Any]) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if compiler == "eager":
            return compile_eager(gm, inputs, partitioner)
        return compile_with_partitioner(gm, inputs, partitioner, {}, guarded=True)

    return torch.compile(function, backend=backend)


def runs_in_eager_mode(program: Program) -> bool:
    """Whether eager mode gives the expected numbers: it draws none, and nothing is rounded coarsely on the way."""
    return not program.is_random and "bfloat16" not in repr(program)


# -- one joint graph, many plans --------------------------------------------------------------------------------------


@dataclass
class Traced:
    """What AOTAutograd made of a function, and what its graphs were called with."""

    budget: str
    joint: fx.GraphModule | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    primals: list[Any] = field(default_factory=list)
    tangents: dict[str, Any] = field(default_factory=dict)

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, ...]:
        """Keep the joint graph, and split it as a user of `compile_remat.partition` would."""
        self.joint, self.keywords = copy.deepcopy(joint), keywords
        return partition(joint, joint_inputs, memory_budget=self.budget, **keywords)

    def forward(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """Keep the inputs as they were before the graph could change them."""

        def run(*inputs: Any) -> Any:
            self.primals = _copies(inputs)
            return graph(*inputs)

        return make_boxed_func(run)

    def backward(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """Keep the tangents."""
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]

        def run(*inputs: Any) -> Any:
            given = {n: v for n, v in zip(names, inputs, strict=True) if n.startswith("tangents")}
            self.tangents = dict(zip(given, _copies(given.values()), strict=True))
            return graph(*inputs)

        return make_boxed_func(run)


def check_graph(trial: Trial) -> None:
    """One plan through AOTAutograd against eager mode; then each plan's two graphs against the joint graph itself."""
    program, traced = trial.program, Traced("min" if "min" in trial.budgets else "max")
    call = aot_function(
        program.function(),
        fw_compiler=traced.forward,
        bw_compiler=traced.backward,
        partition_fn=traced.partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
        dynamic=trial.dynamic,
    )
    compile_remat.reset_reports()
    actual = _step(program, call)
    if runs_in_eager_mode(program):
        assert_same(actual, _step(program, program.function()), trial.tolerance, "against eager mode")
    assert traced.joint is not None
    assert_promise_holds(traced.budget)
    expected = _run_joint(traced)
    joint = _prepare(copy.deepcopy(traced.joint), traced.keywords)
    planner = _planner(joint)
    for where, plan in _plans(planner, trial):
        modules = extract(joint, plan)
        assert_follows(modules, planner, plan, where)
        assert_same(_run_split(traced, *modules), expected, trial.tolerance, where)


def _step(program: Program, call: Callable[..., Any]) -> Observed:
    leaves = program.tensors()
    outputs = call(*leaves)
    weighted_sum(outputs).backward()
    seen: dict[str, Any] = {f"output {k}": _copy(tensor) for k, tensor in enumerate(outputs)}
    for leaf, tensor in zip(program.leaves, leaves, strict=True):
        seen[leaf.name] = _copy(tensor)
        seen[f"gradient of {leaf.name}"] = _copy(tensor.grad)
    return seen


def _plans(planner: Planner, trial: Trial) -> Iterator[tuple[str, Plan]]:
    for budget in trial.budgets:
        if budget == "max":
            yield "max", planner.reference()
        elif budget == "min":
            yield "min", planner.lowest()
        else:
            budget_bytes = int(float(budget) * planner.fastest().peak_bytes)
            plan = planner.within(budget_bytes)
            assert plan.is_feasible == (plan.peak_bytes <= budget_bytes)
            assert plan.is_feasible or planner.lowest().peak_bytes > budget_bytes
            yield f"memory_budget {budget}", plan
    for seed in trial.masks:
        yield f"forced plan {seed}", random_plan(planner, seed)


def assert_follows(modules: tuple[fx.GraphModule, fx.GraphModule], planner: Planner, plan: Plan, where: str) -> None:
    """The backward computes those values that the plan recomputes, and no other."""
    forward, backward = modules
    forward.graph.lint()
    backward.graph.lint()
    if not any(node.users for node in backward.graph.nodes if node.name.startswith("tangents")):
        # Where all gradients are constants, torch 2.13 leaves random nodes without a reader in the backward; so does
        # its own partition.
        backward.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        backward.recompile()
    values = {v.name for v in planner.problem.values}
    computed = {node.name for node in backward.graph.nodes if node.op == "call_function"} & values
    wrong = sorted(computed ^ set(plan.recomputed))
    assert not wrong, f"{where}: the backward is not the planned one\n{wrong} are computed against the plan, or missing"


class _Whole(fx.Interpreter):
    """Runs a joint graph with its writes into inputs put off to the end: the backward reads what the forward read."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.writes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy_.default:
            self.writes.append((args[0], args[1].clone()))
            return args[1]
        return super().call_function(target, args, kwargs)


def _run_joint(traced: Traced) -> Observed:
    assert traced.joint is not None
    primals = _copies(traced.primals)
    torch.manual_seed(1)
    whole = _Whole(traced.joint)
    outputs = whole.run(*primals, *traced.tangents.values(), enable_io_processing=False)
    count = traced.keywords["num_fwd_outputs"]
    gradients = _copies(outputs[count:])
    for destination, source in whole.writes:
        destination.copy_(source)
    return _named([*_copies(outputs[:count]), *gradients], primals)  # an output may be an input that was written to


def _run_split(traced: Traced, forward: fx.GraphModule, backward: fx.GraphModule) -> Observed:
    primals = _copies(traced.primals)
    torch.manual_seed(1)
    with torch.no_grad():
        handed = list(forward(*primals))
        count = traced.keywords["num_fwd_outputs"]
        outputs = [_copy(value) for value in handed[:count]]
        names = [getattr(node, "name", "") for node in forward.graph.output_node().args[0]]
        known = {**dict(zip(names[count:], handed[count:], strict=True)), **traced.tangents}
        places = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
        outputs += backward(*[known[name] for name in places])
    return _named(outputs, primals)


def _named(outputs: Sequence[Any], primals: Sequence[Any]) -> Observed:
    seen = {f"result {k}": value for k, value in enumerate(outputs)}
    seen.update({f"input {k} afterwards": value for k, value in enumerate(primals)})
    return {**seen, "random state": torch.get_rng_state()}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _copies(values: Iterable[Any]) -> list[Any]:
    return [_copy(value) for value in values]
