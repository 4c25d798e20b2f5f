"""The planning problem: what a joint graph asks of a planner, as plain data that knows nothing of torch.

Two lists stand for the joint graph, both in its order and both without views (reading a view is reading its root):
`values` can be computed without a tangent, so they may be saved or recomputed; `steps` depend on a tangent and run in
the backward, once, in order.  Graph inputs are in neither: they are alive anyway and do not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from compile_remat.passes.problem.facts import Assumptions, Plans


class Kernel(StrEnum):
    """How a node reaches memory."""

    EXTERN = "extern"
    """A kernel of its own."""
    REDUCTION = "reduction"
    """The reduction of a fused kernel."""
    SCATTER = "scatter"
    """Writes elements by a fused kernel into a buffer that another kernel has filled; a constant needs no buffer for that."""
    POINTWISE = "pointwise"
    """Part of a fused kernel: in registers, unless something needs it in memory."""
    ITEM = "item"
    """One output of a node with several."""
    CONSTANT = "constant"
    """Computed from nothing."""


EXTERN, REDUCTION, SCATTER, POINTWISE, ITEM, CONSTANT = Kernel


class Pin(StrEnum):
    """What a plan may do with a value."""

    FREE = "free"
    """The planner chooses."""
    SAVE = "save"
    """Must be saved where the backward needs it."""
    RECOMPUTE = "recompute"
    """Must not be saved."""


FREE, SAVE, RECOMPUTE = Pin


class Tag(StrEnum):
    """What the user asked for by selective checkpointing; ``checkpoint`` alone is PREFER_RECOMPUTE everywhere."""

    NONE = ""
    MUST_SAVE = "must_save"
    PREFER_SAVE = "prefer_save"
    MUST_RECOMPUTE = "must_recompute"
    PREFER_RECOMPUTE = "prefer_recompute"


_, MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_RECOMPUTE = Tag

KERNELS_OWN = frozenset(
    {
        "workspace_bytes",
        "held_bytes",
        "is_channels_last",
        "copies",
        "ordered_by",
        "parts",
        "may_differ",
        "gradient_readers",
        "realised_again",
        "is_snapshot",
        "observed_forward_bytes",
        "observed_bytes",
    }
)
"""Fields that tell how a node runs, most of them on this processor; the graph is the same whatever they say."""

NOT_IN_KEY = KERNELS_OWN | {"origin"}

_ENUMS: dict[str, type[StrEnum]] = {"kernel": Kernel, "pin": Pin, "tag": Tag}

SCHEMA = 1
"""Version of the JSON forms of `Problem` and `Plan`."""


@dataclass(frozen=True)
class Origin:
    """Where a node comes from in the user's program, for messages.

    Attributes:
        region: Number of the checkpointed region that it lies in, in the graph's order from 1; 0 for none.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""
    module_path: str = ""
    source_line: str = ""
    region: int = 0


@dataclass(frozen=True)
class Value:
    """A node that needs no tangent: a candidate to be saved, or to be computed once more in the backward.

    Attributes:
        name: The node's name in the joint graph.
        nbytes: Bytes of its buffer; 0 for tuples and for what takes no memory.
        kernel: How it reaches memory.
        reads: Indices of the values that it reads, ascending and each below its own.
        time_ns: Time to compute it once more: its share of a fused kernel, or a kernel of its own.
        save_time_ns: Time that saving it costs: traffic which recomputing it would not cause.
        pin: What a plan may do with it.
        tag: The user's tag that the pin comes from; NONE where it has another reason, which no budget can set aside.
        in_forward: Whether the forward computes it even if the backward does not need it.
        is_output: Whether it is (the root of) an output of the forward: alive to the end, saved for nothing.
        realised: Whether Inductor gives it a buffer although it is pointwise and not saved (too many reads).
        realised_again: The same where it is computed again; None where that is no different.  The backward reads fewer or more
            buffers for it than the forward: what is saved is loaded, and what the forward wrote for its readers may be computed.
        position: Place in the forward order in which a node stands right behind what it reads.
        late_step: For a node that stands among the backward steps in the joint graph: the step before which it
            stands, at which the partition computes it at the latest; -1 where there is none.
        transient_bytes: Bytes that live only while its kernel runs: outputs that nothing reads.
        workspace_bytes: Bytes that its kernel takes for itself while it runs, beside all outputs.
        held_bytes: Bytes of copies of inputs that the forward makes at its start and that this value is computed from: they
            live until then, in the backward as well where it is computed once more.
        is_channels_last: Whether its buffer has the channels innermost, as convolutions have it: nothing of another order is
            written over it.
        may_differ: Whether a second run may give other numbers: then it has one only where a tag asks for it, and never a third.
        copies: Indices of concatenations among its reads that it gets a copy of, right before its own kernel.  The kernel of
            the copy is no node: where one reader alone gets a copy, the two are alive where the concatenation is made
            (`transient_bytes`), and then the copy stands for both.
        ordered_by: Of a concatenation, indices of values with their channels innermost: where one of them is saved, it tells
            the order, and the concatenation is made in it and not copied for a step, if that is all that gets a copy.
        parts: Of a concatenation, indices of values whose buffers, where both are computed again, are places in its own: they
            live as long as it does, and it as long as they.
        is_snapshot: Whether it is a copy of an input, for readers that are computed again: nothing in the forward reads it.  The
            forward makes it at its end, and only if it is saved.
        observed_forward_bytes: Bytes in use in the forward while it is computed, above what all else here explains.
        observed_bytes: The same in the backward, where it is computed once more.
        gradient_readers: Of an output, the steps that read the gradient that comes in for it, which is as large.  Where the
            backward reads the output itself, both are alive; else one stands for the other (`is_output`).
    """

    name: str
    nbytes: int
    kernel: Kernel
    reads: tuple[int, ...]
    time_ns: int
    save_time_ns: int = 0
    pin: Pin = FREE
    tag: Tag = Tag.NONE
    in_forward: bool = True
    is_output: bool = False
    realised: bool = False
    realised_again: bool | None = None
    position: int = 0
    late_step: int = -1
    transient_bytes: int = 0
    workspace_bytes: int = 0
    held_bytes: int = 0
    is_channels_last: bool = False
    copies: tuple[int, ...] = ()
    ordered_by: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    may_differ: bool = False
    is_snapshot: bool = False
    observed_forward_bytes: int = 0
    observed_bytes: int = 0
    gradient_readers: tuple[int, ...] = ()
    origin: Origin = field(default_factory=Origin)

    @property
    def is_realised_again(self) -> bool:
        """Whether Inductor gives it a buffer where it is computed again, although it is pointwise."""
        return self.realised if self.realised_again is None else self.realised_again

    @property
    def is_saveable(self) -> bool:
        """Tuples and constants are never saved: their parts are, or they cost nothing."""
        return self.nbytes > 0 and self.pin != RECOMPUTE and self.kernel != CONSTANT


@dataclass(frozen=True)
class Step:
    """A node of the backward: runs once, whatever the plan.

    Attributes:
        reads: Indices of the values that it reads.
        gradients: Indices of the steps that it reads, each below its own.
        is_output: Whether it is (the root of) a gradient that the backward returns: alive to the end.
        copies: As for a `Value`.
        workspace_bytes: Bytes that its kernel takes for itself while it runs, beside all outputs.
        is_channels_last: As for a `Value`.
        held_bytes: Bytes of copies of inputs that the forward makes at its start and that this step is the last to read.
        observed_bytes: As for a `Value`.
    """

    name: str
    nbytes: int
    kernel: Kernel
    reads: tuple[int, ...]
    gradients: tuple[int, ...]
    time_ns: int = 0
    is_output: bool = False
    realised: bool = False
    transient_bytes: int = 0
    workspace_bytes: int = 0
    held_bytes: int = 0
    is_channels_last: bool = False
    copies: tuple[int, ...] = ()
    observed_bytes: int = 0
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class Problem:
    """All that a planner may know of a joint graph.

    Attributes:
        values: Candidates, in the joint graph's order.
        steps: The backward, in its order; the last one is the return of the gradients.
        step_time_ns: Estimated time of forward and backward with nothing recomputed.
        reference: Indices of the values that torch's own default partition saves, roots in place of views; empty
            where it was not asked.
        estimated: Operators whose arithmetic no formula knows, priced by the bytes that they move; sorted, each once.
        key_before_facts: The key of the problem that `with_facts` was asked of; empty where it was not.
        plans, written: See `Assumptions`.
    """

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    step_time_ns: int = 0
    reference: tuple[int, ...] = ()
    estimated: tuple[str, ...] = ()
    key_before_facts: str = ""
    plans: Plans = ()
    written: tuple[str, ...] = ()

    def key(self) -> str:
        """Hash of the graph with its sizes and prices; equal in every process, at every budget, and whatever was observed.

        It names pinned plans.  Of these only the names of saved values are obeyed, and all figures are worked out anew, so
        `reference` (not known at every budget), `step_time_ns`, `estimated` and `KERNELS_OWN` are not in it.
        """
        return self.key_before_facts or self._key

    def with_facts(self, assumed: Assumptions) -> Problem:
        """The problem with what was observed of plans in place of what was assumed of them.

        Only pointwise nodes may be in registers; what is assumed of other nodes' buffers stays as it is.
        """
        if assumed.is_empty:
            return self
        forward, backward = dict(assumed.stored), dict(assumed.stored_again)
        forward_bytes, backward_bytes = dict(assumed.forward_bytes), dict(assumed.backward_bytes)

        def value(v: Value) -> Value:
            known: dict[str, Any] = {}
            if v.kernel == POINTWISE and v.name in forward:
                known |= {"realised": forward[v.name], "realised_again": v.is_realised_again}
            if v.kernel == POINTWISE and v.name in backward:
                known["realised_again"] = backward[v.name]
            if v.name in forward_bytes:
                known["observed_forward_bytes"] = forward_bytes[v.name]
            if v.name in backward_bytes:
                known["observed_bytes"] = backward_bytes[v.name]
            return replace(v, **known) if known else v

        def step(s: Step) -> Step:
            known: dict[str, Any] = {}
            if s.kernel == POINTWISE and s.name in backward:
                known["realised"] = backward[s.name]
            if s.name in backward_bytes:
                known["observed_bytes"] = backward_bytes[s.name]
            return replace(s, **known) if known else s

        values, steps = tuple(map(value, self.values)), tuple(map(step, self.steps))
        found = replace(self, values=values, steps=steps, key_before_facts=self.key())
        return replace(found, plans=assumed.plans, written=assumed.written)

    @cached_property
    def _key(self) -> str:
        text = json.dumps([[_key_of(v) for v in self.values], [_key_of(s) for s in self.steps]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The problem as JSON; `from_json` gives an equal one."""
        nodes = {"values": [_plain(v) for v in self.values], "steps": [_plain(s) for s in self.steps]}
        rest: dict[str, Any] = {
            "step_time_ns": self.step_time_ns,
            "reference": self.reference,
            "estimated": self.estimated,
        }
        if self.key_before_facts:
            rest |= {"key_before_facts": self.key_before_facts, "plans": self.plans, "written": self.written}
        return json.dumps({"schema": SCHEMA, **nodes, **rest}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Problem:
        """Read what `to_json` wrote; ValueError where the schema is another one."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a problem of schema {SCHEMA}")
        return Problem(
            values=tuple(Value(**_fields(v)) for v in data["values"]),
            steps=tuple(Step(**_fields(s)) for s in data["steps"]),
            step_time_ns=data["step_time_ns"],
            reference=tuple(data["reference"]),
            estimated=tuple(data.get("estimated", ())),
            key_before_facts=data.get("key_before_facts", ""),
            plans=tuple((tuple(saved), tuple(again)) for saved, again in data.get("plans", ())),
            written=tuple(data.get("written", ())),
        )


def _key_of(node: Value | Step) -> list[Any]:
    return [value for name, value in vars(node).items() if name not in NOT_IN_KEY]


def _plain(node: Value | Step) -> dict[str, Any]:
    """What `dataclasses.asdict` gives, which copies every tuple."""
    return {**vars(node), "origin": vars(node.origin)}


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    origin = data.pop("origin")
    origin["shape"] = tuple(origin["shape"])
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    enums = {name: enum(data[name]) for name, enum in _ENUMS.items() if name in data}
    return {**plain, **enums, "origin": Origin(**origin)}
