"""The partitioner that Inductor calls: an immutable value of everything that a plan depends on, which is also its cache key."""

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
from compile_remat.inductor.install import joint_keywords
from compile_remat.partitioning.inner_planning import with_copies_in_backward
from compile_remat.partitioning.joint_split import split, split_without_planner
from compile_remat.passes import NOTHING_ASSUMED, Assumptions
from compile_remat.planning.joint_problem import PlanContext
from compile_remat.planning.request import LOWEST, Fit, Request, target_bytes_of
from compile_remat.planning.searches import Searches
from compile_remat.planning.settings import Settings, with_plain_bytes


@dataclass(frozen=True)
class RematPartitioner(CustomPartitionerFn):
    """The partitioner that Inductor calls, pickles and hashes: its fields are everything that a plan depends on.

    Attributes:
        settings: Constant while a graph is compiled.
        request: The planner's request in this attempt.
        assumed: Facts observed of earlier plans of the graph, and of plain torch.compile's plan.
        sources_hash: `sources_hash()`.
        plans_hash: `hash_of_plans` of the folder in the settings.
        fallback: The reason why the planner failed; if it is not empty, the planner is not called.
        sizes: The symbols among a graph's inputs, each with the size to plan for: that of the first call, or the largest of a
            size class.  Torch's key holds only the symbols and guards that any size may fulfil: without these sizes the cache
            would return a plan for a small batch to a large one.
        guarded: True if Inductor's fusions are kept to the plan; torch's key does not contain this fact.
        early: Positions of the arguments whose gradients leave the backward when they are made.
        is_installed: True if Inductor uses this partitioner for the whole process (`install`).  Then no deadline ends the planning,
            because no caller could compile once more, and the bytes that a fraction multiplies are looked up at each call.
        searches: The planners of earlier rounds; no plan depends on them.
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
        keywords = joint_keywords(kwargs)
        if self.fallback:
            return split_without_planner(gm, joint_inputs, self.settings, self.fallback, **keywords)
        by_inductor = kwargs.get("compiler") == "inductor"
        is_cached = by_inductor and self.settings.can_be_cached and cache_key_text.partition_is_stored()
        with sizes_at(self.sizes):
            return split(
                gm,
                joint_inputs,
                self._settings_now(),
                self.request,
                by_inductor=by_inductor,
                guarded=self.guarded,
                is_cached=is_cached,
                context=PlanContext(
                    has_deadline=not self.is_installed,
                    early=self.early,
                    assumed=self.assumed,
                    searches=self.searches,
                ),
                **keywords,
            )

    @property
    def asks_for_lowest(self) -> bool:
        """True if memory alone counts: the budget is `min`, or no plan is known to fit and the lowest one is looked at."""
        return self.settings.budget.kind == "min" or target_bytes_of(self.request) == LOWEST.target_bytes

    def with_copies(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Returns a graph that contains its own backward, under a plan; Inductor calls no partitioner for such a graph."""
        if self.fallback or not self.guarded:
            return gm
        with sizes_at(self.sizes):
            return with_copies_in_backward(gm, self._settings_now(), self.request, self.assumed.plain)

    def uuid(self) -> object:
        """Returns a hash of every compared field, of the current number of threads, and under `install` of the current plain peak.

        The workspaces of a CPU's convolutions and attention depend on the number of threads; torch's own key has this number only
        from 2.13 on, and only if Inductor's ``cpp.threads`` is not set.  Returns None, and caches are off, if a pass of
        the user has no identity.
        """
        if not self.settings.can_be_cached:
            return None
        identity = identity_text(replace(self, settings=self._settings_now()))
        text = "\n".join([identity, f"threads={torch.get_num_threads()}"])
        return hashlib.sha256(text.encode()).hexdigest()

    def _settings_now(self) -> Settings:
        return with_plain_bytes(self.settings) if self.is_installed else self.settings


def identity_text(value: object) -> str:
    """Returns a text that differs between any two different values: it contains each compared field, even with ``repr=False``.

    Raises:
        TypeError: A value has a type without a stable text.
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
    """Returns the hash of all source files and tables of this package: another version of it has another cache key."""
    return hash_of_sources(Path(module.__file__ or "").parent for module in (compile_remat, passes, cost_models))


def hash_of_sources(folders: Iterable[Path]) -> str:
    """Returns the hash of the names and contents of all Python and JSON files in the folders and below."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(f for f in folder.resolve().rglob("*") if f.suffix in (".py", ".json"))
        for file in files:
            digest.update(str(file.relative_to(folder.resolve())).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def hash_of_plans(plan_dir: str | None) -> str:
    """Returns the hash of the pinned plans as they are now; empty if there are none.

    Torch's own helper caches hashes by file name, but the contents of these files change.

    Raises:
        PlanMismatchError: A file cannot be read.
    """
    try:
        files = sorted(Path(plan_dir).glob("*.plan.json")) if plan_dir else []
    except OSError:  # for example, a name that is too long: `store_plan` warns when it cannot write there
        return ""
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PlanMismatchError(f"{file} cannot be read: {error.strerror}.") from None
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest() if files else ""
