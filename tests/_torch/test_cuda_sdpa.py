"""Attention in graphs traced on a CPU becomes what CUDA runs, with its outputs, seeds and paddings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from compile_remat._torch.cuda_sdpa import (
    CPU_BACKWARD,
    CPU_FORWARD,
    attention_with_flash,
    attention_without_flash,
    replace_cpu_attention,
)
from compile_remat._torch.fake import fake_tensors
from compile_remat.cost_models import load_device
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import trace

aten = torch.ops.aten


def attentions(graph: fx.Graph) -> list[str]:
    """Each attention operator with what its tensors and its items are, as text."""
    return [
        f"{node.target}({', '.join(map(_text, node.args))}) -> {_text(node.meta['val'])}"
        for node in graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]


def _text(value: object) -> str:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple | list) else str(value)


def traced(name: str, device: str = "h100-sxm", dtype: str = "bf16") -> fx.GraphModule:
    return trace(Builder(f"tests.planned_models:{name}", dtype=dtype), load_device(device)).given.module


def test_half_precision_without_a_mask_is_flash_attention() -> None:
    bf, lse, seeds = "bfloat16[2, 2, 48, 64]", "float32[2, 2, 48]", "uint64[2], uint64[]"
    assert attentions(traced("attention").graph) == [
        f"aten._scaled_dot_product_flash_attention.default({bf}, {bf}, {bf}) -> "
        f"({bf}, {lse}, None, None, 48, 48, {seeds}, bfloat16[0])",
        f"aten._scaled_dot_product_flash_attention_backward.default({bf}, {bf}, {bf}, {bf}, {bf}, {lse}, None, None, "
        f"48, 48, 0.0, False, {seeds}) -> ({bf}, {bf}, {bf})",
    ]


def test_a_device_before_ampere_has_memory_efficient_attention() -> None:
    half, lse, seeds = "float16[2, 2, 48, 64]", "float32[2, 2, 64]", "int64[], int64[]"  # rows of the log-sum-exp: 32s
    assert attentions(traced("attention", "v100", "fp16").graph) == [
        f"aten._scaled_dot_product_efficient_attention.default({half}, {half}, {half}, None, True) -> "
        f"({half}, {lse}, {seeds})",
        f"aten._scaled_dot_product_efficient_attention_backward.default({half}, {half}, {half}, {half}, None, {half}, "
        f"{lse}, {seeds}, 0.0, (True, True, True, False)) -> ({half}, {half}, {half}, None)",
    ]


def test_heads_are_padded_for_flash_attention() -> None:
    forward, _ = attentions(traced("attention_of_odd_heads").graph)
    assert "(bfloat16[2, 2, 48, 64], bfloat16[2, 2, 48, 64], bfloat16[2, 2, 48, 64])" in forward


def test_a_mask_has_a_gradient_in_memory_efficient_attention() -> None:
    graph = traced("attention_with_mask").graph
    forward, backward = attentions(graph)
    assert "efficient_attention.default" in forward and "bfloat16[2, 2, 40, 40], True" in forward
    assert backward.endswith("bfloat16[2, 2, 40, 40])")
    operator = aten._scaled_dot_product_efficient_attention.default
    (node,) = graph.find_nodes(op="call_function", target=operator)
    assert node.args[3].meta["val"].stride() == (0, 0, 48, 1)  # rows of 40 lie 48 apart, one copy for all heads


def test_dropout_is_drawn_by_the_kernel() -> None:
    found = attentions(traced("llama_with_dropout").graph)
    assert len(found) == 4 and all("flash_attention" in text and "0.1, True" in text for text in found)


def test_a_cpu_keeps_its_own() -> None:
    targets = {node.target for node in traced("attention", "cpu").graph.nodes}
    assert {CPU_FORWARD, CPU_BACKWARD} <= targets


# -- the joint graph ----------------------------------------------------------------------------------------------------


def test_operators_of_the_cpu_are_replaced_in_a_joint_graph() -> None:
    on_cpu = traced("attention", "cpu")
    for has_flash, device, dtype in ((True, "h100-sxm", "bf16"), (False, "v100", "bf16")):
        module = copy.deepcopy(on_cpu)
        assert replace_cpu_attention(module, has_flash=has_flash) == 1
        module.graph.lint()
        expected = attentions(traced("attention", device, dtype).graph)
        # arguments that are written or left to their defaults are all that may differ
        assert [t.partition(" -> ")[2] for t in attentions(module.graph)] == [t.partition(" -> ")[2] for t in expected]
        assert not {CPU_FORWARD, CPU_BACKWARD} & {node.target for node in module.graph.nodes}


def test_a_mask_in_a_joint_graph() -> None:
    module = traced("attention_with_fixed_mask", "cpu")
    assert replace_cpu_attention(module, has_flash=True) == 1
    module.graph.lint()
    forward, backward = attentions(module.graph)
    assert "efficient_attention.default" in forward and "bfloat16[2, 2, 48, 48], True" in forward
    assert backward.endswith("bfloat16[2, 2, 48, 64], None)")


# -- what is chosen -----------------------------------------------------------------------------------------------------


def chosen(function: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: object) -> str:
    """The name of the operator that runs."""
    found: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    with fake_tensors(dtype):
        tensors = [torch.zeros(shape) for shape in shapes]
        with Names():
            function(*tensors, **options)  # type: ignore[operator]
    names = [name for name in found if "scaled_dot_product" in name]
    return names[0] if names else "products"


QUERY = (2, 8, 32, 64)


@pytest.mark.parametrize(
    ("shapes", "dtype", "options", "expected"),
    [
        ((QUERY, QUERY, QUERY), torch.bfloat16, {}, "flash_attention"),
        ((QUERY, QUERY, QUERY), torch.float32, {}, "efficient_attention"),
        ((QUERY, (2, 2, 32, 64), (2, 2, 32, 64)), torch.bfloat16, {"enable_gqa": True}, "flash_attention"),
        ((QUERY, (2, 2, 32, 64), (2, 2, 32, 64)), torch.float32, {"enable_gqa": True}, "products"),
        ((QUERY, (2, 8, 48, 64), (2, 8, 48, 64)), torch.bfloat16, {"is_causal": True}, "efficient_attention"),
        (((2, 8, 32, 288),) * 3, torch.bfloat16, {}, "efficient_attention"),
        (((2, 8, 32, 5),) * 3, torch.float32, {}, "products"),
    ],
)
def test_the_kernel_that_cuda_chooses(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: dict[str, object], expected: str
) -> None:
    assert expected in chosen(attention_with_flash, *shapes, dtype=dtype, **options)


def test_a_mask_of_truth_values_becomes_numbers() -> None:
    with fake_tensors(torch.float16):
        q = torch.zeros(QUERY)
        assert "efficient" in chosen(
            lambda *a: attention_without_flash(*a, torch.ones(32, 32, dtype=torch.bool)), QUERY, QUERY, QUERY,
            dtype=torch.float16,
        )  # fmt: skip
        assert attention_without_flash(q, q, q, torch.ones(32, 32, dtype=torch.bool)).shape == QUERY


def test_padding_keeps_the_scale_of_the_head() -> None:
    # The flash kernel itself runs on a GPU only; what is padded to it is ordinary arithmetic.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 6) for _ in range(3))
    padded = [F.pad(t, (0, 2)) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(F.scaled_dot_product_attention(*padded, scale=6**-0.5)[..., :6], expected)
