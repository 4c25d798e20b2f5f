"""One joint graph, many plans: each plan's two graphs against the joint graph itself."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from hypothesis import assume
from torch import fx
from torch._inductor.decomposition import select_decomp_table

import compile_remat
from compile_remat import partition
from compile_remat._torch.offload.offload_ops import ARRIVE
from compile_remat.passes import Plan, Planner, extract
from compile_remat.passes.problem.problem import CONSTANT
from tests.correctness.harness import Observed, weighted_sum
from tests.fuzz import partitioners
from tests.fuzz.agreement import assert_promise_holds, assert_same
from tests.fuzz.partitioners import planner_of, prepare
from tests.fuzz.program import Program
from tests.fuzz.trial import Trial


@dataclass
class Traced:
    """The joint graph that AOTAutograd made of a function, and the arguments of its graphs."""

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
        """Run the forward, and keep copies of the inputs made before the graph could change them."""

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
    try:
        actual = _step(program, call)
    except KeyError as error:
        # Torch 2.13: sizes of a complex FFT of what a batch norm returns, before any partitioner is called.
        assume(not any("_tensorify_python_scalars" in f.filename for f in traceback.extract_tb(error.__traceback__)))
        raise
    if trial.follows_eager_mode:
        assert_same(actual, _step(program, program.function()), trial.tolerance, "against eager mode")
    assert traced.joint is not None
    assert_promise_holds(traced.budget)
    expected = _run_joint(traced)
    joint = prepare(copy.deepcopy(traced.joint), traced.keywords)
    planner = planner_of(joint)
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
            yield "max", planner.no_worse_than_torch()
        elif budget == "min":
            yield "min", planner.lowest()
        else:
            budget_bytes = int(float(budget) * planner.fastest().peak_bytes)
            plan = planner.within(budget_bytes)
            assert plan.is_feasible == (plan.peak_bytes <= budget_bytes)
            assert plan.is_feasible or planner.lowest().peak_bytes > budget_bytes
            yield f"memory_budget {budget}", plan
    for seed in trial.masks:
        yield f"forced plan {seed}", partitioners.random_plan(planner, seed, moves=not trial.dynamic)


def assert_follows(modules: tuple[fx.GraphModule, fx.GraphModule], planner: Planner, plan: Plan, where: str) -> None:
    """The backward computes those values that the plan recomputes, and no other.

    No plan speaks of the constants that scatters start from: Inductor computes them where these write.
    """
    forward, backward = modules
    forward.graph.lint()
    backward.graph.lint()
    if not any(node.users for node in backward.graph.nodes if node.name.startswith("tangents")):
        # If all gradients are constants, torch 2.13 leaves random nodes without a reader in the backward; so does
        # its own partition.
        backward.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        backward.recompile()
    problem = planner.problem
    read = {i for reader in (*problem.values, *problem.steps) for i in reader.reads}
    values = {v.name for i, v in enumerate(problem.values) if v.kernel != CONSTANT or i in read}
    calls = [node for node in backward.graph.nodes if node.op == "call_function" and node.target is not ARRIVE]
    computed = {node.name for node in calls} & values
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
