"""Whether a program trains right under us, by two ways in.

`dynamo` goes through ``torch.compile``, as users do, against eager mode, or where numbers are drawn, against
torch.compile that recomputes nothing.  `graph` traces once, without Dynamo, and runs many plans of the one joint graph
(`tests.fuzz.joint`), which costs a tenth.  Both also force plans that no planner would choose: any legal plan must
give the right gradients.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import PlannerWarning
from compile_remat.inductor.entry import CustomPartitionerFn, compile_eager, compile_with_partitioner
from tests.correctness.harness import A_FRACTION_IS_MISSED, Case, Observed, Wrap, observe, train
from tests.fuzz.agreement import assert_promise_holds, assert_same
from tests.fuzz.joint import check_graph
from tests.fuzz.partitioners import Forced, Unplanned
from tests.fuzz.trial import Trial

CODE_NEEDS_MORE = r"compile_remat: Inductor's code needs "
"""What is said under a fraction where emitted code takes more than planned; bytes are the question of `benchmarks.promise`."""


def check(trial: Trial) -> None:
    """AssertionError where anything differs."""
    if trial.entry == "graph":
        check_graph(trial)
    else:
        check_dynamo(trial)


def check_dynamo(trial: Trial) -> None:
    """Two training steps under each budget, then under forced plans."""
    case = Case("fuzz", functools.partial(_train, trial), reference="compiled")
    expected = _expected(trial)
    for budget in trial.budgets:
        compile_remat.reset_reports()
        options = {"memory_budget": budget, "compiler": trial.compiler}
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlannerWarning)
            warnings.filterwarnings("ignore", A_FRACTION_IS_MISSED, PlannerWarning)
            warnings.filterwarnings("ignore", CODE_NEEDS_MORE, PlannerWarning)
            actual = observe(case, lambda f: torch.compile(f, backend=remat, options=options))  # noqa: B023
        assert_promise_holds(budget)
        assert_same(actual, expected, trial.tolerance, f"memory_budget {budget}")
    for seed in trial.masks:
        actual = observe(case, functools.partial(_compiled, trial.compiler, Forced(seed)))
        assert_same(actual, expected, trial.tolerance, f"forced plan {seed}")


def _expected(trial: Trial) -> Observed:
    """Eager mode's numbers; where it would draw or round others, those of torch when it recomputes nothing.

    Torch's usual partition is no reference: it reads a buffer again that the forward has changed since (torch 2.13).
    """
    plain = replace(trial, program=trial.program.without_checkpoints())
    case = Case("fuzz", functools.partial(_train, plain), reference="compiled")
    if trial.follows_eager_mode:
        return observe(case, lambda function: function)
    return observe(case, functools.partial(_compiled, trial.compiler, Unplanned()))


def _train(trial: Trial, wrap: Wrap) -> Observed:
    module, inputs = trial.program.module()
    with torch._dynamo.config.patch(assume_static_by_default=not trial.dynamic):
        return train(module, inputs, wrap, learning_rate=1e-3)


def _compiled(compiler: str, partitioner: CustomPartitionerFn, function: Callable[..., Any]) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if compiler == "eager":
            return compile_eager(gm, inputs, partitioner)
        return compile_with_partitioner(gm, inputs, partitioner, {}, guarded=True)

    return torch.compile(function, backend=backend)
