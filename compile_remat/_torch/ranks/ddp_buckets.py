"""Torch's cuts of Dynamo's graph under DDP: at the buckets in which gradients are reduced.

Private names: ``torch._dynamo.backends.distributed.DDPOptimizer`` and its `buckets`, same in 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer

BUCKET_BYTES = 25 << 20
"""DDP's default of `bucket_cap_mb`, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
The bucket of the last layers is smaller: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, which `DDPOptimizer` uses."""


def buckets_under_ddp(module: fx.GraphModule) -> dict[fx.Node, int]:
    """Returns the number of the piece in which each operator is compiled, counted in the order of the forward.

    All are 0 if ``torch._dynamo.config.optimize_ddp`` is off, or if one bucket holds all gradients.
    """
    operators = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if torch._dynamo.config.optimize_ddp not in (True, "ddp_optimizer"):
        return dict.fromkeys(operators, 0)
    optimizer = DDPOptimizer(BUCKET_BYTES, _as_it_is)
    optimizer.compile_fn(module, [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")])
    return {node: number for number, bucket in enumerate(optimizer.buckets) for node in bucket.nodes}


def _as_it_is(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return module.forward
