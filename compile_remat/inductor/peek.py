"""A look at the joint graph of a Dynamo graph, where a partitioner would get it; nothing is compiled.

Private names, read in the source of 2.13: ``pass_patterns`` of Inductor's `joint_graph`, ``PatternMatcherPass.patterns``, and of a
pattern ``fns``, ``outputs``, ``args`` and ``kwargs``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx

from compile_remat._torch.version import private_name
from compile_remat.inductor.entry import CustomPartitionerFn, compile_eager, compile_with_partitioner

T = TypeVar("T")

pass_patterns = private_name("torch._inductor.fx_passes.joint_graph", "pass_patterns")

PRODUCT = torch.ops.aten.bmm.default


class _Left(Exception):
    """Leaves the compiler once the joint graph was seen."""


class _Look(CustomPartitionerFn):
    """A partitioner that shows the joint graph to `see`, keeps what it makes of it and compiles nothing."""

    def __init__(self, see: Callable[[fx.GraphModule, dict[str, Any]], Any] | None = None) -> None:
        self.see = see
        self.found: Any = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        keywords = {name: kwargs.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}
        assert self.see is not None
        self.found = self.see(gm, keywords)
        raise _Left

    def uuid(self) -> object:
        """Always the same: nothing is ever stored under it."""
        return "compile_remat looks at the joint graph"

    def __reduce__(self) -> tuple[Any, ...]:  # the cache key must not hold graphs
        return (_Look, ())


def look_at_joint_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    see: Callable[[fx.GraphModule, dict[str, Any]], T],
    options: Mapping[str, Any],
    compiler: str = "inductor",
) -> T | None:
    """What `see` makes of the joint graph of a Dynamo graph and of its `num_fwd_outputs` and `static_lifetime_input_indices`.

    `see` runs where a partitioner would, under `options`; nothing is compiled.  None where the graph has no backward, and is
    compiled after all.

    Args:
        compiler: `inductor` or `eager`.
    """
    look = _Look(see)
    try:
        if compiler == "eager":
            compile_eager(gm, example_inputs, look)
        else:
            compile_with_partitioner(gm, example_inputs, look, options, guarded=False)
    except _Left:
        pass
    found: T | None = look.found
    return found


# -- fewer patterns ---------------------------------------------------------------------------------------------------


@contextmanager
def likely_patterns() -> Iterator[None]:
    """Inside, a joint graph without a batched product is not searched for patterns that have one.  What is matched is the same.

    Most of the patterns are those of attention written as products and a softmax, over a hundred, and every node that could end one
    is compared with all of them.  Each has a batched product in it, and no replacement makes one where there was none before.
    """
    if not isinstance(pass_patterns, list):
        yield
        return
    before = list(pass_patterns)
    pass_patterns[:] = map(_Likely, before)
    try:
        yield
    finally:
        pass_patterns[:] = before


class _Likely:
    """A pass of Inductor's, of which a graph gets those patterns that it may have."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def apply(self, graph: Any) -> Any:
        """What ``PatternMatcherPass.apply`` does."""
        searched = graph.graph if isinstance(graph, fx.GraphModule) else graph
        if searched.find_nodes(op="call_function", target=PRODUCT):
            return self.whole.apply(graph)
        patterns = self.whole.patterns
        likely = defaultdict[Any, list[Any]](list)
        for key, entries in patterns.items():
            if kept := [e for e in entries if not _has_product(e.pattern, set())]:
                likely[key] = kept
        self.whole.patterns = likely
        try:
            return self.whole.apply(graph)
        finally:
            self.whole.patterns = patterns


def _has_product(pattern: Any, seen: set[int]) -> bool:
    """Whether a batched product is part of a pattern: of its outputs, or of what they read."""
    if id(pattern) in seen:  # patterns share their parts
        return False
    seen.add(id(pattern))
    if getattr(pattern, "fns", None) == [PRODUCT]:
        return True
    parts = (*getattr(pattern, "outputs", ()), *getattr(pattern, "args", ()), *getattr(pattern, "kwargs", {}).values())
    return any(_has_product(part, seen) for part in parts)
