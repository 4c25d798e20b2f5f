"""Torch's own helpers as we use them: sizes, mutation, tags, names, and torch's own graphs from torch's own choice."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_remat._torch import joint_graph, sizes
from compile_remat.inductor import inductor_options
from compile_remat.inductor.peek import look_at_joint_graph

T = TypeVar("T")


pytestmark = pytest.mark.usefixtures("fresh")


def look(inspect: Callable[..., T], function: Callable[..., Any], *inputs: torch.Tensor, **compile_args: Any) -> T:
    """Returns `inspect(joint, **keywords)` for the joint graph of a call, called in place of a partitioner."""
    from torch._dynamo.backends.common import aot_autograd

    seen: list[T] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        keywords = {k: keywords.get(k) for k in ("num_fwd_outputs", "static_lifetime_input_indices")}
        seen.append(inspect(copy.deepcopy(joint), **keywords))
        return joint_graph.torch_partition(joint, joint_inputs, **keywords)

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, keep_inference_input_mutations=True
    )
    torch.compile(function, backend=backend, **compile_args)(*inputs)
    (found,) = seen
    return found


class Doubled(torch.nn.Module):
    """A module whose exported graph takes a tree of arguments."""

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2 * given["x"]


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_copied_graph_is_one_of_its_own_and_warns_of_nothing() -> None:
    traced = make_fx(Doubled())({"x": grad(3)})
    exported = torch.export.export(Doubled(), ({"x": torch.ones(3)},)).module()
    assert isinstance(exported, fx.GraphModule)
    for module in (traced, exported):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copied = joint_graph.copied_graph(module)
        assert copied.code == module.code
        assert not set(copied.graph.nodes) & set(module.graph.nodes)
        pairs = zip(copied.graph.nodes, module.graph.nodes, strict=True)
        kept = [(new.name, new.meta) == (old.name, old.meta) for new, old in pairs]
        assert kept and all(kept)
        copied.graph.erase_node(copied.graph.output_node())
        assert module.graph.output_node().op == "output"


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.empty(4, 8), 128),
        (torch.empty(4, 8, dtype=torch.bfloat16), 64),
        (torch.empty(4, 8, dtype=torch.bool), 32),
        (torch.empty(()), 4),
        (torch.empty(4, 8).t(), 128),
        (torch.empty(4, 8)[:, :2], (3 * 8 + 2) * 4),
        (torch.empty(8)[::2], 7 * 4),
        (torch.empty(8).expand(5, 8), 32),
        (torch.empty_strided((2, 2), (100, 1)), 102 * 4),
        (torch.empty(0, 8), 0),
        (torch.empty(8, 0).t(), 0),
        (torch.empty(4, 8, device="meta"), 128),
    ],
)
def test_bytes_of_a_storage(tensor: torch.Tensor, nbytes: int) -> None:
    assert sizes.storage_nbytes(tensor) == nbytes


@pytest.mark.parametrize("value", [None, 7, (torch.empty(4),), [torch.empty(4)]])
def test_what_is_no_tensor_has_no_bytes(value: object) -> None:
    assert sizes.storage_nbytes(value) == 0


# -- facts of a joint graph -------------------------------------------------------------------------------------------


def mutated(joint: fx.GraphModule, **keywords: Any) -> list[fx.Node]:
    return list(joint_graph.mutated_inputs(joint_graph.prepare(joint, **keywords)))


def test_mutated_inputs_are_found() -> None:
    def mutates(x: torch.Tensor, count: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * table
        count.add_(1)
        return y

    (node,) = look(mutated, mutates, grad(4), torch.zeros(4), torch.ones(4))
    assert node.op == "placeholder"
    assert torch.ops.aten.add.Tensor in {user.target for user in node.users}


def test_mutated_inputs_of_batch_norm_are_its_statistics() -> None:
    nodes = look(mutated, torch.nn.BatchNorm2d(3), grad(2, 3, 4, 4))
    assert sorted(tuple(n.meta["val"].shape) for n in nodes) == [(), (3,), (3,)]


def test_nothing_is_mutated_in_a_pure_function() -> None:
    assert look(mutated, lambda x, y: torch.sin(x) * y, grad(4), torch.ones(4)) == []


def test_policies_are_the_users_tags() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for policy, expected in [
        (torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE, "save"),
        (torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE, "recompute"),
        (torch.utils.checkpoint.CheckpointPolicy.PREFER_SAVE, None),
        (torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, None),
        (None, None),
    ]:
        node.meta["recompute"] = policy
        assert joint_graph.policy_of(node) == expected
    del node.meta["recompute"]
    assert joint_graph.policy_of(node) is None


@pytest.mark.parametrize("has_tangent", [False, True])
def test_a_graph_without_a_tangent_has_no_backward(has_tangent: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    y = graph.create_node("call_function", torch.ops.aten.sin.default, (x,), name="y")
    outputs: list[fx.Node | None] = [y, None]
    if has_tangent:
        tangent = graph.placeholder("tangents_1")
        outputs[1] = graph.create_node("call_function", torch.ops.aten.mul.Tensor, (tangent, 2), name="dx")
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    graph.output(tuple(outputs)).meta["desc"] = [None, None]
    joint = joint_graph.prepare(fx.GraphModule({}, graph), num_fwd_outputs=1)
    assert joint.has_backward == has_tangent
    assert len(joint.fwd_outputs) == 1
    assert len(joint.bwd_outputs) == has_tangent


# -- names -----------------------------------------------------------------------------------------------


def test_inductor_options_and_modes_are_known() -> None:
    assert {"max_fusion_size", "triton.cudagraphs"} <= set(inductor_options.inductor_option_names())
    assert {"default", "reduce-overhead", "max-autotune"} <= set(inductor_options.mode_names())
    assert inductor_options.mode_options(None) == inductor_options.mode_options("default") == {}
    assert inductor_options.mode_options("reduce-overhead") == {"triton.cudagraphs": True}


# -- torch's own choice gives torch's own graphs ----------------------------------------------------------------------


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w).view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True)).sum((1, 2))


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.layer_norm(torch.relu(x @ w), (24,)), 0.5)


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(normalised, x, w, use_reentrant=False) * 2


def mutating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(24)
    state.add_((x @ w).sum((0, 1)))
    return torch.sin(x @ w) * state


def alike(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The forward returns what the backward computes as well: versions differ in whether one may stand for the other."""
    with torch.no_grad():
        seen = torch.cos(x @ w)
    return torch.sin(x @ w), seen


def chosen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(normalised, x, w, use_reentrant=False, context_fn=save).sin()


def batch_normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(8), torch.ones(8)
    return (F.batch_norm(x, mean, var, training=True) @ w).relu() + mean.sum()


def pieces(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b, c = (x @ w).split(8, -1)
    deviation, mean = torch.std_mean(a, -1, keepdim=True)
    values, indices = torch.max(b, -1, keepdim=True)
    return (a - mean) / (deviation + 1) * values * torch.softmax(c, -1) + indices


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.conv1d(x, w.view(8, 8, 3), padding=1)
    return F.max_pool1d(F.silu(y), 2) * F.avg_pool1d(y, 2)


FUNCTIONS = [attention, normalised, checkpointed, mutating, alike, chosen, batch_normalised, pieces, convolved]


def assert_twins(joint: fx.GraphModule, budget: float = 1.0, **keywords: Any) -> None:
    """Our pipeline, handed what torch's chooser takes, gives the graphs of torch's partitioner.

    The names of a graph of varying sizes are ours, so torch gets the same ones.
    """
    named = copy.deepcopy(joint)
    if sizes.symbols_of(named.graph):
        named.graph.eliminate_dead_code()
        joint_graph.number_nodes(named.graph)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        theirs = joint_graph.torch_partition(named, [], **keywords)
    prepared = joint_graph.prepare(joint, **keywords)
    ours = joint_graph.extract_modules(prepared, joint_graph.torch_choice(prepared, budget))
    for our_graph, their_graph in zip(ours, theirs, strict=True):
        assert our_graph.print_readable(print_output=False) == their_graph.print_readable(print_output=False)
        our_graph.graph.lint()


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    ("function", "dynamic"),
    # attention's view has a fixed batch size
    [
        (function, dynamic)
        for function in FUNCTIONS
        for dynamic in (False, True)
        if function is not attention or not dynamic
    ],
)
def test_torchs_choice_gives_torchs_graphs(function: Callable[..., Any], dynamic: bool, budget: float) -> None:
    """The pipeline is torch's, step for step: only the choice is ours."""
    inspect = functools.partial(assert_twins, budget=budget)
    look(inspect, function, grad(2, 8, 8), grad(8, 24), dynamic=dynamic)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_after_inductors_own_passes(function: Callable[..., Any]) -> None:
    """After Inductor's passes, random numbers come from seeds, and patterns have been replaced."""
    seen: list[bool] = []

    class Twins(CustomPartitionerFn):
        def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
            keywords.pop("compiler")
            assert_twins(copy.deepcopy(joint), **keywords)
            seen.append(True)
            return joint_graph.torch_partition(joint, joint_inputs, **keywords)

        def uuid(self) -> str:
            return "twins"

        def __reduce__(self) -> Any:
            return (object, ())

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(
            graph,
            inputs,
            inner_compile=lambda graph, inputs, **_: make_boxed_func(graph.forward),
            config_patches={"custom_partitioner_fn": Twins()},
        )

    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(function, backend=backend)(grad(2, 8, 8), grad(8, 24))
    assert seen == [True]


@pytest.mark.skipif(not hasattr(joint_graph.P, "_is_assert_only_symbool"), reason="a rule of torch 2.13 and later")
def test_an_assertion_alone_hands_nothing_over() -> None:
    """A SymBool that only an assertion reads is dropped from what is saved."""

    def inspect(joint: fx.GraphModule, **keywords: Any) -> None:
        prepared = joint_graph.prepare(joint, **keywords)
        (checked,) = (n for n in joint.graph.nodes if n.target is torch.ops.aten._assert_scalar.default)
        truth = checked.args[0]
        assert isinstance(truth.meta["val"], torch.SymBool)
        forward, _ = joint_graph.extract_modules(prepared, [*joint_graph.torch_choice(prepared), truth])
        assert truth.name not in [n.name for n in forward.graph.output_node().all_input_nodes]

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        n = count.item()
        torch._check(n <= x.shape[0])
        return torch.sin(x[:n])

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        look(inspect, function, grad(8, 4), torch.tensor(3), dynamic=True)


def test_a_forward_function_without_dynamo() -> None:
    """`aot_function` gives no descriptors or static inputs: the pipeline does without."""
    seen: list[joint_graph.Joint] = []

    def keep(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        seen.append(joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs))
        return joint_graph.extract_modules(seen[0], joint_graph.torch_choice(seen[0]))

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    x = grad(4, 4)
    call = aot_function(lambda x: torch.sin(x @ x), fw_compiler=run, bw_compiler=run, partition_fn=keep)
    (gradient,) = torch.autograd.grad(call(x).sum(), x)
    (expected,) = torch.autograd.grad(torch.sin(x @ x).sum(), x)
    torch.testing.assert_close(gradient, expected)
    assert len(seen[0].fwd_outputs) == len(seen[0].bwd_outputs) == 1


# -- a look at the joint graph ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_look_at_the_joint_graph_compiles_nothing(compiler: str, has_gradient: bool) -> None:
    found: list[object] = []

    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def see(joint: fx.GraphModule, keywords: dict[str, Any]) -> tuple[int, int]:
            return len(joint.graph.find_nodes(op="placeholder")), keywords["num_fwd_outputs"]

        found.append(look_at_joint_graph(gm, example_inputs, see, {}, compiler))
        return gm.forward

    x = torch.randn(4, requires_grad=has_gradient)
    torch.compile(lambda x: x.sin().exp(), backend=backend)(x)
    assert found == [(2, 1) if has_gradient else None]  # the input and the tangent; one output


def test_an_error_while_looking_comes_out() -> None:
    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def see(joint: fx.GraphModule, keywords: dict[str, Any]) -> None:
            raise ZeroDivisionError("as planned")

        with pytest.raises(ZeroDivisionError, match="as planned"):
            look_at_joint_graph(gm, example_inputs, see, {})
        return gm.forward

    torch.compile(torch.sin, backend=backend)(grad(4))
