"""Runs many trials from one seed, and keeps what failed in its shrunk form."""

from __future__ import annotations

import gc
import itertools
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy
from torch._inductor import config as inductor_config

from tests.fuzz.check import check
from tests.fuzz.compiled import Outcome
from tests.fuzz.models import trials
from tests.fuzz.trial import Trial

SHRINK_TRIALS = 80
"""Number of tries to shorten a failure; then the shortest failure so far is kept."""

CHEAP_KERNELS = {"aot_inductor.debug_compile": True, "cpp.simdlen": 1}
"""Options of Inductor: kernels without optimisation or vectors take half the compiler's time and compute the same."""


@dataclass
class Result:
    """Counts and failures of some trials.

    Attributes:
        ran: Trials by entry and compiler.
        kinds: Instructions by kind.
        plans: Plans by budget; forced ones under `forced`.
        outcomes: Promised and measured peaks of each program that Inductor compiled, with the program's trial as a literal.
        failures: The shortest failing trial as a literal, by the first line of its error.
    """

    ran: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    outcomes: list[tuple[Outcome, str]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Take in another's counts and failures."""
        self.ran += other.ran
        self.kinds += other.kinds
        self.plans += other.plans
        self.outcomes += other.outcomes
        for error, literal in other.failures.items():
            self.keep(error, literal)

    def keep(self, error: str, literal: str) -> None:
        """Remember a failure, the shortest of its like."""
        self.failures[error] = min(self.failures.get(error, literal), literal, key=len)

    def count(self, trial: Trial) -> None:
        """Note that a trial is run."""
        self.ran[f"{trial.entry}, {trial.compiler}"] += 1
        self.kinds.update(trial.program.kinds)
        self.plans.update(map(str, trial.budgets))
        self.plans["forced"] += len(trial.masks)
        self.plans["two losses"] += trial.losses == 2
        self.plans["gradients early"] += trial.gradients == "early"
        self.plans["steps in hooks"] += trial.steps_in_hooks
        self.plans["rows in slices"] += trial.slices != "off"


def drawing(values: SearchStrategy[Any], examples: int, seed: int, *, shrinks: bool = False) -> Callable[..., Any]:
    """Decorates a function of a drawn value: called without arguments, it runs on so many; the same ones for the same seed."""
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    return lambda function: hypothesis.seed(seed)(settings(hypothesis.given(values)(function)))


def run(entry: str, compiler: str, examples: int, seed: int, is_lowered: bool = False) -> Result:
    """So many trials; the same ones for the same seed.

    After a failure it is shrunk, and the rest is left out; Inductor's failures stay as they are, and the rest runs.
    """
    gc.freeze()  # imported objects; torch collects garbage with every compilation
    result, attempts, known = Result(), itertools.count(), dict[str, Exception]()

    @drawing(trials(entry, compiler, is_lowered=is_lowered), examples, seed, shrinks=True)
    def all_train_right(trial: Trial) -> None:
        literal = repr(trial)
        if literal in known:
            raise known[literal]
        if not result.failures or compiler == "inductor":
            result.count(trial)
        elif next(attempts) >= SHRINK_TRIALS:
            return
        try:
            outcomes = check(trial)
        except UnsatisfiedAssumption:  # torch cannot train the program either
            raise
        except Exception as error:
            known[literal] = error
            result.keep(first_line(error), literal)
            if compiler == "inductor":
                return  # to make it shorter takes minutes
            raise
        result.outcomes += [(outcome, literal) for outcome in outcomes]

    with warnings.catch_warnings(), inductor_config.patch(CHEAP_KERNELS):
        warnings.simplefilter("ignore", FutureWarning)  # torch's, when a joint graph is copied
        try:
            all_train_right()
        except Exception as error:
            if not result.failures:  # no trial's, so the drawing itself broke
                result.keep(first_line(error), traceback.format_exc())
    torch.compiler.reset()
    return result


def use_one_thread() -> None:
    """For a worker among several; the tensors are tiny anyway."""
    torch.set_num_threads(1)


def first_line(error: Exception) -> str:
    """Kind of error and the start of its text, without the numbers that differ from program to program."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"\d+", "#", f"{type(error).__name__}: {lines[0]}")[:120]
