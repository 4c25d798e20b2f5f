"""Shows the joint graph of a Dynamo graph at the point where a partitioner would get it; nothing is compiled.

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
from compile_remat.inductor.install import joint_keywords

T = TypeVar("T")

pass_patterns = private_name("torch._inductor.fx_passes.joint_graph", "pass_patterns")

PRODUCT = torch.ops.aten.bmm.default


class _Left(Exception):
    """Raised to leave the compiler once the joint graph was seen."""


class _Look(CustomPartitionerFn):
    """A partitioner that calls `see` with the joint graph, keeps the result and compiles nothing."""

    def __init__(self, see: Callable[[fx.GraphModule, dict[str, Any]], Any] | None = None) -> None:
        self.see = see
        self.found: Any = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        assert self.see is not None
        self.found = self.see(gm, joint_keywords(kwargs))
        raise _Left

    def uuid(self) -> object:
        """A constant, as torch's caches never store anything under this identity."""
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
    """Returns the result of `see` for the joint graph of a Dynamo graph; None if the graph has no backward.

    `see` runs where a partitioner would, under `options`, and nothing is compiled; only a graph without a backward is compiled.

    Args:
        see: Gets the joint graph, and a dict of its `num_fwd_outputs` and `static_lifetime_input_indices`.
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
    """Inside, Inductor skips patterns with a batched product for a joint graph without one.  The matches stay the same.

    Most patterns, over a hundred, describe attention written as products and a softmax, and Inductor compares every node that could
    end a pattern with all of them.  Each of these patterns has a batched product, and no replacement adds a first one to a graph.
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
    """One of Inductor's passes, limited to the patterns that can match in a graph."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def apply(self, graph: Any) -> Any:
        """Apply the pass as ``PatternMatcherPass.apply`` does, without the patterns that cannot match."""
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
    """Returns whether a batched product is part of a pattern: one of its outputs, or one of their arguments."""
    if id(pattern) in seen:  # patterns share their parts
        return False
    seen.add(id(pattern))
    if getattr(pattern, "fns", None) == [PRODUCT]:
        return True
    parts = (*getattr(pattern, "outputs", ()), *getattr(pattern, "args", ()), *getattr(pattern, "kwargs", {}).values())
    return any(_has_product(part, seen) for part in parts)
