"""Restores the earlier state of a graph that Inductor lowered, so that Inductor can make its code twice.

Private names of torch, same in 2.11 to 2.15: ``GraphLowering.operations``, ``Scheduler.nodes`` and ``.name_to_buf``,
``ir.Subgraph.graph``, the module ``torch._inductor.metrics`` and ``torch._dynamo.utils.counters``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from compile_remat._torch.version import private_module, private_name

metrics = private_module("torch._inductor.metrics")
counters = private_name("torch._dynamo.utils", "counters")
Subgraph = private_name("torch._inductor.ir", "Subgraph")


@contextmanager
def untouched(graph: Any) -> Iterator[None]:
    """Restore the graph, its scheduler, their nodes, torch's counters and Python's random state at exit.

    Attributes get their old values back, and containers their old content.  Objects that nodes hold (loop bodies, layouts, the FX
    graph) are not restored.

    Args:
        graph: A ``GraphLowering`` with a finished scheduler.
    """
    states = [(thing, _State(vars(thing))) for thing in _things(graph)]
    before = ProcessCounts()
    try:
        yield
    finally:
        before.put_back()
        for thing, state in states:
            vars(thing).clear()
            state.put_into(vars(thing))


class ProcessCounts:
    """Torch's counters, Inductor's metrics and Python's random state at the time of construction."""

    def __init__(self) -> None:
        self._figures = _State({name: value for name, value in vars(metrics).items() if _is_figure(name, value)})
        self._counts = {name: counter.copy() for name, counter in counters.items()}
        self._random_state = random.getstate()

    def put_back(self) -> None:
        """Restore the counters, metrics and random state, as if nothing had been compiled since."""
        random.setstate(self._random_state)
        counters.clear()
        counters.update(self._counts)
        self._figures.put_into(vars(metrics))


class CountsInside:
    """Torch's counts for a graph that is compiled inside of another graph's lowering.

    Inductor caches each graph with the counts of its compilation, and adds these counts again when the graph comes out of
    the cache.  The counts of the inner graph are therefore removed once the inner graph is done, and added again once the
    outer graph is done.
    """

    def __init__(self) -> None:
        self._numbers, self._counts = _numbers(), {name: counter.copy() for name, counter in counters.items()}

    def take(self) -> None:
        """Remove the counts since construction; to be called when the inner graph is done."""
        now, before = _numbers(), self._numbers
        self._numbers = {name: number - before.get(name, 0) for name, number in now.items()}
        vars(metrics).update({name: number for name, number in before.items() if name in now})
        for name, counter in counters.items():
            counted = counter.copy()
            counted.subtract(self._counts.get(name, {}))
            counter.subtract(counted)
            self._counts[name] = counted

    def give_back(self) -> None:
        """Add the removed counts again; to be called when the outer graph is done."""
        for name, number in self._numbers.items():
            vars(metrics)[name] += number
        for name, counted in self._counts.items():
            counters[name].update(counted)


def _numbers() -> dict[str, int]:
    return {name: value for name, value in vars(metrics).items() if type(value) is int and not name.startswith("__")}


def _is_figure(name: str, value: Any) -> bool:
    return isinstance(value, int | list | set | dict) and not name.startswith("__")


class _State:
    """Values by name, and the content of the containers among them at the time of construction."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {name: _fixed(value) for name, value in values.items()}
        self.content = [(value, value.copy()) for value in self.values.values() if _is_container(value)]

    def put_into(self, values: dict[str, Any]) -> None:
        """Write the values into `values`, and restore the content of the containers among them."""
        for value, content in self.content:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        values.update(self.values)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | set | dict) or type(value).__name__ == "OrderedSet"


def _fixed(value: Any) -> Any:
    """A new counter at the same number for an ``itertools.count``, which counting changes; any other value itself."""
    return _count_from(value) if isinstance(value, itertools.count) else value


def _things(graph: Any) -> list[Any]:
    """The graph, its operations, scheduler, nodes and buffers, and the same of its control flow graphs; each object once."""
    scheduler = graph.scheduler
    found: list[Any] = [graph, *graph.operations]
    if scheduler is not None:
        found += [scheduler, *scheduler.name_to_buf.values()]
        found += [part for node in scheduler.nodes for part in (node, *node.get_nodes())]
    inner = [thing for operation in graph.operations for thing in _subgraphs(vars(operation).values())]
    found += [part for each in inner if each is not None for part in _things(each)]
    return list({id(thing): thing for thing in found}.values())


def _subgraphs(values: Any) -> Iterator[Any]:
    """Yields the lowered graphs among a control flow operation's attributes: branches, bodies and regions."""
    for value in values:
        if isinstance(value, Subgraph):
            yield value.graph
        elif isinstance(value, list | tuple):
            yield from _subgraphs(value)


def _count_from(counter: itertools.count[int]) -> itertools.count[int]:
    """A new counter at the number that the old one's text shows, ``count(3)``: Python 3.14 has no other way to read the number."""
    return itertools.count(int(repr(counter)[len("count(") : -1]))
