"""The planning problem: the facts of a joint graph that a planner needs, as plain data without torch.

Two lists stand for the joint graph, both in its order and both without views (reading a view is reading its root).
`values` can be computed without a tangent, so they may be saved or recomputed.  `steps` depend on a tangent and run in
the backward, once, in order.  Graph inputs are in neither list: they are alive anyway and do not count.
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
    """The way in which a node's result reaches memory."""

    EXTERN = "extern"
    """A kernel of its own."""
    REDUCTION = "reduction"
    """The reduction of a fused kernel."""
    SCATTER = "scatter"
    """A fused kernel writes elements into a buffer that another kernel has filled; a constant needs no buffer for that."""
    POINTWISE = "pointwise"
    """Part of a fused kernel: in registers, unless something needs the result in memory."""
    ITEM = "item"
    """One output of a node with several."""
    CONSTANT = "constant"
    """Computed from nothing."""


EXTERN, REDUCTION, SCATTER, POINTWISE, ITEM, CONSTANT = Kernel


class Pin(StrEnum):
    """A plan's freedom to save a value or not."""

    FREE = "free"
    """The planner chooses."""
    SAVE = "save"
    """The value must be saved if the backward needs it."""
    RECOMPUTE = "recompute"
    """The value must not be saved."""


FREE, SAVE, RECOMPUTE = Pin


class Tag(StrEnum):
    """The user's policy from selective checkpointing; ``checkpoint`` alone means PREFER_RECOMPUTE everywhere."""

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
"""Fields that say how a node runs, most of them on this processor; the graph is the same for any values of these fields."""

NOT_IN_KEY = KERNELS_OWN | {"origin"}

_ENUMS: dict[str, type[StrEnum]] = {"kernel": Kernel, "pin": Pin, "tag": Tag}

SCHEMA = 1
"""Version of the JSON forms of `Problem` and `Plan`."""


@dataclass(frozen=True)
class Origin:
    """The place in the user's program that a node comes from, for messages.

    Attributes:
        region: Number of the checkpointed region that contains the node, in the graph's order from 1; 0 for none.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""
    module_path: str = ""
    source_line: str = ""
    region: int = 0


@dataclass(frozen=True)
class Value:
    """A node that needs no tangent: a plan may save the value, or recompute it in the backward.

    Attributes:
        name: The node's name in the joint graph.
        nbytes: Bytes of the value's buffer; 0 for tuples and for values that take no memory.
        kernel: The way in which the value reaches memory.
        reads: Indices of the values that this value reads, ascending and each below its own.
        time_ns: Time to recompute the value: its share of a fused kernel, or a kernel of its own.
        save_time_ns: Time of saving the value: memory traffic that recomputing it would not cause.
        pin: A plan's freedom to save the value or not.
        tag: The user's tag that the pin comes from; NONE if the pin has another reason, which no budget can set aside.
        in_forward: True if the forward computes the value even if the backward does not need it.
        is_output: True for (the root of) an output of the forward: alive to the end, so saving it takes no more memory.
        realised: True if Inductor gives the value a buffer although it is pointwise and not saved (too many reads).
        realised_again: `realised` for the value's recomputation; None if equal.  The recomputation may read fewer or more buffers
            than the forward: it loads saved inputs, and may recompute, in registers, inputs that the forward has in memory.
        position: Place in the forward order in which a node stands right behind its inputs.
        late_step: For a node that stands among the backward steps in the joint graph: the step before which the node
            stands, at which the partition computes it at the latest; -1 for other nodes.
        transient_bytes: Bytes that live only while the value's kernel runs: outputs that nothing reads.
        workspace_bytes: Bytes of workspace that the value's kernel takes while it runs, beside all outputs.
        held_bytes: Bytes of the input copies that the value is computed from.  The forward makes these copies at its start; they
            live until the value is computed, in the backward if the value is recomputed there.
        is_channels_last: True if the buffer has the channels innermost, as for convolutions: no kernel reuses the buffer in place
            for a value of another layout.
        may_differ: True if a second run may give other numbers: the value is recomputed only if a tag asks for it, at most once.
        copies: Indices of the concatenations among `reads` that are copied for this value right before its kernel.  The copy's
            kernel is no node: if one reader alone gets a copy, concatenation and copy are both alive where the concatenation is
            made (`transient_bytes`), and then the copy stands for both.
        ordered_by: For a concatenation, indices of channels-last values: if one of them is saved, the concatenation is made in
            that layout and not copied for a step, provided that no recomputed value gets a copy.
        parts: For a concatenation, indices of values whose buffers lie inside the concatenation's buffer if both are recomputed:
            then parts and concatenation live equally long.
        is_snapshot: True for a copy of an input for recomputed readers: nothing in the forward reads the copy.  The forward makes
            the copy at its end, and only if the copy is saved.
        observed_forward_bytes: Bytes in use in the forward while the value is computed, beyond what the other fields explain.
        observed_bytes: Such bytes in the backward, while the value is recomputed.
        gradient_readers: For an output, the steps that read its incoming gradient, which is as large as the output.  If the
            backward reads the output itself, both are alive; else one buffer stands for both (`is_output`).
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
        """True if Inductor gives the recomputed value a buffer although it is pointwise."""
        return self.realised if self.realised_again is None else self.realised_again

    @property
    def is_saveable(self) -> bool:
        """False for tuples (a plan saves their parts), constants (these cost nothing), and values pinned to RECOMPUTE."""
        return self.nbytes > 0 and self.pin != RECOMPUTE and self.kernel != CONSTANT


@dataclass(frozen=True)
class Step:
    """A node of the backward, which runs once in every plan.

    Attributes:
        reads: Indices of the values that the step reads.
        gradients: Indices of the steps that this step reads, each below its own.
        is_output: True for (the root of) a gradient that the backward returns: alive to the end.
        copies: See `Value`.
        workspace_bytes: Bytes of workspace that the step's kernel takes while it runs, beside all outputs.
        is_channels_last: See `Value`.
        held_bytes: Bytes of input copies that the forward makes at its start and that this step is the last to read.
        observed_bytes: See `Value`.
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
    """All facts that a planner may use about a joint graph.

    Attributes:
        values: Values that a plan may save or recompute, in the joint graph's order.
        steps: Steps of the backward, in its order; the last step is the return of the gradients.
        step_time_ns: Estimated time of forward and backward with nothing recomputed.
        reference: Indices of the values that torch's own default partition saves, roots in place of views; empty if unknown.
        estimated: Operators without a formula for their arithmetic, priced by the bytes that they move; sorted, each once.
        key_before_facts: The key of the problem on which `with_facts` was called; empty if it was not called.
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
        """Hash of the graph with its sizes and prices; equal in every process, at every budget, and for any observed facts.

        The key names pinned plans.  Only the names of saved values are taken from such a plan, and all figures are computed anew,
        so the hash omits `reference` (not known at every budget), `step_time_ns`, `estimated` and `KERNELS_OWN`.
        """
        return self.key_before_facts or self._key

    def with_facts(self, assumed: Assumptions) -> Problem:
        """Returns the problem with the facts observed of plans in place of the crude rules.

        Facts about buffers change pointwise nodes alone, because no other node can be in registers.
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
        """Returns the problem as JSON; `from_json` returns an equal problem."""
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
        """Reads the text of `to_json`; ValueError if the schema is another one."""
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
    """Like `dataclasses.asdict`, but without a copy of every tuple."""
    return {**vars(node), "origin": vars(node.origin)}


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    origin = data.pop("origin")
    origin["shape"] = tuple(origin["shape"])
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    enums = {name: enum(data[name]) for name, enum in _ENUMS.items() if name in data}
    return {**plain, **enums, "origin": Origin(**origin)}
