"""Registers the backend's name `remat` with torch, and warns if the backend gets no graph that trains, so that no budget holds.

Only torch imports this module, when ``torch.compile(..., backend="remat")`` is first called.  Options reach the backend with the
first graph: if Dynamo makes none, the budget would be ignored silently.  Two cases are detected when a backward ends in the
parameters of a function that has no graph: Dynamo has given the function up, or has traced it as a part of another
`torch.compile`.  A function that Dynamo never tries (``nn.Sequential.compile()`` in versions that do not trace it) is reported
when the process ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from compile_remat._torch.dynamo.compile_attempts import (
    Attempt,
    Attempts,
    has_gradients,
    is_compiled_by,
    model_being_compiled,
    trained_leaves,
)
from compile_remat._util.user_warnings import note_compilation
from compile_remat.errors import warn
from compile_remat.inductor.unplanned_graphs import computes_gradients
from compile_remat.report import reports

NOWHERE = 'memory_budget holds nowhere: torch.compile(backend="remat") has got no graph with a backward'


class Watch:
    """Watches for a graph that trains to reach the backend, and warns if none has.

    Attributes:
        is_called: True if any graph has reached the backend, one for inference included.
        has_graph: True if a graph that trains has reached the backend.
        has_trained: True if a backward has ended in parameters of the function to compile.
    """

    def __init__(self, model: object) -> None:
        self.is_called = self.has_graph = self.has_trained = False
        self._said: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self._process = os.getpid()
        self.attempts = Attempts(self._attempted)
        self._once_trained([model], self._note)

    def reached(self, *, trains: bool) -> None:
        """Note that a graph has reached the backend; after a graph that trains, no warning will follow."""
        self.is_called = True
        self.attempts.listen()
        if trains:
            self.has_graph = True
            self.attempts.stop()
            while self._handles:
                self._handles.pop().remove()

    def at_exit(self) -> None:
        """Warn at the end of the process if it has trained without a graph, unless an error ends it or a warning was given."""
        is_normal = getattr(sys, "last_type", None) is None and os.getpid() == self._process
        if self.is_called or self._said or not is_normal or any(report.plan is not None for report in reports()):
            return
        if self.has_trained or has_gradients(gc.get_objects()):
            sequential = "on some versions of torch, nn.Sequential(...).compile() compiles nothing, and torch.compile(model) does"
            self._say(
                "at exit",
                f"TORCH_LOGS=graph_breaks shows where Dynamo stops; nothing, if it was not asked: {sequential}",
            )

    def _attempted(self, attempt: Attempt) -> None:
        if not torch.is_grad_enabled():
            return
        if attempt.backend is remat:
            if attempt.is_given_up:
                why = f": {attempt.problem}" if attempt.problem else ""
                given_up = f"Dynamo gives up {attempt.code.co_qualname}{why}"
                self._once_trained(attempt.values, lambda: self._say("given up", given_up))
            return
        inner = [value for value in attempt.values if is_compiled_by(value, remat)]
        text = f"The model is traced as a part of {attempt.code.co_qualname}, which another backend compiles: compile it once"
        self._once_trained(inner, lambda: self._say("inside", text))

    def _note(self) -> None:
        self.has_trained = True

    def _say(self, case: str, why: str) -> None:
        if self.has_graph or case in self._said:
            return
        self._said.add(case)
        warn(f"{NOWHERE}. {why}")

    def _once_trained(self, values: Sequence[object], then: Callable[[], None]) -> None:
        """Call `then` once, when a parameter of `values` gets the first gradient."""
        leaves = {id(leaf): leaf for value in values for leaf in trained_leaves(value)}
        handles: list[RemovableHandle] = []

        def trained(leaf: torch.Tensor) -> None:
            while handles:
                handles.pop().remove()
            then()

        handles.extend(leaf.register_post_accumulate_grad_hook(trained) for leaf in leaves.values())
        self._handles.extend(handles)


def remat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Any = None,
    mode: str | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """The backend; see `compile_remat.backend.remat`."""
    from compile_remat import backend

    note_compilation()
    has_leaf = any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
    WATCH.reached(trains=(has_leaf and torch.is_grad_enabled()) or computes_gradients(gm))
    return backend.remat(gm, example_inputs, options=options, mode=mode, **others)


note_compilation()
WATCH = Watch(model_being_compiled())
atexit.register(WATCH.at_exit)
