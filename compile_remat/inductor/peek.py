"""A look at the joint graph of a Dynamo graph, where a partitioner would get it; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx

from compile_remat.inductor.entry import CustomPartitionerFn, compile_eager, compile_with_partitioner

T = TypeVar("T")


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
