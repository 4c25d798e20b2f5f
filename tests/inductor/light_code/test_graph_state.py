"""The state of a graph that is restored: attributes, contents of their containers, counters, figures."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.utils._ordered_set import OrderedSet

from compile_remat.inductor.light_code.graph_state import untouched


def test_a_graph_is_put_back_with_the_containers_that_it_had() -> None:
    """Other objects hold the same containers, so the containers are filled again, not replaced."""
    removed, users, numbers = OrderedSet(["buf0"]), ["a"], itertools.count()
    next(numbers)
    operation = SimpleNamespace(users=users, layout="flexible")
    graph = SimpleNamespace(operations=[operation], scheduler=None, removed_buffers=removed, numbers=numbers)
    kernels, counts = metrics.generated_kernel_count, {name: dict(counter) for name, counter in counters.items()}
    with untouched(graph):
        removed.add("buf1")
        users.clear()
        operation.layout, operation.cached = "fixed", 3
        graph.removed_buffers, graph.wrapper_code = OrderedSet(), "code"
        assert next(graph.numbers) == 1
        metrics.generated_kernel_count += 7
        counters["inductor"]["fxgraph_cache_miss"] += 1
    assert graph.removed_buffers is removed and removed == OrderedSet(["buf0"])
    assert operation.users is users and users == ["a"]
    assert vars(operation) == {"users": ["a"], "layout": "flexible"} and not hasattr(graph, "wrapper_code")
    assert next(graph.numbers) == 1
    assert metrics.generated_kernel_count == kernels
    assert {name: dict(counter) for name, counter in counters.items()} == counts
