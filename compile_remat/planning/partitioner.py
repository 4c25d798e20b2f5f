"""The partitioner that Inductor calls: an immutable value made of all that a plan depends on, which is also its cache key."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import compile_remat
from compile_remat import cost_models, passes
from compile_remat._torch import cache_key_text
from compile_remat._torch.sizes import sizes_at
from compile_remat._util.size_range import Sizes
from compile_remat.errors import PlanMismatchError
from compile_remat.inductor.entry import CustomPartitionerFn
from compile_remat.passes import (
    NOTHING_ASSUMED,
    Assumptions,
    keep_matmuls_in_place,
    lay_gradients_out_once,
    unroll_sliced_calls,
)
from compile_remat.planning.inner_planning import with_copies_in_backward
from compile_remat.planning.joint_split import split, split_without_planner
from compile_remat.planning.request import Fit, Request
from compile_remat.planning.searches import Searches
from compile_remat.planning.settings import Settings, with_plain_bytes


@dataclass(frozen=True)
class RematPartitioner(CustomPartitionerFn):
    """The value that Inductor calls, pickles and hashes: its fields are all that a plan depends on.

    Attributes:
        settings: Constant while a graph is compiled.
        request: What this attempt asks of the planner.
        assumed: What was observed of earlier plans of the graph, and of plain torch.compile's.
        sources_hash: `sources_hash()`.
        plans_hash: `hash_of_plans` of the folder in the settings.
        fallback: Why the planner failed; with a reason here the planner is left alone.
        sizes: The symbols among a graph's inputs, each with the size that is planned for: that of the first call, or the
            largest of a size class.  Torch's key has the symbols alone, and guards that any size may fulfil: without these sizes
            a plan for a small batch would come out of the cache for a large one.
        guarded: Whether Inductor's fusions are kept to the plan, which torch's key does not see.
        early: Positions of the arguments whose gradients leave the backward when they are made.
        is_installed: Whether it is Inductor's own in this process (`install`): no deadline ends the planning, since nobody could
            compile once more, and what a fraction is of is looked up here.
        searches: What earlier rounds have searched; no plan depends on it.
    """

    settings: Settings
    request: Request = Fit()
    assumed: Assumptions = NOTHING_ASSUMED
    sources_hash: str = ""
    plans_hash: str = ""
    fallback: str = ""
    sizes: Sizes = ()
    guarded: bool = False
    early: tuple[int, ...] = ()
    is_installed: bool = False
    searches: Searches | None = field(default=None, compare=False, repr=False)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph (Inductor passes ``num_fwd_outputs``, ``static_lifetime_input_indices``, ``compiler``)."""
        keywords: dict[str, Any] = {
            "num_fwd_outputs": kwargs["num_fwd_outputs"],
            "static_lifetime_input_indices": kwargs.get("static_lifetime_input_indices"),
        }
        if self.fallback:
            return split_without_planner(gm, joint_inputs, self.settings, self.fallback, **keywords)
        by_inductor = kwargs.get("compiler") == "inductor"
        is_cached = by_inductor and cache_key_text.partition_is_stored()
        with sizes_at(self.sizes):
            forward, backward = split(
                gm,
                joint_inputs,
                self._settings_now(),
                self.request,
                is_cached=is_cached,
                has_deadline=not self.is_installed,
                early=self.early,
                assumed=self.assumed,
                searches=self.searches,
                **keywords,
            )
        if by_inductor:
            unroll_sliced_calls(forward)
            unroll_sliced_calls(backward)
            lay_gradients_out_once(backward, forward)
        if self.guarded and by_inductor:
            keep_matmuls_in_place(backward)
        return forward, backward

    def with_copies(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A graph that has its backward inside, under a plan; Inductor asks no partitioner for such a graph."""
        if self.fallback or not self.guarded:
            return gm
        with sizes_at(self.sizes):
            return with_copies_in_backward(gm, self._settings_now(), self.request, self.assumed.plain)

    def uuid(self) -> object:
        """Changes with every field, with the number of threads as it is now, and under `install` with what a fraction is of.

        The bytes that a CPU's convolutions and attention take for themselves depend on the threads; torch's own key has their
        number only from 2.13 on, and only where Inductor's ``cpp.threads`` is not set.
        """
        identity = identity_text(replace(self, settings=self._settings_now()))
        text = "\n".join([identity, f"threads={torch.get_num_threads()}"])
        return hashlib.sha256(text.encode()).hexdigest()

    def _settings_now(self) -> Settings:
        return with_plain_bytes(self.settings) if self.is_installed else self.settings


def identity_text(value: object) -> str:
    """A text that differs between any two different values: each field that is compared is in it, shown by `repr` or not.

    Raises:
        TypeError: There is a value of a type that has no stable text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{f.name}={identity_text(getattr(value, f.name))}" for f in fields(value) if f.compare)
        return f"{type(value).__qualname__}({inner})"
    if isinstance(value, tuple):
        return f"({', '.join(map(identity_text, value))},)"
    if value is None or isinstance(value, bool | int | float | str):  # enumerations of text among them
        return repr(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a cache key")


@functools.cache
def sources_hash() -> str:
    """Hash of all our source files and tables: another version of us makes another cache key."""
    return hash_of_sources(Path(module.__file__ or "").parent for module in (compile_remat, passes, cost_models))


def hash_of_sources(folders: Iterable[Path]) -> str:
    """Hash of the names and contents of all Python and JSON files in the folders and below."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(f for f in folder.resolve().rglob("*") if f.suffix in (".py", ".json"))
        for file in files:
            digest.update(str(file.relative_to(folder.resolve())).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def hash_of_plans(plan_dir: str | None) -> str:
    """Hash of the pinned plans as they are now: torch's helper remembers files by their names, and these change."""
    try:
        files = sorted(Path(plan_dir).glob("*.plan.json")) if plan_dir else []
    except OSError:  # a name that is too long, for example: the plan that cannot be written there comes with a warning
        return ""
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PlanMismatchError(f"{file} cannot be read: {error.strerror}.") from None
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest() if files else ""
