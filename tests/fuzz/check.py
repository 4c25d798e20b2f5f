"""Checks that a program trains right under our planner, by two entries.

`dynamo` goes through ``torch.compile``, as users do, against eager mode, or where numbers are drawn, against
torch.compile that recomputes nothing.  `graph` traces once, without Dynamo, and runs many plans of the one joint graph
(`tests.fuzz.joint`), which costs a tenth.  Both also force plans that no planner would choose: any legal plan must
give the right gradients.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from compile_remat.backend import remat
from compile_remat.compilation.driver import draws_in_turn
from compile_remat.errors import PlannerWarning
from compile_remat.inductor.entry import CustomPartitionerFn, compile_eager, compile_with_partitioner
from compile_remat.runtime.process_state import clear_process_state
from tests.correctness.harness import A_FRACTION_IS_MISSED, RUNS_UNFUSED, Case, observe
from tests.fuzz.agreement import NumbersDiffer, assert_promise_holds, assert_same
from tests.fuzz.compiled import AT_THE_END, NOT_SLICED, Compare, Outcome, check_compiled
from tests.fuzz.joint import check_graph
from tests.fuzz.models import REFUSED
from tests.fuzz.partitioners import Forced, Unplanned
from tests.fuzz.steps import train
from tests.fuzz.trial import Trial


def check(trial: Trial) -> list[Outcome]:
    """Raises an AssertionError if anything differs; returns the promised and measured peaks if Inductor compiled the program."""
    if trial.entry == "graph":
        check_graph(trial)
        return []
    try:
        return check_dynamo(trial)
    except RuntimeError as error:
        if trial.losses == 2 and "compiled with non-empty donated buffers" in str(error):
            return []  # with symbolic sizes torch compiles the backward before it knows that the graph is kept
        if not any(text in str(error) for text in REFUSED) or not _torch_refuses(trial):
            raise
        return []


def _torch_refuses(trial: Trial) -> bool:
    """True if plain graphs fail, too: a graph's backward reads all saved tensors, eager mode's only those the loss needs."""
    case = Case("fuzz", lambda wrap: train(trial.in_the_plain_way, wrap).seen, reference="compiled")
    try:
        observe(case, functools.partial(_compiled, trial.compiler, Unplanned()))
    except RuntimeError as error:
        return any(text in str(error) for text in REFUSED)
    return False


def check_dynamo(trial: Trial) -> list[Outcome]:
    """Two training steps under each budget, then under forced plans.

    If numbers differ by a free choice of Inductor's, both sides run again without that choice, and must agree then.  In coarse
    dtypes both sides also keep their weights: a gradient that is rounded differently changes a weight, and a comparison in the
    next step turns the weight's last bit into another number.
    """
    try:
        return _check_dynamo(trial)
    except NumbersDiffer:
        settled = _without_choices(trial)
        if not settled:
            raise
        again = replace(trial, learning_rate=0.0) if trial.program.is_rounded else trial
        with inductor_config.patch(settled):
            return _check_dynamo(again)


def _without_choices(trial: Trial) -> dict[str, bool]:
    """Inductor's options under which numbers depend neither on what is fused nor on a tensor's layout nor on the kernels' order.

    A fused kernel does not round what it hands on, and a sum that ends in `tanh` shows it; an operator that draws numbers into a
    tensor in the order of memory gives an element another one where a convolution behind it wants channels innermost; and under
    `max`, as in plain torch.compile, kernels that draw are sorted by the peak.
    """
    if trial.compiler != "inductor":
        return {}
    rounded = {"emulate_precision_casts": True} if trial.program.is_rounded else {}
    drawn = {"layout_optimization": False, "reorder_for_peak_memory": False} if trial.program.is_random else {}
    return {**rounded, **drawn}


def _check_dynamo(trial: Trial) -> list[Outcome]:
    case = Case("fuzz", lambda wrap: train(trial, wrap).seen, reference="compiled")
    outcomes = []
    with torch._dynamo.config.patch(assume_static_by_default=not trial.dynamic):
        compare = _comparison(trial)
        for budget in trial.budgets:
            if trial.compiler == "inductor":
                outcomes.append(check_compiled(trial, budget, compare))
            else:
                _check_eager(case, budget, trial.options, compare)
        for seed in trial.masks:
            actual = observe(case, functools.partial(_compiled, trial.compiler, Forced(seed)))
            compare(actual, f"forced plan {seed}")
    return outcomes


def _check_eager(case: Case, budget: float | str, trial_options: Mapping[str, int | str], compare: Compare) -> None:
    clear_process_state()
    options = {"memory_budget": budget, "compiler": "eager", **trial_options}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        warnings.filterwarnings("ignore", A_FRACTION_IS_MISSED, PlannerWarning)
        warnings.filterwarnings("ignore", RUNS_UNFUSED, PlannerWarning)
        for text in (AT_THE_END, *NOT_SLICED):
            warnings.filterwarnings("ignore", "(?s).*" + re.escape(text), PlannerWarning)
        actual = observe(case, lambda function: torch.compile(function, backend=remat, options=options))  # type: ignore[arg-type]
    assert_promise_holds(budget)
    compare(actual, f"memory_budget {budget}")


def _comparison(trial: Trial) -> Compare:
    """With eager mode's numbers; where it would draw or round others, with those of torch when it recomputes nothing.

    Torch's usual partition is no reference: it reads a buffer again that the forward has changed since (torch 2.13).  Nor is code
    that writes over saved activations: torch's default partition saves two views of one tensor, and one may be overwritten before
    the other is read (torch 2.13).
    """
    reference = trial.in_the_plain_way
    if trial.follows_eager_mode:
        plain = replace(reference, program=trial.program.without_checkpoints())
        expected = observe(
            Case("fuzz", lambda wrap: train(plain, wrap).seen, reference="compiled"), lambda function: function
        )
    else:  # with its checkpoints: what they read, Dynamo returns, and draws that nothing else reads are drawn
        case = Case("fuzz", lambda wrap: train(reference, wrap).seen, reference="compiled")
        with torch._functorch.config.patch(donated_buffer=False):
            expected = observe(case, functools.partial(_compiled, trial.compiler, Unplanned()))
    return lambda actual, where: assert_same(actual, expected, trial.tolerance, where)


def _compiled(compiler: str, partitioner: CustomPartitionerFn, function: Callable[..., Any]) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if compiler == "eager":
            return compile_eager(gm, inputs, partitioner)
        return compile_with_partitioner(gm, inputs, partitioner, {}, guarded=True, is_ordered=draws_in_turn)

    return torch.compile(function, backend=backend)
