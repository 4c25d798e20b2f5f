"""Joint graph -> `Problem` -> `Plan` -> forward and backward modules.  The code is independent of Inductor and the environment."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_remat.passes.api import *  # noqa: F403

__all__ = [  # noqa: F405
    "MUST_RECOMPUTE",
    "MUST_SAVE",
    "NOTHING_ASSUMED",
    "PREFER_RECOMPUTE",
    "Assumptions",
    "BufferFacts",
    "GraphFacts",
    "KernelFacts",
    "Link",
    "LiveBuffer",
    "NodeFacts",
    "NodeTable",
    "Offloaded",
    "Origin",
    "PlainFacts",
    "Plan",
    "PlanOption",
    "Planner",
    "Problem",
    "ProblemBuilder",
    "RegionFacts",
    "SearchOptions",
    "SlicedProduct",
    "Status",
    "Step",
    "Timeline",
    "Value",
    "build_problem",
    "curves",
    "extract",
    "plain_option",
    "plain_time_ns",
    "plan_options",
    "solve",
    "timeline",
]

if not TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        """Import the names when one is first used: a package that is only looked at, as `TORCH_LOGS` does, imports no torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from compile_remat.passes import api

        return getattr(api, name)
