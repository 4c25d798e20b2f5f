"""A model's step planned as in training: Inductor lowers its plans, their peaks are read, and no code is generated."""

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
from compile_remat.inductor.entry import without_caches
from compile_remat.passes import PlainFacts, Problem
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.planning.settings import sizes_of
from compile_remat.report import Report


@dataclass(frozen=True)
class Asked:
    """A request to plan one step.

    Attributes:
        budget: Budget of the region peak; never `auto`.
        from_auto: True if the user asked for `auto`: then the lowest plan is taken if none keeps the budget.
        with_plain: True to lower plain torch.compile's own partition, too; `max` and fractions always do.
    """

    builder: Builder
    target: Target
    budget: MemoryBudget
    from_auto: bool = False
    with_plain: bool = False

    @property
    def needs_plain(self) -> bool:
        """True if the peak of plain torch.compile is needed."""
        return self.with_plain or self.budget.kind in ("fraction", "max")


@dataclass(frozen=True)
class Observed:
    """A plan whose graphs Inductor has lowered.

    Attributes:
        report: Report on the plan, with its observed peak.
        problem: The problem of the plan: with facts of the plans that were lowered, and rules for facts that none of these showed.
    """

    report: Report
    problem: Problem

    @property
    def peak_bytes(self) -> int:
        """The observed region peak."""
        assert self.report.observed_peak_bytes is not None
        return self.report.observed_peak_bytes


@dataclass(frozen=True)
class NotObserved:
    """The reason why no plan was lowered, in words, and a remedy."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


Outcome = Observed | BudgetError | NotObserved
"""A `BudgetError` is an outcome too: no plan that was lowered keeps the budget, and the floor that it names was observed."""


def with_attention_of(outcome: Outcome, by_rules: Problem) -> Outcome:
    """Returns `outcome`, or `NotObserved` if its graph has products where the device runs an attention kernel.

    Inductor replaces explicit softmaxes by attention.  Only a driver tells which attention kernel runs; rules assume one.

    Args:
        by_rules: The problem of the same step, by rules.
    """
    if isinstance(outcome, Observed) and _num_attentions(outcome.problem) < _num_attentions(by_rules):
        return NotObserved("Inductor makes attention of its softmaxes, whose kernel a fake device cannot choose")
    return outcome


def _num_attentions(problem: Problem) -> int:
    return sum(value.name.startswith("_scaled_dot_product") for value in problem.values)


def facts_text(why: str) -> str:
    """Returns the origin of a plan's bytes as a line of text.

    Args:
        why: Reason why the bytes were not observed; empty if they were.
    """
    if why:
        return f"ESTIMATE, by rules and not from lowered graphs: {why}"
    return "observed: the plan's graphs were lowered by Inductor for the device, and read"


def observe(asked: Asked) -> Outcome:
    """Build the model and plan its step in this process, which must lower for the target: a CPU, or a fake CUDA device.

    Raises:
        RematError: The builder is invalid, or the model breaks into several graphs.
    """
    is_cpu, has_flash = kind_of(asked.target.figures())
    place = torch.device("cpu" if is_cpu else "cuda")
    with fake_tensors(asked.builder.torch_dtype), NumbersAreZero(), place:
        module, inputs = asked.builder.build()
    found: list[Outcome] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        apply(Stage.PROGRAM, gm, Context(inlines_regions=True))
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
    """Returns the outcome of one graph; None if the graph has no backward."""
    config = RematConfig(gradients=asked.target.gradients)
    settings = asked.target.settings(asked.budget, from_auto=asked.from_auto)
    plain: dict[Sizes, PlainFacts | None] = {} if asked.needs_plain else {sizes_of(example_inputs): None}
    try:
        planned = planned_graph(gm, example_inputs, config, settings, {}, observes=True, plain=plain)
    except Exception as error:  # Dynamo would wrap an error that leaves a backend
        refused = find_error(error, BudgetError)
        return NotObserved(reason_of(error)) if refused is None else without_traceback(refused)
    if planned is None:
        return None
    if planned.report.observed_peak_bytes is None or planned.report.plan is None:
        return NotObserved("the code that Inductor makes of the graph is not understood")
    return Observed(planned.report, planned.problem)


def reason_of(error: BaseException) -> str:
    """Returns an error in one line of text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
