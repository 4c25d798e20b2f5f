"""A model's step planned as in training: its plans are lowered by Inductor and read, and no code is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch.cuda_sdpa import use_cuda_attention
from compile_remat._torch.fake import NumbersAreZero, fake_tensors
from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat._util.size_range import Sizes
from compile_remat.budget import MemoryBudget
from compile_remat.compilation.looking import planned_graph
from compile_remat.config import RematConfig
from compile_remat.errors import BudgetError, find_error, without_traceback
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import kind_of, refuse
from compile_remat.forecast.target_step import Target
from compile_remat.inductor.called_regions import inline_regions
from compile_remat.inductor.entry import without_caches
from compile_remat.passes import PlainFacts, Problem
from compile_remat.planning.settings import SLICES, Settings, sizes_of
from compile_remat.report import Report


@dataclass(frozen=True)
class Asked:
    """Which step is to be planned.

    Attributes:
        budget: Of the region peak; never `auto`.
        from_auto: Whether `auto` was asked for: the lowest plan is taken where none keeps the budget.
        with_plain: Whether plain torch.compile's own partition is lowered, too; it always is under a fraction.
    """

    builder: Builder
    target: Target
    budget: MemoryBudget
    from_auto: bool = False
    with_plain: bool = False

    @property
    def needs_plain(self) -> bool:
        """Whether somebody asks what plain torch.compile takes."""
        return self.with_plain or self.budget.kind in ("fraction", "max")


@dataclass(frozen=True)
class Observed:
    """A plan whose graphs Inductor has lowered.

    Attributes:
        report: Of the plan, with its observed peak.
        problem: What the plan was searched in: facts of the plans that were lowered, and rules for what none of them showed.
    """

    report: Report
    problem: Problem

    @property
    def peak_bytes(self) -> int:
        """The region peak that was read."""
        assert self.report.observed_peak_bytes is not None
        return self.report.observed_peak_bytes


@dataclass(frozen=True)
class NotObserved:
    """Why nothing was lowered, in words, and what to do to have it."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


Outcome = Observed | BudgetError | NotObserved
"""A `BudgetError` is an answer: no plan that was lowered keeps the budget, and its floor was read."""


def with_attention_of(outcome: Outcome, by_rules: Problem) -> Outcome:
    """The outcome, but no observation where it lacks attention that the device runs: then it has products in its place.

    Inductor makes attention of explicit softmaxes, and which kernel runs that only a driver says; rules know it.

    Args:
        by_rules: The same step's problem, by rules.
    """
    if isinstance(outcome, Observed) and _num_attentions(outcome.problem) < _num_attentions(by_rules):
        return NotObserved("Inductor makes attention of its softmaxes, whose kernel a fake device cannot choose")
    return outcome


def _num_attentions(problem: Problem) -> int:
    return sum(value.name.startswith("_scaled_dot_product") for value in problem.values)


def facts_text(why: str) -> str:
    """The origin of a plan's bytes in a line, for people.

    Args:
        why: Why they were not observed; empty where they were.
    """
    if why:
        return f"ESTIMATE, by rules and not from lowered graphs: {why}"
    return "observed: the plan's graphs were lowered by Inductor for the device, and read"


def observe(asked: Asked) -> Outcome:
    """Build the model and plan its step where Inductor makes code for the target: on a CPU, or in a process with a fake device.

    Raises:
        RematError: The builder is off, or the model breaks into several graphs.
    """
    is_cpu, has_flash = kind_of(asked.target.figures())
    place = torch.device("cpu" if is_cpu else "cuda")
    with fake_tensors(asked.builder.torch_dtype), NumbersAreZero(), place:
        module, inputs = asked.builder.build()
    found: list[Outcome] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inline_regions(gm)
        if not is_cpu:
            use_cuda_attention(gm, has_flash=has_flash)
        outcome = _of_graph(gm, example_inputs, asked)
        if outcome is not None:
            found.append(outcome)
        return gm.forward

    try:
        with fake_tensors(), without_caches():
            trace_isolated(module, backend, inputs)
    except Exception as error:
        found.append(NotObserved(reason_of(error)))
    if not found:
        refuse(0, asked.builder.name)
    failed = [outcome for outcome in found if isinstance(outcome, NotObserved)]
    if len(found) > 1 and not failed:
        refuse(len(found), asked.builder.name)
    return failed[0] if failed else found[0]


def _of_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Asked) -> Outcome | None:
    """The outcome of one graph; None where it has no backward."""
    config = RematConfig(gradients=asked.target.gradients)
    plain: dict[Sizes, PlainFacts | None] = {} if asked.needs_plain else {sizes_of(example_inputs): None}
    try:
        planned = planned_graph(gm, example_inputs, config, _settings(asked), {}, observes=True, plain=plain)
    except Exception as error:  # Dynamo would wrap it
        refused = find_error(error, BudgetError)
        return NotObserved(reason_of(error)) if refused is None else without_traceback(refused)
    if planned is None:
        return None
    if planned.report.observed_peak_bytes is None or planned.report.plan is None:
        return NotObserved("what Inductor made of the graph is not understood")
    return Observed(planned.report, planned.problem)


def _settings(asked: Asked) -> Settings:
    """As training has them on the device, but for what only a kernel that runs there can tell."""
    target, figures = asked.target, asked.target.figures()
    return Settings(
        asked.budget,
        figures,
        target.cost_model,
        from_auto=asked.from_auto,
        time_limit=target.time_limit,
        is_here=figures.name == "cpu",
        slices=target.slices if isinstance(target.slices, int) else SLICES[target.slices],
        inputs_are_constant=target.inputs == "constant",
    )


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
