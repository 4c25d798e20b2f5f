"""The operators of ``scaled_dot_product_attention`` on a CUDA device, for graphs that are traced on a CPU.

Imports nothing of compile_remat.  On a CPU torch traces attention to an operator of the CPU's own, or with dropout to an
explicit softmax; a GPU runs neither.  The operators below are those that ``sdp_utils.cpp`` and ``attention.cpp`` of 2.11 to 2.15
choose for CUDA, except for cuDNN's, which saves tensors of the same sizes as flash attention.  Their kernels for fake tensors
ignore the device of the tensors, so outputs, log-sum-exps, seeds, offsets and gradients have the sizes, types and strides
that they have on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

aten = torch.ops.aten

FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD = 256
"""``sdp_utils.cpp``, ``check_head_dim_size_flash``."""

HEAD_MULTIPLE = 8
"""Head sizes are padded to a multiple of this for flash attention (``attention.cpp``, `pad_last_dim<8>`)."""

BIAS_MULTIPLE = 16
"""The stride of a mask's rows is padded to a multiple of this (``attention.cpp``, `pad_bias<16>`)."""

Attention = Callable[..., Tensor]


def attention_with_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` as CUDA devices from Ampere on run it: flash, else memory-efficient, else by products."""
    if attn_mask is None and _suits_flash(query, key, value, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    return attention_without_flash(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def attention_without_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` without flash attention: on devices before Ampere, or for arguments that flash rejects."""
    if _suits_efficient(query, key, value):
        bias = None if attn_mask is None else _padded_bias(attn_mask, query, key)
        found: tuple[Tensor, ...] = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad or key.requires_grad or value.requires_grad, dropout_p, is_causal,
            scale=scale,
        )  # fmt: skip
        return found[0]
    found = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]


def use_cuda_attention(module: fx.GraphModule, *, has_flash: bool) -> int:
    """Replace ``scaled_dot_product_attention`` in a Dynamo graph by the operators of CUDA; returns the number of calls replaced."""
    attention = attention_with_flash if has_flash else attention_without_flash
    nodes = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    for node in nodes:
        node.target = attention
    if nodes:
        module.recompile()
    return len(nodes)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head = q.size(-1)
    missing = -head % HEAD_MULTIPLE
    if missing:
        scale = head**-0.5 if scale is None else scale  # of the head before padding
        q, k, v = (F.pad(t, (0, missing)) for t in (q, k, v))
    found: tuple[Any, ...] = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
    output: Tensor = found[0]
    return output[..., :head] if missing else output


def _suits_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    if query.dtype not in FLASH_TYPES or any(t.dim() != 4 for t in (query, key, value)):
        return False
    heads, key_heads = query.size(1), key.size(1)
    is_square = query.size(2) == key.size(2)
    one_head_size = query.size(-1) == key.size(-1) == value.size(-1)
    groups = key_heads == value.size(1) and heads % key_heads == 0
    return one_head_size and groups and query.size(-1) <= FLASH_MAX_HEAD and (is_square or not is_causal)


def _suits_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    tensors = (query, key, value)
    if any(t.dim() != 4 for t in tensors) or query.dtype not in (*FLASH_TYPES, torch.float32):
        return False
    # 16 bytes of a head are loaded at once (``sdp_utils.cpp``, `check_head_dim_size_mem_efficient`)
    aligned = all(t.size(-1) * t.element_size() % 16 == 0 for t in tensors)
    return aligned and query.size(1) == key.size(1) == value.size(1)


def _padded_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns a mask as memory-efficient attention gets it: additive, its rows padded, and expanded over heads without a copy."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    last = mask.size(-1)
    missing = -last % BIAS_MULTIPLE
    if missing:
        mask = F.pad(mask, (0, missing))[..., :last]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


# -- attention that Inductor's own patterns insert ----------------------------------------------------------------------

CPU_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def replace_cpu_attention(module: fx.GraphModule, *, has_flash: bool) -> int:
    """Replace the CPU's attention operators in a joint graph by CUDA's; returns the number of forward operators replaced.

    Inductor's patterns replace explicit softmaxes in the joint graph by attention operators of the device that it runs on.
    """
    forwards = module.graph.find_nodes(op="call_function", target=CPU_FORWARD)
    backward_of = {_output_of(n.args[4]): n for n in module.graph.find_nodes(op="call_function", target=CPU_BACKWARD)}
    for node in forwards:
        _replace_pair(module.graph, node, backward_of.get(node), has_flash)
    if forwards:
        module.recompile()
    return len(forwards)


def _output_of(node: Any) -> Any:
    """Returns the node of which `node`, a getitem, takes an item."""
    return node.args[0]


def _replace_pair(graph: fx.Graph, forward: fx.Node, backward: fx.Node | None, has_flash: bool) -> None:
    """Replace the forward and backward operator of one attention; the new nodes keep the metadata of the old ones."""
    bound = _arguments(forward)
    q, k, v, mask = (bound[name] for name in ("query", "key", "value", "attn_mask"))
    causal, scale = bound["is_causal"], {"scale": bound["scale"]}
    values = [n.meta["val"] for n in (q, k, v)]
    is_flash = has_flash and mask is None and _suits_flash(values[0], values[1], values[2], causal)
    with graph.inserting_before(forward):
        if is_flash:
            op = aten._scaled_dot_product_flash_attention.default
            new = _call(graph, op, (q, k, v, 0.0, causal), scale, forward)
            extra: tuple[Any, ...] = tuple(_item(graph, new, i, forward) for i in (6, 7))
        else:
            op = aten._scaled_dot_product_efficient_attention.default
            if mask is not None:
                shape = [*values[0].shape[:3], values[1].shape[2]]
                mask = _call(graph, aten.expand.default, (mask, shape), {}, forward)
            new = _call(graph, op, (q, k, v, mask, True, 0.0, causal), scale, forward)
            extra = tuple(_item(graph, new, i, forward) for i in (2, 3))
    _take_over_items(forward, new)
    if backward is None:
        graph.erase_node(forward)
        return
    gradient, out, lse = backward.args[0], backward.args[4], backward.args[5]
    with graph.inserting_before(backward):
        if is_flash:
            op = aten._scaled_dot_product_flash_attention_backward.default
            rest = (values[0].shape[2], values[1].shape[2], 0.0, causal, *extra)
            new = _call(graph, op, (gradient, q, k, v, out, lse, None, None, *rest), scale, backward)
        else:
            op = aten._scaled_dot_product_efficient_attention_backward.default
            wanted = [True, True, True, False]
            new = _call(graph, op, (gradient, q, k, v, mask, out, lse, *extra, 0.0, wanted, causal), scale, backward)
    _take_over_items(backward, new)
    graph.erase_node(backward)
    graph.erase_node(forward)  # by hand: FX keeps an unused operator that may draw random numbers


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of an operator's node by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False))
    return {a.name: node.kwargs.get(a.name, given.get(a.name, a.default_value)) for a in schema}


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    read = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = like.args[0].meta["val"].fake_mode  # type: ignore[union-attr]
    with mode:
        value = target(*read[0], **read[1])
    node.meta = {**like.meta, "val": value}
    return node


def _item(graph: fx.Graph, source: fx.Node, index: int, like: fx.Node) -> fx.Node:
    node = graph.call_function(operator.getitem, (source, index))
    node.meta = {**like.meta, "val": source.meta["val"][index]}
    return node


def _take_over_items(old: fx.Node, new: fx.Node) -> None:
    """Have the nodes that take items of `old` take the same items of `new`."""
    for user in list(old.users):
        user.replace_input_with(old, new)
        user.meta["val"] = new.meta["val"][user.args[1]]
