"""Problems of graphs that can be checked by hand: unit costs, and 512 x 512 float32 is 1 MiB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from expecttest import assert_expected_inline
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat._torch.codegen_rules import InductorRules, RulesOf, inductor_rules
from compile_remat._torch.fake import say_device
from compile_remat._torch.joint_graph import prepare
from compile_remat._torch.version import torch_version
from compile_remat.cost_models import Roofline, UnitCost, load_device
from compile_remat.passes import Planner, Problem, build_problem
from compile_remat.passes.graph import build
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, REDUCTION, SAVE, SCATTER
from tests.passes.joint import joint_of

MIB = 1 << 20
aten = torch.ops.aten


def problem_of(
    function: Callable[..., Any],
    *arguments: Tensor,
    decompose: bool = True,
    cost: Any = None,
    rules: RulesOf = inductor_rules,
    on_gpu: bool = False,
) -> Problem:
    """The problem of a function's joint graph."""
    traced = joint_of(function, *arguments, decompositions=None if decompose else {})
    if on_gpu:
        say_device(traced.module, torch.device("cuda", 0))
    return build_problem(traced.module, num_fwd_outputs=traced.num_fwd_outputs, cost=cost or UnitCost(), rules=rules)


def table(problem: Problem) -> str:
    """One line a node: name, kernel, MiB, what it reads, and what is special."""
    lines = []
    for v in problem.values:
        marks = [m for m, is_so in (("output", v.is_output), ("backward only", not v.in_forward)) if is_so]
        marks += [v.pin] if v.pin != "free" else []
        reads = " ".join(problem.values[i].name for i in v.reads)
        lines.append(
            f"{v.name}: {v.kernel} {v.nbytes / MIB:g} MiB, {v.time_ns} ns ({reads}) {' '.join(marks)}".rstrip()
        )
    for s in problem.steps:
        reads = " ".join([problem.values[i].name for i in s.reads] + [problem.steps[i].name for i in s.gradients])
        lines.append(
            f"> {s.name}: {s.kernel} {s.nbytes / MIB:g} MiB ({reads}) {'output' if s.is_output else ''}".rstrip()
        )
    return "\n".join(lines)


def weights(count: int = 1, size: int = 512) -> Sequence[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, size, requires_grad=True) for _ in range(count)]


def test_golden_of_two_layers() -> None:
    problem = problem_of(lambda x, w1, w2: ((x @ w1).relu() @ w2).sin(), *weights(3))
    assert_expected_inline(
        table(problem),
        """\
mm: extern 1 MiB, 1 ns ()
relu: pointwise 1 MiB, 1 ns (mm)
mm_1: extern 1 MiB, 1 ns (relu)
sin: pointwise 1 MiB, 1 ns (mm_1) output
cos: pointwise 1 MiB, 1 ns (mm_1) backward only
le: pointwise 0.25 MiB, 1 ns (relu) backward only
scalar_tensor: constant 3.8147e-06 MiB, 0 ns () backward only
> mul: pointwise 1 MiB (cos)
> mm_2: extern 1 MiB (relu mul) output
> mm_3: extern 1 MiB (mul)
> where: pointwise 1 MiB (le scalar_tensor mm_3)
> mm_4: extern 1 MiB (where) output
> mm_5: extern 1 MiB (where) output
> output: constant 0 MiB (mm_2 mm_4 mm_5)""",
    )


def test_golden_of_a_layer_norm() -> None:
    problem = problem_of(lambda x, w: torch.nn.functional.layer_norm(x @ w, (512,)).sum(), *weights(2))
    assert_expected_inline(
        table(replace(problem, steps=())),
        """\
mm: extern 1 MiB, 1 ns ()
native_layer_norm: reduction 0 MiB, 1 ns (mm)
getitem: item 1 MiB, 0 ns (native_layer_norm)
getitem_1: item 0.00195312 MiB, 0 ns (native_layer_norm) backward only
getitem_2: item 0.00195312 MiB, 0 ns (native_layer_norm) backward only
sum_1: reduction 3.8147e-06 MiB, 1 ns (getitem) output
sub: pointwise 1 MiB, 1 ns (mm getitem_1) backward only
mul: pointwise 1 MiB, 1 ns (getitem_2 sub) backward only
div: pointwise 0.00195312 MiB, 1 ns (getitem_2) backward only""",
    )


def test_views_are_seen_through() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).view(2, 256, 512).unbind(0)
        return (a.t() @ b).sin()

    problem = problem_of(function, *weights(2))
    kernels = {v.kernel for v in problem.values}
    assert "item" not in kernels  # the items of unbind are views of the product
    second = next(v for v in problem.values if v.name == "mm_1")
    assert [problem.values[i].name for i in second.reads] == ["mm"]


def test_backward_only_values_stand_right_behind_what_they_read() -> None:
    def function(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return ((x @ w1).relu() @ w2).relu()

    problem = problem_of(function, *weights(3))
    masks = [v for v in problem.values if not v.in_forward]
    assert masks
    for mask in masks:
        behind = max((problem.values[i].position for i in mask.reads), default=-1)
        between = [v for v in problem.values if v.in_forward and behind < v.position < mask.position]
        assert not between, (mask.name, [v.name for v in between])


def test_items_of_one_kernel_share_its_pin_and_carry_the_bytes() -> None:
    problem = problem_of(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, True).cos(), *weights(1), decompose=False)
    tuples = [v for v in problem.values if v.name.startswith("native_dropout")]
    items = [v for v in problem.values if v.kernel == "item"]
    assert tuples[0].nbytes == 0 and not tuples[0].is_saveable
    assert {v.nbytes for v in items} == {MIB, MIB // 4}  # values, and a byte for each element of the mask
    assert all(v.pin == SAVE for v in items)


def test_a_constant_that_a_product_reads_is_a_buffer_that_may_be_saved() -> None:
    """Writing it again costs more than keeping it; what fused kernels read is made in registers."""

    def function(x: Tensor) -> Tensor:
        return torch.mm(x, x.new_ones(x.shape)).sin() * x.new_full((512,), 0.5)

    problem = problem_of(function, *weights(1), cost=Roofline(load_device("cpu")))
    written, inlined = (v for v in problem.values if v.name.startswith(("full", "new")))
    assert (written.kernel, written.is_saveable, written.nbytes) == ("pointwise", True, MIB) and written.time_ns > 0
    assert (inlined.kernel, inlined.is_saveable, inlined.time_ns) == ("constant", False, 0)


def test_symbolic_sizes_add_no_guards() -> None:
    seen: list[tuple[int, int, int]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def spy(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
            env = next(s for s in joint_inputs[0] if isinstance(s, torch.SymInt)).node.shape_env
            before = len(env.guards)
            problem = build_problem(joint, num_fwd_outputs=num_fwd_outputs, cost=Roofline(load_device("cpu")))
            seen.append((before, len(env.guards), max(v.nbytes for v in problem.values)))
            return min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

        return aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=spy)(gm, example_inputs)

    weight = torch.randn(512, 512, requires_grad=True)
    torch.compiler.reset()
    torch.compile(lambda x: (x @ weight).sin().sum(), backend=backend, dynamic=True)(torch.randn(512, 512))
    assert seen[0][0] == seen[0][1]
    assert seen[0][2] == MIB


def test_operators_without_a_formula_are_named_and_not_free() -> None:
    cost = Roofline(load_device("h100-sxm"))
    problem = problem_of(lambda x, w: (x @ w).sort()[0].sin(), *weights(2), cost=cost)
    assert problem.estimated == ("aten.sort.default",)
    (sort,) = (value for value in problem.values if value.name.startswith("sort"))
    assert sort.time_ns > cost.launch_time_ns
    assert Problem.from_json(problem.to_json()) == problem
    assert replace(problem, estimated=()).key() == problem.key()
    assert problem_of(lambda x, w: (x @ w).sin(), *weights(2), cost=cost).estimated == ()


def test_an_output_knows_who_reads_the_gradient_that_comes_in() -> None:
    """Tangents come in their outputs' order; the sigmoid's is read by its own backward."""

    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        return hidden.sum(), torch.sigmoid(hidden)

    problem = problem_of(two, torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
    found = {v.name: [problem.steps[b].name for b in v.gradient_readers] for v in problem.values if v.is_output}
    assert found == {"sum_1": ["add"], "sigmoid": ["mul_1"]}


# -- concatenations ---------------------------------------------------------------------------------------------------


def test_what_is_concatenated_lies_in_it_and_a_saved_part_tells_its_order() -> None:
    def skip(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        around = (torch.conv2d(x, w, padding=1) * 2.0).sin()
        return torch.conv2d(
            torch.cat([around.mean((2, 3), keepdim=True).expand_as(around).cos(), around], 1), v, padding=1
        )

    problem = problem_of(
        skip, torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3), torch.randn(4, 8, 3, 3).requires_grad_()
    )
    (whole,) = [v for v in problem.values if v.name.startswith("cat")]
    names = [problem.values[i].name for i in whole.parts]
    assert names == ["sin", "cos"]  # each has a place in it
    is_known = not inductor_rules("cpu").gradients_read_eager_strides  # by "sin", made from a convolution's output
    assert [problem.values[i].name for i in whole.ordered_by] == (["sin"] if is_known else [])
    assert whole.transient_bytes == whole.nbytes  # the copy that convolution gets


def test_what_is_read_by_strides_is_written_to_memory() -> None:
    """So the kernel of what reads it reads one buffer instead of three, and is not too large to be run twice."""

    def scaled(view: Callable[[Tensor], Tensor], x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        y = x * view(a * b * c) + d
        return y.sin() @ d * y

    for view, is_written in ((lambda t: t.as_strided((512, 512), (512, 1)), False), (lambda t: t.view(512, 512), True)):
        problem = problem_of(partial(scaled, view), *weights(5))
        (y,) = [v for v in problem.values if v.name == "add"]
        assert y.realised == is_written


# -- rules of Inductor ------------------------------------------------------------------------------------------------


def materialised(problem: Problem) -> set[str]:
    return {v.name for v in problem.values if v.realised}


def test_the_users_thresholds_change_what_is_materialised() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (x + a + b + c) @ x

    assert materialised(problem_of(function, *weights(4))) == set()
    with torch._inductor.config.patch(realize_acc_reads_threshold=3):
        assert "add_2" in materialised(problem_of(function, *weights(4)))  # x + a + b + c has four reads


def test_a_sum_that_becomes_an_addmm_is_in_memory() -> None:
    """An unfused kernel computes the gradient of y, so no kernel holds it in registers (zoo, pinn_burgers at `min`: 57.3 MB)."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.tanh(x)
        return (y @ w) * (y @ v)

    (total,) = [step for step in problem_of(function, *weights(3)).steps if step.name == "add"]
    assert total.realised


def test_each_device_has_its_own_rules() -> None:
    """Two read the exponential: C++ writes it to memory, Triton does not; the device need not be here."""
    asked: list[str] = []

    def as_triton(device_type: str) -> InductorRules:
        asked.append(device_type)
        return inductor_rules("cuda")

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        return (y @ x) * y

    module = joint_of(function, *weights(1), decompositions={}).module
    found = [
        build_problem(module, num_fwd_outputs=1, cost=UnitCost(), rules=rules) for rules in (inductor_rules, as_triton)
    ]
    assert [("exp" in materialised(problem)) for problem in found] == [True, False]
    assert asked == ["cpu"]  # once


def test_rows_are_padded_where_inductor_chooses_the_strides() -> None:
    """On a GPU: not what is returned, nor what another operator than a product reads, nor what leads to a convolution."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        read_by_sort, leads = x.sin(), x.cos()
        kept = F.conv2d(leads.tanh()[None, None], w[:3, :3][None, None])[0, 0].sum()
        product = x.sigmoid() @ x.erf()
        return product.sum() + read_by_sort.sort()[0].sum() + kept, x.exp()

    def padded(device_type: str) -> InductorRules:
        return replace(inductor_rules("cuda"), padded_above=500, padding_bytes=4096)

    problem = problem_of(function, *weights(2), rules=padded)
    by_name = {value.name: value.nbytes / MIB for value in problem.values}
    written = {name: round(by_name[name], 2) for name in ("sin", "cos", "tanh", "sigmoid", "erf", "exp")}
    assert written == {"sin": 1, "cos": 1, "tanh": 1, "sigmoid": 2, "erf": 2, "exp": 1}


def test_the_gpus_allocator_hands_out_blocks_of_512_bytes() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().exp().sum()

    here, there = (problem_of(function, torch.ones(3, 43, requires_grad=True), on_gpu=gpu) for gpu in (False, True))
    for own, blocks in zip((*here.values, *here.steps), (*there.values, *there.steps), strict=True):
        assert blocks.nbytes == -(-own.nbytes // 512) * 512
    assert {value.nbytes for value in here.values} >= {4, 516}


def test_prices_count_bytes_and_not_blocks() -> None:
    class Bytes(UnitCost):
        def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
            return nbytes

    def function(x: Tensor) -> Tensor:
        return x.sin().exp().sum()

    x = torch.ones(3, 43, requires_grad=True)
    here, there = (problem_of(function, x, on_gpu=on_gpu, cost=Bytes()) for on_gpu in (False, True))
    assert here.step_time_ns == there.step_time_ns
    assert [value.save_time_ns for value in here.values] == [value.save_time_ns for value in there.values]


def test_a_fused_scatter_needs_one_buffer() -> None:
    """The zeros that it starts from have none of their own; on a GPU, where it is no call of ATen's, nor has what it adds."""

    def gathered(x: Tensor, i: Tensor) -> Tensor:
        return torch.gather(x.sin(), 0, i).exp()

    peaks = []
    for device in ("cpu", "cuda"):
        with torch._inductor.config.patch({"cpp.threads": 2}):  # one thread has a fused kernel
            rules = inductor_rules(device)
        index = torch.zeros(512, 512, dtype=torch.int64)
        problem = problem_of(gathered, *weights(1), index, rules=lambda device_type, rules=rules: rules)
        (scatter,) = [step for step in problem.steps if step.name == "scatter_add"]
        assert scatter.kernel == (SCATTER if device == "cuda" else EXTERN)
        (zeros,) = [value for value in problem.values if value.kernel == CONSTANT]
        assert not zeros.is_saveable
        peaks.append(Planner(problem).lowest().peak_bytes / MIB)
    assert peaks == [3, 3]


def test_a_short_sum_is_no_reduction() -> None:
    """One of eight elements is."""

    def summed(x: Tensor, w: Tensor, *, rows: int) -> Tensor:
        return (x[: rows * 64].view(rows, -1) * w[: rows * 64].view(rows, -1)).sum(0).exp()

    for rows, kernel in ((1, POINTWISE), (7, POINTWISE), (8, REDUCTION)):
        values = problem_of(partial(summed, rows=rows), *weights(2)).values
        assert [value.kernel for value in values if value.name.startswith("sum")] == [kernel]


def test_a_constant_that_is_scattered_into_itself_is_written() -> None:
    """Zeros that are the start and the elements alike: ATen's kernel reads these from memory."""

    def scattered(x: Tensor, i: Tensor) -> Tensor:
        zeros = torch.zeros(512, 512)
        return torch.scatter_reduce(zeros, 0, i, zeros, "amax") * x

    index = torch.zeros(512, 512, dtype=torch.int64)
    values = problem_of(scattered, *weights(1), index).values
    assert not [value for value in values if value.kernel == CONSTANT]


def test_a_part_that_others_read_lies_in_what_a_product_reads() -> None:
    """On a GPU: from torch 2.13 on Inductor computes it there, else the concatenation is computed by a kernel of its own."""

    def skip(x: Tensor, w: Tensor, *, is_shared: bool) -> Tensor:
        part = x + 1.0
        y = torch.cat([part, w]) @ w
        return y.sum() + (part @ w).sum() if is_shared else y

    for is_shared in (True, False):
        problem = problem_of(
            partial(skip, is_shared=is_shared), *weights(2), rules=lambda device: inductor_rules("cuda")
        )
        (whole,) = [v for v in problem.values if v.name == "cat"]
        assert [problem.values[i].name for i in whole.parts] == (
            ["add"] if is_shared and torch_version() >= (2, 13) else []
        )


def test_parts_that_are_in_memory_lie_in_their_concatenation() -> None:
    """On a GPU: a sum that two read is in memory if it reads many buffers, and Inductor then copies no part."""

    def skip(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        part = sum(others, x)
        return (torch.cat([part, w @ w]) @ w).sum() + (part @ w).sum()

    rules = replace(inductor_rules("cuda"), concatenates_shared=False)
    for num_others, parts in ((4, ["add_3"]), (3, [])):
        problem = problem_of(skip, *weights(2 + num_others), rules=lambda device: rules)
        (whole,) = [v for v in problem.values if v.name == "cat"]
        assert [problem.values[i].name for i in whole.parts] == parts


def test_numbers_that_depend_on_their_kernel_are_not_drawn_again() -> None:
    """Inductor's Triton code of 2.13: a reduction in the backward would draw another mask than the forward's pointwise kernel."""

    def dropout(x: Tensor) -> Tensor:
        seed = torch.ops.prims.inductor_lookup_seed(torch.ops.prims.inductor_seeds(1, x.device), 0)
        return x.sin() * (torch.ops.prims.inductor_random(x.shape, seed, "rand") > 0.5)

    for draws_by_kernel in (False, True):
        rules = replace(inductor_rules("cuda"), draws_by_kernel=draws_by_kernel)
        problem = problem_of(dropout, *weights(1), rules=lambda device_type, rules=rules: rules)
        (drawn,) = [value for value in problem.values if value.name.startswith("inductor_random")]
        assert (drawn.pin == SAVE) == draws_by_kernel
    assert not inductor_rules("cpu").draws_by_kernel


def test_a_builder_reads_its_graph_and_asks_for_workspaces_once() -> None:
    asked: list[str] = []

    def workspace(node: fx.Node, rules: RulesOf) -> int:
        asked.append(node.name)
        return len(node.name)

    prepared = prepare(
        joint_of(lambda x, weight: x.tanh() @ weight, *weights(2), decompositions={}).module, num_fwd_outputs=1
    )
    builder = build.ProblemBuilder(prepared, UnitCost(), workspace)
    first, second = builder.build(), builder.build()
    assert len(asked) == len(set(asked)) > 0
    assert first == second == build_problem(prepared, cost=UnitCost(), workspace=workspace)
