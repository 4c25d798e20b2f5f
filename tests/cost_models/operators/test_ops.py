"""Kinds, counts and bytes of nodes, on graphs that torch traced."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import fx
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from compile_remat.api import look
from compile_remat.cost_models import Op, OpKind, describe, op_kind
from compile_remat.cost_models.operators.kinds import DROPOUT_POSITION, RUNS_NO_KERNEL, target_facts

aten = torch.ops.aten
prims = torch.ops.prims


def trace(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def joint_graph(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The joint graph of `function`, as a partition function gets it."""
    caught: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        caught.append(joint)
        return default_partition(joint, joint_inputs, **kwargs)

    compiler = lambda module, _: make_boxed_func(module.forward)  # noqa: E731
    aot_function(function, compiler, compiler, partition_fn=partition, dynamic=dynamic)(*inputs)
    (joint,) = caught
    return joint


def node_of(module: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = [n for n in module.graph.nodes if n.target == target]
    return node


def op_of(module: fx.GraphModule, target: Any) -> Op:
    return describe(node_of(module, target))


def total_flops(module: fx.GraphModule) -> int:
    heavy = (OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION)
    return sum(op.flops for op in map(describe, module.graph.nodes) if op.kind in heavy)


# -- kinds ------------------------------------------------------------------------------------------------------------

X = torch.randn(4, 6)
IMAGE = torch.randn(2, 3, 8, 8)

KINDS = {
    OpKind.CONSTANT: [
        (lambda x: aten.full.default([2], 1.0), aten.full.default),
        (lambda x: aten.full_like.default(x, 1.0), aten.full_like.default),
        (lambda x: aten.arange.default(6), aten.arange.default),
        (lambda x: aten.zeros.default([2]), aten.zeros.default),
        (lambda x: aten.scalar_tensor.default(1.0), aten.scalar_tensor.default),
        (
            lambda x: prims.iota(6, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False),
            prims.iota.default,
        ),
    ],
    OpKind.VIEW: [
        (lambda x: aten.view.default(x, [24]), aten.view.default),
        (lambda x: aten._unsafe_view.default(x, [24]), aten._unsafe_view.default),
        (lambda x: aten.permute.default(x, [1, 0]), aten.permute.default),
        (lambda x: aten.t.default(x), aten.t.default),
        (lambda x: aten.transpose.int(x, 0, 1), aten.transpose.int),
        (lambda x: aten.expand.default(x[:1], [4, 6]), aten.expand.default),
        (lambda x: aten.slice.Tensor(x, 0, 1, 3), aten.slice.Tensor),
        (lambda x: aten.select.int(x, 0, 1), aten.select.int),
        (lambda x: aten.unsqueeze.default(x, 0), aten.unsqueeze.default),
        (lambda x: aten.squeeze.dim(x, 0), aten.squeeze.dim),
        (lambda x: aten.as_strided.default(x, [2, 2], [6, 1]), aten.as_strided.default),
        (lambda x: aten.alias.default(x), aten.alias.default),
        (lambda x: aten.split.Tensor(x, 2)[0], aten.split.Tensor),
        (lambda x: aten.split_with_sizes.default(x, [1, 3])[0], aten.split_with_sizes.default),
        (lambda x: aten.unbind.int(x)[0], aten.unbind.int),
        (lambda x: aten.diagonal.default(x), aten.diagonal.default),
        (lambda x: aten.view_as_real.default(x.to(torch.complex64)), aten.view_as_real.default),
        (lambda x: prims.split_dim.default(x, 1, 2), prims.split_dim.default),
    ],
    OpKind.POINTWISE: [
        (lambda x: x + x, aten.add.Tensor),
        (lambda x: x.exp(), aten.exp.default),
        (lambda x: x.relu(), aten.relu.default),
        (lambda x: F.gelu(x), aten.gelu.default),
        (lambda x: F.softplus(x), aten.softplus.default),
        (lambda x: torch.where(x > 0, x, x), aten.where.self),
        (lambda x: x > 0, aten.gt.Scalar),
        (lambda x: torch.maximum(x, x), aten.maximum.default),
        (lambda x: torch.max(x, x + 1), aten.maximum.default),
        (lambda x: x.clamp(min=0), aten.clamp.default),
        (lambda x: x.clone(), aten.clone.default),
        (lambda x: prims.convert_element_type.default(x, torch.bfloat16), prims.convert_element_type.default),
        (lambda x: x[(x[:, 0] > 0).long()], aten.index.Tensor),
        (lambda x: torch.cat([x, x]), aten.cat.default),
        (lambda x: x.index_select(0, (x[:, 0] > 0).long()), aten.index_select.default),
        (lambda x: x.gather(0, (x > 0).long()), aten.gather.default),
        (lambda x: F.embedding((x[0] > 0).long(), x), aten.embedding.default),
        (lambda x: aten.constant_pad_nd.default(x, [1, 1]), aten.constant_pad_nd.default),
        (lambda x: x.flip(0), aten.flip.default),
        (lambda x: x.repeat(2, 1), aten.repeat.default),
        (lambda x: x.roll(1), aten.roll.default),
        (lambda x: x.tril(), aten.tril.default),
        (lambda x: aten.slice_scatter.default(x, x[:1], 0, 0, 1), aten.slice_scatter.default),
        (lambda x: aten.threshold_backward.default(x, x, 0), aten.threshold_backward.default),
        (lambda x: aten.reshape.default(x.t(), [24]), aten.clone.default),
    ],
    OpKind.REDUCTION: [
        (lambda x: x.sum(), aten.sum.default),
        (lambda x: x.sum(1), aten.sum.dim_IntList),
        (lambda x: x.mean(1), aten.mean.dim),
        (lambda x: x.amax(1), aten.amax.default),
        (lambda x: torch.max(x), aten.max.default),
        (lambda x: torch.max(x, 1)[0], aten.max.dim),
        (lambda x: torch.var_mean(x, 1)[0], aten.var_mean.correction),
        (lambda x: x.argmax(1), aten.argmax.default),
        (lambda x: (x > 0).any(), aten.any.default),
        (lambda x: x.cumsum(0), aten.cumsum.default),
        (lambda x: x.softmax(1), aten._softmax.default),
        (lambda x: F.layer_norm(x, (6,)), aten.native_layer_norm.default),
        (lambda x: x.logsumexp(1), aten.logsumexp.default),
    ],
    OpKind.MATMUL: [
        (lambda x: x @ x.t(), aten.mm.default),
        (lambda x: torch.addmm(x[0, :4], x, x.t()), aten.addmm.default),
        (lambda x: torch.bmm(x[None], x.t()[None]), aten.bmm.default),
        (lambda x: torch.baddbmm(x[None, :, :4], x[None], x.t()[None]), aten.baddbmm.default),
        (lambda x: torch.mv(x, x[0]), aten.mv.default),
    ],
    OpKind.OTHER: [
        (lambda x: x.sort()[0], aten.sort.default),
        (lambda x: x.topk(2)[0], aten.topk.default),
        (lambda x: aten.index_put.default(x, [(x[:, 0] > 0).long()], x), aten.index_put.default),
        (lambda x: aten.scatter_add.default(x, 0, (x > 0).long(), x), aten.scatter_add.default),
        (lambda x: torch.fft.fft(x), aten._fft_r2c.default),
        (lambda x: torch.bernoulli(x.sigmoid()), aten.bernoulli.default),
        (lambda x: torch.digamma(x), aten.digamma.default),
    ],
}


@pytest.mark.parametrize(
    ("kind", "function", "target"),
    [pytest.param(kind, *row, id=f"{kind}-{row[1]}") for kind, rows in KINDS.items() for row in rows],
)
def test_kind_of_traced_operator(kind: OpKind, function: Callable[..., Any], target: Any) -> None:
    module = trace(function, X)
    nodes = [n for n in module.graph.nodes if n.target == target]
    assert nodes, module.code
    assert {op_kind(n) for n in nodes} == {kind}


def test_a_detached_value_is_a_view() -> None:
    """Torch 2.15 traces `detach` as `alias`, others as itself."""
    (node,) = (n for n in trace(lambda x: aten.detach.default(x), X).graph.nodes if n.op == "call_function")
    assert node.target in (aten.detach.default, aten.alias.default)
    assert op_kind(node) is OpKind.VIEW


def test_heavy_kinds_of_a_joint_graph() -> None:
    """Convolution and attention, forward and backward, and what surrounds them."""
    weight = torch.randn(3, 3, 3, 3, requires_grad=True)
    conv = joint_graph(lambda image, w: F.conv2d(image, w).sum(), IMAGE, weight)
    assert op_kind(node_of(conv, aten.convolution.default)) is OpKind.CONV
    assert op_kind(node_of(conv, aten.convolution_backward.default)) is OpKind.CONV

    query = torch.randn(2, 2, 16, 8, requires_grad=True)
    attention = joint_graph(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum(), query)
    kinds = {str(n.target): op_kind(n) for n in attention.graph.nodes}
    assert kinds["aten._scaled_dot_product_flash_attention_for_cpu.default"] is OpKind.ATTENTION
    assert kinds["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"] is OpKind.ATTENTION
    assert {op_kind(n) for n in attention.graph.nodes if n.target is operator.getitem} == {OpKind.ITEM}
    assert {op_kind(n) for n in attention.graph.nodes if n.op == "placeholder"} == {OpKind.INPUT}


def test_inductor_primitives_for_random_numbers() -> None:
    """Only the seeds draw from a generator; the numbers are a function of them."""
    import torch._inductor.inductor_prims  # noqa: F401  registers the operators

    assert target_facts(prims.inductor_seeds.default).kind is OpKind.OTHER
    assert target_facts(prims.inductor_seeds.default).is_random
    for target in (prims.inductor_lookup_seed.default, prims.inductor_random.default):
        assert target_facts(target).kind is OpKind.POINTWISE
        assert not target_facts(target).is_random


def test_reshape_is_a_view_only_where_it_aliases() -> None:
    graph = fx.Graph()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6)
        alias, copy = x.reshape(24), x.t().reshape(24)
        source, turned = graph.placeholder("x"), graph.placeholder("turned")
        source.meta["val"], turned.meta["val"] = x, x.t()
        first = graph.call_function(aten.reshape.default, (source, [24]))
        second = graph.call_function(aten.reshape.default, (turned, [24]))
        first.meta["val"], second.meta["val"] = alias, copy
    assert op_kind(first) is OpKind.VIEW
    assert op_kind(second) is OpKind.POINTWISE
    assert describe(second).write_bytes == 96
    assert describe(second).flops == 0


def test_output_and_inputs_cost_nothing() -> None:
    ops = {op.name: op for op in map(describe, trace(lambda x: x + 1, X).graph.nodes)}
    assert (ops["output"].kind, ops["output"].read_bytes, ops["output"].write_bytes) == (OpKind.VIEW, 0, 0)
    assert (ops["x_1"].kind, ops["x_1"].read_bytes, ops["x_1"].flops) == (OpKind.INPUT, 0, 0)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_attention_flops_by_hand() -> None:
    """Two products forward and five backward, of 2 * S * S * D each, for each of B * H heads."""
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    joint = joint_graph(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).sum(), query, query + 1, query + 2)
    product = 2 * 2 * 3 * 16 * 16 * 8
    forward = op_of(joint, aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = op_of(joint, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert not forward.estimated and not backward.estimated


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolution_backward_is_not_counted_as_dense(transposed: bool) -> None:
    """Forward, input gradient and weight gradient of a depthwise convolution are equal work."""
    image = torch.randn(2, 4, 8, 8, requires_grad=True)
    weight = torch.randn(4, 1, 3, 3, requires_grad=True)
    convolve = F.conv_transpose2d if transposed else F.conv2d
    joint = joint_graph(lambda x, w: convolve(x, w, padding=1, groups=4).sum(), image, weight)
    forward = op_of(joint, aten.convolution.default).flops
    assert forward == 2 * 2 * (8 * 8) * 4 * (3 * 3)
    assert op_of(joint, aten.convolution_backward.default).flops == 2 * forward


def test_flops_agree_with_torchs_counter() -> None:
    """A small network with convolution, products and their backward against FlopCounterMode on the same step."""
    weight = torch.randn(8, 3, 3, 3, requires_grad=True)
    projection = torch.randn(8 * 36, 5, requires_grad=True)

    def network(x: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (F.conv2d(x, w).relu().flatten(1) @ p).pow(2).sum()

    with FlopCounterMode(display=False) as counter:
        network(IMAGE, weight, projection).backward()
    assert total_flops(joint_graph(network, IMAGE, weight, projection)) == counter.get_total_flops()


def test_pointwise_and_reduction_weights() -> None:
    module = trace(lambda x: (x + 1, x.exp(), x.erf(), x.pow(2), x.pow(1.7), x.clone(), x.sum(1)), X)
    flops = {str(op.target): op.flops for op in map(describe, module.graph.nodes) if op.kind is not OpKind.INPUT}
    assert flops["aten.add.Tensor"] == 24
    assert flops["aten.exp.default"] == 24 * 10
    assert flops["aten.erf.default"] == 24 * 20
    assert flops["aten.pow.Tensor_Scalar"] == 24 * 20
    assert flops["aten.clone.default"] == 0
    assert flops["aten.sum.dim_IntList"] == 24
    square = trace(lambda x: x.pow(2), X)
    assert op_of(square, aten.pow.Tensor_Scalar).flops == 24 * 2


def test_operator_without_formula_is_marked_as_estimated() -> None:
    op = op_of(trace(lambda x: x.sort()[0], X), aten.sort.default)
    assert (op.estimated, op.flops, op.read_bytes, op.write_bytes) == (True, 0, 96, 96 + 192)
    put = trace(lambda x: aten.index_put.default(x, [(x[:, 0] > 0).long()], x), X)
    assert not op_of(put, aten.index_put.default).estimated


def test_formula_of_the_user_prices_a_custom_operator() -> None:
    with torch.library._scoped_library("remat_cost_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        packet = torch.ops.remat_cost_test.twice
        module = trace(lambda x: packet(x), X)
        assert op_of(module, packet.default).estimated
        register_flop_formula(packet)(lambda x_shape, out_shape=None: 1000 + x_shape[0])
        try:
            op = op_of(module, packet.default)
            assert (op.kind, op.flops, op.estimated) == (OpKind.OTHER, 1004, False)
        finally:
            del torch.utils.flop_counter.flop_registry[packet]


def test_formula_that_fails_leaves_a_price_by_bytes() -> None:
    with torch.library._scoped_library("remat_cost_test2", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: torch.empty_like(x), "Meta")
        packet = torch.ops.remat_cost_test2.same
        module = trace(lambda x: packet(x), X)
        register_flop_formula(packet, get_raw=True)(lambda x, out_val=None: x.item())
        try:
            op = op_of(module, packet.default)
            assert (op.flops, op.estimated, op.read_bytes) == (0, True, 96)
        finally:
            del torch.utils.flop_counter.flop_registry[packet]


def test_an_operator_that_calls_graphs_has_their_arithmetic() -> None:
    """A branch counts as the more expensive one; a scan runs its graph for each row."""
    (planned,) = look(Branching(), [torch.randn(4, 8, requires_grad=True)], memory_budget="max")
    ops = [describe(n) for n in planned.joint.module.graph.nodes if n.op == "call_function"]
    branch = next(op for op in ops if op.target == "cond")
    assert (branch.flops, branch.estimated) == (2 * 4 * 8 * 8 + 15 * 4 * 8, False)
    scanned = next(op for op in ops if op.target == "scan")
    assert (scanned.flops, scanned.estimated) == (4 * (15 * 8 + 8 + 15 * 8), False)


def test_attention_that_calls_graphs_has_its_own_formula() -> None:
    """Torch's formula counts queries with keys, then with values: not the arithmetic of the function of one score."""
    score = trace(lambda score, b, h, q, k: torch.sin(score) + q - k, *[torch.tensor(1.0)] * 5)
    graph = fx.Graph()
    query = graph.placeholder("query")
    query.meta["val"] = torch.empty(1, 2, 16, 8, device="meta")
    attention = torch.ops.higher_order.flex_attention
    node = graph.call_function(attention, (query, query, query, graph.get_attr("score"), (), 1.0, {}, (), ()))
    node.meta["val"] = (query.meta["val"], torch.empty(1, 2, 16, device="meta"))
    graph.output(node)
    fx.GraphModule({"score": score}, graph)
    op = describe(node)
    assert (op.kind, op.flops, op.estimated) == (OpKind.ATTENTION, 2 * (2 * 2 * 16 * 16 * 8), False)


class Branching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, lambda x: torch.sin(self.layer(x)), torch.sin, (x,))
        last, _ = scan(lambda state, row: (torch.sin(state) * row, torch.cos(row)), torch.sin(x[0]), torch.sin(x))
        return last


# -- bytes and types --------------------------------------------------------------------------------------------------


def test_expanded_input_is_read_once_and_a_slice_reads_its_own_elements() -> None:
    row = torch.randn(1, 6)
    op = op_of(trace(lambda r, x: r.expand(4, 6) * x, row, X), aten.mul.Tensor)
    assert (op.read_bytes, op.write_bytes) == (4 * 6 + 4 * 24, 4 * 24)
    assert op_of(trace(lambda x: x[:, :2].exp(), X), aten.exp.default).read_bytes == 4 * 4 * 2


def test_input_read_twice_counts_once() -> None:
    assert op_of(trace(lambda x: x * x, X), aten.mul.Tensor).read_bytes == 96


def test_gather_reads_no_more_of_its_table_than_it_takes() -> None:
    table, index = torch.randn(1000, 8), torch.tensor([1, 2, 3])
    op = op_of(trace(lambda t, i: F.embedding(i, t), table, index), aten.embedding.default)
    assert (op.read_bytes, op.write_bytes) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)


def test_views_items_and_symbols_move_nothing() -> None:
    module = trace(lambda x: torch.var_mean(x.t(), 1)[0].view(x.shape[1]), X, mode="symbolic")
    for op in map(describe, module.graph.nodes):
        if op.kind in (OpKind.VIEW, OpKind.ITEM, OpKind.SYMBOL):
            assert (op.read_bytes, op.write_bytes, op.flops) == (0, 0, 0)
    assert op_of(module, aten.var_mean.correction).write_bytes == 2 * 6 * 4


def test_empty_and_tuple_values() -> None:
    empty = trace(lambda x: x.exp(), torch.randn(0, 4))
    op = op_of(empty, aten.exp.default)
    assert (op.flops, op.read_bytes, op.write_bytes) == (0, 0, 0)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_dtype_of_the_arithmetic(dtype: torch.dtype, name: str) -> None:
    x = torch.randn(4, 4, dtype=dtype)
    assert op_of(trace(torch.mm, x, x), aten.mm.default).dtype == name
    bias = torch.randn(4)
    assert op_of(trace(lambda b, x: b.to(x.dtype) + x, bias, x), aten.add.Tensor).dtype == name


def test_float8_types_share_one_name() -> None:
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    scale = torch.ones(())

    def product(a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, a.t(), scale, scale, out_dtype=torch.bfloat16)

    op = op_of(trace(product, a, scale), aten._scaled_mm.default)
    assert (op.dtype, op.kind, op.flops) == ("float8", OpKind.MATMUL, 2 * 16 * 32 * 16)


# -- random numbers ---------------------------------------------------------------------------------------------------


def test_attention_is_random_only_with_dropout() -> None:
    query = torch.randn(1, 1, 8, 8)

    def attend(q: torch.Tensor, dropout: float) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, dropout)[0]

    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert target_facts(target).is_random
    module = trace(lambda q: attend(q, 0.0), query)
    assert not op_of(module, target).is_random
    node = node_of(module, target)
    node.args = (*node.args[:3], 0.5)
    assert describe(node).is_random
    node.args, node.kwargs = node.args[:3], {"dropout_p": 0.5}
    assert describe(node).is_random
    node.kwargs = {}
    assert not describe(node).is_random


def test_dropout_positions_fit_the_schemas() -> None:
    for packet, position in DROPOUT_POSITION.items():
        overload = getattr(aten, packet.removeprefix("aten.")).default
        assert overload._schema.arguments[position].name == "dropout_p"


def test_random_operators_carry_torchs_tag() -> None:
    assert op_of(trace(lambda x: torch.bernoulli(x.sigmoid()), X), aten.bernoulli.default).is_random
    assert op_of(trace(lambda x: torch.rand_like(x) + x, X), aten.rand_like.default).is_random
    assert not op_of(trace(lambda x: x.exp(), X), aten.exp.default).is_random


# -- symbolic sizes ---------------------------------------------------------------------------------------------------


def test_symbolic_sizes_give_the_hinted_counts_and_no_guards() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        q = (x @ w).view(x.shape[0], 2, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).softmax(-1).sum() + x.exp()[:, :3].sort()[0].sum()

    x, w = torch.randn(12, 6), torch.randn(6, 64)
    symbolic, fixed = trace(step, x, w, mode="symbolic"), trace(step, x, w)
    shape_env = next(iter(symbolic.graph.nodes)).meta["val"].fake_mode.shape_env
    guards, replacements = [str(g.expr) for g in shape_env.guards], dict(shape_env.replacements)
    ops = [describe(n) for n in symbolic.graph.nodes]
    assert [str(g.expr) for g in shape_env.guards] == guards
    assert shape_env.replacements == replacements
    assert OpKind.SYMBOL in {op.kind for op in ops}

    def kernels(ops: list[Op]) -> list[tuple[Any, ...]]:
        return [(o.target, o.flops, o.read_bytes, o.write_bytes) for o in ops if o.kind not in RUNS_NO_KERNEL]

    assert kernels(ops) == kernels([describe(n) for n in fixed.graph.nodes])
    assert len(kernels(ops)) >= 5


def test_dynamic_joint_graph_has_symbols() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    joint = joint_graph(lambda x: (x.view(-1) * x.shape[0]).sum(), x, dynamic=True)
    ops = [describe(n) for n in joint.graph.nodes]
    for node, op in zip(joint.graph.nodes, ops, strict=True):
        assert (op.kind is OpKind.SYMBOL) == isinstance(node.meta.get("val"), torch.SymInt | int)


def test_every_node_of_a_joint_graph_is_described() -> None:
    """No heavy operator of a transformer block is estimated, and every Op can be compared and hashed."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    weights = dict(layer.named_parameters())

    def step(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(weights, values, strict=True)), (x,)).sum()

    joint = joint_graph(step, torch.randn(2, 8, 16), *weights.values())
    ops = [describe(n) for n in joint.graph.nodes]
    assert not [op for op in ops if op.estimated]
    assert len({op.name for op in ops}) == len(set(ops)) == len(ops)
