"""A program and how it is run, as a literal that makes it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.fuzz.program import Program

TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2}
"""Largest difference from another way to compute the same, as a part of the largest element."""

BYTES = "bytes"
"""A budget between the lowest peak and the fastest plan's, in bytes, which are worked out when the trial is run."""


@dataclass(frozen=True)
class Trial:
    """A program and how it is run.

    Attributes:
        entry: `graph` or `dynamo`.
        budgets: Values of `memory_budget`, and `BYTES`.
        masks: Seeds of the plans that are forced.
        dynamic: True if sizes are symbols.
        compiler: `eager`, or with `dynamo` also `inductor`.
        losses: 2 where the first output and the others have a backward each.
        gradients: `end` or `early`, as the setting.
        slices: `off`, `auto` or a number, as the setting.
        learning_rate: Learning rate of the steps.
        steps_in_hooks: True if hooks of the leaves step each parameter and free its gradient, as early gradients are meant for.
    """

    program: Program
    entry: str = "graph"
    budgets: tuple[float | str, ...] = ("max", "min")
    masks: tuple[int, ...] = (0,)
    dynamic: bool = False
    compiler: str = "eager"
    losses: int = 1
    gradients: str = "end"
    slices: int | str = "off"
    steps_in_hooks: bool = False
    learning_rate: float = 1e-3

    @property
    def options(self) -> dict[str, int | str]:
        """Settings of the backend that lower the peak below what recomputation reaches, where they are not the defaults."""
        asked = {"gradients": self.gradients, "slices": self.slices}
        return {name: value for name, value in asked.items() if value not in ("end", "off")}

    @property
    def in_the_plain_way(self) -> Trial:
        """The reference trial: the same program with gradients that an optimizer takes after the step."""
        return replace(self, gradients="end", slices="off", steps_in_hooks=False)

    @property
    def tolerance(self) -> float:
        """The tolerance of the least exact dtype in the program."""
        dtypes = {leaf.dtype for leaf in self.program.leaves}
        dtypes |= {str(a) for top in self.program.body for op in top.walk() if op.kind == "to" for a in op.attrs}
        dtypes |= {"bfloat16"} if self.program.is_rounded else set()
        return max(value for dtype, value in TOLERANCES.items() if dtype in dtypes | {"float64"})

    @property
    def follows_eager_mode(self) -> bool:
        """True if eager mode gives the expected numbers: no number is drawn, and no value is rounded coarsely on the way."""
        return not self.program.is_random and not self.program.is_rounded
